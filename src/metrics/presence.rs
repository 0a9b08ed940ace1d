//! Presence of a target: a score of its probability map, and the threshold that separates present from absent targets.

/// Fraction of the pixels whose mean is the score.
const HIGHEST_FRAC: f64 = 0.005;
/// Least number of pixels whose mean is the score.
const LEAST_PIXELS: usize = 16;

/// Presence score of a map of foreground probabilities: the mean of its highest 0.5 % (at least 16 pixels, or all of a
/// smaller map), 0..=1. One bright pixel does not raise it, and a small lesion is enough. 0 for an empty map.
pub fn presence_score(probabilities: &[f32]) -> f64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a length")]
    let part = (probabilities.len() as f64 * HIGHEST_FRAC).ceil() as usize;
    let count = part.max(LEAST_PIXELS).min(probabilities.len());
    if count == 0 {
        return 0.0;
    }
    let mut values = probabilities.to_vec();
    let (highest, least, _) = values.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
    let sum: f64 = highest.iter().map(|value| f64::from(*value)).sum();
    (sum + f64::from(*least)) / count as f64
}

/// The threshold with the highest sum of sensitivity and specificity (Youden 1950), half-way between two scores. Among
/// equal ones the middle of the widest gap. `None` without a present or without an absent target.
pub fn best_threshold(present: &[f64], absent: &[f64]) -> Option<f64> {
    if present.is_empty() || absent.is_empty() {
        return None;
    }
    let mut all: Vec<(f64, bool)> =
        present.iter().map(|score| (*score, true)).chain(absent.iter().map(|score| (*score, false))).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut missed, mut rejected) = (0_u64, 0_u64);
    // a threshold below all scores finds everything, one above all of them nothing
    let mut best = (0.0, f64::INFINITY, all[0].0 / 2.0);
    for (i, (score, is_present)) in all.iter().enumerate() {
        if *is_present {
            missed += 1;
        } else {
            rejected += 1;
        }
        let next = all.get(i + 1).map_or(1.0_f64.max(*score), |next| next.0);
        let youden = rejected as f64 / absent.len() as f64 - missed as f64 / present.len() as f64;
        let gap = next - score;
        if gap > 0.0 && (youden, gap) > (best.0, best.1) {
            best = (youden, gap, f64::midpoint(*score, next));
        }
    }
    Some(best.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_score_is_the_mean_of_the_highest_probabilities() {
        assert_eq!(presence_score(&[]), 0.0);
        assert!((presence_score(&[0.25, 0.75]) - 0.5).abs() < 1e-9);
        let mut map = vec![0.1_f32; 10_000];
        map[7] = 1.0;
        // 50 pixels: one of 1.0 and 49 of 0.1
        assert!((presence_score(&map) - (1.0 + 4.9) / 50.0).abs() < 1e-6);
        map[..100].fill(0.9);
        assert!((presence_score(&map) - 0.9).abs() < 1e-6);
        let mut small = vec![0.0_f32; 100];
        small[40..56].fill(0.8);
        assert!((presence_score(&small) - 0.8).abs() < 1e-6);
    }

    #[test]
    fn the_threshold_separates_what_can_be_separated() {
        assert_eq!(best_threshold(&[0.9], &[]), None);
        assert_eq!(best_threshold(&[], &[0.1]), None);
        assert_eq!(best_threshold(&[0.75, 1.0], &[0.0, 0.25]), Some(0.5));
        // one absent target scores higher than one present: the threshold keeps the three of four on their sides
        let threshold = best_threshold(&[0.3, 0.8, 0.9], &[0.1, 0.2, 0.5]).unwrap();
        assert!((threshold - 0.65).abs() < 1e-9 || (threshold - 0.25).abs() < 1e-9, "{threshold}");
        // equal scores cannot be separated
        let threshold = best_threshold(&[0.5, 0.5], &[0.5]).unwrap();
        assert!(threshold < 0.5, "nothing is declared absent without a reason: {threshold}");
    }

    /// The best sum of sensitivity and specificity over all thresholds, by trying them.
    #[test]
    fn no_other_threshold_is_better() {
        use rand::{Rng as _, SeedableRng as _};
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(3);
        for _ in 0..100 {
            let mut scores = |mean: f64| -> Vec<f64> {
                (0..random.random_range(1..20))
                    .map(|_| (mean + random.random_range(-0.3..0.3_f64)).clamp(0.0, 1.0))
                    .collect()
            };
            let (present, absent) = (scores(0.6), scores(0.4));
            let youden = |threshold: f64| {
                let part =
                    |scores: &[f64]| scores.iter().filter(|s| **s >= threshold).count() as f64 / scores.len() as f64;
                part(&present) - part(&absent)
            };
            let best = present.iter().chain(&absent).map(|score| youden(*score)).fold(0.0, f64::max);
            assert!((youden(best_threshold(&present, &absent).unwrap()) - best).abs() < 1e-9);
        }
    }
}
