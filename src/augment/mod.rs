//! Image+mask pairs from diffusion models: generation, filtering, quality metrics and an ablation of their use.
//!
//! Start reading at [`generate`]: source images and prompts -> latents -> generated images with preserved labels -> a
//! new data root.

pub mod ablation;
pub mod adapters;
mod autoencoder;
pub mod distance;
pub mod dry_run;
pub mod export;
pub mod filter;
pub mod finetune;
pub mod generate;
pub mod inpaint_mask;
pub mod inputs;
pub mod mask_bank;
pub mod neighbours;
pub mod pipeline;
pub mod pipeline_config;
mod placement;
pub mod prompt;
pub mod quality;
mod saved_settings;
pub mod settings;

use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};

/// Fails with [`Error::Interrupted`] once the flag is set.
fn check_interrupt(interrupt: &AtomicBool) -> Result<()> {
    if interrupt.load(Ordering::SeqCst) { Err(Error::Interrupted) } else { Ok(()) }
}
