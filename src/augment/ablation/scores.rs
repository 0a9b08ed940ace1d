//! Scores of a trained segmenter on sets of real test rows.

use super::trained::ArmSegmenter;
use crate::augment::check_interrupt;
use crate::augment::inputs::image_sums;
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
    pub(super) rows: Vec<usize>,
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

impl<'a> TestSet<'a> {
    /// Rows of `real`, or of `external`, whose masks show their target and whose images are not also training images of
    /// `real`: the `test` rows, or all rows of `external` if there are none. At most `limit` rows, spread evenly; 0 = all.
    pub(super) fn new(
        real: &'a Manifest,
        external: Option<&'a Manifest>,
        (labels, limit): (Labels, usize),
        observer: &dyn Observer,
    ) -> Result<Self> {
        let (name, manifest) = external.map_or(("test", real), |external| ("external", external));
        let mut rows = manifest.rows_of(Split::Test);
        if rows.is_empty() && external.is_some() {
            rows = (0..manifest.rows.len()).collect();
        }
        let trained = image_sums(real.rows_of(Split::Train).into_iter().map(|row| &real.rows[row]))?;
        let trained: HashSet<String> = trained.into_values().collect();
        let sums = image_sums(rows.iter().map(|&row| &manifest.rows[row]))?;
        let sum = |row: usize| &sums[manifest.rows[row].image_path.as_path()];
        rows.retain(|&row| manifest.rows[row].is_present());
        let all = rows.len();
        rows.retain(|&row| !trained.contains(sum(row)));
        if rows.len() < all {
            let count = all - rows.len();
            let text = format!("left out {count} {name} rows whose images are also training images");
            observer.on(&Event::Warning(text));
        }
        if rows.is_empty() {
            let (reason, hint) = match external {
                Some(_) => ("all images are training images of the ablation", "give a data root of other images"),
                None => (
                    "there are no `test` rows",
                    "give some rows the split `test`: the ablation scores real images that no arm was trained on",
                ),
            };
            return Err(Error::data(&manifest.root, reason, hint));
        }
        let rows = spread(rows, limit);
        let images = rows.iter().map(|&row| sum(row).clone()).collect();
        Ok(Self { name, manifest, rows, images, labels })
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
        let text = files::read(&self.file(folder), files::MAX_TABLE).unwrap_or_default();
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
    pub(super) fn score(&self, model: &ArmSegmenter, folder: &Path, runtime: &Runtime) -> Result<Vec<RowScore>> {
        let mut saved = Saved { set_sha256: self.identity()?, rows: self.known(folder)? };
        let observer = runtime.observer();
        let total = self.rows.len() as u64;
        observer.on(&Event::Started { phase: format!("score {} rows", self.name), total, unit: "questions" });
        while let Some(&row) = self.rows.get(saved.rows.len()) {
            if runtime.is_interrupted() || (!saved.rows.is_empty() && saved.rows.len().is_multiple_of(SAVED_AFTER)) {
                self.save(folder, &saved)?;
                check_interrupt(runtime.interrupt())?;
            }
            saved.rows.push(self.row_score(model, &self.manifest.rows[row])?);
            observer.on(&Event::Advanced { done: saved.rows.len() as u64 });
        }
        observer.on(&Event::Finished);
        self.save(folder, &saved)?;
        Ok(saved.rows)
    }

    fn save(&self, folder: &Path, saved: &Saved) -> Result<()> {
        write_bytes(&self.file(folder), &serde_json::to_vec(saved).expect("plain numbers serialise"))
    }

    fn row_score(&self, model: &ArmSegmenter, row: &Row) -> Result<RowScore> {
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
