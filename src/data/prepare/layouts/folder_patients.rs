//! Folders of patients, known by their names.

use std::collections::{BTreeMap, BTreeSet};

use super::super::scan::tree::{FileKind, Tree};
use super::patterns::{Groups, split_of};
use super::words::is_word;

/// Takes the folders of images for patients where their names have digits, and either the files in them have equal names or
/// begin with the name of their folder, or there is one image in each.
pub(super) fn patients(found: &mut Groups, tree: &Tree) {
    let has_digit = |name: &str| name.chars().any(|c| c.is_ascii_digit());
    let is_patient = |name: &&str| has_digit(name) && !is_word(name) && split_of(name).is_none();
    // the first folder that may be a patient, and the name of the file, of each group
    let mut folders: BTreeMap<&str, Vec<(&str, &str)>> = BTreeMap::new();
    for (key, group) in found.groups.iter().filter(|(_, group)| group.num_files() > 0) {
        let file = &tree.files[group.images[0].file];
        let (parts, stem) = file.parts();
        let folder = parts.iter().find(|part| is_patient(part)).copied();
        let folder = folder.or_else(|| (file.kind == FileKind::Series && has_digit(stem)).then_some(stem));
        let Some(folder) = folder else { return };
        folders.entry(folder).or_default().push((key, stem));
    }
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for stem in folders.values().flat_map(|files| files.iter().map(|(_, stem)| *stem).collect::<BTreeSet<_>>()) {
        *counts.entry(stem).or_default() += 1;
    }
    let are_equal = counts.values().any(|count| 2 * count > folders.len());
    let begins = folders.iter().all(|(folder, files)| files.iter().all(|(_, stem)| stem.starts_with(folder)));
    let is_one_each = folders.values().all(|files| files.len() == 1);
    if folders.len() < 2 || !(are_equal || begins || is_one_each) {
        return;
    }
    let first: Vec<String> = folders.keys().take(3).map(|folder| format!("`{folder}`")).collect();
    let note = format!(
        "the {} folders {}, .. are taken for patients; the column `patient` of `pairs.csv` decides",
        folders.len(),
        first.join(", ")
    );
    let named: Vec<(String, String)> = folders
        .iter()
        .flat_map(|(folder, files)| files.iter().map(|(key, _)| ((*key).to_owned(), (*folder).to_owned())))
        .collect();
    for (key, folder) in named {
        if let Some(group) = found.groups.get_mut(&key) {
            group.patient = Some(folder);
        }
    }
    found.notes.push(note);
}
