//! The plan of a job: three columns of memory for every phase (tensors, allocator, device), time, and a verdict.

use super::cards::{self, Budget};
use super::device_terms::{Facts, Term, device_terms};
use super::host;
use super::rehearse::{Buffers, Job, Rehearsed};
use super::replay::{self, PhaseMemory};
use super::time::{self, PhaseTime};
use crate::tensor::meta::{self, Target};
use crate::trainer::graph::MOST_RECORDINGS;
use crate::units::Bytes;

/// What a job will run on.
#[derive(Debug, Clone, PartialEq)]
pub enum Machine {
    /// A CUDA card, with what other processes hold on it.
    Cuda(Budget, Facts),
    /// The CPU of this host.
    Cpu(host::Host),
}

/// What a device offers to a job.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Offer {
    /// Name of the device or its size.
    pub device: String,
    /// Bytes.
    pub bytes: Bytes,
    /// How that was found.
    pub note: String,
}

/// Memory of one phase.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PhasePlan {
    /// Tensors and allocator.
    #[serde(flatten)]
    pub memory: PhaseMemory,
    /// What the driver (on the CPU: the system, as resident memory) shows for the process.
    pub device_peak: Bytes,
}

/// The plan of a job.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Plan {
    /// What is planned.
    pub job: Job,
    /// Phases in order of time.
    pub phases: Vec<PhasePlan>,
    /// Highest of all phases.
    pub allocated_peak: Bytes,
    /// Highest of all phases.
    pub reserved_peak: Bytes,
    /// Highest of all phases.
    pub device_peak: Bytes,
    /// The phase with the highest device peak.
    pub peak_phase: &'static str,
    /// What lives at the peak by module.
    pub scopes: Vec<(String, Bytes)>,
    /// What a process costs besides its tensors.
    pub terms: Vec<Term>,
    /// What the device offers.
    pub budget: Offer,
    /// Whether the device peak is within the budget.
    pub fits: bool,
    /// One optimizer step (one validation batch, one prediction); none on the CPU.
    pub time: Option<PhaseTime>,
    /// Floating-point operations of that; 0 when they were not counted.
    pub flops: f64,
    /// What recorded steps need, where it is left open whether they are (`train.graph=auto`).
    pub recorded: Option<Recorded>,
}

/// A plan's numbers with recorded steps.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Recorded {
    /// Highest of all phases, the pool of recordings included.
    pub device_peak: Bytes,
    /// Whether that is within the budget; without it nothing is recorded.
    pub fits: bool,
    /// Predicted seconds of an optimizer step.
    pub seconds: Option<f64>,
}

impl Plan {
    /// The plan of a rehearsed job on `machine`.
    pub fn of(rehearsed: &Rehearsed, machine: &Machine) -> Self {
        let Rehearsed { job, trace, .. } = rehearsed;
        let inputs = rehearsed.steps.recorded_inputs;
        let terms = match machine {
            Machine::Cuda(budget, facts) => {
                let pool = |recorded| replay::graph_pool(trace).0 + further_inputs(recorded);
                device_terms(budget, &Facts { graph_pool: inputs.map_or(0, pool), ..*facts })
            }
            Machine::Cpu(_) => Vec::new(),
        };
        let device = match machine {
            Machine::Cuda(..) => replay::Device::Cuda(&terms),
            Machine::Cpu(_) => replay::Device::Cpu,
        };
        let memory = replay::phases(trace, device);
        let terms = match machine {
            Machine::Cuda(..) => terms,
            Machine::Cpu(host) => {
                let recordings = inputs.map_or(0, further_inputs);
                host.terms(&Buffers { recordings, ..rehearsed.buffers })
            }
        };
        let outside: u64 = terms.iter().filter(|term| !term.reserved).map(|term| term.bytes).sum();
        let phases: Vec<PhasePlan> = memory
            .into_iter()
            .map(|memory| PhasePlan { device_peak: Bytes(memory.reserved_peak.0 + outside), memory })
            .collect();
        let highest = phases.iter().max_by_key(|phase| (phase.device_peak, phase.memory.allocated_peak));
        let (peak_phase, peak_event) = highest.map_or(("", 0), |phase| (phase.memory.name, phase.memory.peak_event));
        let most = |of: fn(&PhasePlan) -> Bytes| phases.iter().map(of).max().unwrap_or_default();
        let device_peak = most(|phase| phase.device_peak);
        let budget = machine.offer();
        Self {
            job: *job,
            allocated_peak: most(|phase| phase.memory.allocated_peak),
            reserved_peak: most(|phase| phase.memory.reserved_peak),
            device_peak,
            peak_phase,
            scopes: replay::scopes_at(trace, peak_event, 2),
            fits: device_peak <= budget.bytes,
            recorded: None,
            budget,
            time: machine.time(*job, rehearsed),
            flops: time::flops(&rehearsed.trace, phase_of(*job), rehearsed.repeats()),
            terms,
            phases,
        }
    }

    /// The same, which may turn out as `recorded`: the plan of the same steps with recordings.
    #[must_use]
    pub fn or(self, recorded: &Self) -> Self {
        let (device_peak, seconds) = (recorded.device_peak, recorded.time.map(|time| time.seconds));
        Self { recorded: Some(Recorded { device_peak, fits: recorded.fits, seconds }), ..self }
    }

    /// Whether steps may be recorded where that is left open.
    pub fn has_room_for_graphs(&self) -> bool {
        self.recorded.is_none_or(|recorded| recorded.fits)
    }

    /// The table for people.
    pub fn table(&self) -> String {
        let mut rows = vec![["phase", "allocated", "reserved", "device"].map(str::to_owned)];
        for phase in &self.phases {
            let numbers = [phase.memory.allocated_peak, phase.memory.reserved_peak, phase.device_peak];
            let [a, r, d] = numbers.map(|bytes| bytes.to_string());
            rows.push([phase.memory.name.to_owned(), a, r, d]);
        }
        let mut lines = vec![columns(&rows)];
        let peak = self.phases.iter().find(|phase| phase.memory.name == self.peak_phase);
        if let Some(peak) = peak {
            let mut categories: Vec<_> = peak.memory.categories.iter().filter(|(_, bytes)| bytes.0 > 0).collect();
            categories.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
            let parts = categories.iter().map(|(name, bytes)| format!("{name} {bytes}"));
            lines.push(format!("peak in `{}`: {}", self.peak_phase, joined(parts)));
        }
        let scopes = self.scopes.iter().take(6).map(|(name, bytes)| format!("{name} {bytes}"));
        lines.push(format!("by module: {}", joined(scopes)));
        let terms = self.terms.iter().filter(|term| term.bytes > 0);
        lines.push(format!("besides tensors: {}", joined(terms.map(|t| format!("{} {}", t.name, Bytes(t.bytes))))));
        if let Some(time) = self.time {
            let bound = if time.host_bound { ", held back by the host" } else { "" };
            let what = match self.job {
                Job::Train | Job::Step => "an optimizer step",
                Job::Eval => "a validation batch",
                Job::Predict => "a prediction",
                Job::Augment => "denoising a batch",
            };
            let (seconds, tera) = (time::text(time.seconds), time.flops / 1e12);
            lines.push(format!("{what}: {seconds} predicted, {tera:.1} TFLOP{bound}"));
        }
        if let Some(Recorded { device_peak, fits, seconds }) = self.recorded {
            let then = if fits { "tried in the first steps" } else { "not tried: it does not fit" };
            let time =
                seconds.map_or_else(String::new, |seconds| format!(", {} a step predicted", time::text(seconds)));
            lines.push(format!("recorded steps (train.graph=auto): {device_peak}{time}; {then}"));
        }
        lines.push(self.verdict());
        lines.join("\n")
    }

    /// Whether it fits, in one sentence.
    pub fn verdict(&self) -> String {
        let Offer { device, bytes, note } = &self.budget;
        if self.fits {
            let left = Bytes(bytes.0 - self.device_peak.0);
            format!("fits {device}: {} of {bytes}, {left} left ({note})", self.device_peak)
        } else {
            let over = Bytes(self.device_peak.0 - bytes.0);
            format!("does not fit {device}: {} of {bytes}, {over} too much ({note})", self.device_peak)
        }
    }
}

impl Machine {
    /// The machine that `text` names: a card or a size as [`cards::find`] takes them, `cpu` for this host, `cpu:24gb` for
    /// one with that much memory.
    ///
    /// # Errors
    /// As [`cards::find`].
    pub fn named(text: &str) -> Result<Self, cards::NotFound> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu(host::Host::detect())),
            Some(("cpu", size)) => Ok(Self::Cpu(host::Host::of_size(Bytes(cards::find(size)?.marketing_bytes)))),
            _ => Ok(Self::Cuda(cards::find(text)?, Facts::default())),
        }
    }

    /// Whose operators a plan for it imitates.
    pub fn target(&self) -> Target {
        match self {
            Self::Cuda(..) => Target::Cuda,
            Self::Cpu(_) => Target::Cpu,
        }
    }

    /// Whether its products know bf16.
    pub fn has_bf16(&self) -> bool {
        match self {
            Self::Cuda(budget, _) => budget.rates.bf16,
            Self::Cpu(_) => true,
        }
    }

    /// From now on this thread's plans for CUDA choose kernels as this card does.
    pub fn stand_for(&self) {
        /// Multiprocessors of an A100; the table of cards has no column for them.
        const MULTIPROCESSORS: i32 = 108;
        if let Self::Cuda(Budget { capability: (major, minor), .. }, _) = self {
            let number = i32::try_from(10 * major + minor).unwrap_or(i32::MAX);
            meta::set_card(number, MULTIPROCESSORS);
        }
    }

    /// What it offers.
    pub fn offer(&self) -> Offer {
        match self {
            Self::Cuda(budget, _) => {
                let device = budget.card.map_or_else(
                    || format!("{} GB", budget.marketing_bytes.div_ceil(cards::GIB)),
                    |card| card.name.clone(),
                );
                Offer { device, bytes: Bytes(budget.total_bytes), note: budget.note.clone() }
            }
            Self::Cpu(host) => Offer { device: "the CPU".into(), bytes: host.available, note: host.note.clone() },
        }
    }

    fn time(&self, job: Job, rehearsed: &Rehearsed) -> Option<PhaseTime> {
        let Self::Cuda(budget, _) = self else { return None };
        if rehearsed.trace.costs.is_empty() {
            return None;
        }
        let time = time::phase(&rehearsed.trace, phase_of(job), rehearsed.repeats(), &budget.rates)?;
        let steps = rehearsed.steps;
        let time = time.bringing(steps.over_the_bus);
        Some(if steps.recorded_inputs.is_some() { time.recorded() } else { time })
    }
}

/// Bytes of the fixed inputs of recordings: a rehearsal makes one, and a run at most [`MOST_RECORDINGS`].
fn further_inputs(recorded: Bytes) -> u64 {
    (MOST_RECORDINGS as u64 - 1) * recorded.0
}

/// The phase whose time counts.
fn phase_of(job: Job) -> &'static str {
    match job {
        Job::Train | Job::Step => "step",
        Job::Eval => "evaluate",
        Job::Predict => "predict",
        Job::Augment => "denoise",
    }
}

fn joined(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(", ")
}

/// Rows as columns, the first one to the left and the others to the right.
fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let line = |row: &[String; N]| {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(i, (cell, width))| if i == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") })
            .collect();
        cells.join("  ") + "\n"
    };
    rows.iter().map(line).collect()
}
