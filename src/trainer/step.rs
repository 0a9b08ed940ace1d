//! One optimizer step: forward and backward passes over its micro-batches, clipping, loss scaling, optimizer, moving
//! average.
//!
//! The engine, the planner's dry run and `bench` all call [`Stepper::step`]. A plan therefore runs the code of
//! the training.

use super::ema::Ema;
use super::graph::backend::Numbers;
use super::graph::{Graphs, Share, forward_backward};
use super::host_masters::HostMasters;
use super::optimizer::AdamW;
use super::precision::Scaler;
use super::{BatchSize, Parameter, Task, TrainConfig};
use crate::Result;
use crate::tensor::async_copy::ReadBack;
use crate::tensor::{Device, Kind, Tensor};

/// The part of a step that just ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
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

impl Mark {
    /// Its name in profiles.
    pub fn label(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Ema => "ema",
        }
    }
}

/// Called at every [`Mark`] with the trained parameters (none inside a backward pass that also updates them).
pub type OnMark<'m> = dyn FnMut(Mark, &[Parameter]) -> Result<()> + 'm;

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
    numbers: ReadBack,
}

impl Launched {
    /// True if the device has finished the step.
    ///
    /// # Errors
    /// An error of the device.
    pub fn is_complete(&self) -> Result<bool> {
        self.numbers.is_complete()
    }
}

/// Everything that changes from step to step: optimizer, moving average, loss scaler, CUDA graphs.
pub struct Stepper<'a, T: Task> {
    task: &'a T,
    /// Masters in host memory, which the optimizer then updates.
    pub(crate) masters: Option<HostMasters>,
    pub(crate) optimizer: AdamW,
    pub(crate) ema: Option<Ema>,
    pub(crate) scaler: Scaler,
    pub(crate) graphs: Graphs<'a>,
    step_in_backward: bool,
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
        Self { task, masters, optimizer, ema, scaler, graphs, step_in_backward: config.step_in_backward }
    }

    /// Device of the passes.
    pub fn device(&self) -> Device {
        self.masters.as_ref().map_or_else(|| self.optimizer.device(), HostMasters::device)
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
    /// As [`Task::loss`], and errors of `mark`. Afterwards [`AdamW::is_partially_updated`] is true if weights changed.
    pub fn step(&mut self, batches: &[T::Batch], info: StepInfo, mark: &mut OnMark) -> Result<StepResult> {
        let launched = self.launch(batches, info, mark)?;
        self.finish(launched, mark)
    }

    /// True if the next step may be launched before [`Self::finish`]: it does not depend on this step's numbers. The
    /// update itself never waits, because a step whose gradients are not finite changes nothing on the device.
    pub fn may_run_ahead(&self) -> bool {
        let waits = self.scaler.is_dynamic() || self.ema.is_some() || self.step_in_backward || self.masters.is_some();
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
        let Self { task, masters, optimizer, graphs, scaler, .. } = self;
        let task = *task;
        // a batch that was split after memory ran out has several gradients to add up
        let (batch_size, losses, gradients) = if let Some(masters) = masters {
            let work = Work { task, scaler, epoch: info.epoch, params: &[] };
            let (batch_size, losses) = masters.collect(|| work.accumulate(batches, graphs, mark))?;
            mark(Mark::Gradients, optimizer.params())?;
            let gradients = optimizer.measure(scaler.unscale_factor())?;
            optimizer.step(info.learning_rate, &gradients)?;
            optimizer.mark_partial();
            masters.round()?;
            optimizer.mark_whole();
            (batch_size, losses, gradients)
        } else if self.step_in_backward && batches.len() == 1 {
            let work = Work { task, scaler, epoch: info.epoch, params: &[] };
            let ((batch_size, losses), gradients) =
                optimizer.step_during(info.learning_rate, || work.accumulate(batches, graphs, mark))?;
            (batch_size, losses, gradients)
        } else {
            let work = Work { task, scaler, epoch: info.epoch, params: optimizer.params() };
            let (batch_size, losses) = work.accumulate(batches, graphs, mark)?;
            mark(Mark::Gradients, optimizer.params())?;
            let gradients = graphs.step(optimizer, info.learning_rate, scaler.unscale_factor())?;
            (batch_size, losses, gradients)
        };
        mark(Mark::Optimizer, self.optimizer.params())?;
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
        let losses = names.into_iter().zip(numbers).collect();
        let update = self.update_scale(grad_norm.is_finite());
        if let (Some(ema), Update::Applied | Update::Skipped) = (&mut self.ema, update) {
            ema.update(number, self.optimizer.params());
            mark(Mark::Ema, self.optimizer.params())?;
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
        let work = Work { task: self.task, scaler: &self.scaler, epoch, params: self.optimizer.params() };
        work.accumulate(batches, &mut self.graphs, mark)
    }

    /// Updates the loss scale and classifies the step.
    fn update_scale(&mut self, is_finite: bool) -> Update {
        let is_usable = self.scaler.update(is_finite);
        if is_finite {
            self.optimizer.mark_whole();
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

/// Data that the micro-batches of a step share.
struct Work<'s, 'a, T: Task> {
    task: &'a T,
    scaler: &'s Scaler,
    epoch: u64,
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
        let effective_batch: BatchSize = batches.iter().map(|batch| self.task.batch_size(batch)).sum();
        let share = Share { effective_batch, epoch: self.epoch, scaler: self.scaler, params: self.params };
        graphs.begin_step(self.scaler, self.params)?;
        let mut losses = Numbers::new();
        for batch in batches {
            let parts = if graphs.is_on() {
                graphs.pass(self.task, batch, &share)?
            } else {
                let loss = || self.task.loss(batch, effective_batch, self.epoch);
                forward_backward(&loss, self.scaler, || mark(Mark::Forward, self.params))?
            };
            mark(Mark::Backward, self.params)?;
            add_up(&mut losses, parts);
        }
        graphs.keep_gradients(self.params);
        Ok((effective_batch, losses))
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
