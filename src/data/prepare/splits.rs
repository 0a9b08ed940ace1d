//! Divides images into splits. Images of a patient and copies of an image stay together, and what the data root contains
//! keeps its split.

use std::collections::BTreeMap;
use std::path::Path;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::item::MaskItem;
use super::options::PrepareOptions;
use crate::manifest::Split;
use crate::marks::Mark;
use prsmed_base::{Error, Result};

/// What the data root already contains.
#[derive(Default)]
pub(super) struct KnownSplits<'a> {
    /// Splits of its patients.
    pub(super) patients: BTreeMap<String, Split>,
    /// Its images by their pixels.
    pub(super) pixels: BTreeMap<Mark, (&'a Path, Split)>,
}

/// The split of every item.
///
/// The units are patients, or images if patients are not known; units with the pixels of one image are one unit. Their
/// fractions are exact, in shuffled order. Of three patients or more, at least one is in each split with a fraction above
/// 0. A unit that the data root contains keeps its split, and one whose pairs have a split has that one.
///
/// # Errors
/// [`Error::Data`] for a unit in two splits.
pub(super) fn splits(items: &[MaskItem], options: &PrepareOptions, known: &KnownSplits) -> Result<Vec<Split>> {
    let units = units(items);
    let mut fixed: BTreeMap<usize, (Split, String)> = BTreeMap::new();
    for (item, unit) in items.iter().zip(&units) {
        let patient = item.patient.as_ref().and_then(|patient| known.patients.get_key_value(patient));
        let patient = patient.map(|(patient, split)| (*split, format!("patient `{patient}` is in `{split}`")));
        let copied = item.pixels.and_then(|pixels| known.pixels.get(&pixels));
        let copied = copied.map(|(path, split)| (*split, format!("`{}` is in `{split}`", path.display())));
        let of = item.patient.as_ref().map_or(String::new(), |patient| format!(" of the patient `{patient}`"));
        let given = item.split.map(|split| (split, format!("`{}`{of} is to be in `{split}`", item.stem)));
        for (split, reason) in patient.into_iter().chain(copied).chain(given) {
            let (first, other) = fixed.entry(*unit).or_insert_with(|| (split, reason.clone()));
            if *first != split {
                let reason = format!(
                    "`{}`: images of a patient and copies of an image stay in one split, but {other}, and {reason}",
                    item.image
                );
                let hint = "leave this image out, or write a table of pairs (`prsmed data scan`) in which all of them have \
                            one `split`, or the right `patient`";
                return Err(Error::data(&options.out, reason, hint));
            }
        }
    }
    let mut numbers: BTreeMap<usize, usize> = BTreeMap::new();
    for unit in units.iter().filter(|unit| !fixed.contains_key(unit)) {
        let next = numbers.len();
        numbers.entry(*unit).or_insert(next);
    }
    let are_patients = items.iter().any(|item| item.patient.is_some());
    let drawn = draw(numbers.len(), options, are_patients);
    Ok(units.iter().map(|unit| fixed.get(unit).map_or_else(|| drawn[numbers[unit]], |(split, _)| *split)).collect())
}

/// The number of each item's unit: that of the first item with its patient (or image), or with its pixels.
fn units(items: &[MaskItem]) -> Vec<usize> {
    let mut of_name: BTreeMap<&str, usize> = BTreeMap::new();
    let mut of_pixels: BTreeMap<Mark, usize> = BTreeMap::new();
    // each unit points to itself or to an earlier one
    let mut first: Vec<usize> = (0..items.len()).collect();
    let mut own = Vec::new();
    for (number, item) in items.iter().enumerate() {
        let of_name = *of_name.entry(item.unit()).or_insert(number);
        let of_pixels = item.pixels.map_or(of_name, |pixels| *of_pixels.entry(pixels).or_insert(of_name));
        let [a, b] = [of_name, of_pixels].map(|unit| root(&first, unit));
        first[a.max(b)] = a.min(b);
        own.push(of_name);
    }
    own.into_iter().map(|unit| root(&first, unit)).collect()
}

fn root(first: &[usize], mut unit: usize) -> usize {
    while first[unit] != unit {
        unit = first[unit];
    }
    unit
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

#[cfg(test)]
mod tests {
    use super::*;

    fn item(image: &str, patient: Option<&str>, pixels: u8) -> MaskItem {
        let pixels = (pixels > 0).then_some([pixels; 32]);
        MaskItem {
            image: image.into(),
            stem: image.into(),
            patient: patient.map(str::to_owned),
            pixels,
            ..MaskItem::default()
        }
    }

    #[test]
    fn units_are_joined_through_patients_and_pixels() {
        let of = |items: &[(&str, Option<&str>, u8)]| {
            units(&items.iter().map(|(image, patient, pixels)| item(image, *patient, *pixels)).collect::<Vec<_>>())
        };
        assert_eq!(of(&[("a", None, 1), ("b", None, 2), ("c", None, 1), ("b", None, 2)]), [0, 1, 0, 1]);
        // images of one colour have no pixels in common
        assert_eq!(of(&[("a", None, 0), ("b", None, 0)]), [0, 1]);
        assert_eq!(
            of(&[("a", Some("p"), 1), ("b", Some("q"), 2), ("c", Some("q"), 1), ("d", Some("r"), 3)]),
            [0, 0, 0, 3]
        );
        assert_eq!(
            of(&[("a", Some("p"), 1), ("b", Some("q"), 2), ("c", Some("r"), 3), ("d", Some("r"), 2)]),
            [0, 1, 1, 1]
        );
        assert_eq!(
            of(&[("a", Some("p"), 1), ("b", Some("q"), 2), ("c", Some("r"), 2), ("d", Some("r"), 1)]),
            [0; 4],
            "a chain"
        );
    }

    #[test]
    fn copies_of_images_of_the_data_root_get_their_split() {
        let options = PrepareOptions::new("images", "masks", "ct", "out");
        let at = |patients: &[(&str, Split)], pixels: &[(u8, Split)]| KnownSplits {
            patients: patients.iter().map(|(name, split)| ((*name).to_owned(), *split)).collect(),
            pixels: pixels.iter().map(|(mark, split)| ([*mark; 32], (Path::new("old.png"), *split))).collect(),
        };
        let items = [item("a", Some("p"), 1), item("b", Some("p"), 2), item("c", Some("q"), 3)];
        for split in Split::ALL {
            let found = splits(&items, &options, &at(&[], &[(2, split), (3, split)])).unwrap();
            assert_eq!(found, [split; 3]);
            let found = splits(&items, &options, &at(&[("p", split)], &[(1, split), (3, Split::Val)])).unwrap();
            assert_eq!(found, [split, split, Split::Val]);
        }
        let error = splits(&items, &options, &at(&[("p", Split::Test)], &[(2, Split::Train)])).unwrap_err().to_string();
        assert!(error.contains("patient `p` is in `test`, and `old.png` is in `train`"), "{error}");
    }
}
