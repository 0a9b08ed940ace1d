//! Normalisation layers.

use super::cast;
use crate::tensor::functions::rms_norm;
use crate::tensor::store::{Init, Scope};
use crate::tensor::{Tensor, dims};

/// Layer normalisation over the last dimension (Ba et al. 2016).
#[derive(Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    /// Weight 1, bias 0.
    pub fn new(scope: &Scope, dim: i64, eps: f64) -> Self {
        Self::with_bias(scope, dim, eps, 0.0)
    }

    /// Weight 1, bias `bias`.
    pub fn with_bias(scope: &Scope, dim: i64, eps: f64, bias: f64) -> Self {
        Self {
            weight: scope.param("weight", &[dim], Init::Const(1.0)),
            bias: scope.param("bias", &[dim], Init::Const(bias)),
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
    /// Weight 1, bias 0.
    pub fn new(scope: &Scope, channels: i64, eps: f64) -> Self {
        Self(LayerNorm::new(scope, channels, eps))
    }

    /// # Shapes
    /// `xs [b, c, h, w]` to the same.
    pub fn forward(&self, xs: &Tensor) -> Tensor {
        self.0.forward(&xs.permute([0, 2, 3, 1])).permute([0, 3, 1, 2])
    }
}

/// Normalisation over groups of channels with all their places (Wu & He 2018).
#[derive(Debug)]
pub struct GroupNorm {
    weight: Tensor,
    bias: Tensor,
    groups: i64,
    eps: f64,
}

impl GroupNorm {
    /// Weight 1, bias 0; `groups` divides `channels`.
    pub fn new(scope: &Scope, groups: i64, channels: i64, eps: f64) -> Self {
        Self {
            weight: scope.param("weight", &[channels], Init::Const(1.0)),
            bias: scope.param("bias", &[channels], Init::Const(0.0)),
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

/// Root-mean-square normalisation (Zhang & Sennrich 2019), computed in fp32 as transformers' Mistral does.
#[derive(Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// Weight 1.
    pub fn new(scope: &Scope, dim: i64, eps: f64) -> Self {
        Self { weight: scope.param("weight", &[dim], Init::Const(1.0)), eps }
    }

    /// # Shapes
    /// `xs [..., dim]` to the same.
    pub fn forward(&self, xs: &Tensor) -> Tensor {
        rms_norm(xs, &self.weight, self.eps)
    }
}

/// Instance normalisation with affine parameters, statistics of each image in training and evaluation alike
/// (Ulyanov et al. 2016).
#[derive(Debug)]
pub struct InstanceNorm2d {
    weight: Tensor,
    bias: Tensor,
}

impl InstanceNorm2d {
    /// Weight 1, bias 0, eps 1e-5.
    pub fn new(scope: &Scope, channels: i64) -> Self {
        Self {
            weight: scope.param("weight", &[channels], Init::Const(1.0)),
            bias: scope.param("bias", &[channels], Init::Const(0.0)),
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
