//! Parsing of DICOM files.

use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use dicom_object::{DefaultDicomObject, FileMetaTable, OpenFileOptions};

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
    if let Ok(Ok(object)) = catch_unwind(AssertUnwindSafe(read)) {
        return Ok((object, note));
    }
    let damaged = ("its DICOM header is damaged and cannot be read".to_owned(), hint);
    // the parser knows no data set of an unknown transfer syntax
    let known = syntax.or_else(|| syntax_of(&bytes));
    let (reason, hint) = known.and_then(|uid| syntax::check(&uid).err()).unwrap_or(damaged);
    Err(Error::data(path, reason, hint))
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
