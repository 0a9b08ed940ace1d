//! The server behind a proxy, below another path and name, and forms of `curl -F`.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::alone;
use crate::sizes::image_of;
use crate::support::{Server, done, home, image_file, volume_file};

/// A form with a text and files.
fn form(files: &[&[u8]]) -> Vec<u8> {
    let mut body = b"--xx\r\nContent-Disposition: form-data; name=\"send\"\r\n\r\nSend\r\n".to_vec();
    for file in files {
        let head = "--xx\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.png\"\r\n";
        body.extend(head.as_bytes());
        body.extend(b"Content-Type: image/png\r\n\r\n");
        body.extend(*file);
        body.extend(b"\r\n");
    }
    body.extend(b"--xx--\r\n");
    body
}

#[test]
fn a_form_sends_one_file() {
    let server = Server::start(&["--max-upload", "0.1"]);
    let image = fs::read(image_file()).unwrap();
    let send =
        |body: &[u8]| server.send("POST", "/api/images", &[("Content-Type", "multipart/form-data; boundary=xx")], body);
    let by_form = send(&form(&[&image])).ok().json();
    let by_body = server.send("POST", "/api/images", &[], &image).ok().json();
    assert_eq!((&by_form["width"], &by_form["height"]), (&by_body["width"], &by_body["height"]));
    let pixels = |image: &serde_json::Value| {
        server.get(&format!("/api/images/{}/pixels", image["id"].as_str().unwrap())).ok().bytes
    };
    assert_eq!(pixels(&by_form), pixels(&by_body));
    send(&form(&[])).is_error(400, "the form has no file");
    send(&form(&[&image, &image])).is_error(400, "the form has several files");
    send(&form(&[&vec![0; 200_000]])).is_error(413, "the file is too large: at most 0.1 MiB are allowed");
    send(&form(&[b"text"])).is_error(422, "the uploaded file: is not a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM image");
    send(b"--yy\r\n").is_error(400, "");
    let none = server.send("POST", "/api/images", &[("Content-Type", "multipart/form-data")], b"");
    none.is_error(400, "boundary");
    assert!(none.json()["hint"].as_str().unwrap().contains("curl -F file=@image.png"));
}

#[test]
fn a_base_path_holds_for_every_route() {
    let server = Server::start(&["--base-path", "/tools/prsmed"]);
    let page = String::from_utf8(server.get("/tools/prsmed/").ok().bytes).unwrap();
    assert!(page.contains("page/main.js") && !page.contains("\"/page/"), "the page's own addresses are relative");
    server.get("/tools/prsmed/page/main.js").ok();
    let moved = server.send("GET", "/tools/prsmed", &[("Accept", "text/html")], &[]);
    assert!(moved.status == 200 || moved.header("location") == "prsmed/", "{}", moved.status);
    server.get("/").is_error(404, "");
    server.get("/api/model").is_error(404, "");
    let sent = server.send("POST", "/tools/prsmed/api/images", &[], &fs::read(image_file()).unwrap()).ok();
    assert_eq!(sent.status, 201);
    let id = sent.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(sent.header("location"), format!("images/{id}"), "relative to /tools/prsmed/api/images");
    server.get(&format!("/tools/prsmed/api/images/{id}")).ok();
}

#[test]
fn a_token_is_wanted_below_a_base_path_too() {
    let server = Server::start(&["--base-path", "/prsmed", "--token", "correct-horse-battery"]);
    server.get("/prsmed/api/model").is_error(401, "");
    server.get("/prsmed/metrics").is_error(401, "");
    server.get("/prsmed/").ok();
    server.with_token("correct-horse-battery").get("/prsmed/api/model").ok();
}

#[test]
fn uploads_leave_no_file_even_if_the_server_is_killed() {
    let folder = home().join("temporary");
    fs::create_dir_all(&folder).unwrap();
    let mut server = Server::start_with(&[], &[("TMPDIR", folder.as_os_str())]);
    let files = |folder: &Path| fs::read_dir(folder).unwrap().count();
    let volume = fs::read(volume_file("kept.nii.gz", 200)).unwrap();
    let address = server.address.clone();
    let sender = std::thread::spawn(move || {
        for _ in 0..20 {
            let sent = ureq::post(format!("http://{address}/api/images")).send(&volume[..]);
            if sent.is_err() {
                break;
            }
        }
    });
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(400) {
        assert_eq!(files(&folder), 0);
        std::thread::sleep(Duration::from_millis(1));
    }
    server.kill();
    sender.join().unwrap();
    assert_eq!(files(&folder), 0);
    // without a usable folder for temporary files
    let server = Server::start_with(&[], &[("TMPDIR", folder.join("none").as_os_str())]);
    let image = server.upload(&image_file());
    server.get(&format!("/api/images/{image}/pixels")).ok();
    let volume = server.upload(&volume_file("other.nii.gz", 3));
    server.result(&volume, "Where?", 2);
    server.get(&format!("/api/images/{volume}/mask.nii.gz")).ok();
}

/// nginx of the system, or of `scripts/setup --checks`.
fn nginx() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join(".tools/nginx/usr/sbin/nginx");
    if own.exists() { own } else { "nginx".into() }
}

/// nginx with the configuration of the guide. Ends when the value is dropped.
struct Nginx(Child);

impl Nginx {
    fn start(server: &Server, port: u16) -> Self {
        let folder = home().join("nginx");
        fs::create_dir_all(&folder).expect("a folder");
        let guide = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guides/serve-a-model.md"));
        let guide = guide.expect("the guide");
        let location = guide.split("```nginx\n").nth(1).and_then(|rest| rest.split("```").next()).expect("its lines");
        let location = location.replace("127.0.0.1:8080", &server.address);
        let mut text =
            format!("daemon off; pid {0}/pid; error_log {0}/error.log;\nevents {{}}\nhttp {{\n", folder.display());
        for name in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
            writeln!(text, "{name}_temp_path {}/{name};", folder.display()).expect("a string");
        }
        writeln!(text, "access_log off;\nserver {{\nlisten 127.0.0.1:{port};\n{location}}}\n}}").expect("a string");
        let file = folder.join("nginx.conf");
        fs::write(&file, text).expect("written");
        let mut command = Command::new(nginx());
        command.arg("-e").arg(folder.join("error.log")).arg("-c").arg(&file).arg("-p").arg(&folder);
        let started = Self(command.stderr(Stdio::null()).spawn().expect("nginx (scripts/setup --checks)"));
        let begin = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(begin.elapsed() < Duration::from_secs(10), "nginx does not start; see {}", folder.display());
            std::thread::sleep(Duration::from_millis(20));
        }
        started
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // its other processes end with it
        let _ = Command::new("kill").arg(self.0.id().to_string()).status();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs nginx"]
fn nginx_passes_pages_uploads_and_event_streams() {
    let _alone = alone();
    let server = Server::start(&["--base-path", "/prsmed", "--allow-host", "lab.example"]);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let _nginx = Nginx::start(&server, port);
    let url = format!("http://127.0.0.1:{port}/prsmed");
    let curl = |args: &[&str]| {
        let mut command = Command::new("curl");
        done(command.args(["-sS", "--fail-with-body", "--noproxy", "*", "-H", "Host: lab.example"]).args(args))
    };
    assert!(curl(&[&format!("{url}/")]).contains("<!doctype html>"));
    let large = home().join("large.png");
    // nginx keeps larger bodies in a file
    fs::write(&large, image_of(3 << 20)).unwrap();
    for way in [&["-F", &format!("file=@{}", large.display())], &["--data-binary", &format!("@{}", large.display())]] {
        let sent = curl(&[way[0], way[1], &format!("{url}/api/images")]);
        assert!(sent.contains("\"width\":64"), "{sent}");
    }
    let file = format!("file=@{}", image_file().display());
    let origin = ["-H", "Origin: https://lab.example"];
    let sent = curl(&["-F", &file, origin[0], origin[1], &format!("{url}/api/images")]);
    let sent: serde_json::Value = serde_json::from_str(&sent).expect("an image");
    let address = format!("{url}/api/images/{}/questions", sent["id"].as_str().unwrap());
    let question = json!({ "question": "Where?", "max_new_tokens": 4 }).to_string();
    let answered = curl(&["-N", "--json", &question, &address]);
    assert!(answered.contains("event: token") && answered.contains("event: result"), "{answered}");
    // a foreign page and a foreign name stay refused
    let foreign = |header: &str, host: &str| {
        let mut command = Command::new("curl");
        command.args(["-sS", "-o", "/dev/null", "-w", "%{http_code}", "--noproxy", "*", "-H", host, "-H", header]);
        done(command.arg(format!("{url}/api/model")))
    };
    assert_eq!(foreign("Origin: https://evil.example", "Host: lab.example"), "403");
    assert_eq!(foreign("Accept: */*", "Host: evil.example"), "403");

    // each event arrives when it is made: a proxy that waits would send all of them at the end
    let volume = server.send("POST", "/prsmed/api/images", &[], &fs::read(volume_file("behind.nii.gz", 60)).unwrap());
    let address = format!("{url}/api/images/{}/questions", volume.ok().json()["id"].as_str().unwrap());
    let question = json!({ "question": "Where?", "volume": {} }).to_string();
    let mut command = Command::new("curl");
    command.args(["-sSN", "--noproxy", "*", "-H", "Host: lab.example", "--json", &question, &address]);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("curl");
    let lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let (mut first, mut last) = (None, None);
    for line in lines.map_while(Result::ok) {
        if line.starts_with("event: progress") {
            first = first.or(Some(Instant::now()));
            last = Some(Instant::now());
        }
    }
    child.wait().unwrap();
    let spread = last.unwrap() - first.unwrap();
    assert!(spread > Duration::from_millis(50), "60 slices in {spread:?}");
}

#[test]
fn forms_of_other_programs_and_volumes_are_read() {
    let server = Server::start(&[]);
    for (file, field, slices) in [(image_file(), "image", 1), (volume_file("form.nii.gz", 3), "files[]", 3)] {
        let bytes = fs::read(file).unwrap();
        let disposition = format!("form-data; name=\"{field}\"; filename=\"scan 1\"");
        let head =
            format!("--xx\r\ncontent-disposition: {disposition}\r\ncontent-type: application/octet-stream\r\n\r\n");
        let body = [head.as_bytes(), &bytes, b"\r\n--xx--\r\n"].concat();
        let headers = [("content-type", "Multipart/Form-Data; boundary=\"xx\"")];
        let by_form = server.send("POST", "/api/images", &headers, &body).ok().json();
        let by_body = server.send("POST", "/api/images", &[], &bytes).ok().json();
        assert_eq!(by_form["slices"], slices, "{field}");
        for key in ["width", "height", "slices", "spacing_mm"] {
            assert_eq!(by_form[key], by_body[key], "{field}: {key}");
        }
    }
}

#[test]
fn forms_without_a_usable_file_are_refused_with_the_way_to_send_one() {
    let server = Server::start(&[]);
    let headers = [("Content-Type", "multipart/form-data; boundary=xx")];
    let part = |head: &str, content: &str| {
        let text = format!("--xx\r\nContent-Disposition: form-data; {head}\r\n\r\n{content}\r\n--xx--\r\n");
        server.send("POST", "/api/images", &headers, text.as_bytes())
    };
    let text_only = part("name=\"file\"", "scan.png");
    text_only.is_error(400, "the form has no file");
    assert!(text_only.json()["hint"].as_str().unwrap().contains("--data-binary @image.png"));
    part("name=\"file\"; filename=\"a.png\"", "").is_error(400, "the file is empty");
    part("name=\"file\"; filename=\"a.nrrd\"", "NRRD0004\n").is_error(422, "its header has 0 sizes");
    let with = |header| server.send("POST", "/api/images", &[header], &fs::read(image_file()).unwrap());
    with(("Content-Encoding", "gzip")).is_error(415, "the body is compressed");
    for header in [("Content-Encoding", "identity"), ("Content-Type", "application/json")] {
        with(header).ok();
    }
    let json = server.send("POST", "/api/images", &[("Content-Type", "application/json")], b"{\"image\": \"iVBO\"}");
    json.is_error(415, "the body is JSON, and must be the file itself");
}

#[test]
fn a_proxy_may_send_another_host_than_the_browser() {
    let server = Server::start(&["--allow-host", "lab.example"]);
    let image = fs::read(image_file()).unwrap();
    let upload = |headers: &[(&str, &str)]| server.send("POST", "/api/images", headers, &image);
    for origin in ["https://lab.example", "http://LAB.example:8443"] {
        assert_eq!(upload(&[("Origin", origin), ("Sec-Fetch-Site", "same-origin")]).status, 201, "{origin}");
    }
    for origin in ["https://lab.example.evil.example", "https://other.lab.example", "null"] {
        upload(&[("Origin", origin)]).is_error(403, "requests from other sites");
    }
    upload(&[("Host", "backend"), ("Origin", "https://lab.example")]).is_error(403, "the host name `backend`");
    // nginx holds events back without this header
    let id = server.upload(&image_file());
    let question = json!({ "question": "Where?", "max_new_tokens": 2 });
    let answered = server.json("POST", &format!("/api/images/{id}/questions"), &question).ok();
    assert_eq!(answered.header("x-accel-buffering"), "no");
}
