//! Medical volumes: NIfTI and DICOM files as voxels with a position in the patient.
//!
//! ```text
//! NIfTI file                                  window
//!            \                                   v
//!             Volume (16 bits, grid in mm) -> slices (8 bits, radiological) -> mask of the volume -> NIfTI, DICOM SEG
//!            /                                                                    ^
//! DICOM file, folder, zip                     label map on the volume's grid -----+
//! ```
//!
//! [`open`] reads all formats. Voxels keep their full depth until a [`Window`] is applied. Nothing that identifies a
//! patient is kept: no name, id, date, institution or accession number. UIDs that a DICOM SEG must refer to are in
//! [`References`], which is never printed or serialised.

pub mod cleanup;
pub mod dicom;
pub mod grid;
pub mod labels;
pub mod limits;
pub mod modality;
pub mod nifti;
pub mod path;
pub mod slices;
pub mod source;
pub mod voxels;
pub mod window;
pub mod write;

#[cfg(test)]
mod python_tests;
#[cfg(test)]
mod tests;

use std::path::Path;

pub use cleanup::Cleanup;
pub use dicom::seg::Segment;
pub use grid::{Affine, Grid};
pub use labels::{LabelMap, LabelNames};
pub use limits::MAX_VOXELS;
pub use modality::Modality;
pub use slices::{Axis, Plane};
pub use source::{References, Source, Uid};
pub use voxels::{Volume, Voxels};
pub use window::{Levels, Window};
pub use write::MaskFormat;

use crate::error::{Error, Result};

/// True for a path that [`open`] reads: a folder, or a NIfTI, DICOM or zip file by its first bytes or its name.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be read.
pub fn is_volume(path: &Path) -> Result<bool> {
    let (path, _) = path::split_selection(path);
    if !path.is_file() {
        return Ok(path.is_dir());
    }
    let mut start = [0; 132];
    let num_bytes = path::first_bytes(&path, &mut start)?;
    let start = &start[..num_bytes];
    Ok(dicom::is_dicom(start) || dicom::is_zip(start) || nifti::is_nifti(&path, start))
}

/// Opens a volume or an image: a NIfTI file, a DICOM file, a folder of DICOM files, or a zip of them.
///
/// `PATH#N` chooses one of several: volume N of a 4-D NIfTI file (from 0), the DICOM series with number N, or frame N
/// (from 1) of a DICOM file whose frames are not slices of a volume. A path that exists as it is written is not split.
///
/// # Errors
/// [`Error::Data`] with what is wrong and what to do; [`Error::Io`].
pub fn open(path: &Path) -> Result<Volume> {
    let (path, selected) = path::split_selection(path);
    if path.is_dir() {
        return dicom::open(&path, selected);
    }
    let mut start = [0; 132];
    let num_bytes = path::first_bytes(&path, &mut start)?;
    let start = &start[..num_bytes];
    if dicom::is_dicom(start) || dicom::is_zip(start) {
        return dicom::open(&path, selected);
    }
    if nifti::is_nifti(&path, start) {
        return nifti::open(&path, selected);
    }
    let hint = "give a DICOM file, a folder or zip of DICOM files, or a NIfTI file (`.nii`, `.nii.gz`)";
    Err(Error::data(&path, "it is not a medical image that can be read", hint))
}
