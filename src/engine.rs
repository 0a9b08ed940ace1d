//! The library without a command line and a server; `prsmed` has the same modules, and more. A crate of its own, so that
//! the compiler works on both at the same time.

pub use prsmed_base::{error, event, files, location, panics, setting, shell, units};
pub use {prsmed_data as data, prsmed_hub as hub, prsmed_metrics as metrics, prsmed_replay as replay};
pub use {prsmed_tensor as tensor, prsmed_trainer as trainer};

pub mod nn;

pub mod models;
pub mod runtime;

pub mod segment;

pub mod front;

pub mod augment;

pub mod report;

pub mod plan;

pub mod config;

pub mod job;

pub use error::{Error, Result};

#[cfg(test)]
#[path = "data/fixture.rs"]
#[expect(dead_code, reason = "shared with the tests of prsmed-data")]
mod fixture;
