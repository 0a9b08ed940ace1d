//! What the user should know about images and masks that can be used: choices that were made, and masks and images
//! that are probably not meant so.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use ::image::GrayImage;
use serde::Serialize;

use crate::decode::{ImageFile, StoredMask};
use prsmed_base::units::percent;

/// Most files that a text names.
const MAX_NAMED: usize = 3;

const TURNED: &str = "files with an EXIF orientation, which was applied";
const FULL: &str = "masks that cover at least 95 % of their image";
const FLAT: &str = "images of one grey level or colour";
const COLOURS: &str = "foreground must be white (255) and background black (0)";
const BORDER: &str = "masks with most of the border of the image as foreground";

/// Findings by kind, each with its files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Findings {
    files: BTreeMap<String, BTreeSet<PathBuf>>,
    #[serde(skip)]
    num_masks: usize,
    /// Masks without any background.
    #[serde(skip)]
    num_whole: usize,
}

impl Findings {
    /// Adds a file to the kind `what`, words for several files.
    pub fn add(&mut self, what: impl Into<String>, path: &Path) {
        self.files.entry(what.into()).or_default().insert(path.to_owned());
    }

    /// Adds an image if its EXIF orientation was applied, or if all of its pixels are equal.
    pub fn add_image(&mut self, path: &Path, file: &ImageFile) {
        if file.is_turned {
            self.add(TURNED, path);
        }
        let image = &file.pixels;
        let num_channels = usize::from(image.color().channel_count());
        let bytes = image.as_bytes();
        if bytes.chunks_exact(num_channels).all(|pixel| pixel == &bytes[..num_channels]) {
            self.add(FLAT, path);
        }
    }

    /// Adds a mask file by what was decided to read it.
    pub fn add_stored(&mut self, path: &Path, mask: &StoredMask) {
        if mask.is_turned {
            self.add(TURNED, path);
        }
        if let Some(note) = mask.note {
            self.add(note, path);
        }
    }

    /// Adds a mask of 0 and 255 if it covers almost everything, or most of the border.
    pub fn add_mask(&mut self, path: &Path, mask: &GrayImage) {
        self.num_masks += 1;
        self.num_whole += usize::from(num_set(mask) == mask.len());
        if is_full(mask) {
            self.add(FULL, path);
        }
        if has_border(mask) {
            self.add(BORDER, path);
        }
    }

    /// Adds all findings of `other`.
    pub fn merge(&mut self, other: Self) {
        self.num_masks += other.num_masks;
        self.num_whole += other.num_whole;
        for (what, files) in other.files {
            self.files.entry(what).or_default().extend(files);
        }
    }

    /// Whether there are several masks, and none of them has background.
    pub fn is_all_foreground(&self) -> bool {
        self.num_masks > 1 && self.num_whole == self.num_masks
    }

    /// The kinds that are told, with their files.
    fn shown(&self) -> impl Iterator<Item = (&String, &BTreeSet<PathBuf>)> {
        // the border of a single mask is often foreground; of most masks, it says that they are inverted
        let is_inverted = |files: &BTreeSet<PathBuf>| 2 * files.len() > self.num_masks;
        self.files.iter().filter(move |(what, files)| *what != BORDER || is_inverted(files))
    }

    /// Images of one grey level or colour.
    pub fn flat_images(&self) -> impl Iterator<Item = &PathBuf> {
        self.files.get(FLAT).into_iter().flatten()
    }

    /// A text for each kind, with the number of files and the first of them.
    pub fn texts(&self) -> Vec<String> {
        let text = |(what, files): (&String, &BTreeSet<PathBuf>)| {
            let remedy = match what.as_str() {
                FLAT => "; they show nothing",
                BORDER => &format!("; masks may be inverted: {COLOURS}"),
                FULL => &format!("; {COLOURS}"),
                _ => "",
            };
            format!("{what}: {}{remedy}", count_and_first(files.len(), files.iter()))
        };
        self.shown().map(text).collect()
    }
}

/// What to tell about one mask of 0 and 255 that is probably not meant so: it covers almost everything, or more than half of
/// the image and most of its border.
pub fn mask_warning(mask: &GrayImage) -> Option<String> {
    let share = num_set(mask) as f64 / mask.len().max(1) as f64;
    let is_odd = is_full(mask) || (share > 0.5 && has_border(mask));
    let border = if has_border(mask) { " and most of its border" } else { "" };
    is_odd.then(|| {
        let share = percent(share);
        format!("the mask covers {share} of the image{border}; it may be inverted: {COLOURS}")
    })
}

fn num_set(mask: &GrayImage) -> usize {
    mask.iter().filter(|value| **value > 0).count()
}

/// Whether a mask covers at least 95 % of its image.
fn is_full(mask: &GrayImage) -> bool {
    !mask.is_empty() && 20 * num_set(mask) >= 19 * mask.len()
}

/// Whether most of the border of the image is foreground.
fn has_border(mask: &GrayImage) -> bool {
    let (width, height) = mask.dimensions();
    let columns = (0..width).flat_map(|x| [(x, 0), (x, height - 1)]);
    let border = columns.chain((0..height).flat_map(|y| [(0, y), (width - 1, y)]));
    let are_set: Vec<bool> = border.map(|(x, y)| mask.get_pixel(x, y).0[0] > 0).collect();
    2 * are_set.iter().filter(|is_set| **is_set).count() > are_set.len()
}

/// `5 (a.png, b.png, c.png and 2 more)`.
fn count_and_first<'a>(count: usize, files: impl Iterator<Item = &'a PathBuf>) -> String {
    let first: Vec<String> = files.take(MAX_NAMED).map(|path| path.display().to_string()).collect();
    let more = if count > first.len() { format!(" and {} more", count - first.len()) } else { String::new() };
    format!("{count} ({}{more})", first.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::image::Luma;

    #[test]
    fn a_full_and_an_inverted_mask_are_named() {
        let mask = |is_set: &dyn Fn(u32, u32) -> bool| {
            GrayImage::from_fn(40, 30, |x, y| Luma([if is_set(x, y) { 255 } else { 0 }]))
        };
        let is_large = |x: u32, y: u32| (4..36).contains(&x) && (3..27).contains(&y);
        let full = mask_warning(&mask(&|_, _| true)).expect("a warning");
        assert!(full.starts_with("the mask covers 100.00 % of the image and most of its border; it may be inverted"));
        let inverted = mask_warning(&mask(&|x, y| !(10..25).contains(&x) || y > 20)).expect("a warning");
        assert!(inverted.contains("most of its border") && inverted.ends_with(COLOURS), "{inverted}");
        // 64 % of the image, but nothing of the border; a half with much of the border; nothing
        for usual in [mask(&is_large), mask(&|_, y| y < 15), mask(&|_, _| false), GrayImage::new(0, 0)] {
            assert_eq!(mask_warning(&usual), None);
        }
    }
}
