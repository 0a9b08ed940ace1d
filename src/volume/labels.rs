//! Opens label maps.

use std::path::Path;

use super::format::{self, Choice};
pub use super::label_map::{LabelMap, LabelNames};
use super::nifti::geometry::Geometry;
use super::path::split_selection;
use super::voxels::Volume;
use prsmed_base::error::{Error, Result};
use prsmed_base::panics::guard_file;

/// Opens a label map: for example a NIfTI or NRRD file of whole numbers from 0 to 65535, or a DICOM SEG with binary segments,
/// whose labels are the segment numbers. `PATH#N` chooses a volume of a 4-D NIfTI file. Contours (DICOM RTSTRUCT) need
/// the voxels of their series: see [`open_for`].
///
/// # Errors
/// [`Error::Data`] for other files and values; [`Error::Io`].
pub fn open(path: &Path) -> Result<LabelMap> {
    open_with(path, None)
}

/// As [`open`]; `geometry` counts where a NIfTI file has two affines that differ.
///
/// # Errors
/// As [`open`].
pub fn open_with(path: &Path, geometry: Option<Geometry>) -> Result<LabelMap> {
    opened(path, geometry, None)
}

/// As [`open_with`], also for contours (DICOM RTSTRUCT), which are filled on the grid of `volume`, their series. Their
/// labels are the numbers of the ROIs. Other label maps keep their grid.
///
/// # Errors
/// As [`open`]; [`Error::Data`] for contours of another series than `volume`.
pub fn open_for(path: &Path, geometry: Option<Geometry>, volume: &Volume) -> Result<LabelMap> {
    opened(path, geometry, Some(volume))
}

fn opened(path: &Path, geometry: Option<Geometry>, volume: Option<&Volume>) -> Result<LabelMap> {
    let hint = "save it again as NIfTI (`.nii.gz`) with another program";
    guard_file(path, hint, || {
        let (path, selected) = split_selection(path);
        let unknown = || {
            let hint = "give a NIfTI file (`.nii.gz`), a DICOM SEG or RTSTRUCT (`.dcm`), or an NRRD or MetaImage file";
            Error::data(&path, "it is not a label map that can be read", hint)
        };
        let read = format::reader(&path, |format| format.labels, unknown)?;
        read(&path, &Choice { selected: selected.as_deref(), series: None, geometry, volume })
    })
}
