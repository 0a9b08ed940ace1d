//! Memory profile of a run: peaks of phases.
//!
//! Peaks have the phases and categories of the planner, so that they can be compared with a plan. Numbers are those of
//! [`prsmed_tensor::memory`]. A profiler affects neither results nor the overall peak of the ledger.

mod components;
mod hooks;

pub use components::ModelPart;

pub(super) use hooks::Hooks;

use super::records::log_file::LogFile;
use prsmed_base::units::Bytes;
use prsmed_base::{Error, Result, files};
use prsmed_tensor::ledger::CategoryBytes;
use prsmed_tensor::memory::{self, MemoryReading, System};
use prsmed_tensor::{Device, ledger};
use std::path::{Path, PathBuf};

/// Name of the profile in a run folder.
pub const PROFILE_FILE: &str = "memory.jsonl";

/// Settings of the memory profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfileSettings {
    /// Profile the first step of a session and every so many optimizer steps, 1 or more. Evaluations and saves are
    /// always profiled.
    pub every_steps: u64,
    /// JSON lines file. A resumed run appends to it; a new run replaces it.
    pub out: PathBuf,
}

impl ProfileSettings {
    /// Checks that the file can be written, before expensive work. Does not change its content, and follows no link.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn check(&self) -> Result<()> {
        files::open_to_change(&self.out).map(drop).map_err(Error::io(&self.out, "write"))
    }
}

/// Memory of a phase as the planner defines it, with measurements of the device.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ProfiledPhase {
    /// `phase`: the kind of its line.
    pub kind: &'static str,
    /// Name of the phase as in a plan: `load`, `first step`, `step`, `evaluate`, `save`, `resume`.
    pub name: String,
    /// Optimizer steps done when it ended.
    pub step: u64,
    /// Peak bytes of live tensors.
    pub allocated_peak: Bytes,
    /// The peak by category.
    pub categories: CategoryBytes,
    /// Bytes of live tensors when it ended.
    pub allocated: Bytes,
    /// The bytes when it ended, by category.
    pub categories_after: CategoryBytes,
    /// Bytes that the allocator had reserved when it ended.
    pub reserved: Bytes,
    /// Peak of the reserved bytes.
    pub reserved_peak: Bytes,
    /// Memory of the process and the GPU by operating system and driver, when it ended.
    pub system: System,
}

/// Measures a device's memory. A process can have one at a time.
#[derive(Debug)]
pub struct Profiler {
    device: Device,
    /// Open phase: its name and its highest peaks so far.
    open: Option<(String, MemoryReading)>,
    lines: LogFile,
}

impl Profiler {
    /// Starts a profile of `device`, which is written to `path`, one JSON object a line. With `append` an existing file is
    /// continued, else replaced. For the CPU, the ledger must be installed.
    ///
    /// # Errors
    /// [`Error::Torch`] for a GPU that is not in use; [`Error::Io`].
    pub fn new(device: Device, path: &Path, append: bool) -> Result<Self> {
        memory::begin_window(device)?;
        let file = files::open_to_change(path).map_err(Error::io(path, "write"))?;
        let before =
            if append { files::read(path, files::MAX_TABLE).map_err(Error::io(path, "read"))? } else { Vec::new() };
        // a crash may leave a partial line
        let keep = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at as u64 + 1);
        file.set_len(keep).map_err(Error::io(path, "write"))?;
        Ok(Self { device, open: None, lines: LogFile::new(file, path.to_owned())? })
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
            MemoryReading { allocated_peak, reserved_peak, categories_at_peak: reading.categories.clone(), ..reading };
        self.open = Some((name.to_owned(), start));
        Ok(())
    }

    /// Ends the phase (`"kind": "phase"`) after `step` optimizer steps. `None` if no phase is open.
    ///
    /// # Errors
    /// [`Error::Io`]; as [`Profiler::new`].
    pub fn end(&mut self, step: u64) -> Result<Option<ProfiledPhase>> {
        if self.open.is_none() {
            return Ok(None);
        }
        let now = self.take()?;
        let Some((name, most)) = self.open.take() else { return Ok(None) };
        self.write(name, step, most, now).map(Some)
    }

    /// Writes a phase that ran before the profiler started, from the ledger's overall peak (CPU only).
    ///
    /// # Errors
    /// [`Error::Io`]; as [`Profiler::new`].
    pub fn before(&mut self, name: &str, step: u64) -> Result<()> {
        let (usage, reserved_peak) = (ledger::usage(), ledger::window().reserved_peak);
        let now = self.take()?;
        if matches!(self.device, Device::Cuda(_)) {
            return Ok(());
        }
        let categories_at_peak = usage.categories.iter().map(|category| (category.name, category.at_peak)).collect();
        let most =
            MemoryReading { allocated_peak: usage.allocated_peak, categories_at_peak, reserved_peak, ..now.clone() };
        self.write(name.to_owned(), step, most, now).map(drop)
    }

    /// Reads the peaks since the last call and resets them.
    fn take(&mut self) -> Result<MemoryReading> {
        let reading = memory::read(self.device)?;
        memory::begin_window(self.device)?;
        if let Some((_, most)) = &mut self.open {
            if reading.allocated_peak > most.allocated_peak {
                most.allocated_peak = reading.allocated_peak;
                most.categories_at_peak.clone_from(&reading.categories_at_peak);
            }
            most.reserved_peak = most.reserved_peak.max(reading.reserved_peak);
        }
        Ok(reading)
    }

    /// Writes a phase with the peaks of `most` that ends `now`.
    fn write(&mut self, name: String, step: u64, most: MemoryReading, now: MemoryReading) -> Result<ProfiledPhase> {
        let phase = ProfiledPhase {
            kind: "phase",
            name,
            step,
            allocated_peak: most.allocated_peak,
            categories: most.categories_at_peak,
            allocated: now.allocated,
            categories_after: now.categories,
            reserved: now.reserved,
            reserved_peak: most.reserved_peak,
            system: now.system,
        };
        let line = serde_json::to_value(&phase).expect("plain values serialise");
        self.lines.append(format!("{line}\n").as_bytes())?;
        Ok(phase)
    }
}

#[cfg(test)]
#[path = "profile_tests.rs"]
mod tests;
