//! Images and masks of two folders: matching by name, decoding, copying.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use image::{DynamicImage, GrayImage};
use rayon::prelude::*;

use super::existing::Existing;
use super::item::{EMPTY, IS_A, ITS_IMAGE, Item, NO_IMAGE, NO_MASK, NOT_AN_IMAGE, NOT_UTF8, Skipped, png, reason_of};
use super::location::describe;
use super::options::{MASK_SUFFIXES, PrepareOptions};
use super::structures::Structure;
use super::work::Work;
use super::write;
use crate::annotation::is_image;
use crate::annotation_file;
use crate::bit_depth::DepthReport;
use crate::decode::{self, Refusal, StoredMask};
use crate::findings::Findings;
use crate::manifest::Split;
use crate::marks::pixel_mark;
use crate::names;
use prsmed_base::event::{Event, Observer};
use prsmed_base::{Error, Result, files};

/// An image and its mask file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FilePair {
    pub(super) stem: String,
    pub(super) image: PathBuf,
    pub(super) mask: PathBuf,
    /// Further mask files of the image, with a number at the end of their names.
    pub(super) more: Vec<PathBuf>,
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
    /// Number of pairs that the data root does not contain.
    pub(super) num_read: usize,
    /// Those that cannot be used, other than for an empty mask.
    pub(super) bad: Vec<Skipped>,
    /// Images without a mask.
    pub(super) alone: Vec<Skipped>,
    pub(super) findings: Findings,
}

/// Reads all pairs of the two folders, in parallel.
///
/// # Errors
/// [`Error::Data`] for an ambiguous stem, [`Error::Io`] for a folder that cannot be read.
pub(super) fn read(work: &Work) -> Result<Found> {
    let Work { options, structures, existing, observer, .. } = work;
    let (image_folder, mask_folder) = (&options.images[0], &options.masks[0]);
    let Matched { pairs, skipped, images, is_one_folder } = matched(image_folder, mask_folder)?;
    let mut found = Found { skipped, ..Found::default() };
    let (mut new, mut used) = (Vec::new(), BTreeSet::new());
    for pair in pairs {
        match is_known(&pair, structures, existing)? {
            Ok(true) => {
                found.known += 1;
                used.insert(pair.image);
            }
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
    found.num_read = read.len();
    for result in read {
        match result {
            Ok((usable, findings)) => {
                found.pairs.extend(usable);
                found.findings.merge(findings);
            }
            Err(skip) => {
                found.bad.extend((skip.reason != EMPTY).then(|| skip.clone()));
                found.skipped.push(skip);
            }
        }
    }
    used.extend(found.pairs.iter().map(|pair| pair.image.clone()));
    found.skipped.iter_mut().for_each(|skip| name_second_mask(skip, &images, &used, is_one_folder));
    found.skipped.sort_by(|a, b| a.path.cmp(&b.path));
    found.alone = found.skipped.iter().filter(|skip| skip.reason == NO_MASK).cloned().collect();
    Ok(found)
}

/// Says so if a file that is left over may be a mask of an image, because its name begins with the stem of one. In the
/// folder of the images, a word for a mask must follow.
fn name_second_mask(
    skip: &mut Skipped,
    images: &BTreeMap<String, PathBuf>,
    used: &BTreeSet<PathBuf>,
    is_one_folder: bool,
) {
    let is_image = is_one_folder && skip.reason == NO_MASK;
    if !is_image && skip.reason != NO_IMAGE {
        return;
    }
    let name = skip.path.file_stem().and_then(OsStr::to_str).unwrap_or_default();
    let begins = |text: &str, start: &str| text.get(..start.len()).is_some_and(|head| head.eq_ignore_ascii_case(start));
    let follows = |stem: &str| {
        let rest = &name[stem.len()..];
        rest.starts_with(|c: char| !c.is_alphanumeric())
            && (!is_image || MASK_SUFFIXES.iter().any(|suffix| begins(rest, suffix)))
    };
    let of_name = images.iter().filter(|(stem, _)| begins(name, stem) && follows(stem));
    if let Some((_, image)) = of_name.max_by_key(|(stem, _)| stem.len()) {
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        skip.reason = if used.contains(image) {
            format!("may be a second mask of `{name}`, which is used without it")
        } else {
            format!("{}; it may be a mask of `{name}`", skip.reason)
        };
    }
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
        let word = &suffix[1..];
        let (head, tail) = stem.split_at_checked(stem.len().checked_sub(word.len())?)?;
        let head = match head.strip_suffix('_') {
            Some(head) => head.trim_end(),
            // a blank or a hyphen before the word
            None => head.strip_suffix([' ', '-', '\u{a0}'])?.trim_end_matches([' ', '-', '\u{a0}']),
        };
        (!head.is_empty() && tail.eq_ignore_ascii_case(word)).then_some(head)
    })
}

/// The stem without mask suffix and number, as of `0001_mask_2`, `0001_mask2` and `0001_mask (2)`; `None` without both.
fn without_number(stem: &str) -> Option<&str> {
    let stem = stem.strip_suffix(')').map_or(stem, |stem| stem);
    let head = stem.trim_end_matches(|c: char| c.is_ascii_digit());
    let has_number = (1..=3).contains(&(stem.len() - head.len()));
    let head = head.strip_suffix(['_', '-', '(']).unwrap_or(head);
    without_suffix(head.trim_end()).filter(|_| has_number)
}

/// Image files of a folder with their stems, sorted by name. Hidden files are notes of other programs.
fn list_images(folder: &Path, skipped: &mut Vec<Skipped>) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder, "read"))? {
        let path = entry.map_err(Error::io(folder, "read"))?.path();
        if path.is_dir() || files::is_hidden(&path) {
            continue;
        }
        match path.file_stem().and_then(OsStr::to_str) {
            Some(stem) if is_image(&path) => found.push((stem.to_owned(), path)),
            None if is_image(&path) => skipped.push(Skipped { path, reason: NOT_UTF8.into() }),
            _ => {
                let reason =
                    annotation_file::kind_of(&path).map_or(NOT_AN_IMAGE.into(), |kind| format!("{IS_A} {kind}"));
                skipped.push(Skipped { path, reason });
            }
        }
    }
    found.sort();
    Ok(found)
}

/// One file per stem; two files are an error that names both, with this remedy.
pub(super) fn unique_by_stem(
    files: impl IntoIterator<Item = (String, PathBuf)>,
    what: &str,
    remedy: &str,
) -> Result<BTreeMap<String, PathBuf>> {
    let mut unique_by_stem = BTreeMap::new();
    for (stem, path) in files {
        if let Some(other) = unique_by_stem.insert(stem.clone(), path.clone()) {
            return Err(Error::data(
                path,
                format!("`{}` is a second {what} for the stem `{stem}`", other.display()),
                remedy,
            ));
        }
    }
    Ok(unique_by_stem)
}

/// The files of the two folders by their names.
struct Matched {
    pairs: Vec<FilePair>,
    skipped: Vec<Skipped>,
    /// All images by their stems.
    images: BTreeMap<String, PathBuf>,
    /// The images and the masks are in one folder.
    is_one_folder: bool,
}

fn matched(image_folder: &Path, mask_folder: &Path) -> Result<Matched> {
    let mut skipped = Vec::new();
    let mut images = list_images(image_folder, &mut skipped)?;
    let mut masks;
    let is_one_folder = image_folder.canonicalize().ok() == mask_folder.canonicalize().ok();
    if is_one_folder {
        let stems: BTreeSet<&str> = images.iter().map(|(stem, _)| stem.as_str()).collect();
        let with_mask: BTreeSet<String> =
            stems.iter().filter_map(|stem| without_suffix(stem)).map(str::to_owned).collect();
        // an image's own name may look like that of a mask; then it has a mask, and there is no image that it belongs to
        let is_mask = |stem: &str| {
            let head = without_suffix(stem).or_else(|| without_number(stem));
            head.is_some_and(|head| stems.contains(head) || !with_mask.contains(stem))
        };
        let (of_masks, of_images) = images.iter().cloned().partition(|(stem, _)| is_mask(stem));
        (masks, images) = (of_masks, of_images);
    } else {
        masks = list_images(mask_folder, &mut skipped)?;
    }
    let images = unique_by_stem(images, "image", "keep one image of this name")?;
    let of_images: BTreeSet<String> = images.keys().map(|stem| names::key(stem)).collect();
    let mut numbered: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    masks.retain_mut(|(stem, path)| {
        // An image's own name may end in a mask suffix; then the full stem matches.
        if of_images.contains(&names::key(stem)) {
            return true;
        }
        if let Some(head) = without_suffix(stem) {
            *stem = head.to_owned();
        } else if let Some(head) = without_number(stem) {
            numbered.entry(names::key(head)).or_default().push(path.clone());
            return false;
        }
        true
    });
    let mut masks = unique_by_stem(masks, "mask", "keep one mask for each image; merge several masks into one")?;
    let of_masks: BTreeSet<String> = masks.keys().map(|stem| names::key(stem)).collect();
    for (stem, files) in numbered.iter_mut().filter(|(stem, _)| !of_masks.contains(*stem)) {
        masks.insert(stem.clone(), files.remove(0));
    }
    let (mut pairs, mut skipped) = by_stem(images.clone(), masks, skipped)?;
    for pair in &mut pairs {
        pair.more = numbered.remove(&names::key(&pair.stem)).unwrap_or_default();
    }
    let left = numbered.into_values().flatten();
    skipped.extend(left.map(|path| Skipped { path, reason: NO_IMAGE.into() }));
    Ok(Matched { pairs, skipped, images, is_one_folder })
}

/// Images and masks whose stems match; the others are skipped.
///
/// # Errors
/// As [`names::matched`].
pub(super) fn by_stem(
    images: BTreeMap<String, PathBuf>,
    masks: BTreeMap<String, PathBuf>,
    mut skipped: Vec<Skipped>,
) -> Result<(Vec<FilePair>, Vec<Skipped>)> {
    let names::Matches { pairs, first, second } = names::matched(images, masks)?;
    let pair = |(stem, image, mask)| FilePair { stem, image, mask, more: Vec::new() };
    skipped.extend(first.into_iter().map(|path| Skipped { path, reason: NO_MASK.into() }));
    skipped.extend(second.into_iter().map(|path| Skipped { path, reason: NO_IMAGE.into() }));
    Ok((pairs.into_iter().map(pair).collect(), skipped))
}

fn read_pair(
    pair: &FilePair,
    options: &PrepareOptions,
    structures: &[Structure],
    existing: &Existing,
) -> Result<(Vec<UsablePair>, Findings), Skipped> {
    let skip = |path: &Path, reason: String| Skipped { path: path.to_owned(), reason };
    let unreadable = |path: &Path, error: &Error| skip(path, format!("cannot be read: {}", reason_of(error)));
    // the image is decoded completely, so that a truncated file is found now and not during a training
    let image = decode::image_file(&pair.image).map_err(|error| unreadable(&pair.image, &error))?;
    let mut findings = Findings::default();
    findings.add_image(&pair.image, &image);
    let expected = (image.pixels.width(), image.pixels.height());
    let mut masks = Vec::new();
    for path in std::iter::once(&pair.mask).chain(&pair.more) {
        let mask = decode::stored_mask(path).map_err(|error| unreadable(path, &error))?;
        let found = mask.dimensions();
        if found != expected {
            let turned = decode::turned_by_90(found, expected);
            let reason = format!("is {} x {}{ITS_IMAGE}{} x {}{turned}", found.0, found.1, expected.0, expected.1);
            return Err(skip(path, reason));
        }
        findings.add_stored(path, &mask);
        masks.push((path, mask));
    }
    if masks.len() > 1 {
        findings.add(format!("images with {} mask files, which were joined", masks.len()), &pair.image);
    }
    let pixels = pixel_mark(&image.pixels);
    let mut usable = Vec::new();
    for structure in structures {
        let selected = joined(&masks, structure).map_err(|(path, reason)| skip(path, reason))?;
        let location = describe(&selected, options.zones, options.several);
        let stem = format!("{}{}", pair.stem, structure.suffix);
        if (location.is_none() && !options.negatives.are_wanted()) || existing.has_stem(&stem) {
            continue;
        }
        if location.is_some() {
            findings.add_mask(&pair.mask, &selected);
        }
        let mask_png = png(&DynamicImage::ImageLuma8(selected)).map_err(|reason| skip(&pair.mask, reason))?;
        let target = structure.name.clone();
        let item = Item { image: pair.stem.clone(), stem, target, location, pixels, ..Item::default() };
        usable.push(UsablePair { item, image: pair.image.clone(), mask_png, range: image.range });
    }
    if usable.is_empty() { Err(skip(&pair.mask, EMPTY.into())) } else { Ok((usable, findings)) }
}

/// The foreground of all mask files of an image.
///
/// # Errors
/// A file and the reason.
fn joined<'a>(masks: &[(&'a PathBuf, StoredMask)], structure: &Structure) -> Result<GrayImage, (&'a Path, String)> {
    let mut all: Option<GrayImage> = None;
    let mut first_label = None;
    for (path, mask) in masks {
        let path: &Path = path;
        let selected = select(mask, structure).map_err(|reason| (path, reason))?;
        if structure.labels.is_empty() && masks.len() > 1 {
            match (first_label, mask.only_label()) {
                (Some((first, other)), Some(label)) if first != label => {
                    let other: &Path = other;
                    let reason = format!(
                        "has the label {label}, but another mask of its image, `{}`, has {first}; choose with `--labels`",
                        other.display()
                    );
                    return Err((path, reason));
                }
                (None, Some(label)) => first_label = Some((label, path)),
                _ => {}
            }
        }
        match &mut all {
            Some(all) => all.iter_mut().zip(selected.iter()).for_each(|(value, other)| *value |= other),
            None => all = Some(selected),
        }
    }
    Ok(all.unwrap_or_default())
}

/// The mask of a structure as 0 and 255.
fn select(mask: &StoredMask, structure: &Structure) -> Result<GrayImage, String> {
    mask.check(structure.labels).map_err(|refusal| match refusal {
        Refusal::SeveralLabels(reason) => format!("{reason}; choose with `--labels`"),
        Refusal::Colours(_) | Refusal::Photograph(_) => format!("{refusal}; {}", refusal.hint()),
    })?;
    Ok(if structure.labels.is_empty() { mask.binary() } else { mask.select(structure.labels) })
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

#[cfg(test)]
#[path = "pairs_tests.rs"]
mod tests;
