//! Fingerprint of a data root: sizes, spacings, intensities, labels and foreground of its classes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use ::image::DynamicImage;
use serde::Serialize;

use crate::manifest::{Presence, Row};

/// Smallest, middle and largest value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ValueRange {
    /// The smallest value.
    pub min: f64,
    /// The median; the lower of two in the middle.
    pub median: f64,
    /// The largest value.
    pub max: f64,
}

impl ValueRange {
    /// The range of `values`; `None` if there are none.
    fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        Some(Self { min, median: values[(values.len() - 1) / 2], max })
    }
}

/// Grey levels of all pixels of a class as the model sees them, 0..=255.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct GreyLevels {
    /// Mean.
    pub mean: f64,
    /// Standard deviation.
    pub sd: f64,
    /// First percentile.
    pub p1: u8,
    /// 99th percentile.
    pub p99: u8,
}

/// What the good rows of one class have in common.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fingerprint {
    /// Class folder.
    pub modality: String,
    /// Number of image files.
    pub images: usize,
    /// Number of different patients; `None` if no row names one.
    pub patients: Option<usize>,
    /// Number of rows whose target is in the image.
    pub present: usize,
    /// Number of rows whose target is not in the image.
    pub absent: usize,
    /// Number of rows with an answer only.
    pub unknown: usize,
    /// Width of the images in pixels.
    pub width_px: Option<ValueRange>,
    /// Height of the images in pixels.
    pub height_px: Option<ValueRange>,
    /// Sides of the pixels in mm, across and down together; `None` if no row has a spacing.
    pub spacing_mm: Option<ValueRange>,
    /// Grey levels of the images.
    pub grey: GreyLevels,
    /// Part of the image that is foreground, over the masks of targets that are present, 0..=1.
    pub foreground_frac: Option<ValueRange>,
    /// Number of mask files with each label.
    pub labels: BTreeMap<u16, usize>,
}

/// What is known of an image and its mask once both are decoded.
#[derive(Debug, Clone)]
pub(crate) struct PairSummary {
    /// Width and height of the image in pixels.
    pub(crate) size_px: (u32, u32),
    /// Number of pixels of each grey level.
    pub(crate) levels: Box<[u64; 256]>,
    /// Number of foreground pixels.
    pub(crate) num_foreground: usize,
    /// Labels in the mask file.
    pub(crate) labels: Vec<u16>,
    /// Whether the foreground has a pixel at the border of the image.
    pub(crate) is_at_border: bool,
}

/// Number of pixels of each grey level.
pub(crate) fn levels(image: &DynamicImage) -> Box<[u64; 256]> {
    let mut levels = Box::new([0; 256]);
    let mut count = |value: u8| levels[usize::from(value)] += 1;
    match image.as_luma8() {
        Some(grey) => grey.as_raw().iter().copied().for_each(&mut count),
        None => image.to_luma8().as_raw().iter().copied().for_each(&mut count),
    }
    levels
}

/// Collects the rows of one class.
#[derive(Default)]
struct ClassRows<'a> {
    images: BTreeMap<&'a PathBuf, (u32, u32)>,
    patients: BTreeSet<&'a str>,
    targets: BTreeMap<Presence, usize>,
    spacings: Vec<f64>,
    levels: Option<Box<[u64; 256]>>,
    foreground: Vec<f64>,
    labels: BTreeMap<u16, usize>,
}

impl<'a> ClassRows<'a> {
    /// Adds the rows of one image and mask.
    fn add(&mut self, rows: &[&'a Row], pair: &PairSummary) {
        let Some(first) = rows.first() else { return };
        for row in rows {
            *self.targets.entry(row.target().presence).or_default() += 1;
            self.patients.extend(row.patient.as_deref());
        }
        let (width, height) = pair.size_px;
        if self.images.insert(&first.image_path, pair.size_px).is_none() {
            let levels = self.levels.get_or_insert_with(|| Box::new([0; 256]));
            levels.iter_mut().zip(pair.levels.iter()).for_each(|(sum, count)| *sum += count);
            self.spacings.extend(first.spacing_mm.into_iter().flatten());
        }
        if first.target().presence == Presence::Present {
            let area = f64::from(width) * f64::from(height);
            self.foreground.push(pair.num_foreground as f64 / area.max(1.0));
        }
        for label in &pair.labels {
            *self.labels.entry(*label).or_default() += 1;
        }
    }

    fn fingerprint(self, modality: &str) -> Fingerprint {
        let rows = |target| self.targets.get(&target).copied().unwrap_or(0);
        let side =
            |of: fn(&(u32, u32)) -> u32| ValueRange::of(self.images.values().map(|s| f64::from(of(s))).collect());
        Fingerprint {
            modality: modality.to_owned(),
            images: self.images.len(),
            patients: (!self.patients.is_empty()).then_some(self.patients.len()),
            present: rows(Presence::Present),
            absent: rows(Presence::Absent),
            unknown: rows(Presence::Unknown),
            width_px: side(|size| size.0),
            height_px: side(|size| size.1),
            spacing_mm: ValueRange::of(self.spacings),
            grey: self.levels.as_deref().map(grey_levels).unwrap_or_default(),
            foreground_frac: ValueRange::of(self.foreground),
            labels: self.labels,
        }
    }
}

/// The fingerprints of all classes, by name. Each item has the rows of one image and mask; these rows have one target.
pub(crate) fn fingerprints<'a>(pairs: impl IntoIterator<Item = (Vec<&'a Row>, PairSummary)>) -> Vec<Fingerprint> {
    let mut classes: BTreeMap<&str, ClassRows> = BTreeMap::new();
    for (rows, pair) in pairs {
        if let Some(first) = rows.first() {
            classes.entry(&first.modality).or_default().add(&rows, &pair);
        }
    }
    classes.into_iter().map(|(modality, rows)| rows.fingerprint(modality)).collect()
}

fn grey_levels(levels: &[u64; 256]) -> GreyLevels {
    let count: u64 = levels.iter().sum();
    let num = (count as f64).max(1.0);
    let numbered = || (0_u8..=255).zip(levels.iter());
    let mean = numbered().map(|(level, n)| f64::from(level) * *n as f64).sum::<f64>() / num;
    let variance = numbered().map(|(level, n)| (f64::from(level) - mean).powi(2) * *n as f64).sum::<f64>() / num;
    let percentile = |frac: f64| {
        let mut below = 0;
        numbered()
            .find(|(_, n)| {
                below += **n;
                below as f64 >= frac * count as f64 && below > 0
            })
            .map_or(0, |(level, _)| level)
    };
    GreyLevels { mean, sd: variance.sqrt(), p1: percentile(0.01), p99: percentile(0.99) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use crate::manifest::Target;

    #[test]
    fn grey_levels_are_those_of_the_pixels() {
        let mut levels = [0; 256];
        (levels[10], levels[20]) = (50, 50);
        let grey = grey_levels(&levels);
        assert_eq!((grey.mean, grey.sd, grey.p1, grey.p99), (15.0, 5.0, 10, 20));
        (levels[0], levels[255]) = (1, 899);
        let grey = grey_levels(&levels);
        assert_eq!((grey.p1, grey.p99), (10, 255));
    }

    #[test]
    fn rows_of_a_class_are_summed_up_and_images_count_once() {
        let row = |image: &str, presence: Presence, patient: Option<&str>| Row {
            image_path: image.into(),
            targets: Target::only("m.png".into(), presence),
            patient: patient.map(str::to_owned),
            spacing_mm: Some([0.5, 0.7]),
            ..fixture::row("q", "a", None)
        };
        let pair = |width: u32, num_foreground: usize| {
            let mut levels = Box::new([0; 256]);
            levels[7] = u64::from(width) * 10;
            PairSummary { size_px: (width, 10), levels, num_foreground, labels: vec![255], is_at_border: false }
        };
        let rows = [
            row("a", Presence::Present, Some("p1")),
            row("a", Presence::Present, Some("p1")),
            row("b", Presence::Present, Some("p2")),
            row("a", Presence::Absent, Some("p1")),
            row("c", Presence::Unknown, None),
        ];
        let pairs = [
            (vec![&rows[0], &rows[1]], pair(20, 50)),
            (vec![&rows[2]], pair(40, 100)),
            (vec![&rows[3]], pair(20, 0)),
            (vec![&rows[4]], pair(30, 0)),
        ];
        let found = fingerprints(pairs);
        let [ct] = &found[..] else { panic!("one class: {found:?}") };
        assert_eq!((ct.images, ct.patients, ct.present, ct.absent, ct.unknown), (3, Some(2), 3, 1, 1));
        assert_eq!(ct.width_px, Some(ValueRange { min: 20.0, median: 30.0, max: 40.0 }));
        assert_eq!(ct.spacing_mm, Some(ValueRange { min: 0.5, median: 0.5, max: 0.7 }));
        assert_eq!(ct.foreground_frac, Some(ValueRange { min: 0.25, median: 0.25, max: 0.25 }));
        assert_eq!((ct.grey.mean, ct.labels[&255]), (7.0, 4));
    }
}
