//! Which pairs are good enough to train on.

pub mod pixels;
pub mod sheet;

mod verdict;

pub use verdict::{Spread, Thresholds, Verdict, quantile};
