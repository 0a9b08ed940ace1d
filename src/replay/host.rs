//! Model of the counting allocator of CPU tensors: the memory that it takes from the system, block by block.
//!
//! The allocator itself is `tensor/native/ledger.cpp`; change both together. Blocks of at least `LARGE` bytes are
//! mapped and cached for reuse. Cached blocks never raise the total above the highest total of live blocks so far.

use std::collections::{BTreeMap, BTreeSet};

/// Bytes of the header in front of every block.
const HEADER: u64 = 64;
/// Blocks of at least this size (header included) are mapped and cached.
const LARGE: u64 = 128 << 10;
/// Blocks of at least this size are multiples of [`GRANULARITY`], smaller ones of [`PAGE`].
const COARSE: u64 = 1 << 20;
const PAGE: u64 = 4 << 10;
const GRANULARITY: u64 = 64 << 10;

/// The modelled allocator of one process. The caller numbers the blocks.
#[derive(Debug, Default)]
pub struct HostAllocator {
    /// Capacity of each live block; for small blocks, the size with the header.
    blocks: Vec<u64>,
    /// Cached blocks by capacity (the oldest first among equals), and by age.
    by_capacity: BTreeSet<(u64, u64)>,
    by_age: BTreeMap<u64, u64>,
    clock: u64,
    kept: u64,
    live: u64,
    live_peak: u64,
    small: u64,
}

impl HostAllocator {
    /// Bytes taken from the system: live blocks with their rounding, and cached blocks.
    pub fn reserved(&self) -> u64 {
        self.live + self.kept + self.small
    }

    /// Allocates block `number` of `bytes`.
    pub fn allocate(&mut self, number: usize, bytes: u64) {
        if number >= self.blocks.len() {
            self.blocks.resize(number + 1, 0);
        }
        let held = if bytes == 0 { 0 } else { bytes + HEADER };
        if held < LARGE {
            self.small += held;
            self.blocks[number] = held;
            return;
        }
        let wanted = held.next_multiple_of(if held >= COARSE { GRANULARITY } else { PAGE });
        let found = self.by_capacity.range((wanted, 0)..).next().copied();
        let reused = found.filter(|(capacity, _)| *capacity <= wanted + wanted / 8);
        let capacity = reused.map_or(wanted, |(capacity, _)| capacity);
        if let Some((_, age)) = reused {
            self.forget(age, capacity);
        }
        self.live += capacity;
        self.live_peak = self.live_peak.max(self.live);
        if reused.is_none() {
            while self.live + self.kept > self.live_peak {
                let Some((&age, &capacity)) = self.by_age.first_key_value() else { break };
                self.forget(age, capacity);
            }
        }
        self.blocks[number] = capacity;
    }

    /// Frees block `number`.
    pub fn free(&mut self, number: usize) {
        let capacity = std::mem::take(&mut self.blocks[number]);
        if capacity < LARGE {
            self.small -= capacity;
            return;
        }
        self.live -= capacity;
        self.kept += capacity;
        self.clock += 1;
        self.by_capacity.insert((capacity, self.clock));
        self.by_age.insert(self.clock, capacity);
    }

    fn forget(&mut self, age: u64, capacity: u64) {
        self.by_capacity.remove(&(capacity, age));
        self.by_age.remove(&age);
        self.kept -= capacity;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn large_blocks_are_rounded_and_small_ones_have_a_header() {
        let mut host = HostAllocator::default();
        host.allocate(0, 0);
        assert_eq!(host.reserved(), 0);
        host.allocate(1, 100);
        assert_eq!((host.reserved(), host.small), (164, 164));
        host.allocate(2, LARGE - HEADER - 1);
        assert_eq!(host.small, 164 + LARGE - 1);
        host.allocate(3, LARGE);
        assert_eq!(host.reserved() - host.small, LARGE + PAGE, "the header needs a page");
        host.allocate(4, MIB);
        assert_eq!(host.reserved() - host.small, LARGE + PAGE + MIB + GRANULARITY);
        for block in 0..3 {
            host.free(block);
        }
        assert_eq!((host.small, host.reserved()), (0, LARGE + PAGE + MIB + GRANULARITY));
    }

    #[test]
    fn cached_blocks_stay_below_the_peak_of_live_blocks() {
        let (mut host, large) = (HostAllocator::default(), 4 * MIB - HEADER);
        host.allocate(0, large);
        host.allocate(1, large);
        host.free(0);
        host.free(1);
        assert_eq!(host.reserved(), 8 * MIB, "cached");
        host.allocate(2, large - MIB / 4);
        assert_eq!(
            (host.reserved(), host.live),
            (8 * MIB, 4 * MIB),
            "a cached block within an eighth of the size is reused"
        );
        host.allocate(3, 2 * MIB - HEADER);
        assert_eq!(
            (host.reserved(), host.kept),
            (6 * MIB, 0),
            "4 MiB are too large: a new block, and the oldest one is released"
        );
        host.free(2);
        host.allocate(4, 6 * MIB - HEADER);
        assert_eq!((host.reserved(), host.live_peak), (8 * MIB, 8 * MIB));
    }

    #[test]
    fn the_smallest_fitting_block_is_reused_and_the_oldest_is_released_first() {
        let mut host = HostAllocator::default();
        for (block, mib) in [33, 32, 40].into_iter().enumerate() {
            host.allocate(block, mib * MIB - HEADER);
        }
        for block in [0, 1, 2] {
            host.free(block);
        }
        host.allocate(3, 32 * MIB - HEADER);
        assert_eq!((host.live, host.kept), (32 * MIB, 73 * MIB));
        host.allocate(4, 10 * MIB - HEADER);
        assert_eq!((host.live, host.kept), (42 * MIB, 40 * MIB), "33 MiB were cached first");
    }
}
