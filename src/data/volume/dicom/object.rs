//! Parsing of DICOM files.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use dicom_object::{DefaultDicomObject, FileMetaTable, OpenFileOptions};

use super::structure::{self, is_dicom};
use super::syntax;
use crate::error::{Error, Result};

/// A parsed DICOM file.
pub(super) type Object = DefaultDicomObject;

/// Parses a file, up to its pixel data or with them. The parser's messages are not shown: they could cite values.
pub(super) fn parse(path: &Path, bytes: &[u8], header_only: bool) -> Result<Object> {
    let hint = "copy the file again, or export the series again from the archive";
    if !is_dicom(bytes) {
        let hint = "give a DICOM file, a folder or zip of DICOM files, or a NIfTI file (`.nii`, `.nii.gz`)";
        return Err(Error::data(path, "it is not a medical image that can be read", hint));
    }
    let checked = structure::check(bytes);
    let [header, whole] = checked.map_err(|damage| Error::data(path, damage.reason(), hint))?;
    let bytes = if header_only { header } else { whole };
    if let Ok(Ok(object)) = catch_unwind(AssertUnwindSafe(|| OpenFileOptions::new().from_reader(&*bytes))) {
        return Ok(object);
    }
    let damaged = ("its DICOM header is damaged and cannot be read".to_owned(), hint);
    // the parser knows no data set of an unknown transfer syntax
    let (reason, hint) = unknown_syntax(&bytes).unwrap_or(damaged);
    Err(Error::data(path, reason, hint))
}

/// The reason and the remedy, if the file meta has a transfer syntax that cannot be decoded.
fn unknown_syntax(bytes: &[u8]) -> Option<(String, &'static str)> {
    let start = if bytes.starts_with(b"DICM") { 0 } else { 128 };
    let meta = catch_unwind(|| FileMetaTable::from_reader(bytes.get(start..).unwrap_or_default())).ok()?.ok()?;
    syntax::check(meta.transfer_syntax().trim_matches(['\0', ' '])).err()
}
