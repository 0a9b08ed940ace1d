//! The filter's decision about one pair.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Decision of the filter about one pair.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// All measured scores, by the name of the test.
    pub scores: BTreeMap<String, f64>,
    /// Descriptions of the failed tests; empty if the pair is accepted.
    pub reasons: Vec<String>,
}

impl Decision {
    /// Adds a score without testing it.
    pub fn add_score(&mut self, name: &str, score: f64) {
        self.scores.insert(name.to_owned(), score);
    }

    /// Rejects the pair for the given reason.
    pub fn reject(&mut self, reason: impl Into<String>) {
        self.reasons.push(reason.into());
    }

    /// Tests that the score is at least `least`; NaN fails.
    pub fn at_least(&mut self, name: &str, score: f64, least: f64) {
        self.test_score(name, score, score >= least, || format!("below {least:.4}"));
    }

    /// Tests that the score is at most `most`; NaN fails.
    pub fn at_most(&mut self, name: &str, score: f64, most: f64) {
        self.test_score(name, score, score <= most, || format!("above {most:.4}"));
    }

    /// As [`Self::at_most`]; the score is only logged if there is no limit.
    pub fn at_most_if_known(&mut self, name: &str, score: f64, most: Option<f64>) {
        match most {
            Some(most) => self.at_most(name, score, most),
            None => self.add_score(name, score),
        }
    }

    /// Tests that the score is within `sigma` standard deviations of the real values. With fewer than three real
    /// values the score is only logged.
    pub fn within(&mut self, name: &str, score: f64, real: &ValueSpread, sigma: f64) {
        let (low, high) = (real.mean - sigma * real.deviation, real.mean + sigma * real.deviation);
        let good = real.count < 3 || (low..=high).contains(&score);
        self.test_score(name, score, good, || format!("outside of {low:.4} to {high:.4}, the range of real images"));
    }

    fn test_score(&mut self, name: &str, score: f64, good: bool, problem: impl FnOnce() -> String) {
        self.add_score(name, score);
        if !good {
            self.reject(format!("{name} {score:.4} is {}", problem()));
        }
    }

    /// All reasons in one line; empty when accepted.
    pub fn reason(&self) -> String {
        self.reasons.join("; ")
    }
}

/// Mean and standard deviation of a statistic over real images.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ValueSpread {
    /// Mean.
    pub mean: f64,
    /// Sample standard deviation (divided by n - 1).
    pub deviation: f64,
    /// Number of values.
    pub count: usize,
}

impl ValueSpread {
    /// Computes both over the finite values.
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
    fn decisions_store_every_score_and_each_reason() {
        let mut decision = Decision::default();
        decision.at_least("dice", 0.8, 0.8);
        decision.at_most("clipped", 0.01, 0.01);
        let real = ValueSpread::of(&[1.0, 2.0, 3.0]);
        assert_eq!((real.mean, real.deviation, real.count), (2.0, 1.0, 3));
        decision.within("median", 5.0, &real, 3.0);
        assert!(decision.reasons.is_empty() && decision.reason().is_empty() && decision.scores.len() == 3);
        decision.within("median", 5.1, &real, 3.0);
        decision.at_least("dice", f64::NAN, 0.8);
        decision.at_most("clipped", f64::NAN, 0.01);
        assert!(!decision.reasons.is_empty());
        assert_eq!(decision.reasons.len(), 3);
        let line = decision.reason();
        assert!(line.starts_with("median 5.1000 is outside of -1.0000 to 5.0000"), "{line}");
        let mut alone = Decision::default();
        alone.within("median", 9.0, &ValueSpread::of(&[1.0, 1.0]), 3.0);
        assert!(alone.reasons.is_empty(), "two values are too few for a standard deviation");
    }
}
