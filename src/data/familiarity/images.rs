//! How the images of a training look, and how far a new image is from them.
//!
//! A look is 56 numbers of an image (`look.rs`). A number counts by its spread within the classes of the training. The
//! distance of an image is that to its nearest training image, divided by a limit of that image's class. The limit comes from
//! the distances between the training images of the class, and all limits together from the validation images. Nothing here
//! knows what an image shows: an image of another organ may look the same.

use super::look::{GROUPS, look};
use super::{ImageFamiliarity, damaged, quantile, read};
use crate::decode;
use crate::manifest::{Manifest, Row, Split};
use crate::split::spread;
use ::image::DynamicImage;
use prsmed_base::Result;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The file in a checkpoint folder.
pub const IMAGES_FILE: &str = "images.json";
/// Most training images of each class, and of all classes together.
const MOST: [usize; 2] = [64, 512];
/// Most images that are compared at once: validation images, and those of an evaluation.
const MOST_COMPARED: usize = 128;
/// Images of a class below which it has no limit of its own, but the widest of all classes.
const FEW: usize = 4;
/// Training images below which nothing is said.
const TOO_FEW: usize = 6;
/// Quantile of the distances of a class, and of the validation images, that the limits let pass.
const QUANTILE: f64 = 0.95;
/// A limit is that quantile of a class times this, or more if the validation images need it, up to the second.
const FACTOR: [f64; 2] = [1.25, 2.5];
/// Factor over the quantile of the validation images.
const OVER_VALIDATION: f64 = 1.1;
/// Added to the spread of each number: differences that no eye sees count little.
const SPREAD: f32 = 0.02;
/// Smallest limit of a class, for training images that are nearly the same.
const SMALLEST_LIMIT: f64 = 2.0;

/// The looks of the images of a training: the content of [`IMAGES_FILE`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KnownImages {
    /// Spread of each number within the classes.
    spread: Vec<f32>,
    /// The classes of the training.
    classes: BTreeMap<String, Class>,
    /// What every limit is multiplied by.
    factor: f64,
    /// Validation images that the factor comes from.
    num_validated: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Class {
    /// Largest usual distance to another training image of the class.
    limit: f64,
    looks: Vec<Vec<f32>>,
}

/// The look of a training image, with its patient.
struct Seen<'a> {
    patient: Option<&'a str>,
    look: Vec<f32>,
}

impl KnownImages {
    /// The images of some training rows, with limits from these and from the validation rows. Images that cannot be read
    /// are left out: the training itself reports them.
    pub fn of(manifest: &Manifest, trained: &[usize]) -> Self {
        let mut by_class: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
        for row in different_images(manifest, trained) {
            by_class.entry(&row.modality).or_default().push(row);
        }
        let most = MOST[0].min((MOST[1] / by_class.len().max(1)).max(FEW));
        let rows: Vec<&Row> = by_class.into_values().flat_map(|rows| spread(rows, most)).collect();
        let mut classes: BTreeMap<&str, Vec<Seen>> = BTreeMap::new();
        for (row, look) in rows.par_iter().map(|row| (row, look_of(row))).collect::<Vec<_>>() {
            let patient = row.patient.as_deref();
            classes.entry(&row.modality).or_default().extend(look.map(|look| Seen { patient, look }));
        }
        let validated = spread(different_images(manifest, &manifest.rows_of(Split::Val)), MOST_COMPARED);
        Self::new(classes, &validated.par_iter().filter_map(|row| look_of(row)).collect::<Vec<_>>())
    }

    fn new(classes: BTreeMap<&str, Vec<Seen>>, validated: &[Vec<f32>]) -> Self {
        let spread = spread_within(classes.values());
        let limits: Vec<Option<f64>> = classes.values().map(|seen| limit_of(seen, &spread)).collect();
        let widest = limits.iter().copied().flatten().max_by(f64::total_cmp);
        let num_images: usize = classes.values().map(Vec::len).sum();
        let classes = classes
            .into_iter()
            .zip(limits)
            .filter(|_| num_images >= TOO_FEW)
            .filter_map(|((name, seen), limit)| {
                let limit = limit.filter(|_| seen.len() >= FEW);
                let looks = seen.into_iter().map(|seen| seen.look.into_iter().map(rounded).collect()).collect();
                Some((name.to_owned(), Class { limit: limit.or(widest)?, looks }))
            })
            .collect();
        let mut known = Self { spread, classes, factor: 1.0, num_validated: validated.len() };
        let distances = validated.iter().filter_map(|look| Some(known.nearest(look)?.0)).collect();
        let needed = quantile(distances, QUANTILE).map_or(0.0, |quantile| quantile * OVER_VALIDATION);
        known.factor = needed.clamp(FACTOR[0], FACTOR[1]);
        known
    }

    /// The images in a checkpoint folder; `None` for one of an older version or of the original code.
    ///
    /// # Errors
    /// [`prsmed_base::Error::Weights`] for a damaged file; [`prsmed_base::Error::Io`].
    pub fn open(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(IMAGES_FILE);
        let Some(known) = read::<Self>(&path)? else { return Ok(None) };
        let count: usize = GROUPS.iter().map(|(_, count)| count).sum();
        let mut looks = known.classes.values().flat_map(|class| &class.looks);
        if known.spread.len() != count || looks.any(|look| look.len() != count) {
            return Err(damaged(&path, format!("a look does not have {count} numbers")));
        }
        Ok(Some(known))
    }

    /// The content of the file.
    ///
    /// # Panics
    /// Never: plain values serialise.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain values serialise") + "\n"
    }

    /// Compares an image with those of the training. Nothing is said about an image of 0 pixels.
    pub fn compare(&self, image: &DynamicImage) -> ImageFamiliarity {
        let look = look(image);
        let Some((look, (distance, nearest))) = look.as_deref().and_then(|look| Some((look, self.nearest(look)?)))
        else {
            return ImageFamiliarity::default();
        };
        let mut begin = 0;
        let parts = GROUPS.map(|(name, count)| {
            let numbers = begin..begin + count;
            begin += count;
            let part = squared_distance(&look[numbers.clone()], &nearest[numbers.clone()], &self.spread[numbers]);
            let part = part / count as f64;
            (part, name)
        });
        let most = parts.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
        let distance = distance / self.factor;
        ImageFamiliarity {
            image_known: Some(distance <= 1.0),
            image_distance: Some(distance),
            image_differs: most.map(|(_, name)| name.to_owned()),
        }
    }

    /// How many of the images of some rows look unlike those of the training, and how many were compared.
    pub fn count_unlike(&self, manifest: &Manifest, rows: &[usize]) -> (usize, usize) {
        let images = spread(different_images(manifest, rows), MOST_COMPARED);
        let known = |row: &&Row| self.compare(&decode::image(&row.image_path).ok()?).image_known;
        let compared: Vec<bool> = images.par_iter().filter_map(known).collect();
        (compared.iter().filter(|is_known| !**is_known).count(), compared.len())
    }

    /// The smallest distance to a training image, in units of its class's limit, and the look of that image.
    fn nearest(&self, look: &[f32]) -> Option<(f64, &[f32])> {
        let all = self.classes.values().flat_map(|class| class.looks.iter().map(move |look| (class.limit, look)));
        all.map(|(limit, other)| (squared_distance(look, other, &self.spread).sqrt() / limit, other.as_slice()))
            .min_by(|a, b| a.0.total_cmp(&b.0))
    }
}

/// Sum of the squared differences, each in units of its spread.
fn squared_distance(a: &[f32], b: &[f32], spread: &[f32]) -> f64 {
    a.iter().zip(b).zip(spread).map(|((a, b), spread)| f64::from((a - b) / spread).powi(2)).sum()
}

/// One row for each different image of some rows.
fn different_images<'a>(manifest: &'a Manifest, rows: &[usize]) -> Vec<&'a Row> {
    let mut seen = BTreeSet::new();
    rows.iter().map(|row| &manifest.rows[*row]).filter(|row| seen.insert(&row.image_path)).collect()
}

/// Standard deviation of each number within the classes, and a little more.
fn spread_within<'a>(classes: impl Iterator<Item = &'a Vec<Seen<'a>>>) -> Vec<f32> {
    let length = GROUPS.iter().map(|(_, count)| count).sum();
    let (mut squares, mut all) = (vec![0.0_f32; length], 0.0_f32);
    for class in classes {
        let count = class.len() as f32;
        all += count;
        for (number, square) in squares.iter_mut().enumerate() {
            let values = || class.iter().map(|seen| seen.look[number]);
            let mean = values().sum::<f32>() / count;
            *square += values().map(|value| (value - mean).powi(2)).sum::<f32>();
        }
    }
    squares.into_iter().map(|square| rounded((square / all.max(1.0) + SPREAD * SPREAD).sqrt())).collect()
}

/// The usual distance from an image of a class to the nearest one of another patient; of another image, if all are of one
/// patient. `None` for a class of one image.
fn limit_of(class: &[Seen], spread: &[f32]) -> Option<f64> {
    let nearest = |number: usize| {
        let others = class.iter().enumerate().filter(|(other, _)| *other != number).map(|(_, other)| other);
        let is_of_another = |other: &&Seen| other.patient.is_none() || other.patient != class[number].patient;
        let distance = |other: &Seen| squared_distance(&class[number].look, &other.look, spread).sqrt();
        let of_another = others.clone().filter(is_of_another).map(distance).min_by(f64::total_cmp);
        of_another.or_else(|| others.map(distance).min_by(f64::total_cmp))
    };
    Some(quantile((0..class.len()).filter_map(nearest).collect(), QUANTILE)?.max(SMALLEST_LIMIT))
}

/// The look of a row's image; `None` if it cannot be read.
fn look_of(row: &Row) -> Option<Vec<f32>> {
    look(&decode::image(&row.image_path).ok()?)
}

/// Four decimals, for a file that people can read.
fn rounded(value: f32) -> f32 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
#[path = "images_tests.rs"]
mod tests;
