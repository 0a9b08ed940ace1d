//! Index tensors of a layout on a device.

use super::read::ReadIndices;
use super::{Layout, to_i64};
use crate::data::sample::MOVED_MASKS;
use crate::models::decoder::AttentionPattern;
use crate::tensor::async_copy::{Bundle, BundlePlace, Sent};
use crate::tensor::functions::Segments;
use crate::tensor::{Device, Tensor};

impl Layout {
    /// Builds the index tensors and copies them to `device`, in one copy.
    pub fn to_device(&self, device: Device) -> DeviceLayout {
        self.to_device_with(device, &[]).0
    }

    /// As [`Self::to_device`]; `numbers` are copied with them, `[n]` f32.
    pub fn to_device_with(&self, device: Device, numbers: &[f32]) -> (DeviceLayout, Tensor) {
        let mut bundle = Bundle::default();
        let [s, t, q, l] = [self.sequences(), self.sizes.sequence, self.questions(), self.sizes.prompt].map(to_i64);
        let (targets, labels) = self.supervised_targets();
        let is_ragged = self.lengths.iter().any(|length| *length < self.sizes.sequence);
        let list = |bundle: &mut Bundle, values: &[i64]| bundle.numbers(values, &[to_i64(values.len())]);
        let positions = (!self.has_plain_positions()).then(|| {
            let values = self.positions();
            let axes = [to_i64(values.len()) / (s * t).max(1), s, t];
            bundle.numbers(&values, if axes[0] == 1 { &axes[1..] } else { &axes })
        });
        let packed = self.is_packed().then(|| {
            let blocks = bundle.numbers(&self.blocks(), &[s, t]);
            (blocks, SentSegments::add(self, &mut bundle))
        });
        // causal attention hides right-padding from real tokens; only `reference` reads the padding's own states
        let reads_padding = packed.is_none() && is_ragged && !self.semantics.hides_answer();
        let real = reads_padding.then(|| bundle.flags(&self.real(), &[s, t]));
        let is_one_each = self.questions.iter().enumerate().all(|(index, question)| question.image == index);
        let has_short_prompts =
            self.is_padded || self.questions.iter().any(|question| self.prompt(question) < self.sizes.prompt);
        let hides_answer = self.semantics.hides_answer();
        let ids = list(&mut bundle, &self.ids());
        let index = bundle.numbers(&self.splice_index(), &[s, t]);
        let prompt = hides_answer.then(|| bundle.numbers(&self.prompt_index(), &[q, l]));
        let prompt_keep = (hides_answer && has_short_prompts).then(|| bundle.flags(&self.prompt_keep(), &[q, l]));
        let images: Vec<i64> = self.questions.iter().map(|question| to_i64(question.image)).collect();
        let images = (!is_one_each).then(|| list(&mut bundle, &images));
        let masks = self.target_index().map(|masks| list(&mut bundle, &masks));
        let read = self.reads_masks.then(|| {
            let ReadIndices { states, labels, masks } = self.read();
            [states, labels, masks].map(|values| list(&mut bundle, &values))
        });
        let supervised = list(&mut bundle, &targets);
        let labels = list(&mut bundle, &labels);
        let numbers = bundle.floats(numbers, &[to_i64(numbers.len())]);
        let sent = bundle.send(device);
        let attention = match (packed, real) {
            (Some((blocks, segments)), _) => {
                AttentionLayout::Packed { blocks: sent.get(blocks), segments: segments.get(&sent) }
            }
            (None, Some(real)) => AttentionLayout::Padded(sent.get(real)),
            (None, None) => AttentionLayout::Causal,
        };
        let layout = DeviceLayout {
            ids: sent.get(ids),
            index: sent.get(index),
            positions: positions.map(|place| sent.get(place)),
            attention,
            prompt: prompt.map(|place| sent.get(place)),
            prompt_keep: prompt_keep.map(|place| sent.get(place)),
            images: images.map(|place| sent.get(place)),
            targets: masks.map(|place| sent.get(place)),
            mask_rows: self.questions() * (1 + MOVED_MASKS),
            read: read.map(|places| places.map(|place| sent.get(place))),
            supervised: sent.get(supervised),
            labels: sent.get(labels),
        };
        (layout, sent.get(numbers))
    }
}

/// Attention mask of a forward pass.
#[derive(Debug)]
enum AttentionLayout {
    Causal,
    Padded(Tensor),
    Packed { blocks: Tensor, segments: Segments },
}

/// Places of [`Segments`] in a bundle.
struct SentSegments {
    keys: [BundlePlace; 2],
    starts: [BundlePlace; 2],
    lengths: Vec<[i64; 2]>,
}

impl SentSegments {
    fn add(layout: &Layout, bundle: &mut Bundle) -> Self {
        let (lengths, keys) = layout.segments();
        let room = layout.room_for_keys();
        let starts = [0, 1].map(|side| {
            let ends = lengths.iter().scan(0, |end, segment| {
                *end += segment[side];
                Some(*end)
            });
            let starts: Vec<i32> =
                std::iter::once(0).chain(ends).map(|start| i32::try_from(start).expect("lengths fit")).collect();
            bundle.short_numbers(&starts, &[to_i64(starts.len())])
        });
        let keys = [0, layout.sequences() * layout.sizes.sequence].map(|unused| {
            let unused = std::iter::repeat_n(unused, room - keys.len());
            let rows: Vec<i64> = keys.iter().copied().chain(unused).map(to_i64).collect();
            bundle.numbers(&rows, &[to_i64(room)])
        });
        Self { keys, starts, lengths: lengths.into_iter().map(|segment| segment.map(to_i64)).collect() }
    }

    fn get(self, sent: &Sent) -> Segments {
        let [from, to] = self.keys.map(|place| sent.get(place));
        Segments { from, to, starts: self.starts.map(|place| sent.get(place)), lengths: self.lengths }
    }
}

/// Index tensors of a [`Layout`] on a device.
#[derive(Debug)]
pub struct DeviceLayout {
    /// Ids of all sequences without images, `[s (t - p)]` i64.
    pub ids: Tensor,
    /// For each token, the row of `[embedded ids; image tokens; 0]` to take, `[s, t]` i64.
    pub index: Tensor,
    /// Position of each token, `[s, t]` i64, or `[3, s, t]` with three axes; `None` if it is the token's index.
    pub positions: Option<Tensor>,
    attention: AttentionLayout,
    /// Flat indices of each question's prompt, `[q, l]` i64; `None` if the decoder reads all states.
    pub prompt: Option<Tensor>,
    /// `[q, l]` bool, false = padding; `None` without padding.
    pub prompt_keep: Option<Tensor>,
    /// Image of each question, `[q]` i64; `None` if each question has its own image.
    pub images: Option<Tensor>,
    /// Mask of each target among those of all questions, `[m]` i64; `None` if each mask has a target.
    pub targets: Option<Tensor>,
    /// Rows of the masks that words can follow, `q (1 + moved)`.
    pub mask_rows: usize,
    /// For words that follow masks: flat indices of their states, their labels ([`IGNORED`](super::IGNORED) for padding), and the rows of
    /// the masks that they follow, `[n + moved q]` i64 each.
    pub read: Option<[Tensor; 3]>,
    /// Flat indices of the states that predict supervised tokens, `[n]` i64.
    pub supervised: Tensor,
    /// Ids of the supervised tokens, `[n]` i64; [`IGNORED`](super::IGNORED) for padding.
    pub labels: Tensor,
}

impl DeviceLayout {
    /// Attention mask of a forward pass.
    pub fn attention(&self) -> AttentionPattern<'_> {
        match &self.attention {
            AttentionLayout::Causal => AttentionPattern::Causal,
            AttentionLayout::Padded(keep) => AttentionPattern::Padded(keep),
            AttentionLayout::Packed { blocks, segments } => AttentionPattern::Packed { blocks, segments },
        }
    }

    /// All tensors. Their number and order depend only on the kind of attention and on the options of the layout.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let mut all = vec![&self.ids, &self.index];
        all.extend(&self.positions);
        match &self.attention {
            AttentionLayout::Causal => {}
            AttentionLayout::Padded(keep) => all.push(keep),
            AttentionLayout::Packed { blocks, segments } => {
                let Segments { from, to, starts: [queries, keys], .. } = segments;
                all.extend([blocks, from, to, queries, keys]);
            }
        }
        all.extend([&self.prompt, &self.prompt_keep, &self.images, &self.targets].into_iter().flatten());
        all.extend(self.read.iter().flatten());
        all.extend([&self.supervised, &self.labels]);
        all
    }
}
