//! Results of an evaluation: sums, summary (for `--json`) and plain-text table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::location::first_location;
use crate::metrics::segmentation::{ImageScore, SegmentationMeans, SegmentationSums};
use crate::metrics::text::{BleuCounts, TextScores};
use crate::metrics::threshold_average::{ThresholdScores, ThresholdSums};

/// True if an answer names the location of a label (`upper left`); an answer without a location is wrong. `None` if the
/// label has no location, so that the answer cannot be scored.
fn is_right(answer: &str, label: &str) -> Option<bool> {
    first_location(label).map(|expected| first_location(answer) == Some(expected))
}

/// Sums over the samples of one modality.
#[derive(Debug, Clone, Default)]
pub struct GroupSums {
    segmentation: SegmentationSums,
    thresholds: ThresholdSums,
    positions_right: u64,
    positions: u64,
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

    /// Adds one mask: probabilities at the truth's own `size` (width, height), for every score.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if the sizes do not match.
    pub fn add_mask(&mut self, probabilities: &[f32], truth: &[bool], size: (usize, usize)) -> Result<ImageScore> {
        let score = ImageScore::of(probabilities, truth)?;
        self.thresholds.add(probabilities, size, truth, size)?;
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
        if let Some(right) = right {
            self.positions += 1;
            self.positions_right += u64::from(right);
        }
        (scores, right)
    }

    fn merge(&mut self, other: &Self) {
        self.segmentation.merge(&other.segmentation);
        self.thresholds.merge(&other.thresholds);
        self.positions += other.positions;
        self.positions_right += other.positions_right;
        self.text.add(&other.text);
        self.bleu += other.bleu;
        self.answers += other.answers;
        self.images.extend(other.images.iter().cloned());
    }

    fn row(&self, name: &str) -> EvalRow {
        let answers = self.answers as f64;
        EvalRow {
            name: name.to_owned(),
            questions: self.segmentation.images,
            images: self.images.len() as u64,
            segmentation: self.segmentation.means(),
            thresholds: self.thresholds.scores(),
            position_accuracy: (self.positions > 0).then(|| self.positions_right as f64 / self.positions as f64),
            text: (self.answers > 0).then(|| TextScores {
                bleu: self.text.bleu / answers,
                rouge1: self.text.rouge1 / answers,
                meteor_exact_stem: self.text.meteor_exact_stem / answers,
            }),
            corpus_bleu: (self.answers > 0).then(|| self.bleu.bleu()),
        }
    }
}

/// Sums of a whole evaluation, by modality.
#[derive(Debug, Clone, Default)]
pub struct EvalSums {
    groups: BTreeMap<String, GroupSums>,
}

impl EvalSums {
    /// The sums of one modality, initially empty.
    pub fn group(&mut self, modality: &str) -> &mut GroupSums {
        self.groups.entry(modality.to_owned()).or_default()
    }

    /// Summary of the sums so far.
    pub fn summary(&self) -> EvalSummary {
        let mut all = GroupSums::default();
        self.groups.values().for_each(|group| all.merge(group));
        let modalities: Vec<EvalRow> = self.groups.iter().map(|(name, group)| group.row(name)).collect();
        EvalSummary {
            macro_mean: macro_mean(&modalities),
            all_images: all.row("all questions"),
            pooled: Pooled { dice: all.segmentation.pooled.dice(), iou: all.segmentation.pooled.iou() },
            modalities,
        }
    }
}

/// A row of the table: a modality, or a mean.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalRow {
    /// Modality, `macro mean` or `all questions`.
    pub name: String,
    /// Number of questions, each with its mask.
    #[serde(default)]
    pub questions: u64,
    /// Number of different images.
    pub images: u64,
    /// Scores at 0.5 and soft Dice; `None` without masks.
    pub segmentation: Option<SegmentationMeans>,
    /// The reference's threshold-averaged scores; `None` without masks.
    pub thresholds: Option<ThresholdScores>,
    /// Fraction (0..=1) of answers that name the right location; `None` if no label has one.
    pub position_accuracy: Option<f64>,
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
}

fn macro_mean(rows: &[EvalRow]) -> EvalRow {
    let thresholds: Vec<ThresholdScores> = rows.iter().filter_map(|row| row.thresholds).collect();
    let text: Vec<TextScores> = rows.iter().filter_map(|row| row.text).collect();
    let text_mean = |part: fn(&TextScores) -> f64| mean(text.iter().map(part));
    EvalRow {
        name: "macro mean".into(),
        questions: rows.iter().map(|row| row.questions).sum(),
        images: rows.iter().map(|row| row.images).sum(),
        segmentation: SegmentationMeans::macro_mean(rows.iter().filter_map(|row| row.segmentation)),
        thresholds: ThresholdScores::macro_mean(&thresholds),
        position_accuracy: mean(rows.iter().filter_map(|row| row.position_accuracy)),
        text: text_mean(|t| t.bleu).map(|bleu| TextScores {
            bleu,
            rouge1: text_mean(|t| t.rouge1).unwrap_or_default(),
            meteor_exact_stem: text_mean(|t| t.meteor_exact_stem).unwrap_or_default(),
        }),
        corpus_bleu: mean(rows.iter().filter_map(|row| row.corpus_bleu)),
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

const HEADER: [&str; 15] = [
    "modality", "questions", "images", "Dice", "IoU", "soft Dice", "meanDic", "meanIoU", "maxDic", "MAE", "position",
    "BLEU", "corpus BLEU", "ROUGE-1", "METEOR*",
];

impl EvalRow {
    fn cells(&self) -> Vec<String> {
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| format!("{v:.4}"));
        let (seg, thr, text) = (self.segmentation, self.thresholds, self.text);
        let mut cells = vec![self.name.clone(), self.questions.to_string(), self.images.to_string()];
        cells.extend([
            number(seg.map(|s| s.dice)),
            number(seg.map(|s| s.iou)),
            number(seg.map(|s| s.soft_dice)),
            number(thr.map(|t| t.mean_dic)),
            number(thr.map(|t| t.mean_iou)),
            number(thr.map(|t| t.max_dic)),
            number(thr.map(|t| t.mae)),
            number(self.position_accuracy),
            number(text.map(|t| t.bleu)),
            number(self.corpus_bleu),
            number(text.map(|t| t.rouge1)),
            number(text.map(|t| t.meteor_exact_stem)),
        ]);
        cells
    }
}

impl fmt::Display for EvalSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows: Vec<Vec<String>> = self.modalities.iter().map(EvalRow::cells).collect();
        let rule = rows.len();
        rows.extend([self.macro_mean.cells(), self.all_images.cells()]);
        f.write_str(&aligned(&HEADER, &rows, Some(rule)))?;
        writeln!(f, "pooled over pixels: Dice {:.4}, IoU {:.4}", self.pooled.dice, self.pooled.iou)?;
        writeln!(f, "Dice and IoU at 0.5, 1 if mask and truth are both empty")?;
        writeln!(f, "meanDic, meanIoU, maxDic, MAE: averages over 256 thresholds, as in the original evaluation")?;
        writeln!(
            f,
            "BLEU: mean of the BLEU-4 of each answer, without smoothing; corpus BLEU: of all answers together"
        )?;
        writeln!(f, "* exact and stem matches, no synonyms")
    }
}

/// A text table with aligned columns, the first to the left, the others to the right. A rule is below the header and
/// before row `rule`.
pub fn aligned(header: &[&str], rows: &[Vec<String>], rule: Option<usize>) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([header[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: &[&str]| {
        let mut text = String::new();
        for (column, (cell, &width)) in cells.iter().zip(&widths).enumerate() {
            if column == 0 {
                text.push_str(cell);
                text.extend(std::iter::repeat_n(' ', width - cell.chars().count()));
            } else {
                text.extend(std::iter::repeat_n(' ', 2 + width - cell.chars().count()));
                text.push_str(cell);
            }
        }
        text.trim_end().to_owned() + "\n"
    };
    let ruler = "-".repeat(widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1)) + "\n";
    let mut out = line(header) + &ruler;
    for (i, row) in rows.iter().enumerate() {
        if rule == Some(i) && i > 0 {
            out += &ruler;
        }
        out += &line(&row.iter().map(String::as_str).collect::<Vec<_>>());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_right_if_it_names_the_labels_location() {
        assert_eq!(is_right("the polyp lies in the center left part of the image", "center left"), Some(true));
        assert_eq!(is_right("the polyp lies in the center left part of the image", "center"), Some(false));
        assert_eq!(is_right("no idea", "upper left"), Some(false));
        assert_eq!(is_right("upper left", "liver"), None);
    }

    fn summary() -> EvalSummary {
        let mut sums = EvalSums::default();
        let truth = [true, true, false, false];
        sums.group("skin").add_mask(&[1.0, 1.0, 0.0, 0.0], &truth, (2, 2)).unwrap();
        sums.group("skin").add_mask(&[1.0, 0.0, 0.0, 0.0], &truth, (2, 2)).unwrap();
        for _question in 0..2 {
            sums.group("skin").add_image(Path::new("a.png"));
        }
        sums.group("lung_CT").add_mask(&[0.0, 0.0, 0.0, 1.0], &truth, (2, 2)).unwrap();
        let reference = "The lesion lies in the upper left part of the image.";
        sums.group("skin").add_answer(reference, reference, Some("upper left"));
        sums.group("skin").add_answer("It lies at the bottom.", reference, Some("upper left"));
        sums.summary()
    }

    #[test]
    fn means_are_over_groups_and_over_samples() {
        let summary = summary();
        let dice = |row: &EvalRow| row.segmentation.unwrap().dice;
        let names: Vec<&str> = summary.modalities.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, ["lung_CT", "skin"]);
        assert!((dice(&summary.modalities[1]) - 5.0 / 6.0).abs() < 1e-12);
        assert!((dice(&summary.macro_mean) - 5.0 / 12.0).abs() < 1e-12);
        assert!((dice(&summary.all_images) - 5.0 / 9.0).abs() < 1e-12);
        assert!((summary.pooled.dice - 6.0 / 10.0).abs() < 1e-12, "{:?}", summary.pooled);
        assert_eq!((summary.modalities[1].questions, summary.modalities[1].images), (2, 1), "two questions, one image");
        assert_eq!(summary.modalities[1].position_accuracy, Some(0.5));
        assert_eq!(summary.modalities[0].text, None);
        let reference = "The lesion lies in the upper left part of the image.";
        let [a, b] = [reference, "It lies at the bottom."].map(|answer| TextScores::of(answer, reference));
        let text = summary.modalities[1].text.unwrap();
        for (mean, a, b) in [
            (text.bleu, a.bleu, b.bleu),
            (text.rouge1, a.rouge1, b.rouge1),
            (text.meteor_exact_stem, a.meteor_exact_stem, b.meteor_exact_stem),
        ] {
            assert!((mean - f64::midpoint(a, b)).abs() < 1e-12, "{text:?}");
        }
        assert_eq!(summary.macro_mean.position_accuracy, Some(0.5), "a modality without answers does not count");
    }

    #[test]
    fn each_column_shows_the_score_of_its_header() {
        let row = EvalRow {
            name: "skin".into(),
            questions: 101,
            images: 102,
            segmentation: Some(SegmentationMeans { dice: 0.01, iou: 0.02, soft_dice: 0.03 }),
            thresholds: Some(ThresholdScores {
                mean_dic: 0.04,
                max_dic: 0.05,
                mean_iou: 0.06,
                max_iou: 0.07,
                mean_sen: 0.08,
                mean_spe: 0.09,
                mean_em: 0.10,
                max_em: 0.11,
                sm: 0.12,
                weighted_fm: Some(0.13),
                mae: 0.14,
            }),
            position_accuracy: Some(0.15),
            text: Some(TextScores { bleu: 0.16, rouge1: 0.17, meteor_exact_stem: 0.18 }),
            corpus_bleu: Some(0.19),
        };
        let shown: Vec<(&str, String)> = HEADER.into_iter().zip(row.cells()).collect();
        let expected = [
            ("modality", "skin"),
            ("questions", "101"),
            ("images", "102"),
            ("Dice", "0.0100"),
            ("IoU", "0.0200"),
            ("soft Dice", "0.0300"),
            ("meanDic", "0.0400"),
            ("meanIoU", "0.0600"),
            ("maxDic", "0.0500"),
            ("MAE", "0.1400"),
            ("position", "0.1500"),
            ("BLEU", "0.1600"),
            ("corpus BLEU", "0.1900"),
            ("ROUGE-1", "0.1700"),
            ("METEOR*", "0.1800"),
        ];
        assert_eq!(shown, expected.map(|(name, cell)| (name, cell.to_owned())));
    }

    #[test]
    fn corpus_bleu_and_the_mean_of_bleu_are_different_columns() {
        let mut sums = EvalSums::default();
        let long = "The lesion is in the upper left part of the image.";
        sums.group("a").add_answer(long, long, None);
        sums.group("a").add_answer("upper left", "upper left", None);
        sums.group("b").add_answer("no words of it", long, None);
        let summary = sums.summary();
        let of = |row: &EvalRow| (row.text.unwrap().bleu, row.corpus_bleu.unwrap());
        // an answer of two tokens has no 4-gram; in the corpus its shorter n-grams count
        let (mean, corpus) = of(&summary.modalities[0]);
        assert!((mean - 0.5).abs() < 1e-9 && (corpus - 1.0).abs() < 1e-9, "{mean} {corpus}");
        assert_eq!(of(&summary.modalities[1]), (0.0, 0.0));
        assert!((of(&summary.macro_mean).1 - 0.5).abs() < 1e-9, "the mean over modalities");
        assert!((of(&summary.all_images).0 - 1.0 / 3.0).abs() < 1e-9);
        let all = of(&summary.all_images).1;
        // 15 of 18 tokens, 12 of 15 pairs, 10 of 12 triples and 9 of 10 quadruples match; the references have 26 tokens
        let precisions: f64 = [15.0 / 18.0, 12.0 / 15.0, 10.0 / 12.0, 9.0 / 10.0_f64].iter().map(|p| p.ln()).sum();
        let expected = (precisions / 4.0).exp() * (1.0 - 26.0 / 18.0_f64).exp();
        assert!((all - expected).abs() < 1e-9, "{all} {expected}");
    }

    #[test]
    fn the_summary_can_be_written_and_read_as_json() {
        let text = serde_json::to_string(&summary()).unwrap();
        assert!(text.contains("\"meanDic\"") && text.contains("\"macro_mean\""));
        assert_eq!(serde_json::from_str::<EvalSummary>(&text).unwrap().to_string(), summary().to_string());
    }

    #[test]
    fn columns_are_aligned() {
        let table = summary().to_string();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 2 + 2 + 1 + 2 + 5, "{table}");
        let end_of_dice = lines[0].find("Dice").unwrap() + 4;
        for line in [lines[2], lines[3], lines[5], lines[6]] {
            let cell = &line[..end_of_dice];
            assert!(cell.ends_with(|c: char| c.is_ascii_digit()) && !cell.ends_with(' '), "{table}");
        }
        assert!(EvalSums::default().summary().to_string().contains("macro mean"), "an empty evaluation has a table");
    }
}
