//! What a job takes from libtorch's allocators: replays a trace of its allocations, without a device and without libtorch.
//!
//! [`caching`] is a model of the CUDA caching allocator and [`host`] one of the counting allocator of CPU tensors; both
//! are compared with the real ones to the byte. [`phases()`] gives the peaks of each phase of a [`trace::Trace`].

pub mod caching;
pub mod host;
mod phases;
pub mod trace;

pub use phases::{Live, PhaseMemory, ReplayTarget, alive_by_module, graph_pool, phases};
