//! Scores a model on rows of a data root: masks, answers, positions; a table, a CSV and a sheet of overlays.

use super::predict::{Prediction, Request, predict};
use super::setup::Assembly;
use crate::data::manifest::{Manifest, Row};
use crate::data::{decode, image as pixels, picture};
use crate::event::{Event, Observer};
use crate::metrics::segmentation::ImageScore;
use crate::metrics::table::{EvalSummary, EvalSums};
use crate::metrics::text::TextScores;
use crate::{Error, Result};
use image::{DynamicImage, GrayImage, RgbImage};
use std::path::Path;
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
    /// Whether the answer names the right place; empty when the row has no position.
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
    /// Means.
    pub summary: EvalSummary,
    /// In the order of the rows.
    pub samples: Vec<SampleScore>,
    tiles: Vec<picture::Tile>,
}

/// Runs the model on `rows` (indices into the manifest).
///
/// # Errors
/// [`Error::Data`] naming a row that cannot be read; [`Error::Interrupted`].
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
    observer.on(&Event::Started { phase: "evaluate".into(), total: rows.len() as u64, unit: "images" });
    for (done, &index) in rows.iter().enumerate() {
        if interrupt.load(Ordering::SeqCst) {
            return Err(Error::Interrupted);
        }
        let row = &manifest.rows[index];
        let picture = decode::picture(&row.image_path)?;
        let truth = pixels::foreground(&decode::mask(&row.mask_path)?);
        let request = Request { picture: &picture, question: &row.question, max_new_tokens };
        let prediction = predict(assembly, &request, |_| ())?;
        let group = sums.group(&row.modality);
        let flags: Vec<bool> = truth.iter().map(|v| *v > 127).collect();
        let size = (truth.width() as usize, truth.height() as usize);
        let score = group.add_mask(&prediction.mask, &flags, size)?;
        let (text, right) = group.add_answer(&prediction.answer, &row.answer, row.position.as_deref());
        samples.push(sample_score(assembly, row, &prediction, &score, (text, right)));
        kept.offer(score.dice, || tile(row, &picture, &prediction, &truth, score.dice))?;
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
    /// Writes `summary.json`, `samples.csv` and `overlays.png` (the worst and best samples) into `folder`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(Error::io(folder, "create"))?;
        let path = folder.join("summary.json");
        let json = serde_json::to_vec_pretty(&self.summary).expect("plain numbers serialise");
        std::fs::write(&path, json).map_err(Error::io(&path, "write"))?;
        let path = folder.join("samples.csv");
        let refused = |e: csv::Error| Error::Io { path: path.clone(), action: "write", source: e.into() };
        let mut writer = csv::Writer::from_path(&path).map_err(refused)?;
        for sample in &self.samples {
            writer.serialize(sample).map_err(refused)?;
        }
        writer.flush().map_err(Error::io(&path, "write"))?;
        let path = folder.join("overlays.png");
        let sheet = picture::sheet(&self.tiles, COLUMNS, "worst and best by Dice");
        picture::save(&sheet.into(), &path)
    }
}

const COLUMNS: usize = 4;
const KEPT: usize = 8;

/// The worst and the best samples seen so far.
#[derive(Debug, Default)]
struct Extremes {
    worst: Vec<(f64, picture::Tile)>,
    best: Vec<(f64, picture::Tile)>,
}

impl Extremes {
    fn offer(&mut self, dice: f64, tile: impl Fn() -> Result<picture::Tile>) -> Result<()> {
        let lowest = self.worst.len() < KEPT || self.worst.last().is_some_and(|(d, _)| dice < *d);
        let highest = self.best.len() < KEPT || self.best.last().is_some_and(|(d, _)| dice > *d);
        if lowest {
            self.worst.push((dice, tile()?));
            self.worst.sort_by(|a, b| a.0.total_cmp(&b.0));
            self.worst.truncate(KEPT);
        }
        if highest {
            self.best.push((dice, tile()?));
            self.best.sort_by(|a, b| b.0.total_cmp(&a.0));
            self.best.truncate(KEPT);
        }
        Ok(())
    }

    fn into_tiles(self) -> Vec<picture::Tile> {
        self.worst.into_iter().chain(self.best).map(|(_, tile)| tile).collect()
    }
}

fn tile(
    row: &Row,
    image: &DynamicImage,
    prediction: &Prediction,
    truth: &GrayImage,
    dice: f64,
) -> Result<picture::Tile> {
    let caption = format!("Dice {dice:.3}  {}\n{}\n{}", row.modality, row.question, prediction.answer);
    Ok(picture::Tile { image: overlay(image, prediction, Some(truth))?, caption })
}

/// The picture with the predicted mask, and the truth where given.
///
/// # Errors
/// [`Error::Shape`] when sizes differ.
pub fn overlay(image: &DynamicImage, prediction: &Prediction, truth: Option<&GrayImage>) -> Result<RgbImage> {
    let (width, height) = prediction.size;
    let mask = picture::probability_picture(&prediction.mask, width, height)?;
    picture::overlay(&image.to_rgb8(), &mask, truth)
}
