//! `prsmed train`: plans memory, then trains.

use super::args::{LeakArgs, PlanArgs, ResumeArgs, RootArgs, SettingsArgs, assignments};
use super::context::Context;
use super::memory::ProfileArgs;
use super::plan;
use super::ranks::GpuArgs;
use super::report::{CommandEnd, CommandResult};
use crate::config::{Resolved, RunConfig};
use crate::hub::HubOptions;
use crate::job::rows::Rows;
use crate::job::training::{ExampleQuestion, SegmenterTraining, TrainedSegmenter};
use crate::job::{self, How, training_settings};
use crate::runtime::Runtime;
use crate::segment::task::SCORE;
use crate::segment::weight_files;
use crate::shell::ShellCommand;
use crate::tensor::{self, Device, ledger, memory};
use crate::trainer::{self, Ranks};
use crate::units::Bytes;
use crate::{Error, Result};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Train on a data root
///
/// Leaves a run folder with `last/` and `best/`, each complete in itself, and `report.html` with the curves. Ctrl-C saves
/// and stops; `--resume` continues.
///
/// Memory is planned before anything is loaded. A training that cannot fit is refused (`--no-plan` skips this check).
/// Without `--preset` and `--config` the fastest settings of the full model that fit this machine's GPU are searched;
/// without a GPU the preset `tiny` is used.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed train --data-root data --preset tiny --out runs/a
  prsmed train --data-root data --out runs/a --resume
  prsmed train --data-root data --extra made --synthetic-ratio 0.5 --out runs/b
  prsmed train --data-root data --out runs/a --profile-memory every=100
  prsmed train --data-root data --preset gpu-24gb --out runs/c
  prsmed train --data-root data --check --gpu \"RTX A5000\"")]
pub(super) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Data root of synthetic training rows, for example from `prsmed augment`; may be repeated
    #[arg(long, value_name = "DIR")]
    extra: Vec<PathBuf>,
    #[command(flatten)]
    leak: LeakArgs,
    /// Same as `--set data.synthetic_ratio=R`: synthetic rows for each real one in an epoch, or all
    #[arg(long, value_name = "R")]
    synthetic_ratio: Option<String>,
    /// Same as `--set data.labels=LIST`: labels of masks that are foreground, for example 1,3
    #[arg(long, value_name = "LIST")]
    labels: Option<String>,
    #[command(flatten)]
    settings: SettingsArgs,
    /// Run folder [default: runs/train]
    #[arg(long, value_name = "DIR", default_value = "runs/train", hide_default_value = true)]
    out: PathBuf,
    /// Start from the weights of a trained run: a run folder, a checkpoint, a published folder or `hub:owner/name`
    ///
    /// Also for data with other classes; the training says what was taken and what is new. Sizes of the model and of its
    /// adapters are those of the run. Use a lower learning rate than for a new run. A run that `--resume` continues keeps its
    /// own weights.
    #[arg(long, value_name = "RUN")]
    init: Option<PathBuf>,
    #[command(flatten)]
    resume: ResumeArgs,
    /// Cross-validation: fold K of N, for example 0/5; same as `--set data.fold=K --set data.folds=N`
    #[arg(long, value_name = "K/N", value_parser = fold)]
    fold: Option<(usize, usize)>,
    /// Same as `--set train.seed=N`
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Same as `--set train.precision=P`: fp32, bf16 or fp16
    #[arg(long, value_name = "P")]
    precision: Option<String>,
    /// Same as `--set train.graph=G`: auto, on or off
    #[arg(long, value_name = "G")]
    graph: Option<String>,
    /// Same as `--set data.cache_vision=WHERE`: off, ram or disk
    #[arg(long, value_name = "WHERE")]
    cache_vision: Option<String>,
    #[command(flatten)]
    pub(super) gpus: GpuArgs,
    #[command(flatten)]
    plan: PlanArgs,
    /// Most that tensors may take, for example 20gb; plans ignore it
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<Bytes>,
    /// Check all that the training needs and start nothing: settings, rows, weights on this disk, memory plan
    ///
    /// With `--gpu` it plans for the GPU of another machine, so it can run on the login node of a cluster. Nothing is
    /// downloaded or written. Exit code 0 if the training can start.
    #[arg(long, conflicts_with = "print_config")]
    check: bool,
    /// With `--check`: the GPU that will train, as in `prsmed plan --gpu`
    #[arg(long, value_name = "GPU")]
    gpu: Option<String>,
    /// Print the resolved settings as TOML and stop
    #[arg(long)]
    pub(super) print_config: bool,
    #[command(flatten)]
    profile: ProfileArgs,
}

impl Args {
    /// True if nothing is trained.
    pub(super) fn only_checks(&self) -> bool {
        self.check || self.gpu.is_some()
    }

    fn how<'a>(&self, runtime: &'a Runtime) -> Result<How<'a>> {
        Ok(How { resume: self.resume.resume(), plans: self.plan.is_made(), ..How::new(&self.out, runtime)? })
    }

    fn rows(&self) -> Result<Rows> {
        Ok(Rows { allow_leak: self.leak.allow_leak, ..self.data.rows(&self.extra)? })
    }
}

fn fold(text: &str) -> Result<(usize, usize), String> {
    let numbers = text.split_once('/').and_then(|(fold, folds)| Some((fold.parse().ok()?, folds.parse().ok()?)));
    numbers.filter(|(fold, folds)| fold < folds).ok_or_else(|| "use K/N with K from 0 to N - 1, for example 0/5".into())
}

/// Checks what a training needs, with `--check`.
pub(super) fn check(args: &Args, context: &Context) -> CommandResult {
    if !args.check {
        let hint = "leave it out: the first GPU is used if there is one, and CUDA_VISIBLE_DEVICES chooses another";
        return Err(Error::config("--gpu", "is the GPU that `--check` plans for", hint).into());
    }
    // the compute node may have no network
    let hub = HubOptions { offline: true, ..context.env.hub.clone() };
    let runtime = context.runtime.clone().with_hub(hub);
    let mut how = args.how(&runtime)?;
    if let Some(gpu) = &args.gpu {
        how.machine = plan::named_machine(gpu)?;
    }
    how.machine = how.machine.with_ranks(0, args.gpus.count());
    let mut resolved = resolve(args, &how, context)?;
    if !how.resume.resumes() {
        weight_files::check_architectures(&mut resolved.config, &runtime)?;
    }
    let rows = args.rows()?;
    job::check(&how, |how| SegmenterTraining::new(resolved, &rows, how))?;
    let device = how.machine.offer().device;
    let checked = "settings, rows, and names and shapes of the weights were checked";
    let memory = if how.memory.has_plan() { "memory was planned" } else { "memory was not planned" };
    context.output.line(format!("the training can start on {device}: {checked}; {memory}"))?;
    context.output.record(&json!({ "kind": "check", "ready": true, "device": device }))?;
    Ok(CommandEnd::Done)
}

/// Trains as one of the processes `ranks`.
pub(super) fn run(args: &Args, ranks: Ranks, context: &Context) -> CommandResult {
    let mut how = args.how(&context.runtime)?.with_ranks(ranks);
    let resolved = resolve(args, &how, context)?;
    how.profile = args.profile.settings(&args.out)?;
    if args.print_config {
        return context.done(resolved.to_toml(), &resolved.config);
    }
    how.memory_limit = args.memory_limit;
    how.memory = context.memory.clone();
    let rows = args.rows()?;
    let trained = job::run(&how, |how| SegmenterTraining::new(resolved, &rows, how))?;
    if !ranks.is_main() {
        return Ok(CommandEnd::Done);
    }
    let profile = how.profile.as_ref().map(|profile| profile.out.as_path());
    print_result(&trained, profile, args, context)
}

/// How many steps were trained by this command and, after a resume, in all.
pub(super) fn steps_text(outcome: &trainer::TrainingOutcome) -> String {
    let trainer::TrainingOutcome { steps, steps_now, samples_now, train_seconds, .. } = outcome;
    let speed = || format!("{:.2} images/s", *samples_now as f64 / train_seconds.max(1e-9));
    match (steps_now, steps) {
        (0, all) => format!("nothing was left to train: all {all} steps are done"),
        (now, all) if now == all => format!("trained {all} steps at {}", speed()),
        (now, all) => format!("trained {now} steps at {}, {all} in all", speed()),
    }
}

/// Prints the result of the run.
fn print_result(trained: &TrainedSegmenter, profile: Option<&Path>, args: &Args, context: &Context) -> CommandResult {
    let TrainedSegmenter { run, plan, .. } = trained;
    let (outcome, num_skipped) = (&run.outcome, run.task.num_skipped());
    let peak = memory::overall_peak(tensor::default_device());
    let images_per_s = outcome.samples_now as f64 / outcome.train_seconds.max(1e-9);
    let waited = outcome.data_wait_seconds / outcome.train_seconds.max(1e-9) * 100.0;
    let waited = if outcome.steps_now == 0 { String::new() } else { format!(", data wait {waited:.0} %") };
    let smaller = outcome
        .reduced_micro_batch
        .map_or_else(String::new, |most| format!(", micro-batches of {most} after memory ran out with larger ones"));
    let count = |number: u64, what: &str| if number == 0 { String::new() } else { format!(", {what}: {number}") };
    let skipped = count(outcome.skipped_steps, "steps skipped because of NaN or infinity")
        + &count(num_skipped as u64, "samples skipped because their files cannot be read");
    context.output.line(format!(
        "{}{waited}, peak of tensors {peak}{smaller}{skipped}\n{}\nrun folder: {}{}",
        steps_text(outcome),
        best_line(outcome.best_score, &outcome.best_values),
        args.out.display(),
        next_command(trained, args).map_or_else(String::new, |next| format!("\nnext: {next}"))
    ))?;
    context.output.record(&json!({
        "kind": "result",
        "run": args.out,
        "steps": outcome.steps,
        "steps_now": outcome.steps_now,
        "best_score": outcome.best_score,
        "best_values": outcome.best_values.iter().cloned().collect::<BTreeMap<String, f64>>(),
        "stopped_early": outcome.stopped_early,
        "reduced_micro_batch": outcome.reduced_micro_batch,
        "skipped_steps": outcome.skipped_steps,
        "skipped_samples": num_skipped,
        "images_per_s": images_per_s,
        "train_seconds": outcome.train_seconds,
        "data_wait_seconds": outcome.data_wait_seconds,
        "memory": {
            "measured": measured()?,
            "planned": plan,
            "profile": profile,
        },
    }))?;
    Ok(CommandEnd::Done)
}

/// Validation Dice and score of `best/`. The score alone is not a Dice.
fn best_line(score: Option<f64>, values: &[(String, f64)]) -> String {
    let Some(score) = score else { return "not validated: the run has no `best/`".to_owned() };
    let dice = values.iter().find(|(name, _)| name == "dice");
    match (dice, values.is_empty()) {
        (Some((_, dice)), _) => format!("best/: validation Dice {dice:.4}; score {score:.4} ({SCORE})"),
        (None, true) => format!("best/: score {score:.4} ({SCORE})"),
        (None, false) => {
            format!("best/: no Dice, as no validation image shows its target; score {score:.4} (answer-token accuracy)")
        }
    }
}

/// The command that a training is usually followed by.
fn next_command(trained: &TrainedSegmenter, args: &Args) -> Option<ShellCommand> {
    if trained.has_test {
        let command = args.data.add_to(ShellCommand::new("prsmed eval").path(&args.out));
        return Some(command.flag("--split", ["test"]));
    }
    let ExampleQuestion { image, question } = trained.example.as_ref()?;
    let command = ShellCommand::new("prsmed predict").path(&args.out);
    Some(command.flag("--image", [image]).flag("--question", [question]))
}

/// Memory by the ledger, and resident memory of this process: its peak and its value before the first tensor.
fn measured() -> Result<serde_json::Value> {
    let reading = memory::read(Device::Cpu)?;
    let mut measured = serde_json::to_value(ledger::usage()).expect("plain values serialise");
    // on a GPU its own allocator's
    measured["allocated_peak"] = json!(memory::overall_peak(tensor::default_device()));
    measured["reserved_peak"] = json!(ledger::window().reserved_peak);
    measured["resident_peak"] = json!(reading.system.resident_peak);
    measured["resident_at_start"] = json!(memory::resident_at_start());
    Ok(measured)
}

fn resolve(args: &Args, how: &How, context: &Context) -> Result<Resolved> {
    let init = args.init.as_ref().filter(|_| how.resume.settings(&args.out).is_none());
    let init = init.map(|run| training_settings::of_init(run, how.runtime)).transpose()?.unwrap_or_default();
    let flags = [
        ("train.seed", "--seed", args.seed.map(|seed| seed.to_string())),
        ("train.precision", "--precision", args.precision.clone()),
        ("train.graph", "--graph", args.graph.clone()),
        ("data.cache_vision", "--cache-vision", args.cache_vision.clone()),
        ("data.labels", "--labels", args.labels.clone()),
        ("data.fold", "--fold", args.fold.map(|(fold, _)| fold.to_string())),
        ("data.folds", "--fold", args.fold.map(|(_, folds)| folds.to_string())),
        ("data.synthetic_ratio", "--synthetic-ratio", args.synthetic_ratio.as_ref().map(ToString::to_string)),
    ];
    let mut given = args.settings.sources("tiny", assignments(flags));
    given.sets.splice(0..0, init.into_iter().map(|setting| (setting, "--init".to_owned())));
    // settings that are newer than the run's file have their defaults
    let sources = how.resume.sources::<RunConfig>(&args.out, given, context.progress.as_ref())?;
    let nothing_asked = sources.preset.is_none() && sources.file.is_none();
    let has_gpu = args.gpu.is_some() || tensor::default_device() != Device::Cpu;
    if nothing_asked && has_gpu {
        let found = training_settings::for_this_gpu(sources.sets, how, !args.print_config)?;
        return found.fit_with_note(&how.machine, how.runtime);
    }
    if nothing_asked {
        context.runtime.note(
            "no usable GPU (`prsmed doctor` explains why): using preset `tiny`, a small model from random \
                    weights; `--preset cpu` trains the full model in host memory, slowly",
        );
    }
    let resolved = sources.resolve()?;
    if !args.print_config && args.gpu.is_none() {
        training_settings::refuse_gpu_preset_without_gpu(&resolved, how.runtime)?;
    }
    resolved.fit_with_note(&how.machine, how.runtime)
}

#[cfg(test)]
#[path = "train_tests.rs"]
mod tests;
