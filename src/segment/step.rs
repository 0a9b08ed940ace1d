//! A micro-batch and its losses.
//!
//! [`Layout`] builds all index tensors on the host, [`VisionInput::resolve`] provides vision features, and
//! [`Inputs::to_device`] copies everything once. The [`pass`] then needs no host synchronisation.
//!
//! Legend: b images, q questions, m targets, s sequences, t tokens of a sequence, d width of the language model, n
//! supervised tokens.

pub use super::pass::{Outputs, Pass};

use super::layout::Layout;
use super::layout::device::DeviceLayout;
use super::pass::{self, Images, Segmented};
use super::vision_features::{FeatureCache, VisionInput};
use super::{Semantics, loss};
use crate::data::geometry::Geometry;
use crate::models::prsmed::PrsMed;
use crate::models::{decoder, llava};
use crate::segment::batch::Batch;
use crate::tensor::async_copy::AsyncCopy;
use crate::tensor::{Device, Kind, Tensor, ledger, meta, module_path};
use crate::trainer::BatchSize;
use std::ops::Range;
use std::sync::Arc;

/// A micro-batch on the host.
#[derive(Debug)]
pub struct Inputs {
    /// Index tensors: positions, attention blocks, prompts and labels.
    pub layout: Layout,
    /// Images for the vision tower, or its cached features.
    pub vision: VisionInput,
    /// `[b, 3, s, s]` u8.
    pub sam_image: Tensor,
    /// `[m, 1, s, s]` u8, 255 = foreground.
    pub mask: Tensor,
    /// For each target, whether its mask is known. `None` if all masks of the data set are, one for each question.
    pub has_mask: Option<Vec<bool>>,
    /// Numbers of the masks of each question, `[q, 1 + moved, g]`, for words that follow them.
    pub geometry: Option<Vec<f32>>,
    /// `[q]` i64.
    pub class_label: Tensor,
    /// Rows of the questions in the manifest; empty for batches that are not from a manifest.
    pub rows: Vec<usize>,
}

impl Inputs {
    /// From a collated batch for `model`. New vision features go to the cache.
    pub fn from_batch(batch: Batch, semantics: Semantics, model: &PrsMed, cache: Option<&Arc<FeatureCache>>) -> Self {
        let texts = batch.texts.into_iter().map(|ids| real_ids(ids, semantics)).collect();
        let spans = model.spans(batch.groups.len());
        let layout = Layout::new(texts, &batch.answer_starts, &batch.groups, semantics, spans);
        let layout = layout.with_targets(batch.targets, model.num_masks()).with_read_masks(model.reads_masks());
        let layout = layout.with_moved(batch.moved);
        Self {
            geometry: layout.geometry(batch.geometry.chunks(Geometry::LEN)),
            layout,
            vision: VisionInput::new(batch.tower, cache.cloned()),
            sam_image: batch.sam_image,
            mask: batch.mask,
            has_mask: batch.has_mask,
            class_label: batch.class_label,
            rows: batch.rows,
        }
    }

    /// Starts the copy to a GPU; the result is valid once `copy` completes.
    #[must_use]
    pub fn send(self, copy: &mut AsyncCopy) -> Self {
        Self {
            layout: self.layout,
            vision: self.vision.send(copy),
            sam_image: copy.send(&self.sam_image),
            mask: copy.send(&self.mask),
            has_mask: self.has_mask,
            geometry: self.geometry,
            class_label: copy.send(&self.class_label),
            rows: self.rows,
        }
    }

    /// The masks on `device`, `[m, 1, s, s]` f32 in 0..=1.
    pub fn target(&self, device: Device) -> Tensor {
        self.mask.to_device(device).to_kind(Kind::Float) / 255.0
    }

    /// Parts of at most `most` images (1 or more), in order; tensors are views.
    pub fn split(&self, most: usize) -> Vec<Self> {
        let (images, most) = (self.layout.images(), most.max(1));
        (0..images).step_by(most).map(|first| self.part(first..images.min(first + most))).collect()
    }

    /// The images of `range` with their questions.
    fn part(&self, range: Range<usize>) -> Self {
        let of = |tensor: &Tensor, range: &Range<usize>| {
            let [first, count] = [range.start, range.len()].map(|n| i64::try_from(n).expect("a few samples"));
            tensor.narrow(0, first, count)
        };
        let questions = self.layout.questions_of(&range);
        let targets = self.layout.targets_of(&questions);
        Self {
            layout: self.layout.part(&range),
            vision: self.vision.part(&range),
            sam_image: of(&self.sam_image, &range),
            mask: of(&self.mask, &targets),
            has_mask: self.has_mask.as_ref().map(|has_mask| has_mask[targets].to_vec()),
            geometry: self.geometry.as_ref().map(|geometry| {
                let each = geometry.len() / self.layout.questions().max(1);
                geometry[each * questions.start..each * questions.end].to_vec()
            }),
            class_label: of(&self.class_label, &questions),
            rows: self.rows.get(questions).unwrap_or_default().to_vec(),
        }
    }

    /// Number of questions, of supervised tokens and of known masks.
    pub fn batch_size(&self) -> BatchSize {
        let (samples, tokens) = (self.layout.questions() as f64, self.layout.tokens() as f64);
        let known = |has_mask: &Vec<bool>| has_mask.iter().filter(|known| **known).count() as f64;
        BatchSize { samples, tokens, masks: self.has_mask.as_ref().map_or(samples, known) }
    }

    /// Numbers that a pass needs: supervised tokens (at least 1) and samples of the effective batch; if some masks of
    /// the data set are not known, also its known masks (at least 1) and 1 for each target with a mask, 0 for others.
    #[expect(clippy::cast_possible_truncation, reason = "counts far below 2^24")]
    fn numbers(&self, effective_batch: BatchSize) -> Vec<f32> {
        let mut numbers = vec![effective_batch.tokens.max(1.0) as f32, effective_batch.samples as f32];
        if let Some(has_mask) = &self.has_mask {
            numbers.push(effective_batch.masks.max(1.0) as f32);
            numbers.extend(has_mask.iter().map(|known| f32::from(u8::from(*known))));
        }
        numbers
    }

    /// Copies everything that a pass needs to the device of `vision`, the result of [`VisionInput::resolve`]. Losses
    /// become shares of `effective_batch`.
    pub fn to_device(&self, vision: Tensor, effective_batch: BatchSize) -> Prepared {
        self.prepared(&self.layout, vision, effective_batch)
    }

    /// As [`Self::to_device`], with another layout of these inputs, into separate memory.
    pub fn copy_to_device(&self, layout: &Layout, vision: Tensor, effective_batch: BatchSize) -> Prepared {
        let prepared = self.prepared(layout, vision, effective_batch);
        let _category = ledger::enter(ledger::Category::Inputs);
        Prepared {
            tower_input: prepared.tower_input.copy(),
            sam_image: prepared.sam_image.copy(),
            class_label: prepared.class_label.copy(),
            ..prepared
        }
    }

    fn prepared(&self, layout: &Layout, tower_input: Tensor, effective_batch: BatchSize) -> Prepared {
        let device = tower_input.device();
        let _category = ledger::enter(ledger::Category::Inputs);
        let mut numbers = self.numbers(effective_batch);
        let count = i64::try_from(numbers.len()).expect("a small batch");
        numbers.extend(self.geometry.iter().flatten());
        let (on_device, mut numbers) = layout.to_device_with(device, &numbers);
        // both travel in one copy
        let geometry = self.geometry.as_ref().map(|_| numbers.narrow(0, count, numbers.size()[0] - count));
        if geometry.is_some() {
            numbers = numbers.narrow(0, 0, count);
        }
        Prepared {
            layout: on_device,
            semantics: layout.semantics(),
            tower_input,
            sam_image: self.sam_image.to_device(device),
            mask: self.target(device),
            class_label: self.class_label.to_device(device),
            geometry,
            has_unknown_masks: self.has_mask.is_some(),
            numbers,
        }
    }
}

/// A micro-batch on the model's device: everything that a pass reads besides the weights.
#[derive(Debug)]
pub struct Prepared {
    /// Index tensors: positions, attention blocks, prompts and labels.
    pub layout: DeviceLayout,
    /// `reference` or `corrected`.
    pub semantics: Semantics,
    /// Input of [`PrsMed::image_tokens`]: images `[b, 3, c, c]`, or vision features `[b, p, w]`.
    pub tower_input: Tensor,
    /// `[b, 3, s, s]` u8.
    pub sam_image: Tensor,
    /// `[m, 1, s, s]` f32 in 0..=1.
    pub mask: Tensor,
    /// `[q]` i64.
    pub class_label: Tensor,
    /// Numbers of the masks of each question, `[q (1 + moved) g]` fp32, for words that follow them.
    pub geometry: Option<Tensor>,
    /// Whether some masks of the data set are not known.
    has_unknown_masks: bool,
    /// Loss denominators of the effective batch: supervised tokens (at least 1) and samples, `[2]` f32. With
    /// `has_unknown_masks`, `[3 + m]`: also known masks (at least 1), and 1 or 0 for each target with or without a
    /// mask.
    numbers: Tensor,
}

impl Prepared {
    /// With other masks for the words to follow.
    #[must_use]
    pub fn with_geometry(self, geometry: &[f32]) -> Self {
        let _category = ledger::enter(ledger::Category::Inputs);
        Self { geometry: Some(Tensor::from_slice(geometry).to_device(self.tower_input.device())), ..self }
    }

    /// All tensors; micro-batches of one kind and size have equally many of them, of the same shapes.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let mut all = self.layout.tensors();
        all.extend([&self.tower_input, &self.sam_image, &self.mask, &self.class_label, &self.numbers]);
        all.extend(&self.geometry);
        all
    }
}

/// The ids of a text that are not padding under the rule of the semantics: `reference` takes id 0 for padding.
pub fn real_ids(mut ids: Vec<i64>, semantics: Semantics) -> Vec<i64> {
    ids.retain(|id| *id != 0 || !semantics.drops_zero_ids());
    ids
}

/// Runs the model once.
pub fn forward(model: &PrsMed, inputs: &Prepared, pass: Pass) -> Outputs {
    let images = Images { tower_input: &inputs.tower_input, segmented: Segmented::Pixels(&inputs.sam_image) };
    pass::forward(model, &inputs.layout, images, pass, None)
}

/// The losses of a pass, as shares of an effective batch.
#[derive(Debug)]
pub struct Losses {
    /// Cross-entropy of the answer, mean over the effective batch's supervised tokens.
    pub text: Tensor,
    /// As `text`, of words that follow the masks. Its gradient reaches the reader of masks only.
    pub words: Option<Tensor>,
    /// Structure loss, mean over its samples with a mask.
    pub mask: Tensor,
    /// Cross-entropy of the modality, mean over its samples.
    pub class: Tensor,
}

/// Computes the losses.
pub fn losses(model: &PrsMed, inputs: &Prepared, outputs: &Outputs) -> Losses {
    let _module = module_path::enter("losses");
    let text = text_loss(model, inputs, &outputs.states);
    let words = words_loss(model, inputs, outputs);
    let samples = inputs.numbers.get(1);
    let structure =
        |factors: Option<&Tensor>| loss::structure(&outputs.mask_logits, &inputs.mask, inputs.semantics, factors);
    let mask = if inputs.has_unknown_masks {
        let targets = inputs.numbers.size()[0] - 3;
        structure(Some(&inputs.numbers.narrow(0, 3, targets))) / inputs.numbers.get(2)
    } else {
        structure(None) / &samples
    };
    Losses { text, words, mask, class: loss::class(&outputs.class_logits, &inputs.class_label) / &samples }
}

/// Cross-entropy of the answers from states `[s, t, d]`, as a share of the effective batch.
fn text_loss(model: &PrsMed, inputs: &Prepared, states: &Tensor) -> Tensor {
    model.llm().cross_entropy(&supervised(inputs, states), &inputs.layout.labels) / inputs.numbers.get(0)
}

/// Cross-entropy of words that follow the masks of `inputs`, also of moved ones, as a share of the effective batch; `None`
/// if the model has no such words.
pub fn words_loss(model: &PrsMed, inputs: &Prepared, outputs: &Outputs) -> Option<Tensor> {
    let (states, labels) = read(model, inputs, outputs)?;
    Some(model.llm().cross_entropy_of_frozen_head(&states, labels) / inputs.numbers.get(0))
}

/// States of words with what the masks add, and their labels.
fn read<'a>(model: &PrsMed, inputs: &'a Prepared, outputs: &Outputs) -> Option<(Tensor, &'a Tensor)> {
    let (geometry, [states, labels, masks]) = (inputs.geometry.as_ref()?, inputs.layout.read.as_ref()?);
    let states = outputs.states.detach().flatten(0, 1).index_select(0, states);
    let rows = geometry.view([i64::try_from(inputs.layout.mask_rows).expect("a small batch"), -1]);
    Some((model.read_masks(&states, &rows.index_select(0, masks)), labels))
}

/// Text loss of a pass through the language model only, with zeros for `images`.
pub fn language_loss(model: &PrsMed, inputs: &Prepared, images: usize, pass: decoder::DecoderPass) -> Tensor {
    let options = model.options();
    let count = i64::try_from(images).expect("a small batch");
    let shape = [count, model.config().tower.max_tokens(), model.llm().config().hidden_size];
    let image = Tensor::zeros(shape, (options.compute, options.device));
    let embeds = llava::splice(&model.llm().embed(&inputs.layout.ids), &image, &inputs.layout.index);
    let layout = &inputs.layout;
    let states = model.llm().forward_with(&embeds, layout.attention(), layout.positions.as_ref(), pass);
    text_loss(model, inputs, &states)
}

/// Supervised tokens whose most likely prediction is right.
pub fn tokens_right(model: &PrsMed, inputs: &Prepared, outputs: &Outputs) -> f64 {
    let own = || (supervised(inputs, &outputs.states), &inputs.layout.labels);
    let (states, labels) = read(model, inputs, outputs).unwrap_or_else(own);
    meta::number(&model.llm().count_correct(&states, labels))
}

/// States that predict supervised tokens, of states `[s, t, d]`: `[n, d]`.
fn supervised(inputs: &Prepared, states: &Tensor) -> Tensor {
    states.flatten(0, 1).index_select(0, &inputs.layout.supervised)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::tower::ImageSpan;

    #[test]
    fn only_reference_semantics_drops_ids_0() {
        assert_eq!(real_ids(vec![1, 0, 5, 0], Semantics::Reference), [1, 5]);
        assert_eq!(real_ids(vec![1, 0, 5, 0], Semantics::Corrected), [1, 0, 5, 0]);
    }

    #[test]
    fn parts_of_a_packed_batch_keep_the_targets_of_their_questions() {
        let texts: Vec<Vec<i64>> = (0..6).map(|i| vec![1, crate::data::text::IMAGE_TOKEN, 5 + i, 20 + i]).collect();
        let numbers = |count: i64| Tensor::arange(count, (Kind::Uint8, Device::Cpu)).view([count, 1, 1, 1]);
        let inputs = Inputs {
            layout: Layout::new(texts, &[3; 6], &[2, 1, 3], Semantics::Corrected, vec![ImageSpan::in_a_row(4); 3]),
            vision: numbers(3).into(),
            sam_image: numbers(3),
            mask: numbers(6),
            has_mask: Some(vec![true, false, true, false, false, true]),
            geometry: None,
            class_label: Tensor::arange(6, (Kind::Int64, Device::Cpu)) + 10,
            rows: (20..26).collect(),
        };
        let rows: Vec<Vec<usize>> = inputs.split(2).into_iter().map(|part| part.rows).collect();
        assert_eq!(rows, [vec![20, 21, 22], vec![23, 24, 25]]);
        let masks: Vec<f64> = inputs.split(2).iter().map(|part| part.batch_size().masks).collect();
        assert_eq!((masks, inputs.batch_size().masks), (vec![2.0, 1.0], 3.0));
        let list = |tensor: &Tensor| Vec::<i64>::try_from(tensor.to_kind(Kind::Int64).reshape([-1])).unwrap();
        let targets = |most: usize| -> Vec<[Vec<i64>; 3]> {
            let parts = inputs.split(most);
            parts.iter().map(|part| [&part.sam_image, &part.mask, &part.class_label].map(list)).collect()
        };
        assert_eq!(
            targets(1),
            [
                [vec![0], vec![0, 1], vec![10, 11]],
                [vec![1], vec![2], vec![12]],
                [vec![2], vec![3, 4, 5], vec![13, 14, 15]]
            ]
        );
        assert_eq!(
            targets(2),
            [[vec![0, 1], vec![0, 1, 2], vec![10, 11, 12]], [vec![2], vec![3, 4, 5], vec![13, 14, 15]]]
        );
    }
}
