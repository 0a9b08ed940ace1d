//! Temperature scaling (Guo et al. 2017, "On calibration of modern neural networks"): one number that makes the
//! probabilities of pixels agree with how often they are right. It changes no mask: the threshold of 0.5 stays.

/// Largest absolute logit that is distinguished; `sigmoid(16)` is 1 in fp32.
const MOST: f64 = 16.0;
/// Number of bins of logits; each is 1/64 wide.
const BINS: usize = 2048;
/// Range of temperatures.
const RANGE: [f64; 2] = [0.05, 20.0];

/// Logits of pixels, as a histogram of those of foreground and of background.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct LogitHistogram {
    foreground: Vec<u64>,
    background: Vec<u64>,
}

impl Default for LogitHistogram {
    fn default() -> Self {
        Self { foreground: vec![0; BINS], background: vec![0; BINS] }
    }
}

impl LogitHistogram {
    /// Adds the foreground probabilities of a mask and its truth.
    pub fn add(&mut self, probabilities: &[f32], truth: &[bool]) {
        for (probability, is_foreground) in probabilities.iter().zip(truth) {
            let bin = bin_of(logit(f64::from(*probability)));
            let side = if *is_foreground { &mut self.foreground } else { &mut self.background };
            side[bin] += 1;
        }
    }

    /// Adds another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (ours, theirs) in [(&mut self.foreground, &other.foreground), (&mut self.background, &other.background)] {
            ours.iter_mut().zip(theirs).for_each(|(ours, theirs)| *ours += theirs);
        }
    }

    /// The temperature with the lowest negative log-likelihood, 0.05..=20. `None` without pixels of both kinds.
    pub fn temperature(&self) -> Option<f64> {
        if [&self.foreground, &self.background].iter().any(|side| side.iter().all(|count| *count == 0)) {
            return None;
        }
        // the derivative by 1/T is increasing, so bisection finds its zero
        let (mut low, mut high) = (1.0 / RANGE[1], 1.0 / RANGE[0]);
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            if self.slope(middle) > 0.0 {
                high = middle;
            } else {
                low = middle;
            }
        }
        Some(1.0 / f64::midpoint(low, high))
    }

    /// Derivative of the negative log-likelihood by the inverse temperature.
    fn slope(&self, inverse: f64) -> f64 {
        let of_bin = |bin: usize| {
            let z = (bin as f64 + 0.5) / BINS as f64 * 2.0 * MOST - MOST;
            let probability = 1.0 / (1.0 + (-z * inverse).exp());
            let (foreground, background) = (self.foreground[bin] as f64, self.background[bin] as f64);
            z * (probability * background - (1.0 - probability) * foreground)
        };
        (0..BINS).map(of_bin).sum()
    }
}

/// A probability at a temperature: `sigmoid(logit(p) / T)`.
pub fn scaled(probability: f64, temperature: f64) -> f64 {
    1.0 / (1.0 + (-logit(probability) / temperature).exp())
}

fn logit(probability: f64) -> f64 {
    (probability / (1.0 - probability)).ln().clamp(-MOST, MOST)
}

fn bin_of(logit: f64) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a bin of the range")]
    let bin = ((logit + MOST) / (2.0 * MOST) * BINS as f64) as usize;
    bin.min(BINS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng as _, SeedableRng as _};

    /// Pixels whose true probability is `sigmoid(z / temperature)` for a stated logit `z`.
    fn histogram(temperature: f64) -> LogitHistogram {
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(7);
        let mut histogram = LogitHistogram::default();
        for _ in 0..200_000 {
            let z: f64 = random.random_range(-6.0..6.0);
            let stated = 1.0 / (1.0 + (-z).exp());
            let is_foreground = random.random::<f64>() < scaled(stated, temperature);
            #[expect(clippy::cast_possible_truncation, reason = "probabilities are fp32")]
            histogram.add(&[stated as f32], &[is_foreground]);
        }
        histogram
    }

    #[test]
    fn the_temperature_of_a_known_miscalibration_is_found() {
        for temperature in [0.5, 1.0, 2.5] {
            let found = histogram(temperature).temperature().unwrap();
            assert!((found / temperature - 1.0).abs() < 0.02, "{found} for {temperature}");
        }
    }

    #[test]
    fn separable_and_one_sided_pixels_stay_within_the_range() {
        let mut histogram = LogitHistogram::default();
        histogram.add(&[0.9, 1.0], &[true, true]);
        assert_eq!(histogram.temperature(), None);
        histogram.add(&[0.0, 0.1], &[false, false]);
        assert!((histogram.temperature().unwrap() - RANGE[0]).abs() < 1e-6, "everything is right");
        let mut wrong = LogitHistogram::default();
        wrong.add(&[0.9, 0.1], &[false, true]);
        assert!((wrong.temperature().unwrap() - RANGE[1]).abs() < 1e-3, "everything is wrong");
        let mut both = LogitHistogram::default();
        both.merge(&histogram);
        both.merge(&wrong);
        assert!(both.temperature().unwrap() > RANGE[0]);
    }

    #[test]
    fn scaling_keeps_one_half_and_the_order() {
        assert!((scaled(0.5, 3.0) - 0.5).abs() < 1e-12);
        assert!(scaled(0.9, 2.0) < 0.9 && scaled(0.9, 2.0) > 0.5 && scaled(0.9, 0.5) > 0.9);
        assert!(scaled(1.0, 1.0) > 0.999_999 && scaled(0.0, 1.0) < 1e-6);
    }
}
