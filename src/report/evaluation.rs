//! Report of one evaluation.

use super::spread::{ScoreSpread, round_up};
use super::svg::{self, ChartAxis};
use super::{Page, heading, number, range};
use crate::Result;
use crate::data::agreement::Positions;
use crate::data::manifest::Presence;
use crate::front::evaluate::{Case, Evaluation, SampleScore};
use crate::metrics::estimates::{AUROC, Estimate, keys_in_order};
use crate::metrics::paired::Interval;
use crate::metrics::reliability::ReliabilityCurve;
use crate::metrics::table::EvalRow;
use crate::segment::setup::Description;
use askama::Template;
use std::collections::BTreeSet;
use std::path::Path;

/// Names and values of a run: settings, versions, time, memory.
pub type Facts = Vec<(String, String)>;

/// Most questions in the table of a report; the others are in `samples.csv`.
const MAX_ROWS: usize = 2000;
/// Scores of the cards at the top.
const CARDS: [&str; 10] = [
    "dice",
    "surface_dice",
    "hd95",
    "lesion_f1",
    "target_sensitivity",
    "target_specificity",
    AUROC,
    "position_right",
    "mask_position_right",
    "positions_agree",
];
/// Scores of the table of classes.
const CLASS_COLUMNS: [&str; 8] = [
    "dice",
    "surface_dice",
    "hd95",
    "lesion_f1",
    "target_sensitivity",
    "target_specificity",
    "position_right",
    "mask_position_right",
];

/// Writes `report.html` into `folder`. `(name, subtitle)` are the run and what it was scored on.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io).
pub fn write(folder: &Path, (name, subtitle): (&str, &str), evaluation: &Evaluation, facts: &Facts) -> Result<()> {
    super::write(folder, &EvaluationPage::new((name, subtitle), evaluation, facts))
}

/// Settings of a model for [`Facts`].
pub fn model_facts(description: &Description) -> Facts {
    let mut facts = vec![("classes".to_owned(), description.modalities.join(", "))];
    let calibration = match &description.calibration {
        None => "none: no presence threshold, probabilities as computed".to_owned(),
        Some(calibration) => format!(
            "temperature {:.3}, presence threshold {}, from {} present and {} absent targets",
            calibration.temperature,
            number(calibration.presence_threshold),
            calibration.num_present,
            calibration.num_absent
        ),
    };
    facts.push(("calibration".to_owned(), calibration));
    let settings = serde_json::to_value(&description.model).unwrap_or_default();
    for (key, value) in settings.as_object().into_iter().flatten() {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        facts.push((format!("model.{key}"), value));
    }
    facts
}

#[derive(Template)]
#[template(path = "evaluation.html")]
struct EvaluationPage<'a> {
    page: Page,
    unknown_classes: String,
    /// Why the locations in the answers should not be believed.
    doubt: Option<String>,
    length: &'a str,
    cards: Vec<Card>,
    notes: Vec<String>,
    /// Title of a score, its mean over all questions, and the mean of classes.
    scores: Vec<(String, &'a Estimate, Option<&'a Estimate>)>,
    class_columns: Vec<&'static str>,
    classes: &'a [EvalRow],
    /// Titles and SVG.
    charts: Vec<(String, String)>,
    calibration: Option<CalibrationView<'a>>,
    /// Titles, notes and cases.
    groups: Vec<(&'static str, &'static str, &'a Vec<Case>)>,
    samples: &'a [SampleScore],
    /// The first of them.
    rows: &'a [SampleScore],
    facts: &'a Facts,
}

struct Card {
    title: String,
    value: String,
    interval: String,
    note: String,
    meter: Option<Meter>,
}

/// A mean and its interval on a bar of 100 units.
struct Meter {
    low: f64,
    width: f64,
    mean: f64,
}

struct CalibrationView<'a> {
    svg: String,
    raw: &'a ReliabilityCurve,
    scaled: Option<String>,
}

impl<'a> EvaluationPage<'a> {
    fn new((name, subtitle): (&str, &str), evaluation: &'a Evaluation, facts: &'a Facts) -> Self {
        let Evaluation { summary, samples, cases, .. } = evaluation;
        let length = summary.protocol.length.as_str();
        let (all, mean) = (&summary.all_images.estimates, &summary.macro_mean.estimates);
        let groups = [
            ("Worst masks", "Lowest Dice first; each image and mask once.", &cases.worst),
            ("Best masks", "Highest Dice first.", &cases.best),
            (
                "Masks of absent targets",
                "The target is not in these images. Highest presence score first.",
                &cases.false_masks,
            ),
        ];
        let scores = keys_in_order(all).into_iter().map(|key| (heading(key, length), &all[key], mean.get(key)));
        Self {
            page: Page::new(&format!("Evaluation of {name}"), subtitle),
            unknown_classes: summary.protocol.unknown_classes.join(", "),
            length,
            doubt: summary.positions().filter(|_| summary.doubts_words()),
            cards: cards(&summary.all_images, length),
            notes: summary.notes(),
            scores: scores.collect(),
            class_columns: CLASS_COLUMNS.into_iter().filter(|key| all.contains_key(*key)).collect(),
            classes: &summary.modalities,
            charts: charts(samples, length),
            calibration: calibration(evaluation),
            groups: groups.into_iter().filter(|(.., cases)| !cases.is_empty()).collect(),
            samples,
            rows: &samples[..samples.len().min(MAX_ROWS)],
            facts,
        }
    }
}

fn cards(all: &EvalRow, length: &str) -> Vec<Card> {
    let base = all.position_base_rate.zip(all.most_common_position.as_deref());
    let base = base.map(|(rate, position)| format!("; always “{position}”: {}", number(Some(rate))));
    let card = |key: &str| {
        let Estimate { mean, interval, count } = all.estimates.get(key)?;
        let base = base.as_deref().filter(|_| key == "position_right").unwrap_or_default();
        let is_fraction = !key.starts_with("hd");
        let meter = |Interval { low, high }: &Interval| Meter {
            low: 100.0 * low.clamp(0.0, 1.0),
            width: 100.0 * (high.min(1.0) - low.max(0.0)).max(0.0),
            mean: (100.0 * mean - 0.6).clamp(0.0, 98.8),
        };
        let interval_text =
            interval.map_or_else(|| "no interval".to_owned(), |_| format!("95 %: {}", range(*interval)));
        Some(Card {
            title: heading(key, length),
            value: number(Some(*mean)),
            interval: interval_text,
            note: format!("{count} questions{base}"),
            meter: interval.as_ref().filter(|_| is_fraction).map(meter),
        })
    };
    CARDS.into_iter().filter_map(card).collect()
}

/// Quartiles of Dice and HD95 by class, and of presence scores by target.
fn charts(samples: &[SampleScore], length: &str) -> Vec<(String, String)> {
    let classes: BTreeSet<&str> = samples.iter().map(|sample| sample.modality.as_str()).collect();
    let of_classes = |key: &str| -> Vec<ScoreSpread> {
        let values = |class: &str| -> Vec<f64> {
            samples.iter().filter(|s| s.modality == class).filter_map(|sample| sample.value(key)).collect()
        };
        classes.iter().filter_map(|class| ScoreSpread::new(class, &values(class))).collect()
    };
    let presence = |target: Presence, name: &str| {
        let scores: Vec<f64> = samples.iter().filter(|s| s.target == target).map(|s| s.presence).collect();
        ScoreSpread::new(name, &scores)
    };
    let absent = presence(Presence::Absent, "absent");
    // without absent targets there is nothing to tell apart
    let of_targets =
        absent.into_iter().flat_map(|absent| presence(Presence::Present, "present").into_iter().chain([absent]));
    let groups = [
        ("Dice", "by class", of_classes("dice")),
        (&*format!("HD95 ({length})"), "by class", of_classes("hd95")),
        ("Presence score", "by target", of_targets.collect()),
    ];
    let chart = |(label, by, spreads): (&str, &str, Vec<ScoreSpread>)| {
        let most = spreads.iter().map(|spread| spread.five[4]).fold(0.0, f64::max);
        let high = if label.starts_with("HD95") { round_up(most) } else { 1.0 };
        (format!("{label} {by}"), svg::spreads(&spreads, ChartAxis { low: 0.0, high, label }))
    };
    groups.into_iter().filter(|(.., spreads)| !spreads.is_empty()).map(chart).collect()
}

fn calibration(evaluation: &Evaluation) -> Option<CalibrationView<'_>> {
    let calibration = evaluation.summary.calibration.as_ref()?;
    let mut curves = vec![("series-0", &calibration.raw)];
    curves.extend(calibration.scaled.as_ref().map(|curve| ("series-1", curve)));
    let scaled = calibration.scaled.as_ref().zip(calibration.temperature);
    Some(CalibrationView {
        svg: svg::reliability(&curves),
        raw: &calibration.raw,
        scaled: scaled.map(|(curve, t)| format!("at the run's temperature {t:.3}, error {:.4}", curve.ece)),
    })
}

/// The score by which a case was chosen.
fn case_score(sample: &SampleScore) -> String {
    match sample.dice {
        Some(_) => format!("Dice {}", number(sample.dice)),
        None => format!("Presence {}", number(Some(sample.presence))),
    }
}

/// Locations of the mask and in the answer, in one line.
fn positions(sample: &SampleScore) -> String {
    let SampleScore { mask_position, answer_position, positions_agree, position_warning, .. } = sample.clone();
    let mask_regions = Vec::new();
    Positions { mask_position, mask_regions, answer_position, positions_agree, position_warning }.line()
}

/// The patient, or the name of the image.
fn patient(sample: &SampleScore) -> String {
    let name = |path: &str| Path::new(path).file_name().map_or_else(String::new, |name| name.to_string_lossy().into());
    sample.patient.clone().unwrap_or_else(|| name(&sample.image))
}

fn target(sample: &SampleScore) -> &'static str {
    match sample.target {
        Presence::Present => "present",
        Presence::Absent => "absent",
        Presence::Unknown => "unknown",
    }
}

/// Scores of the table of questions.
fn row_scores(sample: &SampleScore) -> [Option<f64>; 4] {
    [sample.dice, sample.surface_dice, sample.hd95, Some(sample.presence)]
}
