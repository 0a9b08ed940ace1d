//! How long work reports: jobs emit [`Event`]s to an [`Observer`]; nothing below `cli` prints.

use std::time::Duration;

/// Something a job wants its user to know.
#[derive(Debug, Clone)]
pub enum Event {
    /// A phase with a known amount of work begins (`download`, `load weights`, `train`, `evaluate`, ...).
    Started {
        /// What is being done, for the left of the bar.
        phase: String,
        /// Amount of work in `unit`s; 0 when not known.
        total: u64,
        /// `bytes`, `steps`, `images`, `files`, `tokens`.
        unit: &'static str,
    },
    /// The current phase has done `done` units in all.
    Advanced {
        /// Units done since the phase started.
        done: u64,
    },
    /// The current phase ended.
    Finished,
    /// One optimizer step ended.
    Step(StepReport),
    /// The memory of a profiled step.
    Memory(MemoryReport),
    /// A validation pass ended: named values, already averaged.
    Validated {
        /// Optimizer steps done so far.
        step: u64,
        /// For example `dice`, `iou`, `loss`.
        values: Vec<(String, f64)>,
    },
    /// A checkpoint is complete on disk.
    Saved {
        /// The folder.
        path: std::path::PathBuf,
        /// Whether it is the best so far.
        best: bool,
    },
    /// A piece of generated answer, as it is produced.
    Token(String),
    /// Something worth a line, no trouble.
    Note(String),
    /// Something the user should look at; work goes on.
    Warning(String),
}

/// What one optimizer step cost and gave.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct StepReport {
    /// Optimizer steps done, this one included.
    pub step: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Named loss parts and `total`.
    pub losses: Vec<(String, f64)>,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Samples in this step (micro-batch x accumulation).
    pub samples: u64,
    /// Wall time of the step, `data_wait` included.
    pub elapsed: Duration,
    /// Of it, the time before the step in which its data was not there yet.
    pub data_wait: Duration,
    /// Peak of allocated tensor bytes since the start of the run.
    pub allocated_peak: u64,
}

impl StepReport {
    /// Part of the step's time that went into waiting for data, 0..=1.
    pub fn data_wait_share(&self) -> f64 {
        let elapsed = self.elapsed.as_secs_f64();
        if elapsed > 0.0 { self.data_wait.as_secs_f64() / elapsed } else { 0.0 }
    }
}

/// The memory of one profiled phase, bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemoryReport {
    /// `first step` (optimizer state appears) or `step`.
    pub phase: String,
    /// Optimizer steps done.
    pub step: u64,
    /// Bytes of live tensors when it ended.
    pub allocated: u64,
    /// The most that lived at once in it.
    pub allocated_peak: u64,
    /// Bytes that the device's allocator held when it ended.
    pub reserved: u64,
    /// The most that it held.
    pub reserved_peak: u64,
    /// Resident host memory of the process when it ended.
    pub resident: u64,
    /// Used bytes of the card by all processes, where it is one and the driver says.
    pub device_used: Option<u64>,
    /// `allocated_peak` by category; empty where they are not known.
    pub categories_at_peak: Vec<(&'static str, u64)>,
}

/// Receives the events of a job, possibly from several threads.
pub trait Observer: Send + Sync {
    /// Takes one event. Must not block for long.
    fn on(&self, event: &Event);
}

/// An observer that ignores everything.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {
    fn on(&self, _event: &Event) {}
}
