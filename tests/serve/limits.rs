//! What the server refuses, and that it continues afterwards.

use std::io::{Cursor, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use image::{DynamicImage, ImageFormat};
use serde_json::json;

use crate::alone;
use crate::support::{Server, image_file, prsmed, signal, trained, volume_file, volume_file_of};

const TOKEN: &str = "correct-horse-battery";

fn png(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    DynamicImage::new_luma8(width, height).write_to(&mut bytes, ImageFormat::Png).expect("an image");
    bytes.into_inner()
}

#[test]
fn files_that_are_no_images_are_refused() {
    let server = Server::start(&["--max-upload", "0.1", "--max-pixels", "0.01"]);
    let upload = |bytes: &[u8]| server.send("POST", "/api/images", &[], bytes);
    upload(b"").is_error(400, "the file is empty");
    upload(b"garbage").is_error(422, "the uploaded file: is not a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM image");
    upload(b"\x89PNG\r\n\x1a\nrest").is_error(422, "cannot be decoded");
    let whole = std::fs::read(image_file()).unwrap();
    let half = upload(&whole[..whole.len() / 2]);
    half.is_error(422, "the uploaded file: cannot be decoded");
    assert_eq!(half.json()["hint"], "send another file");
    upload(&png(101, 100)).is_error(422, "has 101x100 pixels, at most 10000 pixels are allowed");
    upload(&png(100, 100)).ok();
    // a small file that claims to be huge
    let mut bomb = png(100, 100);
    bomb[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 1, 0, 0]);
    let sum = crc32fast::hash(&bomb[12..29]);
    bomb[29..33].copy_from_slice(&sum.to_be_bytes());
    upload(&bomb).is_error(422, "65536x65536 pixels");
    upload(&vec![0; 200_000]).is_error(413, "the file is too large: at most 0.1 MiB are allowed");
    let chunked =
        "POST /api/images HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
    let mut request = chunked.as_bytes().to_vec();
    for _ in 0..20 {
        request.extend(b"4000\r\n");
        request.extend([0; 0x4000]);
        request.extend(b"\r\n");
    }
    request.extend(b"0\r\n\r\n");
    let answered = server.raw(&request);
    assert!(answered.starts_with("HTTP/1.1 413"), "{answered}");
    for query in ["spacing_x_mm=1", "spacing_x_mm=0&spacing_y_mm=1", "spacing_x_mm=nan&spacing_y_mm=1"] {
        server.send("POST", &format!("/api/images?{query}"), &[], &whole).is_error(422, "size of a pixel");
    }
    server.send("POST", "/api/images?name=a", &[], &whole).is_error(400, "unknown field `name`");
    upload(&whole).ok();
}

/// A NIfTI file whose header promises more voxels than the file has.
fn promised(name: &str, size: [i16; 3]) -> Vec<u8> {
    let mut bytes = std::fs::read(volume_file(name, 1)).expect("read");
    // `dim[1]` to `dim[3]` of the header
    let sides: Vec<u8> = size.into_iter().flat_map(i16::to_le_bytes).collect();
    bytes[42..48].copy_from_slice(&sides);
    bytes
}

#[test]
fn volumes_with_too_large_slices_are_refused() {
    let server = Server::start(&["--max-pixels", "0.01"]);
    let upload = |bytes: &[u8]| server.send("POST", "/api/images", &[], bytes);
    let refused = "voxels, and at most 10000 pixels are allowed in a slice along any axis";
    let hint = "crop the volume or resample it to larger voxels, or start the server with a larger `--max-pixels`";
    // by its header: the voxels are missing
    let large = upload(&promised("slices.nii", [1024, 1024, 250]));
    large.is_error(422, &format!("the uploaded file: has 1024x1024x250 {refused}"));
    assert_eq!(large.json()["hint"], hint);
    // slices of 20x16 pixels; those along the second axis have 20x501
    let long = upload(&std::fs::read(volume_file("long.nii", 501)).unwrap());
    long.is_error(422, &format!("the uploaded file: has 20x16x501 {refused}"));
    assert_eq!(long.json()["hint"], hint);
    server.upload(&volume_file("long.nii", 500));
}

#[test]
fn volumes_with_too_many_voxels_are_refused() {
    let server = Server::start(&[]);
    let large = server.send("POST", "/api/images", &[], &promised("voxels.nii", [1024, 1024, 257]));
    large.is_error(422, "the uploaded file: 1024x1024x257 voxels are more than 268435456, the most that can be used");
    assert_eq!(large.json()["hint"], "crop the volume or resample it to larger voxels");
}

#[test]
fn one_volume_is_decoded_at_a_time() {
    let _alone = alone();
    let server = Server::start(&[]);
    let (large, small) = (volume_file_of("large.nii.gz", [300, 300, 500]), volume_file("small.nii", 2));
    let time = |file: &Path| {
        let begin = Instant::now();
        server.upload(file);
        begin.elapsed()
    };
    let of_large = time(&large);
    let longest = std::thread::scope(|scope| {
        let other = scope.spawn(|| time(&large));
        let mut longest = Duration::ZERO;
        while !other.is_finished() {
            longest = longest.max(time(&small));
        }
        longest
    });
    assert!(longest > of_large / 4, "a small volume waits for the large one: {longest:?}, {of_large:?}");
}

#[test]
fn questions_that_cannot_be_asked_are_refused() {
    let server = Server::start(&["--max-new-tokens", "3"]);
    let image = server.upload(&image_file());
    let url = format!("/api/images/{image}/questions");
    let ask = |value: &serde_json::Value| server.json("POST", &url, value);
    let words = "word ".repeat(10_000);
    ask(&json!({ "question": words })).is_error(413, "the question is too long: at most 4000 characters are allowed");
    ask(&json!({ "question": words.repeat(10) })).is_error(413, "too long");
    ask(&json!({ "question": " " })).is_error(422, "the question is empty");
    ask(&json!({ "question": "Where?", "slice": 1 })).is_error(422, "there is no slice 1");
    ask(&json!({ "question": "Where?", "window": "400/40" })).is_error(422, "no intensity window");
    ask(&json!({ "question": "Where?", "temperature": 1 })).is_error(422, "unknown field `temperature`");
    ask(&json!({})).is_error(422, "missing field `question`");
    let header = [("Content-Type", "application/json")];
    server.send("POST", &url, &header, b"{\"question\": \"Whe").is_error(400, "");
    server.send("POST", &url, &header, b"\xff\xfe\x00").is_error(400, "");
    server.send("POST", &url, &[], b"{\"question\": \"Where?\"}").is_error(415, "application/json");
    server.json("POST", "/api/images/none/questions", &json!({ "question": "Where?" })).is_error(404, "no such image");
    let result = server.result(&image, "Where?", 1000);
    assert!(result["new_tokens"].as_u64().unwrap() <= 3, "{result}");
    let mask = format!("/api/images/{image}/answers/{}/mask", result["id"].as_str().unwrap());
    server.send("PUT", &mask, &[], &png(63, 64)).is_error(422, "the mask is 63x64 pixels but its image is 64x64");
    server.send("PUT", &mask, &[], b"garbage").is_error(422, "is not a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM image");
    let pairs = format!("/api/images/{image}/pairs.zip?class=../x");
    server.get(&pairs).is_error(422, "the model does not have this class");
    for _ in 1..32 {
        server.result(&image, "Where?", 1);
    }
    ask(&json!({ "question": "Where?" })).is_error(409, "the image has 32 answers");
}

#[test]
fn a_token_opens_everything_and_nothing_opens_without_it() {
    let server = Server::start(&["--token", TOKEN]);
    let bearer = |token: &str| server.send("GET", "/api/model", &[("Authorization", token)], &[]);
    server.get("/api/model").is_error(401, "a token is needed");
    server.get("/metrics").is_error(401, "a token is needed");
    server.send("POST", "/api/images", &[], b"x").is_error(401, "a token is needed");
    server.get("/api/images/none").is_error(401, "a token is needed");
    for wrong in ["Bearer ", "Bearer correct-horse-batterx", "Basic correct-horse-battery"] {
        bearer(wrong).is_error(401, "the token is wrong");
    }
    assert_eq!(bearer("Bearer x").header("www-authenticate"), "Bearer");
    bearer(&format!("Bearer {TOKEN}")).ok();
    for open in ["/", "/page/main.js", "/api/health", "/api/openapi.json"] {
        server.get(open).ok();
    }
    let server = server.with_token(TOKEN);
    let image = server.upload(&image_file());
    server.result(&image, "Where?", 1);
}

#[test]
fn other_machines_need_a_token() {
    let mut command = prsmed();
    let output = command.args(["serve", "--host", "0.0.0.0", "--port", "0"]).arg(trained()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("error: `--token`: is required with `--host 0.0.0.0`"), "{error}");
    let server = Server::start(&[]);
    let port = server.address.rsplit_once(':').unwrap().1;
    let output = prsmed().args(["serve", "--port", port]).arg(trained()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains(&format!("error: `--port`: cannot listen on 127.0.0.1, port {port}")), "{error}");
}

#[test]
fn other_hosts_and_sites_are_refused() {
    let server = Server::start(&["--allow-host", "lab.example"]);
    let get = |headers: &[(&str, &str)]| server.send("GET", "/api/model", headers, &[]);
    get(&[("Host", "evil.example")]).is_error(403, "the host name `evil.example` is not allowed");
    get(&[("Host", "lab.example:8080")]).ok();
    get(&[("Origin", "http://evil.example")]).is_error(403, "requests from other sites are not allowed");
    get(&[("Origin", "null")]).is_error(403, "requests from other sites");
    get(&[("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "no-cors")]).is_error(403, "other sites");
    get(&[("Origin", &format!("http://{}", server.address))]).ok();
    let none = server.raw(b"GET /api/model HTTP/1.1\r\nConnection: close\r\n\r\n");
    assert!(none.starts_with("HTTP/1.1 403"), "{none}");
}

#[test]
fn bytes_that_are_no_requests_end_only_their_connection() {
    let server = Server::start(&[]);
    for garbage in
        [&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"[..], b"GET\r\n\r\n", b"\0\0\0\0\r\n\r\n", b"A b c d e\r\n\r\n"]
    {
        let answered = server.raw(garbage);
        assert!(answered.is_empty() || answered.starts_with("HTTP/1.1 400"), "{answered}");
    }
    // clients that stop half-way
    let head = b"POST /api/images HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf of it";
    for _ in 0..20 {
        drop(server.connect(head));
    }
    // until the server has noticed that they left
    std::thread::sleep(Duration::from_secs(1));
    let silent: Vec<TcpStream> = (0..16).map(|_| server.connect(head)).collect();
    let begin = Instant::now();
    server.get("/api/health").ok();
    // 16 uploads are on their way, so that another one is refused
    let mut busy = server.send("POST", "/api/images", &[], b"x");
    while busy.status != 429 && begin.elapsed() < Duration::from_secs(10) {
        busy = server.send("POST", "/api/images", &[], b"x");
    }
    busy.is_error(429, "too many files");
    assert_eq!(busy.header("retry-after"), "5");
    for mut stream in silent {
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        assert!(text.starts_with("HTTP/1.1 408"), "{text}");
        assert!(text.contains("no data arrived for 15 s"), "{text}");
    }
    assert!(begin.elapsed() < Duration::from_secs(40), "{:?}", begin.elapsed());
    server.upload(&image_file());
}

#[test]
fn a_full_queue_refuses_and_loses_nothing() {
    let server = Server::start(&["--queue", "1"]);
    let image = server.upload(&image_file());
    let ask = || {
        let body = json!({ "question": "Where?", "max_new_tokens": 60 });
        server.json("POST", &format!("/api/images/{image}/questions"), &body)
    };
    let answered: Vec<_> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..12).map(|_| scope.spawn(ask)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let done =
        answered.iter().filter(|a| a.status == 200 && String::from_utf8_lossy(&a.bytes).contains("event: result"));
    let refused: Vec<_> = answered.iter().filter(|a| a.status == 429).collect();
    assert_eq!(done.count() + refused.len(), 12);
    assert!(!refused.is_empty(), "12 clients, 1 place");
    for refused in refused {
        refused.is_error(429, "the queue is full: 1 questions wait");
        assert!(refused.header("retry-after").parse::<u64>().unwrap() >= 1);
    }
    assert_eq!(server.metric("prsmed_queue_length"), 0.0);
}

/// Begins a long answer, and returns the connection after its first token, with what was read.
fn begin_answer(server: &Server) -> (TcpStream, String) {
    let image = server.upload(&image_file());
    let body = json!({ "question": "Where?", "max_new_tokens": 60_000 }).to_string();
    let head = format!(
        "POST /api/images/{image}/questions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = server.connect(head.as_bytes());
    let mut text = String::new();
    let mut piece = [0; 512];
    while !text.contains("event: token") && !text.contains("event: error") {
        let count = stream.read(&mut piece).expect("an answer");
        assert!(count > 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&piece[..count]));
    }
    assert!(!text.contains("event: result"), "{text}");
    (stream, text)
}

#[test]
#[expect(clippy::print_stdout, reason = "the measured time")]
fn a_client_that_leaves_stops_its_work_within_a_second() {
    let _alone = alone();
    let server = Server::start(&["--max-new-tokens", "60000"]);
    let (stream, _) = begin_answer(&server);
    assert_eq!(server.metric("prsmed_questions_running"), 1.0);
    drop(stream);
    let took = server.wait_for("prsmed_questions_total{outcome=\"left\"}", 1.0, Duration::from_secs(1));
    assert_eq!(server.metric("prsmed_questions_running"), 0.0);
    println!("work of a client that left stopped after {} ms", took.as_millis());
}

#[test]
fn a_question_has_a_time_limit() {
    let server = Server::start(&["--max-new-tokens", "60000", "--time-limit", "0.01"]);
    let (mut stream, mut rest) = begin_answer(&server);
    while !rest.contains("event: error") {
        let mut piece = [0; 512];
        let count = stream.read(&mut piece).unwrap();
        assert!(count > 0, "{rest}");
        rest.push_str(&String::from_utf8_lossy(&piece[..count]));
    }
    assert!(rest.contains("the question took longer than 0 s"), "{rest}");
}

#[test]
fn ctrl_c_ends_the_server_cleanly() {
    let mut server = Server::start(&["--max-new-tokens", "60000"]);
    let (mut stream, _) = begin_answer(&server);
    // an idle connection and a half request do not keep it alive
    let mut half = server.connect(b"GET / HTTP/1.1\r\nHos");
    let begin = Instant::now();
    signal(server.id(), libc::SIGINT);
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    let rest = String::from_utf8_lossy(&rest);
    assert!(rest.contains("event: error") && rest.contains("the server stops"), "{rest}");
    assert_eq!(server.wait(), Some(0));
    assert!(begin.elapsed() < Duration::from_secs(6), "{:?}", begin.elapsed());
    let _ = half.write_all(b"t: a\r\n\r\n");
}
