//! Samples -> tensors on the CPU.

use super::features::{FeatureShape, Key, Seen};
use super::image::PixelConfig;
use super::sample::Sample;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// The inputs and targets of one micro-batch; `P` pictures, `B` samples (questions about them), `L` ids, sides `C` (CLIP)
/// and `S` (SAM).
#[derive(Debug)]
pub struct Batch {
    /// Token ids, i64 `[B, L]`, padded with 0 on the right.
    pub text_ids: Tensor,
    /// bool `[B, L]`, true = a real id.
    pub text_mask: Tensor,
    /// Where each row's answer starts, `B` numbers.
    pub answer_start: Vec<i64>,
    /// What the vision tower takes of the `P` pictures, or has said before.
    pub clip: ClipInput,
    /// u8 `[P, 3, S, S]`, not normalised.
    pub sam_image: Tensor,
    /// u8 `[B, 1, S, S]`, 255 = foreground.
    pub mask: Tensor,
    /// i64 `[B]`.
    pub class_label: Tensor,
    /// Indices into the manifest's rows.
    pub rows: Vec<usize>,
    /// Samples of each picture, in their order.
    pub groups: Vec<usize>,
}

impl Batch {
    /// Number of samples.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// The pictures of a batch for the vision tower.
#[derive(Debug)]
pub enum ClipInput {
    /// u8 `[B, 3, C, C]`, not normalised.
    Pixels(Tensor),
    /// Where features are kept: picture by picture.
    Views(Vec<View>),
}

/// One picture for the vision tower.
#[derive(Debug)]
pub enum View {
    /// `[1, tokens, width]`: what the tower said before.
    Features(Tensor),
    /// A picture that it has not seen.
    New {
        /// Where its features will be kept.
        key: Key,
        /// u8 `[1, 3, C, C]`, not normalised.
        pixels: Tensor,
    },
}

impl View {
    /// The same tensors.
    #[must_use]
    pub fn shared(&self) -> Self {
        match self {
            Self::Features(features) => Self::Features(features.shallow_clone()),
            Self::New { key, pixels } => Self::New { key: *key, pixels: pixels.shallow_clone() },
        }
    }
}

/// A batch before it becomes tensors: workers make these, so that tensors are allocated by the consumer's thread only and
/// a measured memory peak does not depend on how far ahead the workers are.
#[derive(Debug)]
pub struct Collated {
    ids: Vec<i64>,
    real: Vec<bool>,
    answer_start: Vec<i64>,
    clip: Vec<u8>,
    /// For each picture, where features are kept.
    seen: Vec<Seen>,
    sam: Vec<u8>,
    mask: Vec<u8>,
    labels: Vec<i64>,
    rows: Vec<usize>,
    groups: Vec<usize>,
    config: PixelConfig,
    features: Option<FeatureShape>,
}

impl Collated {
    /// Pads the ids and puts the samples one behind the other; those of one inner list share their picture, which is taken
    /// from the first. `features` where they are kept.
    ///
    /// # Errors
    /// [`Error::Shape`] when there is no sample or its pixels do not have the sizes of `config`.
    pub fn new(groups: &[Vec<Sample>], config: PixelConfig, features: Option<FeatureShape>) -> Result<Self> {
        let samples = || groups.iter().flatten();
        let length = samples().map(|sample| sample.ids.len()).max().unwrap_or(0);
        if length == 0 {
            return Err(Error::Shape { reason: "a batch needs at least one sample with at least one id".into() });
        }
        let (clip_side, sam_side) = (config.clip_size as usize, config.sam_size as usize);
        let (clip_plane, sam_plane) = (clip_side * clip_side, sam_side * sam_side);
        let (count, pictures) = (samples().count(), groups.len());
        let mut batch = Self {
            ids: Vec::with_capacity(count * length),
            real: Vec::with_capacity(count * length),
            answer_start: Vec::with_capacity(count),
            clip: Vec::with_capacity(pictures * 3 * clip_plane),
            seen: Vec::new(),
            sam: Vec::with_capacity(pictures * 3 * sam_plane),
            mask: Vec::with_capacity(count * sam_plane),
            labels: Vec::with_capacity(count),
            rows: Vec::with_capacity(count),
            groups: groups.iter().map(Vec::len).collect(),
            config,
            features,
        };
        for sample in samples() {
            let pixels = &sample.pixels;
            let sizes = (pixels.clip.len(), pixels.sam.len(), pixels.mask.len());
            // pictures whose features are known may come without pixels
            let known = matches!(sample.seen, Some(Seen::Features(_)));
            let clip_bytes = if known { 0 } else { 3 * clip_plane };
            if pixels.clip.len() < clip_bytes || (sizes.1, sizes.2) != (3 * sam_plane, sam_plane) {
                return Err(Error::Shape {
                    reason: format!("a sample holds {sizes:?} bytes, not those of sides {clip_side} and {sam_side}"),
                });
            }
            let padding = length - sample.ids.len();
            batch.ids.extend(&sample.ids);
            batch.ids.extend(std::iter::repeat_n(0, padding));
            batch.real.extend(std::iter::repeat_n(true, sample.ids.len()));
            batch.real.extend(std::iter::repeat_n(false, padding));
            batch.answer_start.push(to_i64(sample.answer_start));
            batch.mask.extend(&pixels.mask);
            batch.labels.push(to_i64(sample.label));
            batch.rows.push(sample.row);
        }
        for Sample { pixels, seen, .. } in groups.iter().filter_map(|group| group.first()) {
            if !matches!(seen, Some(Seen::Features(_))) {
                batch.clip.extend(&pixels.clip);
            }
            batch.seen.extend(seen.clone());
            batch.sam.extend(&pixels.sam);
        }
        Ok(batch)
    }

    /// Copies everything into tensors.
    pub fn into_tensors(self) -> Batch {
        let (count, pictures) = (to_i64(self.rows.len()), to_i64(self.groups.len()));
        let sam = i64::from(self.config.sam_size);
        let clip = self.clip_input();
        Batch {
            text_ids: Tensor::from_slice(&self.ids).view([count, -1]),
            text_mask: Tensor::from_slice(&self.real).view([count, -1]),
            answer_start: self.answer_start,
            clip,
            sam_image: Tensor::from_slice(&self.sam).view([pictures, 3, sam, sam]),
            mask: Tensor::from_slice(&self.mask).view([count, 1, sam, sam]),
            class_label: Tensor::from_slice(&self.labels),
            rows: self.rows,
            groups: self.groups,
        }
    }

    fn clip_input(&self) -> ClipInput {
        let side = i64::from(self.config.clip_size);
        let Some(shape) = self.features else {
            return ClipInput::Pixels(Tensor::from_slice(&self.clip).view([-1, 3, side, side]));
        };
        let mut pictures = self.clip.chunks(3 * self.config.clip_size as usize * self.config.clip_size as usize);
        let view = |seen: &Seen| match seen {
            Seen::Features(bytes) => View::Features(shape.tensor(bytes)),
            Seen::New(key) => {
                let pixels = Tensor::from_slice(pictures.next().expect("checked sizes")).view([1, 3, side, side]);
                View::New { key: *key, pixels }
            }
        };
        ClipInput::Views(self.seen.iter().map(view).collect())
    }
}

fn to_i64(value: usize) -> i64 {
    i64::try_from(value).expect("lengths of loaded data are far below 2^63")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::data::image::{MaskMode, PadOffset};
    use crate::data::sample::Pixels;
    use crate::tensor::Kind;

    const CONFIG: PixelConfig =
        PixelConfig { clip_size: 2, sam_size: 3, mask: MaskMode::Soft, pad_offset: PadOffset::Centre };

    fn sample(row: usize, ids: &[i64]) -> Sample {
        let byte = u8::try_from(row).expect("small");
        let pixels = Pixels { clip: vec![byte; 12], sam: vec![byte; 27], mask: vec![51; 9] };
        Sample { row, label: row + 1, ids: ids.to_vec(), answer_start: 1, pixels: Arc::new(pixels), seen: None }
    }

    #[test]
    fn short_rows_are_padded_and_masked() {
        let batch = Collated::new(&[vec![sample(4, &[1, -200, 7])], vec![sample(2, &[1, 9])]], CONFIG, None)
            .expect("fits")
            .into_tensors();
        assert_eq!(batch.text_ids.size(), [2, 3]);
        assert_eq!(Vec::<i64>::try_from(batch.text_ids.reshape([-1])).expect("ids"), [1, -200, 7, 1, 9, 0]);
        assert_eq!(
            Vec::<bool>::try_from(batch.text_mask.reshape([-1])).expect("mask"),
            [true, true, true, true, true, false]
        );
        assert_eq!((batch.text_mask.kind(), batch.sam_image.kind()), (Kind::Bool, Kind::Uint8));
        let ClipInput::Pixels(clip) = &batch.clip else { panic!("no features are kept") };
        assert_eq!((clip.size().as_slice(), clip.kind()), ([2, 3, 2, 2].as_slice(), Kind::Uint8));
        assert_eq!(clip.int64_value(&[1, 0, 1, 1]), 2);
        assert_eq!(batch.sam_image.size(), [2, 3, 3, 3]);
        assert_eq!(batch.mask.size(), [2, 1, 3, 3]);
        assert_eq!((batch.mask.int64_value(&[1, 0, 2, 2]), batch.mask.kind()), (51, Kind::Uint8));
        assert_eq!(batch.sam_image.int64_value(&[1, 2, 0, 0]), 2);
        assert_eq!((batch.rows.as_slice(), batch.len()), ([4, 2].as_slice(), 2));
        assert_eq!(Vec::<i64>::try_from(&batch.class_label).expect("labels"), [5, 3]);
    }

    #[test]
    fn samples_of_a_group_share_a_picture() {
        let groups = [vec![sample(4, &[1, -200, 7]), sample(5, &[1, -200])], vec![sample(2, &[1, -200, 9])]];
        let batch = Collated::new(&groups, CONFIG, None).expect("fits").into_tensors();
        assert_eq!((batch.groups.as_slice(), batch.len()), ([2, 1].as_slice(), 3));
        assert_eq!((batch.sam_image.size(), batch.mask.size()), (vec![2, 3, 3, 3], vec![3, 1, 3, 3]));
        let bytes: Vec<i64> = (0..2).map(|picture| batch.sam_image.int64_value(&[picture, 0, 0, 0])).collect();
        assert_eq!(bytes, [4, 2]);
    }

    #[test]
    fn features_stand_in_for_pictures() {
        let shape = FeatureShape { tokens: 2, width: 1, kind: Kind::Float };
        let known = Seen::Features([1.5_f32, -2.0].map(f32::to_le_bytes).concat().into());
        let seen = |row, seen: Seen| Sample { seen: Some(seen), ..sample(row, &[1]) };
        let samples = [seen(3, Seen::New([3; 32])), seen(4, known), seen(5, Seen::New([5; 32]))].map(|one| vec![one]);
        let batch = Collated::new(&samples, CONFIG, Some(shape)).expect("fits").into_tensors();
        let ClipInput::Views(views) = &batch.clip else { panic!("features are kept") };
        match &views[..] {
            [View::New { key: [3, ..], pixels: a }, View::Features(known), View::New { key: [5, ..], pixels: b }] => {
                assert_eq!((a.size(), a.int64_value(&[0, 2, 1, 1])), (vec![1, 3, 2, 2], 3));
                assert_eq!((known.size(), known.double_value(&[0, 1, 0])), (vec![1, 2, 1], -2.0));
                assert_eq!(b.int64_value(&[0, 0, 0, 0]), 5);
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn wrong_sizes_and_empty_batches_are_refused() {
        assert!(Collated::new(&[], CONFIG, None).is_err());
        let error = Collated::new(&[vec![sample(0, &[1])]], PixelConfig { sam_size: 4, ..CONFIG }, None)
            .expect_err("3 is not 4");
        assert!(error.to_string().contains("(12, 27, 9)"), "{error}");
    }
}
