//! The training engine: accumulation, precision, optimizer, schedule, moving average, checkpoints, resume, memory
//! profile.
//!
//! It depends only on the [`Task`] trait. Read [`run()`] first: it is the training loop.

pub mod checkpoint;
pub mod config;
mod data_wait;
pub mod distributed;
pub mod ema;
pub mod graph;
pub mod host_masters;
mod loss;
pub mod optimizer;
mod plateau;
pub mod precision;
pub mod profile;
pub mod records;
pub mod recovery;
pub mod run;
pub mod schedule;
mod skipped_steps;
pub mod step;
mod task;

#[cfg(test)]
mod fixture;

pub use config::{FirstLayers, OptimizerKind, Switch, TrainConfig};
pub use distributed::{Ranks, Shard};
pub use loss::{BatchSize, Loss, Parameter};
pub use run::{Session, TrainingOutcome, run};
pub use step::{StepInfo, StepResult, Stepper};
pub use task::{Batches, DryRunTask, HostUse, Task, Validation, ValidationPicture, ValidationScore};
