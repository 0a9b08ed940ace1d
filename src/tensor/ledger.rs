//! Memory ledger of CPU tensors: current and peak bytes, by category.
//!
//! It counts the tensor bytes that libtorch's CPU allocator returns, without the allocator's rounding. It does not
//! count CUDA tensors. Call [`install`] before the first tensor: earlier ones are not counted.

pub use prsmed_replay::trace::{CATEGORIES, Category};

use super::{Tensor, native};
use prsmed_base::units::Bytes;
use std::sync::Once;

/// Bytes of tensors at one moment.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Usage {
    /// Bytes of tensors that are alive.
    pub allocated: Bytes,
    /// Peak of `allocated` since the start or [`reset_peak`].
    pub allocated_peak: Bytes,
    /// Current and peak bytes of each category.
    pub categories: Vec<CategoryUsage>,
}

/// Bytes of one category.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct CategoryUsage {
    /// Name in `snake_case`.
    pub name: &'static str,
    /// Bytes of tensors that are alive.
    pub allocated: Bytes,
    /// Peak of this category alone.
    pub own_peak: Bytes,
    /// Bytes of this category when the total was at its peak.
    pub at_peak: Bytes,
}

/// Wraps libtorch's CPU allocator with a counting one, and configures malloc to return large freed buffers to the
/// system. Later calls do nothing.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        super::memory::resident_at_start();
        // SAFETY: replaces a global pointer; blocks from before are freed as they were allocated.
        unsafe { native::prsmed_ledger_install() }
    });
}

/// Sets the category of its thread's allocations until it is dropped.
#[derive(Debug)]
pub struct CategoryGuard(i32);

/// Enters `category` on this thread until the result is dropped.
#[must_use]
pub fn enter(category: Category) -> CategoryGuard {
    // SAFETY: sets a thread-local integer.
    CategoryGuard(unsafe { native::prsmed_ledger_enter(category as i32) })
}

impl Drop for CategoryGuard {
    fn drop(&mut self) {
        // SAFETY: sets a thread-local integer.
        unsafe { native::prsmed_ledger_enter(self.0) };
    }
}

/// Moves the bytes of `tensor` to `category`. For example, gradients are allocated as activations.
pub fn recategorize(tensor: &Tensor, category: Category) {
    if !tensor.defined() {
        return;
    }
    let device = tensor.device();
    if device == super::Device::Cpu {
        // SAFETY: the tensor outlives the call; foreign storages are left alone by the callee.
        unsafe { native::prsmed_ledger_move(native::raw(tensor), category as i32) };
    } else if device == super::META {
        // SAFETY: as above.
        unsafe { native::prsmed_meta_move(native::raw(tensor), category as i32) };
    }
}

/// Current and peak bytes. All are zero if [`install`] was not called.
pub fn usage() -> Usage {
    let mut raw = [0_u64; 2 + 3 * CATEGORIES.len()];
    // SAFETY: the callee writes exactly that many numbers.
    unsafe { native::prsmed_ledger_read(raw.as_mut_ptr()) };
    let categories = CATEGORIES
        .iter()
        .enumerate()
        .map(|(i, (_, name))| CategoryUsage {
            name,
            allocated: Bytes(raw[2 + i]),
            own_peak: Bytes(raw[2 + CATEGORIES.len() + i]),
            at_peak: Bytes(raw[2 + 2 * CATEGORIES.len() + i]),
        })
        .collect();
    Usage { allocated: Bytes(raw[0]), allocated_peak: Bytes(raw[1]), categories }
}

/// A live block of at least 128 KiB.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct LargeBlock {
    /// Size in bytes.
    pub bytes: Bytes,
    /// Name of the category.
    pub category: &'static str,
    /// Module that allocated it (`llm.layers.7.mlp`).
    #[serde(rename = "scope")]
    pub module: String,
}

/// The `count` largest live blocks, largest first.
pub fn largest(count: usize) -> Vec<LargeBlock> {
    let mut raw = vec![native::RawBlock::default(); count];
    // SAFETY: the callee writes at most `count` blocks and says how many.
    let found = unsafe { native::prsmed_ledger_largest(raw.as_mut_ptr(), i64::try_from(count).unwrap_or(i64::MAX)) };
    raw.truncate(usize::try_from(found).unwrap_or(0));
    raw.iter().map(large_block).collect()
}

fn large_block(raw: &native::RawBlock) -> LargeBlock {
    LargeBlock { bytes: Bytes(raw.bytes), category: category_name(raw.category), module: module_path_of(raw.module) }
}

fn category_name(number: i32) -> &'static str {
    usize::try_from(number).ok().and_then(|i| CATEGORIES.get(i)).map_or("", |(_, name)| name)
}

fn module_path_of(number: u32) -> String {
    super::module_path::path(super::module_path::ModuleId(number))
}

/// Limits the bytes of live CPU tensors (`None`: no limit). An allocation beyond the limit fails as if memory were
/// full. Needs [`install`].
pub fn set_limit(limit: Option<Bytes>) {
    // SAFETY: sets a number under the ledger's lock.
    unsafe { native::prsmed_ledger_set_limit(limit.map_or(u64::MAX, |bytes| bytes.0)) };
}

/// Resets the peak to the current bytes.
pub fn reset_peak() {
    // SAFETY: touches the ledger's own counters under its lock.
    unsafe { native::prsmed_ledger_reset_peak() };
}

/// Bytes by category, in the order of [`CATEGORIES`].
pub type CategoryBytes = Vec<(&'static str, Bytes)>;

fn shares(raw: &[u64]) -> CategoryBytes {
    CATEGORIES.iter().zip(raw).map(|((_, name), bytes)| (*name, Bytes(*bytes))).collect()
}

/// Peak bytes since [`begin_window`], independent of the peaks of [`usage`], and bytes taken from the system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerWindow {
    /// Bytes taken from the system: live blocks with header and rounding, and freed blocks that are cached for reuse.
    pub reserved: Bytes,
    /// Peak of `reserved` since the start.
    pub reserved_peak: Bytes,
    /// Peak of `reserved` in the window.
    pub window_reserved_peak: Bytes,
    /// Peak of allocated bytes in the window.
    pub window_peak: Bytes,
    /// Bytes by category at that peak.
    pub at_window_peak: CategoryBytes,
}

/// The current window. All bytes are zero if [`install`] was not called.
pub fn window() -> LedgerWindow {
    let mut raw = [0_u64; 4 + CATEGORIES.len()];
    // SAFETY: the callee writes exactly that many numbers.
    unsafe { native::prsmed_ledger_read_window(raw.as_mut_ptr()) };
    LedgerWindow {
        reserved: Bytes(raw[0]),
        reserved_peak: Bytes(raw[1]),
        window_reserved_peak: Bytes(raw[2]),
        window_peak: Bytes(raw[3]),
        at_window_peak: shares(&raw[4..]),
    }
}

/// Starts a new window. The process has one window.
pub fn begin_window() {
    // SAFETY: touches the ledger's own counters under its lock.
    unsafe { native::prsmed_ledger_begin_window() };
}

/// Returns the cached freed blocks to the system. Returns their bytes.
pub fn release_cached() -> Bytes {
    // SAFETY: frees blocks that nobody uses, under the lock of their list.
    Bytes(unsafe { native::prsmed_ledger_release_cached() })
}

/// State of the ledger when an allocation failed, before anything was freed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct AllocationFailure {
    /// Size of the failed allocation, if known.
    pub requested: Option<Bytes>,
    /// Category of the failed allocation, if known.
    pub category: Option<&'static str>,
    /// Module that asked for the memory; empty outside of modules.
    #[serde(rename = "scope")]
    pub module: String,
    /// Bytes of live tensors.
    pub allocated: Bytes,
    /// Bytes taken from the system.
    pub reserved: Bytes,
    /// Bytes of live tensors by category; empty if categories are not known.
    pub categories: CategoryBytes,
    /// The largest live blocks, at most 10, largest first.
    pub largest: Vec<LargeBlock>,
}

/// The first failed allocation since [`clear_failure`]. Later ones are ignored, because cleaning up may fail too.
pub fn failure() -> Option<AllocationFailure> {
    let mut raw = native::RawFailure::default();
    // SAFETY: the callee fills the structure when it returns true.
    let failed = unsafe { native::prsmed_ledger_failure(&raw mut raw) };
    failed.then(|| AllocationFailure {
        requested: Some(Bytes(raw.requested)),
        category: Some(category_name(raw.category)),
        module: module_path_of(raw.module),
        allocated: Bytes(raw.allocated),
        reserved: Bytes(raw.reserved),
        categories: shares(&raw.categories),
        largest: raw.largest.iter().take(usize::try_from(raw.num_largest).unwrap_or(0)).map(large_block).collect(),
    })
}

/// Clears the last failure, after it was handled.
pub fn clear_failure() {
    // SAFETY: touches the ledger's own flag under its lock.
    unsafe { native::prsmed_ledger_clear_failure() };
}

/// Tests that read windows, failures or large changes of the ledger hold this lock, because a process has one ledger.
#[doc(hidden)]
pub static TEST_LOCK: std::sync::Mutex<()> = std::sync::Mutex::new(());
