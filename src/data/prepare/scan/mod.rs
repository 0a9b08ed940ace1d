//! Looks at a tree of files: which layout it has, which files make pairs, and what does not fit. Nothing is decoded; of images,
//! sizes and the first bytes are read, and of DICOM files the headers.

mod compare;
mod page;
mod pairs;
mod report;
mod series;
pub(super) mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use self::pairs::Found;
use self::tree::{FileKind, Tree};
use super::layouts::{Groups, Layout, all_layouts};
use super::pairs_csv::write_pairs;
use prsmed_base::event::{Event, Observer};
use prsmed_base::{Error, Result, files};

use report::Ambiguous;
pub use report::{FolderSeries, LayoutRow, ScanOptions, ScanReport};
pub use series::{series_head, series_rows};

/// All layouts with their names.
pub fn layouts() -> impl Iterator<Item = LayoutRow> {
    all_layouts().map(|Layout { name, about, .. }| LayoutRow { name, about, images: 0 })
}

/// Scans a folder.
///
/// # Errors
/// [`Error::Config`] for an unknown layout; [`Error::Data`] for a folder without files, and for a description of the data set
/// that is damaged; [`Error::Io`].
pub fn scan(root: &Path, options: &ScanOptions, observer: &dyn Observer) -> Result<ScanReport> {
    options.check()?;
    let candidates = candidates(options)?;
    let tree = Tree::read(root, observer)?;
    let mut free = vec![true; tree.files.len()];
    let mut report = ScanReport { root: root.to_owned(), ..ScanReport::default() };
    let mut found = Found::default();
    observer.on(&Event::Started { phase: "match names".into(), total: 0, unit: "files" });
    loop {
        let mut tried: Vec<Tried> = candidates.iter().map(|layout| (*layout, layout.groups(&tree, &free))).collect();
        let most = tried.iter().map(|(_, groups)| groups.num_explained()).max().filter(|most| *most > 0);
        let Some(best) = tried.iter().position(|(_, groups)| Some(groups.num_explained()) == most) else {
            if let Some(error) = tried.into_iter().find_map(|(_, groups)| groups.refused).filter(|_| found.len() == 0) {
                return Err(error);
            }
            break;
        };
        let (layout, mut groups) = tried.swap_remove(best);
        if let Some(error) = groups.refused {
            return Err(error);
        }
        if let Some(describe) = layout.describe {
            describe(&tree, &mut groups)?;
        }
        outlines_too(&mut groups, &tried, &tree);
        let before = found.len();
        take(&mut free, &groups);
        found.add(groups, &tree, options, &mut report);
        let Layout { name, about, .. } = layout;
        report.layouts.push(LayoutRow { name, about, images: found.len() - before });
    }
    found.finish(&tree, &free, &mut report)?;
    observer.on(&Event::Finished);
    if let [first, second, ..] = report.layouts.as_slice() {
        let reason = format!(
            "the folder has files of the layouts `{}` and `{}`; choose one with the argument `layout`, or scan their folders one by \
             one",
            first.name, second.name
        );
        report.ambiguous.insert(0, Ambiguous { name: "layout".into(), files: vec![root.to_owned()], reason });
    }
    compare::sizes(&mut report, observer);
    series::decide(&tree, options.series.as_deref(), &mut report);
    compare::copies(&mut report, observer);
    compare::splits(&mut report);
    Ok(report)
}

/// A layout, and what it finds.
type Tried = (&'static Layout, Groups);

/// Images that have masks of their own and files of outlines, or those of two programs, are not clear.
fn outlines_too(groups: &mut Groups, others: &[Tried], tree: &Tree) {
    let unreadable: BTreeSet<usize> =
        tree.outlines().iter().filter(|found| found.opened.is_err()).map(|found| found.file).collect();
    let is_outlines = |file: usize| tree.files[file].kind == FileKind::Outlines;
    let mut by_image: BTreeMap<usize, (&str, usize)> = BTreeMap::new();
    for (layout, other) in others {
        for group in other.groups.values() {
            let Some(mask) = group.masks.iter().find(|mask| !unreadable.contains(&mask.file)) else { continue };
            by_image.extend(group.images.iter().map(|image| (image.file, (layout.name, mask.file))));
        }
    }
    for group in groups.groups.values_mut().filter(|group| group.doubt.is_none()) {
        let Some(mask) = group.masks.first().map(|mask| mask.file) else { continue };
        let other = group.images.iter().find_map(|image| by_image.get(&image.file));
        let Some((layout, other)) = other.filter(|(_, other)| is_outlines(mask) || is_outlines(*other)) else {
            continue;
        };
        let (own, other) = (&tree.files[mask].name, &tree.files[*other].name);
        group.doubt = Some(format!(
            "it has masks in `{own}`, and in `{other}` by the layout `{layout}`; choose with the argument `layout`"
        ));
    }
}

/// The layouts that may be used.
fn candidates(options: &ScanOptions) -> Result<Vec<&'static Layout>> {
    let Some(name) = &options.layout else { return Ok(all_layouts().collect()) };
    let found: Vec<_> = all_layouts().filter(|layout| layout.name.eq_ignore_ascii_case(name.trim())).collect();
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

/// The files that a scan writes into a folder.
pub fn scan_files(out: &Path) -> [PathBuf; 3] {
    ["pairs.csv", "scan.json", "scan.html"].map(|name| out.join(name))
}

/// Writes `pairs.csv`, `scan.json` and `scan.html` into a folder, which is made.
///
/// # Errors
/// [`Error::Io`]; [`Error::Data`] for paths that a table cannot hold.
pub fn write_scan(report: &ScanReport, out: &Path) -> Result<[PathBuf; 3]> {
    files::create_folders(out).map_err(Error::io(out, "create"))?;
    let paths = scan_files(out);
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

#[cfg(test)]
mod dicom_tests;

#[cfg(test)]
mod tests;
