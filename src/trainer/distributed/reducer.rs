//! Sums gradients over the ranks while the backward pass still computes others.
//!
//! Parameters are grouped into buckets, the last ones first, because their gradients are complete first. A bucket is one
//! flat tensor. As soon as all of its gradients are complete, its sum over the ranks starts. All ranks start the buckets
//! in the same order.
//!
//! | stage | a bucket goes to | gradients of a rank | optimizer state of a rank |
//! |---|---|---|---|
//! | 0, data parallel | all ranks, once a step | all | all |
//! | 1 | its owner, once a step | all | its own |
//! | 2 | its owner, after each micro-batch | its own | its own |
//!
//! From stage 1 on, each parameter has an owner, which updates it and sends the new weights to the others. Whole
//! parameters are divided, so that 8-bit optimizer state and its blocks are those of a single process.
//!
//! A segment of activation checkpointing gives a parameter's gradient in parts if another segment uses the parameter
//! too. The reducer learns the number of parts: if one arrives after its bucket was sent, the step is repeated.

use super::{Ranks, World};
use crate::Parameter;
use prsmed_base::{Error, Result};
use prsmed_tensor::autograd::{clear_grad, set_grad, with_gradient_hooks};
use prsmed_tensor::collective::Pending;
use prsmed_tensor::{Kind, Tensor, ledger, module_path, no_grad};
use std::collections::VecDeque;

/// Number of elements to which the start of a parameter in its bucket is rounded up: 64 bytes.
const ALIGNMENT: i64 = 16;
/// Buckets of stage 2 that may be on their way at the same time, if a pass may wait for them.
const MOST_PENDING: usize = 2;

/// Parameters whose gradients are summed as one tensor.
#[derive(Debug, Default)]
struct Bucket {
    /// Parameters with their starts, in elements.
    params: Vec<(usize, i64)>,
    numel: i64,
    /// The rank that updates them; `None`: every rank.
    owner: Option<usize>,
    /// The gradients, or zeros.
    flat: Option<Tensor>,
    /// In stage 2, of the owner: the sum over the micro-batches so far.
    sum: Option<Tensor>,
}

/// Sums the gradients of a [`World`].
#[derive(Debug)]
pub(crate) struct Reducer<'a> {
    world: &'a World,
    stage: u64,
    /// Waits for earlier sums during a pass, so that few buckets are in memory.
    waits_in_passes: bool,
    tensors: Vec<Tensor>,
    buckets: Vec<Bucket>,
    /// Bucket and start of each parameter.
    places: Vec<(usize, i64)>,
    /// Parts in which each gradient arrives; `None` before the first pass.
    parts: Option<Vec<u32>>,
    /// Parts of this pass.
    arrived: Vec<u32>,
    /// Whether this rank has computed a gradient of each parameter in the last step.
    pub(crate) used: Vec<bool>,
    /// First bucket that was not sent in this pass.
    next: usize,
    /// A gradient arrived after its bucket was sent.
    is_late: bool,
    passes: usize,
    pending: VecDeque<(usize, Option<Pending>)>,
}

impl<'a> Reducer<'a> {
    /// Buckets of about `bucket_bytes` for `params`. `stage`: see the module. `is_divided`: passes collect weights from other
    /// ranks. Such a pass never waits for a sum: the other rank may start it only after weights that this rank sends
    /// after the wait, for example because it has fewer passes, or other gradients.
    pub(crate) fn new(
        world: &'a World,
        params: &[Parameter],
        (stage, bucket_bytes): (u64, u64),
        is_divided: bool,
    ) -> Self {
        let tensors: Vec<Tensor> = params.iter().map(|param| param.tensor.shallow_clone()).collect();
        let size = Ranks::of(world).size();
        let owners = if stage == 0 { vec![None; tensors.len()] } else { owners(&tensors, size) };
        let buckets = buckets(&tensors, &owners, bucket_bytes);
        let mut places = vec![(0, 0); tensors.len()];
        for (number, bucket) in buckets.iter().enumerate() {
            bucket.params.iter().for_each(|(index, start)| places[*index] = (number, *start));
        }
        let (arrived, used) = (vec![0; tensors.len()], vec![false; tensors.len()]);
        Self {
            world,
            stage,
            waits_in_passes: stage == 2 && !is_divided,
            tensors,
            buckets,
            places,
            parts: None,
            arrived,
            used,
            next: 0,
            is_late: false,
            passes: 0,
            pending: VecDeque::new(),
        }
    }

    /// Whether this rank updates each parameter.
    pub(crate) fn owned(&self) -> Vec<bool> {
        self.places.iter().map(|(bucket, _)| self.owns(*bucket)).collect()
    }

    /// True if each rank updates only a part of the parameters.
    pub(crate) fn is_sharded(&self) -> bool {
        self.stage > 0
    }

    fn owns(&self, bucket: usize) -> bool {
        self.buckets[bucket].owner.is_none_or(|owner| owner == Ranks::of(self.world).rank())
    }

    /// Begins a step: up to stage 1 gradients are views of the buckets from now on.
    pub(crate) fn begin(&mut self) {
        self.drop_buffers();
        (self.passes, self.next, self.is_late) = (0, 0, false);
        self.used.fill(false);
        if self.stage < 2 {
            for number in 0..self.buckets.len() {
                self.make_flat(number);
            }
            for (index, tensor) in self.tensors.iter().enumerate() {
                set_grad(tensor, &self.view(index));
            }
        }
    }

    fn make_flat(&mut self, bucket: usize) {
        let _category = ledger::enter(ledger::Category::Gradients);
        let Bucket { params, numel, flat, .. } = &mut self.buckets[bucket];
        let device = self.tensors[params[0].0].device();
        flat.get_or_insert_with(|| Tensor::zeros([*numel], (Kind::Float, device)));
    }

    /// The part of a parameter in the flat tensor of its bucket.
    fn view(&self, index: usize) -> Tensor {
        let (bucket, _) = self.places[index];
        let flat = self.buckets[bucket].flat.as_ref().expect("the bucket was made");
        self.part(flat, index)
    }

    fn part(&self, flat: &Tensor, index: usize) -> Tensor {
        let tensor = &self.tensors[index];
        flat.narrow(0, self.places[index].1, tensor.numel().try_into().expect("a size")).view(tensor.size().as_slice())
    }

    /// Runs forward and backward pass of one micro-batch. `is_last`: of this rank's micro-batches in this step.
    ///
    /// # Errors
    /// Those of `pass`; [`Error::Torch`] if another rank does not answer.
    pub(crate) fn pass<T>(&mut self, is_last: bool, pass: impl FnOnce() -> Result<T>) -> Result<T> {
        self.arrived.fill(0);
        self.next = 0;
        let sends = is_last || self.stage == 2;
        let tensors: Vec<Tensor> = self.tensors.iter().map(Tensor::shallow_clone).collect();
        let result = with_gradient_hooks(&tensors, |index| self.arrive(index, sends), pass)?;
        let arrived = &self.arrived;
        match &mut self.parts {
            Some(parts) => parts.iter_mut().zip(arrived).for_each(|(parts, arrived)| *parts = (*parts).max(*arrived)),
            None => self.parts = Some(arrived.clone()),
        }
        if self.stage == 2 {
            self.end_pass()?;
        }
        Ok(result)
    }

    /// Takes part in a pass of other ranks by `pass`, which computes no gradients.
    ///
    /// # Errors
    /// As [`Self::pass`].
    pub(crate) fn join(&mut self, pass: impl FnOnce() -> Result<()>) -> Result<()> {
        pass()?;
        // the others sum the gradients of this pass
        if self.stage == 2 { self.end_pass() } else { Ok(()) }
    }

    /// A gradient, or a part of it, is there.
    fn arrive(&mut self, index: usize, sends: bool) -> Result<()> {
        let _module = module_path::enter("reduce");
        let (bucket, _) = self.places[index];
        self.used[index] = true;
        self.arrived[index] += 1;
        if sends && bucket < self.next {
            self.is_late = true;
        }
        if self.stage == 2 {
            let gradient = self.tensors[index].grad();
            self.make_flat(bucket);
            if bucket >= self.next {
                let _ = no_grad(|| self.view(index).g_add_(&gradient));
            }
            clear_grad(&self.tensors[index]);
        }
        while sends && self.next < self.buckets.len() && self.is_ready(self.next) {
            self.send_next()?;
            if self.waits_in_passes {
                self.wait_until(MOST_PENDING)?;
            }
        }
        Ok(())
    }

    /// True if all gradients of a bucket have arrived. Before the first pass is known, each is expected once.
    fn is_ready(&self, bucket: usize) -> bool {
        let parts = |index: usize| self.parts.as_ref().map_or(1, |parts| parts[index]);
        self.buckets[bucket].params.iter().all(|(index, _)| self.arrived[*index] >= parts(*index))
    }

    /// Starts the sum of the next bucket.
    fn send_next(&mut self) -> Result<()> {
        let number = self.next;
        self.next += 1;
        self.make_flat(number);
        let Bucket { flat, owner, .. } = &self.buckets[number];
        let flat = flat.as_ref().expect("made above");
        let pending = match owner {
            None => self.world.all_reduce(flat)?,
            Some(owner) => self.world.reduce(flat, *owner)?,
        };
        self.pending.push_back((number, pending));
        Ok(())
    }

    /// Waits for the oldest sums until `most` are left.
    fn wait_until(&mut self, most: usize) -> Result<()> {
        while self.pending.len() > most {
            let Some((number, pending)) = self.pending.pop_front() else { break };
            pending.map_or(Ok(()), Pending::wait)?;
            if self.stage < 2 {
                continue;
            }
            let owned = self.owns(number);
            let Bucket { flat, sum, .. } = &mut self.buckets[number];
            let flat = flat.take();
            match (owned, sum) {
                (false, _) => {}
                (true, sum @ None) => *sum = flat,
                (true, Some(sum)) => drop(flat.map(|flat| no_grad(|| sum.g_add_(&flat)))),
            }
        }
        Ok(())
    }

    /// Sends the buckets that were not sent in this pass, and waits for all.
    fn end_pass(&mut self) -> Result<()> {
        let _module = module_path::enter("reduce");
        while self.next < self.buckets.len() {
            self.send_next()?;
            if self.stage == 2 {
                self.wait_until(MOST_PENDING)?;
            }
        }
        (self.passes, self.next) = (self.passes + 1, 0);
        self.wait_until(0)
    }

    /// Completes the sums of a step whose passes ended with `failure`, and agrees with the other ranks. `passes`: the
    /// largest number of micro-batches of a rank. Returns `false` if the passes must run again.
    ///
    /// # Errors
    /// The same kind on every rank: [`Error::OutOfMemory`] if a rank ran out of memory, else `failure` or
    /// [`Error::Peer`].
    pub(crate) fn finish(&mut self, failure: Option<Error>, passes: usize) -> Result<bool> {
        let passes = if self.stage == 2 { passes } else { 1 };
        // a failed pass has sent a part of its buckets
        while self.passes < passes {
            self.end_pass()?;
        }
        let status = match &failure {
            None if self.is_late => 1.0,
            None => 0.0,
            Some(Error::OutOfMemory { .. }) => 2.0,
            Some(_) => 3.0,
        };
        let mut numbers: Vec<f64> = self.used.iter().map(|used| f64::from(u8::from(*used))).collect();
        numbers.push(status);
        let ranks = Ranks::of(self.world);
        ranks.max(&mut numbers)?;
        let worst = numbers.pop().unwrap_or_default();
        if worst >= 1.0 {
            self.drop_buffers();
        }
        if worst >= 3.0 {
            ranks.agree(failure.map_or(Ok(()), Err))?;
        } else if worst >= 2.0 {
            let other = || Error::OutOfMemory { reason: "on another rank".into() };
            return Err(failure.unwrap_or_else(other));
        } else if worst >= 1.0 {
            return Ok(false);
        }
        self.set_gradients(&numbers);
        Ok(true)
    }

    /// Leaves the summed gradients of the parameters that this rank updates and that any rank has used.
    fn set_gradients(&self, used: &[f64]) {
        for (index, tensor) in self.tensors.iter().enumerate() {
            let (bucket, _) = self.places[index];
            let sum = if self.stage == 2 { &self.buckets[bucket].sum } else { &self.buckets[bucket].flat };
            match sum {
                Some(sum) if self.owns(bucket) && used[index] > 0.0 => set_grad(tensor, &self.part(sum, index)),
                _ => clear_grad(tensor),
            }
        }
    }

    /// The norm of all gradients from `own`, the norm of those of this rank.
    ///
    /// # Errors
    /// [`Error::Torch`] if another rank does not answer.
    pub(crate) fn norm(&self, own: &Tensor) -> Result<Tensor> {
        if !self.is_sharded() {
            return Ok(own.shallow_clone());
        }
        let _module = module_path::enter("reduce");
        let square = no_grad(|| own.to_kind(Kind::Double).square());
        self.world.all_reduce(&square)?.map_or(Ok(()), Pending::wait)?;
        Ok(no_grad(|| square.sqrt().to_kind(Kind::Float)))
    }

    /// Sends the weights that each rank has updated to the others, and ends the step.
    ///
    /// # Errors
    /// As [`Self::norm`]. Weights are then partially updated.
    pub(crate) fn share_weights(&mut self) -> Result<()> {
        let _module = module_path::enter("reduce");
        for tensor in &self.tensors {
            clear_grad(tensor);
        }
        for number in 0..self.buckets.len() {
            self.buckets[number].sum = None;
            let Some(owner) = self.buckets[number].owner else { continue };
            self.make_flat(number);
            let bucket = &self.buckets[number];
            let flat = bucket.flat.as_ref().expect("made above");
            let copy = |index: usize, to_flat: bool| {
                let (mut weight, mut part) = (self.tensors[index].detach(), self.part(flat, index));
                no_grad(|| if to_flat { part.copy_(&weight) } else { weight.copy_(&part) });
            };
            if self.owns(number) {
                bucket.params.iter().for_each(|(index, _)| copy(*index, true));
            }
            self.world.broadcast(flat, owner)?.map_or(Ok(()), Pending::wait)?;
            if !self.owns(number) {
                bucket.params.iter().for_each(|(index, _)| copy(*index, false));
            }
            self.buckets[number].flat = None;
        }
        self.drop_buffers();
        Ok(())
    }

    fn drop_buffers(&mut self) {
        self.pending.clear();
        self.tensors.iter().for_each(clear_grad);
        for bucket in &mut self.buckets {
            (bucket.flat, bucket.sum) = (None, None);
        }
    }
}

/// An owner for each parameter: the largest ones first, each to the rank with the fewest elements so far.
fn owners(tensors: &[Tensor], size: usize) -> Vec<Option<usize>> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(tensors[*index].numel()));
    let (mut loads, mut owners) = (vec![0; size], vec![None; tensors.len()]);
    for index in order {
        let owner = (0..size).min_by_key(|rank| loads[*rank]).unwrap_or(0);
        loads[owner] += tensors[index].numel();
        owners[index] = Some(owner);
    }
    owners
}

/// Buckets in the order in which they are complete: from the last parameter to the first.
fn buckets(tensors: &[Tensor], owners: &[Option<usize>], bucket_bytes: u64) -> Vec<Bucket> {
    let most = i64::try_from(bucket_bytes / 4).unwrap_or(i64::MAX);
    let (mut open, mut closed): (Vec<Bucket>, Vec<Bucket>) = (Vec::new(), Vec::new());
    for index in (0..tensors.len()).rev() {
        let numel = i64::try_from(tensors[index].numel()).expect("a size");
        let at = open.iter().position(|bucket| bucket.owner == owners[index]);
        let empty = || Bucket { owner: owners[index], ..Bucket::default() };
        let mut bucket = at.map_or_else(empty, |at| open.remove(at));
        if !bucket.params.is_empty() && bucket.numel + numel > most {
            closed.push(std::mem::replace(&mut bucket, empty()));
        }
        bucket.params.push((index, bucket.numel));
        bucket.numel += (numel + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        open.push(bucket);
    }
    closed.extend(open);
    closed
}
