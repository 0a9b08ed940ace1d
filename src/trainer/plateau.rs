//! Early stopping on a score with noise.
//!
//! A single low value proves nothing: a score that is estimated from a few images goes up and down by itself. So a line
//! is fitted to the last scores, and the training stops when the line shows that the score has stopped growing. The noise
//! is what the scores vary around the line: an error that is the same at every validation does not count.

/// A line through fewer scores is too uncertain to end a training.
const LEAST: usize = 8;
/// 97.5 % quantile of the standard normal distribution, for the difference of two scores.
const Z: f64 = 1.959_963_984_540;

/// True if the upper 95 % bound of the trend over the last `window` scores is below the smallest detectable difference
/// of two scores. False with fewer than `window` scores; windows below 8 count as 8.
pub(super) fn has_stalled(scores: &[f64], window: usize) -> bool {
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
    let residual = |(i, score): (usize, &f64)| (score - mean - slope * (i as f64 - centre)).powi(2);
    let residuals: f64 = scores.iter().enumerate().map(residual).sum();
    let noise = (residuals / (count - 2.0)).sqrt();
    let growth = slope * (count - 1.0);
    let uncertainty = noise * (count - 1.0) / spread.sqrt();
    growth + one_sided_t(count - 2.0) * uncertainty <= Z * std::f64::consts::SQRT_2 * noise
}

/// 95 % quantile of Student's t distribution with `freedom` degrees of freedom, at least 6; to 0.3 %.
fn one_sided_t(freedom: f64) -> f64 {
    // the first terms of its expansion in 1 / freedom around the normal quantile (Abramowitz & Stegun 26.7.5)
    let z: f64 = 1.644_853_626_951;
    z + (z.powi(3) + z) / (4.0 * freedom) + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * freedom.powi(2))
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
        (1..=scores.len()).find(|&count| has_stalled(&scores[..count], window))
    }

    #[test]
    fn noise_rarely_stops_a_training_and_a_plateau_does() {
        let mut rng = ChaCha8Rng::seed_from_u64(9);
        let runs = 1000;
        for window in [8, 12, 20] {
            // over a window the true score grows by twice what two scores must differ by to be told apart
            let growth = 2.0 * Z * std::f64::consts::SQRT_2 / (window as f64 - 1.0);
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
    fn an_error_that_all_scores_share_does_not_end_a_growing_score() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        for offset in [0.0, -5.0, 40.0] {
            let scores: Vec<f64> = (0..60).map(|i| offset + 0.002 * f64::from(i) + 1e-5 * normal(&mut rng)).collect();
            assert!((1..=60).all(|count| !has_stalled(&scores[..count], 8)), "{offset}");
        }
    }

    #[test]
    fn too_few_scores_and_one_low_value_are_no_plateau() {
        assert!(!has_stalled(&[], 8));
        assert!(!has_stalled(&[1.0; 7], 1), "seven scores are too few for every window");
        assert!(has_stalled(&[1.0; 8], 8));
        assert!(!has_stalled(&[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 2.5], 8));
        assert!(has_stalled(&[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 8), "a falling score");
    }

    #[test]
    fn the_quantile_of_student_agrees_with_tables() {
        for (freedom, quantile) in [(6.0, 1.9432), (10.0, 1.8125), (18.0, 1.7341), (60.0, 1.6706)] {
            assert!((one_sided_t(freedom) / quantile - 1.0_f64).abs() < 3e-3, "{freedom}: {}", one_sided_t(freedom));
        }
    }
}
