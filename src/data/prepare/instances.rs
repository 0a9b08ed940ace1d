//! Instances of a target: connected components of its mask, of which questions ask for the larger and the smaller one.
//!
//! In an image, components are those of its mask (8 neighbours). In a volume, they are those of the label map (26 neighbours),
//! so that two parts of one lesion on a slice are one instance, and a lesion keeps its name from slice to slice.

use image::{GrayImage, Luma};

use crate::agreement::SPECK_FRAC;
use crate::volume::components::Components;
use crate::volume::{SlicePlane, VoxelSet};

/// Fewest pixels or voxels of an instance: a block of 3 x 3, the neighbourhood that connects a pixel with others. Less is what a
/// drawing tool leaves behind, and a comparison of sizes depends on single pixels. As everywhere, components below
/// [`SPECK_FRAC`] of the mask are specks too.
pub(super) const FEWEST: usize = 9;

/// An instance on an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    /// Its pixels, or its voxels in the whole volume.
    pub(super) whole: usize,
    /// Its pixels on the image.
    pub(super) shown: usize,
}

/// The instances that questions can name, with their names: of two, the larger and the smaller one; of more, the largest and the
/// smallest one. One that is not larger (or smaller) than all others, both on the image and as a whole, has no name: nobody
/// could tell it from the image.
pub(super) fn named(sizes: &[Size]) -> Vec<(usize, &'static str)> {
    let seen: Vec<usize> = (0..sizes.len()).filter(|index| sizes[*index].shown >= FEWEST).collect();
    let names = match seen.len() {
        0 | 1 => return Vec::new(),
        2 => ["larger", "smaller"],
        _ => ["largest", "smallest"],
    };
    let is_larger = |a: usize, b: usize| sizes[a].whole > sizes[b].whole && sizes[a].shown > sizes[b].shown;
    let others = |of: usize| seen.iter().copied().filter(move |other| *other != of);
    let largest = seen.iter().find(|own| others(**own).all(|other| is_larger(**own, other)));
    let smallest = seen.iter().find(|own| others(**own).all(|other| is_larger(other, **own)));
    [largest, smallest].into_iter().zip(names).filter_map(|(index, name)| Some((*index?, name))).collect()
}

/// The components of a mask that are instances.
pub(super) fn instances(mask: &[u8], size: [usize; 3]) -> Vec<VoxelSet> {
    let components = Components::of(mask, size);
    let all: usize = components.sizes().iter().sum();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a count")]
    let speck = (SPECK_FRAC * all as f64).ceil() as usize;
    components.sets(FEWEST.max(speck))
}

/// The named instances of the mask of an image, each with its own mask of 0 and 255.
pub(super) fn of_image(mask: &GrayImage) -> Vec<(&'static str, GrayImage)> {
    let (width, height) = mask.dimensions();
    let sets = instances(mask.as_raw(), [width as usize, height as usize, 1]);
    let sizes: Vec<Size> = sets.iter().map(|set| Size { whole: set.len(), shown: set.len() }).collect();
    let mask_of = |set: &VoxelSet| {
        let is_set = |x: u32, y: u32| set.contains(y as usize * width as usize + x as usize);
        GrayImage::from_fn(width, height, |x, y| Luma([if is_set(x, y) { 255 } else { 0 }]))
    };
    named(&sizes).into_iter().map(|(index, name)| (name, mask_of(&sets[index]))).collect()
}

/// The named instances of a slice of a volume: index in `sets` and name.
pub(super) fn of_slice(sets: &[VoxelSet], plane: &SlicePlane, slice: usize) -> Vec<(usize, &'static str)> {
    if sets.len() < 2 {
        return Vec::new();
    }
    let [columns, rows] = plane.size;
    let mut sizes: Vec<Size> = sets.iter().map(|set| Size { whole: set.len(), shown: 0 }).collect();
    for (y, x) in (0..rows).flat_map(|y| (0..columns).map(move |x| (y, x))) {
        let voxel = plane.index(slice, x, y);
        if let Some(index) = sets.iter().position(|set| set.contains(voxel)) {
            sizes[index].shown += 1;
        }
    }
    named(&sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(sizes: &[[usize; 2]]) -> Vec<(usize, &'static str)> {
        named(&sizes.iter().map(|[whole, shown]| Size { whole: *whole, shown: *shown }).collect::<Vec<_>>())
    }

    #[test]
    fn two_are_larger_and_smaller_and_more_are_largest_and_smallest() {
        assert_eq!(names(&[[20, 20], [30, 30]]), [(1, "larger"), (0, "smaller")]);
        assert_eq!(names(&[[20, 20], [30, 30], [25, 25]]), [(1, "largest"), (0, "smallest")]);
        // equal sizes, one or none, and what is too small on the image
        for sizes in [&[[20, 20], [20, 20]][..], &[[20, 20]], &[], &[[20, 20], [30, 8]]] {
            assert_eq!(names(sizes), []);
        }
        // of three, the two smaller ones are equal
        assert_eq!(names(&[[20, 20], [30, 30], [20, 20]]), [(1, "largest")]);
        // the slice shows the order of the volume, or says nothing
        assert_eq!(names(&[[500, 20], [400, 30]]), []);
        assert_eq!(names(&[[500, 40], [400, 30], [9000, 8]]), [(0, "larger"), (1, "smaller")]);
    }

    #[test]
    fn components_below_the_smallest_block_and_specks_are_no_instances() {
        let mask = |blocks: &[(u32, u32, u32, u32)]| {
            GrayImage::from_fn(64, 64, |x, y| {
                let is_in = |&(left, top, width, height): &(u32, u32, u32, u32)| {
                    (left..left + width).contains(&x) && (top..top + height).contains(&y)
                };
                Luma([if blocks.iter().any(is_in) { 255 } else { 0 }])
            })
        };
        let found = of_image(&mask(&[(2, 2, 5, 5), (40, 40, 3, 3), (60, 2, 2, 4)]));
        let areas: Vec<_> =
            found.iter().map(|(name, mask)| (*name, mask.pixels().filter(|pixel| pixel.0 == [255]).count())).collect();
        assert_eq!(areas, [("larger", 25), ("smaller", 9)], "8 pixels are no instance");
        // 9 of 1609 pixels are less than 1 %
        assert!(of_image(&mask(&[(2, 2, 40, 40), (50, 50, 3, 3)])).is_empty());
        // parts that touch at a corner are one
        assert!(of_image(&mask(&[(2, 2, 5, 5), (7, 7, 4, 4)])).is_empty());
    }
}
