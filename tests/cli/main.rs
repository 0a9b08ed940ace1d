//! The real binary: what it says, what it refuses and how, and what is left of a run that is stopped.
//!
//! Folders are made below cargo's own temporary folder and cleared when the suite starts.

#![expect(clippy::unwrap_used, reason = "a test panics where an application would report")]

mod augment;
mod bench;
mod checkpoints;
mod data;
mod extra;
mod help;
mod hub;
mod memory;
mod merge;
mod plan;
mod resident;
mod runs;
mod settings;
mod support;
