//! Prefetch of training batches. On a GPU the batches of the next step are copied while the current step runs, if the
//! loader has them ready. No step waits for a prefetch.

use super::step::Inputs;
use crate::Result;
use crate::data::batch::Batch;
use crate::data::loader::Loader;
use crate::tensor::async_copy::AsyncCopy;
use crate::tensor::{Device, ledger};
use std::collections::VecDeque;

/// Iterator over steps; each item has the micro-batches of one step.
pub(super) struct Prefetcher<F> {
    loader: Loader,
    /// Number of micro-batches of each step.
    counts: VecDeque<usize>,
    /// Converts a loaded batch to inputs.
    inputs: F,
    device: Device,
    next: Option<(Result<Vec<Inputs>>, Option<AsyncCopy>)>,
}

impl<F: Fn(Batch) -> Inputs> Prefetcher<F> {
    /// Steps of `counts` micro-batches each, from `loader`, for a model on `device`.
    pub(super) fn new(loader: Loader, counts: Vec<usize>, inputs: F, device: Device) -> Self {
        Self { loader, counts: counts.into(), inputs, device, next: None }
    }

    /// The next `count` micro-batches, without those whose rows were all skipped. On a GPU their asynchronous copy has started.
    fn load(&mut self, count: usize) -> (Result<Vec<Inputs>>, Option<AsyncCopy>) {
        let _category = ledger::enter(ledger::Category::Inputs);
        let mut copy = AsyncCopy::to(self.device);
        let batches = std::iter::from_fn(|| self.loader.next_or_skipped()).take(count).filter_map(Result::transpose);
        let step = batches.map(|batch| {
            let inputs = (self.inputs)(batch?);
            Ok(match &mut copy {
                Some(copy) => inputs.send(copy),
                None => inputs,
            })
        });
        (step.collect(), copy)
    }
}

impl<F: Fn(Batch) -> Inputs> Iterator for Prefetcher<F> {
    type Item = Result<Vec<Inputs>>;

    fn next(&mut self) -> Option<Self::Item> {
        let sent = self.next.take();
        let (step, copy) = if let Some(sent) = sent {
            sent
        } else {
            let count = self.counts.pop_front()?;
            self.load(count)
        };
        if let Some(copy) = copy {
            copy.complete();
            if let Some(&count) = self.counts.front()
                && self.loader.ready(count)
            {
                self.counts.pop_front();
                self.next = Some(self.load(count));
            }
        }
        Some(step)
    }
}
