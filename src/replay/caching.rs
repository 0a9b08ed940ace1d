//! Model of libtorch's CUDA caching allocator. It replays allocations and frees without a device and gives `allocated`
//! and `reserved` to the byte.
//!
//! Source: libtorch 2.11, `c10/cuda/CUDACachingAllocator.cpp` (backend `native`) with its default settings. The
//! revision was identified by the line numbers of its assertions: in the functions that choose, make, join and release
//! blocks they are as far apart as in `libc10_cuda.so` 2.11.0+cu130 (commit 70d99e998).
//!
//! Not modelled: several streams, `record_stream`, several pools (one model is one pool), settings of
//! `PYTORCH_CUDA_ALLOC_CONF`, and a full device, where libtorch empties its cache before it fails.
//!
//! Deviation: a new segment gets an address above all earlier ones. `cudaMalloc` promises no order; addresses only
//! decide between free blocks of equal size.

use std::collections::BTreeSet;

/// Sizes are multiples of this (`kMinBlockSize`).
const MIN_BLOCK: u64 = 512;
/// Largest request of the small pool (`kSmallSize`).
const SMALL_SIZE: u64 = 1 << 20;
/// Segment size of the small pool (`kSmallBuffer`).
const SMALL_SEGMENT: u64 = 2 << 20;
/// Segment size for requests of the large pool below [`MIN_LARGE`] (`large_segment_size`).
const LARGE_SEGMENT: u64 = 20 << 20;
/// Requests of at least this size get a segment of their own size (`kMinLargeAlloc`) ...
const MIN_LARGE: u64 = 10 << 20;
/// ... rounded up to a multiple of this (`kRoundLarge`).
const ROUND_LARGE: u64 = 2 << 20;

/// A live allocation of one [`CachingAllocator`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block(Option<usize>);

/// A part of a segment, live or free.
#[derive(Debug, Clone, Copy)]
struct Node {
    address: u64,
    /// 0 at an unused index of the arena.
    size: u64,
    /// Whether it serves requests up to 1 MiB (else those above).
    small: bool,
    allocated: bool,
    /// Neighbours in the segment.
    prev: Option<usize>,
    next: Option<usize>,
}

/// The modelled allocator of one device. It allocates no real memory.
#[derive(Debug, Default)]
pub struct CachingAllocator {
    allocated: u64,
    reserved: u64,
    /// Arena of blocks, and the indices in it that are unused.
    nodes: Vec<Node>,
    spare: Vec<usize>,
    /// Free blocks of the large and of the small pool in search order: size, address; then the index in the arena.
    free: [BTreeSet<(u64, u64, usize)>; 2],
}

impl CachingAllocator {
    /// Bytes of live blocks after rounding (`memory_allocated`).
    pub fn allocated(&self) -> u64 {
        self.allocated
    }

    /// Bytes of all segments (`memory_reserved`).
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// A block of at least `bytes` bytes. A request of 0 bytes needs no memory, as in libtorch.
    pub fn allocate(&mut self, bytes: u64) -> Block {
        if bytes == 0 {
            return Block(None);
        }
        let size = bytes.next_multiple_of(MIN_BLOCK);
        let small = size <= SMALL_SIZE;
        // The smallest free block that is large enough, the lowest of equals.
        let cached = self.free[usize::from(small)].range((size, 0, 0)..).next().map(|key| key.2);
        if let Some(index) = cached {
            self.set_free(index, false);
        }
        let index = cached.unwrap_or_else(|| self.add_segment(size, small));
        let Node { address, size: whole, next, .. } = self.nodes[index];
        let rest = whole - size;
        if rest >= if small { MIN_BLOCK } else { SMALL_SIZE + 1 } {
            self.nodes[index].size = size;
            let behind = Node { address: address + size, size: rest, small, allocated: false, prev: Some(index), next };
            let behind = self.add(behind);
            self.set_free(behind, true);
        }
        self.nodes[index].allocated = true;
        self.allocated += self.nodes[index].size;
        Block(Some(index))
    }

    /// Returns a block to its pool and joins it with its free neighbours.
    ///
    /// # Panics
    /// If the block is not live.
    pub fn free(&mut self, block: Block) {
        let Block(Some(index)) = block else { return };
        let mut node = self.nodes[index];
        assert!(node.allocated, "the block is not live");
        self.allocated -= node.size;
        node.allocated = false;
        let is_free = |other: &usize| !self.nodes[*other].allocated;
        let (before, behind) = (node.prev.filter(is_free), node.next.filter(is_free));
        for other in [before, behind].into_iter().flatten() {
            self.set_free(other, false);
            let neighbour = std::mem::replace(&mut self.nodes[other].size, 0);
            node.size += neighbour;
            self.spare.push(other);
        }
        if let Some(before) = before {
            (node.address, node.prev) = (self.nodes[before].address, self.nodes[before].prev);
        }
        if let Some(behind) = behind {
            node.next = self.nodes[behind].next;
        }
        self.nodes[index] = node;
        self.link(index);
        self.set_free(index, true);
    }

    /// A new segment for a request of `size` bytes, as one block.
    fn add_segment(&mut self, size: u64, small: bool) -> usize {
        let size = match size {
            0..=SMALL_SIZE => SMALL_SEGMENT,
            _ if size < MIN_LARGE => LARGE_SEGMENT,
            _ => size.next_multiple_of(ROUND_LARGE),
        };
        let address = self.reserved;
        self.reserved += size;
        self.add(Node { address, size, small, allocated: false, prev: None, next: None })
    }

    fn add(&mut self, node: Node) -> usize {
        let index = self.spare.pop().unwrap_or_else(|| {
            self.nodes.push(node);
            self.nodes.len() - 1
        });
        self.nodes[index] = node;
        self.link(index);
        index
    }

    /// Makes the neighbours of the block point to it.
    fn link(&mut self, index: usize) {
        let Node { prev, next, .. } = self.nodes[index];
        if let Some(prev) = prev {
            self.nodes[prev].next = Some(index);
        }
        if let Some(next) = next {
            self.nodes[next].prev = Some(index);
        }
    }

    /// Adds a block to its pool, or removes it.
    fn set_free(&mut self, index: usize, is_free: bool) {
        let Node { address, size, small, .. } = self.nodes[index];
        let (pool, key) = (&mut self.free[usize::from(small)], (size, address, index));
        if is_free {
            pool.insert(key)
        } else {
            pool.remove(&key)
        };
    }
}

#[cfg(test)]
#[path = "caching_tests.rs"]
mod tests;
