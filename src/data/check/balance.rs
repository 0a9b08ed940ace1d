//! How the rows divide among classes and patients, and what their numbers allow.
//!
//! The advice states rules that need no score:
//!
//! - A patient is in one split, so that a class needs three patients to be in all three.
//! - Scores of a test split get an interval from four patients on ([`FEWEST_FOR_INTERVAL`]), as in `prsmed eval`.
//! - A share, such as that of right locations, of n independent patients has a 95 % interval of at most `1.96 * sqrt(0.25 / n)`
//!   to each side: the normal approximation of the binomial distribution, at a share of one half, where it is widest.
//! - How much more data would help is read off a learning curve: trainings with a quarter, a half and all of the patients,
//!   and an inverse power law through their scores (Figueroa et al. 2012, "Predicting sample size required for classification
//!   performance", BMC Medical Informatics and Decision Making 12:8). Without these scores nobody can say it.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::manifest::{Row, Split};
use prsmed_base::units::{counted, percent};

/// Fewest patients of whose scores `prsmed eval` gives an interval.
pub const FEWEST_FOR_INTERVAL: usize = 4;
/// Patients from which on a quarter, a half and all of them are three numbers.
const FEWEST_FOR_CURVE: usize = 4;

/// Numbers of units of one class in each split.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SplitUnits {
    /// In `train`.
    pub train: usize,
    /// In `val`.
    pub val: usize,
    /// In `test`.
    pub test: usize,
}

/// Rows of one patient.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PatientRows {
    /// The patient.
    pub patient: String,
    /// Number of rows.
    pub rows: usize,
    /// Part of all rows that name a patient, 0..=1.
    pub frac: f64,
}

/// The part of one class.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassBalance {
    /// Class folder.
    pub modality: String,
    /// Number of rows.
    pub rows: usize,
    /// Part of all rows, 0..=1.
    pub frac: f64,
    /// True if units are patients; else they are images, because no row of the class names a patient.
    pub are_patients: bool,
    /// Number of different units.
    pub units: SplitUnits,
    /// The patient with most rows of this class.
    pub largest_patient: Option<PatientRows>,
    /// Half the width of the widest 95 % interval of a share of the test units, 0..=1; `None` for fewer than
    /// [`FEWEST_FOR_INTERVAL`].
    pub half_width: Option<f64>,
}

/// Classes and patients of the good rows.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Balance {
    /// Classes, by name.
    pub classes: Vec<ClassBalance>,
    /// Patients, the one with most rows first.
    pub patients: Vec<PatientRows>,
    /// Number of rows without a patient.
    pub rows_without_patient: usize,
    /// What the numbers allow and do not allow.
    pub advice: Vec<String>,
}

/// The balance of these rows.
pub(super) fn balance<'a>(rows: impl Iterator<Item = &'a Row>) -> Balance {
    let all: Vec<&Row> = rows.collect();
    let mut by_class: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    for row in &all {
        by_class.entry(&row.modality).or_default().push(row);
    }
    let classes: Vec<ClassBalance> =
        by_class.into_iter().map(|(name, rows)| of_class(name, &rows, all.len())).collect();
    let advice = classes.iter().flat_map(advice).collect();
    let rows_without_patient = all.iter().filter(|row| row.patient.is_none()).count();
    Balance { patients: patients(&all), rows_without_patient, advice, classes }
}

fn of_class(name: &str, rows: &[&Row], num_all: usize) -> ClassBalance {
    let are_patients = rows.iter().any(|row| row.patient.is_some());
    let unit = |row: &Row| match &row.patient {
        Some(patient) => patient.clone(),
        // a row without a patient is one of its own beside patients, as in `data prepare`
        None => row.image_path.display().to_string(),
    };
    let of = |split: Split| {
        let units: BTreeSet<String> = rows.iter().filter(|row| row.split == split).map(|row| unit(row)).collect();
        units.len()
    };
    let [train, val, test] = Split::ALL.map(of);
    ClassBalance {
        modality: name.to_owned(),
        rows: rows.len(),
        frac: rows.len() as f64 / num_all.max(1) as f64,
        are_patients,
        units: SplitUnits { train, val, test },
        largest_patient: patients(rows).into_iter().next(),
        half_width: (test >= FEWEST_FOR_INTERVAL).then(|| 1.96 * (0.25 / test as f64).sqrt()),
    }
}

/// The patients of rows, the one with most rows first.
fn patients(rows: &[&Row]) -> Vec<PatientRows> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for patient in rows.iter().filter_map(|row| row.patient.as_deref()) {
        *counts.entry(patient).or_default() += 1;
    }
    let sum: usize = counts.values().sum();
    let of = |(patient, rows): (&str, usize)| PatientRows {
        patient: patient.to_owned(),
        rows,
        frac: rows as f64 / sum.max(1) as f64,
    };
    let mut all: Vec<PatientRows> = counts.into_iter().map(of).collect();
    all.sort_by(|a, b| b.rows.cmp(&a.rows).then_with(|| a.patient.cmp(&b.patient)));
    all
}

/// What the numbers of a class allow and do not allow.
fn advice(class: &ClassBalance) -> Vec<String> {
    let ClassBalance { modality, are_patients, units: SplitUnits { train, val, test }, .. } = class;
    let (one, many) = if *are_patients { ("patient", "patients") } else { ("image", "images") };
    let all = train + val + test;
    let mut found = Vec::new();
    let mut say = |text: String| found.push(format!("class `{modality}`: {text}"));
    if all < 3 {
        say(format!("it has {}: three splits need three {many}, because each is in one split", counted(all, one)));
    } else if *test < FEWEST_FOR_INTERVAL {
        say(format!(
            "its test split has {}: `prsmed eval` gives intervals from {FEWEST_FOR_INTERVAL} {many} on",
            counted(*test, one)
        ));
    }
    if let Some(half_width) = class.half_width {
        say(format!(
            "its test split has {}: a share, such as that of right locations, is then known to within {} to each side (95 %), \
             at worst; four times the {many} halve this",
            counted(*test, one),
            percent(half_width)
        ));
    }
    if *train >= FEWEST_FOR_CURVE {
        say(format!(
            "train with {}, {} and {train} of its {train} training {many} to see whether more would help: an inverse power law \
             through the three scores says how much",
            train / 4,
            train / 2
        ));
    }
    found
}

impl Balance {
    /// Warnings: a patient with most rows, of all or of a class, and classes with too few patients for their splits.
    pub fn texts(&self) -> Vec<String> {
        let has_most = |patients: &PatientRows| patients.frac > 0.5;
        let text = |of: String, PatientRows { patient, rows, frac }: &PatientRows| {
            let share = percent(*frac);
            format!(
                "patient `{patient}` has {rows} of the rows {of} ({share}): a model learns this patient, and not what patients \
                 have in common"
            )
        };
        let is_alone = self.patients.len() == 1;
        let of_all = self.patients.first().filter(|first| has_most(first) && !is_alone);
        let of_class = self.classes.iter().filter(|_| of_all.is_none() && self.classes.len() > 1);
        let of_class = of_class.filter_map(|class| {
            let first = class.largest_patient.as_ref().filter(|first| has_most(first) && first.rows < class.rows)?;
            Some(text(format!("of the class `{}`", class.modality), first))
        });
        let only = self.patients.first().filter(|_| is_alone && self.rows_without_patient == 0);
        let only = only.map(|only| format!("all rows are of one patient, `{}`", only.patient));
        of_all.map(|first| text("that name a patient".into(), first)).into_iter().chain(of_class).chain(only).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn rows(of: &[(&str, &str, Split, usize)]) -> Vec<Row> {
        let row = |(class, patient, split): (&str, &str, Split)| Row {
            modality: class.to_owned(),
            patient: (!patient.is_empty()).then(|| patient.to_owned()),
            split,
            ..fixture::row("q", "a", None)
        };
        of.iter().flat_map(|(class, patient, split, count)| vec![row((class, patient, *split)); *count]).collect()
    }

    #[test]
    fn a_patient_with_most_rows_is_named() {
        use Split::{Test, Train};
        let all = rows(&[("ct", "P1", Train, 6), ("ct", "P2", Train, 3), ("ct", "P3", Test, 2)]);
        let found = balance(all.iter());
        let shares: Vec<_> = found.patients.iter().map(|of| (of.patient.as_str(), of.rows)).collect();
        assert_eq!(shares, [("P1", 6), ("P2", 3), ("P3", 2)]);
        assert!(found.texts()[0].starts_with("patient `P1` has 6 of the rows that name a patient (54.55 %)"));
        // of one class only
        let all =
            rows(&[("ct", "P1", Train, 6), ("ct", "P2", Train, 1), ("mr", "P3", Train, 5), ("mr", "P4", Test, 4)]);
        let texts = balance(all.iter()).texts();
        assert_eq!(texts.len(), 2, "{texts:?}");
        assert!(texts[0].starts_with("patient `P1` has 6 of the rows of the class `ct`"), "{texts:?}");
        let even = rows(&[("ct", "P1", Train, 2), ("ct", "P2", Train, 2), ("ct", "", Test, 9)]);
        let found = balance(even.iter());
        assert_eq!((found.texts(), found.rows_without_patient), (vec![], 9));
        let one = rows(&[("ct", "P1", Train, 2)]);
        assert_eq!(balance(one.iter()).texts(), ["all rows are of one patient, `P1`"]);
    }

    #[test]
    fn advice_states_what_the_numbers_allow() {
        let of = |train: usize, test: usize| {
            let names: Vec<String> = (0..train + test).map(|number| format!("P{number}")).collect();
            let split = |number| if number < train { Split::Train } else { Split::Test };
            let of: Vec<_> =
                names.iter().enumerate().map(|(number, name)| ("ct", name.as_str(), split(number), 2)).collect();
            balance(rows(&of).iter())
        };
        assert!(of(1, 1).advice[0].contains("it has 2 patients: three splits need three patients"));
        let few = of(2, 3);
        assert!(
            few.advice[0].contains("its test split has 3 patients: `prsmed eval` gives intervals from 4 patients on")
        );
        assert_eq!((few.advice.len(), few.classes[0].half_width), (1, None));
        let many = of(40, 25);
        let half_width = many.classes[0].half_width.expect("25 patients");
        assert!((half_width - 0.196).abs() < 1e-12, "1.96 * sqrt(0.25 / 25)");
        assert!(many.advice[0].contains("within 19.60 % to each side"), "{:?}", many.advice);
        assert!(many.advice[1].contains("train with 10, 20 and 40 of its 40 training patients"), "{:?}", many.advice);
    }
}
