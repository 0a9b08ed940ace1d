//! `prsmed train`.

use super::claim::Claim;
use super::data::RootArgs;
use super::memory::ProfileArgs;
use super::report::Outcome;
use super::{Context, plan, preset, sets_of};
use crate::augment::export;
use crate::config::planned::remedies;
use crate::config::{Resolved, RunConfig, Sources};
use crate::data::manifest::Manifest;
use crate::data::split;
use crate::event::{Event, Observer, Silent};
use crate::plan::rehearse::Job;
use crate::plan::report::{Machine, Plan};
use crate::segment::fit::{self, Recipe};
use crate::segment::task::SegmentTask;
use crate::segment::{Assembly, sight};
use crate::tensor::weights::{readable_folder, write_bytes};
use crate::tensor::{self, Device, ledger, memory};
use crate::trainer::graph::settling_steps;
use crate::trainer::run::Session;
use crate::units::Bytes;
use crate::{Error, Result, trainer};
use anyhow::Context as _;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Train on a data root
///
/// Leaves a run folder with `last/` and `best/`, each complete in itself. Ctrl-C saves and stops; `--resume` goes on.
///
/// Memory is planned before anything is loaded, and what cannot fit is refused (`--no-plan` starts it all the same).
/// Without `--preset` and `--config` the fastest settings of the full model that fit this machine's card are searched;
/// without a card the preset `tiny` is used.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed train --data-root data --preset tiny --out runs/a
  prsmed train --data-root data --out runs/a --resume
  prsmed train --data-root data --extra made --synthetic-ratio 0.5 --out runs/b
  prsmed train --data-root data --out runs/a --profile-memory every=100
  prsmed train --data-root data --preset full --set model.image_encoder=tinysam_42.3.pth")]
pub(super) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Data root of synthetic training rows, for example from `prsmed augment`; may be repeated
    #[arg(long, value_name = "DIR")]
    extra: Vec<PathBuf>,
    /// Same as `--set data.synthetic_ratio=R`: synthetic rows for each real one in an epoch, or all
    #[arg(long, value_name = "R")]
    synthetic_ratio: Option<String>,
    /// Named settings: tiny, full, cpu, gpu-24gb, ...
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// TOML file over the preset
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One setting, for example `train.micro_batch=4`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Run folder [default: runs/train]
    #[arg(long, value_name = "DIR", default_value = "runs/train", hide_default_value = true)]
    out: PathBuf,
    /// Continue from `last/` in the run folder
    #[arg(long)]
    resume: bool,
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
    /// Do not plan memory before the run, and start even what would not fit
    #[arg(long)]
    no_plan: bool,
    /// Most that tensors may take, for example 20gb; plans ignore it
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<Bytes>,
    /// Print the resolved settings as TOML and stop
    #[arg(long)]
    print_config: bool,
    #[command(flatten)]
    profile: ProfileArgs,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let resolved = resolve(args, context)?;
    let profile = args.profile.settings(&args.out)?;
    if args.print_config {
        context.output.line(resolved.to_toml())?;
        context.output.record(&resolved.config)?;
        return Ok(Outcome::Done);
    }
    let claim = || Claim::on("--out", &args.out, context.progress.as_ref());
    // a run that is there is refused before the data is read; bad data leaves no folder behind
    let early = args.out.is_dir().then(claim).transpose()?;
    if early.is_some() {
        checkpoint_to_resume(args, &Silent)?;
    }
    let manifest = read_data(args, &resolved.config, context)?;
    let _claim = early.map_or_else(claim, Ok)?;
    let resume_from = checkpoint_to_resume(args, context.progress.as_ref())?;
    if let Some(profile) = &profile {
        profile.check()?;
    }
    let machine = plan::training_machine(context);
    if let Some(limit) = args.memory_limit {
        limit_memory(limit, &machine)?;
    }
    if !args.no_plan {
        refuse_what_cannot_fit(&resolved.config.with_cache_for(&manifest), &machine, context)?;
    }
    let toml = resolved.to_toml();
    let config = resolved.config;
    let recipe = Recipe {
        model: config.model.clone(),
        lora: config.lora,
        train: config.train.clone(),
        data: config.data.clone(),
        text: toml.clone(),
    };
    let assembly = build(&recipe, &manifest, resume_from.as_deref(), context).context("cannot set up the model")?;
    for warning in &assembly.warnings {
        context.progress.on(&Event::Warning(warning.clone()));
    }
    let planned_config = config.with_cache_for(&manifest);
    let kept = sight::keep(&assembly, &config.data, context.env.cache.as_deref(), context.progress.as_ref())?;
    if kept.is_some() {
        let most = Bytes((planned_config.data.cache_vision_mib as u64) << 20);
        context.progress.on(&Event::Note(format!("pictures of this run fill at most {most} of vision features")));
    }
    let (train, data) = (config.train.clone(), config.data.clone());
    let task = SegmentTask::new(assembly, &Arc::new(manifest), train, data, toml.clone(), kept)?;
    if let (real, synthetic @ 1..) = task.rows_of_an_epoch() {
        let text = format!("an epoch has {real} real rows and {synthetic} synthetic ones");
        context.progress.on(&Event::Note(text));
    }
    if task.longest().text_tokens >= config.model.max_text_tokens {
        let text = "some answers are cut: their texts have more ids than `model.max_text_tokens`";
        context.progress.on(&Event::Warning(text.into()));
    }
    if resume_from.is_none() {
        task.calibrate()?;
    }
    write_bytes(&args.out.join("config.toml"), toml.as_bytes())?;
    let planned = if args.no_plan { None } else { plan_of_data(&planned_config, &task, &machine, context) };
    let observer = PlanCheck {
        inner: context.progress.as_ref(),
        // what is left open is planned without
        planned: planned
            .as_ref()
            .filter(|plan| plan.recorded.is_none_or(|recorded| !recorded.fits))
            .map(|plan| plan.allocated_peak),
        settled: SETTLED_STEPS.max(settling_steps(config.train.records(), tensor::default_device())),
        steps: AtomicU64::new(0),
    };
    let session = Session {
        config: &config.train,
        folder: &args.out,
        resume: resume_from.is_some(),
        profile: profile.as_ref(),
        observer: &observer,
        interrupt: &context.interrupt,
        has_room_for_graphs: planned.as_ref().is_some_and(Plan::has_room_for_graphs),
    };
    let outcome = trainer::run(&task, &session)?;
    tell(&outcome, planned.as_ref(), profile.as_ref().map(|profile| profile.out.as_path()), args, context)
}

/// Before the first tensor on a card.
fn limit_memory(limit: Bytes, machine: &Machine) -> Result<()> {
    let total = if let Machine::Cuda(budget, _) = machine { Bytes(budget.total_bytes) } else { limit };
    memory::set_limit(tensor::default_device(), limit, total)
}

/// The run's result.
fn tell(
    outcome: &trainer::Outcome,
    planned: Option<&Plan>,
    profile: Option<&Path>,
    args: &Args,
    context: &Context,
) -> anyhow::Result<Outcome> {
    let peak = memory::overall_peak(tensor::default_device());
    #[expect(clippy::cast_precision_loss, reason = "counts are small")]
    let images_per_s = outcome.samples_now as f64 / outcome.train_seconds.max(1e-9);
    let waited = outcome.data_wait_seconds / outcome.train_seconds.max(1e-9) * 100.0;
    let smaller = outcome
        .reduced_micro_batch
        .map_or_else(String::new, |most| format!(", micro-batches of {most} after memory ran out with larger ones"));
    context.output.line(format!(
        "trained {} steps at {images_per_s:.2} images/s, data wait {waited:.0} %, peak of tensors {}{smaller}; best score {}; {}",
        outcome.steps,
        peak,
        outcome.best_score.map_or_else(|| "not measured".to_owned(), |score| format!("{score:.4}")),
        args.out.display()
    ))?;
    context.output.record(&json!({
        "kind": "result",
        "run": args.out,
        "steps": outcome.steps,
        "steps_now": outcome.steps_now,
        "best_score": outcome.best_score,
        "stopped_early": outcome.stopped_early,
        "reduced_micro_batch": outcome.reduced_micro_batch,
        "images_per_s": images_per_s,
        "train_seconds": outcome.train_seconds,
        "data_wait_seconds": outcome.data_wait_seconds,
        "memory": {
            "measured": measured()?,
            "planned": planned,
            "profile": profile,
        },
    }))?;
    Ok(Outcome::Done)
}

/// The ledger's figures, and the most resident memory of this process with what it had before its first tensor.
fn measured() -> Result<serde_json::Value> {
    let reading = memory::read(Device::Cpu)?;
    let mut measured = serde_json::to_value(ledger::usage()).expect("plain values serialise");
    // on a card its own allocator's
    measured["allocated_peak"] = json!(memory::overall_peak(tensor::default_device()));
    measured["reserved_peak"] = json!(ledger::window().reserved_peak);
    measured["resident_peak"] = json!(reading.system.resident_peak);
    measured["resident_at_start"] = json!(memory::at_start());
    Ok(measured)
}

/// Says what the longest texts that the settings allow need, and stops when that cannot fit.
pub(super) fn refuse_what_cannot_fit(config: &RunConfig, machine: &Machine, context: &Context) -> Result<()> {
    let plan = match config.plan(Job::Train, machine) {
        // setting up the model says more about what is wrong with its files
        Err(Error::Weights { .. } | Error::Io { .. }) => return Ok(()),
        // the CPU's operators are tried one by one to learn what they need
        Err(error @ Error::OutOfMemory { .. }) => {
            context.progress.on(&Event::Warning(format!("no memory plan: {error}")));
            return Ok(());
        }
        plan => plan?,
    };
    context.progress.on(&Event::Note(format!("memory plan for the longest texts allowed\n{}", plan.table())));
    if plan.fits {
        context.memory.remember(config, machine, &plan);
        return Ok(());
    }
    let remedies = remedies(config, Job::Train, machine, &plan);
    context.progress.on(&Event::Note(plan::remedy_lines(&remedies)));
    let helps = remedies.iter().find(|remedy| remedy.fits).map_or_else(
        || "`prsmed preset` searches for settings that fit".to_owned(),
        |remedy| format!("`{}` fits", remedy.flags()),
    );
    let hint = format!("{helps}; `--no-plan` starts all the same");
    Err(Error::config("train", plan.verdict(), hint))
}

/// The plan with the data's own longest texts and the model's own sizes.
fn plan_of_data(config: &RunConfig, task: &SegmentTask, machine: &Machine, context: &Context) -> Option<Plan> {
    let sizes = &task.assembly().description.sizes;
    match config.plan_sized(Job::Train, sizes, task.longest(), machine) {
        Ok((_, plan)) => Some(plan),
        Err(error) => {
            context.progress.on(&Event::Warning(format!("no memory plan of this data: {error}")));
            None
        }
    }
}

/// Compares the plan with what the first steps took.
struct PlanCheck<'a> {
    inner: &'a dyn Observer,
    planned: Option<Bytes>,
    /// The step of this call that is compared.
    settled: u64,
    /// Steps of this call.
    steps: AtomicU64,
}

/// By then the optimizer's state exists and a step after that has run.
const SETTLED_STEPS: u64 = 3;

impl Observer for PlanCheck<'_> {
    fn on(&self, event: &Event) {
        self.inner.on(event);
        let (Event::Step(report), Some(Bytes(planned))) = (event, self.planned) else { return };
        let done = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        let is_last = report.step == report.total_steps && done < self.settled;
        if (done == self.settled || is_last) && report.allocated_peak > 0 {
            #[expect(clippy::cast_precision_loss, reason = "two digits are shown")]
            let percent = (report.allocated_peak as f64 / planned as f64 - 1.0) * 100.0;
            let measured = Bytes(report.allocated_peak);
            let text =
                format!("tensors at their peak: planned {}, measured {measured} ({percent:+.1} %)", Bytes(planned));
            self.inner.on(&Event::Note(text));
        }
    }
}

fn resolve(args: &Args, context: &Context) -> Result<Resolved> {
    let saved = args.out.join("config.toml");
    // a resumed run keeps its settings unless told otherwise
    let file = match &args.config {
        None if args.resume && args.preset.is_none() && saved.exists() => Some(saved),
        other => other.clone(),
    };
    let mut sets = sets_of(&args.sets, []);
    let flags = [
        ("train.seed", "--seed", args.seed.map(|seed| seed.to_string())),
        ("train.precision", "--precision", args.precision.clone()),
        ("train.graph", "--graph", args.graph.clone()),
        ("data.cache_vision", "--cache-vision", args.cache_vision.clone()),
        ("data.synthetic_ratio", "--synthetic-ratio", args.synthetic_ratio.as_ref().map(ToString::to_string)),
    ];
    for (key, flag, value) in flags {
        sets.extend(value.map(|value| (format!("{key}={value}"), flag.to_owned())));
    }
    let nothing_asked = args.preset.is_none() && file.is_none();
    if nothing_asked && tensor::default_device() != Device::Cpu {
        return preset_for_this_card(sets, context);
    }
    if nothing_asked {
        let text = "no graphics card: preset `tiny`, a small model from random weights; `--preset cpu` trains the full \
                    model in host memory, slowly";
        context.progress.on(&Event::Note(text.into()));
    }
    Sources { preset: args.preset.clone(), default_preset: "tiny".into(), file, sets }.resolve()
}

/// The fastest settings of the full model for the card of this machine.
fn preset_for_this_card(sets: Vec<(String, String)>, context: &Context) -> Result<Resolved> {
    let resolve =
        |sets: Vec<(String, String)>| Sources { default_preset: "full".into(), sets, ..Sources::default() }.resolve();
    let full = resolve(sets.clone())?;
    let machine = plan::training_machine(context);
    let found = preset::search_for(&full, &machine, full.config.samples_of_a_step(), true)?;
    let Some(best) = found.fitting.first() else {
        let reason = preset::nothing_fits(&found, &machine.offer().device);
        return Err(Error::config(
            "train",
            reason,
            "use a larger card, or `--preset` and `--no-plan` to try all the same",
        ));
    };
    let config = full.config.with(&best.choice);
    let card = machine.offer().device;
    // what the user sets wins; the plan that follows says whether it fits
    let chosen = config.changes_from(&full.config).into_iter();
    let mut all: Vec<_> = chosen.map(|assignment| (assignment, format!("preset for {card}"))).collect();
    all.extend(sets);
    resolve(all)
}

/// The checkpoint to resume from. A run that is there already is continued on request only.
fn checkpoint_to_resume(args: &Args, observer: &dyn Observer) -> Result<Option<PathBuf>> {
    let out = &args.out;
    let last = out.join("last");
    let checkpoint = readable_folder(&last).ok();
    if args.resume {
        if checkpoint.is_none() {
            let note = format!("{} holds no checkpoint yet: starting from the beginning", out.display());
            observer.on(&Event::Note(note));
        }
        return Ok(checkpoint);
    }
    if checkpoint.is_some() {
        let hint = "add `--resume` to continue it, or choose another `--out`";
        return Err(Error::config("--out", format!("`{}` already holds a run", out.display()), hint));
    }
    Ok(None)
}

fn read_data(args: &Args, config: &RunConfig, context: &Context) -> Result<Manifest> {
    let mut manifest = args.data.open_with_extra(&args.extra)?;
    if config.train.validate_every_epochs > 0
        && config.data.val_frac > 0.0
        && let Some(cut) = split::ensure_val(&mut manifest, config.data.val_frac, config.train.seed)?
    {
        context.progress.on(&Event::Note(format!(
            "no `val` rows: {} of {} training pictures ({} rows) are kept for validation",
            cut.val_pictures, cut.pictures, cut.val_rows
        )));
    }
    let left_out = export::drop_pairs_of_held_out(&mut manifest)?;
    if left_out > 0 {
        let text = format!("{left_out} synthetic rows are left out: their sources are validation or test pictures");
        context.progress.on(&Event::Note(text));
    }
    Ok(manifest)
}

fn build(recipe: &Recipe, manifest: &Manifest, checkpoint: Option<&Path>, context: &Context) -> Result<Assembly> {
    let locate = |spec: &str| context.locate(spec);
    let around = context.surroundings(&locate);
    fit::assemble(recipe, manifest, checkpoint, around)
}
