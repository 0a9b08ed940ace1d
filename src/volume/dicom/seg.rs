//! Writing of DICOM Segmentation objects (SEG): one binary segment for each target, on the slices of a DICOM series.
//!
//! Source: DICOM PS3.3, A.51 and C.8.20 (Segmentation). ContentDate and ContentTime are those of writing.

use std::path::Path;

use dicom_core::value::PrimitiveValue;
use dicom_core::{DataElement, Tag, VR};
use dicom_dictionary_std::{tags, uids};
use dicom_object::InMemDicomObject;
use dicom_object::mem::InMemElement;

use super::super::grid::{swap_lps_ras, unit};
use super::super::source::References;
use super::super::voxels::Volume;
pub use super::derived::SegmentMask;
use super::derived::{Kind, code, decimals, group, image_of_slice, images, item, new_uid, now, sequence, short, text};
use prsmed_base::error::{Error, Result};

pub(super) const SEG: Kind =
    Kind { modality: "SEG", class: uids::SEGMENTATION_STORAGE, syntax: uids::EXPLICIT_VR_LITTLE_ENDIAN };

/// The bytes of segments as a DICOM SEG with the geometry of `volume`, which must come from a DICOM series with positions.
///
/// # Errors
/// [`Error::Shape`] for a mask of another size; [`Error::Data`] for a volume that is not a DICOM series.
pub(super) fn encoded(path: &Path, segments: &[SegmentMask], volume: &Volume) -> Result<Vec<u8>> {
    segments.iter().try_for_each(|segment| volume.grid.check(segment.mask.len()))?;
    let (references, frame_of_reference) = SEG.check(path, volume)?;
    let mut object = SEG.object(references, frame_of_reference);
    put_content(&mut object, references);
    object.put(sequence(tags::SEGMENT_SEQUENCE, segments.iter().zip(1..).map(segment_item)));
    object.extend(image(path, volume)?);
    put_frames(&mut object, segments, volume, references);
    SEG.bytes(object)
}

/// What the object is, and the images that it refers to.
fn put_content(object: &mut InMemDicomObject, references: &References) {
    let [date, clock] = now();
    object.extend([
        text(tags::IMAGE_TYPE, VR::CS, "DERIVED\\PRIMARY"),
        text(tags::CONTENT_DATE, VR::DA, &date),
        text(tags::CONTENT_TIME, VR::TM, &clock),
        text(tags::CONTENT_LABEL, VR::CS, "SEGMENTATION"),
        text(tags::CONTENT_DESCRIPTION, VR::LO, "research use only"),
        text(tags::CONTENT_CREATOR_NAME, VR::PN, ""),
    ]);
    let series = [
        text(tags::SERIES_INSTANCE_UID, VR::UI, &references.series),
        sequence(tags::REFERENCED_INSTANCE_SEQUENCE, images(references)),
    ];
    object.put(group(tags::REFERENCED_SERIES_SEQUENCE, series));
}

/// Image and segmentation attributes.
fn image(path: &Path, volume: &Volume) -> Result<[InMemElement; 10]> {
    let side = |side: usize| {
        u16::try_from(side).map_err(|_| Error::data(path, "the slices are too large for DICOM", "crop the volume"))
    };
    let [columns, rows, _] = volume.grid.size;
    Ok([
        short(tags::SAMPLES_PER_PIXEL, 1),
        text(tags::PHOTOMETRIC_INTERPRETATION, VR::CS, "MONOCHROME2"),
        short(tags::ROWS, side(rows)?),
        short(tags::COLUMNS, side(columns)?),
        short(tags::BITS_ALLOCATED, 1),
        short(tags::BITS_STORED, 1),
        short(tags::HIGH_BIT, 0),
        short(tags::PIXEL_REPRESENTATION, 0),
        text(tags::LOSSY_IMAGE_COMPRESSION, VR::CS, "00"),
        text(tags::SEGMENTATION_TYPE, VR::CS, "BINARY"),
    ])
}

fn segment_item((segment, number): (&SegmentMask, u16)) -> InMemDicomObject {
    let tissue = |sequence| code(sequence, "85756007", "SCT", "Tissue");
    item([
        short(tags::SEGMENT_NUMBER, number),
        text(tags::SEGMENT_LABEL, VR::LO, &segment.label()),
        text(tags::SEGMENT_ALGORITHM_TYPE, VR::CS, "AUTOMATIC"),
        text(tags::SEGMENT_ALGORITHM_NAME, VR::LO, "prsmed"),
        tissue(tags::SEGMENTED_PROPERTY_CATEGORY_CODE_SEQUENCE),
        tissue(tags::SEGMENTED_PROPERTY_TYPE_CODE_SEQUENCE),
    ])
}

/// Functional groups and pixels. Slices without a mask have no frame; an empty segmentation has one empty frame.
fn put_frames(object: &mut InMemDicomObject, segments: &[SegmentMask], volume: &Volume, references: &References) {
    let [width, height, num_slices] = volume.grid.size;
    let mut frames = Vec::new();
    for (segment, number) in segments.iter().zip(1_u32..) {
        let slices = segment.mask.chunks_exact(width * height).enumerate();
        let used = slices.filter(|(_, slice)| slice.iter().any(|value| *value != 0));
        frames.extend(used.map(|(index, slice)| (number, index, slice)));
    }
    let empty = vec![0; width * height];
    if frames.is_empty() && num_slices > 0 {
        frames.push((1, 0, empty.as_slice()));
    }
    object.extend(dimensions(&new_uid()));
    object.put(sequence(tags::SHARED_FUNCTIONAL_GROUPS_SEQUENCE, [shared_groups(volume)]));
    let groups = frames.iter().map(|(number, slice, _)| frame_groups(volume, references, *number, *slice));
    object.put(sequence(tags::PER_FRAME_FUNCTIONAL_GROUPS_SEQUENCE, groups));
    object.put(text(tags::NUMBER_OF_FRAMES, VR::IS, &frames.len().to_string()));
    let bits = pack(frames.iter().flat_map(|(_, _, slice)| slice.iter().map(|value| *value != 0)));
    object.put(DataElement::new(tags::PIXEL_DATA, VR::OB, PrimitiveValue::from(bits)));
}

/// Bits of all frames, the first in the lowest bit, without padding between frames; an even number of bytes.
fn pack(bits: impl Iterator<Item = bool>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (index, bit) in bits.enumerate() {
        if index % 8 == 0 {
            bytes.push(0);
        }
        if let Some(last) = bytes.last_mut() {
            *last |= u8::from(bit) << (index % 8);
        }
    }
    if bytes.len() % 2 == 1 {
        bytes.push(0);
    }
    bytes
}

/// Frames are ordered by segment, then by position.
fn dimensions(organization: &str) -> [InMemElement; 2] {
    let identifier = || text(tags::DIMENSION_ORGANIZATION_UID, VR::UI, organization);
    let pointer = |tag: Tag, to: Tag| DataElement::new(tag, VR::AT, PrimitiveValue::from(to));
    let dimensions = [
        (tags::REFERENCED_SEGMENT_NUMBER, tags::SEGMENT_IDENTIFICATION_SEQUENCE, "Segment Number"),
        (tags::IMAGE_POSITION_PATIENT, tags::PLANE_POSITION_SEQUENCE, "Image Position Patient"),
    ];
    let dimensions = dimensions.map(|(index, group, label)| {
        item([
            identifier(),
            pointer(tags::DIMENSION_INDEX_POINTER, index),
            pointer(tags::FUNCTIONAL_GROUP_POINTER, group),
            text(tags::DIMENSION_DESCRIPTION_LABEL, VR::LO, label),
        ])
    });
    [group(tags::DIMENSION_ORGANIZATION_SEQUENCE, [identifier()]), sequence(tags::DIMENSION_INDEX_SEQUENCE, dimensions)]
}

fn shared_groups(volume: &Volume) -> InMemDicomObject {
    let direction = |axis: usize| unit(swap_lps_ras(volume.grid.affine.step(axis)));
    let [x, y, z] = volume.grid.spacing();
    let orientation = decimals(tags::IMAGE_ORIENTATION_PATIENT, &[direction(0), direction(1)].concat());
    let measures = [
        decimals(tags::SLICE_THICKNESS, &[z]),
        decimals(tags::SPACING_BETWEEN_SLICES, &[z]),
        decimals(tags::PIXEL_SPACING, &[y, x]),
    ];
    item([group(tags::PLANE_ORIENTATION_SEQUENCE, [orientation]), group(tags::PIXEL_MEASURES_SEQUENCE, measures)])
}

fn frame_groups(volume: &Volume, references: &References, number: u32, slice: usize) -> InMemDicomObject {
    let place = u32::try_from(slice + 1).unwrap_or(u32::MAX);
    let indices = PrimitiveValue::U32([number, place].as_slice().into());
    let corner = swap_lps_ras(volume.grid.affine.apply([0.0, 0.0, slice as f64]));
    let segment = short(tags::REFERENCED_SEGMENT_NUMBER, u16::try_from(number).unwrap_or(u16::MAX));
    let mut groups = item([
        group(tags::FRAME_CONTENT_SEQUENCE, [DataElement::new(tags::DIMENSION_INDEX_VALUES, VR::UL, indices)]),
        group(tags::PLANE_POSITION_SEQUENCE, [decimals(tags::IMAGE_POSITION_PATIENT, &corner)]),
        group(tags::SEGMENT_IDENTIFICATION_SEQUENCE, [segment]),
    ]);
    if let Some(instance) = references.instances.get(slice) {
        let mut source = image_of_slice(instance);
        let purpose = "Source image for image processing operation";
        source.put(code(tags::PURPOSE_OF_REFERENCE_CODE_SEQUENCE, "121322", "DCM", purpose));
        source.put(text(tags::SPATIAL_LOCATIONS_PRESERVED, VR::CS, "YES"));
        let derivation = [
            sequence(tags::SOURCE_IMAGE_SEQUENCE, [source]),
            code(tags::DERIVATION_CODE_SEQUENCE, "113076", "DCM", "Segmentation"),
        ];
        groups.put(group(tags::DERIVATION_IMAGE_SEQUENCE, derivation));
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_packed_from_the_lowest() {
        let bits = [true, false, false, true, false, false, false, false, true];
        assert_eq!(pack(bits.into_iter()), [0b1001, 1]);
        assert_eq!(pack([true].into_iter()), [1, 0]);
    }
}
