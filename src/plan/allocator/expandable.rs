//! Expandable segments: one for each stream and pool, a range of addresses that gets pages as it is used and gives them
//! back.

use super::blocks::BlockPool;
use super::{ADDRESS_SPACE, CachingAllocator, LARGE_SEGMENT, Request, SMALL_SEGMENT};
use std::iter::successors;

impl BlockPool {
    /// Unit in which an expandable segment grows and shrinks.
    fn page(&self) -> u64 {
        if self.small { SMALL_SEGMENT } else { LARGE_SEGMENT }
    }
}

impl CachingAllocator {
    /// Bytes of a free block with the addresses behind it into which it could grow.
    pub(super) fn room(&self, index: usize) -> u64 {
        let behind = self.nodes[index].next.map(|next| self.nodes[next]).filter(|next| !next.mapped);
        self.nodes[index].size + behind.map_or(0, |next| next.size)
    }

    /// Maps the lowest range of free blocks and addresses without pages that is long enough.
    pub(super) fn grow_expandable(&mut self, request: &Request) -> Option<usize> {
        let mut index = self.find_range(request);
        let node = self.nodes[index];
        if !node.mapped && !self.map(index, node.size.min(request.size)) {
            return None;
        }
        loop {
            let node = self.nodes[index];
            if node.size >= request.size {
                self.unshelve(index);
                return Some(index);
            }
            // Behind a free block that is too small are addresses without pages; once mapped, they absorb it.
            index = node.next?;
            let behind = self.nodes[index].size;
            if !self.map(index, behind.min(request.size - node.size)) {
                return None;
            }
        }
    }

    fn find_range(&mut self, request: &Request) -> usize {
        let is_unused = |index: &usize| !self.nodes[*index].allocated;
        let pool = &self.pools[request.pool];
        let ranges = pool.unmapped.range((request.stream, 0, 0, 0)..).take_while(|key| key.0 == request.stream);
        for &(_, _, _, index) in ranges {
            let start = self.nodes[index].prev.filter(is_unused).unwrap_or(index);
            let unused = successors(Some(start), |&index| self.nodes[index].next.filter(is_unused));
            let mut room = 0;
            if unused.map(|index| self.nodes[index].size).any(|size| {
                room += size;
                room >= request.size
            }) {
                return start;
            }
        }
        let (device, page) = (self.settings.limit.map_or(ADDRESS_SPACE, |limit| limit.min(ADDRESS_SPACE)), pool.page());
        let index = self.add_range(request, (device + device / 8).max(1).next_multiple_of(page), page, false);
        self.shelve(index);
        index
    }

    /// Gives pages to the first `size` bytes of a range without them, whole pages. Says whether the device had them.
    fn map(&mut self, index: usize, size: u64) -> bool {
        let node = self.nodes[index];
        let mapped = size.next_multiple_of(self.pools[node.pool].page());
        if !self.reserve(mapped) {
            return false;
        }
        self.unshelve(index);
        self.nodes[index].size = mapped;
        if mapped < node.size {
            self.cut_off(index, node.size - mapped);
        }
        self.nodes[index].mapped = true;
        self.merge_neighbours(index);
        self.shelve(index);
        true
    }

    /// Returns the whole pages in a free block to the device, and the segment if nothing of it is mapped any more.
    pub(super) fn unmap(&mut self, index: usize) {
        let node = self.nodes[index];
        let (page, old_end) = (self.pools[node.pool].page(), node.address + node.size);
        let (begin, end) = (node.address.next_multiple_of(page), old_end / page * page);
        if begin >= end {
            return;
        }
        self.unshelve(index);
        self.nodes[index].size = end - node.address;
        if old_end > end {
            self.cut_off(index, old_end - end);
        }
        let mut unmapped = index;
        if begin > node.address {
            self.nodes[index].size = begin - node.address;
            unmapped = self.cut_off(index, end - begin);
            self.unshelve(unmapped);
            self.shelve(index);
        }
        self.nodes[unmapped].mapped = false;
        self.merge_neighbours(unmapped);
        self.stats.reserved -= end - begin;
        if self.is_whole(unmapped) {
            self.remove(unmapped);
        } else {
            self.shelve(unmapped);
        }
    }
}
