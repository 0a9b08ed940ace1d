//! Rotary position embedding (Su et al. 2021) in transformers' half-split ("rotate half") convention, with angles in
//! fp32.

use crate::tensor::functions::rotate;
use crate::tensor::{Device, Kind, Tensor, dims};

/// Cosines and sines of positions, `[t, d / 2]` or `[b, t, d / 2]`.
#[derive(Debug)]
pub struct Rope {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    /// Tables for positions `start..start + t` of heads of width `head_dim`, in `kind`.
    pub fn new(head_dim: i64, theta: f64, start: i64, t: i64, (kind, device): (Kind, Device)) -> Self {
        Self::at(head_dim, theta, &Tensor::arange_start(start, start + t, (Kind::Int64, device)), kind)
    }

    /// Tables for the given positions, i64 `[t]`, or `[b, t]` with positions per sequence; in `kind`.
    pub fn at(head_dim: i64, theta: f64, positions: &Tensor, kind: Kind) -> Self {
        let device = positions.device();
        let exponent =
            Tensor::arange_start_step(0, head_dim, 2, (Kind::Int64, device)).to_kind(Kind::Float) / head_dim as f64;
        let inverse = Tensor::full([1], theta, (Kind::Float, device)).pow(&exponent).reciprocal();
        let angles = positions.to_kind(Kind::Float).unsqueeze(-1) * inverse;
        Self { cos: angles.cos().to_kind(kind), sin: angles.sin().to_kind(kind) }
    }

    /// Rotates every head of `xs` in place. `xs` must not be used elsewhere.
    ///
    /// # Shapes
    /// `xs [b, t, h d]` to the same, in the dtype of the tables.
    pub fn rotate(&self, xs: Tensor) -> Tensor {
        let [_b, _t, _width] = dims(&xs);
        rotate(xs, &self.cos, &self.sin)
    }
}
