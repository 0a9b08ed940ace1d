//! Writing of DICOM objects that are derived from a series: elements, and the modules that all such objects have.
//!
//! An object refers to its images by their UIDs (study, frame of reference, series, instances), without which no viewer
//! could show it on them. Everything else of the patient and study modules is empty: name, id, sex, dates and accession
//! number. An archive files such an object under an empty patient; to store it with its patient, copy PatientName and
//! PatientID from the series, for example with `dcmodify`.

use std::path::Path;

use dicom_core::value::{DataSetSequence, PrimitiveValue};
use dicom_core::{DataElement, Tag, VR};
use dicom_dictionary_std::tags;
use dicom_object::mem::InMemElement;
use dicom_object::{FileMetaTableBuilder, InMemDicomObject};

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

impl SegmentMask<'_> {
    /// The name as a label of at most 64 characters.
    pub(super) fn label(&self) -> String {
        // a backslash separates values
        let name = self.name.chars().filter(|c| !c.is_control()).map(|c| if c == '\\' { '/' } else { c });
        let label: String = name.collect::<String>().trim().chars().take(64).collect();
        if label.is_empty() { "target".to_owned() } else { label }
    }
}

/// What a derived object is.
pub(super) struct Kind {
    pub modality: &'static str,
    pub class: &'static str,
    /// Transfer syntax.
    pub syntax: &'static str,
}

impl Kind {
    /// The UIDs that an object of `volume` refers to, and its frame of reference.
    ///
    /// # Errors
    /// [`Error::Data`] for a volume that is not a DICOM series with positions.
    pub(super) fn check<'a>(&self, path: &Path, volume: &'a Volume) -> Result<(&'a References, &'a Uid)> {
        let Self { modality, .. } = self;
        let no_series =
            |reason: String| Error::data(path, reason, "write NIfTI instead: use a name that ends with `.nii.gz`");
        let other = |what: &str| no_series(format!("a DICOM {modality} refers to DICOM images, {what}"));
        let references = match &volume.source {
            VolumeSource::Dicom(references) => references,
            VolumeSource::Nifti(_) => return Err(other("and the volume is a NIfTI file")),
            VolumeSource::Other => return Err(other("which the volume is not")),
        };
        let no_place =
            || no_series(format!("a DICOM {modality} needs positions in the patient, and the image has none"));
        Ok((references, volume.frame_of_reference.as_ref().ok_or_else(no_place)?))
    }

    /// An object with the modules of patient, study, series, frame of reference and equipment.
    pub(super) fn object(&self, references: &References, frame_of_reference: &Uid) -> InMemDicomObject {
        let (instance, series) = (new_uid(), new_uid());
        let texts: [(Tag, VR, &str); 24] = [
            (tags::SPECIFIC_CHARACTER_SET, VR::CS, "ISO_IR 192"),
            (tags::SOP_CLASS_UID, VR::UI, self.class),
            (tags::SOP_INSTANCE_UID, VR::UI, &instance),
            (tags::STUDY_DATE, VR::DA, ""),
            (tags::STUDY_TIME, VR::TM, ""),
            (tags::ACCESSION_NUMBER, VR::SH, ""),
            (tags::MODALITY, VR::CS, self.modality),
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
        ];
        let mut object = item(texts.map(|(tag, vr, value)| text(tag, vr, value)));
        object.put(text(tags::FRAME_OF_REFERENCE_UID, VR::UI, &frame_of_reference.0));
        object
    }

    /// The bytes of a file with the object.
    pub(super) fn bytes(&self, object: InMemDicomObject) -> Result<Vec<u8>> {
        let internal = |error: &dyn std::error::Error| Error::Internal {
            reason: format!("the DICOM {} cannot be encoded: {error}", self.modality),
        };
        let instance = super::numbers::text(&object, tags::SOP_INSTANCE_UID).unwrap_or_default();
        let meta = FileMetaTableBuilder::new()
            .transfer_syntax(self.syntax)
            .media_storage_sop_class_uid(self.class)
            .media_storage_sop_instance_uid(instance);
        let mut bytes = Vec::new();
        let written = object.with_meta(meta).map_err(|error| internal(&error))?.write_all(&mut bytes);
        written.map(|()| bytes).map_err(|error| internal(&error))
    }
}

/// Date and time of now, as DICOM writes them.
pub(super) fn now() -> [String; 2] {
    let now = time::OffsetDateTime::now_utc();
    let (date, clock) = (now.date(), now.time());
    [
        format!("{:04}{:02}{:02}", date.year(), u8::from(date.month()), date.day()),
        format!("{:02}{:02}{:02}", clock.hour(), clock.minute(), clock.second()),
    ]
}

/// The class and instance of each image, once for a file of several frames.
pub(super) fn images(references: &References) -> impl Iterator<Item = InMemDicomObject> {
    let mut instances: Vec<&Instance> = references.instances.iter().collect();
    instances.dedup_by(|next, last| next.uid == last.uid);
    instances.into_iter().map(|instance| item(reference(instance)))
}

pub(super) fn reference(instance: &Instance) -> [InMemElement; 2] {
    let class = text(tags::REFERENCED_SOP_CLASS_UID, VR::UI, &instance.class);
    [class, text(tags::REFERENCED_SOP_INSTANCE_UID, VR::UI, &instance.uid)]
}

/// The image of a slice, with its frame if it has several.
pub(super) fn image_of_slice(instance: &Instance) -> InMemDicomObject {
    let mut image = item(reference(instance));
    image.extend(instance.frame.map(|frame| text(tags::REFERENCED_FRAME_NUMBER, VR::IS, &frame.to_string())));
    image
}

/// A UID from a random number (PS3.5, B.2).
pub(super) fn new_uid() -> String {
    format!("2.25.{}", rand::random::<u128>())
}

/// A data set, or an item of a sequence.
pub(super) fn item<const N: usize>(elements: [InMemElement; N]) -> InMemDicomObject {
    InMemDicomObject::from_element_iter(elements)
}

pub(super) fn text(tag: Tag, vr: VR, text: &str) -> InMemElement {
    DataElement::new(tag, vr, PrimitiveValue::from(text))
}

pub(super) fn short(tag: Tag, value: u16) -> InMemElement {
    DataElement::new(tag, VR::US, PrimitiveValue::from(value))
}

/// Numbers as decimal strings of at most 16 characters.
pub(super) fn decimals(tag: Tag, numbers: &[f64]) -> InMemElement {
    let texts: Vec<String> = numbers.iter().map(|number| decimal(*number)).collect();
    text(tag, VR::DS, &texts.join("\\"))
}

pub(super) fn sequence(tag: Tag, items: impl IntoIterator<Item = InMemDicomObject>) -> InMemElement {
    DataElement::new(tag, VR::SQ, DataSetSequence::from(items.into_iter().collect::<Vec<_>>()))
}

/// A sequence with one item of these elements.
pub(super) fn group<const N: usize>(tag: Tag, elements: [InMemElement; N]) -> InMemElement {
    sequence(tag, [item(elements)])
}

pub(super) fn decimal(number: f64) -> String {
    let exact = format!("{number}");
    if exact.len() <= 16 {
        return exact;
    }
    let fixed = (0..=14).rev().map(|digits| format!("{number:.digits$}")).find(|text| text.len() <= 16);
    let scientific = format!("{number:.8e}");
    // small numbers lose digits in the fixed form
    fixed.filter(|_| number.abs() >= 1e-3 || number.abs() < 1e-12).unwrap_or(scientific)
}

pub(super) fn code(sequence: Tag, value: &str, scheme: &str, meaning: &str) -> InMemElement {
    let scheme = text(tags::CODING_SCHEME_DESIGNATOR, VR::SH, scheme);
    group(sequence, [text(tags::CODE_VALUE, VR::SH, value), scheme, text(tags::CODE_MEANING, VR::LO, meaning)])
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
}
