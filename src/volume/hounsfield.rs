//! Whether values are like Hounsfield units.

use std::ops::RangeInclusive;

use super::voxel_set::VoxelSet;
use super::voxels::Voxels;

/// Hounsfield units of air, with the noise of a scan.
const AIR: RangeInclusive<f32> = -1100.0..=-500.0;
/// Hounsfield units of air, lung and fat.
const LIGHT: RangeInclusive<f32> = -1100.0..=LEAST_WATER;
/// Smallest value that may be water.
pub(crate) const LEAST_WATER: f32 = -20.0;
/// Least share of values that body images have of air, and crops of them of air, lung and fat.
const LIGHT_FRAC: f64 = 0.01;
/// Few voxels of a body have more Hounsfield units.
const DENSE: f32 = 700.0;
/// A larger share of dense values is not bone.
const DENSE_FRAC: f64 = 0.1;

/// True for a value in the range of air.
pub(crate) fn is_air(value: f32) -> bool {
    AIR.contains(&value)
}

/// Shares of values in ranges of Hounsfield units.
pub(crate) struct TissueShares {
    air: f64,
    light: f64,
    dense: f64,
}

impl TissueShares {
    pub(crate) fn of(values: impl Iterator<Item = f32>) -> Self {
        let ([mut air, mut light, mut dense], mut all) = ([0_usize; 3], 0_usize);
        for value in values {
            all += 1;
            air += usize::from(is_air(value));
            light += usize::from(LIGHT.contains(&value));
            dense += usize::from(value > DENSE);
        }
        let [air, light, dense] = [air, light, dense].map(|count| count as f64 / all.max(1) as f64);
        Self { air, light, dense }
    }

    pub(crate) fn of_all(voxels: &Voxels, padding: &VoxelSet) -> Self {
        Self::of(voxels.values(padding, 0..voxels.len()))
    }

    pub(crate) fn has_air(&self) -> bool {
        self.air >= LIGHT_FRAC
    }

    /// True with air, lung or fat. Almost all CT images have some, also those of a part of the body.
    pub(crate) fn has_light(&self) -> bool {
        self.light >= LIGHT_FRAC
    }

    /// True for soft tissue at about 1000, as without the intercept of a CT.
    pub(crate) fn are_shifted(&self) -> bool {
        !self.has_light() && self.dense >= DENSE_FRAC
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_without_the_intercept_of_a_ct_are_found() {
        // air, fat, soft tissue, bone
        let of = |counts: [usize; 4], shift: f32| {
            let values = [-1000.0, -90.0, 45.0, 900.0].into_iter().zip(counts);
            TissueShares::of(values.flat_map(|(value, count)| std::iter::repeat_n(value + shift, count)))
        };
        for (counts, is_shifted) in [([50, 10, 35, 5], true), ([0, 10, 85, 5], true), ([0, 0, 100, 0], true)] {
            assert_eq!(of(counts, 1024.0).are_shifted(), is_shifted);
            assert!(!of(counts, 0.0).are_shifted(), "{counts:?}");
        }
        // bone and teeth with little fat, soft tissue only, nothing
        assert!(!of([0, 2, 20, 78], 0.0).are_shifted() && of([0, 2, 20, 78], 0.0).has_light());
        assert!(!of([0, 0, 100, 0], 0.0).has_light() && !of([0; 4], 0.0).are_shifted());
        assert!(of([1, 0, 99, 0], 0.0).has_air() && !of([0, 99, 1, 0], 0.0).has_air());
    }
}
