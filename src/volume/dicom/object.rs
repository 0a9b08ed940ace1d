//! Parsing of DICOM files.

use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use dicom_core::dictionary::{DataDictionary, DataDictionaryEntry, VirtualVr};
use dicom_core::header::Header as _;
use dicom_core::{Tag, VR};
use dicom_object::mem::InMemElement;
use dicom_object::{DefaultDicomObject, FileMetaTable, InMemDicomObject, OpenFileOptions, StandardDataDictionary};

use super::structure::{self, Checked, is_dicom};
use super::syntax;
use prsmed_base::error::{Error, Result};

/// A parsed DICOM file.
pub(super) type Object = DefaultDicomObject;

/// Parses a file, up to its pixel data or with them, and says what was assumed about its encoding. The parser's messages are
/// not shown: they could cite values.
pub(super) fn parse(path: &Path, bytes: &[u8], header_only: bool) -> Result<(Object, Option<&'static str>)> {
    let hint = "copy the file again, or export the series again from the archive";
    if !is_dicom(bytes) {
        let hint = "give a DICOM file, a folder or zip of DICOM files, or a NIfTI file (`.nii`, `.nii.gz`)";
        return Err(Error::data(path, "it is not a medical image that can be read", hint));
    }
    let checked = structure::check(bytes).map_err(|damage| Error::data(path, damage.reason(), hint))?;
    let Checked { header, whole, syntax, note } = checked;
    let bytes = if header_only { header } else { whole };
    let meta = syntax.as_deref().map(meta_of).unwrap_or_default();
    let read = || OpenFileOptions::new().from_reader(meta.as_slice().chain(&*bytes));
    if let Ok(Ok(mut object)) = catch_unwind(AssertUnwindSafe(read)) {
        name_representations(&mut object);
        return Ok((object, note));
    }
    let damaged = ("its DICOM header is damaged and cannot be read".to_owned(), hint);
    // the parser knows no data set of an unknown transfer syntax
    let known = syntax.or_else(|| syntax_of(&bytes));
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
