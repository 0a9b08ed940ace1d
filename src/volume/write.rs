//! Writing of masks, in a format of [`super::format::FORMATS`] by the ending of the name, and of NIfTI files.

use std::path::Path;

use super::dicom::seg::SegmentMask;
use super::format::{self, Writer};
pub use super::nifti::mask::{check_probabilities, nifti_f32, nifti_i16, nifti_labels};
use super::voxels::Volume;
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

/// Checks that a mask of `volume` can be written to `path`, before the expensive work.
///
/// # Errors
/// [`Error::Config`] for a name that is not one of a format that is written; [`Error::Data`] for a volume that the format
/// cannot hold.
pub fn check(path: &Path, volume: &Volume) -> Result<()> {
    (format_of(path)?.check)(path, volume)
}

fn format_of(path: &Path) -> Result<Writer> {
    format::writer(path).ok_or_else(|| {
        let reason = format!("`{}` has the wrong file extension", path.display());
        Error::argument("out", reason, format!("use a file name that ends with {}", format::written_endings()))
    })
}

/// Writes segments on the grid of `volume`: as NIfTI with the values 1, 2, ... for the segments in their order (a later
/// segment wins where they overlap), or as DICOM SEG or RTSTRUCT.
///
/// # Errors
/// As [`check`]; [`Error::Shape`] for a mask of another size; [`Error::Io`].
pub fn segments(path: &Path, segments: &[SegmentMask], volume: &Volume) -> Result<()> {
    let bytes = encoded(path, segments, volume)?;
    files::write_output(path, &bytes).map_err(Error::io(path, "write"))
}

/// The bytes of the file that [`segments()`] writes.
///
/// # Errors
/// As [`segments()`].
pub fn encoded(path: &Path, segments: &[SegmentMask], volume: &Volume) -> Result<Vec<u8>> {
    check(path, volume)?;
    (format_of(path)?.encode)(path, segments, volume)
}
