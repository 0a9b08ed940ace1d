//! Writing of NRRD files on the grid of a volume.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::super::dicom::seg::SegmentMask;
use super::super::grid::swap_lps_ras;
use super::super::nifti::mask::labels_of;
use super::super::voxels::Volume;
use prsmed_base::error::{Error, Result};

/// The bytes of a file with the segments, whose names 3D Slicer reads.
pub(super) fn encode(path: &Path, segments: &[SegmentMask], volume: &Volume) -> Result<Vec<u8>> {
    let (grid, vector) = (&volume.grid, |[x, y, z]: [f64; 3]| format!("({x},{y},{z})"));
    let labels = labels_of(segments, grid)?;
    let [x, y, z] = grid.size;
    let steps = [0, 1, 2].map(|axis| vector(swap_lps_ras(grid.affine.step(axis)))).join(" ");
    let mut header = format!(
        "NRRD0004\n# mask by prsmed\ntype: unsigned char\ndimension: 3\nspace: left-posterior-superior\nsizes: {x} {y} {z}\n\
         space directions: {steps}\nkinds: domain domain domain\nencoding: gzip\nspace origin: {}\n",
        vector(swap_lps_ras(grid.affine.origin()))
    );
    for (number, segment) in segments.iter().enumerate() {
        let name: String = segment.name.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
        let (id, value) = (format!("Segment{number}"), number + 1);
        // a string takes everything
        let _ =
            write!(header, "{id}_ID:=Segment_{value}\n{id}_LabelValue:={value}\n{id}_Layer:=0\n{id}_Name:={name}\n");
    }
    header.push('\n');
    let mut encoder = GzEncoder::new(header.into_bytes(), Compression::default());
    encoder.write_all(&labels).and_then(|()| encoder.finish()).map_err(Error::io(path, "write"))
}
