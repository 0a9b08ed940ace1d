//! The PRS-Med task: its loss, training task, run folders and their merging, prediction, evaluation, trace.
//!
//! Read [`step`] first: one pass of the model over a micro-batch, the same for training, evaluation and trace.

mod ahead;
pub mod evaluate;
pub mod fit;
pub mod layout;
pub mod loss;
pub mod merge;
pub mod predict;
mod quantized;
pub mod rehearsal;
pub mod semantics;
pub mod setup;
pub mod sight;
pub mod step;
pub mod task;
pub mod trace;
pub mod weights;

pub use semantics::Semantics;
pub use setup::{Assembly, ModelConfig};
