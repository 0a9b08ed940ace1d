//! DICOM RT Structure Sets (RTSTRUCT): closed planar contours as labels on the voxels of their series.
//!
//! Source: DICOM PS3.3, C.8.8.5 (Structure Set) and C.8.8.6 (ROI Contour). Contours are in mm in the patient; the
//! series has the grid. [`fill`] has the rule for pixels. Not read: points and open contours, contours in other planes
//! than those of slices, colours.

mod fill;
mod place;
mod trace;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use dicom_dictionary_std::{tags, uids};
use dicom_object::InMemDicomObject;

use super::super::label_map::{LabelMap, LabelNames, MAX_RUNS};
use super::super::path::first_names;
use super::super::source::VolumeSource;
use super::super::voxel_set::VoxelSet;
use super::super::voxels::Volume;
use super::numbers::{integer, items, series_uids, shown_name, text, wrong};
use super::object::Object;
use fill::{Polygon, fill};
use place::{Placed, Slices};
use prsmed_base::error::{Error, Result};

pub(super) use write::{RTSTRUCT, check, encoded};

/// What to do about contours whose series is not there.
const WITH_SERIES: &str = "give it as the label map of its DICOM series to `data prepare`, or fill the contours with \
                           another program, for example `dcmrtstruct2nii convert -r RTSTRUCT.dcm -d SERIES -o MASKS` \
                           (PyPI) or `plastimatch convert`, and give a NIfTI mask of the result";
const OWN_SERIES: &str =
    "give the RTSTRUCT of this series, or the series that the contours were drawn on (a folder or zip of DICOM files)";
/// Bytes of a file of which the first have the class of the object.
const START: usize = 4096;
/// Most numbers of a file: 11 million points. The parser needs about 70 bytes for each.
const MAX_NUMBERS: usize = 1 << 25;
/// Most voxels of all labels together.
const MAX_FILLED: usize = 1 << 32;

/// Fails for an RTSTRUCT with more numbers than [`MAX_NUMBERS`], before it is parsed. Backslashes separate numbers.
///
/// # Errors
/// [`Error::Data`].
pub(super) fn check_count(path: &Path, bytes: &[u8]) -> Result<()> {
    let class = uids::RT_STRUCTURE_SET_STORAGE.as_bytes();
    let is_rtstruct = bytes[..bytes.len().min(START)].windows(class.len()).any(|part| part == class);
    if is_rtstruct && bytes.split(|byte| *byte == b'\\').count() > MAX_NUMBERS {
        let reason = format!("it has more than {MAX_NUMBERS} numbers, the most of a DICOM RTSTRUCT that can be read");
        return Err(Error::data(path, reason, "export fewer ROIs, or ROIs with fewer points"));
    }
    Ok(())
}

/// True for the class or the modality of an RTSTRUCT.
pub(super) fn is_rtstruct(object: &Object) -> bool {
    text(object, tags::SOP_CLASS_UID).as_deref() == Some(RTSTRUCT.class)
        || text(object, tags::MODALITY).as_deref() == Some(RTSTRUCT.modality)
}

/// A region of interest with its items of contours.
struct Roi<'a> {
    label: u16,
    /// Its number in the file, for messages.
    number: i64,
    contours: Vec<&'a InMemDicomObject>,
}

/// Reads an RTSTRUCT as labels on the grid of `volume`, the series that the contours were drawn on. Labels are the
/// numbers of the ROIs.
///
/// # Errors
/// [`Error::Data`] with what is wrong and what to do: no volume, one of another frame of reference or another series,
/// and contours that do not lie on its slices.
pub(super) fn read(path: &Path, object: &Object, volume: Option<&Volume>) -> Result<LabelMap> {
    let Some(volume) = volume else {
        let reason = "it is a DICOM RTSTRUCT, whose contours can only be filled on the voxels of their series";
        return Err(Error::data(path, reason, WITH_SERIES));
    };
    check_series(path, object, volume)?;
    let mut notes = Vec::new();
    let (rois, names) = rois(path, object, volume, &mut notes)?;
    let mut slices = Slices::new(path, &volume.grid)?;
    let (mut sets, mut num_filled, mut num_runs, mut empty) = (Vec::new(), 0_usize, 0_usize, Vec::new());
    for roi in &rois {
        let set = filled(path, roi, &mut slices)?;
        num_filled = num_filled.saturating_add(set.len());
        num_runs += set.num_runs();
        if num_filled > MAX_FILLED || num_runs > MAX_RUNS {
            return Err(Error::data(path, "its ROIs have too many voxels together", "export fewer ROIs"));
        }
        if set.is_empty() && !roi.contours.is_empty() {
            empty.push(roi.number.to_string());
        }
        sets.push((roi.label, set));
    }
    if slices.num_closed == 0 {
        let hint = "give an RTSTRUCT with closed contours (ContourGeometricType CLOSED_PLANAR)";
        return Err(Error::data(path, "it has no closed planar contours", hint));
    }
    if !empty.is_empty() {
        notes.push(format!("no centre of a voxel is inside the contours of these ROIs: {}", first_names(&empty)));
    }
    notes.extend(slices.notes());
    let mut labels = LabelMap::of_sets(path, &sets, volume.grid.clone(), notes)?;
    labels.names = LabelNames(names);
    labels.frame_of_reference.clone_from(&volume.frame_of_reference);
    Ok(labels)
}

/// The UIDs of the series that the contours refer to.
pub(super) fn series(object: &Object) -> Vec<String> {
    let frames = items(object, tags::REFERENCED_FRAME_OF_REFERENCE_SEQUENCE).iter();
    let studies = frames.flat_map(|frame| items(frame, tags::RT_REFERENCED_STUDY_SEQUENCE));
    studies.flat_map(|study| series_uids(items(study, tags::RT_REFERENCED_SERIES_SEQUENCE))).collect()
}

/// Refuses a volume without a frame of reference, and another series than those that the contours refer to.
fn check_series(path: &Path, object: &Object, volume: &Volume) -> Result<()> {
    if volume.frame_of_reference.is_none() {
        let reason = "it is a DICOM RTSTRUCT, and its volume has no frame of reference, as a DICOM series has: whether \
                      the contours were drawn on it cannot be checked";
        return Err(Error::data(path, reason, OWN_SERIES));
    }
    let (Some(own), uids) = (volume.series(), series(object)) else { return Ok(()) };
    if uids.is_empty() || uids.iter().any(|uid| uid == own) {
        return Ok(());
    }
    Err(Error::data(path, "its contours were drawn on another series than this one", OWN_SERIES))
}

/// The numbers of ROIs, and whether they can be labels.
fn numbers(rois: &[InMemDicomObject]) -> (Vec<Option<i64>>, bool) {
    let numbers: Vec<Option<i64>> = rois.iter().map(|roi| integer(roi, tags::ROI_NUMBER)).collect();
    let are_labels = numbers.iter().flatten().all(|number| (1..=i64::from(u16::MAX)).contains(number));
    (numbers, are_labels)
}

/// The names of all labels: of the numbers of ROIs, or of 1, 2, ...
pub(super) fn names(object: &Object) -> BTreeMap<u16, String> {
    let rois = items(object, tags::STRUCTURE_SET_ROI_SEQUENCE);
    let (numbers, are_labels) = numbers(rois);
    let of = |((roi, number), place): ((&InMemDicomObject, Option<i64>), i64)| {
        let label = if are_labels { number? } else { place };
        Some((u16::try_from(label).ok()?, shown_name(roi, tags::ROI_NAME)?))
    };
    rois.iter().zip(numbers).zip(1..).filter_map(of).collect()
}

/// The images of the volume, if the file was drawn on several series.
fn own_images<'a>(object: &Object, volume: &'a Volume) -> Option<BTreeSet<&'a str>> {
    let VolumeSource::Dicom(references) = &volume.source else { return None };
    let is_of_several = series(object).into_iter().collect::<BTreeSet<_>>().len() > 1;
    is_of_several.then(|| references.instances.iter().map(|instance| instance.uid.as_str()).collect())
}

/// True for contours that name their images, of which none is among `own`.
fn is_elsewhere(contours: &[&InMemDicomObject], own: &BTreeSet<&str>) -> bool {
    let images = contours.iter().flat_map(|contour| items(contour, tags::CONTOUR_IMAGE_SEQUENCE));
    let mut uids = images.filter_map(|image| text(image, tags::REFERENCED_SOP_INSTANCE_UID)).peekable();
    uids.peek().is_some() && uids.all(|uid| !own.contains(uid.as_str()))
}

type Rois<'a> = (Vec<Roi<'a>>, BTreeMap<u16, String>);

/// The ROIs in the frame of reference of the volume, and their names.
fn rois<'a>(path: &Path, object: &'a Object, volume: &Volume, notes: &mut Vec<String>) -> Result<Rois<'a>> {
    let usual = items(object, tags::REFERENCED_FRAME_OF_REFERENCE_SEQUENCE).first().map_or(&**object, |item| item);
    let usual = text(usual, tags::FRAME_OF_REFERENCE_UID);
    let mut contours: BTreeMap<i64, Vec<&InMemDicomObject>> = BTreeMap::new();
    for roi in items(object, tags::ROI_CONTOUR_SEQUENCE) {
        let number = integer(roi, tags::REFERENCED_ROI_NUMBER);
        let number = number.ok_or_else(|| wrong(path, "contours have no valid ReferencedROINumber"))?;
        contours.entry(number).or_default().extend(items(roi, tags::CONTOUR_SEQUENCE));
    }
    let all = items(object, tags::STRUCTURE_SET_ROI_SEQUENCE);
    let (numbers, are_labels) = numbers(all);
    if !are_labels {
        let note = "numbers of ROIs are not all from 1 to 65535: their labels are 1, 2, ... in the order of the file";
        notes.push(note.to_owned());
    }
    let (mut rois, mut names, mut foreign, mut seen) = (Vec::new(), BTreeMap::new(), Vec::new(), BTreeSet::new());
    let (mut elsewhere, own_images) = (Vec::new(), own_images(object, volume));
    for ((roi, number), place) in all.iter().zip(numbers).zip(1..) {
        let number = number.ok_or_else(|| wrong(path, "an ROI has no valid ROINumber"))?;
        let own = text(roi, tags::REFERENCED_FRAME_OF_REFERENCE_UID).or_else(|| usual.clone());
        let own = own.ok_or_else(|| wrong(path, format!("ROI {number} has no frame of reference")))?;
        let contours = contours.remove(&number).unwrap_or_default();
        if volume.frame_of_reference.as_ref().is_none_or(|uid| uid.0 != own) {
            foreign.push(number.to_string());
            continue;
        }
        if own_images.as_ref().is_some_and(|own| is_elsewhere(&contours, own)) {
            elsewhere.push(number.to_string());
            continue;
        }
        let label = u16::try_from(if are_labels { number } else { place });
        let label = label.map_err(|_| wrong(path, "it has more than 65535 ROIs"))?;
        if !seen.insert(number) {
            return Err(wrong(path, format!("two ROIs have the number {number}")));
        }
        names.extend(shown_name(roi, tags::ROI_NAME).map(|name| (label, name)));
        rois.push(Roi { label, number, contours });
    }
    if let Some(number) = contours.into_keys().next() {
        return Err(wrong(
            path,
            format!("it has contours of ROI {number}, which StructureSetROISequence does not have"),
        ));
    }
    if rois.is_empty() && !foreign.is_empty() {
        let reason =
            "it has another frame of reference than the series: its positions are those of another examination";
        return Err(Error::data(path, reason, OWN_SERIES));
    }
    if !foreign.is_empty() {
        notes.push(format!("ROIs of another frame of reference were left out: {}", first_names(&foreign)));
    }
    if !elsewhere.is_empty() {
        notes.push(format!("ROIs that were drawn on another series were left out: {}", first_names(&elsewhere)));
    }
    Ok((rois, names))
}

/// The voxels inside the contours of an ROI.
fn filled(path: &Path, roi: &Roi, slices: &mut Slices) -> Result<VoxelSet> {
    let mut by_slice: BTreeMap<usize, (f64, Vec<Polygon>)> = BTreeMap::new();
    for (contour, number) in roi.contours.iter().zip(1_usize..) {
        let name = format!("contour {number} of ROI {}", roi.number);
        let Some(Placed { slice, height, polygon }) = slices.place(contour, &name)? else { continue };
        let (first, polygons) = by_slice.entry(slice).or_insert((height, Vec::new()));
        slices.check_plane([*first, height], &name)?;
        polygons.push(polygon);
    }
    if let (Some(first), Some(last)) = (by_slice.keys().next(), by_slice.keys().next_back()) {
        slices.num_gaps += last + 1 - first - by_slice.len();
    }
    let mut set = VoxelSet::default();
    let [width, height, _] = slices.size;
    for (slice, (_, polygons)) in by_slice {
        let runs = fill(&polygons, [width, height]).ok_or_else(|| {
            let reason = format!("ROI {} has too many edges on slice {}", roi.number, slice + 1);
            Error::data(path, reason, "export ROIs with fewer points")
        })?;
        let start = slice * width * height;
        for run in runs {
            set.push_run(start + run.start..start + run.end);
        }
        if set.num_runs() > MAX_RUNS {
            let reason = format!("ROI {} has too many parts", roi.number);
            return Err(Error::data(path, reason, "export ROIs with fewer points"));
        }
    }
    Ok(set)
}
