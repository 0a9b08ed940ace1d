//! Commands.

pub mod env;
pub mod output;
pub mod progress;
pub mod report;
