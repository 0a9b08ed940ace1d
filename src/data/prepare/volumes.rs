//! Volumes and label maps: which slices become images, and how they are written.
//!
//! A volume is opened twice: first for the locations of its structures, which decide the slices, then to write them.
//! In between the splits are drawn, which needs all volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use image::{DynamicImage, GrayImage};
use rayon::prelude::*;

use super::item::{Item, Skipped, png};
use super::location::describe;
use super::options::{PrepareOptions, SliceOptions};
use super::pairs::{FilePair, by_stem, is_image, unique_by_stem, without_suffix};
use super::patients::stem_of;
use super::structures::Structure;
use super::work::Work;
use super::write;
use crate::data::manifest::Split;
use crate::data::volume::path::split_selection;
use crate::data::volume::{self, LabelMap, Levels, Plane, Volume, Window, labels};
use crate::event::Event;
use crate::{Error, Result, files};

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
}

/// Whether the paths are volumes: several paths, files, or a folder without PNG, JPEG and TIFF files.
///
/// # Errors
/// [`Error::Io`] for a folder that cannot be read.
pub(super) fn are_volumes(paths: &[PathBuf]) -> Result<bool> {
    let [folder] = paths else { return Ok(true) };
    if !folder.is_dir() {
        return Ok(folder.is_file() || split_selection(folder).1.is_some());
    }
    let entries = entries(folder)?;
    Ok(!entries.is_empty() && !entries.iter().any(|path| is_image(path)))
}

/// Entries of a folder without hidden ones, sorted.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder, "read"))? {
        let path = entry.map_err(Error::io(folder, "read"))?.path();
        if !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.')) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The volumes or label maps that paths name. A file is one of them, and a folder contains them; a folder of volumes may
/// also be one DICOM series.
fn listed(paths: &[PathBuf], may_be_series: bool) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for path in paths {
        if path.is_dir() && !(may_be_series && is_series(path)?) {
            found.extend(entries(path)?);
        } else {
            found.push(path.clone());
        }
    }
    Ok(found.into_iter().map(|path| (stem(&path), path)).collect())
}

/// Whether a folder is one DICOM series: its first file is a DICOM file.
fn is_series(folder: &Path) -> Result<bool> {
    let Some(first) = entries(folder)?.into_iter().find(|path| path.is_file()) else { return Ok(false) };
    let extension = first.extension().unwrap_or_default().to_ascii_lowercase();
    let mut start = Vec::new();
    let file = files::open(&first).map_err(Error::io(&first, "read"))?;
    file.take(132).read_to_end(&mut start).map_err(Error::io(&first, "read"))?;
    Ok(start.ends_with(b"DICM") || extension == "dcm" || extension == "ima")
}

/// Name of a volume in the data root: its file name without extension, and the number that selects it.
fn stem(path: &Path) -> String {
    let (path, number) = split_selection(path);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let stem = if path.is_dir() { name.as_str() } else { stem_of(&name) };
    number.map_or_else(|| stem.to_owned(), |number| format!("{stem}_{number}"))
}

/// Volumes and label maps, matched by name; one of each needs no matching names.
fn matched(options: &PrepareOptions) -> Result<(Vec<FilePair>, Vec<Skipped>)> {
    let (mut images, mut masks) = (listed(&options.images, true)?, listed(&options.masks, false)?);
    if let ([(stem, image)], [(_, mask)]) = (images.as_slice(), masks.as_slice()) {
        return Ok((vec![FilePair { stem: stem.clone(), image: image.clone(), mask: mask.clone() }], Vec::new()));
    }
    let same = |a: &(String, PathBuf), b: &(String, PathBuf)| a.1 == b.1;
    if images.len() == masks.len() && images.iter().zip(&masks).all(|(a, b)| same(a, b)) {
        (masks, images) = images.into_iter().partition(|(stem, _)| without_suffix(stem).is_some());
    }
    for (stem, _) in &mut masks {
        if let Some(head) = without_suffix(stem).filter(|_| !images.iter().any(|(image, _)| image == stem)) {
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
    Ok(by_stem(unique_by_stem(images, "volume")?, unique_by_stem(masks, "label map")?, Vec::new()))
}

/// Opens all volumes and finds the slices with structures, and those without if they are wanted.
///
/// # Errors
/// [`Error::Data`] for an ambiguous name; [`Error::Config`] if the volumes need different windows.
pub(super) fn read(work: &Work, window: Window) -> Result<Found> {
    let (pairs, skipped) = matched(work.options)?;
    let mut found = Found { skipped, window, ..Found::default() };
    let mut windows: BTreeMap<String, (Window, String)> = BTreeMap::new();
    work.observer.on(&Event::Started { phase: "read volumes".into(), total: pairs.len() as u64, unit: "volumes" });
    for (pair, done) in pairs.into_iter().zip(1..) {
        let name = file_name(&pair.image);
        match of_volume(pair, found.volumes.len(), work, window) {
            Ok((volume, slices, notes)) => {
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

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
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
            let reason = match error {
                Error::Data { reason, .. } => reason.clone(),
                other => other.to_string(),
            };
            skip(path, format!("cannot be used: {reason} ({})", error.hint()))
        };
        let volume = volume::open(&pair.image).map_err(|error| unusable(&pair.image, &error))?;
        let on_grid = |labels: LabelMap| labels.on_grid(&pair.mask, &volume.grid, work.options.slices.resample);
        let labels = labels::open(&pair.mask).and_then(on_grid).map_err(|error| unusable(&pair.mask, &error))?;
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
        let is_inside = |label: u16| if chosen.is_empty() { label > 0 } else { chosen.contains(label) };
        let labels = self.plane.values(&self.labels.values, slice)?;
        let pixels = labels.into_iter().map(|label| if is_inside(label) { 255 } else { 0 }).collect();
        let [width, height] = self.plane.size.map(|side| u32::try_from(side).unwrap_or(u32::MAX));
        GrayImage::from_raw(width, height, pixels).ok_or_else(|| Error::Shape { reason: "a slice is too wide".into() })
    }

    /// A slice as PNG.
    fn png(&self, slice: usize, levels: Option<&Levels>) -> Result<Vec<u8>> {
        let image = match levels {
            Some(levels) => DynamicImage::ImageLuma8(self.volume.slice(&self.plane, slice, levels)?),
            // a colour image has no window
            None => DynamicImage::ImageRgb8(self.volume.colour_slice(&self.plane, slice, &FULL)?),
        };
        png(&image).map_err(|reason| Error::Shape { reason })
    }
}

/// Levels that change no grey value of 8 bits.
const FULL: Levels = Levels { low: 0.0, high: 255.0, inverted: false };

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

type OfVolume = (UsableVolume, Vec<SliceItem>, Vec<String>);

/// The slices of a volume, and what was assumed about it.
fn of_volume(pair: FilePair, number: usize, work: &Work, window: Window) -> Result<OfVolume, Skipped> {
    let opened = Opened::open(&pair, work)?;
    let (window, levels) = if opened.volume.is_colour() {
        (None, None)
    } else {
        let window = window.chosen_for(&opened.volume);
        let levels = window.levels(&opened.volume);
        let unusable =
            |error: Error| Skipped { path: pair.image.clone(), reason: format!("{error} ({})", error.hint()) };
        (Some(window), Some(levels.map_err(unusable)?))
    };
    let SliceOptions { axis, every, .. } = work.options.slices;
    let patient = work.finder.is_none().then(|| pair.stem.clone());
    let of_slice = |slice: usize| -> Result<Vec<SliceItem>> {
        let mut items = Vec::new();
        for (structure, Structure { name, suffix, .. }) in work.structures.iter().enumerate() {
            let location = describe(&opened.mask(structure, slice)?, work.options.zones, work.options.several);
            if location.is_none() && !work.options.negatives.are_wanted() {
                continue;
            }
            let image = format!("{}_{axis}_{slice:04}", pair.stem);
            let item = Item {
                stem: format!("{image}{suffix}"),
                image,
                patient: patient.clone(),
                target: name.clone(),
                location,
                // NIfTI stores 32-bit numbers: 0.7 would become 0.699999988
                spacing_mm: Some(opened.plane.spacing.map(|mm| (mm * 1e6).round() / 1e6)),
                slice: Some((file_name(&pair.image), slice)),
            };
            items.push(SliceItem { item, volume: number, slice, structure });
        }
        Ok(items)
    };
    let slices: Vec<usize> = (0..opened.plane.num_slices).step_by(every).collect();
    let items: Result<Vec<Vec<SliceItem>>> = slices.into_par_iter().map(of_slice).collect();
    let unusable = |error: Error| Skipped { path: pair.image.clone(), reason: error.to_string() };
    let items: Vec<SliceItem> = items.map_err(unusable)?.into_iter().flatten().collect();
    if items.is_empty() {
        let reason = "no slice has the target; `--negatives` adds slices without it";
        return Err(Skipped { path: pair.mask, reason: reason.to_owned() });
    }
    Ok((UsableVolume { pair, window, levels }, items, opened.notes()))
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
    let image = opened.png(slice, volume.levels.as_ref())?;
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
