//! Writing of NIfTI-1 files on the grid of a volume.

use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::super::dicom::seg::SegmentMask;
use super::super::grid::{Affine, Grid};
use super::super::path::has_ending;
use super::super::source::VolumeSource;
use super::super::voxels::Volume;
use super::geometry::Forms;
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

/// Bytes of the header with the flag that says that no extension follows.
const HEADER: usize = 352;

/// Code and number of bits of a data type (nifti1.h), and the description of a file.
type Kind = ([i16; 2], &'static str);
const LABELS: Kind = ([2, 8], "mask by prsmed");
const INTEGERS: Kind = ([4, 16], "image by prsmed");
const NUMBERS: Kind = ([16, 32], "probabilities by prsmed");

/// Fails for a volume that NIfTI cannot hold.
pub(crate) fn check(path: &Path, volume: &Volume) -> Result<()> {
    header_like(path, volume, LABELS).map(drop)
}

/// The bytes of a file with the segments.
pub(crate) fn encode(path: &Path, segments: &[SegmentMask], volume: &Volume) -> Result<Vec<u8>> {
    encoded_nifti(path, &header_like(path, volume, LABELS)?, &labels_of(segments, &volume.grid)?)
}

/// Labels 1, 2, ... of the segments in their order; a later segment wins where they overlap.
///
/// # Errors
/// [`Error::Shape`] for a mask of another size than the grid.
pub(crate) fn labels_of(segments: &[SegmentMask], grid: &Grid) -> Result<Vec<u8>> {
    let mut labels = vec![0_u8; grid.num_voxels()];
    for (segment, label) in segments.iter().zip(1..=u8::MAX) {
        grid.check(segment.mask.len())?;
        let pairs = labels.iter_mut().zip(segment.mask);
        pairs.filter(|(_, value)| **value != 0).for_each(|(voxel, _)| *voxel = label);
    }
    Ok(labels)
}

/// The header of a mask of `volume`. The affines of a NIfTI volume are copied as they are, so that every program shows the
/// mask on its volume.
fn header_like(path: &Path, volume: &Volume, kind: Kind) -> Result<[u8; HEADER]> {
    match &volume.source {
        VolumeSource::Nifti(forms) => header(path, &volume.grid, forms, kind),
        VolumeSource::Dicom(_) | VolumeSource::Other => header(path, &volume.grid, &Forms::of_grid(&volume.grid), kind),
    }
}

/// Writes labels (one value for each voxel of a grid) as NIfTI-1 with voxels of type uint8. A path that ends with `.gz` is
/// compressed.
///
/// # Errors
/// [`Error::Shape`] for another number of values; [`Error::Data`] for a grid that NIfTI cannot hold; [`Error::Io`].
pub fn nifti_labels(path: &Path, labels: &[u8], grid: &Grid) -> Result<()> {
    grid.check(labels.len())?;
    write_nifti(path, &header(path, grid, &Forms::of_grid(grid), LABELS)?, labels)
}

/// Writes voxels as NIfTI-1 of type int16. A path that ends with `.gz` is compressed.
///
/// # Errors
/// As [`nifti_labels`].
pub fn nifti_i16(path: &Path, values: &[i16], grid: &Grid) -> Result<()> {
    grid.check(values.len())?;
    let header = header(path, grid, &Forms::of_grid(grid), INTEGERS)?;
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    write_nifti(path, &header, &bytes)
}

/// Writes a number for each voxel as NIfTI-1 of type float32 with the position of their volume. A path that ends with
/// `.gz` is compressed.
///
/// # Errors
/// As [`nifti_labels`].
pub fn nifti_f32(path: &Path, values: &[f32], volume: &Volume) -> Result<()> {
    volume.grid.check(values.len())?;
    let header = header_like(path, volume, NUMBERS)?;
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    write_nifti(path, &header, &bytes)
}

/// Checks that probabilities of `volume` can be written to `path`, before the expensive work.
///
/// # Errors
/// [`Error::Config`] for another ending than `.nii.gz` and `.nii`; [`Error::Data`] for a volume that NIfTI cannot hold.
pub fn check_probabilities(path: &Path, volume: &Volume) -> Result<()> {
    if has_ending(path, &["nii.gz", "nii"]) {
        return check(path, volume);
    }
    let reason = format!("`{}` has the wrong file extension for probabilities of a volume", path.display());
    Err(Error::argument("probabilities", reason, "use a file name that ends with `.nii.gz` or `.nii`"))
}

fn write_nifti(path: &Path, header: &[u8; HEADER], voxels: &[u8]) -> Result<()> {
    let bytes = encoded_nifti(path, header, voxels)?;
    files::write_output(path, &bytes).map_err(Error::io(path, "write"))
}

fn encoded_nifti(path: &Path, header: &[u8; HEADER], voxels: &[u8]) -> Result<Vec<u8>> {
    if !has_ending(path, &["gz"]) {
        return Ok([header, voxels].concat());
    }
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    let written = encoder.write_all(header).and_then(|()| encoder.write_all(voxels));
    written.and_then(|()| encoder.finish()).map_err(Error::io(path, "write"))
}

/// The header of a file, little-endian. Offsets are those of nifti1.h.
#[expect(clippy::cast_possible_truncation, reason = "NIfTI stores f32")]
fn header(path: &Path, grid: &Grid, forms: &Forms, (kind, description): Kind) -> Result<[u8; HEADER]> {
    let mut header = [0; HEADER];
    let mut put = |offset: usize, bytes: &[u8]| header[offset..offset + bytes.len()].copy_from_slice(bytes);
    put(0, &348_i32.to_le_bytes());
    let mut dim = [1_i16; 8];
    dim[0] = 3;
    for (axis, side) in grid.size.iter().enumerate() {
        dim[axis + 1] = i16::try_from(*side).map_err(|_| {
            let reason = format!("NIfTI-1 has at most {} voxels along an axis, and the mask has {side}", i16::MAX);
            Error::data(path, reason, "crop the volume, or write a DICOM SEG")
        })?;
    }
    dim.iter().enumerate().for_each(|(index, side)| put(40 + 2 * index, &side.to_le_bytes()));
    let stored = Affine(grid.affine.0.map(|row| row.map(|value| f64::from(value as f32))));
    if stored.inverse().is_none() {
        let reason = "NIfTI cannot hold its affine, whose numbers are too large or too small for 32 bits";
        return Err(Error::data(path, reason, "correct the spacing of the volume, for example with nibabel"));
    }
    put(70, kind.map(i16::to_le_bytes).as_flattened());
    put(108, &(HEADER as f32).to_le_bytes());
    // slope 1
    put(112, &1_f32.to_le_bytes());
    put(148, description.as_bytes());
    put(344, b"n+1\0");
    forms.put(&mut header);
    Ok(header)
}
