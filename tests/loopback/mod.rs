//! A hub server on loopback that speaks the protocol of the Hugging Face hub: listings, ranges, redirects, tokens.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use prsmed::hub::HubOptions;
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The commit of every repository at first.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the server hands out one file.
#[derive(Clone, Default)]
pub(crate) struct Stored {
    pub(crate) content: Vec<u8>,
    pub(crate) etag: String,
    /// Another size for the listing.
    pub(crate) listed_bytes: Option<u64>,
    /// Redirect to another path of this server, or to its full address as a content network would have.
    pub(crate) redirect: Option<Redirect>,
    /// Close the connection after so many body bytes, once for each entry.
    pub(crate) cuts: Vec<usize>,
    /// Answer every request with the whole file.
    pub(crate) ignores_ranges: bool,
    pub(crate) status: Option<u16>,
    /// Keep a connection that is cut open and send nothing more.
    pub(crate) stalls: bool,
}

#[derive(Clone)]
pub(crate) enum Redirect {
    Relative,
    Absolute,
    /// To a server at another address.
    Other(String),
    /// To the same path, for ever.
    Itself,
}

pub(crate) struct State {
    pub(crate) commit: String,
    /// Read requests and never answer.
    pub(crate) silent: bool,
    /// By `owner/name/FILE`.
    files: BTreeMap<String, Stored>,
    /// Extra names in every listing.
    pub(crate) listed: Vec<String>,
    pub(crate) token: Option<String>,
    pub(crate) forbidden: bool,
    /// Requests to answer with HTTP 429.
    pub(crate) busy: u32,
    pub(crate) log: Vec<Request>,
}

impl State {
    /// A file of `owner/name`.
    pub(crate) fn file(&mut self, name: &str) -> &mut Stored {
        self.files.get_mut(&format!("owner/name/{name}")).unwrap()
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: HashMap<String, String>,
}

pub(crate) struct Server {
    pub(crate) address: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    /// Serves the files of `owner/name`.
    pub(crate) fn start(files: Vec<(&str, Stored)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let files = files.into_iter().map(|(name, stored)| (format!("owner/name/{name}"), stored)).collect();
        let state = State {
            commit: COMMIT.into(),
            silent: false,
            files,
            listed: Vec::new(),
            token: None,
            forbidden: false,
            busy: 0,
            log: Vec::new(),
        };
        let state = Arc::new(Mutex::new(state));
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

    /// Adds a file of any repository.
    pub(crate) fn add(&self, repo: &str, name: &str, stored: Stored) {
        self.with(|state| state.files.insert(format!("{repo}/{name}"), stored));
    }

    pub(crate) fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap())
    }

    pub(crate) fn options(&self, cache: &Path) -> HubOptions {
        HubOptions { endpoint: self.address.clone(), ..HubOptions::new(cache) }
    }

    /// Requests for the body of a file: `(path, range)`.
    pub(crate) fn downloads(&self) -> Vec<(String, String)> {
        let wanted = |request: &Request| {
            let range = request.headers.get("range").cloned().unwrap_or_default();
            (request.method == "GET" && !request.path.starts_with("/api")).then(|| (request.path.clone(), range))
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
    let (Answer { head, body, cut, stalls }, silent) = {
        let mut state = state.lock().unwrap();
        state.log.push(request.clone());
        (respond(&request, &mut state, base), state.silent)
    };
    if silent {
        stay_silent();
    }
    let length = body.len();
    write!(stream, "HTTP/1.1 {head}Content-Length: {length}\r\nConnection: close\r\n\r\n")?;
    if request.method != "HEAD" {
        stream.write_all(&body[..cut.unwrap_or(length).min(length)])?;
    }
    stream.flush()?;
    if stalls {
        stay_silent();
    }
    Ok(())
}

/// Keeps the connection of this thread open until the test ends.
fn stay_silent() {
    loop {
        std::thread::park();
    }
}

struct Answer {
    /// Status line and headers.
    head: String,
    body: Vec<u8>,
    /// Bytes of the body that are sent, if not all.
    cut: Option<usize>,
    stalls: bool,
}

fn whole(head: String, body: Vec<u8>) -> Answer {
    Answer { head, body, cut: None, stalls: false }
}

fn plain(status: &str) -> Answer {
    whole(format!("{status}\r\n"), Vec::new())
}

#[expect(clippy::too_many_lines, reason = "the answers of a server")]
fn respond(request: &Request, state: &mut State, base: &str) -> Answer {
    if let Some(token) = &state.token
        && request.headers.get("authorization") != Some(&format!("Bearer {token}"))
        && !request.path.starts_with("/content/")
    {
        return plain("401 Unauthorized");
    }
    if state.busy > 0 {
        state.busy -= 1;
        return whole("429 Too Many Requests\r\nRetry-After: 0\r\n".into(), Vec::new());
    }
    if state.forbidden {
        return plain("403 Forbidden");
    }
    let path = request.path.split('?').next().unwrap_or_default();
    // data sets have names of their own: `datasets/owner/name`
    let repo = path.strip_prefix("/api/").map(|path| path.strip_prefix("models/").unwrap_or(path));
    if let Some((repo, revision)) = repo.and_then(|rest| rest.split_once("/revision/")) {
        let known = revision == "main" || revision == state.commit;
        return if known { info(repo, state) } else { plain("404 Not Found") };
    }
    let direct = path.strip_prefix("/content/").map(str::to_owned);
    let resolved = || {
        let (repo, rest) = path.strip_prefix('/')?.split_once("/resolve/")?;
        Some(format!("{repo}/{}", rest.split_once('/')?.1))
    };
    let name = direct.clone().or_else(resolved).unwrap_or_default();
    let commit = state.commit.clone();
    let Some(stored) = state.files.get_mut(&name) else { return plain("404 Not Found") };
    if let Some(status) = stored.status {
        return plain(&format!("{status} Whatever"));
    }
    let (etag, size) = (stored.etag.clone(), stored.content.len());
    if let (Some(redirect), None) = (&stored.redirect, &direct) {
        let location = match redirect {
            Redirect::Relative => format!("/content/{name}"),
            Redirect::Absolute => format!("{base}/content/{name}"),
            Redirect::Other(address) => format!("{address}/content/{name}"),
            Redirect::Itself => request.path.clone(),
        };
        let head = format!(
            "302 Found\r\nLocation: {location}\r\nX-Repo-Commit: {commit}\r\nX-Linked-Etag: \"{etag}\"\r\n\
             X-Linked-Size: {size}\r\nETag: \"other\"\r\n"
        );
        return whole(head, Vec::new());
    }
    let mut head = String::new();
    let common = format!("ETag: \"{etag}\"\r\nX-Repo-Commit: {commit}\r\nAccept-Ranges: bytes\r\n");
    let range = request.headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let range = range.map(|(from, to)| (from.parse::<usize>().unwrap_or(0), to.parse::<usize>().unwrap_or(size - 1)));
    let body = match range {
        Some((from, to)) if !stored.ignores_ranges => {
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
    let is_cut = request.method != "HEAD" && !stored.cuts.is_empty();
    let cut = is_cut.then(|| stored.cuts.remove(0));
    Answer { head, body, cut, stalls: is_cut && stored.stalls }
}

fn info(repo: &str, state: &State) -> Answer {
    let below = format!("{repo}/");
    let stored = state.files.iter().filter_map(|(path, file)| {
        let name = path.strip_prefix(&below)?;
        let size = file.listed_bytes.unwrap_or(file.content.len() as u64);
        Some(format!(r#"{{"rfilename":"{name}","size":{size}}}"#))
    });
    let listed = state.listed.iter().map(|name| format!(r#"{{"rfilename":"{name}"}}"#));
    let siblings: Vec<String> = stored.chain(listed).collect();
    if siblings.is_empty() {
        return plain("404 Not Found");
    }
    let body = format!(r#"{{"id":"{repo}","sha":"{}","siblings":[{}]}}"#, state.commit, siblings.join(","));
    whole("200 OK\r\nContent-Type: application/json\r\n".into(), body.into_bytes())
}

impl Stored {
    /// A file with the ETag of large ones, its SHA-256.
    pub(crate) fn of(content: Vec<u8>) -> Self {
        Self { etag: hex(&Sha256::digest(&content)), content, ..Self::default() }
    }
}

/// A small file, whose ETag is its Git hash.
pub(crate) fn small(text: &str) -> Stored {
    let sum = Sha1::digest(format!("blob {}\0{text}", text.len()));
    Stored { content: text.into(), etag: hex(&sum), ..Stored::default() }
}

/// A file of so many bytes.
pub(crate) fn large(bytes: usize) -> Stored {
    let content: Vec<u8> = (0..bytes).map(|i| u8::try_from(i * 31 % 251).unwrap()).collect();
    Stored::of(content)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}
