//! Parity of our models with the published implementations: same weights and inputs give the same outputs and
//! gradients.
//!
//! `scripts/fixtures/*.py` writes the fixtures below `tests/fixtures/parity`. A missing fixture fails the test.

mod adamw;
mod adamw8bit;
mod clip;
mod diffusion;
mod diffusion_keys;
mod finetune;
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
mod training_steps;
