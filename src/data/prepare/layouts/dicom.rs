//! DICOM: a SEG or an RTSTRUCT says by UID which series it was drawn on, so that neither names nor folders count.

use std::collections::{BTreeMap, BTreeSet};

use super::super::scan::tree::{FileKind, Tree};
use super::folder_patients::patients;
use super::patterns::{Group, GroupImage, GroupMask, Groups, Layout, NO_LAYOUT, split_in};
use crate::volume::Uid;
use crate::volume::dicom::{SeriesRow, drawn_on};

pub(super) const DICOM: Layout = Layout {
    name: "dicom",
    about: "DICOM SEG and RTSTRUCT, each with the series that it was drawn on: `P1/CT/*.dcm`, `P1/RTSTRUCT.dcm`",
    find: Some(find),
    ..NO_LAYOUT
};

/// A series in a folder.
struct Place<'a> {
    /// Index of the folder in the tree.
    folder: usize,
    row: &'a SeriesRow,
    is_alone: bool,
}

impl Place<'_> {
    /// The group of the series: its folder, with the number of the series if there are several.
    fn group(&self, tree: &Tree) -> (String, Group) {
        let file = &tree.files[self.folder];
        let (folders, stem) = file.parts();
        let part = self.row.number.filter(|_| !self.is_alone).and_then(|number| usize::try_from(number).ok());
        let name = part.map_or_else(|| stem.to_owned(), |part| format!("{stem}_{part}"));
        let doubt = (part.is_none() && !self.is_alone)
            .then(|| "its folder has several series, and this one has no number; move it into a folder".to_owned());
        let (base, split) = (folders.join("/"), split_in(&file.name));
        let images = vec![GroupImage { file: self.folder, channel: None, part }];
        (format!("{base}/{name}"), Group { base, name, images, split, doubt, ..Group::default() })
    }
}

/// The places of each series. A folder above another one with the series is none.
fn places(tree: &Tree) -> BTreeMap<Uid, Vec<Place<'_>>> {
    let mut found: BTreeMap<Uid, Vec<Place>> = BTreeMap::new();
    for listed in &tree.series {
        let rows = listed.listed.as_deref().unwrap_or_default();
        for row in rows {
            let place = Place { folder: listed.file, row, is_alone: rows.len() == 1 };
            found.entry(row.uid()).or_default().push(place);
        }
    }
    let path = |place: &Place| tree.files[place.folder].path.clone();
    for all in found.values_mut() {
        let paths: Vec<_> = all.iter().map(path).collect();
        all.retain(|place| !paths.iter().any(|other| *other != path(place) && other.starts_with(path(place))));
    }
    found
}

fn find(tree: &Tree, free: &[bool]) -> Groups {
    let mut found = Groups::default();
    let is_mask = |file: &usize| free[*file] && tree.files[*file].kind == FileKind::SeriesMasks;
    let masks: Vec<usize> = (0..tree.files.len()).filter(is_mask).collect();
    let places = places(tree);
    let mut studies: BTreeMap<Uid, BTreeSet<String>> = BTreeMap::new();
    for file in masks {
        let of = drawn_on(&tree.files[file].path).unwrap_or_default();
        let mut all = of.iter().filter_map(|uid| places.get(uid)).flatten().filter(|place| free[place.folder]);
        let Some(first) = all.next() else {
            let reason = if of.is_empty() { "it does not say on which series it was drawn" } else { NOT_THERE };
            found.others.push((file, format!("{reason}; a table can name both")));
            continue;
        };
        let (key, group) = first.group(tree);
        let known = found.groups.entry(key.clone()).or_insert(group);
        known.masks.push(GroupMask { file, target: None, is_numbered: false, path: None });
        if let Some(other) = all.next() {
            let folders = [first, other].map(|place| tree.files[place.folder].name.as_str());
            let doubt = format!("`{}` fits series in `{}` and `{}`", tree.files[file].name, folders[0], folders[1]);
            known.doubt.get_or_insert(format!("{doubt}; keep one, or write a table"));
        }
        if let Some(study) = first.row.study() {
            studies.entry(study).or_default().insert(key);
        }
    }
    patients(&mut found, tree);
    // all series of a study are of one patient
    for keys in studies.into_values().filter(|keys| keys.len() > 1) {
        let patient = keys.first().map(|key| key.trim_start_matches('/').to_owned());
        for key in keys {
            let Some(group) = found.groups.get_mut(&key) else { continue };
            group.patient = group.patient.take().or_else(|| patient.clone());
        }
    }
    let masked: BTreeSet<usize> = found.groups.values().map(|group| group.images[0].file).collect();
    for file in tree.series.iter().map(|listed| listed.file).filter(|file| free[*file] && !masked.contains(file)) {
        let images = vec![GroupImage { file, channel: None, part: None }];
        let doubt = Some("no SEG and no RTSTRUCT refers to it".to_owned());
        let name = tree.files[file].parts().1.to_owned();
        found.groups.insert(tree.files[file].name.clone(), Group { name, images, doubt, ..Group::default() });
    }
    found
}

const NOT_THERE: &str = "the series that it was drawn on is not in the folder";
