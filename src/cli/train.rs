//! `prsmed train`: plans memory, then trains.

use super::args::{ResumeArgs, RootArgs, sets_of};
use super::context::Context;
use super::memory::ProfileArgs;
use super::mlflow::{MlflowArgs, recorded};
use super::plan::PRECISION;
use super::ranks::{GpuArgs, check_data, main_only};
use super::report::Outcome;
use super::run_lock::RunLock;
use super::{plan, preset};
use crate::config::learning_rate::suggestion;
use crate::config::{Resolved, RunConfig, Settings as _, Sources};
use crate::data::manifest::Split;
use crate::event::{Event, Observer};
use crate::hub::Spec;
use crate::plan::detect;
use crate::plan::dry_run::Job;
use crate::plan::report::{Machine, Plan};
use crate::report::{self, training};
use crate::segment::setup::Build;
use crate::segment::task::{SCORE, SegmentTask};
use crate::segment::{Run, Training, init, needs};
use crate::tensor::{self, Device, Kind, ledger, memory};
use crate::trainer::graph::settling_steps;
use crate::trainer::{Ranks, Switch};
use crate::units::Bytes;
use crate::{Error, Result};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

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
  prsmed train --data-root data --preset gpu-24gb --out runs/c")]
pub(super) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Data root of synthetic training rows, for example from `prsmed augment`; may be repeated
    #[arg(long, value_name = "DIR")]
    extra: Vec<PathBuf>,
    /// Same as `--set data.synthetic_ratio=R`: synthetic rows for each real one in an epoch, or all
    #[arg(long, value_name = "R")]
    synthetic_ratio: Option<String>,
    /// Same as `--set data.labels=LIST`: labels of masks that are foreground, for example 1,3
    #[arg(long, value_name = "LIST")]
    labels: Option<String>,
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
    /// Start from the weights of a trained run: a run folder, a checkpoint, a published folder or `hub:owner/name`
    ///
    /// Also for data with other classes; the training says what was taken and what is new. Sizes of the model and of its
    /// adapters are those of the run. Use a lower learning rate than for a new run. A run that `--resume` continues keeps its
    /// own weights.
    #[arg(long, value_name = "RUN")]
    init: Option<PathBuf>,
    #[command(flatten)]
    resume: ResumeArgs,
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
    gpus: GpuArgs,
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
    #[command(flatten)]
    mlflow: MlflowArgs,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    args.gpus.run(args.print_config, context, |ranks| train(args, ranks, context))
}

fn train(args: &Args, ranks: Ranks, context: &Context) -> anyhow::Result<Outcome> {
    let machine = plan::training_machine(context)?.with_ranks(ranks.rank(), ranks.size());
    let resolved = resolve(args, ranks, &machine, context)?.fit_precision(PRECISION, &machine)?;
    let resolved = plan::noted(resolved, PRECISION, context);
    let profile = args.profile.settings(&args.out)?.filter(|_| ranks.is_main());
    if args.print_config {
        context.output.line(resolved.to_toml())?;
        context.output.record(&resolved.config)?;
        return Ok(Outcome::Done);
    }
    let mlflow = if ranks.is_main() { args.mlflow.connect(context)? } else { None };
    let lock = || RunLock::on("--out", &args.out, context.progress.as_ref());
    // an existing run is refused before the data is read; unusable data leaves no folder behind
    let early = (ranks.is_main() && args.out.is_dir()).then(lock).transpose()?;
    if ranks.is_main() {
        args.resume.check(&args.out)?;
    }
    if let Some(suggestion) = suggestion(&resolved, resolved.config.samples_of_a_step()) {
        context.progress.on(&Event::Note(suggestion.text()));
    }
    let (toml, mut config) = (resolved.to_toml(), resolved.config);
    if let Some(note) = config.train.divide_among(ranks.size())? {
        context.progress.on(&Event::Note(note));
    }
    let manifest = args.data.open_with_extra(&args.extra, context)?;
    let has_test = !manifest.rows_of(Split::Test).is_empty();
    check_data(ranks, &manifest)?;
    let training = Training::new(config.clone(), manifest, &args.out, &context.runtime)?.with_toml(toml.clone());
    let training = training.resume(args.resume.resumes()).with_ranks(ranks);
    let _run_lock = ranks.agree_on(main_only(ranks, || {
        let run_lock = early.map_or_else(lock, Ok)?;
        args.resume.adopt(&args.out)?;
        Ok(run_lock)
    }))?;
    let checkpoint = training.checkpoint()?.map(|(folder, _)| folder);
    if args.resume.resumes() && checkpoint.is_none() {
        let note = format!("{} contains no checkpoint yet: starting from the beginning", args.out.display());
        context.progress.on(&Event::Note(note));
    }
    let weights = match (&checkpoint, config.model.init.as_str()) {
        (None, init) if !init.is_empty() => Some(needs::checkpoint_of(&context.locate(init)?)?),
        _ => checkpoint,
    };
    if weights.is_none() {
        context.check_architectures(&config.model)?;
    }
    context.check_files(needs::of_training(&config.model, weights.as_deref())?)?;
    if let Some(profile) = &profile {
        profile.check()?;
    }
    if let Some(limit) = args.memory_limit {
        limit_memory(limit, &machine)?;
    }
    let planned_config = config.with_cache_for(training.manifest());
    if !args.no_plan {
        check_memory(&planned_config, &machine, context)?;
    }
    let prepared = training.prepare().map_err(|error| match error {
        Error::Data { .. } => error.into(),
        error => anyhow::Error::from(error).context("cannot set up the model"),
    })?;
    if prepared.task.has_feature_cache() {
        let most = Bytes((planned_config.data.cache_vision_mib as u64) << 20);
        context.progress.on(&Event::Note(format!("images of this run fill at most {most} of vision features")));
    }
    let plan = if args.no_plan { None } else { plan_of_data(&planned_config, &prepared.task, &machine, context) };
    let has_room = plan.as_ref().is_some_and(Plan::has_room_for_graphs);
    let prepared = prepared.with_profile(profile.as_ref()).with_room_for_graphs(has_room);
    let run = recorded(mlflow, (&args.out, args.resume.resumes()), &config, context, |progress| {
        let observer = PlanCheck::new(plan.as_ref(), config.train.graph_switch(), (progress.as_ref(), context));
        let run = prepared.run(&observer)?;
        if ranks.is_main() {
            write_report(&run, &toml, args, context);
        }
        Ok(run)
    })?;
    if !ranks.is_main() {
        return Ok(Outcome::Done);
    }
    let profile = profile.as_ref().map(|profile| profile.out.as_path());
    print_result(&run, (plan.as_ref(), profile), has_test, args, context)
}

/// Limits tensor memory; call before the first tensor on a GPU.
fn limit_memory(limit: Bytes, machine: &Machine) -> Result<()> {
    let total = if let Machine::Cuda(budget, _) = machine { Bytes(budget.total_bytes) } else { limit };
    memory::set_limit(tensor::default_device(), limit, total)
}

/// Writes `report.html` into the run folder. The training is done, so a failure is a warning only.
fn write_report(run: &Run, toml: &str, args: &Args, context: &Context) {
    let (outcome, device) = (&run.outcome, tensor::default_device());
    let facts = vec![
        ("prsmed".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("libtorch".to_owned(), tensor::libtorch_version()),
        ("device".to_owned(), format!("{device:?}")),
        ("time of this session".to_owned(), format!("{:.1} s", outcome.train_seconds)),
        ("peak memory of tensors".to_owned(), memory::overall_peak(device).to_string()),
    ];
    if let Err(error) = training::write(&args.out, toml, &facts) {
        context.progress.on(&Event::Warning(format!("no {}: {error}", report::REPORT_FILE)));
    }
}

/// Prints the result of the run.
fn print_result(
    run: &Run,
    (planned, profile): (Option<&Plan>, Option<&Path>),
    has_test: bool,
    args: &Args,
    context: &Context,
) -> anyhow::Result<Outcome> {
    let (outcome, num_skipped) = (&run.outcome, run.task.num_skipped());
    let peak = memory::overall_peak(tensor::default_device());
    let images_per_s = outcome.samples_now as f64 / outcome.train_seconds.max(1e-9);
    let waited = outcome.data_wait_seconds / outcome.train_seconds.max(1e-9) * 100.0;
    let smaller = outcome
        .reduced_micro_batch
        .map_or_else(String::new, |most| format!(", micro-batches of {most} after memory ran out with larger ones"));
    let count = |number: u64, what: &str| if number == 0 { String::new() } else { format!(", {what}: {number}") };
    let skipped = count(outcome.skipped_steps, "steps skipped because of NaN or infinity")
        + &count(num_skipped as u64, "samples skipped because their files cannot be read");
    context.output.line(format!(
        "trained {} steps at {images_per_s:.2} images/s, data wait {waited:.0} %, peak of tensors {}{smaller}{skipped}\n\
         {}\nrun folder: {}\nnext: {}",
        outcome.steps,
        peak,
        best_line(outcome.best_score, &outcome.best_values),
        args.out.display(),
        next_command(run, has_test, args)
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
            "planned": planned,
            "profile": profile,
        },
    }))?;
    Ok(Outcome::Done)
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
fn next_command(run: &Run, has_test: bool, args: &Args) -> String {
    let out = args.out.display();
    if has_test {
        return format!("prsmed eval {out} --data-root {} --split test", args.data.shown());
    }
    let questions = run.task.assembly().questions.as_ref();
    let question = questions.and_then(|questions| questions.examples(1).first().copied());
    // a shell would change these characters
    let question = question.filter(|question| !question.contains(['"', '$', '`', '\\', '!', '\n'])).unwrap_or("TEXT");
    format!("prsmed predict {out} --image FILE --question \"{question}\"")
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

/// Prints the memory plan for the longest texts that the settings allow, and refuses settings that cannot fit.
pub(super) fn check_memory(config: &RunConfig, machine: &Machine, context: &Context) -> Result<()> {
    let plan = match config.plan_for(Job::Train, machine) {
        // building the model reports file errors in more detail
        Err(Error::Weights { .. } | Error::Io { .. }) => return Ok(()),
        // the CPU's operators are tried one by one to learn what they need
        Err(error @ Error::OutOfMemory { .. }) => {
            context.progress.on(&Event::Warning(format!("no memory plan: {error}")));
            return Ok(());
        }
        plan => plan?,
    };
    context.progress.on(&Event::Note(format!("memory plan for the longest texts allowed\n{}", plan.table())));
    let suggest = plan::suggest(config, machine, &plan);
    plan::accept(plan, suggest, context)
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

/// Compares the planned peak with the peak of the first steps.
struct PlanCheck<'a> {
    inner: &'a dyn Observer,
    planned: Option<Bytes>,
    /// The step of this session that is compared.
    settled: u64,
    /// Steps of this session.
    steps: AtomicU64,
}

impl<'a> PlanCheck<'a> {
    fn new(plan: Option<&Plan>, graph: Switch, (inner, context): (&'a dyn Observer, &Context)) -> Self {
        // if `train.graph=auto` decides during the run, the plan without graphs is compared
        let planned = plan.filter(|plan| plan.with_graphs.is_none_or(|graphs| !graphs.fits));
        Self {
            inner,
            planned: planned.map(|plan| plan.allocated_peak),
            settled: SETTLED_STEPS.max(settling_steps(graph, context.runtime.device())),
            steps: AtomicU64::new(0),
        }
    }
}

/// Number of steps after which the optimizer's state exists and a further step has run.
const SETTLED_STEPS: u64 = 3;

impl Observer for PlanCheck<'_> {
    fn on(&self, event: &Event) {
        self.inner.on(event);
        let (Event::Step(report), Some(Bytes(planned))) = (event, self.planned) else { return };
        let done = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        let is_last = report.step == report.total_steps && done < self.settled;
        if (done == self.settled || is_last) && report.allocated_peak > 0 {
            let percent = (report.allocated_peak as f64 / planned as f64 - 1.0) * 100.0;
            let measured = Bytes(report.allocated_peak);
            let text =
                format!("tensors at their peak: planned {}, measured {measured} ({percent:+.1} %)", Bytes(planned));
            self.inner.on(&Event::Note(text));
        }
    }
}

fn resolve(args: &Args, ranks: Ranks, machine: &Machine, context: &Context) -> Result<Resolved> {
    let mut sets = init_settings(args, context)?;
    sets.extend(sets_of(&args.sets, []));
    let flags = [
        ("train.seed", "--seed", args.seed.map(|seed| seed.to_string())),
        ("train.precision", "--precision", args.precision.clone()),
        ("train.graph", "--graph", args.graph.clone()),
        ("data.cache_vision", "--cache-vision", args.cache_vision.clone()),
        ("data.labels", "--labels", args.labels.clone()),
        ("data.synthetic_ratio", "--synthetic-ratio", args.synthetic_ratio.as_ref().map(ToString::to_string)),
    ];
    for (key, flag, value) in flags {
        sets.extend(value.map(|value| (format!("{key}={value}"), flag.to_owned())));
    }
    let given = Sources {
        preset: args.preset.clone(),
        default_preset: "tiny".into(),
        file: args.config.clone(),
        sets,
        ..Sources::default()
    };
    // settings that are newer than the run's file have their defaults
    let sources = args.resume.sources::<RunConfig>(&args.out, given, context.progress.as_ref())?;
    let nothing_asked = sources.preset.is_none() && sources.file.is_none();
    if nothing_asked && tensor::default_device() != Device::Cpu {
        return preset_for_this_gpu(sources.sets, args, (ranks, machine), context);
    }
    if nothing_asked {
        let text = "no usable GPU (`prsmed doctor` explains why): using preset `tiny`, a small model from random \
                    weights; `--preset cpu` trains the full model in host memory, slowly";
        context.progress.on(&Event::Note(text.into()));
    }
    let resolved = sources.resolve()?;
    if !args.print_config {
        refuse_gpu_preset_without_gpu(&resolved, context)?;
    }
    Ok(resolved)
}

/// The settings that `--init` takes from its run. A run that goes on has its own.
fn init_settings(args: &Args, context: &Context) -> Result<Vec<(String, String)>> {
    let Some(run) = args.init.as_ref().filter(|_| args.resume.settings(&args.out).is_none()) else {
        return Ok(Vec::new());
    };
    let locate = |spec: &str| context.locate(spec);
    let build = Build { cache: context.env.cache.as_deref(), ..Build::new(Device::Cpu, Kind::Float, &locate) };
    let mut settings = context.read_run(run, None, None, &|folder| init::settings(folder, build))?;
    let path = run.to_string_lossy();
    let named = match Spec::parse(&path)? {
        Spec::Hub(_) => needs::of_run(&path, &context.env.hub, context.progress.as_ref())?.spec,
        Spec::Local(_) => std::path::absolute(run).map_err(Error::io(run, "find"))?.display().to_string(),
    };
    settings.push(format!("model.init={named}"));
    Ok(settings.into_iter().map(|setting| (setting, "--init".to_owned())).collect())
}

/// Stops a training with a preset made for GPUs on a machine without one: it would load the full model on the CPU.
pub(super) fn refuse_gpu_preset_without_gpu(resolved: &Resolved, context: &Context) -> Result<()> {
    let preset = resolved.origins.values().find_map(|origin| origin.strip_prefix("preset ")).unwrap_or_default();
    if tensor::default_device() != Device::Cpu || !preset.starts_with("gpu-") {
        return Ok(());
    }
    let why = detect::why_no_gpu(context.env.cuda_visible_devices.as_deref());
    let reason = format!("`{preset}` needs a GPU, and none is usable: {why}");
    let hint = "`prsmed doctor` shows what this machine offers; `--preset cpu` trains the same model in host memory, \
                slowly, `--preset tiny` a small one";
    Err(Error::config("--preset", reason, hint))
}

/// The fastest settings of the full model for the GPU of this machine. All processes take those of the first one.
fn preset_for_this_gpu(
    sets: Vec<(String, String)>,
    args: &Args,
    (ranks, machine): (Ranks, &Machine),
    context: &Context,
) -> Result<Resolved> {
    let resolve =
        |sets: Vec<(String, String)>| Sources { default_preset: "full".into(), sets, ..Sources::default() }.resolve();
    let full = resolve(sets.clone())?;
    if !args.print_config && !args.resume.resumes() {
        context.check_architectures(&full.config.model)?;
        context.check_files(needs::of_model(&full.config.model))?;
    }
    let search = || {
        let fitted = full.clone().fit_precision(PRECISION, machine)?;
        let found = preset::search_for(&fitted, machine, full.config.samples_of_a_step(), true)?;
        let Some(best) = found.fitting.first() else {
            let reason = preset::nothing_fits(&found, &machine.offer().device);
            let hint = "use a larger GPU, or skip this check with `--preset` and `--no-plan`";
            return Err(Error::config("train", reason, hint));
        };
        let config = fitted.config.with(&best.choice).divided_among(machine.num_ranks())?;
        let origin = format!("preset for {}", machine.offer().device);
        let chosen = config.changes_from(&fitted.config).into_iter();
        Ok(chosen.map(|assignment| (assignment, origin.clone())).collect::<Vec<_>>())
    };
    let search = || context.with_patience(preset::SEARCHING, search);
    let chosen = ranks.gather_if_all(main_only(ranks, search).map(Option::unwrap_or_default))?.swap_remove(0);
    // the user's settings have priority; the plan that follows checks if they fit
    resolve(chosen.into_iter().chain(sets).collect())
}

#[cfg(test)]
#[path = "train_tests.rs"]
mod tests;
