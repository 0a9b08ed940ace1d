//! Stable Diffusion (Rombach et al. 2022) and SDXL (Podell et al. 2023) as the diffusers library lays them out: the
//! networks, the samplers, and adapters read from files. No pipeline: see `augment::pipeline`.

pub mod block;
pub mod controlnet;
pub mod fields;
pub mod lora;
pub mod sampler;
pub mod text;
pub mod unet;
pub mod vae;
