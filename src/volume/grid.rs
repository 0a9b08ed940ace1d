//! Voxel grids: size, and the affine from voxel indices to millimetres of the patient (RAS+, as in NIfTI).

use prsmed_base::error::{Error, Result};

/// No image of a patient has larger voxels in two directions, in mm.
const MAX_VOXEL: f64 = 50.0;

/// Affine of 3 rows and 4 columns: voxel index `[i, j, k]` -> position `[right, anterior, superior]` in mm.
///
/// RAS+: the coordinates grow from left to Right, from posterior to Anterior, and from inferior to Superior.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Affine(pub [[f64; 4]; 3]);

impl Affine {
    /// The affine with these columns: steps in mm along the three voxel axes, and the position of voxel `[0, 0, 0]`.
    pub fn from_columns(steps: [[f64; 3]; 3], origin: [f64; 3]) -> Self {
        let row = |r: usize| [steps[0][r], steps[1][r], steps[2][r], origin[r]];
        Self([row(0), row(1), row(2)])
    }

    /// Step in mm along voxel axis `axis` (0, 1 or 2).
    pub fn step(&self, axis: usize) -> [f64; 3] {
        [self.0[0][axis], self.0[1][axis], self.0[2][axis]]
    }

    /// Position in mm of voxel `[0, 0, 0]`.
    pub fn origin(&self) -> [f64; 3] {
        self.step(3)
    }

    /// Distance in mm between neighbouring voxels along the three voxel axes.
    pub fn spacing(&self) -> [f64; 3] {
        [0, 1, 2].map(|axis| length(self.step(axis)))
    }

    /// Position in mm of a voxel.
    pub fn apply(&self, voxel: [f64; 3]) -> [f64; 3] {
        self.0.map(|row| row[0] * voxel[0] + row[1] * voxel[1] + row[2] * voxel[2] + row[3])
    }

    /// Determinant of the 3x3 part; its absolute value is the volume of a voxel in mm3.
    pub fn determinant(&self) -> f64 {
        dot(self.step(0), cross(self.step(1), self.step(2)))
    }

    /// The inverse, from mm to voxel indices; `None` if the affine is singular or not finite.
    pub fn inverse(&self) -> Option<Self> {
        let determinant = self.determinant();
        let size: f64 = self.spacing().iter().product();
        if !self.is_finite() || determinant.abs() <= 1e-9 * size || size == 0.0 {
            return None;
        }
        let [a, b, c] = [0, 1, 2].map(|axis| self.step(axis));
        let rows = [cross(b, c), cross(c, a), cross(a, b)].map(|row| row.map(|value| value / determinant));
        let origin = self.origin();
        Some(Self(rows.map(|row| [row[0], row[1], row[2], -dot(row, origin)])))
    }

    /// True if all numbers are finite.
    pub fn is_finite(&self) -> bool {
        self.0.iter().flatten().all(|value| value.is_finite())
    }

    /// The voxel axis that is closest to each patient axis (R, A, S), and whether its index decreases along it.
    ///
    /// All 6 permutations are compared, so that each voxel axis is used once, also for oblique volumes.
    pub fn closest_axes(&self) -> [AxisMap; 3] {
        const PERMUTATIONS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
        let spacing = self.spacing();
        let cosine = |patient: usize, voxel: usize| self.0[patient][voxel] / spacing[voxel].max(f64::MIN_POSITIVE);
        let score = |axes: &[usize; 3]| -> f64 { (0..3).map(|patient| cosine(patient, axes[patient]).abs()).sum() };
        let mut best = PERMUTATIONS[0];
        for candidate in &PERMUTATIONS[1..] {
            // a small margin, so that equal candidates keep the first
            if score(candidate) > score(&best) + 1e-9 {
                best = *candidate;
            }
        }
        [0, 1, 2].map(|patient| AxisMap { voxel: best[patient], flipped: cosine(patient, best[patient]) < 0.0 })
    }

    /// Letters of the directions in which the voxel indices grow, for example `LAS`.
    pub fn orientation(&self) -> String {
        let mut letters = [' '; 3];
        for (axis, (forward, backward)) in self.closest_axes().iter().zip([('R', 'L'), ('A', 'P'), ('S', 'I')]) {
            letters[axis.voxel] = if axis.flipped { backward } else { forward };
        }
        letters.iter().collect()
    }

    /// Largest deviation of two voxel axes from a right angle, in degrees.
    pub fn skew(&self) -> f64 {
        let spacing = self.spacing();
        let cosine = |[a, b]: [usize; 2]| dot(self.step(a), self.step(b)) / (spacing[a] * spacing[b]);
        let largest =
            [[0, 1], [0, 2], [1, 2]].map(cosine).into_iter().fold(0.0, |most: f64, value| most.max(value.abs()));
        largest.min(1.0).asin().to_degrees()
    }

    /// The steps as unit vectors; `None` if they are not orthogonal.
    pub(crate) fn unit_steps(&self) -> Option<[[f64; 3]; 3]> {
        let steps = [0, 1, 2].map(|axis| unit(self.step(axis)));
        let expected = cross(steps[0], steps[1]);
        let off = length(subtract(expected, steps[2])).min(length(subtract(expected, scale(steps[2], -1.0))));
        (off < 1e-3).then_some(steps)
    }

    /// `self` after `first`: the affine that applies `first`, then `self`.
    pub(crate) fn after(&self, first: &Self) -> Self {
        let linear = |step: [f64; 3]| self.0.map(|row| dot([row[0], row[1], row[2]], step));
        Self::from_columns([0, 1, 2].map(|axis| linear(first.step(axis))), self.apply(first.origin()))
    }
}

/// A voxel axis, and whether its index decreases along a patient axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AxisMap {
    /// Voxel axis: 0, 1 or 2.
    pub voxel: usize,
    /// True if the index decreases along the patient axis.
    pub flipped: bool,
}

/// A voxel grid in the patient.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    /// Number of voxels along the three axes; the first axis is contiguous in memory.
    pub size: [usize; 3],
    /// Voxel index -> mm (RAS+).
    pub affine: Affine,
}

impl Grid {
    /// Number of voxels.
    pub fn num_voxels(&self) -> usize {
        self.size.iter().product()
    }

    /// Distance in mm between neighbouring voxels along the three voxel axes.
    pub fn spacing(&self) -> [f64; 3] {
        self.affine.spacing()
    }

    /// A note about voxels that are too large for an image of a patient.
    pub(crate) fn size_note(&self) -> Option<String> {
        let [x, y, z] = self.spacing();
        let num_large = [x, y, z].iter().filter(|mm| **mm > MAX_VOXEL).count();
        let note = || {
            format!(
                "voxels of {x:.1} x {y:.1} x {z:.1} mm are too large for an image of a patient: check the voxel size of the \
                 header and its unit"
            )
        };
        (num_large > 1).then(note)
    }

    /// Volume of one voxel in millilitres.
    pub fn voxel_ml(&self) -> f64 {
        self.affine.determinant().abs() / 1000.0
    }

    /// Volume in millilitres of a mask: `mask` has one value for each voxel, 0 is background.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of voxels.
    pub fn volume_ml(&self, mask: &[u8]) -> Result<f64> {
        self.check(mask.len())?;
        Ok(mask.iter().filter(|value| **value != 0).count() as f64 * self.voxel_ml())
    }

    /// Fails if an array of `len` voxels does not belong to the grid.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn check(&self, len: usize) -> Result<()> {
        if len == self.num_voxels() {
            return Ok(());
        }
        let [x, y, z] = self.size;
        Err(Error::Shape { reason: format!("an array of {len} voxels does not belong to a grid of {x}x{y}x{z}") })
    }
}

pub(crate) fn dot(a: [f64; 3], b: [f64; 3]) -> f64 {
    a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
}

pub(crate) fn cross(a: [f64; 3], b: [f64; 3]) -> [f64; 3] {
    [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]]
}

pub(crate) fn length(a: [f64; 3]) -> f64 {
    dot(a, a).sqrt()
}

/// The vector with the length 1.
pub(crate) fn unit(a: [f64; 3]) -> [f64; 3] {
    scale(a, 1.0 / length(a))
}

pub(crate) fn subtract(a: [f64; 3], b: [f64; 3]) -> [f64; 3] {
    [a[0] - b[0], a[1] - b[1], a[2] - b[2]]
}

pub(crate) fn scale(a: [f64; 3], factor: f64) -> [f64; 3] {
    a.map(|value| value * factor)
}

/// Between the patient coordinates of DICOM (LPS+) and those of NIfTI (RAS+), in both directions.
pub(crate) fn swap_lps_ras(a: [f64; 3]) -> [f64; 3] {
    [-a[0], -a[1], a[2]]
}

/// Largest distance in mm between the corners of a volume under two affines.
pub(crate) fn furthest(a: &Affine, b: &Affine, size: [usize; 3]) -> f64 {
    corners(size).map(|corner| length(subtract(a.apply(corner), b.apply(corner)))).fold(0.0, f64::max)
}

/// The 8 corners of a volume as voxel indices.
pub(crate) fn corners(size: [usize; 3]) -> impl Iterator<Item = [f64; 3]> {
    (0..8_usize)
        .map(move |corner| [0, 1, 2].map(|axis| if corner >> axis & 1 == 1 { size[axis] as f64 - 1.0 } else { 0.0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn oblique() -> Affine {
        Affine::from_columns([[0.1, -0.9, 0.05], [-1.8, -0.2, 0.1], [0.1, 0.2, 3.0]], [10.0, -20.0, 30.0])
    }

    #[test]
    fn the_inverse_undoes_the_affine() {
        let affine = oblique();
        let both = affine.inverse().expect("invertible").after(&affine);
        for (row, values) in both.0.iter().enumerate() {
            for (column, value) in values.iter().enumerate() {
                assert!((value - f64::from(u8::from(row == column))).abs() < 1e-12, "{both:?}");
            }
        }
        assert_eq!(Affine::from_columns([[1.0, 0.0, 0.0]; 3], [0.0; 3]).inverse(), None);
        assert_eq!(Affine::from_columns([[0.0; 3]; 3], [0.0; 3]).inverse(), None);
    }

    #[test]
    fn orientations_are_named_by_their_closest_axes() {
        assert_eq!(oblique().orientation(), "PLS");
        let las = Affine::from_columns([[-2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [0.0; 3]);
        assert_eq!(las.orientation(), "LAS");
        // at 45 degrees every voxel axis is still used once
        let turned = Affine::from_columns([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [0.0, 0.0, 1.0]], [0.0; 3]);
        let mut axes = turned.closest_axes().map(|axis| axis.voxel);
        axes.sort_unstable();
        assert_eq!(axes, [0, 1, 2]);
    }

    #[test]
    fn volumes_are_in_millilitres() {
        let grid = Grid {
            size: [2, 2, 1],
            affine: Affine::from_columns([[-2.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 10.0]], [0.0; 3]),
        };
        assert!((grid.volume_ml(&[0, 1, 255, 0]).expect("a mask") - 0.2).abs() < 1e-12);
        assert!(grid.volume_ml(&[0; 5]).is_err());
    }
}
