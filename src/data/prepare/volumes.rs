//! Pairs of volumes and label maps: which slices become images, and how they are written.
//!
//! A volume is opened twice: first for the locations of its structures, which decide the slices, then to write them.
//! In between the splits are drawn, which needs all volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::once;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use image::{DynamicImage, GrayImage};
use rayon::prelude::*;

use super::found::{FoundItems, ItemMask, UsableItem, UsablePair, UsableSource, UsableVolume, VolumePart};
use super::instances;
use super::item::{MaskItem, Skipped, png, reason_of};
use super::layouts::file_name;
use super::location::describe;
use super::options::{PrepareOptions, SliceOptions};
use super::structures::Structure;
use super::table::{Pair, Shown};
use super::work::Preparation;
use super::write;
use crate::findings::Findings;
use crate::labels::Labels;
use crate::manifest::Split;
use crate::marks::{Mark, pixel_mark};
use crate::volume::dicom::SEVERAL_FIT;
use crate::volume::{
    self, Geometry, LabelMap, Levels, Neighbours, Sequence, SlicePlane, Volume, VoxelSet, Window, labels, sequences,
};
use prsmed_base::event::Event;
use prsmed_base::{Error, Result};

/// Opens all volumes and finds the slices with structures, and those without if they are wanted. Returns the window that
/// all volumes have, or the sequences with theirs.
///
/// # Errors
/// [`Error::Config`] if the volumes need different windows; [`Error::Data`] if the option `series` fits several series of a
/// folder.
pub(super) fn read(
    work: &Preparation,
    pairs: Vec<Pair>,
    window: Window,
    found: &mut FoundItems,
) -> Result<(Window, Vec<Sequence>)> {
    // by the name of the sequence, which is empty for volumes of one file, and by their text
    let mut windows: BTreeMap<String, BTreeMap<String, (Window, String)>> = BTreeMap::new();
    work.observer.on(&Event::Started { phase: "read volumes".into(), total: pairs.len() as u64, unit: "volumes" });
    for (pair, done) in pairs.into_iter().zip(1..) {
        let name = file_name(&pair.source);
        match read_volume(pair, work, window) {
            Ok(((source, items, findings), own, notes)) => {
                found.notes.extend(notes.into_iter().map(|note| format!("{name}: {note}")));
                for Sequence { name: of, window } in own {
                    windows.entry(of).or_default().insert(window.to_string(), (window, name.clone()));
                }
                let (known, new): (Vec<_>, Vec<_>) =
                    items.into_iter().partition(|(item, _)| work.existing.has_stem(&item.stem));
                found.known += known.iter().map(|(item, _)| item.slice_number()).collect::<BTreeSet<_>>().len();
                found.add((source, new, findings));
            }
            Err(skip) if work.options.series.is_some() && skip.reason.contains(SEVERAL_FIT) => {
                let hint = "give the argument `series` a rule that fits one series of every folder";
                return Err(Error::data(skip.path, skip.reason, hint));
            }
            Err(skip) => found.skipped.push(skip),
        }
        work.observer.on(&Event::Advanced { done });
    }
    work.observer.on(&Event::Finished);
    if let Some((of, windows)) = windows.iter().find(|(_, windows)| windows.len() > 1) {
        let all: Vec<String> = windows.values().map(|(window, name)| format!("`{window}` for {name}")).collect();
        let of = if of.is_empty() { String::new() } else { format!(" of the sequence `{of}`") };
        let reason = format!("the volumes{of} need different intensity windows: {}", all.join(", "));
        let hint = "choose one for all of them, for example the argument `window=soft-tissue`, or prepare them as \
                    different modalities";
        return Err(Error::argument("window", reason, hint));
    }
    let found = |name: &str| windows.get(name)?.values().next().map(|(window, _)| *window);
    let shown = |sequence: &Sequence| {
        let window = found(&sequence.name).unwrap_or(sequence.window);
        Sequence { window, ..sequence.clone() }
    };
    let sequences: Vec<Sequence> = work.sequences.iter().map(shown).collect();
    let first = sequences.first().map(|sequence| sequence.window);
    Ok((first.or(found("")).unwrap_or(window), sequences))
}

/// The volume of a pair, of one file or of several sequences, with their windows.
fn opened(pair: &Pair, work: &Preparation, geometry: Option<Geometry>) -> Result<(Volume, Vec<Sequence>)> {
    let series = work.options.series.as_deref();
    if pair.sequences.is_empty() {
        return volume::open_chosen(&pair.image, series, geometry).map(|volume| (volume, Vec::new()));
    }
    let joined = sequences::open(&pair.sequences, &work.sequences, series, geometry)?;
    Ok((joined.volume, joined.windows))
}

/// A volume with the masks of its structures.
struct Opened {
    volume: Volume,
    /// The windows of its sequences; empty for a volume of one file.
    windows: Vec<Sequence>,
    plane: SlicePlane,
    structures: Vec<Structure>,
    /// Of each structure.
    masks: Vec<SliceMasks>,
    /// The instances of each structure; none if they are not wanted.
    instances: Vec<Vec<VoxelSet>>,
    /// What was assumed about the label maps.
    notes: Vec<String>,
}

/// One bit for each pixel of the slices that show a structure, by the number of the slice.
type SliceMasks = BTreeMap<usize, Vec<u8>>;

impl Opened {
    /// Label maps are opened one after another, and only the bits of their structures are kept: a volume may have a file for each
    /// of a hundred structures.
    fn open(pair: &Pair, work: &Preparation) -> Result<Self, Skipped> {
        let SliceOptions { geometry, axis, .. } = work.options.slices;
        let (volume, windows) = opened(pair, work, geometry).map_err(|error| unusable(&pair.image, &error))?;
        let shown = work.shown_by(pair);
        let plane = volume.plane(axis);
        let mut masks: Vec<SliceMasks> = vec![SliceMasks::new(); shown.len()];
        let num_whole = if work.options.instances { shown.len() } else { 0 };
        let mut whole = vec![vec![0_u8; volume.grid.num_voxels()]; num_whole];
        let mut notes = Vec::new();
        for number in 0..pair.masks.len() {
            let of_file: Vec<OfFile> = shown.iter().enumerate().flat_map(|shown| of_file(number, shown)).collect();
            let left_out = |Skipped { path, reason }| {
                let volume = if pair.masks.len() > 1 {
                    format!("; so {} is left out", file_name(&pair.source))
                } else {
                    String::new()
                };
                Skipped { path, reason: reason + &volume }
            };
            let mut map = label_map(number, pair, &of_file, &volume, work).map_err(left_out)?;
            for OfFile { structure, labels, .. } in of_file {
                add_bits(&mut masks[structure], &map, labels, &plane, work.options.slices.every);
                if let Some(whole) = whole.get_mut(structure) {
                    whole
                        .par_iter_mut()
                        .enumerate()
                        .for_each(|(voxel, is_set)| *is_set |= u8::from(map.has(voxel, labels)));
                }
            }
            notes.append(&mut map.notes);
        }
        let instances = whole.iter().map(|mask| instances::instances(mask, volume.grid.size)).collect();
        let structures = shown.into_iter().map(|(structure, _)| structure).collect();
        Ok(Self { volume, windows, plane, structures, masks, instances, notes })
    }

    /// The mask of a structure or an instance on a slice as 0 and 255.
    fn mask(&self, VolumePart { structure, instance }: VolumePart, slice: usize) -> Result<GrayImage> {
        let [columns, rows] = self.plane.size;
        let bits = self.masks[structure].get(&slice);
        let is_set = |pixel: usize| match instance {
            Some(number) => {
                self.instances[structure][number].contains(self.plane.index(slice, pixel % columns, pixel / columns))
            }
            None => bits.is_some_and(|bits| bits[pixel / 8] & (1 << (pixel % 8)) > 0),
        };
        let pixels = (0..columns * rows).map(|pixel| if is_set(pixel) { 255 } else { 0 }).collect();
        let [width, height] = self.plane.size.map(|side| u32::try_from(side).unwrap_or(u32::MAX));
        GrayImage::from_raw(width, height, pixels).ok_or_else(|| Error::Shape { reason: "a slice is too wide".into() })
    }

    /// A slice as an image. A colour image has no levels.
    fn image(&self, slice: usize, levels: Option<&Levels>, context: Neighbours) -> Result<DynamicImage> {
        self.volume.image(&self.plane, slice, levels.unwrap_or(&Levels::new(0.0, 255.0)), context)
    }
}

/// A structure that a label map shows: its number and name, and its labels in this file.
struct OfFile<'a> {
    structure: usize,
    name: &'a str,
    labels: Labels,
}

/// What the file of this number shows of a structure.
fn of_file(number: usize, (structure, (of, files)): (usize, &Shown)) -> impl Iterator<Item = OfFile<'_>> {
    let own = files.iter().filter(move |(file, _)| *file == number);
    own.map(move |(_, labels)| OfFile { structure, name: &of.name, labels: *labels })
}

/// A label map of a pair on the grid of its volume, which shows these structures.
fn label_map(
    number: usize,
    pair: &Pair,
    shown: &[OfFile],
    volume: &Volume,
    work: &Preparation,
) -> Result<LabelMap, Skipped> {
    let SliceOptions { geometry, resample, .. } = work.options.slices;
    let path = &pair.masks[number].1;
    let mut before = Vec::new();
    let on_grid = |labels: LabelMap| {
        if resample {
            before.extend(shown.iter().map(|of| mm3_of(&labels, of.labels)));
        }
        labels.on_grid(path, &volume.grid, resample)
    };
    let mut labels = labels::open_for(path, geometry, volume).and_then(on_grid).map_err(|error| {
        // such as skipped files, without which the volume has another size
        let skipped = unusable(path, &error);
        let notes = volume.notes.iter().map(|note| format!("of its volume: {note}"));
        let reason = once(skipped.reason).chain(notes).collect::<Vec<_>>().join("; ");
        Skipped { reason, ..skipped }
    })?;
    let found = labels.labels().into_iter().map(|(label, count)| (label, count as u64));
    if let Some(reason) = pair.unknown_label(number, found) {
        return Err(Skipped { path: path.clone(), reason });
    }
    let is_chosen = work.options.join.is_some() || shown.iter().all(|of| !of.labels.is_empty());
    if let Some(reason) = several_labels(&labels).filter(|_| !is_chosen) {
        return Err(Skipped { path: path.clone(), reason });
    }
    if let Some(reason) = shown.iter().find_map(|of| labels.contradiction(of.name, of.labels)) {
        return Err(Skipped { path: path.clone(), reason });
    }
    for of in shown {
        work.label_names.add(of.name, of.labels, &labels, &file_name(&pair.source));
    }
    for (OfFile { name, labels: chosen, .. }, before) in shown.iter().zip(before) {
        let left = mm3_of(&labels, *chosen) / before;
        if left == 0.0 {
            let reason = "is on no voxel of the volume, whose grid is too coarse for it or lies elsewhere; put the \
                          volume on the grid of the label map with another program";
            return Err(Skipped { path: path.clone(), reason: format!("its `{name}` {reason}") });
        }
        if left < 0.9 {
            let lost = format!("{:.0} % of `{name}`", 100.0 * (1.0 - left));
            labels.notes.push(format!("{lost} in its label map is lost on the grid of the volume"));
        }
    }
    let (own, other) = (&labels.frame_of_reference, &volume.frame_of_reference);
    if own.is_some() && other.is_some() && own != other {
        let note = "its label map has another frame of reference, as one of another examination has: only the \
                    positions fit; check that both belong together";
        labels.notes.push(note.to_owned());
    }
    Ok(labels)
}

/// Adds the pixels with one of the labels to the masks of a structure, on every `every`-th slice.
fn add_bits(masks: &mut SliceMasks, map: &LabelMap, labels: Labels, plane: &SlicePlane, every: usize) {
    let [columns, rows] = plane.size;
    let slices = (0..plane.num_slices).step_by(every).collect::<Vec<_>>().into_par_iter();
    let of_slice = |slice: usize| {
        let mut bits: Option<Vec<u8>> = None;
        let voxels = (0..rows).flat_map(|y| (0..columns).map(move |x| plane.index(slice, x, y)));
        for (pixel, _) in voxels.enumerate().filter(|(_, voxel)| map.has(*voxel, labels)) {
            bits.get_or_insert_with(|| vec![0; (columns * rows).div_ceil(8)])[pixel / 8] |= 1 << (pixel % 8);
        }
        Some((slice, bits?))
    };
    for (slice, bits) in slices.filter_map(of_slice).collect::<Vec<_>>() {
        match masks.get_mut(&slice) {
            Some(known) => known.iter_mut().zip(bits).for_each(|(known, more)| *known |= more),
            None => _ = masks.insert(slice, bits),
        }
    }
}

fn unusable(path: &Path, error: &Error) -> Skipped {
    // the file of a series that is damaged
    let path = if let Error::Data { path, .. } = error { path } else { path };
    Skipped { path: path.to_owned(), reason: format!("cannot be used: {}", reason_of(error)) }
}

/// mm³ of the voxels with one of the chosen labels, or with any.
fn mm3_of(labels: &LabelMap, chosen: Labels) -> f64 {
    let found = labels.labels().into_iter().filter(|(label, _)| chosen.is_empty() || chosen.contains(*label));
    found.map(|(_, count)| count as f64).sum::<f64>() * labels.grid.spacing().iter().product::<f64>()
}

/// Says so if a label map has several labels, of which none is chosen.
fn several_labels(labels: &LabelMap) -> Option<String> {
    let found = labels.labels();
    let name = |label| labels.names.0.get(label).map_or(String::new(), |name| format!("`{name}`, "));
    let all: Vec<String> =
        found.iter().map(|(label, count)| format!("{label} ({}{count} voxels)", name(label))).collect();
    let choice = "choose with the argument `labels=2`, or name them with the argument `labels=1=liver,2=tumour`";
    (found.len() > 1).then(|| format!("the label map has several labels: {}; {choice}", all.join(", ")))
}

/// The slices of a volume, its window without a name (colour images have none) or those of its sequences, and what was assumed
/// about it.
type UsableSlices = (UsablePair, Vec<Sequence>, Vec<String>);

fn read_volume(pair: Pair, work: &Preparation, window: Window) -> Result<UsableSlices, Skipped> {
    let opened = Opened::open(&pair, work)?;
    let window = (!opened.volume.is_colour()).then(|| window.chosen_for(&opened.volume));
    let unusable = |error: Error| Skipped { path: pair.image.clone(), reason: reason_of(&error) };
    let levels = window.map(|window| window.levels(&opened.volume)).transpose().map_err(unusable)?;
    let SliceOptions { every, context, .. } = work.options.slices;
    let slices = (0..opened.plane.num_slices).step_by(every).collect::<Vec<_>>().into_par_iter();
    let read: Result<Vec<_>> = slices.map(|slice| read_slice(slice, &opened, &pair, work)).collect();
    let unusable = |error: Error| Skipped { path: pair.image.clone(), reason: error.to_string() };
    let (mut items, mut findings) = (Vec::new(), Findings::default());
    for (of_slice, found) in read.map_err(unusable)? {
        items.extend(of_slice);
        findings.merge(found);
    }
    if items.is_empty() {
        let reason = "no slice has the target; the argument `negatives` adds slices without it";
        return Err(Skipped { path: pair.masks[0].1.clone(), reason: reason.to_owned() });
    }
    let numbers: BTreeSet<usize> = items.iter().map(|(item, _)| item.slice_number()).collect();
    let mark = |slice: usize| Ok((slice, pixel_mark(&opened.image(slice, levels.as_ref(), context)?)));
    let pixels: Result<BTreeMap<usize, Option<Mark>>> = numbers.into_par_iter().map(mark).collect();
    let pixels = pixels.map_err(unusable)?;
    for (item, _) in &mut items {
        item.pixels = pixels[&item.slice_number()];
    }
    let notes = opened.volume.notes.iter().chain(&opened.notes);
    let mut notes: Vec<String> = notes.cloned().collect();
    if let Some((window, levels)) = window.zip(levels.as_ref()) {
        notes.extend(of_one_grey(&opened, &pixels, window, levels));
    }
    let mut windows = opened.windows;
    windows.extend(window.map(|window| Sequence { name: String::new(), window }));
    let (path, sequences) = (pair.source.clone(), Vec::new());
    let source = UsableSource { path, sequences, range: None, volume: Some(UsableVolume { pair, levels }) };
    Ok(((source, items, findings), windows, notes))
}

/// The items of a slice: one for each structure that it has, and for those that it has not if they are wanted.
fn read_slice(
    slice: usize,
    opened: &Opened,
    pair: &Pair,
    work: &Preparation,
) -> Result<(Vec<(MaskItem, ItemMask)>, Findings)> {
    let (mut items, mut findings) = (Vec::new(), Findings::default());
    for (number, Structure { name, suffix, .. }) in opened.structures.iter().enumerate() {
        let part = VolumePart { structure: number, instance: None };
        let mask = opened.mask(part, slice)?;
        let location = describe(&mask, work.options.zones, work.options.several);
        if location.is_none() && !work.options.negatives.are_wanted() {
            continue;
        }
        let image = format!("{}_{}_{slice:04}", pair.name, work.options.slices.axis);
        let stem = format!("{image}{suffix}");
        if location.is_some() && !work.existing.has_stem(&stem) {
            findings.add_mask(Path::new(&stem), &mask);
        }
        let item = MaskItem {
            stem,
            image,
            target: name.clone(),
            location,
            // NIfTI stores 32-bit numbers: 0.7 would become 0.699999988
            spacing_mm: Some(opened.plane.spacing.map(|mm| (mm * 1e6).round() / 1e6)),
            slice: Some((file_name(&pair.source), slice)),
            // a volume is a patient
            patient: Some(pair.patient.as_ref().unwrap_or(&pair.name).clone()),
            ..pair.item(name)
        };
        let named = opened.instances.get(number).map(|sets| instances::of_slice(sets, &opened.plane, slice));
        for (instance, which) in named.into_iter().flatten() {
            let part = VolumePart { instance: Some(instance), ..part };
            let location = describe(&opened.mask(part, slice)?, work.options.zones, work.options.several);
            items.push((item.instance(which, location), ItemMask::Part(part)));
        }
        items.push((item, ItemMask::Part(part)));
    }
    Ok((items, findings))
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
pub(super) fn write(found: &FoundItems, splits: &[Split], work: &Preparation) -> Result<()> {
    let mut of_source: BTreeMap<usize, BTreeMap<usize, Vec<SliceFile>>> = BTreeMap::new();
    let mut total = 0;
    for (UsableItem { item, source, mask }, split) in found.items.iter().zip(splits) {
        if let ItemMask::Part(part) = *mask {
            total += 1;
            let slices = of_source.entry(*source).or_default().entry(item.slice_number()).or_default();
            slices.push((&*item.stem, part, *split));
        }
    }
    work.observer.on(&Event::Started { phase: "write slices".into(), total, unit: "masks" });
    let done = AtomicU64::new(0);
    for (source, by_slice) in of_source {
        let Some(volume) = &found.sources[source].volume else { continue };
        let opened = Opened::open(&volume.pair, work)
            .map_err(|skip| Error::data(skip.path, skip.reason, "the file has changed; run the command again"))?;
        by_slice.into_par_iter().try_for_each(|(slice, files)| {
            write_slice(&opened, volume, slice, &files, work.options)?;
            let done = done.fetch_add(files.len() as u64, Ordering::Relaxed) + files.len() as u64;
            work.observer.on(&Event::Advanced { done });
            Ok(())
        })?;
    }
    work.observer.on(&Event::Finished);
    Ok(())
}

/// The files of a slice with one part: their stem, the part, and their split.
type SliceFile<'a> = (&'a str, VolumePart, Split);

/// Writes one slice under the names of its structures, and their masks.
fn write_slice(
    opened: &Opened,
    volume: &UsableVolume,
    slice: usize,
    files: &[SliceFile],
    options: &PrepareOptions,
) -> Result<()> {
    let image = png(&opened.image(slice, volume.levels.as_ref(), options.slices.context)?)
        .map_err(|reason| Error::Shape { reason })?;
    let class = options.out.join(&options.modality);
    for (stem, part, split) in files {
        let path = |what: &str| class.join(format!("{split}_{what}")).join(format!("{stem}.png"));
        write::new_file(&path("images"), &image, options.append)?;
        let mask = DynamicImage::ImageLuma8(opened.mask(*part, slice)?);
        let mask = png(&mask).map_err(|reason| Error::Shape { reason })?;
        write::new_file(&path("masks"), &mask, options.append)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "volumes_tests.rs"]
mod tests;
