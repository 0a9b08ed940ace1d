//! Normalisation layers.

use super::cast;
use crate::tensor::functions::rms_norm;
use crate::tensor::store::{Init, VarPath};
use crate::tensor::{Kind, Tensor, dims};

/// Layer normalisation over the last dimension (Ba et al. 2016).
#[derive(Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    /// This norm with `copy(weight)` in place of each weight, in a fixed order.
    #[must_use]
    pub fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        Self { weight: copy(&self.weight), bias: copy(&self.bias), eps: self.eps }
    }

    /// Initialised with weight 1, bias 0.
    pub fn new(vs: &VarPath, dim: i64, eps: f64) -> Self {
        Self::with_bias(vs, dim, eps, 0.0)
    }

    /// Initialised with weight 1 and the given bias.
    pub fn with_bias(vs: &VarPath, dim: i64, eps: f64, bias: f64) -> Self {
        Self {
            weight: vs.param("weight", &[dim], Init::Const(1.0)),
            bias: vs.param("bias", &[dim], Init::Const(bias)),
            eps,
        }
    }

    /// # Shapes
    /// `xs [..., dim]` to the same.
    pub fn forward(&self, xs: &Tensor) -> Tensor {
        let kind = xs.kind();
        xs.layer_norm(self.weight.size(), Some(cast(&self.weight, kind)), Some(cast(&self.bias, kind)), self.eps, true)
    }
}

/// Layer normalisation over the channels of an image (SAM's `LayerNorm2d`).
#[derive(Debug)]
pub struct LayerNorm2d(LayerNorm);

impl LayerNorm2d {
    /// Initialised with weight 1, bias 0.
    pub fn new(vs: &VarPath, channels: i64, eps: f64) -> Self {
        Self(LayerNorm::new(vs, channels, eps))
    }

    /// # Shapes
    /// `xs [b, c, h, w]` to the same.
    pub fn forward(&self, xs: &Tensor) -> Tensor {
        self.0.forward(&xs.permute([0, 2, 3, 1])).permute([0, 3, 1, 2])
    }
}

/// Group normalisation: over groups of channels and all pixels (Wu & He 2018).
#[derive(Debug)]
pub struct GroupNorm {
    weight: Tensor,
    bias: Tensor,
    groups: i64,
    eps: f64,
}

impl GroupNorm {
    /// Initialised with weight 1, bias 0; `groups` divides `channels`.
    pub fn new(vs: &VarPath, groups: i64, channels: i64, eps: f64) -> Self {
        Self {
            weight: vs.param("weight", &[channels], Init::Const(1.0)),
            bias: vs.param("bias", &[channels], Init::Const(0.0)),
            groups,
            eps,
        }
    }

    /// # Shapes
    /// `xs [b, c, h, w]` to the same.
    pub fn forward(&self, xs: &Tensor) -> Tensor {
        let [_b, _c, _h, _w] = dims(xs);
        let kind = xs.kind();
        xs.group_norm(self.groups, Some(cast(&self.weight, kind)), Some(cast(&self.bias, kind)), self.eps, true)
    }
}

/// Factor of a root-mean-square normalisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RmsFactor {
    /// The weight. The quotient is cast to the dtype of the input before the product, as in transformers' Mistral.
    #[default]
    Weight,
    /// One plus the weight, with the product in fp32, as in transformers' Gemma.
    OnePlusWeight,
}

/// Root-mean-square normalisation (Zhang & Sennrich 2019), computed in fp32.
#[derive(Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
    factor: RmsFactor,
}

impl RmsNorm {
    /// This norm with `copy(weight)` in place of its weight.
    #[must_use]
    pub fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        Self { weight: copy(&self.weight), ..*self }
    }

    /// Initialised with the factor 1.
    pub fn new(vs: &VarPath, dim: i64, eps: f64, factor: RmsFactor) -> Self {
        let one = if factor == RmsFactor::Weight { 1.0 } else { 0.0 };
        Self { weight: vs.param("weight", &[dim], Init::Const(one)), eps, factor }
    }

    /// # Shapes
    /// `xs [..., dim]` to the same.
    pub fn forward(&self, xs: &Tensor) -> Tensor {
        match self.factor {
            RmsFactor::Weight => rms_norm(xs, &self.weight, self.eps),
            RmsFactor::OnePlusWeight => {
                let wide = if xs.kind() == Kind::Double { Kind::Double } else { Kind::Float };
                rms_norm(&xs.to_kind(wide), &(self.weight.to_kind(wide) + 1.0), self.eps).to_kind(xs.kind())
            }
        }
    }
}

/// Instance normalisation with affine parameters (Ulyanov et al. 2016). Training and evaluation use the statistics of
/// each image.
#[derive(Debug)]
pub struct InstanceNorm2d {
    weight: Tensor,
    bias: Tensor,
}

impl InstanceNorm2d {
    /// Initialised with weight 1, bias 0; epsilon is 1e-5.
    pub fn new(vs: &VarPath, channels: i64) -> Self {
        Self {
            weight: vs.param("weight", &[channels], Init::Const(1.0)),
            bias: vs.param("bias", &[channels], Init::Const(0.0)),
        }
    }

    /// # Shapes
    /// `xs [b, c, h, w]` to the same.
    pub fn forward(&self, xs: &Tensor) -> Tensor {
        let [_b, _c, _h, _w] = dims(xs);
        let kind = xs.kind();
        let (weight, bias) = (cast(&self.weight, kind), cast(&self.bias, kind));
        xs.instance_norm(Some(&weight), Some(&bias), None, None, true, 0.1, 1e-5, true)
    }
}
