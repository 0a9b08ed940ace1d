//! A format of tests: a line `TOY 2 2 1` with the size, then a number for each voxel of 1 mm.

use std::path::Path;

use super::format::{Format, NO_FORMAT, Writer};
use super::grid::{Affine, Grid};
use super::labels::LabelMap;
use super::voxels::{Volume, Voxels};
use super::{VolumeSource, nifti};
use prsmed_base::error::{Error, Result};

pub(crate) const TOY: Format = Format {
    name: "a toy file",
    endings: &["toy"],
    knows: |_, start| start.starts_with(b"TOY "),
    volume: Some(|path, _| {
        let (numbers, grid) = read(path)?;
        let mut voxels = Voxels::with_capacity(numbers.len());
        for number in numbers {
            voxels.push(number.into());
        }
        Ok(Volume::new(voxels, grid, VolumeSource::Other))
    }),
    labels: Some(|path, _| read(path).map(|(numbers, grid)| LabelMap::new(numbers, grid, Vec::new()))),
    write: Some(Writer {
        endings: &["toy"],
        is_on_page: false,
        check: |_, _| Ok(()),
        encode: |_, segments, volume| {
            let labels = nifti::mask::labels_of(segments, &volume.grid)?;
            let numbers: Vec<String> = labels.iter().map(u8::to_string).collect();
            let [x, y, z] = volume.grid.size;
            Ok(format!("TOY {x} {y} {z}\n{}\n", numbers.join(" ")).into_bytes())
        },
    }),
    ..NO_FORMAT
};

fn read(path: &Path) -> Result<(Vec<u16>, Grid)> {
    let text = std::fs::read_to_string(path).map_err(Error::io(path, "read"))?;
    let mut numbers = text.split_whitespace().skip(1).map(|word| word.parse().expect("a number"));
    let size = [(); 3].map(|()| usize::from(numbers.next().expect("a side")));
    let affine = Affine::from_columns([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [0.0; 3]);
    Ok((numbers.collect(), Grid { size, affine }))
}
