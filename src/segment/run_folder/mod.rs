//! What a run folder and its checkpoints contain, and how a model is built from them.

pub(super) mod adapters;
pub(super) mod architecture;
pub(super) mod description;
pub mod init;
pub(super) mod loaded;
pub mod merge;
pub mod needs;
pub(super) mod parts;
pub(super) mod quantized;
pub mod resume;
pub mod run_config;
pub mod setup;
pub(super) mod sizes;
pub mod weight_files;
pub mod weights;
