//! The names of the labels of BIDS segmentations, in tables such as `derivatives/NAME/desc-aseg_dseg.tsv`.

use std::path::Path;

use super::super::options::word_problem;
use super::super::scan::tree::Tree;
use super::patterns::{Groups, words};
use crate::volume::format::stem_of;
use prsmed_base::{Error, Result, files};

const HINT: &str =
    "write the columns `index` and `name`, separated by tabs; several numbers of one name are one target";

/// Gives the groups the labels of their segmentations. A table is for the files in its folder or below whose names have all parts
/// of its own name.
///
/// # Errors
/// [`Error::Data`] for a table without these columns, and for two tables of one file; [`Error::Io`].
pub(super) fn describe(tree: &Tree, found: &mut Groups) -> Result<()> {
    let is_table = |path: &&Path| path.to_string_lossy().ends_with("dseg.tsv");
    let tables: Vec<&Path> = tree.others.iter().map(|skip| skip.path.as_path()).filter(is_table).collect();
    if tables.is_empty() {
        return Ok(());
    }
    for group in found.groups.values_mut() {
        let unnamed = group.masks.iter().filter(|mask| mask.target.is_none());
        for path in unnamed.map(|mask| tree.files[mask.file].path.as_path()) {
            let mut fit: Vec<&Path> = tables.iter().copied().filter(|table| is_for(table, path)).collect();
            fit.sort_by_key(|table| std::cmp::Reverse(table.components().count()));
            let Some(table) = fit.first() else { continue };
            if let Some(other) = fit.get(1).filter(|other| other.parent() == table.parent()) {
                let reason = format!("names the labels of `{}`, and so does `{}`", path.display(), other.display());
                return Err(Error::data(*table, reason, "keep one of the two tables"));
            }
            group.labels = labels(table)?;
        }
    }
    Ok(())
}

/// Whether a table is for a segmentation.
fn is_for(table: &Path, path: &Path) -> bool {
    let name = |path: &Path| stem_of(&path.file_name().unwrap_or_default().to_string_lossy()).to_owned();
    let (own, of) = (name(table), name(path));
    table.parent().is_some_and(|folder| path.starts_with(folder))
        && own.split('_').all(|part| of.split('_').any(|known| known == part))
}

/// The names and numbers of a table.
fn labels(path: &Path) -> Result<super::super::structures::NamedLabels> {
    let text = files::read_to_string(path, files::MAX_TEXT).map_err(Error::io(path, "read"))?;
    let mut lines = text.trim_start_matches('\u{feff}').lines().map(|line| line.split('\t').collect::<Vec<_>>());
    let header = lines.next().unwrap_or_default();
    let column = |name: &str| header.iter().position(|cell| cell.trim() == name);
    let (Some(index), Some(name)) = (column("index"), column("name")) else {
        return Err(Error::data(path, "has no columns `index` and `name`", HINT));
    };
    let mut named: Vec<(String, Vec<u16>)> = Vec::new();
    for (number, cells) in (2..).zip(lines).filter(|(_, cells)| cells.iter().any(|cell| !cell.trim().is_empty())) {
        let refuse = |reason: String| Error::data_line(path, number, reason, HINT);
        let (label, name) =
            (cells.get(index).map_or("", |cell| cell.trim()), cells.get(name).map_or("", |cell| cell.trim()));
        let label: u16 = label.parse().map_err(|_| refuse(format!("`{label}` is not the number of a label")))?;
        let name = words(&name.replace([',', '='], " "));
        if let Some((reason, _)) = word_problem(&name).filter(|_| label > 0) {
            return Err(refuse(reason));
        }
        match named.iter_mut().find(|(known, _)| *known == name) {
            _ if label == 0 => {}
            Some((_, labels)) => labels.push(label),
            None => named.push((name, vec![label])),
        }
    }
    let part = |(name, labels): (String, Vec<u16>)| {
        let labels: Vec<String> = labels.iter().map(u16::to_string).collect();
        format!("{}={name}", labels.join("+"))
    };
    let text = named.into_iter().map(part).collect::<Vec<_>>().join(",");
    text.parse().map_err(|reason: String| Error::data(path, reason, HINT))
}
