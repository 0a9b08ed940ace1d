//! Image+mask pairs from diffusion models: generation, filtering, quality metrics and an ablation of their use.
//!
//! Start reading at [`generate`]: source images and prompts -> latents -> generated images with preserved labels -> a
//! new data root.

pub mod ablation;
pub mod adapters;
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
pub mod prompt;
pub mod quality;
mod saved_settings;
pub mod settings;
