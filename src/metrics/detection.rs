//! Detection of a target in images: area under the ROC curve of a score.

/// Area under the ROC curve: the probability that a positive item has a higher score than a negative one; ties count
/// half (Mann and Whitney 1947). `items` are `(score, is_positive, weight)` in ascending order of their scores; a weight is
/// how often the item counts. `None` without a positive or a negative item.
pub fn auroc_of_sorted(items: impl Iterator<Item = (f64, bool, f64)>) -> Option<f64> {
    let (mut below, mut won, mut positives) = (0.0, 0.0, 0.0);
    // items of one score
    let (mut level, mut tied_positives, mut tied_negatives) = (f64::NAN, 0.0, 0.0);
    for (score, is_positive, weight) in items {
        if score.total_cmp(&level).is_ne() {
            won += tied_positives * (below + 0.5 * tied_negatives);
            positives += tied_positives;
            below += tied_negatives;
            (level, tied_positives, tied_negatives) = (score, 0.0, 0.0);
        }
        if is_positive {
            tied_positives += weight;
        } else {
            tied_negatives += weight;
        }
    }
    won += tied_positives * (below + 0.5 * tied_negatives);
    positives += tied_positives;
    below += tied_negatives;
    let pairs = positives * below;
    (pairs > 0.0).then(|| won / pairs)
}

/// As [`auroc_of_sorted`], for items in any order.
#[cfg(test)]
pub(crate) fn auroc(items: &[(f64, bool, f64)]) -> Option<f64> {
    let mut sorted = items.to_vec();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    auroc_of_sorted(sorted.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng as _, SeedableRng as _};

    #[test]
    fn the_area_is_the_share_of_ordered_pairs() {
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(5);
        for _ in 0..100 {
            let items: Vec<(f64, bool, f64)> = (0..random.random_range(1..30))
                .map(|_| {
                    (f64::from(random.random_range(0..8)) / 8.0, random.random(), f64::from(random.random_range(0..3)))
                })
                .collect();
            let (mut won, mut pairs) = (0.0, 0.0);
            for positive in items.iter().filter(|item| item.1) {
                for negative in items.iter().filter(|item| !item.1) {
                    let weight = positive.2 * negative.2;
                    pairs += weight;
                    won += weight
                        * if positive.0 > negative.0 {
                            1.0
                        } else if positive.0 < negative.0 {
                            0.0
                        } else {
                            0.5
                        };
                }
            }
            match auroc(&items) {
                Some(found) => assert!((found - won / pairs).abs() < 1e-12, "{items:?}"),
                None => assert_eq!(pairs, 0.0),
            }
        }
        assert_eq!(auroc(&[(0.1, false, 1.0), (0.2, true, 1.0)]), Some(1.0));
        assert_eq!(auroc(&[(0.1, true, 1.0)]), None);
    }
}
