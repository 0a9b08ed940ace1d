//! Fine-tuning of the generator on the user's own images: a LoRA or all weights of the UNet of Stable Diffusion 1.x,
//! 2.x or SDXL, or a ControlNet that reads lesion masks, by the engine that trains the segmenter.
//!
//! Source: diffusers' `train_text_to_image.py`, `train_text_to_image_lora_sdxl.py`, `train_controlnet.py` and, for
//! inpainting, `train_dreambooth_inpaint.py`. Deviations: latents and text
//! embeddings are encoded once and kept on disk, so the autoencoder and the text encoders are not in memory during the
//! training; noise, timestep and caption of a sample depend on seed, epoch and image alone, so that the micro-batch
//! affects rounding only and a resumed run repeats them.

pub mod cache;
pub mod dry_run;
mod masks;
pub mod network;
pub mod objective;
pub mod samples;
pub mod settings;
pub mod step;
pub mod task;
pub mod training;

pub use settings::{FinetuneConfig, FinetuneMode, FinetuneRun, Method};
pub use training::{FinetunedRun, Finetuning};
