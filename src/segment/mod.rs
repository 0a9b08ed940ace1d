//! The PRS-Med task: losses, training, run folders, merging of adapters.
//!
//! Read [`pass`] first: one pass of the model, the same for training, evaluation and prediction.

pub mod batch;
pub mod config;
pub mod dry_run;
pub mod generate;
pub mod loss;
mod measures;
pub mod pass;
mod run_folder;
pub mod semantics;
pub mod step;
pub mod task;
pub mod training;

pub use config::{DataConfig, ModelConfig};
pub use run_folder::loaded::LoadedModel;
pub use run_folder::run_config::RunConfig;
pub use semantics::Semantics;
pub use training::{Run, Training};

pub use batch::{example, layout, rows, vision_features};
pub use measures::{calibration, volume_scores};
pub use run_folder::{init, merge, needs, resume, run_config, setup, weight_files, weights};

#[cfg(test)]
mod oracle_tests;
