//! Results of an evaluation: sums, summary (for `--json`) and plain-text table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::estimates::{self, Estimate, Estimates, QuestionScores, estimates, macro_estimates};
use crate::order::mean;
use crate::reliability::{Reliability, ReliabilityCurve};
use crate::segmentation::{ImageScore, SegmentationMeans, SegmentationSums};
use crate::text::{BleuCounts, TextScores};
use crate::text_table::aligned;
use crate::threshold_average::{ThresholdScores, ThresholdSums};
use prsmed_base::error::Result;
use prsmed_base::location::{Position, first_location};
use prsmed_base::units::fixed;

/// True if an answer names the location of a label (`upper left`); an answer without a location is wrong. `None` if the
/// label has no location, so that the answer cannot be scored.
fn is_right(answer: &str, label: &str) -> Option<bool> {
    first_location(label).map(|expected| first_location(answer) == Some(expected))
}

/// How often something is true.
#[derive(Debug, Clone, Copy, Default)]
struct Share {
    yes: u64,
    all: u64,
}

impl Share {
    fn add(&mut self, is_true: Option<bool>) {
        self.all += u64::from(is_true.is_some());
        self.yes += u64::from(is_true == Some(true));
    }

    fn merge(&mut self, other: Self) {
        self.all += other.all;
        self.yes += other.yes;
    }

    fn value(self) -> Option<f64> {
        (self.all > 0).then(|| self.yes as f64 / self.all as f64)
    }
}

/// Sums over the samples of one modality.
#[derive(Debug, Clone, Default)]
pub struct GroupSums {
    segmentation: SegmentationSums,
    thresholds: ThresholdSums,
    positions_right: Share,
    /// Number of questions by the location of their label.
    positions: BTreeMap<Position, u64>,
    mask_positions: Share,
    agreements: Share,
    contradictions: u64,
    text: TextScores,
    bleu: BleuCounts,
    answers: u64,
    images: BTreeSet<PathBuf>,
}

impl GroupSums {
    /// Counts the image of a question. Several questions about one image count it once.
    pub fn add_image(&mut self, path: &Path) {
        self.images.insert(path.to_owned());
    }

    /// Adds one mask of a target that is in the image: probabilities at the truth's own `size` (width, height), for every score.
    ///
    /// # Errors
    /// [`Error::Shape`](prsmed_base::Error::Shape) if the sizes do not match.
    pub fn add_mask(&mut self, probabilities: &[f32], truth: &[bool], size: (usize, usize)) -> Result<ImageScore> {
        let score = ImageScore::of(probabilities, truth)?;
        self.thresholds.add(probabilities, truth, size.0)?;
        self.segmentation.add(&score);
        Ok(score)
    }

    /// Adds one answer. Returns its text scores, and whether it names the location of `label`, if there is one.
    pub fn add_answer(&mut self, answer: &str, reference: &str, label: Option<&str>) -> (TextScores, Option<bool>) {
        let scores = TextScores::of(answer, reference);
        self.text.add(&scores);
        self.bleu += BleuCounts::of(answer, reference);
        self.answers += 1;
        let right = label.and_then(|label| is_right(answer, label));
        self.positions_right.add(right);
        if let Some(position) = label.and_then(first_location) {
            *self.positions.entry(position).or_default() += 1;
        }
        (scores, right)
    }

    /// Adds whether a mask has the location of the label, and whether it has that of the answer; `None` where that is not
    /// known. `contradicts` says whether the answer and the mask differ in anything, also if one of them names no location.
    pub fn add_mask_position(&mut self, is_right: Option<bool>, agrees: Option<bool>, contradicts: bool) {
        self.mask_positions.add(is_right);
        self.agreements.add(agrees);
        self.contradictions += u64::from(contradicts);
    }

    fn merge(&mut self, other: &Self) {
        self.segmentation.merge(&other.segmentation);
        self.thresholds.merge(&other.thresholds);
        for (position, count) in &other.positions {
            *self.positions.entry(*position).or_default() += count;
        }
        self.positions_right.merge(other.positions_right);
        self.mask_positions.merge(other.mask_positions);
        self.agreements.merge(other.agreements);
        self.contradictions += other.contradictions;
        self.text.add(&other.text);
        self.bleu += other.bleu;
        self.answers += other.answers;
        self.images.extend(other.images.iter().cloned());
    }

    fn row(&self, name: &str, items: &[&QuestionScores]) -> EvalRow {
        let all = self.positions_right.all;
        // the first of equal ones in reading order
        let most_common = self.positions.iter().rev().max_by_key(|(_, count)| **count);
        EvalRow {
            name: name.to_owned(),
            questions: self.answers,
            patients: items.iter().map(|item| &item.group).collect::<BTreeSet<_>>().len() as u64,
            estimates: estimates(items),
            images: self.images.len() as u64,
            segmentation: self.segmentation.means(),
            thresholds: self.thresholds.scores(),
            position_accuracy: self.positions_right.value(),
            mask_position_accuracy: self.mask_positions.value(),
            position_agreement: self.agreements.value(),
            contradictions: self.contradictions,
            position_base_rate: most_common.and_then(|(_, yes)| Share { yes: *yes, all }.value()),
            most_common_position: most_common.map(|(position, _)| position.to_string()),
            text: (self.answers > 0).then(|| self.text.divided(self.answers as f64)),
            corpus_bleu: (self.answers > 0).then(|| self.bleu.bleu()),
        }
    }
}

/// Sums of a whole evaluation, by modality.
#[derive(Debug, Clone, Default)]
pub struct EvalSums {
    groups: BTreeMap<String, GroupSums>,
    items: Vec<QuestionScores>,
    counts: PresenceCounts,
    reliability: Reliability,
}

impl EvalSums {
    /// The sums of one modality, initially empty.
    pub fn group(&mut self, modality: &str) -> &mut GroupSums {
        self.groups.entry(modality.to_owned()).or_default()
    }

    /// Adds the scores of one question. A mask is withheld if its presence score is below the threshold of the run.
    pub fn add_item(&mut self, item: QuestionScores, is_withheld: bool) {
        self.counts.add(item.is_present, is_withheld);
        self.items.push(item);
    }

    /// Adds the pixels of one mask, as the model computed them, to the calibration.
    pub fn add_pixels(&mut self, probabilities: &[f32], truth: &[bool]) {
        self.reliability.add(probabilities, truth);
    }

    /// The scores of the questions so far.
    pub fn items(&self) -> &[QuestionScores] {
        &self.items
    }

    /// Summary of the sums so far.
    pub fn summary(&self, protocol: Protocol) -> EvalSummary {
        let mut all = GroupSums::default();
        self.groups.values().for_each(|group| all.merge(group));
        let items: Vec<&QuestionScores> = self.items.iter().collect();
        let of_class = |name: &str| items.iter().copied().filter(|item| item.class == name).collect::<Vec<_>>();
        let row = |(name, group): (&String, &GroupSums)| group.row(name, &of_class(name));
        let modalities: Vec<EvalRow> = self.groups.iter().map(row).collect();
        let mut mean = macro_mean(&modalities);
        mean.patients = items.iter().map(|item| &item.group).collect::<BTreeSet<_>>().len() as u64;
        mean.estimates = macro_estimates(&items);
        EvalSummary {
            macro_mean: mean,
            all_images: all.row("all questions", &items),
            pooled: Pooled { dice: all.segmentation.pooled.dice(), iou: all.segmentation.pooled.iou() },
            modalities,
            presence: self.counts,
            calibration: self.reliability.curve(1.0).map(|raw| PixelCalibration {
                raw,
                temperature: protocol.temperature,
                scaled: protocol.temperature.and_then(|temperature| self.reliability.curve(temperature)),
            }),
            protocol,
        }
    }
}

/// How questions are scored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct Protocol {
    /// Unit of distances: `mm` if every mask has a pixel spacing, else `px`.
    pub length: String,
    /// Tolerance of the surface Dice in that unit.
    pub tolerance: f64,
    /// Masks with a lower presence score are withheld (empty); `None` if the run has no threshold.
    pub presence_threshold: Option<f64>,
    /// Temperature of the run; `None` if it has none.
    pub temperature: Option<f64>,
    /// Classes of the data that the run does not know.
    pub unknown_classes: Vec<String>,
    /// Questions about images and patients that the run was trained on.
    #[serde(flatten)]
    pub trained_on: TrainedOn,
}

/// How many of the scored questions are about what the run, or a run that it started from, was trained on.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "StoredTrainedOn", into = "StoredTrainedOn")]
pub struct TrainedOn {
    /// Questions about images of the training; at least so many if `unknown` has a reason.
    pub images: u64,
    /// Further questions about other images of patients of the training; `None` without patients.
    pub patients: Option<u64>,
    /// Why the images of the training are not known.
    pub unknown: Option<String>,
}

/// [`TrainedOn`] in `summary.json`: nothing is a number that is not known.
#[derive(Serialize, Deserialize)]
struct StoredTrainedOn {
    #[serde(default)]
    trained_on: Option<u64>,
    #[serde(default)]
    trained_on_patients: Option<u64>,
    #[serde(default)]
    trained_on_unknown: Option<String>,
}

impl From<TrainedOn> for StoredTrainedOn {
    fn from(TrainedOn { images, patients, unknown }: TrainedOn) -> Self {
        let known = |number: u64| unknown.is_none().then_some(number);
        let (trained_on, trained_on_patients) = (known(images), patients.and_then(known));
        let trained_on_unknown = unknown.map(|reason| match images {
            0 => reason,
            least => format!("{reason}; at least {least} of these questions are about its training images"),
        });
        Self { trained_on, trained_on_patients, trained_on_unknown }
    }
}

impl From<StoredTrainedOn> for TrainedOn {
    fn from(stored: StoredTrainedOn) -> Self {
        let StoredTrainedOn { trained_on, trained_on_patients: patients, trained_on_unknown: unknown } = stored;
        Self { images: trained_on.unwrap_or_default(), patients, unknown }
    }
}

impl TrainedOn {
    /// What to say about the scores.
    pub fn notes(&self) -> Vec<String> {
        let Self { images, patients, unknown } = self;
        let at_least = if unknown.is_some() { "at least " } else { "" };
        let images = (*images > 0).then(|| {
            format!("the run was trained on the images of {at_least}{images} of these questions: scores of new images are lower")
        });
        let patients = patients.filter(|patients| *patients > 0).map(|patients| {
            format!(
                "{at_least}{patients} more questions are about other images of patients that the run was trained on"
            )
        });
        let unknown =
            unknown.as_ref().map(|reason| format!("it is unknown whether these images are new to the run: {reason}"));
        images.into_iter().chain(patients).chain(unknown).collect()
    }
}

/// Numbers of questions by what is known about their target.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PresenceCounts {
    /// Questions whose target is in the image.
    pub present: u64,
    /// Questions whose target is absent.
    pub absent: u64,
    /// Questions without a known mask.
    pub unknown: u64,
    /// Masks of present targets that the presence threshold withheld.
    pub withheld_present: u64,
    /// Masks of absent targets that the presence threshold withheld.
    pub withheld_absent: u64,
}

impl PresenceCounts {
    fn add(&mut self, is_present: Option<bool>, is_withheld: bool) {
        let (questions, withheld) = match is_present {
            Some(true) => (&mut self.present, &mut self.withheld_present),
            Some(false) => (&mut self.absent, &mut self.withheld_absent),
            None => {
                self.unknown += 1;
                return;
            }
        };
        *questions += 1;
        *withheld += u64::from(is_withheld);
    }
}

/// Calibration of the pixel probabilities.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PixelCalibration {
    /// Of the probabilities as the model computes them.
    pub raw: ReliabilityCurve,
    /// Temperature of the run; `None` if it has none.
    pub temperature: Option<f64>,
    /// Of the probabilities at that temperature.
    pub scaled: Option<ReliabilityCurve>,
}

/// A row of the table: a modality, or a mean.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalRow {
    /// Modality, `macro mean` or `all questions`.
    pub name: String,
    /// Number of questions.
    #[serde(default)]
    pub questions: u64,
    /// Number of different images.
    pub images: u64,
    /// Number of different patients; an image without a patient counts as one.
    #[serde(default)]
    pub patients: u64,
    /// Means of all scores with 95 % intervals over patients, by name. See [`estimates::SCORES`].
    #[serde(default)]
    pub estimates: Estimates,
    /// Scores at 0.5 and soft Dice of the questions whose target is in the image; `None` without masks.
    pub segmentation: Option<SegmentationMeans>,
    /// The reference's threshold-averaged scores; `None` without masks.
    pub thresholds: Option<ThresholdScores>,
    /// Fraction (0..=1) of answers that name the right location, over all questions that have one; an answer without a
    /// location is wrong. `None` if no question has one.
    pub position_accuracy: Option<f64>,
    /// Fraction of masks with the right location, over the questions with a target that have one; an empty mask is wrong.
    #[serde(default)]
    pub mask_position_accuracy: Option<f64>,
    /// Fraction of answers that name the location of their own mask, over those where both have one and the target is not
    /// absent.
    #[serde(default)]
    pub position_agreement: Option<f64>,
    /// Answers that differ from their own mask in location, size or number of regions, or name a location without a mask.
    #[serde(default)]
    pub contradictions: u64,
    /// What `position_accuracy` would be if every answer named the most common location. In the macro mean, the mean over
    /// modalities.
    #[serde(default)]
    pub position_base_rate: Option<f64>,
    /// The most common location; none in the macro mean.
    #[serde(default)]
    pub most_common_position: Option<String>,
    /// Mean text scores; `None` without answers. Its BLEU is the mean of the BLEU of each answer.
    pub text: Option<TextScores>,
    /// BLEU of all answers as one corpus: n-gram counts are added up before they are divided, as `sacrebleu` and
    /// `evaluate` do. `None` without answers. In the macro mean, the mean over modalities.
    #[serde(default)]
    pub corpus_bleu: Option<f64>,
}

/// Dice and IoU at 0.5 over all pixels of all images together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Pooled {
    /// Pooled Dice.
    pub dice: f64,
    /// Pooled IoU.
    pub iou: f64,
}

/// The result of an evaluation. Its [`Display`](fmt::Display) is the table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalSummary {
    /// One row per modality, by name.
    pub modalities: Vec<EvalRow>,
    /// Mean of the modality rows, each with the same weight. Each column's mean is over the rows that have a value.
    pub macro_mean: EvalRow,
    /// Mean over all samples, each with the same weight.
    pub all_images: EvalRow,
    /// Scores over all pixels.
    pub pooled: Pooled,
    /// Numbers of questions by what is known about their target, and of withheld masks.
    #[serde(default)]
    pub presence: PresenceCounts,
    /// Calibration of the pixel probabilities; `None` without masks.
    #[serde(default)]
    pub calibration: Option<PixelCalibration>,
    /// How the questions were scored.
    #[serde(default)]
    pub protocol: Protocol,
}

fn macro_mean(rows: &[EvalRow]) -> EvalRow {
    let thresholds: Vec<ThresholdScores> = rows.iter().filter_map(|row| row.thresholds).collect();
    let text: Vec<TextScores> = rows.iter().filter_map(|row| row.text).collect();
    let mut text_sum = TextScores::default();
    for scores in &text {
        text_sum.add(scores);
    }
    EvalRow {
        name: "macro mean".into(),
        questions: rows.iter().map(|row| row.questions).sum(),
        images: rows.iter().map(|row| row.images).sum(),
        patients: 0,
        estimates: Estimates::new(),
        segmentation: SegmentationMeans::macro_mean(rows.iter().filter_map(|row| row.segmentation)),
        thresholds: ThresholdScores::macro_mean(&thresholds),
        position_accuracy: mean(rows.iter().filter_map(|row| row.position_accuracy)),
        mask_position_accuracy: mean(rows.iter().filter_map(|row| row.mask_position_accuracy)),
        position_agreement: mean(rows.iter().filter_map(|row| row.position_agreement)),
        contradictions: rows.iter().map(|row| row.contradictions).sum(),
        position_base_rate: mean(rows.iter().filter_map(|row| row.position_base_rate)),
        most_common_position: None,
        text: (!text.is_empty()).then(|| text_sum.divided(text.len() as f64)),
        corpus_bleu: mean(rows.iter().filter_map(|row| row.corpus_bleu)),
    }
}

const HEADER: [&str; 10] =
    ["modality", "questions", "images", "Dice", "IoU", "meanDic", "meanIoU", "position", "base", "BLEU"];

impl EvalRow {
    fn cells(&self) -> Vec<String> {
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| fixed(v, 4));
        let (seg, thr, text) = (self.segmentation, self.thresholds, self.text);
        vec![
            self.name.clone(),
            self.questions.to_string(),
            self.images.to_string(),
            number(seg.map(|s| s.dice)),
            number(seg.map(|s| s.iou)),
            number(thr.map(|t| t.mean_dic)),
            number(thr.map(|t| t.mean_iou)),
            number(self.position_accuracy),
            number(self.position_base_rate),
            number(text.map(|t| t.bleu)),
        ]
    }
}

impl fmt::Display for EvalSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(headline) = self.headline() {
            writeln!(f, "{headline}\n")?;
        }
        let mut rows: Vec<Vec<String>> = self.modalities.iter().map(EvalRow::cells).collect();
        let rule = rows.len();
        rows.extend([self.macro_mean.cells(), self.all_images.cells()]);
        f.write_str(&aligned(&HEADER, &rows, Some(rule)))?;
        writeln!(
            f,
            "Dice and IoU at 0.5, 1 if mask and truth are both empty; over all pixels {:.4} and {:.4}",
            self.pooled.dice, self.pooled.iou
        )?;
        writeln!(f, "meanDic, meanIoU: averages over 256 thresholds, as in the original evaluation")?;
        if self.all_images.position_accuracy.is_some() {
            writeln!(f, "position: answers with the right location; base: always naming the most common location")?;
        }
        let corpus_bleu = self.all_images.corpus_bleu.map(|bleu| format!("; of all answers together {bleu:.4}"));
        let corpus_bleu = corpus_bleu.unwrap_or_default();
        writeln!(f, "BLEU: mean of the BLEU-4 of each answer, without smoothing{corpus_bleu}")?;
        if self.all_images.estimates.is_empty() {
            return Ok(());
        }
        writeln!(f, "\nall questions")?;
        f.write_str(&estimates::table(&self.all_images.estimates, &self.protocol.length))?;
        writeln!(f, "METEOR*: exact and stem matches, no synonyms")?;
        // the sentence about positions is long
        self.notes()
            .into_iter()
            .try_for_each(|note| writeln!(f, "{}", note.replace("; always naming", ";\nalways naming")))
    }
}

impl EvalSummary {
    /// The three scores to read first, with what they are over; `None` without any of them.
    pub fn headline(&self) -> Option<String> {
        let all = &self.all_images;
        let score = |key: &str| {
            let Estimate { mean, interval, .. } = all.estimates.get(key)?;
            let range = interval.map_or_else(String::new, |range| format!(" ({:.2} to {:.2})", range.low, range.high));
            Some(format!("{} {mean:.2}{range}", estimates::title(key, &self.protocol.length)))
        };
        let scores: Vec<String> = ["dice", "hd95", "position_right"].into_iter().filter_map(score).collect();
        let EvalRow { questions, images, patients, .. } = all;
        // an image without a patient counts as one
        let (known, over) =
            if patients < images { (format!(", {patients} patients"), "patients") } else { (String::new(), "images") };
        let base = all.position_base_rate.map_or_else(String::new, |base| format!("; position base rate {base:.2}"));
        let count =
            format!("{questions} questions, {images} images{known}; in brackets 95 % intervals over {over}{base}");
        (!scores.is_empty()).then(|| format!("{}\n{count}", scores.join(", ")))
    }

    /// How many masks the presence threshold withheld; `None` if the run has no threshold.
    pub fn withheld(&self) -> Option<String> {
        let PresenceCounts { withheld_present, withheld_absent, .. } = self.presence;
        self.protocol.presence_threshold.map(|threshold| {
            format!(
                "presence threshold {threshold:.3} of the run: {withheld_present} masks of present and \
                 {withheld_absent} of absent targets were withheld and scored as empty"
            )
        })
    }

    /// How words and masks name locations; `None` if no question has one.
    pub fn positions(&self) -> Option<String> {
        let all = &self.all_images;
        let (words, base, common) =
            (all.position_accuracy?, all.position_base_rate?, all.most_common_position.as_deref()?);
        let worth = match all.estimates.get("position_right").and_then(|estimate| estimate.interval) {
            _ if words <= base => ", so the words are no better",
            Some(interval) if interval.low <= base => ", so the words may be no better",
            _ => "",
        };
        Some(format!(
            "positions: right in {words:.2} of the answers{}{}; always naming `{common}` would be right in {base:.2}{worth}",
            all.mask_position_accuracy.map_or_else(String::new, |value| format!(" and {value:.2} of the masks")),
            all.position_agreement.map_or_else(String::new, |value| {
                let both = "where both have a location; answers that contradict their mask";
                format!("; words and mask agree in {value:.2} {both}: {}", all.contradictions)
            }),
        ))
    }

    /// Whether the words should not be believed: they often differ from the mask, or are not better than one constant location.
    pub fn doubts_words(&self) -> bool {
        /// Agreement below which the report warns.
        const LOW: f64 = 0.9;
        let all = &self.all_images;
        let is_base = all.position_accuracy.zip(all.position_base_rate).is_some_and(|(words, base)| words <= base);
        is_base || all.position_agreement.is_some_and(|agreement| agreement < LOW)
    }

    /// Sentences that explain the estimates: what they are over, withheld masks, calibration.
    pub fn notes(&self) -> Vec<String> {
        let Protocol { length, tolerance, unknown_classes, trained_on, .. } = &self.protocol;
        let PresenceCounts { present, absent, unknown, .. } = self.presence;
        let mut notes = vec![
            format!(
                "mask scores: over {present} questions whose target is in the image; {absent} targets are absent, \
                 {unknown} unknown"
            ),
            format!("surface Dice within {tolerance} {length}; distances only where both masks have foreground"),
        ];
        notes.extend(self.withheld());
        notes.extend(self.positions());
        notes.extend(self.calibration.as_ref().map(|calibration| {
            let scaled =
                calibration.scaled.as_ref().zip(calibration.temperature).map_or_else(String::new, |(curve, t)| {
                    format!(", {:.4} at the run's temperature {t:.3}", curve.ece)
                });
            format!("expected calibration error of pixels: {:.4}{scaled}", calibration.raw.ece)
        }));
        notes.splice(0..0, trained_on.notes());
        if !unknown_classes.is_empty() {
            notes.push(format!("classes that the run does not know: {}", unknown_classes.join(", ")));
        }
        notes
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
