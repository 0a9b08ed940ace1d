//! From rows to batches: samplers, samples, and the loader with its workers.

pub mod batch;
pub mod length_sampler;
pub mod loader;
pub mod mixing_sampler;
pub mod sample;
pub mod unreadable;
