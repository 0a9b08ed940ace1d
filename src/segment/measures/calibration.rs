//! How sure a trained model is of its masks: whether the target is there, and how probable its pixels are. Both are
//! fitted on the validation rows, with the weights that are then saved, and stored in the checkpoint.

use crate::data::manifest::Presence;
use crate::metrics::presence::{best_threshold, presence_score};
use crate::metrics::segmentation::is_foreground;
use crate::metrics::temperature::{LogitHistogram, scaled};
use serde::{Deserialize, Serialize};

/// What a run knows from its validation rows.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Divides the logits of the mask before they are shown as probabilities. 1 = as the model computes them.
    pub temperature: f64,
    /// A target with a lower presence score is reported as not found. `None` if the validation rows have no question
    /// about an absent target.
    pub presence_threshold: Option<f64>,
    /// Number of validation questions whose target is in the image.
    pub num_present: u64,
    /// Number of validation questions whose target is absent.
    pub num_absent: u64,
}

/// Confidence of one mask: presence, foreground probability, boundary.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Confidence {
    /// [`presence_score`] of the probability map, 0..=1.
    pub presence: f64,
    /// Whether the target is reported as found: the presence is at least the threshold of the run. A run without a
    /// threshold finds every target.
    pub is_found: bool,
    /// Mean probability of the pixels in the mask after temperature scaling, 0.5..=1; `None` for an empty mask.
    pub foreground: Option<f64>,
    /// Uncertainty of the boundary: the pixels with a probability from 0.25 to 0.75 after temperature scaling, as a
    /// fraction of all pixels from 0.25 on, 0..=1. `None` for an empty mask.
    pub boundary: Option<f64>,
}

impl Confidence {
    /// The confidence of the foreground probabilities of a mask. Without `calibration`, the temperature is 1.
    pub fn of(probabilities: &[f32], calibration: Option<&Calibration>) -> Self {
        let presence = presence_score(probabilities);
        let threshold = calibration.and_then(|calibration| calibration.presence_threshold);
        let temperature = calibration.map_or(1.0, |calibration| calibration.temperature);
        let (mut area, mut sum, mut uncertain, mut possible) = (0_u64, 0.0, 0_u64, 0_u64);
        for probability in probabilities {
            let calibrated = scaled(f64::from(*probability), temperature);
            uncertain += u64::from((0.25..=0.75).contains(&calibrated));
            possible += u64::from(calibrated >= 0.25);
            if is_foreground(*probability) {
                area += 1;
                sum += calibrated;
            }
        }
        let part = |value: f64, whole: u64| (area > 0).then(|| value / whole as f64);
        Self {
            presence,
            is_found: threshold.is_none_or(|threshold| presence >= threshold),
            foreground: part(sum, area),
            boundary: part(uncertain as f64, possible),
        }
    }
}

/// Collects the validation rows for a [`Calibration`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Calibrator {
    logits: LogitHistogram,
    present: Vec<f64>,
    absent: Vec<f64>,
}

impl Calibrator {
    /// Adds the probabilities and the truth of one question.
    pub(crate) fn add(&mut self, target: Presence, probabilities: &[f32], truth: &[bool]) {
        match target {
            Presence::Present => self.present.push(presence_score(probabilities)),
            Presence::Absent => self.absent.push(presence_score(probabilities)),
            Presence::Unknown => return,
        }
        self.logits.add(probabilities, truth);
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.logits.merge(&other.logits);
        self.present.extend(other.present);
        self.absent.extend(other.absent);
    }

    /// `None` without masks.
    pub(crate) fn fit(&self) -> Option<Calibration> {
        Some(Calibration {
            temperature: self.logits.temperature()?,
            presence_threshold: best_threshold(&self.present, &self.absent),
            num_present: self.present.len() as u64,
            num_absent: self.absent.len() as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map of 40x40 with `area` pixels of `probability` over 0.01.
    fn map(area: usize, probability: f32) -> Vec<f32> {
        (0..1600).map(|i| if i < area { probability } else { 0.01 }).collect()
    }

    #[test]
    fn absent_targets_get_a_threshold_and_present_ones_alone_none() {
        let truth = |area: usize| -> Vec<bool> { (0..1600).map(|i| i < area).collect() };
        let mut calibrator = Calibrator::default();
        assert_eq!(calibrator.fit(), None);
        for probability in [0.7, 0.8, 0.9] {
            calibrator.add(Presence::Present, &map(100, probability), &truth(90));
        }
        calibrator.add(Presence::Unknown, &map(100, 0.99), &truth(0));
        let fitted = calibrator.fit().expect("masks");
        assert_eq!((fitted.presence_threshold, fitted.num_present, fitted.num_absent), (None, 3, 0));
        let mut more = Calibrator::default();
        more.add(Presence::Absent, &map(100, 0.1), &truth(0));
        more.add(Presence::Absent, &map(100, 0.2), &truth(0));
        calibrator.merge(more);
        let fitted = calibrator.fit().expect("masks");
        let threshold = fitted.presence_threshold.expect("both kinds");
        assert!((threshold - 0.45).abs() < 1e-6, "{threshold}");
        assert!(Confidence::of(&map(100, 0.6), Some(&fitted)).is_found);
        assert!(!Confidence::of(&map(100, 0.3), Some(&fitted)).is_found);
        assert!(Confidence::of(&map(100, 0.3), None).is_found, "nothing is known");
    }

    #[test]
    fn confidence_is_that_of_the_mask_and_its_border() {
        let mut probabilities = map(100, 0.9);
        probabilities[100..120].fill(0.6);
        probabilities[120..130].fill(0.3);
        let plain = Confidence::of(&probabilities, None);
        assert!((plain.foreground.expect("a mask") - (100.0 * 0.9 + 20.0 * 0.6) / 120.0).abs() < 1e-6, "{plain:?}");
        assert!((plain.boundary.expect("a mask") - 30.0 / 130.0).abs() < 1e-9, "{plain:?}");
        let calibration = Calibration { temperature: 2.0, presence_threshold: None, num_present: 1, num_absent: 0 };
        let humble = Confidence::of(&probabilities, Some(&calibration));
        assert!(humble.foreground < plain.foreground, "{humble:?}");
        // a small mask with a wide boundary
        let mut wide = map(10, 0.9);
        wide[10..200].fill(0.4);
        let wide = Confidence::of(&wide, None).boundary.expect("a mask");
        assert!((wide - 190.0 / 200.0).abs() < 1e-9, "{wide}");
        let all = Confidence::of(&map(50, 0.6), None).boundary;
        assert_eq!(all, Some(1.0));
        let empty = Confidence::of(&map(100, 0.4), None);
        assert_eq!((empty.foreground, empty.boundary), (None, None));
    }
}
