//! What a scan finds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::Serialize;

use super::super::item::Skipped;
use super::super::table::{Pair, PairKind, PairTable};
use crate::names;
use crate::volume::dicom::SeriesRow;
use crate::volume::sequences::names_problem;
use prsmed_base::{Error, Result};

/// Most ambiguous images that an error names.
const MAX_NAMED: usize = 3;

/// Choices for a scan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScanOptions {
    /// Name of the layout; `None` for the one that explains most files.
    pub layout: Option<String>,
    /// The sequence, phase or channel to use where an image has several; or two or three with commas between, as colours.
    pub channel: Option<String>,
    /// The DICOM series to use where a folder has several, as after `#` in [`crate::volume::open`].
    pub series: Option<String>,
}

impl ScanOptions {
    /// The names of the channels.
    pub(super) fn sequences(&self) -> Vec<&str> {
        self.channel.iter().flat_map(|names| names.split(',')).map(str::trim).collect()
    }

    /// Refuses channels that cannot be the sequences of an image.
    pub(super) fn check(&self) -> Result<()> {
        let names = self.sequences();
        let problem = names_problem(&names).filter(|_| names.len() > 1);
        problem.map_or(Ok(()), |(reason, hint)| Err(Error::argument("channel", reason, hint)))
    }
}

/// A layout by its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayoutRow {
    /// Name for the options.
    pub name: &'static str,
    /// Names of its files.
    pub about: &'static str,
    /// Number of images and volumes that it pairs.
    pub images: usize,
}

/// An image whose files can be understood in several ways.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ambiguous {
    /// Name of the image.
    pub name: String,
    /// The files.
    pub files: Vec<PathBuf>,
    /// What is not clear, and what decides it.
    pub reason: String,
}

/// The series of a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FolderSeries {
    /// The folder.
    pub folder: PathBuf,
    /// Its series, by number.
    pub series: Vec<SeriesRow>,
    /// Indices of the series that a preparation uses; empty if several fit and nothing chooses one, or none fits.
    pub used: BTreeSet<usize>,
}

/// What a scan finds.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ScanReport {
    /// The folder.
    pub root: PathBuf,
    /// Its layouts, the one with most files first.
    pub layouts: Vec<LayoutRow>,
    /// Number of patients; `None` if the layout does not know them.
    pub patients: Option<usize>,
    /// Number of images with a mask.
    pub images: usize,
    /// Number of volumes with a label map.
    pub volumes: usize,
    /// Number of mask files of pairs.
    pub masks: usize,
    /// Number of images and volumes by the name of each structure that their masks show.
    pub structures: BTreeMap<String, usize>,
    /// Number of files by sequence, phase or channel.
    pub sequences: BTreeMap<String, usize>,
    /// Number of images and volumes by split, if the layout gives them.
    pub splits: BTreeMap<String, usize>,
    /// Files that belong to no pair, each with the reason.
    pub unmatched: Vec<Skipped>,
    /// Images whose files are not clear. With any of them, nothing is prepared until a table decides.
    pub ambiguous: Vec<Ambiguous>,
    /// Masks of another size than their image, and files that cannot be read.
    pub problems: Vec<Skipped>,
    /// DICOM series of folders. Descriptions and dates are those of the headers, which may say who a patient is.
    pub series: Vec<FolderSeries>,
    /// Image files with equal content.
    pub copies: Vec<Vec<PathBuf>>,
    /// What was assumed, in sentences for the user.
    pub notes: Vec<String>,
    /// The pairs.
    #[serde(skip)]
    pub(super) table: PairTable,
    /// Pairs that are not clear, one for each of the first ambiguities.
    #[serde(skip)]
    pub(super) undecided: Vec<Pair>,
    /// Images without a mask.
    #[serde(skip)]
    pub(super) alone: Vec<Pair>,
}

impl ScanReport {
    /// The rows of the table that is printed: name and value.
    pub fn summary(&self) -> Vec<(String, String)> {
        let counts = |counts: &BTreeMap<String, usize>| {
            counts.iter().map(|(name, count)| format!("{name} ({count})")).collect::<Vec<_>>().join(", ")
        };
        let layouts = self.layouts.iter().map(|row| format!("{} ({})", row.name, row.images)).collect::<Vec<_>>();
        let unknown = |text: String, what: &str| if text.is_empty() { what.to_owned() } else { text };
        let several = self.series.iter().filter(|found| found.series.len() > 1).count();
        let num_series: usize = self.series.iter().map(|found| found.series.len()).sum();
        let series = format!("{num_series} in {} folders, {several} of them with several", self.series.len());
        let all = [
            ("layout", unknown(layouts.join(", "), "none")),
            ("patients", self.patients.map_or("not known".to_owned(), |count| count.to_string())),
            ("images", self.images.to_string()),
            ("volumes", self.volumes.to_string()),
            ("masks", self.masks.to_string()),
            ("structures", unknown(counts(&self.structures), "without names")),
            ("sequences", unknown(counts(&self.sequences), "one")),
            ("series", series),
            ("splits", unknown(counts(&self.splits), "to be drawn")),
            ("ambiguous", self.ambiguous.len().to_string()),
            ("problems", self.problems.len().to_string()),
            ("copies", self.copies.len().to_string()),
            ("unmatched", self.unmatched.len().to_string()),
        ];
        let is_shown = |(name, _): &(&str, String)| *name != "series" || num_series > 0;
        all.into_iter().filter(is_shown).map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// The pairs.
    ///
    /// # Errors
    /// [`Error::Data`] if something is ambiguous.
    pub fn into_table(self) -> Result<PairTable> {
        let Some(first) = self.ambiguous.first() else { return Ok(self.table) };
        let named = self.ambiguous.iter().take(MAX_NAMED).map(|found| format!("`{}`: {}", found.name, found.reason));
        let named = named.collect::<Vec<_>>().join("; ");
        let reason = match self.ambiguous.len() {
            1 => format!("is ambiguous: {named}"),
            count => format!("is ambiguous in {count} places: {named}"),
        };
        let path = first.files.first().filter(|_| self.ambiguous.len() == 1).unwrap_or(&self.root);
        let hint = format!(
            "run `prsmed data scan` on `{}`, correct `pairs.csv`, and give it with the argument `pairs`",
            self.root.display()
        );
        Err(Error::data(path, reason, hint))
    }
}

/// The number of patients among pairs.
pub(super) fn num_patients<'a>(pairs: impl Iterator<Item = &'a Pair>) -> Option<usize> {
    let patients: BTreeSet<String> = pairs.filter_map(|pair| Some(names::key(pair.patient.as_ref()?))).collect();
    (!patients.is_empty()).then_some(patients.len())
}

/// What most pairs are.
pub(super) fn kind_of(rows: &[Pair]) -> PairKind {
    if rows.iter().any(Pair::is_image) { PairKind::Images } else { PairKind::Volumes }
}
