//! Mask heads of the segmenter: from images and prompts to masks.
//!
//! A family is a file with its sizes ([`HeadSizes`]) and its network ([`Head`]), and a line below.

pub mod family;

pub use family::{Head, HeadOptions, HeadPass, HeadPrompts, HeadSizes, Masks, Version};

use super::families::families;
use super::image_encoder::family::ImageEmbedding;
use super::mask_decoder::{self, MaskDecoder};
use crate::Result;
use crate::tensor::autograd::checkpoint;
use crate::tensor::weights::Archive;
use crate::tensor::{Shared, Tensor};

families! {
    /// Sizes of a mask head.
    sizes Config: HeadSizes;
    /// A mask head.
    network MaskHead: Head;
    unnamed PrsMed(mask_decoder::Config, MaskDecoder);
    #[cfg(test)] ToyHead(super::toy_head::Config, super::toy_head::ToyHead) = "toy_head";
}

impl Config {
    /// Sizes of PRS-Med's head, as [`mask_decoder::sizes`].
    pub fn prsmed(prompt_dim: i64, image_dim: i64, own: Option<(i64, [i64; 2])>, options: &HeadOptions) -> Self {
        Self::PrsMed(mask_decoder::sizes(prompt_dim, image_dim, own, options))
    }

    /// Sizes of the head in a file of the original code, as [`mask_decoder::of_weights`].
    ///
    /// # Errors
    /// [`crate::Error::Weights`] for another file.
    pub fn of_weights(archive: &Archive, attention_dropout: bool) -> Result<(Self, HeadOptions)> {
        mask_decoder::of_weights(archive, attention_dropout).map(|(sizes, options)| (Self::PrsMed(sizes), options))
    }
}

/// Draws the masks of `prompts`.
pub(super) fn masks(head: &Shared<MaskHead>, image: &ImageEmbedding, prompts: HeadPrompts, pass: HeadPass) -> Masks {
    let size = image.size;
    let logits = if pass.checkpoint {
        let (head, keep) = (head.clone(), Shared::new(prompts.keep.map(Tensor::shallow_clone)));
        let inputs: Vec<&Tensor> = [&image.map, prompts.states].into_iter().chain(&image.finer).collect();
        checkpoint(&inputs, move |inputs| {
            let finer = inputs[2..].iter().map(Tensor::shallow_clone).collect();
            let embedding = ImageEmbedding { map: inputs[0].shallow_clone(), finer, size };
            head.logits(&embedding, &HeadPrompts { states: &inputs[1], keep: keep.as_ref() }, pass.train)
        })
    } else {
        head.logits(image, &prompts, pass.train)
    };
    Masks { logits: head.enlarge(&logits, size) }
}
