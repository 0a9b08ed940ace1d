//! Reading of DICOM label maps: Segmentation objects (SEG) with binary segments, whose frames may lack empty slices,
//! and RTSTRUCT.
//!
//! Source: DICOM PS3.3, C.8.20. Not read: fractional segmentations, label map segmentations, compressed ones.

use std::collections::BTreeMap;
use std::path::Path;

use dicom_dictionary_std::{tags, uids};
use dicom_object::InMemDicomObject;

use super::super::grid::{Affine, Grid, cross, dot, length, scale, subtract, swap_lps_ras, unit};
use super::super::label_map::{LabelMap, LabelNames, MAX_RUNS};
use super::super::limits::{MAX_FILE, check_size};
use super::super::source::Uid;
use super::super::voxel_set::VoxelSet;
use super::super::voxels::Volume;
use super::header::Groups;
use super::numbers::{items, series_uids, shown_name, text};
use super::object::{Object, parse};
use super::rtstruct;
use super::series::placed;
use super::syntax;
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

const HINT: &str = "convert it to a NIfTI label map, for example with dcmqi's `segimage2itkimage`";
/// Most frames of a file.
const MAX_FRAMES: i64 = 1 << 16;

/// Segment and position of a frame.
struct Frame {
    segment: u16,
    position: [f64; 3],
}

/// Reads a SEG, or an RTSTRUCT on the grid of `volume`.
///
/// # Errors
/// [`Error::Data`] with what is wrong and what to do; [`Error::Io`].
pub(crate) fn read(path: &Path, volume: Option<&Volume>) -> Result<LabelMap> {
    let bytes = files::read(path, MAX_FILE).map_err(Error::io(path, "read"))?;
    rtstruct::check_count(path, &bytes)?;
    let (object, encoding) = parse(path, &bytes)?;
    drop(bytes);
    let mut labels =
        if rtstruct::is_rtstruct(&object) { rtstruct::read(path, &object, volume)? } else { read_seg(path, &object)? };
    let of = series_uids(items(&object, tags::REFERENCED_SERIES_SEQUENCE));
    if !of.is_empty() && volume.and_then(Volume::series).is_some_and(|series| !of.iter().any(|uid| uid == series)) {
        let note = "it says that it was drawn on another series; only the positions of both were compared";
        labels.notes.push(note.to_owned());
    }
    labels.notes.splice(0..0, encoding.map(str::to_owned));
    Ok(labels)
}

/// The number of the segment for each voxel. The grid is from the first to the last frame, a part of the series.
fn read_seg(path: &Path, object: &Object) -> Result<LabelMap> {
    let wrong = |reason: &str| Error::data(path, reason, HINT);
    if text(object, tags::MODALITY).as_deref() != Some("SEG") {
        return Err(other_kind(path, object));
    }
    if text(object, tags::SEGMENTATION_TYPE).as_deref() != Some("BINARY") {
        return Err(wrong("it is a DICOM SEG with fractions or labels; binary segments can be read"));
    }
    if !syntax::is_native(object.meta().transfer_syntax()) {
        return Err(Error::data(path, "it is a compressed DICOM SEG", "decompress it first: `gdcmconv --raw IN OUT`"));
    }
    let side = |tag| object.get(tag).and_then(|element| element.to_int::<u16>().ok()).map(usize::from);
    let (Some(width), Some(height)) = (side(tags::COLUMNS), side(tags::ROWS)) else {
        return Err(wrong("its header has no size"));
    };
    let count = object.get(tags::NUMBER_OF_FRAMES).and_then(|element| element.to_int::<i64>().ok()).unwrap_or(1);
    let count = usize::try_from(count.clamp(0, MAX_FRAMES)).unwrap_or(0);
    check_size(path, [width, height, count])?;
    let (frames, grid) = arrange(path, object, [width, height, count])?;
    let pixels = object.get(tags::PIXEL_DATA).and_then(|element| element.to_bytes().ok());
    let pixels = pixels.filter(|pixels| pixels.len() >= (width * height * count).div_ceil(8));
    let Some(pixels) = pixels else { return Err(wrong("it is truncated: frames have no pixels")) };
    let sets = sets(path, &frames, &pixels, grid.size)?;
    let frame_of_reference = text(object, tags::FRAME_OF_REFERENCE_UID).map(Uid);
    let labels = LabelMap::of_sets(path, &sets, grid, Vec::new())?;
    Ok(LabelMap { names: LabelNames(names(object)), is_part: true, frame_of_reference, ..labels })
}

/// Class and modality of objects that are no SEG, and what they are. A space stands for several classes.
const KINDS: [(&str, &str, &str); 5] = [
    (uids::RT_DOSE_STORAGE, "RTDOSE", "a DICOM RTDOSE with doses"),
    (uids::RT_PLAN_STORAGE, "RTPLAN", "a DICOM RTPLAN"),
    (uids::SURFACE_SEGMENTATION_STORAGE, "", "a DICOM surface segmentation"),
    (" ", "SR", "a DICOM report (SR)"),
    (" ", "PR", "a DICOM presentation state (PR)"),
];

/// The error of an object that is no SEG: its kind, and what to do about it.
fn other_kind(path: &Path, object: &Object) -> Error {
    let class = text(object, tags::SOP_CLASS_UID).unwrap_or_default();
    let modality = text(object, tags::MODALITY).unwrap_or_default();
    let is_of = |(uid, code, _): &&(&str, &str, &str)| *uid == class || *code == modality;
    let kind = match KINDS.iter().find(is_of) {
        Some(&(.., kind)) => kind,
        None if object.get(tags::ROWS).is_some() => "a DICOM image",
        None => "a DICOM file",
    };
    let hint = "give a DICOM SEG, or a NIfTI label map (`.nii`, `.nii.gz`) on the grid of the volume";
    Error::data(path, format!("it is {kind}, not a segmentation (SEG)"), hint)
}

/// The voxels of each segment. At most one bit of a frame is read for each.
fn sets(
    path: &Path,
    frames: &[(Frame, usize)],
    pixels: &[u8],
    [width, height, _]: [usize; 3],
) -> Result<Vec<(u16, VoxelSet)>> {
    let area = width * height;
    let numbered = frames.iter().enumerate();
    let mut order: Vec<_> = numbered.map(|(index, (frame, slice))| (frame.segment, *slice, index)).collect();
    order.sort_unstable();
    let (mut sets, mut num_runs) = (Vec::new(), 0);
    for of_segment in order.chunk_by(|a, b| a.0 == b.0) {
        let mut set = VoxelSet::default();
        for of_slice in of_segment.chunk_by(|a, b| a.1 == b.1) {
            let start = of_slice[0].1 * area;
            let is_set = |bit: usize| pixels[bit / 8] >> (bit % 8) & 1 == 1;
            let is_in = |pixel: &usize| of_slice.iter().any(|(.., index)| is_set(index * area + pixel));
            (0..area).filter(is_in).for_each(|pixel| set.push(start + pixel));
            if num_runs + set.num_runs() > MAX_RUNS {
                return Err(Error::data(path, "its segments have too many parts", HINT));
            }
        }
        num_runs += set.num_runs();
        sets.push((of_segment[0].0, set));
    }
    Ok(sets)
}

pub(super) fn names(object: &Object) -> BTreeMap<u16, String> {
    let name = |item: &InMemDicomObject| {
        let number = item.get(tags::SEGMENT_NUMBER)?.to_int::<u16>().ok()?;
        Some((number, shown_name(item, tags::SEGMENT_LABEL)?))
    };
    items(object, tags::SEGMENT_SEQUENCE).iter().filter_map(name).collect()
}

/// The frames with their slices, and the grid from the first to the last slice.
fn arrange(path: &Path, object: &Object, [width, height, count]: [usize; 3]) -> Result<(Vec<(Frame, usize)>, Grid)> {
    let wrong = |reason: &str| Error::data(path, reason, HINT);
    let groups = Groups::new(path, object);
    let mut frames = Vec::with_capacity(count);
    let mut plane = None;
    for frame in 0..count {
        let found = groups.frame(frame)?;
        let segment = groups.number(frame, tags::SEGMENT_IDENTIFICATION_SEQUENCE, tags::REFERENCED_SEGMENT_NUMBER);
        let (Some((position, row, column)), Some(segment)) = (placed(&found), segment) else {
            return Err(wrong("its frames have no positions or no segment numbers"));
        };
        let (first_row, first_column, ..) = *plane.get_or_insert((row, column, found.spacing, found.thickness));
        if length(subtract(row, first_row)) > 1e-3 || length(subtract(column, first_column)) > 1e-3 {
            return Err(wrong("its frames have different orientations"));
        }
        let segment = u16::try_from(segment).map_err(|_| wrong("a segment number is wrong"))?;
        frames.push(Frame { segment, position });
    }
    let Some((row, column, Some([x, y]), thickness)) = plane else { return Err(wrong("it has no frames")) };
    let normal = unit(cross(row, column));
    let heights: Vec<f64> = frames.iter().map(|frame| dot(frame.position, normal)).collect();
    let (low, high) = heights.iter().fold((f64::MAX, f64::MIN), |(low, high), at| (low.min(*at), high.max(*at)));
    let gap = gap(&heights, thickness.ok().flatten());
    let slice_of = |at: f64| ((at - low) / gap).round();
    if heights.iter().any(|at| ((at - low) / gap - slice_of(*at)).abs() > 0.1) {
        return Err(wrong("its frames are unevenly spaced"));
    }
    let last = slice_of(high);
    if last > f64::from(u16::MAX) {
        return Err(wrong("its frames are too far apart"));
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 65535")]
    let frames: Vec<(Frame, usize)> =
        frames.into_iter().zip(&heights).map(|(frame, at)| (frame, slice_of(*at) as usize)).collect();
    let by_slice = |frame: &&(Frame, usize)| frame.1;
    let (Some(bottom), Some(top)) = (frames.iter().min_by_key(by_slice), frames.iter().max_by_key(by_slice)) else {
        return Err(wrong("it has no frames"));
    };
    // along the stack, which is oblique to the slices for a tilted gantry
    let step = match top.1 {
        0 => scale(normal, gap),
        slices => scale(subtract(top.0.position, bottom.0.position), 1.0 / slices as f64),
    };
    let size = [width, height, top.1 + 1];
    check_size(path, size)?;
    let steps = [scale(row, x), scale(column, y), step].map(swap_lps_ras);
    let affine = Affine::from_columns(steps, swap_lps_ras(bottom.0.position));
    Ok((frames, Grid { size, affine }))
}

/// Distance of the slices: as the header says if all positions are multiples of it, else the smallest distance.
fn gap(heights: &[f64], stated: Option<f64>) -> f64 {
    let mut sorted = heights.to_vec();
    sorted.sort_by(f64::total_cmp);
    let distances = sorted.windows(2).map(|pair| pair[1] - pair[0]).filter(|distance| *distance > 1e-3);
    let smallest = distances.fold(f64::MAX, f64::min);
    let is_multiple = |gap: &f64| {
        sorted.iter().all(|at| {
            let slices = (at - sorted[0]) / gap;
            (slices - slices.round()).abs() < 0.1
        })
    };
    stated.filter(is_multiple).unwrap_or(if smallest < f64::MAX { smallest } else { 1.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distance_of_slices_is_found() {
        let near = |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-9, "{found}");
        // slices are missing: the stated distance holds
        near(gap(&[0.0, 9.0, 3.0, 3.0], Some(3.0)), 3.0);
        // a slice thickness that is no distance
        near(gap(&[0.0, 9.0, 3.0], Some(5.0)), 3.0);
        near(gap(&[4.0, 4.0], None), 1.0);
    }
}
