//! The plan of a job: memory of each phase (tensors, allocator, device), predicted time, and whether it fits the
//! device.

use super::communication::Link;
use super::device_terms::Term;
use super::dry_run::{Buffers, DryRun, Job};
use super::machine::{Machine, Offer, further_inputs};
use super::time::{self, PhaseTime};
use crate::metrics::text_table::columns;
use crate::replay::{self, PhaseMemory};
use crate::tensor::module_path::{self, ModuleId};
use crate::tensor::trace::Trace;
use crate::units::Bytes;
use std::collections::HashMap;

/// Memory of one phase.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PhasePlan {
    /// Memory of tensors and allocator.
    #[serde(flatten)]
    pub memory: PhaseMemory,
    /// Memory of the process as the driver shows it; on the CPU, resident memory.
    pub device_peak: Bytes,
}

/// The plan of a job.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Plan {
    /// The planned job.
    pub job: Job,
    /// Phases in order of time.
    pub phases: Vec<PhasePlan>,
    /// Highest `allocated_peak` of all phases.
    pub allocated_peak: Bytes,
    /// Highest `reserved_peak` of all phases.
    pub reserved_peak: Bytes,
    /// Highest `device_peak` of all phases.
    pub device_peak: Bytes,
    /// The phase with the highest device peak.
    pub peak_phase: &'static str,
    /// Live bytes at the peak by module.
    pub scopes: Vec<(String, Bytes)>,
    /// Memory of the process in addition to tensors.
    pub terms: Vec<Term>,
    /// Memory that the device offers.
    pub budget: Offer,
    /// Whether the device peak is within the budget.
    pub fits: bool,
    /// Time of one optimizer step (one validation batch, one prediction); `None` if the rates of the device are not
    /// known.
    pub time: Option<PhaseTime>,
    /// Connection with the other GPUs of its machine.
    #[serde(skip)]
    pub link: Option<Link>,
    /// The time by which settings are compared: `time`, or that of typical GPUs of the same size.
    #[serde(skip)]
    pub compared_time: Option<PhaseTime>,
    /// Floating-point operations in that time; 0 if they were not counted.
    pub flops: f64,
    /// Pinned host memory of frozen weights (`model.stream_layers`).
    pub host_weights: Bytes,
    /// Host memory of optimizer state and of fp32 weights (`train.offload_optimizer`, `train.offload_weights`).
    pub host_state: Bytes,
    /// The plan with CUDA graphs, if the run decides about them in its first steps (`train.graph=auto`).
    pub with_graphs: Option<GraphPlan>,
}

/// Memory and time with CUDA graphs.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct GraphPlan {
    /// Highest `device_peak` of all phases, including the memory pool of the graphs.
    pub device_peak: Bytes,
    /// Whether that is within the budget. If not, the run stays eager.
    pub fits: bool,
    /// Predicted seconds of an optimizer step.
    pub seconds: Option<f64>,
    /// The same, of typical GPUs if the rates of the device are not known.
    #[serde(skip)]
    pub compared_seconds: Option<f64>,
}

/// Why a plan for a GPU has no time.
pub const NO_RATES: &str =
    "no published rates of this GPU: times are not predicted; `prsmed calibrate` on it measures them";

impl Plan {
    /// The plan of a job on `machine`, from its dry run.
    pub fn of(dry_run: &DryRun, machine: &Machine) -> Self {
        let DryRun { job, trace, .. } = dry_run;
        let inputs = dry_run.steps.captured_inputs;
        let terms = machine.device_terms(dry_run);
        let reserved: Vec<u64> = terms.iter().filter(|term| term.reserved).map(|term| term.bytes).collect();
        let device = match machine {
            Machine::Cuda(..) => replay::ReplayTarget::Cuda(&reserved),
            Machine::Cpu(_) => replay::ReplayTarget::Cpu,
        };
        let memory = replay::phases(trace, device);
        let terms = match machine {
            Machine::Cuda(..) => terms,
            Machine::Cpu(host) => {
                host.terms(&Buffers { graph_inputs: inputs.map_or(0, further_inputs), ..dry_run.buffers })
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
        let compared_time = machine.time(*job, dry_run);
        let (host_weights, host_state) = match machine {
            Machine::Cuda(..) => (dry_run.steps.host_weights.bytes, dry_run.steps.host_state),
            // part of the planned memory
            Machine::Cpu(_) => (Bytes(0), Bytes(0)),
        };
        Self {
            job: *job,
            allocated_peak: most(|phase| phase.memory.allocated_peak),
            reserved_peak: most(|phase| phase.memory.reserved_peak),
            device_peak,
            peak_phase,
            scopes: scopes_at(trace, peak_event, 2),
            fits: device_peak <= budget.bytes && machine.has_host_memory(Bytes(host_weights.0 + host_state.0)),
            host_weights,
            host_state,
            with_graphs: None,
            budget,
            time: compared_time.filter(|_| machine.knows_rates()),
            link: machine.link(),
            compared_time,
            flops: time::flops(&dry_run.trace, job.timed_phase(), dry_run.repeats()),
            terms,
            phases,
        }
    }

    /// This plan with the numbers of `graphs`, the plan of the same job with CUDA graphs.
    #[must_use]
    pub fn with_graph_plan(self, graphs: &Self) -> Self {
        let [seconds, compared_seconds] = [graphs.time, graphs.compared_time].map(|time| time.map(|time| time.seconds));
        let graphs = GraphPlan { device_peak: graphs.device_peak, fits: graphs.fits, seconds, compared_seconds };
        Self { with_graphs: Some(graphs), ..self }
    }

    /// Whether CUDA graphs fit, if the run decides about them.
    pub fn has_room_for_graphs(&self) -> bool {
        self.host_weights == Bytes(0) && self.with_graphs.is_none_or(|graphs| graphs.fits)
    }

    /// The plan as text.
    pub fn table(&self) -> String {
        let mut rows = vec![["phase", "allocated", "reserved", "device"].map(str::to_owned).to_vec()];
        for phase in &self.phases {
            let numbers = [phase.memory.allocated_peak, phase.memory.reserved_peak, phase.device_peak];
            let [a, r, d] = numbers.map(|bytes| bytes.to_string());
            rows.push(vec![phase.memory.name.to_owned(), a, r, d]);
        }
        let mut lines = vec![columns(&rows)];
        let peak = self.phases.iter().find(|phase| phase.memory.name == self.peak_phase);
        if let Some(peak) = peak {
            let mut categories: Vec<_> = peak.memory.categories.iter().filter(|(_, bytes)| bytes.0 > 0).collect();
            categories.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
            let parts = categories.iter().map(|(name, bytes)| format!("{name} {bytes}"));
            lines.push(wrapped(&format!("peak in `{}`:", self.peak_phase), parts));
        }
        let scopes = self.scopes.iter().take(6).map(|(name, bytes)| format!("{name} {bytes}"));
        lines.push(wrapped("by module:", scopes));
        let terms = self.terms.iter().filter(|term| term.bytes > 0);
        lines.push(wrapped("in addition to tensors:", terms.map(|t| format!("{} {}", t.name, Bytes(t.bytes)))));
        if self.host_weights > Bytes(0) {
            lines.push(format!("in pinned host memory: {} of frozen layers", self.host_weights));
        }
        if self.host_state > Bytes(0) {
            lines.push(format!("in host memory: {} of optimizer state and weights in fp32", self.host_state));
        }
        if let Some(time) = self.time {
            let bound = if time.host_bound { ", limited by the CPU" } else { "" };
            let exchange = self.exchange(&time).unwrap_or_default();
            let tera = time.flops / 1e12;
            lines.push(format!("{} predicted{exchange}, {tera:.1} TFLOP{bound}", self.timed(&time)));
        }
        if self.time.is_none() && self.compared_time.is_some() {
            lines.push(NO_RATES.to_owned());
        }
        if let Some(GraphPlan { device_peak, fits, seconds, .. }) = self.with_graphs {
            let then = if fits { "tried in the first steps" } else { "not used: does not fit" };
            let time = seconds.map(|seconds| format!(", {} per step predicted", time::text(seconds)));
            let time = time.unwrap_or_default();
            lines.push(format!("with CUDA graphs (train.graph=auto): {device_peak}{time}; {then}"));
        }
        lines.push(self.summary());
        lines.join("\n")
    }

    /// Time in which it exchanges data with other GPUs, for the user; `None` for a single GPU.
    fn exchange(&self, time: &PhaseTime) -> Option<String> {
        let link = self.link.filter(|_| time.communication_seconds > 0.0)?;
        let (seconds, rate) = (time::text(time.communication_seconds), link.bytes_per_s / 1e9);
        Some(format!(" ({seconds} of it exchanges data with other GPUs over {}, {rate:.0} GB/s)", link.name))
    }

    /// For the start of a job: one line if it fits, else the table.
    pub fn brief(&self) -> String {
        if !self.fits {
            return format!("\n{}", self.table());
        }
        let time = self.time.map_or_else(String::new, |time| format!("; {} predicted", self.timed(&time)));
        format!(" {}{time} (`prsmed plan` shows it by phase)", self.summary())
    }

    /// The time of its work in words.
    fn timed(&self, time: &PhaseTime) -> String {
        format!("{}: {}", self.job.timed().1, time::text(time.seconds))
    }

    /// Whether it fits, in one sentence.
    pub fn summary(&self) -> String {
        let Offer { device, bytes, note } = &self.budget;
        if self.fits {
            let left = Bytes(bytes.0 - self.device_peak.0);
            format!("fits {device}: {} of {bytes}, {left} free ({note})", self.device_peak)
        } else if self.device_peak <= *bytes {
            let needed = Bytes(self.host_weights.0 + self.host_state.0);
            format!("does not fit this machine: {needed} of host memory are more than three quarters of what is free")
        } else {
            let over = Bytes(self.device_peak.0 - bytes.0);
            format!("does not fit {device}: {} of {bytes}, {over} too much ({note})", self.device_peak)
        }
    }
}

/// A label and its parts, with commas, broken into indented lines of at most 112 characters.
fn wrapped(label: &str, parts: impl Iterator<Item = String>) -> String {
    const WIDTH: usize = 112;
    let mut text = label.to_owned();
    let mut column = text.len();
    for (index, part) in parts.enumerate() {
        if index > 0 {
            text.push(',');
        }
        let (gap, start) = if column + part.len() + 2 > WIDTH { ("\n  ", 2) } else { (" ", column + 2) };
        text += gap;
        text += &part;
        column = start + part.len();
    }
    text
}

/// Bytes live after event `at` by module path, shortened to `depth` names (`llm.layers` for 2), largest first.
fn scopes_at(trace: &Trace, at: usize, depth: usize) -> Vec<(String, Bytes)> {
    let mut names: HashMap<ModuleId, String> = HashMap::new();
    let mut sums: HashMap<String, u64> = HashMap::new();
    for (module, bytes) in replay::alive_by_module(trace, at) {
        let name = names.entry(module).or_insert_with(|| {
            let path = module_path::path(module);
            let parts: Vec<&str> = path.split('.').take(depth).collect();
            if path.is_empty() { "(no module)".into() } else { parts.join(".") }
        });
        *sums.entry(name.clone()).or_default() += bytes;
    }
    let mut sums: Vec<(String, Bytes)> = sums.into_iter().map(|(name, bytes)| (name, Bytes(bytes))).collect();
    sums.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Sources;

    /// The plan of the tiny model with frozen layers on `gpus` such GPUs.
    fn plan_on(gpu: &str, gpus: usize, divides: bool) -> Plan {
        let _lock = crate::tensor::rng::TEST_LOCK.lock();
        let divides = format!("model.divide_layers={divides}");
        let sets = ["model.train_base=false", &divides, "train.micro_batch=1", "train.accumulation=2"];
        let sets = sets.iter().map(|set| ((*set).to_owned(), "--set".to_owned())).collect();
        let sources = Sources { preset: Some("tiny".to_owned()), sets, ..Sources::default() };
        let config = sources.resolve().unwrap().config;
        let machine = Machine::named(gpu).unwrap().with_ranks(0, gpus);
        Plan::of(&config.dry_run(Job::Step, config.longest_example(), &machine, true).unwrap(), &machine)
    }

    fn plan(gpus: usize, divides: bool) -> Plan {
        plan_on("24gb", gpus, divides)
    }

    #[test]
    fn several_gpus_take_time_to_exchange_data() {
        let seconds = |plan: &Plan| plan.time.unwrap().communication_seconds;
        assert_eq!(seconds(&plan(1, true)), 0.0);
        let (whole, divided) = (plan(2, false), plan(2, true));
        // two GPUs send their gradients once over PCI Express; divided layers come in addition
        let gradients: f64 = 12e9 * seconds(&whole);
        assert!(gradients.fract().min(1.0 - gradients.fract()) < 1e-3 && gradients > 1e5, "{gradients} bytes");
        assert!(seconds(&divided) > seconds(&whole), "{divided:?}");
        assert!(divided.table().contains("exchanges data with other GPUs over PCI Express, 12 GB/s"));
        let nvlink = plan_on("NVIDIA A100-SXM4-80GB", 2, false);
        assert!((235e9 * seconds(&nvlink) - gradients).abs() < 1.0, "the same bytes over NVLink");
        assert!(plan_on("A100 80GB PCIe", 2, false).table().contains("PCI Express"));
    }

    #[test]
    fn divided_layers_take_a_second_communicator() {
        let nccl = |plan: &Plan| {
            let terms = plan.terms.iter().filter(|term| term.name.starts_with("NCCL") && term.bytes > 0);
            terms.map(|term| (term.name, Bytes(term.bytes).to_string(), term.reserved)).collect::<Vec<_>>()
        };
        let divided = plan(2, true);
        let [first, second] = ["NCCL", "NCCL for divided layers"].map(|name| (name, "544.00 MiB".to_owned(), false));
        assert_eq!(nccl(&divided), [first.clone(), second]);
        let table = divided.table();
        assert!(table.contains("NCCL 544.00 MiB") && table.contains("NCCL for divided layers 544.00 MiB"), "{table}");
        assert_eq!(nccl(&plan(2, false)), [first]);
        assert_eq!(nccl(&plan(1, true)), []);
    }
}
