//! `prsmed solve`: finds the largest value of one setting that fits a GPU, or the smallest GPU, or the smallest number of
//! GPUs, for given settings.

use super::context::Context;
use super::plan::{MachineArgs, SettingsArgs};
use super::preset::compromise_notes;
use super::report::Outcome;
use crate::Error;
use crate::config::{Resolved, RunConfig, Settings as _};
use crate::job::training_settings::{SEARCHING, search_for};
use crate::job::weight_files;
use crate::models::tiny_vit::STRIDE;
use crate::plan::device_terms::DeviceUsage;
use crate::plan::dry_run::Job;
use crate::plan::gpus::{self, Gpu};
use crate::plan::report::{Machine, Plan};
use crate::plan::search::HEADROOM_FRAC;
use crate::plan::search::{has_headroom, largest};
use crate::trainer::precision::Precision;
use serde_json::json;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Find the largest value of one setting that fits a GPU, or the smallest or fewest GPUs
///
/// All other settings keep their values. The next larger value does not fit. (For image sizes and texts an even larger
/// one may fit again, because sizes are rounded.) As `prsmed preset` does, it keeps 3 % of the memory free, unless
/// `--no-reserve` is given.
///
/// `--for gpus` finds how many GPUs of one kind must train together. They divide the micro-batches of a step; if that does not
/// suffice, also optimizer state, gradients and frozen layers (`train.zero_stage=2`, `model.divide_layers=true`).
///
/// Exit code 1 if not even the smallest value fits.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed solve --gpu 24gb --for micro-batch
  prsmed solve --gpu \"RTX 4090\" --for tokens --set train.checkpointing=full
  prsmed solve --for gpu --preset full
  prsmed solve --for gpus --gpu 12gb --preset full --set train.accumulation=8")]
pub(super) struct Args {
    #[command(flatten)]
    settings: SettingsArgs,
    #[command(flatten)]
    machine: MachineArgs,
    /// What to solve for
    #[arg(long = "for", value_enum, value_name = "WHAT")]
    unknown: Unknown,
    /// Use all memory of the GPU, with nothing left for what the plan cannot know
    #[arg(long)]
    no_reserve: bool,
}

impl Args {
    /// Whether `plan` fits and leaves the reserve free.
    fn fits(&self, plan: &Plan) -> bool {
        has_headroom(plan, if self.no_reserve { 0.0 } else { HEADROOM_FRAC })
    }
}

/// The unknown to solve for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Unknown {
    /// Images of a forward and backward pass
    MicroBatch,
    /// Side of the segmenter's image, in steps of 16 pixels
    ImageSize,
    /// Rank of the LoRA adapters
    LoraRank,
    /// Longest text (`model.max_text_tokens`)
    Tokens,
    /// The smallest GPU of the built-in table
    Gpu,
    /// The smallest number of such GPUs that train together
    Gpus,
}

/// Settings by which several processes divide what does not depend on the batch.
const DIVIDED: [&str; 2] = ["train.zero_stage=2", "model.divide_layers=true"];
/// Largest number of GPUs that is tried.
const MOST_GPUS: usize = 64;

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    if args.machine.gpus.is_some() && matches!(args.unknown, Unknown::Gpu | Unknown::Gpus) {
        let hint = "leave it out; `--for gpus` finds the number, and `--for gpu` is for one GPU";
        return Err(Error::config("--gpus", "is not for `--for gpu` and `--for gpus`", hint).into());
    }
    if args.unknown == Unknown::Gpu {
        let resolved = args.settings.resolved(Vec::new())?;
        weight_files::check_architectures(&resolved.config.model, &context.runtime)?;
        return smallest_gpu(args, &resolved, context);
    }
    let machine = args.machine.machine(context)?;
    let config = args.settings.resolved_with_note(Vec::new(), &machine, context)?.config;
    weight_files::check_architectures(&config.model, &context.runtime)?;
    if args.unknown == Unknown::Gpus {
        return fewest_gpus(args, &config, &machine, context);
    }
    let (key, first, last, unit) = match args.unknown {
        Unknown::MicroBatch => ("train.micro_batch", 1, 1024, 1),
        Unknown::ImageSize => ("model.image_size", 4, 512, usize::try_from(STRIDE)?),
        Unknown::LoraRank => ("lora.rank", 1, 4096, 1),
        Unknown::Tokens | Unknown::Gpu | Unknown::Gpus => ("model.max_text_tokens", 32, 8192, 1),
    };
    let mut best: Option<(usize, Plan)> = None;
    let found = largest(first..=last, |steps| {
        let value = steps * unit;
        let plan = with(&config, args.unknown, value).plan_for(Job::Train, &machine)?;
        let fits = args.fits(&plan);
        if fits && best.as_ref().is_none_or(|(known, _)| *known < value) {
            best = Some((value, plan));
        }
        Ok(fits)
    })?;
    let offer = machine.offer();
    let Some((value, plan)) = best.filter(|_| found.is_some()) else {
        let least = first * unit;
        let reserve = if args.no_reserve { "" } else { " with 3 % of its memory free (`--no-reserve`)" };
        context.output.line(format!("{key}={least} does not fit {}{reserve}; try `prsmed preset`", offer.device))?;
        context.output.record(&json!({ "kind": "solve", "key": key, "value": null, "budget": offer }))?;
        return Ok(Outcome::No);
    };
    let more = if found == Some(last) { " (the largest that was tried)" } else { "" };
    context.output.line(format!("{key}={value}{more}\n{}", plan.summary()))?;
    context.output.record(&json!({ "kind": "solve", "key": key, "value": value, "plan": plan }))?;
    Ok(Outcome::Done)
}

fn with(config: &RunConfig, unknown: Unknown, value: usize) -> RunConfig {
    let mut config = config.clone();
    let number = i64::try_from(value).unwrap_or(i64::MAX);
    match unknown {
        Unknown::MicroBatch => config.train.micro_batch = value,
        Unknown::ImageSize => config.model.image_size = number,
        Unknown::LoraRank => config.lora.rank = number,
        Unknown::Tokens => config.model.max_text_tokens = value,
        Unknown::Gpu | Unknown::Gpus => {}
    }
    config
}

/// The smallest number of GPUs like `machine` that fit and divide a step evenly, with the given settings or else with
/// [`DIVIDED`].
fn fewest_gpus(args: &Args, config: &RunConfig, machine: &Machine, context: &Context) -> anyhow::Result<Outcome> {
    let images = config.train.micro_batch * config.train.accumulation;
    let mut ways = vec![(config.clone(), String::new())];
    if !config.model.train_base && !DIVIDED.iter().all(|set| config.with_sets(set).is_ok_and(|same| same == *config)) {
        ways.push((config.with_sets(&DIVIDED.join(" "))?, format!(" with {}", DIVIDED.join(" "))));
    }
    let offer = machine.offer();
    for (config, with) in &ways {
        let first = if with.is_empty() { 1 } else { 2 };
        for count in (first..=images.min(MOST_GPUS)).filter(|count| images.is_multiple_of(*count)) {
            let machine = machine.clone().with_ranks(0, count);
            let plan = config.clone().divided_among(count)?.plan_for(Job::Train, &machine)?;
            if !args.fits(&plan) {
                continue;
            }
            let gpus = if count == 1 { "1 GPU".to_owned() } else { format!("{count} GPUs{with}") };
            context.output.line(format!("{gpus}\n{}", plan.summary()))?;
            let record =
                json!({ "kind": "solve", "key": "gpus", "value": count, "settings": with.trim(), "plan": plan });
            context.output.record(&record)?;
            return Ok(Outcome::Done);
        }
    }
    let hint = format!(
        "a step has {images} images, so at most {images} GPUs share it; `prsmed preset --gpus N` searches other settings"
    );
    context.output.line(format!("no number of {} is enough: {hint}", offer.device))?;
    context.output.record(&json!({ "kind": "solve", "key": "gpus", "value": null, "budget": offer }))?;
    Ok(Outcome::No)
}

/// The smallest listed GPU that fits. GPUs of one architecture share a dry run and differ only in device terms.
fn smallest_gpu(args: &Args, resolved: &Resolved, context: &Context) -> anyhow::Result<Outcome> {
    let config = &resolved.config;
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
            Entry::Vacant(entry) => {
                entry.insert(config.dry_run(Job::Train, config.longest_example(), &machine, false)?)
            }
        };
        let plan = Plan::of(dry_run, &machine);
        if args.fits(&plan) {
            context.output.line(format!("{} ({} GB)\n{}", gpu.name, gpu.gb, plan.summary()))?;
            let smaller = context.runtime.with_patience(SEARCHING, || smallest_with_preset(resolved, gpu.gb))?;
            if let Some((gb, notes)) = &smaller {
                let text = format!("{gb} GB are enough with the settings that `prsmed preset --gpu {gb}gb` finds");
                context.output.line([&[text][..], notes.as_slice()].concat().join("\n"))?;
            }
            let gb = smaller.map(|(gb, _)| gb);
            let record =
                json!({ "kind": "solve", "key": "gpu", "value": gpu.name, "plan": plan, "gb_with_preset": gb });
            context.output.record(&record)?;
            return Ok(Outcome::Done);
        }
        least = Some(plan);
    }
    let needs = least.map(|plan| plan.device_peak);
    let text = needs.map_or_else(String::new, |bytes| format!(": it needs {bytes}"));
    context.output.line(format!("no listed GPU is large enough{text}"))?;
    context.output.record(&json!({ "kind": "solve", "key": "gpu", "value": null, "device_peak": needs }))?;
    Ok(Outcome::No)
}

/// Sizes of GPUs in GB.
const SIZES: [u32; 9] = [4, 6, 8, 12, 16, 24, 32, 40, 48];

/// GB of the smallest GPU, below `gb`, for which `prsmed preset` finds settings with images of the same size, and notes about
/// those settings that change results.
fn smallest_with_preset(resolved: &Resolved, gb: u32) -> crate::Result<Option<(u32, Vec<String>)>> {
    for size in SIZES.into_iter().filter(|size| *size < gb) {
        let budget = gpus::find(&format!("{size}gb")).expect("a size is a budget");
        let machine = Machine::Cuda(budget, DeviceUsage::default());
        let found = search_for(resolved, &machine, resolved.config.samples_of_a_step(), false)?;
        if let Some(best) = found.fitting.first() {
            return Ok(Some((size, compromise_notes(&resolved.config, best.choice.compromise))));
        }
    }
    Ok(None)
}
