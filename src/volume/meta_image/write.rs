//! Writing of MetaImage files on the grid of a volume.

use std::io::Write as _;
use std::path::Path;

use flate2::Compression;
use flate2::write::ZlibEncoder;

use super::super::dicom::seg::SegmentMask;
use super::super::grid::{swap_lps_ras, unit};
use super::super::nifti::mask::labels_of;
use super::super::voxels::Volume;
use prsmed_base::error::{Error, Result};

/// The bytes of a file with the segments, whose names the format cannot hold.
pub(super) fn encode(path: &Path, segments: &[SegmentMask], volume: &Volume) -> Result<Vec<u8>> {
    let grid = &volume.grid;
    let labels = labels_of(segments, grid)?;
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    let voxels = encoder.write_all(&labels).and_then(|()| encoder.finish()).map_err(Error::io(path, "write"))?;
    let words = |numbers: [f64; 3]| numbers.map(|number| number.to_string()).join(" ");
    let steps = [0, 1, 2].map(|axis| words(swap_lps_ras(unit(grid.affine.step(axis))))).join(" ");
    let header = format!(
        "ObjectType = Image\nNDims = 3\nBinaryData = True\nBinaryDataByteOrderMSB = False\nCompressedData = True\n\
         CompressedDataSize = {}\nTransformMatrix = {steps}\nOffset = {}\nCenterOfRotation = 0 0 0\nElementSpacing = {}\n\
         DimSize = {}\nElementType = MET_UCHAR\nElementDataFile = LOCAL\n",
        voxels.len(),
        words(swap_lps_ras(grid.affine.origin())),
        words(grid.spacing()),
        grid.size.map(|side| side.to_string()).join(" "),
    );
    Ok([header.into_bytes(), voxels].concat())
}
