//! Report of a training: its curves, from `metrics.jsonl`, and its settings.

use super::evaluation::Facts;
use super::svg::Series;
use super::{Page, number};
use crate::metrics::order;
use crate::trainer::checkpoint;
use crate::trainer::records::METRICS_FILE;
use crate::{Error, Result, files};
use askama::Template;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Most points of a curve; more steps are averaged.
const MAX_POINTS: usize = 400;

/// Writes `report.html` into the folder of a run, from its `metrics.jsonl`. `settings` is its configuration as TOML.
///
/// # Errors
/// [`Error::Io`] if the metrics cannot be read or the report cannot be written; [`Error::Data`] for a line that is not
/// a record.
pub fn write(run: &Path, settings: &str, facts: &Facts) -> Result<()> {
    let path = run.join(METRICS_FILE);
    let text = files::read(&path, files::MAX_TABLE).map_err(Error::io(&path, "read"))?;
    let curves = Curves::read(&path, &String::from_utf8_lossy(&text))?;
    let curves =
        Curves { best: checkpoint::read_progress(&run.join("best")).ok().map(|progress| progress.step), ..curves };
    let name = run.file_name().map_or_else(|| run.display().to_string(), |name| name.to_string_lossy().into());
    super::write(run, &TrainingPage::new(&name, &curves, settings, facts))
}

/// Values over steps.
#[derive(Debug, Default)]
struct Curves {
    /// Losses and other values of the steps, by name.
    steps: BTreeMap<String, Vec<(f64, Option<f64>)>>,
    /// Values of the validations, by name.
    validations: BTreeMap<String, Vec<(f64, Option<f64>)>>,
    /// Number of steps planned.
    total: Option<u64>,
    last: u64,
    /// The step of the checkpoint `best/`.
    best: Option<u64>,
}

impl Curves {
    fn read(path: &Path, text: &str) -> Result<Self> {
        let mut curves = Self::default();
        for (number, line) in (1_u64..).zip(text.lines()) {
            let record: Value = serde_json::from_str(line).map_err(|error| {
                Error::data_line(path, number, format!("this line is not a record: {error}"), "remove that line")
            })?;
            curves.add(&record);
        }
        Ok(curves)
    }

    fn add(&mut self, record: &Value) {
        let Some(step) = record["step"].as_u64() else { return };
        let at = step as f64;
        let push = |into: &mut BTreeMap<String, Vec<_>>, name: &str, value: &Value| {
            into.entry(name.to_owned()).or_default().push((at, value.as_f64().filter(|value| value.is_finite())));
        };
        if record["kind"] == "validation" {
            for (name, value) in record["values"].as_object().into_iter().flatten() {
                push(&mut self.validations, name, value);
            }
            return;
        }
        self.last = self.last.max(step);
        self.total = record["total_steps"].as_u64().or(self.total);
        for (name, value) in record["losses"].as_object().into_iter().flatten() {
            push(&mut self.steps, &format!("loss: {name}"), value);
        }
        for name in ["learning_rate", "grad_norm", "images_per_s"] {
            push(&mut self.steps, name, &record[name]);
        }
    }
}

/// At most [`MAX_POINTS`] points: means of equal numbers of steps. A mean leaves out values that are not finite.
fn thinned(points: &[(f64, Option<f64>)]) -> Vec<(f64, Option<f64>)> {
    let mean =
        |part: &[(f64, Option<f64>)]| (part[part.len() - 1].0, order::mean(part.iter().filter_map(|point| point.1)));
    points.chunks(points.len().div_ceil(MAX_POINTS).max(1)).map(mean).collect()
}

#[derive(Template)]
#[template(path = "training.html")]
struct TrainingPage {
    page: Page,
    /// Title, value, note.
    cards: Vec<(String, String, String)>,
    /// Titles with at most four curves each.
    charts: Vec<(&'static str, Vec<Series>)>,
    columns: Vec<String>,
    validations: Vec<ValidationRow>,
    facts: Facts,
}

struct ValidationRow {
    step: u64,
    is_best: bool,
    cells: Vec<Option<f64>>,
}

impl TrainingPage {
    fn new(name: &str, curves: &Curves, settings: &str, facts: &Facts) -> Self {
        let total = curves.total.map_or_else(String::new, |total| format!("of {total} planned"));
        let mut cards = vec![("Steps".to_owned(), curves.last.to_string(), total)];
        for (name, points) in &curves.validations {
            let measured = || points.iter().rev().filter_map(|point| point.1.map(|value| (point.0, value)));
            let best = measured().find(|(step, _)| curves.best.is_some_and(|best| *step == best as f64));
            let place = if best.is_some() { " (the checkpoint best/)" } else { "" };
            cards.extend(best.or_else(|| measured().next()).map(|(step, value)| {
                (format!("Validation: {name}"), number(Some(value)), format!("after step {step}{place}"))
            }));
        }
        let mut all_facts = facts.clone();
        all_facts.extend(flat(settings));
        Self {
            page: Page::new(&format!("Training of {name}"), "Curves from metrics.jsonl"),
            cards,
            charts: charts(curves),
            columns: curves.validations.keys().cloned().collect(),
            validations: validation_rows(curves),
            facts: all_facts,
        }
    }
}

fn charts(curves: &Curves) -> Vec<(&'static str, Vec<Series>)> {
    let of = |from: &BTreeMap<String, Vec<_>>, test: &dyn Fn(&str) -> bool, prefix: &str| -> Vec<Series> {
        let kept = from.iter().filter(|(name, _)| test(name));
        let series = |(name, points): (&String, &Vec<_>)| Series {
            name: name.strip_prefix(prefix).unwrap_or(name).to_owned(),
            points: thinned(points),
        };
        kept.map(series).collect()
    };
    let is_loss = |name: &str| name.contains("loss");
    let groups = [
        ("Training loss", of(&curves.steps, &is_loss, "loss: ")),
        ("Validation scores", of(&curves.validations, &|name| !is_loss(name), "")),
        ("Validation loss", of(&curves.validations, &is_loss, "")),
        ("Learning rate", of(&curves.steps, &|name| name == "learning_rate", "")),
        ("Norm of the gradient", of(&curves.steps, &|name| name == "grad_norm", "")),
        ("Images per second", of(&curves.steps, &|name| name == "images_per_s", "")),
    ];
    // the style sheet has four colours
    groups.iter().flat_map(|(title, series)| series.chunks(4).map(|part| (*title, part.to_vec()))).collect()
}

/// Whether a curve has so many points that they are means.
fn has_means(series: &[Series]) -> bool {
    series.iter().any(|series| series.points.len() >= MAX_POINTS / 2)
}

fn validation_rows(curves: &Curves) -> Vec<ValidationRow> {
    let mut rows: BTreeMap<u64, BTreeMap<&str, Option<f64>>> = BTreeMap::new();
    for (name, points) in &curves.validations {
        for (step, value) in points {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of a step")]
            rows.entry(*step as u64).or_default().insert(name, *value);
        }
    }
    let row = |(step, values): (u64, BTreeMap<&str, Option<f64>>)| ValidationRow {
        step,
        is_best: curves.best == Some(step),
        cells: curves.validations.keys().map(|name| values.get(name.as_str()).copied().flatten()).collect(),
    };
    rows.into_iter().map(row).collect()
}

/// The settings of a TOML text as pairs of dotted keys and values.
fn flat(settings: &str) -> Facts {
    fn add(prefix: &str, value: &toml::Value, into: &mut Facts) {
        match value {
            toml::Value::Table(table) => {
                for (key, value) in table {
                    let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                    add(&name, value, into);
                }
            }
            toml::Value::String(text) => into.push((prefix.to_owned(), text.clone())),
            other => into.push((prefix.to_owned(), other.to_string())),
        }
    }
    let mut facts = Facts::new();
    if let Ok(table) = settings.parse::<toml::Table>() {
        add("", &toml::Value::Table(table), &mut facts);
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_the_curves_and_settings_of_its_run() {
        let run = tempfile::tempdir().unwrap();
        let mut lines = String::new();
        for step in 1..=1000 {
            let loss = if step == 500 { "null".to_owned() } else { format!("{}", 2.0 / f64::from(step)) };
            let line = format!(
                "{{\"kind\":\"step\",\"step\":{step},\"total_steps\":1200,\"losses\":{{\"seg\":{loss}}},\
                 \"learning_rate\":1e-4,\"grad_norm\":1.5,\"images_per_s\":3.0}}\n"
            );
            lines += &line;
        }
        lines += "{\"kind\":\"validation\",\"step\":900,\"values\":{\"dice\":0.875,\"<b>\":1}}\n";
        lines += "{\"kind\":\"validation\",\"step\":1000,\"values\":{\"dice\":0.625,\"<b>\":1}}\n";
        std::fs::write(run.path().join(METRICS_FILE), &lines).unwrap();
        let facts = vec![("prsmed".to_owned(), "<script>alert(1)</script>".to_owned())];
        std::fs::create_dir(run.path().join("best")).unwrap();
        std::fs::write(run.path().join("best/trainer.json"), br#"{"step":900,"best_score":null,"without_gain":0,"scaler":{"scale":1.0,"good_steps":0,"dynamic":false},"steps_per_epoch":4}"#).unwrap();
        write(run.path(), "[train]\nseed = 3\nname = \"a<b\"\n", &facts).unwrap();
        let page = std::fs::read_to_string(run.path().join(super::super::REPORT_FILE)).unwrap();
        for part in [
            "Training loss",
            "Validation scores",
            "0.625",
            "after step 900 (the checkpoint best/)",
            "900 (best)",
            "of 1200 planned",
            "train.seed",
            "a&#60;b",
        ] {
            assert!(page.contains(part), "{part}");
        }
        assert!(!page.contains("<script>alert") && !page.contains("<b>"));
        assert!(page.len() < 200_000, "{}", page.len());
        std::fs::write(run.path().join(METRICS_FILE), "no record\n").unwrap();
        let error = write(run.path(), "", &facts).unwrap_err().to_string();
        assert!(error.contains("metrics.jsonl:1"), "{error}");
    }

    #[test]
    fn long_curves_are_averaged() {
        let points: Vec<(f64, Option<f64>)> = (1..=4000).map(|i| (f64::from(i), Some(f64::from(i % 2)))).collect();
        let thin = thinned(&points);
        assert_eq!((thin.len(), thin[0], thin[399]), (400, (10.0, Some(0.5)), (4000.0, Some(0.5))));
        assert_eq!(thinned(&points[..3]), points[..3]);
        assert_eq!(thinned(&[]), []);
        assert_eq!(thinned(&[(1.0, None)]), [(1.0, None)]);
    }
}
