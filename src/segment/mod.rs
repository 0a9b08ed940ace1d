//! The PRS-Med task: losses, training, run folders, merging of adapters.
//!
//! Read [`pass`] first: one pass of the model, the same for training, evaluation and prediction.

mod adapters;
mod architecture;
pub mod batch;
mod batches;
pub mod calibration;
pub mod config;
mod description;
pub mod dry_run;
pub mod example;
pub mod generate;
pub mod init;
pub mod layout;
mod loaded;
pub mod loss;
pub mod merge;
pub mod needs;
mod parts;
pub mod pass;
mod quantized;
pub mod resume;
pub mod rows;
pub mod run_config;
pub mod semantics;
pub mod setup;
pub mod step;
pub mod task;
pub mod training;
mod validation;
pub mod vision_features;
pub mod volume_scores;
pub mod weight_files;
pub mod weights;

pub use config::{DataConfig, ModelConfig};
pub use loaded::LoadedModel;
pub use run_config::RunConfig;
pub use semantics::Semantics;
pub use training::{Run, Training};

#[cfg(test)]
mod oracle_tests;
