//! Progress events: jobs send [`Event`]s to an [`Observer`]. Only `cli` prints.

use std::time::Duration;

/// A progress event of a job.
#[derive(Debug, Clone)]
pub enum Event {
    /// A phase with a known amount of work begins (`download`, `load weights`, `train`, `evaluate`, ...).
    Started {
        /// Name of the phase, for the progress bar.
        phase: String,
        /// Amount of work in `unit`s; 0 if not known.
        total: u64,
        /// `bytes`, `steps`, `images`, `files`, `tokens`.
        unit: &'static str,
    },
    /// Progress of the current phase.
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
    /// A validation pass ended.
    Validated {
        /// Optimizer steps done so far.
        step: u64,
        /// Averaged values with names, for example `dice`, `iou`, `loss`.
        values: Vec<(String, f64)>,
    },
    /// A checkpoint is complete on disk.
    Saved {
        /// Checkpoint folder.
        path: std::path::PathBuf,
        /// True if it is the best so far.
        best: bool,
    },
    /// A part of a generated answer.
    Token(String),
    /// A result for programs that read one JSON object a line.
    Record(serde_json::Value),
    /// Information for the user.
    Note(String),
    /// A problem that the user should know about. The job continues.
    Warning(String),
}

/// Results and times of one optimizer step.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct StepReport {
    /// Number of optimizer steps done, including this one.
    pub step: u64,
    /// Number of steps of the whole run.
    pub total_steps: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Losses with names, and `total`.
    pub losses: Vec<(String, f64)>,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Number of samples in this step (micro-batch x accumulation).
    pub samples: u64,
    /// Wall time of the step, including `data_wait`.
    pub elapsed: Duration,
    /// Time in which the step waited for its data.
    pub data_wait: Duration,
    /// Peak bytes of tensors since the start of the run.
    pub allocated_peak: u64,
}

impl StepReport {
    /// Fraction of the step's time spent waiting for data, 0..=1.
    pub fn data_wait_share(&self) -> f64 {
        let elapsed = self.elapsed.as_secs_f64();
        if elapsed > 0.0 { self.data_wait.as_secs_f64() / elapsed } else { 0.0 }
    }
}

/// Memory of one profiled phase, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemoryReport {
    /// `first step`, which allocates the optimizer state, or `step`.
    pub phase: String,
    /// Number of optimizer steps done.
    pub step: u64,
    /// Bytes of live tensors at its end.
    pub allocated: u64,
    /// Peak of `allocated` in the phase.
    pub allocated_peak: u64,
    /// Bytes that the device's allocator had reserved at its end.
    pub reserved: u64,
    /// Peak of `reserved` in the phase.
    pub reserved_peak: u64,
    /// Resident CPU memory of the process at its end.
    pub resident: u64,
    /// Used bytes of the GPU by all processes; `None` on the CPU, or if the driver does not report it.
    pub device_used: Option<u64>,
    /// `allocated_peak` by category; empty if categories are not known.
    pub categories_at_peak: Vec<(&'static str, u64)>,
}

/// Receives the events of a job, possibly from several threads.
pub trait Observer: Send + Sync {
    /// Handles one event. Must not block for long.
    fn on(&self, event: &Event);
}

/// An observer that ignores all events.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {
    fn on(&self, _event: &Event) {}
}
