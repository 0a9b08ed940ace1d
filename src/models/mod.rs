//! Models, one file or folder each; all are published. Field names are checkpoint keys; a table
//! next to a model lists renamed keys.

pub mod base;
pub mod clip;
pub mod decoder;
pub mod diffusion;
mod families;
pub mod image_encoder;
pub mod inception;
pub mod limits;
pub mod llava;
pub mod mask_decoder;
pub mod mask_head;
pub mod mask_reader;
pub mod prsmed;
pub mod tiny_vit;
pub mod tower;
#[cfg(test)]
mod toy_encoder;
#[cfg(test)]
mod toy_head;
