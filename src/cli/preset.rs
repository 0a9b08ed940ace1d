//! `prsmed preset`: the fastest settings that fit a card.

use super::Context;
use super::plan::{MachineArgs, SettingsArgs};
use super::report::Outcome;
use crate::Error;
use crate::config::planned::{Searched, preset_toml};
use crate::config::planned_augment::augment_toml;
use crate::config::{Resolved, RunConfig};
use crate::event::Event;
use crate::nn::Quantization;
use crate::plan::report::Machine;
use crate::plan::search::{Candidate, Choice, Compromise, Found, Space, Tried, Use, search};
use crate::plan::time;
use crate::segment::setup::BatchNorm;
use crate::segment::task::CacheVision;
use crate::tensor::meta::Target;
use crate::trainer::{Checkpointing, OptimizerKind};
use crate::units::Bytes;
use serde_json::json;

/// Find settings for a card: to train the full model, or to make pairs
///
/// Searches micro-batch and accumulation (the effective batch stays), whether questions about one picture share it, what
/// is run twice in the backward pass (layers of the language model, the image encoder, the mask decoder) and whether the
/// optimizer's moments are on the host, by whole plans, and prints TOML for `prsmed train --config` on standard output;
/// the plan and the runner-up go to standard error. Where it changes no result, parameters may be stepped in the backward
/// pass. Features of the frozen vision tower are kept in the cache folder where that saves 2 % of a step's time; kernels of
/// our own, and recorded steps where the host would hold the card back, are tried in the first steps of the run. Results of
/// training do not depend on these (but for `model.batch_norm=batch`, which is said).
///
/// Only when nothing fits so, frozen layers in 4 bits (`model.quantization`) are tried, then moments in 8 bits
/// (`train.optimizer`), then smaller pictures, and that is said. 3 % of the card stay free. On the CPU, whose rates nobody
/// states, settings with the fewest operations count as the fastest.
///
/// With `--task augment` the fastest batch of `prsmed augment generate` is searched, and how latents become pixels.
///
/// Exit code 1 and nothing on standard output when no settings fit.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed preset --gpu 24gb > my.toml
  prsmed train --data-root data --config my.toml
  prsmed preset --gpu \"RTX A6000\" --effective-batch 16 --image-size 512
  prsmed preset --task augment --gpu 8gb > augment.toml")]
pub(super) struct Args {
    #[command(flatten)]
    settings: SettingsArgs,
    #[command(flatten)]
    machine: MachineArgs,
    /// Samples of an optimizer step, for training [default: micro-batch times accumulation times questions of the settings]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=8192))]
    effective_batch: Option<u16>,
    /// Side of the picture in pixels, a multiple of 16, of 64 for pairs [default: as the settings say; for training smaller if
    /// need be]
    #[arg(long, value_name = "N")]
    image_size: Option<i64>,
    /// train: the full model; augment: making image+mask pairs, the fastest batch that fits
    #[arg(long, value_enum, default_value_t = Task::Train)]
    task: Task,
    /// For training. speed: fastest step; quality: also a moving average of the weights, and never a smaller picture
    #[arg(long, value_enum, default_value_t = Objective::Speed)]
    objective: Objective,
}

/// Whose settings are searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Task {
    Train,
    Augment,
}

/// What the search is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Objective {
    Speed,
    Quality,
}

/// Part of a card that a preset leaves free: plans have not been compared with a GPU yet.
pub(super) const HEADROOM_FRAC: f64 = 0.03;

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    if args.task == Task::Augment {
        return augment(args, context);
    }
    let mut flags = Vec::new();
    if let Some(side) = args.image_size {
        flags.push((format!("model.image_size={side}"), "--image-size".to_owned()));
    }
    if args.objective == Objective::Quality {
        flags.push(("train.ema_decay=0.999".to_owned(), "--objective".to_owned()));
    }
    let resolved = args.settings.resolved(flags)?;
    let config = &resolved.config;
    let machine = args.machine.machine(context)?;
    if machine.target() == Target::Cpu {
        let text =
            "planning for the CPU: its operators are learnt by running each once, about a minute for the full model";
        context.progress.on(&Event::Note(text.into()));
    }
    let may_shrink = args.image_size.is_none() && args.objective == Objective::Speed;
    let own = config.samples_of_a_step();
    let found = search_for(&resolved, &machine, args.effective_batch.map_or(own, usize::from), may_shrink)?;
    let device = machine.offer().device;
    let Some(best) = found.fitting.first() else {
        context.progress.on(&Event::Warning(nothing_fits(&found, &device)));
        context.output.record(&json!({ "kind": "preset", "fits": false, "smallest": found.smallest }))?;
        return Ok(Outcome::No);
    };
    let toml = preset_toml(&config.with(&best.choice), &best.plan);
    context.output.line(&toml)?;
    let mut notes = vec![best.plan.table()];
    notes.extend(compromises(config, best.choice.compromise));
    notes.extend(best.tried.iter().map(tried));
    notes.extend(used(config, &config.with(&best.choice)));
    if best.choice.image_size < config.model.image_size {
        let (wanted, now) = (config.model.image_size, best.choice.image_size);
        notes.push(format!("nothing fits with pictures of {wanted} pixels: these have {now}, masks become coarser"));
    }
    if config.model.batch_norm == BatchNorm::Batch && best.choice.micro_batch != config.train.micro_batch {
        notes.push("`model.batch_norm=batch` takes its statistics from the micro-batch, whose size changed".to_owned());
    }
    if let Some(second) = found.fitting.get(1) {
        notes.push(format!("runner-up: {}", described(second)));
    }
    notes.push(format!("best of {} settings, {} of them planned", found.considered, found.planned));
    context.progress.on(&Event::Note(notes.join("\n")));
    context.output.record(&json!({
        "kind": "preset",
        "fits": true,
        "choice": best.choice,
        "plan": best.plan,
        "tried": best.tried,
        "runner_up": found.fitting.get(1),
        "considered": found.considered,
        "planned": found.planned,
        "toml": toml,
    }))?;
    Ok(Outcome::Done)
}

/// The fastest batch of the generator that fits.
fn augment(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    if args.effective_batch.is_some() {
        let hint = "leave it out: the fastest batch that fits is searched";
        return Err(Error::config("--effective-batch", "is for training, not for `--task augment`", hint).into());
    }
    let side = args.image_size.map(|side| (format!("augment.image_size={side}"), "--image-size".to_owned()));
    let run = args.settings.resolve_augment(side.into_iter().collect())?;
    let machine = args.machine.machine(context)?;
    let blueprint = super::augment::planned_blueprint(&run, context)?;
    let Some((fitted, plan)) = run.fitted(&blueprint, &machine, HEADROOM_FRAC)? else {
        let least = run.plan(&blueprint, &machine)?;
        let helping = run.remedies(&blueprint, &machine, &least);
        let text = format!(
            "no batch fits {} with 3 % of it left free: {}\n{}",
            machine.offer().device,
            least.verdict(),
            super::plan::remedy_lines(&helping)
        );
        context.progress.on(&Event::Warning(text));
        context.output.record(&json!({ "kind": "preset", "fits": false, "smallest": least, "remedies": helping }))?;
        return Ok(Outcome::No);
    };
    let toml = augment_toml(&fitted, &plan);
    context.output.line(&toml)?;
    context.progress.on(&Event::Note(plan.table()));
    context
        .output
        .record(&json!({ "kind": "preset", "fits": true, "settings": fitted, "plan": plan, "toml": toml }))?;
    Ok(Outcome::Done)
}

/// The search that `prsmed preset` and `prsmed train` do. What is only tried stays as a flag says.
pub(super) fn search_for(
    resolved: &Resolved,
    machine: &Machine,
    effective_batch: usize,
    may_shrink: bool,
) -> crate::Result<Found> {
    let config = &resolved.config;
    let (wanted, packed) = (config.model.image_size, config.data.questions_per_picture);
    let smaller = [768, 512].into_iter().filter(|side| may_shrink && *side < wanted);
    let on_a_card = machine.target() == Target::Cuda;
    let space = Space {
        effective_batch,
        questions: if packed > 1 { vec![packed, 1] } else { vec![1] },
        image_sizes: std::iter::once(wanted).chain(smaller).collect(),
        keep_features: match config.keeping_features() {
            Use::Possible if resolved.is_from_a_flag("data.cache_vision") => Use::Never,
            keeping => keeping,
        },
        record: on_a_card && config.model.semantics.hides_answer() && !resolved.is_from_a_flag("train.graph"),
        own_kernels: on_a_card && !resolved.is_from_a_flag("train.fused_kernels"),
        headroom_frac: HEADROOM_FRAC,
    };
    search(&Searched::new(config, machine)?, &space)
}

/// What was changed that changes the arithmetic.
fn compromises(config: &RunConfig, compromise: Compromise) -> Vec<String> {
    let mut notes = Vec::new();
    if compromise.quantization != config.model.quantization {
        let scales = if compromise.quantization == Quantization::Nf4Double { ", their scales in 8" } else { "" };
        notes.push(format!("nothing fits otherwise: the language model's frozen layers are in 4 bits{scales}"));
    }
    if compromise.optimizer != config.train.optimizer {
        notes.push("nothing fits otherwise: the optimizer's moments are in 8 bits".to_owned());
    }
    notes
}

/// What a setting would save, and whether it is used.
fn tried(tried: &Tried) -> String {
    let Tried { what, saves_frac, fits, is_used } = tried;
    let percent = saves_frac * 100.0;
    let verdict = match (is_used, fits) {
        (true, _) => "used",
        (false, true) => "left out",
        (false, false) => "left out, does not fit",
    };
    format!("`{what}` would save {percent:.1} % of a step's time: {verdict}")
}

/// What the settings switch on that needs a word.
fn used(before: &RunConfig, now: &RunConfig) -> Vec<String> {
    let mut notes = Vec::new();
    if now.data.cache_vision == CacheVision::Disk && before.data.cache_vision == CacheVision::Off {
        let most = Bytes((now.data.cache_vision_mib as u64) << 20);
        notes.push(format!(
            "`data.cache_vision=disk`: the first epoch computes what the frozen vision tower says, later ones read it from the \
             cache folder, at most {most} (about {} pictures)",
            now.pictures_kept()
        ));
    }
    if now.train.fused_kernels != before.train.fused_kernels {
        notes.push("`train.fused_kernels=auto`: kernels of our own, where the first steps find them faster".to_owned());
    }
    if before.train.step_in_backward && !now.train.step_in_backward {
        let count = now.train.accumulation;
        notes.push(format!("`train.step_in_backward` is off: a step has {count} micro-batches"));
    }
    if now.train.step_in_backward && !before.train.step_in_backward {
        notes.push("`train.step_in_backward=true`: each gradient is used and dropped in the backward pass".to_owned());
    }
    notes
}

/// Why there is no preset, and what would help.
pub(super) fn nothing_fits(found: &Found, device: &str) -> String {
    let least = found.smallest.as_ref().map_or_else(String::new, |smallest| {
        format!(
            "; the smallest settings need {} of {} ({})",
            smallest.plan.device_peak,
            smallest.plan.budget.bytes,
            described(smallest)
        )
    });
    format!(
        "no settings fit {device} with 3 % of it left free{least}\nshorter texts, smaller pictures or adapters of a lower rank \
         need less; `prsmed solve --for gpu` names the smallest card"
    )
}

fn described(candidate: &Candidate) -> String {
    let choice = &candidate.choice;
    let Choice { saving, compromise, .. } = choice;
    let mut twice = Vec::new();
    if saving.checkpoint_encoder != Checkpointing::None {
        twice.push("encoder".to_owned());
    }
    match saving.checkpointing {
        Checkpointing::None => {}
        Checkpointing::Layers(layers) => twice.push(format!("{layers} layers")),
        Checkpointing::Full => twice.push("all layers".to_owned()),
    }
    if saving.checkpoint_decoder {
        twice.push("decoder".to_owned());
    }
    let mut parts =
        vec![if twice.is_empty() { "no checkpointing".into() } else { format!("{} checkpointed", twice.join(", ")) }];
    if saving.step_in_backward && choice.accumulation == 1 {
        parts.push("steps in the backward pass".to_owned());
    }
    if saving.offload_optimizer {
        parts.push("moments on the host".to_owned());
    }
    if choice.keep_features {
        parts.push("vision features kept".to_owned());
    }
    if choice.record {
        parts.push("steps recorded".to_owned());
    }
    match compromise.quantization {
        Quantization::None => {}
        Quantization::Nf4 => parts.push("frozen layers in 4 bits".to_owned()),
        Quantization::Nf4Double => parts.push("frozen layers in 4 bits, scales in 8".to_owned()),
    }
    if compromise.optimizer == OptimizerKind::AdamW8bit {
        parts.push("moments in 8 bits".to_owned());
    }
    let time = candidate.step_seconds().map_or_else(String::new, |seconds| format!(", {} a step", time::text(seconds)));
    format!(
        "micro-batch {} x {} with {} questions a picture, {}, {} pixels: {}{time}",
        choice.micro_batch,
        choice.accumulation,
        choice.questions,
        parts.join(", "),
        choice.image_size,
        candidate.device_peak()
    )
}
