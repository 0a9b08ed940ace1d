//! Layers that know no model: each owns its tensors, takes the input's dtype as the compute dtype and casts what it
//! stores (fp32 masters of trained weights) where it is used.

pub mod attention;
pub mod conv;
pub mod embedding;
pub mod linear;
pub mod norm;
pub mod position;
pub mod rope;

pub use attention::{Mask, attention};
pub use conv::{BatchStatistics, Conv2d, Conv2dBn};
pub use embedding::Embedding;
pub use linear::{Linear, Lora, LoraConfig, Quantization};
pub use norm::{GroupNorm, InstanceNorm2d, LayerNorm, LayerNorm2d, RmsNorm};
pub use position::sine_positions;

use crate::tensor::{Kind, Tensor};

/// `tensor` in `kind`; no copy when it already is.
pub(crate) fn cast(tensor: &Tensor, kind: Kind) -> Tensor {
    if tensor.kind() == kind { tensor.shallow_clone() } else { tensor.to_kind(kind) }
}
