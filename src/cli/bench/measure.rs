//! Real steps under the clock: the engine's own run, watched from outside.

use super::Work;
use crate::event::{Event, Observer};
use crate::plan::rehearse::{Measured, Meter, Phase};
use crate::segment::rehearsal::Rehearsal;
use crate::tensor::{Device, kernels, memory, scope, synchronize};
use crate::trainer::optimizer::AdamW;
use crate::trainer::precision::Scaler;
use crate::trainer::run::{self, Session};
use crate::trainer::{Rehearse, Task, TrainConfig};
use crate::units::Bytes;
use crate::{Error, Result, trainer};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Steps that are run.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub(super) struct Count {
    /// Not timed.
    pub(super) warmup: u64,
    /// Timed.
    pub(super) steps: u64,
}

/// What runs, on what, and who hears of it.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) device: Device,
    pub(super) count: Count,
    /// Whether recorded steps fit.
    pub(super) has_room: bool,
    pub(super) observer: &'a dyn Observer,
    pub(super) interrupt: &'a AtomicBool,
}

/// What timed steps took.
#[derive(Debug, Clone, serde::Serialize)]
pub(super) struct Measurement {
    /// Of each step (or prediction), without waiting for its batches.
    pub(super) seconds: Vec<f64>,
    /// Waiting for the loader before each step; `None` for examples.
    pub(super) wait_seconds: Option<Vec<f64>>,
    /// Questions of a step.
    pub(super) samples: f64,
    /// Tokens of a step that pass the language model; `None` where texts differ.
    pub(super) tokens: Option<u64>,
    /// Peaks of the timed steps.
    pub(super) memory: Phase,
    /// The most resident memory of this process so far, and what it had before its first tensor.
    pub(super) resident: (Bytes, Bytes),
    /// Seconds by part of one more step.
    pub(super) parts: Option<scope::Parts>,
    /// What was said about recorded passes and kernels of our own.
    pub(super) notes: Vec<String>,
}

impl Measurement {
    pub(super) fn median(&self) -> f64 {
        median(&self.seconds)
    }
}

/// The middle value; of an even number the mean of the middle two.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        length if length.is_multiple_of(2) => f64::midpoint(sorted[half - 1], sorted[half]),
        _ => sorted[half],
    }
}

/// The settings of a run that lasts as long as the steps that are counted, and changes no weights.
pub(super) fn settings(train: &TrainConfig, count: Count) -> TrainConfig {
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

/// Steps of a model that `build` makes, on examples.
pub(super) fn examples(
    job: Job,
    work: Work,
    train: &TrainConfig,
    parts: bool,
    build: impl FnOnce() -> Result<Rehearsal>,
) -> Result<Measurement> {
    let mut meter = Measured::begin(job.device)?;
    meter.begin("load")?;
    kernels::check(job.device)?;
    if let Some(reason) = (job.device != Device::Cpu).then(kernels::unavailable).flatten() {
        job.observer.on(&Event::Warning(format!("kernels of our own are off: {reason}")));
    }
    let task = build()?.with_steps(job.count.warmup + job.count.steps);
    let tokens = task.tokens(&task.example(true)) * train.accumulation as u64;
    if work == Work::Predict {
        return predictions(job, &task, meter);
    }
    let mut measurement = training(job, &task, train, meter)?;
    measurement.wait_seconds = None;
    measurement.tokens = Some(tokens);
    if parts {
        measurement.parts = Some(parts_of_a_step(&task, train, job.device)?);
    }
    Ok(measurement)
}

/// Steps of `task` on its own batches.
pub(super) fn training<T: Task>(job: Job, task: &T, train: &TrainConfig, meter: Measured) -> Result<Measurement> {
    let folder = tempfile::tempdir().map_err(Error::io("the folder of temporary files", "write"))?;
    let config = settings(train, job.count);
    let total = config.max_steps;
    let watch = Watch {
        inner: job.observer,
        warmup: job.count.warmup,
        total,
        seen: Mutex::new(Seen { meter: Some(meter), ..Seen::default() }),
    };
    let session = Session {
        config: &config,
        folder: folder.path(),
        resume: false,
        profile: None,
        observer: &watch,
        interrupt: job.interrupt,
        has_room_for_graphs: job.has_room,
    };
    if let Some(most) = trainer::run(task, &session)?.reduced_micro_batch {
        let reason = format!("micro-batches of {} do not fit, {most} did", train.micro_batch);
        return Err(Error::OutOfMemory { reason });
    }
    let seen = watch.seen.into_inner().unwrap_or_else(PoisonError::into_inner);
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
        notes: seen.notes,
    })
}

/// Predictions, one after the other.
fn predictions(job: Job, task: &Rehearsal, mut meter: Measured) -> Result<Measurement> {
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
        notes: Vec::new(),
    })
}

/// The phase that ends now.
fn last(meter: Measured) -> Result<Phase> {
    Ok(meter.finish()?.pop().unwrap_or_else(|| unreachable!("a phase was begun")))
}

fn resident() -> Result<(Bytes, Bytes)> {
    Ok((memory::read(Device::Cpu)?.system.resident_peak, memory::at_start()))
}

/// One more step, whose parts are waited for one by one: the modules of the forward pass, the backward pass, the optimizer.
fn parts_of_a_step<T: Rehearse>(task: &T, train: &TrainConfig, device: Device) -> Result<scope::Parts> {
    let mut optimizer = AdamW::new(task.parameters(), &settings(train, Count { warmup: 0, steps: 1 }));
    optimizer.make_moments();
    let scaler = Scaler::new(train.precision);
    let batches: Vec<T::Batch> = (0..train.accumulation).map(|_| task.example(true)).collect();
    let watch = scope::Stopwatch::start(device);
    let (mut parts, mut backward, mut since) = (scope::Parts::new(), 0.0, Instant::now());
    let mark = &mut |label| {
        synchronize(device);
        if label == "forward" {
            add(&mut parts, watch.take());
            since = Instant::now();
        } else {
            backward += since.elapsed().as_secs_f64();
            // what is computed again belongs to the backward pass
            drop(watch.take());
        }
        Ok(())
    };
    run::accumulate_marked(task, &batches, &scaler, 0, mark)?;
    drop(watch);
    let start = Instant::now();
    let gradients = optimizer.measure(scaler.unscale_factor())?;
    optimizer.step(0.0, &gradients)?;
    synchronize(device);
    parts.extend([("backward", backward), ("optimizer", start.elapsed().as_secs_f64())]);
    Ok(parts)
}

fn add(sums: &mut scope::Parts, parts: scope::Parts) {
    for (name, seconds) in parts {
        match sums.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum += seconds,
            None => sums.push((name, seconds)),
        }
    }
}

/// Hears when steps end, and reads clock and memory there.
struct Watch<'a> {
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
    meter: Option<Measured>,
    phase: Option<Phase>,
    failed: Option<Error>,
    notes: Vec<String>,
}

impl Seen {
    fn step(&mut self, report: &crate::event::StepReport, warmup: u64, total: u64) -> Result<()> {
        if report.step > warmup {
            self.seconds.push(report.elapsed.saturating_sub(report.data_wait).as_secs_f64());
            self.waits.push(report.data_wait.as_secs_f64());
            #[expect(clippy::cast_precision_loss, reason = "few questions")]
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

impl Watch<'_> {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for Watch<'_> {
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
    use super::*;
    use crate::event::{Silent, StepReport};
    use std::time::Duration;

    #[test]
    fn the_middle() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-12);
        assert!(median(&[]).abs() < 1e-12);
    }

    #[test]
    fn steps_after_the_warm_up_count_and_the_rest_is_waiting() {
        let watch = Watch { inner: &Silent, warmup: 1, total: 3, seen: Mutex::default() };
        for step in 1..=3 {
            let [elapsed, data_wait] = [15 * step, 10 * step].map(Duration::from_millis);
            watch.on(&Event::Step(StepReport { step, elapsed, data_wait, samples: 6, ..StepReport::default() }));
        }
        let seen = watch.seen();
        assert_eq!(
            (seen.seconds.as_slice(), seen.waits.as_slice()),
            ([0.01, 0.015].as_slice(), [0.02, 0.03].as_slice())
        );
        assert_eq!(seen.samples, 6.0);
    }
}
