//! Medical image files: NIfTI, DICOM, NRRD, MetaImage and NumPy volumes as voxels with a position in the patient, and flat images ([`decode`]).
//! It needs no libtorch.
//!
//! ```text
//! NIfTI file                                  window
//!            \                                   v
//!             Volume (16 bits, grid in mm) -> slices (8 bits, radiological) -> mask of the volume -> NIfTI, DICOM SEG, RTSTRUCT
//!            /                                                                    ^
//! DICOM file, folder, zip                     label map on the volume's grid -----+
//! ```
//!
//! [`open`] reads all formats; a new one is a row of [`format::FORMATS`]. Voxels keep their full depth until a [`Window`] is applied. Nothing that identifies a
//! patient is kept: no name, id, date, institution or accession number. UIDs that a DICOM SEG or RTSTRUCT must refer to
//! are in [`References`], which is never printed or serialised.
//!
//! ```no_run
//! use prsmed_volume::{Axis, Window, open};
//!
//! let volume = open("ct.nii.gz".as_ref())?;
//! let (plane, levels) = (volume.plane(Axis::Axial), Window::Auto.levels(&volume)?);
//! let middle = volume.slice(&plane, plane.num_slices / 2, &levels)?;
//! # Ok::<(), prsmed_base::Error>(())
//! ```

pub mod cleanup;
pub mod components;
pub mod decode;
pub mod dicom;
pub mod display;
pub mod foreground;
pub mod format;
pub mod grid;
pub mod hounsfield;
pub mod labels;
pub mod limits;
pub mod modality;
pub mod neighbours;
pub mod nifti;
pub mod padding;
pub mod path;
pub mod sequences;
pub mod slices;
pub mod source;
pub mod voxel_set;
pub mod voxels;
pub mod window;
pub mod write;

mod colours;
mod detached;
mod gunzip;
mod label_map;
mod mask_file;
mod meta_image;
mod nrrd;
mod numpy;
mod photograph;
mod plateau;
mod stored;
mod tiff_volume;
mod transparency;

#[cfg(test)]
#[path = "../data/fixture.rs"]
#[expect(dead_code, reason = "shared with the tests of prsmed-data")]
mod fixture;
#[cfg(test)]
mod python_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod toy_format;

use std::path::{Path, PathBuf};

pub use cleanup::Cleanup;
pub use dicom::seg::SegmentMask;
pub use display::{Curve, Display};
pub use grid::{Affine, Grid};
pub use label_map::{LabelMap, LabelNames};
pub use limits::MAX_VOXELS;
pub use modality::Modality;
pub use neighbours::Neighbours;
pub use nifti::geometry::Geometry;
pub use sequences::{Sequence, SequenceFile, Windows};
pub use slices::{Axis, SlicePlane};
pub use source::{References, Uid, VolumeSource};
pub use voxel_set::VoxelSet;
pub use voxels::{Volume, Voxels};
pub use window::{Levels, Window};

use format::Choice;
use prsmed_base::error::{Error, Result};
use prsmed_base::panics::guard_file;

/// As [`open`], for a volume of at most so many voxels.
///
/// # Errors
/// As [`open`].
pub fn open_within(path: &Path, voxels: usize) -> Result<Volume> {
    limits::within(voxels, || open(path))
}

/// True for a path that [`open`] reads, or knows as a volume that cannot be read: a folder, or a file by its first bytes
/// or its name.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be read.
pub fn is_volume(path: &Path) -> Result<bool> {
    let (path, _) = path::split_selection(path);
    if !path.is_file() {
        return Ok(path.is_dir());
    }
    Ok(format::of_volume(&path)?.is_some())
}

/// Opens a volume or an image: a file of a format of [`format::FORMATS`], a folder with nothing but one, a folder of DICOM
/// files, or a zip of them.
///
/// `PATH#N` chooses one of several: volume N of a 4-D file (from 0), an array by its name, the DICOM series with number N, or frame N
/// (from 1) of a DICOM file whose frames are not slices of a volume. A series is also chosen by its SeriesInstanceUID, by
/// its description or a part of it, or as the `largest` one. A path that exists as it is written is not split.
///
/// # Errors
/// [`Error::Data`] with what is wrong and what to do; [`Error::Io`].
pub fn open(path: &Path) -> Result<Volume> {
    open_chosen(path, None, None)
}

/// As [`open`], with a choice of a series for folders and zips whose path has none. `geometry` counts where a NIfTI file has
/// two affines that differ.
///
/// # Errors
/// As [`open`].
pub fn open_chosen(path: &Path, series: Option<&str>, geometry: Option<Geometry>) -> Result<Volume> {
    const HINT: &str = "convert it with another program, for example with dcm2niix or SimpleITK; if that fails too, the file \
                        is damaged";
    guard_file(path, HINT, || {
        #[cfg(test)]
        assert!(!path.ends_with("panics.nii"), "a panic of a test");
        let (path, selected) = path::split_selection(path);
        let (path, selected) = (only_volume(&path)?.unwrap_or(path), selected.as_deref());
        if path.is_dir() {
            return dicom::open(&path, selected.or(series));
        }
        let unknown = || {
            let hint = "give a DICOM file, a folder or zip of DICOM files, or a NIfTI, NRRD or MetaImage file";
            Error::data(&path, "it is not a medical image that can be read", hint)
        };
        let read = format::reader(&path, |format| format.volume, unknown)?;
        read(&path, &Choice { selected, series, geometry, volume: None })
    })
}

/// The file with a whole volume in a folder that has no other file.
fn only_volume(folder: &Path) -> Result<Option<PathBuf>> {
    if !folder.is_dir() {
        return Ok(None);
    }
    let mut files = std::fs::read_dir(folder).map_err(Error::io(folder, "read"))?;
    let (Some(Ok(only)), None) = (files.next(), files.next()) else { return Ok(None) };
    let file = only.path();
    let format = if file.is_file() { format::of_volume(&file)? } else { None };
    Ok(format.filter(|format| format.volume.is_some() && !format.is_series).map(|_| file))
}
