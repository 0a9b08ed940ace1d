//! The hub client against a server of its own on loopback that speaks the hub's protocol.

#![expect(clippy::unwrap_used, reason = "a test panics where an application would report")]

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use prsmed::error::Error;
use prsmed::event::{Event, Observer, Silent};
use prsmed::hub::{Files, HubOptions, RemoteFile, ls, resolve};
use prsmed::tensor::weights::{Archive, write_safetensors};
use prsmed::tensor::{Device, Kind, Tensor};
use sha2::{Digest, Sha256};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the server hands out one file.
#[derive(Clone, Default)]
struct Stored {
    content: Vec<u8>,
    etag: String,
    /// Redirect to another path of this server, or to its full address as a content network would have.
    redirect: Option<Redirect>,
    /// Close the connection after so many body bytes, once for each entry.
    cuts: Vec<usize>,
    /// Answer every request with the whole file.
    ignores_ranges: bool,
    status: Option<u16>,
}

#[derive(Clone, Copy)]
enum Redirect {
    Relative,
    Absolute,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, Stored>,
    /// Extra names in the listing.
    listed: Vec<String>,
    token: Option<String>,
    forbidden: bool,
    log: Vec<Request>,
}

#[derive(Debug, Clone)]
struct Request {
    method: String,
    path: String,
    headers: HashMap<String, String>,
}

struct Server {
    address: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    fn start(files: Vec<(&str, Stored)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let files = files.into_iter().map(|(name, stored)| (name.to_owned(), stored)).collect();
        let state = Arc::new(Mutex::new(State { files, ..State::default() }));
        let (shared, base) = (state.clone(), address.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (shared, base) = (shared.clone(), base.clone());
                // A client that goes away is no failure of the server.
                std::thread::spawn(move || stream.and_then(|stream| answer(&stream, &shared, &base)));
            }
        });
        Self { address, state }
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap())
    }

    fn options(&self, cache: &Path) -> HubOptions {
        HubOptions { endpoint: self.address.clone(), ..HubOptions::new(cache) }
    }

    /// Requests for the body of a file: `(path, range)`.
    fn downloads(&self) -> Vec<(String, String)> {
        let wanted = |request: &Request| {
            let range = request.headers.get("range").cloned().unwrap_or_default();
            (range != "bytes=0-0" && !request.path.starts_with("/api")).then(|| (request.path.clone(), range))
        };
        self.with(|state| state.log.iter().filter_map(wanted).collect())
    }
}

fn answer(mut stream: &TcpStream, state: &Mutex<State>, base: &str) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next().unwrap_or_default().to_owned(), words.next().unwrap_or_default().to_owned());
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let request = Request { method, path, headers };
    let (head, body, cut) = {
        let mut state = state.lock().unwrap();
        state.log.push(request.clone());
        respond(&request, &mut state, base)
    };
    let length = body.len();
    write!(stream, "HTTP/1.1 {head}Content-Length: {length}\r\nConnection: close\r\n\r\n")?;
    if request.method != "HEAD" {
        stream.write_all(&body[..cut.unwrap_or(length).min(length)])?;
    }
    stream.flush()
}

fn plain(status: &str) -> (String, Vec<u8>, Option<usize>) {
    (format!("{status}\r\n"), Vec::new(), None)
}

/// Status line and headers, body, and where to cut it.
fn respond(request: &Request, state: &mut State, base: &str) -> (String, Vec<u8>, Option<usize>) {
    if let Some(token) = &state.token
        && request.headers.get("authorization") != Some(&format!("Bearer {token}"))
        && !request.path.starts_with("/content/")
    {
        return plain("401 Unauthorized");
    }
    if state.forbidden {
        return plain("403 Forbidden");
    }
    let path = request.path.split('?').next().unwrap_or_default();
    if let Some(revision) = path.strip_prefix("/api/models/owner/name/revision/") {
        return if revision == "main" || revision == COMMIT { info(state) } else { plain("404 Not Found") };
    }
    let direct = path.strip_prefix("/content/");
    let name =
        direct.or_else(|| path.strip_prefix("/owner/name/resolve/").and_then(|rest| Some(rest.split_once('/')?.1)));
    let Some(stored) = name.and_then(|name| state.files.get_mut(name)) else { return plain("404 Not Found") };
    if let Some(status) = stored.status {
        return plain(&format!("{status} Whatever"));
    }
    let (etag, size) = (stored.etag.clone(), stored.content.len());
    if let (Some(redirect), None) = (stored.redirect, direct) {
        let base = if matches!(redirect, Redirect::Absolute) { base } else { "" };
        let name = name.unwrap_or_default();
        let head = format!(
            "302 Found\r\nLocation: {base}/content/{name}\r\nX-Repo-Commit: {COMMIT}\r\nX-Linked-Etag: \"{etag}\"\r\n\
             X-Linked-Size: {size}\r\nETag: \"other\"\r\n"
        );
        return (head, Vec::new(), None);
    }
    let mut head = String::new();
    let common = format!("ETag: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\nAccept-Ranges: bytes\r\n");
    let range = request.headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let range = range.map(|(from, to)| (from.parse::<usize>().unwrap_or(0), to.parse::<usize>().unwrap_or(size - 1)));
    let probe = range == Some((0, 0));
    let body = match range {
        Some((from, to)) if !stored.ignores_ranges || probe => {
            if from >= size {
                return plain("416 Range Not Satisfiable");
            }
            write!(head, "206 Partial Content\r\n{common}Content-Range: bytes {from}-{to}/{size}\r\n").unwrap();
            stored.content[from..=to.min(size - 1)].to_vec()
        }
        _ => {
            write!(head, "200 OK\r\n{common}").unwrap();
            stored.content.clone()
        }
    };
    let cut = if probe || stored.cuts.is_empty() { None } else { Some(stored.cuts.remove(0)) };
    (head, body, cut)
}

fn info(state: &State) -> (String, Vec<u8>, Option<usize>) {
    let stored =
        state.files.iter().map(|(name, file)| format!(r#"{{"rfilename":"{name}","size":{}}}"#, file.content.len()));
    let listed = state.listed.iter().map(|name| format!(r#"{{"rfilename":"{name}"}}"#));
    let siblings: Vec<String> = stored.chain(listed).collect();
    let body = format!(r#"{{"id":"owner/name","sha":"{COMMIT}","siblings":[{}]}}"#, siblings.join(","));
    ("200 OK\r\nContent-Type: application/json\r\n".into(), body.into_bytes(), None)
}

fn small(text: &str) -> Stored {
    let sum = Sha256::digest(text);
    // Small files have a Git hash of 40 digits.
    Stored { content: text.into(), etag: hex(&sum)[..40].to_owned(), ..Stored::default() }
}

fn large(bytes: usize) -> Stored {
    let content: Vec<u8> = (0..bytes).map(|i| u8::try_from(i * 31 % 251).unwrap()).collect();
    Stored { etag: hex(&Sha256::digest(&content)), content, ..Stored::default() }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

const SPEC: &str = "hub:owner/name";

fn failure(result: prsmed::Result<PathBuf>) -> (String, String) {
    let error = result.unwrap_err();
    (error.to_string(), error.hint())
}

#[derive(Default)]
struct Recorder(Mutex<Vec<Event>>);

impl Observer for Recorder {
    fn on(&self, event: &Event) {
        self.0.lock().unwrap().push(event.clone());
    }
}

#[test]
fn files_come_through_every_kind_of_redirect_into_pythons_cache_layout() {
    let weights = Stored { redirect: Some(Redirect::Absolute), ..large(3_000_000) };
    let nested = Stored { redirect: Some(Redirect::Relative), ..small("nested") };
    let server =
        Server::start(vec![("config.json", small("{}")), ("model.safetensors", weights.clone()), ("a/b.json", nested)]);
    let cache = tempfile::tempdir().unwrap();
    let recorder = Recorder::default();
    let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &recorder).unwrap();

    assert_eq!(folder, cache.path().join("models--owner--name/snapshots").join(COMMIT));
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights.content);
    assert_eq!(fs::read_to_string(folder.join("a/b.json")).unwrap(), "nested");
    let link = fs::read_link(folder.join("a/b.json")).unwrap();
    assert!(link.starts_with("../../../blobs"), "{}", link.display());
    assert_eq!(fs::read_to_string(cache.path().join("models--owner--name/refs/main")).unwrap(), COMMIT);
    assert!(cache.path().join("models--owner--name/blobs").join(&weights.etag).is_file());

    let events = recorder.0.into_inner().unwrap();
    let total: u64 = 3_000_000 + 2 + 6;
    assert!(
        matches!(&events[0], Event::Started { phase, total: t, unit: "bytes" } if phase == "download owner/name" && *t == total)
    );
    let done: Vec<u64> =
        events.iter().filter_map(|e| if let Event::Advanced { done } = e { Some(*done) } else { None }).collect();
    assert!(done.len() >= 5 && done.is_sorted() && done.last() == Some(&total), "{done:?}");
    assert!(matches!(events.last(), Some(Event::Finished)));

    // A second time nothing is downloaded.
    let before = server.downloads().len();
    assert_eq!(resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap(), folder);
    assert_eq!(server.downloads().len(), before);
    // Nor offline; nor under the commit's own name.
    let offline = HubOptions { offline: true, endpoint: "http://127.0.0.1:9".into(), ..HubOptions::new(cache.path()) };
    assert_eq!(resolve(SPEC, &Files::Checkpoint, &offline, &Silent).unwrap(), folder);
    let pinned = format!("{SPEC}@{COMMIT}");
    assert_eq!(resolve(&pinned, &Files::Checkpoint, &offline, &Silent).unwrap(), folder);
    assert_eq!(ls(SPEC, &offline).unwrap().len(), 3);
}

#[test]
fn a_cut_connection_is_resumed_where_it_broke() {
    let weights = Stored { cuts: vec![700_000, 0, 800_000], redirect: Some(Redirect::Absolute), ..large(2_000_000) };
    let server = Server::start(vec![("model.safetensors", weights.clone())]);
    let cache = tempfile::tempdir().unwrap();
    let recorder = Recorder::default();
    let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &recorder).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights.content);
    let mut ranges: Vec<String> = server.downloads().into_iter().map(|(_, range)| range).collect();
    ranges.dedup();
    assert_eq!(ranges, ["bytes=0-", "bytes=700000-", "bytes=1500000-"]);
    let notes = recorder.0.into_inner().unwrap();
    let notes = notes.iter().filter(|event| matches!(event, Event::Note(text) if text.contains("resuming"))).count();
    assert_eq!(notes, 3);
}

#[test]
fn a_killed_download_is_continued_by_the_next_run() {
    let weights = large(500_000);
    let server = Server::start(vec![("model.safetensors", weights.clone())]);
    for (held, ranges) in [(200_000, vec!["bytes=200000-"]), (500_000, vec![])] {
        let cache = tempfile::tempdir().unwrap();
        let blobs = cache.path().join("models--owner--name/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(&weights.etag).with_extension("part"), &weights.content[..held]).unwrap();
        server.with(|state| state.log.clear());
        let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap();
        assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights.content);
        let asked: Vec<String> = server.downloads().into_iter().map(|(_, range)| range).collect();
        assert_eq!(asked, ranges, "{held} bytes were there");
    }
}

#[test]
fn a_wrong_part_or_a_server_without_ranges_is_noticed_and_repaired() {
    for ignores_ranges in [false, true] {
        let weights = Stored { ignores_ranges, ..large(500_000) };
        let server = Server::start(vec![("model.safetensors", weights.clone())]);
        let cache = tempfile::tempdir().unwrap();
        let blobs = cache.path().join("models--owner--name/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(&weights.etag).with_extension("part"), vec![7; 1000]).unwrap();
        let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap();
        assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights.content);
    }
}

#[test]
fn content_that_is_not_what_the_hub_promises_is_refused() {
    let weights = Stored { etag: "0".repeat(64), ..large(1000) };
    let server = Server::start(vec![("model.safetensors", weights)]);
    let cache = tempfile::tempdir().unwrap();
    let (text, _) = failure(resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent));
    assert!(text.contains("`model.safetensors` does not have the size or SHA-256"), "{text}");
    assert!(!cache.path().join("models--owner--name/refs/main").exists());
}

#[test]
fn a_connection_that_keeps_breaking_is_given_up_and_continues_later() {
    let weights = Stored { cuts: vec![1000, 0, 0, 0, 0, 0], ..large(5000) };
    let server = Server::start(vec![("model.safetensors", weights.clone())]);
    let cache = tempfile::tempdir().unwrap();
    let error = resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap_err();
    assert!(matches!(error, Error::Hub { .. }) && error.to_string().contains("keeps breaking"), "{error}");
    assert!(error.hint().contains("continues where it stopped"), "{}", error.hint());
    server.with(|state| state.files.get_mut("model.safetensors").unwrap().cuts.clear());
    let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights.content);
    assert_eq!(server.downloads().last().unwrap().1, "bytes=1000-");
}

#[test]
fn a_sharded_repository_becomes_an_archive() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = vec![("config.json", small("{}")), ("README.md", small("not wanted"))];
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let index = format!(r#"{{"weight_map":{{"t0":"{}","t1":"{}"}}}}"#, names[0], names[1]);
    for (i, name) in names.into_iter().enumerate() {
        let tensor = Tensor::full([1000], i64::try_from(i).unwrap(), (Kind::Float, Device::Cpu));
        let path = folder.path().join(name);
        write_safetensors(&path, &[(format!("t{i}"), &tensor)], &BTreeMap::new()).unwrap();
        let content = fs::read(path).unwrap();
        let etag = hex(&Sha256::digest(&content));
        files.push((
            name,
            Stored { content, etag, redirect: Some(Redirect::Absolute), cuts: vec![1500], ..Stored::default() },
        ));
    }
    files.push(("model.safetensors.index.json", small(&index)));
    let server = Server::start(files);
    let cache = tempfile::tempdir().unwrap();
    let local = resolve(SPEC, &Files::Checkpoint, &server.options(cache.path()), &Silent).unwrap();
    assert!(!local.join("README.md").exists());
    let archive = Archive::open(&local).unwrap();
    assert_eq!(archive.names(), ["t0", "t1"]);
    assert_eq!(archive.read("t1").unwrap().int64_value(&[999]), 1);
}

#[test]
fn refusals_say_what_to_do() {
    let server = Server::start(vec![("config.json", small("{}")), ("model.safetensors", large(10))]);
    let cache = tempfile::tempdir().unwrap();
    let options = server.options(cache.path());
    let all = |spec: &str, options: &HubOptions| failure(resolve(spec, &Files::All, options, &Silent));

    let (text, hint) = all("hub:owner/other", &options);
    assert!(text.contains("`hub:owner/other`: the repository does not exist") && text.contains("404"), "{text}");
    assert!(hint.contains("check the spelling"), "{hint}");
    let (text, _) = all("hub:owner/name@v9", &options);
    assert!(text.contains("`hub:owner/name@v9`") && text.contains("revision `v9`"), "{text}");

    let (text, hint) = failure(resolve(SPEC, &Files::Matching(&["absent.bin"]), &options, &Silent));
    assert!(text.contains("holds no `absent.bin`") && text.contains("`config.json`"), "{text} {hint}");

    server.with(|state| state.files.get_mut("model.safetensors").unwrap().status = Some(404));
    let (text, _) = all(SPEC, &options);
    assert!(text.contains("`model.safetensors` does not exist"), "{text}");

    server.with(|state| state.token = Some("right".into()));
    let (text, hint) = all(SPEC, &options);
    assert!(text.contains("private, gated or does not exist (HTTP 401)") && hint.contains("HF_TOKEN"), "{text} {hint}");
    let wrong = HubOptions { token: Some("wrong".into()), ..options.clone() };
    let (text, hint) = all(SPEC, &wrong);
    assert!(text.contains("token was refused") && !text.contains("wrong") && hint.contains("expired"), "{text} {hint}");
    server.with(|state| state.forbidden = true);
    let right = HubOptions { token: Some("right".into()), ..options.clone() };
    let (text, hint) = all(SPEC, &right);
    assert!(text.contains("HTTP 403") && hint.contains("accept the terms"), "{text} {hint}");

    server.with(|state| {
        state.forbidden = false;
        state.files.get_mut("model.safetensors").unwrap().status = None;
    });
    assert!(resolve(SPEC, &Files::All, &right, &Silent).is_ok());
    assert!(resolve("hub:../x", &Files::All, &options, &Silent).unwrap_err().to_string().contains("no repository"));
    assert!(resolve("/no/such/folder", &Files::All, &options, &Silent).unwrap_err().hint().contains("hub:owner/name"));
    assert_eq!(resolve(cache.path().to_str().unwrap(), &Files::All, &options, &Silent).unwrap(), cache.path());
}

#[test]
fn names_that_leave_the_cache_are_refused_before_any_download() {
    let server = Server::start(vec![("config.json", small("{}"))]);
    let cache = tempfile::tempdir().unwrap();
    for evil in ["../../evil", "/etc/evil", "a/../../../evil"] {
        server.with(|state| state.listed = vec![evil.into()]);
        let (text, _) = failure(resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent));
        assert!(text.contains(&format!("names the file `{evil}`")), "{text}");
    }
    assert!(server.downloads().is_empty());
    server.with(|state| {
        state.listed.clear();
        state.files.get_mut("config.json").unwrap().etag = "../../../evil".into();
    });
    let (text, _) = failure(resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent));
    assert!(text.contains("cannot name a file"), "{text}");
    assert!(server.downloads().is_empty());
}

#[test]
fn without_a_connection_the_cache_serves_or_the_error_says_how_to_fill_it() {
    let cache = tempfile::tempdir().unwrap();
    let dead = HubOptions { endpoint: "http://127.0.0.1:9".into(), ..HubOptions::new(cache.path()) };
    let offline = HubOptions { offline: true, ..dead.clone() };
    let (text, hint) = failure(resolve(SPEC, &Files::All, &offline, &Silent));
    assert!(text.contains("is not in the cache") && hint.contains("prsmed hub get"), "{text} {hint}");
    let (text, hint) = failure(resolve(SPEC, &Files::All, &dead, &Silent));
    assert!(text.contains("cannot be reached") && hint.contains("network"), "{text} {hint}");

    let server = Server::start(vec![("config.json", small("{}")), ("model.safetensors", large(10))]);
    resolve(SPEC, &Files::Matching(&["config.json"]), &server.options(cache.path()), &Silent).unwrap();
    let (text, _) = failure(resolve(SPEC, &Files::Checkpoint, &offline, &Silent));
    assert!(text.contains("holds only a part"), "{text}");
    let recorder = Recorder::default();
    resolve(SPEC, &Files::Matching(&["config.json"]), &dead, &recorder).unwrap();
    let events = recorder.0.into_inner().unwrap();
    assert!(matches!(&events[..], [Event::Warning(text)] if text.contains("cached files are used")), "{events:?}");
}

#[test]
fn ls_lists_names_and_sizes() {
    let server = Server::start(vec![("model.safetensors", large(10)), ("config.json", small("{}"))]);
    let cache = tempfile::tempdir().unwrap();
    let file = |name: &str, size| RemoteFile { name: name.into(), size: Some(size) };
    let expected = [file("config.json", 2), file("model.safetensors", 10)];
    assert_eq!(ls(SPEC, &server.options(cache.path())).unwrap(), expected);
    let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap();
    assert_eq!(ls(folder.to_str().unwrap(), &server.options(cache.path())).unwrap(), expected);
}

#[test]
fn python_reads_the_cache_offline() {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python");
    let skip = |why: &str| {
        let mut stderr = std::io::stderr();
        writeln!(stderr, "skipped: {why}").unwrap();
    };
    if !python.exists() {
        return skip(".venv is absent");
    }
    let weights = Stored { redirect: Some(Redirect::Absolute), ..large(1000) };
    let server = Server::start(vec![("a/config.json", small("{}")), ("model.safetensors", weights)]);
    let cache = tempfile::tempdir().unwrap();
    let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap();
    let code = "import sys\nfrom huggingface_hub import hf_hub_download, snapshot_download, scan_cache_dir\nc = sys.argv[1]\n\
                print(snapshot_download('owner/name', cache_dir=c, local_files_only=True))\n\
                print(hf_hub_download('owner/name', 'a/config.json', cache_dir=c, local_files_only=True))\n\
                info = scan_cache_dir(c)\nprint(len(info.warnings), info.size_on_disk)";
    let output = std::process::Command::new(python)
        .args(["-c", code])
        .arg(cache.path())
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    if error.contains("ModuleNotFoundError") {
        return skip("huggingface_hub is not installed in .venv");
    }
    assert!(output.status.success(), "{error}");
    let folder = folder.display();
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{folder}\n{folder}/a/config.json\n0 1002\n"));
}

/// The server itself: `HEAD` has the headers of `GET` and no body, as Python's client asks.
#[test]
fn the_test_server_answers_head() {
    let server = Server::start(vec![("config.json", small("{}"))]);
    let mut stream = TcpStream::connect(server.address.trim_start_matches("http://")).unwrap();
    write!(stream, "HEAD /owner/name/resolve/main/config.json HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\nETag: ") && text.ends_with("\r\n\r\n"), "{text}");
    assert!(text.contains(&format!("X-Repo-Commit: {COMMIT}")), "{text}");
}
