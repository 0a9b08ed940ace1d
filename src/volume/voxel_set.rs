//! Sets of voxels as runs of neighbours: small for regions, whatever their size.

use std::ops::Range;

/// Linear indices of voxels in ascending order, as runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VoxelSet {
    /// First index, and the index after the last one. At most 2^30 voxels fit.
    runs: Vec<[u32; 2]>,
    count: usize,
}

impl VoxelSet {
    /// Adds a voxel, whose index is larger than those before.
    pub(crate) fn push(&mut self, index: usize) {
        self.push_run(index..index + 1);
    }

    /// Adds neighbouring voxels, whose indices are larger than those before.
    pub(crate) fn push_run(&mut self, Range { start, end }: Range<usize>) {
        let (Ok(first), Ok(after)) = (u32::try_from(start), u32::try_from(end)) else { return };
        self.count += end - start;
        match self.runs.last_mut() {
            Some(run) if run[1] == first => run[1] = after,
            _ => self.runs.push([first, after]),
        }
    }

    /// True for a voxel of the set.
    pub fn contains(&self, index: usize) -> bool {
        let after = self.runs.partition_point(|run| run[0] as usize <= index);
        after > 0 && index < self.runs[after - 1][1] as usize
    }

    /// Number of voxels.
    pub fn len(&self) -> usize {
        self.count
    }

    /// True without voxels.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Number of runs.
    pub fn num_runs(&self) -> usize {
        self.runs.len()
    }

    /// The runs, in ascending order.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.runs.iter().map(|run| run[0] as usize..run[1] as usize)
    }

    /// The runs of a range of voxels that are not in the set.
    pub(crate) fn others(&self, Range { start, end }: Range<usize>) -> impl Iterator<Item = Range<usize>> + '_ {
        let ends = std::iter::once(start).chain(self.runs().map(move |run| run.end.clamp(start, end)));
        let starts = self.runs().map(move |run| run.start.clamp(start, end)).chain([end]);
        ends.zip(starts).map(|(start, end)| start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_joined_and_found() {
        let mut set = VoxelSet::default();
        assert!(set.is_empty() && !set.contains(0));
        assert!(set.others(0..5).eq(std::iter::once(0..5)));
        for index in [0, 1] {
            set.push(index);
        }
        for run in [4..5, 5..7, 9..10] {
            set.push_run(run);
        }
        assert_eq!((set.len(), set.runs().collect::<Vec<_>>()), (6, vec![0..2, 4..7, 9..10]));
        let found: Vec<usize> = (0..12).filter(|index| set.contains(*index)).collect();
        assert_eq!(found, [0, 1, 4, 5, 6, 9]);
        let others: Vec<usize> = set.others(0..12).flatten().collect();
        assert_eq!(others, [2, 3, 7, 8, 10, 11]);
        assert_eq!(set.others(0..10).flatten().count(), 4);
        for (range, wanted) in [(1..3, vec![2]), (3..8, vec![3, 7]), (4..6, vec![]), (7..12, vec![7, 8, 10, 11])] {
            assert_eq!(set.others(range).flatten().collect::<Vec<_>>(), wanted);
        }
    }
}
