//! One optimizer step: forward and backward passes over its micro-batches, clipping, loss scaling, optimizer, moving
//! average.
//!
//! The engine, the planner's dry run and `bench` all call [`Stepper::step`]. A plan therefore runs the code of
//! the training.

use super::distributed;
use super::distributed::reducer::Reducer;
use super::ema::Ema;
use super::graph::backend::Numbers;
use super::graph::{Graphs, Share, forward_backward};
use super::host_masters::HostMasters;
use super::optimizer::AdamW;
use super::optimizer::Gradients;
use super::precision::Scaler;
use super::{BatchSize, Parameter, Ranks, Task, TrainConfig};
use prsmed_base::Result;
use prsmed_tensor::async_copy::ReadBack;
use prsmed_tensor::{Device, Kind, Tensor, guard, rng};
use rand::RngCore;

/// The part of a step that just ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepMark {
    /// The forward pass of a micro-batch; not reported while CUDA graphs are in use.
    Forward,
    /// The backward pass of a micro-batch.
    Backward,
    /// All backward passes: every gradient is complete. Not reported by a step inside the backward pass.
    Gradients,
    /// The optimizer's update.
    Optimizer,
    /// The update of the moving average.
    Ema,
}

/// Called at every [`StepMark`] with the trained parameters (none inside a backward pass that also updates them).
pub type OnMark<'m> = dyn FnMut(StepMark, &[Parameter]) -> Result<()> + 'm;

/// Number, epoch and learning rate of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepInfo {
    /// Number of the step, from 1.
    pub number: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Learning rate.
    pub learning_rate: f64,
}

/// Effect of a step on the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Update {
    /// They were updated.
    Applied,
    /// fp16 gradients overflowed: the weights stayed, and the loss scale was halved.
    Skipped,
    /// Gradients were not finite for another reason: the run has diverged.
    NotFinite,
}

/// The result of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepResult {
    /// Samples and tokens of the effective batch.
    pub batch_size: BatchSize,
    /// Named loss parts and `total`.
    pub losses: Vec<(&'static str, f64)>,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Effect on the weights.
    pub update: Update,
}

/// A step that was launched and whose losses and norm the host has not read.
#[derive(Debug)]
pub struct Launched {
    number: u64,
    batch_size: BatchSize,
    names: Vec<&'static str>,
    /// The losses in the order of `names`, and the gradient norm.
    pub(super) numbers: ReadBack,
}

/// Everything that changes from step to step: optimizer, moving average, loss scaler, CUDA graphs.
pub struct Stepper<'a, T: Task> {
    task: &'a T,
    /// Masters in host memory, which the optimizer then updates.
    pub masters: Option<HostMasters>,
    /// The optimizer and its state.
    pub optimizer: AdamW,
    /// The moving average of the weights, if one is kept.
    pub(super) ema: Option<Ema>,
    /// The factor of the losses in fp16.
    pub scaler: Scaler,
    /// The captured passes.
    pub graphs: Graphs<'a>,
    step_in_backward: bool,
    seed: u64,
    pub(super) ranks: Ranks<'a>,
    /// Sums gradients over the ranks; `None` for one process.
    reducer: Option<Reducer<'a>>,
}

impl<T: Task> std::fmt::Debug for Stepper<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stepper").field("scaler", &self.scaler).field("graphs", &self.graphs).finish_non_exhaustive()
    }
}

impl<'a, T: Task> Stepper<'a, T> {
    /// Starts from the current weights of `task`. `has_room_for_graphs`: true if the plan leaves memory for captured
    /// passes. Only `train.graph = "auto"` uses it.
    pub fn new(task: &'a T, config: &TrainConfig, has_room_for_graphs: bool) -> Self {
        let optimizer = AdamW::new(task.parameters(), config);
        let mastered = task.mastered();
        let masters = (!mastered.is_empty()).then(|| HostMasters::new(mastered));
        let device = masters.as_ref().map_or_else(|| optimizer.device(), HostMasters::device);
        let ema = (config.ema_decay > 0.0).then(|| Ema::new(config.ema_decay, optimizer.params()));
        let graphs = Graphs::new(config.graph_switch(), device, has_room_for_graphs);
        let scaler = Scaler::new(config.precision);
        let (step_in_backward, seed, ranks) = (config.step_in_backward, config.seed, Ranks::default());
        Self { task, masters, optimizer, ema, scaler, graphs, step_in_backward, seed, ranks, reducer: None }
    }

    /// Trains together with other processes: gradients are summed over `ranks`.
    #[must_use]
    pub fn with_ranks(mut self, ranks: Ranks<'a>, config: &TrainConfig) -> Self {
        let Some(world) = ranks.world() else { return self };
        let bytes = config.reduce_bucket_mib << 20;
        let sizes = (config.zero_stage, bytes);
        let reducer = Reducer::new(world, self.optimizer.params(), sizes, self.task.is_divided());
        self.optimizer.set_owned(reducer.owned());
        (self.ranks, self.reducer) = (ranks, Some(reducer));
        self
    }

    /// Device of the passes.
    pub fn device(&self) -> Device {
        self.masters.as_ref().map_or_else(|| self.optimizer.device(), HostMasters::device)
    }

    /// Optimizer state and moving average, as named tensors. If several processes divide the optimizer state, all of
    /// them must call it, and the main one gets everything.
    ///
    /// # Errors
    /// [`prsmed_base::Error::Torch`] if another process does not answer.
    pub fn state(&self) -> Result<Vec<(String, Tensor)>> {
        let mut state = self.optimizer.state();
        if let Some(reducer) = self.reducer.as_ref().filter(|reducer| reducer.is_sharded()) {
            if self.ranks.planned_passes().is_none() {
                state = distributed::complete_state(state, self.ranks)?;
            } else if self.ranks.is_main() {
                state.extend(self.optimizer.state_of_others(&reducer.used));
            }
        }
        state.extend(self.ema.iter().flat_map(|ema| ema.state(self.optimizer.params())));
        Ok(state)
    }

    /// Drops all gradients.
    pub fn clear(&self) {
        self.optimizer.clear();
        if let Some(masters) = &self.masters {
            masters.clear();
        }
    }

    /// One optimizer step over the micro-batches of an effective batch. Waits for the device.
    ///
    /// # Errors
    /// As [`Task::loss`], and errors of `mark`. Afterwards [`AdamW::partially_updated`] is true if weights changed.
    pub fn step(&mut self, batches: &[T::Batch], info: StepInfo, mark: &mut OnMark) -> Result<StepResult> {
        let launched = self.launch(batches, info, mark)?;
        self.finish(launched, mark)
    }

    /// True if the next step may be launched before [`Self::finish`]: it does not depend on this step's numbers. The
    /// update itself never waits, because a step whose gradients are not finite changes nothing on the device.
    pub fn may_run_ahead(&self) -> bool {
        let waits = self.scaler.is_dynamic()
            || self.ema.is_some()
            || self.step_in_backward
            || self.masters.is_some()
            || self.reducer.is_some();
        let is_asynchronous = matches!(self.device(), Device::Cuda(_));
        #[cfg(test)]
        let is_asynchronous = is_asynchronous || super::fixture::RUN_AHEAD.get();
        is_asynchronous && !waits
    }

    /// Launches a step and does not wait for the device. [`Self::finish`] must be called for each step, in order.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn launch(&mut self, batches: &[T::Batch], info: StepInfo, mark: &mut OnMark) -> Result<Launched> {
        let Self { task, masters, optimizer, graphs, scaler, seed, ranks, reducer, .. } = self;
        let (task, whole) = (*task, StepBatch::of(*task, batches, *ranks)?);
        let work = Work { task, scaler, info, seed: *seed, whole, params: &[] };
        // a batch that was split after memory ran out has several gradients to add up
        let (batch_size, losses, gradients) = if let Some(reducer) = reducer {
            step_together(&work, batches, (optimizer, graphs, reducer), mark)?
        } else if let Some(masters) = masters {
            let (batch_size, losses) = masters.collect(|| work.accumulate(batches, graphs, mark))?;
            mark(StepMark::Gradients, optimizer.params())?;
            let gradients = optimizer.measure(scaler.unscale_factor())?;
            optimizer.step(info.learning_rate, &gradients)?;
            optimizer.partially_updated = true;
            masters.round()?;
            optimizer.partially_updated = false;
            (batch_size, losses, gradients)
        } else if self.step_in_backward && batches.len() == 1 {
            let ((batch_size, losses), gradients) =
                optimizer.step_during(info.learning_rate, || work.accumulate(batches, graphs, mark))?;
            (batch_size, losses, gradients)
        } else {
            let work = Work { params: optimizer.params(), ..work };
            let (batch_size, losses) = work.accumulate(batches, graphs, mark)?;
            mark(StepMark::Gradients, optimizer.params())?;
            let gradients = graphs.step(optimizer, info.learning_rate, scaler.unscale_factor())?;
            (batch_size, losses, gradients)
        };
        mark(StepMark::Optimizer, self.optimizer.params())?;
        let (names, mut numbers): (Vec<_>, Vec<Tensor>) = losses.into_iter().unzip();
        numbers.push(gradients.on_device);
        Ok(Launched { number: info.number, batch_size, names, numbers: ReadBack::begin(&numbers) })
    }

    /// Reads the numbers of a launched step. Waits for the device.
    ///
    /// # Errors
    /// Errors of the device, and of `mark`.
    pub fn finish(&mut self, launched: Launched, mark: &mut OnMark) -> Result<StepResult> {
        let Launched { number, batch_size, names, numbers } = launched;
        let mut numbers = numbers.numbers()?;
        let grad_norm = numbers.pop().unwrap_or_default();
        let losses = self.ranks.sum_named(names.into_iter().zip(numbers).collect())?;
        let update = self.update_scale(grad_norm.is_finite());
        if let (Some(ema), Update::Applied | Update::Skipped) = (&mut self.ema, update) {
            ema.update(number, self.optimizer.params());
            mark(StepMark::Ema, self.optimizer.params())?;
        }
        Ok(StepResult { batch_size, losses, grad_norm, update })
    }

    /// Runs only the passes of a step.
    #[cfg(test)]
    pub(super) fn accumulate(
        &mut self,
        batches: &[T::Batch],
        epoch: u64,
        mark: &mut OnMark,
    ) -> Result<(BatchSize, Numbers)> {
        let whole = StepBatch::of(self.task, batches, Ranks::default())?;
        let info = StepInfo { number: 1, epoch, learning_rate: 0.0 };
        let (task, scaler, params) = (self.task, &self.scaler, self.optimizer.params());
        let work = Work { task, scaler, info, seed: self.seed, whole, params };
        work.accumulate(batches, &mut self.graphs, mark)
    }

    /// Updates the loss scale and classifies the step.
    fn update_scale(&mut self, is_finite: bool) -> Update {
        let is_usable = self.scaler.update(is_finite);
        if is_finite {
            self.optimizer.partially_updated = false;
            Update::Applied
        } else if is_usable || self.scaler.exhausted() {
            Update::NotFinite
        } else {
            Update::Skipped
        }
    }

    /// Exchanges the weights and their moving average, if it is on. A second call exchanges them back.
    ///
    /// # Errors
    /// An error of the device.
    pub fn swap_ema(&mut self) -> Result<()> {
        if let Some(ema) = &mut self.ema {
            ema.swap(self.optimizer.params());
            if let Some(masters) = &self.masters {
                masters.round()?;
            }
        }
        Ok(())
    }
}

/// The effective batch of a step: the micro-batches of all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
struct StepBatch {
    size: BatchSize,
    /// Micro-batches of the ranks before this one.
    first: u64,
    /// Largest number of micro-batches of a rank.
    most: usize,
}

impl StepBatch {
    /// The effective batch of which this rank has `batches`.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts of micro-batches")]
    fn of<T: Task>(task: &T, batches: &[T::Batch], ranks: Ranks) -> Result<Self> {
        let own: BatchSize = batches.iter().map(|batch| task.batch_size(batch)).sum();
        let mut numbers = vec![own.samples, own.tokens, own.masks];
        let (first, count) = (numbers.len(), batches.len());
        numbers.resize(first + ranks.size(), 0.0);
        numbers[first + ranks.rank()] = count as f64;
        ranks.sum(&mut numbers)?;
        let counts = &numbers[first..];
        Ok(Self {
            size: BatchSize { samples: numbers[0], tokens: numbers[1], masks: numbers[2] },
            first: counts[..ranks.rank()].iter().sum::<f64>() as u64,
            most: ranks
                .planned_passes()
                .unwrap_or(counts.iter().fold(0.0_f64, |most, count| most.max(*count)) as usize),
        })
    }
}

/// Passes and update of a step that several processes do together.
fn step_together<T: Task>(
    work: &Work<T>,
    batches: &[T::Batch],
    (optimizer, graphs, reducer): (&mut AdamW, &mut Graphs, &mut Reducer),
    mark: &mut OnMark,
) -> Result<(BatchSize, Numbers, Gradients)> {
    let (batch_size, losses) = loop {
        reducer.begin();
        let mut losses = Numbers::new();
        if work.task.is_divided() {
            // first, so that the last passes of all ranks, and their reductions, coincide
            (batches.len()..work.whole.most).try_for_each(|_| {
                guard::guard(|| {
                    reducer.join(|| {
                        work.task.join_pass(true);
                        Ok(())
                    })
                })
            })?;
        }
        let passes = batches.iter().enumerate().try_for_each(|(index, batch)| {
            let is_last = index + 1 == batches.len();
            let parts = guard::guard(|| reducer.pass(is_last, || work.eager_pass(index, batch, mark)))?;
            add_up(&mut losses, parts);
            Ok(())
        });
        let failure = match passes {
            // the others wait in a pass that cannot be completed
            Err(error) if work.task.is_divided() => return Err(error),
            passes => passes.err(),
        };
        if reducer.finish(failure, work.whole.most)? {
            break (work.whole.size, losses);
        }
    };
    debug_assert!(!graphs.is_on(), "the engine turns them off");
    mark(StepMark::Gradients, optimizer.params())?;
    let norm = reducer.norm(&optimizer.norm(work.scaler.unscale_factor())?)?;
    let gradients = optimizer.gradients_of(norm)?;
    optimizer.step(work.info.learning_rate, &gradients)?;
    optimizer.partially_updated = true;
    reducer.share_weights()?;
    optimizer.partially_updated = false;
    Ok((batch_size, losses, gradients))
}

/// Data that the micro-batches of a step share.
struct Work<'s, 'a, T: Task> {
    task: &'a T,
    scaler: &'s Scaler,
    info: StepInfo,
    seed: u64,
    whole: StepBatch,
    params: &'s [Parameter],
}

impl<'a, T: Task> Work<'_, 'a, T> {
    /// Forward and backward over all micro-batches; gradients add up in the parameters. Returns the size of the
    /// effective batch and its losses, scalars on the device.
    fn accumulate(
        &self,
        batches: &[T::Batch],
        graphs: &mut Graphs<'a>,
        mark: &mut OnMark,
    ) -> Result<(BatchSize, Numbers)> {
        let (effective_batch, epoch) = (self.whole.size, self.info.epoch);
        let share = Share { effective_batch, epoch, scaler: self.scaler, params: self.params };
        graphs.begin_step(self.scaler, self.params)?;
        let mut losses = Numbers::new();
        for (index, batch) in batches.iter().enumerate() {
            let parts = if graphs.is_on() {
                self.seed_pass(index);
                let parts = graphs.pass(self.task, batch, &share)?;
                mark(StepMark::Backward, self.params)?;
                parts
            } else {
                self.eager_pass(index, batch, mark)?
            };
            add_up(&mut losses, parts);
        }
        graphs.keep_gradients(self.params);
        Ok((effective_batch, losses))
    }
}

impl<T: Task> Work<'_, '_, T> {
    /// Seeds libtorch's generators for one micro-batch: its numbers do not depend on the process that runs it.
    fn seed_pass(&self, index: usize) {
        let micro_batch = self.whole.first + index as u64;
        rng::seed(rng::stream(self.seed, "step", &[self.info.number - 1, micro_batch]).next_u64());
    }

    /// Forward and backward of this rank's micro-batch number `index`.
    fn eager_pass(&self, index: usize, batch: &T::Batch, mark: &mut OnMark) -> Result<Numbers> {
        self.seed_pass(index);
        let loss = || self.task.loss(batch, self.whole.size, self.info.epoch);
        let parts = forward_backward(&loss, self.scaler, || mark(StepMark::Forward, self.params))?;
        mark(StepMark::Backward, self.params)?;
        Ok(parts)
    }
}

fn add_up(sums: &mut Numbers, parts: Numbers) {
    for (name, value) in parts {
        debug_assert_eq!(value.kind(), Kind::Double);
        match sums.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum = &*sum + value,
            None => sums.push((name, value)),
        }
    }
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
