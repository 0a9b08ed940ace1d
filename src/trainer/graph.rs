//! CUDA graphs of training steps: forward and backward of a micro-batch as one graph for each bucket of sizes, and the
//! optimizer's update as another.
//!
//! A task offers a micro-batch as tensors of a bucket's sizes and the loss that reads them ([`Capturable`]). The first
//! passes of a bucket run eagerly and warm everything up. Then the pass is captured with that micro-batch's tensors as
//! fixed inputs, into which later micro-batches are copied. Gradients keep their memory: they are zeroed instead of
//! dropped, and every graph adds to the same tensors, so that one captured optimizer update serves all buckets. All
//! graphs share one memory pool. The results of a graph are used only after its first replay has matched the eager
//! pass.
//!
//! A failed capture (an operator waits for the GPU, or memory runs out) or a replay that differs turns CUDA graphs off
//! for the rest of the run. A note reports the reason, and training continues eagerly. The backend of the CPU runs the
//! pass again on the fixed inputs. It is not faster; tests and plans use it.

pub mod backend;
mod capturable;
mod check;

pub use capturable::{Bucket, Capturable};

use self::backend::{CapturedGraph, GraphBackend, Numbers};
use super::optimizer::{AdamW, Gradients};
use super::precision::Scaler;
use super::{BatchSize, Loss, Parameter, Switch, Task};
use prsmed_base::units::Bytes;
use prsmed_base::{Error, Result};
use prsmed_metrics::order::median;
use prsmed_tensor::autograd::{clear_grad, set_grad};
use prsmed_tensor::{Device, Kind, Tensor, graph, guard, ledger, memory, no_grad};
use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Instant;

/// Eager passes of a bucket before its capture.
const WARM_UP: u64 = 3;
/// Steps of one bucket after which its pass and the optimizer's update are captured.
pub const SETTLING_STEPS: u64 = 2 * WARM_UP + 2;
/// Maximum number of graphs; further buckets run eagerly.
pub const MAX_GRAPHS: usize = 8;
/// Eager and replayed passes that [`Switch::Auto`] compares, each.
const COMPARED: usize = 5;

/// Steps of one bucket after which `switch` has nothing left to capture or to compare.
pub fn settling_steps(switch: Switch, device: Device) -> u64 {
    match switch {
        Switch::On => SETTLING_STEPS,
        Switch::Auto if device != Device::Cpu => SETTLING_STEPS + 2 * COMPARED as u64,
        Switch::Auto | Switch::Off => 0,
    }
}

/// A bucket's state.
enum BucketState<'a> {
    /// Eager passes so far.
    Eager(u64),
    Captured {
        batch: Capturable<'a>,
        graph: Box<dyn CapturedGraph>,
        uses: u64,
    },
}

/// The comparison of [`Switch::Auto`], in the first captured bucket. Seconds.
#[derive(Debug, Default)]
struct Trial {
    bucket: Option<Bucket>,
    eager: Vec<f64>,
    replayed: Vec<f64>,
}

/// State of the optimizer's update.
enum OptimizerState {
    /// Eagerly so far: updates with gradients in their fixed memory.
    Eager(u64),
    Captured {
        rate: Tensor,
        graph: Box<dyn CapturedGraph>,
    },
    /// It cannot be captured.
    AlwaysEager,
}

/// Data that the micro-batches of a step share.
pub(super) struct Share<'s> {
    pub(super) effective_batch: BatchSize,
    pub(super) epoch: u64,
    pub(super) scaler: &'s Scaler,
    pub(super) params: &'s [Parameter],
}

/// All CUDA graphs of a run.
pub struct Graphs<'a> {
    backend: Option<Box<dyn GraphBackend>>,
    /// The backend after graphs were turned off: the run stays on its stream, since memory blocks of one stream cannot
    /// be reused by another.
    retired: Option<Box<dyn GraphBackend>>,
    buckets: HashMap<Bucket, BucketState<'a>>,
    optimizer: OptimizerState,
    gradients: Option<Vec<Option<Tensor>>>,
    family: Option<u64>,
    trial: Option<Trial>,
    scale: f64,
    device: Device,
    notes: Vec<String>,
}

impl std::fmt::Debug for Graphs<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let count = self.num_graphs();
        f.debug_struct("Graphs").field("is_on", &self.is_on()).field("graphs", &count).finish_non_exhaustive()
    }
}

impl<'a> Graphs<'a> {
    /// `has_room`: true if the plan leaves memory for the pool; only [`Switch::Auto`] uses it. On the CPU passes are
    /// "captured" only with [`Switch::On`].
    pub fn new(switch: Switch, device: Device, has_room: bool) -> Self {
        let mut graphs = Self::off();
        if switch == Switch::Off || (switch == Switch::Auto && (!has_room || !matches!(device, Device::Cuda(_)))) {
            return graphs;
        }
        match backend::of(device) {
            Ok(backend) => Self { device, ..Self::with_backend(switch, backend) },
            Err(error) => {
                graphs.stop(&error.to_string());
                graphs
            }
        }
    }

    /// Uses the backend of the caller.
    pub fn with_backend(switch: Switch, backend: Box<dyn GraphBackend>) -> Self {
        let trial = (switch == Switch::Auto).then(Trial::default);
        Self { backend: (switch != Switch::Off).then_some(backend), trial, ..Self::off() }
    }

    /// CUDA graphs turned off.
    pub fn off() -> Self {
        Self {
            backend: None,
            retired: None,
            buckets: HashMap::new(),
            optimizer: OptimizerState::Eager(0),
            gradients: None,
            family: None,
            trial: None,
            scale: 1.0,
            device: Device::Cpu,
            notes: Vec::new(),
        }
    }

    /// True if passes are captured, or may be captured later.
    pub fn is_on(&self) -> bool {
        self.backend.is_some()
    }

    /// Number of captured passes.
    pub fn num_graphs(&self) -> usize {
        self.buckets.values().filter(|state| matches!(state, BucketState::Captured { .. })).count()
    }

    /// Bytes of the fixed inputs of all graphs.
    pub fn input_bytes(&self) -> Bytes {
        let bytes = |state: &BucketState| match state {
            BucketState::Captured { batch, .. } => batch.bytes().0,
            BucketState::Eager(_) => 0,
        };
        Bytes(self.buckets.values().map(bytes).sum())
    }

    /// Returns the messages since the last call.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Forward and backward of one micro-batch: eager, captured or replayed.
    ///
    /// # Errors
    /// As [`Task::loss`].
    pub(super) fn pass<T: Task>(&mut self, task: &'a T, batch: &T::Batch, share: &Share) -> Result<Numbers> {
        let start = self.stopwatch()?;
        let Share { effective_batch, epoch, scaler, params } = *share;
        let eager = || forward_backward(&|| task.loss(batch, effective_batch, epoch), scaler, || Ok(()));
        let Some(capturable) = guard::guard(|| task.capturable(batch, effective_batch, epoch))? else {
            return eager();
        };
        self.enter_family(capturable.family, params);
        let bucket = capturable.bucket.clone();
        match self.buckets.entry(bucket.clone()).or_insert(BucketState::Eager(0)) {
            BucketState::Captured { .. } => self.pass_of_captured(&bucket, &capturable, (&eager, start), scaler),
            BucketState::Eager(count) => {
                *count += 1;
                let is_warm = *count > WARM_UP && self.gradients.is_some();
                if is_warm && self.has_room_for(&bucket) {
                    return self.capture(capturable, scaler, params);
                }
                forward_backward(&*capturable.loss, scaler, || Ok(()))
            }
        }
    }

    /// Ends the passes of a step. From the first captured step on, gradients keep their memory. A task without
    /// capturable passes allocates new gradients in each step.
    pub(super) fn keep_gradients(&mut self, params: &[Parameter]) {
        if self.is_on() && self.family.is_some() && self.gradients.is_none() {
            self.gradients = Some(gradients_like(params));
        }
    }

    /// Gives every parameter the memory of its gradient, zeroed.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn begin_step(&mut self, scaler: &Scaler, params: &[Parameter]) -> Result<()> {
        let scale = scaler.unscale_factor();
        if (scale - self.scale).abs() > 0.0 {
            // the loss scale is a constant of a graph
            self.scale = scale;
            for state in self.buckets.values_mut() {
                if matches!(state, BucketState::Captured { .. }) {
                    *state = BucketState::Eager(WARM_UP);
                }
            }
            self.optimizer = OptimizerState::Eager(0);
        }
        if let (true, Some(gradients)) = (self.is_on(), &self.gradients) {
            graph::zero(&gradients.iter().flatten().collect::<Vec<_>>())?;
        }
        self.set_gradients(params);
        Ok(())
    }

    /// Sets the gradients of `params` to the fixed tensors, with their values.
    fn set_gradients(&self, params: &[Parameter]) {
        if let (true, Some(gradients)) = (self.is_on(), &self.gradients) {
            for (param, gradient) in params.iter().zip(gradients) {
                if let Some(gradient) = gradient {
                    set_grad(&param.tensor, gradient);
                }
            }
        }
    }

    /// Start time of a micro-batch. During a comparison it waits for the device first.
    fn stopwatch(&self) -> Result<Instant> {
        if let (Some(backend), Some(Trial { bucket: Some(_), .. })) = (&self.backend, &self.trial) {
            backend.wait()?;
        }
        Ok(Instant::now())
    }

    /// Drops all graphs if other parameters get gradients from now on. All passes of a step are of one family.
    fn enter_family(&mut self, family: u64, params: &[Parameter]) {
        if self.family.replace(family).is_some_and(|before| before != family) {
            self.buckets.clear();
            self.optimizer = OptimizerState::Eager(0);
            self.gradients = None;
            self.trial = self.trial.take().map(|_| Trial::default());
            for param in params {
                clear_grad(&param.tensor);
            }
        }
    }

    /// Replays; during a comparison, every second pass is eager. The eager pass comes with the start of this one.
    fn pass_of_captured(
        &mut self,
        bucket: &Bucket,
        batch: &Capturable,
        (eager, start): (&dyn Fn() -> Result<Numbers>, Instant),
        scaler: &Scaler,
    ) -> Result<Numbers> {
        let (Some(backend), Some(BucketState::Captured { batch: fixed, graph, uses })) =
            (&self.backend, self.buckets.get_mut(bucket))
        else {
            return eager();
        };
        *uses += 1;
        let mut trial = self.trial.as_mut().filter(|trial| trial.bucket.as_ref() == Some(bucket));
        let is_eager = trial.as_ref().is_some_and(|trial| trial.eager.len() < trial.replayed.len());
        // an eager pass needs neither padding nor a copy of its inputs
        let start = if is_eager { Instant::now() } else { start };
        let losses = if is_eager {
            eager()?
        } else {
            fixed.copy_from(batch)?;
            graph.replay(&|| forward_backward(&*fixed.loss, scaler, || Ok(())))?
        };
        if let Some(trial) = &mut trial {
            backend.wait()?;
            let times = if is_eager { &mut trial.eager } else { &mut trial.replayed };
            times.push(start.elapsed().as_secs_f64());
            if trial.eager.len() == COMPARED {
                let (eager, replayed) = (median(&trial.eager), median(&trial.replayed));
                self.decide(eager, replayed);
            }
        }
        Ok(losses)
    }

    fn decide(&mut self, eager: f64, replayed: f64) {
        self.trial = None;
        let (eager_ms, replayed_ms) = (eager * 1e3, replayed * 1e3);
        let numbers = format!("a pass takes {replayed_ms:.2} ms replayed and {eager_ms:.2} ms eager");
        if replayed < eager {
            self.notes.push(format!("graphs: {numbers}; passes are replayed"));
        } else {
            self.stop(&format!("{numbers}; graphs are not faster"));
        }
    }

    fn capture(&mut self, batch: Capturable<'a>, scaler: &Scaler, params: &[Parameter]) -> Result<Numbers> {
        let work = || forward_backward(&*batch.loss, scaler, || Ok(()));
        let Some(backend) = &mut self.backend else { return work() };
        let before = with_gradient(params);
        let captured = guard::guard(|| backend.capture(&work)).and_then(|graph| {
            if with_gradient(params) == before {
                Ok(graph)
            } else {
                Err(Error::Torch { reason: "a parameter got its first gradient during the capture".into() })
            }
        });
        let mut graph = match captured {
            Ok(graph) => graph,
            Err(error) => {
                memory::clear_failure();
                // gradients of the failed capture were never computed
                for (param, had) in params.iter().zip(before) {
                    if !had {
                        clear_grad(&param.tensor);
                    }
                }
                self.stop(&format!("a pass cannot be captured: {error}"));
                return work();
            }
        };
        let gradients = self.gradients.iter().flatten().zip(params);
        let gradients: Vec<(&str, &Tensor)> =
            gradients.filter_map(|(gradient, param)| Some((param.name.as_str(), gradient.as_ref()?))).collect();
        let device = batch.inputs.first().map_or(Device::Cpu, Tensor::device);
        let (numbers, difference) = check::first_replay(&mut *graph, &work, &gradients, device)?;
        if let Some(difference) = difference {
            self.stop(&format!("a replay differs from the eager pass: {difference}"));
            return Ok(numbers);
        }
        if let Some(trial @ Trial { bucket: None, .. }) = &mut self.trial {
            trial.bucket = Some(batch.bucket.clone());
        }
        let (bucket, label, bytes) = (batch.bucket.clone(), batch.label.clone(), batch.bytes());
        self.buckets.insert(bucket, BucketState::Captured { graph, uses: 1, batch });
        let count = self.num_graphs();
        self.notes.push(format!("graphs: captured {label}, {bytes} of inputs, {count} in all"));
        Ok(numbers)
    }

    /// The optimizer's update: measures the gradients times `factor` and steps, as [`AdamW::measure`] and
    /// [`AdamW::step`] do. It is captured after the passes are.
    ///
    /// # Errors
    /// As [`AdamW::step`].
    pub fn step(&mut self, optimizer: &mut AdamW, learning_rate: f64, factor: f64) -> Result<Gradients> {
        let eager = |optimizer: &mut AdamW| {
            let gradients = optimizer.measure(factor)?;
            optimizer.step(learning_rate, &gradients)?;
            Ok(gradients)
        };
        let replays = self.is_on() && self.trial.is_none() && self.num_graphs() > 0;
        if !replays || !optimizer.can_be_captured() {
            return eager(optimizer);
        }
        if let OptimizerState::Eager(count) = &mut self.optimizer {
            *count += 1;
            if *count <= WARM_UP || !self.capture_step(optimizer, factor) {
                return eager(optimizer);
            }
        }
        let OptimizerState::Captured { rate, graph } = &mut self.optimizer else { return eager(optimizer) };
        no_grad(|| drop(rate.fill_(learning_rate)));
        // a graph updates all weights at once
        if let Device::Cuda(_) = optimizer.device() {
            optimizer.partially_updated = true;
        }
        let cell = RefCell::new(&mut *optimizer);
        let numbers = graph.replay(&|| Ok(cell.borrow_mut().step_on_device(rate, factor)?.named()))?;
        optimizer.partially_updated = false;
        optimizer.clear();
        Gradients::from_named(numbers)
    }

    /// Captures the optimizer's update; true on success.
    fn capture_step(&mut self, optimizer: &mut AdamW, factor: f64) -> bool {
        let Some(backend) = &mut self.backend else { return false };
        let rate = optimizer.rate_on_device();
        let cell = RefCell::new(&mut *optimizer);
        let work = || Ok(cell.borrow_mut().step_on_device(&rate, factor)?.named());
        let captured = guard::guard(|| backend.capture(&work));
        // a capture drops the gradients and updates nothing
        optimizer.partially_updated = false;
        self.set_gradients(optimizer.params());
        match captured {
            Ok(graph) => {
                self.optimizer = OptimizerState::Captured { rate, graph };
                self.notes.push("graphs: captured the optimizer's update".to_owned());
                true
            }
            Err(error) => {
                memory::clear_failure();
                self.optimizer = OptimizerState::AlwaysEager;
                self.notes.push(format!("graphs: the optimizer's update stays eager: {error}"));
                false
            }
        }
    }

    /// True if `bucket` may be captured; drops a graph that is used far less often to make room.
    fn has_room_for(&mut self, bucket: &Bucket) -> bool {
        if self.num_graphs() < MAX_GRAPHS {
            return true;
        }
        let Some(BucketState::Eager(count)) = self.buckets.get(bucket) else { return false };
        let uses = self.buckets.iter().filter_map(|(bucket, state)| match state {
            BucketState::Captured { uses, .. } => Some((*uses, bucket)),
            BucketState::Eager(_) => None,
        });
        let Some((uses, rarest)) = uses.min() else { return false };
        if *count <= 2 * uses {
            return false;
        }
        let rarest = rarest.clone();
        if self.trial.as_ref().is_some_and(|trial| trial.bucket.as_ref() == Some(&rarest)) {
            self.trial = Some(Trial::default());
        }
        self.buckets.insert(rarest, BucketState::Eager(uses));
        true
    }

    /// Turns graphs off for the rest of the run, and frees their memory. Each step then allocates new gradients.
    pub(super) fn stop(&mut self, reason: &str) {
        self.notes.push(format!("graphs: off: {reason}"));
        self.buckets.clear();
        self.optimizer = OptimizerState::AlwaysEager;
        self.gradients = None;
        self.trial = None;
        self.retired = self.backend.take().or(self.retired.take());
        // the memory of the graphs would stay reserved
        if let Err(error) = memory::release_cache(self.device) {
            self.notes.push(format!("graphs: their memory stays reserved: {error}"));
        }
    }
}

/// Forward and backward; gradients add up in the parameters. Returns the named losses in fp64.
pub(super) fn forward_backward(
    loss: &dyn Fn() -> Result<Loss>,
    scaler: &Scaler,
    after_forward: impl FnOnce() -> Result<()>,
) -> Result<Numbers> {
    let Loss { total, mut parts } = guard::guard(loss)?;
    after_forward()?;
    guard::guard(|| {
        scaler.scale(&total).backward();
        Ok(())
    })?;
    parts.push(("total", total.detach()));
    Ok(parts.into_iter().map(|(name, value)| (name, value.to_kind(Kind::Double))).collect())
}

fn with_gradient(params: &[Parameter]) -> Vec<bool> {
    params.iter().map(|param| param.tensor.grad().defined()).collect()
}

/// Zeros for each parameter that has a gradient.
fn gradients_like(params: &[Parameter]) -> Vec<Option<Tensor>> {
    let _category = ledger::enter(ledger::Category::Gradients);
    no_grad(|| {
        let grads = params.iter().map(|param| param.tensor.grad());
        grads.map(|grad| grad.defined().then(|| grad.zeros_like())).collect()
    })
}

#[cfg(test)]
#[path = "graph_tests.rs"]
mod tests;
