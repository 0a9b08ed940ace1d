//! DICOM series of the folders of a tree, and which of them a preparation uses.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::super::item::{Skipped, reason_of};
use super::super::table::Pair;
use super::report::{Ambiguous, FolderSeries, ScanReport};
use super::tree::{ListedSeries, Tree};
use crate::volume::dicom::{RULE_FORMS, SERIES_HEAD, SeriesRow, usable_series};
use crate::volume::path::split_selection;
use prsmed_base::Error;

/// Lists the series of all folders of DICOM files in the report, by the headers of their files. A folder in which not exactly
/// one series fits is ambiguous. The images of folders with several series get the rule that chooses one.
pub(super) fn decide(tree: &Tree, rule: Option<&str>, report: &mut ScanReport) {
    let mut ambiguous: BTreeMap<&Path, String> = BTreeMap::new();
    let mut several: BTreeSet<&Path> = BTreeSet::new();
    for ListedSeries { file, listed } in &tree.series {
        let folder = &tree.files[*file].path;
        let series = match listed {
            Ok(series) if series.is_empty() => continue,
            Ok(series) => series,
            Err(error) => {
                let reason = format!("cannot be read: {}", reason_of(error));
                // the file of the folder
                let path = if let Error::Data { path, .. } | Error::Io { path, .. } = error { path } else { folder };
                report.problems.push(Skipped { path: path.clone(), reason });
                continue;
            }
        };
        let usable = usable_series(series, rule);
        if usable.len() != 1 {
            ambiguous.insert(folder, reason(series, &usable, rule));
        }
        if series.len() > 1 {
            several.insert(folder);
        }
        let used = if let [only] = usable[..] { BTreeSet::from([only]) } else { BTreeSet::new() };
        report.series.push(FolderSeries { folder: folder.clone(), series: series.clone(), used });
    }
    let mut clear = Vec::new();
    for pair in std::mem::take(&mut report.table.rows) {
        let (folder, selected) = split_selection(&pair.image);
        if selected.as_ref().is_some_and(|number| !is_chosen(number, &folder, rule, report)) {
            let reason = "its mask is of a series that the argument `series` does not choose".to_owned();
            report.unmatched.push(Skipped { path: pair.image, reason });
            continue;
        }
        match ambiguous.get(folder.as_path()).filter(|_| selected.is_none()) {
            Some(reason) => {
                let (name, files) = (pair.name.clone(), vec![folder]);
                report.ambiguous.push(Ambiguous { name, files, reason: reason.clone() });
                report.undecided.push(pair);
            }
            None => {
                clear.push(with_rule(pair, rule.filter(|_| several.contains(folder.as_path()) && selected.is_none())));
            }
        }
    }
    for pair in &clear {
        let (folder, Some(number)) = split_selection(&pair.image) else { continue };
        let Some(found) = report.series.iter_mut().find(|found| found.folder == folder) else { continue };
        found.used.extend(of_number(&found.series, &number));
    }
    report.volumes = clear.iter().filter(|pair| !pair.is_image()).count();
    report.table.rows = clear;
}

/// The index of the series of a number.
fn of_number(series: &[SeriesRow], number: &str) -> Option<usize> {
    series.iter().position(|row| row.number.is_some_and(|own| own.to_string() == number))
}

/// Whether the rule, if there is one, fits the series of a folder that a layout has found by its number.
fn is_chosen(number: &str, folder: &Path, rule: Option<&str>, report: &ScanReport) -> bool {
    let (Some(rule), Some(found)) = (rule, report.series.iter().find(|found| found.folder == folder)) else {
        return true;
    };
    of_number(&found.series, number).is_none_or(|index| usable_series(&found.series, Some(rule)).contains(&index))
}

/// The pair with a rule in the path of its image, which chooses the series wherever the table is read.
fn with_rule(pair: Pair, rule: Option<&str>) -> Pair {
    match rule {
        Some(rule) => Pair { image: PathBuf::from(format!("{}#{rule}", pair.image.display())), ..pair },
        None => pair,
    }
}

/// Why not exactly one series of a folder is used.
fn reason(all: &[SeriesRow], usable: &[usize], rule: Option<&str>) -> String {
    /// Most series that a reason names.
    const MAX_NAMED: usize = 10;
    let of = |row: &SeriesRow| {
        let [number, description, modality, slices, ..] = row.cells();
        format!("{number}: `{description}` ({modality}, {slices} slices)")
    };
    let listed: Vec<&SeriesRow> =
        if usable.is_empty() { all.iter().collect() } else { usable.iter().map(|index| &all[*index]).collect() };
    let more = listed.len().saturating_sub(MAX_NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let named = listed.iter().take(MAX_NAMED).map(|row| of(row)).collect::<Vec<_>>().join(", ");
    let fit = match rule {
        Some(rule) if usable.is_empty() => format!("none of its {} series fits `{rule}`", all.len()),
        Some(rule) => format!("{} of its series fit `{rule}`", usable.len()),
        None => format!("it has {} series", usable.len()),
    };
    format!("{fit}: {named}{more}; choose one with the argument `series`: {RULE_FORMS}")
}

/// Heads of [`series_rows`].
pub fn series_head() -> Vec<String> {
    ["folder"].into_iter().chain(SERIES_HEAD).chain(["used"]).map(str::to_owned).collect()
}

/// The rows of a table of folders and their series, those of folders with several first, with a mark at those that are used.
pub fn series_rows(report: &ScanReport) -> Vec<Vec<String>> {
    let of_folder = |found: &FolderSeries| {
        let name = found.folder.strip_prefix(&report.root).unwrap_or(&found.folder).display().to_string();
        let name = if name.is_empty() { ".".to_owned() } else { name };
        let of = |(index, row): (usize, &SeriesRow)| {
            let used = if found.used.contains(&index) { "yes" } else { "no" };
            [name.clone()].into_iter().chain(row.cells()).chain([used.to_owned()]).collect()
        };
        found.series.iter().enumerate().map(of).collect::<Vec<_>>()
    };
    let (several, single): (Vec<_>, Vec<_>) = report.series.iter().partition(|found| found.series.len() > 1);
    several.into_iter().chain(single).flat_map(of_folder).collect()
}
