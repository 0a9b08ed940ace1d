//! Divides images into splits. Images of a patient stay together, and known patients keep their split.

use std::collections::BTreeMap;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::item::Item;
use super::options::PrepareOptions;
use crate::manifest::Split;

/// The split of every item. `known` are the splits of patients that the data root already contains.
///
/// The units are patients, or images if patients are not known. Their fractions are exact, in shuffled order. Of three
/// patients or more, at least one is in each split with a fraction above 0.
pub(super) fn splits(items: &[Item], options: &PrepareOptions, known: &BTreeMap<String, Split>) -> Vec<Split> {
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    for item in items {
        let next = numbers.len();
        if !item.patient.as_ref().is_some_and(|patient| known.contains_key(patient)) {
            numbers.entry(item.unit()).or_insert(next);
        }
    }
    let are_patients = items.iter().any(|item| item.patient.is_some());
    let drawn = draw(numbers.len(), options, are_patients);
    let split = |item: &Item| match item.patient.as_ref().and_then(|patient| known.get(patient)) {
        Some(split) => *split,
        None => drawn[numbers[item.unit()]],
    };
    items.iter().map(split).collect()
}

fn draw(count: usize, options: &PrepareOptions, at_least_one: bool) -> Vec<Split> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
    let part = |frac: f64| {
        let least = usize::from(at_least_one && count >= 3 && frac > 0.0);
        ((count as f64 * frac).round() as usize).max(least)
    };
    let (test, val) = (part(options.test_frac), part(options.val_frac));
    let mut splits: Vec<_> = (0..count)
        .map(|rank| match rank {
            _ if rank < test => Split::Test,
            _ if rank < test + val => Split::Val,
            _ => Split::Train,
        })
        .collect();
    splits.shuffle(&mut ChaCha8Rng::seed_from_u64(options.seed));
    splits
}
