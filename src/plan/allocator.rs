//! A model of libtorch's caching allocator for CUDA that replays allocations and frees and says, to the byte, what
//! `allocated`, `active` and `reserved` would be, without a device.
//!
//! Source: libtorch 2.11, `c10/cuda/CUDACachingAllocator.cpp` (backend `native`) and `c10/core/AllocatorConfig.h`. The
//! text read is the one whose assertions stand as many lines apart as `libc10_cuda.so` 2.11.0+cu130 (commit 70d99e998)
//! says they do, in the functions that choose, make, join and release blocks.
//! Not modelled: `record_stream` (a freed block is free at once, so `active` equals `allocated`); memory from elsewhere
//! (CUDA context, NCCL), which belongs off `limit`; pools with their own allocator, without splits or for use on
//! out-of-memory; checkpoints of pools; `large_segment_size_mb` and `max_non_split_rounding_mb` other than 20.
//! Deviations:
//! - A new segment lies above all earlier ones. `cudaMalloc` promises no order; addresses decide between free blocks of
//!   equal size only.
//! - `limit` is what the device has. libtorch can also be held to a fraction of the device
//!   (`set_per_process_memory_fraction`): without expandable segments that is the same; with them it compares the size
//!   of a plain segment where we compare the pages to be mapped. Only with a fraction below 1 does libtorch collect
//!   garbage; here `limit` stands for both.
//! - An expandable segment has addresses for 9/8 of `limit`, in libtorch for 9/8 of the device's memory.
//! - An allocation from a private pool counts as part of a capture: if it fails, the cache is not emptied. Allocations
//!   from the default pool and `empty_cache` count as outside any capture.
//! - A released private pool that is used again is kept again; libtorch fails an assertion while it holds memory.
//! - Sizes are rounded up to equal divisions everywhere; libtorch can also do so by size. 1 PiB is out of memory; in
//!   libtorch 1 EiB is.

mod blocks;
mod expandable;

use self::blocks::{BlockPool, Node};
use std::iter::successors;

/// Sizes are multiples of this (`kMinBlockSize`).
const MIN_BLOCK: u64 = 512;
/// Largest request of the small pool (`kSmallSize`).
const SMALL_SIZE: u64 = 1 << 20;
/// Segment of the small pool (`kSmallBuffer`).
const SMALL_SEGMENT: u64 = 2 << 20;
/// Segment of requests of the large pool below [`MIN_LARGE`] (`large_segment_size`).
const LARGE_SEGMENT: u64 = 20 << 20;
/// Requests from here on get a segment of their own size (`kMinLargeAlloc`) ...
const MIN_LARGE: u64 = 10 << 20;
/// ... rounded up to this (`kRoundLarge`).
const ROUND_LARGE: u64 = 2 << 20;
/// How much larger than an oversize request its block may be (`max_non_split_rounding_size`).
const MAX_NON_SPLIT_ROUNDING: u64 = 20 << 20;
/// More than any device has; no request reaches it.
const ADDRESS_SPACE: u64 = 1 << 50;

/// The settings of `PYTORCH_CUDA_ALLOC_CONF` that change the numbers, and the device. The default is libtorch's.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Settings {
    /// `expandable_segments`: one segment per stream and pool, which grows and shrinks by pages.
    pub expandable_segments: bool,
    /// `max_split_size_mb`, in bytes (at least 20 MiB): blocks from this size on are neither split nor given to smaller
    /// requests.
    pub max_split_size: Option<u64>,
    /// `garbage_collection_threshold`: above this fraction of `limit`, old free segments are released before a new
    /// one is made. 0 is off.
    pub garbage_collection_threshold: f64,
    /// `roundup_power2_divisions`: sizes are rounded up to this many steps (a power of two) from each power of two to
    /// the next. 0 is off.
    pub roundup_power2_divisions: u64,
    /// Bytes that the device has for segments; none is unlimited.
    pub limit: Option<u64>,
}

/// A live allocation of one [`CachingAllocator`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block(Option<usize>);

/// Which memory an allocation may share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pool {
    /// That of everything outside a capture.
    Default,
    /// That of the CUDA graphs with this number.
    Private(u32),
}

/// The device has no room, even after cached segments were released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no room for {requested} bytes beside {reserved} reserved bytes ({allocated} allocated)")]
pub struct OutOfMemory {
    /// Size of the segment that the device could not give; libtorch's message names the same number.
    pub requested: u64,
    /// Bytes of all segments.
    pub reserved: u64,
    /// Bytes of live blocks.
    pub allocated: u64,
}

/// What `torch.cuda.memory_stats` counts, in bytes unless said otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Live blocks, as rounded (`memory_allocated`).
    pub allocated: u64,
    /// Highest `allocated` so far.
    pub allocated_peak: u64,
    /// Live blocks and those that another stream still uses.
    pub active: u64,
    /// Highest `active` so far.
    pub active_peak: u64,
    /// Segments and mapped pages (`memory_reserved`).
    pub reserved: u64,
    /// Highest `reserved` so far.
    pub reserved_peak: u64,
    /// Number of segments now; libtorch does not count expandable ones.
    pub num_segments: u64,
    /// Number of times that memory was got from the device: calls of `cudaMalloc`, and mappings of pages.
    pub num_cuda_mallocs: u64,
    /// Number of times that the cache was emptied to make room.
    pub num_retries: u64,
}

/// A contiguous range of reserved memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins.
    pub address: u64,
    /// Its bytes.
    pub size: u64,
    /// Those in live blocks.
    pub live: u64,
    /// Whose it is.
    pub pool: Pool,
    /// Whether it serves requests up to 1 MiB (else those above).
    pub small: bool,
    /// The stream that it serves.
    pub stream: u32,
}

/// What an allocation comes down to.
struct Request {
    size: u64,
    /// Size of the segment that it would get.
    segment: u64,
    stream: u32,
    pool: usize,
}

/// The allocator of one device. It hands out no memory.
#[derive(Debug)]
pub struct CachingAllocator {
    settings: Settings,
    stats: Stats,
    /// Arena of blocks and its unused places.
    nodes: Vec<Node>,
    spare: Vec<usize>,
    /// Small and large pool of each owner, side by side; first the default ones.
    pools: Vec<BlockPool>,
    next_address: u64,
}

impl CachingAllocator {
    /// An allocator that has nothing yet.
    ///
    /// # Panics
    /// If `max_split_size` is below 20 MiB or the number of divisions is not a power of two; libtorch refuses both.
    pub fn new(settings: Settings) -> Self {
        assert!(settings.max_split_size.is_none_or(|size| size >= LARGE_SEGMENT), "`max_split_size` is below 20 MiB");
        let divisions = settings.roundup_power2_divisions;
        assert!(divisions == 0 || divisions.is_power_of_two(), "`roundup_power2_divisions` is not a power of two");
        Self {
            settings,
            stats: Stats::default(),
            nodes: Vec::new(),
            spare: Vec::new(),
            pools: vec![BlockPool::new(Pool::Default, true), BlockPool::new(Pool::Default, false)],
            next_address: 0,
        }
    }

    /// A block of at least `bytes` bytes for work on `stream`. No bytes need no memory, as in libtorch.
    ///
    /// # Errors
    /// If the device has no room and nothing more can be released.
    pub fn allocate(&mut self, bytes: u64, stream: u32, pool: Pool) -> Result<Block, OutOfMemory> {
        if bytes == 0 {
            return Ok(Block(None));
        }
        let size = self.round(bytes.min(ADDRESS_SPACE));
        let request = Request { size, segment: segment_size(size), stream, pool: self.pool_index(pool, size) };
        let found = if bytes < ADDRESS_SPACE { self.find(&request, pool) } else { None };
        let Some(index) = found else {
            let Stats { reserved, allocated, .. } = self.stats;
            return Err(OutOfMemory { requested: request.segment, reserved, allocated });
        };
        self.split(index, size);
        self.nodes[index].allocated = true;
        self.stats.allocated += self.nodes[index].size;
        self.stats.allocated_peak = self.stats.allocated_peak.max(self.stats.allocated);
        Ok(Block(Some(index)))
    }

    /// Gives a block back to its pool, where it joins its free neighbours.
    ///
    /// # Panics
    /// If the block is not live.
    pub fn free(&mut self, block: Block) {
        let Block(Some(index)) = block else { return };
        let node = &mut self.nodes[index];
        assert!(node.allocated, "the block is not live");
        node.allocated = false;
        self.stats.allocated -= node.size;
        self.merge_neighbours(index);
        self.shelve(index);
    }

    /// Returns free segments and free pages to the device, except those of private pools in use.
    pub fn empty_cache(&mut self) {
        for pool in 0..self.pools.len() {
            if self.pools[pool].kept {
                continue;
            }
            let free: Vec<usize> = self.pools[pool].free.iter().map(|key| key.3).collect();
            for index in free {
                let whole = self.is_whole(index);
                if self.settings.expandable_segments {
                    self.unmap(index);
                } else if whole {
                    self.release_segment(index);
                }
            }
        }
    }

    /// The graphs of private pool `id` are gone: from now on its free memory leaves with that of the default pool.
    pub fn release_private(&mut self, id: u32) {
        self.keep(Pool::Private(id), false);
    }

    /// The numbers now.
    pub fn stats(&self) -> Stats {
        Stats { active: self.stats.allocated, active_peak: self.stats.allocated_peak, ..self.stats }
    }

    /// Everything reserved, by address.
    pub fn segments(&self) -> Vec<Segment> {
        let is_mapped = |index: usize| self.nodes[index].mapped;
        let heads = self.nodes.iter().filter(|node| node.size > 0 && node.mapped && !node.prev.is_some_and(is_mapped));
        let mut segments: Vec<Segment> = heads
            .map(|head| {
                let BlockPool { owner, small, .. } = self.pools[head.pool];
                let (mut size, mut live) = (0, 0);
                let blocks = successors(Some(head), |node| node.next.map(|next| &self.nodes[next]));
                for node in blocks.take_while(|node| node.mapped) {
                    size += node.size;
                    live += if node.allocated { node.size } else { 0 };
                }
                Segment { address: head.address, size, live, pool: owner, small, stream: head.stream }
            })
            .collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        segments
    }

    fn round(&self, bytes: u64) -> u64 {
        let divisions = self.settings.roundup_power2_divisions;
        if divisions > 1 && bytes > MIN_BLOCK * divisions && !bytes.is_power_of_two() {
            // The step is at least 512: the power of two below `bytes` is more than half of it.
            bytes.next_multiple_of((1 << bytes.ilog2()) / divisions)
        } else {
            bytes.next_multiple_of(MIN_BLOCK)
        }
    }

    fn pool_index(&mut self, owner: Pool, size: u64) -> usize {
        let small = self.pools.iter().position(|pool| pool.owner == owner).unwrap_or_else(|| {
            self.pools.extend([BlockPool::new(owner, true), BlockPool::new(owner, false)]);
            self.pools.len() - 2
        });
        self.keep(owner, owner != Pool::Default);
        small + usize::from(size > SMALL_SIZE)
    }

    fn keep(&mut self, owner: Pool, kept: bool) {
        for pool in self.pools.iter_mut().filter(|pool| pool.owner == owner) {
            pool.kept = kept;
        }
    }

    /// A block that is in no pool: the best free one, else a new one, else a new one after making room.
    fn find(&mut self, request: &Request, pool: Pool) -> Option<usize> {
        self.take_cached(request)
            .or_else(|| {
                self.collect_garbage();
                self.grow(request)
            })
            .or_else(|| self.release_oversize(request).then(|| self.grow(request))?)
            .or_else(|| {
                if pool != Pool::Default {
                    return None;
                }
                self.empty_cache();
                self.stats.num_retries += 1;
                self.grow(request)
            })
    }

    /// The smallest free block of the stream that is large enough, the lowest of equals.
    fn take_cached(&mut self, request: &Request) -> Option<usize> {
        if self.garbage_threshold().is_some() {
            self.pools[request.pool].searches += 1;
        }
        let free = &self.pools[request.pool].free;
        let mut candidates =
            free.range((request.stream, request.size, 0, 0)..).take_while(|key| key.0 == request.stream);
        let mut best = *candidates.next()?;
        if self.settings.expandable_segments {
            for &next in candidates {
                if self.room(next.3) >= self.room(best.3) {
                    break;
                }
                best = next;
            }
        }
        let (max_split_size, size) = (self.max_split_size(), best.1);
        let oversize = request.size >= max_split_size;
        if size >= if oversize { request.size + MAX_NON_SPLIT_ROUNDING } else { max_split_size } {
            return None;
        }
        self.pools[request.pool].free.remove(&best);
        Some(best.3)
    }

    /// Cuts what is left behind `size` bytes off the block, if that is worth it.
    fn split(&mut self, index: usize, size: u64) {
        let node = self.nodes[index];
        let rest = node.size - size;
        let worth_it = if self.pools[node.pool].small || self.settings.expandable_segments {
            rest >= MIN_BLOCK
        } else {
            rest > SMALL_SIZE && size < self.max_split_size()
        };
        if worth_it {
            self.nodes[index].size = size;
            self.cut_off(index, rest);
        }
    }

    /// A new segment, or an expandable one that has grown.
    fn grow(&mut self, request: &Request) -> Option<usize> {
        if self.settings.expandable_segments {
            return self.grow_expandable(request);
        }
        if !self.reserve(request.segment) {
            return None;
        }
        self.stats.num_segments += 1;
        Some(self.add_range(request, request.segment, ROUND_LARGE, true))
    }

    /// Releases free oversize blocks, no more than needed. Says whether that frees enough.
    fn release_oversize(&mut self, request: &Request) -> bool {
        let Some(max_split_size) = self.settings.max_split_size.filter(|_| !self.settings.expandable_segments) else {
            return false;
        };
        let wanted = request.size.max(max_split_size);
        let at_least = |size: u64| (request.stream, size, 0, 0);
        let large_enough = self.pools[request.pool].free.range(at_least(wanted)..).next();
        if let Some(&(_, _, _, index)) = large_enough.filter(|key| key.0 == request.stream) {
            self.release_segment(index);
            return true;
        }
        let mut released = 0;
        while released < wanted {
            let mut oversize = self.pools[request.pool].free.range(at_least(max_split_size)..at_least(wanted));
            let Some(&(_, size, _, index)) = oversize.next_back() else { return false };
            self.release_segment(index);
            released += size;
        }
        true
    }

    /// Releases free large segments, those of more than mean age first, until `reserved` is below the threshold.
    #[expect(clippy::cast_precision_loss, reason = "ages are far below 2^52")]
    fn collect_garbage(&mut self) {
        let Some(threshold) = self.garbage_threshold() else { return };
        let searches = self.pools[1].searches;
        let segments = self.pools[1].free.iter().map(|key| key.3).filter(|&index| self.is_whole(index));
        let mut aged: Vec<(usize, u64)> =
            segments.map(|index| (index, searches - self.nodes[index].freed_at)).collect();
        while self.stats.reserved > threshold && !aged.is_empty() {
            let mean = aged.iter().map(|(_, age)| age).sum::<u64>() as f64 / aged.len() as f64;
            let (old, young) = aged.into_iter().partition(|&(_, age)| age as f64 >= mean);
            for (index, _) in old {
                self.release_segment(index);
            }
            aged = young;
        }
    }

    /// Bytes reserved above which garbage is collected; none in expandable segments, which have no free segments.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "as libtorch casts"
    )]
    fn garbage_threshold(&self) -> Option<u64> {
        let Settings { expandable_segments, garbage_collection_threshold: fraction, limit, .. } = self.settings;
        limit.filter(|_| fraction > 0.0 && !expandable_segments).map(|limit| (fraction * limit as f64) as u64)
    }

    fn max_split_size(&self) -> u64 {
        self.settings.max_split_size.unwrap_or(u64::MAX)
    }

    /// Counts bytes got from the device. Says whether it has them.
    fn reserve(&mut self, bytes: u64) -> bool {
        let stats = &mut self.stats;
        if self.settings.limit.is_some_and(|limit| stats.reserved + bytes > limit) {
            return false;
        }
        stats.reserved += bytes;
        stats.reserved_peak = stats.reserved_peak.max(stats.reserved);
        stats.num_cuda_mallocs += 1;
        true
    }

    fn release_segment(&mut self, index: usize) {
        self.unshelve(index);
        self.stats.reserved -= self.nodes[index].size;
        self.stats.num_segments -= 1;
        self.remove(index);
    }
}

/// Size of the segment that a request gets if no block is free.
fn segment_size(size: u64) -> u64 {
    match size {
        0..=SMALL_SIZE => SMALL_SEGMENT,
        _ if size < MIN_LARGE => LARGE_SEGMENT,
        _ => size.next_multiple_of(ROUND_LARGE),
    }
}

#[cfg(test)]
#[path = "allocator_tests.rs"]
mod tests;
