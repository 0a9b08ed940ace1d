//! Evaluation of a model on rows of a data root: scores of masks, answers and locations, and a sheet of overlays.

use super::predict::{Prediction, Request, predict};
use super::setup::Assembly;
use crate::data::manifest::{Manifest, Row};
use crate::data::sample::{at_row, decoded};
use crate::data::{image as pixels, sheet};
use crate::event::{Event, Observer};
use crate::metrics::segmentation::ImageScore;
use crate::metrics::table::{EvalSummary, EvalSums};
use crate::metrics::text::TextScores;
use crate::{Error, Result, files};
use image::{DynamicImage, GrayImage, RgbImage};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// One row's scores; a line of `samples.csv`.
#[derive(Debug, Clone, serde::Serialize)]
pub struct SampleScore {
    /// CSV file and line of the row.
    pub row: String,
    /// Modality folder.
    pub modality: String,
    /// Mask file.
    pub mask: String,
    /// Dice at 0.5.
    pub dice: f64,
    /// IoU at 0.5.
    pub iou: f64,
    /// Soft Dice.
    pub soft_dice: f64,
    /// True if the answer names the correct location; empty if the row has no location.
    pub position_right: Option<bool>,
    /// BLEU of the answer.
    pub bleu: f64,
    /// ROUGE-1 F1 of the answer.
    pub rouge1: f64,
    /// METEOR without synonyms.
    pub meteor_exact_stem: f64,
    /// Predicted modality.
    pub predicted_modality: String,
    /// The question.
    pub question: String,
    /// The row's answer.
    pub answer: String,
    /// The generated answer.
    pub generated: String,
}

/// An evaluation: the summary and every sample.
#[derive(Debug)]
pub struct Evaluation {
    /// Mean scores.
    pub summary: EvalSummary,
    /// Scores of each sample, in the order of the rows.
    pub samples: Vec<SampleScore>,
    tiles: Vec<sheet::Tile>,
}

/// Runs the model on `rows` (indices into the manifest).
///
/// # Errors
/// [`Error::Data`] naming a row that cannot be read, or whose mask and image differ in width or height;
/// [`Error::NotFinite`] naming the image for which the model computes NaN; [`Error::Interrupted`].
pub fn evaluate(
    assembly: &Assembly,
    manifest: &Manifest,
    rows: &[usize],
    max_new_tokens: usize,
    observer: &dyn Observer,
    interrupt: &AtomicBool,
) -> Result<Evaluation> {
    let mut sums = EvalSums::default();
    let mut samples = Vec::new();
    let mut kept = Extremes::default();
    observer.on(&Event::Started { phase: "evaluate".into(), total: rows.len() as u64, unit: "questions" });
    for (done, &index) in rows.iter().enumerate() {
        if interrupt.load(Ordering::SeqCst) {
            return Err(Error::Interrupted);
        }
        let row = &manifest.rows[index];
        let labels = assembly.description.pixels.labels;
        let (image, mask) = decoded(row, labels).map_err(|error| at_row(row, &error))?;
        let truth = pixels::foreground(&mask);
        let request = Request { image: &image, question: &row.question, max_new_tokens };
        let prediction = predict(assembly, &request, |_| ()).map_err(|error| error.of_image(&row.image_path))?;
        let group = sums.group(&row.modality);
        group.add_image(&row.image_path);
        let flags: Vec<bool> = truth.iter().map(|v| *v > 127).collect();
        let size = (truth.width() as usize, truth.height() as usize);
        let score = group.add_mask(&prediction.mask, &flags, size).map_err(|error| error.of_image(&row.image_path))?;
        let (text, right) = group.add_answer(&prediction.answer, &row.answer, row.position.as_deref());
        samples.push(sample_score(assembly, row, &prediction, &score, (text, right)));
        kept.offer(row, score.dice, || tile(row, &image, &prediction, &truth, score.dice))?;
        observer.on(&Event::Advanced { done: done as u64 + 1 });
    }
    observer.on(&Event::Finished);
    Ok(Evaluation { summary: sums.summary(), samples, tiles: kept.into_tiles() })
}

fn sample_score(
    assembly: &Assembly,
    row: &Row,
    prediction: &Prediction,
    score: &ImageScore,
    (text, position_right): (TextScores, Option<bool>),
) -> SampleScore {
    let best = prediction.classes.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i);
    SampleScore {
        row: format!("{}:{}", row.csv.display(), row.line),
        modality: row.modality.clone(),
        mask: row.mask_path.display().to_string(),
        dice: score.dice,
        iou: score.iou,
        soft_dice: score.soft_dice,
        position_right,
        bleu: text.bleu,
        rouge1: text.rouge1,
        meteor_exact_stem: text.meteor_exact_stem,
        predicted_modality: best.and_then(|i| assembly.description.modalities.get(i).cloned()).unwrap_or_default(),
        question: row.question.clone(),
        answer: row.answer.clone(),
        generated: prediction.answer.clone(),
    }
}

impl Evaluation {
    /// Writes `summary.json`, `samples.csv` and `overlays.png` (the worst samples by Dice, then the best;
    /// `overlays.csv` lists the tiles) into `folder`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, folder: &Path) -> Result<()> {
        files::create_folders(folder).map_err(Error::io(folder, "create"))?;
        let path = folder.join("summary.json");
        let json = serde_json::to_vec_pretty(&self.summary).expect("plain numbers serialise");
        files::write(&path, &json).map_err(Error::io(&path, "write"))?;
        let path = folder.join("samples.csv");
        let refused = |e: csv::Error| Error::Io { path: path.clone(), action: "write", source: e.into() };
        let mut writer = csv::Writer::from_writer(Vec::new());
        for sample in &self.samples {
            writer.serialize(sample).map_err(refused)?;
        }
        let rows = writer.into_inner().expect("a vector takes all bytes");
        files::write(&path, &rows).map_err(Error::io(&path, "write"))?;
        sheet::save_sheet(&self.tiles, COLUMNS, &folder.join("overlays.png"))
    }
}

const COLUMNS: usize = 4;
const KEPT: usize = 8;

/// The worst and the best samples so far. Questions about the same mask of an image share a tile.
#[derive(Debug, Default)]
struct Extremes {
    masks: HashSet<(PathBuf, PathBuf)>,
    worst: Vec<Kept>,
    best: Vec<Kept>,
}

/// A tile with its Dice and its number.
#[derive(Debug)]
struct Kept {
    dice: f64,
    number: usize,
    tile: sheet::Tile,
}

impl Extremes {
    fn offer(&mut self, row: &Row, dice: f64, tile: impl Fn() -> Result<sheet::Tile>) -> Result<()> {
        if !self.masks.insert((row.image_path.clone(), row.mask_path.clone())) {
            return Ok(());
        }
        let number = self.masks.len();
        let lowest = self.worst.len() < KEPT || self.worst.last().is_some_and(|last| dice < last.dice);
        let highest = self.best.len() < KEPT || self.best.last().is_some_and(|last| dice > last.dice);
        if lowest {
            self.worst.push(Kept { dice, number, tile: tile()? });
            self.worst.sort_by(|a, b| a.dice.total_cmp(&b.dice));
            self.worst.truncate(KEPT);
        }
        if highest {
            self.best.push(Kept { dice, number, tile: tile()? });
            self.best.sort_by(|a, b| b.dice.total_cmp(&a.dice));
            self.best.truncate(KEPT);
        }
        Ok(())
    }

    /// The worst, then those of the best that are not among the worst.
    fn into_tiles(self) -> Vec<sheet::Tile> {
        let worst: HashSet<usize> = self.worst.iter().map(|kept| kept.number).collect();
        let best = self.best.into_iter().filter(|kept| !worst.contains(&kept.number));
        self.worst.into_iter().chain(best).map(|kept| kept.tile).collect()
    }
}

fn tile(row: &Row, image: &DynamicImage, prediction: &Prediction, truth: &GrayImage, dice: f64) -> Result<sheet::Tile> {
    Ok(sheet::Tile {
        image: overlay(image, prediction, Some(truth))?,
        frame: None,
        name: row.image_path.display().to_string(),
        shows: sheet::SHOWS_BOTH,
        notes: format!("Dice {dice:.3}, {}: {} {}", row.modality, row.question, prediction.answer),
    })
}

/// The image with the predicted mask and, if given, the ground truth.
///
/// # Errors
/// [`Error::Shape`] if sizes differ.
pub fn overlay(image: &DynamicImage, prediction: &Prediction, truth: Option<&GrayImage>) -> Result<RgbImage> {
    let (width, height) = prediction.size;
    let mask = sheet::probability_image(&prediction.mask, width, height)?;
    sheet::overlay(&image.to_rgb8(), &mask, truth)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::manifest::{Split, Target};

    #[test]
    fn a_sheet_shows_every_image_and_mask_once() {
        let row = |image: &str, mask: &str| Row {
            csv: PathBuf::new(),
            line: 2,
            modality: "skin".into(),
            mask_path: mask.into(),
            image_path: image.into(),
            question: String::new(),
            answer: String::new(),
            position: None,
            split: Split::Test,
            target: Target::Present,
            patient: None,
            spacing_mm: None,
            synthetic: false,
        };
        let mut kept = Extremes::default();
        let tile = |name: &str| {
            Ok(sheet::Tile {
                image: RgbImage::new(1, 1),
                frame: None,
                name: name.to_owned(),
                shows: "",
                notes: String::new(),
            })
        };
        for (image, mask, dice, name) in [
            ("a", "left", 0.9, "a left"),
            ("a", "left", 0.1, "again"),
            ("a", "right", 0.2, "a right"),
            ("b", "b", 0.5, "b"),
        ] {
            kept.offer(&row(image, mask), dice, || tile(name)).expect("a tile");
        }
        let shown: Vec<String> = kept.into_tiles().into_iter().map(|tile| tile.name).collect();
        assert_eq!(shown, ["a right", "b", "a left"]);
    }
}
