//! One pass of the model over a micro-batch: **one** language-model forward serves the text loss and the mask.
//!
//! Legend: b batch, t spliced tokens, d width of the language model, n supervised tokens.

use super::{Semantics, loss};
use crate::data::batch::Batch;
use crate::models::llava::{IMAGE_TOKEN, Splice};
use crate::models::prsmed::PrsMed;
use crate::models::{mistral, tiny_vit};
use crate::tensor::{Kind, Tensor, dims, meta, scope};
use crate::trainer::Weight;

/// What a pass needs, with texts as host ids so that the splice costs no device round trip.
#[derive(Debug)]
pub struct Inputs {
    /// Real ids of each sample, one [`IMAGE_TOKEN`] in each.
    pub texts: Vec<Vec<i64>>,
    /// Index in each text where the answer begins (its length when there is none).
    pub answer_start: Vec<usize>,
    /// `[b, 3, c, c]` f32, normalised.
    pub clip_image: Tensor,
    /// `[b, 3, s, s]` u8.
    pub sam_image: Tensor,
    /// `[b, 1, s, s]` f32 in 0..=1.
    pub mask: Tensor,
    /// `[b]` i64.
    pub class_label: Tensor,
}

impl Inputs {
    /// From a collated batch.
    ///
    /// # Panics
    /// When the batch's tensors do not have the documented types.
    pub fn from_batch(batch: &Batch, semantics: Semantics) -> Self {
        let ids = Vec::<Vec<i64>>::try_from(&batch.text_ids).expect("text_ids is i64 [b, l]");
        let mask = Vec::<Vec<bool>>::try_from(&batch.text_mask).expect("text_mask is bool [b, l]");
        let answer_start = batch.answer_start.iter().map(|&s| usize::try_from(s).expect("not negative")).collect();
        Self {
            texts: real_ids(&ids, &mask, semantics),
            answer_start,
            clip_image: batch.clip_image.shallow_clone(),
            sam_image: batch.sam_image.shallow_clone(),
            mask: batch.mask.shallow_clone(),
            class_label: batch.class_label.shallow_clone(),
        }
    }

    /// Images and supervised tokens.
    pub fn weight(&self, semantics: Semantics) -> Weight {
        let tokens: usize = (0..self.texts.len()).map(|row| self.supervised(row, semantics).count()).sum();
        #[expect(clippy::cast_precision_loss, reason = "counts are small")]
        let (samples, tokens) = (self.texts.len() as f64, tokens as f64);
        Weight { samples, tokens }
    }

    /// Indices of the ids of `row` that the text loss covers.
    fn supervised(&self, row: usize, semantics: Semantics) -> impl Iterator<Item = usize> {
        let text = &self.texts[row];
        let first = if semantics.labels_answer_only() { self.answer_start[row].max(1) } else { 1 };
        (first..text.len()).filter(|&i| text[i] != IMAGE_TOKEN)
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
    /// Dropout of the mask decoder on.
    pub decoder_dropout: bool,
}

impl Pass {
    /// Changes nothing, drops nothing.
    pub fn evaluation() -> Self {
        Self { llm: mistral::Pass::default(), encoder: PrsMed::evaluation_pass(), decoder_dropout: false }
    }
}

/// What a pass gives.
#[derive(Debug)]
pub struct Outputs {
    /// States after the final norm, `[b, t, d]`.
    pub states: Tensor,
    /// `[b, c, h, w]`.
    pub embedding: Tensor,
    /// `[b, 1, s, s]` fp32.
    pub mask_logits: Tensor,
    /// `[b, classes]` fp32.
    pub class_logits: Tensor,
    splice: Splice,
}

/// Runs the model once.
pub fn forward(model: &PrsMed, inputs: &Inputs, semantics: Semantics, pass: Pass) -> Outputs {
    let image = model.image_tokens(&inputs.clip_image);
    let splice = Splice::new(inputs.texts.clone(), image.size()[1]);
    let embeds = splice.embed(&image, |ids| model.llm().embed(ids));
    let padded = (0..inputs.texts.len()).any(|row| splice.row_len(row) < splice.len);
    // causal attention hides right-padding from real tokens; only `reference` reads the padding's own states
    let keep =
        (padded && !semantics.hides_answer()).then(|| splice.keep_before(embeds.device(), |row| splice.row_len(row)));
    let states = model.llm().forward(&embeds, keep.as_ref(), pass.llm);
    let embedding = model.embed_image(&inputs.sam_image, pass.encoder);
    let mask_logits = if semantics.hides_answer() {
        let end = |row: usize| splice.position(row, inputs.answer_start[row]);
        let longest = (0..inputs.texts.len()).map(end).max().unwrap_or(splice.len);
        let prompt = states.narrow(1, 0, longest);
        let ragged = (0..inputs.texts.len()).any(|row| end(row) < longest);
        let keep = ragged.then(|| splice.keep_before(states.device(), end).narrow(1, 0, longest));
        model.mask_logits(&embedding, &prompt, keep.as_ref(), pass.decoder_dropout)
    } else {
        model.mask_logits(&embedding, &states, None, pass.decoder_dropout)
    };
    let class_logits = model.class_logits(&embedding);
    Outputs { states, embedding, mask_logits, class_logits, splice }
}

/// The three losses of a pass, as shares of an effective batch weighing `whole`.
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
pub fn losses(model: &PrsMed, inputs: &Inputs, outputs: &Outputs, semantics: Semantics, whole: Weight) -> Losses {
    let device = outputs.mask_logits.device();
    let _scope = scope::enter("losses");
    let (logits, labels) = supervised_logits(model, inputs, outputs, semantics);
    let mask = inputs.mask.to_device(device).to_kind(Kind::Float);
    Losses {
        text: loss::text(&logits, &labels) / whole.tokens.max(1.0),
        mask: loss::structure(&outputs.mask_logits, &mask, semantics) / whole.samples,
        class: loss::class(&outputs.class_logits, &inputs.class_label.to_device(device)) / whole.samples,
    }
}

/// Supervised tokens whose most likely prediction is right, and all supervised tokens.
pub fn tokens_right(model: &PrsMed, inputs: &Inputs, outputs: &Outputs, semantics: Semantics) -> (f64, f64) {
    let (logits, labels) = supervised_logits(model, inputs, outputs, semantics);
    let right = logits.argmax(-1, false).eq_tensor(&labels).sum(Kind::Double);
    (meta::number(&right), inputs.weight(semantics).tokens)
}

/// `lm_head` at supervised positions only.
///
/// # Shapes
/// Logits `[n, vocab]` in the compute dtype, labels `[n]` i64.
fn supervised_logits(model: &PrsMed, inputs: &Inputs, outputs: &Outputs, semantics: Semantics) -> (Tensor, Tensor) {
    let device = outputs.states.device();
    let [b, t, d] = dims(&outputs.states);
    let (mut positions, mut labels) = (Vec::new(), Vec::new());
    for (row, text) in inputs.texts.iter().enumerate() {
        let first = i64::try_from(row).expect("small") * t;
        for index in inputs.supervised(row, semantics) {
            // the state just before a token predicts it
            positions.push(first + outputs.splice.position(row, index) - 1);
            labels.push(text[index]);
        }
    }
    let states = outputs.states.reshape([b * t, d]);
    let states = states.index_select(0, &Tensor::from_slice(&positions).to_device(device));
    (model.llm().logits(&states), Tensor::from_slice(&labels).to_device(device))
}
