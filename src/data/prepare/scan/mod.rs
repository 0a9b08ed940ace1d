//! Looks at a tree of files: which layout it has, which files make pairs, and what does not fit. Nothing is decoded; of images,
//! sizes and the first bytes are read.

mod compare;
mod page;
mod pairs;
pub(super) mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Serialize;

use self::pairs::Found;
use self::tree::Tree;
use super::item::Skipped;
use super::layouts::{Groups, LAYOUTS, Layout};
use super::pairs_csv::write_pairs;
use super::table::{Pair, PairKind, PairTable};
use crate::names;
use prsmed_base::event::Observer;
use prsmed_base::{Error, Result, files};

/// Most ambiguous images that an error names.
const MAX_NAMED: usize = 3;

/// Choices for a scan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScanOptions {
    /// Name of the layout; `None` for the one that explains most files.
    pub layout: Option<String>,
    /// The sequence, phase or channel to use where an image has several.
    pub channel: Option<String>,
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
    /// Image files with equal content.
    pub copies: Vec<Vec<PathBuf>>,
    /// What was assumed, in sentences for the user.
    pub notes: Vec<String>,
    /// The pairs.
    #[serde(skip)]
    table: PairTable,
    /// Pairs that are not clear, one for each of the first ambiguities.
    #[serde(skip)]
    undecided: Vec<Pair>,
    /// Images without a mask.
    #[serde(skip)]
    alone: Vec<Pair>,
}

impl ScanReport {
    /// The rows of the table that is printed: name and value.
    pub fn summary(&self) -> Vec<(String, String)> {
        let counts = |counts: &BTreeMap<String, usize>| {
            counts.iter().map(|(name, count)| format!("{name} ({count})")).collect::<Vec<_>>().join(", ")
        };
        let layouts = self.layouts.iter().map(|row| format!("{} ({})", row.name, row.images)).collect::<Vec<_>>();
        let unknown = |text: String, what: &str| if text.is_empty() { what.to_owned() } else { text };
        let all = [
            ("layout", unknown(layouts.join(", "), "none")),
            ("patients", self.patients.map_or("not known".to_owned(), |count| count.to_string())),
            ("images", self.images.to_string()),
            ("volumes", self.volumes.to_string()),
            ("masks", self.masks.to_string()),
            ("structures", unknown(counts(&self.structures), "without names")),
            ("sequences", unknown(counts(&self.sequences), "one")),
            ("splits", unknown(counts(&self.splits), "to be drawn")),
            ("ambiguous", self.ambiguous.len().to_string()),
            ("problems", self.problems.len().to_string()),
            ("copies", self.copies.len().to_string()),
            ("unmatched", self.unmatched.len().to_string()),
        ];
        all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
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

/// All layouts with their names.
pub fn layouts() -> impl Iterator<Item = LayoutRow> {
    LAYOUTS.iter().map(|Layout { name, about, .. }| LayoutRow { name, about, images: 0 })
}

/// Scans a folder.
///
/// # Errors
/// [`Error::Config`] for an unknown layout; [`Error::Data`] for a folder without files, and for a description of the data set
/// that is damaged; [`Error::Io`].
pub fn scan(root: &Path, options: &ScanOptions, observer: &dyn Observer) -> Result<ScanReport> {
    let candidates = candidates(options)?;
    let tree = Tree::read(root, observer)?;
    let mut free = vec![true; tree.files.len()];
    let mut report = ScanReport { root: root.to_owned(), ..ScanReport::default() };
    let mut found = Found::default();
    loop {
        let tried = candidates.iter().map(|layout| (*layout, layout.groups(&tree, &free)));
        let best = tried
            .filter(|(_, groups)| groups.num_files() > 0)
            .reduce(|best, next| if next.1.num_files() > best.1.num_files() { next } else { best });
        let Some((layout, mut groups)) = best else { break };
        if let Some(describe) = layout.describe {
            describe(&tree, &mut groups)?;
        }
        let before = found.len();
        take(&mut free, &groups);
        found.add(groups, &tree, options, &mut report);
        let Layout { name, about, .. } = layout;
        report.layouts.push(LayoutRow { name, about, images: found.len() - before });
    }
    found.finish(&tree, &free, &mut report)?;
    if let [first, second, ..] = report.layouts.as_slice() {
        let reason = format!(
            "the folder has files of the layouts `{}` and `{}`; choose one with the argument `layout`, or scan their folders one by \
             one",
            first.name, second.name
        );
        report.ambiguous.insert(0, Ambiguous { name: "layout".into(), files: vec![root.to_owned()], reason });
    }
    compare::sizes(&mut report, observer);
    compare::copies(&mut report, observer);
    Ok(report)
}

/// The layouts that may be used.
fn candidates(options: &ScanOptions) -> Result<Vec<&'static Layout>> {
    let Some(name) = &options.layout else { return Ok(LAYOUTS.iter().collect()) };
    let found: Vec<_> = LAYOUTS.iter().filter(|layout| layout.name.eq_ignore_ascii_case(name.trim())).collect();
    if found.is_empty() {
        let names = layouts().map(|row| format!("`{}`", row.name)).collect::<Vec<_>>().join(", ");
        return Err(Error::argument("layout", format!("there is no layout `{name}`"), format!("give one of {names}")));
    }
    Ok(found)
}

/// Marks the files that a layout has explained.
fn take(free: &mut [bool], groups: &Groups) {
    for group in groups.groups.values().filter(|group| group.num_files() > 0) {
        let files = group.images.iter().map(|image| image.file).chain(group.masks.iter().map(|mask| mask.file));
        files.for_each(|file| free[file] = false);
    }
    groups.others.iter().for_each(|(file, _)| free[*file] = false);
}

/// Writes `pairs.csv`, `scan.json` and `scan.html` into a folder, which is made.
///
/// # Errors
/// [`Error::Io`]; [`Error::Data`] for paths that a table cannot hold.
pub fn write_scan(report: &ScanReport, out: &Path) -> Result<[PathBuf; 3]> {
    files::create_folders(out).map_err(Error::io(out, "create"))?;
    let paths = ["pairs.csv", "scan.json", "scan.html"].map(|name| out.join(name));
    let undecided = report.undecided.iter().map(|pair| {
        let is_it = |found: &&Ambiguous| found.name == pair.name;
        (pair, report.ambiguous.iter().find(is_it).map(|found| found.reason.clone()))
    });
    let clear = report.table.rows.iter().chain(&report.alone).map(|pair| (pair, None));
    write_pairs(&paths[0], clear.chain(undecided))?;
    let json = serde_json::to_vec_pretty(report).map_err(|error| Error::data(out, error.to_string(), ""))?;
    files::write_bytes(&paths[1], &json)?;
    files::write_bytes(&paths[2], page::page(report).as_bytes())?;
    Ok(paths)
}

/// The number of patients among pairs.
fn num_patients<'a>(pairs: impl Iterator<Item = &'a Pair>) -> Option<usize> {
    let patients: BTreeSet<String> = pairs.filter_map(|pair| Some(names::key(pair.patient.as_ref()?))).collect();
    (!patients.is_empty()).then_some(patients.len())
}

/// What most pairs are.
fn kind_of(rows: &[Pair]) -> PairKind {
    if rows.iter().any(Pair::is_image) { PairKind::Images } else { PairKind::Volumes }
}

#[cfg(test)]
mod tests;
