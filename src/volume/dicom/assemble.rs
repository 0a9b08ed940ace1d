//! Volumes from the slices of a series: decoded values, and what the header says about showing them.

use std::path::Path;

use super::super::display::{Curve, Display};
use super::super::hounsfield::{TissueShares, is_air};
use super::super::modality::Modality;
use super::super::padding::add_undeclared;
use super::super::path::first_names;
use super::super::source::{Instance, References, Uid, VolumeSource};
use super::super::voxel_set::VoxelSet;
use super::super::voxels::{Volume, Voxels};
use super::archive::Container;
use super::header::{DicomHeader, Photometric, RescaleType};
use super::numbers::DAMAGED;
use super::object::parse;
use super::pixels::{self, DicomPixels};
use super::series::{SeriesFile, SeriesLayout, Slice};
use prsmed_base::error::{Error, Result};

/// Decodes the slices in their order.
pub(super) fn assemble(
    path: &Path,
    container: &mut Container,
    entries: &[SeriesFile],
    layout: SeriesLayout,
) -> Result<Volume> {
    let SeriesLayout { slices, grid, mut notes } = layout;
    check_rescale(&slices)?;
    let (first, frame) = (&slices[0].entry.header, slices[0].header());
    let mut builder = Builder::new(first, grid.num_voxels());
    // neighbouring slices of one file are decoded together
    for slices in slices.chunk_by(|a, b| a.entry.index == b.entry.index) {
        let SeriesFile { index, name, header, .. } = slices[0].entry;
        let (_, bytes) = container.read(*index)?;
        let (mut object, _) = parse(name, &bytes)?;
        drop(bytes);
        pixels::join_fragments(name, &mut object, header.frames.len())?;
        let pixels = DicomPixels::new(name, &object, &header.pixels, header.frames.len())?;
        for slice in slices {
            builder.add(&pixels, header, slice.frame, &declared_padding(entries, header, slice.frame))?;
        }
    }
    let Builder { voxels, padding, num_adopted } = builder;
    grid.check(voxels.len()).map_err(|error| Error::data(path, error.to_string(), "export the series again"))?;
    notes.extend(grid.size_note());
    Ok(Volume {
        is_8_bit: first.pixels.bits_stored <= 8 && frame.slope() == 1.0 && frame.intercept() == 0.0,
        display: display(&slices, &voxels, (padding, num_adopted), &mut notes),
        voxels,
        modality: first.modality.clone(),
        windows: frame.windows.clone(),
        inverted: first.pixels.photometric == Photometric::Monochrome1,
        frame_of_reference: first.frame_of_reference.clone().map(Uid),
        notes,
        source: VolumeSource::Dicom(Box::new(references(&slices))),
        grid,
    })
}

/// Refuses slices without a rescale that other slices have: their values would be of another kind.
fn check_rescale(slices: &[Slice]) -> Result<()> {
    for (part, name, neutral) in [(0, "RescaleSlope", 1.0), (1, "RescaleIntercept", 0.0)] {
        let stated = |slice: &Slice| slice.header().rescale[part];
        let is_other = |slice: &&Slice| stated(slice).is_some_and(|value| value != neutral);
        let lacking = slices.iter().find(|slice| stated(slice).is_none());
        if let (Some(example), Some(slice)) = (slices.iter().find(is_other), lacking) {
            let (lacks, has) = (slice.called("it"), example.name());
            let reason = format!("{lacks} has no {name}, and {has} has {}", stated(example).unwrap_or(neutral));
            return Err(Error::data(&slice.entry.name, reason, DAMAGED));
        }
    }
    Ok(())
}

/// Stored values of padding in a frame: those of its file, and those of files with the same sign and rescale. Ranges that
/// do not overlap, in ascending order.
#[expect(clippy::cast_possible_truncation, reason = "a value of a CT")]
fn declared_padding(entries: &[SeriesFile], header: &DicomHeader, frame: usize) -> Vec<[i64; 2]> {
    let frame = &header.frames[frame];
    let is_like = |other: &&DicomHeader| {
        other.pixels.is_signed == header.pixels.is_signed && other.frames[0].rescale == frame.rescale
    };
    let value = |stored: i64| (stored as f64 * frame.slope() + frame.intercept()) as f32;
    // what one slice of a CT declares may be the air of the others
    let is_of_air = |range: &[i64; 2]| header.modality == Modality::Ct && range.iter().any(|end| is_air(value(*end)));
    let others = entries.iter().map(|entry| &entry.header).filter(is_like).filter_map(|other| other.padding);
    let others = others.filter(|range| !is_of_air(range));
    let mut ranges: Vec<[i64; 2]> = others.chain(header.padding).collect();
    ranges.sort_unstable();
    ranges.dedup_by(|next, kept| {
        let is_joined = next[0] <= kept[1];
        kept[1] = if is_joined { kept[1].max(next[1]) } else { kept[1] };
        is_joined
    });
    ranges
}

/// What the headers say about showing the values. Adds notes about what is unusual. `num_adopted` voxels of the padding are
/// padding by the header of another slice.
fn display(
    slices: &[Slice],
    voxels: &Voxels,
    (mut padding, num_adopted): (VoxelSet, usize),
    notes: &mut Vec<String>,
) -> Display {
    let (first, frame) = (&slices[0].entry.header, slices[0].header());
    if !first.pixels.photometric.is_grey() {
        return Display::default();
    }
    if !padding.is_empty() {
        let (count, all) = (padding.len(), voxels.len());
        let adopted = match num_adopted {
            0 => String::new(),
            _ => format!("; the slices of {num_adopted} of them do not declare the value, and other slices do"),
        };
        notes.push(format!(
            "{count} of {all} pixels are padding (PixelPaddingValue): they are black, and not part of percentiles{adopted}"
        ));
    }
    notes.extend(add_undeclared(voxels, &first.modality, &mut padding));
    if first.has_inverse_shape {
        let note = "PresentationLUTShape is INVERSE, which contradicts MONOCHROME2: large values are bright, as MONOCHROME2 \
                    says";
        notes.push(note.to_owned());
    }
    let has_window = !frame.windows.is_empty();
    let curve = match &first.table {
        _ if has_window && frame.is_sigmoid => Curve::Sigmoid,
        Some(table) if !has_window => Curve::Table(table.clone()),
        _ => Curve::Linear,
    };
    if first.table.is_some() && has_window {
        let note = "the file has a window and a lookup table (VOI LUT) for its grey values; the table is ignored";
        notes.push(note.to_owned());
    } else if !curve.is_linear() && !first.modality.is_radiograph() {
        let kind = if curve == Curve::Sigmoid { "a sigmoid window" } else { "a lookup table (VOI LUT)" };
        notes.push(format!("the file has {kind} for its grey values, which only the window `file` uses"));
    }
    let not_hounsfield = not_hounsfield(slices, voxels, &padding, notes);
    Display { padding, curve, window_fault: frame.window_fault.clone(), not_hounsfield }
}

/// Why the values of a CT are not Hounsfield units. Adds notes about what is missing or unlikely.
fn not_hounsfield(slices: &[Slice], voxels: &Voxels, padding: &VoxelSet, notes: &mut Vec<String>) -> Option<String> {
    let is_ct = slices[0].entry.header.modality == Modality::Ct;
    let missing = match slices[0].header().rescale {
        [slope, Some(_)] => {
            if is_ct {
                notes.extend(unlikely_intercept(slices, voxels, padding));
            }
            slope.is_none().then_some("RescaleSlope, and 1 is assumed")
        }
        [Some(_), None] if !is_ct => Some("RescaleIntercept, and 0 is assumed"),
        _ if !is_ct => None,
        _ => {
            if !TissueShares::of_all(voxels, padding).has_air() {
                let reason = "the CT has no RescaleIntercept, and its values are not like Hounsfield units: less than 1 % \
                              of them are those of air";
                notes.push(reason.to_owned());
                return Some(reason.to_owned());
            }
            Some("RescaleIntercept; its values look like Hounsfield units, and are taken for them")
        }
    };
    notes.extend(missing.map(|what| format!("the file has no {what}")));
    if !is_ct {
        return None;
    }
    let of_type = |wanted| some_of(slices, |index| slices[index].header().rescale_type == wanted);
    let other = of_type(RescaleType::Other)
        .map(|of| format!("RescaleType says that the values of the CT are not Hounsfield units{of}"));
    if let Some(of) = of_type(RescaleType::Unspecified).filter(|of| !of.is_empty()) {
        notes.push(format!("RescaleType is US (unspecified){of}; their values are used as those of the others"));
    }
    notes.extend(other.clone());
    other
}

/// A note if the stated intercept of a CT, or that of some of its slices, leaves values that are not like Hounsfield units.
fn unlikely_intercept(slices: &[Slice], voxels: &Voxels, padding: &VoxelSet) -> Option<String> {
    let why = "less than 1 % of them are those of air, lung and fat (-1100 to -20), and at least 10 % are above 700; check \
               RescaleIntercept and RescaleSlope";
    let intercept = slices[0].header().intercept();
    if slices.iter().all(|slice| slice.header().intercept() == intercept) {
        let what =
            format!("the CT has RescaleIntercept {intercept}, but its values are not like Hounsfield units: {why}");
        return TissueShares::of_all(voxels, padding).are_shifted().then_some(what);
    }
    let size = voxels.len() / slices.len();
    let values = |index: usize| voxels.values(padding, index * size..(index + 1) * size);
    let of = some_of(slices, |index| TissueShares::of(values(index)).are_shifted())?;
    Some(format!(
        "RescaleIntercept differs between the slices of the CT, and values are not like Hounsfield units{of}: {why}"
    ))
}

/// The slices for which something holds, for a message: ` in 1 of 6 slices (2.dcm)`, or nothing for all of them.
fn some_of(slices: &[Slice], holds: impl Fn(usize) -> bool) -> Option<String> {
    let holding = slices.iter().enumerate().filter(|(index, _)| holds(*index));
    let names: Vec<String> = holding.map(|(_, slice)| slice.name()).collect();
    match names.len() {
        0 => None,
        count if count == slices.len() => Some(String::new()),
        count => Some(format!(" in {count} of {} slices ({})", slices.len(), first_names(&names))),
    }
}

/// Voxels of slices that are added one by one.
struct Builder {
    voxels: Voxels,
    padding: VoxelSet,
    /// Number of voxels that are padding by the header of another slice.
    num_adopted: usize,
}

impl Builder {
    fn new(header: &DicomHeader, count: usize) -> Self {
        let is_grey = header.pixels.photometric.is_grey();
        let voxels = if is_grey { Voxels::with_capacity(count) } else { Voxels::Rgb(Vec::new()) };
        Self { voxels, padding: VoxelSet::default(), num_adopted: 0 }
    }

    fn add(&mut self, pixels: &DicomPixels, header: &DicomHeader, frame: usize, padding: &[[i64; 2]]) -> Result<()> {
        if let Voxels::Rgb(voxels) = &mut self.voxels {
            voxels.extend(pixels.colours(frame)?);
            return Ok(());
        }
        let (slope, intercept) = (header.frames[frame].slope(), header.frames[frame].intercept());
        for value in pixels.grey(frame)? {
            let before = padding.partition_point(|range| range[0] <= value);
            if before > 0 && value <= padding[before - 1][1] {
                self.padding.push(self.voxels.len());
                let is_own = header.padding.is_some_and(|[first, last]| (first..=last).contains(&value));
                self.num_adopted += usize::from(!is_own);
            }
            // at most 32 bits
            self.voxels.push(value as f64 * slope + intercept);
        }
        Ok(())
    }
}

fn references(slices: &[Slice]) -> References {
    let first = &slices[0].entry.header;
    let instances = slices.iter().map(|slice| {
        let header = &slice.entry.header;
        let frame = (header.frames.len() > 1).then(|| u32::try_from(slice.frame + 1).unwrap_or(u32::MAX));
        Instance { uid: header.instance.clone(), class: header.class.clone(), frame }
    });
    References { study: first.study.clone(), series: first.series.clone(), instances: instances.collect() }
}
