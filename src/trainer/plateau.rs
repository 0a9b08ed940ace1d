//! Early stopping on a score with noise.
//!
//! A single low value proves nothing: a score that is estimated from a few images goes up and down by itself. So a line
//! is fitted to the last scores, and the training stops when the line shows that the score has stopped growing.

/// 95 % quantile of the standard normal distribution.
const Z_ONE_SIDED: f64 = 1.644_853_626_951;
/// 97.5 % quantile of the standard normal distribution.
const Z_INTERVAL: f64 = 1.959_963_984_540;
/// A line through fewer scores is too uncertain to end a training.
const LEAST: usize = 8;

/// True if, with 95 % confidence, the score grew by less than `half_width` over the last `window` scores. `half_width` is
/// half the width of the 95 % interval of one score. False with fewer than `window` scores; windows below 8 count as 8.
pub(super) fn has_stalled(scores: &[f64], window: usize, half_width: f64) -> bool {
    let window = window.max(LEAST);
    let Some(scores) = scores.len().checked_sub(window).map(|first| &scores[first..]) else { return false };
    let count = window as f64;
    let mean = scores.iter().sum::<f64>() / count;
    let centre = (count - 1.0) / 2.0;
    let (mut spread, mut product) = (0.0, 0.0);
    for (i, score) in scores.iter().enumerate() {
        let time = i as f64 - centre;
        spread += time * time;
        product += time * (score - mean);
    }
    let slope = product / spread;
    let growth = slope * (count - 1.0);
    let uncertainty = half_width / Z_INTERVAL * (count - 1.0) / spread.sqrt();
    growth + Z_ONE_SIDED * uncertainty < half_width
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// About standard normal.
    fn normal(rng: &mut ChaCha8Rng) -> f64 {
        (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0
    }

    /// The first of 60 validations at which a training stops, for a true score and noise of deviation 1.
    fn stop(window: usize, score: impl Fn(f64) -> f64, rng: &mut ChaCha8Rng) -> Option<usize> {
        let scores: Vec<f64> = (0..60).map(|i| score(f64::from(i)) + normal(rng)).collect();
        (1..=scores.len()).find(|&count| has_stalled(&scores[..count], window, Z_INTERVAL))
    }

    #[test]
    fn noise_rarely_stops_a_training_and_a_plateau_does() {
        let mut rng = ChaCha8Rng::seed_from_u64(9);
        let runs = 1000;
        for window in [8, 12, 20] {
            // over a window the true score grows by twice the half width of an interval
            let growth = 2.0 * Z_INTERVAL / (window as f64 - 1.0);
            let false_stops = (0..runs).filter(|_| stop(window, |time| growth * time, &mut rng).is_some()).count();
            assert!(false_stops <= runs / 20, "window {window}: {false_stops} of {runs} growing scores stopped");
            // the score grows for 20 validations and then no longer
            let ends = (0..runs).map(|_| stop(window, |time| growth * time.min(20.0), &mut rng));
            let ends: Vec<usize> = ends.flatten().collect();
            let late = ends.iter().filter(|&&end| end <= 20 + 2 * window).count();
            assert!(
                late * 10 >= runs * 8,
                "window {window}: {late} of {runs} stopped soon after the end of the growth"
            );
        }
    }

    #[test]
    fn too_few_scores_and_changes_within_the_interval_are_no_plateau_by_themselves() {
        assert!(!has_stalled(&[], 8, 1.0));
        assert!(!has_stalled(&[1.0; 7], 1, 1.0), "seven scores are too few for every window");
        assert!(has_stalled(&[1.0; 8], 8, 1.0));
        // the last value falls within the interval of a growing score
        assert!(!has_stalled(&[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 2.5], 8, 1.0));
        assert!(has_stalled(&[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 8, 1.0), "a falling score");
    }
}
