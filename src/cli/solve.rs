//! `prsmed solve`: finds the largest value of one setting that fits a GPU, or the smallest GPU, or the smallest number of
//! GPUs, for given settings.

use super::args::SettingsArgs;
use super::context::Context;
use super::plan::{AUTO, MachineArgs};
use super::report::{CommandEnd, CommandResult};
use crate::Error;
use crate::config::{Resolved, RunConfig};
use crate::job::solve::{self, SolvedNumber};
use crate::job::training_settings::SEARCHING;
use crate::plan::machine::Machine;
use crate::plan::search::HEADROOM_FRAC;
use crate::segment::weight_files;
use serde_json::json;

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
#[command(mut_arg("preset", |arg| arg.help("Named settings: tiny, full, cpu, gpu-24gb, ... [default: full]")))]
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
    /// Share of the memory that stays free.
    fn headroom_frac(&self) -> f64 {
        if self.no_reserve { 0.0 } else { HEADROOM_FRAC }
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

pub(super) fn run(args: &Args, context: &Context) -> CommandResult {
    if args.machine.gpus.is_some() && matches!(args.unknown, Unknown::Gpu | Unknown::Gpus) {
        let hint = "leave it out; `--for gpus` finds the number, and `--for gpu` is for one GPU";
        return Err(Error::config("--gpus", "is not for `--for gpu` and `--for gpus`", hint).into());
    }
    if args.unknown == Unknown::Gpu {
        if args.machine.gpu != AUTO {
            let hint = "leave it out, or ask with `--for gpus` how many such GPUs are needed";
            return Err(Error::config("--gpu", "is what `--for gpu` finds", hint).into());
        }
        let mut resolved = args.settings.sources("full", []).resolve()?;
        weight_files::check_architectures(&mut resolved.config, &context.runtime)?;
        return smallest_gpu(args, &resolved, context);
    }
    let machine = args.machine.machine(context)?;
    let mut config: RunConfig = args.settings.resolved_with_note(Vec::new(), &machine, context)?.config;
    weight_files::check_architectures(&mut config, &context.runtime)?;
    let number = match args.unknown {
        Unknown::MicroBatch => SolvedNumber::MICRO_BATCH,
        Unknown::ImageSize => SolvedNumber::IMAGE_SIZE,
        Unknown::LoraRank => SolvedNumber::LORA_RANK,
        Unknown::Tokens => SolvedNumber::TOKENS,
        Unknown::Gpu | Unknown::Gpus => return fewest_gpus(args, &config, &machine, context),
    };
    let (key, offer) = (number.key, machine.offer());
    let Some((value, plan, is_last)) = number.largest(&config, &machine, args.headroom_frac())? else {
        let reserve = if args.no_reserve { "" } else { " with 3 % of its memory free (`--no-reserve`)" };
        let least = number.least;
        context.output.line(format!("{key}={least} does not fit {}{reserve}; try `prsmed preset`", offer.device))?;
        context.output.record(&json!({ "kind": "solve", "key": key, "value": null, "budget": offer }))?;
        return Ok(CommandEnd::No);
    };
    let more = if is_last { " (the largest that was tried)" } else { "" };
    context.output.line(format!("{key}={value}{more}\n{}", plan.summary()))?;
    context.output.record(&json!({ "kind": "solve", "key": key, "value": value, "plan": plan }))?;
    Ok(CommandEnd::Done)
}

fn fewest_gpus(args: &Args, config: &RunConfig, machine: &Machine, context: &Context) -> CommandResult {
    let Some((count, sets, plan)) = solve::fewest_gpus(config, machine, args.headroom_frac())? else {
        let images = config.train.micro_batch * config.train.accumulation;
        let hint = format!(
            "a step has {images} images, so at most {images} GPUs share it; `prsmed preset --gpus N` searches other settings"
        );
        let offer = machine.offer();
        context.output.line(format!("no number of {} is enough: {hint}", offer.device))?;
        context.output.record(&json!({ "kind": "solve", "key": "gpus", "value": null, "budget": offer }))?;
        return Ok(CommandEnd::No);
    };
    let with = if sets.is_empty() { String::new() } else { format!(" with {sets}") };
    let gpus = if count == 1 { "1 GPU".to_owned() } else { format!("{count} GPUs{with}") };
    context.output.line(format!("{gpus}\n{}", plan.summary()))?;
    let record = json!({ "kind": "solve", "key": "gpus", "value": count, "settings": with.trim(), "plan": plan });
    context.output.record(&record)?;
    Ok(CommandEnd::Done)
}

fn smallest_gpu(args: &Args, resolved: &Resolved, context: &Context) -> CommandResult {
    let (gpu, plan) = match solve::smallest_gpu(&resolved.config, args.headroom_frac())? {
        Ok(found) => found,
        Err(needs) => {
            let text = needs.map_or_else(String::new, |bytes| format!(": it needs {bytes}"));
            context.output.line(format!("no listed GPU is large enough{text}"))?;
            context.output.record(&json!({ "kind": "solve", "key": "gpu", "value": null, "device_peak": needs }))?;
            return Ok(CommandEnd::No);
        }
    };
    context.output.line(format!("{} ({} GB)\n{}", gpu.name, gpu.gb, plan.summary()))?;
    let search = || solve::smallest_with_preset(resolved, gpu.gb);
    let smaller = context.runtime.with_patience(SEARCHING, search)?;
    if let Some((gb, notes)) = &smaller {
        let text = format!("{gb} GB are enough with the settings that `prsmed preset --gpu {gb}gb` finds");
        context.output.line([&[text][..], notes.as_slice()].concat().join("\n"))?;
    }
    let gb = smaller.map(|(gb, _)| gb);
    let record = json!({ "kind": "solve", "key": "gpu", "value": gpu.name, "plan": plan, "gb_with_preset": gb });
    context.output.record(&record)?;
    Ok(CommandEnd::Done)
}
