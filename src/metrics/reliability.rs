//! Calibration of pixel probabilities: the reliability curve and the expected calibration error (Naeini et al. 2015).
//!
//! A pixel's probability is that of foreground, and its outcome is whether it is foreground. Bins have equal width:
//! bin `i` of 15 holds the probabilities in `[i/15, (i+1)/15)`, the last one also 1. Most pixels of most images are
//! certain background, so the error over all pixels is small; the curve shows each bin by itself.

use serde::{Deserialize, Serialize};

use super::temperature::scaled;

/// Number of bins.
pub const BINS: usize = 15;
/// Number of levels at which the temperature is applied: probabilities are rounded to 1/65535.
const LEVELS: usize = 1 << 16;

/// Counts of pixels by their probability.
#[derive(Debug, Clone)]
pub struct Reliability {
    /// Pixels, and foreground pixels, of each level.
    levels: Vec<(u64, u64)>,
}

impl Default for Reliability {
    fn default() -> Self {
        Self { levels: vec![(0, 0); LEVELS] }
    }
}

/// A bin of the reliability curve.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Bin {
    /// Lower end of the probabilities; the bins have equal width.
    pub from: f64,
    /// Number of pixels.
    pub pixels: u64,
    /// Mean probability of the pixels; `None` without pixels.
    pub probability: Option<f64>,
    /// Fraction of the pixels that are foreground; `None` without pixels.
    pub foreground: Option<f64>,
}

/// Expected calibration error and its curve.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReliabilityCurve {
    /// Mean over pixels of the absolute difference between probability and fraction of foreground, bin by bin.
    pub ece: f64,
    /// The bins, from low to high probabilities.
    pub bins: Vec<Bin>,
}

impl Reliability {
    /// Adds the foreground probabilities of a mask and its truth.
    pub fn add(&mut self, probabilities: &[f32], truth: &[bool]) {
        for (probability, is_foreground) in probabilities.iter().zip(truth) {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
            let level = (f64::from(*probability) * (LEVELS - 1) as f64).round() as usize;
            let counts = &mut self.levels[level.min(LEVELS - 1)];
            counts.0 += 1;
            counts.1 += u64::from(*is_foreground);
        }
    }

    /// The curve of the probabilities after division of their logits by `temperature`; `None` without pixels.
    pub fn curve(&self, temperature: f64) -> Option<ReliabilityCurve> {
        let mut sums = [(0_u64, 0.0, 0_u64); BINS];
        for (level, &(pixels, foreground)) in self.levels.iter().enumerate().filter(|(_, counts)| counts.0 > 0) {
            let probability = level as f64 / (LEVELS - 1) as f64;
            let probability = if temperature == 1.0 { probability } else { scaled(probability, temperature) };
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a bin")]
            let sum = &mut sums[((probability * BINS as f64) as usize).min(BINS - 1)];
            sum.0 += pixels;
            sum.1 += probability * pixels as f64;
            sum.2 += foreground;
        }
        let all: u64 = sums.iter().map(|sum| sum.0).sum();
        (all > 0).then(|| ReliabilityCurve {
            ece: sums.iter().map(|(_, probability, foreground)| (probability - *foreground as f64).abs()).sum::<f64>()
                / all as f64,
            bins: sums.iter().enumerate().map(|(i, sum)| bin(i, *sum)).collect(),
        })
    }
}

fn bin(i: usize, (pixels, probability, foreground): (u64, f64, u64)) -> Bin {
    let part = |value: f64| (pixels > 0).then(|| value / pixels as f64);
    Bin { from: i as f64 / BINS as f64, pixels, probability: part(probability), foreground: part(foreground as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_known_curve() {
        let mut pixels = Reliability::default();
        assert_eq!(pixels.curve(1.0), None);
        // 10 pixels at 0.9 of which 6 are foreground, 30 at 0.1 of which 3 are
        let truth = |set: usize, all: usize| -> Vec<bool> { (0..all).map(|i| i < set).collect() };
        pixels.add(&[0.9; 10], &truth(6, 10));
        pixels.add(&[0.1; 30], &truth(3, 30));
        let curve = pixels.curve(1.0).unwrap();
        assert!((curve.ece - 0.25 * 0.3).abs() < 1e-4, "{}", curve.ece);
        assert_eq!(curve.bins.len(), BINS);
        assert_eq!(curve.bins.iter().map(|bin| bin.pixels).sum::<u64>(), 40);
        assert_eq!((curve.bins[1].pixels, curve.bins[13].pixels), (30, 10), "0.1 and 0.9 of 15 bins");
        assert_eq!(curve.bins[13].foreground, Some(0.6));
        assert!((curve.bins[13].probability.unwrap() - 0.9).abs() < 1e-4);
        assert_eq!((curve.bins[7].foreground, curve.bins[7].probability), (None, None));
    }

    #[test]
    fn a_temperature_repairs_confident_probabilities() {
        let mut pixels = Reliability::default();
        // stated 0.98, true 0.8: logits are too large by ln(49) / ln(4) = 2.8
        pixels.add(&[0.98; 100], &(0..100).map(|i| i < 80).collect::<Vec<_>>());
        pixels.add(&[0.02; 100], &(0..100).map(|i| i < 20).collect::<Vec<_>>());
        let (raw, scaled) = (pixels.curve(1.0).unwrap(), pixels.curve(49_f64.ln() / 4_f64.ln()).unwrap());
        assert!((raw.ece - 0.18).abs() < 1e-4 && scaled.ece < 1e-3, "{} {}", raw.ece, scaled.ece);
        let mut ends = Reliability::default();
        ends.add(&[0.0, 1.0], &[false, true]);
        let curve = ends.curve(1.0).unwrap();
        assert_eq!((curve.ece, curve.bins[0].pixels, curve.bins[BINS - 1].pixels), (0.0, 1, 1));
    }
}
