//! Collates samples into batches.

use crate::features::{FeatureLookup, FeatureShape};
use crate::geometry::{Geometry, MovedMask};
use crate::image::PixelConfig;
use crate::sample::Sample;
use prsmed_base::error::{Error, Result};

/// Inputs and targets of one micro-batch: `P` images, `B` samples (questions about them), `M` targets, sides `C`
/// (vision tower) and `S` (SAM). Workers make these, and only the consumer's thread copies them into tensors.
/// Measured memory peaks therefore do not depend on the number of prefetched batches.
#[derive(Debug)]
pub struct Collated {
    /// Token ids of each sample.
    pub texts: Vec<Vec<i64>>,
    /// Index of the answer's first id in each text.
    pub answer_starts: Vec<usize>,
    /// `[N, 3, C, C]`, not normalised: the images without cached features.
    pub tower: Vec<u8>,
    /// For each image, with a vision feature cache; otherwise empty.
    pub seen: Vec<FeatureLookup>,
    /// `[P, 3, S, S]`, not normalised.
    pub sam: Vec<u8>,
    /// `[M, 1, S, S]`, 255 = foreground.
    pub mask: Vec<u8>,
    /// For each target, whether its mask is known.
    pub has_mask: Vec<bool>,
    /// Targets of each sample, in their order.
    pub targets: Vec<usize>,
    /// Numbers of each target's mask, `[M, geometry]`; empty without them.
    pub geometry: Vec<f32>,
    /// Masks at other places, of each sample; empty without them.
    pub moved: Vec<Vec<MovedMask>>,
    /// Whether the data set has samples without a mask, or with several.
    pub with_unknown_masks: bool,
    /// Class of each sample.
    pub labels: Vec<i64>,
    /// Indices into the manifest's rows.
    pub rows: Vec<usize>,
    /// Samples of each image, in their order.
    pub groups: Vec<usize>,
    /// Sides of the images.
    pub config: PixelConfig,
    /// Shape of cached features, if there is a cache.
    pub features: Option<FeatureShape>,
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
        let (tower_side, sam_side) = (config.tower_size as usize, config.sam_size as usize);
        let (tower_plane, sam_plane) = (tower_side * tower_side, sam_side * sam_side);
        let (count, images) = (samples().count(), groups.len());
        let mut batch = Self {
            texts: Vec::with_capacity(count),
            answer_starts: Vec::with_capacity(count),
            tower: Vec::with_capacity(images * 3 * tower_plane),
            seen: Vec::new(),
            sam: Vec::with_capacity(images * 3 * sam_plane),
            mask: Vec::with_capacity(count * sam_plane),
            has_mask: Vec::with_capacity(count),
            targets: Vec::with_capacity(count),
            geometry: Vec::new(),
            moved: Vec::new(),
            with_unknown_masks: false,
            labels: Vec::with_capacity(count),
            rows: Vec::with_capacity(count),
            groups: groups.iter().map(Vec::len).collect(),
            config,
            features,
        };
        for sample in samples() {
            let pixels = &sample.pixels;
            let sizes = (pixels.tower.len(), pixels.sam.len(), pixels.mask.len());
            // images with cached features may have no pixels
            let known = matches!(sample.seen, Some(FeatureLookup::Features(_)));
            let tower_bytes = if known { 0 } else { 3 * tower_plane };
            if pixels.tower.len() < tower_bytes
                || (sizes.1, sizes.2) != (3 * sam_plane, sample.has_mask.len() * sam_plane)
            {
                return Err(Error::Shape {
                    reason: format!("a sample holds {sizes:?} bytes, not those of sides {tower_side} and {sam_side}"),
                });
            }
            batch.texts.push(sample.ids.clone());
            batch.answer_starts.push(sample.answer_start);
            batch.mask.extend(&pixels.mask);
            batch.has_mask.extend(&sample.has_mask);
            batch.targets.push(sample.has_mask.len());
            batch.moved.push(sample.moved.clone());
            batch.geometry.extend(sample.geometry.iter().flat_map(Geometry::numbers));
            batch.labels.push(to_i64(sample.label));
            batch.rows.push(sample.row);
        }
        for Sample { pixels, seen, .. } in groups.iter().filter_map(|group| group.first()) {
            if !matches!(seen, Some(FeatureLookup::Features(_))) {
                batch.tower.extend(&pixels.tower);
            }
            batch.seen.extend(seen.clone());
            batch.sam.extend(&pixels.sam);
        }
        Ok(batch)
    }

    /// Marks the batch as one of a data set with samples without a mask, or with several. All its batches then have the
    /// same tensors.
    #[must_use]
    pub fn with_unknown_masks(mut self) -> Self {
        self.with_unknown_masks = true;
        self
    }
}

fn to_i64(value: usize) -> i64 {
    i64::try_from(value).expect("lengths of loaded data are far below 2^63")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::fixture::{SMALL as CONFIG, sample};
    use crate::sample::Pixels;

    #[test]
    fn wrong_sizes_and_empty_batches_are_refused() {
        assert!(Collated::new(&[], CONFIG, None).is_err());
        let error = Collated::new(&[vec![sample(0, &[1])]], PixelConfig { sam_size: 4, ..CONFIG }, None)
            .expect_err("3 is not 4");
        assert!(error.to_string().contains("(12, 27, 9)"), "{error}");
        let short = Pixels { tower: vec![0; 8], sam: vec![0; 27], mask: vec![0; 9], shown: (3, 3) };
        let short = Sample { pixels: Arc::new(short), ..sample(0, &[1]) };
        let error = Collated::new(&[vec![short]], CONFIG, None).expect_err("two of three planes");
        assert!(error.to_string().contains("(8, 27, 9)"), "{error}");
    }
}
