//! The flags by which trainings are recorded on an MLflow server.

use super::context::Context;
use crate::config::Settings;
use crate::event::Observer;
use crate::mlflow::{Connection, End, MlflowOptions, Tracker};
use crate::setting::table::leaves;
use crate::{Error, Result};
use std::path::Path;
use std::sync::Arc;
use toml::Table;

/// Files of a run folder that are stored on the server.
const FILES: [&str; 2] = ["config.toml", "report.html"];

#[derive(Debug, clap::Args)]
pub(in crate::cli) struct MlflowArgs {
    /// Also record the training on this MLflow server, for example http://127.0.0.1:5000
    ///
    /// Sends settings, losses, validations, memory, and at the end `config.toml` and `report.html`; never images, captions
    /// or questions. MLFLOW_TRACKING_TOKEN, or
    /// MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, are its credentials. A resumed training continues its
    /// record. A server that fails during the training does not stop it.
    #[arg(long, value_name = "URL")]
    mlflow: Option<String>,
    /// Experiment on that server
    #[arg(long, value_name = "NAME", default_value = "prsmed", requires = "mlflow")]
    mlflow_experiment: String,
}

impl MlflowArgs {
    /// Connects to the server, before expensive work.
    pub(in crate::cli) fn connect(&self, context: &Context) -> Result<Option<Connection>> {
        let Some(url) = &self.mlflow else { return Ok(None) };
        let credentials = context.env.mlflow.clone();
        let experiment = self.mlflow_experiment.clone();
        Connection::open(MlflowOptions { url: url.clone(), experiment, credentials }).map(Some)
    }
}

/// Runs a training with the observer of its events, and records it if there is a connection.
pub(in crate::cli) fn recorded<C: Settings, T>(
    connection: Option<Connection>,
    (folder, resumes): (&Path, bool),
    config: &C,
    context: &Context,
    train: impl FnOnce(Arc<dyn Observer>) -> Result<T>,
) -> Result<T> {
    let Some(connection) = connection else { return train(Arc::clone(&context.progress)) };
    let table = Table::try_from(config).expect("plain values serialise");
    let params = leaves(&table).into_iter().map(|(key, value)| (key, value.to_string()));
    let tracker = connection.record(folder, resumes, &params.collect::<Vec<_>>(), Arc::clone(&context.progress))?;
    let tracker: Arc<Tracker> = Arc::new(tracker);
    let trained = train(tracker.clone());
    let end = match &trained {
        Ok(_) => End::Finished,
        Err(Error::Interrupted) => End::Interrupted,
        Err(_) => End::Failed,
    };
    tracker.finish(end, &FILES.map(|name| folder.join(name)));
    trained
}
