//! Records a training on an MLflow tracking server, over its REST interface.
//!
//! Metrics are sent by a thread of their own: a slow or failing server never delays or ends a training. What cannot be
//! sent is tried again and reported at the end; `metrics.jsonl` in the run folder has all of it in any case.

mod client;
mod options;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::event::{Event, Observer, StepReport};
use crate::files;
use client::{Client, Fault, RemoteRun};
pub use options::{Credentials, MlflowOptions};

/// Which run of which server belongs to a run folder.
pub const RUN_FILE: &str = "mlflow.json";
/// Most metrics and most parameters of one request, limits of the server.
const BATCH: usize = 1000;
const PARAMS: usize = 100;
/// Longest value of a parameter that all versions of the server accept.
const PARAM_LENGTH: usize = 500;
/// Metrics that wait while the server does not answer; older ones are dropped first.
const MAX_WAITING: usize = 200_000;
/// How often metrics are sent, and how long a failed request waits.
const INTERVAL: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_secs(10);
/// How long the end of a training tries again to send metrics.
const LAST_ATTEMPTS: Duration = Duration::from_secs(15);

/// Contents of [`RUN_FILE`].
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Stored {
    url: String,
    run_id: String,
}

/// A server that has answered.
#[derive(Debug)]
pub struct Connection {
    client: Client,
    options: MlflowOptions,
    experiment: String,
}

impl Connection {
    /// Connects to the server and finds or creates the experiment.
    ///
    /// # Errors
    /// [`Error::Config`] if the address is wrong, the server does not answer, or it refuses.
    pub fn open(options: MlflowOptions) -> Result<Self> {
        if options.url.contains(['@', '?', '#']) || options.url.contains("%40") {
            let hint = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead";
            return Err(Error::config("--mlflow", "the address contains a name, a password or a query", hint));
        }
        if !options.url.starts_with("http://") && !options.url.starts_with("https://") {
            let reason = format!("`{}` is not an `http://` or `https://` address", options.url);
            return Err(Error::config("--mlflow", reason, "write for example `--mlflow http://127.0.0.1:5000`"));
        }
        let client = Client::new(&options);
        let experiment = client.experiment(&options.experiment).map_err(|fault| refused(&options, &fault))?;
        Ok(Self { client, options, experiment })
    }

    /// Starts to record the run in `folder`, or continues the record of a resumed one. `params` are its settings.
    /// Events go on to `inner`, with warnings about the server.
    ///
    /// # Errors
    /// [`Error::Config`] if the server refuses; [`Error::Io`].
    pub fn record(
        self,
        folder: &Path,
        resumes: bool,
        params: &[(String, String)],
        inner: Arc<dyn Observer>,
    ) -> Result<Tracker> {
        let refused = |fault: Fault| refused(&self.options, &fault);
        let file = folder.join(RUN_FILE);
        let known = files::read_to_string(&file, files::MAX_TEXT).ok().filter(|_| resumes);
        let known = known.and_then(|text| serde_json::from_str::<Stored>(&text).ok());
        let known = known.filter(|stored| stored.url == self.options.url);
        let run = match known.map(|stored| self.client.run(&stored.run_id)) {
            Some(Ok(run)) => {
                self.client.set_status(&run.id, "RUNNING", now()).map_err(refused)?;
                run
            }
            // deleted on the server
            None | Some(Err(Fault::Refused(404, _))) => {
                let name = folder.file_name().unwrap_or_default().to_string_lossy();
                let run = self.client.create_run(&self.experiment, &name, now()).map_err(refused)?;
                let values: Vec<Value> = params.iter().map(|(key, value)| param(key, value)).collect();
                for part in values.chunks(PARAMS) {
                    self.client.log(&run.id, &[], part).map_err(refused)?;
                }
                let stored = Stored { url: self.options.url.clone(), run_id: run.id.clone() };
                let text = serde_json::to_string_pretty(&stored).expect("plain values serialise");
                files::write(&file, text.as_bytes()).map_err(Error::io(&file, "write"))?;
                run
            }
            Some(Err(fault)) => return Err(refused(fault)),
        };
        inner.on(&Event::Note(format!("this training is recorded on {} as run {}", self.options.url, run.id)));
        let (sender, receiver) = channel();
        let worker = Worker { client: self.client, run: run.id.clone(), observer: Arc::clone(&inner) };
        let thread = std::thread::Builder::new().name("mlflow".into()).spawn(move || worker.work(&receiver));
        let thread = thread.map_err(Error::io(folder, "start a thread for"))?;
        let end = Mutex::new(Some((sender.clone(), thread)));
        Ok(Tracker { inner, sender, end, run })
    }
}

fn refused(options: &MlflowOptions, fault: &Fault) -> Error {
    let reason = format!("`{}`: {fault}", options.url);
    let hint = match fault {
        Fault::Refused(401 | 403, _) => {
            "set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        }
        Fault::Refused(_, words) if words.contains("deleted") => {
            "restore it (`mlflow experiments restore`, `mlflow runs restore`), or choose another name with \
             `--mlflow-experiment`"
        }
        Fault::Refused(404, _) => "check the address: it must be that of an MLflow tracking server",
        Fault::Refused(400..500, _) => {
            "the server's own words say what it wants; `--mlflow-experiment` chooses another experiment"
        }
        _ => "start the server (`mlflow server`), check the address and the proxy, or leave out `--mlflow`",
    };
    Error::config("--mlflow", reason, hint)
}

/// How a training ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// To its last step.
    Finished,
    /// With an error.
    Failed,
    /// Interrupted by the user or the system.
    Interrupted,
}

/// Sends the metrics of one training to the server. An [`Observer`] that hands all events on.
pub struct Tracker {
    inner: Arc<dyn Observer>,
    sender: Sender<Message>,
    end: Mutex<Option<(Sender<Message>, JoinHandle<()>)>>,
    run: RemoteRun,
}

impl std::fmt::Debug for Tracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tracker").field("run", &self.run).finish_non_exhaustive()
    }
}

enum Message {
    Metric(Value),
    /// The last message: status of the run, and files to store with it.
    End(&'static str, RemoteRun, Vec<PathBuf>),
}

impl Tracker {
    /// Sends what is left, the `files` that exist and how the training ended. Nothing more is sent to a server that
    /// stopped to answer, so the wait for it is a minute at most.
    pub fn finish(&self, end: End, files: &[PathBuf]) {
        let status = match end {
            End::Finished => "FINISHED",
            End::Failed => "FAILED",
            End::Interrupted => "KILLED",
        };
        let Some((sender, thread)) = self.end.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let files = files.iter().filter(|file| file.is_file()).cloned().collect();
        if sender.send(Message::End(status, self.run.clone(), files)).is_ok() {
            let _ended = thread.join();
        }
    }

    fn send(&self, step: u64, metrics: impl IntoIterator<Item = (String, f64)>) {
        let timestamp = now();
        for (key, value) in metrics.into_iter().filter(|(_, value)| value.is_finite()) {
            let metric = json!({ "key": key, "value": value, "timestamp": timestamp, "step": step });
            // after the end nothing is sent
            let _sent = self.sender.send(Message::Metric(metric));
        }
    }
}

impl Observer for Tracker {
    fn on(&self, event: &Event) {
        self.inner.on(event);
        match event {
            Event::Step(report) => self.send(report.step, step_metrics(report)),
            Event::Validated { step, values } => {
                self.send(*step, values.iter().map(|(name, value)| (format!("val/{name}"), *value)));
            }
            _ => {}
        }
    }
}

/// The same names as in TensorBoard.
fn step_metrics(report: &StepReport) -> Vec<(String, f64)> {
    let mut metrics: Vec<(String, f64)> =
        report.losses.iter().map(|(name, value)| (format!("loss/{name}"), *value)).collect();
    metrics.extend([
        ("train/learning_rate".into(), report.learning_rate),
        ("train/grad_norm".into(), report.grad_norm),
        ("train/data_wait_share".into(), report.data_wait_share()),
        ("memory/allocated_peak_bytes".into(), report.allocated_peak as f64),
    ]);
    let seconds = report.elapsed.as_secs_f64();
    if seconds > 0.0 {
        metrics.push(("train/images_per_s".into(), report.samples as f64 / seconds));
    }
    metrics
}

/// The thread that sends.
struct Worker {
    client: Client,
    run: String,
    observer: Arc<dyn Observer>,
}

impl Worker {
    fn work(&self, receiver: &Receiver<Message>) {
        let mut waiting: Vec<Value> = Vec::new();
        let (mut dropped, mut next, mut has_warned) = (0, Instant::now() + INTERVAL, false);
        loop {
            match receiver.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(Message::Metric(metric)) => {
                    waiting.push(metric);
                    if waiting.len() > MAX_WAITING {
                        waiting.drain(..BATCH);
                        dropped += BATCH;
                    }
                }
                Ok(Message::End(status, run, files)) => {
                    dropped += self.end(&mut waiting, status, (&run, &files));
                    break;
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if Instant::now() < next {
                continue;
            }
            next = Instant::now() + INTERVAL;
            if let Err(fault) = self.send(&mut waiting) {
                next = Instant::now() + RETRY;
                if !has_warned {
                    has_warned = true;
                    let text = format!("MLflow: {fault}; the training goes on and the metrics are sent later");
                    self.observer.on(&Event::Warning(text));
                }
                if !fault.may_pass() {
                    dropped += waiting.len();
                    waiting.clear();
                }
            }
        }
        if dropped > 0 {
            let text = format!("MLflow: {dropped} values were not recorded there; `metrics.jsonl` has them all");
            self.observer.on(&Event::Warning(text));
        }
    }

    /// Sends the waiting metrics; those that were sent are removed.
    fn send(&self, waiting: &mut Vec<Value>) -> std::result::Result<(), Fault> {
        while !waiting.is_empty() {
            let part = waiting.len().min(BATCH);
            self.client.log(&self.run, &waiting[..part], &[])?;
            waiting.drain(..part);
        }
        Ok(())
    }

    /// Sends the rest, the files and the status. Returns how many values the server did not take.
    fn end(&self, waiting: &mut Vec<Value>, status: &str, files: (&RemoteRun, &[PathBuf])) -> usize {
        let until = Instant::now() + LAST_ATTEMPTS;
        let not_marked = |fault: &Fault| {
            self.observer.on(&Event::Warning(format!("MLflow: the run is not marked as {status}: {fault}")));
        };
        while let Err(fault) = self.send(waiting) {
            if fault.may_pass() && Instant::now() < until {
                std::thread::sleep(Duration::from_secs(1));
                continue;
            }
            if matches!(fault, Fault::Connection(_)) {
                not_marked(&fault);
                return waiting.len();
            }
            break;
        }
        let (run, files) = files;
        for file in files {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            let stored = self.client.upload(run, &name, file);
            let problem = match &stored {
                Ok(Ok(_)) => continue,
                Ok(Err(fault)) => fault.to_string(),
                Err(error) => error.to_string(),
            };
            self.observer.on(&Event::Warning(format!("MLflow: `{name}` is not stored with the run: {problem}")));
            if let Ok(Err(fault @ Fault::Connection(_))) = &stored {
                not_marked(fault);
                return waiting.len();
            }
        }
        if let Err(fault) = self.client.set_status(&self.run, status, now()) {
            not_marked(&fault);
        }
        waiting.len()
    }
}

fn param(key: &str, value: &str) -> Value {
    let value: String = value.chars().take(PARAM_LENGTH).collect();
    json!({ "key": key, "value": value })
}

/// Milliseconds since 1970.
fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()
}
