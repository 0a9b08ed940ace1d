//! Lets the words of an answer follow a mask: what the mask's geometry adds to the states that become words.
//!
//! ```text
//! state of the language model [n, d] --+-> linear -> GELU -> linear -> + state -> logits of the next token
//! geometry of the masks [n, g] --------+
//! ```
//!
//! The last layer starts at 0, so that an untrained reader changes nothing.

use crate::models::limits::{self, MAX_WIDTH};
use crate::nn::linear::Linear;
use crate::tensor::store::{Init, VarPath};
use crate::tensor::{Tensor, dims};
use crate::{Error, Result};

/// Sizes of a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Width of the states.
    pub states: i64,
    /// Numbers that describe the masks of a question.
    pub geometry: i64,
    /// Width between the two layers.
    pub hidden: i64,
}

impl Config {
    /// Of states of this width and so many numbers.
    pub fn new(states: i64, geometry: i64) -> Self {
        Self { states, geometry, hidden: 256 }
    }

    /// Refuses impossible sizes, and those of a model with other states or masks.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn check(&self, expected: &Self) -> Result<()> {
        limits::check_ranges(&[("sizes.mask_reader.hidden", self.hidden, MAX_WIDTH)])?;
        if (self.states, self.geometry) == (expected.states, expected.geometry) {
            return Ok(());
        }
        let reason = format!("{self:?} does not fit the model, which needs {expected:?}");
        Err(Error::config("sizes.mask_reader", reason, "use the version of prsmed that wrote it, or train again"))
    }
}

/// The network.
#[derive(Debug)]
pub struct MaskReader {
    first: Linear,
    last: Linear,
}

impl MaskReader {
    /// Creates the parameters at `vs`.
    pub fn new(vs: &VarPath, config: &Config) -> Self {
        let Config { states, geometry, hidden } = *config;
        let zeros = Init::Const(0.0);
        Self {
            first: Linear::new(&vs.sub("first"), states + geometry, hidden),
            last: Linear::with_init(&vs.sub("last"), hidden, states, zeros, Some(zeros)),
        }
    }

    /// The states with what the masks add. There is no gradient for the states.
    ///
    /// # Shapes
    /// `states [n, d]` after the final norm, `geometry [n, g]` fp32; to `[n, d]` in the dtype of the states.
    pub fn read(&self, states: &Tensor, geometry: &Tensor) -> Tensor {
        let [_n, _d] = dims(states);
        let states = states.detach();
        let inputs = Tensor::cat(&[&states, &geometry.to_kind(states.kind())], -1);
        self.last.forward_gelu(&self.first.forward(&inputs, true)) + states
    }
}
