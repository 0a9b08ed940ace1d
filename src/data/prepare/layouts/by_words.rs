//! The layout of all other trees: words in the names of folders and files say which of them are masks, and what is left of the
//! names says what belongs together. So a folder for each patient may have files of equal names.

use std::collections::{BTreeMap, BTreeSet};

use super::super::scan::tree::{FileKind, Tree};
use super::names::{MASK_WORDS, is_among, is_mask_word, without_number, without_suffix};
use super::patterns::{Group, GroupImage, GroupMask, Groups, Layout, NO_LAYOUT, split_of, words};
use crate::names;

pub(super) const NAMES: Layout = Layout {
    name: "names",
    about: "`P1/image.png`, `P1/mask.png`; `scans/P1/imaging.nii.gz`, `labels/P1/imaging.nii.gz`; `a.jpg`, `a_mask.png`",
    find: Some(find),
    ..NO_LAYOUT
};

/// Names of folders and files of images; they say nothing else.
const IMAGE_WORDS: [&str; 14] = [
    "image", "images", "img", "imgs", "imaging", "scan", "scans", "volume", "volumes", "original", "originals",
    "input", "inputs", "picture",
];
/// A name without a word at its end or its beginning; `None` without one.
fn without_word<'a>(name: &'a str, words: &[&str]) -> Option<&'a str> {
    let between = [' ', '_', '-', '.'];
    let end = name.rsplit_once(between).filter(|(_, word)| is_among(word, words)).map(|(head, _)| head);
    let start = || name.split_once(between).filter(|(word, _)| is_among(word, words)).map(|(_, tail)| tail);
    end.or_else(start).map(|rest| rest.trim_matches(between)).filter(|rest| !rest.is_empty())
}

/// What the name of a file says.
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
struct Named {
    file: usize,
    is_mask: bool,
    /// A folder says that it is a mask.
    is_of_folder: bool,
    is_numbered: bool,
    /// The name is nothing but a word.
    is_bare: bool,
    /// Folders, and the name, without words.
    parts: Vec<String>,
    /// As `parts`, with the whole name of a file in a folder of masks.
    whole: Vec<String>,
}

impl Named {
    fn new(file: usize, tree: &Tree) -> Self {
        let (folders, stem) = tree.files[file].parts();
        let (mut parts, mut is_of_folder, mut is_of_images) = (Vec::new(), false, false);
        for folder in folders {
            if is_mask_word(folder) {
                is_of_folder = true;
            } else if is_among(folder, &IMAGE_WORDS) {
                is_of_images = true;
            } else if let Some(rest) = without_word(folder, &MASK_WORDS) {
                is_of_folder = true;
                parts.push(rest.to_owned());
            } else if let Some(rest) = without_word(folder, &IMAGE_WORDS) {
                is_of_images = true;
                parts.push(rest.to_owned());
            } else {
                parts.push(folder.to_owned());
            }
        }
        let whole: Vec<String> = parts.iter().cloned().chain([stem.to_owned()]).collect();
        let suffixed = without_suffix(stem).or_else(|| without_word(stem, &MASK_WORDS));
        let numbered = without_number(stem).filter(|_| suffixed.is_none());
        let says_mask = is_mask_word(stem) || suffixed.is_some() || numbered.is_some();
        let is_mask = is_of_folder || (says_mask && !is_of_images);
        let name = suffixed.or(numbered).filter(|_| is_mask).unwrap_or(stem);
        let is_bare = is_among(name, &IMAGE_WORDS) || (is_mask && is_mask_word(name));
        let name = without_word(name, &IMAGE_WORDS).unwrap_or(name);
        parts.extend((!is_bare).then(|| name.to_owned()));
        Self { file, is_mask, is_of_folder, is_numbered: numbered.is_some() && is_mask, is_bare, parts, whole }
    }
}

fn key(parts: &[String]) -> String {
    parts.iter().map(|part| names::key(part)).collect::<Vec<_>>().join("/")
}

fn find(tree: &Tree, free: &[bool]) -> Groups {
    let all = (0..tree.files.len()).filter(|file| free[*file]).map(|file| Named::new(file, tree));
    let (masks, images): (Vec<Named>, Vec<Named>) = all.partition(|named| named.is_mask);
    let mut found = Groups::default();
    // the keys of all images in a folder, also below it
    let mut in_folder: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for image in &images {
        let own = key(&image.parts);
        for depth in 0..image.parts.len() {
            in_folder.entry(key(&image.parts[..depth])).or_default().insert(own.clone());
        }
        let (folders, stem) = tree.files[image.file].parts();
        let name = if image.parts.is_empty() { stem.to_owned() } else { image.parts.join("_") };
        let group = found.groups.entry(own).or_insert_with(|| Group { name, ..Group::default() });
        group.images.push(GroupImage { file: image.file, channel: None, part: None });
        group.split = group.split.or_else(|| folders.iter().find_map(|folder| split_of(folder)));
    }
    let mut joined: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for mask in masks {
        let (whole, own) = (key(&mask.whole), key(&mask.parts));
        let of = |key: &String| found.groups.get(key).is_some_and(|group| !group.images.is_empty());
        let below = |folder: &str| in_folder.get(folder).cloned().unwrap_or_default();
        let folder = key(&mask.parts[..mask.parts.len().saturating_sub(1)]);
        let is_part = mask.is_of_folder && !mask.is_bare && tree.files[mask.file].kind != FileKind::Image;
        let mut target = None;
        let group = if mask.is_of_folder && of(&whole) {
            whole
        } else if of(&own) {
            own
        } else if !below(&own).is_empty() {
            // the name of a folder of images
            let several = below(&own);
            let only = if several.len() == 1 { several.first().cloned() } else { None };
            only.unwrap_or_else(|| {
                joined.insert(own.clone(), several);
                own
            })
        } else if is_part && !folder.is_empty() && (of(&folder) || below(&folder).len() == 1) {
            // a file for each structure
            target = mask.parts.last().map(|name| words(name));
            if of(&folder) { folder } else { below(&folder).first().cloned().unwrap_or_default() }
        } else {
            own
        };
        let name = || if mask.parts.is_empty() { mask.whole.join("_") } else { mask.parts.join("_") };
        let group = found.groups.entry(group).or_insert_with(|| Group { name: name(), ..Group::default() });
        group.masks.push(GroupMask { file: mask.file, target, is_numbered: mask.is_numbered });
    }
    for (own, several) in joined {
        join(&mut found, &own, &several, tree);
    }
    patients(&mut found, tree);
    found
}

/// Makes the images without masks in a folder channels of its mask.
fn join(found: &mut Groups, own: &str, several: &BTreeSet<String>, tree: &Tree) {
    let free: Vec<&String> = several.iter().filter(|key| found.groups[*key].masks.is_empty()).collect();
    let mut images = Vec::new();
    for key in free {
        let Some(group) = found.groups.remove(key) else { continue };
        images.extend(group.images.into_iter().map(|image| {
            let channel = tree.files[image.file].parts().1.to_owned();
            GroupImage { channel: Some(channel), ..image }
        }));
    }
    if let Some(group) = found.groups.get_mut(own) {
        group.images.extend(images);
    }
}

/// Takes the folders of images for patients where their names have digits, and either the files in them have equal names or
/// begin with the name of their folder, or there is one image in each.
fn patients(found: &mut Groups, tree: &Tree) {
    let has_digit = |name: &str| name.chars().any(|c| c.is_ascii_digit());
    let is_patient = |name: &&str| {
        has_digit(name) && !is_mask_word(name) && !is_among(name, &IMAGE_WORDS) && split_of(name).is_none()
    };
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
