//! Training loop: runs a task from the first step or from a checkpoint to the end.
//!
//! On a GPU the CPU does not wait for a step: it launches the next one while the GPU still computes, and then reads the
//! losses of the step before. Validation, checkpoints and the end of the run wait for all steps.

mod length;
mod saving;

use super::checkpoint::{self, TrainingProgress};
use super::data_wait::Waiting;
use super::distributed::{self, Ranks};
use super::profile::{self, Hooks};
use super::records::Records;
use super::recovery::{self, Fitting};
use super::skipped_steps::{self, SkippedSteps};
use super::step::{Launched, StepInfo, StepResult, Stepper, Update};
use super::{Switch, Task, TrainConfig, Validation, ValidationPicture, ValidationScore, plateau, schedule};
use prsmed_base::event::{Event, Observer, StepReport};
use prsmed_base::{Error, Result};
use prsmed_tensor::threads::Adaptive;
use prsmed_tensor::weights;
use prsmed_tensor::{guard, kernels, memory, no_grad};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use length::{check_length, check_steps_per_epoch, jump, resumed_at};

/// Scores that early stopping looks at.
const MOST_SCORES: usize = 1000;

/// Result of a training run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TrainingOutcome {
    /// Optimizer steps done, including earlier sessions.
    pub steps: u64,
    /// Best validation score.
    pub best_score: Option<f64>,
    /// The values of the validation with that score; empty if an earlier version measured it.
    pub best_values: Vec<(String, f64)>,
    /// True if training stopped early by `train.patience`.
    pub stopped_early: bool,
    /// Optimizer steps of this session.
    pub steps_now: u64,
    /// Samples of this session.
    pub samples_now: u64,
    /// Seconds that this session spent in optimizer steps.
    pub train_seconds: f64,
    /// Seconds of these that steps waited for data.
    pub data_wait_seconds: f64,
    /// Steps of this session that were skipped because their loss or gradients were not finite.
    pub skipped_steps: u64,
    /// Micro-batch at the end of the run, if it was reduced because memory ran out.
    pub reduced_micro_batch: Option<usize>,
}

/// Settings and environment of a training run.
pub struct Session<'a> {
    /// The engine's settings.
    pub config: &'a TrainConfig,
    /// The run folder, for `last/` and `best/`.
    pub folder: &'a Path,
    /// The run's settings as TOML: `config.toml` of the run folder, written when the run has started and no earlier,
    /// so that a refused resume changes nothing. Empty: none.
    pub settings: &'a str,
    /// Continue from `last/`.
    pub resume: bool,
    /// Settings of the memory profile; `None` costs nothing.
    pub profile: Option<&'a profile::ProfileSettings>,
    /// Receives all events.
    pub observer: &'a dyn Observer,
    /// Set by Ctrl-C: the run saves and ends with [`Error::Interrupted`].
    pub interrupt: &'a AtomicBool,
    /// True if the plan leaves room for the memory pool of CUDA graphs. Only `train.graph = "auto"` uses it.
    pub has_room_for_graphs: bool,
    /// The processes that train together. Only the main one writes files.
    pub ranks: Ranks<'a>,
}

/// A launched step whose results were not read yet.
struct OpenStep {
    launched: Launched,
    step: u64,
    epoch: u64,
    learning_rate: f64,
    /// For messages about gradients that are not finite.
    samples: Vec<usize>,
}

struct Engine<'a, T: Task> {
    task: &'a T,
    session: &'a Session<'a>,
    stepper: Stepper<'a, T>,
    /// Counts launched steps.
    progress: TrainingProgress,
    open: Option<OpenStep>,
    outcome: TrainingOutcome,
    /// End of the last step, validation or checkpoint.
    since: Instant,
    /// Time since then that a step waited for data.
    waited: Duration,
    /// `None` if another process writes them.
    records: Option<Records>,
    data_wait: Waiting,
    profile: Hooks<'a>,
    kernels_reported: Vec<String>,
    threads: Adaptive,
    total_steps: u64,
    /// Samples that fit into a micro-batch.
    fitting: Fitting,
    skipped: SkippedSteps,
    /// Steps of the checkpoint in `last/`.
    saved: Option<u64>,
    /// Whether a process was asked to stop before this step.
    asked_to_stop: bool,
    /// True if no process has a sample for this step.
    is_empty: bool,
}

/// Trains `task` to the end of its epochs.
///
/// # Errors
/// [`Error::Interrupted`] after saving; [`Error::Diverged`]; errors of data, weights and libtorch.
pub fn run<T: Task>(task: &T, session: &Session) -> Result<TrainingOutcome> {
    let mut engine = guard::guard(|| Engine::start(task, session))?;
    let steps_per_epoch = engine.progress.steps_per_epoch;
    let phase = Event::Started { phase: "train".into(), total: engine.total_steps, unit: "steps" };
    session.observer.on(&phase);
    // a measurement has no settings of a user
    if let Some(note) = length::which_limit(session.config, steps_per_epoch).filter(|_| !session.settings.is_empty()) {
        session.observer.on(&Event::Note(note));
    }
    let mut stopped_early = engine.stops_at_once()?;
    engine.begin_interval();
    while engine.progress.step < engine.total_steps && !stopped_early {
        let epoch = engine.progress.step / steps_per_epoch;
        let mut batches = task.batches(epoch, engine.progress.step % steps_per_epoch, session.ranks.shard())?;
        while let (Some(batch), waited) = timed(|| guard::guard(|| batches.next().transpose()).transpose()) {
            engine.count_wait(waited)?;
            let done = engine.begin_step(batch).and_then(|batch| guard::guard(|| engine.step(&batch, epoch)));
            done.or_else(|error| engine.rescue(error))?;
            let ended = engine.progress.step >= engine.total_steps;
            let epoch_ended = ended || engine.progress.step.is_multiple_of(steps_per_epoch);
            let interrupted = engine.is_interrupted();
            if !(epoch_ended || interrupted || engine.save_is_due()) {
                continue;
            }
            let settled = guard::guard(|| engine.settle());
            settled.or_else(|error| engine.rescue(error))?;
            if epoch_ended {
                stopped_early = match engine.validate(epoch, ended) {
                    Ok(stops) => stops,
                    // the steps are saved, and a resumed run validates first
                    Err(error) => return engine.rescue(error).map(|()| TrainingOutcome::default()),
                };
            }
            let interrupted = session.ranks.any(interrupted || session.interrupt.load(Ordering::SeqCst))?;
            if ended || stopped_early || interrupted {
                engine.save("last")?;
            } else if epoch_ended || engine.save_is_due() {
                engine.save_if_possible("last")?;
            }
            if interrupted && !ended {
                return Err(Error::Interrupted);
            }
            if ended || stopped_early {
                break;
            }
            engine.begin_interval();
        }
    }
    session.observer.on(&Event::Finished);
    let TrainingProgress { step: steps, best_score, best_values, .. } = engine.progress;
    let (reduced_micro_batch, skipped_steps) = (engine.fitting.reduced(), engine.skipped.total);
    let outcome = TrainingOutcome { steps, best_score, best_values, ..engine.outcome };
    Ok(TrainingOutcome { stopped_early, skipped_steps, reduced_micro_batch, ..outcome })
}

/// The result of `work` and its duration.
fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    (work(), start.elapsed())
}

impl TrainingOutcome {
    fn count(&mut self, report: &StepReport) {
        self.steps_now += 1;
        self.samples_now += report.samples;
        self.train_seconds += report.elapsed.as_secs_f64();
        self.data_wait_seconds += report.data_wait.as_secs_f64();
    }
}

/// The progress of the checkpoint in `folder`, whose state `stepper` gets.
fn continued<T: Task>(
    folder: &Path,
    stepper: &mut Stepper<T>,
    (steps_per_epoch, total_steps): (u64, u64),
    session: &Session,
) -> Result<TrainingProgress> {
    let config = session.config;
    let mut progress = checkpoint::load(folder, &mut stepper.optimizer, stepper.ema.as_mut())?;
    check_steps_per_epoch(&progress, steps_per_epoch, &session.folder.join("last"))?;
    check_length(&progress, total_steps, config)?;
    if let Some(warning) = jump(&progress, total_steps, config) {
        session.observer.on(&Event::Warning(warning));
    }
    progress.total_steps = total_steps;
    stepper.scaler = progress.scaler.clone();
    session.observer.on(&Event::Note(resumed_at(progress.step, total_steps, config)));
    Ok(progress)
}

impl<'a, T: Task> Engine<'a, T> {
    fn start(task: &'a T, session: &'a Session<'a>) -> Result<Self> {
        let (config, ranks) = (session.config, session.ranks);
        distributed::check(config, ranks)?;
        let steps_per_epoch = task.steps_per_epoch();
        let all = config.epochs * steps_per_epoch;
        let total_steps = if config.max_steps > 0 { all.min(config.max_steps) } else { all };
        config.prepare_process();
        let last = || weights::readable_folder(&session.folder.join("last"));
        let checkpoint = session.resume.then(last).transpose()?;
        if let Some(folder) = &checkpoint {
            weights::verify_folder(folder)?;
            task.load(folder)?;
        }
        distributed::share_start(&task.parameters(), ranks)?;
        let has_room = session.has_room_for_graphs && ranks.size() == 1;
        let mut stepper = Stepper::new(task, config, has_room).with_ranks(ranks, config);
        let mut progress = TrainingProgress::new(stepper.scaler.clone(), steps_per_epoch, total_steps);
        if let Some(folder) = &checkpoint {
            progress = continued(folder, &mut stepper, (steps_per_epoch, total_steps), session)?;
        }
        let done = checkpoint.is_some().then_some(progress.step);
        let same = format!("{} {steps_per_epoch} {:?} {}", env!("CARGO_PKG_VERSION"), progress, session.settings);
        ranks.check_equal("settings, data or a checkpoint", &same, "start all processes with the same command")?;
        let opened = ranks.is_main().then(|| Records::open(session.folder, done)).transpose();
        let records = ranks.agree_on(opened)?;
        let profile = Hooks::start(session.profile, session.observer, stepper.device(), done)?;
        if ranks.is_main() && !session.settings.is_empty() {
            weights::write_bytes(&session.folder.join("config.toml"), session.settings.as_bytes())?;
        }
        Ok(Self {
            task,
            session,
            progress,
            records,
            data_wait: Waiting::default(),
            profile,
            threads: Adaptive::begin(stepper.device()),
            kernels_reported: Vec::new(),
            total_steps,
            fitting: Fitting::new(config.micro_batch),
            skipped: SkippedSteps::default(),
            saved: done,
            asked_to_stop: false,
            is_empty: false,
            stepper,
            open: None,
            outcome: TrainingOutcome::default(),
            since: Instant::now(),
            waited: Duration::ZERO,
        })
    }

    /// This process's batches of the next step, if all processes could read theirs.
    fn begin_step(&mut self, batch: Result<Vec<T::Batch>>) -> Result<Vec<T::Batch>> {
        let mut read = Vec::new();
        let own = batch.map(|batch| {
            read = batch;
            (self.session.interrupt.load(Ordering::SeqCst), read.is_empty())
        });
        let all = self.session.ranks.gather_if_all(own)?;
        self.asked_to_stop = all.iter().any(|(stops, _)| *stops);
        self.is_empty = all.iter().all(|(_, is_empty)| *is_empty);
        Ok(read)
    }

    /// True if the run was asked to stop; several processes decide it together, before a step.
    fn is_interrupted(&self) -> bool {
        if self.session.ranks.size() > 1 { self.asked_to_stop } else { self.session.interrupt.load(Ordering::SeqCst) }
    }

    /// Begins to measure the time of the next step.
    fn begin_interval(&mut self) {
        (self.since, self.waited) = (Instant::now(), Duration::ZERO);
    }

    /// Counts a wait for data, unless the device was still busy with the step before.
    fn count_wait(&mut self, waited: Duration) -> Result<()> {
        let is_idle =
            self.open.as_ref().map_or(Ok(true), |open| guard::guard(|| open.launched.numbers.is_complete()))?;
        if is_idle {
            self.waited += waited;
        }
        Ok(())
    }

    /// Records a step and reports it.
    fn report(&mut self, mut report: StepReport) -> Result<()> {
        (report.elapsed, report.data_wait) = (self.since.elapsed(), self.waited);
        self.begin_interval();
        self.outcome.count(&report);
        self.records.as_mut().map_or(Ok(()), |records| records.step(&report))?;
        let waited = self.data_wait.add(&report);
        let observer = self.session.observer;
        observer.on(&Event::Step(report));
        let notes = self.threads.adapt().into_iter().chain(waited).map(Event::Note);
        let full = self.records.as_mut().and_then(Records::take_warning).into_iter().map(Event::Warning);
        for event in notes.chain(full).chain(self.task.take_events()) {
            observer.on(&event);
        }
        Ok(())
    }

    /// One optimizer step over the micro-batches of an effective batch. When memory runs out, it is repeated with
    /// smaller ones. Then reads the step before, and this one too unless the next one may be launched first.
    fn step(&mut self, batches: &[T::Batch], epoch: u64) -> Result<()> {
        loop {
            let parts = self.parts(batches);
            match guard::guard(|| self.attempt(parts.as_deref().unwrap_or(batches), epoch)) {
                // with divided weights the other processes wait in a pass that cannot be completed
                Err(Error::OutOfMemory { reason }) if !self.task.is_divided() => {
                    self.settle()?;
                    self.reduce_memory(reason, batches)?;
                }
                outcome => break outcome?,
            }
        }
        if self.stepper.may_run_ahead() && self.session.profile.is_none() { Ok(()) } else { self.settle() }
    }

    /// The batches in smaller parts, after memory ran out with larger ones.
    fn parts(&self, batches: &[T::Batch]) -> Option<Vec<T::Batch>> {
        let most = self.fitting.reduced()?;
        let parts: Option<Vec<Vec<T::Batch>>> = batches.iter().map(|batch| self.task.split(batch, most)).collect();
        parts.map(|parts| parts.into_iter().flatten().collect())
    }

    /// After a step that ran out of memory: turns CUDA graphs off or, where they are off, makes micro-batches smaller.
    fn reduce_memory(&mut self, reason: String, batches: &[T::Batch]) -> Result<()> {
        let stepper = &mut self.stepper;
        if stepper.optimizer.partially_updated {
            let reason =
                format!("{reason}; some weights were already updated in this step, {}", self.last_checkpoint());
            return Err(Error::OutOfMemory { reason });
        }
        let observer = self.session.observer;
        if stepper.graphs.is_on() {
            stepper.clear();
            stepper.graphs.stop(&format!("memory ran out ({reason}), the step is repeated without them"));
            stepper.graphs.take_notes().into_iter().for_each(|note| observer.on(&Event::Note(note)));
            memory::clear_failure();
            memory::release_cache(stepper.device())?;
            return Ok(());
        }
        // a process without samples follows those that have some
        let is_alone = self.session.ranks.size() == 1;
        if batches.first().map_or(is_alone, |batch| self.task.split(batch, 1).is_none()) {
            return Err(Error::OutOfMemory { reason });
        }
        stepper.clear();
        let halved = self.fitting.halve(reason, stepper.device())?;
        let text = format!(
            "step {}: {}; it is repeated with micro-batches of {}, the effective batch stays; next time: `{}`",
            self.progress.step + 1,
            halved.what,
            halved.most,
            recovery::remedy(self.session.config, halved.most)
        );
        observer.on(&Event::Note(text));
        Ok(())
    }

    /// Launches an optimizer step, which may run out of memory, and reads the one before.
    fn attempt(&mut self, batches: &[T::Batch], epoch: u64) -> Result<()> {
        let (config, step) = (self.session.config, self.progress.step);
        self.profile.begin_step(step)?;
        let learning_rate = schedule::learning_rate(config, step, self.total_steps);
        if self.is_empty {
            return self.step_without_samples(epoch, learning_rate);
        }
        let Self { stepper, session, .. } = self;
        let info = StepInfo { number: step + 1, epoch, learning_rate };
        let launched = stepper.launch(batches, info, &mut |_, _| Ok(()));
        stepper.graphs.take_notes().into_iter().for_each(|note| session.observer.on(&Event::Note(note)));
        let launched = launched?;
        self.progress.step += 1;
        self.report_kernels();
        let samples = batches.iter().flat_map(|batch| self.task.samples(batch)).collect();
        let before = self.open.replace(OpenStep { launched, step: step + 1, epoch, learning_rate, samples });
        before.map_or(Ok(()), |before| self.read(before))
    }

    /// Reads the open step, if there is one.
    fn settle(&mut self) -> Result<()> {
        self.open.take().map_or(Ok(()), |open| self.read(open))
    }

    /// Waits for a launched step, checks and reports it.
    fn read(&mut self, open: OpenStep) -> Result<()> {
        let OpenStep { launched, step, epoch, learning_rate, samples } = open;
        let result = self.stepper.finish(launched, &mut |_, _| Ok(()))?;
        let checked = self.check(&result, step, &samples, epoch);
        if checked.is_err() && self.open.is_none() {
            // no later step was launched: the state is that before this one
            self.progress.step = step - 1;
        }
        checked?;
        self.profile.end_step(step)?;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of samples")]
        let samples = result.batch_size.samples as u64;
        let allocated_peak = memory::overall_peak(self.stepper.device()).0;
        self.report(StepReport {
            step,
            total_steps: self.total_steps,
            epoch,
            losses: result.losses.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            learning_rate,
            grad_norm: result.grad_norm,
            samples,
            allocated_peak,
            ..StepReport::default()
        })
    }

    /// A step whose samples were all skipped because their files cannot be read: it counts and changes nothing.
    fn step_without_samples(&mut self, epoch: u64, learning_rate: f64) -> Result<()> {
        self.settle()?;
        self.progress.step += 1;
        let (step, total_steps) = (self.progress.step, self.total_steps);
        self.session.observer.on(&Event::Warning(format!("step {step}: no sample can be read, the weights stay")));
        self.report(StepReport { step, total_steps, epoch, learning_rate, ..StepReport::default() })
    }

    /// Reports which custom CUDA kernels the first steps chose.
    fn report_kernels(&mut self) {
        /// Steps after which new kernels are no longer reported.
        const REPORTED_STEPS: u64 = 20;
        if self.session.config.fused_kernels != Switch::Auto || self.progress.step > REPORTED_STEPS {
            return;
        }
        for kernels::Timing { name, own_us, chain_us } in kernels::choices() {
            if !self.kernels_reported.contains(&name) {
                let text = format!("kernels: {name}: custom {own_us:.1} us, libtorch's {chain_us:.1} us");
                self.session.observer.on(&Event::Note(text));
                self.kernels_reported.push(name);
            }
        }
    }

    /// Notes an fp16 overflow, warns of a step whose gradients are not finite, and ends a run that has diverged.
    fn check(&mut self, result: &StepResult, step: u64, samples: &[usize], epoch: u64) -> Result<()> {
        let observer = self.session.observer;
        match result.update {
            Update::Applied => self.skipped.in_a_row = 0,
            Update::Skipped => observer.on(&Event::Note(format!("step {step}: fp16 overflow, scale halved"))),
            Update::NotFinite => {
                let what = skipped_steps::describe(self.task, step, result, samples, epoch);
                self.skipped.total += 1;
                self.skipped.in_a_row += 1;
                if let Some(why) = self.end_of_run() {
                    return Err(Error::Diverged { reason: format!("{what}; {why}") });
                }
                observer.on(&Event::Warning(format!("{what}; the step is skipped, the weights stay")));
            }
        }
        Ok(())
    }

    /// Why the run ends after a step whose gradients are not finite; `None` if the step is skipped.
    fn end_of_run(&mut self) -> Option<String> {
        if self.stepper.optimizer.partially_updated {
            return Some(format!("some weights were already updated in this step, {}", self.last_checkpoint()));
        }
        if skipped_steps::has_bad_buffers(self.task) {
            // such a state must not be saved
            self.stepper.optimizer.partially_updated = true;
            let what = "the running statistics of batch normalisation are no longer finite";
            return Some(format!("{what}, {}", self.last_checkpoint()));
        }
        match self.skipped.in_a_row {
            row if row <= self.session.config.max_skipped_steps => None,
            1 => Some("`last/` holds the state before this step".to_owned()),
            row => Some(format!("{row} steps in a row; `last/` holds the weights before them")),
        }
    }

    fn last_checkpoint(&self) -> String {
        match self.saved {
            Some(step) => format!("`last/` holds the state after step {step}"),
            None => "and no checkpoint exists yet".to_owned(),
        }
    }

    /// Validates at the end of an epoch and saves the best weights; returns `true` if training stops early.
    fn validate(&mut self, epoch: u64, ended: bool) -> Result<bool> {
        let config = self.session.config;
        let due =
            config.validate_every_epochs > 0 && (ended || (epoch + 1).is_multiple_of(config.validate_every_epochs));
        if !due {
            return Ok(false);
        }
        self.profile.begin("evaluate")?;
        // `best/` and its score are those of the moving average, if it is on
        self.stepper.swap_ema()?;
        let outcome = self.validate_and_keep();
        self.stepper.swap_ema()?;
        outcome
    }

    fn validate_and_keep(&mut self) -> Result<bool> {
        let session = self.session;
        self.progress.unvalidated = true;
        let validation = guard::guard(|| no_grad(|| self.task.validate(session.observer, session.ranks)))?;
        self.progress.unvalidated = false;
        self.profile.end(self.progress.step)?;
        let Some(Validation { score, values, pictures }) = validation else { return Ok(false) };
        let step = self.progress.step;
        self.records.as_mut().map_or(Ok(()), |records| records.validation(step, &values))?;
        for picture in &pictures {
            self.keep_picture(picture)?;
        }
        let ValidationScore { value: score, is_noisy, kind } = score;
        if self.progress.score_kind != kind {
            if let Some(best) = self.progress.best_score.take() {
                let text =
                    format!("scores from now on measure something else; the best so far ({best}) is not compared");
                session.observer.on(&Event::Warning(text));
            }
            (self.progress.without_gain, self.progress.score_kind) = (0, kind.to_owned());
            self.progress.best_values.clear();
            self.progress.scores.clear();
        }
        // JSON has no NaN
        let best_values = values.iter().filter(|(_, value)| value.is_finite()).cloned().collect();
        session.observer.on(&Event::Validated { step: self.progress.step, values });
        if self.progress.best_score.is_none_or(|best| score > best) {
            let before = (
                self.progress.best_score.replace(score),
                std::mem::replace(&mut self.progress.best_values, best_values),
            );
            self.progress.without_gain = 0;
            if !self.save_if_possible("best")? {
                // `best/` still holds the weights of the score before
                (self.progress.best_score, self.progress.best_values) = before;
            }
        } else {
            self.progress.without_gain += 1;
        }
        if is_noisy {
            let scores = &mut self.progress.scores;
            scores.push(score);
            scores.drain(..scores.len().saturating_sub(MOST_SCORES));
        }
        let stalled = self.stalled().filter(|_| self.progress.step < self.total_steps);
        if let Some(why) = &stalled {
            session.observer.on(&Event::Note(format!("stopped early, {why}")));
        }
        Ok(stalled.is_some())
    }

    /// Validates the last step of the run that is continued, if that is missing. Returns true if `train.patience` ends the
    /// training before its first step.
    fn stops_at_once(&mut self) -> Result<bool> {
        let TrainingProgress { step, steps_per_epoch, unvalidated, .. } = self.progress;
        if unvalidated {
            let stops = self.validate((step - 1) / steps_per_epoch, step >= self.total_steps)?;
            self.save("last")?;
            return Ok(stops);
        }
        let Some(why) = self.stalled().filter(|_| self.session.resume && step < self.total_steps) else {
            return Ok(false);
        };
        // a queue that starts a finished job again
        let text = format!("nothing to train: it stopped early, {why}; a larger `train.patience`, or 0, continues it");
        self.session.observer.on(&Event::Note(text));
        Ok(true)
    }

    /// Why `train.patience` ends the training now; `None` if it goes on. Only noisy scores are kept one by one.
    fn stalled(&self) -> Option<String> {
        let TrainingProgress { step, scores, without_gain, best_score, .. } = &self.progress;
        let patience = self.session.config.patience;
        if patience == 0 {
            return None;
        }
        if scores.is_empty() {
            let best = best_score.map_or_else(String::new, |best| format!(" than {best:.4}"));
            return (*without_gain >= patience).then(|| {
                format!("after step {step}: the last {without_gain} validations were not better{best} (`train.patience={patience}`)")
            });
        }
        let window = usize::try_from(patience).unwrap_or(usize::MAX).min(MOST_SCORES);
        plateau::has_stalled(scores, window).then(|| {
            format!("after step {step}: the score no longer grows beyond its noise (`train.patience={patience}`)")
        })
    }

    /// Writes a picture into the run folder and to TensorBoard. A full disk is a warning.
    fn keep_picture(&mut self, picture: &ValidationPicture) -> Result<()> {
        let step = self.progress.step;
        let kept = self.records.as_mut().map_or(Ok(()), |records| records.picture(step, picture));
        match kept {
            Err(error @ Error::Io { .. }) if error.is_disk_full() => {
                self.session.observer.on(&Event::Warning(format!("a picture is not saved: {error}")));
                Ok(())
            }
            kept => kept,
        }
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
