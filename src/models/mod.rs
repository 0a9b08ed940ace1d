//! One file for each published model; field names are checkpoint keys, renames are a table beside the model.

pub mod clip;
pub mod diffusion;
pub mod inception;
pub mod llava;
pub mod mask_decoder;
pub mod mistral;
pub mod prsmed;
pub mod tiny_vit;
