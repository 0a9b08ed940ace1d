//! How the images of a training look, and how far a new image is from them.
//!
//! A look is 56 numbers of the image at 64 x 64 pixels: brightness, colours, directions of edges, sharpness and texture
//! (local binary patterns). A number counts by its spread within the classes of the training. The distance of an image is
//! that to its nearest training image, divided by a limit of that image's class; the limit comes from the distances
//! between the training images of the class, and all limits together from the validation images. Nothing here knows what
//! an image shows: an image of another organ may look the same, and only the looks are compared.

use super::decode;
use super::image::sam_pixels;
use super::manifest::{Manifest, Row, Split};
use super::split::spread;
use ::image::DynamicImage;
use prsmed_base::{Error, Result, files};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The file in a checkpoint folder.
pub const IMAGES_FILE: &str = "images.json";
/// Side of the image in pixels.
const SIDE: usize = SIDE_PX as usize;
const SIDE_PX: u32 = 64;
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
/// What the numbers of a look describe, and how many there are.
const GROUPS: [(&str, usize); 5] =
    [("brightness", 9), ("colours", 5), ("directions of edges", 8), ("sharpness", 4), ("texture", 30)];
/// Difference of the channels below which a pixel is grey.
const GREY: f32 = 0.04;
/// Levels of a look's image, each of half the side: edges at all four, texture at the first three.
const LEVELS: usize = 4;

/// Content of [`IMAGES_FILE`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Saved {
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

/// How an image compares with those of the training.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ImageFamiliarity {
    /// Whether it looks like the training images; `None` if the run does not know them, or has too few.
    #[serde(default)]
    pub image_known: Option<bool>,
    /// Distance to the nearest training image, in units of the limit: above 1 it looks unlike them.
    #[serde(default)]
    pub image_distance: Option<f64>,
    /// What differs most from that training image.
    #[serde(default)]
    pub image_differs: Option<String>,
}

impl ImageFamiliarity {
    /// The one whose distance is in the middle; nothing is known of no image.
    pub fn in_the_middle(mut images: Vec<Self>) -> Self {
        images.sort_by(|a, b| a.image_distance.unwrap_or_default().total_cmp(&b.image_distance.unwrap_or_default()));
        if images.is_empty() { Self::default() } else { images.swap_remove((images.len() - 1) / 2) }
    }

    /// What to tell about an image that looks unlike those of the training.
    pub fn warning(&self) -> Option<String> {
        let differs = self.image_differs.as_deref().filter(|_| self.image_known == Some(false))?;
        Some(format!(
            "this image looks unlike those of the training (most of all its {differs}), so do not rely on the answer and \
             the mask"
        ))
    }
}

/// The looks of the images of a training.
#[derive(Debug, Clone, PartialEq)]
pub struct KnownImages(Saved);

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
        let mut known = Self(Saved { spread, classes, factor: 1.0, num_validated: validated.len() });
        let distances = validated.iter().filter_map(|look| Some(known.nearest(look)?.0)).collect();
        let needed = quantile(distances).map_or(0.0, |quantile| quantile * OVER_VALIDATION);
        known.0.factor = needed.clamp(FACTOR[0], FACTOR[1]);
        known
    }

    /// The images in a checkpoint folder; `None` for one of an older version or of the original code.
    ///
    /// # Errors
    /// [`Error::Weights`] for a damaged file; [`Error::Io`].
    pub fn open(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(IMAGES_FILE);
        let text = match files::read(&path, files::MAX_TEXT) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(&path, "read")(error)),
        };
        let damaged = |reason: String| {
            Error::weights(
                &path,
                reason,
                "use another checkpoint of the run (`last` or `best`), or copy this one again",
            )
        };
        let saved: Saved = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        let count: usize = GROUPS.iter().map(|(_, count)| count).sum();
        let mut looks = saved.classes.values().flat_map(|class| &class.looks);
        if saved.spread.len() != count || looks.any(|look| look.len() != count) {
            return Err(damaged(format!("a look does not have {count} numbers")));
        }
        Ok(Some(Self(saved)))
    }

    /// The content of the file.
    ///
    /// # Panics
    /// Never: plain values serialise.
    pub fn to_json(&self) -> String {
        serde_json::to_string(&self.0).expect("plain values serialise") + "\n"
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
            let part = self.squared_distance(look, nearest, begin..begin + count) / count as f64;
            begin += count;
            (part, name)
        });
        let most = parts.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
        let distance = distance / self.0.factor;
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
        let all = self.0.classes.values().flat_map(|class| class.looks.iter().map(move |look| (class.limit, look)));
        all.map(|(limit, other)| (self.squared_distance(look, other, 0..look.len()).sqrt() / limit, other.as_slice()))
            .min_by(|a, b| a.0.total_cmp(&b.0))
    }

    fn squared_distance(&self, a: &[f32], b: &[f32], numbers: std::ops::Range<usize>) -> f64 {
        numbers.map(|number| f64::from((a[number] - b[number]) / self.0.spread[number]).powi(2)).sum()
    }
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
    let distance = |a: &Seen, b: &Seen| {
        let squares =
            a.look.iter().zip(&b.look).zip(spread).map(|((a, b), spread)| f64::from((a - b) / spread).powi(2));
        squares.sum::<f64>().sqrt()
    };
    let nearest = |number: usize| {
        let others = class.iter().enumerate().filter(|(other, _)| *other != number).map(|(_, other)| other);
        let is_of_another = |other: &&Seen| other.patient.is_none() || other.patient != class[number].patient;
        let smallest = |others: &mut dyn Iterator<Item = &Seen>| {
            others.map(|other| distance(&class[number], other)).min_by(f64::total_cmp)
        };
        smallest(&mut others.clone().filter(is_of_another)).or_else(|| smallest(&mut others.clone()))
    };
    Some(quantile((0..class.len()).filter_map(nearest).collect())?.max(SMALLEST_LIMIT))
}

/// The look of a row's image; `None` if it cannot be read.
fn look_of(row: &Row) -> Option<Vec<f32>> {
    look(&decode::image(&row.image_path).ok()?)
}

/// The numbers of [`GROUPS`]; `None` for an image of 0 pixels.
fn look(image: &DynamicImage) -> Option<Vec<f32>> {
    let planes = sam_pixels(image, SIDE_PX).ok()?;
    let [red, green, blue] = [0, 1, 2].map(|channel| {
        let plane = &planes[channel * SIDE * SIDE..][..SIDE * SIDE];
        plane.iter().map(|value| f32::from(*value) / 255.0).collect::<Vec<f32>>()
    });
    let grey = (0..SIDE * SIDE).map(|i| (red[i] + green[i] + blue[i]) / 3.0).collect();
    let grey = Plane { side: SIDE, values: grey };
    let mut look = grey.brightness();
    for other in [&red, &blue] {
        let difference: Vec<f32> = other.iter().zip(&green).map(|(other, green)| other - green).collect();
        look.extend([mean(&difference), deviation(&difference)]);
    }
    // grey images have no colour at all, and photographs have some nearly everywhere
    let is_grey = |i: &usize| red[*i].max(green[*i]).max(blue[*i]) - red[*i].min(green[*i]).min(blue[*i]) < GREY;
    look.push((0..SIDE * SIDE).filter(is_grey).count() as f32 / (SIDE * SIDE) as f32);
    look.extend(grey.edge_directions());
    let mut levels = vec![grey];
    for level in 0..LEVELS {
        levels.push(levels[level].half());
        look.push(levels[level].details(&levels[level + 1]));
    }
    for level in &levels[..LEVELS - 1] {
        look.extend(level.texture());
    }
    Some(look)
}

/// A square of grey levels from 0 to 1.
struct Plane {
    side: usize,
    values: Vec<f32>,
}

impl Plane {
    fn at(&self, row: usize, column: usize) -> f32 {
        self.values[row * self.side + column]
    }

    /// Mean of some rows and columns.
    fn mean_of(&self, rows: std::ops::Range<usize>, columns: std::ops::Range<usize>) -> f32 {
        let values: Vec<f32> = rows.flat_map(|row| columns.clone().map(move |column| self.at(row, column))).collect();
        mean(&values)
    }

    /// Mean and deviation, shares of black and of white, means of the middle and of the four sides.
    fn brightness(&self) -> Vec<f32> {
        let (all, side) = (0..self.side, self.side / 8);
        let share = |is_in: fn(f32) -> bool| {
            self.values.iter().filter(|value| is_in(**value)).count() as f32 / self.values.len() as f32
        };
        let middle = self.side / 4..self.side * 3 / 4;
        vec![
            mean(&self.values),
            deviation(&self.values),
            share(|value| value < 0.04),
            share(|value| value > 0.96),
            self.mean_of(middle.clone(), middle),
            self.mean_of(0..side, all.clone()),
            self.mean_of(self.side - side..self.side, all.clone()),
            self.mean_of(all.clone(), 0..side),
            self.mean_of(all, self.side - side..self.side),
        ]
    }

    /// Square roots of the shares of eight directions in all differences of neighbours.
    fn edge_directions(&self) -> [f32; 8] {
        let mut directions = [0.0; 8];
        for row in 0..self.side - 1 {
            for column in 0..self.side - 1 {
                let across = self.at(row, column + 1) - self.at(row, column);
                let down = self.at(row + 1, column) - self.at(row, column);
                let eighth = down.atan2(across).rem_euclid(std::f32::consts::PI) * 8.0 / std::f32::consts::PI;
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 8")]
                let eighth = (eighth as usize).min(7);
                directions[eighth] += across.hypot(down);
            }
        }
        let all = directions.iter().sum::<f32>() + 1e-6;
        directions.map(|share| (share / all).sqrt())
    }

    /// The same at half the side.
    fn half(&self) -> Self {
        let side = self.side / 2;
        let mean = |i: usize| {
            let (row, column) = (i / side * 2, i % side * 2);
            (self.at(row, column) + self.at(row, column + 1) + self.at(row + 1, column) + self.at(row + 1, column + 1))
                / 4.0
        };
        Self { side, values: (0..side * side).map(mean).collect() }
    }

    /// Logarithm of the deviation from the plane of half the side.
    fn details(&self, half: &Self) -> f32 {
        let lost = |i: usize| self.values[i] - half.at(i / self.side / 2, i % self.side / 2);
        (deviation(&(0..self.values.len()).map(lost).collect::<Vec<f32>>()) + 1e-3).ln()
    }

    /// Square roots of the shares of ten uniform local binary patterns (Ojala et al. 2002): how many of the eight neighbours
    /// are brighter, where these are side by side, else the tenth.
    fn texture(&self) -> [f32; 10] {
        /// Difference from which a neighbour is brighter.
        const STEP: f32 = 0.01;
        const NEIGHBOURS: [[usize; 2]; 8] = [[0, 0], [0, 1], [0, 2], [1, 2], [2, 2], [2, 1], [2, 0], [1, 0]];
        let mut patterns = [0.0; 10];
        for row in 1..self.side - 1 {
            for column in 1..self.side - 1 {
                let limit = self.at(row, column) + STEP;
                let is_brighter = NEIGHBOURS.map(|[down, across]| self.at(row + down - 1, column + across - 1) > limit);
                let changes = (0..8).filter(|i| is_brighter[*i] != is_brighter[(i + 1) % 8]).count();
                let count = is_brighter.iter().filter(|is_brighter| **is_brighter).count();
                patterns[if changes <= 2 { count } else { 9 }] += 1.0;
            }
        }
        let all = ((self.side - 2) * (self.side - 2)) as f32;
        patterns.map(|count: f32| (count / all).sqrt())
    }
}

fn mean(values: &[f32]) -> f32 {
    values.iter().sum::<f32>() / values.len() as f32
}

fn deviation(values: &[f32]) -> f32 {
    let mean = mean(values);
    (values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt()
}

/// Four decimals, for a file that people can read.
fn rounded(value: f32) -> f32 {
    (value * 1e4).round() / 1e4
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index of the list")]
fn quantile(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let rank = (QUANTILE * values.len() as f64).ceil() as usize;
    values.get(rank.checked_sub(1)?).copied()
}

#[cfg(test)]
#[path = "appearance_tests.rs"]
mod tests;
