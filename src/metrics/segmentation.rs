//! Dice and IoU at one threshold: per image, pooled over pixels, and soft. The reference's threshold-averaged scores
//! are in [`threshold_average`](crate::threshold_average).
//!
//! If prediction and truth are both empty, the scores are 1. If only one of them is empty, they are 0.

use serde::{Deserialize, Serialize};

use prsmed_base::error::{Error, Result};

/// Whether a pixel with this probability is foreground: from 0.5 on, in scores and in written masks alike.
pub fn is_foreground(probability: f32) -> bool {
    probability >= 0.5
}

/// Pixel counts of a binary prediction and a binary truth. The sum of two counts pools their pixels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PixelCounts {
    /// Foreground pixels in both.
    pub both: u64,
    /// Foreground pixels in the prediction.
    pub predicted: u64,
    /// Foreground pixels in the truth.
    pub truth: u64,
    /// All pixels.
    pub pixels: u64,
}

impl PixelCounts {
    /// Counts the foreground of probabilities against `truth`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the lengths differ; [`Error::NotFinite`] for NaN, which is neither foreground nor
    /// background.
    pub fn of(probabilities: &[f32], truth: &[bool]) -> Result<Self> {
        same_length(probabilities.len(), truth.len())?;
        check_probabilities(probabilities)?;
        let mut counts = Self { pixels: probabilities.len() as u64, ..Self::default() };
        for (&probability, &is_truth) in probabilities.iter().zip(truth) {
            let is_predicted = is_foreground(probability);
            counts.both += u64::from(is_predicted && is_truth);
            counts.predicted += u64::from(is_predicted);
            counts.truth += u64::from(is_truth);
        }
        Ok(counts)
    }

    /// `2 both / (predicted + truth)`; 1 if both masks are empty.
    pub fn dice(&self) -> f64 {
        let sum = self.predicted + self.truth;
        if sum == 0 { 1.0 } else { 2.0 * self.both as f64 / sum as f64 }
    }

    /// `both / union`; 1 if both masks are empty.
    pub fn iou(&self) -> f64 {
        let union = self.predicted + self.truth - self.both;
        if union == 0 { 1.0 } else { self.both as f64 / union as f64 }
    }
}

impl std::ops::AddAssign for PixelCounts {
    fn add_assign(&mut self, other: Self) {
        self.both += other.both;
        self.predicted += other.predicted;
        self.truth += other.truth;
        self.pixels += other.pixels;
    }
}

/// The scores of one image.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ImageScore {
    /// Counts of the foreground.
    pub counts: PixelCounts,
    /// Dice of the foreground.
    pub dice: f64,
    /// IoU of the foreground.
    pub iou: f64,
    /// Dice of the probabilities without a threshold, as the reference's trainer reports it:
    /// `(2 Σ p t + 1e-6) / (Σ p + Σ t + 1e-6)`. Two empty masks give 1.
    pub soft_dice: f64,
}

impl ImageScore {
    /// Scores probabilities in `0..=1` against a truth of the same size.
    ///
    /// # Errors
    /// As [`PixelCounts::of`].
    pub fn of(probabilities: &[f32], truth: &[bool]) -> Result<Self> {
        let counts = PixelCounts::of(probabilities, truth)?;
        let (mut product, mut sum) = (0.0, 0.0);
        for (&p, &t) in probabilities.iter().zip(truth) {
            product += if t { f64::from(p) } else { 0.0 };
            sum += f64::from(p) + f64::from(u8::from(t));
        }
        Ok(Self { counts, dice: counts.dice(), iou: counts.iou(), soft_dice: soft_ratio(product, sum) })
    }
}

fn soft_ratio(product: f64, sum: f64) -> f64 {
    (2.0 * product + 1e-6) / (sum + 1e-6)
}

/// Sums of scores over the images of one group (a modality, or all).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SegmentationSums {
    /// Number of images.
    pub images: u64,
    /// Sum of the Dice of each image.
    pub dice: f64,
    /// Sum of the IoU of each image.
    pub iou: f64,
    /// Sum of the soft Dice of each image.
    pub soft_dice: f64,
    /// Pixel counts of all images.
    pub pooled: PixelCounts,
}

impl SegmentationSums {
    /// Adds one image.
    pub fn add(&mut self, score: &ImageScore) {
        let ImageScore { counts: pooled, dice, iou, soft_dice } = *score;
        self.merge(&Self { images: 1, dice, iou, soft_dice, pooled });
    }

    /// Adds another group's images.
    pub fn merge(&mut self, other: &Self) {
        self.images += other.images;
        self.dice += other.dice;
        self.iou += other.iou;
        self.soft_dice += other.soft_dice;
        self.pooled += other.pooled;
    }

    /// Means over images; `None` without images.
    pub fn means(&self) -> Option<SegmentationMeans> {
        let images = (self.images > 0).then_some(self.images as f64)?;
        Some(SegmentationMeans { dice: self.dice / images, iou: self.iou / images, soft_dice: self.soft_dice / images })
    }
}

/// Means over images, or over the means of groups.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SegmentationMeans {
    /// Mean Dice at 0.5.
    pub dice: f64,
    /// Mean IoU at 0.5.
    pub iou: f64,
    /// Mean soft Dice.
    pub soft_dice: f64,
}

impl SegmentationMeans {
    /// Mean over groups, each with the same weight regardless of its number of images; `None` without groups.
    pub fn macro_mean(groups: impl IntoIterator<Item = Self>) -> Option<Self> {
        let mut sums = SegmentationSums::default();
        for Self { dice, iou, soft_dice } in groups {
            sums.merge(&SegmentationSums { images: 1, dice, iou, soft_dice, ..SegmentationSums::default() });
        }
        sums.means()
    }
}

/// [`Error::NotFinite`] if a probability is NaN or infinite.
pub(super) fn check_probabilities(probabilities: &[f32]) -> Result<()> {
    Error::check_finite("mask probabilities", probabilities)
}

/// [`Error::Shape`] unless a prediction and its truth have the same number of pixels.
pub(super) fn same_length(prediction: usize, truth: usize) -> Result<()> {
    if prediction == truth {
        return Ok(());
    }
    Err(Error::Shape { reason: format!("the prediction has {prediction} pixels, the truth {truth}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dice_and_iou_of_a_known_overlap() {
        let score = ImageScore::of(&[0.9, 0.8, 0.2, 0.4], &[true, false, true, false]).unwrap();
        assert_eq!(score.counts, PixelCounts { both: 1, predicted: 2, truth: 2, pixels: 4 });
        assert!((score.dice - 0.5).abs() < 1e-12);
        assert!((score.iou - 1.0 / 3.0).abs() < 1e-12);
        let expected = (2.0 * (f64::from(0.9_f32) + f64::from(0.2_f32)) + 1e-6) / (2.3 + 2.0 + 1e-6);
        assert!((score.soft_dice - expected).abs() < 1e-6, "{} {expected}", score.soft_dice);
    }

    #[test]
    fn empty_masks_score_one_or_zero() {
        let both = ImageScore::of(&[0.0; 4], &[false; 4]).unwrap();
        assert_eq!((both.dice, both.iou, both.soft_dice), (1.0, 1.0, 1.0));
        let missed = ImageScore::of(&[0.0; 4], &[true, false, false, false]).unwrap();
        assert_eq!((missed.dice, missed.iou), (0.0, 0.0));
        let invented = ImageScore::of(&[0.9, 0.0, 0.0, 0.0], &[false; 4]).unwrap();
        assert_eq!((invented.dice, invented.iou), (0.0, 0.0));
    }

    #[derive(Deserialize)]
    struct Edges {
        masks: Vec<MaskPair>,
    }

    #[derive(Deserialize)]
    struct MaskPair {
        name: String,
        prediction: Vec<u8>,
        truth: Vec<u8>,
        monai: Overlap,
        monai_default: Overlap,
        medpy: Overlap,
    }

    #[derive(Deserialize)]
    struct Overlap {
        dice: Option<f64>,
        iou: Option<f64>,
    }

    #[test]
    fn dice_and_iou_equal_monai_and_medpy() {
        let edges: Edges = serde_json::from_str(include_str!("../../tests/fixtures/score_edges.json")).unwrap();
        assert!(edges.masks.len() > 8);
        for MaskPair { name, prediction, truth, monai, monai_default, medpy } in edges.masks {
            let probabilities: Vec<f32> = prediction.iter().map(|value| f32::from(*value)).collect();
            let truth: Vec<bool> = truth.iter().map(|value| *value == 1).collect();
            let score = ImageScore::of(&probabilities, &truth).unwrap();
            // MONAI computes in fp32
            let is = |found: f64, expected: Option<f64>| expected.is_some_and(|value| (found - value).abs() < 1e-7);
            assert!(is(score.dice, monai.dice) && is(score.iou, monai.iou), "{name}: {score:?}");
            let (is_truth_empty, are_both_empty) =
                (score.counts.truth == 0, score.counts.truth + score.counts.predicted == 0);
            // by default MONAI leaves out an empty truth; medpy's Dice of two empty masks is NaN
            assert_eq!(
                (monai_default.dice.is_none(), medpy.dice.is_none()),
                (is_truth_empty, are_both_empty),
                "{name}"
            );
            assert!(is_truth_empty || is(score.dice, monai_default.dice) && is(score.iou, monai_default.iou), "{name}");
            assert!(are_both_empty || is(score.dice, medpy.dice), "{name}");
            assert!(is(score.iou, medpy.iou), "{name}");
        }
    }

    #[test]
    fn nan_is_neither_foreground_nor_background() {
        for probability in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for truth in [true, false] {
                let error = ImageScore::of(&[0.9, probability], &[true, truth]).unwrap_err();
                let expected = "the mask probabilities of the model are not finite: 1 of 2 are NaN or infinite";
                assert_eq!(error.to_string(), expected);
            }
        }
    }

    #[test]
    fn macro_and_pooled_means_differ_if_groups_do() {
        let good = ImageScore::of(&[1.0; 9], &[true; 9]).unwrap();
        let bad = ImageScore::of(&[0.0], &[true]).unwrap();
        let (mut first, mut second) = (SegmentationSums::default(), SegmentationSums::default());
        first.add(&good);
        first.add(&good);
        second.add(&bad);
        let means = SegmentationMeans::macro_mean([first, second].iter().filter_map(SegmentationSums::means)).unwrap();
        assert!((means.dice - 0.5).abs() < 1e-12, "two groups, one perfect");
        assert!((means.iou - 0.5).abs() < 1e-12 && (means.soft_dice - 0.5).abs() < 1e-6, "{means:?}");
        first.merge(&second);
        assert!((first.means().unwrap().dice - 2.0 / 3.0).abs() < 1e-12, "three images, two perfect");
        assert!((first.pooled.dice() - 36.0 / 37.0).abs() < 1e-12, "19 truth pixels, 18 found");
        assert_eq!(SegmentationSums::default().means(), None);
    }

    #[test]
    fn different_sizes_are_an_error() {
        let error = ImageScore::of(&[0.0; 3], &[false; 4]).unwrap_err();
        assert_eq!(error.to_string(), "the prediction has 3 pixels, the truth 4");
    }
}
