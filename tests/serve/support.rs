//! A server process with a tiny trained run, and a client.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use prsmed::data::volume::{Affine, Grid, write};
use serde_json::{Value, json};
use sha2::Digest;

/// The folder of this suite, empty at first.
pub(crate) fn home() -> &'static Path {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    HOME.get_or_init(|| {
        let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join(concat!("serve-", env!("CARGO_CRATE_NAME")));
        let _ = std::fs::remove_dir_all(&home);
        std::fs::create_dir_all(&home).expect("a folder for the tests");
        home
    })
}

/// The binary with a fixed environment.
pub(crate) fn prsmed() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_prsmed"));
    command.current_dir(home()).stdin(Stdio::null());
    command.env("OMP_NUM_THREADS", "1").env("COLUMNS", "100").env_remove("PRSMED_TOKEN");
    command
}

/// Runs a command that must succeed; returns standard output.
pub(crate) fn done(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    String::from_utf8(output.stdout).expect("text")
}

/// A data root of 8 small phantoms.
pub(crate) fn phantoms() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let root = home().join("phantoms");
        done(prsmed().args(["data", "phantom", "--count", "8", "--image-size", "64", "--seed", "3"]).arg(&root));
        root
    })
}

/// A run of two steps, whose words follow no mask.
pub(crate) fn trained() -> &'static Path {
    static RUN: OnceLock<PathBuf> = OnceLock::new();
    RUN.get_or_init(|| train("run", &["train.max_steps=2", "model.answer_reads_mask=false"]))
}

/// A run whose words follow masks, trained until they do.
pub(crate) fn reads_masks() -> &'static Path {
    static RUN: OnceLock<PathBuf> = OnceLock::new();
    let sets = ["train.learning_rate=3e-3", "train.epochs=100", "train.max_steps=150"];
    RUN.get_or_init(|| train("reads-masks", &[&sets[..], &["train.validate_every_epochs=50"]].concat()))
}

fn train(name: &str, sets: &[&str]) -> PathBuf {
    let run = home().join(name);
    let mut train = prsmed();
    train.args(["train", "--preset", "tiny", "--data-root"]).arg(phantoms()).arg("--out").arg(&run);
    for set in ["model.image_size=64", "train.micro_batch=2"].iter().chain(sets) {
        train.args(["--set", set]);
    }
    done(&mut train);
    run
}

/// A copy of the run whose first two classes were prepared from volumes with the windows `lung` and `bone`. It has a question
/// about the first one only.
pub(crate) fn run_of_two_windows(name: &str) -> PathBuf {
    let run = home().join(name);
    let _ = std::fs::remove_dir_all(&run);
    done(Command::new("cp").arg("-r").arg(trained()).arg(&run));
    for folder in ["best", "last"].map(|name| run.join(name)) {
        let edit = |file: &str, change: &dyn Fn(&mut Value)| edit(&folder.join(file), change);
        edit("model.json", &|model| {
            let classes: Vec<String> = serde_json::from_value(model["modalities"].clone()).expect("classes");
            for (class, window) in classes.iter().zip(["lung", "bone"]) {
                model["intensity"][class] = json!({ "axis": "axial", "window": window });
            }
        });
        let model: Value =
            serde_json::from_slice(&std::fs::read(folder.join("model.json")).expect("read")).expect("JSON");
        edit("questions.json", &|known| {
            known["questions"].as_array_mut().expect("a list").push(json!(["Where is the nodule?", 1]));
            known["classes"].as_array_mut().expect("a list").push(json!([model["modalities"][0]]));
        });
        update_sums(&folder, &["model.json", "questions.json"]);
    }
    run
}

fn edit(path: &Path, change: &dyn Fn(&mut Value)) {
    let mut value = serde_json::from_slice(&std::fs::read(path).expect("read")).expect("JSON");
    change(&mut value);
    std::fs::write(path, value.to_string()).expect("written");
}

fn update_sums(folder: &Path, files: &[&str]) {
    edit(&folder.join("checksums.json"), &|sums| {
        for file in files {
            let bytes = std::fs::read(folder.join(file)).expect("read");
            let sum = format!("{:x}", sha2::Sha256::digest(&bytes));
            sums["files"][file] = json!({ "bytes": bytes.len(), "sha256": sum });
        }
    });
}

/// A copy of the run whose classes were all prepared as `change` says.
pub(crate) fn run_with(name: &str, change: impl Fn(&mut Value)) -> PathBuf {
    let run = home().join(name);
    let _ = std::fs::remove_dir_all(&run);
    done(Command::new("cp").arg("-r").arg(trained()).arg(&run));
    for folder in ["best", "last"].map(|name| run.join(name)) {
        edit(&folder.join("model.json"), &|model| {
            let classes: Vec<String> = serde_json::from_value(model["modalities"].clone()).expect("classes");
            for class in &classes {
                change(&mut model["intensity"][class]);
            }
        });
        update_sums(&folder, &["model.json"]);
    }
    run
}

/// An image of the phantoms.
pub(crate) fn image_file() -> PathBuf {
    let folder = phantoms().join("brain_MRI/train_images");
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("images").map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    files.swap_remove(0)
}

/// A NIfTI file with `slices` slices of 20 x 16 pixels.
pub(crate) fn volume_file(name: &str, slices: usize) -> PathBuf {
    volume_file_of(name, [20, 16, slices])
}

/// A NIfTI file with a bright block, and voxels of 1 x 1 x 2 mm.
pub(crate) fn volume_file_of(name: &str, size: [usize; 3]) -> PathBuf {
    let affine = Affine::from_columns([[-1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 2.0]], [0.0; 3]);
    let (grid, [width, height, _]) = (Grid { size, affine }, size);
    let inside = |index: usize| (5..12).contains(&(index % width)) && (4..9).contains(&(index / width % height));
    let values: Vec<u8> = (0..grid.num_voxels()).map(|index| if inside(index) { 200 } else { 20 }).collect();
    let path = home().join(name);
    write::nifti_labels(&path, &values, &grid).expect("a NIfTI file");
    path
}

/// A running server. Ends when the value is dropped.
pub(crate) struct Server {
    child: Child,
    /// `127.0.0.1:PORT`.
    pub(crate) address: String,
    token: Option<String>,
    agent: ureq::Agent,
}

/// A response with its content.
pub(crate) struct Answered {
    pub(crate) status: u16,
    pub(crate) headers: ureq::http::HeaderMap,
    pub(crate) bytes: Vec<u8>,
}

impl Answered {
    pub(crate) fn json(&self) -> Value {
        let text = String::from_utf8_lossy(&self.bytes);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {text}: {error}", self.status))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// Checks an error: its status, and that its text contains `expected`.
    pub(crate) fn is_error(&self, status: u16, expected: &str) {
        let value = self.json();
        let error = value["error"].as_str().unwrap_or_default();
        assert_eq!(self.status, status, "{value}");
        assert!(error.contains(expected), "`{expected}` is not in {value}");
        assert!(value["hint"].is_string(), "{value}");
    }

    /// Checks the status of a success.
    pub(crate) fn ok(self) -> Self {
        assert!((200..300).contains(&self.status), "{}: {}", self.status, String::from_utf8_lossy(&self.bytes));
        self
    }
}

impl Server {
    /// Starts a server on a free port of this machine.
    pub(crate) fn start(flags: &[&str]) -> Self {
        Self::start_with(flags, &[])
    }

    /// As [`Self::start`], with variables of the environment.
    pub(crate) fn start_with(flags: &[&str], variables: &[(&str, &OsStr)]) -> Self {
        Self::start_run(trained(), flags, variables)
    }

    /// As [`Self::start_with`], with another run.
    pub(crate) fn start_run(run: &Path, flags: &[&str], variables: &[(&str, &OsStr)]) -> Self {
        let mut command = prsmed();
        command.envs(variables.iter().copied());
        command.args(["--json", "serve", "--port", "0"]).args(flags).arg(run);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the server starts");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let serving = lines.by_ref().map_while(Result::ok).find(|line| line.contains("\"serving\""));
        let Some(serving) = serving else {
            let mut errors = String::new();
            let _ = child.stderr.take().expect("a pipe").read_to_string(&mut errors);
            panic!("the server does not start: {errors}");
        };
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        let serving: Value = serde_json::from_str(&serving).expect("an object");
        let url = serving["url"].as_str().expect("an address");
        let address = url.trim_start_matches("http://").split('/').next().unwrap_or_default().to_owned();
        let config = ureq::Agent::config_builder().http_status_as_error(false).proxy(None);
        let agent = config.timeout_global(Some(Duration::from_mins(2))).build().new_agent();
        Self { child, address, token: None, agent }
    }

    /// Sends this token with every request.
    pub(crate) fn with_token(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }

    /// Ends the process at once.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("the process runs");
        self.child.wait().expect("the process ends");
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the end of the process; its exit code.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        self.child.wait().expect("the process ends").code()
    }

    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answered {
        let url = format!("http://{}{path}", self.address);
        let mut request = ureq::http::Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let request = request.body(body.to_vec()).expect("a request");
        let run = |agent: &ureq::Agent| agent.run(request);
        let mut response = run(&self.agent).unwrap_or_else(|error| panic!("{method} {path}: {error}"));
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let read = response.body_mut().with_config().limit(1 << 28).read_to_vec();
        Answered { status, headers, bytes: read.unwrap_or_else(|error| panic!("{method} {path}: {error}")) }
    }

    pub(crate) fn get(&self, path: &str) -> Answered {
        self.send("GET", path, &[], &[])
    }

    pub(crate) fn json(&self, method: &str, path: &str, value: &Value) -> Answered {
        self.send(method, path, &[("Content-Type", "application/json")], value.to_string().as_bytes())
    }

    /// Uploads a file; the id of the image.
    pub(crate) fn upload(&self, file: &Path) -> String {
        let bytes = std::fs::read(file).expect("an image file");
        let image = self.send("POST", "/api/images", &[], &bytes).ok().json();
        image["id"].as_str().expect("an id").to_owned()
    }

    /// Asks and waits for the last event; all events by name.
    pub(crate) fn ask(&self, image: &str, question: &Value) -> Vec<(String, Value)> {
        let answered = self.json("POST", &format!("/api/images/{image}/questions"), question).ok();
        assert_eq!(answered.header("content-type"), "text/event-stream");
        events(&String::from_utf8(answered.bytes).expect("text"))
    }

    /// The result of a question.
    pub(crate) fn result(&self, image: &str, question: &str, max_new_tokens: usize) -> Value {
        let asked = self.ask(image, &json!({ "question": question, "max_new_tokens": max_new_tokens }));
        let (name, value) = asked.last().expect("events").clone();
        assert_eq!(name, "result", "{value}");
        value
    }

    /// Checks that a value has exactly the fields that a schema of `openapi.json` describes and requires.
    pub(crate) fn check_described(&self, schema: &str, value: &Value) {
        let openapi = self.get("/api/openapi.json").ok().json();
        let schema = &openapi["components"]["schemas"][schema];
        let fields = |value: &Value| value.as_object().expect("an object").keys().cloned().collect::<BTreeSet<_>>();
        let required = schema["required"].as_array().expect("names").iter();
        let required = required.map(|name| name.as_str().expect("a name").to_owned()).collect();
        assert_eq!((fields(value), fields(&schema["properties"])), (BTreeSet::clone(&required), required));
    }

    /// A number of `/metrics`; 0 if it is not there.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = String::from_utf8(self.get("/metrics").ok().bytes).expect("text");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        line.unwrap_or(0.0)
    }

    /// Waits until a number of `/metrics` has a value; the time that it took.
    pub(crate) fn wait_for(&self, name: &str, value: f64, limit: Duration) -> Duration {
        let begin = Instant::now();
        while self.metric(name) != value {
            assert!(begin.elapsed() < limit, "{name} is {} and not {value} after {limit:?}", self.metric(name));
            std::thread::sleep(Duration::from_millis(10));
        }
        begin.elapsed()
    }

    /// A connection for bytes that no client library sends.
    pub(crate) fn connect(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_mins(1))).expect("a time limit");
        stream.write_all(bytes).expect("the server reads");
        stream
    }

    /// Sends bytes; everything that the server answers until it closes the connection.
    pub(crate) fn raw(&self, bytes: &[u8]) -> String {
        let mut text = Vec::new();
        let _ = self.connect(bytes).read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The events of a stream, by name.
pub(crate) fn events(text: &str) -> Vec<(String, Value)> {
    let event = |block: &str| {
        let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let data = field("data:")?;
        Some((field("event:")?.to_owned(), serde_json::from_str(data).expect("JSON")))
    };
    text.split("\n\n").filter_map(event).collect()
}

/// Sends a signal to a process that was not waited for.
pub(crate) fn signal(process: u32, number: i32) {
    let id = i32::try_from(process).expect("a process id");
    // SAFETY: the caller holds the child, so the id is still its own.
    assert_eq!(unsafe { libc::kill(id, number) }, 0);
}
