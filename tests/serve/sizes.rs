//! Bodies of every size and way: each documented call takes them to its limit, and says why it takes no more.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Server, done, home, image_file};

const MIB: usize = 1 << 20;
/// `--max-upload 1.5`.
const LIMIT: usize = MIB + MIB / 2;

/// The image of the tests as a PNG file of exactly `size` bytes.
pub(crate) fn image_of(size: usize) -> Vec<u8> {
    padded(&std::fs::read(image_file()).expect("an image"), size)
}

/// A mask for this image, as a PNG file of exactly `size` bytes.
fn mask_of(size: usize) -> Vec<u8> {
    let mask = image::GrayImage::from_fn(64, 64, |x, _| image::Luma([if x < 20 { 255 } else { 0 }]));
    let mut png = std::io::Cursor::new(Vec::new());
    mask.write_to(&mut png, image::ImageFormat::Png).expect("a mask");
    padded(png.get_ref(), size)
}

/// A PNG file of exactly `size` bytes, by a chunk that readers skip. For a smaller size its first bytes.
fn padded(png: &[u8], size: usize) -> Vec<u8> {
    let Some(length) = size.checked_sub(png.len() + 12) else { return png[..size].to_vec() };
    let chunk = [b"paDd".as_slice(), &vec![7; length]].concat();
    // after the signature and the chunk IHDR
    let (head, rest) = png.split_at(8 + 25);
    let length = u32::try_from(length).expect("a small file").to_be_bytes();
    [head, &length, &chunk, &crc32fast::hash(&chunk).to_be_bytes(), rest].concat()
}

/// A form with a field of text and a file.
fn form(file: &[u8]) -> Vec<u8> {
    let text = "--xx\r\nContent-Disposition: form-data; name=\"note\"\r\n\r\nfirst\r\n";
    let head = "--xx\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.png\"\r\n\r\n";
    [text.as_bytes(), head.as_bytes(), file, b"\r\n--xx--\r\n"].concat()
}

/// How a client sends a body.
#[derive(Debug, Clone, Copy)]
enum Way {
    Length,
    Chunked,
    /// HTTP/1.0.
    Old,
    /// Waits for `100 Continue`.
    Asks,
    /// In three pieces.
    Slow,
}

/// Sends a request; status and JSON of the answer.
fn send(server: &Server, way: Way, (method, path, kind): (&str, &str, &str), body: &[u8]) -> (u16, Value) {
    let version = if matches!(way, Way::Old) { "1.0" } else { "1.1" };
    let mut head = format!("{method} {path} HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n");
    write!(head, "Content-Type: {kind}\r\n").expect("a string");
    match way {
        Way::Chunked => head += "Transfer-Encoding: chunked\r\n",
        _ => write!(head, "Content-Length: {}\r\n", body.len()).expect("a string"),
    }
    if matches!(way, Way::Asks) {
        head += "Expect: 100-continue\r\n";
    }
    let mut stream = server.connect((head + "\r\n").as_bytes());
    let mut answer = Vec::new();
    match way {
        Way::Length | Way::Old => stream.write_all(body).expect("the server reads"),
        Way::Chunked => {
            for piece in body.chunks(70_001) {
                let framed = [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat();
                stream.write_all(&framed).expect("the server reads");
            }
            stream.write_all(b"0\r\n\r\n").expect("the server reads");
        }
        Way::Asks => {
            while !answer.windows(4).any(|end| end == b"\r\n\r\n") {
                answer.push(byte_of(&mut stream));
            }
            if answer.starts_with(b"HTTP/1.1 100") {
                answer.clear();
                stream.write_all(body).expect("the server reads");
            }
        }
        Way::Slow => {
            for piece in body.chunks(body.len().div_ceil(3)) {
                stream.write_all(piece).expect("the server reads");
                std::thread::sleep(Duration::from_millis(30));
            }
        }
    }
    stream.read_to_end(&mut answer).expect("an answer");
    let text = String::from_utf8_lossy(&answer);
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    let json = text.split_once("\r\n\r\n").and_then(|(_, body)| serde_json::from_str(body).ok());
    (status.unwrap_or_else(|| panic!("{text}")), json.unwrap_or_default())
}

fn byte_of(stream: &mut TcpStream) -> u8 {
    let mut byte = [0];
    stream.read_exact(&mut byte).expect("an answer");
    byte[0]
}

#[test]
fn files_are_taken_to_the_limit_in_every_way() {
    let server = Server::start(&["--max-upload", "1.5"]);
    let image = server.upload(&image_file());
    let answer = server.result(&image, "Where?", 1);
    let mask = format!("/api/images/{image}/answers/{}/mask", answer["id"].as_str().unwrap());
    let with_form = "multipart/form-data; boundary=xx";
    for way in [Way::Length, Way::Chunked, Way::Old, Way::Asks, Way::Slow] {
        for (method, path) in [("POST", "/api/images"), ("PUT", mask.as_str())] {
            for kind in ["image/png", with_form] {
                for (size, expected) in [(1, 422), (MIB, 200), (LIMIT, 200), (LIMIT + 1, 413)] {
                    let file = if method == "PUT" { mask_of(size) } else { image_of(size) };
                    assert_eq!(file.len(), size);
                    let body = if kind == with_form { form(&file) } else { file };
                    let (status, answered) = send(&server, way, (method, path, kind), &body);
                    let name = format!("{way:?} {method} {kind} {size}: {status} {answered}");
                    let status = if status == 201 { 200 } else { status };
                    assert_eq!(status, expected, "{name}");
                    let error = answered["error"].as_str().unwrap_or_default();
                    match expected {
                        422 => assert!(error.contains("is not a PNG"), "{name}"),
                        413 => assert!(error.contains("too large: at most 1.5 MiB"), "{name}"),
                        _ => assert!(answered["width"] == 64 || answered["corrected"] == true, "{name}"),
                    }
                }
            }
        }
    }
}

#[test]
fn all_but_the_file_of_a_form_is_taken_to_its_limit() {
    let server = Server::start(&["--max-upload", "1.5"]);
    let file = std::fs::read(image_file()).expect("an image");
    let small = form(&file);
    let room = (128 << 10) - (small.len() - file.len());
    for way in [Way::Length, Way::Chunked] {
        for (more, expected) in [(0, 201), (room, 201), (room + 1, 413), (MIB, 413), (2 * MIB, 413)] {
            let text = String::from_utf8_lossy(&small[..small.len() - file.len()]).find("first").expect("the text");
            let body = [&small[..text], &vec![b'x'; more], &small[text..]].concat();
            let kind = "multipart/form-data; boundary=xx";
            let (status, answered) = send(&server, way, ("POST", "/api/images", kind), &body);
            assert_eq!(status, expected, "{way:?} {more}: {answered}");
            if expected == 413 {
                let error = "the form is too large: at most 1.5 MiB are allowed for its file, and 128 KiB for the rest";
                assert_eq!(answered["error"], error);
                assert!(answered["hint"].as_str().is_some_and(|hint| hint.ends_with("send less text beside the file")));
            }
        }
    }
}

#[test]
fn json_is_taken_to_its_limit_in_every_way() {
    let server = Server::start(&[]);
    let image = server.upload(&image_file());
    let answer = server.result(&image, "Where?", 1);
    let questions = format!("/api/images/{image}/questions");
    let answer = format!("/api/images/{image}/answers/{}", answer["id"].as_str().unwrap());
    for way in [Way::Length, Way::Chunked, Way::Old, Way::Asks, Way::Slow] {
        for (method, path, content) in [
            ("POST", &questions, json!({ "question": "Where?", "max_new_tokens": 1 })),
            ("PATCH", &answer, json!({ "corrected_answer": "It is here." })),
        ] {
            let content = content.to_string();
            for (size, expected) in [(1, 400), (128 << 10, 200), ((128 << 10) + 1, 413), (MIB, 413)] {
                let body = if size == 1 { "{".to_owned() } else { content.clone() + &" ".repeat(size - content.len()) };
                let (status, answered) = send(&server, way, (method, path, "application/json"), body.as_bytes());
                assert_eq!(status, expected, "{way:?} {method} {size}: {answered}");
                if expected == 413 {
                    assert_eq!(answered["error"], "the request is too long: at most 128 KiB are allowed");
                }
            }
        }
    }
}

#[test]
fn a_client_that_asks_first_sends_nothing_that_is_refused() {
    let server = Server::start(&["--max-upload", "1.5", "--token", "correct-horse-battery"]);
    let begin = Instant::now();
    for (token, length, status) in [("correct-horse-battery", LIMIT + 1, "413"), ("another", 10, "401")] {
        let head = format!(
            "POST /api/images HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\
             Content-Length: {length}\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
        );
        let answered = server.raw(head.as_bytes());
        assert!(answered.starts_with(&format!("HTTP/1.1 {status}")), "{answered}");
    }
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
}

#[test]
fn bodies_that_break_off_or_are_framed_wrongly_have_their_own_reason() {
    let server = Server::start(&[]);
    let head = "POST /api/images HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n";
    let half = server.connect(format!("{head}Content-Length: 1000\r\n\r\nhalf").as_bytes());
    half.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answered = String::new();
    { half }.read_to_string(&mut answered).unwrap();
    assert!(answered.contains("the body is incomplete: the connection ended"), "{answered}");
    let answered = server.raw(format!("{head}Transfer-Encoding: chunked\r\n\r\nno length\r\n").as_bytes());
    assert!(answered.contains("the body is not as `Transfer-Encoding: chunked` says"), "{answered}");
    let form = format!("{head}Content-Type: multipart/form-data; boundary=xx\r\nContent-Length: 6\r\n\r\n--xx\r\n");
    assert!(server.raw(form.as_bytes()).contains("the form is incomplete: its last `boundary` is missing"));
}

/// The commands `curl` of the guide, each in one line.
fn commands() -> Vec<String> {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guides/serve-a-model.md");
    let guide = std::fs::read_to_string(guide).expect("the guide").replace(",\n  \"", ", \"");
    guide.lines().filter(|line| line.starts_with("curl ")).map(str::to_owned).collect()
}

#[test]
#[ignore = "needs curl"]
fn the_commands_of_the_guide_work_with_large_files() {
    let folder = home().join("curl");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("scan.png"), image_of(MIB)).unwrap();
    let volume: PathBuf = crate::support::volume_file("scan.nii.gz", 41);
    std::fs::copy(volume, folder.join("scan.nii.gz")).unwrap();
    let server = Server::start_run(crate::support::reads_masks(), &["--max-new-tokens", "2"], &[]);
    let (mut image, mut answer) = (String::new(), String::new());
    let commands = commands();
    // this run has no sequences; `sequences.rs` asks one that has
    for command in commands.iter().filter(|command| !command.contains("image.T1=")) {
        let line = command.replace("127.0.0.1:8080", &server.address).replace("ID", &image).replace("ANSWER", &answer);
        let line = line.replacen("curl ", "curl --fail-with-body --noproxy '*' ", 1);
        let answered = done(Command::new("sh").args(["-c", &line]).current_dir(&folder));
        if line.contains("@scan") {
            let sent: Value =
                serde_json::from_str(&answered).unwrap_or_else(|error| panic!("{line}: {answered}: {error}"));
            sent["id"].as_str().unwrap().clone_into(&mut image);
        } else if line.contains(" -N ") {
            let events = crate::support::events(&answered);
            let (name, result) = events.last().unwrap();
            assert_eq!(name, "result", "{line}: {answered}");
            result["id"].as_str().unwrap().clone_into(&mut answer);
        }
    }
    assert!(commands.len() >= 9, "{commands:?}");
    for file in ["mask.png", "mask.nii.gz", "slice.png"] {
        assert!(folder.join(file).metadata().unwrap().len() > 50, "{file}");
    }
    let url = format!("http://{}/api/images", server.address);
    for flags in [
        &["-F", "file=@scan.png", "--http1.0"][..],
        &["-F", "file=@scan.png", "-H", "Transfer-Encoding: chunked"],
        &["-F", "file=@scan.png", "-H", "Expect: 100-continue"],
        &["-F", "file=@scan.png", "-H", "Expect:"],
        &["-F", "note=first", "-F", "image=@scan.png;type=image/png;filename=a;b.png", "-F", "note=last"],
        &["-T", "scan.png", "-X", "POST"],
        &["--data-binary", "@scan.png", "--limit-rate", "2M"],
    ] {
        let mut curl = Command::new("curl");
        curl.args(["-sS", "--fail-with-body", "--noproxy", "*"]).args(flags).arg(&url).current_dir(&folder);
        let sent: Value = serde_json::from_str(&done(&mut curl)).unwrap();
        assert_eq!(sent["width"], 64, "{flags:?}");
    }
}
