//! DICOM: a SEG or an RTSTRUCT says by UID which series it was drawn on, so that neither names nor folders count.

use std::collections::{BTreeMap, BTreeSet};

use super::super::scan::tree::{ListedSeries, Tree, TreeFile};
use super::super::structures::NamedLabels;
use super::dicom_patients::{Imaged, patients};
use super::patterns::{Group, GroupImage, GroupMask, Groups, Layout, NO_LAYOUT, split_in};
use crate::volume::Uid;
use prsmed_base::error::quoted;

pub(super) const DICOM: Layout = Layout {
    name: "dicom",
    about: "DICOM SEG and RTSTRUCT, each with the series that it was drawn on: `P1/CT/*.dcm`, `P1/RTSTRUCT.dcm`",
    find: Some(find),
    ..NO_LAYOUT
};

/// A series in a folder.
struct Place<'a> {
    listed: &'a ListedSeries,
    index: usize,
}

impl Place<'_> {
    fn folder<'a>(&self, tree: &'a Tree) -> &'a TreeFile {
        &tree.files[self.listed.file]
    }

    /// What is equal for the masks of the series.
    fn key(&self) -> String {
        format!("{:09} {:09}", self.listed.file, self.index)
    }

    /// The group of the series: its folder, with the number of the series if there are several.
    fn group(&self, tree: &Tree) -> Group {
        let (file, rows) = (self.folder(tree), self.listed.rows());
        let (folders, stem) = file.parts();
        let number = rows[self.index].number;
        let is_own = number.is_some() && rows.iter().filter(|row| row.number == number).count() == 1;
        let part = number.filter(|_| is_own && rows.len() > 1).and_then(|number| usize::try_from(number).ok());
        let written = part.map(|part| format!("{}#{part}", file.path.display()));
        let doubt = if rows.len() > 1 && part.is_none() {
            let remedy = "write `#` and its SeriesInstanceUID behind the folder in the column `image`";
            Some(format!("its folder has several series, and this one has no number of its own; {remedy}"))
        } else {
            let taken = written.filter(|path| std::path::Path::new(path).exists());
            taken.map(|path| format!("`{path}` would mean a series, but is also a file; rename that"))
        };
        let name = part.map_or_else(|| stem.to_owned(), |part| format!("{stem}_{part}"));
        let images = vec![GroupImage { file: self.listed.file, channel: None, part }];
        Group { base: folders.join("/"), name, images, split: split_in(&file.name), doubt, ..Group::default() }
    }
}

/// The places of each series. A folder above another one with the series is none.
fn places(tree: &Tree) -> BTreeMap<Uid, Vec<Place<'_>>> {
    let mut found: BTreeMap<Uid, Vec<Place>> = BTreeMap::new();
    for listed in &tree.series {
        for (index, row) in listed.rows().iter().enumerate() {
            found.entry(row.uid()).or_default().push(Place { listed, index });
        }
    }
    for all in found.values_mut() {
        let paths: Vec<_> = all.iter().map(|place| &place.folder(tree).path).collect();
        let is_above = |own| paths.iter().any(|other| *other != own && other.starts_with(own));
        all.retain(|place| !is_above(&place.folder(tree).path));
    }
    found
}

fn find(tree: &Tree, free: &[bool]) -> Groups {
    let (mut found, places) = (Groups::default(), places(tree));
    let mut imaged: BTreeMap<String, Imaged> = BTreeMap::new();
    let masks = tree.files.iter().enumerate().filter(|(file, _)| free[*file]);
    for (file, header) in masks.filter_map(|(file, found)| Some((file, found.masks.as_ref()?))) {
        let uids: BTreeSet<&Uid> = header.series.iter().collect();
        let all = uids.into_iter().filter_map(|uid| places.get(uid)).flatten();
        let all: Vec<&Place> = all.filter(|place| free[place.listed.file]).collect();
        let Some(first) = all.first() else {
            found.others.push((file, tree.files[file].no_series().to_owned()));
            continue;
        };
        let known = found.groups.entry(first.key()).or_insert_with(|| first.group(tree));
        let target = header.names.0.values().next().filter(|_| header.names.0.len() == 1).cloned();
        known.masks.push(GroupMask { file, target, is_numbered: false, path: None });
        known.labels = NamedLabels::of_file(&header.names);
        if all.len() > 1 {
            let folders: BTreeSet<_> = all.iter().map(|place| place.folder(tree).name.as_str()).collect();
            let folders = quoted(&folders.into_iter().collect::<Vec<_>>());
            let remedy = "keep one in the table, or put the parts of one series into one folder";
            known.doubt.get_or_insert(format!("`{}` fits series in {folders}; {remedy}", tree.files[file].name));
        }
        let row = &first.listed.rows()[first.index];
        imaged.insert(first.key(), Imaged { folder: first.folder(tree), row });
    }
    for group in found.groups.values_mut() {
        // files of one structure each are told apart by its name; the names of one file are those of its labels
        let has_several = group.masks.len() > 1;
        if !has_several || group.masks.iter().any(|mask| mask.target.is_none()) {
            group.masks.iter_mut().for_each(|mask| mask.target = None);
        }
        if has_several {
            group.labels = NamedLabels::default();
        }
    }
    patients(&mut found, &imaged, tree);
    let masked: BTreeSet<usize> = found.groups.values().map(|group| group.images[0].file).collect();
    for listed in tree.series.iter().filter(|listed| free[listed.file] && !masked.contains(&listed.file)) {
        let place = Place { listed, index: 0 };
        let images = vec![GroupImage { file: listed.file, channel: None, part: None }];
        let name = place.folder(tree).parts().1.to_owned();
        found.groups.insert(place.key(), Group { name, images, ..Group::default() });
    }
    found
}
