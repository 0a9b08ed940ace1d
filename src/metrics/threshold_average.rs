//! Threshold-averaged scores of the reference evaluation (its mean Dice, mean IoU and so on): averages over 256
//! thresholds of an 8-bit map that is first stretched to its full range.
//!
//! They differ from Dice at 0.5. For example, a perfect binary map whose foreground covers 4 % scores 0.9964, because
//! the last threshold, 0, counts every pixel as foreground.
//!
//! Source: PRS-Med `evaluation/segmentation` (after UACANet's `run/Eval.py`).
//! Deviations: that code divides by an empty set in some cases and gets NaN for a whole modality. Here the image is
//! left out of that mean (`weighted_f` with an empty truth), or the empty quadrant is (`structure`). One 256-bin
//! histogram replaces the passes over all pixels; a test compares the two.

use serde::{Deserialize, Serialize};

use crate::segmentation::{check_probabilities, same_length};
use crate::{order, structure};
use prsmed_base::error::{Error, Result};

/// Number of thresholds: 1, 254/255, ..., 0.
pub const NUM_THRESHOLDS: usize = 256;

/// Stretches a probability map to 0..=255 by its own minimum and maximum. It rounds half to even, in fp32, like the
/// reference's prediction PNGs. NaN becomes 0.
pub fn stretch_8bit(probabilities: &[f32]) -> Vec<u8> {
    let low = probabilities.iter().copied().fold(f32::INFINITY, f32::min);
    let high = probabilities.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let range = high - low + 1e-8;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "in 0..=255; `as` saturates, NaN is 0")]
    probabilities.iter().map(|p| ((p - low) / range * 255.0).round_ties_even() as u8).collect()
}

/// The thresholds, in the order and with the rounding of the reference (`numpy.linspace(1, 0, 256)`).
fn threshold(index: usize) -> f64 {
    if index == NUM_THRESHOLDS - 1 {
        return 0.0;
    }
    let index = index as f64;
    index * (-1.0 / 255.0) + 1.0
}

/// For each threshold, the smallest 8-bit level with `level / 255 >= threshold` in double precision, as in the
/// reference.
fn first_levels() -> [usize; NUM_THRESHOLDS] {
    std::array::from_fn(|index| {
        let threshold = threshold(index);
        (0..=255_u8).position(|level| f64::from(level) / 255.0 >= threshold).unwrap_or(256)
    })
}

/// Scores of one image at one threshold: Dice, IoU, sensitivity, specificity and E-measure.
type AtThreshold = [f64; 5];

/// `both`, `predicted`, `truth`, `pixels` are pixel counts. Without overlap all scores but the E-measure are 0, also the
/// specificity, as in the reference.
fn at_threshold(both: f64, predicted: f64, truth: f64, pixels: f64) -> AtThreshold {
    let enhanced = structure::enhanced_alignment(both, predicted, truth, pixels);
    if both == 0.0 {
        return [0.0, 0.0, 0.0, 0.0, enhanced];
    }
    let negatives = pixels - truth;
    let true_negatives = negatives - (predicted - both);
    // without any negative pixel the reference divides 0 by 0
    let specificity = if negatives == 0.0 { 0.0 } else { true_negatives / negatives };
    [2.0 * both / (truth + predicted), both / (truth + predicted - both), both / truth, specificity, enhanced]
}

/// Sums of the threshold curves over images. Scores are averaged over images first, then over thresholds.
#[derive(Debug, Clone, PartialEq)]
pub struct ThresholdSums {
    images: u64,
    curve: Vec<AtThreshold>,
    mae: f64,
    structure: f64,
    weighted_f: f64,
    weighted_f_images: u64,
}

impl Default for ThresholdSums {
    fn default() -> Self {
        let curve = vec![[0.0; 5]; NUM_THRESHOLDS];
        Self { images: 0, curve, mae: 0.0, structure: 0.0, weighted_f: 0.0, weighted_f_images: 0 }
    }
}

impl ThresholdSums {
    /// Adds one image: its probability map and its truth of the same size. Like the reference, it stretches the map to 8
    /// bit. `width` is the number of columns.
    ///
    /// # Errors
    /// As [`Self::add_8bit`]; [`Error::NotFinite`] for NaN.
    pub fn add(&mut self, probabilities: &[f32], truth: &[bool], width: usize) -> Result<()> {
        check_probabilities(probabilities)?;
        self.add_8bit(&stretch_8bit(probabilities), truth, width)
    }

    /// Adds one image with an 8-bit map of the truth's size. `width` is the number of columns.
    ///
    /// # Errors
    /// [`Error::Shape`] if the lengths differ or are not a multiple of `width`.
    pub fn add_8bit(&mut self, prediction: &[u8], truth: &[bool], width: usize) -> Result<()> {
        same_length(prediction.len(), truth.len())?;
        if truth.is_empty() || width == 0 || !truth.len().is_multiple_of(width) {
            let reason = format!("{} pixels are not an image of width {width}", truth.len());
            return Err(Error::Shape { reason });
        }
        let map = structure::MaskPair::new(prediction, truth, width);
        let weighted_f = map.weighted_f();
        self.merge(&Self {
            images: 1,
            curve: curve_of(prediction, truth).collect(),
            mae: map.mean_absolute_error(),
            structure: map.structure_measure(),
            weighted_f: weighted_f.unwrap_or(0.0),
            weighted_f_images: weighted_f.is_some().into(),
        });
        Ok(())
    }

    /// Adds another group's images.
    pub fn merge(&mut self, other: &Self) {
        let sums = self.curve.iter_mut().flatten().zip(other.curve.iter().flatten());
        sums.for_each(|(sum, one)| *sum += one);
        self.images += other.images;
        self.mae += other.mae;
        self.structure += other.structure;
        self.weighted_f += other.weighted_f;
        self.weighted_f_images += other.weighted_f_images;
    }

    /// The mean scores of the images so far; `None` without images.
    pub fn scores(&self) -> Option<ThresholdScores> {
        let images = (self.images > 0).then_some(self.images as f64)?;
        let of_images = |score: usize| self.curve.iter().map(move |at| at[score] / images);
        let [mean_dic, mean_iou, mean_sen, mean_spe, mean_em] =
            std::array::from_fn(|score| of_images(score).sum::<f64>() / NUM_THRESHOLDS as f64);
        let [max_dic, max_iou, _, _, max_em] = std::array::from_fn(|score| of_images(score).fold(0.0, f64::max));
        Some(ThresholdScores {
            mean_dic,
            max_dic,
            mean_iou,
            max_iou,
            mean_sen,
            mean_spe,
            mean_em,
            max_em,
            sm: self.structure / images,
            weighted_fm: (self.weighted_f_images > 0).then(|| self.weighted_f / self.weighted_f_images as f64),
            mae: self.mae / images,
        })
    }
}

fn curve_of(prediction: &[u8], truth: &[bool]) -> impl Iterator<Item = AtThreshold> {
    let (mut all, mut inside) = ([0_u64; 257], [0_u64; 257]);
    for (&level, &is_truth) in prediction.iter().zip(truth) {
        all[usize::from(level)] += 1;
        inside[usize::from(level)] += u64::from(is_truth);
    }
    for level in (0..256).rev() {
        all[level] += all[level + 1];
        inside[level] += inside[level + 1];
    }
    first_levels()
        .into_iter()
        .map(move |level| at_threshold(inside[level] as f64, all[level] as f64, inside[0] as f64, all[0] as f64))
}

/// Scores with the names of the reference, also when serialised.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ThresholdScores {
    /// Dice, mean over images, then over the 256 thresholds.
    #[serde(rename = "meanDic")]
    pub mean_dic: f64,
    /// Dice at the threshold that is best for these images.
    #[serde(rename = "maxDic")]
    pub max_dic: f64,
    /// IoU, mean over images, then thresholds.
    #[serde(rename = "meanIoU")]
    pub mean_iou: f64,
    /// IoU at the best threshold.
    #[serde(rename = "maxIoU")]
    pub max_iou: f64,
    /// Sensitivity, mean over images, then thresholds.
    #[serde(rename = "meanSen")]
    pub mean_sen: f64,
    /// Specificity (0 without overlap), mean over images, then thresholds.
    #[serde(rename = "meanSpe")]
    pub mean_spe: f64,
    /// Enhanced-alignment measure, mean over images, then thresholds.
    #[serde(rename = "meanEm")]
    pub mean_em: f64,
    /// Enhanced-alignment measure at the best threshold.
    #[serde(rename = "maxEm")]
    pub max_em: f64,
    /// Structure measure, alpha 0.5.
    #[serde(rename = "Sm")]
    pub sm: f64,
    /// Weighted F measure over the images with a non-empty truth; `None` if there are none.
    #[serde(rename = "wFm")]
    pub weighted_fm: Option<f64>,
    /// Mean absolute error of the stretched map.
    pub mae: f64,
}

impl ThresholdScores {
    /// Mean over groups, each with the same weight, as the reference averages its classes; `None` without groups.
    pub fn macro_mean(groups: &[Self]) -> Option<Self> {
        let n = (!groups.is_empty()).then_some(groups.len() as f64)?;
        let mean = |part: fn(&Self) -> f64| groups.iter().map(part).sum::<f64>() / n;
        Some(Self {
            mean_dic: mean(|g| g.mean_dic),
            max_dic: mean(|g| g.max_dic),
            mean_iou: mean(|g| g.mean_iou),
            max_iou: mean(|g| g.max_iou),
            mean_sen: mean(|g| g.mean_sen),
            mean_spe: mean(|g| g.mean_spe),
            mean_em: mean(|g| g.mean_em),
            max_em: mean(|g| g.max_em),
            sm: mean(|g| g.sm),
            weighted_fm: order::mean(groups.iter().filter_map(|group| group.weighted_fm)),
            mae: mean(|g| g.mae),
        })
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// The definition: pixel by pixel, threshold by threshold.
    fn direct(prediction: &[u8], truth: &[bool]) -> Vec<AtThreshold> {
        (0..NUM_THRESHOLDS)
            .map(|index| {
                let (mut tp, mut fp, mut tn, mut false_negative) = (0.0, 0.0, 0.0, 0.0);
                for (&level, &is_truth) in prediction.iter().zip(truth) {
                    match (f64::from(level) / 255.0 >= threshold(index), is_truth) {
                        (true, true) => tp += 1.0,
                        (true, false) => fp += 1.0,
                        (false, true) => false_negative += 1.0,
                        (false, false) => tn += 1.0,
                    }
                }
                let enhanced =
                    structure::enhanced_alignment(tp, tp + fp, tp + false_negative, tp + fp + tn + false_negative);
                if tp == 0.0 {
                    return [0.0, 0.0, 0.0, 0.0, enhanced];
                }
                let (dice, iou) = (2.0 * tp / (2.0 * tp + fp + false_negative), tp / (tp + fp + false_negative));
                [dice, iou, tp / (tp + false_negative), tn / (tn + fp), enhanced]
            })
            .collect()
    }

    fn scores_of(probabilities: &[f32], truth: &[bool], width: usize) -> ThresholdScores {
        let mut sums = ThresholdSums::default();
        sums.add(probabilities, truth, width).unwrap();
        sums.scores().unwrap()
    }

    #[test]
    fn the_histogram_equals_the_definition() {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        for round in 0..4 {
            let truth: Vec<bool> = (0..40 * 30).map(|_| rng.random_bool(0.3)).collect();
            let prediction: Vec<u8> = (0..40 * 30).map(|_| if round == 0 { 3 } else { rng.random() }).collect();
            for (index, (fast, slow)) in curve_of(&prediction, &truth).zip(direct(&prediction, &truth)).enumerate() {
                for (a, b) in fast.into_iter().zip(slow) {
                    assert!((a - b).abs() < 1e-12, "round {round}, threshold {index}: {fast:?} {slow:?}");
                }
            }
        }
    }

    #[test]
    fn worked_examples_have_the_reference_scores() {
        // 4 % foreground
        let truth: Vec<bool> = (0..10_000).map(|i| i % 25 == 0).collect();
        let perfect: Vec<f32> = truth.iter().map(|&t| f32::from(u8::from(t))).collect();
        let scores = scores_of(&perfect, &truth, 100);
        assert!((scores.mean_dic - 0.9964).abs() < 5e-5, "{}", scores.mean_dic);
        assert!((scores.max_dic - 1.0).abs() < 1e-12 && scores.mae.abs() < 1e-12);
        // a correct map with low probabilities: stretching makes it binary
        let soft: Vec<f32> = truth.iter().map(|&t| if t { 0.6 } else { 0.4 }).collect();
        assert!((scores_of(&soft, &truth, 100).mean_dic - 0.9964).abs() < 5e-5);
        let mut unstretched = ThresholdSums::default();
        let levels: Vec<u8> = truth.iter().map(|&t| if t { 153 } else { 102 }).collect();
        unstretched.add_8bit(&levels, &truth, 100).unwrap();
        let mean = unstretched.scores().unwrap().mean_dic;
        assert!((mean - 0.23).abs() < 5e-3, "{mean}");
    }

    #[test]
    fn without_overlap_the_specificity_is_zero() {
        let [dice, _, _, specificity, enhanced] = at_threshold(0.0, 10.0, 20.0, 100.0);
        assert_eq!((dice, specificity), (0.0, 0.0));
        assert!(enhanced > 0.0);
    }

    #[test]
    fn scores_are_averaged_over_images_first() {
        let truth = [true, false, false, false];
        let mut both = ThresholdSums::default();
        both.add_8bit(&[255, 0, 0, 0], &truth, 2).unwrap();
        let mut other = ThresholdSums::default();
        other.add_8bit(&[0, 255, 0, 0], &truth, 2).unwrap();
        both.merge(&other);
        let scores = both.scores().unwrap();
        // at threshold 0 both images have Dice 0.4; above it 1 and 0
        assert!((scores.mean_dic - (255.0 * 0.5 + 0.4) / 256.0).abs() < 1e-12);
        assert!((scores.max_dic - 0.5).abs() < 1e-12);
        // no error, and an error of 1 at two of four pixels
        assert!((scores.mae - 0.25).abs() < 1e-12, "{}", scores.mae);
        let alone = other.scores().unwrap();
        assert!((scores.sm - f64::midpoint(1.0, alone.sm)).abs() < 1e-9, "{} {}", scores.sm, alone.sm);
        let found = [scores, alone].map(|one| one.weighted_fm.unwrap());
        assert!((found[0] - f64::midpoint(1.0, found[1])).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn maps_are_stretched() {
        assert_eq!(stretch_8bit(&[0.25, 0.5, 0.75]), [0, 128, 255]);
        assert_eq!(stretch_8bit(&[0.7; 3]), [0, 0, 0]);
    }

    #[test]
    fn empty_truth_gives_finite_scores() {
        let scores = scores_of(&[0.0, 0.3, 0.5, 1.0], &[false; 4], 2);
        assert_eq!((scores.mean_dic, scores.weighted_fm), (0.0, None));
        assert!(scores.sm.is_finite() && scores.mean_em.is_finite());
    }

    #[derive(Deserialize)]
    struct Fixture {
        cases: Vec<Case>,
        all: std::collections::BTreeMap<String, f64>,
    }

    #[derive(Deserialize)]
    struct Case {
        name: String,
        width: usize,
        levels: Vec<u8>,
        truth: Vec<u8>,
        #[serde(flatten)]
        expected: ThresholdScores,
    }

    #[test]
    fn scores_equal_numpy_and_scipy() {
        let fixture: Fixture =
            serde_json::from_str(include_str!("../../tests/fixtures/segmentation_scores.json")).unwrap();
        assert!(fixture.cases.len() >= 5);
        let mut all = ThresholdSums::default();
        for case in &fixture.cases {
            let truth: Vec<bool> = case.truth.iter().map(|&t| t == 1).collect();
            let mut one = ThresholdSums::default();
            one.add_8bit(&case.levels, &truth, case.width).unwrap();
            all.merge(&one);
            let found = serde_json::to_value(one.scores().unwrap()).unwrap();
            let expected = serde_json::to_value(case.expected).unwrap();
            for (key, value) in expected.as_object().unwrap() {
                match (value.as_f64(), found[key].as_f64()) {
                    (Some(a), Some(b)) => assert!((a - b).abs() < 1e-10, "{} {key}: expected {a}, got {b}", case.name),
                    (a, b) => assert_eq!(a, b, "{} {key}", case.name),
                }
            }
        }
        let found = serde_json::to_value(all.scores().unwrap()).unwrap();
        for (key, value) in &fixture.all {
            assert!((found[key].as_f64().unwrap() - value).abs() < 1e-10, "{key}");
        }
    }

    #[test]
    fn groups_have_the_same_weight_in_the_mean_of_groups() {
        let group = |value: f64, weighted_fm| ThresholdScores {
            mean_dic: value,
            max_dic: value + 0.01,
            mean_iou: value + 0.02,
            max_iou: value + 0.03,
            mean_sen: value + 0.04,
            mean_spe: value + 0.05,
            mean_em: value + 0.06,
            max_em: value + 0.07,
            sm: value + 0.08,
            weighted_fm,
            mae: value + 0.09,
        };
        assert!(ThresholdScores::macro_mean(&[]).is_none());
        let of =
            |groups: &[ThresholdScores]| serde_json::to_value(ThresholdScores::macro_mean(groups).unwrap()).unwrap();
        let mean = of(&[group(0.2, Some(0.5)), group(0.6, None)]);
        let expected = serde_json::to_value(group(0.4, Some(0.5))).unwrap();
        for (name, value) in expected.as_object().unwrap() {
            let (found, value) = (mean[name].as_f64().unwrap(), value.as_f64().unwrap());
            assert!((found - value).abs() < 1e-12, "{name}: {found} {value}");
        }
        assert!(of(&[group(0.2, None)])["wFm"].is_null());
    }
}
