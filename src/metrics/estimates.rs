//! Means of scores over questions, with 95 % intervals over patients, and paired differences of two runs.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::bootstrap::Bootstrap;
use super::detection::auroc_of_sorted;
use super::order::mean;
use super::paired::Interval;
use super::text_table::aligned;
use prsmed_base::error::{Error, Result};
use prsmed_base::units::{fixed, signed};

/// A score of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoreKind {
    /// Name in JSON and CSV.
    pub key: &'static str,
    /// Name in tables.
    pub title: &'static str,
    /// Unit of the values.
    pub unit: Unit,
}

/// Unit of a score.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// 0..=1, higher is better.
    Fraction,
    /// A relative error, lower is better.
    Error,
    /// A distance in mm or pixels, lower is better.
    Distance,
    /// A signed area in mm² or pixels, best near 0.
    Area,
}

/// All scores, in the order of tables and of [`QuestionScores::values`].
pub const SCORES: [ScoreKind; 26] = [
    score("dice", "Dice", Unit::Fraction),
    score("iou", "IoU", Unit::Fraction),
    score("soft_dice", "soft Dice", Unit::Fraction),
    score("raw_dice", "Dice without presence threshold", Unit::Fraction),
    score("surface_dice", "surface Dice", Unit::Fraction),
    score("hd95", "HD95", Unit::Distance),
    score("hd", "Hausdorff distance", Unit::Distance),
    score("assd", "ASSD", Unit::Distance),
    score("pixel_sensitivity", "pixel sensitivity", Unit::Fraction),
    score("pixel_precision", "pixel precision", Unit::Fraction),
    score("lesion_recall", "lesion recall", Unit::Fraction),
    score("lesion_precision", "lesion precision", Unit::Fraction),
    score("lesion_f1", "lesion F1", Unit::Fraction),
    score("area_error_frac", "relative area error", Unit::Error),
    score("area_difference", "area difference", Unit::Area),
    score("target_sensitivity", "target sensitivity", Unit::Fraction),
    score("target_specificity", "target specificity", Unit::Fraction),
    score("class_right", "class accuracy", Unit::Fraction),
    score("position_right", "position accuracy", Unit::Fraction),
    score("mask_position_right", "mask position accuracy", Unit::Fraction),
    score("positions_agree", "position agreement", Unit::Fraction),
    score("good_mask_agrees", "position agreement, Dice from 0.8", Unit::Fraction),
    score("words_follow", "words follow moved masks", Unit::Fraction),
    score("bleu", "BLEU", Unit::Fraction),
    score("rouge1", "ROUGE-1", Unit::Fraction),
    score("meteor_exact_stem", "METEOR*", Unit::Fraction),
];

const fn score(key: &'static str, title: &'static str, unit: Unit) -> ScoreKind {
    ScoreKind { key, title, unit }
}

/// Values of all [`SCORES`]; `None` where a score is not defined.
pub type ScoreValues = [Option<f64>; SCORES.len()];

/// The scores of one question and what they are grouped by.
#[derive(Debug, Clone, PartialEq)]
pub struct QuestionScores {
    /// Identity of the question, the same in all runs.
    pub row: String,
    /// Class (modality folder).
    pub class: String,
    /// Patient, or the image if the patient is not known.
    pub group: String,
    /// Whether the target is in the image, if that is known.
    pub is_present: Option<bool>,
    /// Presence score of the prediction.
    pub presence: f64,
    /// Values in the order of [`SCORES`].
    pub values: ScoreValues,
}

/// A mean with its interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The mean.
    pub mean: f64,
    /// 95 % interval by the bootstrap over patients, or the exact binomial interval of fractions that are all 0 or all 1;
    /// `None` with fewer than four patients (two if it is exact), or if all have the same value.
    pub interval: Option<Interval>,
    /// Number of questions with a value.
    pub count: u64,
}

/// Means by the key of the score; scores without a value are missing.
pub type Estimates = BTreeMap<String, Estimate>;

/// Key of the area under the ROC curve of the presence score among the estimates.
pub const AUROC: &str = "auroc";

/// Estimates over all items, each with the same weight.
pub fn estimates(items: &[&QuestionScores]) -> Estimates {
    let bootstrap = Bootstrap::new(items.iter().map(|item| item.group.as_str()));
    let all: Vec<usize> = (0..items.len()).collect();
    let mut found = of_classes(items, &bootstrap, &[all]);
    found.extend(auroc(items, &bootstrap).map(|estimate| (AUROC.to_owned(), estimate)));
    found
}

/// Estimates of the mean over classes, each class with the same weight.
pub fn macro_estimates(items: &[&QuestionScores]) -> Estimates {
    let classes: BTreeSet<&str> = items.iter().map(|item| item.class.as_str()).collect();
    let of_class = |class: &str| (0..items.len()).filter(|&i| items[i].class == class).collect::<Vec<_>>();
    let classes: Vec<Vec<usize>> = classes.into_iter().map(of_class).collect();
    of_classes(items, &Bootstrap::new(items.iter().map(|item| item.group.as_str())), &classes)
}

fn of_classes(items: &[&QuestionScores], bootstrap: &Bootstrap, classes: &[Vec<usize>]) -> Estimates {
    let mut found = Estimates::new();
    for (index, score) in SCORES.iter().enumerate() {
        let values: Vec<Option<f64>> = items.iter().map(|item| item.values[index]).collect();
        if let Some(mean) = macro_mean(classes, &values) {
            let count = values.iter().flatten().count() as u64;
            let exact = exact(&values, bootstrap).filter(|_| score.unit == Unit::Fraction);
            let interval = exact.or_else(|| bootstrap.macro_mean(classes, &values));
            found.insert(score.key.to_owned(), Estimate { mean, interval, count });
        }
    }
    found
}

/// Interval of fractions of at least two patients that are all 0 or all 1, whose bootstrap has no spread. It is the exact
/// binomial interval (Clopper and Pearson 1934) with one trial for each patient.
fn exact(values: &[Option<f64>], bootstrap: &Bootstrap) -> Option<Interval> {
    let all = |end: f64| values.iter().flatten().all(|value| *value == end);
    let with_value = (0..values.len()).filter(|item| values[*item].is_some());
    let patients = with_value.map(|item| bootstrap.group_of(item)).collect::<BTreeSet<_>>().len();
    if patients < 2 {
        return None;
    }
    let open = 0.025_f64.powf(1.0 / patients as f64);
    match (all(0.0), all(1.0)) {
        (true, false) => Some(Interval { low: 0.0, high: 1.0 - open }),
        (false, true) => Some(Interval { low: open, high: 1.0 }),
        _ => None,
    }
}

fn macro_mean(classes: &[Vec<usize>], values: &[Option<f64>]) -> Option<f64> {
    let of_class = |class: &Vec<usize>| mean(class.iter().filter_map(|item| values[*item]));
    mean(classes.iter().filter_map(of_class))
}

/// Area under the ROC curve of the presence score, over the items for which it is known whether the target is there.
fn auroc(items: &[&QuestionScores], bootstrap: &Bootstrap) -> Option<Estimate> {
    let mut known: Vec<(f64, bool, usize)> = (items.iter().enumerate())
        .filter_map(|(i, item)| Some((item.presence, item.is_present?, bootstrap.group_of(i))))
        .collect();
    known.sort_by(|a, b| a.0.total_cmp(&b.0));
    let of = |weight: &dyn Fn(usize) -> f64| {
        auroc_of_sorted(known.iter().map(|(score, is_present, group)| (*score, *is_present, weight(*group))))
    };
    let mean = of(&|_| 1.0)?;
    let interval = bootstrap.interval(|weights| of(&|group| weights[group]));
    Some(Estimate { mean, interval, count: known.len() as u64 })
}

/// Mean difference of a score between two runs on the same questions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Key of the score.
    pub score: String,
    /// Number of questions for which both runs have a value.
    pub count: u64,
    /// Mean of the baseline over these questions.
    pub baseline: f64,
    /// Mean of the other run over these questions.
    pub other: f64,
    /// `other - baseline`.
    pub difference: f64,
    /// 95 % interval of the difference by the bootstrap over patients; `None` with fewer than four patients, or
    /// if all have the same difference.
    pub interval: Option<Interval>,
}

/// Compares a run with a baseline, question by question.
///
/// # Errors
/// [`Error::Config`] if the runs were not scored on the same questions in the same order.
pub fn differences(baseline: &[QuestionScores], other: &[QuestionScores]) -> Result<Vec<Difference>> {
    if baseline.len() != other.len() || baseline.iter().zip(other).any(|(a, b)| a.row != b.row) {
        let hint = "score all runs with one call of `prsmed eval`";
        return Err(Error::config("runs", "they were scored on different questions", hint));
    }
    let bootstrap = Bootstrap::new(baseline.iter().map(|item| item.group.as_str()));
    let of_score = |(index, score): (usize, &ScoreKind)| {
        let pairs: Vec<Option<(f64, f64)>> =
            baseline.iter().zip(other).map(|(a, b)| a.values[index].zip(b.values[index])).collect();
        let [first, second] =
            [mean(pairs.iter().flatten().map(|pair| pair.0))?, mean(pairs.iter().flatten().map(|pair| pair.1))?];
        let differences: Vec<Option<f64>> = pairs.iter().map(|pair| pair.map(|(a, b)| b - a)).collect();
        Some(Difference {
            score: score.key.to_owned(),
            count: pairs.iter().flatten().count() as u64,
            baseline: first,
            other: second,
            difference: second - first,
            interval: bootstrap.mean(&differences),
        })
    };
    Ok(SCORES.iter().enumerate().filter_map(of_score).collect())
}

/// The title of a score with its unit; `length` is `mm` or `px`.
pub fn title(key: &str, length: &str) -> String {
    match SCORES.iter().find(|score| score.key == key) {
        None if key == AUROC => "AUROC of presence".to_owned(),
        None => key.to_owned(),
        Some(score) => match score.unit {
            Unit::Fraction | Unit::Error => score.title.to_owned(),
            Unit::Distance => format!("{} ({length})", score.title),
            Unit::Area => format!("{} ({})", score.title, if length == "px" { "px" } else { "mm2" }),
        },
    }
}

/// Which values of a score are better.
fn better(key: &str) -> &'static str {
    match SCORES.iter().find(|score| score.key == key).map(|score| score.unit) {
        Some(Unit::Fraction) | None => "higher",
        Some(Unit::Error | Unit::Distance) => "lower",
        Some(Unit::Area) => "near 0",
    }
}

/// The keys of estimates in the order of tables.
pub fn keys_in_order(estimates: &Estimates) -> Vec<&'static str> {
    let known = SCORES.iter().map(|score| score.key).chain([AUROC]);
    known.filter(|key| estimates.contains_key(*key)).collect()
}

/// Estimates as a text table.
pub fn table(estimates: &Estimates, length: &str) -> String {
    let row = |key: &'static str| {
        let Estimate { mean, interval, count } = estimates[key];
        let mean = fixed(mean, 4);
        vec![title(key, length), mean, range(interval.as_ref()), better(key).to_owned(), count.to_string()]
    };
    let rows: Vec<Vec<String>> = keys_in_order(estimates).into_iter().map(row).collect();
    aligned(&["score", "mean", "95 % interval", "better is", "questions"], &rows, None)
}

/// `0.7123 .. 0.8456`, or `-` without an interval.
pub fn range(interval: Option<&Interval>) -> String {
    interval
        .map_or_else(|| "-".to_owned(), |Interval { low, high }| format!("{} .. {}", fixed(*low, 4), fixed(*high, 4)))
}

/// Differences as a text table, with the two means.
pub fn difference_table(rows: &[Difference], names: [&str; 2], length: &str) -> String {
    let cells = |row: &Difference| {
        let interval = row.interval.map_or_else(|| "-".to_owned(), |interval| interval.to_string());
        let numbers = [fixed(row.baseline, 4), fixed(row.other, 4), signed(row.difference, 4)];
        let mut cells = vec![title(&row.score, length)];
        cells.extend(numbers);
        cells.extend([interval, row.count.to_string()]);
        cells
    };
    let header = ["score", names[0], names[1], "difference", "95 % interval", "questions"];
    aligned(&header, &rows.iter().map(cells).collect::<Vec<_>>(), None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(row: usize, class: &str, group: &str, dice: Option<f64>) -> QuestionScores {
        let mut values: ScoreValues = [None; SCORES.len()];
        values[0] = dice;
        QuestionScores {
            row: row.to_string(),
            class: class.into(),
            group: group.into(),
            is_present: None,
            presence: 0.5,
            values,
        }
    }

    #[test]
    fn means_are_over_the_questions_with_a_value() {
        let items = [
            item(0, "a", "p", Some(1.0)),
            item(1, "a", "p", Some(0.5)),
            item(2, "a", "q", None),
            item(3, "b", "r", Some(0.0)),
        ];
        let items: Vec<&QuestionScores> = items.iter().collect();
        let all = estimates(&items);
        assert_eq!(all.keys().collect::<Vec<_>>(), ["dice"]);
        assert_eq!((all["dice"].mean, all["dice"].count), (0.5, 3));
        assert_eq!(macro_estimates(&items)["dice"].mean, 0.375);
        assert_eq!(all["dice"].interval, None, "two patients have a value");
        assert!(table(&all, "mm").contains(" -  "), "{}", table(&all, "mm"));
        let items: Vec<QuestionScores> =
            (0..8).map(|i| item(i, "a", &(i / 2).to_string(), Some(i as f64 / 8.0))).collect();
        let all = estimates(&items.iter().collect::<Vec<_>>());
        let Interval { low, high } = all["dice"].interval.expect("four patients");
        assert!(low > 0.0625 && high < 0.8125 && low < 0.4375 && high > 0.4375, "{low} {high}");
        assert!(table(&all, "mm").contains(&format!("{low:.4} .. {high:.4}")), "{}", table(&all, "mm"));
    }

    #[test]
    fn fractions_without_spread_have_an_exact_interval() {
        let items: Vec<QuestionScores> = (0..20).map(|i| item(i, "a", &(i / 2).to_string(), Some(1.0))).collect();
        let interval = estimates(&items.iter().collect::<Vec<_>>())["dice"].interval.unwrap();
        // 10 of 10 patients: SciPy's `binomtest(10, 10).proportion_ci(method="exact")` is 0.6915 to 1
        assert!((interval.low - 0.691_503).abs() < 1e-5 && interval.high == 1.0, "{interval:?}");
        let items: Vec<QuestionScores> = (0..4).map(|i| item(i, "a", &i.to_string(), Some(0.0))).collect();
        let interval = estimates(&items.iter().collect::<Vec<_>>())["dice"].interval.unwrap();
        assert!((interval.high - 0.602_365).abs() < 1e-5 && interval.low == 0.0, "{interval:?}");
    }

    #[test]
    fn presence_scores_of_unknown_targets_do_not_count() {
        let mut items: Vec<QuestionScores> = (0..8).map(|i| item(i, "a", &i.to_string(), None)).collect();
        for (i, item) in items.iter_mut().enumerate() {
            item.presence = i as f64 / 8.0;
            item.is_present = (i < 6).then_some(i % 2 == 1);
        }
        let found = estimates(&items.iter().collect::<Vec<_>>())[AUROC];
        // of nine pairs (1, 3, 5) and (0, 2, 4) six are in order
        assert!((found.mean - 6.0 / 9.0).abs() < 1e-12 && found.count == 6, "{found:?}");
        assert!(found.interval.is_some());
    }

    #[test]
    fn differences_are_paired() {
        let run = |shift: f64| -> Vec<QuestionScores> {
            (0..30).map(|i| item(i, "a", &i.to_string(), Some(i as f64 / 60.0 + shift))).collect()
        };
        let found = differences(&run(0.0), &run(0.1)).unwrap();
        assert_eq!((found.len(), found[0].count), (1, 30));
        assert!((found[0].difference - 0.1).abs() < 1e-9);
        assert_eq!(found[0].interval, None, "equal differences");
        let mut other = run(0.1);
        other[3].values[0] = Some(0.9);
        let interval = differences(&run(0.0), &other).unwrap()[0].interval.unwrap();
        assert!((interval.low - 0.1).abs() < 1e-9 && interval.high > 0.12, "{interval:?}");
        let mut other = run(0.0);
        other[3].row = "another".into();
        assert!(differences(&run(0.0), &other).is_err());
        assert!(differences(&run(0.0), &run(0.0)[1..]).is_err());
        other = run(0.0);
        other[29].values[0] = None;
        assert_eq!(differences(&run(0.0), &other).unwrap()[0].count, 29);
    }

    #[test]
    fn every_score_has_one_name() {
        let keys: BTreeSet<&str> = SCORES.iter().map(|score| score.key).collect();
        assert_eq!(keys.len(), SCORES.len());
        assert_eq!(
            (title("hd95", "mm"), title("area_difference", "px")),
            ("HD95 (mm)".into(), "area difference (px)".into())
        );
    }
}
