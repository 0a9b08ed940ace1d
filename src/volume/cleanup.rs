//! 3-D clean-up of a mask: small or secondary components are removed, and gaps between slices are filled.

use serde::{Deserialize, Serialize};

use super::components::Components;
use super::grid::Grid;
use prsmed_base::error::Result;

/// The steps of a clean-up, in the order in which they are applied. The default changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cleanup {
    /// Most empty slices between two slices with a mask that are filled, per line of voxels through the slices. 0: none.
    pub fill_gaps: usize,
    /// Removes components with less than this volume in millilitres.
    pub min_volume_ml: f64,
    /// Keeps the largest component only.
    pub largest_component: bool,
}

impl Cleanup {
    /// Cleans a mask (0 is background; the result has 0 and 1). `through` is the voxel axis through the slices.
    ///
    /// Voxels are connected over faces, edges and corners (26 neighbours).
    ///
    /// # Errors
    /// [`prsmed_base::Error::Shape`] for a mask of another size than the grid.
    pub fn apply(&self, mask: &mut [u8], grid: &Grid, through: usize) -> Result<()> {
        grid.check(mask.len())?;
        for value in mask.iter_mut() {
            *value = u8::from(*value != 0);
        }
        fill_gaps(mask, grid.size, through, self.fill_gaps);
        if self.min_volume_ml > 0.0 || self.largest_component {
            let components = Components::of(mask, grid.size);
            let largest = components.largest();
            let is_kept = |component: u32| {
                let volume = components.sizes()[component as usize - 1] as f64 * grid.voxel_ml();
                volume >= self.min_volume_ml && (!self.largest_component || Some(component) == largest)
            };
            for (value, component) in mask.iter_mut().zip(components.of_voxels()) {
                *value = u8::from(*component != 0 && is_kept(*component));
            }
        }
        Ok(())
    }
}

/// Fills runs of at most `max` background voxels between two foreground voxels along one axis.
fn fill_gaps(mask: &mut [u8], size: [usize; 3], axis: usize, max: usize) {
    let strides = [1, size[0], size[0] * size[1]];
    let (length, stride) = (size[axis], strides[axis]);
    let lines = (0..mask.len()).filter(|index| index / stride % length == 0);
    for start in lines {
        let mut last: Option<usize> = None;
        for place in 0..length {
            if mask[start + place * stride] == 0 {
                continue;
            }
            if let Some(last) = last.filter(|last| place - last - 1 <= max) {
                (last + 1..place).for_each(|gap| mask[start + gap * stride] = 1);
            }
            last = Some(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::grid::Affine;
    use super::*;

    const SIZE: [usize; 3] = [5, 4, 6];

    fn grid() -> Grid {
        // voxels of 10 x 10 x 5 mm: 0.5 ml
        let affine = Affine::from_columns([[10.0, 0.0, 0.0], [0.0, 10.0, 0.0], [0.0, 0.0, 5.0]], [0.0; 3]);
        Grid { size: SIZE, affine }
    }

    fn mask(voxels: &[[usize; 3]]) -> Vec<u8> {
        let mut mask = vec![0; SIZE.iter().product()];
        for [x, y, z] in voxels {
            mask[(z * SIZE[1] + y) * SIZE[0] + x] = 1;
        }
        mask
    }

    fn cleaned(cleanup: Cleanup, voxels: &[[usize; 3]]) -> Vec<u8> {
        let mut cleaned = mask(voxels);
        cleanup.apply(&mut cleaned, &grid(), 2).expect("a mask of the grid");
        cleaned
    }

    /// Three voxels that touch at an edge and a corner, two at the border, and a single one.
    const VOXELS: [[usize; 3]; 6] = [[0, 0, 0], [1, 1, 0], [2, 2, 1], [4, 0, 4], [4, 0, 5], [0, 3, 5]];

    #[test]
    fn nothing_changes_by_default() {
        assert_eq!(cleaned(Cleanup::default(), &VOXELS), mask(&VOXELS));
        let mut other = vec![0; 3];
        assert!(Cleanup::default().apply(&mut other, &grid(), 2).is_err());
    }

    #[test]
    fn components_touch_at_corners_and_are_measured_in_millilitres() {
        let largest = Cleanup { largest_component: true, ..Cleanup::default() };
        assert_eq!(cleaned(largest, &VOXELS), mask(&VOXELS[..3]));
        let at_least = |min_volume_ml| Cleanup { min_volume_ml, ..Cleanup::default() };
        assert_eq!(cleaned(at_least(1.0), &VOXELS), mask(&VOXELS[..5]));
        assert_eq!(cleaned(at_least(1.01), &VOXELS), mask(&VOXELS[..3]));
        assert_eq!(cleaned(at_least(2.0), &VOXELS), mask(&[]));
        // of two components with the same size the first is kept
        assert_eq!(cleaned(largest, &[[0, 0, 0], [4, 3, 5]]), mask(&[[0, 0, 0]]));
    }

    #[test]
    fn gaps_between_slices_are_filled_up_to_a_length() {
        let fill = |fill_gaps| Cleanup { fill_gaps, ..Cleanup::default() };
        let column = [[1, 1, 0], [1, 1, 2], [1, 1, 5]];
        assert_eq!(cleaned(fill(1), &column), mask(&[[1, 1, 0], [1, 1, 1], [1, 1, 2], [1, 1, 5]]));
        let all: Vec<[usize; 3]> = (0..6).map(|z| [1, 1, z]).collect();
        assert_eq!(cleaned(fill(2), &column), mask(&all));
        // nothing is added beyond the first and the last slice, or across a line
        assert_eq!(cleaned(fill(9), &[[4, 1, 2], [0, 2, 2]]), mask(&[[4, 1, 2], [0, 2, 2]]));
        let mut across = mask(&[[0, 1, 2], [2, 1, 2]]);
        fill(1).apply(&mut across, &grid(), 0).expect("a mask of the grid");
        assert_eq!(across, mask(&[[0, 1, 2], [1, 1, 2], [2, 1, 2]]));
    }

    #[test]
    fn gaps_are_filled_before_components_are_counted() {
        let both = Cleanup { fill_gaps: 1, largest_component: true, min_volume_ml: 0.0 };
        let kept = mask(&[[1, 1, 0], [1, 1, 1], [1, 1, 2]]);
        assert_eq!(cleaned(both, &[[1, 1, 0], [1, 1, 2], [4, 3, 4], [4, 3, 5]]), kept);
    }
}
