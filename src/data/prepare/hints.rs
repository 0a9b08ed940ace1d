//! What to do about files that cannot be used.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::item::{EMPTY, IS_A, ITS_IMAGE, NO_IMAGE, NO_MASK, NOT_AN_IMAGE, NOT_LISTED, OTHER_IMAGE, Skipped, by_kind};
use super::layouts::without_suffix;
use super::patients::file_name;
use crate::annotation::is_image;
use crate::annotation_file;
use crate::volume::format::is_other_image;
use prsmed_base::{Error, Result};

/// Most files or folders that a message names.
pub(super) const MAX_NAMED: usize = 3;
/// Remedy for files of annotation programs.
const EXPORT: &str = "export the masks as images from the annotation program, one PNG for each image with the name of the \
                      image, background 0; of outlines, files of COCO, LabelMe and YOLO are read, if they are in a folder without masks";

/// What to do about the most frequent kind of reason; `None` if it is that names differ, or says it itself.
pub(super) fn remedy(skipped: &[Skipped]) -> Option<&'static str> {
    let reason = &by_kind(skipped).first()?.first()?.reason;
    let is_other = |file: &Skipped| file.reason == NOT_AN_IMAGE && is_other_image(&file.path);
    match reason.split(';').next()? {
        reason if reason.starts_with(OTHER_IMAGE) => {
            Some("give the new images other names, for example with the name of their folder or patient before it")
        }
        reason
            if [NOT_LISTED, NO_IMAGE, NOT_AN_IMAGE].contains(&reason)
                || [NO_MASK, IS_A].iter().any(|start| reason.starts_with(start)) =>
        {
            if skipped.iter().any(|file| file.reason.starts_with(IS_A)) {
                return Some(EXPORT);
            }
            skipped.iter().any(is_other).then_some("convert the images and masks to PNG")
        }
        EMPTY => Some(
            "if they should show a target, their export failed; the argument `negatives` keeps images whose mask is rightly empty, as \
             questions about an absent target",
        ),
        size if size.contains(ITS_IMAGE) => {
            Some("save each mask at the size of its image; resize masks with the nearest pixel, not smoothly")
        }
        _ => Some("correct the files that are named"),
    }
}

/// Refuses a file where a folder of masks is expected.
pub(super) fn refuse_file_of_masks(masks: &Path) -> Result<()> {
    if !masks.is_file() {
        return Ok(());
    }
    match annotation_file::kind_of(masks) {
        Some(kind) => Err(Error::data(masks, format!("{IS_A} {kind}"), EXPORT)),
        None => Err(Error::data(masks, "is a file, and the images are in a folder", "give the folder of the masks")),
    }
}

/// Refuses several folders of images: only one is read.
pub(super) fn refuse_folders_of_images(paths: &[PathBuf]) -> Result<()> {
    match paths {
        [first, _, ..] if paths.iter().all(|path| path.is_dir() && !images_in(path).is_empty()) => {
            let reason = format!("is the first of {} folders of images, and one folder is read", paths.len());
            let root = first.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            Err(Error::data(first, reason, as_it_is(root)))
        }
        _ => Ok(()),
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

fn images_in(folder: &Path) -> Vec<PathBuf> {
    entries(folder).into_iter().filter(|path| is_image(path)).collect()
}

/// Says so if a folder has no images, but folders with images: those of the patients, or those of images and of masks.
pub(super) fn folders_in(folder: &Path) -> Option<String> {
    if !images_in(folder).is_empty() {
        return None;
    }
    let found = entries(folder);
    let has_images = |path: &PathBuf| !images_in(path).is_empty();
    let mut folders: Vec<PathBuf> = found.iter().filter(|path| has_images(path)).cloned().collect();
    let are_below = folders.is_empty();
    if are_below {
        folders = found.iter().flat_map(|path| entries(path)).filter(has_images).collect();
    }
    if folders.is_empty() {
        return None;
    }
    folders.sort();
    let named: Vec<String> = folders.iter().take(2 * MAX_NAMED).map(|path| format!("`{}`", path.display())).collect();
    let in_folders = format!("its images are in folders of it: {}", named.join(", "));
    if !are_below && folders.len() > 1 && are_of_patients(&folders) {
        return Some(format!("{in_folders}; {}", as_it_is(folder)));
    }
    Some(format!("{in_folders}; give the folder of images and the folder of masks"))
}

/// Whether folders are those of patients: their files have equal names, or each has masks beside its images. Two folders
/// whose names differ in more than their numbers may be those of images and of masks.
fn are_of_patients(folders: &[PathBuf]) -> bool {
    let masks = |folder: &Path| entries(folder).iter().filter(|path| is_mask(path)).count();
    let with_both = folders.iter().filter(|folder| masks(folder) > 0 && masks(folder) < entries(folder).len()).count();
    let names = ["images", "image", "masks", "mask", "labels", "label", "scans", "imgs"];
    let are_parts = folders.iter().any(|folder| names.contains(&file_name(folder).to_lowercase().as_str()));
    let without_digits = |folder: &PathBuf| file_name(folder).replace(|c: char| c.is_ascii_digit(), "");
    let may_be_parts = matches!(folders, [a, b] if without_digits(a) != without_digits(b));
    !are_parts && (2 * with_both > folders.len() || (repeated(folders).is_some() && !may_be_parts))
}

/// A file name that most of the folders have.
fn repeated(folders: &[PathBuf]) -> Option<String> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for path in folders.iter().flat_map(|folder| images_in(folder)) {
        *counts.entry(file_name(&path)).or_default() += 1;
    }
    counts.into_iter().find(|(_, count)| 2 * count > folders.len()).map(|(name, _)| name)
}

/// Whether a file is a mask by its name: `mask.png`, `scan_mask.png`.
fn is_mask(path: &Path) -> bool {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    is_image(path) && without_suffix(&format!("a_{stem}")).is_some()
}

/// The commands for a folder whose images are in folders of patients.
fn as_it_is(root: &Path) -> String {
    let root = shell_quoted(root);
    format!(
        "such a folder is read as it is: `prsmed data scan {root}` lists its pairs, and `prsmed data prepare {root}` with the \
         arguments `modality` and `out` prepares them"
    )
}

fn shell_quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[&str]) -> tempfile::TempDir {
        let home = tempfile::tempdir().expect("a folder");
        for file in files {
            let path = home.path().join(file);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            std::fs::write(path, file).expect("written");
        }
        home
    }

    #[test]
    fn folders_of_patients_are_read_as_they_are() {
        for files in [
            &["P 1/image.png", "P 1/mask.png", "P2/image.png", "P2/mask.png"][..],
            &["P1/scan.jpg", "P1/scan_seg.png", "P2/scan.jpg", "P2/scan_seg.png"],
            &["P1/a.png", "P1/b.png", "P2/a.png", "P2/b.png"],
            &["P1/a.png", "P1/a_mask.png", "P1/b.png", "P2/a.png", "P2/a_mask.png"],
        ] {
            let home = folder(files);
            let command = format!("`prsmed data scan '{}'`", home.path().display());
            let text = folders_in(home.path()).expect("patients");
            assert!(text.contains(&command), "{text}");
            let error = refuse_folders_of_images(&entries(home.path())).expect_err("several folders");
            assert!(error.hint().contains(&command), "{}", error.hint());
        }
    }

    #[test]
    fn folders_of_images_and_of_masks_are_named() {
        let same = &["us/PAT_01_a.png", "us/PAT_02_a.png", "lesions/PAT_01_a.png", "lesions/PAT_02_a.png"];
        for files in
            [&same[..], &["images/a.png", "masks/a.png"], &["scans/a.png", "truth/b.png"], &["set/images/a.png"]]
        {
            let text = folders_in(folder(files).path()).expect("folders");
            assert!(text.ends_with("give the folder of images and the folder of masks"), "{text}");
        }
        assert_eq!(folders_in(folder(&["a.png", "more/b.png"]).path()), None);
        assert_eq!(folders_in(folder(&["a.nii.gz", "more/notes.txt"]).path()), None);
        refuse_folders_of_images(&["a.nii".into(), "b.nii".into()]).expect("volumes");
    }
}
