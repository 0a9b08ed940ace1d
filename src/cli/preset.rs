//! `prsmed preset`: searches for the fastest settings that fit a GPU.

use super::args::{SettingsArgs, assignments};
use super::context::Context;
use super::next;
use super::plan::{MachineArgs, no_rates};
use super::report::{CommandEnd, CommandResult};
use crate::Error;
use crate::config::learning_rate::{Suggestion, suggestion};
use crate::config::{AugmentRun, FinetuneRun, FlagSet, Resolved, Settings as _};
use crate::job::advice::{self, EvenBatch, OnGpu};
use crate::job::memory::remedy_lines;
use crate::job::planned::{Fitted, Planned as _};
use crate::job::training_settings::{SEARCHING, search_for};
use crate::job::{finetuning, found, generator};
use crate::plan::dry_run::Job;
use crate::plan::duration::{Duration, Samples};
use crate::plan::machine::Machine;
use crate::segment::weight_files;
use crate::shell::{ShellCommand, path_word};
use serde_json::json;
use std::fs;
use std::io::{self, IsTerminal as _};
use std::path::Path;

/// Find the fastest settings that fit a GPU
///
/// Prints TOML for `prsmed train --config` on standard output, with its memory plan as a comment. The search keeps the effective batch and tries: micro-batch and accumulation, questions packed per image,
/// activation checkpointing (language model, image encoder, mask decoder), frozen layers and optimizer state in host
/// memory and, if it changes no result, parameter updates in the backward pass. It caches vision features on disk if that saves 2 % of
/// a step's time. Custom CUDA kernels, and CUDA graphs if the CPU would limit the speed, are tried in the first steps
/// of the run. These settings do not change training results (except with `model.batch_norm=batch`, where a note says
/// so).
///
/// It uses frozen layers in 4 bits (`model.quantization`), and then 8-bit optimizer state (`train.optimizer`), only if
/// nothing else fits, or if a step would take more than 1.3 times as long with frozen layers in host memory. Smaller
/// images are used only if nothing fits. It prints a note then. 3 % of the GPU's memory stay free. The speed of CPUs is
/// not known to the planner: there, settings with the fewest operations count as the fastest.
///
/// With `--task augment` it searches for the fastest batch and decoding mode of `prsmed augment generate`, with `--task
/// finetune` for the fastest settings of `prsmed augment finetune`.
///
/// With `--gpu all` it compares the listed GPUs instead, each with the largest built-in preset that fits: memory, seconds a
/// step, and with `--samples` hours a training.
///
/// Exit code 1 and nothing on standard output if no settings fit.
#[derive(Debug, clap::Args)]
#[command(mut_arg("preset", |arg| arg.help("Named settings: tiny, full, cpu, gpu-24gb, ... [default: full; for other tasks the task's preset]")))]
#[command(after_help = "Examples:
  prsmed preset --gpu 24gb > my.toml
  prsmed train --data-root data --config my.toml
  prsmed preset --gpu \"RTX A6000\" --effective-batch 16 --image-size 512
  prsmed preset --gpu all --samples 38000
  prsmed preset --task augment --gpu 8gb > augment.toml
  prsmed preset --task finetune --preset lora-sd15 --gpu 8gb > finetune.toml")]
pub(super) struct Args {
    #[command(flatten)]
    settings: SettingsArgs,
    #[command(flatten)]
    machine: MachineArgs,
    /// For trainings: samples of an optimizer step [default: micro-batch times accumulation times questions per image]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=8192))]
    effective_batch: Option<u16>,
    /// Side of the image in pixels: a multiple of 16, for the other tasks of 64 [default: as in the settings; for
    /// trainings smaller if nothing fits]
    #[arg(long, value_name = "N")]
    image_size: Option<i64>,
    /// train: settings to train the model; augment: settings to generate image+mask pairs; finetune: settings to
    /// fine-tune the generator
    #[arg(long, value_enum, default_value_t = Task::Train)]
    task: Task,
    /// For trainings: predict the time of a training on so many questions
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    samples: Option<u64>,
    /// For training. speed: the fastest step; quality: also a moving average of the weights, and never a smaller image
    #[arg(long, value_enum, default_value_t = Objective::Speed)]
    objective: Objective,
}

impl Args {
    /// The side of the image as a setting of this section.
    fn side_of(&self, section: &str) -> Vec<FlagSet> {
        let key = format!("{section}.image_size");
        assignments([(&key, "--image-size", self.image_size.map(|side| side.to_string()))])
    }

    /// Whether smaller images may be used if nothing fits.
    fn may_shrink(&self) -> bool {
        self.image_size.is_none() && self.objective == Objective::Speed
    }
}

/// The task whose settings are searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Task {
    Train,
    Augment,
    Finetune,
}

/// The objective of the search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Objective {
    Speed,
    Quality,
}

pub(super) fn run(args: &Args, context: &Context) -> CommandResult {
    match args.task {
        Task::Train => training(args, context),
        Task::Augment => augment(args, context),
        Task::Finetune => finetune(args, context),
    }
}

/// The fastest settings of a training that fit.
fn training(args: &Args, context: &Context) -> CommandResult {
    let average = (args.objective == Objective::Quality).then(|| "0.999".to_owned());
    let flags = [args.side_of("model"), assignments([("train.ema_decay", "--objective", average)])].concat();
    if args.machine.gpu == "all" {
        return all_gpus(args, flags, context);
    }
    let machine = args.machine.machine(context)?;
    let mut resolved: Resolved = args.settings.resolved_with_note(flags, &machine, context)?;
    weight_files::check_architectures(&mut resolved.config, &context.runtime)?;
    let config = &resolved.config;
    let effective_batch = args.effective_batch.map_or(config.samples_of_a_step(), usize::from);
    let search = || search_for(&resolved, &machine, effective_batch, args.may_shrink());
    let searched = context.runtime.with_patience(SEARCHING, search)?;
    let device = machine.offer().device;
    let Some(best) = searched.fitting.first() else {
        context.runtime.warn(found::nothing_fits(&searched, &device));
        context.output.record(
            &json!({ "kind": "preset", "fits": false, "smallest": searched.smallest.as_ref().map(found::record) }),
        )?;
        return Ok(CommandEnd::No);
    };
    let chosen = config.with_sets(&best.sets)?.divided_among(machine.num_ranks())?;
    let toml = chosen.to_commented_preset(&best.plan);
    context.output.line(shown(&toml))?;
    let learning_rate = suggestion(&resolved, chosen.samples_of_a_step());
    let even = || advice::even_batches(&resolved, &machine, best, args.may_shrink());
    let even = context.runtime.with_patience("comparing batches that the GPUs divide evenly", even)?;
    let of = args.samples.map(|samples| Samples::even(samples, chosen.data.questions_per_image));
    let training = of.zip(best.step_seconds()).map(|(of, seconds)| Duration::new(of, &chosen.train, seconds));
    let step = (chosen.train.micro_batch, chosen.train.accumulation);
    let mut notes = vec![best.plan.summary(), found::described(best, step, machine.num_ranks())];
    notes.extend(training.map(|training| training.text(&machine.speed_source())));
    notes.extend(best.step_seconds().is_none().then(|| no_rates(&machine).to_owned()));
    notes.extend(EvenBatch::text(&even, &machine));
    notes.extend(found::notes(config, best, &chosen, machine.num_ranks()));
    notes.extend(found::not_made(&searched));
    notes.extend(learning_rate.as_ref().map(Suggestion::text));
    notes.push(next_step(context, &machine));
    context.runtime.note(notes.join("\n"));
    context.output.record(&json!({
        "kind": "preset",
        "fits": true,
        "choice": found::choice(best),
        "plan": best.plan,
        "tried": best.tried,
        "runner_up": searched.fitting.get(1).map(found::record),
        "considered": searched.num_considered,
        "planned": searched.num_planned,
        "learning_rate": learning_rate,
        "even_batches": even,
        "training": training,
        "toml": toml,
    }))?;
    Ok(CommandEnd::Done)
}

/// A table of all GPUs.
fn all_gpus(args: &Args, flags: Vec<FlagSet>, context: &Context) -> CommandResult {
    let chosen = [("--preset", args.settings.preset.is_some()), ("--config", args.settings.config.is_some())];
    let batch = ("--effective-batch", args.effective_batch.is_some());
    if let Some((flag, _)) = chosen.into_iter().chain([batch]).find(|(_, given)| *given) {
        let hint = "leave it out, or name one GPU; `--set` changes the settings of all";
        return Err(Error::config(flag, "belongs to one GPU: each has its own built-in preset here", hint).into());
    }
    let count = args.machine.ranks();
    let sets = args.settings.sources("", flags).sets;
    let found = advice::all_gpus(&sets, args.samples, count, context.progress.as_ref())?;
    context.output.line(OnGpu::table(&found).trim_end())?;
    let epochs = found.iter().find_map(|on| on.training).map(|training| format!(", {} epochs in all", training.epochs));
    let gpus = if count > 1 {
        format!("{count} GPUs of a kind with {count} times the samples in a step, ")
    } else {
        String::new()
    };
    let search = ShellCommand::new("prsmed preset").flag("--gpu", found.first().map(|on| on.gpu));
    let note = format!(
        "{gpus}times predicted from published rates, without validation{}; GPUs without published rates are left out\n\
         next: `{search}` searches settings for this GPU, often faster ones",
        epochs.unwrap_or_default()
    );
    context.runtime.note(note);
    context.output.record(&json!({ "kind": "preset", "gpus": found, "count": count }))?;
    Ok(CommandEnd::Done)
}

/// The settings as they are printed: on a terminal without the plan, which a file has as comments.
fn shown(toml: &str) -> &str {
    let end_of_plan = toml.find("\n\n").filter(|_| toml.starts_with('#') && io::stdout().is_terminal());
    end_of_plan.map_or(toml, |end| &toml[end + 2..])
}

/// How the settings are saved and used.
fn next_step(context: &Context, machine: &Machine) -> String {
    let count = machine.num_ranks();
    let use_of = |file: &Path| {
        let flags = ShellCommand::new("--config").path(file);
        let flags = flags.flag("--gpus", Some(count.to_string()).filter(|_| count > 1));
        format!("add `{flags}` to `prsmed train`")
    };
    // where a shell has redirected standard output
    let saved = fs::read_link("/proc/self/fd/1").ok().filter(|file| file.is_file() && !context.output.is_json());
    if let Some(file) = saved {
        return format!("next: {}", use_of(&file));
    }
    let file = next::free("preset", ".toml");
    let save = format!("{} > {}", context.command, path_word(&file));
    format!("next: save the settings with `{save}`, then {}", use_of(&file))
}

/// The fastest batch of the generator that fits.
fn augment(args: &Args, context: &Context) -> CommandResult {
    if args.effective_batch.is_some() {
        let hint = "leave it out: the search chooses the batch";
        return Err(Error::config("--effective-batch", "is for training, not for `--task augment`", hint).into());
    }
    let machine = args.machine.machine(context)?;
    let run: AugmentRun = args.settings.resolved_with_note(args.side_of("augment"), &machine, context)?.config;
    let sizes = generator::planned(&run, &context.runtime)?;
    fitted(&run, &sizes, (Job::Augment, &machine), args, context, |_| Vec::new())
}

/// The fastest settings of a fine-tuning that fit.
fn finetune(args: &Args, context: &Context) -> CommandResult {
    let machine = args.machine.machine(context)?;
    let mut run: FinetuneRun = args.settings.resolved_with_note(args.side_of("finetune"), &machine, context)?.config;
    if let Some(wanted) = args.effective_batch {
        (run.train.micro_batch, run.train.accumulation) = (1, wanted.into());
    }
    let sizes = generator::planned_to_finetune(&run, &context.runtime)?;
    fitted(&run, &sizes, (Job::Train, &machine), args, context, |fitted| finetuning::changes(&run, fitted))
}

/// Prints the fastest settings that fit, or what would help.
fn fitted<T: Fitted>(
    settings: &T,
    facts: &T::Facts,
    (job, machine): (Job, &Machine),
    args: &Args,
    context: &Context,
    changes: impl FnOnce(&T) -> Vec<String>,
) -> CommandResult {
    let Some((fitted, plan)) = settings.fitted(facts, machine, args.may_shrink())? else {
        let least = settings.plan_of(facts, job, machine)?;
        let helping = settings.remedies(facts, job, machine, &least);
        context.runtime.warn(format!(
            "nothing fits {} with 3 % of its memory kept free: {}\n{}",
            machine.offer().device,
            least.summary(),
            remedy_lines(&helping)
        ));
        context.output.record(&json!({ "kind": "preset", "fits": false, "smallest": least, "remedies": helping }))?;
        return Ok(CommandEnd::No);
    };
    let toml = fitted.to_commented_preset(&plan);
    context.output.line(shown(&toml))?;
    let notes: Vec<String> = std::iter::once(plan.summary()).chain(changes(&fitted)).collect();
    context.runtime.note(notes.join("\n"));
    let record = json!({ "kind": "preset", "fits": true, "settings": fitted, "plan": plan, "toml": toml });
    context.output.record(&record)?;
    Ok(CommandEnd::Done)
}
