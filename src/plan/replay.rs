//! From the trace of a job to its memory: peaks of every phase, what the caching allocator reserves, what lived at the peak.

use super::allocator::{Block, CachingAllocator, Pool, Settings};
use super::device_terms::Term;
use super::host_allocator::HostAllocator;
use crate::tensor::ledger::{CATEGORIES, Category};
use crate::tensor::scope::{self, Scope};
use crate::tensor::trace::{Change, Event, Trace};
use crate::units::Bytes;
use std::collections::HashMap;

/// Memory of one phase.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PhaseMemory {
    /// Its name; see [`super::rehearse`].
    pub name: &'static str,
    /// The most bytes that tensors held: on CUDA as the caching allocator counts them (multiples of 512), with the
    /// library workspaces that come from it.
    pub allocated_peak: Bytes,
    /// The most bytes that the allocator held from the device or, on the CPU, from the system.
    pub reserved_peak: Bytes,
    /// Bytes of tensors at the peak by category.
    pub categories: Vec<(&'static str, Bytes)>,
    /// Event of the trace after which tensors held the most.
    #[serde(skip)]
    pub peak_event: usize,
}

/// How a trace is replayed.
#[derive(Debug, Clone, Copy)]
pub enum Device<'a> {
    /// Tensor bytes as they are, reserved by the counting allocator.
    Cpu,
    /// Through libtorch's caching allocator, which also holds the reserved ones of these terms from the start.
    Cuda(&'a [Term]),
}

/// Live blocks of a replay.
#[derive(Debug, Default)]
struct Live {
    /// Size and category of each block, by number.
    blocks: Vec<(u64, u8)>,
    total: u64,
    by_category: [u64; CATEGORIES.len()],
}

impl Live {
    fn apply(&mut self, event: &Event) {
        let block = event.block as usize;
        if block >= self.blocks.len() {
            self.blocks.resize(block + 1, (0, 0));
        }
        match event.change {
            Change::Allocate(bytes) => {
                self.blocks[block] = (bytes, event.category);
                self.total += bytes;
                self.by_category[usize::from(event.category)] += bytes;
            }
            Change::Release => {
                let (bytes, category) = std::mem::take(&mut self.blocks[block]);
                self.total -= bytes;
                self.by_category[usize::from(category)] -= bytes;
            }
            Change::Move => {
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
    fn new(terms: &[Term]) -> Self {
        let mut allocator = CachingAllocator::new(Settings::default());
        for term in terms.iter().filter(|term| term.reserved && term.bytes > 0) {
            let _kept = allocator.allocate(term.bytes, 0, Pool::Default);
        }
        Self { allocator, blocks: Vec::new() }
    }

    fn apply(&mut self, event: &Event) {
        let block = event.block as usize;
        match event.change {
            Change::Allocate(bytes) => {
                if block >= self.blocks.len() {
                    self.blocks.resize(block + 1, None);
                }
                self.blocks[block] = self.allocator.allocate(bytes, 0, Pool::Default).ok();
            }
            Change::Release => {
                if let Some(block) = self.blocks[block].take() {
                    self.allocator.free(block);
                }
            }
            Change::Move => {}
        }
    }
}

fn apply(host: &mut HostAllocator, event: &Event) {
    match event.change {
        Change::Allocate(bytes) => host.allocate(event.block as usize, bytes),
        Change::Release => host.free(event.block as usize),
        Change::Move => {}
    }
}

/// The memory of every phase. A phase that begins with nothing alive begins in a new process.
pub fn phases(trace: &Trace, device: Device) -> Vec<PhaseMemory> {
    let mut live = Live::default();
    let mut cache = None;
    let mut host = HostAllocator::default();
    let ends = trace.marks.iter().skip(1).map(|mark| mark.1).chain([trace.events.len()]);
    let mut phases = Vec::new();
    for (&(name, start, _), end) in trace.marks.iter().zip(ends) {
        if let Device::Cuda(terms) = device
            && (live.total == 0 || cache.is_none())
        {
            cache = Some(Cache::new(terms));
        }
        if live.total == 0 {
            host = HostAllocator::default();
        }
        let before = cache.as_ref().map(|cache| cache.allocator.stats());
        let mut peak = PhaseMemory {
            name,
            allocated_peak: Bytes(before.map_or(live.total, |stats| stats.allocated)),
            reserved_peak: Bytes(before.map_or(host.reserved(), |stats| stats.reserved)),
            categories: live.categories(),
            peak_event: start,
        };
        for (index, event) in trace.events[start..end].iter().enumerate() {
            live.apply(event);
            let (allocated, reserved) = if let Some(cache) = &mut cache {
                cache.apply(event);
                let stats = cache.allocator.stats();
                (stats.allocated, stats.reserved)
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

/// What the private pool of recorded passes (`train.graph`) holds: the most that the caching allocator reserves for the
/// activations and workspaces of a step alone. All recordings share the pool, and a recording's blocks are free when it has
/// run, so the largest bucket decides; the default pool keeps what passes that are not recorded took from it.
pub fn graph_pool(trace: &Trace) -> Bytes {
    let Some(step) = trace.marks.iter().position(|mark| mark.0 == "step") else { return Bytes(0) };
    let start = trace.marks[step].1;
    let end = trace.marks.get(step + 1).map_or(trace.events.len(), |mark| mark.1);
    let is_captured =
        |category: u8| [Category::Activations, Category::Workspace].iter().any(|kind| *kind as u8 == category);
    let mut allocator = CachingAllocator::new(Settings::default());
    let mut blocks: HashMap<u32, Block> = HashMap::new();
    for event in &trace.events[start..end] {
        match event.change {
            Change::Allocate(bytes) if is_captured(event.category) => {
                if let Ok(block) = allocator.allocate(bytes, 0, Pool::Private(0)) {
                    blocks.insert(event.block, block);
                }
            }
            Change::Release => {
                if let Some(block) = blocks.remove(&event.block) {
                    allocator.free(block);
                }
            }
            Change::Allocate(_) | Change::Move => {}
        }
    }
    Bytes(allocator.stats().reserved)
}

/// What lives after event `at`, summed over `key`, largest first.
fn alive_by<K: std::hash::Hash + Eq + Ord>(trace: &Trace, at: usize, key: impl Fn(&Event) -> K) -> Vec<(K, u64)> {
    let mut born: HashMap<u32, (&Event, u64)> = HashMap::new();
    for event in trace.events.iter().take(at + 1) {
        match event.change {
            Change::Allocate(bytes) => drop(born.insert(event.block, (event, bytes))),
            Change::Release => drop(born.remove(&event.block)),
            Change::Move => {}
        }
    }
    let mut sums: HashMap<K, u64> = HashMap::new();
    for (event, bytes) in born.into_values() {
        *sums.entry(key(event)).or_default() += bytes;
    }
    let mut sums: Vec<(K, u64)> = sums.into_iter().collect();
    sums.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    sums
}

/// Bytes that live after event `at` by module scope, cut to `depth` names (`llm.layers` for 2), largest first.
pub fn scopes_at(trace: &Trace, at: usize, depth: usize) -> Vec<(String, Bytes)> {
    let mut names: HashMap<Scope, String> = HashMap::new();
    let mut sums: HashMap<String, u64> = HashMap::new();
    for (scope, bytes) in alive_by(trace, at, |event| event.scope) {
        let name = names.entry(scope).or_insert_with(|| {
            let path = scope::path(scope);
            let parts: Vec<&str> = path.split('.').take(depth).collect();
            if path.is_empty() { "(no module)".into() } else { parts.join(".") }
        });
        *sums.entry(name.clone()).or_default() += bytes;
    }
    let mut sums: Vec<(String, Bytes)> = sums.into_iter().map(|(name, bytes)| (name, Bytes(bytes))).collect();
    sums.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    sums
}

/// Memory after each event by category, phases, and the operators around the highest point, for a picture.
pub fn timeline(trace: &Trace, title: String, budget: Option<u64>) -> super::timeline::Timeline {
    use super::timeline::{Peak, Point, Timeline};
    // what stays the same lies below
    const ORDER: [Category; CATEGORIES.len()] = [
        Category::Frozen,
        Category::Trainable,
        Category::Optimizer,
        Category::Ema,
        Category::Gradients,
        Category::Workspace,
        Category::Inputs,
        Category::Activations,
    ];
    let mut live = Live::default();
    let mut points = Vec::with_capacity(trace.events.len());
    for event in &trace.events {
        live.apply(event);
        points.push(Point { bytes: ORDER.iter().map(|category| live.by_category[*category as usize]).collect() });
    }
    let at = (0..points.len()).max_by_key(|i| (points[*i].total(), usize::MAX - i)).unwrap_or(0);
    Timeline {
        categories: ORDER.iter().map(|category| CATEGORIES[*category as usize].1.to_owned()).collect(),
        phases: trace.marks.iter().map(|(name, event, _)| ((*name).to_owned(), *event)).collect(),
        title,
        budget,
        peak: Peak { at, ops: changes_around(trace, at, points.get(at).map_or(0, Point::total)) },
        points,
    }
}

/// The large changes of memory around event `at` by operator: name, scope, bytes gained.
fn changes_around(trace: &Trace, at: usize, total: u64) -> Vec<(String, String, i64)> {
    const EACH_SIDE: usize = 8;
    const LARGE_FRAC: u64 = 2000;
    let sizes = sizes_of_blocks(trace);
    let change = |index: usize| {
        let event = trace.events[index];
        let bytes = sizes[event.block as usize];
        let is_large = bytes >= total / LARGE_FRAC;
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let (bytes, op) = match event.change {
            Change::Allocate(_) => (bytes, trace.ops[usize::from(event.op)].trim_start_matches("aten::")),
            Change::Release => (-bytes, "(release)"),
            Change::Move => return None,
        };
        // the engine's own nodes around operators say nothing
        let op = if op.is_empty() || op.starts_with("autograd::") { "(allocation)" } else { op };
        is_large.then(|| (op.to_owned(), scope::path(event.scope), bytes))
    };
    let mut before: Vec<_> = (0..=at).rev().filter_map(change).take(EACH_SIDE).collect();
    before.reverse();
    let after = (at + 1..trace.events.len()).filter_map(change).take(EACH_SIDE);
    before.into_iter().chain(after).collect()
}

fn sizes_of_blocks(trace: &Trace) -> Vec<u64> {
    let mut sizes = Vec::new();
    for event in &trace.events {
        if let Change::Allocate(bytes) = event.change {
            sizes.resize(sizes.len().max(event.block as usize + 1), 0);
            sizes[event.block as usize] = bytes;
        }
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(block: u32, change: Change, category: u8) -> Event {
        Event { block, change, category, op: 0, scope: Scope(0) }
    }

    fn trace() -> Trace {
        Trace {
            events: vec![
                event(0, Change::Allocate(1000), 1),
                event(1, Change::Allocate(3 << 20), 0),
                event(1, Change::Move, 3),
                event(1, Change::Release, 0),
                event(2, Change::Allocate(2 << 20), 0),
                event(2, Change::Release, 0),
                event(0, Change::Release, 0),
                event(3, Change::Allocate(512), 1),
            ],
            costs: Vec::new(),
            ops: vec![String::new()],
            marks: vec![("load", 0, 0), ("step", 2, 0), ("resume", 7, 0)],
        }
    }

    #[test]
    fn recorded_passes_have_a_pool_for_a_step_s_activations() {
        // 2 MiB of activations open a segment of 20 MiB; what was there before the step and gradients lie outside
        assert_eq!(graph_pool(&trace()), Bytes(20 << 20));
        let mut other = trace();
        other.events[4].category = Category::Gradients as u8;
        assert_eq!(graph_pool(&other), Bytes(0));
        assert_eq!(graph_pool(&Trace { marks: Vec::new(), ..trace() }), Bytes(0));
    }

    #[test]
    fn phases_have_their_own_peaks() {
        let phases = phases(&trace(), Device::Cpu);
        let peaks: Vec<u64> = phases.iter().map(|phase| phase.allocated_peak.0).collect();
        assert_eq!(peaks, [1000 + (3 << 20), 1000 + (3 << 20), 512]);
        let held: Vec<u64> = phases[1].categories.iter().map(|(_, bytes)| bytes.0).collect();
        assert_eq!(held[..4], [3 << 20, 1000, 0, 0], "the peak of the step is what the load left");
        assert_eq!(phases[0].peak_event, 1);
    }

    #[test]
    fn the_cache_rounds_reserves_and_starts_anew() {
        let phases = phases(&trace(), Device::Cuda(&[]));
        let numbers: Vec<(u64, u64)> = phases.iter().map(|p| (p.allocated_peak.0, p.reserved_peak.0)).collect();
        let (small, large) = (2 << 20, 20 << 20);
        assert_eq!(numbers[0], (1024 + (3 << 20), small + large));
        assert_eq!(numbers[2], (512, small), "a new process has an empty cache");
    }
}
