//! Names of images and masks that belong together: endings of masks, and their numbers.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::super::options::MASK_SUFFIXES;
use prsmed_base::{Error, Result};

/// A file with the name by which it is matched.
pub(super) type Named = (String, PathBuf);

/// Names of folders and files of masks.
pub(super) const MASK_WORDS: [&str; 15] = [
    "mask", "masks", "label", "labels", "seg", "segs", "segmentation", "segmentations", "gt", "groundtruth",
    "annotation", "annotations", "truth", "manual", "contours",
];

/// Whether a name of a folder or file says that it is of masks.
pub(in crate::prepare) fn is_mask_word(name: &str) -> bool {
    is_among(name, &MASK_WORDS)
}

pub(super) fn is_among(name: &str, words: &[&str]) -> bool {
    let name: String = crate::names::key(name).chars().filter(|c| !" _-".contains(*c)).collect();
    words.contains(&name.as_str())
}

/// The stem without its mask suffix; `None` if it has none.
pub(in crate::prepare) fn without_suffix(stem: &str) -> Option<&str> {
    MASK_SUFFIXES.iter().find_map(|suffix| {
        let word = &suffix[1..];
        let (head, tail) = stem.split_at_checked(stem.len().checked_sub(word.len())?)?;
        let head = match head.strip_suffix('_') {
            Some(head) => head.trim_end(),
            // a blank or a hyphen before the word
            None => head.strip_suffix([' ', '-', '\u{a0}'])?.trim_end_matches([' ', '-', '\u{a0}']),
        };
        (!head.is_empty() && tail.eq_ignore_ascii_case(word)).then_some(head)
    })
}

/// The stem without mask suffix and number, as of `0001_mask_2`, `0001_mask2` and `0001_mask (2)`; `None` without both.
pub(in crate::prepare) fn without_number(stem: &str) -> Option<&str> {
    let stem = stem.strip_suffix(')').map_or(stem, |stem| stem);
    let head = stem.trim_end_matches(|c: char| c.is_ascii_digit());
    let has_number = (1..=3).contains(&(stem.len() - head.len()));
    let head = head.strip_suffix(['_', '-', '(']).unwrap_or(head);
    without_suffix(head.trim_end()).filter(|_| has_number)
}

/// One file for each name; two files are an error that names both, with this remedy.
pub(super) fn unique(files: Vec<Named>, what: &str, remedy: &str) -> Result<BTreeMap<String, PathBuf>> {
    let mut unique = BTreeMap::new();
    for (stem, path) in files {
        if let Some(other) = unique.insert(stem.clone(), path.clone()) {
            let reason = format!("`{}` is a second {what} for the stem `{stem}`", other.display());
            return Err(Error::data(path, reason, remedy));
        }
    }
    Ok(unique)
}
