//! Our models against the published implementations: same weights, same inputs, same outputs and gradients.
//!
//! The values under `tests/fixtures/parity` come from `scripts/fixtures/*.py`. A missing fixture fails the test.

mod adamw;
mod adamw8bit;
mod clip;
mod diffusion;
mod diffusion_keys;
mod fixture;
mod inception;
mod lora;
mod lora_files;
mod losses;
mod mask_decoder;
mod mistral;
mod nf4;
mod pipelines;
mod samplers;
mod tiny_vit;
