//! Runs the phases of a task: on the meta device, under a trace, that is the plan; on the CPU, under the ledger, the
//! measurement.
//!
//! The phases call the engine's own functions; nothing here knows a formula.

use crate::Result;
use crate::event::Silent;
use crate::tensor::ledger::CATEGORIES;
use crate::tensor::trace::{Change, Recording, Trace};
use crate::tensor::weights::Staged;
use crate::tensor::{Kind, META, Tensor, ledger, meta, no_grad, trace};
use crate::trainer::ema::Ema;
use crate::trainer::optimizer::AdamW;
use crate::trainer::precision::Scaler;
use crate::trainer::{Rehearse, TrainConfig, checkpoint, run};
use crate::units::Bytes;
use std::collections::HashMap;

/// What is rehearsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Job {
    /// A training run: load, first step, step, evaluation, saving, resuming.
    Train,
    /// Validation of loaded weights.
    Eval,
    /// One picture and its question.
    Predict,
}

/// Memory of one phase.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Phase {
    /// `load`, `first step` (optimizer state appears), `step`, `evaluate`, `save`, `resume`, `predict`.
    pub name: &'static str,
    /// The most bytes of tensors that lived at once, above what lived before the task.
    pub allocated_peak: Bytes,
    /// That peak by category.
    pub categories: Vec<(&'static str, Bytes)>,
}

/// Hears where phases begin.
pub trait Meter {
    /// A phase begins; the one before has ended.
    fn begin(&mut self, phase: &'static str);
}

impl Meter for Recording {
    fn begin(&mut self, phase: &'static str) {
        self.mark(phase);
    }
}

/// Reads the ledger: for tasks on the CPU.
#[derive(Debug)]
pub struct Measured {
    before: ledger::Usage,
    current: Option<&'static str>,
    phases: Vec<Phase>,
}

impl Measured {
    /// Starts from what lives now. Nothing else may allocate tensors meanwhile.
    pub fn begin() -> Self {
        ledger::install();
        Self { before: ledger::usage(), current: None, phases: Vec::new() }
    }

    /// The phases that ran.
    pub fn finish(mut self) -> Vec<Phase> {
        self.end();
        self.phases
    }

    fn end(&mut self) {
        let Some(name) = self.current.take() else { return };
        let now = ledger::usage();
        let above = |now: Bytes, before: Bytes| Bytes(now.0.saturating_sub(before.0));
        let categories = now.categories.iter().zip(&self.before.categories);
        self.phases.push(Phase {
            name,
            allocated_peak: above(now.allocated_peak, self.before.allocated),
            categories: categories.map(|(now, before)| (now.name, above(now.at_peak, before.allocated))).collect(),
        });
    }
}

impl Meter for Measured {
    fn begin(&mut self, phase: &'static str) {
        self.end();
        ledger::reset_peak();
        self.current = Some(phase);
    }
}

/// Plans `job`: runs it on [`META`] as `target` would.
///
/// # Errors
/// What the task says.
pub fn plan<T: Rehearse>(
    job: Job,
    config: &TrainConfig,
    target: meta::Target,
    build: impl Fn() -> Result<T>,
) -> Result<Trace> {
    meta::install()?;
    let _target = meta::enter_target(target);
    let mut recording = trace::begin(target == meta::Target::Cpu)?;
    rehearse(job, config, &build, &mut recording)?;
    Ok(recording.finish())
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
    match job {
        Job::Train => {
            let state = train(config, build, meter)?;
            meter.begin("resume");
            resume(config, build, &state)
        }
        Job::Eval => {
            meter.begin("load");
            let task = build()?;
            meter.begin("evaluate");
            no_grad(|| task.validate(&Silent)).map(drop)
        }
        Job::Predict => {
            meter.begin("load");
            let task = build()?;
            meter.begin("predict");
            task.predict()
        }
    }
}

/// Names and shapes of what a checkpoint holds besides the task's own tensors.
type SavedState = HashMap<String, Vec<i64>>;

fn train<T: Rehearse>(
    config: &TrainConfig,
    build: &impl Fn() -> Result<T>,
    meter: &mut impl Meter,
) -> Result<SavedState> {
    meter.begin("load");
    let task = build()?;
    let mut optimizer = AdamW::new(task.parameters(), config);
    let mut ema = average(config, &optimizer);
    let scaler = Scaler::new(config.precision);
    for name in ["first step", "step"] {
        meter.begin(name);
        let batches: Vec<T::Batch> = (0..config.accumulation).map(|_| task.example()).collect();
        let (_whole, losses) = run::accumulate(&task, &batches, &scaler, 0)?;
        drop(losses);
        let gradients = optimizer.measure(scaler.unscale_factor());
        optimizer.step(config.learning_rate, gradients)?;
        if let Some(ema) = &mut ema {
            ema.update(1, optimizer.params());
        }
    }
    meter.begin("evaluate");
    swap(&mut ema, &optimizer);
    no_grad(|| task.validate(&Silent))?;
    swap(&mut ema, &optimizer);
    meter.begin("save");
    let _category = ledger::enter(ledger::Category::Workspace);
    let mut folder = Staged::nowhere();
    task.save(&mut folder)?;
    checkpoint::save_tensors(&mut folder, &optimizer, ema.as_ref())?;
    let state = checkpoint::state(&optimizer, ema.as_ref());
    Ok(state.into_iter().map(|(name, tensor)| (name, tensor.size())).collect())
}

/// A new process that reads everything back.
fn resume<T: Rehearse>(config: &TrainConfig, build: &impl Fn() -> Result<T>, state: &SavedState) -> Result<()> {
    let task = build()?;
    let mut optimizer = AdamW::new(task.parameters(), config);
    let _ema = average(config, &optimizer);
    let device = optimizer.params().first().map_or(META, |param| param.tensor.device());
    optimizer.restore(|name| Ok(state.get(name).map(|shape| Tensor::empty(shape, (Kind::Float, device)))))
}

fn average(config: &TrainConfig, optimizer: &AdamW) -> Option<Ema> {
    (config.ema_decay > 0.0).then(|| Ema::new(config.ema_decay, optimizer.params()))
}

fn swap(ema: &mut Option<Ema>, optimizer: &AdamW) {
    if let Some(ema) = ema {
        ema.swap(optimizer.params());
    }
}

/// Peaks of the marked phases of a trace.
pub fn phases(trace: &Trace) -> Vec<Phase> {
    let mut live = vec![(0_u64, 0_u8); 0];
    let (mut total, mut by_category) = (0_u64, [0_u64; CATEGORIES.len()]);
    let mut phases = Vec::new();
    let ends = trace.marks.iter().skip(1).map(|mark| mark.1).chain([trace.events.len()]);
    for (&(name, start, _), end) in trace.marks.iter().zip(ends) {
        let (mut peak, mut at_peak) = (total, by_category);
        for event in &trace.events[start..end] {
            let block = event.block as usize;
            match event.change {
                Change::Allocate(bytes) => {
                    live.resize(live.len().max(block + 1), (0, 0));
                    live[block] = (bytes, event.category);
                    total += bytes;
                    by_category[usize::from(event.category)] += bytes;
                    if total > peak {
                        (peak, at_peak) = (total, by_category);
                    }
                }
                Change::Release => {
                    let (bytes, category) = live[block];
                    total -= bytes;
                    by_category[usize::from(category)] -= bytes;
                }
                Change::Move => {
                    let (bytes, category) = live[block];
                    by_category[usize::from(category)] -= bytes;
                    by_category[usize::from(event.category)] += bytes;
                    live[block].1 = event.category;
                }
            }
        }
        let categories = CATEGORIES.iter().zip(at_peak).map(|((_, name), bytes)| (*name, Bytes(bytes))).collect();
        phases.push(Phase { name, allocated_peak: Bytes(peak), categories });
    }
    phases
}
