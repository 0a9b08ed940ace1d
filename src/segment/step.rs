//! One pass of the model over a micro-batch: **one** language-model forward serves the text loss and the mask.
//!
//! What a pass needs of the host is decided before ([`Layout`]) and put on the device once ([`Inputs::to_device`]): the
//! pass itself uses tensors of known shapes only.
//!
//! Legend: b pictures, q questions, s sequences, t tokens of a sequence, d width of the language model, n supervised
//! tokens.

use super::layout::{Layout, Places};
use super::sight::{Kept, Sight};
use super::{Semantics, loss};
use crate::data::batch::Batch;
use crate::models::prsmed::PrsMed;
use crate::models::{llava, mask_decoder, mistral, tiny_vit};
use crate::tensor::transfer::Flight;
use crate::tensor::{Device, Kind, Tensor, dims, ledger, meta, scope};
use crate::trainer::Weight;
use std::ops::Range;
use std::sync::Arc;

/// A micro-batch on the host.
#[derive(Debug)]
pub struct Inputs {
    /// Where ids, images, prompts and labels stand.
    pub layout: Layout,
    /// What the vision tower says about the pictures.
    pub sight: Sight,
    /// `[b, 3, s, s]` u8.
    pub sam_image: Tensor,
    /// `[q, 1, s, s]` u8, 255 = foreground.
    pub mask: Tensor,
    /// `[q]` i64.
    pub class_label: Tensor,
}

impl Inputs {
    /// From a collated batch; a picture becomes `image_tokens` tokens. What the tower says of new pictures goes to `kept`.
    ///
    /// # Panics
    /// When the batch's tensors do not have the documented types.
    pub fn from_batch(batch: Batch, semantics: Semantics, image_tokens: i64, kept: Option<&Arc<Kept>>) -> Self {
        let ids = Vec::<Vec<i64>>::try_from(&batch.text_ids).expect("text_ids is i64 [q, l]");
        let mask = Vec::<Vec<bool>>::try_from(&batch.text_mask).expect("text_mask is bool [q, l]");
        let start = |start: &i64| usize::try_from(*start).expect("not negative");
        let answer_starts: Vec<usize> = batch.answer_start.iter().map(start).collect();
        let texts = real_ids(&ids, &mask, semantics);
        Self {
            layout: Layout::new(texts, &answer_starts, &batch.groups, semantics, image_tokens),
            sight: Sight::new(batch.clip, kept.cloned()),
            sam_image: batch.sam_image,
            mask: batch.mask,
            class_label: batch.class_label,
        }
    }

    /// The same on a card, once `flight` has landed.
    #[must_use]
    pub fn send(self, flight: &mut Flight) -> Self {
        Self {
            layout: self.layout,
            sight: self.sight.send(flight),
            sam_image: flight.send(&self.sam_image),
            mask: flight.send(&self.mask),
            class_label: flight.send(&self.class_label),
        }
    }

    /// The targets on `device`, `[q, 1, s, s]` f32 in 0..=1.
    pub fn target(&self, device: Device) -> Tensor {
        self.mask.to_device(device).to_kind(Kind::Float) / 255.0
    }

    /// The same pictures in order, at most `most` (1 or more) together; tensors are views.
    pub fn split(&self, most: usize) -> Vec<Self> {
        let (pictures, most) = (self.layout.pictures(), most.max(1));
        (0..pictures).step_by(most).map(|first| self.part(first..pictures.min(first + most))).collect()
    }

    /// The pictures of `range` with their questions.
    fn part(&self, range: Range<usize>) -> Self {
        let of = |tensor: &Tensor, range: &Range<usize>| {
            let [first, count] = [range.start, range.len()].map(|n| i64::try_from(n).expect("a few samples"));
            tensor.narrow(0, first, count)
        };
        let questions = self.layout.questions_of(&range);
        Self {
            layout: self.layout.part(&range),
            sight: self.sight.part(&range),
            sam_image: of(&self.sam_image, &range),
            mask: of(&self.mask, &questions),
            class_label: of(&self.class_label, &questions),
        }
    }

    /// Questions and supervised tokens.
    pub fn weight(&self) -> Weight {
        #[expect(clippy::cast_precision_loss, reason = "counts are small")]
        let (samples, tokens) = (self.layout.questions() as f64, self.layout.tokens() as f64);
        Weight { samples, tokens }
    }

    /// Everything that a pass needs, as the share of an effective batch weighing `whole`.
    pub fn to_device(&self, model: &PrsMed, whole: Weight) -> Prepared {
        self.prepared(&self.layout, model, whole)
    }

    /// The same with another layout of these inputs, and sharing no memory with them.
    pub fn to_device_apart(&self, layout: &Layout, model: &PrsMed, whole: Weight) -> Prepared {
        let prepared = self.prepared(layout, model, whole);
        let _category = ledger::enter(ledger::Category::Inputs);
        Prepared {
            clip: prepared.clip.copy(),
            sam_image: prepared.sam_image.copy(),
            class_label: prepared.class_label.copy(),
            ..prepared
        }
    }

    fn prepared(&self, layout: &Layout, model: &PrsMed, whole: Weight) -> Prepared {
        let device = model.options().device;
        let clip = self.sight.prepare(model);
        let _category = ledger::enter(ledger::Category::Inputs);
        #[expect(clippy::cast_possible_truncation, reason = "counts far below 2^24")]
        let whole = [whole.tokens.max(1.0) as f32, whole.samples as f32];
        Prepared {
            places: layout.to_device(device),
            semantics: layout.semantics(),
            clip,
            sam_image: self.sam_image.to_device(device),
            mask: self.target(device),
            class_label: self.class_label.to_device(device),
            whole: Tensor::from_slice(&whole).to_device(device),
        }
    }
}

/// A micro-batch on the model's device: all that a pass reads besides the weights.
#[derive(Debug)]
pub struct Prepared {
    /// Where ids, images, prompts and labels stand.
    pub places: Places,
    /// The arithmetic.
    pub semantics: Semantics,
    /// What [`PrsMed::image_tokens`] takes: pictures `[b, 3, c, c]`, or kept features `[b, p, w]`.
    pub clip: Tensor,
    /// `[b, 3, s, s]` u8.
    pub sam_image: Tensor,
    /// `[q, 1, s, s]` f32 in 0..=1.
    pub mask: Tensor,
    /// `[q]` i64.
    pub class_label: Tensor,
    /// Supervised tokens (at least 1) and samples of the effective batch, `[2]` f32.
    pub whole: Tensor,
}

impl Prepared {
    /// All tensors; micro-batches of the same kind and sizes have the same number of them, of the same shapes.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let mut all = self.places.tensors();
        all.extend([&self.clip, &self.sam_image, &self.mask, &self.class_label, &self.whole]);
        all
    }
}

/// Ids that are real under the semantics' padding rule.
pub fn real_ids(ids: &[Vec<i64>], mask: &[Vec<bool>], semantics: Semantics) -> Vec<Vec<i64>> {
    ids.iter()
        .zip(mask)
        .map(|(ids, mask)| {
            let real = ids.iter().zip(mask).filter(|(id, keep)| **keep && !(semantics.drops_zero_ids() && **id == 0));
            real.map(|(id, _)| *id).collect()
        })
        .collect()
}

/// How a pass runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pass {
    /// Of the language model.
    pub llm: mistral::Pass,
    /// Of the image encoder.
    pub encoder: tiny_vit::Pass,
    /// Of the mask decoder.
    pub decoder: mask_decoder::Pass,
}

impl Pass {
    /// Changes nothing, drops nothing.
    pub fn evaluation() -> Self {
        Self {
            llm: mistral::Pass::default(),
            encoder: PrsMed::evaluation_pass(),
            decoder: mask_decoder::Pass::default(),
        }
    }
}

/// What a pass gives.
#[derive(Debug)]
pub struct Outputs {
    /// States after the final norm, `[s, t, d]`.
    pub states: Tensor,
    /// `[b, c, h, w]`.
    pub embedding: Tensor,
    /// `[q, 1, s, s]` fp32.
    pub mask_logits: Tensor,
    /// `[q, classes]` fp32.
    pub class_logits: Tensor,
}

/// Runs the model once.
pub fn forward(model: &PrsMed, inputs: &Prepared, pass: Pass) -> Outputs {
    let places = &inputs.places;
    let embeds = embeds(model, &inputs.clip, places);
    let states = model.llm().forward_seen(&embeds, places.sight(), pass.llm);
    let embedding = model.embed_image(&inputs.sam_image, pass.encoder);
    let mask_logits = {
        let embedding = of_questions(&embedding, places);
        match &places.prompt {
            Some(prompt) => {
                let [q, l] = dims(prompt);
                let [_s, _t, d] = dims(&states);
                let prompt = states.flatten(0, 1).index_select(0, &prompt.flatten(0, 1)).view([q, l, d]);
                model.mask_logits(&embedding, &prompt, places.prompt_keep.as_ref(), pass.decoder)
            }
            None => model.mask_logits(&embedding, &states, None, pass.decoder),
        }
    };
    let class_logits = of_questions(&model.class_logits(&embedding), places);
    Outputs { states, embedding, mask_logits, class_logits }
}

/// Embedded ids with the image's tokens among them.
///
/// # Shapes
/// `clip` as [`PrsMed::image_tokens`] takes it, to `[s, t, d]`.
pub fn embeds(model: &PrsMed, clip: &Tensor, places: &Places) -> Tensor {
    let image = model.image_tokens(clip);
    llava::splice(&model.llm().embed(&places.ids), &image, &places.index)
}

/// What belongs to pictures, for each question: `[b, ..]` to `[q, ..]`.
fn of_questions(xs: &Tensor, places: &Places) -> Tensor {
    places.pictures.as_ref().map_or_else(|| xs.shallow_clone(), |pictures| xs.index_select(0, pictures))
}

/// The three losses of a pass, as shares of an effective batch.
#[derive(Debug)]
pub struct Losses {
    /// Cross-entropy of the answer, mean over the effective batch's supervised tokens.
    pub text: Tensor,
    /// Structure loss, mean over its samples.
    pub mask: Tensor,
    /// Cross-entropy of the modality, mean over its samples.
    pub class: Tensor,
}

/// Computes all three.
pub fn losses(model: &PrsMed, inputs: &Prepared, outputs: &Outputs) -> Losses {
    let _scope = scope::enter("losses");
    let text = text_loss(model, inputs, &outputs.states);
    let samples = inputs.whole.get(1);
    Losses {
        text,
        mask: loss::structure(&outputs.mask_logits, &inputs.mask, inputs.semantics) / &samples,
        class: loss::class(&outputs.class_logits, &inputs.class_label) / &samples,
    }
}

/// Cross-entropy of the answers from states `[s, t, d]`, as a share of the effective batch.
fn text_loss(model: &PrsMed, inputs: &Prepared, states: &Tensor) -> Tensor {
    model.llm().cross_entropy(&supervised(inputs, states), &inputs.places.labels) / inputs.whole.get(0)
}

/// The text loss of the language model alone, which sees zeros in place of `pictures`.
pub fn language_loss(model: &PrsMed, inputs: &Prepared, pictures: usize, pass: mistral::Pass) -> Tensor {
    let options = model.options();
    let count = i64::try_from(pictures).expect("a small batch");
    let shape = [count, model.num_image_tokens(), model.llm().config().hidden_size];
    let image = Tensor::zeros(shape, (options.compute, options.device));
    let embeds = llava::splice(&model.llm().embed(&inputs.places.ids), &image, &inputs.places.index);
    text_loss(model, inputs, &model.llm().forward_seen(&embeds, inputs.places.sight(), pass))
}

/// Supervised tokens whose most likely prediction is right.
pub fn tokens_right(model: &PrsMed, inputs: &Prepared, outputs: &Outputs) -> f64 {
    meta::number(&model.llm().count_right(&supervised(inputs, &outputs.states), &inputs.places.labels))
}

/// States that predict supervised tokens, of states `[s, t, d]`: `[n, d]`.
fn supervised(inputs: &Prepared, states: &Tensor) -> Tensor {
    states.flatten(0, 1).index_select(0, &inputs.places.supervised)
}
