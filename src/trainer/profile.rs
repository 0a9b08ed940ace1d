//! The memory of a real run: levels at marked moments, peaks of phases, components of the model, and a watch for leaks.
//!
//! Peaks are by the categories of the planner's phases, so that plan and profile subtract. Numbers are those of
//! [`crate::tensor::memory`]; a profiler changes neither what is computed nor the overall peak of the ledger.

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

/// How a run is profiled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Profile the first step of a session and every so many optimizer steps, 1 or more. Evaluations and saves always are.
    pub every_steps: u64,
    /// JSON lines file. A resumed run appends to it, another replaces it.
    pub out: PathBuf,
}

impl Settings {
    /// Tries the file, before expensive work; what is in it stays.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn check(&self) -> Result<()> {
        let mut options = std::fs::File::options();
        options.create(true).append(true).open(&self.out).map(drop).map_err(crate::Error::io(&self.out, "write"))
    }
}

/// A labelled moment, compared with the mark before.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Mark {
    /// What had just ended: `forward`, `backward`, `optimizer`, ...
    pub label: String,
    /// Optimizer steps done before.
    pub step: u64,
    /// Bytes of live tensors.
    pub allocated: Bytes,
    /// Bytes more than at the mark before.
    pub allocated_delta: i64,
    /// The most that lived since the mark before.
    pub allocated_peak: Bytes,
    /// Bytes that the allocator holds.
    pub reserved: Bytes,
    /// Bytes more than at the mark before.
    pub reserved_delta: i64,
    /// The most that it held since the mark before.
    pub reserved_peak: Bytes,
}

/// The memory of a phase, as the planner has it, with what else a real device says.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Phase {
    /// The planner's names: `load`, `first step`, `step`, `evaluate`, `save`, `resume`.
    pub name: String,
    /// Optimizer steps done when it ended.
    pub step: u64,
    /// The most bytes of tensors that lived at once.
    pub allocated_peak: Bytes,
    /// That peak by category.
    pub categories: Shares,
    /// Bytes of live tensors when it ended.
    pub allocated: Bytes,
    /// Those by category.
    pub categories_after: Shares,
    /// Bytes that the allocator held when it ended.
    pub reserved: Bytes,
    /// The most that it held.
    pub reserved_peak: Bytes,
    /// What kernel and driver said when it ended.
    pub system: System,
}

/// Measures a device's memory between marks. One at a time: its window is the process's.
#[derive(Debug)]
pub struct Profiler {
    device: Device,
    last: Reading,
    /// The phase since it began: its name and its highest peaks.
    open: Option<(String, Reading)>,
    step: u64,
    allocated_peak: Bytes,
    reserved_peak: Bytes,
    watch: LeakWatch,
    lines: Option<Lines>,
}

impl Profiler {
    /// Starts from what lives now on `device`; for the CPU the ledger must be installed.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] for a card that is not in use.
    pub fn new(device: Device) -> Result<Self> {
        memory::begin_window(device)?;
        let last = memory::read(device)?;
        let (allocated_peak, reserved_peak) = (last.allocated_peak, last.reserved_peak);
        let watch = LeakWatch::default();
        Ok(Self { device, last, open: None, step: 0, allocated_peak, reserved_peak, watch, lines: None })
    }

    /// Writes everything to `path` too, one JSON object a line: after what is there with `append`, else anew.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn to_file(mut self, path: &Path, append: bool) -> Result<Self> {
        self.lines = Some(Lines::open(path, append)?);
        Ok(self)
    }

    /// Optimizer steps done, for the lines to come.
    pub fn at_step(&mut self, step: u64) {
        self.step = step;
    }

    /// Starts the deltas of the next mark from here, and says what lives (`"kind": "baseline"`).
    ///
    /// # Errors
    /// [`crate::Error::Io`]; as [`Profiler::new`].
    pub fn baseline(&mut self) -> Result<Reading> {
        let reading = self.take()?;
        self.write(&json!({ "kind": "baseline", "step": self.step }), &reading)?;
        Ok(reading)
    }

    /// Names this moment (`"kind": "mark"`).
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

    /// Begins a phase. One that did not end is dropped.
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

    /// Ends the phase (`"kind": "phase"`) and compares its level with those after the same phase before; `None` when
    /// none is open.
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

    /// The phase that led here, for what was measured before the profiler: the ledger's overall peak (CPU only).
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

    /// Writes what each component holds (`"kind": "components"`).
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn components(&mut self, components: &[ComponentUse]) -> Result<()> {
        let value = json!({ "kind": "components", "step": self.step, "components": components });
        self.lines.as_mut().map_or(Ok(()), |lines| lines.write(&value))
    }

    /// Gives memory that the allocator only keeps back to the system (`"kind": "released"`); returns how much.
    ///
    /// # Errors
    /// As [`Profiler::baseline`].
    pub fn release_cache(&mut self) -> Result<Bytes> {
        let released = memory::release_cache(self.device)?;
        let reading = self.take()?;
        self.write(&json!({ "kind": "released", "step": self.step, "released": released }), &reading)?;
        Ok(released)
    }

    /// The most bytes of tensors, and the most that the allocator held, since the profiler started.
    pub fn peaks(&self) -> (Bytes, Bytes) {
        (self.allocated_peak, self.reserved_peak)
    }

    /// Reads the window that ends here and begins the next.
    fn take(&mut self) -> Result<Reading> {
        let reading = memory::read(self.device)?;
        memory::begin_window(self.device)?;
        self.allocated_peak = self.allocated_peak.max(reading.allocated_peak);
        self.reserved_peak = self.reserved_peak.max(reading.reserved_peak);
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

    /// One line: the fields of `head`, then those of `body`.
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
