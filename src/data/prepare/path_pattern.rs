//! Paths of tables: patterns with `*`, and paths relative to a folder.

use std::path::{Component, Path, PathBuf};

use regex::Regex;

use crate::volume::path::split_selection;
use prsmed_base::files::visible_entries;
use prsmed_base::{Error, Result};

/// Between several files in a cell: no name of a file on Windows has it, and no table is separated by it.
pub(super) const BETWEEN: char = '|';

/// The files that a pattern below a folder fits, each with the texts that its `*` stand for, sorted.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn files(folder: &Path, pattern: &str) -> Result<Vec<(PathBuf, Vec<String>)>> {
    let mut found = vec![(folder.to_owned(), Vec::new())];
    for part in Path::new(pattern).components() {
        let Some(part) = part.as_os_str().to_str().filter(|part| part.contains('*')) else {
            for (path, _) in &mut found {
                path.push(part);
            }
            found.retain(|(path, _)| path.exists());
            continue;
        };
        let regex = format!("^{}$", regex::escape(part).replace(r"\*", "(.*?)"));
        let regex = Regex::new(&regex).map_err(|error| Error::data(part, error.to_string(), "correct the pattern"))?;
        let mut next = Vec::new();
        for (path, texts) in found.into_iter().filter(|(path, _)| path.is_dir()) {
            for entry in visible_entries(&path)? {
                let name = entry.file_name().unwrap_or_default().to_string_lossy();
                let Some(captures) = regex.captures(&name) else { continue };
                let more = captures.iter().skip(1).flatten().map(|text| text.as_str().to_owned());
                next.push((entry.clone(), texts.iter().cloned().chain(more).collect()));
            }
        }
        found = next;
    }
    Ok(found)
}

/// A text whose first `*` is replaced by the first text, and so on.
pub(super) fn filled(pattern: &str, texts: &[String]) -> String {
    texts.iter().fold(pattern.to_owned(), |pattern, text| pattern.replacen('*', text, 1))
}

/// Why a table cannot hold a path.
pub(super) const UNNAMEABLE: &str = "a table cannot name it: its name has `|` or `*`, or begins or ends with a blank";

/// True for a path that a table can hold.
pub(super) fn is_nameable(text: &str) -> bool {
    !text.contains([BETWEEN, '*']) && text.trim() == text
}

/// A path as it is written in a table of this folder, with `/` and, where needed, `..`. A path that has no folder in common
/// with it is absolute. What chooses a part of the file, behind `#`, stays as it is.
///
/// # Errors
/// [`Error::Data`] for a path that is not UTF-8, or that a table cannot hold; [`Error::Io`].
pub(super) fn relative(path: &Path, folder: &Path) -> Result<String> {
    let absolute = |path: &Path| {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        path.canonicalize().or_else(|_| std::path::absolute(path)).map_err(Error::io(path, "find"))
    };
    let (path, selected) = split_selection(path);
    let selected = selected.map(|selected| format!("#{selected}")).unwrap_or_default();
    // the file itself may be a link
    let name = path.file_name().unwrap_or_default();
    let (path, folder) = (absolute(path.parent().unwrap_or(Path::new("")))?.join(name), absolute(folder)?);
    let common = path.components().zip(folder.components()).take_while(|(a, b)| a == b).count();
    let written: PathBuf = if common <= 1 {
        path.clone()
    } else {
        let up = folder.components().skip(common).map(|_| Component::ParentDir);
        up.chain(path.components().skip(common)).collect()
    };
    let refuse = |reason: &str| Error::data(&path, reason, "rename the file");
    let text = written.to_str().ok_or_else(|| refuse("its name is not UTF-8"))?;
    let text = format!("{text}{selected}");
    if !is_nameable(&text) {
        return Err(refuse(UNNAMEABLE));
    }
    Ok(text)
}
