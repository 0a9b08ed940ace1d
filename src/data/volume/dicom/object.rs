//! Parsing of DICOM files.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use dicom_object::{DefaultDicomObject, OpenFileOptions};

use super::structure::{self, is_dicom};
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
    match catch_unwind(AssertUnwindSafe(|| OpenFileOptions::new().from_reader(&*bytes))) {
        Ok(Ok(object)) => Ok(object),
        Ok(Err(_)) | Err(_) => Err(Error::data(path, "its DICOM header is damaged and cannot be read", hint)),
    }
}
