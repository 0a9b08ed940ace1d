//! The machine of a plan: a GPU or the CPU, the memory that it offers, and how fast it computes.

use super::communication::Link;
use super::detect;
use super::device_terms::{DeviceUsage, Term, device_terms};
use super::dry_run::{DryRun, DryRunPlace, Job};
use super::gpus::{self, GpuBudget};
use super::host::Host;
use super::reading::DeviceReading;
use super::speed::Speed;
use super::time::{self, PhaseTime};
use super::unsupported::refusal;
use crate::replay;
use crate::tensor::Device;
use crate::tensor::meta::{self, PlanTarget};
use crate::trainer::HostUse;
use crate::trainer::graph::MAX_GRAPHS;
use crate::trainer::precision::Precision;
use crate::units::Bytes;
use crate::{Error, Result};

/// The device that a job will run on.
#[derive(Debug, Clone, PartialEq)]
pub enum Machine {
    /// A CUDA GPU and how it is used.
    Cuda(GpuBudget, DeviceUsage),
    /// The CPU of this host.
    Cpu(Host),
}

/// Memory that a device offers to a job.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Offer {
    /// Name of the device or its size.
    pub device: String,
    /// Bytes.
    pub bytes: Bytes,
    /// Origin of that number.
    pub note: String,
}

impl Machine {
    /// The machine of a device of this process.
    pub fn of(device: Device) -> Self {
        match detect::detect(None).first() {
            Some(gpu) if device != Device::Cpu => {
                Self::Cuda(gpu.budget(), DeviceUsage { other_processes: gpu.in_use(), ..DeviceUsage::default() })
            }
            _ => Self::Cpu(Host::detect()),
        }
    }

    /// The machine named by `text`: a GPU or a size as in [`gpus::find`], `cpu` for this host, `cpu:24gb` for a host
    /// with that much memory.
    ///
    /// # Errors
    /// Those of [`gpus::find`].
    pub fn named(text: &str) -> Result<Self, gpus::NotFound> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu(Host::detect())),
            Some(("cpu", size)) => Ok(Self::Cpu(Host::of_size(Bytes(gpus::find(size)?.marketing_bytes)))),
            _ => Ok(Self::Cuda(gpus::find(text)?, DeviceUsage::default())),
        }
    }

    /// Whether this machine has room for `weights` bytes of pinned memory; true if the host is not known.
    pub(super) fn has_host_memory(&self, weights: Bytes) -> bool {
        let Self::Cuda(GpuBudget { host_free: Some(_), .. }, _) = self else { return true };
        self.host_limit().is_none_or(|limit| weights <= limit)
    }

    /// Memory of the host that frozen weights may take in a search: three quarters of what is free on this machine, and
    /// 5/4 of the GPU's memory where the host is not known. `None` for a CPU, where it would save nothing.
    pub fn host_limit(&self) -> Option<Bytes> {
        let Self::Cuda(budget, _) = self else { return None };
        Some(budget.host_free.map_or(Bytes(budget.marketing_bytes / 4 * 5), |free| Bytes(free.0 / 4 * 3)))
    }

    /// This machine, or one of several alike, for process `rank` of `ranks` that train together.
    #[must_use]
    pub fn with_ranks(mut self, rank: usize, ranks: usize) -> Self {
        match &mut self {
            Self::Cuda(_, usage) => (usage.rank, usage.num_ranks) = (rank, ranks),
            Self::Cpu(host) => (host.rank, host.num_ranks) = (rank, ranks),
        }
        self
    }

    /// Number of processes that train together.
    pub fn num_ranks(&self) -> usize {
        match self {
            Self::Cuda(_, usage) => usage.num_ranks.max(1),
            Self::Cpu(host) => host.num_ranks.max(1),
        }
    }

    /// The device and the processes of a dry run.
    pub fn place(&self) -> DryRunPlace {
        let rank = match self {
            Self::Cuda(_, usage) => usage.rank,
            Self::Cpu(host) => host.rank,
        };
        DryRunPlace { target: self.target(), rank, ranks: self.num_ranks() }
    }

    /// The device whose operators a dry run models.
    pub fn target(&self) -> PlanTarget {
        match self {
            Self::Cuda(..) => PlanTarget::Cuda,
            Self::Cpu(_) => PlanTarget::Cpu,
        }
    }

    /// Returns an error if libtorch has no code for the GPU.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn check_gpu(&self) -> Result<()> {
        let Self::Cuda(GpuBudget { name: Some(name), capability, .. }, _) = self else { return Ok(()) };
        refusal(*capability).map_or(Ok(()), |reason| {
            let hint = "use a newer GPU, or the CPU (`CUDA_VISIBLE_DEVICES= prsmed ...` hides GPUs)";
            Err(Error::config("GPU", format!("{name}: {reason}"), hint))
        })
    }

    /// Returns an error if the GPU cannot be used, or if the setting `key` is bf16 and the GPU does not support it.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn check_precision(&self, key: &str, precision: Precision) -> Result<()> {
        self.check_gpu()?;
        if precision != Precision::Bf16 || self.has_bf16() {
            return Ok(());
        }
        let reason = format!("{} has no bf16", self.offer().device);
        Err(Error::config(key, reason, format!("set `{key}=fp16`, or leave it out")))
    }

    /// Whether it computes in bf16.
    pub fn has_bf16(&self) -> bool {
        !matches!(self, Self::Cuda(budget, _) if !budget.has_bf16())
    }

    /// Sets the GPU whose kernel choices CUDA plans of this thread model.
    pub fn set_planned_gpu(&self) {
        if let Self::Cuda(GpuBudget { capability, .. }, _) = self {
            let number = i32::try_from(10 * capability.0 + capability.1).unwrap_or(i32::MAX);
            meta::set_gpu(number, most_multiprocessors(*capability));
        }
    }

    /// The memory that it offers.
    pub fn offer(&self) -> Offer {
        match self {
            Self::Cuda(budget, _) => {
                let size = || format!("{} GB", budget.marketing_bytes.div_ceil(gpus::GIB));
                let device = budget.name.clone().unwrap_or_else(size);
                Offer { device, bytes: Bytes(budget.total_bytes), note: budget.note.clone() }
            }
            Self::Cpu(host) if host.num_ranks > 1 => {
                let note = format!("{}, divided by {} processes", host.note, host.num_ranks);
                Offer { device: "the CPU".into(), bytes: Bytes(host.available.0 / host.num_ranks as u64), note }
            }
            Self::Cpu(host) => Offer { device: "the CPU".into(), bytes: host.available, note: host.note.clone() },
        }
    }

    /// What `prsmed calibrate` measured on it.
    pub fn reading(&self) -> Option<&DeviceReading> {
        match self {
            Self::Cuda(budget, _) => budget.reading.as_deref(),
            Self::Cpu(host) => host.reading.as_deref(),
        }
    }

    /// The same machine with a reading.
    #[must_use]
    pub fn with_reading(mut self, reading: Option<DeviceReading>) -> Self {
        let place = match &mut self {
            Self::Cuda(budget, _) => &mut budget.reading,
            Self::Cpu(host) => &mut host.reading,
        };
        *place = reading.map(Box::new);
        self
    }

    /// Where predicted times come from, for the user.
    pub fn speed_source(&self) -> String {
        let assumed = || "predicted from published rates; `prsmed calibrate` measures this machine's".to_owned();
        self.reading().map_or_else(assumed, |reading| format!("predicted from rates {}", reading.source()))
    }

    /// Whether its own rates are known, published or measured.
    pub(super) fn knows_rates(&self) -> bool {
        matches!(self, Self::Cuda(GpuBudget { has_own_rates: true, .. }, _) | Self::Cpu(_)) || self.reading().is_some()
    }

    /// The speed of operators; `None` for a CPU without a reading.
    pub(super) fn speed(&self) -> Option<Speed> {
        match self {
            Self::Cuda(budget, _) => Some(budget.speed()),
            Self::Cpu(host) => host.reading.as_ref().map(|reading| reading.speed.clone()),
        }
    }

    /// Memory of the process on a GPU in addition to tensors; nothing for a CPU.
    pub(super) fn device_terms(&self, dry_run: &DryRun) -> Vec<Term> {
        let Self::Cuda(budget, usage) = self else { return Vec::new() };
        let steps = &dry_run.steps;
        let pool = |inputs| replay::graph_pool(&dry_run.trace).0 + further_inputs(inputs);
        let graph_pool = steps.captured_inputs.map_or(0, pool);
        let mut terms = device_terms(budget, &DeviceUsage { graph_pool, deterministic: steps.deterministic, ..*usage });
        terms.extend(streamed_layer(&steps.host_weights));
        terms.extend(second_communicator(&steps.host_weights, &terms));
        terms
    }

    /// Its connection with other GPUs like it in one machine; `None` for a CPU.
    pub(super) fn link(&self) -> Option<Link> {
        let Self::Cuda(budget, _) = self else { return None };
        Some(match budget.nvlink {
            Some(bytes_per_s) => Link { name: "NVLink", bytes_per_s },
            None => Link { name: "PCI Express", bytes_per_s: budget.speed().bus? },
        })
    }

    pub(super) fn time(&self, job: Job, dry_run: &DryRun) -> Option<PhaseTime> {
        let speed = self.speed()?;
        if dry_run.trace.costs.is_empty() {
            return None;
        }
        let (steps, repeats, ranks) = (&dry_run.steps, dry_run.repeats(), self.num_ranks());
        let time = time::phase(&dry_run.trace, job.timed_phase(), repeats, &speed)?;
        let time = self.link().map_or(time, |link| {
            let weights = &steps.host_weights;
            let layers = time::of_layers(&dry_run.trace, job.timed_phase(), &weights.layers, &speed);
            let count = weights.layers.iter().map(|(_, count)| count).sum();
            let sent = speed.transfer_seconds(weights.sent.0 as f64);
            let copied = repeats * layers.waiting(count, sent);
            let all = repeats * layers.waiting(count, sent + link.collect_seconds(weights.collected, ranks));
            let reduced = link.reduce_seconds(steps.gradients, dry_run.micro_batches.0, ranks);
            time.waiting(copied).communicating(all - copied + reduced)
        });
        let time = time.with_transfers(steps.copied, &speed);
        Some(if steps.captured_inputs.is_some() { time.with_graphs() } else { time })
    }
}

/// Multiprocessors of the largest GPU of a compute capability (NVIDIA's whitepapers of the architectures and data sheets of
/// the RTX PRO 6000 and B200). Kernels of smaller GPUs divide their work into fewer parts and need no more memory.
fn most_multiprocessors(capability: (u32, u32)) -> i32 {
    match capability {
        (7, 0) => 80,
        (7, _) => 72,
        (8, 0) => 108,
        (8, 9) => 142,
        (8, _) => 84,
        (9, _) => 132,
        (10 | 11, _) => 160,
        _ => 188,
    }
}

/// Bytes of the fixed inputs of further CUDA graphs: a dry run captures one, and a run at most [`MAX_GRAPHS`].
pub(super) fn further_inputs(inputs: Bytes) -> u64 {
    (MAX_GRAPHS as u64 - 1) * inputs.0
}

/// Divided layers are collected by a communicator of their own.
fn second_communicator(weights: &HostUse, terms: &[Term]) -> Option<Term> {
    let first = terms.iter().find(|term| term.name == "NCCL")?;
    (weights.divided_block > Bytes(0)).then(|| Term {
        name: "NCCL for divided layers",
        provenance: "buffers of a second communicator, as large as those of the first one; not measured here"
            .to_owned(),
        ..*first
    })
}

/// Room for one more block of a layer that is copied from host memory.
fn streamed_layer(weights: &HostUse) -> Option<Term> {
    let layers: usize = weights.layers.iter().map(|(_, count)| count).sum();
    (layers > 0).then(|| Term {
        name: "one more layer from host memory",
        bytes: (weights.bytes.0 / layers as u64).max(weights.divided_block.0),
        reserved: false,
        provenance:
            "an allowance: blocks of layers are freed and reused on two streams, and libtorch's caching allocator \
                     kept one more of them than its model predicts (seen on a fake CUDA runtime)"
                .to_owned(),
    })
}
