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
use dicom_object::{FileMetaTableBuilder, InMemDicomObject};

use super::super::grid::{length, scale, swap_lps_ras};
use super::super::source::{Instance, References, Source, Uid};
use super::super::voxels::Volume;
use prsmed_base::error::{Error, Result};

/// A target of a segmentation.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
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
    let Source::Dicom(references) = &volume.source else {
        return Err(no_series("a DICOM SEG refers to DICOM images, and the volume is a NIfTI file"));
    };
    let frame_of_reference = volume.frame_of_reference.as_ref();
    let frame_of_reference = frame_of_reference
        .ok_or_else(|| no_series("a DICOM SEG needs positions in the patient, and the image has none"))?;
    Ok((references, frame_of_reference))
}

/// The bytes of segments as a DICOM SEG with the geometry of `volume`, which must come from a DICOM series with positions.
///
/// # Errors
/// [`Error::Shape`] for a mask of another size; [`Error::Data`] for a volume that is not a DICOM series.
pub fn encoded(path: &Path, segments: &[Segment], volume: &Volume) -> Result<Vec<u8>> {
    segments.iter().try_for_each(|segment| volume.grid.check(segment.mask.len()))?;
    let (references, frame_of_reference) = check(path, volume)?;
    let instance = new_uid();
    let mut object = InMemDicomObject::new_empty();
    put_modules(&mut object, &instance, references);
    put_text(&mut object, tags::FRAME_OF_REFERENCE_UID, VR::UI, &frame_of_reference.0);
    put_image(&mut object, path, volume)?;
    put_sequence(&mut object, tags::SEGMENT_SEQUENCE, segments.iter().zip(1..).map(segment_item).collect());
    put_frames(&mut object, segments, volume, references);
    let meta = FileMetaTableBuilder::new()
        .transfer_syntax(uids::EXPLICIT_VR_LITTLE_ENDIAN)
        .media_storage_sop_class_uid(uids::SEGMENTATION_STORAGE)
        .media_storage_sop_instance_uid(instance);
    let file = object.with_meta(meta).map_err(|error| internal(&error))?;
    let mut bytes = Vec::new();
    file.write_all(&mut bytes).map_err(|error| internal(&error))?;
    Ok(bytes)
}

fn internal(error: &dyn std::error::Error) -> Error {
    Error::Internal { reason: format!("the DICOM SEG cannot be encoded: {error}") }
}

/// A UID from a random number (PS3.5, B.2).
fn new_uid() -> String {
    format!("2.25.{}", rand::random::<u128>())
}

fn put(object: &mut InMemDicomObject, tag: Tag, vr: VR, value: PrimitiveValue) {
    object.put(DataElement::new(tag, vr, value));
}

fn put_text(object: &mut InMemDicomObject, tag: Tag, vr: VR, text: &str) {
    put(object, tag, vr, PrimitiveValue::from(text));
}

fn put_u16(object: &mut InMemDicomObject, tag: Tag, value: u16) {
    put(object, tag, VR::US, PrimitiveValue::from(value));
}

fn put_sequence(object: &mut InMemDicomObject, tag: Tag, items: Vec<InMemDicomObject>) {
    object.put(DataElement::new(tag, VR::SQ, DataSetSequence::from(items)));
}

/// Numbers as decimal strings of at most 16 characters.
fn put_numbers(object: &mut InMemDicomObject, tag: Tag, numbers: &[f64]) {
    let texts: Vec<String> = numbers.iter().map(|number| decimal(*number)).collect();
    put_text(object, tag, VR::DS, &texts.join("\\"));
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

fn code(value: &str, scheme: &str, meaning: &str) -> InMemDicomObject {
    let mut item = InMemDicomObject::new_empty();
    put_text(&mut item, tags::CODE_VALUE, VR::SH, value);
    put_text(&mut item, tags::CODING_SCHEME_DESIGNATOR, VR::SH, scheme);
    put_text(&mut item, tags::CODE_MEANING, VR::LO, meaning);
    item
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
    for (tag, vr, text) in texts {
        put_text(object, tag, vr, text);
    }
    let mut seen: Vec<&str> = Vec::new();
    let mut instances = Vec::new();
    for instance in &references.instances {
        if seen.last() != Some(&instance.uid.as_str()) {
            seen.push(&instance.uid);
            instances.push(reference(instance));
        }
    }
    let mut item = InMemDicomObject::new_empty();
    put_text(&mut item, tags::SERIES_INSTANCE_UID, VR::UI, &references.series);
    put_sequence(&mut item, tags::REFERENCED_INSTANCE_SEQUENCE, instances);
    put_sequence(object, tags::REFERENCED_SERIES_SEQUENCE, vec![item]);
}

fn reference(instance: &Instance) -> InMemDicomObject {
    let mut item = InMemDicomObject::new_empty();
    put_text(&mut item, tags::REFERENCED_SOP_CLASS_UID, VR::UI, &instance.class);
    put_text(&mut item, tags::REFERENCED_SOP_INSTANCE_UID, VR::UI, &instance.uid);
    item
}

/// Image and segmentation attributes.
fn put_image(object: &mut InMemDicomObject, path: &Path, volume: &Volume) -> Result<()> {
    let side = |side: usize| {
        u16::try_from(side).map_err(|_| Error::data(path, "the slices are too large for DICOM", "crop the volume"))
    };
    let [columns, rows, _] = volume.grid.size;
    put_u16(object, tags::SAMPLES_PER_PIXEL, 1);
    put_text(object, tags::PHOTOMETRIC_INTERPRETATION, VR::CS, "MONOCHROME2");
    put_u16(object, tags::ROWS, side(rows)?);
    put_u16(object, tags::COLUMNS, side(columns)?);
    put_u16(object, tags::BITS_ALLOCATED, 1);
    put_u16(object, tags::BITS_STORED, 1);
    put_u16(object, tags::HIGH_BIT, 0);
    put_u16(object, tags::PIXEL_REPRESENTATION, 0);
    put_text(object, tags::LOSSY_IMAGE_COMPRESSION, VR::CS, "00");
    put_text(object, tags::SEGMENTATION_TYPE, VR::CS, "BINARY");
    Ok(())
}

fn segment_item((segment, number): (&Segment, u16)) -> InMemDicomObject {
    // a backslash separates values
    let name: String =
        segment.name.chars().filter(|c| !c.is_control()).map(|c| if c == '\\' { '/' } else { c }).collect();
    let label: String = name.trim().chars().take(64).collect();
    let tissue = || code("85756007", "SCT", "Tissue");
    let mut item = InMemDicomObject::new_empty();
    put_u16(&mut item, tags::SEGMENT_NUMBER, number);
    put_text(&mut item, tags::SEGMENT_LABEL, VR::LO, if label.is_empty() { "target" } else { &label });
    put_text(&mut item, tags::SEGMENT_ALGORITHM_TYPE, VR::CS, "AUTOMATIC");
    put_text(&mut item, tags::SEGMENT_ALGORITHM_NAME, VR::LO, "prsmed");
    put_sequence(&mut item, tags::SEGMENTED_PROPERTY_CATEGORY_CODE_SEQUENCE, vec![tissue()]);
    put_sequence(&mut item, tags::SEGMENTED_PROPERTY_TYPE_CODE_SEQUENCE, vec![tissue()]);
    item
}

/// Functional groups and pixels. Slices without a mask have no frame; an empty segmentation has one empty frame.
fn put_frames(object: &mut InMemDicomObject, segments: &[Segment], volume: &Volume, references: &References) {
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
    let organization = new_uid();
    put_dimensions(object, &organization);
    put_sequence(object, tags::SHARED_FUNCTIONAL_GROUPS_SEQUENCE, vec![shared_groups(volume)]);
    let groups = frames.iter().map(|(number, slice, _)| frame_groups(volume, references, *number, *slice));
    put_sequence(object, tags::PER_FRAME_FUNCTIONAL_GROUPS_SEQUENCE, groups.collect());
    put_text(object, tags::NUMBER_OF_FRAMES, VR::IS, &frames.len().to_string());
    let bits = pack(frames.iter().flat_map(|(_, _, slice)| slice.iter().map(|value| *value != 0)));
    put(object, tags::PIXEL_DATA, VR::OB, PrimitiveValue::from(bits));
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
fn put_dimensions(object: &mut InMemDicomObject, organization: &str) {
    let mut item = InMemDicomObject::new_empty();
    put_text(&mut item, tags::DIMENSION_ORGANIZATION_UID, VR::UI, organization);
    put_sequence(object, tags::DIMENSION_ORGANIZATION_SEQUENCE, vec![item]);
    let dimension = |pointer: Tag, group: Tag, label: &str| {
        let mut item = InMemDicomObject::new_empty();
        put_text(&mut item, tags::DIMENSION_ORGANIZATION_UID, VR::UI, organization);
        put(&mut item, tags::DIMENSION_INDEX_POINTER, VR::AT, PrimitiveValue::from(pointer));
        put(&mut item, tags::FUNCTIONAL_GROUP_POINTER, VR::AT, PrimitiveValue::from(group));
        put_text(&mut item, tags::DIMENSION_DESCRIPTION_LABEL, VR::LO, label);
        item
    };
    let segment = dimension(tags::REFERENCED_SEGMENT_NUMBER, tags::SEGMENT_IDENTIFICATION_SEQUENCE, "Segment Number");
    let position = dimension(tags::IMAGE_POSITION_PATIENT, tags::PLANE_POSITION_SEQUENCE, "Image Position Patient");
    put_sequence(object, tags::DIMENSION_INDEX_SEQUENCE, vec![segment, position]);
}

fn shared_groups(volume: &Volume) -> InMemDicomObject {
    let affine = &volume.grid.affine;
    let unit = |axis: usize| {
        let step = swap_lps_ras(affine.step(axis));
        scale(step, 1.0 / length(step))
    };
    let [x, y, z] = volume.grid.spacing();
    let mut orientation = InMemDicomObject::new_empty();
    put_numbers(&mut orientation, tags::IMAGE_ORIENTATION_PATIENT, &[unit(0), unit(1)].concat());
    let mut measures = InMemDicomObject::new_empty();
    put_numbers(&mut measures, tags::SLICE_THICKNESS, &[z]);
    put_numbers(&mut measures, tags::SPACING_BETWEEN_SLICES, &[z]);
    put_numbers(&mut measures, tags::PIXEL_SPACING, &[y, x]);
    let mut groups = InMemDicomObject::new_empty();
    put_sequence(&mut groups, tags::PLANE_ORIENTATION_SEQUENCE, vec![orientation]);
    put_sequence(&mut groups, tags::PIXEL_MEASURES_SEQUENCE, vec![measures]);
    groups
}

fn frame_groups(volume: &Volume, references: &References, number: u32, slice: usize) -> InMemDicomObject {
    let mut content = InMemDicomObject::new_empty();
    let place = u32::try_from(slice + 1).unwrap_or(u32::MAX);
    let indices = PrimitiveValue::U32([number, place].as_slice().into());
    put(&mut content, tags::DIMENSION_INDEX_VALUES, VR::UL, indices);
    let mut position = InMemDicomObject::new_empty();
    let corner = swap_lps_ras(volume.grid.affine.apply([0.0, 0.0, slice as f64]));
    put_numbers(&mut position, tags::IMAGE_POSITION_PATIENT, &corner);
    let mut segment = InMemDicomObject::new_empty();
    put_u16(&mut segment, tags::REFERENCED_SEGMENT_NUMBER, u16::try_from(number).unwrap_or(u16::MAX));
    let mut groups = InMemDicomObject::new_empty();
    put_sequence(&mut groups, tags::FRAME_CONTENT_SEQUENCE, vec![content]);
    put_sequence(&mut groups, tags::PLANE_POSITION_SEQUENCE, vec![position]);
    put_sequence(&mut groups, tags::SEGMENT_IDENTIFICATION_SEQUENCE, vec![segment]);
    if let Some(instance) = references.instances.get(slice) {
        let mut source = reference(instance);
        if let Some(frame) = instance.frame {
            put_text(&mut source, tags::REFERENCED_FRAME_NUMBER, VR::IS, &frame.to_string());
        }
        let purpose = code("121322", "DCM", "Source image for image processing operation");
        put_sequence(&mut source, tags::PURPOSE_OF_REFERENCE_CODE_SEQUENCE, vec![purpose]);
        put_text(&mut source, tags::SPATIAL_LOCATIONS_PRESERVED, VR::CS, "YES");
        let mut derivation = InMemDicomObject::new_empty();
        put_sequence(&mut derivation, tags::SOURCE_IMAGE_SEQUENCE, vec![source]);
        put_sequence(&mut derivation, tags::DERIVATION_CODE_SEQUENCE, vec![code("113076", "DCM", "Segmentation")]);
        put_sequence(&mut groups, tags::DERIVATION_IMAGE_SEQUENCE, vec![derivation]);
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
