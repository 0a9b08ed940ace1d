//! The allocation ledger: how many bytes of tensors live now, and the most that ever lived, by category.
//!
//! Counts what libtorch's CPU allocator hands out (tensor bytes, not the allocator's rounding). CUDA tensors are not
//! counted here. [`install`] once, before the first tensor.

use super::{Tensor, native};
use crate::units::Bytes;
use std::sync::Once;

/// What a tensor is for; the category of the thread that allocates it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(i32)]
pub enum Category {
    /// Intermediate results and what autograd saves of them.
    Activations = 0,
    /// Weights that are not trained.
    Frozen = 1,
    /// Weights that are trained (fp32 masters).
    Trainable = 2,
    /// Gradients of trained weights.
    Gradients = 3,
    /// Optimizer state.
    Optimizer = 4,
    /// Moving average of the trained weights.
    Ema = 5,
    /// Batches.
    Inputs = 6,
    /// Buffers of checkpoint reading and writing.
    Workspace = 7,
}

/// All categories with their names, in the order of their numbers.
pub const CATEGORIES: [(Category, &str); 8] = [
    (Category::Activations, "activations"),
    (Category::Frozen, "frozen"),
    (Category::Trainable, "trainable"),
    (Category::Gradients, "gradients"),
    (Category::Optimizer, "optimizer"),
    (Category::Ema, "ema"),
    (Category::Inputs, "inputs"),
    (Category::Workspace, "workspace"),
];

/// Bytes of tensors at one moment.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Usage {
    /// Live now.
    pub allocated: Bytes,
    /// The most that ever lived since the start or [`reset_peak`].
    pub allocated_peak: Bytes,
    /// By category: live now, and its share at the moment of the overall peak.
    pub categories: Vec<CategoryUsage>,
}

/// One category's share.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct CategoryUsage {
    /// Name in `snake_case`.
    pub name: &'static str,
    /// Live now.
    pub allocated: Bytes,
    /// This category's own maximum.
    pub own_peak: Bytes,
    /// Its bytes when the total was at its maximum.
    pub at_peak: Bytes,
}

/// Puts the counting allocator in front of libtorch's CPU allocator, and has malloc give large buffers back when they are
/// freed; later calls do nothing.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        super::memory::at_start();
        // SAFETY: replaces a global pointer; blocks made before keep their own deleter.
        unsafe { native::prsmed_ledger_install() }
    });
}

/// While it lives, allocations of this thread count for a category.
#[derive(Debug)]
pub struct Entered(i32);

/// Enters `category` on this thread until the result is dropped.
#[must_use]
pub fn enter(category: Category) -> Entered {
    // SAFETY: sets a thread-local integer.
    Entered(unsafe { native::prsmed_ledger_enter(category as i32) })
}

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: sets a thread-local integer.
        unsafe { native::prsmed_ledger_enter(self.0) };
    }
}

/// Moves the bytes of `tensor` to `category` (gradients are born among activations).
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

/// Bytes now and at the peak; all zero when [`install`] was never called.
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
    /// Its size.
    pub bytes: Bytes,
    /// What it is for.
    pub category: &'static str,
    /// Module that asked for it (`llm.layers.7.mlp`).
    pub scope: String,
}

/// The `count` largest live blocks, largest first.
pub fn largest(count: usize) -> Vec<LargeBlock> {
    let mut raw = vec![native::RawBlock::default(); count];
    // SAFETY: the callee writes at most `count` blocks and says how many.
    let found = unsafe { native::prsmed_ledger_largest(raw.as_mut_ptr(), i64::try_from(count).unwrap_or(i64::MAX)) };
    raw.truncate(usize::try_from(found).unwrap_or(0));
    raw.iter().map(LargeBlock::from).collect()
}

impl From<&native::RawBlock> for LargeBlock {
    fn from(raw: &native::RawBlock) -> Self {
        Self { bytes: Bytes(raw.bytes), category: category_name(raw.category), scope: scope_path(raw.scope) }
    }
}

fn category_name(number: i32) -> &'static str {
    usize::try_from(number).ok().and_then(|i| CATEGORIES.get(i)).map_or("", |(_, name)| name)
}

fn scope_path(number: u32) -> String {
    super::scope::path(super::scope::Scope(number))
}

/// From now on CPU tensors of no more than `limit` may live at once (`None`: as many as the machine has room for); beyond,
/// allocations fail as on a full machine. Needs [`install`].
pub fn set_limit(limit: Option<Bytes>) {
    // SAFETY: sets a number under the ledger's lock.
    unsafe { native::prsmed_ledger_set_limit(limit.map_or(u64::MAX, |bytes| bytes.0)) };
}

/// Starts a new peak from what lives now.
pub fn reset_peak() {
    // SAFETY: touches the ledger's own counters under its lock.
    unsafe { native::prsmed_ledger_reset_peak() };
}

/// Bytes by category, in the order of [`CATEGORIES`].
pub type Shares = Vec<(&'static str, Bytes)>;

fn shares(raw: &[u64]) -> Shares {
    CATEGORIES.iter().zip(raw).map(|((_, name), bytes)| (*name, Bytes(*bytes))).collect()
}

/// Peaks since [`begin_window`], which leave those of [`usage`] alone, and what is taken from the system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// Taken from the system now: live blocks with header and rounding, and freed ones that are kept for reuse.
    pub reserved: Bytes,
    /// The most that was ever taken.
    pub reserved_peak: Bytes,
    /// The most that was taken in the window.
    pub window_reserved_peak: Bytes,
    /// The most that lived in the window.
    pub window_peak: Bytes,
    /// Its parts.
    pub at_window_peak: Shares,
}

/// The window so far; all zero when [`install`] was never called.
pub fn window() -> Window {
    let mut raw = [0_u64; 4 + CATEGORIES.len()];
    // SAFETY: the callee writes exactly that many numbers.
    unsafe { native::prsmed_ledger_read_window(raw.as_mut_ptr()) };
    Window {
        reserved: Bytes(raw[0]),
        reserved_peak: Bytes(raw[1]),
        window_reserved_peak: Bytes(raw[2]),
        window_peak: Bytes(raw[3]),
        at_window_peak: shares(&raw[4..]),
    }
}

/// Starts a new window from what lives now; one for the process.
pub fn begin_window() {
    // SAFETY: touches the ledger's own counters under its lock.
    unsafe { native::prsmed_ledger_begin_window() };
}

/// Gives freed blocks that are kept for reuse back to the system; returns their bytes.
pub fn release_kept() -> Bytes {
    // SAFETY: frees blocks that nobody uses, under the lock of their list.
    Bytes(unsafe { native::prsmed_ledger_release_kept() })
}

/// What lived when a tensor could not be allocated: written down before anything was freed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Failure {
    /// Bytes of the tensor, where they are known.
    pub requested: Option<Bytes>,
    /// What it was for.
    pub category: Option<&'static str>,
    /// Module that asked for it; empty outside of modules.
    pub scope: String,
    /// Bytes that lived.
    pub allocated: Bytes,
    /// Bytes taken from the system.
    pub reserved: Bytes,
    /// What lived, by category; empty where categories are not known.
    pub categories: Shares,
    /// The largest live blocks, at most 10, largest first.
    pub largest: Vec<LargeBlock>,
}

/// The first failure since [`clear_failure`]; later ones (in tidying up) are its consequences.
pub fn failure() -> Option<Failure> {
    let mut raw = native::RawFailure::default();
    // SAFETY: the callee fills the structure when it returns true.
    let failed = unsafe { native::prsmed_ledger_failure(&raw mut raw) };
    failed.then(|| Failure {
        requested: Some(Bytes(raw.requested)),
        category: Some(category_name(raw.category)),
        scope: scope_path(raw.scope),
        allocated: Bytes(raw.allocated),
        reserved: Bytes(raw.reserved),
        categories: shares(&raw.categories),
        largest: raw.largest.iter().take(usize::try_from(raw.num_largest).unwrap_or(0)).map(LargeBlock::from).collect(),
    })
}

/// Forgets a failure that was dealt with.
pub fn clear_failure() {
    // SAFETY: touches the ledger's own flag under its lock.
    unsafe { native::prsmed_ledger_clear_failure() };
}

/// Tests that read windows, failures or large changes of the ledger take turns: it is one for the process.
#[cfg(test)]
pub(crate) static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
