//! The check of a data root in words and tables.

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
        .chain(report.words.texts())
        .chain(report.depth.warning())
        .chain(report.findings.texts())
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
