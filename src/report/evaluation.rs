//! Report of one evaluation.

use super::picture::{self, Layer};
use super::spread::{Spread, round_up};
use super::svg::{self, Axis};
use super::{Page, heading, number, sort_key};
use crate::Result;
use crate::data::agreement::Positions;
use crate::data::manifest::Presence;
use crate::front::evaluate::{Case, Evaluation, SampleScore};
use crate::metrics::estimates::{AUROC, Estimate, Estimates, keys_in_order};
use crate::metrics::paired::Interval;
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
/// Scores of the table of questions.
const ROW_COLUMNS: [&str; 3] = ["dice", "surface_dice", "hd95"];

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
struct EvaluationPage {
    page: Page,
    unknown_classes: String,
    /// Why the locations in the answers should not be believed.
    doubt: Option<String>,
    length: String,
    cards: Vec<Card>,
    notes: Vec<String>,
    scores: Vec<ScoreRow>,
    class_columns: Vec<String>,
    classes: Vec<ClassRow>,
    charts: Vec<Chart>,
    calibration: Option<CalibrationView>,
    groups: Vec<Group>,
    rows: Vec<Row>,
    hidden: usize,
    facts: Facts,
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

struct ScoreRow {
    title: String,
    mean: String,
    range: String,
    macro_mean: String,
    macro_range: String,
    count: u64,
}

struct ClassRow {
    name: String,
    questions: u64,
    patients: u64,
    cells: Vec<MeanCell>,
}

/// A mean with its interval.
pub(super) struct MeanCell {
    pub(super) mean: String,
    pub(super) range: String,
    pub(super) sort: String,
}

/// A number in a table that can be sorted.
pub(super) struct Cell {
    pub(super) shown: String,
    pub(super) sort: String,
}

struct Chart {
    title: String,
    svg: String,
}

struct CalibrationView {
    svg: String,
    raw: String,
    scaled: Option<String>,
    bins: Vec<BinRow>,
}

struct BinRow {
    from: String,
    pixels: u64,
    probability: String,
    foreground: String,
}

struct Group {
    title: &'static str,
    note: &'static str,
    cases: Vec<CaseView>,
}

struct CaseView {
    number: usize,
    image: String,
    prediction: String,
    truth: String,
    score: String,
    is_withheld: bool,
    presence: String,
    class: String,
    question: String,
    generated: String,
    positions: String,
}

struct Row {
    number: usize,
    class: String,
    group: String,
    target: &'static str,
    /// `yes` if the painted mask has foreground, else `no`.
    mask: &'static str,
    is_withheld: bool,
    cells: Vec<Cell>,
    question: String,
    answer: String,
    generated: String,
    mask_position: String,
    /// Whether words and mask name different locations.
    differ: bool,
}

impl EvaluationPage {
    fn new((name, subtitle): (&str, &str), evaluation: &Evaluation, facts: &Facts) -> Self {
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
        let groups = groups.into_iter().filter(|group| !group.2.is_empty()).map(|(title, note, cases)| Group {
            title,
            note,
            cases: cases.iter().map(|case| case_view(case, &samples[case.sample])).collect(),
        });
        Self {
            page: Page::new(&format!("Evaluation of {name}"), subtitle),
            unknown_classes: summary.protocol.unknown_classes.join(", "),
            length: length.to_owned(),
            doubt: summary.positions().filter(|_| summary.doubts_words()),
            cards: cards(&summary.all_images, length),
            notes: summary.notes(),
            scores: keys_in_order(all).into_iter().map(|key| score_row(key, all, mean, length)).collect(),
            class_columns: class_keys(all).map(|key| heading(key, length)).collect(),
            classes: summary.modalities.iter().map(|row| class_row(row, all)).collect(),
            charts: charts(samples, length),
            calibration: calibration(evaluation),
            groups: groups.collect(),
            rows: samples.iter().take(MAX_ROWS).enumerate().map(|(i, sample)| row(i + 1, sample)).collect(),
            hidden: samples.len().saturating_sub(MAX_ROWS),
            facts: facts.clone(),
        }
    }
}

/// `0.712 – 0.846`, or `–`.
pub(super) fn range(interval: Option<&Interval>) -> String {
    interval.map_or_else(
        || "–".to_owned(),
        |Interval { low, high }| format!("{} to {}", number(Some(*low)), number(Some(*high))),
    )
}

/// Cell of a score in a table of means.
pub(super) fn mean_cell(estimate: Option<&Estimate>) -> MeanCell {
    let mean = estimate.map(|estimate| estimate.mean);
    let interval = estimate.and_then(|estimate| estimate.interval.as_ref());
    MeanCell {
        mean: number(mean),
        range: interval.map_or_else(String::new, |interval| range(Some(interval))),
        sort: sort_key(mean),
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
        let interval_text = interval
            .as_ref()
            .map_or_else(|| "no interval".to_owned(), |interval| format!("95 %: {}", range(Some(interval))));
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

fn score_row(key: &str, all: &Estimates, macro_mean: &Estimates, length: &str) -> ScoreRow {
    let (estimate, mean) = (&all[key], macro_mean.get(key));
    ScoreRow {
        title: heading(key, length),
        mean: number(Some(estimate.mean)),
        range: range(estimate.interval.as_ref()),
        macro_mean: number(mean.map(|mean| mean.mean)),
        macro_range: range(mean.and_then(|mean| mean.interval.as_ref())),
        count: estimate.count,
    }
}

fn class_keys(all: &Estimates) -> impl Iterator<Item = &'static str> {
    CLASS_COLUMNS.into_iter().filter(|key| all.contains_key(*key))
}

fn class_row(row: &EvalRow, all: &Estimates) -> ClassRow {
    ClassRow {
        name: row.name.clone(),
        questions: row.questions,
        patients: row.patients,
        cells: class_keys(all).map(|key| mean_cell(row.estimates.get(key))).collect(),
    }
}

/// Quartiles of Dice and HD95 by class, and of presence scores by target.
fn charts(samples: &[SampleScore], length: &str) -> Vec<Chart> {
    let classes: BTreeSet<&str> = samples.iter().map(|sample| sample.modality.as_str()).collect();
    let of_classes = |key: &str| -> Vec<Spread> {
        let values = |class: &str| -> Vec<f64> {
            samples.iter().filter(|s| s.modality == class).filter_map(|sample| sample.value(key)).collect()
        };
        classes.iter().filter_map(|class| Spread::new(class, &values(class))).collect()
    };
    let presence = |target: Presence, name: &str| {
        let scores: Vec<f64> = samples.iter().filter(|s| s.target == target).map(|s| s.presence).collect();
        Spread::new(name, &scores)
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
    let chart = |(label, by, spreads): (&str, &str, Vec<Spread>)| {
        let most = spreads.iter().map(|spread| spread.five[4]).fold(0.0, f64::max);
        let high = if label.starts_with("HD95") { round_up(most) } else { 1.0 };
        Chart { title: format!("{label} {by}"), svg: svg::spreads(&spreads, Axis { low: 0.0, high, label }) }
    };
    groups.into_iter().filter(|(.., spreads)| !spreads.is_empty()).map(chart).collect()
}

fn calibration(evaluation: &Evaluation) -> Option<CalibrationView> {
    let calibration = evaluation.summary.calibration.as_ref()?;
    let mut curves = vec![("series-0", &calibration.raw)];
    curves.extend(calibration.scaled.as_ref().map(|curve| ("series-1", curve)));
    let scaled = calibration.scaled.as_ref().zip(calibration.temperature);
    let bins = calibration.raw.bins.iter().map(|bin| BinRow {
        from: format!("{:.2}", bin.from),
        pixels: bin.pixels,
        probability: number(bin.probability),
        foreground: number(bin.foreground),
    });
    Some(CalibrationView {
        svg: svg::reliability(&curves),
        raw: format!("{:.4}", calibration.raw.ece),
        scaled: scaled.map(|(curve, t)| format!("at the run's temperature {t:.3}, error {:.4}", curve.ece)),
        bins: bins.collect(),
    })
}

fn case_view(case: &Case, sample: &SampleScore) -> CaseView {
    let score = match sample.dice {
        Some(_) => format!("Dice {}", number(sample.dice)),
        None => format!("Presence {}", number(Some(sample.presence))),
    };
    CaseView {
        number: case.sample + 1,
        image: picture::photo(&case.image),
        prediction: picture::layer(&case.prediction, Layer::Prediction),
        truth: picture::layer(&case.truth, Layer::Truth),
        score,
        is_withheld: sample.is_withheld,
        presence: number(Some(sample.presence)),
        class: sample.modality.clone(),
        question: sample.question.clone(),
        generated: sample.generated.clone(),
        positions: positions(sample),
    }
}

/// Locations of the mask and in the answer, in one line.
fn positions(sample: &SampleScore) -> String {
    let SampleScore { mask_position, answer_position, positions_agree, .. } = sample.clone();
    Positions { mask_position, answer_position, positions_agree, position_warning: None }.line()
}

fn row(number_of_row: usize, sample: &SampleScore) -> Row {
    let cell = |value: Option<f64>| Cell { shown: number(value), sort: sort_key(value) };
    let mut cells: Vec<Cell> = ROW_COLUMNS.into_iter().map(|key| cell(sample.value(key))).collect();
    cells.push(cell(Some(sample.presence)));
    let name = |path: &str| Path::new(path).file_name().map_or_else(String::new, |name| name.to_string_lossy().into());
    Row {
        number: number_of_row,
        class: sample.modality.clone(),
        group: sample.patient.clone().unwrap_or_else(|| name(&sample.image)),
        target: match sample.target {
            Presence::Present => "present",
            Presence::Absent => "absent",
            Presence::Unknown => "unknown",
        },
        mask: if sample.has_mask { "yes" } else { "no" },
        is_withheld: sample.is_withheld,
        cells,
        question: sample.question.clone(),
        answer: sample.answer.clone(),
        generated: sample.generated.clone(),
        mask_position: sample.mask_position.clone().unwrap_or_else(|| "–".to_owned()),
        differ: sample.positions_agree == Some(false),
    }
}
