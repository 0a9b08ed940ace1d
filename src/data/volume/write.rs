//! Writing of masks: NIfTI files, or DICOM SEG by the ending of the name.

use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::dicom::seg::{self, Segment};
use super::grid::{Affine, Grid};
use super::path::{has_extension, is_nifti_name};
use super::source::Source;
use super::voxels::Volume;
use crate::error::{Error, Result};
use crate::files;

/// Bytes of the header with the flag that says that no extension follows.
const HEADER: usize = 352;
/// `sform_code` and `qform_code` of scanner coordinates.
const SCANNER: i16 = 1;

/// File formats of masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskFormat {
    /// `.nii` or `.nii.gz`.
    Nifti,
    /// `.dcm`: DICOM SEG.
    DicomSeg,
}

impl MaskFormat {
    /// The format of a file name.
    pub fn of(path: &Path) -> Option<Self> {
        if is_nifti_name(path) {
            return Some(Self::Nifti);
        }
        has_extension(path, "dcm").then_some(Self::DicomSeg)
    }
}

/// Checks that a mask of `volume` can be written to `path`, before the expensive work.
///
/// # Errors
/// [`Error::Config`] for another ending than those of [`MaskFormat`]; [`Error::Data`] for a volume that the format cannot
/// hold.
pub fn check(path: &Path, volume: &Volume) -> Result<()> {
    match MaskFormat::of(path) {
        Some(MaskFormat::DicomSeg) => seg::check(path, volume).map(drop),
        Some(MaskFormat::Nifti) => header(path, &volume.grid, SCANNER).map(drop),
        None => {
            let reason = format!("`{}` has the wrong file extension", path.display());
            Err(Error::config("--out", reason, "use a file name that ends with `.nii.gz`, `.nii` or `.dcm`"))
        }
    }
}

/// Writes segments on the grid of `volume`: as NIfTI with the values 1, 2, ... for the segments in their order (a later
/// segment wins where they overlap), or as DICOM SEG.
///
/// # Errors
/// As [`check`]; [`Error::Shape`] for a mask of another size; [`Error::Io`].
pub fn segments(path: &Path, segments: &[Segment], volume: &Volume) -> Result<()> {
    check(path, volume)?;
    if MaskFormat::of(path) == Some(MaskFormat::DicomSeg) {
        return seg::write(path, segments, volume);
    }
    let mut labels = vec![0_u8; volume.grid.num_voxels()];
    for (segment, label) in segments.iter().zip(1..=u8::MAX) {
        volume.grid.check(segment.mask.len())?;
        let pairs = labels.iter_mut().zip(segment.mask);
        pairs.filter(|(_, value)| **value != 0).for_each(|(voxel, _)| *voxel = label);
    }
    nifti(path, &labels, volume)
}

/// Writes labels (one value for each voxel) as NIfTI-1 with the grid of their volume and voxels of type uint8. A path
/// that ends with `.gz` is compressed.
///
/// # Errors
/// [`Error::Shape`] for another number of values; [`Error::Data`] for a grid that NIfTI cannot hold; [`Error::Io`].
pub fn nifti(path: &Path, labels: &[u8], volume: &Volume) -> Result<()> {
    volume.grid.check(labels.len())?;
    let code = match volume.source {
        Source::Nifti { code } => code,
        Source::Dicom(_) => SCANNER,
    };
    let header = header(path, &volume.grid, code.max(SCANNER))?;
    write_nifti(path, &header, labels)
}

/// Writes labels on a grid as [`nifti()`] does, without a volume.
///
/// # Errors
/// As [`nifti()`].
pub fn nifti_labels(path: &Path, labels: &[u8], grid: &Grid) -> Result<()> {
    grid.check(labels.len())?;
    write_nifti(path, &header(path, grid, SCANNER)?, labels)
}

/// Writes voxels as NIfTI-1 of type int16. A path that ends with `.gz` is compressed.
///
/// # Errors
/// As [`nifti()`].
pub fn nifti_i16(path: &Path, values: &[i16], grid: &Grid) -> Result<()> {
    grid.check(values.len())?;
    let mut header = header(path, grid, SCANNER)?;
    // int16, 16 bits
    header[70..72].copy_from_slice(&4_i16.to_le_bytes());
    header[72..74].copy_from_slice(&16_i16.to_le_bytes());
    let description = b"image by prsmed";
    header[148..148 + description.len()].copy_from_slice(description);
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    write_nifti(path, &header, &bytes)
}

fn write_nifti(path: &Path, header: &[u8; HEADER], voxels: &[u8]) -> Result<()> {
    let bytes = if has_extension(path, "gz") {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        let written = encoder.write_all(header).and_then(|()| encoder.write_all(voxels));
        written.and_then(|()| encoder.finish()).map_err(Error::io(path, "write"))?
    } else {
        [header, voxels].concat()
    };
    files::write_output(path, &bytes).map_err(Error::io(path, "write"))
}

/// The header of a mask, little-endian. Offsets are those of nifti1.h.
#[expect(clippy::cast_possible_truncation, reason = "NIfTI stores f32")]
fn header(path: &Path, grid: &Grid, code: i16) -> Result<[u8; HEADER]> {
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
    // uint8, 8 bits
    put(70, &2_i16.to_le_bytes());
    put(72, &8_i16.to_le_bytes());
    let stored = Affine(grid.affine.0.map(|row| row.map(|value| f64::from(value as f32))));
    if stored.inverse().is_none() {
        let reason = "NIfTI cannot hold its affine, whose numbers are too large or too small for 32 bits";
        return Err(Error::data(path, reason, "correct the spacing of the volume, for example with nibabel"));
    }
    let quaternion = quaternion(&grid.affine);
    let spacing = grid.spacing();
    let pixdim = [quaternion.map_or(1.0, |found| found.1), spacing[0], spacing[1], spacing[2]];
    pixdim.iter().enumerate().for_each(|(index, value)| put(76 + 4 * index, &(*value as f32).to_le_bytes()));
    put(108, &(HEADER as f32).to_le_bytes());
    // slope 1; millimetres
    put(112, &1_f32.to_le_bytes());
    put(123, &[2]);
    put(148, b"mask by prsmed");
    let [x, y, z] = grid.affine.origin();
    if let Some((vector, _)) = quaternion {
        put(252, &code.to_le_bytes());
        let values = [vector[0], vector[1], vector[2], x, y, z];
        values.iter().enumerate().for_each(|(index, value)| put(256 + 4 * index, &(*value as f32).to_le_bytes()));
    }
    put(254, &code.to_le_bytes());
    let rows = grid.affine.0.iter().flatten().enumerate();
    rows.for_each(|(index, value)| put(280 + 4 * index, &(*value as f32).to_le_bytes()));
    put(344, b"n+1\0");
    Ok(header)
}

/// `b`, `c` and `d` of the rotation of an affine, and the sign of its third axis; `None` if its axes are not orthogonal.
fn quaternion(affine: &Affine) -> Option<([f64; 3], f64)> {
    let mut steps = affine.unit_steps()?;
    let sign = if affine.determinant() < 0.0 { -1.0 } else { 1.0 };
    steps[2] = steps[2].map(|value| value * sign);
    // the matrix has the steps as its columns
    let at = |row: usize, column: usize| steps[column][row];
    let diagonal = [at(0, 0), at(1, 1), at(2, 2)];
    let a = (1.0 + diagonal.iter().sum::<f64>()).max(0.0).sqrt() / 2.0;
    let skew = [at(2, 1) - at(1, 2), at(0, 2) - at(2, 0), at(1, 0) - at(0, 1)];
    if a > 0.1 {
        return Some((skew.map(|value| value / (4.0 * a)), sign));
    }
    // half a turn: from the largest entry of the diagonal
    let largest = (0..3).max_by(|x, y| diagonal[*x].total_cmp(&diagonal[*y]))?;
    let (next, last) = ((largest + 1) % 3, (largest + 2) % 3);
    let side = (1.0 + diagonal[largest] - diagonal[next] - diagonal[last]).max(0.0).sqrt() / 2.0;
    let mut vector = [0.0; 3];
    vector[largest] = side;
    vector[next] = (at(next, largest) + at(largest, next)) / (4.0 * side);
    vector[last] = (at(last, largest) + at(largest, last)) / (4.0 * side);
    // the fourth number must not be negative
    let flip = if skew[largest] < 0.0 { -1.0 } else { 1.0 };
    Some((vector.map(|value| value * flip), sign))
}
