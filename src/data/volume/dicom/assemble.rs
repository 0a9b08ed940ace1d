//! Volumes from the slices of a series: decoded values, and what the header says about showing them.

use std::path::Path;

use super::super::display::{Curve, Display};
use super::super::modality::Modality;
use super::super::source::{Instance, References, Source, Uid};
use super::super::voxel_set::VoxelSet;
use super::super::voxels::{Volume, VoxelBuilder, Voxels};
use super::archive::Container;
use super::header::{Frame, Header, Photometric};
use super::numbers::DAMAGED;
use super::object::parse;
use super::pixels::{self, Pixels};
use super::series::{Entry, Layout, Slice};
use crate::error::{Error, Result};

/// Hounsfield units of air, with the noise of a scan. Body images have much more of it than [`AIR_FRAC`].
const AIR: std::ops::RangeInclusive<f32> = -1100.0..=-500.0;
const AIR_FRAC: f64 = 0.01;

/// Decodes the slices in their order.
pub(super) fn assemble(path: &Path, container: &mut Container, entries: &[Entry], layout: Layout) -> Result<Volume> {
    let Layout { slices, grid, mut notes } = layout;
    check_rescale(entries, &slices)?;
    let first = &entries[slices[0].entry].header;
    let frame = &first.frames[slices[0].frame];
    let mut builder = Builder::new(first, grid.num_voxels());
    let mut at = 0;
    while at < slices.len() {
        // neighbouring slices of one file are decoded together
        let entry = slices[at].entry;
        let count = slices[at..].iter().take_while(|slice| slice.entry == entry).count();
        let Entry { index, name, header, .. } = &entries[entry];
        let (_, bytes) = container.read(*index)?;
        let (mut object, _) = parse(name, &bytes, false)?;
        drop(bytes);
        pixels::mark_rgb(&mut object, &header.pixels);
        let pixels = Pixels::new(name, &object, &header.pixels, header.frames.len())?;
        for slice in &slices[at..at + count] {
            builder.add(&pixels, header, slice.frame)?;
        }
        at += count;
    }
    let (voxels, padding) = builder.finish();
    grid.check(voxels.len()).map_err(|error| Error::data(path, error.to_string(), "export the series again"))?;
    Ok(Volume {
        is_8_bit: first.pixels.bits_stored <= 8 && frame.slope() == 1.0 && frame.intercept() == 0.0,
        display: display(first, frame, &voxels, padding, &mut notes),
        voxels,
        modality: first.modality.clone(),
        windows: frame.windows.clone(),
        inverted: first.pixels.photometric == Photometric::Monochrome1,
        frame_of_reference: first.frame_of_reference.clone().map(Uid),
        notes,
        source: Source::Dicom(Box::new(references(entries, &slices))),
        grid,
    })
}

/// Refuses slices without a rescale that other slices have: their values would be of another kind.
fn check_rescale(entries: &[Entry], slices: &[Slice]) -> Result<()> {
    for (part, name, neutral) in [(0, "RescaleSlope", 1.0), (1, "RescaleIntercept", 0.0)] {
        let stated = |slice: &Slice| entries[slice.entry].header.frames[slice.frame].rescale[part];
        let Some(example) = slices.iter().find(|slice| stated(slice).is_some_and(|value| value != neutral)) else {
            continue;
        };
        if let Some(slice) = slices.iter().find(|slice| stated(slice).is_none()) {
            let reason = format!(
                "{} has no {name}, and {} has {}",
                entries[slice.entry].of_frame(slice.frame, "it"),
                entries[example.entry].of_frame(example.frame, &entries[example.entry].short),
                stated(example).unwrap_or(neutral),
            );
            return Err(Error::data(&entries[slice.entry].name, reason, DAMAGED));
        }
    }
    Ok(())
}

/// What the header says about showing the values. Adds notes about what is unusual.
fn display(first: &Header, frame: &Frame, voxels: &Voxels, padding: VoxelSet, notes: &mut Vec<String>) -> Display {
    if !first.pixels.photometric.is_grey() {
        return Display::default();
    }
    if !padding.is_empty() {
        let (count, all) = (padding.len(), voxels.len());
        notes.push(format!(
            "{count} of {all} pixels are padding (PixelPaddingValue): they are black, and not part of percentiles"
        ));
    }
    let curve = match &first.table {
        _ if !frame.windows.is_empty() && frame.is_sigmoid => Curve::Sigmoid,
        Some(table) if frame.windows.is_empty() => Curve::Table(table.clone()),
        _ => Curve::Linear,
    };
    if first.table.is_some() && !frame.windows.is_empty() {
        notes.push(
            "the file has a window and a lookup table (VOI LUT) for its grey values; the table is ignored".into(),
        );
    } else if !curve.is_linear() && !first.modality.is_radiograph() {
        let kind = if curve == Curve::Sigmoid { "a sigmoid window" } else { "a lookup table (VOI LUT)" };
        notes.push(format!("the file has {kind} for its grey values, which only the window `file` uses"));
    }
    let not_hounsfield = not_hounsfield(first, frame, voxels, &padding, notes);
    Display { padding, curve, window_fault: frame.window_fault.clone(), not_hounsfield }
}

/// Why the values of a CT are not Hounsfield units.
fn not_hounsfield(
    first: &Header,
    frame: &Frame,
    voxels: &Voxels,
    padding: &VoxelSet,
    notes: &mut Vec<String>,
) -> Option<String> {
    let missing = match frame.rescale {
        [Some(_), Some(_)] => None,
        [None, Some(_)] => Some("RescaleSlope, and 1 is assumed"),
        [Some(_), None] if first.modality != Modality::Ct => Some("RescaleIntercept, and 0 is assumed"),
        _ if first.modality != Modality::Ct => None,
        _ => {
            let of_air = share(voxels, padding, |value| AIR.contains(&value));
            if of_air < AIR_FRAC {
                let reason = "the CT has no RescaleIntercept, and its values are not like Hounsfield units: less than 1 % \
                              of them are those of air";
                notes.push(reason.to_owned());
                return Some(reason.to_owned());
            }
            Some("RescaleIntercept; its values look like Hounsfield units, and are taken for them")
        }
    };
    notes.extend(missing.map(|what| format!("the file has no {what}")));
    let other =
        frame.has_other_unit.then(|| "RescaleType says that the values of the CT are not Hounsfield units".to_owned());
    notes.extend(other.clone());
    other
}

/// The share of the voxels that are not padding.
fn share(voxels: &Voxels, padding: &VoxelSet, is_wanted: impl Fn(f32) -> bool) -> f64 {
    let used = padding.others(voxels.len()).flatten();
    let count = used.filter(|index| voxels.get(*index).is_some_and(&is_wanted)).count();
    count as f64 / (voxels.len() - padding.len()).max(1) as f64
}

/// Voxels of slices that are added one by one.
struct Builder {
    values: Values,
    /// Number of grey values so far.
    count: usize,
    padding: VoxelSet,
}

enum Values {
    Grey(VoxelBuilder),
    Colour(Vec<[u8; 3]>),
}

impl Builder {
    fn new(header: &Header, count: usize) -> Self {
        let is_grey = header.pixels.photometric.is_grey();
        let values =
            if is_grey { Values::Grey(VoxelBuilder::with_capacity(count)) } else { Values::Colour(Vec::new()) };
        Self { values, count: 0, padding: VoxelSet::default() }
    }

    fn add(&mut self, pixels: &Pixels, header: &Header, frame: usize) -> Result<()> {
        match &mut self.values {
            Values::Grey(voxels) => {
                let (slope, intercept) = (header.frames[frame].slope(), header.frames[frame].intercept());
                for value in pixels.grey(frame)? {
                    if header.padding.is_some_and(|[first, last]| (first..=last).contains(&value)) {
                        self.padding.push(self.count);
                    }
                    self.count += 1;
                    // at most 32 bits
                    voxels.push(value as f64 * slope + intercept);
                }
            }
            Values::Colour(voxels) => voxels.extend(pixels.colours(frame)?),
        }
        Ok(())
    }

    fn finish(self) -> (Voxels, VoxelSet) {
        let voxels = match self.values {
            Values::Grey(voxels) => voxels.finish(),
            Values::Colour(voxels) => Voxels::Rgb(voxels),
        };
        (voxels, self.padding)
    }
}

fn references(entries: &[Entry], slices: &[Slice]) -> References {
    let first = &entries[slices[0].entry].header;
    let instances = slices.iter().map(|slice| {
        let header = &entries[slice.entry].header;
        let frame = (header.frames.len() > 1).then(|| u32::try_from(slice.frame + 1).unwrap_or(u32::MAX));
        Instance { uid: header.instance.clone(), class: header.class.clone(), frame }
    });
    References { study: first.study.clone(), series: first.series.clone(), instances: instances.collect() }
}
