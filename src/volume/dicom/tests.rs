//! Series and images that are written here.

mod colours;
mod cut;
mod encodings;
mod kinds;
mod rtstruct;
mod segments;
mod series;
mod unknown;
mod values;

use std::fs;
use std::path::{Path, PathBuf};

use dicom_core::dictionary::{DataDictionary, DataDictionaryEntry};
use dicom_core::value::{DataSetSequence, PrimitiveValue};
use dicom_core::{DataElement, Tag, VR};
use dicom_dictionary_std::{tags, uids};
use dicom_object::{FileMetaTableBuilder, InMemDicomObject, StandardDataDictionary};

use crate::{Volume, open};

/// Columns and rows of the images.
const SIZE: [u16; 2] = [4, 3];

/// Sets the text of an attribute.
fn set(object: &mut InMemDicomObject, tag: Tag, text: &str) {
    let vr = StandardDataDictionary.by_tag(tag).expect("a standard attribute").vr().relaxed();
    object.put(DataElement::new(tag, vr, PrimitiveValue::from(text)));
}

fn set_u16(object: &mut InMemDicomObject, tag: Tag, value: u16) {
    object.put(DataElement::new(tag, VR::US, PrimitiveValue::from(value)));
}

fn set_i16(object: &mut InMemDicomObject, tag: Tag, value: i16) {
    object.put(DataElement::new(tag, VR::SS, PrimitiveValue::from(value)));
}

fn set_items(object: &mut InMemDicomObject, tag: Tag, items: Vec<InMemDicomObject>) {
    object.put(DataElement::new(tag, VR::SQ, DataSetSequence::from(items)));
}

fn item(attributes: &[(Tag, &str)]) -> InMemDicomObject {
    let mut item = InMemDicomObject::new_empty();
    for (tag, text) in attributes {
        set(&mut item, *tag, text);
    }
    item
}

/// Sets pixels of 16 bits.
fn set_pixels(object: &mut InMemDicomObject, values: &[i32], is_signed: bool) {
    set_u16(object, tags::PIXEL_REPRESENTATION, u16::from(is_signed));
    let words: Vec<u16> = values.iter().map(|value| u16::try_from(value & 0xffff).expect("16 bits")).collect();
    object.put(DataElement::new(tags::PIXEL_DATA, VR::OW, PrimitiveValue::U16(words.into())));
}

/// A CT slice of 4x3 unsigned pixels with the values 1000, 1001, .., at a height of `index` mm.
fn slice(index: i32) -> InMemDicomObject {
    let mut object = item(&[
        (tags::SOP_CLASS_UID, uids::CT_IMAGE_STORAGE),
        (tags::SOP_INSTANCE_UID, &format!("1.2.3.{index}")),
        (tags::MODALITY, "CT"),
        (tags::STUDY_INSTANCE_UID, "1.2.4"),
        (tags::SERIES_INSTANCE_UID, "1.2.5"),
        (tags::FRAME_OF_REFERENCE_UID, "1.2.6"),
        (tags::IMAGE_POSITION_PATIENT, &format!("0\\0\\{index}")),
        (tags::IMAGE_ORIENTATION_PATIENT, "1\\0\\0\\0\\1\\0"),
        (tags::PIXEL_SPACING, "0.5\\0.5"),
        (tags::SLICE_THICKNESS, "1"),
        (tags::RESCALE_SLOPE, "1"),
        (tags::RESCALE_INTERCEPT, "-1024"),
        (tags::PHOTOMETRIC_INTERPRETATION, "MONOCHROME2"),
    ]);
    for (tag, value) in [
        (tags::SAMPLES_PER_PIXEL, 1),
        (tags::COLUMNS, SIZE[0]),
        (tags::ROWS, SIZE[1]),
        (tags::BITS_ALLOCATED, 16),
        (tags::BITS_STORED, 16),
        (tags::HIGH_BIT, 15),
    ] {
        set_u16(&mut object, tag, value);
    }
    set_pixels(&mut object, &(1000..1012).collect::<Vec<_>>(), false);
    object
}

/// A slice with another modality and no rescale.
fn slice_of(modality: &str, index: i32) -> InMemDicomObject {
    let mut object = slice(index);
    set(&mut object, tags::MODALITY, modality);
    object.remove_element(tags::RESCALE_SLOPE);
    object.remove_element(tags::RESCALE_INTERCEPT);
    object
}

fn bytes_of(object: InMemDicomObject) -> Vec<u8> {
    let meta = FileMetaTableBuilder::new().transfer_syntax(uids::EXPLICIT_VR_LITTLE_ENDIAN);
    let mut bytes = Vec::new();
    object.with_meta(meta).expect("meta").write_all(&mut bytes).expect("written");
    bytes
}

/// A folder with these files, `0.dcm`, `1.dcm`, ..
fn folder(objects: Vec<InMemDicomObject>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (index, object) in objects.into_iter().enumerate() {
        fs::write(folder.path().join(format!("{index}.dcm")), bytes_of(object)).expect("written");
    }
    folder
}

/// The slices 0, 1, 2 after a change.
fn changed(change: impl Fn(usize, &mut InMemDicomObject)) -> tempfile::TempDir {
    let mut objects: Vec<InMemDicomObject> = (0..3).map(slice).collect();
    objects.iter_mut().enumerate().for_each(|(index, object)| change(index, object));
    folder(objects)
}

fn volume(objects: Vec<InMemDicomObject>) -> Volume {
    open(folder(objects).path()).expect("a volume")
}

/// Message and hint.
fn refused(path: &Path) -> String {
    let error = open(path).expect_err("refused");
    format!("{error}\n{}", error.hint())
}

fn fixture(name: &str) -> PathBuf {
    crate::fixture::checkout().join("tests/fixtures/volumes").join(name)
}

/// True if a note has a text.
fn has_note(volume: &Volume, text: &str) -> bool {
    volume.notes.iter().any(|note| note.contains(text))
}
