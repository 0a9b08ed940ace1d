//! Runs the phases of a task: on the meta device, under a trace, as the plan; on a real device as the measurement.
//!
//! Every phase calls the engine's own functions. This module contains no formulas.

use super::communication::AddedGradients;
use crate::Result;
use crate::event::Silent;
use crate::tensor::trace::{Trace, TraceBuilder};
use crate::tensor::weights::Staged;
use crate::tensor::{self, Device, Kind, META, Tensor, ledger, memory, meta, no_grad, synchronize, trace};
use crate::trainer::distributed::World;
use crate::trainer::graph::SETTLING_STEPS;
use crate::trainer::precision::Scaler;
use crate::trainer::{
    DryRunTask, HostUse, Parameter, Ranks, Shard, StepInfo, Stepper, Switch, TrainConfig, checkpoint,
};
use crate::units::Bytes;
use std::collections::HashMap;
use std::time::Instant;

/// Job of a dry run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Job {
    /// A training run: load, first step, step, evaluate, save, resume.
    Train,
    /// Only the step, with everything allocated before it.
    Step,
    /// Validation of loaded weights.
    Eval,
    /// One image and its question.
    Predict,
    /// A batch of new images: prompts, weights, images to latents, denoising, latents to images.
    Augment,
}

impl Job {
    /// The phase whose time is reported.
    pub fn timed_phase(self) -> &'static str {
        self.timed().0
    }

    /// The phase whose time is reported, and its work in words.
    pub(super) fn timed(self) -> (&'static str, &'static str) {
        match self {
            Self::Train | Self::Step => ("step", "an optimizer step"),
            Self::Eval => ("evaluate", "a validation batch"),
            Self::Predict => ("predict", "a prediction"),
            Self::Augment => ("denoise", "denoising a batch"),
        }
    }
}

/// Measured memory of one phase; [`crate::replay::PhaseMemory`] is the planned one.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct RealPhase {
    /// `load`, `first step` (allocates the optimizer state), `capture` (steps until they are captured as CUDA graphs),
    /// `new images` (a step that fills a cache for `step`), `step`, `evaluate`, `save`, `resume`, `predict`.
    pub name: &'static str,
    /// Peak of allocated tensor bytes, above what was allocated before the task.
    pub allocated_peak: Bytes,
    /// Peak of the bytes that the allocator reserved.
    pub reserved_peak: Bytes,
    /// Used bytes of the GPU by all processes when the phase ended; `None` on the CPU.
    pub device_used: Option<Bytes>,
    /// The peak by category; empty on a GPU.
    pub categories: Vec<(&'static str, Bytes)>,
    /// Duration in seconds, once all its work on the device was done.
    pub seconds: f64,
}

/// Receives the beginning of each phase.
pub trait Meter {
    /// A phase begins, and the previous one ends.
    ///
    /// # Errors
    /// If the device's memory cannot be read.
    fn begin(&mut self, phase: &'static str) -> Result<()>;
}

impl Meter for TraceBuilder {
    fn begin(&mut self, phase: &'static str) -> Result<()> {
        self.mark(phase);
        Ok(())
    }
}

/// Measures a device's memory while a task really runs.
#[derive(Debug)]
pub struct PhaseMeter {
    device: Device,
    before: memory::MemoryReading,
    current: Option<(&'static str, Instant)>,
    phases: Vec<RealPhase>,
}

impl PhaseMeter {
    /// Measures from the memory allocated now on `device`. Nothing else may allocate tensors there during the
    /// measurement.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] for a GPU that is not in use.
    pub fn begin(device: Device) -> Result<Self> {
        ledger::install();
        if device != Device::Cpu {
            // a GPU's allocator can only be read after its first use
            drop(crate::tensor::guard::guard(|| Ok(Tensor::zeros([1], (Kind::Float, device))))?);
        }
        Ok(Self { device, before: memory::read(device)?, current: None, phases: Vec::new() })
    }

    /// The measured phases.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn finish(mut self) -> Result<Vec<RealPhase>> {
        self.end()?;
        Ok(self.phases)
    }

    fn end(&mut self) -> Result<()> {
        let Some((name, began)) = self.current.take() else { return Ok(()) };
        synchronize(self.device);
        let seconds = began.elapsed().as_secs_f64();
        let now = memory::read(self.device)?;
        let above = |now: Bytes, before: Bytes| Bytes(now.0.saturating_sub(before.0));
        let categories = now.categories_at_peak.iter().zip(&self.before.categories);
        self.phases.push(RealPhase {
            name,
            allocated_peak: above(now.allocated_peak, self.before.allocated),
            reserved_peak: now.reserved_peak,
            device_used: now.system.device_used,
            categories: categories.map(|(now, before)| (now.0, above(now.1, before.1))).collect(),
            seconds,
        });
        Ok(())
    }
}

impl Meter for PhaseMeter {
    fn begin(&mut self, phase: &'static str) -> Result<()> {
        self.end()?;
        memory::begin_window(self.device)?;
        self.current = Some((phase, Instant::now()));
        Ok(())
    }
}

/// A job that ran on [`META`].
#[derive(Debug)]
pub struct DryRun {
    /// The job.
    pub job: Job,
    /// Its allocations and operators.
    pub trace: Trace,
    /// Micro-batches of a step, and how many of them ran.
    pub(super) micro_batches: (usize, usize),
    /// Buffers of the input pipeline; zero without data.
    pub buffers: Buffers,
    /// Further facts about its steps.
    pub steps: StepFacts,
}

/// Facts about steps besides allocations and operators.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepFacts {
    /// True if a GPU adds in a fixed order (`train.deterministic`).
    pub deterministic: bool,
    /// Bytes of a CUDA graph's fixed inputs, where steps are captured.
    pub captured_inputs: Option<Bytes>,
    /// Bytes that a step copies between host memory and the device, in both directions, because optimizer state or fp32
    /// weights are in host memory.
    pub copied: Bytes,
    /// Host memory of optimizer state and, with `train.offload_weights`, of fp32 weights, their gradients and their
    /// moving average.
    pub host_state: Bytes,
    /// Frozen weights in host memory or divided among processes; `sent` and `collected` count those of the micro-batches
    /// that ran in the phase whose time is predicted.
    pub host_weights: HostUse,
    /// Gradients that several processes add.
    pub gradients: AddedGradients,
}

/// Host memory of a run besides tensors: bytes of its input pipeline, and which kernels it needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Buffers {
    /// Prefetched micro-batches.
    pub prefetched: u64,
    /// Cached preprocessed images.
    pub cache: u64,
    /// Cached vision features.
    pub features: u64,
    /// Fixed inputs of further CUDA graphs.
    pub graph_inputs: u64,
    /// True if it computes in bf16 or fp16.
    pub half_precision: bool,
}

impl DryRun {
    /// Micro-batches of a step divided by those that ran.
    pub fn repeats(&self) -> f64 {
        match self.job {
            Job::Train | Job::Step => self.micro_batches.0 as f64 / self.micro_batches.1 as f64,
            Job::Augment => self.micro_batches.0 as f64 / self.micro_batches.1.max(1) as f64,
            Job::Eval | Job::Predict => 1.0,
        }
    }
}

/// Denoising steps of a batch, and how many of them a dry run runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedSteps {
    /// Steps of a whole trajectory.
    pub whole: usize,
    /// Steps of the dry run.
    pub shown: usize,
}

/// Plans a job that defines its own phases: `walk` runs it on [`META`] as `target` would, and calls its argument when a
/// phase begins.
///
/// # Errors
/// Those of the job.
pub fn plan_walk(
    job: Job,
    steps: PlannedSteps,
    target: meta::PlanTarget,
    costs: bool,
    walk: impl FnOnce(&mut dyn FnMut(&'static str) -> Result<()>) -> Result<()>,
) -> Result<DryRun> {
    meta::install()?;
    let _target = meta::enter_target(target);
    let mut tracer = trace::begin(target, costs)?;
    walk(&mut |phase| tracer.begin(phase))?;
    let trace = tracer.finish();
    let micro_batches = (steps.whole, steps.shown);
    Ok(DryRun { job, trace, micro_batches, buffers: Buffers::default(), steps: StepFacts::default() })
}

/// Where a dry run takes place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DryRunPlace {
    /// The device that it models.
    pub target: meta::PlanTarget,
    /// Number of the process that it models, from 0.
    pub rank: usize,
    /// Number of processes that train together.
    pub ranks: usize,
}

impl From<meta::PlanTarget> for DryRunPlace {
    fn from(target: meta::PlanTarget) -> Self {
        Self { target, rank: 0, ranks: 1 }
    }
}

impl DryRunPlace {
    /// The processes without connections, of which this one runs `shown` of its micro-batches; `None` for one process.
    fn world(self, accumulation: usize, shown: usize) -> Option<World> {
        let count = |rank: usize| Shard::new(rank, self.ranks).range(accumulation).len();
        // the first process has the most; another one may have one less
        let waits = usize::from(count(0) > count(self.rank));
        (self.ranks > 1).then(|| World::planned(self.rank, self.ranks, shown + waits))
    }
}

/// Steps until they are captured as CUDA graphs.
const CAPTURE: &str = "capture";
/// A later step of the first epoch, whose samples are not in the cache yet.
const NEW_IMAGES: &str = "new images";

/// Micro-batches of a step that a plan runs: from the second one on, gradients exist and memory repeats itself.
const PLANNED_MICRO_BATCHES: usize = 2;

/// Plans `job`: runs it on [`META`] as `target` would. Without `costs` it takes half the time, but has neither names
/// nor times of operators.
///
/// # Errors
/// Those of the task.
pub fn plan<T: DryRunTask>(
    job: Job,
    config: &TrainConfig,
    place: impl Into<DryRunPlace>,
    costs: bool,
    build: impl Fn(Ranks) -> Result<T>,
) -> Result<DryRun> {
    plan_after(job, config, place, costs, |_| Ok(()), build)
}

/// As [`plan`], for a job with phases before the first task is built. `before` calls its argument when one begins.
///
/// # Errors
/// Those of the task and of `before`.
pub fn plan_after<T: DryRunTask>(
    job: Job,
    config: &TrainConfig,
    place: impl Into<DryRunPlace>,
    costs: bool,
    before: impl FnOnce(&mut dyn FnMut(&'static str) -> Result<()>) -> Result<()>,
    build: impl Fn(Ranks) -> Result<T>,
) -> Result<DryRun> {
    let place: DryRunPlace = place.into();
    let target = place.target;
    meta::install()?;
    let _deterministic = tensor::enter_deterministic(config.deterministic);
    config.prepare_process();
    let _target = meta::enter_target(target);
    let mut tracer = trace::begin(target, costs)?;
    before(&mut |phase| tracer.begin(phase))?;
    let whole = Shard::new(place.rank, place.ranks).range(config.accumulation).len();
    let shown = whole.min(PLANNED_MICRO_BATCHES);
    // batches wait on the host; on the CPU, where the host is the device, all of them count
    let loaded = if target == meta::PlanTarget::Cpu { whole } else { shown };
    let world = place.world(config.accumulation, shown);
    let ranks = Ranks::of_some(world.as_ref());
    let steps = run_phases(job, config, Batches { whole, loaded, shown, ranks }, &build, &mut tracer)?;
    Ok(DryRun { job, trace: tracer.finish(), micro_batches: (whole, shown), buffers: Buffers::default(), steps })
}

/// Runs the phases of `job` with tasks from `build`, which gets the processes that train together.
///
/// # Errors
/// Those of the task and of `meter`.
pub fn dry_run<T: DryRunTask>(
    job: Job,
    config: &TrainConfig,
    ranks: Ranks,
    build: &impl Fn(Ranks) -> Result<T>,
    meter: &mut impl Meter,
) -> Result<()> {
    let whole = ranks.shard().range(config.accumulation).len();
    run_phases(job, config, Batches { whole, loaded: whole, shown: whole, ranks }, build, meter).map(drop)
}

/// Micro-batches of a step of this process.
#[derive(Debug, Clone, Copy)]
struct Batches<'a> {
    /// All of them.
    whole: usize,
    /// Those that are loaded.
    loaded: usize,
    /// Those that run.
    shown: usize,
    ranks: Ranks<'a>,
}

fn run_phases<T: DryRunTask>(
    job: Job,
    config: &TrainConfig,
    count: Batches,
    build: &impl Fn(Ranks) -> Result<T>,
    meter: &mut impl Meter,
) -> Result<StepFacts> {
    match job {
        Job::Train => {
            let (state, facts) = train(config, count, true, build, meter)?;
            meter.begin("resume")?;
            resume(config, count.ranks, build, &state)?;
            Ok(facts)
        }
        Job::Step => train(config, count, false, build, meter).map(|(_, facts)| facts),
        Job::Eval | Job::Predict => {
            meter.begin("load")?;
            // each process answers with the whole model
            let task = build(Ranks::default())?;
            meter.begin(job.timed_phase())?;
            let before = task.host_weights();
            if job == Job::Predict {
                task.predict()?;
            } else {
                no_grad(|| task.validate(&Silent, count.ranks))?;
            }
            Ok(StepFacts { host_weights: task.host_weights().since(&before), ..StepFacts::default() })
        }
        Job::Augment => unreachable!("augmentation defines its own phases"),
    }
}

/// Names, shapes and dtypes of a checkpoint's training state.
type SavedState = HashMap<String, (Vec<i64>, Kind)>;

fn train<T: DryRunTask>(
    config: &TrainConfig,
    count: Batches,
    whole: bool,
    build: &impl Fn(Ranks) -> Result<T>,
    meter: &mut impl Meter,
) -> Result<(SavedState, StepFacts)> {
    meter.begin("load")?;
    let task = build(count.ranks)?;
    if whole {
        task.calibrate()?;
    }
    let mut stepper = Stepper::new(&task, config, false).with_ranks(count.ranks, config);
    stepper.scaler = Scaler::smallest(config.precision);
    if !whole {
        stepper.optimizer.make_moments();
    }
    let captures = config.graph_switch() == Switch::On;
    let info = StepInfo { number: 1, epoch: 0, learning_rate: config.learning_rate };
    let loaded = if task.sends_whole_steps() { count.whole } else { count.loaded };
    let mut before = HostUse::default();
    for StepPhase { name, times, seen } in step_phases(whole, captures, task.has_cache()) {
        meter.begin(name)?;
        before = task.host_weights();
        for _ in 0..times {
            let batches: Vec<T::Batch> = (0..loaded).map(|_| task.example(seen)).collect();
            // any micro-batch of a step may be the one that is captured
            let batches = &batches[..if name == CAPTURE { 1 } else { count.shown }];
            stepper.step(batches, info, &mut |_, _| Ok(()))?;
        }
    }
    let moments = if config.offload_optimizer { stepper.optimizer.moment_bytes() } else { Bytes(0) };
    let (copied, host_state) = match &stepper.masters {
        Some(masters) => (masters.copied_bytes(count.whole), masters.host_bytes(config)),
        None => (Bytes(2 * moments.0), moments),
    };
    let bytes = |param: &Parameter| (param.tensor.numel() * param.tensor.kind().elt_size_in_bytes()) as u64;
    let gradients = Bytes(stepper.optimizer.params().iter().map(bytes).sum());
    let facts = StepFacts {
        deterministic: config.deterministic,
        gradients: AddedGradients { bytes: gradients, zero_stage: config.zero_stage },
        // of the last phase, which is one step
        host_weights: task.host_weights().since(&before),
        captured_inputs: captures.then(|| stepper.graphs.input_bytes()),
        copied,
        host_state,
    };
    if !whole {
        return Ok((SavedState::new(), facts));
    }
    meter.begin("evaluate")?;
    stepper.swap_ema()?;
    no_grad(|| task.validate(&Silent, count.ranks))?;
    stepper.swap_ema()?;
    meter.begin("save")?;
    let _category = ledger::enter(ledger::Category::Workspace);
    let mut folder = Staged::discarding();
    task.save(&mut folder)?;
    let state = stepper.state()?;
    checkpoint::save_tensors(&mut folder, &state)?;
    Ok((state.into_iter().map(|(name, tensor)| (name, (tensor.size(), tensor.kind()))).collect(), facts))
}

/// A phase of optimizer steps.
struct StepPhase {
    name: &'static str,
    times: u64,
    /// True if an earlier epoch had the samples of their batches.
    seen: bool,
}

fn step_phases(whole: bool, captures: bool, has_cache: bool) -> Vec<StepPhase> {
    let first = whole.then_some(StepPhase { name: "first step", times: 1, seen: false });
    let capture = captures.then_some(StepPhase { name: CAPTURE, times: SETTLING_STEPS, seen: false });
    let new = has_cache.then_some(StepPhase { name: NEW_IMAGES, times: 1, seen: false });
    [first, capture, new, Some(StepPhase { name: "step", times: 1, seen: has_cache })].into_iter().flatten().collect()
}

/// A new process that restores everything.
fn resume<T: DryRunTask>(
    config: &TrainConfig,
    ranks: Ranks,
    build: &impl Fn(Ranks) -> Result<T>,
    state: &SavedState,
) -> Result<()> {
    let task = build(ranks)?;
    let mut stepper = Stepper::new(&task, config, false).with_ranks(ranks, config);
    let device = stepper.optimizer.params().first().map_or(META, |param| param.tensor.device());
    let target = if config.offload_optimizer && matches!(device, Device::Cuda(_)) { Device::Cpu } else { device };
    // in a planned GPU run, offloaded optimizer state is in host memory, which the plan does not count
    let is_offloaded = config.offload_optimizer && device == META && meta::target() == meta::PlanTarget::Cuda;
    let read = |(shape, kind): &(Vec<i64>, Kind)| {
        if is_offloaded && !shape.is_empty() {
            return Tensor::zeros(vec![1; shape.len()], (*kind, Device::Cpu)).expand(shape, false);
        }
        Tensor::empty(shape, (*kind, target))
    };
    stepper.optimizer.restore(|name| Ok(state.get(name).map(read)))
}
