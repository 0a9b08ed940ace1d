//! Thresholds of the filter, and what it says of one pair.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Limits of all tests; the defaults are those of the published filters that each was taken from, or stated as our own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Thresholds {
    /// Least standard deviation of the picture's brightness (0..=1): below it the picture is blank. Ours: 0.02.
    pub spread_min: f64,
    /// Most pixels that are clipped beyond those of the source, as a part of the picture: 0.01.
    pub clipped_max: f64,
    /// Least Dice of the judge's mask and the label: 0.8 (PolypInpainter).
    pub dice_min: f64,
    /// Most foreground of the judge outside of the dilated label, as a part of the picture: 0.01. Ours.
    pub outside_max: f64,
    /// Quantile of the judge's agreement on real pairs above which a pair is too easy, once the quota is full: 0.95.
    pub easy_quantile: f64,
    /// Quantile of real-real neighbour distances that the distance to real features must not exceed: 0.99 (MedDiff-FT).
    pub knn_quantile: f64,
    /// Quantile of real-real similarities that the largest similarity to a train picture must not exceed: 0.999.
    pub cosine_quantile: f64,
    /// Standard deviations of a real statistic within which intensity and seams must lie: 3 (MAISI).
    pub sigma: f64,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            spread_min: 0.02,
            clipped_max: 0.01,
            dice_min: 0.8,
            outside_max: 0.01,
            easy_quantile: 0.95,
            knn_quantile: 0.99,
            cosine_quantile: 0.999,
            sigma: 3.0,
        }
    }
}

impl Thresholds {
    /// Whether every limit is in its range.
    ///
    /// # Errors
    /// [`Error::Config`] that names the first one that is not.
    pub fn check(&self) -> Result<()> {
        for (key, value) in [
            ("spread_min", self.spread_min),
            ("clipped_max", self.clipped_max),
            ("dice_min", self.dice_min),
            ("outside_max", self.outside_max),
            ("easy_quantile", self.easy_quantile),
            ("knn_quantile", self.knn_quantile),
            ("cosine_quantile", self.cosine_quantile),
        ] {
            if !(0.0..=1.0).contains(&value) {
                let key = format!("filter.{key}");
                return Err(Error::config(key, format!("{value} is out of range"), "give a number from 0 to 1"));
            }
        }
        if !(self.sigma > 0.0 && self.sigma.is_finite()) {
            let reason = format!("{} is out of range", self.sigma);
            return Err(Error::config("filter.sigma", reason, "give a positive number, for example 3"));
        }
        Ok(())
    }
}

/// The scores of a pair, and why it is not accepted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Every number that was looked at, by its test's name.
    pub scores: BTreeMap<String, f64>,
    /// Whether no test failed.
    pub accepted: bool,
    /// The tests that failed, in words.
    pub reasons: Vec<String>,
}

impl Verdict {
    /// No test yet: accepted.
    pub fn new() -> Self {
        Self { accepted: true, ..Self::default() }
    }

    /// Writes down a score without judging it.
    pub fn note(&mut self, name: &str, score: f64) {
        self.scores.insert(name.to_owned(), score);
    }

    /// Turns the pair down for a reason of its own.
    pub fn refuse(&mut self, reason: impl Into<String>) {
        self.accepted = false;
        self.reasons.push(reason.into());
    }

    /// The score must be `least` or more; NaN is not.
    pub fn at_least(&mut self, name: &str, score: f64, least: f64) {
        self.judge(name, score, score >= least, || format!("below {least:.4}"));
    }

    /// The score must be `most` or less; NaN is not.
    pub fn at_most(&mut self, name: &str, score: f64, most: f64) {
        self.judge(name, score, score <= most, || format!("above {most:.4}"));
    }

    /// The score must lie within `sigma` standard deviations of the real values; nothing is judged without any spread
    /// to compare with (fewer than three values).
    pub fn within(&mut self, name: &str, score: f64, real: &Spread, sigma: f64) {
        let (low, high) = (real.mean - sigma * real.deviation, real.mean + sigma * real.deviation);
        let good = real.count < 3 || (low..=high).contains(&score);
        self.judge(name, score, good, || format!("outside of {low:.4} to {high:.4}, where real ones lie"));
    }

    fn judge(&mut self, name: &str, score: f64, good: bool, words: impl FnOnce() -> String) {
        self.note(name, score);
        if !good {
            self.refuse(format!("{name} {score:.4} is {}", words()));
        }
    }

    /// All reasons in one line; empty when accepted.
    pub fn reason(&self) -> String {
        self.reasons.join("; ")
    }
}

/// Mean and standard deviation of a number on real pictures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// The standard deviation (of a sample: n - 1).
    pub deviation: f64,
    /// Number of values.
    pub count: usize,
}

impl Spread {
    /// Of these values; those that are not finite are left out.
    #[expect(clippy::cast_precision_loss, reason = "counts of pictures")]
    pub fn of(values: &[f64]) -> Self {
        let values: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        let count = values.len();
        if count == 0 {
            return Self::default();
        }
        let mean = values.iter().sum::<f64>() / count as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        Self { mean, deviation: (squares / (count.max(2) - 1) as f64).sqrt(), count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_hold_every_score_and_each_reason() {
        let mut verdict = Verdict::new();
        verdict.at_least("dice", 0.8, 0.8);
        verdict.at_most("clipped", 0.01, 0.01);
        let real = Spread::of(&[1.0, 2.0, 3.0]);
        assert_eq!((real.mean, real.deviation, real.count), (2.0, 1.0, 3));
        verdict.within("median", 5.0, &real, 3.0);
        assert!(verdict.accepted && verdict.reason().is_empty() && verdict.scores.len() == 3);
        verdict.within("median", 5.1, &real, 3.0);
        verdict.at_least("dice", f64::NAN, 0.8);
        verdict.at_most("clipped", f64::NAN, 0.01);
        assert!(!verdict.accepted);
        assert_eq!(verdict.reasons.len(), 3);
        let line = verdict.reason();
        assert!(line.starts_with("median 5.1000 is outside of -1.0000 to 5.0000"), "{line}");
        let mut alone = Verdict::new();
        alone.within("median", 9.0, &Spread::of(&[1.0, 1.0]), 3.0);
        assert!(alone.accepted, "two values are no spread");
    }

    #[test]
    fn thresholds_are_read_and_checked() {
        let read: Thresholds = toml::from_str("dice_min = 0.7").unwrap();
        assert_eq!(read, Thresholds { dice_min: 0.7, ..Thresholds::default() });
        read.check().unwrap();
        assert!(toml::from_str::<Thresholds>("dice = 0.7").is_err());
        let error = Thresholds { knn_quantile: 1.5, ..Thresholds::default() }.check().unwrap_err();
        assert!(error.to_string().contains("knn_quantile"), "{error}");
        assert!(Thresholds { sigma: f64::NAN, ..Thresholds::default() }.check().is_err());
    }
}
