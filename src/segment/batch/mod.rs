//! Batches of tensors on the CPU.

pub(super) mod batches;
pub mod example;
pub mod layout;
pub mod rows;
pub mod vision_features;

use crate::data::batch::Collated;
use crate::data::features::{Dtype, FeatureLookup, FeatureShape, Key};
use crate::data::geometry::MovedMask;
use crate::tensor::{Kind, Tensor};

/// Inputs and targets of one micro-batch: `P` images, `B` samples (questions about them), sides `C` (vision tower) and `S`
/// (SAM).
#[derive(Debug)]
pub struct Batch {
    /// Token ids of each sample.
    pub texts: Vec<Vec<i64>>,
    /// Index of the answer's first id in each text.
    pub answer_starts: Vec<usize>,
    /// The `P` images for the vision tower, or their cached features.
    pub tower: TowerInput,
    /// u8 `[P, 3, S, S]`, not normalised.
    pub sam_image: Tensor,
    /// u8 `[M, 1, S, S]`, 255 = foreground.
    pub mask: Tensor,
    /// Targets of each sample, in their order.
    pub targets: Vec<usize>,
    /// For each target, whether its mask is known. `None` if all masks of the data set are, one for each sample.
    pub has_mask: Option<Vec<bool>>,
    /// Numbers of each target's mask, `[M, geometry]`; empty without them.
    pub geometry: Vec<f32>,
    /// Masks at other places, of each sample; empty without them.
    pub moved: Vec<Vec<MovedMask>>,
    /// i64 `[B]`.
    pub class_label: Tensor,
    /// Indices into the manifest's rows.
    pub rows: Vec<usize>,
    /// Samples of each image, in their order.
    pub groups: Vec<usize>,
}

/// Images of a batch for the vision tower.
#[derive(Debug)]
pub enum TowerInput {
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

impl From<Collated> for Batch {
    /// Copies everything into tensors.
    fn from(host: Collated) -> Self {
        let (targets, images) = (to_i64(host.has_mask.len()), to_i64(host.groups.len()));
        let sam = i64::from(host.config.sam_size);
        let tower = tower_input(&host);
        Self {
            texts: host.texts,
            answer_starts: host.answer_starts,
            tower,
            sam_image: Tensor::from_slice(&host.sam).view([images, 3, sam, sam]),
            mask: Tensor::from_slice(&host.mask).view([targets, 1, sam, sam]),
            targets: host.targets,
            has_mask: host.with_unknown_masks.then_some(host.has_mask),
            geometry: host.geometry,
            moved: host.moved,
            class_label: Tensor::from_slice(&host.labels),
            rows: host.rows,
            groups: host.groups,
        }
    }
}

fn tower_input(host: &Collated) -> TowerInput {
    let side = i64::from(host.config.tower_size);
    let Some(shape) = host.features else {
        return TowerInput::Pixels(Tensor::from_slice(&host.tower).view([-1, 3, side, side]));
    };
    let mut images = host.tower.chunks(3 * host.config.tower_size as usize * host.config.tower_size as usize);
    let view = |seen: &FeatureLookup| match seen {
        FeatureLookup::Features(bytes) => View::Features(feature_tensor(shape, bytes)),
        FeatureLookup::New(key) => {
            let pixels = Tensor::from_slice(images.next().expect("checked sizes")).view([1, 3, side, side]);
            View::New { key: *key, pixels }
        }
    };
    TowerInput::Views(host.seen.iter().map(view).collect())
}

/// The dtype of cached features as libtorch names it.
pub fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::F32 => Kind::Float,
        Dtype::F16 => Kind::Half,
        Dtype::Bf16 => Kind::BFloat16,
    }
}

/// One image's features as a tensor `[1, tokens, width]` in host memory.
pub fn feature_tensor(shape: FeatureShape, bytes: &[u8]) -> Tensor {
    Tensor::from_data_size(bytes, &[1, shape.tokens, shape.width], kind_of(shape.dtype))
}

/// The bytes of one image's features, copied from any device.
pub fn feature_bytes(shape: FeatureShape, features: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; shape.bytes()];
    features.copy_data_u8(&mut bytes, features.numel());
    bytes
}

fn to_i64(value: usize) -> i64 {
    i64::try_from(value).expect("lengths of loaded data are far below 2^63")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::sample::Sample;
    use crate::fixture::{SMALL as CONFIG, sample};
    use crate::tensor::Kind;

    #[test]
    fn samples_become_tensors_and_lists_of_ids() {
        let batch: Batch = Collated::new(&[vec![sample(4, &[1, -200, 7])], vec![sample(2, &[1, 9])]], CONFIG, None)
            .expect("fits")
            .into();
        assert_eq!((batch.texts, batch.answer_starts), (vec![vec![1, -200, 7], vec![1, 9]], vec![1, 1]));
        assert_eq!(batch.sam_image.kind(), Kind::Uint8);
        let TowerInput::Pixels(tower) = &batch.tower else { panic!("features are cached") };
        assert_eq!((tower.size().as_slice(), tower.kind()), ([2, 3, 2, 2].as_slice(), Kind::Uint8));
        assert_eq!(tower.int64_value(&[1, 0, 1, 1]), 2);
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
        let batch: Batch = Collated::new(&groups, CONFIG, None).expect("fits").into();
        assert_eq!((batch.groups.as_slice(), batch.rows.len()), ([2, 1].as_slice(), 3));
        assert_eq!((batch.sam_image.size(), batch.mask.size()), (vec![2, 3, 3, 3], vec![3, 1, 3, 3]));
        let bytes: Vec<i64> = (0..2).map(|image| batch.sam_image.int64_value(&[image, 0, 0, 0])).collect();
        assert_eq!(bytes, [4, 2]);
        let masks: Vec<i64> = (0..3).map(|question| batch.mask.int64_value(&[question, 0, 0, 0])).collect();
        assert_eq!(masks, [54, 55, 52], "each question has its own mask");
        assert_eq!(Vec::<i64>::try_from(&batch.class_label).expect("labels"), [5, 6, 3]);
        assert_eq!(batch.has_mask, None, "all masks of the data set are known");
        let batch: Batch = Collated::new(&groups, CONFIG, None).expect("fits").with_unknown_masks().into();
        assert_eq!(batch.has_mask, Some(vec![true, true, false]));
    }

    #[test]
    fn cached_features_replace_pixels() {
        let shape = FeatureShape { tokens: 2, width: 1, dtype: Dtype::F32 };
        let known = FeatureLookup::Features([1.5_f32, -2.0].map(f32::to_le_bytes).concat().into());
        let seen = |row, seen: FeatureLookup| Sample { seen: Some(seen), ..sample(row, &[1]) };
        let samples = [seen(3, FeatureLookup::New([3; 32])), seen(4, known), seen(5, FeatureLookup::New([5; 32]))]
            .map(|one| vec![one]);
        let batch: Batch = Collated::new(&samples, CONFIG, Some(shape)).expect("fits").into();
        let TowerInput::Views(views) = &batch.tower else { panic!("features are not cached") };
        match &views[..] {
            [View::New { key: [3, ..], pixels: a }, View::Features(known), View::New { key: [5, ..], pixels: b }] => {
                assert_eq!((a.size(), a.int64_value(&[0, 2, 1, 1])), (vec![1, 3, 2, 2], 3));
                assert_eq!((known.size(), known.double_value(&[0, 1, 0])), (vec![1, 2, 1], -2.0));
                assert_eq!(b.int64_value(&[0, 0, 0, 0]), 5);
            }
            other => panic!("{other:?}"),
        }
    }
}
