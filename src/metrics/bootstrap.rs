//! 95 % intervals by the bootstrap over groups (patients): it draws as many groups as there are, with replacement, and
//! all items of a drawn group count as often as the group was drawn. Images of one patient are alike, so an interval
//! over images alone would be too narrow.
//!
//! Source: Efron and Tibshirani 1993, percentile interval.

use super::order::{mean, quantile};
use super::paired::Interval;
use prsmed_base::rng;
use rand::Rng as _;
use std::collections::HashMap;

/// Number of bootstrap samples.
const DRAWS: usize = 2000;
/// Fewest groups that have an interval: of two or three, it would reach from the smallest to the largest value, and miss
/// the mean in one of two or four cases.
const MIN_GROUPS: usize = 4;
/// Seed of every bootstrap: equal scores give equal intervals.
const SEED: u64 = 0;

/// Items in groups.
#[derive(Debug, Clone)]
pub struct Bootstrap {
    /// Group of each item.
    group_of: Vec<usize>,
    num_groups: usize,
}

impl Bootstrap {
    /// Groups items by name.
    pub fn new<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        let mut known: HashMap<&str, usize> = HashMap::new();
        let group_of = names
            .map(|name| {
                let next = known.len();
                *known.entry(name).or_insert(next)
            })
            .collect();
        Self { group_of, num_groups: known.len() }
    }

    /// Group of an item.
    pub fn group_of(&self, item: usize) -> usize {
        self.group_of[item]
    }

    /// The interval of a statistic of the groups' weights (how often each group was drawn). `None` with fewer than four
    /// groups, if the statistic is defined for less than half of the draws, or if it is the same in all of them: draws
    /// without spread would look like certainty.
    pub fn interval(&self, statistic: impl Fn(&[f64]) -> Option<f64>) -> Option<Interval> {
        if self.num_groups < MIN_GROUPS {
            return None;
        }
        let mut stream = rng::stream(SEED, "bootstrap over groups", &[]);
        let mut weights = vec![0.0; self.num_groups];
        let mut found = Vec::with_capacity(DRAWS);
        for _ in 0..DRAWS {
            weights.fill(0.0);
            for _ in 0..self.num_groups {
                weights[stream.random_range(0..self.num_groups)] += 1.0;
            }
            found.extend(statistic(&weights).filter(|value| value.is_finite()));
        }
        if found.len() < DRAWS / 2 {
            return None;
        }
        let interval = Interval { low: quantile(&found, 0.025)?, high: quantile(&found, 0.975)? };
        let is_wide = interval.high - interval.low > 1e-12 * interval.high.abs().max(1.0);
        is_wide.then_some(interval)
    }

    /// The interval of the mean of the items that have a value.
    pub fn mean(&self, values: &[Option<f64>]) -> Option<Interval> {
        self.macro_mean(&[(0..values.len()).collect()], values)
    }

    /// The interval of the mean over classes of the mean of each class's items, as indices. A class without a drawn
    /// item does not count.
    pub fn macro_mean(&self, classes: &[Vec<usize>], values: &[Option<f64>]) -> Option<Interval> {
        let sums: Vec<Vec<(usize, f64, f64)>> = classes.iter().map(|items| self.sums(items, values)).collect();
        // only groups with a value can change the mean
        let with_value = sums.iter().flatten().map(|(group, ..)| *group).collect::<std::collections::HashSet<_>>();
        if with_value.len() < MIN_GROUPS {
            return None;
        }
        self.interval(|weights| {
            let means = sums.iter().filter_map(|sums| {
                let (sum, count) = sums.iter().fold((0.0, 0.0), |(sum, count), (group, value, number)| {
                    (sum + weights[*group] * value, count + weights[*group] * number)
                });
                (count > 0.0).then(|| sum / count)
            });
            mean(means)
        })
    }

    /// Group, sum and number of the values of the items, by group.
    fn sums(&self, items: &[usize], values: &[Option<f64>]) -> Vec<(usize, f64, f64)> {
        let mut sums = vec![(0.0, 0.0); self.num_groups];
        for (&item, value) in items.iter().filter_map(|item| values[*item].as_ref().map(|value| (item, value))) {
            let sum = &mut sums[self.group_of[item]];
            sum.0 += value;
            sum.1 += 1.0;
        }
        let groups = sums.into_iter().enumerate().filter(|(_, (_, count))| *count > 0.0);
        groups.map(|(group, (sum, count))| (group, sum, count)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(values: &[f64]) -> Vec<Option<f64>> {
        values.iter().copied().map(Some).collect()
    }

    #[test]
    fn images_of_one_patient_count_as_one() {
        let values: Vec<f64> = (0..40).map(|i| f64::from(i / 10)).collect();
        let patients: Vec<String> = (0..40).map(|i| format!("p{}", i / 10)).collect();
        let images: Vec<String> = (0..40).map(|i| format!("i{i}")).collect();
        let interval =
            |names: &[String]| Bootstrap::new(names.iter().map(String::as_str)).mean(&some(&values)).unwrap();
        let (by_patient, by_image) = (interval(&patients), interval(&images));
        assert!(by_patient.high - by_patient.low > 2.0 * (by_image.high - by_image.low), "{by_patient:?} {by_image:?}");
        assert!(by_image.low < 1.5 && by_image.high > 1.5);
        assert_eq!(interval(&patients), by_patient, "the seed is fixed");
    }

    #[test]
    fn the_interval_of_a_mean_is_that_of_the_normal_distribution() {
        // 400 independent values of 0 or 1: standard error 0.025
        let values: Vec<f64> = (0..400).map(|i| f64::from(i % 2)).collect();
        let names: Vec<String> = (0..400).map(|i| i.to_string()).collect();
        let found = Bootstrap::new(names.iter().map(String::as_str)).mean(&some(&values)).unwrap();
        assert!((found.low - 0.451).abs() < 0.006 && (found.high - 0.549).abs() < 0.006, "{found:?}");
    }

    #[test]
    fn too_few_groups_or_values_have_no_interval() {
        let one = Bootstrap::new(["a", "a"].into_iter());
        assert_eq!(one.mean(&some(&[0.1, 0.9])), None);
        let three = Bootstrap::new(["a", "b", "c", "c"].into_iter());
        assert_eq!(three.num_groups, 3);
        assert_eq!(three.mean(&some(&[0.1, 0.9, 0.4, 0.5])), None);
        let four = Bootstrap::new(["a", "b", "c", "d"].into_iter());
        assert_eq!(four.mean(&[Some(0.5), None, Some(0.1), Some(0.2)]), None, "three patients have a value");
        let found = four.mean(&some(&[0.1, 0.9, 0.4, 0.5])).unwrap();
        assert!(found.low > 0.1 && found.high < 0.9, "narrower than from the smallest to the largest: {found:?}");
    }

    #[test]
    fn draws_without_spread_have_no_interval() {
        let names: Vec<String> = (0..10).map(|i| i.to_string()).collect();
        let ten = Bootstrap::new(names.iter().map(String::as_str));
        for value in [1.0 / 6.0, 0.0, 1.0, -3.5, 0.1, 1e9] {
            assert_eq!(ten.mean(&some(&[value; 10])), None, "{value}");
        }
        let mut values = [0.25; 10];
        values[3] = 0.75;
        assert!(ten.mean(&some(&values)).is_some(), "one value differs");
        assert_eq!(ten.interval(|_| Some(0.5)), None);
        assert_eq!(ten.interval(|_| None), None);
    }

    #[test]
    fn classes_have_the_same_weight() {
        let names: Vec<String> = (0..60).map(|i| i.to_string()).collect();
        let values: Vec<f64> = (0..60).map(|i| if i < 50 { 1.0 } else { 0.0 } + f64::from(i % 2) * 1e-3).collect();
        let found = Bootstrap::new(names.iter().map(String::as_str))
            .macro_mean(&[(0..50).collect(), (50..60).collect()], &some(&values))
            .unwrap();
        assert!((found.low - 0.5).abs() < 1e-3 && (found.high - 0.5).abs() < 1e-3, "{found:?}");
    }
}
