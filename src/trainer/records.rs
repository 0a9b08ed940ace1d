//! Log files of a run: `metrics.jsonl` (one JSON object a line) and a TensorBoard event file in the same folder.

mod event_file;
pub(super) mod log_file;

use std::io::Cursor;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

pub use event_file::EventFile;

use crate::ValidationPicture;
use image::ImageFormat;
use log_file::LogFile;
use prsmed_base::error::{Error, Result};
use prsmed_base::event::StepReport;
use prsmed_base::files;

/// Name of the JSON lines file in a run folder.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// Writes the log files of one run. Records are written at once; while the disk is full, they wait in memory.
#[derive(Debug)]
pub struct Records {
    lines: LogFile,
    events: EventFile,
    is_full: bool,
    warning: Option<String>,
    folder: PathBuf,
}

impl Records {
    /// Opens the log files in the existing `folder`. With `resumed_step` (optimizer steps already done), lines of later
    /// steps and a partial last line are removed. Without it, an older `metrics.jsonl` is replaced.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] for a line that is not a record, unless it is the last.
    pub fn open(folder: &Path, resumed_step: Option<u64>) -> Result<Self> {
        let path = folder.join(METRICS_FILE);
        let kept = match resumed_step {
            Some(step) if path.exists() => lines_until(&path, step)?,
            _ => String::new(),
        };
        // replaced as a whole, so that a crash here loses nothing
        files::write(&path, kept.as_bytes()).map_err(Error::io(&path, "write"))?;
        let lines = files::open_to_change(&path).map_err(Error::io(&path, "write"))?;
        let lines = LogFile::new(lines, path)?;
        let events = EventFile::create(folder, resumed_step.map(|step| step + 1))?;
        Ok(Self { folder: folder.to_owned(), lines, events, is_full: false, warning: None })
    }

    /// Writes one optimizer step.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn step(&mut self, report: &StepReport) -> Result<()> {
        let line = step_line(report);
        let mut scalars: Vec<(String, f64)> =
            report.losses.iter().map(|(name, value)| (format!("loss/{name}"), *value)).collect();
        scalars.extend([
            ("train/learning_rate".into(), report.learning_rate),
            ("train/grad_norm".into(), report.grad_norm),
            ("train/images_per_s".into(), images_per_s(report)),
            ("train/data_wait_share".into(), report.data_wait_share()),
            ("memory/allocated_peak_bytes".into(), report.allocated_peak as f64),
        ]);
        self.write(&line, report.step, &scalars)
    }

    /// Writes a validation after `step` optimizer steps.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn validation(&mut self, step: u64, values: &[(String, f64)]) -> Result<()> {
        let scalars: Vec<(String, f64)> = values.iter().map(|(name, value)| (format!("val/{name}"), *value)).collect();
        self.write(&validation_line(step, values), step, &scalars)
    }

    /// Writes a picture to `NAME/step-000123.png` in the run folder and to the event file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn picture(&mut self, step: u64, picture: &ValidationPicture) -> Result<()> {
        let folder = self.folder.join(&picture.name);
        files::create_folders(&folder).map_err(Error::io(&folder, "create"))?;
        let mut png = Cursor::new(Vec::new());
        let (path, image) = (folder.join(format!("step-{step:06}.png")), &picture.image);
        image
            .write_to(&mut png, ImageFormat::Png)
            .map_err(|error| Error::Internal { reason: format!("cannot encode {}: {error}", path.display()) })?;
        files::write(&path, png.get_ref()).map_err(Error::io(&path, "write"))?;
        self.events.picture(step, (&picture.name, image.dimensions()), png.get_ref()).map(drop)
    }

    /// Waits until all lines are on disk. A checkpoint is published only after the lines of its steps.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&mut self) -> Result<()> {
        self.events.flush()?;
        self.lines.sync()
    }

    /// A warning that the disk is full, once each time it becomes full.
    pub fn take_warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    fn write(&mut self, line: &Value, step: u64, scalars: &[(String, f64)]) -> Result<()> {
        let has_line = self.lines.append(format!("{line}\n").as_bytes())?;
        let is_full = !self.events.scalars(step, scalars)? || !has_line;
        if is_full && !self.is_full {
            let text = "no room on the disk for the log files; training continues, and their lines are written when \
                        there is room: free some space";
            self.warning = Some(text.to_owned());
        }
        self.is_full = is_full;
        Ok(())
    }
}

/// One optimizer step as a JSON object, `"kind": "step"`.
pub fn step_line(report: &StepReport) -> Value {
    json!({
        "kind": "step",
        "step": report.step,
        "total_steps": report.total_steps,
        "epoch": report.epoch,
        "losses": object(&report.losses),
        "learning_rate": report.learning_rate,
        "grad_norm": report.grad_norm,
        "samples": report.samples,
        "seconds": report.elapsed.as_secs_f64(),
        "data_wait_seconds": report.data_wait.as_secs_f64(),
        "images_per_s": images_per_s(report),
        "allocated_peak": report.allocated_peak,
    })
}

/// One validation as a JSON object, `"kind": "validation"`.
pub fn validation_line(step: u64, values: &[(String, f64)]) -> Value {
    json!({ "kind": "validation", "step": step, "values": object(values) })
}

/// Samples per second of one step; 0 when it took no time.
pub fn images_per_s(report: &StepReport) -> f64 {
    let seconds = report.elapsed.as_secs_f64();
    if seconds > 0.0 { report.samples as f64 / seconds } else { 0.0 }
}

/// A JSON object; NaN and infinities, which JSON lacks, become null.
fn object(values: &[(String, f64)]) -> Value {
    Value::Object(values.iter().map(|(name, value)| (name.clone(), json!(value))).collect::<Map<_, _>>())
}

/// The lines of a metrics file up to and including `step`.
fn lines_until(path: &Path, step: u64) -> Result<String> {
    let bytes = files::read(path, files::MAX_TABLE).map_err(Error::io(path, "read"))?;
    // a partial line may end inside a character
    let text = String::from_utf8_lossy(&bytes);
    let mut kept = String::with_capacity(text.len());
    for (number, line) in (1_u64..).zip(text.split_inclusive('\n')) {
        // a power cut may leave zeros in place of lines after the last checkpoint
        let is_partial = !line.ends_with('\n') || line.contains('\0');
        let parsed: Option<Value> = serde_json::from_str(line).ok();
        match parsed.as_ref().and_then(|value| value.get("step")).and_then(Value::as_u64) {
            Some(found) if found <= step && !is_partial => kept.push_str(line),
            Some(_) => {}
            None if is_partial => {}
            None => {
                let hint = "remove that line, or move the file away to start a new one";
                return Err(Error::data_line(path, number, "this line is not a record of a step", hint));
            }
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;
    use std::time::Duration;

    use super::*;

    fn report(step: u64) -> StepReport {
        StepReport {
            step,
            total_steps: 10,
            losses: vec![("seg".into(), 0.5), ("total".into(), f64::NAN)],
            learning_rate: 1e-4,
            samples: 8,
            elapsed: Duration::from_secs(2),
            allocated_peak: 1 << 20,
            ..StepReport::default()
        }
    }

    fn steps(folder: &Path) -> Vec<(String, u64)> {
        let text = fs::read_to_string(folder.join(METRICS_FILE)).unwrap();
        text.lines()
            .map(|line| {
                let value: Value = serde_json::from_str(line).unwrap();
                (value["kind"].as_str().unwrap().to_owned(), value["step"].as_u64().unwrap())
            })
            .collect()
    }

    fn a_run(folder: &Path) {
        let mut records = Records::open(folder, None).unwrap();
        for step in 1..=4 {
            records.step(&report(step)).unwrap();
        }
        records.validation(4, &[("dice".into(), 0.75)]).unwrap();
        records.step(&report(5)).unwrap();
    }

    #[test]
    fn lines_hold_the_step() {
        let folder = tempfile::tempdir().unwrap();
        a_run(folder.path());
        let text = fs::read_to_string(folder.path().join(METRICS_FILE)).unwrap();
        let first: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        assert_eq!(first["losses"], json!({ "seg": 0.5, "total": null }));
        assert_eq!(first["images_per_s"], json!(4.0));
        let validation: Value = serde_json::from_str(text.lines().nth(4).unwrap()).unwrap();
        assert_eq!(validation, json!({ "kind": "validation", "step": 4, "values": { "dice": 0.75 } }));
    }

    #[test]
    fn resuming_removes_later_steps_and_a_partial_line() {
        let folder = tempfile::tempdir().unwrap();
        a_run(folder.path());
        let path = folder.path().join(METRICS_FILE);
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"{\"kind\": \"step\", \"step\": 3, \"loss\xc3").unwrap();
        let mut records = Records::open(folder.path(), Some(4)).unwrap();
        records.step(&report(5)).unwrap();
        let expected = [("step", 1), ("step", 2), ("step", 3), ("step", 4), ("validation", 4), ("step", 5)];
        assert_eq!(steps(folder.path()), expected.map(|(kind, step)| (kind.to_owned(), step)));
    }

    #[test]
    fn zeros_that_a_power_cut_leaves_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        a_run(folder.path());
        let path = folder.path().join(METRICS_FILE);
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"\0\0\0\0\0: 0.5}\n\0\0\0\0\n").unwrap();
        Records::open(folder.path(), Some(5)).unwrap();
        assert_eq!(steps(folder.path()).len(), 6);
    }

    #[test]
    fn links_in_a_run_folder_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("thesis.txt");
        let run = folder.path().join("run");
        fs::create_dir(&run).unwrap();
        fs::write(&precious, "thesis").unwrap();
        for name in [METRICS_FILE, "metrics.jsonl.partial"] {
            std::os::unix::fs::symlink(&precious, run.join(name)).unwrap();
        }
        a_run(&run);
        assert_eq!(fs::read_to_string(&precious).unwrap(), "thesis");
        assert_eq!(steps(&run).len(), 6);
    }

    #[test]
    fn a_new_run_replaces_the_file() {
        let folder = tempfile::tempdir().unwrap();
        a_run(folder.path());
        Records::open(folder.path(), None).unwrap();
        assert_eq!(steps(folder.path()), []);
    }

    #[test]
    fn a_line_that_is_not_a_record_is_named() {
        let folder = tempfile::tempdir().unwrap();
        a_run(folder.path());
        let path = folder.path().join(METRICS_FILE);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replacen('{', "hello {", 1)).unwrap();
        let error = Records::open(folder.path(), Some(4)).unwrap_err();
        assert_eq!(error.to_string(), format!("{}:1: this line is not a record of a step", path.display()));
        assert!(!error.hint().is_empty());
    }
}
