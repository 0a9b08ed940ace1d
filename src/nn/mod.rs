//! Neural network layers that know no model. The dtype of the input is the compute dtype: a layer casts its stored
//! weights (fp32 masters of trainable weights) to it.

pub mod attention;
pub mod config;
pub mod conv;
pub mod embedding;
pub mod linear;
pub mod norm;
pub mod peft;
pub mod position;
pub mod rope;

pub use attention::{Mask, attention};
pub use config::LoraConfig;
pub use conv::{BatchStatistics, Conv2d, Conv2dBn};
pub use embedding::Embedding;
pub use linear::{Linear, Lora, Quantization};
pub use norm::{GroupNorm, InstanceNorm2d, LayerNorm, LayerNorm2d, RmsNorm};
pub use position::sine_positions;

use crate::tensor::{Kind, Tensor};

/// `tensor` in the dtype `kind`; no copy if it already is.
pub(crate) fn cast(tensor: &Tensor, kind: Kind) -> Tensor {
    if tensor.kind() == kind { tensor.shallow_clone() } else { tensor.to_kind(kind) }
}
