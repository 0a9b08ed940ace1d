//! The blocks of all segments in one arena, and the pools of those that are unused.

use super::{CachingAllocator, Pool, Request};
use std::collections::BTreeSet;

/// A part of a segment: live, free, or (expandable segments only) without pages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    pub(super) address: u64,
    /// 0 in an unused place of the arena.
    pub(super) size: u64,
    pub(super) stream: u32,
    pub(super) pool: usize,
    pub(super) allocated: bool,
    pub(super) mapped: bool,
    /// Its neighbours in the segment.
    pub(super) prev: Option<usize>,
    pub(super) next: Option<usize>,
    /// `BlockPool::searches` when it became free.
    pub(super) freed_at: u64,
}

/// Order of search: stream, size (0 without pages), address; then the place in the arena.
pub(super) type Key = (u32, u64, u64, usize);

/// The unused blocks of one kind.
#[derive(Debug)]
pub(super) struct BlockPool {
    pub(super) owner: Pool,
    pub(super) small: bool,
    /// Whether its memory stays reserved when the cache is emptied.
    pub(super) kept: bool,
    /// Free blocks.
    pub(super) free: BTreeSet<Key>,
    /// Address ranges without pages.
    pub(super) unmapped: BTreeSet<Key>,
    /// Searches so far; counted only for garbage collection.
    pub(super) searches: u64,
}

impl BlockPool {
    pub(super) fn new(owner: Pool, small: bool) -> Self {
        Self { owner, small, kept: false, free: BTreeSet::new(), unmapped: BTreeSet::new(), searches: 0 }
    }
}

impl CachingAllocator {
    /// Whether the block is all of its segment.
    pub(super) fn is_whole(&self, index: usize) -> bool {
        self.nodes[index].prev.is_none() && self.nodes[index].next.is_none()
    }

    /// Joins the block, which is in no pool, with neighbours that are unused in the same way.
    pub(super) fn merge_neighbours(&mut self, index: usize) {
        let node = self.nodes[index];
        for other in [node.prev, node.next].into_iter().flatten() {
            let neighbour = self.nodes[other];
            if neighbour.allocated || neighbour.mapped != node.mapped {
                continue;
            }
            self.unshelve(other);
            self.remove(other);
            let merged = &mut self.nodes[index];
            merged.size += neighbour.size;
            if node.prev == Some(other) {
                merged.address = neighbour.address;
                merged.prev = neighbour.prev;
            } else {
                merged.next = neighbour.next;
            }
            self.link(index);
        }
    }

    /// Adds a block of `size` bytes behind block `index`, unused in the same way, to the pool.
    pub(super) fn cut_off(&mut self, index: usize, size: u64) -> usize {
        let node = self.nodes[index];
        let rest = self.add(Node { address: node.address + node.size, size, prev: Some(index), ..node });
        self.shelve(rest);
        rest
    }

    /// A segment that is one block, in no pool.
    pub(super) fn add_range(&mut self, request: &Request, size: u64, alignment: u64, mapped: bool) -> usize {
        let address = self.next_address.next_multiple_of(alignment);
        self.next_address = address + size;
        let Request { stream, pool, .. } = *request;
        self.add(Node { address, size, stream, pool, allocated: false, mapped, prev: None, next: None, freed_at: 0 })
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

    pub(super) fn remove(&mut self, index: usize) {
        self.nodes[index].size = 0;
        self.spare.push(index);
    }

    /// Tells the neighbours of the block that it is theirs.
    fn link(&mut self, index: usize) {
        let Node { prev, next, .. } = self.nodes[index];
        if let Some(prev) = prev {
            self.nodes[prev].next = Some(index);
        }
        if let Some(next) = next {
            self.nodes[next].prev = Some(index);
        }
    }

    /// Puts an unused block into its pool.
    pub(super) fn shelve(&mut self, index: usize) {
        self.nodes[index].freed_at = self.pools[self.nodes[index].pool].searches;
        let (shelf, key) = self.place(index);
        shelf.insert(key);
    }

    /// Takes an unused block out of its pool.
    pub(super) fn unshelve(&mut self, index: usize) {
        let (shelf, key) = self.place(index);
        shelf.remove(&key);
    }

    fn place(&mut self, index: usize) -> (&mut BTreeSet<Key>, Key) {
        let Node { address, size, stream, pool, mapped, .. } = self.nodes[index];
        let pool = &mut self.pools[pool];
        if mapped {
            (&mut pool.free, (stream, size, address, index))
        } else {
            (&mut pool.unmapped, (stream, 0, address, index))
        }
    }
}
