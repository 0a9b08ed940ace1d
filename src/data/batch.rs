//! Samples -> tensors on the CPU.

use super::image::{PixelConfig, normalise_clip};
use super::sample::Sample;
use crate::error::{Error, Result};
use crate::tensor::{Device, Tensor};

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
    /// f32 `[P, 3, C, C]`, normalised for CLIP.
    pub clip_image: Tensor,
    /// u8 `[P, 3, S, S]`, not normalised.
    pub sam_image: Tensor,
    /// f32 `[B, 1, S, S]` in 0..=1.
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

    /// The same batch on another device.
    #[must_use]
    pub fn to_device(&self, device: Device) -> Self {
        Self {
            text_ids: self.text_ids.to_device(device),
            text_mask: self.text_mask.to_device(device),
            answer_start: self.answer_start.clone(),
            clip_image: self.clip_image.to_device(device),
            sam_image: self.sam_image.to_device(device),
            mask: self.mask.to_device(device),
            class_label: self.class_label.to_device(device),
            rows: self.rows.clone(),
            groups: self.groups.clone(),
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
    clip: Vec<f32>,
    sam: Vec<u8>,
    mask: Vec<f32>,
    labels: Vec<i64>,
    rows: Vec<usize>,
    groups: Vec<usize>,
    config: PixelConfig,
}

impl Collated {
    /// Pads the ids and puts the samples one behind the other; those of one inner list share their picture, which is taken
    /// from the first.
    ///
    /// # Errors
    /// [`Error::Shape`] when there is no sample or its pixels do not have the sizes of `config`.
    pub fn new(groups: &[Vec<Sample>], config: PixelConfig) -> Result<Self> {
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
            sam: Vec::with_capacity(pictures * 3 * sam_plane),
            mask: Vec::with_capacity(count * sam_plane),
            labels: Vec::with_capacity(count),
            rows: Vec::with_capacity(count),
            groups: groups.iter().map(Vec::len).collect(),
            config,
        };
        for sample in samples() {
            let pixels = &sample.pixels;
            let sizes = (pixels.clip.len(), pixels.sam.len(), pixels.mask.len());
            if sizes != (3 * clip_plane, 3 * sam_plane, sam_plane) {
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
            batch.mask.extend(pixels.mask.iter().map(|&byte| f32::from(byte) / 255.0));
            batch.labels.push(to_i64(sample.label));
            batch.rows.push(sample.row);
        }
        for pixels in groups.iter().filter_map(|group| group.first()).map(|sample| &sample.pixels) {
            batch.clip.extend(normalise_clip(&pixels.clip, clip_plane));
            batch.sam.extend(&pixels.sam);
        }
        Ok(batch)
    }

    /// Copies everything into tensors.
    pub fn into_tensors(self) -> Batch {
        let (count, pictures) = (to_i64(self.rows.len()), to_i64(self.groups.len()));
        let (clip, sam) = (i64::from(self.config.clip_size), i64::from(self.config.sam_size));
        Batch {
            text_ids: Tensor::from_slice(&self.ids).view([count, -1]),
            text_mask: Tensor::from_slice(&self.real).view([count, -1]),
            answer_start: self.answer_start,
            clip_image: Tensor::from_slice(&self.clip).view([pictures, 3, clip, clip]),
            sam_image: Tensor::from_slice(&self.sam).view([pictures, 3, sam, sam]),
            mask: Tensor::from_slice(&self.mask).view([count, 1, sam, sam]),
            class_label: Tensor::from_slice(&self.labels),
            rows: self.rows,
            groups: self.groups,
        }
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
        Sample { row, label: row + 1, ids: ids.to_vec(), answer_start: 1, pixels: Arc::new(pixels) }
    }

    #[test]
    fn short_rows_are_padded_and_masked() {
        let batch = Collated::new(&[vec![sample(4, &[1, -200, 7])], vec![sample(2, &[1, 9])]], CONFIG)
            .expect("fits")
            .into_tensors();
        assert_eq!(batch.text_ids.size(), [2, 3]);
        assert_eq!(Vec::<i64>::try_from(batch.text_ids.reshape([-1])).expect("ids"), [1, -200, 7, 1, 9, 0]);
        assert_eq!(
            Vec::<bool>::try_from(batch.text_mask.reshape([-1])).expect("mask"),
            [true, true, true, true, true, false]
        );
        assert_eq!((batch.text_mask.kind(), batch.sam_image.kind()), (Kind::Bool, Kind::Uint8));
        assert_eq!(batch.clip_image.size(), [2, 3, 2, 2]);
        assert_eq!(batch.sam_image.size(), [2, 3, 3, 3]);
        assert_eq!(batch.mask.size(), [2, 1, 3, 3]);
        assert!((batch.mask.double_value(&[1, 0, 2, 2]) - 0.2).abs() < 1e-7);
        assert_eq!(batch.sam_image.int64_value(&[1, 2, 0, 0]), 2);
        assert_eq!((batch.rows.as_slice(), batch.len()), ([4, 2].as_slice(), 2));
        assert_eq!(Vec::<i64>::try_from(&batch.class_label).expect("labels"), [5, 3]);
    }

    #[test]
    fn samples_of_a_group_share_a_picture() {
        let groups = [vec![sample(4, &[1, -200, 7]), sample(5, &[1, -200])], vec![sample(2, &[1, -200, 9])]];
        let batch = Collated::new(&groups, CONFIG).expect("fits").into_tensors();
        assert_eq!((batch.groups.as_slice(), batch.len()), ([2, 1].as_slice(), 3));
        assert_eq!((batch.clip_image.size(), batch.mask.size()), (vec![2, 3, 2, 2], vec![3, 1, 3, 3]));
        let bytes: Vec<i64> = (0..2).map(|picture| batch.sam_image.int64_value(&[picture, 0, 0, 0])).collect();
        assert_eq!(bytes, [4, 2]);
    }

    #[test]
    fn wrong_sizes_and_empty_batches_are_refused() {
        assert!(Collated::new(&[], CONFIG).is_err());
        let error =
            Collated::new(&[vec![sample(0, &[1])]], PixelConfig { sam_size: 4, ..CONFIG }).expect_err("3 is not 4");
        assert!(error.to_string().contains("(12, 27, 9)"), "{error}");
    }
}
