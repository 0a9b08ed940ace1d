//! Parts of a model with their tensors.

use prsmed_tensor::store::StoreEntry;

/// A part of a model (`llm`, `vision_tower`, `mask_decoder`) with all its tensors, frozen ones too.
#[derive(Debug)]
pub struct ModelPart {
    /// Its module path.
    pub name: &'static str,
    /// Its tensors, named `FILE/KEY` like [`Parameter`](crate::Parameter)s.
    pub entries: Vec<StoreEntry>,
}
