//! Cases worked by hand from the rules of `CUDACachingAllocator.cpp`, and invariants over random sequences.

use super::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn plain() -> CachingAllocator {
    CachingAllocator::new(Settings::default())
}

fn limited(mib: u64) -> CachingAllocator {
    CachingAllocator::new(Settings { limit: Some(mib * MIB), ..Settings::default() })
}

fn expandable(limit: Option<u64>) -> CachingAllocator {
    CachingAllocator::new(Settings { expandable_segments: true, limit, ..Settings::default() })
}

/// Allocates on stream 0 from the default pool.
fn get(allocator: &mut CachingAllocator, bytes: u64) -> Block {
    allocator.allocate(bytes, 0, Pool::Default).unwrap()
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
    (allocator.stats().allocated, allocator.stats().reserved)
}

fn segment_sizes(allocator: &CachingAllocator) -> Vec<u64> {
    allocator.segments().iter().map(|segment| segment.size / MIB).collect()
}

#[test]
fn first_byte_takes_512_of_a_2_mib_segment() {
    let mut allocator = plain();
    let block = get(&mut allocator, 1);
    let stats = Stats {
        allocated: 512,
        allocated_peak: 512,
        active: 512,
        active_peak: 512,
        reserved: 2 * MIB,
        reserved_peak: 2 * MIB,
        num_segments: 1,
        num_cuda_mallocs: 1,
        num_retries: 0,
    };
    assert_eq!(allocator.stats(), stats);
    let segment = Segment { address: 0, size: 2 * MIB, live: 512, pool: Pool::Default, small: true, stream: 0 };
    assert_eq!(allocator.segments(), [segment]);
    allocator.free(block);
    assert_eq!(allocator.stats(), Stats { allocated: 0, active: 0, ..stats });
    assert_eq!(allocator.segments(), [Segment { live: 0, ..segment }]);
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
fn no_bytes_need_no_memory() {
    let mut allocator = plain();
    let block = get(&mut allocator, 0);
    allocator.free(block);
    assert_eq!(allocator.stats(), Stats::default());
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
    assert_eq!(segment_sizes(&allocator), [2, 2, 20]);
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
    assert_eq!(
        allocator.pools[1].free.iter().map(|key| (key.1 / MIB, key.2 / MIB)).collect::<Vec<_>>(),
        [(4, 0), (10, 10)]
    );
    allocator.free(b);
    assert_eq!(allocator.pools[1].free.iter().map(|key| (key.1 / MIB, key.2 / MIB)).collect::<Vec<_>>(), [(20, 0)]);
    // All 20 MiB serve again, unsplit, without another segment.
    let block = get(&mut allocator, 20 * MIB);
    assert_eq!((address(&allocator, block), size(&allocator, block)), (0, 20 * MIB));
    assert_eq!(allocator.stats().num_cuda_mallocs, 1);
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
    let stats = allocator.stats();
    assert_eq!((stats.allocated_peak, stats.reserved_peak, stats.num_segments), (17 * MIB, 40 * MIB, 2));
}

#[test]
fn peaks_stay() {
    let mut allocator = plain();
    let [a, b] = get_all(&mut allocator, [30, 50]);
    allocator.free(a);
    allocator.free(b);
    allocator.empty_cache();
    get(&mut allocator, 10 * MIB);
    let stats = allocator.stats();
    assert_eq!((stats.allocated, stats.allocated_peak), (10 * MIB, 80 * MIB));
    assert_eq!((stats.active, stats.active_peak), (10 * MIB, 80 * MIB));
    assert_eq!((stats.reserved, stats.reserved_peak), (10 * MIB, 80 * MIB));
    assert_eq!((stats.num_segments, stats.num_cuda_mallocs), (1, 3));
}

#[test]
fn emptying_the_cache_keeps_segments_in_use() {
    let mut allocator = plain();
    let [a, b, c] = get_all(&mut allocator, [8, 8, 30]);
    let d = get(&mut allocator, 1);
    free_all(&mut allocator, [a, c, d]);
    assert_eq!(bytes(&allocator), (8 * MIB, 52 * MIB));
    allocator.empty_cache();
    assert_eq!(bytes(&allocator), (8 * MIB, 20 * MIB));
    allocator.free(b);
    allocator.empty_cache();
    assert_eq!((bytes(&allocator), allocator.stats().num_segments), ((0, 0), 0));
}

#[test]
fn full_device_empties_the_cache_and_tries_again() {
    let mut allocator = limited(30);
    let block = get(&mut allocator, 20 * MIB);
    allocator.free(block);
    // 20 + 24 are more than 30; without the 20, 24 are not.
    get(&mut allocator, 24 * MIB);
    let stats = allocator.stats();
    assert_eq!((stats.reserved, stats.reserved_peak), (24 * MIB, 24 * MIB));
    assert_eq!((stats.num_retries, stats.num_cuda_mallocs, stats.num_segments), (1, 2, 1));
}

#[test]
fn limit_is_the_last_byte_that_fits() {
    assert!(limited(24).allocate(24 * MIB, 0, Pool::Default).is_ok());
    let error = limited(24).allocate(24 * MIB + 1, 0, Pool::Default).unwrap_err();
    assert_eq!(error, OutOfMemory { requested: 26 * MIB, reserved: 0, allocated: 0 });
}

#[test]
fn out_of_memory_leaves_the_allocator_usable() {
    let mut allocator = limited(40);
    let [a, b] = get_all(&mut allocator, [8, 7]);
    allocator.free(a);
    // The segment of b cannot go: 20 + 24 stay more than 40.
    let error = allocator.allocate(23 * MIB, 0, Pool::Default).unwrap_err();
    assert_eq!(error, OutOfMemory { requested: 24 * MIB, reserved: 20 * MIB, allocated: 7 * MIB });
    assert_eq!(error.to_string(), "no room for 25165824 bytes beside 20971520 reserved bytes (7340032 allocated)");
    assert_eq!(allocator.stats().num_retries, 1);
    allocator.free(b);
    get(&mut allocator, 24 * MIB);
    assert_eq!((bytes(&allocator), allocator.stats().num_retries), ((24 * MIB, 24 * MIB), 2));
}

#[test]
fn request_that_no_device_can_hold_is_out_of_memory() {
    for allocator in [&mut plain(), &mut expandable(None)] {
        for requested in [1 << 50, u64::MAX] {
            assert!(allocator.allocate(requested, 0, Pool::Default).is_err());
        }
        assert_eq!(allocator.stats(), Stats::default());
    }
}

#[test]
fn stream_reuses_only_its_own_blocks() {
    let mut allocator = plain();
    let block = allocator.allocate(512, 1, Pool::Default).unwrap();
    allocator.free(block);
    allocator.allocate(512, 0, Pool::Default).unwrap();
    allocator.allocate(512, 2, Pool::Default).unwrap();
    assert_eq!(bytes(&allocator), (1024, 6 * MIB));
    let again = allocator.allocate(512, 1, Pool::Default).unwrap();
    assert_eq!(address(&allocator, again), 0);
    assert_eq!(bytes(&allocator), (1536, 6 * MIB));
    assert_eq!(allocator.segments().iter().map(|segment| segment.stream).collect::<Vec<_>>(), [1, 0, 2]);
}

#[test]
fn private_pool_keeps_its_memory_until_released() {
    let mut allocator = plain();
    let graph = Pool::Private(7);
    let small = allocator.allocate(512, 0, graph).unwrap();
    let large = allocator.allocate(12 * MIB, 0, graph).unwrap();
    allocator.free(small);
    allocator.free(large);
    // Neither the default pool nor another graph gets it.
    get(&mut allocator, 512);
    allocator.allocate(512, 0, Pool::Private(8)).unwrap();
    assert_eq!(bytes(&allocator), (1024, 18 * MIB));
    // The graph does.
    let large = allocator.allocate(12 * MIB, 0, graph).unwrap();
    assert_eq!(bytes(&allocator), (12 * MIB + 1024, 18 * MIB));
    allocator.empty_cache();
    assert_eq!(allocator.stats().reserved, 18 * MIB);
    // Released: its free segment goes, the live one when it is free.
    allocator.release_private(7);
    assert_eq!(allocator.stats().reserved, 18 * MIB);
    allocator.empty_cache();
    assert_eq!(allocator.stats().reserved, 16 * MIB);
    allocator.free(large);
    allocator.empty_cache();
    assert_eq!(bytes(&allocator), (1024, 4 * MIB));
    let pools: Vec<Pool> = allocator.segments().iter().map(|segment| segment.pool).collect();
    assert_eq!(pools, [Pool::Default, Pool::Private(8)]);
}

#[test]
fn full_device_releases_free_memory_of_released_pools() {
    let mut allocator = limited(30);
    let block = allocator.allocate(20 * MIB, 0, Pool::Private(0)).unwrap();
    allocator.free(block);
    assert!(allocator.allocate(24 * MIB, 0, Pool::Default).is_err());
    allocator.release_private(0);
    assert!(allocator.allocate(24 * MIB, 0, Pool::Default).is_ok());
    assert_eq!(allocator.stats().num_retries, 2);
}

#[test]
fn capture_does_not_empty_the_cache() {
    let mut allocator = limited(30);
    let block = get(&mut allocator, 20 * MIB);
    allocator.free(block);
    let error = allocator.allocate(12 * MIB, 0, Pool::Private(0)).unwrap_err();
    assert_eq!(error, OutOfMemory { requested: 12 * MIB, reserved: 20 * MIB, allocated: 0 });
    assert_eq!(allocator.stats().num_retries, 0);
}

#[test]
fn used_again_a_released_pool_is_kept_again() {
    let mut allocator = plain();
    for _ in 0..2 {
        let block = allocator.allocate(512, 0, Pool::Private(0)).unwrap();
        allocator.free(block);
        allocator.empty_cache();
        assert_eq!(allocator.stats().reserved, 2 * MIB);
        allocator.release_private(0);
    }
    allocator.empty_cache();
    assert_eq!(allocator.stats().reserved, 0);
}

#[test]
fn oversize_blocks_are_not_split_and_serve_only_their_like() {
    let settings = Settings { max_split_size: Some(30 * MIB), ..Settings::default() };
    let mut allocator = CachingAllocator::new(settings);
    let block = get(&mut allocator, 40 * MIB);
    allocator.free(block);
    // Below 30 MiB: not from the 40.
    get(&mut allocator, 12 * MIB);
    assert_eq!(bytes(&allocator), (12 * MIB, 52 * MIB));
    // From 30 MiB on: any within 20 MiB, whole. 40 is not below 20 + 20, but it is below 30 + 20.
    let block = get(&mut allocator, 30 * MIB);
    assert_eq!(bytes(&allocator), (52 * MIB, 52 * MIB));
    allocator.free(block);
    let block = get(&mut allocator, 60 * MIB);
    allocator.free(block);
    // 60 is not below 40 + 20, but below 41 + 20.
    let block = get(&mut allocator, 40 * MIB);
    assert_eq!(size(&allocator, block), 40 * MIB);
    get(&mut allocator, 40 * MIB);
    assert_eq!(segment_sizes(&allocator), [40, 12, 60, 40]);
    get(&mut allocator, 41 * MIB);
    assert_eq!(bytes(&allocator), (152 * MIB, 152 * MIB));
}

#[test]
fn full_device_releases_oversize_blocks_first_and_no_more_than_needed() {
    let settings = Settings { max_split_size: Some(30 * MIB), limit: Some(100 * MIB), ..Settings::default() };
    // One that is large enough: 60 + 32 + 36 are more than 100; 60 is too large for 36, so it goes.
    let mut allocator = CachingAllocator::new(settings);
    let blocks = get_all(&mut allocator, [60, 32]);
    free_all(&mut allocator, blocks);
    get(&mut allocator, 36 * MIB);
    assert_eq!(segment_sizes(&allocator), [32, 36]);
    assert_eq!(allocator.stats().num_retries, 0);
    // Several: 44 is not enough for 50, 44 + 34 are; the 12 stay.
    let mut allocator = CachingAllocator::new(settings);
    let blocks = get_all(&mut allocator, [44, 34, 12]);
    free_all(&mut allocator, blocks);
    get(&mut allocator, 50 * MIB);
    assert_eq!(segment_sizes(&allocator), [12, 50]);
    assert_eq!(allocator.stats().num_retries, 0);
    // Too few: they go all the same, then the cache is emptied.
    let mut allocator = CachingAllocator::new(settings);
    let blocks = get_all(&mut allocator, [44, 12]);
    free_all(&mut allocator, blocks);
    get(&mut allocator, 90 * MIB);
    assert_eq!(segment_sizes(&allocator), [90]);
    assert_eq!(allocator.stats().num_retries, 1);
}

#[test]
fn garbage_collection_releases_the_oldest_segments() {
    let settings = Settings { garbage_collection_threshold: 0.5, limit: Some(100 * MIB), ..Settings::default() };
    let mut allocator = CachingAllocator::new(settings);
    for mib in [20, 30, 40] {
        let block = get(&mut allocator, mib * MIB);
        allocator.free(block);
    }
    assert_eq!(segment_sizes(&allocator), [20, 30, 40]);
    // 90 are more than 50. Searches since they became free: 3, 2, 1; those of at least the mean, 2, go.
    get(&mut allocator, 60 * MIB);
    assert_eq!(segment_sizes(&allocator), [40, 60]);
    assert_eq!(allocator.stats().num_retries, 0);
}

#[test]
fn garbage_collection_goes_on_until_below_the_threshold() {
    let settings = Settings { garbage_collection_threshold: 0.3, limit: Some(160 * MIB), ..Settings::default() };
    let mut allocator = CachingAllocator::new(settings);
    let [a, mut b, mut c] = get_all(&mut allocator, [12, 40, 44]);
    // Free after search 3, 11 and 12.
    allocator.free(a);
    for _ in 0..8 {
        allocator.free(b);
        b = get(&mut allocator, 40 * MIB);
    }
    allocator.free(b);
    allocator.free(c);
    c = get(&mut allocator, 44 * MIB);
    allocator.free(c);
    // 96 are more than 48. Ages at search 13: 10, 2, 1, of mean 4.3: 12 go, 84 stay. Ages 2, 1, of mean 1.5: 40 go.
    get(&mut allocator, 60 * MIB);
    assert_eq!(segment_sizes(&allocator), [44, 60]);
}

#[test]
fn sizes_are_rounded_up_to_divisions_of_a_power_of_two() {
    let settings = Settings { roundup_power2_divisions: 4, ..Settings::default() };
    let cases = [
        // Up to 4 x 512 bytes: as ever.
        (1, 512),
        (1200, 1536),
        (2048, 2048),
        // 2048, 2560, 3072, 3584, 4096, 5120, ...
        (2049, 2560),
        (3000, 3072),
        (3585, 4096),
        (4096, 4096),
        (4097, 5120),
        (5 * MIB + 1, 6 * MIB),
        (6 * MIB, 6 * MIB),
    ];
    for (requested, allocated) in cases {
        let mut allocator = CachingAllocator::new(settings);
        get(&mut allocator, requested);
        assert_eq!(allocator.stats().allocated, allocated, "{requested}");
    }
}

#[test]
fn expandable_segment_grows_by_pages() {
    let mut allocator = expandable(None);
    // Small pages of 2 MiB: 5 MiB need three.
    for _ in 0..5 {
        get(&mut allocator, MIB);
    }
    assert_eq!(bytes(&allocator), (5 * MIB, 6 * MIB));
    // Large pages of 20 MiB, whatever the request; what is left is split to the last 512 bytes.
    get(&mut allocator, 11 * MIB);
    assert_eq!(bytes(&allocator), (16 * MIB, 26 * MIB));
    // 9 MiB are left; 12 need one page more, which joins them.
    get(&mut allocator, 12 * MIB);
    assert_eq!(bytes(&allocator), (28 * MIB, 46 * MIB));
    // 17 are left; 60 need three pages: 43 rounded up.
    get(&mut allocator, 60 * MIB);
    assert_eq!(bytes(&allocator), (88 * MIB, 106 * MIB));
    assert_eq!(segment_sizes(&allocator), [6, 100]);
    // Each growth is one mapping; libtorch counts no segment.
    let stats = allocator.stats();
    assert_eq!((stats.num_segments, stats.num_cuda_mallocs), (0, 6));
    // Another stream has a segment of its own.
    allocator.allocate(1, 1, Pool::Default).unwrap();
    assert_eq!(allocator.stats().reserved, 108 * MIB);
}

#[test]
fn expandable_segment_returns_whole_free_pages() {
    let mut allocator = expandable(None);
    let [a, b, _c] = get_all(&mut allocator, [15, 15, 10]);
    assert_eq!(bytes(&allocator), (40 * MIB, 40 * MIB));
    allocator.free(b);
    // 15..30 holds no whole page.
    allocator.empty_cache();
    assert_eq!(bytes(&allocator), (25 * MIB, 40 * MIB));
    allocator.free(a);
    // 0..30 holds 0..20; 20..30 stays free.
    allocator.empty_cache();
    assert_eq!(bytes(&allocator), (10 * MIB, 20 * MIB));
    let d = get(&mut allocator, 10 * MIB);
    assert_eq!(bytes(&allocator), (20 * MIB, 20 * MIB));
    allocator.free(d);
    // 25 fit into 0..20 (mapped again) and 20..30.
    let e = get(&mut allocator, 25 * MIB);
    assert_eq!(bytes(&allocator), (35 * MIB, 40 * MIB));
    assert_eq!(segment_sizes(&allocator), [40]);
    assert_eq!(address(&allocator, e), allocator.segments()[0].address);
}

#[test]
fn expandable_segment_fills_its_lowest_gap_that_is_long_enough() {
    let mut allocator = expandable(None);
    let [a, b, _c] = get_all(&mut allocator, [20, 20, 20]);
    let start = address(&allocator, a);
    allocator.free(b);
    allocator.empty_cache();
    assert_eq!(segment_sizes(&allocator), [20, 20]);
    // 30 do not fit into 20..40.
    let d = get(&mut allocator, 30 * MIB);
    assert_eq!(address(&allocator, d) - start, 60 * MIB);
    assert_eq!(segment_sizes(&allocator), [20, 60]);
    // 15 do, better than behind the 10 that are free in 90..100.
    let e = get(&mut allocator, 15 * MIB);
    assert_eq!(address(&allocator, e) - start, 20 * MIB);
    assert_eq!((bytes(&allocator), segment_sizes(&allocator)), ((85 * MIB, 100 * MIB), vec![100]));
}

#[test]
fn expandable_segment_spares_the_block_that_can_grow() {
    for (expandable_segments, expected) in [(true, 0), (false, 18 * MIB)] {
        let mut allocator = CachingAllocator::new(Settings { expandable_segments, ..Settings::default() });
        let [a, _b] = get_all(&mut allocator, [3, 9]);
        get(&mut allocator, 6 * MIB);
        let start = address(&allocator, a);
        allocator.free(a);
        // Free: 0..3, and 18..20, which could grow.
        let block = get(&mut allocator, 2 * MIB);
        assert_eq!(address(&allocator, block) - start, expected);
    }
}

#[test]
fn expandable_segment_on_a_full_device() {
    let mut allocator = expandable(Some(60 * MIB));
    let block = get(&mut allocator, 1);
    allocator.free(block);
    // Three pages are 60; the free small page goes first.
    let block = get(&mut allocator, 55 * MIB);
    assert_eq!((bytes(&allocator), allocator.stats().num_retries), ((55 * MIB, 60 * MIB), 1));
    // 5 MiB are left, 9 need a page.
    let error = allocator.allocate(9 * MIB, 0, Pool::Default).unwrap_err();
    assert_eq!(error, OutOfMemory { requested: 20 * MIB, reserved: 60 * MIB, allocated: 55 * MIB });
    get(&mut allocator, 5 * MIB);
    allocator.free(block);
    allocator.empty_cache();
    assert_eq!(bytes(&allocator), (5 * MIB, 20 * MIB));
}

#[test]
fn expandable_private_pool_keeps_its_pages() {
    let mut allocator = expandable(None);
    let block = allocator.allocate(30 * MIB, 0, Pool::Private(1)).unwrap();
    get(&mut allocator, 5 * MIB);
    allocator.free(block);
    allocator.empty_cache();
    assert_eq!(bytes(&allocator), (5 * MIB, 60 * MIB));
    allocator.release_private(1);
    allocator.empty_cache();
    assert_eq!(bytes(&allocator), (5 * MIB, 20 * MIB));
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

/// What must hold between any two calls. `live` are the blocks and the bytes asked for.
fn check(allocator: &CachingAllocator, live: &[(Block, u64)]) {
    let Settings { expandable_segments, max_split_size, limit, .. } = allocator.settings;
    let stats = allocator.stats();
    for &(block, requested) in live {
        let (size, rounded) = (size(allocator, block), requested.div_ceil(512) * 512);
        let oversize = max_split_size.is_some_and(|limit| rounded >= limit);
        let excess = match requested {
            _ if expandable_segments || rounded <= MIB => 0,
            _ if oversize => 20 * MIB - 1,
            _ => MIB,
        };
        assert!((rounded..=rounded + excess).contains(&size), "{requested} became {size}");
    }
    let mut ranges: Vec<(u64, u64)> =
        live.iter().map(|&(block, _)| (address(allocator, block), size(allocator, block))).collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "blocks overlap");
    assert_eq!(stats.allocated, ranges.iter().map(|range| range.1).sum::<u64>());
    assert!(stats.allocated <= stats.allocated_peak && stats.reserved <= stats.reserved_peak);
    assert!(stats.allocated <= stats.reserved && limit.is_none_or(|limit| stats.reserved <= limit));
    let segments = allocator.segments();
    assert_eq!(stats.reserved, segments.iter().map(|segment| segment.size).sum::<u64>());
    assert_eq!(stats.allocated, segments.iter().map(|segment| segment.live).sum::<u64>());
    assert_eq!(stats.num_segments, if expandable_segments { 0 } else { segments.len() as u64 });
    for (index, node) in allocator.nodes.iter().enumerate().filter(|(_, node)| node.size > 0) {
        let Some(next) = node.next else { continue };
        let (behind, kinds) = (&allocator.nodes[next], |node: &Node| (node.allocated, node.mapped));
        assert_eq!((behind.prev, behind.address), (Some(index), node.address + node.size));
        assert!(node.allocated || kinds(node) != kinds(behind), "free neighbours are apart");
    }
}

#[test]
fn random_sequences_keep_the_books() {
    let base = Settings::default();
    let (limit, max_split_size) = (Some(700 * MIB), Some(24 * MIB));
    let variants = [
        base,
        Settings { limit, ..base },
        Settings { max_split_size, limit, ..base },
        Settings { limit, garbage_collection_threshold: 0.6, ..base },
        Settings { expandable_segments: true, ..base },
        Settings { expandable_segments: true, limit, max_split_size, garbage_collection_threshold: 0.6, ..base },
    ];
    for (seed, settings) in (0..24).zip(variants.into_iter().cycle()) {
        let (mut random, mut allocator) = (Random(seed), CachingAllocator::new(settings));
        let (mut live, mut failures) = (Vec::new(), 0);
        for step in 0..1500 {
            match random.below(100) {
                0 => allocator.empty_cache(),
                1..55 => {
                    let requested = random.size();
                    let pool = if random.below(5) > 0 { Pool::Default } else { Pool::Private(0) };
                    match allocator.allocate(requested, u32::from(random.below(4) == 0), pool) {
                        Ok(block) => live.push((block, requested)),
                        Err(error) => {
                            failures += 1;
                            assert_eq!(error.allocated, allocator.stats().allocated);
                        }
                    }
                }
                _ if live.is_empty() => {}
                draw => {
                    // Mostly the youngest, as in a forward pass.
                    let nth = random.below(if draw < 80 { live.len().min(4) } else { live.len() } as u64);
                    let place = live.len() - 1 - usize::try_from(nth).unwrap();
                    allocator.free(live.remove(place).0);
                }
            }
            if step % 16 == 0 {
                check(&allocator, &live);
            }
        }
        assert!(settings.limit.is_none() || failures > 0, "the limit was never met");
        live.drain(..).for_each(|(block, _)| allocator.free(block));
        check(&allocator, &live);
        allocator.release_private(0);
        allocator.empty_cache();
        assert_eq!((bytes(&allocator), allocator.segments()), ((0, 0), vec![]));
    }
}
