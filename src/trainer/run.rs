//! One training run, from the first step or from a checkpoint to the end.

use super::checkpoint::{self, Progress};
use super::ema::Ema;
use super::graph::Graphs;
use super::optimizer::{AdamW, Gradients};
use super::precision::Scaler;
use super::profile::{self, Hooks};
use super::records::Records;
use super::recovery::{self, Fitting};
use super::waiting::Waiting;
use super::{Loss, Switch, Task, TrainConfig, Validation, Weight, schedule};
use crate::event::{Event, Observer, StepReport};
use crate::tensor::weights::{self, Staged};
use crate::tensor::{Kind, Tensor, guard, kernels, ledger, memory, no_grad, rng};
use crate::{Error, Result};
use rand::RngCore;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// Optimizer steps done in all, earlier sessions included.
    pub steps: u64,
    /// Best validation score.
    pub best_score: Option<f64>,
    /// Whether patience ran out.
    pub stopped_early: bool,
    /// Steps done by this call.
    pub steps_now: u64,
    /// Samples seen by this call.
    pub samples_now: u64,
    /// Seconds this call spent in training steps.
    pub train_seconds: f64,
    /// Of these, seconds in which a step's data was not there yet.
    pub data_wait_seconds: f64,
    /// The micro-batch that memory allowed in the end, where it is smaller than configured.
    pub reduced_micro_batch: Option<usize>,
}

/// What a run is given besides its task.
pub struct Session<'a> {
    /// The engine's settings.
    pub config: &'a TrainConfig,
    /// The run folder; gets `last/` and `best/`.
    pub folder: &'a Path,
    /// Continue from `last/`.
    pub resume: bool,
    /// Profile the memory; costs nothing when `None`.
    pub profile: Option<&'a profile::Settings>,
    /// Hears about everything.
    pub observer: &'a dyn Observer,
    /// Set by Ctrl-C: the run saves and ends with [`Error::Interrupted`].
    pub interrupt: &'a AtomicBool,
    /// Whether the plan leaves room for the pool of recorded passes: `train.graph = "auto"` asks.
    pub has_room_for_graphs: bool,
}

impl std::fmt::Debug for Session<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("folder", &self.folder).field("resume", &self.resume).finish_non_exhaustive()
    }
}

struct Engine<'a, T: Task> {
    task: &'a T,
    session: &'a Session<'a>,
    optimizer: AdamW,
    ema: Option<Ema>,
    progress: Progress,
    records: Records,
    waiting: Waiting,
    profile: Hooks<'a>,
    graphs: Graphs<'a>,
    kernels_told: Vec<String>,
    total_steps: u64,
    /// Samples of a micro-batch.
    fitting: Fitting,
    /// Steps done in `last/`.
    saved: Option<u64>,
}

/// Trains `task` to the end of its epochs.
///
/// # Errors
/// [`Error::Interrupted`] after saving; [`Error::Diverged`]; whatever data, weights and libtorch say.
pub fn run<T: Task>(task: &T, session: &Session) -> Result<Outcome> {
    let mut engine = guard::guard(|| Engine::start(task, session))?;
    let steps_per_epoch = engine.progress.steps_per_epoch;
    let mut outcome = Outcome { best_score: engine.progress.best_score, ..Outcome::default() };
    let phase = Event::Started { phase: "train".into(), total: engine.total_steps, unit: "steps" };
    session.observer.on(&phase);
    while engine.progress.step < engine.total_steps && !outcome.stopped_early {
        let epoch = engine.progress.step / steps_per_epoch;
        let mut batches = task.batches(epoch, engine.progress.step % steps_per_epoch)?;
        while let (Some(batch), data_wait) = timed(|| guard::guard(|| batches.next().transpose()).transpose()) {
            let report = batch.and_then(|batch| guard::guard(|| engine.step(&batch, epoch)));
            let mut report = report.or_else(|error| engine.rescue(error))?;
            report.data_wait = data_wait;
            report.elapsed += data_wait;
            outcome.count(&report);
            engine.tell(report)?;
            let ended = engine.progress.step >= engine.total_steps;
            let epoch_ended = ended || engine.progress.step.is_multiple_of(steps_per_epoch);
            if epoch_ended {
                outcome.stopped_early = engine.validate(epoch, ended)?;
            }
            let interrupted = session.interrupt.load(Ordering::SeqCst);
            if epoch_ended || interrupted || engine.save_is_due() {
                engine.save("last")?;
            }
            if interrupted && !ended {
                return Err(Error::Interrupted);
            }
            if ended || outcome.stopped_early {
                break;
            }
        }
    }
    session.observer.on(&Event::Finished);
    let (steps, best_score) = (engine.progress.step, engine.progress.best_score);
    Ok(Outcome { steps, best_score, reduced_micro_batch: engine.fitting.reduced(), ..outcome })
}

/// What `work` gives, and how long it took.
fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    (work(), start.elapsed())
}

impl Outcome {
    fn count(&mut self, report: &StepReport) {
        self.steps_now += 1;
        self.samples_now += report.samples;
        self.train_seconds += report.elapsed.as_secs_f64();
        self.data_wait_seconds += report.data_wait.as_secs_f64();
    }
}

impl<'a, T: Task> Engine<'a, T> {
    fn start(task: &'a T, session: &'a Session<'a>) -> Result<Self> {
        let config = session.config;
        let steps_per_epoch = task.steps_per_epoch();
        let all = config.epochs * steps_per_epoch;
        let total_steps = if config.max_steps > 0 { all.min(config.max_steps) } else { all };
        let mut optimizer = AdamW::new(task.parameters(), config);
        kernels::set_mode(config.fused_kernels.kernels());
        let (progress, ema, done) = if session.resume {
            let (progress, ema) = Self::resumed(task, session, &mut optimizer, steps_per_epoch)?;
            session.observer.on(&Event::Note(format!("resumed at step {} of {total_steps}", progress.step)));
            let done = progress.step;
            (progress, ema, Some(done))
        } else {
            let scaler = Scaler::new(config.precision);
            let fresh = Progress { step: 0, best_score: None, without_gain: 0, scaler, steps_per_epoch };
            (fresh, average(config, &optimizer), None)
        };
        let device = optimizer.device();
        Ok(Self {
            task,
            session,
            ema,
            progress,
            records: Records::open(session.folder, done)?,
            waiting: Waiting::default(),
            profile: Hooks::start(session.profile, session.observer, device, done)?,
            graphs: Graphs::new(config.records(), device, session.has_room_for_graphs),
            kernels_told: Vec::new(),
            total_steps,
            fitting: Fitting::new(config.micro_batch),
            saved: done,
            optimizer,
        })
    }

    /// Reads back what `last/` holds: weights and moments in place, progress and moving average as the result.
    fn resumed(
        task: &T,
        session: &Session,
        optimizer: &mut AdamW,
        steps_per_epoch: u64,
    ) -> Result<(Progress, Option<Ema>)> {
        let last = session.folder.join("last");
        let folder = weights::readable_folder(&last)?;
        weights::verify_folder(&folder)?;
        task.load(&folder)?;
        let mut ema = average(session.config, optimizer);
        let progress = checkpoint::load(&folder, optimizer, ema.as_mut())?;
        if progress.steps_per_epoch != steps_per_epoch {
            let reason = format!(
                "this run had {} steps an epoch, the data and batch sizes given now make {steps_per_epoch}",
                progress.steps_per_epoch
            );
            let hint = "resume with the same data, `train.micro_batch` and `train.accumulation`, or start a new run";
            return Err(Error::weights(last, reason, hint));
        }
        Ok((progress, ema))
    }

    /// Writes a step down and reports it.
    fn tell(&mut self, report: StepReport) -> Result<()> {
        self.records.step(&report)?;
        let waited = self.waiting.add(&report);
        let observer = self.session.observer;
        observer.on(&Event::Step(report));
        for note in waited.into_iter().chain(self.task.note()) {
            observer.on(&Event::Note(note));
        }
        Ok(())
    }

    /// One optimizer step over the micro-batches of an effective batch; where memory runs out, again with smaller ones.
    fn step(&mut self, batches: &[T::Batch], epoch: u64) -> Result<StepReport> {
        let start = Instant::now();
        loop {
            let parts = self.parts(batches);
            match guard::guard(|| self.attempt(parts.as_deref().unwrap_or(batches), epoch, start)) {
                Err(Error::OutOfMemory { reason }) => self.shrink(reason, batches)?,
                outcome => return outcome,
            }
        }
    }

    /// The batches in smaller parts, once that was found to be necessary.
    fn parts(&self, batches: &[T::Batch]) -> Option<Vec<T::Batch>> {
        let most = self.fitting.reduced()?;
        let parts: Option<Vec<Vec<T::Batch>>> = batches.iter().map(|batch| self.task.split(batch, most)).collect();
        parts.map(|parts| parts.into_iter().flatten().collect())
    }

    /// Drops what a step left that ran out of memory, and does without recordings or, where there are none, makes micro-batches
    /// smaller.
    fn shrink(&mut self, reason: String, batches: &[T::Batch]) -> Result<()> {
        if self.optimizer.is_torn() {
            let reason = format!("{reason}; some weights were stepped before, {}", self.what_last_holds());
            return Err(Error::OutOfMemory { reason });
        }
        if self.graphs.is_on() {
            self.optimizer.clear();
            self.graphs.give_up(&format!("memory ran out ({reason}), the step is repeated without"));
            let observer = self.session.observer;
            self.graphs.take_notes().into_iter().for_each(|note| observer.on(&Event::Note(note)));
            memory::clear_failure();
            memory::release_cache(self.optimizer.device())?;
            return Ok(());
        }
        if batches.first().is_none_or(|batch| self.task.split(batch, 1).is_none()) {
            return Err(Error::OutOfMemory { reason });
        }
        self.optimizer.clear();
        let halved = self.fitting.halve(reason, self.optimizer.device())?;
        let text = format!(
            "step {}: {}; it is repeated with micro-batches of {}, the effective batch stays; next time: `{}`",
            self.progress.step + 1,
            halved.what,
            halved.most,
            recovery::remedy(self.session.config, halved.most)
        );
        self.session.observer.on(&Event::Note(text));
        Ok(())
    }

    /// An optimizer step that may run out of memory.
    fn attempt(&mut self, batches: &[T::Batch], epoch: u64, start: Instant) -> Result<StepReport> {
        let config = self.session.config;
        let step = self.progress.step;
        rng::seed(rng::stream(config.seed, "step", &[step]).next_u64());
        self.profile.begin_step(step)?;
        let learning_rate = schedule::learning_rate(config, step, self.total_steps);
        let Self { task, session, optimizer, profile, progress, graphs, .. } = &mut *self;
        let mark = &mut |label| profile.mark(label);
        // one that was split has several gradients to add up
        let ((whole, losses), gradients) = if config.step_in_backward && batches.len() == 1 {
            let backward = || accumulate_marked(*task, batches, &progress.scaler, epoch, mark);
            optimizer.step_during(learning_rate, backward)?
        } else {
            let accumulated = if graphs.is_on() {
                let accumulated = graphs.accumulate(*task, batches, &progress.scaler, epoch, optimizer.params())?;
                mark("backward")?;
                accumulated
            } else {
                accumulate_marked(*task, batches, &progress.scaler, epoch, mark)?
            };
            profile.gradients(optimizer.params());
            let gradients = graphs.step(optimizer, learning_rate, progress.scaler.unscale_factor())?;
            graphs.take_notes().into_iter().for_each(|note| session.observer.on(&Event::Note(note)));
            (accumulated, gradients)
        };
        profile.mark("optimizer")?;
        self.tell_kernels();
        let losses: Vec<(String, f64)> =
            losses.iter().map(|(name, value)| ((*name).to_owned(), value.double_value(&[]))).collect();
        let grad_norm = self.settle(step, &losses, &gradients)?;
        let state = || {
            [self.optimizer.state(), self.ema.as_ref().map_or_else(Vec::new, |ema| ema.state(self.optimizer.params()))]
        };
        self.profile.end_step(self.progress.step, self.task, state)?;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of samples")]
        let samples = whole.samples as u64;
        Ok(StepReport {
            step: self.progress.step,
            total_steps: self.total_steps,
            epoch,
            losses,
            learning_rate,
            grad_norm,
            samples,
            elapsed: start.elapsed(),
            data_wait: Duration::ZERO,
            allocated_peak: memory::overall_peak(self.optimizer.device()).0,
        })
    }

    /// Says which kernels the first steps chose.
    fn tell_kernels(&mut self) {
        /// Steps after which no new kernel is told of.
        const TOLD_STEPS: u64 = 20;
        if self.session.config.fused_kernels != Switch::Auto || self.progress.step > TOLD_STEPS {
            return;
        }
        for kernels::Timing { name, own_us, chain_us } in kernels::choices() {
            if !self.kernels_told.contains(&name) {
                let text = format!("kernels: {name}: ours {own_us:.1} us, libtorch's {chain_us:.1} us");
                self.session.observer.on(&Event::Note(text));
                self.kernels_told.push(name);
            }
        }
    }

    /// Looks at what the step did, which changed nothing when its gradients were not finite; returns their norm.
    fn settle(&mut self, step: u64, losses: &[(String, f64)], gradients: &Gradients) -> Result<f64> {
        let norm = gradients.norm();
        let usable = self.progress.scaler.update(norm.is_finite());
        if norm.is_finite() {
            self.optimizer.mend();
        } else if usable || self.progress.scaler.exhausted() {
            let parts: Vec<String> = losses.iter().map(|(name, value)| format!("{name} {value}")).collect();
            let kept = if self.optimizer.is_torn() {
                format!("weights with other gradients were stepped before, {}", self.what_last_holds())
            } else {
                "`last/` holds the state before".to_owned()
            };
            let reason = format!("step {}: the gradient norm is {norm} ({}); {kept}", step + 1, parts.join(", "));
            return Err(Error::Diverged { reason });
        } else {
            self.session.observer.on(&Event::Note(format!("step {}: fp16 overflow, scale halved", step + 1)));
        }
        self.progress.step += 1;
        if let Some(ema) = &mut self.ema {
            ema.update(self.progress.step, self.optimizer.params());
            self.profile.mark("ema")?;
        }
        Ok(norm)
    }

    fn what_last_holds(&self) -> String {
        match self.saved {
            Some(step) => format!("`last/` holds the state after step {step}"),
            None => "nothing is saved yet".to_owned(),
        }
    }

    /// Validates at the end of an epoch and keeps the best; `true` when patience ran out.
    fn validate(&mut self, epoch: u64, ended: bool) -> Result<bool> {
        let config = self.session.config;
        let due =
            config.validate_every_epochs > 0 && (ended || (epoch + 1).is_multiple_of(config.validate_every_epochs));
        if !due {
            return Ok(false);
        }
        self.profile.begin("evaluate", self.progress.step)?;
        // `best/` and its score belong to the moving average when there is one
        self.swap_ema();
        let outcome = self.validate_and_keep();
        self.swap_ema();
        outcome
    }

    fn validate_and_keep(&mut self) -> Result<bool> {
        let session = self.session;
        let validation = guard::guard(|| no_grad(|| self.task.validate(session.observer)))?;
        self.profile.end(self.progress.step)?;
        let Some(Validation { score, values }) = validation else { return Ok(false) };
        self.records.validation(self.progress.step, &values)?;
        session.observer.on(&Event::Validated { step: self.progress.step, values });
        if self.progress.best_score.is_none_or(|best| score > best) {
            self.progress.best_score = Some(score);
            self.progress.without_gain = 0;
            self.save("best")?;
        } else {
            self.progress.without_gain += 1;
        }
        Ok(session.config.patience > 0 && self.progress.without_gain >= session.config.patience)
    }

    fn swap_ema(&mut self) {
        if let Some(ema) = &mut self.ema {
            ema.swap(self.optimizer.params());
        }
    }

    /// Keeps what is done when a later step fails: the weights are still those of the last good step.
    fn rescue(&mut self, error: Error) -> Result<StepReport> {
        // weights in the middle of a step are worth nothing
        if !matches!(error, Error::Io { .. }) && self.progress.step > 0 && !self.optimizer.is_torn() {
            self.optimizer.clear();
            match self.save("last") {
                // the first failure is the cause
                Ok(()) | Err(Error::OutOfMemory { .. }) => (),
                Err(other) => return Err(other),
            }
        }
        Err(error)
    }

    fn save_is_due(&self) -> bool {
        let every = self.session.config.checkpoint_every_steps;
        every > 0 && self.progress.step.is_multiple_of(every)
    }

    fn save(&mut self, name: &'static str) -> Result<()> {
        let path = self.session.folder.join(name);
        self.profile.begin("save", self.progress.step)?;
        guard::guard(|| self.write(&path))?;
        self.profile.end(self.progress.step)?;
        if name == "last" {
            self.saved = Some(self.progress.step);
        }
        self.session.observer.on(&Event::Saved { path, best: name == "best" });
        Ok(())
    }

    fn write(&self, path: &Path) -> Result<()> {
        let _category = ledger::enter(ledger::Category::Workspace);
        let mut folder = Staged::begin(path)?;
        self.task.save(&mut folder)?;
        checkpoint::save(&mut folder, &self.progress, &self.optimizer, self.ema.as_ref())?;
        folder.publish()
    }
}

/// The moving average that the settings ask for, started at the weights.
fn average(config: &TrainConfig, optimizer: &AdamW) -> Option<Ema> {
    (config.ema_decay > 0.0).then(|| Ema::new(config.ema_decay, optimizer.params()))
}

/// Forward and backward passes over the micro-batches of one optimizer step; gradients stay in the parameters.
///
/// Returns the weight of the effective batch and its losses, scalars on the task's device.
///
/// # Errors
/// As [`Task::loss`].
pub fn accumulate<T: Task>(
    task: &T,
    batches: &[T::Batch],
    scaler: &Scaler,
    epoch: u64,
) -> Result<(Weight, Vec<(&'static str, Tensor)>)> {
    accumulate_marked(task, batches, scaler, epoch, &mut |_| Ok(()))
}

/// As [`accumulate`]; calls `mark` after each `forward` and each `backward`.
///
/// # Errors
/// As [`accumulate`], and what `mark` says.
pub fn accumulate_marked<T: Task>(
    task: &T,
    batches: &[T::Batch],
    scaler: &Scaler,
    epoch: u64,
    mark: &mut dyn FnMut(&'static str) -> Result<()>,
) -> Result<(Weight, Vec<(&'static str, Tensor)>)> {
    let whole: Weight = batches.iter().map(|batch| task.weight(batch)).sum();
    let mut losses: Vec<(&'static str, Tensor)> = Vec::new();
    for batch in batches {
        let Loss { total, parts } = guard::guard(|| task.loss(batch, whole, epoch))?;
        mark("forward")?;
        guard::guard(|| {
            scaler.scale(&total).backward();
            Ok(())
        })?;
        mark("backward")?;
        add_up(&mut losses, parts, total.detach());
    }
    Ok((whole, losses))
}

fn add_up(sums: &mut Vec<(&'static str, Tensor)>, parts: Vec<(&'static str, Tensor)>, total: Tensor) {
    for (name, value) in parts.into_iter().chain([("total", total)]) {
        let value = value.to_kind(Kind::Double);
        match sums.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum = &*sum + value,
            None => sums.push((name, value)),
        }
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
