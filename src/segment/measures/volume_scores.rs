//! Scores of the masks of volumes against label maps, in three dimensions and in mm.
//!
//! A volume is one item: its Dice counts voxels of all slices together, and distances are those between surfaces. Masks
//! are scored where the truth has foreground. Volumes without it count for the share of false masks only. Distances use
//! the spacing along the voxel axes, which is exact for grids with orthogonal axes. Other grids have no distances.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::data::labels::Labels;
use crate::data::names;
use crate::data::prepare::stem_without_suffix;
use crate::data::volume::format::{is_written, written_endings};
use crate::data::volume::{Geometry, Grid, LabelMap, labels};
use crate::event::{Event, Observer};
use crate::metrics::estimates::{AUROC, Estimates, QuestionScores, SCORES, ScoreValues, estimates, range};
use crate::metrics::grid::{Size, Spacing};
use crate::metrics::mask_scores::MaskScores;
use crate::metrics::text_table::aligned;
use crate::units::fixed;
use crate::{Error, Result};

/// Largest deviation of two voxel axes from a right angle, in degrees. It changes no distance by more than 1 %.
const MAX_SKEW: f64 = 0.5;

/// What is compared, and how.
#[derive(Debug, Clone, Copy)]
pub struct CompareOptions {
    /// Foreground of the label maps; empty: every label, of which there may be only one.
    pub truth_labels: Labels,
    /// Foreground of the predictions, in the same way.
    pub predicted_labels: Labels,
    /// Tolerance of the surface Dice in mm.
    pub tolerance_mm: f64,
    /// Put a prediction on another grid than its label map on that grid, by the nearest voxel.
    pub resample: bool,
    /// The affine that counts where a NIfTI file has two that differ.
    pub geometry: Option<Geometry>,
}

/// A mask and the label map that it is compared with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskPaths {
    /// Name of the volume.
    pub name: String,
    /// File of the mask.
    pub prediction: PathBuf,
    /// File of the label map.
    pub truth: PathBuf,
}

/// Scores of one volume. A score that is not defined is `None`: without foreground in the truth all but `has_mask`, and
/// distances if the prediction is empty.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VolumeScore {
    /// Name of the volume.
    pub volume: String,
    /// Whether the truth has foreground.
    pub is_present: bool,
    /// Whether the prediction has foreground.
    pub has_mask: bool,
    /// Distance in mm between neighbouring voxels along the three voxel axes.
    pub spacing_mm: [f64; 3],
    /// Volume of the truth in millilitres.
    pub truth_ml: f64,
    /// Volume of the prediction in millilitres.
    pub predicted_ml: f64,
    /// Dice of all voxels.
    pub dice: Option<f64>,
    /// IoU of all voxels.
    pub iou: Option<f64>,
    /// Surface Dice at the tolerance.
    pub surface_dice: Option<f64>,
    /// 95th percentile of the Hausdorff distance in mm.
    pub hd95: Option<f64>,
    /// Hausdorff distance in mm.
    pub hd: Option<f64>,
    /// Average symmetric surface distance in mm.
    pub assd: Option<f64>,
    /// Share of the true voxels that are predicted.
    pub voxel_sensitivity: Option<f64>,
    /// Share of the predicted voxels that are true.
    pub voxel_precision: Option<f64>,
    /// Share of the true lesions that are found.
    pub lesion_recall: Option<f64>,
    /// Share of the predicted components that contain a true voxel.
    pub lesion_precision: Option<f64>,
    /// Harmonic mean of lesion recall and precision.
    pub lesion_f1: Option<f64>,
    /// Absolute difference of the volumes as a fraction of the true one.
    pub volume_error_frac: Option<f64>,
}

/// Scores of several volumes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VolumeSummary {
    /// Number of volumes.
    pub volumes: usize,
    /// Number of volumes whose truth has foreground.
    pub present: usize,
    /// Tolerance of the surface Dice in mm.
    pub tolerance_mm: f64,
    /// Means over volumes with 95 % intervals, by the name of the score.
    pub estimates: Estimates,
    /// The volumes.
    pub scores: Vec<VolumeScore>,
}

/// Scores of a volume: name, title, and the name of the score of an image that is computed in the same way.
const VOLUME_SCORES: [(&str, &str, &str); 14] = [
    ("dice", "Dice", "dice"),
    ("iou", "IoU", "iou"),
    ("surface_dice", "surface Dice", "surface_dice"),
    ("hd95", "HD95 (mm)", "hd95"),
    ("hd", "Hausdorff distance (mm)", "hd"),
    ("assd", "ASSD (mm)", "assd"),
    ("voxel_sensitivity", "voxel sensitivity", "pixel_sensitivity"),
    ("voxel_precision", "voxel precision", "pixel_precision"),
    ("lesion_recall", "lesion recall", "lesion_recall"),
    ("lesion_precision", "lesion precision", "lesion_precision"),
    ("lesion_f1", "lesion F1", "lesion_f1"),
    ("volume_error_frac", "relative volume error", "area_error_frac"),
    ("target_sensitivity", "volumes found", "target_sensitivity"),
    ("target_specificity", "empty volumes kept empty", "target_specificity"),
];

/// The pairs of two files, or of two folders by the names of their files, and the label maps without a prediction.
///
/// # Errors
/// [`Error::Data`] for a prediction without a label map, two files of one name, or no pair at all; [`Error::Io`].
pub fn pairs(predictions: &Path, truths: &Path) -> Result<(Vec<MaskPaths>, Vec<PathBuf>)> {
    if !predictions.is_dir() && !truths.is_dir() {
        let name = predictions.file_name().unwrap_or_default().to_string_lossy();
        let name = stem_without_suffix(&name).to_owned();
        return Ok((vec![MaskPaths { name, prediction: predictions.into(), truth: truths.into() }], Vec::new()));
    }
    let (found, truth_files) = (by_name(predictions)?, by_name(truths)?);
    let mut pairs = Vec::with_capacity(found.len());
    let found = names::matched(found, truth_files)?;
    if let Some(prediction) = found.first.first() {
        let reason = format!("`{}` has no label map of this name", truths.display());
        return Err(Error::data(prediction, reason, "name the label map like the prediction, or remove the file"));
    }
    for (name, prediction, truth) in found.pairs {
        pairs.push(MaskPaths { name, prediction, truth });
    }
    if pairs.is_empty() {
        let hint = format!("give a folder of masks ({})", written_endings());
        return Err(Error::data(predictions, "there is no mask in this folder", hint));
    }
    Ok((pairs, found.second))
}

/// Masks and label maps of a folder by their names without suffix.
fn by_name(path: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut files = Vec::new();
    if path.is_dir() {
        for entry in std::fs::read_dir(path).map_err(Error::io(path, "read"))? {
            let file = entry.map_err(Error::io(path, "read"))?.path();
            files.extend((file.is_file() && is_written(&file)).then_some(file));
        }
    } else {
        files.push(path.to_owned());
    }
    files.sort();
    let mut found = BTreeMap::new();
    for file in files {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = stem_without_suffix(&name).to_owned();
        if let Some(other) = found.insert(name.clone(), file.clone()) {
            let reason = format!("`{}` has the same name `{name}`", other.display());
            return Err(Error::data(file, reason, "keep one file for each volume"));
        }
    }
    Ok(found)
}

/// Scores the pairs one after the other.
///
/// # Errors
/// [`Error::Data`] for a file that is no label map, that has several labels of which none is chosen, or that has
/// another grid; [`Error::Io`].
pub fn compare(pairs: &[MaskPaths], options: CompareOptions, observer: &dyn Observer) -> Result<VolumeSummary> {
    observer.on(&Event::Started { phase: "compare".into(), total: pairs.len() as u64, unit: "volumes" });
    let mut scores = Vec::with_capacity(pairs.len());
    for pair in pairs {
        scores.push(score(pair, options, observer)?);
        observer.on(&Event::Advanced { done: scores.len() as u64 });
    }
    observer.on(&Event::Finished);
    let items: Vec<QuestionScores> = scores.iter().map(VolumeScore::item).collect();
    let of_images = estimates(&items.iter().collect::<Vec<_>>());
    let named =
        VOLUME_SCORES.iter().filter_map(|(name, _, of_image)| Some(((*name).to_owned(), *of_images.get(*of_image)?)));
    Ok(VolumeSummary {
        volumes: scores.len(),
        present: scores.iter().filter(|score| score.is_present).count(),
        tolerance_mm: options.tolerance_mm,
        estimates: named.filter(|(name, _)| name != AUROC).collect(),
        scores,
    })
}

fn score(pair: &MaskPaths, options: CompareOptions, observer: &dyn Observer) -> Result<VolumeScore> {
    let truth = labels::open_with(&pair.truth, options.geometry)?;
    let grid = truth.grid.clone();
    let prediction = labels::open_with(&pair.prediction, options.geometry)?;
    let prediction = prediction.on_grid(&pair.prediction, &grid, options.resample)?;
    for (path, LabelMap { notes, .. }) in [(&pair.truth, &truth), (&pair.prediction, &prediction)] {
        for note in notes {
            observer.on(&Event::Note(format!("{}: {note}", path.display())));
        }
    }
    let is_true = foreground(&pair.truth, &truth, options.truth_labels, "labels")?;
    let is_predicted = foreground(&pair.prediction, &prediction, options.predicted_labels, "predicted_labels")?;
    let [columns, rows, slices] = grid.size;
    let spacing_mm = grid.spacing();
    let spacing = Spacing { slice: spacing_mm[2], row: spacing_mm[1], column: spacing_mm[0] };
    let count = |mask: &[bool]| mask.iter().filter(|set| **set).count();
    let (num_true, num_predicted) = (count(&is_true), count(&is_predicted));
    let size = Size::volume(slices, rows, columns);
    let scores = (num_true > 0)
        .then(|| MaskScores::of(&is_predicted, &is_true, size, spacing, options.tolerance_mm))
        .transpose()
        .map_err(|error| Error::data(&pair.truth, error.to_string(), "check the spacing in the header"))?;
    let both = is_predicted.iter().zip(&is_true).filter(|(a, b)| **a && **b).count();
    let sum = num_true + num_predicted;
    let part = |value: usize, all: usize| (num_true > 0).then(|| value as f64 / all as f64);
    let has_distances = scores.is_some() && has_distances(&pair.truth, &grid, observer);
    let border = scores.and_then(|scores| scores.border).filter(|_| has_distances);
    let lesions = scores.map(|scores| scores.lesions);
    Ok(VolumeScore {
        volume: pair.name.clone(),
        is_present: num_true > 0,
        has_mask: num_predicted > 0,
        spacing_mm,
        truth_ml: num_true as f64 * grid.voxel_ml(),
        predicted_ml: num_predicted as f64 * grid.voxel_ml(),
        dice: part(2 * both, sum),
        iou: part(both, sum - both),
        surface_dice: scores.map(|scores| scores.surface_dice).filter(|_| has_distances),
        hd95: border.map(|border| border.hd95),
        hd: border.map(|border| border.hd),
        assd: border.map(|border| border.assd),
        voxel_sensitivity: scores.and_then(|scores| scores.sensitivity),
        voxel_precision: scores.and_then(|scores| scores.precision),
        lesion_recall: lesions.and_then(|lesions| lesions.recall()),
        lesion_precision: lesions.and_then(|lesions| lesions.precision()),
        lesion_f1: lesions.and_then(|lesions| lesions.f1()),
        volume_error_frac: scores.and_then(|scores| scores.area_error_frac),
    })
}

/// Whether distances can be measured along the axes of a grid. A note says so if not.
fn has_distances(path: &Path, grid: &Grid, observer: &dyn Observer) -> bool {
    let skew = grid.affine.skew();
    if skew > MAX_SKEW {
        observer.on(&Event::Note(format!(
            "{}: the axes of its voxels are {skew:.1} degrees from a right angle, as those of a CT with a tilted gantry, so \
             it has no surface Dice, HD95, Hausdorff distance and ASSD (resample mask and label map to a grid with right \
             angles)",
            path.display()
        )));
    }
    skew <= MAX_SKEW
}

/// The voxels with one of the labels. Without chosen labels, a file may have one label only.
fn foreground(path: &Path, map: &labels::LabelMap, chosen: Labels, argument: &str) -> Result<Vec<bool>> {
    let found = map.labels();
    if chosen.is_empty() && found.len() > 1 {
        let all: Vec<String> = found.keys().map(u16::to_string).collect();
        let hint = format!("choose the foreground, for example with the argument `{argument}={}`", all[0]);
        return Err(Error::data(path, format!("it has several labels: {}", all.join(", ")), hint));
    }
    Ok((0..map.values.len()).map(|index| map.has(index, chosen)).collect())
}

impl VolumeScore {
    /// The value of a score by its name; `None` where it is not defined.
    pub fn value(&self, name: &str) -> Option<f64> {
        let flag = |value: bool| f64::from(u8::from(value));
        match name {
            "dice" => self.dice,
            "iou" => self.iou,
            "surface_dice" => self.surface_dice,
            "hd95" => self.hd95,
            "hd" => self.hd,
            "assd" => self.assd,
            "voxel_sensitivity" => self.voxel_sensitivity,
            "voxel_precision" => self.voxel_precision,
            "lesion_recall" => self.lesion_recall,
            "lesion_precision" => self.lesion_precision,
            "lesion_f1" => self.lesion_f1,
            "volume_error_frac" => self.volume_error_frac,
            "target_sensitivity" => self.is_present.then(|| flag(self.has_mask)),
            "target_specificity" => (!self.is_present).then(|| flag(!self.has_mask)),
            _ => None,
        }
    }

    fn item(&self) -> QuestionScores {
        let of_image = |key: &str| {
            let name = VOLUME_SCORES.iter().find(|(_, _, of_image)| *of_image == key)?.0;
            self.value(name)
        };
        let values: ScoreValues = SCORES.map(|score| of_image(score.key));
        QuestionScores {
            row: self.volume.clone(),
            class: String::new(),
            group: self.volume.clone(),
            is_present: Some(self.is_present),
            presence: self.predicted_ml,
            values,
        }
    }
}

impl std::fmt::Display for VolumeSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let number =
            |value: Option<f64>, digits: usize| value.map_or_else(|| "-".to_owned(), |v| format!("{v:.digits$}"));
        let row = |score: &VolumeScore| {
            let [truth, predicted] = [score.truth_ml, score.predicted_ml].map(|ml| format!("{ml:.2}"));
            let [dice, surface] = [score.dice, score.surface_dice].map(|value| number(value, 4));
            let [hd95, assd] = [score.hd95, score.assd].map(|value| number(value, 2));
            vec![score.volume.clone(), truth, predicted, dice, surface, hd95, assd]
        };
        let header = ["volume", "truth ml", "predicted ml", "Dice", "surface Dice", "HD95 mm", "ASSD mm"];
        let rows: Vec<Vec<String>> = self.scores.iter().map(row).collect();
        writeln!(f, "{}", aligned(&header, &rows, None))?;
        let mean = |(name, title, _): &(&str, &str, &str)| {
            let estimate = self.estimates.get(*name)?;
            let interval = range(estimate.interval.as_ref());
            Some(vec![(*title).to_owned(), fixed(estimate.mean, 4), interval, estimate.count.to_string()])
        };
        let rows: Vec<Vec<String>> = VOLUME_SCORES.iter().filter_map(mean).collect();
        write!(f, "{}", aligned(&["score", "mean", "95 % interval", "volumes"], &rows, None))?;
        write!(
            f,
            "{} volumes, {} of them with a target; surface Dice at {} mm",
            self.volumes, self.present, self.tolerance_mm
        )
    }
}

#[cfg(test)]
#[path = "volume_scores_tests.rs"]
mod tests;
