//! Patients of DICOM series: by PatientID, which is compared and not written; else by folders and studies.

use std::collections::{BTreeMap, BTreeSet};

use super::super::scan::tree::{Tree, TreeFile};
use super::folder_patients;
use super::patterns::Groups;
use crate::volume::Uid;
use crate::volume::dicom::SeriesRow;

/// A series with masks.
pub(super) struct Imaged<'a> {
    pub(super) folder: &'a TreeFile,
    pub(super) row: &'a SeriesRow,
}

/// Gives the groups of `imaged`, by their keys, patients.
pub(super) fn patients(found: &mut Groups, imaged: &BTreeMap<String, Imaged>, tree: &Tree) {
    let ids: BTreeSet<&Uid> = imaged.values().filter_map(|of| of.row.patient.as_ref()).collect();
    if ids.len() > 1 {
        by_id(found, imaged);
    } else {
        folder_patients::patients(found, tree);
        if !ids.is_empty() && imaged.len() > 1 {
            found.notes.push("all series have one PatientID, which tells no patients apart and is not used".to_owned());
        }
    }
    let mut studies: BTreeMap<Uid, Vec<&String>> = BTreeMap::new();
    for (key, of) in imaged {
        studies.entry(of.row.study().unwrap_or_else(|| of.row.uid())).or_default().push(key);
    }
    // all series of a study are of one patient
    for keys in studies.into_values().filter(|keys| keys.len() > 1) {
        let known = keys.iter().find_map(|key| found.groups.get(*key)?.patient.clone());
        let name = known.unwrap_or_else(|| imaged[keys[0]].folder.name.clone());
        for key in keys {
            if let Some(group) = found.groups.get_mut(key) {
                group.patient = Some(name.clone());
            }
        }
    }
    let num_unknown = found.groups.values().filter(|group| group.patient.is_none()).count();
    if num_unknown > 1 {
        found.notes.push(format!(
            "the patients of {num_unknown} series are not known, and each counts as a patient of its own: if some are of one \
             patient, fill the column `patient` of `pairs.csv`, or they may be in two splits"
        ));
    }
}

/// The series of each PatientID are one patient, who has the name of the first folder that has no series of others.
fn by_id(found: &mut Groups, imaged: &BTreeMap<String, Imaged>) {
    let mut by_id: BTreeMap<&Uid, Vec<&String>> = BTreeMap::new();
    for (key, of) in imaged {
        let Some(id) = &of.row.patient else { continue };
        by_id.entry(id).or_default().push(key);
    }
    let mut used: BTreeMap<String, usize> = BTreeMap::new();
    // in the order of the files, which the ids would not have
    let mut all: Vec<(&Uid, Vec<&String>)> = by_id.into_iter().collect();
    all.sort_by_key(|(_, keys)| keys[0]);
    for (id, keys) in &all {
        let is_other = |of: &&Imaged| of.row.patient.as_ref() != Some(*id);
        let others: Vec<&str> = imaged.values().filter(is_other).map(|of| of.folder.name.as_str()).collect();
        let name = name(&keys.iter().map(|key| imaged[*key].folder.name.as_str()).collect::<Vec<_>>(), &others);
        let count = used.entry(name.clone()).or_default();
        *count += 1;
        let name = if *count > 1 { format!("{name} ({count})") } else { name };
        for key in keys {
            if let Some(group) = found.groups.get_mut(*key) {
                group.patient = Some(name.clone());
            }
        }
    }
    found.notes.push(format!(
        "series of one PatientID are one patient ({} patients, called by their folders); the column `patient` of `pairs.csv` decides",
        all.len()
    ));
}

/// The first folder above all of `own` and none of `others`, or else the first of `own`.
fn name(own: &[&str], others: &[&str]) -> String {
    let first = own[0];
    let ends = first.match_indices('/').map(|(end, _)| end).chain([first.len()]);
    let above = |folder: &str, name: &&str| {
        *name == folder || name.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
    };
    let found = ends
        .map(|end| &first[..end])
        .find(|folder| own.iter().all(|name| above(folder, name)) && !others.iter().any(|name| above(folder, name)));
    found.unwrap_or(first).to_owned()
}
