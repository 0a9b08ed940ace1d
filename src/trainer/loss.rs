//! Trained tensors, batch sizes and losses.

use prsmed_tensor::Tensor;

/// A trained tensor: fp32, requires a gradient.
#[derive(Debug)]
pub struct Parameter {
    /// `FILE/KEY`.
    pub name: String,
    /// The master copy.
    pub tensor: Tensor,
    /// True for a part beside the model: its gradient does not change how far those of the others are clipped.
    pub is_beside: bool,
}

impl Parameter {
    /// A tensor of the model.
    pub fn new(name: impl Into<String>, tensor: Tensor) -> Self {
        Self { name: name.into(), tensor, is_beside: false }
    }

    /// For a part that reads the model and that no other part reads.
    #[must_use]
    pub fn beside(self, is_beside: bool) -> Self {
        Self { is_beside, ..self }
    }
}

/// Size of a (micro-)batch: the loss denominator. Losses are averages over the effective batch, not over micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BatchSize {
    /// Questions, each with its image.
    pub samples: f64,
    /// Supervised text tokens.
    pub tokens: f64,
    /// Questions whose mask is known.
    pub masks: f64,
}

impl std::iter::Sum for BatchSize {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |a, b| Self {
            samples: a.samples + b.samples,
            tokens: a.tokens + b.tokens,
            masks: a.masks + b.masks,
        })
    }
}

/// The loss of one micro-batch, already scaled to its share of the effective batch.
#[derive(Debug)]
pub struct Loss {
    /// Scalar to differentiate.
    pub total: Tensor,
    /// Named parts as scalars without a graph, same scaling.
    pub parts: Vec<(&'static str, Tensor)>,
}
