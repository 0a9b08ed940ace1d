//! Memory of a task on a card: what cards offer, what libtorch's caching allocator makes of allocations, pictures of both.
//!
//! Knows no model.

pub mod allocator;
pub mod cards;
pub mod detect;
pub mod device_terms;
pub mod host;
pub mod host_allocator;
pub mod matmul;
pub mod rehearse;
pub mod replay;
pub mod report;
pub mod search;
pub mod time;
pub mod timeline;
