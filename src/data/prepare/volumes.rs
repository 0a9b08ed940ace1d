//! Volumes and label maps: which slices become images, and how they are written.
//!
//! A volume is opened twice: first for the locations of its structures, which decide the slices, then to write them.
//! In between the splits are drawn, which needs all volumes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::iter::once;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use image::{DynamicImage, GrayImage};
use rayon::prelude::*;

use super::item::{Item, NOT_UTF8, Skipped, png, reason_of};
use super::location::describe;
use super::options::{PrepareOptions, SliceOptions};
use super::pairs::{FilePair, by_stem, unique_by_stem, without_suffix};
use super::structures::Structure;
use super::work::Work;
use super::write;
use crate::annotation::is_image;
use crate::findings::Findings;
use crate::manifest::Split;
use crate::marks::{Mark, pixel_mark};
use crate::names;
use crate::volume::format::{DICOM, has_voxels_only, is_other_image, of_volume, stem_of};
use crate::volume::path::{selection_name, split_selection};
use crate::volume::{self, LabelMap, Levels, Plane, Volume, Window, labels};
use prsmed_base::event::Event;
use prsmed_base::{Error, Result, files};

/// How a label map is found.
pub(super) const SAME_NAMES: &str =
    "a label map must have the name of its volume, or both must have folders of one name";

/// A slice of a volume with one structure.
pub(super) struct SliceItem {
    pub(super) item: Item,
    /// Index of the volume in [`Found::volumes`].
    pub(super) volume: usize,
    slice: usize,
    structure: usize,
}

/// A volume with a usable label map.
pub(super) struct UsableVolume {
    pub(super) pair: FilePair,
    /// `None` for a colour image, as the levels.
    window: Option<Window>,
    levels: Option<Levels>,
}

/// What the volumes contain.
#[derive(Default)]
pub(super) struct Found {
    pub(super) volumes: Vec<UsableVolume>,
    pub(super) slices: Vec<SliceItem>,
    pub(super) skipped: Vec<Skipped>,
    /// Number of slices that the data root already contains.
    pub(super) known: usize,
    /// What was assumed about the volumes, with their names.
    pub(super) notes: Vec<String>,
    /// The window that all volumes have.
    pub(super) window: Window,
    /// Masks that are probably not meant so, by the names of their slices.
    pub(super) findings: Findings,
}

/// Whether the paths are volumes: several paths, files, or a folder without images such as PNG, JPEG and TIFF files, and
/// not of images in other formats alone.
///
/// # Errors
/// [`Error::Io`] for a folder that cannot be read.
pub(super) fn are_volumes(paths: &[PathBuf]) -> Result<bool> {
    let [folder] = paths else { return Ok(true) };
    if !folder.is_dir() {
        return Ok(folder.is_file() || split_selection(folder).1.is_some());
    }
    let entries = entries(folder)?;
    let is_of_images = entries.iter().any(|path| is_image(path)) || entries.iter().all(|path| is_other_image(path));
    Ok(!entries.is_empty() && !is_of_images)
}

/// Entries of a folder without hidden ones, sorted.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder, "read"))? {
        let path = entry.map_err(Error::io(folder, "read"))?.path();
        if !files::is_hidden(&path) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The volumes or label maps that `flag` names. A file is one of them, and a folder contains them; a folder of volumes
/// may also be one DICOM series.
fn listed(flag: &str, paths: &[PathBuf], skipped: &mut Vec<Skipped>) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for path in paths {
        if !path.is_dir() || flag == "--images" && is_series(path)? {
            found.push((stem(path), path.clone()));
            continue;
        }
        for entry in entries(path)? {
            match volume_of_folder(flag, &entry)? {
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
fn files_in(folder: &Path, deep: bool) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in entries(folder)? {
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
fn volume_of_folder(flag: &str, folder: &Path) -> Result<Result<PathBuf, Skipped>> {
    if !folder.is_dir() {
        return Ok(Ok(folder.to_owned()));
    }
    let mut volumes = Vec::new();
    for deep in [false, true] {
        for path in files_in(folder, deep)? {
            match of_volume(&path)? {
                Some(format) if format.is_series && flag == "--images" => return Ok(Ok(folder.to_owned())),
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
    let example = volumes.iter().find(|path| is_label(path) == (flag == "--masks")).unwrap_or(&volumes[0]);
    let name = file_name(folder);
    let inside = |path: &Path| path.strip_prefix(folder).unwrap_or(path).display().to_string();
    let names: Vec<String> = volumes.iter().take(4).map(|path| format!("`{}`", inside(path))).collect();
    let more = if volumes.len() > 4 { format!(" and {} more", volumes.len() - 4) } else { String::new() };
    let others = folder.with_file_name("*").join(inside(example).replace(&name, "*"));
    let reason = format!(
        "it has {} volumes: {}{more} (name one of each patient's folder, for example `{flag} {}`)",
        volumes.len(),
        names.join(", "),
        others.display()
    );
    Ok(Err(Skipped { path: folder.to_owned(), reason }))
}

/// Names for files, of which no two are equal: their stems, one of their folders (the nearest first), all folders that
/// differ, and those with the stem.
fn namings(files: &[(String, PathBuf)]) -> Vec<Vec<String>> {
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

/// Names volumes and label maps by the folders on their paths if their own names make no pairs: those of
/// `--images scans/*/ct.nii.gz --masks scans/*/masks/liver.nii.gz` are what stands for `*`.
fn name_by_path(images: &mut [(String, PathBuf)], masks: &mut [(String, PathBuf)]) {
    let pairs = |images: &[String], masks: &[String]| -> Vec<(usize, usize)> {
        let numbers: BTreeMap<String, usize> = images.iter().map(|name| names::key(name)).zip(0..).collect();
        masks.iter().enumerate().filter_map(|(mask, name)| Some((*numbers.get(&names::key(name))?, mask))).collect()
    };
    let stems = |files: &[(String, PathBuf)]| -> Vec<String> { files.iter().map(|(stem, _)| stem.clone()).collect() };
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

/// What a volume is called: its file, the folder that gives it its name, or no file, if several folders do.
pub(super) fn named_by(pair: &FilePair) -> PathBuf {
    let own = stem(&pair.image);
    let folder = pair.image.ancestors().skip(1).find(|folder| file_name(folder) == pair.stem);
    match folder {
        _ if own == pair.stem => pair.image.clone(),
        Some(folder) => folder.to_owned(),
        None if own.starts_with(&pair.stem) => pair.image.clone(),
        None => pair.image.with_file_name(&pair.stem),
    }
}

/// Whether a folder is one DICOM series: its first file is a DICOM file, by its content or its name.
fn is_series(folder: &Path) -> Result<bool> {
    let Some(first) = entries(folder)?.into_iter().find(|path| path.is_file()) else { return Ok(false) };
    Ok(DICOM.has_ending(&first) || of_volume(&first)?.is_some_and(|format| format.name == DICOM.name))
}

/// Name of a volume in the data root: its file name without extension, and what selects it.
fn stem(path: &Path) -> String {
    let (path, selected) = split_selection(path);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let stem = if path.is_dir() { name.as_str() } else { stem_of(&name) };
    selected.map_or_else(|| stem.to_owned(), |selected| format!("{stem}_{}", selection_name(&selected)))
}

/// Volumes and label maps, matched by name; one of each needs no matching names.
fn matched(options: &PrepareOptions) -> Result<(Vec<FilePair>, Vec<Skipped>)> {
    let mut skipped = Vec::new();
    let mut images = listed("--images", &options.images, &mut skipped)?;
    let mut masks = listed("--masks", &options.masks, &mut skipped)?;
    if let ([(stem, image)], [(_, mask)]) = (images.as_slice(), masks.as_slice())
        && skipped.is_empty()
        && image != mask
    {
        return Ok((
            vec![FilePair { stem: stem.clone(), image: image.clone(), mask: mask.clone(), more: Vec::new() }],
            Vec::new(),
        ));
    }
    let same = |a: &(String, PathBuf), b: &(String, PathBuf)| a.1 == b.1;
    if images.len() == masks.len() && images.iter().zip(&masks).all(|(a, b)| same(a, b)) {
        (masks, images) = images.into_iter().partition(|(stem, _)| without_suffix(stem).is_some());
    }
    for (stem, _) in &mut masks {
        if let Some(head) =
            without_suffix(stem).filter(|_| !images.iter().any(|(image, _)| names::key(image) == names::key(stem)))
        {
            *stem = head.to_owned();
        }
    }
    for (stem, _) in &mut images {
        // nnU-Net numbers the channels of an image: `case_0000.nii.gz` belongs to `case.nii.gz`
        let head = stem.strip_suffix("_0000").filter(|_| !masks.iter().any(|(mask, _)| mask == stem));
        if let Some(head) = head {
            *stem = head.to_owned();
        }
    }
    name_by_path(&mut images, &mut masks);
    let remedy = format!("name one file of each patient; {SAME_NAMES}");
    let masks = unique_by_stem(masks, "label map", &remedy)?;
    by_stem(unique_by_stem(images, "volume", &remedy)?, masks, skipped)
}

/// Opens all volumes and finds the slices with structures, and those without if they are wanted.
///
/// # Errors
/// [`Error::Data`] for an ambiguous name; [`Error::Config`] if the volumes need different windows.
pub(super) fn read(work: &Work, window: Window) -> Result<Found> {
    let (pairs, skipped) = matched(work.options)?;
    let mut found = Found { skipped, window, ..Found::default() };
    let is_joined =
        |pair: &&FilePair| named_by(pair).file_name() == Some(pair.stem.as_ref()) && !named_by(pair).exists();
    if let Some(pair) = pairs.iter().find(is_joined).filter(|_| work.finder.is_none()) {
        found.notes.push(format!(
            "volumes have the names of several folders, as `{}`, and each is a patient of its own; `--group` finds the \
             patients in these names",
            pair.stem
        ));
    }
    if let Some(pair) = pairs.iter().find(|pair| work.options.append && named_by(pair) != pair.image) {
        found.notes.push(format!(
            "volumes have the names of their folders, as `{}`: what is added must have the names of the earlier call, or it \
             is added again",
            pair.stem
        ));
    }
    let mut windows: BTreeMap<String, (Window, String)> = BTreeMap::new();
    work.observer.on(&Event::Started { phase: "read volumes".into(), total: pairs.len() as u64, unit: "volumes" });
    for (pair, done) in pairs.into_iter().zip(1..) {
        let name = file_name(&named_by(&pair));
        match read_volume(pair, found.volumes.len(), work, window) {
            Ok((volume, slices, notes, findings)) => {
                found.findings.merge(findings);
                found.notes.extend(notes.into_iter().map(|note| format!("{name}: {note}")));
                windows.extend(volume.window.map(|window| (window.to_string(), (window, name))));
                let (known, new): (Vec<_>, Vec<_>) =
                    slices.into_iter().partition(|slice| work.existing.has_stem(&slice.item.stem));
                found.known += known.iter().map(|slice| slice.slice).collect::<BTreeSet<_>>().len();
                found.slices.extend(new);
                found.volumes.push(volume);
            }
            Err(skip) => found.skipped.push(skip),
        }
        work.observer.on(&Event::Advanced { done });
    }
    work.observer.on(&Event::Finished);
    if windows.len() > 1 {
        let all: Vec<String> = windows.values().map(|(window, name)| format!("`{window}` for {name}")).collect();
        return Err(Error::config(
            "--window",
            format!("the volumes need different intensity windows: {}", all.join(", ")),
            "choose one for all of them, for example `--window soft-tissue`, or prepare them as different modalities",
        ));
    }
    found.window = windows.into_values().next().map_or(window, |(window, _)| window);
    Ok(found)
}

/// Name of a volume for messages and the table.
fn file_name(path: &Path) -> String {
    let (path, selected) = split_selection(path);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    selected.map_or_else(|| name.clone().into_owned(), |selected| format!("{name}#{}", selection_name(&selected)))
}

/// A volume with its label map.
struct Opened<'a> {
    volume: Volume,
    plane: Plane,
    labels: LabelMap,
    structures: &'a [Structure],
}

impl<'a> Opened<'a> {
    fn open(pair: &FilePair, work: &'a Work) -> Result<Self, Skipped> {
        let skip = |path: &Path, reason: String| Skipped { path: path.to_owned(), reason };
        let unusable = |path: &Path, error: &Error| {
            // the file of a series that is damaged
            let path = if let Error::Data { path, .. } = error { path } else { path };
            skip(path, format!("cannot be used: {}", reason_of(error)))
        };
        let SliceOptions { geometry, resample, .. } = work.options.slices;
        let volume = volume::open_chosen(&pair.image, work.options.series.as_deref(), geometry)
            .map_err(|error| unusable(&pair.image, &error))?;
        let on_grid = |labels: LabelMap| labels.on_grid(&pair.mask, &volume.grid, resample);
        let labels = labels::open_with(&pair.mask, geometry).and_then(on_grid).map_err(|error| {
            // such as skipped files, without which the volume has another size
            let skipped = unusable(&pair.mask, &error);
            let notes = volume.notes.iter().map(|note| format!("of its volume: {note}"));
            let reason = once(skipped.reason).chain(notes).collect::<Vec<_>>().join("; ");
            Skipped { reason, ..skipped }
        })?;
        check_labels(&labels, &work.structures).map_err(|reason| skip(&pair.mask, reason))?;
        let plane = volume.plane(work.options.slices.axis);
        Ok(Self { volume, plane, labels, structures: &work.structures })
    }

    /// What was assumed about the volume and its label map.
    fn notes(&self) -> Vec<String> {
        self.volume.notes.iter().chain(&self.labels.notes).cloned().collect()
    }

    /// The mask of a structure on a slice as 0 and 255.
    fn mask(&self, structure: usize, slice: usize) -> Result<GrayImage> {
        let chosen = self.structures[structure].labels;
        let [columns, rows] = self.plane.size;
        let places = (0..rows).flat_map(|y| (0..columns).map(move |x| (x, y)));
        let has = |(x, y)| self.labels.has(self.plane.index(slice, x, y), chosen);
        let pixels = places.map(|place| if has(place) { 255 } else { 0 }).collect();
        let [width, height] = self.plane.size.map(|side| u32::try_from(side).unwrap_or(u32::MAX));
        GrayImage::from_raw(width, height, pixels).ok_or_else(|| Error::Shape { reason: "a slice is too wide".into() })
    }

    /// A slice as an image.
    fn image(&self, slice: usize, levels: Option<&Levels>) -> Result<DynamicImage> {
        Ok(match levels {
            Some(levels) => DynamicImage::ImageLuma8(self.volume.slice(&self.plane, slice, levels)?),
            // a colour image has no window
            None => DynamicImage::ImageRgb8(self.volume.colour_slice(&self.plane, slice, &Levels::new(0.0, 255.0))?),
        })
    }
}

/// Refuses a label map of several labels if none is chosen.
fn check_labels(labels: &LabelMap, structures: &[Structure]) -> Result<(), String> {
    let found = labels.labels();
    if found.len() < 2 || structures.iter().all(|structure| !structure.labels.is_empty()) {
        return Ok(());
    }
    let all: Vec<String> = found.iter().map(|(label, count)| format!("{label} ({count} voxels)")).collect();
    let choice = "choose with `--labels 2`, or name them with `--labels 1=liver,2=tumour`";
    Err(format!("the label map has several labels: {}; {choice}", all.join(", ")))
}

type OfVolume = (UsableVolume, Vec<SliceItem>, Vec<String>, Findings);

/// The slices of a volume, and what was assumed about it.
fn read_volume(pair: FilePair, number: usize, work: &Work, window: Window) -> Result<OfVolume, Skipped> {
    let opened = Opened::open(&pair, work)?;
    let (window, levels) = if opened.volume.is_colour() {
        (None, None)
    } else {
        let window = window.chosen_for(&opened.volume);
        let levels = window.levels(&opened.volume);
        let unusable = |error: Error| Skipped { path: pair.image.clone(), reason: reason_of(&error) };
        (Some(window), Some(levels.map_err(unusable)?))
    };
    let SliceOptions { axis, every, .. } = work.options.slices;
    let patient = work.finder.is_none().then(|| pair.stem.clone());
    let of_slice = |slice: usize| -> Result<(Vec<SliceItem>, Findings)> {
        let (mut items, mut findings) = (Vec::new(), Findings::default());
        for (structure, Structure { name, suffix, .. }) in work.structures.iter().enumerate() {
            let mask = opened.mask(structure, slice)?;
            let location = describe(&mask, work.options.zones, work.options.several);
            if location.is_none() && !work.options.negatives.are_wanted() {
                continue;
            }
            let image = format!("{}_{axis}_{slice:04}", pair.stem);
            let stem = format!("{image}{suffix}");
            if location.is_some() && !work.existing.has_stem(&stem) {
                findings.add_mask(Path::new(&stem), &mask);
            }
            let item = Item {
                stem,
                image,
                patient: patient.clone(),
                target: name.clone(),
                location,
                // NIfTI stores 32-bit numbers: 0.7 would become 0.699999988
                spacing_mm: Some(opened.plane.spacing.map(|mm| (mm * 1e6).round() / 1e6)),
                slice: Some((file_name(&named_by(&pair)), slice)),
                pixels: None,
            };
            items.push(SliceItem { item, volume: number, slice, structure });
        }
        Ok((items, findings))
    };
    let slices: Vec<usize> = (0..opened.plane.num_slices).step_by(every).collect();
    let read: Result<Vec<(Vec<SliceItem>, Findings)>> = slices.into_par_iter().map(of_slice).collect();
    let unusable = |error: Error| Skipped { path: pair.image.clone(), reason: error.to_string() };
    let (items, of_slices): (Vec<Vec<SliceItem>>, Vec<Findings>) = read.map_err(unusable)?.into_iter().unzip();
    let mut items: Vec<SliceItem> = items.into_iter().flatten().collect();
    if items.is_empty() {
        let reason = "no slice has the target; `--negatives` adds slices without it";
        return Err(Skipped { path: pair.mask, reason: reason.to_owned() });
    }
    let slices: BTreeSet<usize> = items.iter().map(|item| item.slice).collect();
    let mark = |slice: usize| Ok((slice, pixel_mark(&opened.image(slice, levels.as_ref())?)));
    let pixels: Result<BTreeMap<usize, Option<Mark>>> = slices.into_par_iter().map(mark).collect();
    let pixels = pixels.map_err(unusable)?;
    for item in &mut items {
        item.item.pixels = pixels[&item.slice];
    }
    let mut notes = opened.notes();
    if let Some((window, levels)) = window.zip(levels.as_ref()) {
        notes.extend(of_one_grey(&opened, &pixels, window, levels));
    }
    let mut findings = Findings::default();
    for of_slice in of_slices {
        findings.merge(of_slice);
    }
    Ok((UsableVolume { pair, window, levels }, items, notes, findings))
}

/// Names the slices that are one single grey level with the window, which have no mark of their pixels, and says if the
/// window may not fit the volume.
fn of_one_grey(
    opened: &Opened,
    pixels: &BTreeMap<usize, Option<Mark>>,
    window: Window,
    levels: &Levels,
) -> Vec<String> {
    let found = pixels.iter().filter(|(_, mark)| mark.is_none());
    let found: Vec<String> = found.map(|(slice, _)| slice.to_string()).collect();
    let named = found.iter().take(10).cloned().collect::<Vec<_>>().join(", ");
    let more = if found.len() > 10 { ", .." } else { "" };
    let uniform = (!found.is_empty()).then(|| {
        format!(
            "{} of {} slices are one single grey level with the window `{window}` (slice {named}{more}); if they show \
             anatomy, choose another window",
            found.len(),
            pixels.len()
        )
    });
    uniform.into_iter().chain(window.mismatch(&opened.volume, levels)).collect()
}

/// Writes the slices and their masks.
///
/// # Errors
/// [`Error::Io`]; [`Error::Data`] for a file that exists with another content, and for a volume that has changed
/// meanwhile.
pub(super) fn write(found: &Found, splits: &[Split], work: &Work) -> Result<()> {
    let total = found.slices.len() as u64;
    work.observer.on(&Event::Started { phase: "write slices".into(), total, unit: "masks" });
    let done = AtomicU64::new(0);
    for (number, volume) in found.volumes.iter().enumerate() {
        let mut by_slice: BTreeMap<usize, Vec<(&SliceItem, Split)>> = BTreeMap::new();
        for (slice, split) in found.slices.iter().zip(splits).filter(|(slice, _)| slice.volume == number) {
            by_slice.entry(slice.slice).or_default().push((slice, *split));
        }
        if by_slice.is_empty() {
            continue;
        }
        let opened = Opened::open(&volume.pair, work)
            .map_err(|skip| Error::data(skip.path, skip.reason, "the file has changed; run the command again"))?;
        by_slice.into_par_iter().try_for_each(|(slice, items)| {
            write_slice(&opened, volume, slice, &items, work.options)?;
            let done = done.fetch_add(items.len() as u64, Ordering::Relaxed) + items.len() as u64;
            work.observer.on(&Event::Advanced { done });
            Ok(())
        })?;
    }
    work.observer.on(&Event::Finished);
    Ok(())
}

/// Writes one slice under the names of its structures, and their masks.
fn write_slice(
    opened: &Opened,
    volume: &UsableVolume,
    slice: usize,
    items: &[(&SliceItem, Split)],
    options: &PrepareOptions,
) -> Result<()> {
    let image = png(&opened.image(slice, volume.levels.as_ref())?).map_err(|reason| Error::Shape { reason })?;
    let class = options.out.join(&options.modality);
    for (SliceItem { item, structure, .. }, split) in items {
        let path = |what: &str| class.join(format!("{split}_{what}")).join(format!("{}.png", item.stem));
        write::new_file(&path("images"), &image, options.append)?;
        let mask = DynamicImage::ImageLuma8(opened.mask(*structure, slice)?);
        let mask = png(&mask).map_err(|reason| Error::Shape { reason })?;
        write::new_file(&path("masks"), &mask, options.append)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "volumes_tests.rs"]
mod tests;
