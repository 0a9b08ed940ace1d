//! Compares files without decoding them: sizes of images and masks, and contents of images.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::super::annotations::AnnotationFiles;
use super::super::item::{ITS_IMAGE, Skipped, UNREADABLE, reason_of};
use super::super::table::Pair;
use super::report::{Ambiguous, ScanReport};
use crate::decode;
use crate::manifest::Split;
use crate::names;
use crate::progress::in_parallel;
use crate::volume::path::split_selection;
use prsmed_base::event::{Event, Observer};
use prsmed_base::{Error, files};

/// First bytes by which files are compared before their whole content.
const START: u64 = 64 << 10;

/// Adds masks of another size than their image, and files whose header cannot be read, to the problems.
pub(super) fn sizes(report: &mut ScanReport, observer: &dyn Observer) {
    let outlines = AnnotationFiles::default();
    let of = |pair: &Pair| if pair.is_image() { of_image(pair, &outlines) } else { of_volume(pair) };
    let found = in_parallel(report.table.rows.iter().collect(), ("compare sizes", "images"), observer, of);
    report.problems = found.into_iter().flatten().collect();
}

fn of_image(pair: &Pair, outlines: &AnnotationFiles) -> Vec<Skipped> {
    let unreadable = |path: &Path, error: &Error| Skipped {
        path: path.to_owned(),
        reason: format!("{UNREADABLE}: {}", reason_of(error)),
    };
    let expected = match decode::dimensions(&pair.image) {
        Ok(expected) => expected,
        Err(error) => return vec![unreadable(&pair.image, &error)],
    };
    let problem = |(_, path): &(Option<String>, PathBuf)| match outlines.mask(path, expected) {
        Ok(Some(_)) => None,
        Ok(None) => match decode::dimensions(path) {
            Ok(found) if found == expected => None,
            Ok(found) => {
                let turned = decode::turned_by_90(found, expected);
                let reason = format!("is {} x {}{ITS_IMAGE}{} x {}{turned}", found.0, found.1, expected.0, expected.1);
                Some(Skipped { path: path.clone(), reason })
            }
            Err(error) => Some(unreadable(path, &error)),
        },
        Err(error) => Some(unreadable(path, &error)),
    };
    pair.masks.iter().filter_map(problem).collect()
}

/// Volumes in NIfTI files; others are compared when they are opened.
fn of_volume(pair: &Pair) -> Vec<Skipped> {
    let Some(expected) = nifti_size(&pair.image) else { return Vec::new() };
    let sorted = |mut size: [u16; 3]| {
        size.sort_unstable();
        size
    };
    let problem = |(_, path): &(Option<String>, PathBuf)| {
        let found = nifti_size(path).filter(|found| sorted(*found) != sorted(expected))?;
        let [own, volume] = [found, expected].map(|size| size.map(|side| side.to_string()).join(" x "));
        let reason = format!("has {own} voxels, its volume {volume}; the argument `resample` allows another grid");
        Some(Skipped { path: path.clone(), reason })
    };
    pair.masks.iter().filter_map(problem).collect()
}

/// The first three sides of a NIfTI file.
fn nifti_size(path: &Path) -> Option<[u16; 3]> {
    let (path, _) = split_selection(path);
    let name = path.to_string_lossy().to_lowercase();
    if !path.is_file() || ![".nii", ".nii.gz"].iter().any(|ending| name.ends_with(ending)) {
        return None;
    }
    let header = nifti::NiftiHeader::from_file(&path).ok()?;
    (header.dim[0] >= 3).then(|| [header.dim[1], header.dim[2], header.dim[3]])
}

/// Adds image files with equal content. Files of one length are compared by their first bytes, and then completely.
pub(super) fn copies(report: &mut ScanReport, observer: &dyn Observer) {
    let images: Vec<&PathBuf> =
        report.table.rows.iter().map(|pair| &pair.image).filter(|path| path.is_file()).collect();
    let length = |path: &&&PathBuf| path.metadata().map_or(0, |found| found.len());
    let start = |path: &&PathBuf| {
        let mut bytes = Vec::new();
        files::open(path).ok()?.take(START).read_to_end(&mut bytes).ok()?;
        Some(format!("{:x}", Sha256::digest(&bytes)))
    };
    observer.on(&Event::Started { phase: "find copies".into(), total: images.len() as u64, unit: "images" });
    let lengths: Vec<(&PathBuf, u64)> = images.par_iter().map(|path| (*path, length(&path))).collect();
    let of_length = several(lengths);
    let starts: Vec<_> = of_length.into_par_iter().filter_map(|path| Some((path, start(&path)?))).collect();
    let whole: Vec<_> =
        several(starts).into_par_iter().filter_map(|path| Some((path, files::sha256(path).ok()?))).collect();
    observer.on(&Event::Finished);
    let mut copies: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for (path, hash) in whole {
        copies.entry(hash).or_default().push(path.clone());
    }
    let mut copies: Vec<Vec<PathBuf>> = copies.into_values().filter(|paths| paths.len() > 1).collect();
    copies.sort();
    report.copies = copies;
}

/// Adds patients whose images the layout has in several splits, and a note about copies in several splits.
pub(super) fn splits(report: &mut ScanReport) {
    let splits_of = |pairs: &[&Pair]| -> BTreeMap<Split, PathBuf> {
        pairs.iter().filter_map(|pair| Some((pair.split?, pair.image.clone()))).collect()
    };
    let mut of_patient: BTreeMap<String, Vec<&Pair>> = BTreeMap::new();
    for pair in &report.table.rows {
        if let Some(patient) = &pair.patient {
            of_patient.entry(names::key(patient)).or_default().push(pair);
        }
    }
    let patients = of_patient.into_values().filter_map(|pairs| {
        let splits = splits_of(&pairs);
        let named = splits.keys().map(|split| format!("`{split}`")).collect::<Vec<_>>().join(" and ");
        let reason = format!(
            "the patient's images are in {named}; give them one split in `pairs.csv`, or leave the column `split` empty"
        );
        let name = pairs[0].patient.clone().unwrap_or_default();
        (splits.len() > 1).then(|| Ambiguous { name, files: splits.into_values().collect(), reason })
    });
    let patients: Vec<Ambiguous> = patients.collect();
    let of_image: BTreeMap<&PathBuf, &Pair> = report.table.rows.iter().map(|pair| (&pair.image, pair)).collect();
    let in_several = report.copies.iter().filter(|paths| {
        let pairs: Vec<&Pair> = paths.iter().filter_map(|path| of_image.get(path).copied()).collect();
        splits_of(&pairs).len() > 1
    });
    let count = in_several.count();
    report.notes.extend((count > 0).then(|| {
        format!(
            "{count} of the groups of copies are in two splits: `data prepare` refuses them unless they show nothing; see `copies` \
             in scan.json, and correct the column `split` of `pairs.csv`"
        )
    }));
    report.ambiguous.extend(patients);
}

/// The files that have a key in common with another one.
fn several<K: Ord>(keyed: Vec<(&PathBuf, K)>) -> Vec<&PathBuf> {
    let mut by_key: BTreeMap<K, Vec<&PathBuf>> = BTreeMap::new();
    for (path, key) in keyed {
        by_key.entry(key).or_default().push(path);
    }
    by_key.into_values().filter(|paths| paths.len() > 1).flatten().collect()
}
