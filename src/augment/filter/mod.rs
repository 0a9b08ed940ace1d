//! Filter of generated pairs: pixel tests and cross-fitted filter models decide which pairs are good enough for
//! training.

pub mod model;
pub mod pixels;
pub mod survey;

mod config;
mod decision;

pub use config::Thresholds;
pub use decision::{Decision, ValueSpread};
