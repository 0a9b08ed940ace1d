//! Rotary position embedding (Su et al. 2021) in transformers' half-split ("rotate half") convention, with angles in
//! fp32.

use crate::tensor::functions::rotate;
use crate::tensor::{Device, Kind, Tensor, dims};
use std::f64::consts::TAU;

/// The angle of each position.
#[derive(Debug, Clone, PartialEq)]
pub struct Angles {
    /// Width of a head.
    pub head_dim: i64,
    /// Base of the wavelengths.
    pub theta: f64,
    /// Longer wavelengths than those of the base.
    pub scaling: Option<Scaling>,
    /// Parts of a head for positions of three axes.
    pub sections: Option<Sections>,
}

/// Longer wavelengths, for texts that are longer than those of the pretraining.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Scaling {
    /// All wavelengths are `factor` times as long (Gemma 3).
    Linear {
        /// Factor of the wavelengths.
        factor: f64,
    },
    /// Wavelengths above `original / low` are `factor` times as long, those below `original / high` stay (Llama 3).
    Llama3 {
        /// Factor of the long wavelengths.
        factor: f64,
        /// Turns in `original` positions below which a wavelength is long.
        low: f64,
        /// Turns in `original` positions above which a wavelength is short.
        high: f64,
        /// Positions of the pretraining.
        original: f64,
    },
}

/// Parts of a head's half width for the axes time, height and width of a position (Qwen-VL).
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sections {
    /// Frequencies of each axis.
    pub sizes: [i64; 3],
    /// The axes alternate (Qwen3-VL) instead of following one another (Qwen2.5-VL).
    pub interleaved: bool,
}

impl Sections {
    /// The angle of each frequency's own axis.
    ///
    /// # Shapes
    /// `angles [3, ..., d / 2]` to `[..., d / 2]`.
    fn select(self, angles: &Tensor) -> Tensor {
        let [time, height, width] = [0, 1, 2].map(|axis| angles.get(axis));
        let at = Tensor::arange(time.size()[time.dim() - 1], (Kind::Int64, angles.device()));
        let [first, second, third] = self.sizes;
        let [is_height, is_width] = if self.interleaved {
            [(1, second), (2, third)].map(|(axis, size)| at.remainder(3).eq(axis).logical_and(&at.lt(3 * size)))
        } else {
            [(first, second), (first + second, third)]
                .map(|(start, size)| at.ge(start).logical_and(&at.lt(start + size)))
        };
        height.where_self(&is_height, &width.where_self(&is_width, &time))
    }
}

/// Cosines and sines of positions, `[t, d / 2]` or `[b, t, d / 2]`.
#[derive(Debug)]
pub struct Rope {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    /// Tables for positions `start..start + t`, in `kind`.
    pub fn new(angles: &Angles, start: i64, t: i64, (kind, device): (Kind, Device)) -> Self {
        Self::at(angles, &Tensor::arange_start(start, start + t, (Kind::Int64, device)), kind)
    }

    /// Tables for the given positions, i64 `[t]`, `[b, t]` with positions per sequence, or `[3, b, t]` with positions of
    /// three axes; in `kind`.
    ///
    /// # Panics
    /// For positions of three axes without sections.
    pub fn at(angles: &Angles, positions: &Tensor, kind: Kind) -> Self {
        let (device, head_dim) = (positions.device(), angles.head_dim);
        let exponent =
            Tensor::arange_start_step(0, head_dim, 2, (Kind::Int64, device)).to_kind(Kind::Float) / head_dim as f64;
        let inverse = Tensor::full([1], angles.theta, (Kind::Float, device)).pow(&exponent).reciprocal();
        let inverse = match angles.scaling {
            None => inverse,
            Some(Scaling::Linear { factor }) => inverse / factor,
            Some(Scaling::Llama3 { factor, low, high, original }) => {
                let short = ((&inverse * (original / TAU) - low) / (high - low)).clamp(0.0, 1.0);
                &inverse * &short + &inverse / factor * (1.0 - short)
            }
        };
        let mut turned = positions.to_kind(Kind::Float).unsqueeze(-1) * inverse;
        if positions.dim() == 3 {
            turned = angles.sections.expect("positions of three axes need sections").select(&turned);
        }
        Self { cos: turned.cos().to_kind(kind), sin: turned.sin().to_kind(kind) }
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
