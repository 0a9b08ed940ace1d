//! Volumes and label maps as files or in folders: which there are, and what they are called.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::super::item::{NOT_UTF8, Skipped};
use super::super::options::PrepareOptions;
use super::super::patients::Patients;
use super::super::table::Pair;
use super::names::Named;
use crate::annotation::is_flat_image;
use crate::names;
use crate::volume::format::{DICOM, FORMATS, has_voxels_only, is_other_image, is_stack, of_volume, stem_of};
use crate::volume::path::{selection_name, split_selection};
use prsmed_base::Result;
use prsmed_base::error::first_quoted;
use prsmed_base::files::visible_entries;

/// Whether the paths are volumes: several paths, files, or a folder with fewer images than files of volumes by their
/// names, or with neither, and not of images in other formats alone.
///
/// # Errors
/// [`Error::Io`] for a folder that cannot be read.
pub(in crate::prepare) fn are_volumes(paths: &[PathBuf]) -> Result<bool> {
    let [folder] = paths else { return Ok(true) };
    if !folder.is_dir() {
        return Ok(folder.is_file() || split_selection(folder).1.is_some());
    }
    let entries = visible_entries(folder)?;
    let is_volume =
        |path: &Path| is_stack(path) || FORMATS.iter().any(|format| format.is_mask_volume() && format.has_ending(path));
    let images = entries.iter().filter(|path| is_flat_image(path)).count();
    // a preview beside volumes is none of them
    let is_of_images = images > 0 && images >= entries.iter().filter(|path| is_volume(path)).count();
    let is_of_others = entries.iter().all(|path| is_other_image(path));
    Ok(!is_of_images && !is_of_others)
}

/// The volumes or label maps that `argument` names. A file is one of them, and a folder contains them; a folder of volumes
/// may also be one DICOM series.
pub(super) fn listed(argument: &str, paths: &[PathBuf], skipped: &mut Vec<Skipped>) -> Result<Vec<Named>> {
    let mut found = Vec::new();
    for path in paths {
        if !path.is_dir() || argument == "images" && is_series(path)? {
            found.push((stem(path), path.clone()));
            continue;
        }
        for entry in visible_entries(path)? {
            match volume_of_folder(argument, &entry)? {
                Ok(volume) if has_voxels_only(&volume) => {}
                Ok(path) if path.to_str().is_none() => skipped.push(Skipped { path, reason: NOT_UTF8.into() }),
                Ok(volume) => found.push((stem(&entry), volume)),
                Err(skip) if skipped.contains(&skip) => {}
                Err(skip) => skipped.push(skip),
            }
        }
    }
    Ok(found)
}

/// Files of a folder, with those of its subfolders if it is `deep`. Links to folders are not followed.
pub(super) fn files_in(folder: &Path, deep: bool) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in visible_entries(folder)? {
        if path.is_file() {
            files.push(path);
        } else if deep && path.is_dir() && !path.is_symlink() {
            files.extend(files_in(&path, deep)?);
        }
    }
    Ok(files)
}

/// The only volume in a patient's folder, as KiTS and TotalSegmentator have them, or else in its subfolders, as BIDS has
/// them. A folder of DICOM images or without volumes stays, as a file does; a DICOM file of masks is a label map.
fn volume_of_folder(argument: &str, folder: &Path) -> Result<Result<PathBuf, Skipped>> {
    if !folder.is_dir() {
        return Ok(Ok(folder.to_owned()));
    }
    let mut volumes = Vec::new();
    for deep in [false, true] {
        for path in files_in(folder, deep)? {
            match of_volume(&path)? {
                Some(format) if format.is_series && argument == "images" => return Ok(Ok(folder.to_owned())),
                Some(_) if !has_voxels_only(&path) => volumes.push(path),
                _ => {}
            }
        }
        if !volumes.is_empty() {
            break;
        }
    }
    if volumes.len() < 2 {
        return Ok(Ok(volumes.pop().unwrap_or_else(|| folder.to_owned())));
    }
    let is_label = |path: &Path| ["seg", "label", "mask"].iter().any(|word| file_name(path).contains(word));
    let example = volumes.iter().find(|path| is_label(path) == (argument == "masks")).unwrap_or(&volumes[0]);
    let name = file_name(folder);
    let inside = |path: &Path| path.strip_prefix(folder).unwrap_or(path).display().to_string();
    let names = first_quoted(&volumes.iter().map(|path| inside(path)).collect::<Vec<_>>(), 4);
    let others = folder.with_file_name("*").join(inside(example).replace(&name, "*"));
    let reason = format!(
        "it has {} volumes: {names} (name one of each patient's folder, for example the argument `{argument}={}`)",
        volumes.len(),
        others.display()
    );
    Ok(Err(Skipped { path: folder.to_owned(), reason }))
}

/// Names for files, of which no two are equal: their stems, one of their folders (the nearest first), all folders that
/// differ, and those with the stem.
fn namings(files: &[Named]) -> Vec<Vec<String>> {
    let folders_of = |path: &Path| -> Vec<String> {
        path.ancestors().skip(1).filter(|path| path.file_name().is_some()).map(file_name).collect()
    };
    let folders: Vec<Vec<String>> = files.iter().map(|(_, path)| folders_of(path)).collect();
    let num_levels = folders.iter().map(Vec::len).min().unwrap_or(0);
    let level = |level: usize| -> Vec<String> { folders.iter().map(|folders| folders[level].clone()).collect() };
    let differ = |names: &[String]| names.iter().any(|name| *name != names[0]);
    let differing: Vec<Vec<String>> = (0..num_levels).map(level).filter(|names| differ(names)).collect();
    let stems: Vec<String> = files.iter().map(|(stem, _)| stem.clone()).collect();
    let mut found = vec![stems.clone()];
    // a single file differs from none
    found.extend((num_levels > 0 && files.len() == 1).then(|| level(0)));
    found.extend(differing.iter().cloned());
    if let Some(folders) = differing.into_iter().reduce(|inner, outer| joined(&outer, &inner)) {
        let with_stems = joined(&folders, &stems);
        found.extend([folders, with_stems]);
    }
    found.retain(|names| names.iter().collect::<BTreeSet<_>>().len() == names.len());
    found
}

/// Pairs of names with `_` between them.
fn joined(first: &[String], second: &[String]) -> Vec<String> {
    first.iter().zip(second).map(|(first, second)| format!("{first}_{second}")).collect()
}

/// Gives volumes and label maps the names by which they are matched.
pub(super) fn name(images: &mut [Named], masks: &mut [Named]) {
    for (stem, _) in images.iter_mut() {
        // nnU-Net numbers the channels of an image: `case_0000.nii.gz` belongs to `case.nii.gz`
        let head = stem.strip_suffix("_0000").filter(|_| !masks.iter().any(|(mask, _)| mask == stem));
        if let Some(head) = head {
            *stem = head.to_owned();
        }
    }
    name_by_path(images, masks);
}

/// Names volumes and label maps by the folders on their paths if their own names make no pairs: those of
/// `--images scans/*/ct.nii.gz --masks scans/*/masks/liver.nii.gz` are what stands for `*`.
fn name_by_path(images: &mut [Named], masks: &mut [Named]) {
    let pairs = |images: &[String], masks: &[String]| -> Vec<(usize, usize)> {
        let numbers: BTreeMap<String, usize> = images.iter().map(|name| names::key(name)).zip(0..).collect();
        masks.iter().enumerate().filter_map(|(mask, name)| Some((*numbers.get(&names::key(name))?, mask))).collect()
    };
    let stems = |files: &[Named]| -> Vec<String> { files.iter().map(|(stem, _)| stem.clone()).collect() };
    let are_different = |names: &[String]| names.iter().collect::<BTreeSet<_>>().len() == names.len();
    let (of_images, of_masks) = (stems(images), stems(masks));
    if are_different(&of_images) && are_different(&of_masks) && !pairs(&of_images, &of_masks).is_empty() {
        return;
    }
    let (of_images, of_masks) = (namings(images), namings(masks));
    let both = of_images.iter().flat_map(|images| of_masks.iter().map(move |masks| (images, masks)));
    let mut found: Vec<_> = both.map(|(images, masks)| (pairs(images, masks), images, masks)).collect();
    found.sort_by_key(|(pairs, ..)| Reverse(pairs.len()));
    let Some((best, of_images, of_masks)) = found.first().filter(|(pairs, ..)| !pairs.is_empty()) else { return };
    // two namings that make other pairs say nothing
    if found.iter().any(|(pairs, ..)| pairs.len() == best.len() && pairs != best) {
        return;
    }
    images.iter_mut().zip(*of_images).for_each(|((stem, _), name)| stem.clone_from(name));
    masks.iter_mut().zip(*of_masks).for_each(|((stem, _), name)| stem.clone_from(name));
}

/// A volume with the path by which it is called: its file, the folder that gives it its name, or no file, if several
/// folders do.
pub(in crate::prepare) fn called(pair: Pair) -> Pair {
    let own = stem(&pair.image);
    let folder = pair.image.ancestors().skip(1).find(|folder| file_name(folder) == pair.name);
    let source = match folder {
        _ if own == pair.name => pair.image.clone(),
        Some(folder) => folder.to_owned(),
        None if own.starts_with(&pair.name) && pair.sequences.is_empty() => pair.image.clone(),
        None => pair.image.with_file_name(&pair.name),
    };
    Pair { source, ..pair }
}

/// Says so if volumes have the names of folders.
pub(super) fn notes(rows: &[Pair], options: &PrepareOptions) -> Vec<String> {
    let is_joined = |pair: &&Pair| pair.source.file_name() == Some(pair.name.as_ref()) && !pair.source.exists();
    let joined = rows.iter().find(is_joined).filter(|_| options.patients == Patients::Unknown).map(|pair| {
        format!(
            "volumes have the names of several folders, as `{}`, and each is a patient of its own; the argument `group` finds the \
             patients in these names",
            pair.name
        )
    });
    let of_folder = rows.iter().find(|pair| options.append && pair.source != pair.image).map(|pair| {
        format!(
            "volumes have the names of their folders, as `{}`: what is added must have the names of the earlier call, or it \
             is added again",
            pair.name
        )
    });
    joined.into_iter().chain(of_folder).collect()
}

/// Whether a folder is one DICOM series: its first file is a DICOM file, by its content or its name.
fn is_series(folder: &Path) -> Result<bool> {
    let Some(first) = visible_entries(folder)?.into_iter().find(|path| path.is_file()) else { return Ok(false) };
    Ok(DICOM.has_ending(&first) || of_volume(&first)?.is_some_and(|format| format.name == DICOM.name))
}

/// Name of a volume in the data root: its file name without extension, and what selects it.
pub(in crate::prepare) fn stem(path: &Path) -> String {
    let (path, selected) = split_selection(path);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let stem = if path.is_dir() { name.as_str() } else { stem_of(&name) };
    selected.map_or_else(|| stem.to_owned(), |selected| format!("{stem}_{}", selection_name(&selected)))
}

/// Name of a volume for messages and the table.
pub(in crate::prepare) fn file_name(path: &Path) -> String {
    let (path, selected) = split_selection(path);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    selected.map_or_else(|| name.clone().into_owned(), |selected| format!("{name}#{}", selection_name(&selected)))
}
