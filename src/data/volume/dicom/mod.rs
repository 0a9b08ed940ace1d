//! DICOM images: one file, a folder of files, or a zip of them.
//!
//! Source: DICOM PS3.3 (image modules), PS3.5 (encoding); dicom-rs parses and decodes. Transfer syntaxes that can be read
//! are listed in `syntax.rs`. Not read: modality lookup tables, floating-point pixels, segmented palettes, videos.
//! Graphic overlays (groups 60xx) and windows that are lookup tables are ignored.

mod archive;
mod header;
mod object;
mod pixels;
pub mod seg;
pub(crate) mod segments;
mod series;
mod structure;
mod syntax;

use std::collections::BTreeSet;
use std::path::Path;

pub(crate) use archive::is_zip;
pub(crate) use structure::is_dicom;

use super::source::{Instance, References, Source, Uid};
use super::voxels::{Volume, VoxelBuilder, Voxels};
use crate::error::{Error, Result};
use archive::Container;
use header::{Header, Photometric};
use object::parse;
use pixels::Pixels;
use series::{Entry, Layout, Slice};

/// Reads a series, or an image. `selected` is the number of a series of a folder or zip, or of a frame of a file.
///
/// # Errors
/// [`Error::Data`] with what is wrong and what to do; [`Error::Io`].
pub(crate) fn open(path: &Path, selected: Option<u32>) -> Result<Volume> {
    let mut container = Container::open(path)?;
    let mut num_others = 0;
    let mut entries = Vec::new();
    for index in 0..container.len() {
        let (name, bytes) = container.read(index)?;
        if !is_dicom(&bytes) && container.is_group() {
            num_others += 1;
            continue;
        }
        match Header::read(&name, &parse(&name, &bytes, true)?)? {
            Some(header) => entries.push(Entry { index, name, header }),
            None => num_others += 1,
        }
    }
    let is_group = container.is_group();
    if entries.is_empty() {
        let reason = if is_group { "it has no DICOM images" } else { "it is a DICOM file without an image" };
        let hint = "give an image, a folder or zip with the images of one series, or a NIfTI file";
        return Err(Error::data(path, reason, hint));
    }
    let entries = if is_group { series::choose(path, entries, selected)? } else { entries };
    let mut layout = series::arrange(path, &entries, if is_group { None } else { selected })?;
    if num_others > 0 {
        layout.notes.push(format!("{num_others} files that are not images of this kind were skipped"));
    }
    let instances: BTreeSet<&str> = entries.iter().map(|entry| entry.header.instance.as_str()).collect();
    if instances.len() < entries.len() {
        let note = "several files have the same SOPInstanceUID, a fault of their de-identification: the frames of a DICOM \
                    SEG of this series have positions, but cannot refer to single slices";
        layout.notes.push(note.to_owned());
    }
    assemble(path, &mut container, &entries, layout)
}

/// Decodes the slices in their order.
fn assemble(path: &Path, container: &mut Container, entries: &[Entry], layout: Layout) -> Result<Volume> {
    let Layout { slices, grid, notes } = layout;
    let mut voxels = Builder::new(&entries[slices[0].entry].header, grid.num_voxels());
    let mut at = 0;
    while at < slices.len() {
        // neighbouring slices of one file are decoded together
        let entry = slices[at].entry;
        let count = slices[at..].iter().take_while(|slice| slice.entry == entry).count();
        let Entry { index, name, header } = &entries[entry];
        let (_, bytes) = container.read(*index)?;
        let mut object = parse(name, &bytes, false)?;
        drop(bytes);
        pixels::mark_rgb(&mut object, &header.pixels);
        let pixels = Pixels::new(name, &object, &header.pixels, header.frames.len())?;
        for slice in &slices[at..at + count] {
            voxels.add(&pixels, header, slice.frame)?;
        }
        at += count;
    }
    let first = &entries[slices[0].entry].header;
    let frame = &first.frames[slices[0].frame];
    let is_8_bit = first.pixels.bits_stored <= 8 && frame.slope == 1.0 && frame.intercept == 0.0;
    let voxels = voxels.finish();
    grid.check(voxels.len()).map_err(|error| Error::data(path, error.to_string(), "export the series again"))?;
    Ok(Volume {
        is_8_bit,
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

/// Voxels of slices that are added one by one.
enum Builder {
    Grey(VoxelBuilder),
    Colour(Vec<[u8; 3]>),
}

impl Builder {
    fn new(header: &Header, count: usize) -> Self {
        if header.pixels.photometric.is_grey() {
            return Self::Grey(VoxelBuilder::with_capacity(count));
        }
        Self::Colour(Vec::new())
    }

    fn add(&mut self, pixels: &Pixels, header: &Header, frame: usize) -> Result<()> {
        match self {
            Self::Grey(voxels) => {
                let (slope, intercept) = (header.frames[frame].slope, header.frames[frame].intercept);
                pixels.grey(frame)?.into_iter().for_each(|value| voxels.push(f64::from(value) * slope + intercept));
            }
            Self::Colour(voxels) => voxels.extend(pixels.colours(frame)?),
        }
        Ok(())
    }

    fn finish(self) -> Voxels {
        match self {
            Self::Grey(voxels) => voxels.finish(),
            Self::Colour(voxels) => Voxels::Rgb(voxels),
        }
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
