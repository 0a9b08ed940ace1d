//! New image+mask pairs from diffusion models: made, filtered, judged.
//!
//! Read [`generate`] first: sources and prompts -> latents -> pictures with held labels -> a data root.

pub mod blueprint;
pub mod donor;
pub mod export;
pub mod filter;
pub mod generate;
pub mod hold;
mod kept;
pub mod pipeline;
pub mod prompt;
pub mod quality;
pub mod rehearsal;
pub mod settings;
pub mod study;
