//! Recording of training steps: forward and backward of a micro-batch as one CUDA graph for each bucket of sizes, and the
//! optimizer's step as another.
//!
//! A task offers a micro-batch as tensors of a bucket's sizes and the loss that reads them ([`Recordable`]). The first passes
//! of a bucket run as ever and warm everything up; then the pass is recorded with that micro-batch's tensors as fixed inputs,
//! into which later micro-batches are copied. Gradients stay at their places too: they are zeroed, not dropped, and every
//! recording adds to the same ones, so that one recording of the optimizer's step serves all buckets. Recordings share one
//! pool of memory. A recording's results are used once a replay has given what the pass gives.
//!
//! Whatever cannot be recorded (an operator that waits for the card, no memory), or differs, turns recording off for the rest
//! of the run, with a note that says why, and the step goes on without. The CPU has a recorder of its own that runs the pass
//! again on the fixed inputs: it has no gain, and tests and plans of everything here.

mod check;
pub mod recorder;

use self::recorder::{Numbers, Recorder, Recording};
use super::optimizer::{AdamW, Gradients};
use super::precision::Scaler;
use super::{Loss, Parameter, Switch, Task, Weight};
use crate::tensor::autograd::clear_grad;
use crate::tensor::{Device, Kind, Tensor, graph, guard, kind_bytes, ledger, memory, no_grad};
use crate::units::Bytes;
use crate::{Error, Result};
use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Instant;

/// Passes of a bucket before it is recorded.
const WARM_UP: u64 = 3;
/// Steps of one bucket after which its pass and the optimizer's step are recorded.
pub const SETTLING_STEPS: u64 = 2 * WARM_UP + 2;
/// Recordings that are kept; buckets beyond run as ever.
pub const MOST_RECORDINGS: usize = 8;
/// Passes of each kind that are compared with [`Switch::Auto`].
const COMPARED: usize = 5;

/// Steps of one bucket after which `switch` has nothing left to record or to compare.
pub fn settling_steps(switch: Switch, device: Device) -> u64 {
    match switch {
        Switch::On => SETTLING_STEPS,
        Switch::Auto if device != Device::Cpu => SETTLING_STEPS + 2 * COMPARED as u64,
        Switch::Auto | Switch::Off => 0,
    }
}

/// Sizes that the kernels of a pass depend on, and everything else that a recording cannot read anew.
pub type Bucket = Vec<i64>;

/// A micro-batch whose pass can be recorded.
pub struct Recordable<'a> {
    /// Passes of one bucket start the same kernels on tensors of the same shapes.
    pub bucket: Bucket,
    /// The bucket for people: `2 sequences of 192 tokens`.
    pub label: String,
    /// Passes of one family give gradients to the same parameters.
    pub family: u64,
    /// Every tensor that `loss` reads besides weights and constants, on the device, in an order that the bucket decides.
    pub inputs: Vec<Tensor>,
    /// The loss of `inputs`: reads them whenever it is called, and nothing else that changes.
    pub loss: Box<dyn Fn() -> Result<Loss> + 'a>,
}

impl std::fmt::Debug for Recordable<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recordable").field("bucket", &self.bucket).field("inputs", &self.inputs).finish_non_exhaustive()
    }
}

impl Recordable<'_> {
    /// Bytes of the inputs: what a recording holds beside its pool.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.inputs.iter().map(|input| input.numel() as u64 * kind_bytes(input.kind())).sum())
    }

    fn take(&self, other: &Recordable) -> Result<()> {
        let sizes = |batch: &Recordable| batch.inputs.iter().map(|t| (t.size(), t.kind())).collect::<Vec<_>>();
        if sizes(self) != sizes(other) {
            let reason = format!("micro-batches of bucket {:?} have inputs of different shapes", self.bucket);
            return Err(Error::Shape { reason });
        }
        no_grad(|| self.inputs.iter().zip(&other.inputs).for_each(|(to, from)| to.shallow_clone().copy_(from)));
        Ok(())
    }
}

enum State<'a> {
    Seen(u64),
    Recorded { batch: Recordable<'a>, recording: Box<dyn Recording>, uses: u64 },
}

/// The comparison of [`Switch::Auto`], in the first bucket that is recorded. Seconds.
#[derive(Debug, Default)]
struct Trial {
    bucket: Option<Bucket>,
    plain: Vec<f64>,
    replayed: Vec<f64>,
}

/// The recording of the optimizer's step.
enum Stepping {
    /// Steps with gradients at their places so far.
    Seen(u64),
    Recorded {
        rate: Tensor,
        recording: Box<dyn Recording>,
    },
    /// It cannot be recorded.
    Plain,
}

/// A micro-batch's turn: its pass without recordings, and when it began.
struct Turn<'w> {
    plain: &'w dyn Fn() -> Result<Numbers>,
    start: Instant,
}

/// All recordings of a run.
pub struct Graphs<'a> {
    recorder: Option<Box<dyn Recorder>>,
    /// The recorder once recording ended: the run stays on its stream, since blocks of memory that were made on one stream
    /// serve no other.
    retired: Option<Box<dyn Recorder>>,
    buckets: HashMap<Bucket, State<'a>>,
    stepping: Stepping,
    gradients: Option<Vec<Option<Tensor>>>,
    family: Option<u64>,
    trial: Option<Trial>,
    scale: f64,
    device: Device,
    notes: Vec<String>,
}

impl std::fmt::Debug for Graphs<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let recordings = self.recordings();
        f.debug_struct("Graphs").field("is_on", &self.is_on()).field("recordings", &recordings).finish_non_exhaustive()
    }
}

impl<'a> Graphs<'a> {
    /// `has_room`: whether the plan leaves memory for the pool; only [`Switch::Auto`] asks. On the CPU passes are "recorded"
    /// with [`Switch::On`] alone.
    pub fn new(switch: Switch, device: Device, has_room: bool) -> Self {
        let mut graphs = Self::off();
        if switch == Switch::Off || (switch == Switch::Auto && (!has_room || !matches!(device, Device::Cuda(_)))) {
            return graphs;
        }
        match recorder::of(device) {
            Ok(recorder) => Self { device, ..Self::with_recorder(switch, recorder) },
            Err(error) => {
                graphs.stop(&error.to_string());
                graphs
            }
        }
    }

    /// With a recorder of the caller's.
    pub fn with_recorder(switch: Switch, recorder: Box<dyn Recorder>) -> Self {
        let trial = (switch == Switch::Auto).then(Trial::default);
        Self { recorder: (switch != Switch::Off).then_some(recorder), trial, ..Self::off() }
    }

    /// Records nothing.
    pub fn off() -> Self {
        Self {
            recorder: None,
            retired: None,
            buckets: HashMap::new(),
            stepping: Stepping::Seen(0),
            gradients: None,
            family: None,
            trial: None,
            scale: 1.0,
            device: Device::Cpu,
            notes: Vec::new(),
        }
    }

    /// Whether passes are recorded, or may be later.
    pub fn is_on(&self) -> bool {
        self.recorder.is_some()
    }

    /// Recordings that exist.
    pub fn recordings(&self) -> usize {
        self.buckets.values().filter(|state| matches!(state, State::Recorded { .. })).count()
    }

    /// Bytes of the fixed inputs of all recordings.
    pub fn input_bytes(&self) -> Bytes {
        let bytes = |state: &State| match state {
            State::Recorded { batch, .. } => batch.bytes().0,
            State::Seen(_) => 0,
        };
        Bytes(self.buckets.values().map(bytes).sum())
    }

    /// What there is to tell since the last call.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Forward and backward over the micro-batches of an optimizer step, as [`super::run::accumulate`] does it.
    ///
    /// # Errors
    /// As [`Task::loss`].
    pub fn accumulate<T: Task>(
        &mut self,
        task: &'a T,
        batches: &[T::Batch],
        scaler: &Scaler,
        epoch: u64,
        params: &[Parameter],
    ) -> Result<(Weight, Numbers)> {
        let whole: Weight = batches.iter().map(|batch| task.weight(batch)).sum();
        self.begin_step(scaler, params)?;
        let mut losses = Numbers::new();
        for batch in batches {
            let start = self.stopwatch()?;
            let plain = || pass(&|| task.loss(batch, whole, epoch), scaler);
            let recordable = if self.is_on() { guard::guard(|| task.recordable(batch, whole, epoch))? } else { None };
            let parts = match recordable {
                Some(recordable) => {
                    self.settle(recordable.family, params);
                    self.pass(recordable, &Turn { plain: &plain, start }, scaler, params)?
                }
                None => plain()?,
            };
            add_up(&mut losses, parts);
        }
        // of a task that offers nothing to record, gradients come and go as ever
        if self.is_on() && self.family.is_some() && self.gradients.is_none() {
            self.gradients = Some(gradients_like(params));
        }
        Ok((whole, losses))
    }

    /// Gives every parameter that gets gradients its place for them, with zeros in it.
    fn begin_step(&mut self, scaler: &Scaler, params: &[Parameter]) -> Result<()> {
        let scale = scaler.unscale_factor();
        if (scale - self.scale).abs() > 0.0 {
            // the loss's scale is a constant of recordings
            self.scale = scale;
            for state in self.buckets.values_mut() {
                if matches!(state, State::Recorded { .. }) {
                    *state = State::Seen(WARM_UP);
                }
            }
            self.stepping = Stepping::Seen(0);
        }
        if let (true, Some(gradients)) = (self.is_on(), &self.gradients) {
            let places: Vec<&Tensor> = gradients.iter().flatten().collect();
            graph::zero(&places)?;
        }
        self.give_places(params);
        Ok(())
    }

    /// Makes the places of gradients those of `params`, with what is in them.
    fn give_places(&self, params: &[Parameter]) {
        if let (true, Some(gradients)) = (self.is_on(), &self.gradients) {
            for (param, place) in params.iter().zip(gradients) {
                if let Some(place) = place {
                    graph::set_grad(&param.tensor, place);
                }
            }
        }
    }

    /// When a micro-batch began; while two ways are compared, with nothing else under way.
    fn stopwatch(&self) -> Result<Instant> {
        if let (Some(recorder), Some(Trial { bucket: Some(_), .. })) = (&self.recorder, &self.trial) {
            recorder.wait()?;
        }
        Ok(Instant::now())
    }

    /// Begins anew when other parameters get gradients from now on; a step's passes are all of one family.
    fn settle(&mut self, family: u64, params: &[Parameter]) {
        if self.family.replace(family).is_some_and(|before| before != family) {
            self.buckets.clear();
            self.stepping = Stepping::Seen(0);
            self.gradients = None;
            self.trial = self.trial.take().map(|_| Trial::default());
            for param in params {
                clear_grad(&param.tensor);
            }
        }
    }

    fn pass(&mut self, batch: Recordable<'a>, turn: &Turn, scaler: &Scaler, params: &[Parameter]) -> Result<Numbers> {
        let bucket = batch.bucket.clone();
        let has_places = self.gradients.is_some();
        match self.buckets.entry(bucket.clone()).or_insert(State::Seen(0)) {
            State::Recorded { .. } => self.pass_of_recorded(&bucket, &batch, turn, scaler),
            State::Seen(count) => {
                *count += 1;
                let is_warm = *count > WARM_UP && has_places;
                if is_warm && self.has_place_for(&bucket) {
                    return self.record(batch, scaler, params);
                }
                pass(&batch.loss, scaler)
            }
        }
    }

    /// Replays, or while two ways are compared takes turns.
    fn pass_of_recorded(
        &mut self,
        bucket: &Bucket,
        batch: &Recordable,
        turn: &Turn,
        scaler: &Scaler,
    ) -> Result<Numbers> {
        let (Some(recorder), Some(State::Recorded { batch: fixed, recording, uses })) =
            (&self.recorder, self.buckets.get_mut(bucket))
        else {
            return (turn.plain)();
        };
        *uses += 1;
        let mut trial = self.trial.as_mut().filter(|trial| trial.bucket.as_ref() == Some(bucket));
        let is_plain = trial.as_ref().is_some_and(|trial| trial.plain.len() < trial.replayed.len());
        // without recordings there is neither padding nor a copy
        let start = if is_plain { Instant::now() } else { turn.start };
        let losses = if is_plain {
            (turn.plain)()?
        } else {
            fixed.take(batch)?;
            recording.replay(&|| pass(&fixed.loss, scaler))?
        };
        if let Some(trial) = &mut trial {
            recorder.wait()?;
            let times = if is_plain { &mut trial.plain } else { &mut trial.replayed };
            times.push(start.elapsed().as_secs_f64());
            if trial.plain.len() == COMPARED {
                let (plain, replayed) = (median(&trial.plain), median(&trial.replayed));
                self.decide(plain, replayed);
            }
        }
        Ok(losses)
    }

    fn decide(&mut self, plain: f64, replayed: f64) {
        self.trial = None;
        let (plain_ms, replayed_ms) = (plain * 1e3, replayed * 1e3);
        let numbers = format!("a pass takes {replayed_ms:.2} ms replayed and {plain_ms:.2} ms as ever");
        if replayed < plain {
            self.notes.push(format!("graphs: {numbers}; passes are replayed"));
        } else {
            self.stop(&format!("{numbers}; nothing to gain"));
        }
    }

    fn record(&mut self, batch: Recordable<'a>, scaler: &Scaler, params: &[Parameter]) -> Result<Numbers> {
        let Some(recorder) = &mut self.recorder else { return pass(&batch.loss, scaler) };
        let before = with_gradient(params);
        let work = || pass(&batch.loss, scaler);
        let recorded = guard::guard(|| recorder.record(&work)).and_then(|recording| {
            if with_gradient(params) == before {
                Ok(recording)
            } else {
                Err(Error::Torch { reason: "a parameter got its first gradient while recording".into() })
            }
        });
        let mut recording = match recorded {
            Ok(recording) => recording,
            Err(error) => {
                memory::clear_failure();
                // what the failed recording left behind was never computed
                for (param, had) in params.iter().zip(before) {
                    if !had {
                        clear_grad(&param.tensor);
                    }
                }
                self.stop(&format!("a pass cannot be recorded: {error}"));
                return pass(&batch.loss, scaler);
            }
        };
        let places = self.gradients.iter().flatten().zip(params);
        let places: Vec<(&str, &Tensor)> =
            places.filter_map(|(place, param)| Some((param.name.as_str(), place.as_ref()?))).collect();
        let device = batch.inputs.first().map_or(Device::Cpu, Tensor::device);
        let check::Checked { numbers, difference } = check::first_replay(&mut *recording, &work, &places, device)?;
        if let Some(difference) = difference {
            self.stop(&format!("a replay is not what was recorded: {difference}"));
            return Ok(numbers);
        }
        if let Some(trial @ Trial { bucket: None, .. }) = &mut self.trial {
            trial.bucket = Some(batch.bucket.clone());
        }
        let (bucket, label, bytes) = (batch.bucket.clone(), batch.label.clone(), batch.bytes());
        self.buckets.insert(bucket, State::Recorded { recording, uses: 1, batch });
        let count = self.recordings();
        self.notes.push(format!("graphs: recorded {label}, {bytes} of inputs, {count} in all"));
        Ok(numbers)
    }

    /// Measures the gradients times `factor` and steps, as [`AdamW::measure`] and [`AdamW::step`] do; recorded once passes are
    /// replayed for good.
    ///
    /// # Errors
    /// As [`AdamW::step`].
    pub fn step(&mut self, optimizer: &mut AdamW, learning_rate: f64, factor: f64) -> Result<Gradients> {
        let plainly = |optimizer: &mut AdamW| {
            let gradients = optimizer.measure(factor)?;
            optimizer.step(learning_rate, &gradients)?;
            Ok(gradients)
        };
        let replays = self.is_on() && self.trial.is_none() && self.recordings() > 0;
        if !replays || !optimizer.can_be_recorded() {
            return plainly(optimizer);
        }
        if let Stepping::Seen(count) = &mut self.stepping {
            *count += 1;
            if *count <= WARM_UP || !self.record_step(optimizer, factor) {
                return plainly(optimizer);
            }
        }
        let Stepping::Recorded { rate, recording } = &mut self.stepping else { return plainly(optimizer) };
        no_grad(|| drop(rate.fill_(learning_rate)));
        // a card's recording steps all weights at once
        if let Device::Cuda(_) = optimizer.device() {
            optimizer.tear();
        }
        let cell = RefCell::new(&mut *optimizer);
        let numbers = recording.replay(&|| Ok(cell.borrow_mut().step_on_device(rate, factor)?.named()))?;
        optimizer.mend();
        optimizer.clear();
        Gradients::from_named(numbers)
    }

    /// Whether the optimizer's step was recorded.
    fn record_step(&mut self, optimizer: &mut AdamW, factor: f64) -> bool {
        let Some(recorder) = &mut self.recorder else { return false };
        let rate = optimizer.rate_on_device();
        let cell = RefCell::new(&mut *optimizer);
        let work = || Ok(cell.borrow_mut().step_on_device(&rate, factor)?.named());
        let recorded = guard::guard(|| recorder.record(&work));
        // a recording drops gradients, and does not step
        optimizer.mend();
        self.give_places(optimizer.params());
        match recorded {
            Ok(recording) => {
                self.stepping = Stepping::Recorded { rate, recording };
                self.notes.push("graphs: recorded the optimizer's step".to_owned());
                true
            }
            Err(error) => {
                memory::clear_failure();
                self.stepping = Stepping::Plain;
                self.notes.push(format!("graphs: the optimizer's step runs as ever: {error}"));
                false
            }
        }
    }

    /// Whether `bucket` may be recorded; drops a recording that is used far less to make room.
    fn has_place_for(&mut self, bucket: &Bucket) -> bool {
        if self.recordings() < MOST_RECORDINGS {
            return true;
        }
        let Some(State::Seen(count)) = self.buckets.get(bucket) else { return false };
        let uses = self.buckets.iter().filter_map(|(bucket, state)| match state {
            State::Recorded { uses, .. } => Some((*uses, bucket)),
            State::Seen(_) => None,
        });
        let Some((uses, rarest)) = uses.min() else { return false };
        if *count <= 2 * uses {
            return false;
        }
        let rarest = rarest.clone();
        if self.trial.as_ref().is_some_and(|trial| trial.bucket.as_ref() == Some(&rarest)) {
            self.trial = Some(Trial::default());
        }
        self.buckets.insert(rarest, State::Seen(uses));
        true
    }

    /// Ends recording where it is on: what recordings hold is free again.
    pub fn give_up(&mut self, reason: &str) {
        if self.is_on() {
            self.stop(reason);
        }
    }

    /// Ends recording for good; gradients are dropped and made again as ever.
    fn stop(&mut self, reason: &str) {
        self.notes.push(format!("graphs: off: {reason}"));
        self.buckets.clear();
        self.stepping = Stepping::Plain;
        self.gradients = None;
        self.trial = None;
        self.retired = self.recorder.take().or(self.retired.take());
        // what recordings held would stay reserved
        if let Err(error) = memory::release_cache(self.device) {
            self.notes.push(format!("graphs: their memory stays reserved: {error}"));
        }
    }
}

/// Forward and backward; gradients stay in the parameters.
fn pass(loss: &dyn Fn() -> Result<Loss>, scaler: &Scaler) -> Result<Numbers> {
    let Loss { total, mut parts } = guard::guard(loss)?;
    guard::guard(|| {
        scaler.scale(&total).backward();
        Ok(())
    })?;
    parts.push(("total", total.detach()));
    Ok(parts.into_iter().map(|(name, value)| (name, value.to_kind(Kind::Double))).collect())
}

fn add_up(sums: &mut Numbers, parts: Numbers) {
    for (name, value) in parts {
        match sums.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum = &*sum + value,
            None => sums.push((name, value)),
        }
    }
}

fn with_gradient(params: &[Parameter]) -> Vec<bool> {
    params.iter().map(|param| param.tensor.grad().defined()).collect()
}

/// Zeros for each parameter that has a gradient.
fn gradients_like(params: &[Parameter]) -> Vec<Option<Tensor>> {
    let _category = ledger::enter(ledger::Category::Gradients);
    no_grad(|| {
        params
            .iter()
            .map(|param| {
                let grad = param.tensor.grad();
                grad.defined().then(|| grad.zeros_like())
            })
            .collect()
    })
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::INFINITY)
}

#[cfg(test)]
#[path = "graph_tests.rs"]
mod tests;
