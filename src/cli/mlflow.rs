//! The flags by which trainings are recorded on an MLflow server.

use super::context::Context;
use crate::mlflow::MlflowOptions;

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
    /// The server of the flags.
    pub(in crate::cli) fn options(&self, context: &Context) -> Option<MlflowOptions> {
        let (credentials, experiment) = (context.env.mlflow.clone(), self.mlflow_experiment.clone());
        self.mlflow.clone().map(|url| MlflowOptions { url, experiment, credentials })
    }
}
