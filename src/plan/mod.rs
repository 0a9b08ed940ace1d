//! Memory planner: runs a job on the meta device, replays its allocations through a model of the CUDA caching
//! allocator, and searches for settings that fit a GPU.
//!
//! It knows no model: the job is given as a task.

pub mod calibrate;
pub mod communication;
pub mod detect;
pub mod device_terms;
pub mod dry_run;
pub mod duration;
pub mod gpus;
pub mod host;
pub mod machine;
pub mod matmul;
pub mod measured;
pub mod reading;
pub mod report;
pub mod search;
pub mod speed;
pub mod time;
pub mod timeline;
pub mod unsupported;
