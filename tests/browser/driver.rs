//! A headless Chromium under the control of a test, by chromedriver's WebDriver protocol (W3C) over HTTP.
//!
//! Every function panics with a sentence if the browser cannot do what it was asked for.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// Key under which WebDriver passes an element.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";
/// Longest wait for a condition.
const PATIENCE: Duration = Duration::from_secs(20);

/// A browser with one page. It ends when the value is dropped.
pub(crate) struct Browser {
    driver: Child,
    session: String,
    agent: ureq::Agent,
    _profile: TempDir,
}

impl Browser {
    /// Starts a browser with a window of 1280 x 900 pixels.
    pub(crate) fn start() -> Self {
        Self::with_preferences(&json!({}))
    }

    /// Starts a browser in which pages cannot run scripts.
    pub(crate) fn without_scripts() -> Self {
        Self::with_preferences(&json!({ "profile.managed_default_content_settings.javascript": 2 }))
    }

    fn with_preferences(preferences: &Value) -> Self {
        let profile = tempfile::tempdir().expect("a folder for the browser's profile");
        // it takes a free port for IPv4 and ends if another program has the same one for IPv6
        let (driver, port) = (0..4).find_map(|_| chromedriver()).expect("chromedriver says its port");
        let config = ureq::Agent::config_builder().timeout_global(Some(Duration::from_mins(2)));
        let agent = config.http_status_as_error(false).proxy(None).build().new_agent();
        let flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--window-size=1280,900",
        ];
        let mut args: Vec<String> = flags.map(str::to_owned).to_vec();
        args.push(format!("--user-data-dir={}", profile.path().display()));
        let mut options = json!({ "args": args, "prefs": preferences });
        if let Some(binary) = ["/usr/bin/chromium", "/usr/bin/chromium-browser"].iter().find(|file| is_file(file)) {
            options["binary"] = json!(binary);
        }
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": { "browser": "ALL" },
        }}});
        let mut this = Self { driver, session: format!("http://127.0.0.1:{port}/session"), agent, _profile: profile };
        let value = this.post("", &wanted);
        let id = value["sessionId"].as_str().expect("a session").to_owned();
        this.session = format!("{}/{id}", this.session);
        this
    }

    /// Opens an address, `http://..` or `file://..`, and waits until it is loaded.
    pub(crate) fn open(&self, url: &str) {
        self.post("/url", &json!({ "url": url }));
    }

    /// Opens a file of this machine.
    pub(crate) fn open_file(&self, path: &Path) {
        let path = path.canonicalize().expect("the page exists");
        self.open(&format!("file://{}", path.display()));
    }

    /// The value of a JavaScript expression in the page.
    pub(crate) fn eval(&self, expression: &str) -> Value {
        self.post("/execute/sync", &json!({ "script": format!("return ({expression})"), "args": [] }))
    }

    /// Waits until a JavaScript expression is true.
    pub(crate) fn wait_for(&self, expression: &str) {
        let end = Instant::now() + PATIENCE;
        while self.eval(expression) != Value::Bool(true) {
            assert!(Instant::now() < end, "not true after {} s: {expression}", PATIENCE.as_secs());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Clicks the first element of a CSS selector, as a user does: it must be visible and not covered.
    pub(crate) fn click(&self, selector: &str) {
        self.post(&format!("/element/{}/click", self.find(selector)), &json!({}));
    }

    /// Draws with the mouse: a line through points, in pixels from the centre of the first element of a CSS selector.
    pub(crate) fn draw(&self, selector: &str, points: &[[i64; 2]]) {
        let origin = json!({ ELEMENT: self.find(selector) });
        let to = |[x, y]: &[i64; 2]| json!({ "type": "pointerMove", "duration": 0, "origin": origin, "x": x, "y": y });
        let mut steps: Vec<Value> = points.iter().map(to).collect();
        steps.insert(1, json!({ "type": "pointerDown", "button": 0 }));
        steps.push(json!({ "type": "pointerUp", "button": 0 }));
        let mouse =
            json!({ "type": "pointer", "id": "mouse", "parameters": { "pointerType": "mouse" }, "actions": steps });
        self.post("/actions", &json!({ "actions": [mouse] }));
    }

    /// Types into the first element of a CSS selector. For keys see [`key`].
    pub(crate) fn type_text(&self, selector: &str, text: &str) {
        self.post(&format!("/element/{}/value", self.find(selector)), &json!({ "text": text }));
    }

    /// Empties an input.
    pub(crate) fn clear(&self, selector: &str) {
        self.post(&format!("/element/{}/clear", self.find(selector)), &json!({}));
    }

    /// Chooses files in an `<input type="file">`.
    pub(crate) fn upload(&self, selector: &str, files: &[&Path]) {
        let files: Vec<String> = files.iter().map(|file| absolute(file)).collect();
        self.type_text(selector, &files.join("\n"));
    }

    /// The visible text of the first element of a CSS selector.
    pub(crate) fn text(&self, selector: &str) -> String {
        let value = self.get(&format!("/element/{}/text", self.find(selector)));
        value.as_str().expect("a text").to_owned()
    }

    /// Sets the size of the window in pixels.
    pub(crate) fn resize(&self, width: u32, height: u32) {
        self.post("/window/rect", &json!({ "width": width, "height": height }));
    }

    /// Sets the preferred colours of the user: `light` or `dark`.
    pub(crate) fn prefer(&self, scheme: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.devtools("Emulation.setEmulatedMedia", &json!({ "features": features }));
    }

    /// Writes what the window shows to a PNG file.
    pub(crate) fn screenshot(&self, path: &Path) {
        let image = self.get("/screenshot");
        let bytes = base64(image.as_str().expect("an image"));
        fs::write(path, bytes).expect("the screenshot is written");
    }

    /// Errors and warnings that pages logged since the last call.
    pub(crate) fn console_errors(&self) -> Vec<String> {
        let lines = self.post("/se/log", &json!({ "type": "browser" }));
        let lines = lines.as_array().expect("log lines").iter();
        let bad = lines.filter(|line| line["level"] == "SEVERE" || line["level"] == "WARNING");
        bad.map(|line| line["message"].to_string()).collect()
    }

    /// A command of the DevTools protocol.
    pub(crate) fn devtools(&self, command: &str, parameters: &Value) -> Value {
        self.post("/goog/cdp/execute", &json!({ "cmd": command, "params": parameters }))
    }

    fn find(&self, selector: &str) -> String {
        let found = self.post("/element", &json!({ "using": "css selector", "value": selector }));
        found[ELEMENT].as_str().expect("an element").to_owned()
    }

    fn get(&self, path: &str) -> Value {
        let answer = self.agent.get(format!("{}{path}", self.session)).call();
        read(path, answer)
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let request = self.agent.post(format!("{}{path}", self.session)).content_type("application/json");
        read(path, request.send(body.to_string()))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // ends Chromium, which would outlive chromedriver
        let _ended = self.agent.delete(&self.session).call();
        let _killed = self.driver.kill();
        let _status = self.driver.wait();
    }
}

/// WebDriver's codes of keys for [`Browser::type_text`].
pub(crate) mod key {
    pub(crate) const ENTER: &str = "\u{E007}";
    pub(crate) const SPACE: &str = " ";
    pub(crate) const ESCAPE: &str = "\u{E00C}";
}

fn is_file(path: &str) -> bool {
    Path::new(path).is_file()
}

fn absolute(path: &Path) -> String {
    path.canonicalize().expect("the file exists").display().to_string()
}

/// A new chromedriver and the port that it says on standard output that it listens on; `None` if it has ended.
fn chromedriver() -> Option<(Child, u16)> {
    let mut driver = Command::new("chromedriver")
        .arg("--port=0")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("chromedriver starts (`scripts/setup --checks` installs it)");
    let output = driver.stdout.take().expect("standard output is a pipe");
    let mut lines = BufReader::new(output).lines();
    let started = lines.by_ref().map_while(Result::ok).find(|line| line.contains("started successfully on port"));
    // chromedriver must be able to write until it ends
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
    let Some(line) = started else {
        let _ = driver.wait();
        return None;
    };
    let number: String =
        line.chars().rev().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
    let number: String = number.chars().rev().collect();
    Some((driver, number.parse().expect("a port number")))
}

fn read(path: &str, answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Value {
    let mut answer = answer.unwrap_or_else(|error| panic!("chromedriver does not answer `{path}`: {error}"));
    let body = answer.body_mut().with_config().limit(256 << 20);
    let text = body.read_to_string().unwrap_or_else(|error| panic!("the answer to `{path}`: {error}"));
    let mut value: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("the answer to `{path}`: {text}"));
    let value = value["value"].take();
    assert!(value.get("error").is_none() || value.get("stacktrace").is_none(), "`{path}`: {}", value["message"]);
    value
}

/// The bytes of a base64 text.
fn base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits: Vec<u32> = text.bytes().filter_map(digit).map(u32::from).collect();
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    for group in digits.chunks(4) {
        let word = group.iter().fold(0, |word, digit| word << 6 | digit) << (6 * (4 - group.len()));
        bytes.extend_from_slice(&word.to_be_bytes()[1..group.len()]);
    }
    bytes
}
