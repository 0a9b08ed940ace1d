//! `prsmed train --mlflow` and `prsmed augment finetune --mlflow`, against a small server on loopback that behaves as
//! MLflow's REST interface is documented.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::support::{done, error_text, path, phantoms, prsmed, run, train, tree};

/// What a server was told.
#[derive(Default)]
pub(crate) struct State {
    /// All requests, head and body.
    pub(crate) received: Vec<u8>,
    /// Experiments by name.
    experiments: BTreeMap<String, String>,
    /// Status of each run by id.
    runs: BTreeMap<String, String>,
    /// `run, key, step, value` of each metric.
    metrics: Vec<(String, String, u64, f64)>,
    params: BTreeMap<String, String>,
    artifacts: BTreeMap<String, Vec<u8>>,
    /// Requests without this header are refused.
    authorization: Option<String>,
    /// How many requests with metrics fail before one is taken.
    failures: usize,
    /// Requests of this method are redirected: status and address.
    redirect: Option<(&'static str, u16, String)>,
    /// No request is answered once metrics were sent.
    hangs: bool,
}

pub(crate) struct Server {
    pub(crate) address: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    pub(crate) fn start(state: State) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(state));
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let shared = Arc::clone(&shared);
                // a client that goes away is no failure of the server
                std::thread::spawn(move || stream.and_then(|stream| answer(&stream, &shared)));
            }
        });
        Self { address, state }
    }

    pub(crate) fn with<T>(&self, read: impl FnOnce(&mut State) -> T) -> T {
        read(&mut self.state.lock().unwrap())
    }
}

fn answer(mut stream: &TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        if line.trim().is_empty() {
            break;
        }
        head.push(line.trim().to_owned());
    }
    let header = |name: &str| {
        head.iter().filter_map(|line| line.split_once(": ")).find(|(key, _)| key.eq_ignore_ascii_case(name))
    };
    let length = header("content-length").map_or(0, |(_, value)| value.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let mut words = head[0].split_whitespace().map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut state = state.lock().unwrap();
    state.received.extend(head.join("\n").into_bytes());
    state.received.extend(&body);
    if state.hangs && String::from_utf8_lossy(&state.received).contains("loss/total") {
        drop(state);
        loop {
            std::thread::park();
        }
    }
    if let Some((_, status, to)) = state.redirect.as_ref().filter(|(redirected, ..)| *redirected == method) {
        let end = "Content-Length: 0\r\nConnection: close\r\n\r\n";
        return write!(stream, "HTTP/1.1 {status} x\r\nLocation: {to}{path}\r\n{end}");
    }
    let allowed = state.authorization.is_none()
        || header("authorization").map(|(_, value)| value) == state.authorization.as_deref();
    let (status, reply) =
        if allowed { respond(&mut state, &method, &path, body) } else { refusal(401, "UNAUTHENTICATED") };
    let reply = reply.to_string();
    write!(stream, "HTTP/1.1 {status} x\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{reply}", reply.len())
}

fn refusal(status: u16, code: &str) -> (u16, Value) {
    (status, json!({ "error_code": code, "message": "refused by the test" }))
}

fn respond(state: &mut State, method: &str, path: &str, body: Vec<u8>) -> (u16, Value) {
    if let Some(name) = path.strip_prefix("/api/2.0/mlflow-artifacts/artifacts/") {
        state.artifacts.insert(name.to_owned(), body);
        return (200, json!({}));
    }
    let request: Value = serde_json::from_slice(&body).unwrap_or_default();
    let text = |key: &str| request[key].as_str().unwrap_or_default().to_owned();
    let run = |id: &str| {
        let info = json!({ "run_id": id, "artifact_uri": format!("mlflow-artifacts:/1/{id}/artifacts") });
        (200, json!({ "run": { "info": info } }))
    };
    let route = path.strip_prefix("/api/2.0/mlflow/").unwrap_or_default();
    match (method, route.split('?').next().unwrap_or_default()) {
        ("GET", "experiments/get-by-name") => {
            let name = route.split_once('=').unwrap().1;
            match state.experiments.get(name) {
                Some(id) => (200, json!({ "experiment": { "experiment_id": id } })),
                None => refusal(404, "RESOURCE_DOES_NOT_EXIST"),
            }
        }
        ("POST", "experiments/create") => {
            state.experiments.insert(text("name"), "7".into());
            (200, json!({ "experiment_id": "7" }))
        }
        ("POST", "runs/create") => {
            assert_eq!(text("experiment_id"), "7");
            let id = format!("r{}", state.runs.len());
            state.runs.insert(id.clone(), "RUNNING".into());
            run(&id)
        }
        ("GET", "runs/get") => {
            let id = route.split_once('=').unwrap().1;
            if state.runs.contains_key(id) { run(id) } else { refusal(404, "RESOURCE_DOES_NOT_EXIST") }
        }
        ("POST", "runs/update") => {
            state.runs.insert(text("run_id"), text("status"));
            (200, json!({}))
        }
        ("POST", "runs/log-batch") => {
            let list = |key: &str| request[key].as_array().cloned().unwrap_or_default();
            assert!(list("metrics").len() <= 1000 && list("params").len() <= 100);
            if !list("metrics").is_empty() && state.failures > 0 {
                state.failures -= 1;
                return refusal(503, "TEMPORARILY_UNAVAILABLE");
            }
            for metric in list("metrics") {
                let key = metric["key"].as_str().unwrap().to_owned();
                let (step, value) = (metric["step"].as_u64().unwrap(), metric["value"].as_f64().unwrap());
                state.metrics.push((text("run_id"), key, step, value));
            }
            for param in list("params") {
                let part = |key: &str| param[key].as_str().unwrap().to_owned();
                state.params.insert(part("key"), part("value"));
            }
            (200, json!({}))
        }
        _ => refusal(404, "ENDPOINT_NOT_FOUND"),
    }
}

fn losses(state: &State) -> Vec<(u64, f64)> {
    let of = |(_, key, step, value): &(String, String, u64, f64)| (key == "loss/total").then_some((*step, *value));
    state.metrics.iter().filter_map(of).collect()
}

#[test]
fn a_training_is_recorded_and_its_continuation_joins_the_same_run() {
    let server = Server::start(State { failures: 1, ..State::default() });
    let out = path("mlflow-run");
    let mut first = train(phantoms(), &out, &["train.max_steps=3"]);
    let ran = run(first.args(["--mlflow", &server.address, "--mlflow-experiment", "lungs"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("is recorded on http://127.0.0.1:"), "{}", ran.stderr);
    let recorded = server.with(|state| {
        assert_eq!(state.experiments.get("lungs").map(String::as_str), Some("7"));
        assert_eq!(state.runs.get("r0").map(String::as_str), Some("FINISHED"));
        assert_eq!(state.params.get("train.max_steps").map(String::as_str), Some("3"));
        assert!(state.metrics.iter().any(|(_, key, ..)| key == "val/dice"), "{:?}", state.metrics);
        let config = &state.artifacts["1/r0/artifacts/config.toml"];
        assert!(String::from_utf8_lossy(config).contains("max_steps = 3"));
        assert!(state.artifacts["1/r0/artifacts/report.html"].starts_with(b"<!"));
        losses(state)
    });
    // the same values as in the run folder, although the first request failed
    let lines = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let steps = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let written: Vec<(u64, f64)> = steps
        .filter(|line| line["kind"] == "step")
        .map(|line| (line["step"].as_u64().unwrap(), line["losses"]["total"].as_f64().unwrap()))
        .collect();
    assert_eq!(recorded, written);

    let mut again = prsmed();
    again.args(["train", "--set", "train.max_steps=4", "--mlflow", &server.address, "--data-root"]).arg(phantoms());
    done(again.arg("--out").arg(&out).arg("--resume"));
    server.with(|state| {
        assert_eq!(state.runs.len(), 1);
        assert_eq!(losses(state).iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3, 4]);
    });
}

#[test]
fn a_training_that_fails_is_marked_and_a_server_that_dies_does_not_stop_one() {
    let server = Server::start(State::default());
    let mut diverges =
        train(phantoms(), &path("mlflow-diverges"), &["train.learning_rate=1e30", "train.warmup_frac=0.0"]);
    let ran = run(diverges.args(["--set", "train.max_skipped_steps=0", "--mlflow", &server.address]));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert_eq!(server.with(|state| state.runs.get("r0").cloned()).as_deref(), Some("FAILED"));

    let server = Server::start(State { failures: usize::MAX, ..State::default() });
    let mut goes_on = train(phantoms(), &path("mlflow-goes-on"), &["train.max_steps=2"]);
    let ran = run(goes_on.args(["--mlflow", &server.address]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("values were not recorded there; `metrics.jsonl` has them all"), "{}", ran.stderr);
}

#[test]
fn a_server_that_refuses_or_does_not_answer_stops_the_start() {
    let server = Server::start(State { authorization: Some("Bearer right".into()), ..State::default() });
    let start = |url: &str, token: &str| {
        let out = path("mlflow-refused");
        let mut command = train(phantoms(), &out, &["train.max_steps=1"]);
        let ran = run(command.args(["--mlflow", url]).env("MLFLOW_TRACKING_TOKEN", token));
        assert!(!out.exists() || ran.code == Some(0), "nothing was written");
        ran
    };
    let error = error_text(&start(&server.address, "wrong"));
    assert!(error.contains("HTTP 401 UNAUTHENTICATED") && error.contains("MLFLOW_TRACKING_TOKEN"), "{error}");
    assert!(!error.contains("wrong"), "{error}");
    assert_eq!(start(&server.address, "right").code, Some(0));
    let error =
        error_text(&run(train(phantoms(), &path("mlflow-nobody"), &[]).args(["--mlflow", "http://127.0.0.1:9"])));
    assert!(error.contains("`http://127.0.0.1:9`") && error.contains("leave out `--mlflow`"), "{error}");
    let error = error_text(&run(train(phantoms(), &path("mlflow-password"), &[]).args(["--mlflow", "http://u:p@a"])));
    assert!(error.contains("MLFLOW_TRACKING_PASSWORD") && !error.contains("u:p"), "{error}");
}

#[test]
fn a_fine_tuning_is_recorded_as_a_training_is() {
    let server = Server::start(State::default());
    let out = path("mlflow-finetuned");
    let finetune = |steps: &str, more: &[&str]| {
        let mut command = prsmed();
        command.args(["augment", "finetune", "--preset", "tiny", "--set", "finetune.image_size=64", "--data-root"]);
        command.arg(phantoms()).arg("--out").arg(&out).args(["--mlflow", &server.address, "--set", steps]).args(more);
        command
    };
    done(&mut finetune("train.max_steps=2", &[]));
    server.with(|state| {
        assert_eq!(state.runs.get("r0").map(String::as_str), Some("FINISHED"));
        assert_eq!(state.params.get("train.max_steps").map(String::as_str), Some("2"));
        assert!(state.params.contains_key("finetune.rank"), "{:?}", state.params);
        let config = &state.artifacts["1/r0/artifacts/config.toml"];
        assert!(String::from_utf8_lossy(config).contains("[finetune]"));
    });
    // refused settings leave no record
    let ran = run(&mut finetune("train.max_steps=3", &["--resume", "--set", "finetune.rank=3"]));
    assert!(ran.code == Some(2) && error_text(&ran).contains("finetune.rank"), "{}", ran.stderr);
    assert_eq!(server.with(|state| state.runs.get("r0").cloned()).as_deref(), Some("FINISHED"));
    done(&mut finetune("train.max_steps=3", &["--resume"]));
    let lines = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let steps = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let written: Vec<(u64, f64)> = steps
        .filter(|line| line["kind"] == "step")
        .map(|line| (line["step"].as_u64().unwrap(), line["losses"]["total"].as_f64().unwrap()))
        .collect();
    server.with(|state| {
        assert_eq!(state.runs.len(), 1);
        assert_eq!(losses(state), written);
        assert_eq!(written.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3]);
    });
}

#[test]
fn a_server_that_redirects_is_refused_and_the_other_one_gets_nothing() {
    let other = Server::start(State::default());
    for (method, status) in [("GET", 301), ("GET", 307), ("POST", 302), ("POST", 308)] {
        let redirect = Some((method, status, other.address.clone()));
        let server = Server::start(State { redirect, ..State::default() });
        let mut command = train(phantoms(), &path("mlflow-redirected"), &["train.max_steps=1"]);
        command.env("MLFLOW_TRACKING_USERNAME", "bob").env("MLFLOW_TRACKING_PASSWORD", "hunter2secret");
        let error = error_text(&run(command.args(["--mlflow", &server.address])));
        assert!(error.contains(&format!("HTTP {status} the server redirects: give the address")), "{error}");
    }
    assert!(other.with(|state| state.received.is_empty()));
}

/// Answers each request with these bytes; its address.
fn always(answer: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (mut reader, mut line) = (BufReader::new(&stream), String::new());
            while reader.read_line(&mut line).is_ok_and(|length| length > 2) {
                line.clear();
            }
            // a client that goes away is no failure of the server
            let _ = (&stream).write_all(answer.as_bytes());
        }
    });
    address
}

#[test]
fn a_server_that_fails_stops_the_start_and_credentials_that_it_repeats_are_hidden() {
    let reply = |status: u16, body: &str| {
        format!("HTTP/1.1 {status} x\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
    };
    let repeats = json!({ "error_code": "NO", "message": "hunter2secret is not Basic Ym9iOmh1bnRlcjJzZWNyZXQ=" });
    let state = "The experiment 7 must be in the 'active' state. Current state is deleted.";
    let deleted = json!({ "error_code": "INVALID_PARAMETER_VALUE", "message": state });
    for (answer, expected) in [
        (reply(500, "boom"), "`: HTTP 500\nhint: start the server"),
        (reply(400, &deleted.to_string()), "Current state is deleted.\nhint: restore it"),
        (reply(400, &deleted.to_string()), "`--mlflow-experiment`"),
        (reply(404, "{}"), "hint: check the address"),
        (reply(400, "{}"), "the server's own words"),
        (reply(200, "boom"), "is this an MLflow server?"),
        (reply(200, "{}").replace("Content-Length: 2", "Content-Length: 9"), "--mlflow"),
        ("not HTTP\r\n\r\n".to_owned(), "--mlflow"),
        (reply(401, &repeats.to_string()), "HTTP 401 NO ... is not Basic ..."),
    ] {
        let address = always(answer.clone());
        let mut command = train(phantoms(), &path("mlflow-fails"), &["train.max_steps=1"]);
        command.env("MLFLOW_TRACKING_USERNAME", "bob").env("MLFLOW_TRACKING_PASSWORD", "hunter2secret");
        let error = error_text(&run(command.args(["--mlflow", &address])));
        assert!(error.contains(expected), "{answer}: {error}");
        assert!(!error.contains("hunter2secret") && !error.contains("Ym9iOmh1bnRlcjJzZWNyZXQ="), "{error}");
    }
}

#[test]
fn an_address_with_a_password_is_refused_and_not_repeated() {
    for address in [
        "http://bob:hunter2secret@127.0.0.1:9",
        "bob:hunter2secret@127.0.0.1:9",
        "http://bob:hunter2secret%40127.0.0.1:9",
        "http://127.0.0.1:9/?password=hunter2secret",
        "http://127.0.0.1:9/#hunter2secret",
    ] {
        for mode in ["--quiet", "--json"] {
            let out = path("mlflow-password");
            let mut command = train(phantoms(), &out, &[]);
            let ran = run(command.args(["--mlflow", address, mode]));
            assert_eq!(ran.code, Some(2), "{address}");
            assert!(!ran.stdout.contains("hunter2secret") && !ran.stderr.contains("hunter2secret"), "{}", ran.stderr);
            assert!(error_text(&ran).contains("MLFLOW_TRACKING_PASSWORD") && !out.exists(), "{}", ran.stderr);
        }
    }
}

#[test]
fn credentials_are_in_no_file_and_no_output_of_a_recorded_training() {
    let authorization = Some("Basic Ym9iOmh1bnRlcjJzZWNyZXQ=".into());
    let server = Server::start(State { authorization, failures: 1, ..State::default() });
    let out = path("mlflow-credentials");
    let mut command = train(phantoms(), &out, &["train.max_steps=2"]);
    command.env("MLFLOW_TRACKING_USERNAME", "bob").env("MLFLOW_TRACKING_PASSWORD", "hunter2secret");
    let ran = run(command.env("RUST_LOG", "trace").args(["--json", "--mlflow", &server.address]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let mut texts = tree(&out);
    assert!(texts.contains_key("mlflow.json"), "{:?}", texts.keys());
    texts.extend([("output".to_owned(), ran.stdout.into_bytes()), ("errors".to_owned(), ran.stderr.into_bytes())]);
    server.with(|state| {
        texts.extend(state.artifacts.iter().map(|(name, bytes)| (name.clone(), bytes.clone())));
        texts.extend(state.params.iter().map(|(name, value)| (name.clone(), value.clone().into_bytes())));
    });
    for (name, bytes) in texts {
        for secret in ["hunter2secret", "Ym9iOmh1bnRlcjJzZWNyZXQ="] {
            assert!(!bytes.windows(secret.len()).any(|part| part == secret.as_bytes()), "{name}");
        }
    }
}

#[test]
#[ignore = "takes minutes: scripts/soak"]
fn soak_a_server_that_stops_to_answer_delays_the_start_and_the_end_by_a_minute_at_most() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", silent.local_addr().unwrap());
    let error = error_text(&run(train(phantoms(), &path("mlflow-silent"), &[]).args(["--mlflow", &address])));
    assert!(error.contains("no answer within 30s"), "{error}");

    let server = Server::start(State { hangs: true, ..State::default() });
    let start = std::time::Instant::now();
    let mut command = train(phantoms(), &path("mlflow-hangs"), &["train.max_steps=2"]);
    let ran = run(command.args(["--mlflow", &server.address]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("MLflow: the run is not marked as FINISHED: no answer within 30s"), "{}", ran.stderr);
    assert!(ran.stderr.contains("values were not recorded there"), "{}", ran.stderr);
    assert!(start.elapsed().as_secs() < 90, "{:?}", start.elapsed());
}
