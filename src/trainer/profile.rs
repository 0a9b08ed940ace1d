//! Memory profile of a run: bytes at marks, peaks of phases, components of the model, and leak detection.
//!
//! Peaks have the phases and categories of the planner, so that they can be compared with a plan. Numbers are those of
//! [`crate::tensor::memory`]. A profiler affects neither results nor the overall peak of the ledger.

pub mod components;
pub mod leak;

mod hooks;
mod lines;

pub use components::{Component, ComponentUse, Held};
pub use leak::{Leak, LeakWatch};

pub(super) use hooks::Hooks;

use crate::Result;
use crate::tensor::ledger::Shares;
use crate::tensor::memory::{self, Reading, System};
use crate::tensor::{Device, ledger};
use crate::units::Bytes;
use lines::Lines;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Name of the profile in a run folder.
pub const PROFILE_FILE: &str = "memory.jsonl";

/// Settings of the memory profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Profile the first step of a session and every so many optimizer steps, 1 or more. Evaluations and saves are
    /// always profiled.
    pub every_steps: u64,
    /// JSON lines file. A resumed run appends to it; a new run replaces it.
    pub out: PathBuf,
}

impl Settings {
    /// Checks that the file can be written, before expensive work. Does not change its content, and follows no link.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn check(&self) -> Result<()> {
        crate::files::open_to_change(&self.out).map(drop).map_err(crate::Error::io(&self.out, "write"))
    }
}

/// Memory at a labelled point of a run, compared with the previous mark.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Mark {
    /// Part of a step that just ended: `forward`, `backward`, `optimizer`, ...
    pub label: String,
    /// Optimizer steps done so far.
    pub step: u64,
    /// Bytes of live tensors.
    pub allocated: Bytes,
    /// Increase in bytes since the previous mark.
    pub allocated_delta: i64,
    /// Peak bytes of live tensors since the previous mark.
    pub allocated_peak: Bytes,
    /// Bytes that the allocator has reserved.
    pub reserved: Bytes,
    /// Increase in bytes since the previous mark.
    pub reserved_delta: i64,
    /// Peak of the reserved bytes since the previous mark.
    pub reserved_peak: Bytes,
}

/// Memory of a phase as the planner defines it, with measurements of the device.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Phase {
    /// Name of the phase as in a plan: `load`, `first step`, `step`, `evaluate`, `save`, `resume`.
    pub name: String,
    /// Optimizer steps done when it ended.
    pub step: u64,
    /// Peak bytes of live tensors.
    pub allocated_peak: Bytes,
    /// The peak by category.
    pub categories: Shares,
    /// Bytes of live tensors when it ended.
    pub allocated: Bytes,
    /// The bytes when it ended, by category.
    pub categories_after: Shares,
    /// Bytes that the allocator had reserved when it ended.
    pub reserved: Bytes,
    /// Peak of the reserved bytes.
    pub reserved_peak: Bytes,
    /// Memory of the process and the GPU by operating system and driver, when it ended.
    pub system: System,
}

/// Measures a device's memory between marks. A process can have one at a time.
#[derive(Debug)]
pub struct Profiler {
    device: Device,
    last: Reading,
    /// Open phase: its name and its highest peaks so far.
    open: Option<(String, Reading)>,
    step: u64,
    watch: LeakWatch,
    lines: Option<Lines>,
}

impl Profiler {
    /// Starts a profile of `device`. For the CPU, the ledger must be installed.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] for a GPU that is not in use.
    pub fn new(device: Device) -> Result<Self> {
        memory::begin_window(device)?;
        let last = memory::read(device)?;
        Ok(Self { device, last, open: None, step: 0, watch: LeakWatch::default(), lines: None })
    }

    /// Also writes everything to `path`, one JSON object a line. With `append` an existing file is continued, else
    /// replaced.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn to_file(mut self, path: &Path, append: bool) -> Result<Self> {
        self.lines = Some(Lines::open(path, append)?);
        Ok(self)
    }

    /// Sets the number of optimizer steps done, for the next lines.
    pub fn at_step(&mut self, step: u64) {
        self.step = step;
    }

    /// Sets the baseline of the next mark, and writes the live bytes (`"kind": "baseline"`).
    ///
    /// # Errors
    /// [`crate::Error::Io`]; as [`Profiler::new`].
    pub fn baseline(&mut self) -> Result<Reading> {
        let reading = self.take()?;
        self.write(&json!({ "kind": "baseline", "step": self.step }), &reading)?;
        Ok(reading)
    }

    /// Writes a mark (`"kind": "mark"`).
    ///
    /// # Errors
    /// As [`Profiler::baseline`].
    pub fn mark(&mut self, label: &str) -> Result<Mark> {
        let before = self.last.clone();
        let now = self.take()?;
        let mark = Mark {
            label: label.to_owned(),
            step: self.step,
            allocated: now.allocated,
            allocated_delta: delta(now.allocated, before.allocated),
            allocated_peak: now.allocated_peak,
            reserved: now.reserved,
            reserved_delta: delta(now.reserved, before.reserved),
            reserved_peak: now.reserved_peak,
        };
        self.write(&json!({ "kind": "mark" }), &mark)?;
        Ok(mark)
    }

    /// Begins a phase. A phase that did not end is discarded.
    ///
    /// # Errors
    /// As [`Profiler::new`].
    pub fn begin(&mut self, name: &str) -> Result<()> {
        self.open = None;
        let reading = self.take()?;
        // the peaks of the phase start at its own level
        let (allocated_peak, reserved_peak) = (reading.allocated, reading.reserved);
        let start =
            Reading { allocated_peak, reserved_peak, categories_at_peak: reading.categories.clone(), ..reading };
        self.open = Some((name.to_owned(), start));
        Ok(())
    }

    /// Ends the phase (`"kind": "phase"`) and checks for a leak against earlier phases of the same name. `None` if no
    /// phase is open.
    ///
    /// # Errors
    /// As [`Profiler::baseline`].
    pub fn end(&mut self) -> Result<Option<(Phase, Option<Leak>)>> {
        if self.open.is_none() {
            return Ok(None);
        }
        let now = self.take()?;
        let Some((name, most)) = self.open.take() else { return Ok(None) };
        let phase = Phase {
            name,
            step: self.step,
            allocated_peak: most.allocated_peak,
            categories: most.categories_at_peak,
            allocated: now.allocated,
            categories_after: now.categories,
            reserved: now.reserved,
            reserved_peak: most.reserved_peak,
            system: now.system,
        };
        self.write(&json!({ "kind": "phase" }), &phase)?;
        let leak = self.watch.observe(&phase.name, phase.allocated, &phase.categories_after);
        if let Some(leak) = &leak {
            self.write(&json!({ "kind": "leak", "step": self.step }), leak)?;
        }
        Ok(Some((phase, leak)))
    }

    /// Writes a phase that ran before the profiler started, from the ledger's overall peak (CPU only).
    ///
    /// # Errors
    /// As [`Profiler::baseline`].
    pub fn before(&mut self, name: &str) -> Result<()> {
        let (usage, window) = (ledger::usage(), ledger::window());
        let now = self.take()?;
        if matches!(self.device, Device::Cuda(_)) {
            return Ok(());
        }
        let phase = Phase {
            name: name.to_owned(),
            step: self.step,
            allocated_peak: usage.allocated_peak,
            categories: usage.categories.iter().map(|category| (category.name, category.at_peak)).collect(),
            allocated: now.allocated,
            categories_after: now.categories,
            reserved: now.reserved,
            reserved_peak: window.reserved_peak,
            system: now.system,
        };
        self.write(&json!({ "kind": "phase" }), &phase)
    }

    /// Writes the memory of each component (`"kind": "components"`).
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn components(&mut self, components: &[ComponentUse]) -> Result<()> {
        let value = json!({ "kind": "components", "step": self.step, "components": components });
        self.lines.as_mut().map_or(Ok(()), |lines| lines.write(&value))
    }

    /// Reads the peaks since the last call and resets them.
    fn take(&mut self) -> Result<Reading> {
        let reading = memory::read(self.device)?;
        memory::begin_window(self.device)?;
        if let Some((_, most)) = &mut self.open {
            if reading.allocated_peak > most.allocated_peak {
                most.allocated_peak = reading.allocated_peak;
                most.categories_at_peak.clone_from(&reading.categories_at_peak);
            }
            most.reserved_peak = most.reserved_peak.max(reading.reserved_peak);
        }
        self.last.clone_from(&reading);
        Ok(reading)
    }

    /// Writes one line: the fields of `head`, then those of `body`.
    fn write(&mut self, head: &Value, body: &impl serde::Serialize) -> Result<()> {
        self.lines.as_mut().map_or(Ok(()), |lines| lines.write_both(head, body))
    }
}

fn delta(now: Bytes, before: Bytes) -> i64 {
    i64::try_from(i128::from(now.0) - i128::from(before.0)).unwrap_or(i64::MAX)
}

#[cfg(test)]
#[path = "profile_tests.rs"]
mod tests;
