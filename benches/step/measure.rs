//! Times real steps: runs the training engine and measures with an observer.

use prsmed::event::{Event, Observer};
use prsmed::metrics::order::median;
use prsmed::plan::dry_run::{Meter, PhaseMeter, RealPhase};
use prsmed::segment::dry_run::SegmentDryRun;
use prsmed::tensor::kernel_times::{self, KernelTime};
use prsmed::tensor::{Device, kernels, memory, module_path, synchronize};
use prsmed::trainer::step::StepMark;
use prsmed::trainer::{DryRunTask, Ranks, Session, StepInfo, Stepper, Switch, Task, TrainConfig};
use prsmed::units::Bytes;
use prsmed::{Error, Result, trainer};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Timed work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TimedWork {
    /// An optimizer step
    Train,
    /// A mask and an answer of three tokens
    Predict,
}

/// Numbers of steps.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub(crate) struct Count {
    /// Warm-up steps, not timed.
    pub(crate) warmup: u64,
    /// Timed steps.
    pub(crate) steps: u64,
}

/// Device, steps and observer of a measurement.
#[derive(Clone, Copy)]
pub(crate) struct TimedJob<'a> {
    /// Where steps run.
    pub(crate) device: Device,
    /// Numbers of steps.
    pub(crate) count: Count,
    /// True if steps with CUDA graphs fit.
    pub(crate) has_room: bool,
    /// Receives notes and warnings.
    pub(crate) observer: &'a dyn Observer,
    /// Ends the measurement.
    pub(crate) interrupt: &'a AtomicBool,
}

/// Time and memory of the timed steps.
#[derive(Debug, Clone, serde::Serialize)]
pub(crate) struct Measurement {
    /// Seconds of each step (or prediction), without the wait for its batches.
    pub(crate) seconds: Vec<f64>,
    /// Seconds of waiting for the loader before each step; `None` for examples.
    pub(crate) wait_seconds: Option<Vec<f64>>,
    /// Questions of a step.
    pub(crate) samples: f64,
    /// Tokens of a step that the language model processes; `None` if texts differ.
    pub(crate) tokens: Option<u64>,
    /// Peaks of the timed steps.
    pub(crate) memory: RealPhase,
    /// Peak resident memory of this process, and its resident memory before the first tensor.
    pub(crate) resident: (Bytes, Bytes),
    /// Seconds by part of one more step.
    pub(crate) parts: Option<module_path::ModuleTimes>,
    /// Kernels of one more step (on the CPU: operators), the longest first.
    pub(crate) kernels: Option<Vec<KernelTime>>,
    /// Notes about CUDA graphs and custom CUDA kernels.
    pub(crate) notes: Vec<String>,
}

impl Measurement {
    /// Median seconds of a step.
    pub(crate) fn median(&self) -> f64 {
        median(&self.seconds)
    }

    /// Median seconds of a step and of the wait for its batches.
    pub(crate) fn median_with_wait(&self) -> f64 {
        self.median() + self.wait_seconds.as_deref().map_or(0.0, median)
    }
}

/// Settings of a run with exactly the counted steps, which does not change weights.
pub(crate) fn settings(train: &TrainConfig, count: Count) -> TrainConfig {
    TrainConfig {
        // random values must stay finite; the arithmetic is the same
        learning_rate: 0.0,
        min_learning_rate: 0.0,
        epochs: u64::from(u32::MAX),
        max_steps: count.warmup + count.steps,
        validate_every_epochs: 0,
        checkpoint_every_steps: 0,
        ..train.clone()
    }
}

/// Times steps of a model from `build`, on examples.
///
/// # Errors
/// Typed errors of libtorch.
pub(crate) fn examples(
    job: TimedJob,
    work: TimedWork,
    train: &TrainConfig,
    parts: bool,
    build: impl FnOnce() -> Result<SegmentDryRun>,
) -> Result<Measurement> {
    let mut meter = PhaseMeter::begin(job.device)?;
    meter.begin("load")?;
    kernels::check(job.device)?;
    if let Some(reason) = (job.device != Device::Cpu).then(kernels::unavailable).flatten() {
        job.observer.on(&Event::Warning(format!("custom CUDA kernels are off: {reason}")));
    }
    for refusal in kernels::refusals() {
        job.observer.on(&Event::Warning(refusal));
    }
    let task = build()?.with_steps(job.count.warmup + job.count.steps);
    let tokens = task.tokens(&task.example(true)) * train.accumulation as u64;
    if work == TimedWork::Predict {
        return predictions(job, &task, meter);
    }
    let mut measurement = training(job, &task, train, meter)?;
    measurement.wait_seconds = None;
    measurement.tokens = Some(tokens);
    if parts {
        measurement.parts = Some(parts_of_a_step(&task, train, job.device)?);
        measurement.kernels = Some(kernels_of_a_step(&task, train, job.device)?);
    }
    Ok(measurement)
}

/// Times steps of `task` on its own batches.
///
/// # Errors
/// Typed errors of libtorch, and errors of the data.
pub(crate) fn training<T: Task>(
    job: TimedJob,
    task: &T,
    train: &TrainConfig,
    meter: PhaseMeter,
) -> Result<Measurement> {
    let folder = tempfile::tempdir().map_err(Error::io("the folder of temporary files", "write"))?;
    let config = settings(train, job.count);
    let total = config.max_steps;
    let timer = StepTimer {
        inner: job.observer,
        warmup: job.count.warmup,
        total,
        seen: Mutex::new(Seen { meter: Some(meter), ..Seen::default() }),
    };
    let session = Session {
        config: &config,
        folder: folder.path(),
        settings: "",
        resume: false,
        profile: None,
        observer: &timer,
        interrupt: job.interrupt,
        has_room_for_graphs: job.has_room,
        ranks: Ranks::default(),
    };
    if let Some(most) = trainer::run(task, &session)?.reduced_micro_batch {
        let reason = format!("micro-batches of {} do not fit, {most} did", train.micro_batch);
        return Err(Error::OutOfMemory { reason });
    }
    let seen = timer.seen.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(error) = seen.failed {
        return Err(error);
    }
    Ok(Measurement {
        seconds: seen.seconds,
        wait_seconds: Some(seen.waits),
        samples: seen.samples,
        tokens: None,
        memory: seen.phase.unwrap_or_else(|| unreachable!("the last step ends it")),
        resident: resident()?,
        parts: None,
        kernels: None,
        notes: seen.notes,
    })
}

/// Times predictions, one after the other.
fn predictions(job: TimedJob, task: &SegmentDryRun, mut meter: PhaseMeter) -> Result<Measurement> {
    let Count { warmup, steps } = job.count;
    job.observer.on(&Event::Started { phase: "predict".into(), total: warmup + steps, unit: "steps" });
    let mut seconds = Vec::new();
    for step in 0..warmup + steps {
        if step == warmup {
            meter.begin("predict")?;
        }
        let start = Instant::now();
        task.predict()?;
        synchronize(job.device);
        if step >= warmup {
            seconds.push(start.elapsed().as_secs_f64());
        }
        job.observer.on(&Event::Advanced { done: step + 1 });
        if job.interrupt.load(Ordering::SeqCst) {
            return Err(Error::Interrupted);
        }
    }
    job.observer.on(&Event::Finished);
    let memory = last(meter)?;
    let resident = resident()?;
    Ok(Measurement {
        seconds,
        wait_seconds: None,
        samples: 1.0,
        tokens: None,
        memory,
        resident,
        parts: None,
        kernels: None,
        notes: Vec::new(),
    })
}

/// Ends the measurement; returns its phase.
fn last(meter: PhaseMeter) -> Result<RealPhase> {
    Ok(meter.finish()?.pop().unwrap_or_else(|| unreachable!("a phase was begun")))
}

fn resident() -> Result<(Bytes, Bytes)> {
    Ok((memory::read(Device::Cpu)?.system.resident_peak, memory::resident_at_start()))
}

/// The parts of one more step, each timed to its end: modules of the forward pass, backward pass, optimizer.
fn parts_of_a_step<T: DryRunTask>(task: &T, train: &TrainConfig, device: Device) -> Result<module_path::ModuleTimes> {
    let timer = module_path::Stopwatch::start(device);
    let (mut parts, mut backward, mut optimizer, mut since) =
        (module_path::ModuleTimes::new(), 0.0, 0.0, Instant::now());
    eager_step(task, train, &mut |mark| {
        synchronize(device);
        let seconds = since.elapsed().as_secs_f64();
        match mark {
            StepMark::Forward => add(&mut parts, timer.take()),
            StepMark::Backward => {
                backward += seconds;
                // recomputed modules belong to the backward pass
                drop(timer.take());
            }
            StepMark::Optimizer => optimizer += seconds,
            StepMark::Gradients | StepMark::Ema => {}
        }
        since = Instant::now();
    })?;
    parts.extend([("backward", backward), ("optimizer", optimizer)]);
    Ok(parts)
}

/// The kernels of one more step.
fn kernels_of_a_step<T: DryRunTask>(task: &T, train: &TrainConfig, device: Device) -> Result<Vec<KernelTime>> {
    kernel_times::measure(device, || eager_step(task, train, &mut |_| ()))
}

/// One step without CUDA graphs, which changes no weight.
fn eager_step<T: DryRunTask>(task: &T, train: &TrainConfig, at: &mut dyn FnMut(StepMark)) -> Result<()> {
    let config = settings(train, Count { warmup: 0, steps: 1 });
    let config = TrainConfig { graph: Switch::Off, step_in_backward: false, ema_decay: 0.0, ..config };
    let mut stepper = Stepper::new(task, &config, false);
    stepper.optimizer.make_moments();
    let batches: Vec<T::Batch> = (0..train.accumulation).map(|_| task.example(true)).collect();
    stepper.step(&batches, StepInfo { number: 1, epoch: 0, learning_rate: 0.0 }, &mut |mark, _| {
        at(mark);
        Ok(())
    })?;
    Ok(())
}

fn add(sums: &mut module_path::ModuleTimes, parts: module_path::ModuleTimes) {
    for (name, seconds) in parts {
        match sums.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum += seconds,
            None => sums.push((name, seconds)),
        }
    }
}

/// Observer that reads clock and memory at the end of each step.
struct StepTimer<'a> {
    inner: &'a dyn Observer,
    warmup: u64,
    total: u64,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    seconds: Vec<f64>,
    waits: Vec<f64>,
    samples: f64,
    meter: Option<PhaseMeter>,
    phase: Option<RealPhase>,
    failed: Option<Error>,
    notes: Vec<String>,
}

impl Seen {
    fn step(&mut self, report: &prsmed::event::StepReport, warmup: u64, total: u64) -> Result<()> {
        if report.step > warmup {
            self.seconds.push(report.elapsed.saturating_sub(report.data_wait).as_secs_f64());
            self.waits.push(report.data_wait.as_secs_f64());
            let samples = report.samples as f64;
            self.samples = samples;
        }
        if report.step == warmup
            && let Some(meter) = &mut self.meter
        {
            meter.begin("step")?;
        }
        if report.step == total
            && let Some(meter) = self.meter.take()
        {
            self.phase = Some(last(meter)?);
        }
        Ok(())
    }
}

impl StepTimer<'_> {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for StepTimer<'_> {
    fn on(&self, event: &Event) {
        match event {
            Event::Step(report) => {
                let mut seen = self.seen();
                if let Err(error) = seen.step(report, self.warmup, self.total) {
                    seen.failed.get_or_insert(error);
                }
                drop(seen);
                self.inner.on(&Event::Advanced { done: report.step });
            }
            Event::Saved { .. } => {}
            Event::Note(text) if text.starts_with("graphs: ") || text.starts_with("kernels: ") => {
                self.seen().notes.push(text.clone());
                self.inner.on(event);
            }
            other => self.inner.on(other),
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn steps_after_the_warm_up_count_and_the_rest_is_waiting() {
        use super::*;
        use prsmed::event::{Silent, StepReport};
        use std::time::Duration;
        let timer = StepTimer { inner: &Silent, warmup: 1, total: 3, seen: Mutex::default() };
        for step in 1..=3 {
            let [elapsed, data_wait] = [15 * step, 10 * step].map(Duration::from_millis);
            timer.on(&Event::Step(StepReport { step, elapsed, data_wait, samples: 6, ..StepReport::default() }));
        }
        let seen = timer.seen();
        assert_eq!(
            (seen.seconds.as_slice(), seen.waits.as_slice()),
            ([0.01, 0.015].as_slice(), [0.02, 0.03].as_slice())
        );
        assert_eq!(seen.samples, 6.0);
    }

    #[test]
    fn the_time_of_a_step_includes_the_wait_for_its_batches() {
        use super::*;
        let memory = RealPhase {
            name: "step",
            allocated_peak: Bytes(0),
            reserved_peak: Bytes(0),
            device_used: None,
            categories: Vec::new(),
            seconds: 0.0,
        };
        let examples = Measurement {
            seconds: vec![1.0, 3.0, 2.0],
            wait_seconds: None,
            samples: 4.0,
            tokens: None,
            memory,
            resident: (Bytes(0), Bytes(0)),
            parts: None,
            kernels: None,
            notes: Vec::new(),
        };
        let rows = Measurement { wait_seconds: Some(vec![0.5, 0.25, 1.0]), ..examples.clone() };
        assert_eq!((examples.median_with_wait(), rows.median_with_wait()), (2.0, 2.5));
    }

    #[test]
    fn timed_steps_change_no_weight_and_save_nothing() {
        use super::*;
        let train = TrainConfig {
            learning_rate: 1.0,
            min_learning_rate: 1.0,
            max_steps: 7,
            validate_every_epochs: 1,
            checkpoint_every_steps: 1,
            ..TrainConfig::default()
        };
        let timed = settings(&train, Count { warmup: 2, steps: 3 });
        assert_eq!((timed.learning_rate, timed.min_learning_rate), (0.0, 0.0));
        assert_eq!((timed.max_steps, timed.validate_every_epochs, timed.checkpoint_every_steps), (5, 0, 0));
    }

    #[test]
    fn notes_about_graphs_and_kernels_are_part_of_the_measurement() {
        use super::*;
        use prsmed::event::Silent;
        let timer = StepTimer { inner: &Silent, warmup: 1, total: 3, seen: Mutex::default() };
        for text in ["graphs: captured", "an epoch has 8 rows", "kernels: faster"] {
            timer.on(&Event::Note(text.into()));
        }
        assert_eq!(timer.seen().notes, ["graphs: captured", "kernels: faster"]);
    }
}
