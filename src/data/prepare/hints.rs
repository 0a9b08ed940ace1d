//! What to do about files that cannot be used.

use std::path::{Path, PathBuf};

use super::item::{EMPTY, ITS_IMAGE, NO_IMAGE, NO_MASK, NOT_AN_IMAGE, Skipped, by_kind};
use crate::annotation::is_image;
use crate::decode;

/// Most files or folders that a message names.
pub(super) const MAX_NAMED: usize = 3;

/// What to do about the most frequent kind of reason; `None` if it is that names differ, or says it itself.
pub(super) fn remedy(skipped: &[Skipped]) -> Option<&'static str> {
    let reason = &by_kind(skipped).first()?.first()?.reason;
    let is_other = |file: &Skipped| file.reason == NOT_AN_IMAGE && decode::is_other_image(&file.path);
    match reason.split(';').next()? {
        NO_MASK | NO_IMAGE | NOT_AN_IMAGE => {
            skipped.iter().any(is_other).then_some("convert the images and masks to PNG")
        }
        EMPTY => Some(
            "if they should show a target, their export failed; `--negatives` keeps images whose mask is rightly empty, as \
             questions about an absent target",
        ),
        size if size.contains(ITS_IMAGE) => {
            Some("save each mask at the size of its image; resize masks with the nearest pixel, not smoothly")
        }
        _ => Some("correct the files that are named"),
    }
}

/// Says so if a folder has no images, but folders with images, as the parent of the images and the masks has.
pub(super) fn folders_in(folder: &Path) -> Option<String> {
    let paths = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
    };
    let found = paths(folder);
    let has_images = |path: &PathBuf| paths(path).iter().any(|path| is_image(path));
    let mut folders: Vec<PathBuf> = found.iter().filter(|path| has_images(path)).cloned().collect();
    if folders.is_empty() {
        folders = found.iter().flat_map(|path| paths(path)).filter(has_images).collect();
    }
    if folders.is_empty() || found.iter().any(|path| is_image(path)) {
        return None;
    }
    folders.sort();
    let named: Vec<String> = folders.iter().take(2 * MAX_NAMED).map(|path| format!("`{}`", path.display())).collect();
    Some(format!(
        "its images are in folders of it: {}; give the folder of images and the folder of masks",
        named.join(", ")
    ))
}
