//! What a family of mask heads provides.

use crate::Result;
use crate::models::image_encoder::family::ImageEmbedding;
use crate::tensor::Tensor;

/// Version of the published decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Version {
    /// Normalised image cells and prompts, residual around the cross-attention; 70 keys.
    V5,
    /// Without these norms and this residual; 66 keys.
    V6,
}

/// Settings of PRS-Med's decoder that its weights do not decide.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadOptions {
    /// Published version.
    pub version: Version,
    /// Dropout of the encoder layer, 0..1.
    pub dropout: f64,
    /// Dropout of attention probabilities too.
    pub attention_dropout: bool,
    /// Add fixed positions to the image cells.
    pub positions: bool,
    /// Initial value of biases, also those of the class head.
    pub initial_bias: f64,
}

/// Facts about a mask head that are known from its sizes.
pub trait HeadSizes {
    /// Width of the language model's states that it reads.
    fn prompt_dim(&self) -> i64;

    /// Channels of the image embedding.
    fn image_dim(&self) -> i64;

    /// Masks for each prompt: the most targets of a question.
    fn masks(&self) -> usize {
        1
    }

    /// Takes over the options that it has.
    fn follow(&mut self, options: &HeadOptions);

    /// Initial value of the biases of the class head.
    fn initial_bias(&self) -> f64 {
        0.0
    }

    /// Refuses sizes that no head has, or that contradict each other.
    ///
    /// # Errors
    /// [`crate::Error::Config`].
    fn check(&self) -> Result<()>;
}

/// A network that draws masks.
pub trait Head: std::fmt::Debug {
    /// Logits of k masks for each of q prompts, at the resolution of the head: `[q, k, h, w]`.
    fn logits(&self, embedding: &ImageEmbedding, prompts: &HeadPrompts, train: bool) -> Tensor;

    /// Logits with the rows and columns of the images, fp32.
    fn enlarge(&self, logits: &Tensor, size: [i64; 2]) -> Tensor;
}

/// What the masks are to show: q prompts, each with an image of the embedding.
#[derive(Debug, Clone, Copy)]
pub struct HeadPrompts<'a> {
    /// States of the language model, `[q, t, d]`.
    pub states: &'a Tensor,
    /// `[q, t]` bool, true = a real token; `None`: all are real.
    pub keep: Option<&'a Tensor>,
}

/// Masks of q prompts.
#[derive(Debug)]
pub struct Masks {
    /// `[q, k, rows, columns]` fp32, of the size of the images.
    pub logits: Tensor,
}

/// Settings of a pass through the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeadPass {
    /// Use dropout.
    pub train: bool,
    /// Activation checkpointing: save only the inputs and recompute the head in the backward pass.
    pub checkpoint: bool,
}
