//! Parsing of DICOM files.

use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use dicom_core::dictionary::{DataDictionary, DataDictionaryEntry, UidDictionary, UidDictionaryEntry, VirtualVr};
use dicom_core::header::Header as _;
use dicom_core::{Tag, VR};
use dicom_dictionary_std::{StandardSopClassDictionary, tags};
use dicom_object::mem::InMemElement;
use dicom_object::{DefaultDicomObject, FileMetaTable, InMemDicomObject, OpenFileOptions, StandardDataDictionary};

use super::super::path::start_of;
use super::element::Damage;
use super::structure::{self, CheckedFile, is_dicom};
use super::{numbers, syntax};
use prsmed_base::error::{Error, Result};

/// Modalities of objects that are no images, or whose pixels are no image.
const OTHER_MODALITIES: [&str; 7] = ["SEG", "RTDOSE", "RTSTRUCT", "RTPLAN", "PR", "KO", "SR"];
/// The group of the attributes of a directory (DICOMDIR).
const DIRECTORY: u16 = 4;

/// A parsed DICOM file.
pub(super) type Object = DefaultDicomObject;

/// What to do about a damaged file.
const COPY: &str = "copy the file again, or export the series again from the archive";

/// A file without its pixel data.
pub(super) struct HeaderObject {
    pub object: Object,
    /// What was assumed about the encoding.
    pub encoding: Option<&'static str>,
    /// True if the file has pixel data.
    has_pixels: bool,
}

impl HeaderObject {
    pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let (object, checked) = parse_checked(path, bytes, true)?;
        Ok(Self { object, encoding: checked.note, has_pixels: checked.header.len() < checked.whole.len() })
    }

    /// The attributes before the pixels of a file, of which no more is read; `None` for one that needs another look.
    pub(super) fn start_of(path: &Path) -> Option<Object> {
        if is_dicom(&start_of(path).ok()?) { read_until(tags::PIXEL_DATA, path) } else { None }
    }

    /// The SOP class of an object that has no image, and no modality of other objects.
    pub(super) fn class_without_image(&self) -> Option<String> {
        self.class().filter(|_| !is_other_modality(&self.object))
    }

    /// The SOP class.
    fn class(&self) -> Option<String> {
        let of_meta = self.object.meta().media_storage_sop_class_uid().trim_matches(['\0', ' ']);
        numbers::text(&self.object, tags::SOP_CLASS_UID).or_else(|| (!of_meta.is_empty()).then(|| of_meta.to_owned()))
    }

    /// Refuses an image without its pixels, or without their size: a file that was cut between two elements of its header.
    /// What is no image has the class of another object.
    pub(super) fn check_whole(&self, path: &Path) -> Result<()> {
        let Self { object, has_pixels, .. } = self;
        let has_size = object.get(tags::ROWS).is_some() && object.get(tags::COLUMNS).is_some();
        let is_other = is_other_modality(object);
        let is_image = match self.class() {
            Some(class) => is_image_class(&class),
            // a directory has none, and a file that is cut before it neither
            None => !is_other && !object.iter().any(|element| element.tag().group() == DIRECTORY),
        };
        let is_sent_apart = object.get(tags::PIXEL_DATA_PROVIDER_URL).is_some();
        if (has_size && *has_pixels) || is_sent_apart || !(is_image || has_size && !is_other) {
            return Ok(());
        }
        Err(cut_in_header(path))
    }
}

/// The attributes of a DICOM file before `tag`, of which no more is read; `None` for one that needs another look.
pub(super) fn read_until(tag: Tag, path: &Path) -> Option<Object> {
    let read = || OpenFileOptions::new().read_until(tag).open_file(path);
    let mut object = catch_unwind(AssertUnwindSafe(read)).ok()?.ok()?;
    name_representations(&mut object);
    Some(object)
}

/// True for the SOP class of images, by its name.
fn is_image_class(uid: &str) -> bool {
    let is_named = |name: &str| name.contains("Image Storage") || name == "Enhanced US Volume Storage";
    StandardSopClassDictionary.by_uid(uid).is_some_and(|class| is_named(class.name()))
}

/// The error of a file that ends within its header.
pub(super) fn cut_in_header(path: &Path) -> Error {
    Error::data(path, Damage::NO_IMAGE.0, COPY)
}

/// True for an object whose Modality is that of no image.
pub(super) fn is_other_modality(object: &InMemDicomObject) -> bool {
    let modality = numbers::text(object, tags::MODALITY).unwrap_or_default();
    OTHER_MODALITIES.contains(&modality.as_str())
}

/// Parses a file with its pixel data, and says what was assumed about its encoding.
pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<(Object, Option<&'static str>)> {
    parse_checked(path, bytes, false).map(|(object, checked)| (object, checked.note))
}

/// Parses a file, up to its pixel data or with them. The parser's messages are not shown: they could cite values.
fn parse_checked<'a>(path: &Path, bytes: &'a [u8], header_only: bool) -> Result<(Object, CheckedFile<'a>)> {
    if !is_dicom(bytes) {
        let hint = "give a DICOM file, a folder or zip of DICOM files, or a NIfTI file (`.nii`, `.nii.gz`)";
        return Err(Error::data(path, "it is not a medical image that can be read", hint));
    }
    let checked = structure::check(bytes).map_err(|damage| Error::data(path, damage.0, COPY))?;
    let (syntax, bytes) = (&checked.syntax, if header_only { &checked.header } else { &checked.whole });
    let meta = syntax.as_deref().map(meta_of).unwrap_or_default();
    let read = || OpenFileOptions::new().from_reader(meta.as_slice().chain(&**bytes));
    if let Ok(Ok(mut object)) = catch_unwind(AssertUnwindSafe(read)) {
        name_representations(&mut object);
        return Ok((object, checked));
    }
    let damaged = ("its DICOM header is damaged and cannot be read".to_owned(), COPY);
    // the parser knows no data set of an unknown transfer syntax
    let known = syntax.clone().or_else(|| syntax_of(bytes));
    let (reason, hint) = known.and_then(|uid| syntax::check(&uid).err()).unwrap_or(damaged);
    Err(Error::data(path, reason, hint))
}

/// Reads attributes of the standard that are stored with an unknown value representation (UN), as archives write what they
/// do not know. Their values are in Implicit VR Little Endian (PS3.5, 6.2.2). A value that is damaged stays unknown.
fn name_representations(object: &mut InMemDicomObject) {
    let is_concerned = |vr| vr == VR::UN || vr == VR::SQ;
    let concerned =
        object.iter().filter(|element| is_concerned(element.vr())).map(|element| (element.tag(), element.vr()));
    for (tag, vr) in concerned.collect::<Vec<_>>() {
        if vr == VR::SQ {
            object.update_value(tag, |value| {
                value.items_mut().into_iter().flatten().for_each(name_representations);
            });
        } else if let Some(element) = known_element(object, tag) {
            object.put(element);
        }
    }
}

/// An attribute of the standard with its own value representation.
fn known_element(object: &InMemDicomObject, tag: Tag) -> Option<InMemElement> {
    const PIXELS: u16 = 0x7fe0;
    let is_private = tag.group() & 1 == 1;
    if is_private || tag.group() == PIXELS || StandardDataDictionary.by_tag(tag)?.vr() == VirtualVr::Exact(VR::UN) {
        return None;
    }
    let value = object.get(tag)?.to_bytes().ok().filter(|value| !value.is_empty())?;
    let length = u32::try_from(value.len()).ok()?.to_le_bytes();
    let [group, number] = [tag.group(), tag.element()].map(u16::to_le_bytes);
    let dataset = [&group, &number, length.as_slice(), &value].concat();
    structure::check_implicit(&dataset).ok()?;
    let meta = meta_of(syntax::IMPLICIT);
    let read = || OpenFileOptions::new().from_reader(meta.as_slice().chain(dataset.as_slice()));
    catch_unwind(AssertUnwindSafe(read)).ok()?.ok()?.take_element(tag).ok()
}

/// The transfer syntax in the file meta.
fn syntax_of(bytes: &[u8]) -> Option<String> {
    let start = if bytes.starts_with(b"DICM") { 0 } else { 128 };
    let meta = catch_unwind(|| FileMetaTable::from_reader(bytes.get(start..).unwrap_or_default())).ok()?.ok()?;
    Some(meta.transfer_syntax().trim_matches(['\0', ' ']).to_owned())
}

/// A preamble and a file meta with a transfer syntax only.
fn meta_of(syntax: &str) -> Vec<u8> {
    let mut uid = syntax.as_bytes().to_vec();
    uid.resize(uid.len().next_multiple_of(2), 0);
    let length = u8::try_from(uid.len()).unwrap_or(u8::MAX);
    let mut bytes = vec![0; 128];
    bytes.extend(b"DICM");
    bytes.extend([2, 0, 0, 0, b'U', b'L', 4, 0, 8 + length, 0, 0, 0]);
    bytes.extend([2, 0, 0x10, 0, b'U', b'I', length, 0]);
    bytes.extend(uid);
    bytes
}
