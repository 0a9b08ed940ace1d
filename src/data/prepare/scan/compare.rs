//! Compares files without decoding them: sizes of images and masks, and contents of images.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::super::item::{ITS_IMAGE, Skipped, reason_of};
use super::super::table::Pair;
use super::report::ScanReport;
use crate::decode;
use crate::volume::path::split_selection;
use prsmed_base::event::{Event, Observer};
use prsmed_base::files;

/// First bytes by which files are compared before their whole content.
const START: u64 = 64 << 10;

/// Adds masks of another size than their image, and files whose header cannot be read, to the problems.
pub(super) fn sizes(report: &mut ScanReport, observer: &dyn Observer) {
    let rows = &report.table.rows;
    observer.on(&Event::Started { phase: "compare sizes".into(), total: rows.len() as u64, unit: "images" });
    let done = AtomicU64::new(0);
    let problems: Vec<Skipped> = rows
        .par_iter()
        .flat_map_iter(|pair| {
            let found = if pair.is_image() { of_image(pair) } else { of_volume(pair) };
            observer.on(&Event::Advanced { done: done.fetch_add(1, Ordering::Relaxed) + 1 });
            found
        })
        .collect();
    observer.on(&Event::Finished);
    report.problems = problems;
}

fn of_image(pair: &Pair) -> Vec<Skipped> {
    let size = |path: &Path| {
        decode::dimensions(path).map_err(|error| Skipped {
            path: path.to_owned(),
            reason: format!("cannot be read: {}", reason_of(&error)),
        })
    };
    let expected = match size(&pair.image) {
        Ok(expected) => expected,
        Err(problem) => return vec![problem],
    };
    let problem = |(_, path): &(Option<String>, PathBuf)| match size(path) {
        Ok(found) if found == expected => None,
        Ok(found) => {
            let turned = decode::turned_by_90(found, expected);
            let reason = format!("is {} x {}{ITS_IMAGE}{} x {}{turned}", found.0, found.1, expected.0, expected.1);
            Some(Skipped { path: path.clone(), reason })
        }
        Err(problem) => Some(problem),
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

/// The files that have a key in common with another one.
fn several<K: Ord>(keyed: Vec<(&PathBuf, K)>) -> Vec<&PathBuf> {
    let mut by_key: BTreeMap<K, Vec<&PathBuf>> = BTreeMap::new();
    for (path, key) in keyed {
        by_key.entry(key).or_default().push(path);
    }
    by_key.into_values().filter(|paths| paths.len() > 1).flatten().collect()
}
