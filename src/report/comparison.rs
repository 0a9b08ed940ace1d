//! Comparison of several runs that were scored on the same questions: a text table, files and a report.

use super::{Page, REPORT_FILE, number};
use crate::Result;
use crate::front::evaluate::files::{write_csv, write_json};
use crate::metrics::estimates::{self, Difference, Estimates, QuestionScores, differences, keys_in_order, title};
use crate::metrics::paired::Interval;
use crate::metrics::table::EvalSummary;
use crate::metrics::text_table::aligned;
use crate::units::fixed;
use askama::Template;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// One of the compared runs.
#[derive(Debug, Clone)]
pub struct Compared {
    /// Name; its report is in the folder of this name.
    pub name: String,
    /// Its scores.
    pub summary: EvalSummary,
    /// Its scores question by question.
    pub items: Vec<QuestionScores>,
}

/// Scores of several runs on the same questions. Its [`Display`](fmt::Display) is a table.
#[derive(Debug, Clone)]
pub struct RunComparison {
    runs: Vec<Compared>,
    /// Differences of each run but the first from the first.
    pub differences: Vec<RunDifferences>,
}

/// Differences of one run from the baseline.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunDifferences {
    /// The run.
    pub run: String,
    /// The first run.
    pub baseline: String,
    /// One difference for each score that both have.
    pub scores: Vec<Difference>,
}

impl RunComparison {
    /// Compares runs with the first one.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if the runs were not scored on the same questions.
    pub fn new(runs: Vec<Compared>) -> Result<Self> {
        let Some((first, others)) = runs.split_first() else { return Ok(Self { runs, differences: Vec::new() }) };
        let compare = |run: &Compared| -> Result<RunDifferences> {
            let scores = differences(&first.items, &run.items)?;
            Ok(RunDifferences { run: run.name.clone(), baseline: first.name.clone(), scores })
        };
        let differences = others.iter().map(compare).collect::<Result<_>>()?;
        Ok(Self { runs, differences })
    }

    /// Writes `comparison.json`, `comparison.csv` and `report.html` into `folder`.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io).
    pub fn write(&self, folder: &Path, subtitle: &str) -> Result<()> {
        write_json(&folder.join("comparison.json"), &self.differences)?;
        write_csv(&folder.join("comparison.csv"), |writer| {
            let header = [
                "score", "run", "baseline", "questions", "baseline_mean", "mean", "difference", "difference_low",
                "difference_high",
            ];
            writer.write_record(header)?;
            for RunDifferences { run, baseline, scores } in &self.differences {
                for row in scores {
                    let (low, high) = (row.interval.map(|i| i.low), row.interval.map(|i| i.high));
                    let numbers = (row.count, row.baseline, row.other, row.difference, low, high);
                    writer.serialize((&row.score, run, baseline, numbers))?;
                }
            }
            Ok(())
        })?;
        super::write(folder, &self.page(subtitle))
    }

    /// Scores that at least one run has, in the order of tables.
    fn keys(&self) -> Vec<&'static str> {
        let all: Estimates = self.runs.iter().flat_map(|run| run.summary.all_images.estimates.clone()).collect();
        keys_in_order(&all)
    }

    /// What the runs were trained on of these questions, masks that their presence thresholds withheld, and how words and masks
    /// agree.
    fn notes(&self) -> Vec<String> {
        let notes = |run: &Compared| {
            let EvalSummary { protocol, .. } = &run.summary;
            let others = [run.summary.withheld(), run.summary.positions()].into_iter().flatten();
            let notes = protocol.trained_on.notes().into_iter().chain(others);
            notes.map(|note| format!("{}: {note}", run.name)).collect::<Vec<_>>()
        };
        self.runs.iter().flat_map(notes).collect()
    }

    fn length(&self) -> &str {
        self.runs.first().map_or("px", |run| &run.summary.protocol.length)
    }

    fn page<'a>(&'a self, subtitle: &str) -> ComparisonPage<'a> {
        let names: BTreeSet<&str> = self.runs.iter().map(|run| run.name.as_str()).collect();
        ComparisonPage {
            page: Page::new(&format!("Comparison of {} runs", names.len()), subtitle),
            baseline: self.runs.first().map_or("", |run| &run.name),
            length: self.length(),
            runs: &self.runs,
            keys: self.keys(),
            notes: self.notes(),
            differences: &self.differences,
        }
    }
}

/// Relative address of a run's report. Characters that have a meaning in addresses are encoded.
fn href(name: &str) -> String {
    let encode = |byte: u8| {
        let is_plain = byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
        if is_plain { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    };
    format!("./{}/{REPORT_FILE}", name.bytes().map(encode).collect::<String>())
}

/// A difference with its sign.
fn with_sign(value: f64) -> String {
    format!("{}{}", if value > 0.0 { "+" } else { "" }, number(Some(value)))
}

/// What an interval of a difference shows.
fn result(interval: Option<Interval>) -> &'static str {
    match interval {
        Some(Interval { low, .. }) if low > 0.0 => "higher",
        Some(Interval { high, .. }) if high < 0.0 => "lower",
        Some(_) => "no difference shown",
        None => "no interval",
    }
}

#[derive(Template)]
#[template(path = "comparison.html")]
struct ComparisonPage<'a> {
    page: Page,
    baseline: &'a str,
    length: &'a str,
    runs: &'a [Compared],
    keys: Vec<&'static str>,
    notes: Vec<String>,
    differences: &'a [RunDifferences],
}

impl fmt::Display for RunComparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let length = self.length();
        // wider tables do not fit a terminal; the report has all intervals
        let has_intervals = self.runs.len() <= 2;
        let mut header = vec!["score"];
        for run in &self.runs {
            header.push(run.name.as_str());
            header.extend(has_intervals.then_some("95 %"));
        }
        let cells = |key: &'static str| -> Vec<String> {
            let mut cells = vec![title(key, length)];
            for run in &self.runs {
                let estimate = run.summary.all_images.estimates.get(key);
                cells.push(estimate.map_or_else(|| "-".to_owned(), |estimate| fixed(estimate.mean, 4)));
                let range = || estimates::range(estimate.and_then(|estimate| estimate.interval.as_ref()));
                cells.extend(has_intervals.then(range));
            }
            cells
        };
        let rows: Vec<Vec<String>> = self.keys().into_iter().map(cells).collect();
        f.write_str(&aligned(&header, &rows, None))?;
        for RunDifferences { run, baseline, scores } in &self.differences {
            writeln!(f, "\n{run} compared with {baseline}, question by question")?;
            f.write_str(&estimates::difference_table(scores, [baseline, run], length))?;
        }
        writeln!(f, "intervals: 95 %, bootstrap over patients (an image without one counts as one)")?;
        self.notes().into_iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}
