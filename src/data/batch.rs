//! Collates samples into batches: tensors on the CPU.

use super::features::{FeatureShape, Key, Seen};
use super::image::PixelConfig;
use super::sample::Sample;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Inputs and targets of one micro-batch: `P` images, `B` samples (questions about them), sides `C` (CLIP) and `S`
/// (SAM).
#[derive(Debug)]
pub struct Batch {
    /// Token ids of each sample.
    pub texts: Vec<Vec<i64>>,
    /// Index of the answer's first id in each text.
    pub answer_starts: Vec<usize>,
    /// The `P` images for the vision tower, or their cached features.
    pub clip: ClipInput,
    /// u8 `[P, 3, S, S]`, not normalised.
    pub sam_image: Tensor,
    /// u8 `[B, 1, S, S]`, 255 = foreground.
    pub mask: Tensor,
    /// For each sample, whether its mask is known. `None` if all masks of the data set are.
    pub has_mask: Option<Vec<bool>>,
    /// i64 `[B]`.
    pub class_label: Tensor,
    /// Indices into the manifest's rows.
    pub rows: Vec<usize>,
    /// Samples of each image, in their order.
    pub groups: Vec<usize>,
}

/// Images of a batch for the vision tower.
#[derive(Debug)]
pub enum ClipInput {
    /// u8 `[B, 3, C, C]`, not normalised.
    Pixels(Tensor),
    /// Image by image, with a vision feature cache.
    Views(Vec<View>),
}

/// One image for the vision tower, or its cached features.
#[derive(Debug)]
pub enum View {
    /// Cached features `[1, tokens, width]`.
    Features(Tensor),
    /// An image whose features are not cached.
    New {
        /// Cache key of its features.
        key: Key,
        /// u8 `[1, 3, C, C]`, not normalised.
        pixels: Tensor,
    },
}

impl View {
    /// A view that shares the tensors.
    #[must_use]
    pub fn shared(&self) -> Self {
        match self {
            Self::Features(features) => Self::Features(features.shallow_clone()),
            Self::New { key, pixels } => Self::New { key: *key, pixels: pixels.shallow_clone() },
        }
    }
}

/// A batch before it becomes tensors. Workers make these, and only the consumer's thread allocates tensors. Measured
/// memory peaks therefore do not depend on the number of prefetched batches.
#[derive(Debug)]
pub struct Collated {
    texts: Vec<Vec<i64>>,
    answer_starts: Vec<usize>,
    clip: Vec<u8>,
    /// For each image, with a vision feature cache.
    seen: Vec<Seen>,
    sam: Vec<u8>,
    mask: Vec<u8>,
    has_mask: Vec<bool>,
    /// Whether the data set has samples without a mask.
    with_unknown_masks: bool,
    labels: Vec<i64>,
    rows: Vec<usize>,
    groups: Vec<usize>,
    config: PixelConfig,
    features: Option<FeatureShape>,
}

impl Collated {
    /// Concatenates samples. Samples of an inner list share an image, which is taken from the first one. `features` is
    /// the shape of cached features, if there is a cache.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is no sample or its pixels do not have the sizes of `config`.
    pub fn new(groups: &[Vec<Sample>], config: PixelConfig, features: Option<FeatureShape>) -> Result<Self> {
        let samples = || groups.iter().flatten();
        if samples().all(|sample| sample.ids.is_empty()) {
            return Err(Error::Shape { reason: "a batch needs at least one sample with at least one id".into() });
        }
        let (clip_side, sam_side) = (config.clip_size as usize, config.sam_size as usize);
        let (clip_plane, sam_plane) = (clip_side * clip_side, sam_side * sam_side);
        let (count, images) = (samples().count(), groups.len());
        let mut batch = Self {
            texts: Vec::with_capacity(count),
            answer_starts: Vec::with_capacity(count),
            clip: Vec::with_capacity(images * 3 * clip_plane),
            seen: Vec::new(),
            sam: Vec::with_capacity(images * 3 * sam_plane),
            mask: Vec::with_capacity(count * sam_plane),
            has_mask: Vec::with_capacity(count),
            with_unknown_masks: false,
            labels: Vec::with_capacity(count),
            rows: Vec::with_capacity(count),
            groups: groups.iter().map(Vec::len).collect(),
            config,
            features,
        };
        for sample in samples() {
            let pixels = &sample.pixels;
            let sizes = (pixels.clip.len(), pixels.sam.len(), pixels.mask.len());
            // images with cached features may have no pixels
            let known = matches!(sample.seen, Some(Seen::Features(_)));
            let clip_bytes = if known { 0 } else { 3 * clip_plane };
            if pixels.clip.len() < clip_bytes || (sizes.1, sizes.2) != (3 * sam_plane, sam_plane) {
                return Err(Error::Shape {
                    reason: format!("a sample holds {sizes:?} bytes, not those of sides {clip_side} and {sam_side}"),
                });
            }
            batch.texts.push(sample.ids.clone());
            batch.answer_starts.push(sample.answer_start);
            batch.mask.extend(&pixels.mask);
            batch.has_mask.push(sample.has_mask);
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

    /// Marks the batch as one of a data set with samples without a mask. All its batches then have the same tensors.
    #[must_use]
    pub fn with_unknown_masks(mut self) -> Self {
        self.with_unknown_masks = true;
        self
    }

    /// Copies everything into tensors.
    pub fn into_tensors(self) -> Batch {
        let (count, images) = (to_i64(self.rows.len()), to_i64(self.groups.len()));
        let sam = i64::from(self.config.sam_size);
        let clip = self.clip_input();
        Batch {
            texts: self.texts,
            answer_starts: self.answer_starts,
            clip,
            sam_image: Tensor::from_slice(&self.sam).view([images, 3, sam, sam]),
            mask: Tensor::from_slice(&self.mask).view([count, 1, sam, sam]),
            has_mask: self.with_unknown_masks.then_some(self.has_mask),
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
        let mut images = self.clip.chunks(3 * self.config.clip_size as usize * self.config.clip_size as usize);
        let view = |seen: &Seen| match seen {
            Seen::Features(bytes) => View::Features(shape.tensor(bytes)),
            Seen::New(key) => {
                let pixels = Tensor::from_slice(images.next().expect("checked sizes")).view([1, 3, side, side]);
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
    use crate::data::labels::Labels;
    use crate::data::sample::Pixels;
    use crate::tensor::Kind;

    const CONFIG: PixelConfig = PixelConfig {
        clip_size: 2,
        sam_size: 3,
        mask: MaskMode::Soft,
        pad_offset: PadOffset::Centre,
        labels: Labels::NONE,
    };

    fn sample(row: usize, ids: &[i64]) -> Sample {
        let byte = u8::try_from(row).expect("small");
        let pixels = Pixels { clip: vec![byte; 12], sam: vec![byte; 27], mask: vec![byte + 50; 9] };
        let ids = ids.to_vec();
        let has_mask = row != 2;
        Sample { row, label: row + 1, ids, answer_start: 1, has_mask, pixels: Arc::new(pixels), seen: None }
    }

    #[test]
    fn samples_become_tensors_and_lists_of_ids() {
        let batch = Collated::new(&[vec![sample(4, &[1, -200, 7])], vec![sample(2, &[1, 9])]], CONFIG, None)
            .expect("fits")
            .into_tensors();
        assert_eq!((batch.texts, batch.answer_starts), (vec![vec![1, -200, 7], vec![1, 9]], vec![1, 1]));
        assert_eq!(batch.sam_image.kind(), Kind::Uint8);
        let ClipInput::Pixels(clip) = &batch.clip else { panic!("features are cached") };
        assert_eq!((clip.size().as_slice(), clip.kind()), ([2, 3, 2, 2].as_slice(), Kind::Uint8));
        assert_eq!(clip.int64_value(&[1, 0, 1, 1]), 2);
        assert_eq!(batch.sam_image.size(), [2, 3, 3, 3]);
        assert_eq!(batch.mask.size(), [2, 1, 3, 3]);
        assert_eq!((batch.mask.int64_value(&[1, 0, 2, 2]), batch.mask.kind()), (52, Kind::Uint8));
        assert_eq!(batch.sam_image.int64_value(&[1, 2, 0, 0]), 2);
        assert_eq!(batch.rows, [4, 2]);
        assert_eq!(Vec::<i64>::try_from(&batch.class_label).expect("labels"), [5, 3]);
    }

    #[test]
    fn samples_of_a_group_share_an_image() {
        let groups = [vec![sample(4, &[1, -200, 7]), sample(5, &[1, -200])], vec![sample(2, &[1, -200, 9])]];
        let batch = Collated::new(&groups, CONFIG, None).expect("fits").into_tensors();
        assert_eq!((batch.groups.as_slice(), batch.rows.len()), ([2, 1].as_slice(), 3));
        assert_eq!((batch.sam_image.size(), batch.mask.size()), (vec![2, 3, 3, 3], vec![3, 1, 3, 3]));
        let bytes: Vec<i64> = (0..2).map(|image| batch.sam_image.int64_value(&[image, 0, 0, 0])).collect();
        assert_eq!(bytes, [4, 2]);
        let masks: Vec<i64> = (0..3).map(|question| batch.mask.int64_value(&[question, 0, 0, 0])).collect();
        assert_eq!(masks, [54, 55, 52], "each question has its own mask");
        assert_eq!(Vec::<i64>::try_from(&batch.class_label).expect("labels"), [5, 6, 3]);
        assert_eq!(batch.has_mask, None, "all masks of the data set are known");
        let batch = Collated::new(&groups, CONFIG, None).expect("fits").with_unknown_masks().into_tensors();
        assert_eq!(batch.has_mask, Some(vec![true, true, false]));
    }

    #[test]
    fn cached_features_replace_pixels() {
        let shape = FeatureShape { tokens: 2, width: 1, kind: Kind::Float };
        let known = Seen::Features([1.5_f32, -2.0].map(f32::to_le_bytes).concat().into());
        let seen = |row, seen: Seen| Sample { seen: Some(seen), ..sample(row, &[1]) };
        let samples = [seen(3, Seen::New([3; 32])), seen(4, known), seen(5, Seen::New([5; 32]))].map(|one| vec![one]);
        let batch = Collated::new(&samples, CONFIG, Some(shape)).expect("fits").into_tensors();
        let ClipInput::Views(views) = &batch.clip else { panic!("features are not cached") };
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
        let short = Pixels { clip: vec![0; 8], sam: vec![0; 27], mask: vec![0; 9] };
        let short = Sample { pixels: Arc::new(short), ..sample(0, &[1]) };
        let error = Collated::new(&[vec![short]], CONFIG, None).expect_err("two of three planes");
        assert!(error.to_string().contains("(8, 27, 9)"), "{error}");
    }
}
