//! Connected components of masks. Voxels are connected over faces, edges and corners: 26 neighbours, and 8 in a single slice.

use super::voxel_set::VoxelSet;

/// Connected components of a mask.
pub struct Components {
    /// Component of each voxel, from 1; 0 is background.
    of_voxel: Vec<u32>,
    /// Number of voxels; entry 0 is not used.
    sizes: Vec<usize>,
}

impl Components {
    /// Of a mask of this size, whose background is 0. Components are numbered by their first voxel.
    pub fn of(mask: &[u8], size: [usize; 3]) -> Self {
        let mut of_voxel = vec![0_u32; mask.len()];
        let mut sizes = vec![0];
        let mut stack = Vec::new();
        for seed in 0..mask.len() {
            if mask[seed] == 0 || of_voxel[seed] != 0 {
                continue;
            }
            let component = u32::try_from(sizes.len()).unwrap_or(u32::MAX);
            sizes.push(0);
            of_voxel[seed] = component;
            stack.push(seed);
            while let Some(voxel) = stack.pop() {
                sizes[component as usize] += 1;
                for_neighbours(voxel, size, |neighbour| {
                    if mask[neighbour] != 0 && of_voxel[neighbour] == 0 {
                        of_voxel[neighbour] = component;
                        stack.push(neighbour);
                    }
                });
            }
        }
        Self { of_voxel, sizes }
    }

    /// The component of each voxel, from 1; 0 is background.
    pub fn of_voxels(&self) -> &[u32] {
        &self.of_voxel
    }

    /// Number of voxels of each component; the first is component 1.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes[1..]
    }

    /// The component with most voxels; the first of equal ones.
    pub(crate) fn largest(&self) -> Option<u32> {
        let components = (1_u32..).zip(self.sizes());
        components.reduce(|best, next| if next.1 > best.1 { next } else { best }).map(|(component, _)| component)
    }

    /// The voxels of each component of at least so many.
    pub fn sets(&self, least: usize) -> Vec<VoxelSet> {
        let mut sets = vec![VoxelSet::default(); self.sizes.len()];
        for (voxel, component) in self.of_voxel.iter().enumerate() {
            let component = *component as usize;
            if component > 0 && self.sizes[component] >= least {
                sets[component].push(voxel);
            }
        }
        sets.retain(|set| !set.is_empty());
        sets
    }
}

/// Calls `visit` with the linear indices of the 26 neighbours of a voxel that are inside, and of the voxel itself.
fn for_neighbours(voxel: usize, size: [usize; 3], mut visit: impl FnMut(usize)) {
    let place = [voxel % size[0], voxel / size[0] % size[1], voxel / size[0] / size[1]];
    let range = |axis: usize| place[axis].saturating_sub(1)..=(place[axis] + 1).min(size[axis] - 1);
    for z in range(2) {
        for y in range(1) {
            for x in range(0) {
                visit((z * size[1] + y) * size[0] + x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of voxels of the components of this mask, the largest first, are those of scipy 1.17 and SimpleITK 2:
    ///
    /// ```python
    /// z, y, x = np.mgrid[0:11, 0:19, 0:23]
    /// mask = (x * x * 7 + y * 13 * x + z * 29 * y + z * z * 5) % 17 == 0
    /// labels, count = scipy.ndimage.label(mask, structure=np.ones((3, 3, 3)))  # of a slice: mask[4], np.ones((3, 3))
    /// SimpleITK.ConnectedComponent(SimpleITK.GetImageFromArray(mask.astype(np.uint8)), True)
    /// ```
    #[test]
    fn components_are_those_of_scipy_and_simple_itk() {
        const SIZE: [usize; 3] = [23, 19, 11];
        let is_set =
            |x: usize, y: usize, z: usize| (x * x * 7 + y * 13 * x + z * 29 * y + z * z * 5).is_multiple_of(17);
        let mut mask = Vec::new();
        for z in 0..SIZE[2] {
            for y in 0..SIZE[1] {
                mask.extend((0..SIZE[0]).map(|x| u8::from(is_set(x, y, z))));
            }
        }
        let components = Components::of(&mask, SIZE);
        assert_eq!(components.sizes(), [138, 401, 6, 3, 1, 1]);
        let sets = components.sets(4);
        assert_eq!(sets.iter().map(VoxelSet::len).collect::<Vec<_>>(), [138, 401, 6]);
        assert!(sets.iter().all(|set| (0..mask.len()).all(|voxel| !set.contains(voxel) || mask[voxel] == 1)));
        assert_eq!(components.largest(), Some(2));
        let slice = &mask[4 * 23 * 19..5 * 23 * 19];
        let mut sizes = Components::of(slice, [23, 19, 1]).sizes().to_vec();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        assert_eq!((sizes.len(), sizes[0], sizes[1], sizes.iter().sum::<usize>()), (24, 21, 1, 44));
    }
}
