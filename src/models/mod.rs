//! Models, one file or folder each; all are published. Field names are checkpoint keys; a table
//! next to a model lists renamed keys.

pub mod clip;
pub mod diffusion;
pub mod inception;
pub mod llava;
pub mod mask_decoder;
pub mod mistral;
pub mod prsmed;
pub mod tiny_vit;
