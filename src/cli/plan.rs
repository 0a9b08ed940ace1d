//! `prsmed plan`, and the flags by which commands name settings and a machine to plan for.

use super::args::SettingsArgs;
use super::context::Context;
use super::predict::ModelArgs;
use super::ranks::{self, JoinedJob};
use super::report::{CommandEnd, CommandResult};
use crate::augment::pipeline_config::PipelineConfig;
use crate::config::learning_rate::suggestion;
use crate::config::{AugmentRun, FinetuneRun, FlagSet, Resolved, RunConfig, Settings};
use crate::data::manifest::Manifest;
use crate::job::memory::remedy_lines;
use crate::job::planned::{Planned, Remedy};
use crate::job::{generator, machine};
use crate::plan::dry_run::{DryRun, Job, RealPhase};
use crate::plan::duration::Samples;
use crate::plan::machine::Machine;
use crate::plan::report::{NO_RATES, Plan};
use crate::plan::{measured, timeline};
use crate::segment::weight_files;
use crate::tensor::meta::PlanTarget;
use crate::tensor::{Device, default_device};
use crate::{Error, Result, files};
use serde_json::json;
use std::path::{Path, PathBuf};

impl SettingsArgs {
    /// The settings, overridden by `flags`, in a precision that `machine` has.
    pub(super) fn resolved_on<T: Settings>(&self, flags: Vec<FlagSet>, machine: &Machine) -> Result<Resolved<T>> {
        self.sources(T::DEFAULT_PRESET, flags).resolve_as()?.fit_precision(machine)
    }

    /// As [`Self::resolved_on`], with a note about another precision.
    pub(super) fn resolved_with_note<T: Settings>(
        &self,
        flags: Vec<FlagSet>,
        machine: &Machine,
        context: &Context,
    ) -> Result<Resolved<T>> {
        self.sources(T::DEFAULT_PRESET, flags).resolve_as()?.fit_with_note(machine, &context.runtime)
    }
}

/// Why there is no predicted time.
pub(super) fn no_rates(machine: &Machine) -> &'static str {
    match machine.target() {
        PlanTarget::Cpu => "training time: not predicted for the CPU before `prsmed calibrate` measured it",
        PlanTarget::Cuda => NO_RATES,
    }
}

/// The GPU of this machine.
pub(super) const AUTO: &str = "auto";

/// The machine to plan for.
#[derive(Debug, clap::Args)]
pub(super) struct MachineArgs {
    /// A memory size (24gb), a GPU ("RTX 4090"), this CPU (cpu), a CPU with that much memory (cpu:24gb), or `auto`: the
    /// first GPU visible to this process, else the CPU
    #[arg(long, value_name = "GPU", default_value = AUTO)]
    pub(super) gpu: String,
    /// Number of GPUs like this one on which a training runs: `train --gpus N`. The plan is that of one of them
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) gpus: Option<u16>,
}

impl MachineArgs {
    pub(super) fn machine(&self, context: &Context) -> Result<Machine> {
        let machine = match self.gpu.as_str() {
            AUTO => {
                let found = machine::detected(&context.runtime)?;
                if found.target() == PlanTarget::Cpu {
                    context.runtime.note(
                        "no GPU was found and none is named (`--gpu 24gb`): planning for this CPU, which runs each operator \
                         once, up to a minute for the full model",
                    );
                }
                found
            }
            "cpu" => machine::this_cpu(&context.runtime),
            named => named_machine(named)?,
        };
        let rank = context.rendezvous.as_ref().map_or(0, |joined| joined.rank);
        Ok(machine.with_ranks(rank, self.ranks()))
    }

    /// Number of processes that train together.
    pub(super) fn ranks(&self) -> usize {
        self.gpus.map_or(1, usize::from)
    }
}

/// The machine with this name, for example `24gb`.
pub(super) fn named_machine(gpu: &str) -> Result<Machine> {
    Machine::named(gpu).map_err(|error| {
        let hint = error.hint();
        Error::config("--gpu", error.to_string(), hint)
    })
}

/// Predict the memory and time of a job before it runs
///
/// Runs the job's own code without data: no weights and no GPU are needed, and every allocation is counted. Only the
/// `config.json` of another language model on the hub is read, if it can be. The table has three columns: memory of
/// tensors (allocated), memory that libtorch's allocator reserves for them (reserved), and memory of the process as the
/// driver shows it (device; on the CPU, resident memory). All texts are planned with `model.max_text_tokens` ids.
///
/// Exit code 0 if the job fits. Exit code 1 if it does not; then changes that would help are listed, each with its
/// plan.
#[derive(Debug, clap::Args)]
#[command(mut_arg("preset", |arg| arg.help("Named settings: tiny, full, cpu, gpu-24gb, ... [default: full; for other tasks the task's preset]")))]
#[command(after_help = "Examples:
  prsmed plan --preset full --gpu 24gb
  prsmed plan --config my.toml --gpu \"RTX 4090\" --timeline step.json
  prsmed plan --preset full --gpu 16gb --task predict --json
  prsmed plan --preset gpu-24gb --gpu 24gb --samples 30000
  prsmed plan --task augment --gpu 12gb --set augment.batch=4
  prsmed plan --task finetune --preset lora-sd15 --gpu 8gb
  prsmed plan --preset gpu-24gb --measure")]
pub(super) struct Args {
    #[command(flatten)]
    settings: SettingsArgs,
    #[command(flatten)]
    machine: MachineArgs,
    /// What to plan
    #[arg(long, value_enum, default_value_t = Task::Train)]
    task: Task,
    /// Write memory over time as a Chrome trace (.json); open it at <https://ui.perfetto.dev>
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// Predict the time of a training on this many questions, each image with `data.questions_per_image` of them
    #[arg(long, value_name = "N", conflicts_with = "data_root", value_parser = clap::value_parser!(u64).range(1..))]
    samples: Option<u64>,
    /// Predict the time of a training on this data root, with its own number of questions about each image
    #[arg(long, value_name = "DIR")]
    data_root: Option<PathBuf>,
    /// Also run the job on this machine with random weights, and print measured and planned memory of each phase
    #[arg(long)]
    measure: bool,
}

/// The planned job.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Task {
    /// A training run: load, steps, evaluation, saving and resuming
    Train,
    /// Validation batches of a training run (`prsmed eval` answers one row at a time: plan `predict` for it)
    Eval,
    /// One image of the model's size, the longest question, an answer of 128 tokens
    Predict,
    /// One batch of generated images (settings of `prsmed augment generate`, preset `augment`)
    Augment,
    /// Fine-tuning the generator (settings of `prsmed augment finetune`, preset `lora-sdxl`)
    Finetune,
}

impl Task {
    /// The job, and its title in a timeline.
    fn job(self) -> (Job, &'static str) {
        match self {
            Self::Train => (Job::Train, "Training"),
            Self::Eval => (Job::Eval, "Evaluation"),
            Self::Predict => (Job::Predict, "Prediction"),
            Self::Augment => (Job::Augment, "Generation"),
            Self::Finetune => (Job::Train, "Fine-tuning"),
        }
    }
}

pub(super) fn run(args: &Args, context: &Context) -> CommandResult {
    if args.measure && args.machine.ranks() > 1 && context.rendezvous.is_none() {
        return Ok(CommandEnd::Ended(ranks::start(args.machine.ranks(), context)?));
    }
    args.timeline.as_deref().map(check_timeline).transpose()?;
    let machine = args.machine.machine(context)?;
    let (job, title) = args.task.job();
    if args.measure {
        refuse_to_measure(&machine)?;
    }
    let asks_for_time = args.samples.is_some() || args.data_root.is_some();
    if asks_for_time && !matches!(args.task, Task::Train) {
        let reason = "only the time of `--task train` is predicted";
        return Err(Error::config("--task", reason, "leave out `--samples` and `--data-root`").into());
    }
    let (dry_run, plan, helping) = planned(args, job, &machine, context)?;
    if let Some(path) = &args.timeline {
        let title = format!("{title} on {}: peak {}", plan.budget.device, plan.allocated_peak);
        let trace = timeline::chrome_trace(&dry_run.trace, &title, plan.budget.bytes);
        files::write_output(path, trace.to_string().as_bytes()).map_err(Error::io(path, "write"))?;
    }
    context.output.line(plan.table())?;
    if !plan.fits {
        context.output.line(remedies_text(args.task, &helping))?;
    }
    let mut record = serde_json::to_value(&plan)?;
    if asks_for_time {
        let config: RunConfig = args.settings.resolved_on(Vec::new(), &machine)?.config;
        let duration = config.duration(samples(args, &config)?, &plan, &machine)?;
        let unknown = || no_rates(&machine).to_owned();
        let source = machine.speed_source();
        context.output.line(duration.as_ref().map_or_else(unknown, |duration| duration.text(&source)))?;
        record["training"] = json!(duration);
    }
    if args.measure {
        let lacks_host_memory = matches!(machine, Machine::Cpu(_)) || plan.device_peak <= plan.budget.bytes;
        if !plan.fits && lacks_host_memory {
            let hint = "measure smaller settings: the system would end this program";
            return Err(Error::config("--measure", plan.summary(), hint).into());
        }
        let measured = measure(args, &machine, context)?;
        context.output.line(measured::text(&plan, &measured))?;
        record["measured"] = measured::record(&plan, &measured)?;
    }
    record["kind"] = json!("plan");
    record["remedies"] = json!(helping);
    if let Task::Train = args.task {
        let resolved = args.settings.resolved_on(Vec::new(), &machine)?;
        let learning_rate = suggestion(&resolved, resolved.config.samples_of_a_step());
        if let Some(suggestion) = learning_rate {
            context.output.line(suggestion.text())?;
        }
        record["learning_rate"] = json!(learning_rate);
    }
    context.output.record(&record)?;
    Ok(if plan.fits { CommandEnd::Done } else { CommandEnd::No })
}

/// Changes that help, as flags of the command that takes them.
fn remedies_text(task: Task, helping: &[Remedy]) -> String {
    match task {
        Task::Predict if !helping.is_empty() => {
            let (mut own, mut trained) = (Vec::new(), Vec::new());
            for remedy in helping {
                match ModelArgs::flags_of(&remedy.change) {
                    Some(flags) => own.push(remedy.line_with(&flags)),
                    None => trained.push(remedy.line()),
                }
            }
            let parts = [
                ("changes that save memory, as flags of `prsmed predict`, `eval` and `serve`:", own),
                ("settings of another training that save memory, as flags of `prsmed train`:", trained),
            ];
            let parts = parts.into_iter().filter(|(_, lines)| !lines.is_empty());
            let parts = parts.map(|(title, lines)| format!("{title}\n  {}", lines.join("\n  ")));
            parts.collect::<Vec<_>>().join("\n")
        }
        Task::Eval if !helping.is_empty() => {
            format!("{}\na validation is a part of a training: `prsmed train` takes these flags", remedy_lines(helping))
        }
        _ => remedy_lines(helping),
    }
}

/// The dry run of `job`, its plan, and changes that help if it does not fit.
fn planned(args: &Args, job: Job, machine: &Machine, context: &Context) -> Result<(DryRun, Plan, Vec<Remedy>)> {
    let with_plan = |dry_run: DryRun, plan: Plan, remedies: &dyn Fn(&Plan) -> Vec<Remedy>| {
        let helping = if plan.fits { Vec::new() } else { remedies(&plan) };
        Ok((dry_run, plan, helping))
    };
    match args.task {
        Task::Augment => {
            let (run, sizes) = generation(args, machine, context)?;
            let dry_run = run.dry_run(&sizes, 2, machine, true)?;
            let plan = Plan::of(&dry_run, machine);
            with_plan(dry_run, plan, &|plan| run.remedies(&sizes, job, machine, plan))
        }
        Task::Finetune => {
            let (run, sizes) = finetuning(args, machine, context)?;
            let dry_run = run.dry_run(&sizes, job, machine, true)?;
            let plan = Plan::of(&dry_run, machine);
            with_plan(dry_run, plan, &|plan| run.remedies(&sizes, job, machine, plan))
        }
        Task::Train | Task::Eval | Task::Predict => {
            let mut config: RunConfig = args.settings.resolved_with_note(Vec::new(), machine, context)?.config;
            weight_files::check_architectures(&mut config, &context.runtime)?;
            config.train.divide_among(machine.num_ranks())?;
            let sizes = config.planned_sizes()?;
            let (dry_run, plan) = config.plan_sized(job, &sizes, config.longest_example(), machine)?;
            with_plan(dry_run, plan, &|plan| config.remedies(&(), job, machine, plan))
        }
    }
}

/// A generation and the sizes of its generator.
fn generation(args: &Args, machine: &Machine, context: &Context) -> Result<(AugmentRun, PipelineConfig)> {
    let run = args.settings.resolved_with_note(Vec::new(), machine, context)?.config;
    let sizes = generator::planned(&run, &context.runtime)?;
    Ok((run, sizes))
}

/// A fine-tuning for one of the processes and the sizes of its generator.
fn finetuning(args: &Args, machine: &Machine, context: &Context) -> Result<(FinetuneRun, PipelineConfig)> {
    let mut run: FinetuneRun = args.settings.resolved_with_note(Vec::new(), machine, context)?.config;
    run.train.divide_among(machine.num_ranks())?;
    let sizes = generator::planned_to_finetune(&run, &context.runtime)?;
    Ok((run, sizes))
}

/// The questions whose training time is asked for.
fn samples(args: &Args, config: &RunConfig) -> Result<Samples> {
    let most = config.data.questions_per_image;
    Ok(match (&args.data_root, args.samples) {
        (Some(root), _) => Samples::of_rows(&Manifest::open(root, None)?, most),
        (None, samples) => Samples::even(samples.unwrap_or_default(), most),
    })
}

fn refuse_to_measure(machine: &Machine) -> Result<()> {
    let is_here = (machine.target() == PlanTarget::Cpu) == (default_device() == Device::Cpu);
    if is_here {
        return Ok(());
    }
    let reason = "only the device of this machine can be measured";
    Err(Error::config("--measure", reason, "leave out `--gpu` or `--measure`"))
}

/// Runs the phases of the job on this machine's device.
fn measure(args: &Args, machine: &Machine, context: &Context) -> anyhow::Result<Vec<RealPhase>> {
    context.runtime.note("running the job with random weights");
    if let Task::Augment = args.task {
        let (run, sizes) = generation(args, machine, context)?;
        return Ok(run.measure(&sizes, default_device())?);
    }
    JoinedJob::work(context, |ranks| {
        if let Task::Finetune = args.task {
            let (run, sizes) = finetuning(args, machine, context)?;
            return Ok(run.measure(&sizes, default_device(), ranks)?);
        }
        let config: RunConfig = args.settings.resolved_on(Vec::new(), machine)?.config;
        let config = config.divided_among(args.machine.ranks())?;
        Ok(config.measure(args.task.job().0, default_device(), ranks)?)
    })
}

/// Refuses a timeline that is no JSON file.
fn check_timeline(path: &Path) -> Result<()> {
    if path.extension().is_some_and(|extension| extension == "json") {
        return Ok(());
    }
    let reason = format!("`{}` does not end in .json", path.display());
    Err(Error::config("--timeline", reason, "name a file such as step.json, and open it at https://ui.perfetto.dev"))
}
