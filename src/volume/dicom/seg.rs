//! Writing of DICOM Segmentation objects (SEG): one binary segment for each target, on the slices of a DICOM series.
//!
//! Source: DICOM PS3.3, A.51 and C.8.20 (Segmentation). The object refers to its images by their UIDs (study, frame of
//! reference, series, instances), without which no viewer could show it on them. Everything else of the patient and study
//! modules is empty: name, id, sex, dates and accession number. ContentDate and ContentTime
//! are those of writing. An archive files such an object under an empty patient;
//! to store it with its patient, copy PatientName and PatientID from the series, for example with `dcmodify`.

use std::path::Path;

use dicom_core::value::{DataSetSequence, PrimitiveValue};
use dicom_core::{DataElement, Tag, VR};
use dicom_dictionary_std::{tags, uids};
use dicom_object::mem::InMemElement;
use dicom_object::{FileMetaTableBuilder, InMemDicomObject};

use super::super::grid::{swap_lps_ras, unit};
use super::super::source::{Instance, References, Uid, VolumeSource};
use super::super::voxels::Volume;
use prsmed_base::error::{Error, Result};

/// A target of a segmentation.
#[derive(Debug, Clone, Copy)]
pub struct SegmentMask<'a> {
    /// Name for people, for example the question or `liver`.
    pub name: &'a str,
    /// One value for each voxel of the volume; 0 is background.
    pub mask: &'a [u8],
}

/// The UIDs that a SEG of `volume` refers to, and its frame of reference.
///
/// # Errors
/// [`Error::Data`] for a volume that is not a DICOM series with positions.
pub(crate) fn check<'a>(path: &Path, volume: &'a Volume) -> Result<(&'a References, &'a Uid)> {
    let no_series =
        |reason: &str| Error::data(path, reason, "write NIfTI instead: use a name that ends with `.nii.gz`");
    let references = match &volume.source {
        VolumeSource::Dicom(references) => references,
        VolumeSource::Nifti(_) => {
            return Err(no_series("a DICOM SEG refers to DICOM images, and the volume is a NIfTI file"));
        }
        VolumeSource::Other => return Err(no_series("a DICOM SEG refers to DICOM images, which the volume is not")),
    };
    let no_place = || no_series("a DICOM SEG needs positions in the patient, and the image has none");
    Ok((references, volume.frame_of_reference.as_ref().ok_or_else(no_place)?))
}

/// The bytes of segments as a DICOM SEG with the geometry of `volume`, which must come from a DICOM series with positions.
///
/// # Errors
/// [`Error::Shape`] for a mask of another size; [`Error::Data`] for a volume that is not a DICOM series.
pub fn encoded(path: &Path, segments: &[SegmentMask], volume: &Volume) -> Result<Vec<u8>> {
    segments.iter().try_for_each(|segment| volume.grid.check(segment.mask.len()))?;
    let (references, frame_of_reference) = check(path, volume)?;
    let instance = new_uid();
    let mut object = item([
        text(tags::FRAME_OF_REFERENCE_UID, VR::UI, &frame_of_reference.0),
        sequence(tags::SEGMENT_SEQUENCE, segments.iter().zip(1..).map(segment_item)),
    ]);
    put_modules(&mut object, &instance, references);
    object.extend(image(path, volume)?);
    put_frames(&mut object, segments, volume, references);
    let meta = FileMetaTableBuilder::new()
        .transfer_syntax(uids::EXPLICIT_VR_LITTLE_ENDIAN)
        .media_storage_sop_class_uid(uids::SEGMENTATION_STORAGE)
        .media_storage_sop_instance_uid(instance);
    let mut bytes = Vec::new();
    let written = object.with_meta(meta).map_err(|error| internal(&error))?.write_all(&mut bytes);
    written.map(|()| bytes).map_err(|error| internal(&error))
}

fn internal(error: &dyn std::error::Error) -> Error {
    Error::Internal { reason: format!("the DICOM SEG cannot be encoded: {error}") }
}

/// A UID from a random number (PS3.5, B.2).
fn new_uid() -> String {
    format!("2.25.{}", rand::random::<u128>())
}

/// A data set, or an item of a sequence.
fn item<const N: usize>(elements: [InMemElement; N]) -> InMemDicomObject {
    InMemDicomObject::from_element_iter(elements)
}

fn text(tag: Tag, vr: VR, text: &str) -> InMemElement {
    DataElement::new(tag, vr, PrimitiveValue::from(text))
}

fn short(tag: Tag, value: u16) -> InMemElement {
    DataElement::new(tag, VR::US, PrimitiveValue::from(value))
}

/// Numbers as decimal strings of at most 16 characters.
fn decimals(tag: Tag, numbers: &[f64]) -> InMemElement {
    let texts: Vec<String> = numbers.iter().map(|number| decimal(*number)).collect();
    text(tag, VR::DS, &texts.join("\\"))
}

fn sequence(tag: Tag, items: impl IntoIterator<Item = InMemDicomObject>) -> InMemElement {
    DataElement::new(tag, VR::SQ, DataSetSequence::from(items.into_iter().collect::<Vec<_>>()))
}

/// A sequence with one item of these elements.
fn group<const N: usize>(tag: Tag, elements: [InMemElement; N]) -> InMemElement {
    sequence(tag, [item(elements)])
}

fn decimal(number: f64) -> String {
    let exact = format!("{number}");
    if exact.len() <= 16 {
        return exact;
    }
    let fixed = (0..=14).rev().map(|digits| format!("{number:.digits$}")).find(|text| text.len() <= 16);
    let scientific = format!("{number:.8e}");
    // small numbers lose digits in the fixed form
    fixed.filter(|_| number.abs() >= 1e-3 || number.abs() < 1e-12).unwrap_or(scientific)
}

fn code(sequence: Tag, value: &str, scheme: &str, meaning: &str) -> InMemElement {
    let scheme = text(tags::CODING_SCHEME_DESIGNATOR, VR::SH, scheme);
    group(sequence, [text(tags::CODE_VALUE, VR::SH, value), scheme, text(tags::CODE_MEANING, VR::LO, meaning)])
}

/// Patient, study, series, equipment, references. Attributes of the patient and study are empty.
fn put_modules(object: &mut InMemDicomObject, instance: &str, references: &References) {
    let now = time::OffsetDateTime::now_utc();
    let (date, clock) = (now.date(), now.time());
    let date = format!("{:04}{:02}{:02}", date.year(), u8::from(date.month()), date.day());
    let clock = format!("{:02}{:02}{:02}", clock.hour(), clock.minute(), clock.second());
    let series = new_uid();
    let texts: [(Tag, VR, &str); 30] = [
        (tags::SPECIFIC_CHARACTER_SET, VR::CS, "ISO_IR 192"),
        (tags::IMAGE_TYPE, VR::CS, "DERIVED\\PRIMARY"),
        (tags::SOP_CLASS_UID, VR::UI, uids::SEGMENTATION_STORAGE),
        (tags::SOP_INSTANCE_UID, VR::UI, instance),
        (tags::STUDY_DATE, VR::DA, ""),
        (tags::STUDY_TIME, VR::TM, ""),
        (tags::CONTENT_DATE, VR::DA, &date),
        (tags::CONTENT_TIME, VR::TM, &clock),
        (tags::ACCESSION_NUMBER, VR::SH, ""),
        (tags::MODALITY, VR::CS, "SEG"),
        (tags::MANUFACTURER, VR::LO, "prsmed"),
        (tags::REFERRING_PHYSICIAN_NAME, VR::PN, ""),
        (tags::MANUFACTURER_MODEL_NAME, VR::LO, "prsmed"),
        (tags::PATIENT_NAME, VR::PN, ""),
        (tags::PATIENT_ID, VR::LO, ""),
        (tags::PATIENT_BIRTH_DATE, VR::DA, ""),
        (tags::PATIENT_SEX, VR::CS, ""),
        (tags::PATIENT_IDENTITY_REMOVED, VR::CS, "YES"),
        (tags::DEIDENTIFICATION_METHOD, VR::LO, "patient and study attributes are not copied"),
        (tags::DEVICE_SERIAL_NUMBER, VR::LO, "0"),
        (tags::SOFTWARE_VERSIONS, VR::LO, env!("CARGO_PKG_VERSION")),
        (tags::STUDY_INSTANCE_UID, VR::UI, &references.study),
        (tags::SERIES_INSTANCE_UID, VR::UI, &series),
        (tags::STUDY_ID, VR::SH, ""),
        (tags::SERIES_NUMBER, VR::IS, "1"),
        (tags::INSTANCE_NUMBER, VR::IS, "1"),
        (tags::POSITION_REFERENCE_INDICATOR, VR::LO, ""),
        (tags::CONTENT_LABEL, VR::CS, "SEGMENTATION"),
        (tags::CONTENT_DESCRIPTION, VR::LO, "research use only"),
        (tags::CONTENT_CREATOR_NAME, VR::PN, ""),
    ];
    for (tag, vr, value) in texts {
        object.put(text(tag, vr, value));
    }
    let mut instances: Vec<&Instance> = references.instances.iter().collect();
    instances.dedup_by(|next, last| next.uid == last.uid);
    let instances = instances.into_iter().map(|instance| item(reference(instance)));
    let series = [
        text(tags::SERIES_INSTANCE_UID, VR::UI, &references.series),
        sequence(tags::REFERENCED_INSTANCE_SEQUENCE, instances),
    ];
    object.put(group(tags::REFERENCED_SERIES_SEQUENCE, series));
}

fn reference(instance: &Instance) -> [InMemElement; 2] {
    let class = text(tags::REFERENCED_SOP_CLASS_UID, VR::UI, &instance.class);
    [class, text(tags::REFERENCED_SOP_INSTANCE_UID, VR::UI, &instance.uid)]
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
    // a backslash separates values
    let name: String =
        segment.name.chars().filter(|c| !c.is_control()).map(|c| if c == '\\' { '/' } else { c }).collect();
    let label: String = name.trim().chars().take(64).collect();
    let tissue = |sequence| code(sequence, "85756007", "SCT", "Tissue");
    item([
        short(tags::SEGMENT_NUMBER, number),
        text(tags::SEGMENT_LABEL, VR::LO, if label.is_empty() { "target" } else { &label }),
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
        let mut source = item(reference(instance));
        source.extend(instance.frame.map(|frame| text(tags::REFERENCED_FRAME_NUMBER, VR::IS, &frame.to_string())));
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
    fn decimal_strings_have_at_most_16_characters() {
        for (number, text) in [(0.0, "0"), (-3.0, "-3"), (0.976_562, "0.976562"), (1.0 / 3.0, "0.33333333333333")] {
            assert_eq!(decimal(number), text);
        }
        for number in [
            -123.456_789_012_345,
            1e-7 / 3.0,
            -6.123_233_995_736_766e-17,
            12_345_678_901_234.567,
            -0.000_123_456_789_01,
        ] {
            let text = decimal(number);
            let error = (text.parse::<f64>().unwrap() - number).abs();
            assert!(text.len() <= 16 && error <= 1e-8 * number.abs() + 1e-13, "{number}: {text}");
        }
    }

    #[test]
    fn bits_are_packed_from_the_lowest() {
        let bits = [true, false, false, true, false, false, false, false, true];
        assert_eq!(pack(bits.into_iter()), [0b1001, 1]);
        assert_eq!(pack([true].into_iter()), [1, 0]);
    }
}
