//! The targets as a library.

pub mod targets;
#[cfg(feature = "torch")]
pub mod with_torch;
