//! Evaluation of a model on rows of a data root: scores of masks, answers and locations, and a sheet of overlays.
//!
//! A mask is scored as `predict` paints it: a mask whose presence score is below the threshold of the run is empty.
//! Masks are scored where the target is in the image. Absent targets count for the share of false masks, and rows
//! without a known mask for their answers only.

mod extremes;
pub mod files;
mod sample;

use self::extremes::{Extremes, Shown};
use self::sample::Scored;
use super::{Ask, Encoded, Image, Model, Painted, Prediction};
use crate::data::agreement::Positions;
use crate::data::geometry::moved_to;
use crate::data::manifest::{Manifest, Presence, Row};
use crate::data::position::Position;
use crate::data::sample::{at_row, decoded};
use crate::data::{image as pixels, sheet};
use crate::event::{Event, Observer};
use crate::location::first_location;
use crate::metrics::estimates::QuestionScores;
use crate::metrics::grid::{Size, Spacing};
use crate::metrics::mask_scores::MaskScores;
use crate::metrics::segmentation::ImageScore;
use crate::metrics::table::{EvalSummary, EvalSums, Protocol, TrainedOn};
use crate::segment::calibration::Confidence;
use crate::tensor::{Kind, Tensor};
use crate::trainer::Ranks;
use crate::{Error, Result};
use image::{DynamicImage, GrayImage};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

pub use extremes::{Case, Cases};
pub use sample::SampleScore;

/// Options of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EvaluationOptions {
    /// Longest answer in tokens.
    pub max_new_tokens: usize,
    /// Tolerance of the surface Dice in mm; in pixels if a row has no pixel spacing.
    pub tolerance: f64,
    /// Also measure how often words follow masks that are moved: up to nine more answers for each row.
    pub moves_masks: bool,
}

/// An evaluation: the summary and every sample.
#[derive(Debug)]
pub struct Evaluation {
    /// Mean scores.
    pub summary: EvalSummary,
    /// Scores of each sample, in the order of the rows.
    pub samples: Vec<SampleScore>,
    /// The same scores as [`EvalSums`] takes them, for the comparison of runs.
    pub items: Vec<QuestionScores>,
    /// Images for a report.
    pub cases: Cases,
    tiles: Vec<sheet::Tile>,
}

/// Runs the model on `rows` (indices into the manifest). Classes that the run does not know are scored, but not whether
/// the class is right; a warning names them.
///
/// Several processes answer the questions in turn. The first one scores all answers, so that the result does not depend on
/// the number of processes, and gets the evaluation.
///
/// # Errors
/// [`Error::Data`] naming a row that cannot be read, or whose mask and image differ in width or height;
/// [`Error::NotFinite`] naming the image for which the model computes NaN; [`Error::Interrupted`]; [`Error::Peer`] if
/// another process failed.
pub fn evaluate(
    ranks: Ranks,
    model: &Model,
    manifest: &Manifest,
    rows: &[usize],
    options: EvaluationOptions,
    (observer, interrupt): (&dyn Observer, &AtomicBool),
) -> Result<Option<Evaluation>> {
    if options.moves_masks && !model.reads_masks() {
        let reason = "the words of this run do not follow a mask";
        return Err(Error::argument(
            "move_masks",
            reason,
            "leave it out, or train with `model.answer_reads_mask=true`",
        ));
    }
    let rows: Vec<&Row> = rows.iter().map(|index| &manifest.rows[*index]).collect();
    let protocol = protocol(model, &rows, options, observer);
    let mut run = Running {
        model,
        options,
        is_in_mm: protocol.length == "mm",
        sums: EvalSums::default(),
        samples: Vec::new(),
        kept: Extremes::default(),
    };
    observer.on(&Event::Started { phase: "evaluate".into(), total: rows.len() as u64, unit: "questions" });
    let mut scored = Ok(());
    let mut done = 0;
    for asked in rows.chunks(ranks.size()) {
        let own = scored.and_then(|()| {
            if interrupt.load(Ordering::SeqCst) { Err(Error::Interrupted) } else { Ok(asked.get(ranks.rank())) }
        });
        let mut images = None;
        let own = own.and_then(|row| row.map(|row| run.predicted(row, &mut images)).transpose());
        let predictions = gathered(own, ranks)?;
        // the first question is that of the first process, which has its images already
        scored =
            asked.iter().zip(predictions).try_for_each(|(row, prediction)| run.score(row, &prediction, images.take()));
        done += asked.len() as u64;
        observer.on(&Event::Advanced { done });
    }
    ranks.agree(scored)?;
    observer.on(&Event::Finished);
    if !ranks.is_main() {
        return Ok(None);
    }
    let (tiles, cases) = run.kept.into_parts();
    let items = run.sums.items().to_vec();
    Ok(Some(Evaluation { summary: run.sums.summary(protocol), samples: run.samples, items, cases, tiles }))
}

/// A prediction, and how often words follow a moved mask.
type Answered = (Prediction, Option<f64>);

/// The predictions of all processes on the first one, in their order; nothing on the others.
fn gathered(own: Result<Option<Answered>>, ranks: Ranks) -> Result<Vec<Answered>> {
    if ranks.size() == 1 {
        return Ok(own?.into_iter().collect());
    }
    // the masks, which are large, are sent as they are
    let mut masks = Vec::new();
    let own = own.map(|prediction| {
        prediction.map(|(mut prediction, follow)| {
            masks.extend(prediction.targets.iter_mut().map(|target| std::mem::take(&mut target.probabilities)));
            (prediction, follow)
        })
    });
    let all = ranks.gather_if_all(own)?;
    let mut predictions = Vec::new();
    for (from, prediction) in all.into_iter().enumerate() {
        let Some((mut prediction, follow)) = prediction else { continue };
        let shape = [i64::from(prediction.size.0) * i64::from(prediction.size.1)];
        for (number, target) in prediction.targets.iter_mut().enumerate() {
            let own = (from == ranks.rank()).then(|| Tensor::from_slice(&masks[number]));
            if let Some(collected) = ranks.collect(own, (&shape, Kind::Float), from)? {
                target.probabilities = Vec::try_from(&collected).expect("a flat tensor of fp32");
            }
        }
        if ranks.is_main() {
            predictions.push((prediction, follow));
        }
    }
    Ok(predictions)
}

/// Unit, thresholds and unknown classes; warns about what the user may not expect.
fn protocol(model: &Model, rows: &[&Row], options: EvaluationOptions, observer: &dyn Observer) -> Protocol {
    let present = || rows.iter().filter(|row| row.target().presence == Presence::Present);
    let without = present().filter(|row| row.spacing_mm.is_none()).count();
    let is_in_mm = without == 0 && present().next().is_some();
    if without > 0 && without < present().count() {
        let text = format!(
            "{without} of {} masks have no pixel spacing, so all distances and areas are in pixels; fill in the columns \
             `spacing_x_mm` and `spacing_y_mm` to get mm",
            present().count()
        );
        observer.on(&Event::Warning(text));
    }
    let description = model.description();
    let classes: BTreeSet<&str> = rows.iter().map(|row| row.modality.as_str()).collect();
    let is_unknown = |class: &&str| !description.modalities.iter().any(|known| known == class);
    let unknown_classes: Vec<String> = classes.into_iter().filter(is_unknown).map(str::to_owned).collect();
    if !unknown_classes.is_empty() {
        let text = format!(
            "the run does not know the classes `{}`: their masks and answers are scored, but not the predicted class",
            unknown_classes.join("`, `")
        );
        observer.on(&Event::Warning(text));
    }
    let calibration = description.calibration.as_ref();
    Protocol {
        length: if is_in_mm { "mm" } else { "px" }.to_owned(),
        tolerance: options.tolerance,
        presence_threshold: calibration.and_then(|calibration| calibration.presence_threshold),
        temperature: calibration.map(|calibration| calibration.temperature),
        unknown_classes,
        trained_on: TrainedOn::default(),
    }
}

/// The text with the location of a row; a row without a label has that which its own answer names.
fn label(row: &Row) -> Option<&str> {
    let named = |text: &&str| first_location(text).is_some();
    row.position.as_deref().filter(named).or_else(|| Some(row.answer.as_str()).filter(named))
}

/// An image and its mask.
type Images = (DynamicImage, GrayImage);

/// An evaluation that runs.
struct Running<'a> {
    model: &'a Model,
    options: EvaluationOptions,
    is_in_mm: bool,
    sums: EvalSums,
    samples: Vec<SampleScore>,
    kept: Extremes,
}

impl Running<'_> {
    /// The answer to the question of `row`, whose image and mask are kept.
    fn predicted(&self, row: &Row, images: &mut Option<Images>) -> Result<Answered> {
        let (image, truth) = images.insert(self.decoded(row)?);
        let ask = Ask { max_new_tokens: self.options.max_new_tokens, ..Ask::new(&row.question) };
        let answered = || {
            let encoded = self.model.encode(&Image::Pixels(image))?;
            let moves = self.options.moves_masks && row.is_present() && label(row).is_some();
            let follow = if moves { self.words_follow(&encoded, &ask, &pixels::foreground(truth))? } else { None };
            Ok((self.model.ask(&encoded, &ask)?, follow))
        };
        answered().map_err(|error: Error| error.of_image(&row.image_path))
    }

    /// How often the words name the location of a mask that is moved to each location; `None` if it fits nowhere.
    fn words_follow(&self, image: &Encoded, ask: &Ask, mask: &GrayImage) -> Result<Option<f64>> {
        let zones = self.model.description().zones;
        let moved: Vec<GrayImage> = Position::ALL.into_iter().filter_map(|at| moved_to(mask, at, zones)).collect();
        let answers = self.model.words_for(image, ask, &moved)?;
        let follows =
            |(answer, mask): (&String, &GrayImage)| Positions::of(mask, answer, zones).positions_agree == Some(true);
        let followed = answers.iter().zip(&moved).filter(|pair| follows(*pair)).count();
        Ok((!moved.is_empty()).then(|| followed as f64 / moved.len() as f64))
    }

    fn decoded(&self, row: &Row) -> Result<Images> {
        decoded(row, self.model.description().pixels.labels).map_err(|error| at_row(row, &error))
    }

    fn score(&mut self, row: &Row, (prediction, follow): &Answered, images: Option<Images>) -> Result<()> {
        let (image, mask) = images.map_or_else(|| self.decoded(row), Ok)?;
        let truth = pixels::foreground(&mask);
        let flags: Vec<bool> = truth.iter().map(|v| *v > 127).collect();
        let Painted { probabilities, confidence, .. } = prediction.target();
        if row.target().presence != Presence::Unknown {
            self.sums.add_pixels(probabilities, &flags);
        }
        let raw = ImageScore::of(probabilities, &flags).map_err(|error| error.of_image(&row.image_path))?;
        let is_withheld = !confidence.is_found && raw.counts.predicted > 0;
        let scored = row.is_present().then(|| self.mask_scores(row, prediction, &flags, &raw)).transpose()?;
        let mut sample = self.answered(row, prediction, is_withheld);
        sample.words_follow = *follow;
        if let Some(scored) = scored {
            sample.add_mask(scored);
        }
        // the report shows the worst, the best and false masks
        let number = self.samples.len();
        let shown = || -> Result<Shown> {
            let mask = prediction.levels()?;
            let score = sample.dice.map_or_else(|| "absent".to_owned(), |dice| format!("Dice {dice:.3}"));
            let tile = sheet::Tile {
                image: prediction.overlay(&image, Some(&truth))?,
                name: row.image_path.display().to_string(),
                shows: sheet::SHOWS_BOTH,
                notes: format!("{score}, {}: {} {}", row.modality, row.question, prediction.answer),
            };
            Ok((tile, Case::new(number, &image, &mask, &truth)))
        };
        match (row.target().presence, sample.dice) {
            (Presence::Present, Some(dice)) => self.kept.offer(row, dice, shown)?,
            (Presence::Absent, _) if sample.has_mask => self.kept.offer_false(sample.presence, shown)?,
            _ => {}
        }
        self.sums.add_item(sample.item(), is_withheld);
        self.samples.push(sample);
        Ok(())
    }

    /// Scores of a painted mask. `raw` is its overlap before it was withheld.
    fn mask_scores(&mut self, row: &Row, prediction: &Prediction, truth: &[bool], raw: &ImageScore) -> Result<Scored> {
        let (width, height) = (prediction.size.0 as usize, prediction.size.1 as usize);
        let named = |error: Error| error.of_image(&row.image_path);
        let group = self.sums.group(&row.modality);
        let painted = group.add_mask(&prediction.target().mask(), truth, (width, height)).map_err(named)?;
        let spacing = match row.spacing_mm.filter(|_| self.is_in_mm) {
            Some([across, down]) => Spacing::image(down, across),
            None => Spacing::PIXELS,
        };
        let predicted: Vec<bool> = prediction.target().pixels().collect();
        let size = Size::image(height, width);
        let mask = MaskScores::of(&predicted, truth, size, spacing, self.options.tolerance).map_err(named)?;
        let has_threshold = self.model.description().calibration.is_some_and(|c| c.presence_threshold.is_some());
        Ok(Scored { painted, raw_dice: has_threshold.then_some(raw.dice), mask })
    }

    fn answered(&mut self, row: &Row, prediction: &Prediction, is_withheld: bool) -> SampleScore {
        let group = self.sums.group(&row.modality);
        group.add_image(&row.image_path);
        let label = label(row);
        let (text, position_right) = group.add_answer(&prediction.answer, &row.answer, label);
        let mask_position_right = label.filter(|_| row.is_present()).map(|label| prediction.mask_is_at(label));
        let Positions { mask_position, answer_position, positions_agree, position_warning, .. } =
            prediction.positions.clone();
        // words that agree with a mask of something absent are no success
        let positions_agree = positions_agree.filter(|_| row.target().presence != Presence::Absent);
        group.add_mask_position(mask_position_right, positions_agree, position_warning.is_some());
        let modalities = &self.model.description().modalities;
        let predicted_modality = prediction.class.as_ref().map_or_else(String::new, |(name, _)| name.clone());
        let Confidence { presence, is_found, foreground, boundary } = prediction.target().confidence;
        SampleScore {
            row: format!("{}:{}", row.csv.display(), row.line),
            modality: row.modality.clone(),
            mask: row.target().mask_path.display().to_string(),
            position_right,
            bleu: text.bleu,
            rouge1: text.rouge1,
            meteor_exact_stem: text.meteor_exact_stem,
            class_right: modalities.contains(&row.modality).then(|| predicted_modality == row.modality),
            predicted_modality,
            question: row.question.clone(),
            answer: row.answer.clone(),
            generated: prediction.answer.clone(),
            image: row.image_path.display().to_string(),
            patient: row.patient.clone(),
            target: row.target().presence,
            presence,
            is_found,
            is_withheld,
            has_mask: prediction.target().num_foreground() > 0,
            foreground_confidence: foreground,
            uncertain_boundary: boundary,
            mask_position,
            answer_position,
            positions_agree,
            mask_position_right,
            position_warning,
            ..SampleScore::default()
        }
    }
}
