//! `prsmed` trains, evaluates and uses PRS-Med (an image and a question give a mask and an answer), and makes new
//! image+mask pairs for it with Stable Diffusion.
//!
//! ```text
//! files -> data -> batch -> segment (task) -> trainer -> run folder -> segment::predict / evaluate
//!                             |
//!        models: clip -> projector -> mistral (+LoRA) -> hidden states --+
//!                tiny_vit -> image embedding ----------------------------+-> mask_decoder -> mask
//!
//! train rows -> augment (prompt, latents, denoise, decode, paste) -> filter -> a data root of its own
//!                  |
//!        models::diffusion: text, unet (+controlnet), vae, sampler
//! ```
//!
//! # Levels
//!
//! A module names modules of lower levels only (`tests/layering.rs` reads this table and fails otherwise).
//!
//! | level | modules |
//! |---|---|
//! | 9 | `cli` |
//! | 8 | `config` |
//! | 7 | `plan` |
//! | 6 | `augment` |
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

pub mod augment;

pub mod plan;

pub mod config;

pub mod cli;

pub use error::{Error, Result};
