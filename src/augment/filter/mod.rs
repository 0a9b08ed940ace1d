//! Which pairs are good enough to train on.

pub mod judge;
pub mod pixels;
pub mod sheet;
pub mod survey;

mod verdict;

pub use verdict::{Spread, Thresholds, Verdict};
