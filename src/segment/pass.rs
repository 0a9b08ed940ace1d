//! Forward pass: the same for training, validation, evaluation, prediction and dry runs. **One** language-model forward
//! serves the text loss and the mask.
//!
//! Legend: b images, q questions, m targets, k masks of a question, s sequences, t tokens of a sequence, l tokens of
//! a prompt, d width of the language model.

use super::layout::device::DeviceLayout;
use crate::models::decoder::{self, KvCache};
use crate::models::image_encoder::{self, ImageEmbedding};
use crate::models::llava;
use crate::models::mask_head::{self, HeadPrompts};
use crate::models::prsmed::PrsMed;
use crate::tensor::{Tensor, dims};

/// Options of a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Pass {
    /// Options of the language model.
    pub llm: decoder::DecoderPass,
    /// Options of the image encoder.
    pub encoder: image_encoder::EncoderPass,
    /// Options of the mask head.
    pub decoder: mask_head::HeadPass,
}

impl Pass {
    /// Without dropout and without updates of running statistics.
    pub fn evaluation() -> Self {
        Self::default()
    }
}

/// Images of a pass, as the encoders read them or as they encoded them before.
#[derive(Debug, Clone, Copy)]
pub struct Images<'a> {
    /// Input of [`PrsMed::image_tokens`]: images `[b, 3, c, c]`, or vision features `[b, p, w]`.
    pub tower_input: &'a Tensor,
    /// Input or output of the image encoder.
    pub segmented: Segmented<'a>,
}

/// Input or output of the image encoder.
#[derive(Debug, Clone, Copy)]
pub enum Segmented<'a> {
    /// Images `[b, 3, s, s]` u8.
    Pixels(&'a Tensor),
    /// Their embedding, [`PrsMed::embed_image`].
    Embedding(&'a ImageEmbedding),
}

/// Outputs of a pass.
#[derive(Debug)]
pub struct Outputs {
    /// States after the final norm, `[s, t, d]`.
    pub states: Tensor,
    /// Of b images.
    pub embedding: ImageEmbedding,
    /// `[m, 1, s, s]` fp32.
    pub mask_logits: Tensor,
    /// `[q, classes]` fp32.
    pub class_logits: Tensor,
}

/// Runs the model once. The language model stores keys and values in `cache`, from which it generates an answer to a
/// single question without padding.
pub fn forward(
    model: &PrsMed,
    layout: &DeviceLayout,
    images: Images,
    pass: Pass,
    cache: Option<&mut KvCache>,
) -> Outputs {
    let image_tokens = model.image_tokens(images.tower_input);
    let embeds = llava::splice(&model.llm().embed(&layout.ids), &image_tokens, &layout.index);
    drop(image_tokens);
    let states = match cache {
        Some(cache) => model.llm().forward_cached(&embeds, layout.positions.as_ref(), cache),
        None => model.llm().forward_with(&embeds, layout.attention(), layout.positions.as_ref(), pass.llm),
    };
    let embedding = match images.segmented {
        Segmented::Pixels(pixels) => model.embed_image(pixels, pass.encoder),
        Segmented::Embedding(embedding) => embedding.map_each(Tensor::shallow_clone),
    };
    let masks = {
        let embedding = embedding.map_each(|map| of_questions(map, layout));
        let [s, t, d] = dims(&states);
        match &layout.prompt {
            // texts without answers are prompts as a whole
            Some(prompt) if layout.prompt_keep.is_some() || dims(prompt) != [s, t] => {
                let [q, l] = dims(prompt);
                let prompt = states.flatten(0, 1).index_select(0, &prompt.flatten(0, 1)).view([q, l, d]);
                let prompts = HeadPrompts { states: &prompt, keep: layout.prompt_keep.as_ref() };
                model.masks(&embedding, prompts, pass.decoder)
            }
            _ => model.masks(&embedding, HeadPrompts { states: &states, keep: None }, pass.decoder),
        }
    };
    let class_logits = of_questions(&model.class_logits(&embedding), layout);
    Outputs { states, embedding, mask_logits: of_targets(masks.logits, layout), class_logits }
}

/// Masks of the targets, of those of the questions: `[q, k, s, s]` to `[m, 1, s, s]`.
fn of_targets(logits: Tensor, layout: &DeviceLayout) -> Tensor {
    let [_q, k, h, w] = dims(&logits);
    let all = if k == 1 { logits } else { logits.reshape([-1, 1, h, w]) };
    layout.targets.as_ref().map_or_else(|| all.shallow_clone(), |targets| all.index_select(0, targets))
}

/// Rows of images, repeated for their questions: `[b, ..]` to `[q, ..]`.
fn of_questions(xs: &Tensor, layout: &DeviceLayout) -> Tensor {
    layout.images.as_ref().map_or_else(|| xs.shallow_clone(), |images| xs.index_select(0, images))
}
