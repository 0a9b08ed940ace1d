//! Tests of the `prsmed` binary: output, error messages, exit codes, and runs that are stopped.
//!
//! Folders are created in cargo's temporary folder, which the suite clears when it starts.

#![expect(clippy::unwrap_used, reason = "a test panics where an application would report")]

mod augment;
mod bench;
mod bounds;
mod calibrate;
mod checkpoints;
mod data;
mod documented;
mod environment;
mod evaluation;
mod extra;
mod first_run;
mod help;
mod hub;
mod init;
mod layouts;
mod leaks;
#[expect(dead_code, reason = "tests of the hub client use the rest")]
#[path = "../loopback/mod.rs"]
mod loopback;
mod memory;
mod merge;
mod negatives;
mod next;
mod old_runs;
mod outputs;
mod phantom_volumes;
mod plan;
mod predict_many;
mod prepared_volumes;
mod privacy;
mod pth;
mod ranks;
mod real_volumes;
mod reference;
mod resident;
mod resume;
mod runs;
mod scan;
mod scores;
mod sequences;
mod settings;
mod soak;
mod support;
mod volumes;
mod walk;
mod warm;
mod words;
