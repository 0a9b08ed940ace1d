//! Images and masks of two folders: matching by name, decoding, copying.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use image::{DynamicImage, GrayImage};
use rayon::prelude::*;

use super::existing::Existing;
use super::item::{Item, Skipped, png};
use super::location::{binary, describe};
use super::options::{MASK_SUFFIXES, PrepareOptions};
use super::structures::Structure;
use super::work::Work;
use super::write;
use crate::data::annotation::EXTENSIONS;
use crate::data::bit_depth::DepthReport;
use crate::data::decode::{self, StoredMask};
use crate::data::labels;
use crate::data::manifest::Split;
use crate::event::{Event, Observer};
use crate::{Error, Result};

/// An image and its mask file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FilePair {
    pub(super) stem: String,
    pub(super) image: PathBuf,
    pub(super) mask: PathBuf,
}

/// An image with a usable mask of one structure.
pub(super) struct UsablePair {
    pub(super) item: Item,
    pub(super) image: PathBuf,
    mask_png: Vec<u8>,
    /// Smallest and largest value of a 16-bit image.
    range: Option<[u16; 2]>,
}

/// What the two folders contain.
#[derive(Default)]
pub(super) struct Found {
    pub(super) pairs: Vec<UsablePair>,
    pub(super) skipped: Vec<Skipped>,
    /// Number of images that the data root already contains.
    pub(super) known: usize,
}

/// Reads all pairs of the two folders, in parallel.
///
/// # Errors
/// [`Error::Data`] for an ambiguous stem, [`Error::Io`] for a folder that cannot be read.
pub(super) fn read(work: &Work) -> Result<Found> {
    let Work { options, structures, existing, observer, .. } = work;
    let (image_folder, mask_folder) = (&options.images[0], &options.masks[0]);
    let (files, skipped) = matched(image_folder, mask_folder)?;
    let mut found = Found { skipped, ..Found::default() };
    let mut new = Vec::new();
    for pair in files {
        match is_known(&pair, structures, existing)? {
            Ok(true) => found.known += 1,
            Ok(false) => new.push(pair),
            Err(skip) => found.skipped.push(skip),
        }
    }
    observer.on(&Event::Started { phase: "read masks".into(), total: new.len() as u64, unit: "images" });
    let done = AtomicU64::new(0);
    let read: Vec<_> = new
        .into_par_iter()
        .map(|pair| {
            let usable = read_pair(&pair, options, structures, existing);
            observer.on(&Event::Advanced { done: done.fetch_add(1, Ordering::Relaxed) + 1 });
            usable
        })
        .collect();
    observer.on(&Event::Finished);
    for result in read {
        match result {
            Ok(usable) => found.pairs.extend(usable),
            Err(skip) => found.skipped.push(skip),
        }
    }
    found.skipped.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Whether the data root has this image with all structures.
fn is_known(pair: &FilePair, structures: &[Structure], existing: &Existing) -> Result<Result<bool, Skipped>> {
    let mut all = true;
    for structure in structures {
        match existing.has(&format!("{}{}", pair.stem, structure.suffix), &pair.image)? {
            Ok(known) => all &= known,
            Err(skip) => return Ok(Err(skip)),
        }
    }
    Ok(Ok(all))
}

/// The stem without its mask suffix; `None` if it has none.
pub(super) fn without_suffix(stem: &str) -> Option<&str> {
    MASK_SUFFIXES.iter().find_map(|suffix| {
        let (head, tail) = stem.split_at_checked(stem.len().checked_sub(suffix.len())?)?;
        (!head.is_empty() && tail.eq_ignore_ascii_case(suffix)).then_some(head)
    })
}

/// Whether a file is an image that can be read, by its extension.
pub(super) fn is_image(path: &Path) -> bool {
    let extension = path.extension().and_then(OsStr::to_str).map(str::to_ascii_lowercase);
    extension.is_some_and(|extension| EXTENSIONS.contains(&extension.as_str()))
}

/// Image files of a folder with their stems, sorted by name.
fn list_images(folder: &Path, skipped: &mut Vec<Skipped>) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder, "read"))? {
        let path = entry.map_err(Error::io(folder, "read"))?.path();
        if path.is_dir() {
            continue;
        }
        match path.file_stem().and_then(OsStr::to_str) {
            Some(stem) if is_image(&path) => found.push((stem.to_owned(), path)),
            _ => skipped.push(Skipped { path, reason: "not a PNG, JPEG or TIFF file".into() }),
        }
    }
    found.sort();
    Ok(found)
}

/// One file per stem; two files are an error that names both.
pub(super) fn unique_by_stem(
    files: impl IntoIterator<Item = (String, PathBuf)>,
    what: &str,
) -> Result<BTreeMap<String, PathBuf>> {
    let mut unique_by_stem = BTreeMap::new();
    for (stem, path) in files {
        if let Some(other) = unique_by_stem.insert(stem.clone(), path.clone()) {
            return Err(Error::data(
                path,
                format!("`{}` is a second {what} for the stem `{stem}`", other.display()),
                format!("keep one {what} for each image; merge several masks into one"),
            ));
        }
    }
    Ok(unique_by_stem)
}

fn matched(image_folder: &Path, mask_folder: &Path) -> Result<(Vec<FilePair>, Vec<Skipped>)> {
    let mut skipped = Vec::new();
    let mut images = list_images(image_folder, &mut skipped)?;
    let mut masks;
    if image_folder.canonicalize().ok() == mask_folder.canonicalize().ok() {
        (masks, images) = images.into_iter().partition(|(stem, _)| without_suffix(stem).is_some());
    } else {
        masks = list_images(mask_folder, &mut skipped)?;
    }
    let images = unique_by_stem(images, "image")?;
    for (stem, _) in &mut masks {
        // An image's own name may end in a mask suffix; then the full stem matches.
        if let Some(head) = without_suffix(stem).filter(|_| !images.contains_key(stem.as_str())) {
            *stem = head.to_owned();
        }
    }
    Ok(by_stem(images, unique_by_stem(masks, "mask")?, skipped))
}

/// Images and masks with the same stem; the others are skipped.
pub(super) fn by_stem(
    images: BTreeMap<String, PathBuf>,
    mut masks: BTreeMap<String, PathBuf>,
    mut skipped: Vec<Skipped>,
) -> (Vec<FilePair>, Vec<Skipped>) {
    let mut pairs = Vec::new();
    for (stem, image) in images {
        match masks.remove(&stem) {
            Some(mask) => pairs.push(FilePair { stem, image, mask }),
            None => skipped.push(Skipped { path: image, reason: "no mask with this stem".into() }),
        }
    }
    skipped.extend(masks.into_values().map(|path| Skipped { path, reason: "no image with this stem".into() }));
    (pairs, skipped)
}

fn read_pair(
    pair: &FilePair,
    options: &PrepareOptions,
    structures: &[Structure],
    existing: &Existing,
) -> Result<Vec<UsablePair>, Skipped> {
    let skip = |path: &Path, reason: String| Skipped { path: path.to_owned(), reason };
    let unreadable = |path: &Path, error: &Error| {
        let reason = match error {
            Error::Data { reason, .. } => reason.clone(),
            other => other.to_string(),
        };
        skip(path, format!("cannot be read: {reason}"))
    };
    // the image is decoded completely, so that a truncated file is found now and not during a training
    let (decoded, range) = decode::image_with_range(&pair.image).map_err(|error| unreadable(&pair.image, &error))?;
    let mask = decode::stored_mask(&pair.mask).map_err(|error| unreadable(&pair.mask, &error))?;
    let (found, expected) = (mask.dimensions(), (decoded.width(), decoded.height()));
    if found != expected {
        let reason = format!("is {} x {} pixels, its image {} x {}", found.0, found.1, expected.0, expected.1);
        return Err(skip(&pair.mask, reason));
    }
    let mut usable = Vec::new();
    for structure in structures {
        let selected = select(&mask, structure).map_err(|reason| skip(&pair.mask, reason))?;
        let location = describe(&selected, options.zones, options.several);
        let stem = format!("{}{}", pair.stem, structure.suffix);
        if (location.is_none() && !options.negatives.are_wanted()) || existing.has_stem(&stem) {
            continue;
        }
        let mask_png = png(&DynamicImage::ImageLuma8(selected)).map_err(|reason| skip(&pair.mask, reason))?;
        let item = Item { image: pair.stem.clone(), stem, target: structure.name.clone(), location, ..Item::default() };
        usable.push(UsablePair { item, image: pair.image.clone(), mask_png, range });
    }
    if usable.is_empty() { Err(skip(&pair.mask, "the mask is empty".into())) } else { Ok(usable) }
}

/// The mask of a structure as 0 and 255.
fn select(mask: &StoredMask, structure: &Structure) -> Result<GrayImage, String> {
    if !structure.labels.is_empty() {
        return Ok(mask.select(structure.labels));
    }
    let several = mask.labels();
    if several.len() > 1 {
        let found = labels::describe(&several);
        return Err(format!("the mask has several labels: {found}; choose with `--labels`"));
    }
    Ok(binary(mask))
}

/// Copies the images and writes the masks.
///
/// # Errors
/// [`Error::Io`]; [`Error::Data`] for a file that exists with another content.
pub(super) fn copy(
    pairs: &[UsablePair],
    splits: &[Split],
    options: &PrepareOptions,
    observer: &dyn Observer,
) -> Result<()> {
    let root = options.out.join(&options.modality);
    observer.on(&Event::Started { phase: "copy images".into(), total: pairs.len() as u64, unit: "images" });
    for (number, (pair, split)) in pairs.iter().zip(splits).enumerate() {
        let extension = pair.image.extension().unwrap_or_default().to_string_lossy();
        let image = root.join(format!("{split}_images")).join(format!("{}.{extension}", pair.item.stem));
        let bytes = decode::bytes_of(&pair.image)?;
        write::new_file(&image, &bytes, options.append)?;
        let mask = root.join(format!("{split}_masks")).join(format!("{}.png", pair.item.stem));
        write::new_file(&mask, &pair.mask_png, options.append)?;
        observer.on(&Event::Advanced { done: number as u64 + 1 });
    }
    observer.on(&Event::Finished);
    Ok(())
}

/// Bit depths of the images.
pub(super) fn depths(pairs: &[UsablePair]) -> DepthReport {
    let mut depth = DepthReport::default();
    let mut last = None;
    for pair in pairs {
        if last.replace(&pair.image) != Some(&pair.image) {
            depth.add(&pair.image, pair.range);
        }
    }
    depth
}
