//! What to do about files that cannot be used.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::grouping;
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
        reason if [NO_MASK, NOT_LISTED, NO_IMAGE, NOT_AN_IMAGE].contains(&reason) || reason.starts_with(IS_A) => {
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
            Err(Error::data(first, reason, one_folder(root, paths)))
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
        return Some(format!("{in_folders}; {}", one_folder(folder, &folders)));
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

/// The commands that copy the files of patients' folders into one folder of images and one of masks.
fn one_folder(root: &Path, folders: &[PathBuf]) -> String {
    let quoted = |path: &Path| format!("'{}'", path.display().to_string().replace('\'', r"'\''"));
    let (masks, scans): (Vec<_>, Vec<_>) = images_in(&folders[0]).into_iter().partition(|path| is_mask(path));
    let ending = |path: &Path| path.extension().unwrap_or_default().to_string_lossy().into_owned();
    let root = quoted(root);
    if let ([mask], [scan]) = (masks.as_slice(), scans.as_slice()) {
        let (mask_end, scan_end) = (ending(mask), ending(scan));
        return format!(
            "copy them into one folder of images and one of masks, named after their folders: `mkdir images masks; for d in \
             {root}/*/; do n=$(basename \"$d\"); cp \"$d\"{} images/\"$n\".{scan_end}; cp \"$d\"{} masks/\"$n\".{mask_end}; \
             done`",
            quoted(Path::new(&file_name(scan))),
            quoted(Path::new(&file_name(mask)))
        );
    }
    let ending = scans.first().or(masks.first()).map_or("png".to_owned(), |path| ending(path));
    format!(
        "copy them into one folder, with the name of their folder before their own: `mkdir flat; for f in \
         {root}/*/*.{ending}; do cp \"$f\" flat/\"$(basename \"$(dirname \"$f\")\")_$(basename \"$f\")\"; done`, the masks \
         in the same way, and give the patients with {}",
        patients_of(folders)
    )
}

/// The flag that says the patients of files that got the name of their folder before their own.
fn patients_of(folders: &[PathBuf]) -> String {
    let images = |folder: &PathBuf| images_in(folder).iter().map(|path| file_name(path)).collect();
    let folders: Vec<(String, Vec<String>)> =
        folders.iter().map(|folder| (file_name(folder), images(folder))).collect();
    match grouping::pattern_of_folders(&folders) {
        Some(pattern) => format!("the argument `group='{pattern}'`"),
        None => "the argument `patients=TABLE.csv`, a table with the columns `file` and `patient`".to_owned(),
    }
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
    fn folders_of_patients_become_folders_of_images_and_masks_by_the_printed_commands() {
        for (files, made) in [
            (
                &["P 1/image.png", "P 1/mask.png", "P2/image.png", "P2/mask.png"][..],
                &["images/P 1.png", "images/P2.png", "masks/P 1.png", "masks/P2.png"][..],
            ),
            (&["P1/scan.jpg", "P1/scan_seg.png", "P2/scan.jpg", "P2/scan_seg.png"], &["images/P1.jpg", "masks/P2.png"]),
            (&["P1/a.png", "P1/b.png", "P2/a.png", "P2/b.png"], &["flat/P1_a.png", "flat/P2_b.png"]),
            (&["P1/a.png", "P1/a_mask.png", "P1/b.png", "P2/a.png", "P2/a_mask.png"], &["flat/P2_a_mask.png"]),
        ] {
            let home = folder(files);
            let text = folders_in(home.path()).expect("patients");
            let script = text.split('`').find(|part| part.starts_with("mkdir")).expect("commands");
            let to = tempfile::tempdir().expect("a folder");
            let ran = std::process::Command::new("bash").args(["-c", script]).current_dir(to.path()).status();
            assert!(ran.expect("bash").success(), "{script}");
            for name in made {
                assert!(to.path().join(name).is_file(), "{name} by {script}");
            }
            let paths: Vec<PathBuf> = entries(home.path());
            let error = refuse_folders_of_images(&paths).expect_err("several folders");
            assert!(error.hint().contains(script), "{}", error.hint());
        }
    }

    #[test]
    fn the_patients_of_copied_files_are_those_of_their_folders() {
        for (files, flag) in [
            (&["P1/a.png", "P1/b.png", "P2/a.png", "P2/b.png"][..], "the argument `group='^([^_]+)_'`"),
            (
                &["PAT_01/a.png", "PAT_01/b.png", "PAT_02/a.png", "PAT_02/b.png"],
                "the argument `group='^([^_]+_[^_]+)_'`",
            ),
            (
                &["us_1_x/a.png", "us_1_x/b.png", "us_2_x/a.png", "us_2_x/b.png"],
                "the argument `group='^([^_]+_[^_]+_[^_]+)_'`",
            ),
            (
                &["P_1/a.png", "P_1/b.png", "P_2/a.png", "P_2/b.png", "P3/a.png", "P3/b.png"],
                "the argument `patients=TABLE.csv`",
            ),
        ] {
            let text = folders_in(folder(files).path()).expect("folders");
            assert!(text.contains(&format!("give the patients with {flag}")), "{files:?}: {text}");
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
