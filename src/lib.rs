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
//! A module may use modules of lower levels only (`tests/layering.rs` reads this table and checks it). Folders with a
//! `Cargo.toml` are crates of their own; all of them but `tensor` and `trainer` need no libtorch. `cli`, `serve`, `console`
//! and `prelude` are in this crate, which the program is made of, and the other modules in `prsmed-engine`
//! (`src/engine.rs`).
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

pub use prsmed_engine::{
    Error, Result, augment, config, data, error, event, files, front, hub, job, location, metrics, models, nn, panics,
    plan, replay, report, runtime, segment, setting, shell, tensor, trainer, units,
};

#[cfg(feature = "console")]
pub mod console;

#[cfg(feature = "cli")]
pub mod serve;

#[cfg(feature = "cli")]
pub mod cli;

pub mod prelude;
