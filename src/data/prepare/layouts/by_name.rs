//! Images and masks that are matched by their names: `--images` and `--masks` are two folders (or one) of images, or
//! volumes and their label maps, as files or in folders.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::super::hints;
use super::super::item::{IS_A, NO_IMAGE, NO_MASK, NOT_AN_IMAGE, NOT_UTF8, Skipped};
use super::super::options::{MASK_SUFFIXES, PrepareOptions, SliceOptions};
use super::super::table::{Pair, PairKind, PairTable, SAME_NAMES};
use super::names::{Named, unique, without_number, without_suffix};
use super::volumes;
use crate::annotation::is_image;
use crate::annotation_file;
use crate::names;
use prsmed_base::files::visible_entries;
use prsmed_base::{Error, Result};

/// The pairs of `--images` and `--masks`.
///
/// # Errors
/// [`Error::Data`] for an ambiguous name, for example.
pub(super) fn by_name(options: &PrepareOptions) -> Result<PairTable> {
    hints::refuse_folders_of_images(&options.images)?;
    let mut skipped = Vec::new();
    let (kind, images, masks) = files(options, &mut skipped)?;
    let table = |rows: Vec<Pair>, skipped| {
        let rows: Vec<Pair> = rows.into_iter().map(volumes::called).collect();
        Ok(PairTable { notes: volumes::notes(&rows, options), rows, skipped, kind })
    };
    if kind == PairKind::Volumes
        && let ([(stem, image)], [(_, mask)], []) = (images.as_slice(), masks.as_slice(), skipped.as_slice())
        && image != mask
    {
        // one of each needs no matching names
        return table(vec![Pair::new(stem, image, mask)], Vec::new());
    }
    let is_one_folder = images.len() == masks.len() && images.iter().zip(&masks).all(|(image, mask)| image.1 == mask.1);
    let (mut images, mut masks) = if is_one_folder { divided(images, kind) } else { (images, masks) };
    let mut numbered = without_suffixes(&images, &mut masks, kind);
    if kind == PairKind::Volumes {
        volumes::name(&mut images, &mut masks);
    }
    let (images, mut masks) = unique_names(images, masks, kind)?;
    let of_masks: BTreeSet<String> = masks.keys().map(|stem| names::key(stem)).collect();
    for (stem, files) in numbered.iter_mut().filter(|(stem, _)| !of_masks.contains(*stem)) {
        masks.insert(stem.clone(), files.remove(0));
    }
    let names::Matches { pairs, first, second } = names::matched(images.clone(), masks)?;
    let mut rows: Vec<Pair> = pairs.into_iter().map(|(stem, image, mask)| Pair::new(stem, image, mask)).collect();
    for pair in &mut rows {
        let more = numbered.remove(&names::key(&pair.name)).unwrap_or_default();
        pair.masks.extend(more.into_iter().map(|path| (None, path)));
    }
    let second = second.into_iter().chain(numbered.into_values().flatten());
    skipped.extend(first.into_iter().map(|path| Skipped { path, reason: NO_MASK.into() }));
    skipped.extend(second.map(|path| Skipped { path, reason: NO_IMAGE.into() }));
    if kind == PairKind::Images {
        for skip in &mut skipped {
            name_second_mask(skip, &images, &rows, is_one_folder);
        }
    }
    table(rows, skipped)
}

/// Says so if a file that is left over may be a mask of an image, because its name begins with the stem of one. In the
/// folder of the images, a word for a mask must follow.
fn name_second_mask(skip: &mut Skipped, images: &ByName, rows: &[Pair], is_one_folder: bool) {
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
        skip.reason = if rows.iter().any(|pair| pair.image == *image) {
            format!("may be a second mask of `{name}`, which is used without it")
        } else {
            format!("{}; it may be a mask of `{name}`", skip.reason)
        };
    }
}

type Files = (PairKind, Vec<Named>, Vec<Named>);

/// The images and the masks of the options, which are the same files if both are in one folder.
fn files(options: &PrepareOptions, skipped: &mut Vec<Skipped>) -> Result<Files> {
    if volumes::are_volumes(&options.images)? {
        let images = volumes::listed("images", &options.images, skipped)?;
        let masks = volumes::listed("masks", &options.masks, skipped)?;
        return Ok((PairKind::Volumes, images, masks));
    }
    check_folders(options)?;
    let (images, masks) = (&options.images[0], &options.masks[0]);
    let found = list_images(images, skipped)?;
    let is_one_folder = images.canonicalize().ok() == masks.canonicalize().ok();
    let masks = if is_one_folder { found.clone() } else { list_images(masks, skipped)? };
    Ok((PairKind::Images, found, masks))
}

/// Refuses what is not a folder of images and one of masks, and options of volumes.
fn check_folders(options: &PrepareOptions) -> Result<()> {
    hints::refuse_file_of_masks(&options.masks[0])?;
    for (key, paths) in [("images", &options.images), ("masks", &options.masks)] {
        if paths.len() != 1 {
            let reason = format!("{} paths were given", paths.len());
            return Err(Error::argument(key, reason, "give one folder of images and one folder of masks"));
        }
    }
    refuse_slice_options(options)
}

/// Refuses options of volumes.
pub(super) fn refuse_slice_options(options: &PrepareOptions) -> Result<()> {
    if options.slices != SliceOptions::default() || options.series.is_some() {
        let reason = format!("`{}` is a folder of images, not of volumes", options.images[0].display());
        let names = "axis, every, window, resample, geometry, series";
        return Err(Error::argument(names, reason, "leave these arguments out"));
    }
    Ok(())
}

/// Image files of a folder with their stems, sorted by name. Hidden files are notes of other programs.
fn list_images(folder: &Path, skipped: &mut Vec<Skipped>) -> Result<Vec<Named>> {
    let mut found = Vec::new();
    for path in visible_entries(folder)?.into_iter().filter(|path| !path.is_dir()) {
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

/// The images and the masks among files that are in one folder.
fn divided(all: Vec<Named>, kind: PairKind) -> (Vec<Named>, Vec<Named>) {
    let stems: BTreeSet<String> = all.iter().map(|(stem, _)| stem.clone()).collect();
    let with_mask: BTreeSet<&str> = stems.iter().filter_map(|stem| without_suffix(stem)).collect();
    // an image's own name may look like that of a mask; then it has a mask, and there is no image that it belongs to
    let is_mask = |stem: &str| match kind {
        PairKind::Images => {
            let head = without_suffix(stem).or_else(|| without_number(stem));
            head.is_some_and(|head| stems.contains(head) || !with_mask.contains(stem))
        }
        PairKind::Volumes => without_suffix(stem).is_some(),
    };
    all.into_iter().partition(|(stem, _)| !is_mask(stem))
}

/// Gives masks the stems of their images. Masks of images with a number behind the suffix are taken out and returned by
/// the keys of these stems.
fn without_suffixes(images: &[Named], masks: &mut Vec<Named>, kind: PairKind) -> BTreeMap<String, Vec<PathBuf>> {
    let of_images: BTreeSet<String> = images.iter().map(|(stem, _)| names::key(stem)).collect();
    let mut numbered: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    masks.retain_mut(|(stem, path)| {
        // an image's own name may end in a mask suffix; then the full stem matches
        if of_images.contains(&names::key(stem)) {
            return true;
        }
        if let Some(head) = without_suffix(stem) {
            *stem = head.to_owned();
        } else if let Some(head) = without_number(stem).filter(|_| kind == PairKind::Images) {
            numbered.entry(names::key(head)).or_default().push(path.clone());
            return false;
        }
        true
    });
    numbered
}

type ByName = BTreeMap<String, PathBuf>;

/// Images and masks by their names.
///
/// # Errors
/// [`Error::Data`] for two files of one name.
fn unique_names(images: Vec<Named>, masks: Vec<Named>, kind: PairKind) -> Result<(ByName, ByName)> {
    if kind == PairKind::Images {
        let images = unique(images, "image", "keep one image of this name")?;
        return Ok((images, unique(masks, "mask", "keep one mask for each image; merge several masks into one")?));
    }
    let remedy = format!("name one file of each patient; {SAME_NAMES}");
    let masks = unique(masks, "label map", &remedy)?;
    Ok((unique(images, "volume", &remedy)?, masks))
}
