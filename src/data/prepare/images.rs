//! Pairs of image and mask files: decoding and copying.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use image::{DynamicImage, GrayImage};

use super::existing::same_bytes;
use super::found::{FoundItems, ItemMask, UsableItem, UsablePair, UsableSource};
use super::instances;
use super::item::{EMPTY, ITS_IMAGE, MaskItem, Skipped, UNREADABLE, png, reason_of};
use super::location::describe;
use super::options::PrepareOptions;
use super::table::Pair;
use super::work::Preparation;
use super::write;
use crate::bit_depth::DepthReport;
use crate::decode::{self, ImageFile, MaskRefusal, StoredMask};
use crate::findings::Findings;
use crate::labels::Labels;
use crate::manifest::Split;
use crate::marks::pixel_mark;
use crate::progress::in_parallel;
use crate::volume::{SequenceFile, sequences};
use prsmed_base::event::Event;
use prsmed_base::{Error, Result};

/// About outlines on an image that is stored in another orientation than it is shown.
const TURNED: &str = "masks of outlines on images with an EXIF orientation, which was applied (right for programs that show the \
                      image so)";

/// Reads all pairs of image files, in parallel.
///
/// # Errors
/// [`Error::Io`] for an image that the data root may already have.
pub(super) fn read(work: &Preparation, pairs: Vec<Pair>, found: &mut FoundItems) -> Result<()> {
    let mut new = Vec::new();
    for pair in pairs {
        match is_known(&pair, work)? {
            Ok(true) => found.known += 1,
            Ok(false) => new.push(pair),
            Err(skip) => found.skipped.push(skip),
        }
    }
    let read = in_parallel(new, ("read masks", "images"), work.observer, |pair| read_pair(&pair, work));
    found.num_read = read.len();
    for result in read {
        match result {
            Ok(usable) => found.add(usable),
            Err(skip) => {
                found.bad.extend((skip.reason != EMPTY).then(|| skip.clone()));
                found.skipped.push(skip);
            }
        }
    }
    Ok(())
}

/// Whether the data root has this image with all structures.
fn is_known(pair: &Pair, work: &Preparation) -> Result<Result<bool, Skipped>> {
    let mut all = true;
    for (structure, _) in work.shown_by(pair) {
        let stem = format!("{}{}", pair.name, structure.suffix);
        let is_same = |image: &Path| match pair.sequences.as_slice() {
            [] => same_bytes(image, &pair.image),
            files => Ok(decode::bytes_of(image)? == joined_png(files)?),
        };
        match work.existing.has(&stem, &pair.image, is_same)? {
            Ok(known) => all &= known,
            Err(skip) => return Ok(Err(skip)),
        }
    }
    Ok(Ok(all))
}

fn read_pair(pair: &Pair, work: &Preparation) -> Result<UsablePair, Skipped> {
    let skip = |path: &Path, reason: String| Skipped { path: path.to_owned(), reason };
    let unreadable = |path: &Path, error: &Error| skip(path, format!("{UNREADABLE}: {}", reason_of(error)));
    // the image is decoded completely, so that a truncated file is found now and not during a training
    let image = decoded(pair).map_err(|error| unreadable(&pair.image, &error))?;
    let mut findings = Findings::default();
    findings.add_image(&pair.image, &image);
    let expected = (image.pixels.width(), image.pixels.height());
    let mut masks = Vec::new();
    for (number, (_, path)) in pair.masks.iter().enumerate() {
        let (mask, notes) = stored(path, expected, work).map_err(|error| unreadable(path, &error))?;
        for note in notes.into_iter().flat_map(|notes| notes.into_iter().chain(image.is_turned.then_some(TURNED))) {
            findings.add(note, path);
        }
        let found = mask.dimensions();
        if found != expected {
            let turned = decode::turned_by_90(found, expected);
            let reason = format!("is {} x {}{ITS_IMAGE}{} x {}{turned}", found.0, found.1, expected.0, expected.1);
            return Err(skip(path, reason));
        }
        if let Some(reason) = pair.unknown_label(number, mask.labels().into_iter()) {
            return Err(skip(path, reason));
        }
        findings.add_stored(path, &mask);
        masks.push((path, mask));
    }
    let pixels = pixel_mark(&image.pixels);
    let (mut items, mut is_joined) = (Vec::new(), false);
    for (structure, files) in work.shown_by(pair) {
        let files: Vec<_> = files.iter().map(|(file, labels)| (&masks[*file], *labels)).collect();
        is_joined |= files.iter().any(|(mask, _)| mask.0 != files[0].0.0);
        let mask = joined(&files, work.options.join.is_some()).map_err(|(path, reason)| skip(path, reason))?;
        let location = describe(&mask, work.options.zones, work.options.several);
        let stem = format!("{}{}", pair.name, structure.suffix);
        if (location.is_none() && !work.options.negatives.are_wanted()) || work.existing.has_stem(&stem) {
            continue;
        }
        let path: &Path = files[0].0.0;
        if location.is_some() {
            findings.add_mask(path, &mask);
        }
        let (image, of_pair) = (pair.name.clone(), pair.item(&structure.name));
        let whole = MaskItem { image, stem, target: structure.name, location, pixels, ..of_pair };
        for (item, mask) in with_instances(whole, mask, work.options) {
            let mask = png(&DynamicImage::ImageLuma8(mask)).map_err(|reason| skip(path, reason))?;
            items.push((item, ItemMask::Png(mask)));
        }
    }
    if is_joined {
        findings.add(format!("images with {} mask files, which were joined", masks.len()), &pair.image);
    }
    if items.is_empty() {
        return Err(skip(&pair.masks[0].1, EMPTY.into()));
    }
    let (path, sequences) = (pair.image.clone(), pair.sequences.clone());
    let source = UsableSource { path, sequences, range: image.range, volume: None };
    Ok((source, items, findings))
}

/// An item with its mask, and those of its instances, if they are wanted.
fn with_instances(whole: MaskItem, mask: GrayImage, options: &PrepareOptions) -> Vec<(MaskItem, GrayImage)> {
    let parts = if options.instances { instances::of_image(&mask) } else { Vec::new() };
    let part = |(which, mask): (&'static str, GrayImage)| {
        let location = describe(&mask, options.zones, options.several);
        (whole.instance(which, location), mask)
    };
    let parts: Vec<_> = parts.into_iter().map(part).collect();
    std::iter::once((whole, mask)).chain(parts).collect()
}

/// The image of a pair, of one file or of several sequences.
fn decoded(pair: &Pair) -> Result<ImageFile> {
    if pair.sequences.is_empty() { decode::image_file(&pair.image) } else { sequences::image_file(&pair.sequences) }
}

/// A mask of an image of this width and height, from its file or drawn from outlines, with the notes about what was drawn.
fn stored(path: &Path, size: (u32, u32), work: &Preparation) -> Result<(StoredMask, Option<BTreeSet<&'static str>>)> {
    match work.annotations.mask(path, size)? {
        Some(drawn) => Ok((drawn.mask.into(), Some(drawn.notes))),
        None => Ok((decode::stored_mask(path)?, None)),
    }
}

/// The foreground of all mask files of a structure, each with its labels. With `takes_all`, files without labels may have
/// several, and different ones.
///
/// # Errors
/// A file and the reason.
fn joined<'a>(
    masks: &[(&(&'a PathBuf, StoredMask), Labels)],
    takes_all: bool,
) -> Result<GrayImage, (&'a Path, String)> {
    let mut all: Option<GrayImage> = None;
    let mut first_label = None;
    for ((path, mask), labels) in masks {
        let path: &Path = path;
        let selected = select(mask, *labels, takes_all).map_err(|reason| (path, reason))?;
        if labels.is_empty() && masks.len() > 1 && !takes_all {
            match (first_label, mask.only_label()) {
                (Some((first, other)), Some(label)) if first != label => {
                    let other: &Path = other;
                    let reason = format!(
                        "has the label {label}, but another mask of its image, `{}`, has {first}; choose with the argument `labels`",
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

/// The pixels with one of the labels as 0 and 255.
fn select(mask: &StoredMask, labels: Labels, takes_all: bool) -> Result<GrayImage, String> {
    let refused = |refusal: MaskRefusal| match refusal {
        MaskRefusal::SeveralLabels(reason) => format!("{reason}; choose with the argument `labels`"),
        _ => format!("{refusal}; {}", refusal.hint()),
    };
    if takes_all && labels.is_empty() {
        return mask.any_label().map_err(refused);
    }
    mask.check(labels).map_err(refused)?;
    Ok(if labels.is_empty() { mask.binary() } else { mask.select(labels) })
}

/// Copies the images and writes the masks.
///
/// # Errors
/// [`Error::Io`]; [`Error::Data`] for a file that exists with another content.
pub(super) fn write(found: &FoundItems, splits: &[Split], work: &Preparation) -> Result<()> {
    let all = found.items.iter().zip(splits).filter_map(|(usable, split)| {
        let UsableItem { item, source, mask: ItemMask::Png(mask) } = usable else { return None };
        Some((&item.stem, &found.sources[*source], mask, split))
    });
    let all: Vec<_> = all.collect();
    let root = work.options.out.join(&work.options.modality);
    work.observer.on(&Event::Started { phase: "copy images".into(), total: all.len() as u64, unit: "images" });
    for ((stem, source, mask, split), done) in all.into_iter().zip(1..) {
        let (bytes, extension) = if source.sequences.is_empty() {
            (decode::bytes_of(&source.path)?, source.path.extension().unwrap_or_default().to_string_lossy())
        } else {
            (joined_png(&source.sequences)?, "png".into())
        };
        let image = root.join(format!("{split}_images")).join(format!("{stem}.{extension}"));
        write::new_file(&image, &bytes, work.options.append)?;
        let path = root.join(format!("{split}_masks")).join(format!("{stem}.png"));
        write::new_file(&path, mask, work.options.append)?;
        work.observer.on(&Event::Advanced { done });
    }
    work.observer.on(&Event::Finished);
    Ok(())
}

/// The image of several sequences as a PNG file.
fn joined_png(files: &[SequenceFile]) -> Result<Vec<u8>> {
    png(&sequences::image_file(files)?.pixels).map_err(|reason| Error::Shape { reason })
}

/// Bit depths of those images that have items.
pub(super) fn depths(found: &FoundItems) -> DepthReport {
    let mut depth = DepthReport::default();
    let used: BTreeSet<usize> = found.items.iter().map(|usable| usable.source).collect();
    for source in used.into_iter().map(|number| &found.sources[number]).filter(|source| source.volume.is_none()) {
        depth.add(&source.path, source.range);
    }
    depth
}

#[cfg(test)]
#[path = "images_tests.rs"]
mod tests;
