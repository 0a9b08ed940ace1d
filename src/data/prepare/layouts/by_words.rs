//! The layout of all other trees: words in the names of folders and files say which of them are masks, and what is left of the
//! names says what belongs together. So a folder for each patient may have files of equal names.

use std::collections::{BTreeMap, BTreeSet};

use super::super::scan::tree::{FileKind, Tree};
use super::folder_patients::patients;
use super::patterns::{Group, GroupImage, GroupMask, Groups, Layout, NO_LAYOUT, split_of, words};
use super::words::NameWords;
use crate::names;

pub(super) const NAMES: Layout = Layout {
    name: "names",
    about: "`P1/image.png`, `P1/mask.png`; `scans/P1/imaging.nii.gz`, `labels/P1/imaging.nii.gz`; `a.jpg`, `a_mask.png`",
    find: Some(find),
    ..NO_LAYOUT
};

fn key(parts: &[String]) -> String {
    parts.iter().map(|part| names::key(part)).collect::<Vec<_>>().join("/")
}

fn find(tree: &Tree, free: &[bool]) -> Groups {
    let is_file = |file: &usize| {
        let found = &tree.files[*file];
        free[*file] && found.kind != FileKind::Outlines && !found.names_series()
    };
    let all = (0..tree.files.len()).filter(is_file).map(|file| NameWords::new(file, tree));
    let (masks, images): (Vec<NameWords>, Vec<NameWords>) = all.partition(|named| named.is_mask);
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
        group.masks.push(GroupMask { file: mask.file, target, is_numbered: mask.is_numbered, path: None });
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
