//! Answer and painted masks of a question, and how sure the model is of them.

use crate::data::agreement::Positions;
use crate::data::check::findings::mask_warning;
use crate::data::familiarity::Familiarity;
use crate::data::position::Zones;
use crate::data::sheet;
use crate::metrics::segmentation::is_foreground;
use crate::segment::calibration::{Calibration, Confidence};
use crate::segment::generate::Written;
use crate::{Error, Result};
use image::{DynamicImage, GrayImage, RgbImage};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The mask of one target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Painted {
    /// Probabilities at the image's size before the presence threshold, row by row.
    pub probabilities: Vec<f32>,
    /// Computes the confidence of the mask.
    pub confidence: Confidence,
    /// False if the mask is empty because the target is reported as not found.
    pub is_painted: bool,
    /// True for a mask that was given with the question; its probabilities are 0 and 1.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_given: bool,
    /// Of several runs: mean Dice of their masks with the mask. 1 where they agree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agreement: Option<f64>,
}

impl Painted {
    /// The probabilities of the painted mask: zeros if it is not painted.
    pub fn mask(&self) -> Cow<'_, [f32]> {
        if self.is_painted {
            Cow::Borrowed(&self.probabilities)
        } else {
            Cow::Owned(vec![0.0; self.probabilities.len()])
        }
    }

    /// Whether each pixel belongs to the painted mask: from a probability of 0.5 on.
    pub fn pixels(&self) -> impl Iterator<Item = bool> {
        self.probabilities.iter().map(|probability| self.is_painted && is_foreground(*probability))
    }

    /// Number of foreground pixels.
    pub fn num_foreground(&self) -> usize {
        self.pixels().filter(|is_foreground| *is_foreground).count()
    }

    /// Foreground as a fraction of the image.
    pub fn area_frac(&self) -> f64 {
        self.num_foreground() as f64 / self.probabilities.len().max(1) as f64
    }
}

/// Answer, masks and class of a question about an image.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The answer without remains of the template.
    pub answer: String,
    /// Number of generated tokens, including the end token.
    pub new_tokens: usize,
    /// The masks of the targets that the question is about; at least one.
    pub targets: Vec<Painted>,
    /// `(width, height)` of the image and its masks in pixels.
    pub size: (u32, u32),
    /// Probability of each modality class, in the order of the run's classes.
    pub classes: Vec<f32>,
    /// Name and probability of the most probable class.
    pub class: Option<(String, f32)>,
    /// How question, image and answer compare with the training.
    pub familiarity: Familiarity,
    /// The words for locations in the training data.
    pub zones: Zones,
    /// Locations of the first mask and in the answer.
    pub positions: Positions,
}

impl Prediction {
    /// Masks as they are painted, without an answer. Nothing is known of class and familiarity.
    pub fn painted(
        (masks, classes): (Vec<Vec<f32>>, Vec<f32>),
        size: (u32, u32),
        zones: Zones,
        calibration: Option<&Calibration>,
        always_paint: bool,
    ) -> Self {
        // a target that is reported as not found gets an empty mask
        let paint = |probabilities: Vec<f32>| {
            let confidence = Confidence::of(&probabilities, calibration);
            let is_painted = confidence.is_found || always_paint;
            Painted { probabilities, confidence, is_painted, is_given: false, agreement: None }
        };
        let targets = masks.into_iter().map(paint).collect();
        let mut painted = Self { targets, size, classes, zones, ..Self::default() };
        painted.positions = painted.positions_in("");
        painted
    }

    /// With a mask of the same size in place of the first one; its foreground is above 0.
    #[must_use]
    pub fn with_mask(mut self, mask: &GrayImage) -> Self {
        let probabilities: Vec<f32> = mask.iter().map(|value| if *value > 0 { 1.0 } else { 0.0 }).collect();
        let confidence = Confidence::of(&probabilities, None);
        let given = Painted { probabilities, confidence, is_painted: true, is_given: true, agreement: None };
        self.targets.splice(0..1, [given]);
        self.positions = self.positions_in("");
        self
    }

    /// With an answer, whose location is compared with that of the first mask.
    #[must_use]
    pub fn with_answer(mut self, Written { answer, new_tokens }: Written) -> Self {
        (self.answer, self.new_tokens) = (answer, new_tokens);
        self.positions = self.positions_in(&self.answer);
        self
    }

    /// The painted masks as images of 0 and 255.
    ///
    /// # Errors
    /// As [`Self::binary_mask`].
    pub(crate) fn binary_masks(&self) -> Result<Vec<GrayImage>> {
        self.targets.iter().map(|target| self.binary(target)).collect()
    }

    /// The mask of the first target.
    ///
    /// # Panics
    /// If a model without targets made this.
    pub fn target(&self) -> &Painted {
        self.targets.first().expect("a model has a target")
    }

    /// The first mask as an image of 0 and 255: foreground from a probability of 0.5 on.
    ///
    /// # Errors
    /// [`Error::Shape`] if the mask does not have the size.
    pub fn binary_mask(&self) -> Result<GrayImage> {
        self.binary(self.target())
    }

    fn binary(&self, target: &Painted) -> Result<GrayImage> {
        let levels = target.pixels().map(|is_foreground| if is_foreground { 255 } else { 0 }).collect();
        let (width, height) = self.size;
        let wrong = || Error::Shape { reason: format!("a mask of another size than {width}x{height}") };
        GrayImage::from_raw(width, height, levels).ok_or_else(wrong)
    }

    /// The location of the first mask beside that in a text.
    fn positions_in(&self, text: &str) -> Positions {
        self.binary_mask().map_or_else(|_| Positions::default(), |mask| Positions::of(&mask, text, self.zones))
    }

    /// What to tell if the first mask was given and is probably not meant so; see [`mask_warning`].
    pub fn mask_warning(&self) -> Option<String> {
        self.binary_mask().ok().filter(|_| self.target().is_given).as_ref().and_then(mask_warning)
    }

    /// Whether the first mask has the location that a text names; false for an empty mask.
    pub fn mask_is_at(&self, text: &str) -> bool {
        self.positions_in(text).positions_agree == Some(true)
    }

    /// The painted probabilities of the first mask as grey levels.
    ///
    /// # Errors
    /// As [`Self::binary_mask`].
    pub fn levels(&self) -> Result<GrayImage> {
        sheet::probability_image(&self.target().mask(), self.size.0, self.size.1)
    }

    /// The image with the first mask and, if given, the ground truth.
    ///
    /// # Errors
    /// [`Error::Shape`] if sizes differ.
    pub fn overlay(&self, image: &DynamicImage, truth: Option<&GrayImage>) -> Result<RgbImage> {
        sheet::overlay(&image.to_rgb8(), &self.levels()?, truth)
    }
}

/// The most probable class of an image, and its probability.
pub(super) fn class_of(names: &[String], probabilities: &[f32]) -> Option<(String, f32)> {
    let best = probabilities.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.and_then(|(class, probability)| Some((names.get(class)?.clone(), *probability)))
}

/// Mean of the masks of several runs, and the mean Dice of each of them with it.
pub(super) fn mean_mask(masks: &[Vec<f32>]) -> (Vec<f32>, f64) {
    let count = masks.len() as f32;
    let num_pixels = masks.first().map_or(0, Vec::len);
    let mean: Vec<f32> =
        (0..num_pixels).map(|pixel| masks.iter().map(|mask| mask[pixel]).sum::<f32>() / count).collect();
    let agreement = masks.iter().map(|mask| dice(mask, &mean)).sum::<f64>() / f64::from(count);
    (mean, agreement)
}

/// Dice of two masks of probabilities; 1 if both are empty.
fn dice(a: &[f32], b: &[f32]) -> f64 {
    let count = |of: &[f32]| of.iter().filter(|value| is_foreground(**value)).count();
    let both = a.iter().zip(b).filter(|(a, b)| is_foreground(**a) && is_foreground(**b)).count();
    let all = count(a) + count(b);
    if all == 0 { 1.0 } else { 2.0 * both as f64 / all as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::segmentation::ImageScore;

    fn painted(mask: Vec<f32>, size: (u32, u32), calibration: Option<&Calibration>, always_paint: bool) -> Prediction {
        let answer = "in the upper left part of the image".to_owned();
        let painted = Prediction::painted((vec![mask], Vec::new()), size, Zones::Grid, calibration, always_paint);
        painted.with_answer(Written { answer, new_tokens: 0 })
    }

    #[test]
    fn the_mask_of_several_runs_is_their_mean() {
        let (mean, agreement) = mean_mask(&[vec![0.9, 0.9, 0.0, 0.0], vec![0.9, 0.3, 0.2, 0.0]]);
        assert_eq!(mean, [0.9, 0.6, 0.1, 0.0]);
        // the first mask is the mean's; of the second 2 of 1 + 2 pixels are common
        assert_eq!(agreement, f64::midpoint(1.0, 2.0 / 3.0));
        assert_eq!(dice(&[0.1], &[0.2]), 1.0);
    }

    #[test]
    fn a_probability_of_one_half_is_foreground_in_scores_and_masks() {
        let below = f32::from_bits(0.5_f32.to_bits() - 1);
        for (probabilities, num_foreground) in
            [([0.5, 0.5, 0.2, 0.9], 3), ([below, 0.0, 0.1, 0.2], 0), ([0.5, below, below, 0.0], 1)]
        {
            let score = ImageScore::of(&probabilities, &[true; 4]).unwrap();
            assert_eq!(score.counts.predicted, num_foreground);
            let prediction = painted(probabilities.into(), (2, 2), None, false);
            let drawn: u64 = prediction.binary_mask().unwrap().iter().map(|value| u64::from(*value == 255)).sum();
            let target = prediction.target();
            assert_eq!((drawn, target.num_foreground() as u64), (num_foreground, num_foreground));
            let confidence = target.confidence;
            assert_eq!((confidence.is_found, confidence.foreground.is_some()), (true, num_foreground > 0));
        }
    }

    #[test]
    fn a_target_that_is_not_found_has_an_empty_mask_unless_it_is_always_painted() {
        let calibration =
            Calibration { temperature: 1.0, presence_threshold: Some(0.99), num_present: 1, num_absent: 1 };
        for (paint, left) in [(false, 0), (true, 4)] {
            let prediction = painted(vec![0.5; 4], (2, 2), Some(&calibration), paint);
            let target = prediction.target();
            assert!(!target.confidence.is_found);
            assert_eq!((target.num_foreground(), target.probabilities.len()), (left, 4));
            assert_eq!(target.mask()[0], if paint { 0.5 } else { 0.0 });
            // the location is that of the mask that is left
            let Positions { mask_position, positions_agree, .. } = prediction.positions;
            let expected = if paint { (Some("center"), Some(false)) } else { (None, None) };
            assert_eq!((mask_position.as_deref(), positions_agree), expected);
        }
    }

    #[test]
    fn a_mask_has_the_pixels_with_a_probability_of_at_least_one_half() {
        let prediction = painted(vec![0.0, 0.497, 0.5, 0.503, 1.0], (5, 1), None, false);
        assert_eq!(prediction.binary_mask().unwrap().as_raw(), &[0, 0, 255, 255, 255]);
        let names = ["a", "b", "c"].map(str::to_owned);
        assert_eq!(class_of(&names, &[0.2, 0.5, 0.3]), Some(("b".to_owned(), 0.5)));
    }
}
