//! Rotary position embedding (Su et al. 2021), the half-split ("rotate half") convention of transformers, angles in
//! fp32.

use crate::tensor::{Device, Kind, Tensor, dims};

/// Cosines and sines of positions, `[t, d]` or `[b, 1, t, d]` fp32.
#[derive(Debug)]
pub struct Rope {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    /// Tables for positions `start..start + t` of heads of width `head_dim`.
    pub fn new(head_dim: i64, theta: f64, start: i64, t: i64, device: Device) -> Self {
        Self::at(head_dim, theta, &Tensor::arange_start(start, start + t, (Kind::Int64, device)))
    }

    /// Tables for given positions, `[t]` or for each sequence `[b, t]`, i64.
    pub fn at(head_dim: i64, theta: f64, positions: &Tensor) -> Self {
        let device = positions.device();
        #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
        let exponent =
            Tensor::arange_start_step(0, head_dim, 2, (Kind::Int64, device)).to_kind(Kind::Float) / head_dim as f64;
        let inverse = Tensor::full([1], theta, (Kind::Float, device)).pow(&exponent).reciprocal();
        let angles = positions.to_kind(Kind::Float).unsqueeze(-1) * inverse;
        let angles = Tensor::cat(&[&angles, &angles], -1);
        // one table for all heads
        let angles = if positions.dim() == 2 { angles.unsqueeze(1) } else { angles };
        Self { cos: angles.cos(), sin: angles.sin() }
    }

    /// # Shapes
    /// `xs [b, h, t, d]` to the same.
    pub fn rotate(&self, xs: &Tensor) -> Tensor {
        let [_b, _h, _t, d] = dims(xs);
        let kind = xs.kind();
        let half = d / 2;
        let turned = Tensor::cat(&[&xs.narrow(3, half, half).neg(), &xs.narrow(3, 0, half)], 3);
        xs * self.cos.to_kind(kind) + turned * self.sin.to_kind(kind)
    }
}
