//! Replays the trace of a job through an allocator model: memory peaks of each phase, reserved memory, and the tensors
//! that are live at the peak.

use crate::caching::{Block, CachingAllocator};
use crate::host::HostAllocator;
use crate::trace::{BlockChange, CATEGORIES, Category, ModuleId, Trace, TraceEvent};
use prsmed_base::units::Bytes;
use std::collections::HashMap;

/// Memory of one phase.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PhaseMemory {
    /// Name, as the job names it.
    pub name: &'static str,
    /// Peak bytes of tensors. On CUDA as the caching allocator counts them (multiples of 512), including the library
    /// workspaces that come from it.
    pub allocated_peak: Bytes,
    /// Peak bytes that the allocator reserved from the device or, on the CPU, from the system.
    pub reserved_peak: Bytes,
    /// Bytes of tensors at the peak by category.
    pub categories: Vec<(&'static str, Bytes)>,
    /// Event of the trace after which tensors take the most memory.
    #[serde(skip)]
    pub peak_event: usize,
}

/// The allocator through which a trace is replayed.
#[derive(Debug, Clone, Copy)]
pub enum ReplayTarget<'a> {
    /// The counting allocator of CPU tensors.
    Cpu,
    /// libtorch's CUDA caching allocator, in which blocks of these sizes are allocated before the first event.
    Cuda(&'a [u64]),
}

/// Live blocks of a replay.
#[derive(Debug, Default)]
pub struct Live {
    /// Size and category of each block, by number.
    blocks: Vec<(u64, u8)>,
    /// Bytes of all blocks.
    pub total: u64,
    /// The same by category.
    pub by_category: [u64; CATEGORIES.len()],
}

impl Live {
    /// Applies the next event of a trace.
    pub fn apply(&mut self, event: &TraceEvent) {
        let block = event.block as usize;
        if block >= self.blocks.len() {
            self.blocks.resize(block + 1, (0, 0));
        }
        match event.change {
            BlockChange::Allocate(bytes) => {
                self.blocks[block] = (bytes, event.category);
                self.total += bytes;
                self.by_category[usize::from(event.category)] += bytes;
            }
            BlockChange::Release => {
                let (bytes, category) = std::mem::take(&mut self.blocks[block]);
                self.total -= bytes;
                self.by_category[usize::from(category)] -= bytes;
            }
            BlockChange::Move => {
                let (bytes, category) = &mut self.blocks[block];
                self.by_category[usize::from(*category)] -= *bytes;
                self.by_category[usize::from(event.category)] += *bytes;
                *category = event.category;
            }
        }
    }

    fn categories(&self) -> Vec<(&'static str, Bytes)> {
        CATEGORIES.iter().zip(self.by_category).map(|((_, name), bytes)| (*name, Bytes(bytes))).collect()
    }
}

/// The caching allocator of one process and its blocks, by number.
struct Cache {
    allocator: CachingAllocator,
    blocks: Vec<Option<Block>>,
}

impl Cache {
    fn new(before: &[u64]) -> Self {
        let mut allocator = CachingAllocator::default();
        for bytes in before.iter().filter(|bytes| **bytes > 0) {
            allocator.allocate(*bytes);
        }
        Self { allocator, blocks: Vec::new() }
    }

    fn apply(&mut self, event: &TraceEvent) {
        let block = event.block as usize;
        match event.change {
            BlockChange::Allocate(bytes) => {
                if block >= self.blocks.len() {
                    self.blocks.resize(block + 1, None);
                }
                self.blocks[block] = Some(self.allocator.allocate(bytes));
            }
            BlockChange::Release => {
                if let Some(block) = self.blocks.get_mut(block).and_then(Option::take) {
                    self.allocator.free(block);
                }
            }
            BlockChange::Move => {}
        }
    }
}

fn apply(host: &mut HostAllocator, event: &TraceEvent) {
    match event.change {
        BlockChange::Allocate(bytes) => host.allocate(event.block as usize, bytes),
        BlockChange::Release => host.free(event.block as usize),
        BlockChange::Move => {}
    }
}

/// The memory of each phase. A phase that begins without live tensors begins in a new process.
pub fn phases(trace: &Trace, device: ReplayTarget) -> Vec<PhaseMemory> {
    let mut live = Live::default();
    let mut cache = None;
    let mut host = HostAllocator::default();
    let ends = trace.marks.iter().skip(1).map(|mark| mark.1).chain([trace.events.len()]);
    let mut phases = Vec::new();
    for (&(name, start, _), end) in trace.marks.iter().zip(ends) {
        if let ReplayTarget::Cuda(before) = device
            && (live.total == 0 || cache.is_none())
        {
            cache = Some(Cache::new(before));
        }
        if live.total == 0 {
            host = HostAllocator::default();
        }
        let before = cache.as_ref().map(|cache| (cache.allocator.allocated(), cache.allocator.reserved()));
        let mut peak = PhaseMemory {
            name,
            allocated_peak: Bytes(before.map_or(live.total, |(allocated, _)| allocated)),
            reserved_peak: Bytes(before.map_or(host.reserved(), |(_, reserved)| reserved)),
            categories: live.categories(),
            peak_event: start,
        };
        for (index, event) in trace.events[start..end].iter().enumerate() {
            live.apply(event);
            let (allocated, reserved) = if let Some(cache) = &mut cache {
                cache.apply(event);
                (cache.allocator.allocated(), cache.allocator.reserved())
            } else {
                apply(&mut host, event);
                (live.total, host.reserved())
            };
            peak.reserved_peak.0 = peak.reserved_peak.0.max(reserved);
            if allocated > peak.allocated_peak.0 {
                peak.allocated_peak.0 = allocated;
                peak.categories = live.categories();
                peak.peak_event = start + index;
            }
        }
        phases.push(peak);
    }
    phases
}

/// Size of the private memory pool of CUDA graphs (`train.graph`): the peak that the caching allocator reserves for the
/// activations and workspaces of a step. All graphs share the pool, and the blocks of a graph are free after its
/// replay, so the largest graph decides. Memory that earlier eager passes took stays in the default pool.
pub fn graph_pool(trace: &Trace) -> Bytes {
    let Some(step) = trace.marks.iter().position(|mark| mark.0 == "step") else { return Bytes(0) };
    let start = trace.marks[step].1;
    let end = trace.marks.get(step + 1).map_or(trace.events.len(), |mark| mark.1);
    let is_captured =
        |category: u8| [Category::Activations, Category::Workspace].iter().any(|kind| *kind as u8 == category);
    let mut pool = Cache::new(&[]);
    for event in &trace.events[start..end] {
        if is_captured(event.category) || !matches!(event.change, BlockChange::Allocate(_)) {
            pool.apply(event);
        }
    }
    Bytes(pool.allocator.reserved())
}

/// Bytes that are live after event `at`, by module, largest first.
pub fn alive_by_module(trace: &Trace, at: usize) -> Vec<(ModuleId, u64)> {
    let mut born: HashMap<u32, (ModuleId, u64)> = HashMap::new();
    for event in trace.events.iter().take(at + 1) {
        match event.change {
            BlockChange::Allocate(bytes) => drop(born.insert(event.block, (event.module, bytes))),
            BlockChange::Release => drop(born.remove(&event.block)),
            BlockChange::Move => {}
        }
    }
    let mut sums: HashMap<ModuleId, u64> = HashMap::new();
    for (module, bytes) in born.into_values() {
        *sums.entry(module).or_default() += bytes;
    }
    let mut sums: Vec<(ModuleId, u64)> = sums.into_iter().collect();
    sums.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(block: u32, change: BlockChange, category: u8) -> TraceEvent {
        TraceEvent { block, change, category, op: 0, module: ModuleId(0) }
    }

    fn trace() -> Trace {
        Trace {
            events: vec![
                event(0, BlockChange::Allocate(1000), 1),
                event(1, BlockChange::Allocate(3 << 20), 0),
                event(1, BlockChange::Move, 3),
                event(1, BlockChange::Release, 0),
                event(2, BlockChange::Allocate(2 << 20), 0),
                event(2, BlockChange::Release, 0),
                event(0, BlockChange::Release, 0),
                event(3, BlockChange::Allocate(512), 1),
            ],
            costs: Vec::new(),
            ops: vec![String::new()],
            marks: vec![("load", 0, 0), ("step", 2, 0), ("resume", 7, 0)],
        }
    }

    #[test]
    fn the_graph_pool_holds_the_activations_of_a_step() {
        // 2 MiB of activations open a segment of 20 MiB; earlier tensors and gradients are not in the pool
        assert_eq!(graph_pool(&trace()), Bytes(20 << 20));
        let mut other = trace();
        other.events[4].category = Category::Gradients as u8;
        assert_eq!(graph_pool(&other), Bytes(0));
        assert_eq!(graph_pool(&Trace { marks: Vec::new(), ..trace() }), Bytes(0));
    }

    #[test]
    fn phases_have_their_own_peaks() {
        let phases = phases(&trace(), ReplayTarget::Cpu);
        let peaks: Vec<u64> = phases.iter().map(|phase| phase.allocated_peak.0).collect();
        assert_eq!(peaks, [1000 + (3 << 20), 1000 + (3 << 20), 512]);
        let held: Vec<u64> = phases[1].categories.iter().map(|(_, bytes)| bytes.0).collect();
        assert_eq!(held[..4], [3 << 20, 1000, 0, 0], "the peak of the step is its beginning, before anything is freed");
        assert_eq!(phases[0].peak_event, 1);
    }

    #[test]
    fn the_caching_allocator_rounds_up_and_is_empty_in_a_new_process() {
        let phases = phases(&trace(), ReplayTarget::Cuda(&[]));
        let numbers: Vec<(u64, u64)> = phases.iter().map(|p| (p.allocated_peak.0, p.reserved_peak.0)).collect();
        let (small, large) = (2 << 20, 20 << 20);
        assert_eq!(numbers[0], (1024 + (3 << 20), small + large));
        assert_eq!(numbers[2], (512, small), "a new process has an empty cache");
    }
}
