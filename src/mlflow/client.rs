//! Requests to MLflow's REST interface, version 2.0 (<https://mlflow.org/docs/latest/rest-api.html>).

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use ureq::Agent;

use super::options::{Credentials, MlflowOptions};
use crate::error::{Error, Result};

/// How long a connection is awaited.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a complete answer is awaited.
const ANSWER: Duration = Duration::from_secs(30);
/// Limit of an answer, in bytes.
const MAX_ANSWER: u64 = 4 << 20;
/// Scheme of artifacts that the tracking server itself stores.
const STORED_BY_SERVER: &str = "mlflow-artifacts:/";

/// Failure of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// No answer: another attempt may succeed.
    Connection(String),
    /// The server refused: HTTP status, and MLflow's error code and message.
    Refused(u16, String),
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Connection(reason) => write!(f, "{reason}"),
            Self::Refused(status, reason) if reason.is_empty() => write!(f, "HTTP {status}"),
            Self::Refused(status, reason) => write!(f, "HTTP {status} {reason}"),
        }
    }
}

impl Fault {
    /// True if the same request may succeed later.
    pub(super) fn may_pass(&self) -> bool {
        match self {
            Self::Connection(_) => true,
            Self::Refused(status, _) => *status == 429 || *status >= 500,
        }
    }
}

type Answer<T> = std::result::Result<T, Fault>;

/// A run on the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemoteRun {
    pub(super) id: String,
    artifacts: String,
}

/// Client of one tracking server.
#[derive(Debug)]
pub(super) struct Client {
    agent: Agent,
    base: String,
    credentials: Option<Credentials>,
}

impl Client {
    pub(super) fn new(options: &MlflowOptions) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // a request with metrics would lose them, and another host is not to get them
            .max_redirects(0)
            .user_agent(concat!("prsmed/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT))
            .timeout_global(Some(ANSWER));
        Self {
            agent: config.build().into(),
            base: options.url.trim_end_matches('/').to_owned(),
            credentials: options.credentials.clone(),
        }
    }

    /// The id of an experiment, which is created if it does not exist.
    pub(super) fn experiment(&self, name: &str) -> Answer<String> {
        let encoded = encode(name);
        let id = |answer: &Value| text_at(answer, &["experiment", "experiment_id"]);
        match self.get(&format!("experiments/get-by-name?experiment_name={encoded}")) {
            Ok(answer) => id(&answer),
            Err(Fault::Refused(404, _)) => {
                text_at(&self.post("experiments/create", &json!({ "name": name }))?, &["experiment_id"])
            }
            Err(fault) => Err(fault),
        }
    }

    /// Creates a run that starts `now` (milliseconds since 1970).
    pub(super) fn create_run(&self, experiment: &str, name: &str, now: u128) -> Answer<RemoteRun> {
        let tag = json!({ "key": "mlflow.source.name", "value": "prsmed" });
        let request = json!({ "experiment_id": experiment, "run_name": name, "start_time": now, "tags": [tag] });
        read_run(&self.post("runs/create", &request)?)
    }

    /// A run that exists.
    pub(super) fn run(&self, id: &str) -> Answer<RemoteRun> {
        read_run(&self.get(&format!("runs/get?run_id={}", encode(id)))?)
    }

    /// Logs metrics and parameters in the form of `runs/log-batch`.
    pub(super) fn log(&self, run: &str, metrics: &[Value], params: &[Value]) -> Answer<()> {
        self.post("runs/log-batch", &json!({ "run_id": run, "metrics": metrics, "params": params })).map(drop)
    }

    /// Sets the status of a run: `RUNNING`, `FINISHED`, `FAILED` or `KILLED`.
    pub(super) fn set_status(&self, run: &str, status: &str, now: u128) -> Answer<()> {
        let mut request = json!({ "run_id": run, "status": status });
        if status != "RUNNING" {
            request["end_time"] = json!(now);
        }
        self.post("runs/update", &request).map(drop)
    }

    /// Stores a file with a run; `false` if the artifacts of this server are elsewhere and cannot be written here.
    pub(super) fn upload(&self, run: &RemoteRun, name: &str, file: &Path) -> Result<Answer<bool>> {
        let Some(inside) = run.artifacts.strip_prefix(STORED_BY_SERVER) else { return Ok(Ok(false)) };
        let bytes = std::fs::read(file).map_err(Error::io(file, "read"))?;
        let inside = inside.trim_start_matches('/');
        let address = format!("{}/api/2.0/mlflow-artifacts/artifacts/{inside}/{}", self.base, encode(name));
        let mut request = self.agent.put(&address);
        if let Some(Credentials(authorization)) = &self.credentials {
            request = request.header("Authorization", authorization);
        }
        Ok(self.read(request.send(&bytes[..])).map(|_| true))
    }

    fn get(&self, route: &str) -> Answer<Value> {
        let mut request = self.agent.get(self.address(route));
        if let Some(Credentials(authorization)) = &self.credentials {
            request = request.header("Authorization", authorization);
        }
        self.read(request.call())
    }

    fn post(&self, route: &str, body: &Value) -> Answer<Value> {
        let mut request = self.agent.post(self.address(route)).header("Content-Type", "application/json");
        if let Some(Credentials(authorization)) = &self.credentials {
            request = request.header("Authorization", authorization);
        }
        self.read(request.send(body.to_string()))
    }

    fn address(&self, route: &str) -> String {
        format!("{}/api/2.0/mlflow/{route}", self.base)
    }

    fn read(&self, answer: std::result::Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Answer<Value> {
        let mut answer = answer.map_err(|error| broken(&error))?;
        let status = answer.status();
        if status.is_redirection() {
            let reason = "the server redirects: give the address that it redirects to";
            return Err(Fault::Refused(status.as_u16(), reason.into()));
        }
        let text = answer.body_mut().with_config().limit(MAX_ANSWER).read_to_string();
        let text = text.map_err(|error| broken(&error))?;
        let body: Option<Value> = serde_json::from_str(&text).ok();
        if status.is_success() {
            return Ok(body.unwrap_or_default());
        }
        let part = |key: &str| body.as_ref().and_then(|body| body[key].as_str()).unwrap_or_default().to_owned();
        let reason = [part("error_code"), part("message")].join(" ");
        // a server may repeat what it was sent
        let reason = match &self.credentials {
            Some(credentials) => credentials.hidden_in(&reason),
            None => reason,
        };
        Err(Fault::Refused(status.as_u16(), reason.trim().chars().take(300).collect()))
    }
}

fn broken(error: &ureq::Error) -> Fault {
    Fault::Connection(match error {
        ureq::Error::Timeout(ureq::Timeout::Connect) => format!("no connection within {CONNECT:?}"),
        ureq::Error::Timeout(_) => format!("no answer within {ANSWER:?}"),
        other => other.to_string(),
    })
}

fn read_run(answer: &Value) -> Answer<RemoteRun> {
    let id = text_at(answer, &["run", "info", "run_id"])?;
    let artifacts = answer["run"]["info"]["artifact_uri"].as_str().unwrap_or_default().to_owned();
    Ok(RemoteRun { id, artifacts })
}

fn text_at(answer: &Value, path: &[&str]) -> Answer<String> {
    let found = path.iter().try_fold(answer, |value, key| value.get(key)).and_then(Value::as_str);
    let missing = || Fault::Refused(200, format!("the answer has no `{}`: is this an MLflow server?", path.join(".")));
    found.map(str::to_owned).ok_or_else(missing)
}

/// Percent-encodes everything but letters, digits and `-._~`.
fn encode(text: &str) -> String {
    let encoded = text.bytes().map(|byte| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    });
    encoded.collect()
}
