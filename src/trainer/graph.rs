//! Recording of training passes: forward and backward of a micro-batch as one CUDA graph for each bucket of sizes.
//!
//! A task offers a micro-batch as tensors of a bucket's sizes and the loss that reads them ([`Recordable`]). The first passes
//! of a bucket run as ever and warm everything up; then the pass is recorded with that micro-batch's tensors as fixed inputs,
//! into which later micro-batches are copied. Gradients stay at their places too: they are zeroed, not dropped, and every
//! recording adds to the same ones. Recordings share one pool of memory. The optimizer is not part of them: it is a handful of
//! kernels for all tensors together.
//!
//! Whatever cannot be recorded (an operator that waits for the card, no memory) turns recording off for the rest of the run,
//! with a note that says why, and the step goes on without. The CPU has a recorder of its own that runs the pass again on the
//! fixed inputs: it has no gain, and tests of everything here.

use super::precision::Scaler;
use super::{Loss, Parameter, Switch, Task, Weight};
use crate::tensor::autograd::clear_grad;
use crate::tensor::graph::{self, Graph, Pool, SideStream};
use crate::tensor::{Device, Kind, Tensor, guard, kind_bytes, ledger, memory, no_grad};
use crate::units::Bytes;
use crate::{Error, Result};
use std::collections::HashMap;
use std::time::Instant;

/// Passes of a bucket before it is recorded.
const WARM_UP: u64 = 3;
/// Recordings that are kept; buckets beyond run as ever.
pub const MOST_RECORDINGS: usize = 8;
/// Passes of each kind that are compared with [`Switch::Auto`].
const COMPARED: usize = 5;

/// Sizes that the kernels of a pass depend on, and everything else that a recording cannot read anew.
pub type Bucket = Vec<i64>;

/// Named losses, scalars on the task's device.
pub type Losses = Vec<(&'static str, Tensor)>;

/// A micro-batch whose pass can be recorded.
pub struct Recordable<'a> {
    /// Passes of one bucket start the same kernels on tensors of the same shapes.
    pub bucket: Bucket,
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

/// Forward and backward of a micro-batch.
pub type Work<'w> = dyn Fn() -> Result<Losses> + 'w;

/// Makes recordings.
pub trait Recorder {
    /// Records `work`; nothing of it happens.
    ///
    /// # Errors
    /// What cannot be recorded.
    fn record(&mut self, work: &Work) -> Result<Box<dyn Recording>>;

    /// Waits until everything that was started has happened.
    ///
    /// # Errors
    /// Of the device.
    fn wait(&self) -> Result<()>;
}

/// A recorded pass.
pub trait Recording {
    /// Lets what was recorded happen; `work` is what was recorded, over the same inputs.
    ///
    /// # Errors
    /// Of the device.
    fn replay(&mut self, work: &Work) -> Result<Losses>;
}

/// Records on a card, on this thread's side stream.
#[derive(Debug)]
struct Card {
    pool: Pool,
    device: Device,
    _stream: SideStream,
}

struct OnCard {
    graph: Graph,
    losses: Losses,
}

impl Recorder for Card {
    fn record(&mut self, work: &Work) -> Result<Box<dyn Recording>> {
        // freed blocks of earlier passes make room for the pool
        memory::release_cache(self.device)?;
        let (graph, losses) = Graph::record(&self.pool, work)?;
        Ok(Box::new(OnCard { graph, losses }))
    }

    fn wait(&self) -> Result<()> {
        graph::synchronize(self.device)
    }
}

impl Recording for OnCard {
    fn replay(&mut self, _work: &Work) -> Result<Losses> {
        self.graph.replay()?;
        // the next replay, of any recording of the pool, may write over them
        Ok(no_grad(|| self.losses.iter().map(|(name, loss)| (*name, loss.copy())).collect()))
    }
}

/// "Records" on the CPU: a replay runs the pass again.
#[derive(Debug)]
struct Host;

impl Recorder for Host {
    fn record(&mut self, _work: &Work) -> Result<Box<dyn Recording>> {
        Ok(Box::new(Self))
    }

    fn wait(&self) -> Result<()> {
        Ok(())
    }
}

impl Recording for Host {
    fn replay(&mut self, work: &Work) -> Result<Losses> {
        work()
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

/// All recordings of a run.
pub struct Graphs<'a> {
    recorder: Option<Box<dyn Recorder>>,
    buckets: HashMap<Bucket, State<'a>>,
    gradients: Option<Vec<Option<Tensor>>>,
    family: Option<u64>,
    trial: Option<Trial>,
    scale: f64,
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
        let recorder: Result<Box<dyn Recorder>> = match device {
            Device::Cuda(_) => guard::guard(|| {
                let stream = SideStream::enter(device)?;
                Ok(Box::new(Card { pool: Pool::new(device)?, device, _stream: stream }) as Box<dyn Recorder>)
            }),
            _ => Ok(Box::new(Host)),
        };
        match recorder {
            Ok(recorder) => Self::with_recorder(switch, recorder),
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
            buckets: HashMap::new(),
            gradients: None,
            family: None,
            trial: None,
            scale: 1.0,
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
    ) -> Result<(Weight, Losses)> {
        let whole: Weight = batches.iter().map(|batch| task.weight(batch)).sum();
        self.begin_step(scaler, params);
        let mut losses = Losses::new();
        for batch in batches {
            let recordable = if self.is_on() { guard::guard(|| task.recordable(batch, whole, epoch))? } else { None };
            let parts = match recordable {
                Some(recordable) => {
                    self.settle(recordable.family, params);
                    self.pass(recordable, scaler, params)?
                }
                None => pass(&|| task.loss(batch, whole, epoch), scaler)?,
            };
            add_up(&mut losses, parts);
        }
        if self.is_on() && self.gradients.is_none() {
            self.gradients = Some(gradients_like(params));
        }
        Ok((whole, losses))
    }

    /// Gives every parameter that gets gradients its place for them, with zeros in it.
    fn begin_step(&mut self, scaler: &Scaler, params: &[Parameter]) {
        let scale = scaler.unscale_factor();
        if (scale - self.scale).abs() > 0.0 {
            // the loss's scale is a constant of a recording
            self.scale = scale;
            for state in self.buckets.values_mut() {
                if matches!(state, State::Recorded { .. }) {
                    *state = State::Seen(WARM_UP);
                }
            }
        }
        if let (true, Some(gradients)) = (self.is_on(), &self.gradients) {
            no_grad(|| {
                for (param, grad) in params.iter().zip(gradients) {
                    if let Some(grad) = grad {
                        let _ = grad.shallow_clone().zero_();
                        graph::set_grad(&param.tensor, grad);
                    }
                }
            });
        }
    }

    /// Begins anew when other parameters get gradients from now on; a step's passes are all of one family.
    fn settle(&mut self, family: u64, params: &[Parameter]) {
        if self.family.replace(family).is_some_and(|before| before != family) {
            self.buckets.clear();
            self.gradients = None;
            for param in params {
                clear_grad(&param.tensor);
            }
        }
    }

    fn pass(&mut self, batch: Recordable<'a>, scaler: &Scaler, params: &[Parameter]) -> Result<Losses> {
        let bucket = batch.bucket.clone();
        let has_places = self.gradients.is_some();
        match self.buckets.entry(bucket.clone()).or_insert(State::Seen(0)) {
            State::Recorded { .. } => self.pass_of_recorded(&bucket, &batch, scaler),
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
    fn pass_of_recorded(&mut self, bucket: &Bucket, batch: &Recordable, scaler: &Scaler) -> Result<Losses> {
        let (Some(recorder), Some(State::Recorded { batch: fixed, recording, uses })) =
            (&self.recorder, self.buckets.get_mut(bucket))
        else {
            return pass(&batch.loss, scaler);
        };
        *uses += 1;
        let mut trial = self.trial.as_mut().filter(|trial| trial.bucket.as_ref() == Some(bucket));
        if trial.is_some() {
            recorder.wait()?;
        }
        let start = Instant::now();
        let is_plain = trial.as_ref().is_some_and(|trial| trial.plain.len() < trial.replayed.len());
        let losses = if is_plain {
            pass(&batch.loss, scaler)?
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

    fn record(&mut self, batch: Recordable<'a>, scaler: &Scaler, params: &[Parameter]) -> Result<Losses> {
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
        match recorded {
            Ok(mut recording) => {
                let losses = recording.replay(&work)?;
                if let Some(trial @ Trial { bucket: None, .. }) = &mut self.trial {
                    trial.bucket = Some(batch.bucket.clone());
                }
                let state = State::Recorded { recording, uses: 1, batch };
                if let State::Recorded { batch, .. } = &state {
                    let (bucket, bytes) = (batch.bucket.clone(), batch.bytes());
                    self.notes.push(format!("graphs: recorded bucket {bucket:?}, {bytes} of inputs"));
                    self.buckets.insert(bucket, state);
                }
                Ok(losses)
            }
            Err(error) => {
                memory::clear_failure();
                // what the failed recording left behind was never computed
                for (param, had) in params.iter().zip(before) {
                    if !had {
                        crate::tensor::autograd::clear_grad(&param.tensor);
                    }
                }
                self.stop(&format!("a pass cannot be recorded: {error}"));
                pass(&batch.loss, scaler)
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
        self.gradients = None;
        self.trial = None;
        self.recorder = None;
    }
}

/// Forward and backward; gradients stay in the parameters.
fn pass(loss: &dyn Fn() -> Result<Loss>, scaler: &Scaler) -> Result<Losses> {
    let Loss { total, mut parts } = guard::guard(loss)?;
    guard::guard(|| {
        scaler.scale(&total).backward();
        Ok(())
    })?;
    parts.push(("total", total.detach()));
    Ok(parts.into_iter().map(|(name, value)| (name, value.to_kind(Kind::Double))).collect())
}

fn add_up(sums: &mut Losses, parts: Losses) {
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
