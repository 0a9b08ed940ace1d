//! Cases worked by hand from the rules of `CUDACachingAllocator.cpp`, and invariants over random sequences.

use super::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn plain() -> CachingAllocator {
    CachingAllocator::default()
}

fn get(allocator: &mut CachingAllocator, bytes: u64) -> Block {
    allocator.allocate(bytes)
}

fn get_all<const N: usize>(allocator: &mut CachingAllocator, mib: [u64; N]) -> [Block; N] {
    mib.map(|mib| get(allocator, mib * MIB))
}

fn free_all<const N: usize>(allocator: &mut CachingAllocator, blocks: [Block; N]) {
    for block in blocks {
        allocator.free(block);
    }
}

fn address(allocator: &CachingAllocator, block: Block) -> u64 {
    allocator.nodes[block.0.unwrap()].address
}

fn size(allocator: &CachingAllocator, block: Block) -> u64 {
    allocator.nodes[block.0.unwrap()].size
}

/// `allocated` and `reserved`.
fn bytes(allocator: &CachingAllocator) -> (u64, u64) {
    (allocator.allocated(), allocator.reserved())
}

/// Free blocks of the large pool: size and address in MiB.
fn holes(allocator: &CachingAllocator) -> Vec<(u64, u64)> {
    allocator.free[0].iter().map(|key| (key.0 / MIB, key.1 / MIB)).collect()
}

#[test]
fn block_and_segment_of_a_first_request() {
    let cases = [
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        // Large pool, below 10 MiB: 20 MiB, split.
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        // Rounded to 512 first: this is a request of 10 MiB.
        (10 * MIB - 1, 10 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        // 12 MiB; 2 MiB - 512 are left, more than 1 MiB: split.
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        // 1 MiB is left, not more: the block is all of it, and counts.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 1, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (12 * MIB, 12 * MIB, 12 * MIB),
        (100 * MIB + 1, 100 * MIB + 512, 102 * MIB),
    ];
    for (requested, allocated, reserved) in cases {
        let mut allocator = plain();
        get(&mut allocator, requested);
        assert_eq!(bytes(&allocator), (allocated, reserved), "{requested}");
    }
}

#[test]
fn a_request_of_zero_bytes_takes_no_memory() {
    let mut allocator = plain();
    let block = get(&mut allocator, 0);
    allocator.free(block);
    assert_eq!(bytes(&allocator), (0, 0));
}

#[test]
fn requests_share_a_segment_and_small_ones_never_a_large_one() {
    let mut allocator = plain();
    // 2 MiB hold 512 KiB, 1 MiB and 512 KiB; the fourth needs another.
    for kib in [512, 1024, 512, 512] {
        get(&mut allocator, kib * KIB);
    }
    assert_eq!(bytes(&allocator), (2560 * KIB, 4 * MIB));
    // 20 MiB hold 9 and 9; 2 MiB are left for the third.
    get_all(&mut allocator, [9, 9, 2]);
    assert_eq!(bytes(&allocator), (2560 * KIB + 20 * MIB, 24 * MIB));
}

#[test]
fn small_blocks_are_split_to_the_last_512_bytes() {
    let mut allocator = plain();
    get(&mut allocator, MIB);
    get(&mut allocator, MIB - 512);
    get(&mut allocator, 512);
    assert_eq!(bytes(&allocator), (2 * MIB, 2 * MIB));
    get(&mut allocator, 512);
    assert_eq!(bytes(&allocator), (2 * MIB + 512, 4 * MIB));
}

#[test]
fn free_neighbours_become_one_block() {
    let mut allocator = plain();
    let [a, b, c] = get_all(&mut allocator, [4, 6, 8]);
    // 4 + 6 + 8 of 20: 2 MiB are free behind c.
    allocator.free(a);
    allocator.free(c);
    // Holes of 4 and of 8 + 2 MiB.
    assert_eq!(holes(&allocator), [(4, 0), (10, 10)]);
    allocator.free(b);
    assert_eq!(holes(&allocator), [(20, 0)]);
    // All 20 MiB serve again, unsplit, without another segment.
    let block = get(&mut allocator, 20 * MIB);
    assert_eq!((address(&allocator, block), size(&allocator, block)), (0, 20 * MIB));
    assert_eq!(allocator.reserved(), 20 * MIB);
}

#[test]
fn smallest_block_that_fits_is_taken_and_the_lowest_of_equals() {
    let mut allocator = plain();
    let blocks = get_all(&mut allocator, [16, 12, 14, 12]);
    // At 0, 16, 28 and 42 MiB.
    free_all(&mut allocator, blocks);
    let block = get(&mut allocator, 13 * MIB);
    assert_eq!(address(&allocator, block), 28 * MIB);
    // 1 MiB more than asked is not split off.
    assert_eq!(bytes(&allocator), (14 * MIB, 54 * MIB));
    let block = get(&mut allocator, 12 * MIB);
    assert_eq!(address(&allocator, block), 16 * MIB);
    let block = get(&mut allocator, 12 * MIB);
    assert_eq!(address(&allocator, block), 42 * MIB);
    // 16 = 12 + 4: split.
    let block = get(&mut allocator, 12 * MIB);
    assert_eq!((address(&allocator, block), size(&allocator, block)), (0, 12 * MIB));
    assert_eq!(bytes(&allocator), (50 * MIB, 54 * MIB));
}

#[test]
fn holes_that_are_too_small_make_reserved_exceed_allocated() {
    let mut allocator = plain();
    let [a, _b] = get_all(&mut allocator, [8, 8]);
    allocator.free(a);
    // Free: 8 and 4 MiB, not 9.
    get(&mut allocator, 9 * MIB);
    assert_eq!(bytes(&allocator), (17 * MIB, 40 * MIB));
}

#[test]
#[should_panic(expected = "not live")]
fn block_is_freed_once() {
    let mut allocator = plain();
    let block = get(&mut allocator, 1);
    allocator.free(block);
    allocator.free(block);
}

/// `SplitMix64`.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound
    }

    /// From a few bytes to 63 MiB, as often below as above 1 MiB.
    fn size(&mut self) -> u64 {
        match self.below(4) {
            0 => 1 + self.below(4 * KIB),
            1 => 1 + self.below(MIB),
            2 => 1 + self.below(10 * MIB),
            _ => 1 + self.below(63 * MIB),
        }
    }
}

/// Checks the invariants between two calls. `live` has the blocks and the requested bytes.
fn check(allocator: &CachingAllocator, live: &[(Block, u64)]) {
    for &(block, requested) in live {
        let (size, rounded) = (size(allocator, block), requested.div_ceil(512) * 512);
        let excess = if rounded <= MIB { 0 } else { MIB };
        assert!((rounded..=rounded + excess).contains(&size), "{requested} became {size}");
    }
    let mut ranges: Vec<(u64, u64)> =
        live.iter().map(|&(block, _)| (address(allocator, block), size(allocator, block))).collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "blocks overlap");
    assert_eq!(allocator.allocated(), ranges.iter().map(|range| range.1).sum::<u64>());
    let nodes = || allocator.nodes.iter().enumerate().filter(|(_, node)| node.size > 0);
    assert_eq!(allocator.reserved(), nodes().map(|(_, node)| node.size).sum::<u64>());
    let num_free: usize = allocator.free.iter().map(std::collections::BTreeSet::len).sum();
    assert_eq!(nodes().filter(|(_, node)| !node.allocated).count(), num_free);
    for (index, node) in nodes() {
        let Some(next) = node.next else { continue };
        let behind = &allocator.nodes[next];
        assert_eq!((behind.prev, behind.address), (Some(index), node.address + node.size));
        assert!(node.allocated || behind.allocated, "free neighbours are apart");
    }
}

#[test]
fn random_sequences_keep_all_invariants() {
    for seed in 0..8 {
        let (mut random, mut allocator, mut live) = (Random(seed), plain(), Vec::new());
        for step in 0..1500 {
            match random.below(100) {
                0..55 => {
                    let requested = random.size();
                    live.push((allocator.allocate(requested), requested));
                }
                _ if live.is_empty() => {}
                draw => {
                    // Mostly the youngest, as in a forward pass.
                    let nth = random.below(if draw < 80 { live.len().min(4) } else { live.len() } as u64);
                    let index = live.len() - 1 - usize::try_from(nth).unwrap();
                    allocator.free(live.remove(index).0);
                }
            }
            if step % 16 == 0 {
                check(&allocator, &live);
            }
        }
        live.drain(..).for_each(|(block, _)| allocator.free(block));
        check(&allocator, &live);
    }
}
