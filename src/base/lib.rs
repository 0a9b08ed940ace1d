//! What all crates of `prsmed` need: errors, events, files that are written completely or not at all, settings, units,
//! locations in an image, and random streams. It needs no libtorch.

pub mod error;
pub mod event;
pub mod files;
pub mod location;
pub mod panics;
pub mod rng;
pub mod setting;
pub mod shell;
pub mod units;

pub use error::{Error, Result};
