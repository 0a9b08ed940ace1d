//! Scores of a trained segmenter on sets of real test rows.

use super::trained::Trained;
use crate::data::image::foreground;
use crate::data::labels::Labels;
use crate::data::manifest::{Manifest, Row, Split};
use crate::data::sample::{at_row, decoded};
use crate::data::split::spread;
use crate::event::{Event, Observer};
use crate::metrics::segmentation::PixelCounts;
use crate::runtime::Runtime;
use crate::tensor::weights::{sha256, write_bytes};
use crate::{Error, Result, files};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// Unfinished scores are written after so many rows.
const SAVED_AFTER: usize = 25;

/// Scores of one row.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct RowScore {
    pub(super) dice: f64,
    /// Pixels that only the prediction counts to the foreground.
    pub(super) false_positives: u64,
    /// Background pixels of the truth.
    pub(super) background: u64,
}

/// Rows that every trained segmenter is scored on.
pub(super) struct TestSet<'a> {
    /// `test` or `external`: the name of the file of scores, and in the report.
    pub(super) name: &'static str,
    manifest: &'a Manifest,
    rows: Vec<usize>,
    /// SHA-256 of the image of each row. A data root may contain a copy of an image for each of its masks.
    images: Vec<String>,
    labels: Labels,
}

/// Scores of a file, and what they are scores of.
#[derive(Serialize, Deserialize)]
struct Saved {
    set_sha256: String,
    rows: Vec<RowScore>,
}

/// How sets are scored.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scoring {
    /// Foreground labels of masks.
    pub(super) labels: Labels,
    /// Most rows of a set, spread evenly; 0 = all.
    pub(super) limit: usize,
}

impl<'a> TestSet<'a> {
    /// The `test` rows of `real` whose masks show their target and whose images are not also training images.
    pub(super) fn of_test_rows(real: &'a Manifest, scoring: Scoring, observer: &dyn Observer) -> Result<Self> {
        let rows = real.rows_of(Split::Test);
        let set = Self::unseen("test", real, (real, rows), scoring, observer)?;
        if set.rows.is_empty() {
            let hint = "give some rows the split `test`: the ablation scores real images that no arm was trained on";
            return Err(Error::data(&real.root, "there are no `test` rows", hint));
        }
        Ok(set)
    }

    /// The `test` rows of `external`, or all of its rows if there are none, whose images are not training images of
    /// `real`.
    pub(super) fn of_external(
        real: &'a Manifest,
        external: &'a Manifest,
        scoring: Scoring,
        observer: &dyn Observer,
    ) -> Result<Self> {
        let test = external.rows_of(Split::Test);
        let rows = if test.is_empty() { (0..external.rows.len()).collect() } else { test };
        let set = Self::unseen("external", real, (external, rows), scoring, observer)?;
        if set.rows.is_empty() {
            let hint = "give a data root of other images";
            return Err(Error::data(&external.root, "all images are training images of the ablation", hint));
        }
        Ok(set)
    }

    fn unseen(
        name: &'static str,
        real: &Manifest,
        (manifest, rows): (&'a Manifest, Vec<usize>),
        scoring: Scoring,
        observer: &dyn Observer,
    ) -> Result<Self> {
        let trained: HashSet<&PathBuf> =
            real.rows_of(Split::Train).into_iter().map(|row| &real.rows[row].image_path).collect();
        let trained: HashSet<String> = trained.into_iter().map(|path| sha256(path)).collect::<Result<_>>()?;
        let sums = sums(rows.iter().map(|&row| &manifest.rows[row]))?;
        let sum = |row: usize| &sums[&manifest.rows[row].image_path];
        let rows: Vec<usize> = rows.into_iter().filter(|&row| manifest.rows[row].is_present()).collect();
        let all = rows.len();
        let unseen: Vec<usize> = rows.into_iter().filter(|&row| !trained.contains(sum(row))).collect();
        if unseen.len() < all {
            let count = all - unseen.len();
            let text = format!("left out {count} {name} rows whose images are also training images");
            observer.on(&Event::Warning(text));
        }
        let rows = spread(unseen, scoring.limit);
        let images = rows.iter().map(|&row| sum(row).clone()).collect();
        Ok(Self { name, manifest, rows, images, labels: scoring.labels })
    }

    /// Number of rows.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// The class of each image, in the order of first rows.
    pub(super) fn groups(&self) -> Vec<String> {
        let mut seen = HashSet::new();
        let firsts = self.rows.iter().zip(&self.images).filter(|(_, image)| seen.insert(*image));
        firsts.map(|(&row, _)| self.manifest.rows[row].modality.clone()).collect()
    }

    /// Mean score of each image, in the order of [`Self::groups`]. Rows about one image are not independent samples;
    /// confidence intervals over rows would be too narrow.
    pub(super) fn by_image(&self, scores: &[RowScore]) -> Vec<f64> {
        by_image(&self.images, scores.iter().map(|score| score.dice))
    }

    /// Identifies rows, files and settings of the scores.
    pub(super) fn identity(&self) -> Result<String> {
        let mut hash = Sha256::new();
        hash.update(format!("{:?}", self.labels));
        for (&row, image) in self.rows.iter().zip(&self.images) {
            let row = &self.manifest.rows[row];
            hash.update(format!("{:?}", (image, sha256(&row.target().mask_path)?, &row.question)));
        }
        Ok(format!("{:x}", hash.finalize()))
    }

    /// The scores that are known in the folder of a run; fewer than there are rows after an interruption, and none if
    /// they are of other rows.
    pub(super) fn known(&self, folder: &Path) -> Result<Vec<RowScore>> {
        let Ok(text) = files::read(&self.file(folder), files::MAX_TABLE) else { return Ok(Vec::new()) };
        let Ok(saved) = serde_json::from_slice::<Saved>(&text) else { return Ok(Vec::new()) };
        let is_same = saved.rows.len() <= self.rows.len() && saved.set_sha256 == self.identity()?;
        Ok(if is_same { saved.rows } else { Vec::new() })
    }

    fn file(&self, folder: &Path) -> PathBuf {
        folder.join(format!("scores-{}.json", self.name))
    }

    /// Scores all rows, and continues with those that are known in `folder`.
    ///
    /// # Errors
    /// [`Error::Data`] for a row that cannot be read; [`Error::NotFinite`]; [`Error::Interrupted`] after saving.
    pub(super) fn score(&self, model: &Trained, folder: &Path, runtime: &Runtime) -> Result<Vec<RowScore>> {
        let mut saved = Saved { set_sha256: self.identity()?, rows: self.known(folder)? };
        let observer = runtime.observer();
        let total = self.rows.len() as u64;
        observer.on(&Event::Started { phase: format!("score {} rows", self.name), total, unit: "questions" });
        while let Some(&row) = self.rows.get(saved.rows.len()) {
            if runtime.is_interrupted() {
                self.save(folder, &saved)?;
                return Err(Error::Interrupted);
            }
            saved.rows.push(self.row_score(model, &self.manifest.rows[row])?);
            if saved.rows.len().is_multiple_of(SAVED_AFTER) {
                self.save(folder, &saved)?;
            }
            observer.on(&Event::Advanced { done: saved.rows.len() as u64 });
        }
        observer.on(&Event::Finished);
        self.save(folder, &saved)?;
        Ok(saved.rows)
    }

    fn save(&self, folder: &Path, saved: &Saved) -> Result<()> {
        write_bytes(&self.file(folder), &serde_json::to_vec(saved).expect("plain numbers serialise"))
    }

    fn row_score(&self, model: &Trained, row: &Row) -> Result<RowScore> {
        let (image, mask) = decoded(row, self.labels).map_err(|error| at_row(row, &error))?;
        let truth: Vec<bool> = foreground(&mask).iter().map(|value| *value > 127).collect();
        let probabilities =
            model.probabilities(&image, &row.question).map_err(|error| error.of_image(&row.image_path))?;
        let counts = PixelCounts::of(&probabilities, &truth)?;
        Ok(RowScore {
            dice: counts.dice(),
            false_positives: counts.predicted - counts.both,
            background: counts.pixels - counts.truth,
        })
    }
}

/// SHA-256 of each image.
fn sums<'a>(rows: impl Iterator<Item = &'a Row>) -> Result<HashMap<&'a PathBuf, String>> {
    let images: HashSet<&PathBuf> = rows.map(|row| &row.image_path).collect();
    images.into_iter().map(|path| Ok((path, sha256(path)?))).collect()
}

/// Mean score of each image, in the order of first occurrence.
fn by_image(images: &[String], scores: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut index_of: HashMap<&str, usize> = HashMap::new();
    let mut sums: Vec<(f64, f64)> = Vec::new();
    for (image, score) in images.iter().zip(scores) {
        let index = *index_of.entry(image).or_insert(sums.len());
        if index == sums.len() {
            sums.push((0.0, 0.0));
        }
        sums[index].0 += score;
        sums[index].1 += 1.0;
    }
    sums.into_iter().map(|(sum, count)| sum / count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_of_one_image_are_averaged() {
        let images = ["b", "a", "b", "b"].map(str::to_owned);
        assert_eq!(by_image(&images, [0.0, 0.5, 0.3, 0.6].into_iter()), [0.3, 0.5]);
    }
}
