//! Advice: how fast each listed GPU is, and what would make a training faster.

use super::training_settings::search_for;
use crate::Result;
use crate::config::{FlagSet, PRESETS, Resolved, Settings as _, Sources};
use crate::event::{Event, Observer};
use crate::metrics::text_table;
use crate::plan::device_terms::DeviceUsage;
use crate::plan::dry_run::{DryRun, Job};
use crate::plan::duration::{Duration, Samples, long};
use crate::plan::gpus::{self, Gpu};
use crate::plan::machine::Machine;
use crate::plan::report::Plan;
use crate::plan::search::{HEADROOM_FRAC, PlannedSettings, has_headroom};
use crate::plan::time;
use crate::plan::unsupported::refusal;
use crate::trainer::precision::Precision;
use crate::units::Bytes;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// A training of the full model on a listed GPU, with the preset for its memory.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct OnGpu {
    /// Name of the GPU.
    pub gpu: &'static str,
    /// Memory that it offers to a process.
    pub memory: Bytes,
    /// The preset that was planned: the largest one that fits.
    pub preset: &'static str,
    /// Its precision, or fp16 where the GPU has no bf16.
    pub precision: Precision,
    /// Planned peak on the device.
    pub device_peak: Bytes,
    /// Host memory of frozen weights and optimizer state.
    pub host: Bytes,
    /// Predicted seconds of an optimizer step.
    pub step_seconds: f64,
    /// Predicted time of the whole training, if its samples are known.
    pub training: Option<Duration>,
}

impl OnGpu {
    /// A table, the fastest GPU first.
    pub fn table(all: &[Self]) -> String {
        let mut header = vec!["GPU", "offers", "preset", "precision", "uses", "host memory", "a step"];
        if all.iter().any(|on| on.training.is_some()) {
            header.extend(["an epoch", "in all"]);
        }
        let row = |on: &Self| {
            let host = if on.host == Bytes(0) { "-".to_owned() } else { on.host.to_string() };
            let (precision, peak) = (format!("{:?}", on.precision).to_lowercase(), on.device_peak.to_string());
            let step = time::text(on.step_seconds);
            let mut row = vec![on.gpu.into(), on.memory.to_string(), on.preset.into(), precision, peak, host, step];
            row.extend(on.training.iter().flat_map(|all| [long(all.epoch_seconds), long(all.seconds)]));
            row
        };
        text_table::aligned(&header, &all.iter().map(row).collect::<Vec<_>>(), None)
    }
}

/// Plans the full model on all listed GPUs with published rates, each with the largest built-in preset that fits. `sets`
/// are overrides of each preset with the flags that state them. `count` GPUs of a machine train together, each on the
/// samples that one alone has in a step.
///
/// # Errors
/// [`crate::Error::Config`] for overrides that no preset can have.
pub fn all_gpus(sets: &[FlagSet], samples: Option<u64>, count: usize, observer: &dyn Observer) -> Result<Vec<OnGpu>> {
    let listed: Vec<&'static Gpu> =
        gpus::all().iter().filter(|gpu| gpu.rates().is_some() && refusal(gpu.capability).is_none()).collect();
    observer.on(&Event::Started { phase: "plan".into(), total: listed.len() as u64, unit: "GPUs" });
    let (mut found, mut dry_runs) = (Vec::new(), DryRuns::new());
    for (done, gpu) in (1..).zip(listed) {
        found.extend(on_gpu(gpu, sets, (samples, count), &mut dry_runs)?);
        observer.on(&Event::Advanced { done });
    }
    observer.on(&Event::Finished);
    found.sort_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds));
    Ok(found)
}

/// Dry runs by preset, precision and capability: GPUs that share them differ in rates and memory only.
type DryRuns = HashMap<(&'static str, bool, (u32, u32)), DryRun>;

/// The training on `count` of `gpu` with the largest preset that fits; `None` if none does.
fn on_gpu(
    gpu: &'static Gpu,
    sets: &[FlagSet],
    (samples, count): (Option<u64>, usize),
    dry_runs: &mut DryRuns,
) -> Result<Option<OnGpu>> {
    let Ok(budget) = gpus::find(&gpu.name) else { return Ok(None) };
    let machine = Machine::Cuda(budget, DeviceUsage::default()).with_ranks(0, count);
    for &(preset, _) in PRESETS.iter().rev() {
        let size = preset.strip_prefix("gpu-").and_then(|size| size.strip_suffix("gb")?.parse::<u32>().ok());
        if size.is_none_or(|size| size > gpu.gb) {
            continue;
        }
        let sources = Sources { preset: Some(preset.into()), sets: sets.to_vec(), ..Sources::default() };
        let resolved = sources.resolve()?.fit_precision(&machine)?;
        let mut config = resolved.config;
        config.train.accumulation *= count;
        let dry_run = match dry_runs.entry((preset, machine.has_bf16(), gpu.capability)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(config.dry_run(Job::Train, config.longest_example(), &machine, true)?),
        };
        let plan = Plan::of(dry_run, &machine);
        let Some(time) = plan.time.filter(|_| has_headroom(&plan, HEADROOM_FRAC)) else { continue };
        let of = samples.map(|samples| Samples::even(samples, config.data.questions_per_image));
        let step_seconds = time.seconds;
        return Ok(Some(OnGpu {
            gpu: &gpu.name,
            memory: plan.budget.bytes,
            preset,
            precision: config.train.precision,
            device_peak: plan.device_peak,
            host: Bytes(plan.host_weights.0 + plan.host_state.0),
            step_seconds,
            training: of.map(|of| Duration::new(of, &config.train, step_seconds)),
        }));
    }
    Ok(None)
}

/// An effective batch that several GPUs divide evenly.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct EvenBatch {
    /// Samples of a step.
    pub effective_batch: usize,
    /// Predicted samples per second, divided by those of the settings as they are.
    pub times_faster: f64,
}

impl EvenBatch {
    /// These batches in words.
    pub fn text(all: &[Self], machine: &Machine) -> Option<String> {
        let flag = |even: &Self| {
            format!("argument `effective_batch={}` is {:.1} times as fast", even.effective_batch, even.times_faster)
        };
        let flags: Vec<String> = all.iter().map(flag).collect();
        let count = machine.num_ranks();
        (!all.is_empty()).then(|| format!("{count} GPUs cannot divide this batch evenly: {}", flags.join(", ")))
    }
}

/// Effective batches near that of `best` that the GPUs of `machine` divide evenly, if they do not divide its own. Only those
/// that are at least a tenth faster, the fastest first.
///
/// # Errors
/// Those of [`search_for`].
pub fn even_batches(
    resolved: &Resolved,
    machine: &Machine,
    best: &PlannedSettings,
    may_shrink: bool,
) -> Result<Vec<EvenBatch>> {
    let ranks = machine.num_ranks();
    let samples = best.batch.samples;
    let questions = resolved.config.with_sets(&best.sets)?.data.questions_per_image;
    let Some(seconds) = best.step_seconds().filter(|_| !(samples / questions).is_multiple_of(ranks)) else {
        return Ok(Vec::new());
    };
    let packed = resolved.config.data.questions_per_image;
    let mut near = vec![samples / ranks * ranks, samples.next_multiple_of(ranks), ranks * packed];
    near.sort_unstable();
    near.dedup();
    let mut found = Vec::new();
    for effective_batch in near.into_iter().filter(|batch| *batch >= ranks && *batch != samples) {
        let searched = search_for(resolved, machine, effective_batch, may_shrink)?;
        let rate = |seconds: f64, samples: usize| samples as f64 / seconds;
        let other = searched.fitting.first().and_then(PlannedSettings::step_seconds);
        let times_faster = other.map_or(0.0, |other| rate(other, effective_batch) / rate(seconds, samples));
        if times_faster >= 1.1 {
            found.push(EvenBatch { effective_batch, times_faster });
        }
    }
    found.sort_by(|a, b| b.times_faster.total_cmp(&a.times_faster));
    Ok(found)
}
