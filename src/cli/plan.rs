//! `prsmed plan`, and how commands name settings and machines to plan for.

use super::report::Outcome;
use super::{Context, sets_of};
use crate::config::planned::{Remedy, remedies};
use crate::config::{AugmentRun, Resolved, RunConfig, Settings, Sources};
use crate::event::Event;
use crate::plan::cards::{self, Budget};
use crate::plan::device_terms::Facts;
use crate::plan::host::Host;
use crate::plan::rehearse::{self, Job, Measured, Phase};
use crate::plan::report::{Machine, Plan};
use crate::plan::{detect, replay, timeline};
use crate::segment::rehearsal::Rehearsal;
use crate::tensor::meta::Target;
use crate::tensor::weights::write_bytes;
use crate::tensor::{Device, Kind, Tensor, default_device, kernels, memory};
use crate::{Error, Result};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Settings to plan.
#[derive(Debug, clap::Args)]
pub(super) struct SettingsArgs {
    /// Named settings: tiny, full, cpu, gpu-24gb, ... [default: full; `augment` for that task]
    #[arg(long, value_name = "NAME")]
    pub(super) preset: Option<String>,
    /// TOML file over the preset
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// One setting, for example `train.micro_batch=4`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(super) sets: Vec<String>,
}

impl SettingsArgs {
    /// The settings with those of flags over them.
    pub(super) fn resolve(&self, flags: Vec<(String, String)>) -> Result<RunConfig> {
        Ok(self.resolved(flags)?.config)
    }

    /// The same with where each value came from.
    pub(super) fn resolved(&self, flags: Vec<(String, String)>) -> Result<Resolved> {
        self.resolve_as("full", flags)
    }

    /// The same for making pairs.
    pub(super) fn resolve_augment(&self, flags: Vec<(String, String)>) -> Result<AugmentRun> {
        Ok(self.resolve_as("augment", flags)?.config)
    }

    fn resolve_as<T: Settings>(&self, default_preset: &str, flags: Vec<(String, String)>) -> Result<Resolved<T>> {
        let (preset, file, sets) = (self.preset.clone(), self.config.clone(), sets_of(&self.sets, flags));
        Sources { preset, default_preset: default_preset.into(), file, sets }.resolve_as()
    }
}

/// The machine to plan for.
#[derive(Debug, clap::Args)]
pub(super) struct MachineArgs {
    /// A size (24gb), a card ("RTX 4090"), `cpu`, a host with that much memory (cpu:24gb), or `auto`: the first card that
    /// this process may use, else the CPU
    #[arg(long, value_name = "CARD", default_value = "auto")]
    pub(super) gpu: String,
}

impl MachineArgs {
    pub(super) fn machine(&self, context: &Context) -> Result<Machine> {
        match self.gpu.as_str() {
            "auto" => Ok(detected(context)),
            named => Machine::named(named).map_err(|error| {
                let hint = error.hint();
                Error::config("--gpu", error.to_string(), hint)
            }),
        }
    }
}

/// The machine that training in this process runs on.
pub(super) fn training_machine(context: &Context) -> Machine {
    if default_device() == Device::Cpu { Machine::Cpu(Host::detect()) } else { detected(context) }
}

/// The first device that this process may use, with what others hold on it; without any, the CPU.
fn detected(context: &Context) -> Machine {
    let devices = detect::detect(context.env.cuda_visible_devices.as_deref());
    let Some(first) = devices.first() else {
        return seen_by_libtorch().unwrap_or_else(|| Machine::Cpu(Host::detect()));
    };
    if let [_, others @ ..] = devices.as_slice()
        && !others.is_empty()
    {
        let note = format!("{} cards: planning for the first, {}; training uses one", devices.len(), first.name);
        context.progress.on(&Event::Note(note));
    }
    Machine::Cuda(first.budget(), Facts { other_processes: first.in_use(), ..Facts::default() })
}

/// The card that libtorch uses, where the driver's management library is missing.
fn seen_by_libtorch() -> Option<Machine> {
    let device = default_device();
    if device == Device::Cpu {
        return None;
    }
    let _in_use = Tensor::zeros([1], (Kind::Float, device));
    let system = memory::read(device).ok()?.system;
    let (total, used) = (system.device_total?.0, system.device_used?.0);
    let like = cards::find(&format!("{}gb", total.div_ceil(cards::GIB))).ok()?;
    let budget = Budget { total_bytes: total, note: "what libtorch says".into(), ..like };
    Some(Machine::Cuda(budget, Facts { other_processes: used, ..Facts::default() }))
}

/// Say what a job needs, before it runs
///
/// The job's own code runs without memory, weights, GPU or network, and every allocation is counted. Three columns:
/// what tensors hold (allocated), what libtorch's allocator holds for them (reserved), what the driver shows (device).
/// On the CPU all texts are planned as long as `model.max_text_tokens`; the last column is resident memory.
///
/// Exit code 0 when it fits, 1 when it does not; then the changes that would help are listed, each planned.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed plan --preset full --gpu 24gb
  prsmed plan --config my.toml --gpu \"RTX 4090\" --timeline step.html
  prsmed plan --preset full --gpu 16gb --task predict --json
  prsmed plan --task augment --gpu 12gb --set augment.batch=4
  prsmed plan --preset gpu-24gb --measure")]
pub(super) struct Args {
    #[command(flatten)]
    settings: SettingsArgs,
    #[command(flatten)]
    machine: MachineArgs,
    /// What to plan
    #[arg(long, value_enum, default_value_t = Task::Train)]
    task: Task,
    /// Write a picture of memory over the job: .svg, or .html with a readout under the pointer
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// Also run the job on this machine, with random weights, and print what each phase took beside its plan
    #[arg(long)]
    measure: bool,
}

/// Jobs by their command.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Task {
    /// Load, steps, evaluation, saving and resuming
    Train,
    /// Validation batches of a training run (`prsmed eval` answers row by row, as predict)
    Eval,
    /// One picture of the model's size, the longest question, an answer of 128 tokens
    Predict,
    /// A batch of new pictures (settings of `prsmed augment`, preset `augment`)
    Augment,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let picture = args.timeline.as_deref().map(picture_kind).transpose()?;
    let machine = args.machine.machine(context)?;
    let job = match args.task {
        Task::Train => Job::Train,
        Task::Eval => Job::Eval,
        Task::Predict => Job::Predict,
        Task::Augment => Job::Augment,
    };
    if args.measure {
        refuse_to_measure(job, &machine)?;
    }
    let (rehearsed, plan, helping) = if job == Job::Augment {
        let run = args.settings.resolve_augment(Vec::new())?;
        let blueprint = super::augment::planned_blueprint(&run, context)?;
        let rehearsed = run.rehearse(&blueprint, (2, None), &machine, true)?;
        let plan = Plan::of(&rehearsed, &machine);
        let helping = if plan.fits { Vec::new() } else { run.remedies(&blueprint, &machine, &plan) };
        (rehearsed, plan, helping)
    } else {
        let config = args.settings.resolve(Vec::new())?;
        let sizes = config.planned_sizes()?;
        let (rehearsed, plan) = config.plan_sized(job, &sizes, config.longest_example(), &machine)?;
        let helping = if plan.fits { Vec::new() } else { remedies(&config, job, &machine, &plan) };
        (rehearsed, plan, helping)
    };
    if let (Some(path), Some(kind)) = (&args.timeline, picture) {
        let title = format!("{} on {}: peak {}", title(job), plan.budget.device, plan.allocated_peak);
        let timeline = replay::timeline(&rehearsed.trace, title, Some(plan.budget.bytes.0));
        let text = match kind {
            Picture::Svg => timeline::svg(&timeline),
            Picture::Html => timeline::html(&timeline),
        };
        write_bytes(path, text.as_bytes())?;
    }
    context.output.line(plan.table())?;
    if !plan.fits {
        context.output.line(remedy_lines(&helping))?;
    }
    let mut record = serde_json::to_value(&plan)?;
    if args.measure {
        let measured = measure(&args.settings.resolve(Vec::new())?, job, context)?;
        context.output.line(beside(&plan, &measured))?;
        record["measured"] = json!(measured);
    }
    record["kind"] = json!("plan");
    record["remedies"] = json!(helping);
    context.output.record(&record)?;
    Ok(if plan.fits { Outcome::Done } else { Outcome::No })
}

fn refuse_to_measure(job: Job, machine: &Machine) -> Result<()> {
    let is_here = (machine.target() == Target::Cpu) == (default_device() == Device::Cpu);
    let (reason, hint) = match (job, is_here) {
        (Job::Augment, _) => ("pairs are not measured here", "`prsmed augment generate` tells what it took"),
        (_, true) => return Ok(()),
        (_, false) => ("only the device of this machine can be measured", "leave out `--gpu`, or `--measure`"),
    };
    Err(Error::config("--measure", reason, hint))
}

/// Runs the phases of `job` on this machine's device.
fn measure(config: &RunConfig, job: Job, context: &Context) -> Result<Vec<Phase>> {
    let (device, sizes, example) = (default_device(), config.planned_sizes()?, config.longest_example());
    kernels::check(device)?;
    kernels::set_mode(config.train.fused_kernels.kernels());
    let build = || {
        let task = Rehearsal::random(&config.model, &sizes, &config.train, example, device)?;
        Ok(task.keeping_features(job != Job::Eval && config.data.keeps_features()))
    };
    context.progress.on(&Event::Note("running the job with random weights".into()));
    let mut meter = Measured::begin(device)?;
    rehearse::rehearse(job, &config.train, &build, &mut meter)?;
    meter.finish()
}

/// Planned and measured bytes of each phase that both know.
fn beside(plan: &Plan, measured: &[Phase]) -> String {
    let mut lines = vec!["measured with random weights (planned):".to_owned()];
    for phase in measured {
        let Some(planned) = plan.phases.iter().find(|planned| planned.memory.name == phase.name) else { continue };
        let device =
            phase.device_used.map_or_else(String::new, |used| format!(", device {used} ({})", planned.device_peak));
        lines.push(format!(
            "  {}: allocated {} ({}), reserved {} ({}){device}",
            phase.name,
            phase.allocated_peak,
            planned.memory.allocated_peak,
            phase.reserved_peak,
            planned.memory.reserved_peak
        ));
    }
    lines.join("\n")
}

fn title(job: Job) -> &'static str {
    match job {
        Job::Train | Job::Step => "Training",
        Job::Eval => "Evaluation",
        Job::Predict => "Prediction",
        Job::Augment => "Generation",
    }
}

/// Changes as lines, the most useful first.
pub(super) fn remedy_lines(remedies: &[Remedy]) -> String {
    let mut lines = vec!["changes that save memory:".to_owned()];
    lines.extend(remedies.iter().map(|remedy| format!("  {}", remedy.line())));
    lines.join("\n")
}

#[derive(Debug, Clone, Copy)]
enum Picture {
    Svg,
    Html,
}

fn picture_kind(path: &Path) -> Result<Picture> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => Ok(Picture::Svg),
        Some("html") => Ok(Picture::Html),
        _ => {
            let reason = format!("`{}` is neither .svg nor .html", path.display());
            Err(Error::config("--timeline", reason, "name a file such as step.html"))
        }
    }
}
