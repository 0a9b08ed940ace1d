//! The check of a data root in words and tables.

use crate::data::check::balance::{ClassBalance, SplitUnits};
use crate::data::check::{CheckReport, ModalityCounts, Uncovered};
use crate::data::fingerprint::{Fingerprint, ValueRange};
use crate::data::manifest::Split;
use crate::metrics::text_table::columns;

/// What is not wrong with a row, but the user should know.
pub fn warnings(report: &CheckReport) -> Vec<String> {
    let uncovered = report.uncovered.iter().map(|Uncovered { split, classes }| {
        format!("these classes have no `{split}` images: `{}`", classes.join("`, `"))
    });
    let left_out = (report.left_out > 0).then(|| {
        format!("a training leaves out {} synthetic rows: their sources are `val` or `test` images", report.left_out)
    });
    let without_target = |class: &&Fingerprint| class.present == 0 && class.absent > 0;
    let without_target = report.fingerprint.iter().filter(without_target).map(|class| {
        format!(
            "class `{}`: no image shows its target ({} questions about an absent one): a model cannot learn its masks",
            class.modality, class.absent
        )
    });
    without_target
        .chain(report.other_leaks.iter().cloned())
        .chain(report.spellings.clone())
        .chain(left_out)
        .chain(uncovered)
        .chain(report.balance.texts())
        .chain(report.given_away.texts())
        .chain(report.words.texts())
        .chain(report.depth.warning())
        .chain(report.findings.texts())
        .chain(report.target_sizes.texts())
        .collect()
}

/// Table of good rows by modality and split, with totals.
pub fn count_table(report: &CheckReport) -> String {
    let width = report.counts.iter().map(|count| count.modality.chars().count()).max().unwrap_or(0).max(8);
    let row = |name: &str, [a, b, c, d]: [String; 4]| format!("{name:<width$}{a:>8}{b:>8}{c:>8}{d:>8}\n");
    let numbers = |count: &ModalityCounts| {
        let ModalityCounts { train, val, test, .. } = *count;
        [train, val, test, train + val + test].map(|number| number.to_string())
    };
    let [train, val, test] = Split::ALL.map(|split| split.name().to_owned());
    let mut text = row("modality", [train, val, test, "all".into()]);
    let mut sum = ModalityCounts { modality: "all".into(), ..ModalityCounts::default() };
    for count in &report.counts {
        text += &row(&count.modality, numbers(count));
        sum.train += count.train;
        sum.val += count.val;
        sum.test += count.test;
    }
    text += &row(&sum.modality, numbers(&sum));
    let bad = if report.is_good() { "no bad rows".into() } else { format!("{} bad", report.bad.len()) };
    let extra = match report.extra_rows {
        0 => String::new(),
        count => format!(" ({count} rows are of extra data roots and not in the table)"),
    };
    format!("{text}{} rows of {} images{extra}, {bad}", report.rows, report.images)
}

/// Table of what decides whether a training is worth its time, one line for each class.
pub fn balance_table(report: &CheckReport) -> String {
    let rows = balance_rows(report).into_iter().map(|row| row.to_vec());
    let text = columns(&std::iter::once(BALANCE_HEAD.map(str::to_owned).to_vec()).chain(rows).collect::<Vec<_>>());
    let grid = report.target_sizes.grid_side.map(|side| format!("the mask head draws on {side} x {side} cells"));
    format!("{text}{}", grid.unwrap_or_default())
}

/// Heads of the columns of [`balance_rows`].
pub const BALANCE_HEAD: [&str; 8] =
    ["modality", "% of rows", "units", "train/val/test", "largest patient", "targets", "< 2 cells", "at border"];

/// For each class: its part of the rows, its patients or images in each split, the patient with most rows, and the numbers of
/// its targets, of those that are small for the mask head, and of those at the border.
pub fn balance_rows(report: &CheckReport) -> Vec<[String; 8]> {
    let row = |class: &ClassBalance| {
        let SplitUnits { train, val, test } = class.units;
        let counts = report.target_sizes.classes.get(&class.modality).copied().unwrap_or_default();
        let largest = class.largest_patient.as_ref();
        let small = report.target_sizes.grid_side.map(|_| counts.small.to_string());
        [
            class.modality.clone(),
            format!("{:.1}", 100.0 * class.frac),
            if class.are_patients { "patients" } else { "images" }.to_owned(),
            format!("{train}/{val}/{test}"),
            largest.map_or_else(|| "-".to_owned(), |of| format!("{} ({:.1} %)", of.patient, 100.0 * of.frac)),
            counts.targets.to_string(),
            small.unwrap_or_else(|| "-".to_owned()),
            counts.at_border.to_string(),
        ]
    };
    report.balance.classes.iter().map(row).collect()
}

/// Table of the fingerprint, one line for each class.
pub fn fingerprint_table(report: &CheckReport) -> String {
    let head = ["modality", "images", "patients", "width", "height", "mm/pixel", "grey", "foreground %", "labels"];
    let mut table = vec![head.into_iter().chain(["absent", "unknown"]).map(str::to_owned).collect::<Vec<_>>()];
    table.extend(report.fingerprint.iter().map(fingerprint_cells));
    let text = columns(&table);
    format!("{text}{} image files are copies of another one", report.copies)
}

fn fingerprint_cells(class: &Fingerprint) -> Vec<String> {
    let range = |range: Option<ValueRange>, digits: usize, times: f64| match range {
        None => "-".to_owned(),
        Some(ValueRange { min, median, max }) => {
            let [min, median, max] = [min, median, max].map(|value| format!("{:.digits$}", value * times));
            if min == max { min } else { format!("{min}..{median}..{max}") }
        }
    };
    let labels: Vec<String> = match class.labels.len() {
        0..=6 => class.labels.keys().map(u16::to_string).collect(),
        more => vec![format!("{more} labels")],
    };
    vec![
        class.modality.clone(),
        class.images.to_string(),
        class.patients.map_or_else(|| "-".to_owned(), |count| count.to_string()),
        range(class.width_px, 0, 1.0),
        range(class.height_px, 0, 1.0),
        range(class.spacing_mm, 2, 1.0),
        format!("{}..{}", class.grey.p1, class.grey.p99),
        range(class.foreground_frac, 1, 100.0),
        labels.join(","),
        class.absent.to_string(),
        class.unknown.to_string(),
    ]
}
