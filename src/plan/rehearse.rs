//! Runs the phases of a task: on the meta device, under a trace, that is the plan; on the CPU, under the ledger, the
//! measurement.
//!
//! The phases call the engine's own functions; nothing here knows a formula.

use crate::Result;
use crate::event::Silent;
use crate::tensor::trace::{Recording, Trace};
use crate::tensor::weights::Staged;
use crate::tensor::{Device, Kind, META, Tensor, kernels, ledger, memory, meta, no_grad, trace};
use crate::trainer::ema::Ema;
use crate::trainer::graph::{Graphs, SETTLING_STEPS};
use crate::trainer::optimizer::AdamW;
use crate::trainer::precision::Scaler;
use crate::trainer::{Rehearse, Switch, TrainConfig, checkpoint, run};
use crate::units::Bytes;
use std::collections::HashMap;

/// What is rehearsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Job {
    /// A training run: load, first step, step, evaluation, saving, resuming.
    Train,
    /// A step of it alone, with everything that lives then.
    Step,
    /// Validation of loaded weights.
    Eval,
    /// One picture and its question.
    Predict,
    /// A batch of new pictures: prompts, weights, pictures to latents, denoising, latents to pictures.
    Augment,
}

/// Measured memory of one phase; [`super::replay::PhaseMemory`] is the planned one.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Phase {
    /// `load`, `first step` (optimizer state appears), `record` (steps until they are recorded), `new pictures` (a step that
    /// keeps something for `step`), `step`, `evaluate`, `save`, `resume`, `predict`.
    pub name: &'static str,
    /// The most bytes of tensors that lived at once, above what lived before the task.
    pub allocated_peak: Bytes,
    /// The most bytes that the allocator held in all.
    pub reserved_peak: Bytes,
    /// Used bytes of the card by all processes when the phase ended; `None` on the CPU.
    pub device_used: Option<Bytes>,
    /// That peak by category; empty on a card.
    pub categories: Vec<(&'static str, Bytes)>,
}

/// Hears where phases begin.
pub trait Meter {
    /// A phase begins; the one before has ended.
    ///
    /// # Errors
    /// When the device's memory cannot be read.
    fn begin(&mut self, phase: &'static str) -> Result<()>;
}

impl Meter for Recording {
    fn begin(&mut self, phase: &'static str) -> Result<()> {
        self.mark(phase);
        Ok(())
    }
}

/// Reads a device's memory: for tasks that really run.
#[derive(Debug)]
pub struct Measured {
    device: Device,
    before: memory::Reading,
    current: Option<&'static str>,
    phases: Vec<Phase>,
}

impl Measured {
    /// Starts from what lives now on `device`. Nothing else may allocate tensors there meanwhile.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] for a card that is not in use.
    pub fn begin(device: Device) -> Result<Self> {
        ledger::install();
        if device != Device::Cpu {
            // a card's allocator can be read once it is in use
            drop(crate::tensor::guard::guard(|| Ok(Tensor::zeros([1], (Kind::Float, device))))?);
        }
        Ok(Self { device, before: memory::read(device)?, current: None, phases: Vec::new() })
    }

    /// The phases that ran.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn finish(mut self) -> Result<Vec<Phase>> {
        self.end()?;
        Ok(self.phases)
    }

    fn end(&mut self) -> Result<()> {
        let Some(name) = self.current.take() else { return Ok(()) };
        let now = memory::read(self.device)?;
        let above = |now: Bytes, before: Bytes| Bytes(now.0.saturating_sub(before.0));
        let categories = now.categories_at_peak.iter().zip(&self.before.categories);
        self.phases.push(Phase {
            name,
            allocated_peak: above(now.allocated_peak, self.before.allocated),
            reserved_peak: now.reserved_peak,
            device_used: now.system.device_used,
            categories: categories.map(|(now, before)| (now.0, above(now.1, before.1))).collect(),
        });
        Ok(())
    }
}

impl Meter for Measured {
    fn begin(&mut self, phase: &'static str) -> Result<()> {
        self.end()?;
        memory::begin_window(self.device)?;
        self.current = Some(phase);
        Ok(())
    }
}

/// A job that ran on [`META`].
#[derive(Debug)]
pub struct Rehearsed {
    /// What ran.
    pub job: Job,
    /// What it allocated and computed.
    pub trace: Trace,
    /// Micro-batches of a step, and those that ran.
    micro_batches: (usize, usize),
    /// Buffers of its data; none without data.
    pub buffers: Buffers,
    /// What else is known of its steps.
    pub steps: StepFacts,
}

/// What a rehearsal shows of steps besides what they allocate and compute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepFacts {
    /// Bytes of a recording's fixed inputs, where steps are recorded.
    pub recorded_inputs: Option<Bytes>,
    /// Bytes that a step brings from host memory and back.
    pub over_the_bus: Bytes,
}

/// What a run takes of the host's memory besides tensors: bytes of its input pipeline, and which kernels it needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Buffers {
    /// Micro-batches made ahead.
    pub ahead: u64,
    /// Preprocessed pictures kept for later epochs.
    pub cache: u64,
    /// Vision features kept for later epochs.
    pub features: u64,
    /// Fixed inputs of further recordings.
    pub recordings: u64,
    /// Whether it computes in bf16 or fp16.
    pub half_precision: bool,
}

impl Rehearsed {
    /// How often the micro-batches that ran make a step.
    #[expect(clippy::cast_precision_loss, reason = "small counts")]
    pub fn repeats(&self) -> f64 {
        match self.job {
            Job::Train | Job::Step => self.micro_batches.0 as f64 / self.micro_batches.1 as f64,
            Job::Augment => self.micro_batches.0 as f64 / self.micro_batches.1.max(1) as f64,
            Job::Eval | Job::Predict => 1.0,
        }
    }
}

/// Denoising steps of a batch, and those that a rehearsal runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steps {
    /// Of a whole trajectory.
    pub whole: usize,
    /// Of the rehearsal.
    pub shown: usize,
}

/// Plans a job that walks its phases itself: `walk` runs it on [`META`] as `target` would and says where a phase begins.
///
/// # Errors
/// What the job says.
pub fn plan_walk(
    job: Job,
    steps: Steps,
    target: meta::Target,
    costs: bool,
    walk: impl FnOnce(&mut dyn FnMut(&'static str) -> Result<()>) -> Result<()>,
) -> Result<Rehearsed> {
    meta::install()?;
    let _target = meta::enter_target(target);
    let options = trace::Options { counts_host: target == meta::Target::Cpu, costs };
    let mut recording = trace::begin(options)?;
    walk(&mut |phase| recording.begin(phase))?;
    let trace = recording.finish();
    let micro_batches = (steps.whole, steps.shown);
    Ok(Rehearsed { job, trace, micro_batches, buffers: Buffers::default(), steps: StepFacts::default() })
}

/// Steps until they are recorded.
const RECORD: &str = "record";
/// A later step of the first epoch, where what is kept of a batch has to be made first.
const NEW_PICTURES: &str = "new pictures";

/// Micro-batches of a step that a plan runs: from the second one on gradients exist and nothing new happens.
const PLANNED_MICRO_BATCHES: usize = 2;

/// Plans `job`: runs it on [`META`] as `target` would. Without `costs` in half the time, but with neither the names nor the
/// times of operators.
///
/// # Errors
/// What the task says.
pub fn plan<T: Rehearse>(
    job: Job,
    config: &TrainConfig,
    target: meta::Target,
    costs: bool,
    build: impl Fn() -> Result<T>,
) -> Result<Rehearsed> {
    meta::install()?;
    kernels::set_mode(config.fused_kernels.kernels());
    let _target = meta::enter_target(target);
    let options = trace::Options { counts_host: target == meta::Target::Cpu, costs };
    let mut recording = trace::begin(options)?;
    let shown = config.accumulation.min(PLANNED_MICRO_BATCHES);
    // batches wait on the host: on the CPU, where that is the device, all of them count
    let loaded = if target == meta::Target::Cpu { config.accumulation } else { shown };
    let steps = run_phases(job, config, Batches { loaded, shown }, &build, &mut recording)?;
    Ok(Rehearsed {
        job,
        trace: recording.finish(),
        micro_batches: (config.accumulation, shown),
        buffers: Buffers::default(),
        steps,
    })
}

/// Runs the phases of `job` with tasks that `build` makes.
///
/// # Errors
/// What the task says.
pub fn rehearse<T: Rehearse>(
    job: Job,
    config: &TrainConfig,
    build: &impl Fn() -> Result<T>,
    meter: &mut impl Meter,
) -> Result<()> {
    run_phases(job, config, Batches { loaded: config.accumulation, shown: config.accumulation }, build, meter).map(drop)
}

/// Micro-batches of a step that are made, and those that are run.
#[derive(Debug, Clone, Copy)]
struct Batches {
    loaded: usize,
    shown: usize,
}

fn run_phases<T: Rehearse>(
    job: Job,
    config: &TrainConfig,
    count: Batches,
    build: &impl Fn() -> Result<T>,
    meter: &mut impl Meter,
) -> Result<StepFacts> {
    match job {
        Job::Train => {
            let (state, facts) = train(config, count, true, build, meter)?;
            meter.begin("resume")?;
            resume(config, build, &state)?;
            return Ok(facts);
        }
        Job::Step => return train(config, count, false, build, meter).map(|(_, facts)| facts),
        Job::Eval => {
            meter.begin("load")?;
            let task = build()?;
            meter.begin("evaluate")?;
            no_grad(|| task.validate(&Silent))?;
        }
        Job::Predict => {
            meter.begin("load")?;
            let task = build()?;
            meter.begin("predict")?;
            task.predict()?;
        }
        Job::Augment => unreachable!("it walks its phases itself"),
    }
    Ok(StepFacts::default())
}

/// Names, shapes and dtypes of what a checkpoint holds besides the task's own tensors.
type SavedState = HashMap<String, (Vec<i64>, Kind)>;

fn train<T: Rehearse>(
    config: &TrainConfig,
    count: Batches,
    whole: bool,
    build: &impl Fn() -> Result<T>,
    meter: &mut impl Meter,
) -> Result<(SavedState, StepFacts)> {
    meter.begin("load")?;
    let task = build()?;
    if whole {
        task.calibrate()?;
    }
    let mut optimizer = AdamW::new(task.parameters(), config);
    let mut ema = average(config, &optimizer);
    let scaler = Scaler::new(config.precision);
    let records = config.records() == Switch::On;
    let mut graphs = if records { Graphs::new(Switch::On, optimizer.device(), true) } else { Graphs::off() };
    if !whole {
        optimizer.make_moments();
    }
    for Shown { name, times, seen } in shown_steps(whole, records, task.keeps()) {
        meter.begin(name)?;
        let (loaded, ahead) =
            if task.sends_ahead() { (config.accumulation, config.accumulation) } else { (count.loaded, 0) };
        for _ in 0..times {
            let batches: Vec<T::Batch> = (0..loaded).map(|_| task.example(seen)).collect();
            let _next: Vec<T::Batch> = (0..ahead).map(|_| task.example(seen)).collect();
            // a bucket is recorded in any micro-batch of a step
            let batches = &batches[..if name == RECORD { 1 } else { count.shown }];
            if config.step_in_backward {
                let accumulate = || run::accumulate(&task, batches, &scaler, 0);
                let _done = optimizer.step_during(config.learning_rate, accumulate)?;
            } else {
                let _accumulated = if records {
                    graphs.accumulate(&task, batches, &scaler, 0, optimizer.params())?
                } else {
                    run::accumulate(&task, batches, &scaler, 0)?
                };
                graphs.step(&mut optimizer, config.learning_rate, scaler.unscale_factor())?;
            }
            if let Some(ema) = &mut ema {
                ema.update(1, optimizer.params());
            }
        }
    }
    let facts = StepFacts {
        recorded_inputs: records.then(|| graphs.input_bytes()),
        over_the_bus: if config.offload_optimizer { optimizer.moment_bytes() } else { Bytes(0) },
    };
    if !whole {
        return Ok((SavedState::new(), facts));
    }
    meter.begin("evaluate")?;
    swap(&mut ema, &optimizer);
    no_grad(|| task.validate(&Silent))?;
    swap(&mut ema, &optimizer);
    meter.begin("save")?;
    let _category = ledger::enter(ledger::Category::Workspace);
    let mut folder = Staged::nowhere();
    task.save(&mut folder)?;
    checkpoint::save_tensors(&mut folder, &optimizer, ema.as_ref())?;
    let state = checkpoint::state(&optimizer, ema.as_ref());
    Ok((state.into_iter().map(|(name, tensor)| (name, (tensor.size(), tensor.kind()))).collect(), facts))
}

/// A phase of steps.
struct Shown {
    name: &'static str,
    times: u64,
    /// Whether the task has seen the like of their batches.
    seen: bool,
}

fn shown_steps(whole: bool, records: bool, keeps: bool) -> Vec<Shown> {
    let first = whole.then_some(Shown { name: "first step", times: 1, seen: false });
    let record = records.then_some(Shown { name: RECORD, times: SETTLING_STEPS, seen: false });
    let new = keeps.then_some(Shown { name: NEW_PICTURES, times: 1, seen: false });
    [first, record, new, Some(Shown { name: "step", times: 1, seen: keeps })].into_iter().flatten().collect()
}

/// A new process that reads everything back.
fn resume<T: Rehearse>(config: &TrainConfig, build: &impl Fn() -> Result<T>, state: &SavedState) -> Result<()> {
    let task = build()?;
    let mut optimizer = AdamW::new(task.parameters(), config);
    let _ema = average(config, &optimizer);
    let device = optimizer.params().first().map_or(META, |param| param.tensor.device());
    let brought_to = if config.offload_optimizer && matches!(device, Device::Cuda(_)) { Device::Cpu } else { device };
    // moments that stay on the host of a rehearsed card: nobody counts them
    let stays = config.offload_optimizer && device == META && meta::target() == meta::Target::Cuda;
    let read = |(shape, kind): &(Vec<i64>, Kind)| {
        if stays && !shape.is_empty() {
            return Tensor::zeros(vec![1; shape.len()], (*kind, Device::Cpu)).expand(shape, false);
        }
        Tensor::empty(shape, (*kind, brought_to))
    };
    optimizer.restore(|name| Ok(state.get(name).map(read)))
}

fn average(config: &TrainConfig, optimizer: &AdamW) -> Option<Ema> {
    (config.ema_decay > 0.0).then(|| Ema::new(config.ema_decay, optimizer.params()))
}

fn swap(ema: &mut Option<Ema>, optimizer: &AdamW) {
    if let Some(ema) = ema {
        ema.swap(optimizer.params());
    }
}
