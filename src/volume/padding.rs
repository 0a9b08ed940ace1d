//! Padding that a header does not declare: one extreme value of many voxels, far from all other values.

use super::hounsfield::is_air;
use super::modality::Modality;
use super::voxel_set::VoxelSet;
use super::voxels::{FEW_VALUES, Voxels, extremes, has_more_than};

/// Least share of the voxels.
const FRAC: f64 = 0.01;

/// Adds voxels to `padding` that have the smallest or the largest value, if it is further from all other values than these
/// are from each other. Returns a note about them.
pub(crate) fn add_undeclared(voxels: &Voxels, modality: &Modality, padding: &mut VoxelSet) -> Option<String> {
    // images for display have lines and texts of one value
    if !modality.is_measured() {
        return None;
    }
    let values = || voxels.values(padding, 0..voxels.len());
    let [low, high] = extremes(values());
    let [_, next_high] = extremes(values().filter(|value| *value < high));
    let [next_low, _] = extremes(values().filter(|value| *value > low));
    let is_apart = |value: f32, others: [f32; 2]| {
        let [first, last] = others.map(f64::from);
        let gap = (first - f64::from(value)).max(f64::from(value) - last);
        let count = || values().filter(|other| *other == value).count();
        // 0 is no signal, and may be far from the signal
        value != 0.0
            && first < last
            && gap > last - first
            && !(*modality == Modality::Ct && is_air(value))
            && count() as f64 >= FRAC * voxels.len() as f64
            && has_more_than(FEW_VALUES, values().filter(|other| *other != value))
    };
    // a large value may be a mark in the image, if it is not the largest number of a type
    let is_limit = [i16::MAX.into(), u16::MAX.into(), f32::MAX].contains(&high);
    let candidates = [Some((low, [next_low, high])), Some((high, [low, next_high])).filter(|_| is_limit)];
    let found = candidates.into_iter().flatten().find(|(value, rest)| is_apart(*value, *rest));
    let (value, [first, last]) = found?;
    let mut all = VoxelSet::default();
    (0..voxels.len())
        .filter(|index| padding.contains(*index) || voxels.get(*index) == Some(value))
        .for_each(|index| all.push(index));
    let (count, num_voxels) = (all.len() - padding.len(), voxels.len());
    *padding = all;
    Some(format!(
        "{count} of {num_voxels} voxels have the value {value:?}, far from all others ({first:?} to {last:?}): they are taken \
         for padding that the file does not declare, are black, and are not part of percentiles"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values from 100 to 139, and `count` more at their start.
    fn with(value: f32, count: usize) -> Voxels {
        Voxels::F32(std::iter::repeat_n(value, count).chain((0_u8..120).map(|at| f32::from(100 + at % 40))).collect())
    }

    fn found(voxels: &Voxels, modality: &str) -> (usize, Option<String>) {
        let mut padding = VoxelSet::default();
        let note = add_undeclared(voxels, &Modality::from_code(modality), &mut padding);
        assert!(padding.runs().eq(note.iter().map(|_| 0..padding.len())));
        (padding.len(), note)
    }

    #[test]
    fn one_far_value_of_many_voxels_is_padding() {
        for value in [f32::MIN, -32768.0, -2000.0, 32767.0, 65535.0] {
            let (count, note) = found(&with(value, 30), "");
            assert_eq!(count, 30, "{value}");
            let part = format!("30 of 150 voxels have the value {value:?}, far from all others (100.0 to 139.0)");
            assert!(note.is_some_and(|note| note.starts_with(&part)), "{value}");
        }
        // 0, near, rare, of few values, the air of a CT, and lines of a radiograph
        for (voxels, modality) in [
            (with(0.0, 30), "MR"),
            (with(61.0, 30), ""),
            (with(178.0, 30), "MR"),
            (with(-32768.0, 1), ""),
            (with(100.0, 30), ""),
            (Voxels::I16([5; 40].into_iter().chain((0..80).map(|at| 100 + at % 3)).collect()), ""),
            (Voxels::I16(vec![7; 50]), ""),
            (Voxels::Rgb(vec![[0; 3]; 9]), ""),
            (with(-1000.0, 30), "CT"),
            (with(4095.0, 30), "DX"),
            (with(4095.0, 30), "MR"),
        ] {
            assert_eq!(found(&voxels, modality), (0, None));
        }
    }

    #[test]
    fn declared_padding_stays() {
        let Voxels::F32(mut values) = with(-900.0, 30) else { panic!("numbers") };
        values.splice(0..0, [-5000.0; 20]);
        let mut padding = VoxelSet::default();
        (0..20).for_each(|index| padding.push(index));
        let note = add_undeclared(&Voxels::F32(values), &Modality::Mr, &mut padding).expect("a note");
        assert!(note.starts_with("30 of 170 voxels have the value -900.0"), "{note}");
        assert!(padding.runs().eq(std::iter::once(0..50)));
    }
}
