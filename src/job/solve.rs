//! Finds the largest value of one setting, the smallest GPU, or the fewest GPUs, for which a training fits.

use super::found::compromise_notes;
use super::training_settings::search_for;
use crate::Result;
use crate::config::{Resolved, RunConfig, Settings as _};
use crate::plan::device_terms::DeviceUsage;
use crate::plan::dry_run::Job;
use crate::plan::gpus::{self, Gpu};
use crate::plan::machine::Machine;
use crate::plan::report::Plan;
use crate::plan::search::{has_headroom, largest};
use crate::trainer::precision::Precision;
use crate::units::Bytes;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Settings by which several processes divide what does not depend on the batch.
const DIVIDED: [&str; 2] = ["train.zero_stage=2", "model.divide_layers=true"];
/// Largest number of GPUs that is tried.
const MOST_GPUS: usize = 64;
/// Sizes of GPUs in GB.
const SIZES: [u32; 9] = [4, 6, 8, 12, 16, 24, 32, 40, 48];

/// A setting whose largest value is searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SolvedNumber {
    /// Its key.
    pub key: &'static str,
    /// The least value that is tried.
    pub least: usize,
    /// The largest value that is tried.
    most: usize,
    /// Step between values.
    step: usize,
}

impl SolvedNumber {
    /// Images of a forward and backward pass.
    pub const MICRO_BATCH: Self = Self { key: "train.micro_batch", least: 1, most: 1024, step: 1 };
    /// Side of the segmenter's image.
    pub const IMAGE_SIZE: Self = Self { key: "model.image_size", least: 64, most: 8192, step: 16 };
    /// Rank of the LoRA adapters.
    pub const LORA_RANK: Self = Self { key: "lora.rank", least: 1, most: 4096, step: 1 };
    /// Ids of a text.
    pub const TOKENS: Self = Self { key: "model.max_text_tokens", least: 32, most: 8192, step: 1 };

    /// The largest value with which `config` fits `machine` and leaves `headroom_frac` of it free, and its plan; `None` if
    /// not even the least one does. True if no larger value was tried.
    ///
    /// # Errors
    /// Those of [`Planned::plan_of`](super::planned::Planned::plan_of).
    pub fn largest(
        self,
        config: &RunConfig,
        machine: &Machine,
        headroom_frac: f64,
    ) -> Result<Option<(usize, Plan, bool)>> {
        let Self { key, least, most, step } = self;
        let mut best: Option<(usize, Plan)> = None;
        let found = largest(least / step..=most / step, |steps| {
            let value = steps * step;
            let plan = config.with_sets(&format!("{key}={value}"))?.plan_for(Job::Train, machine)?;
            let fits = has_headroom(&plan, headroom_frac);
            if fits && best.as_ref().is_none_or(|(known, _)| *known < value) {
                best = Some((value, plan));
            }
            Ok(fits)
        })?;
        Ok(best.filter(|_| found.is_some()).map(|(value, plan)| (value, plan, value == most)))
    }
}

/// The smallest number of GPUs like `machine` that fit and divide a step evenly: with the given settings, or else with
/// settings that divide more, which are returned too. `None` if no number fits.
///
/// # Errors
/// Those of [`Planned::plan_of`](super::planned::Planned::plan_of).
pub fn fewest_gpus(config: &RunConfig, machine: &Machine, headroom_frac: f64) -> Result<Option<(usize, String, Plan)>> {
    let images = config.train.micro_batch * config.train.accumulation;
    let mut ways = vec![(config.clone(), String::new())];
    if !config.model.train_base && !DIVIDED.iter().all(|set| config.with_sets(set).is_ok_and(|same| same == *config)) {
        ways.push((config.with_sets(&DIVIDED.join(" "))?, DIVIDED.join(" ")));
    }
    for (config, sets) in ways {
        let first = if sets.is_empty() { 1 } else { 2 };
        for count in (first..=images.min(MOST_GPUS)).filter(|count| images.is_multiple_of(*count)) {
            let machine = machine.clone().with_ranks(0, count);
            let plan = config.clone().divided_among(count)?.plan_for(Job::Train, &machine)?;
            if has_headroom(&plan, headroom_frac) {
                return Ok(Some((count, sets, plan)));
            }
        }
    }
    Ok(None)
}

/// The smallest listed GPU on which `config` fits, and its plan; else the memory that it needs on the largest one. GPUs of
/// one architecture share a dry run and differ only in device terms.
///
/// # Errors
/// Those of [`Planned::plan_of`](super::planned::Planned::plan_of).
pub fn smallest_gpu(config: &RunConfig, headroom_frac: f64) -> Result<Result<(&'static Gpu, Plan), Option<Bytes>>> {
    let needs_bf16 = config.train.precision == Precision::Bf16;
    let mut gpus: Vec<&'static Gpu> = gpus::sized().collect();
    gpus.sort_by_key(|gpu| (gpu.gb, gpu.total_bytes()));
    let mut dry_runs = HashMap::new();
    let mut least = None;
    for gpu in gpus {
        let machine = Machine::Cuda(gpu.budget(gpu.memory_source.clone()), DeviceUsage::default());
        if machine.check_gpu().is_err() || needs_bf16 && !machine.has_bf16() {
            continue;
        }
        let dry_run = match dry_runs.entry(gpu.capability) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(config.dry_run(Job::Train, config.longest_example(), &machine, false)?),
        };
        let plan = Plan::of(dry_run, &machine);
        if has_headroom(&plan, headroom_frac) {
            return Ok(Ok((gpu, plan)));
        }
        least = Some(plan.device_peak);
    }
    Ok(Err(least))
}

/// GB of the smallest GPU, below `gb`, for which `prsmed preset` finds settings with images of the same size, and notes about
/// those settings that change results.
///
/// # Errors
/// Those of [`search_for`].
pub fn smallest_with_preset(resolved: &Resolved, gb: u32) -> Result<Option<(u32, Vec<String>)>> {
    for size in SIZES.into_iter().filter(|size| *size < gb) {
        let budget = gpus::find(&format!("{size}gb")).expect("a size is a budget");
        let machine = Machine::Cuda(budget, DeviceUsage::default());
        let found = search_for(resolved, &machine, resolved.config.samples_of_a_step(), false)?;
        if let Some(best) = found.fitting.first() {
            return Ok(Some((size, compromise_notes(&resolved.config, &resolved.config.with_sets(&best.sets)?))));
        }
    }
    Ok(None)
}
