//! `prsmed` trains, evaluates and runs PRS-Med (from an image and a question to a mask and an answer). It also makes
//! synthetic image+mask pairs with Stable Diffusion.
//!
//! ```text
//! files -> data -> batch -> segment (task) -> trainer -> run folder -> front (predict, evaluate)
//!                             |
//!        models: tower (with projector) -> decoder (+LoRA) -> states ----+
//!                image_encoder -> image embedding -----------------------+-> mask_head -> mask
//!
//! train rows -> augment (prompt, latents, denoise, decode, paste) -> filter -> data root
//!                  |
//!        models::diffusion: text, unet (+controlnet), vae, sampler
//! ```
//!
//! # Levels
//!
//! A module may use modules of lower levels only (`tests/layering.rs` reads this table and checks it). `base`, `data`,
//! `hub`, `metrics`, `replay` and `volume` are crates of their own without libtorch: their folders have a `Cargo.toml`.
//!
//! | level | modules |
//! |---|---|
//! | 12 | `cli` `prelude` |
//! | 11 | `job` `serve` |
//! | 10 | `config` |
//! | 9 | `plan` `report` |
//! | 8 | `augment` |
//! | 7 | `front` |
//! | 6 | `segment` `console` |
//! | 5 | `trainer` |
//! | 4 | `models` `runtime` |
//! | 3 | `nn` |
//! | 2 | `tensor` `data` |
//! | 1 | `hub` `metrics` `replay` `volume` |
//! | 0 | `base` |

pub use prsmed_base::{error, event, files, location, panics, setting, shell, units};
pub use {prsmed_data as data, prsmed_hub as hub, prsmed_metrics as metrics, prsmed_replay as replay};

pub mod tensor;

pub mod nn;

pub mod models;
pub mod runtime;

pub mod trainer;

pub mod segment;

pub mod front;

#[cfg(feature = "console")]
pub mod console;

pub mod augment;

pub mod report;

pub mod plan;

pub mod config;

pub mod job;

#[cfg(feature = "cli")]
pub mod serve;

#[cfg(feature = "cli")]
pub mod cli;

pub mod prelude;

pub use error::{Error, Result};

#[cfg(test)]
#[path = "data/fixture.rs"]
#[expect(dead_code, reason = "shared with the tests of prsmed-data")]
mod fixture;
