//! What a job takes from libtorch's allocators: replays a trace of its allocations, without a device and without libtorch.
//!
//! [`caching`] is a model of the CUDA caching allocator and [`host`] one of the counting allocator of CPU tensors; both
//! are compared with the real ones to the byte. [`phases()`] gives the peaks of each phase of a [`trace::Trace`].
//!
//! ```
//! use prsmed_replay::caching::CachingAllocator;
//!
//! let mut gpu = CachingAllocator::default();
//! let block = gpu.allocate(3 << 20);
//! gpu.free(block);
//! // a request between 1 and 10 MiB opens a segment of 20 MiB, which stays reserved
//! assert_eq!((gpu.allocated(), gpu.reserved()), (0, 20 << 20));
//! ```

pub mod caching;
pub mod host;
mod phases;
pub mod trace;

pub use phases::{Live, PhaseMemory, ReplayTarget, alive_by_module, graph_pool, phases};
