//! Files of an evaluation: `summary.json`, `samples.csv`, `patients.csv`, `overlays.png`.

use super::Evaluation;
use crate::data::manifest::Presence;
use crate::data::sheet;
use crate::metrics::estimates::SCORES;
use crate::{Error, Result, files};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Columns of the sheet of overlays.
const COLUMNS: usize = 4;

impl Evaluation {
    /// Writes `summary.json`, `samples.csv` and `overlays.png` (the worst samples by Dice, then the best;
    /// `overlays.csv` lists the tiles) into `folder`, and `patients.csv` if the data name patients.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, folder: &Path) -> Result<()> {
        files::create_folders(folder).map_err(Error::io(folder, "create"))?;
        write_json(&folder.join("summary.json"), &self.summary)?;
        write_csv(&folder.join("samples.csv"), |writer| {
            self.samples.iter().try_for_each(|sample| writer.serialize(sample))
        })?;
        if self.samples.iter().any(|sample| sample.patient.is_some()) {
            write_csv(&folder.join("patients.csv"), |writer| self.patients(writer))?;
        }
        sheet::save_sheet(&self.tiles, COLUMNS, &folder.join("overlays.png"))
    }

    /// One line for each patient: numbers of questions and the mean of each score.
    fn patients(&self, writer: &mut csv::Writer<Vec<u8>>) -> csv::Result<()> {
        let mut groups: BTreeMap<&str, Vec<&super::SampleScore>> = BTreeMap::new();
        for sample in &self.samples {
            groups.entry(sample.group()).or_default().push(sample);
        }
        let header = ["patient", "questions", "present", "absent"].into_iter();
        writer.write_record(header.chain(SCORES.iter().map(|score| score.key)))?;
        for (name, samples) in groups {
            let count = |target: Presence| samples.iter().filter(|sample| sample.target == target).count();
            let counts = [samples.len(), count(Presence::Present), count(Presence::Absent)];
            let mean = |key: &str| {
                let values: Vec<f64> = samples.iter().filter_map(|sample| sample.value(key)).collect();
                let mean = values.iter().sum::<f64>() / values.len() as f64;
                if values.is_empty() { String::new() } else { mean.to_string() }
            };
            let cells = counts.iter().map(ToString::to_string).chain(SCORES.iter().map(|score| mean(score.key)));
            writer.write_record([name.to_owned()].into_iter().chain(cells))?;
        }
        Ok(())
    }
}

/// Writes a value as readable JSON.
///
/// # Errors
/// [`Error::Io`].
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let json = serde_json::to_vec_pretty(value).expect("plain numbers serialise");
    files::write(path, &json).map_err(Error::io(path, "write"))
}

/// Writes a table whose lines `fill` adds.
///
/// # Errors
/// [`Error::Io`].
pub fn write_csv(path: &Path, fill: impl FnOnce(&mut csv::Writer<Vec<u8>>) -> csv::Result<()>) -> Result<()> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    fill(&mut writer).map_err(|e| Error::Io { path: path.into(), action: "write", source: e.into() })?;
    let rows = writer.into_inner().expect("a vector takes all bytes");
    files::write(path, &rows).map_err(Error::io(path, "write"))
}
