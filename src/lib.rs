//! `prsmed` trains, evaluates and uses PRS-Med: an image and a question give a mask and an answer.
//!
//! ```text
//! files -> data -> batch -> segment (task) -> trainer -> run folder -> segment::predict / evaluate
//!                             |
//!        models: clip -> projector -> mistral (+LoRA) -> hidden states --+
//!                tiny_vit -> image embedding ----------------------------+-> mask_decoder -> mask
//! ```
//!
//! # Levels
//!
//! A module names modules of lower levels only (`tests/layering.rs` reads this table and fails otherwise).
//!
//! | level | modules |
//! |---|---|
//! | 8 | `cli` |
//! | 7 | `config` |
//! | 6 | `plan` |
//! | 5 | `segment` |
//! | 4 | `trainer` |
//! | 3 | `models` `data` `metrics` |
//! | 2 | `nn` `hub` |
//! | 1 | `tensor` |
//! | 0 | `error` `units` `event` `place` |

pub mod error;
pub mod event;
pub mod place;
pub mod units;

pub mod tensor;

pub mod hub;
pub mod nn;

pub mod data;
pub mod metrics;
pub mod models;

pub mod trainer;

pub mod segment;

pub mod plan;

pub mod config;

pub mod cli;

pub use error::{Error, Result};
