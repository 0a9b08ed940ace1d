//! The batches of a training, step by step. On a card the next step's are copied while this step runs, when the loader has
//! them; nothing waits for that.

use super::step::Inputs;
use crate::Result;
use crate::data::batch::Batch;
use crate::data::loader::Loader;
use crate::tensor::transfer::Flight;
use crate::tensor::{Device, ledger};
use std::collections::VecDeque;

/// Hands out the micro-batches of one step after the other.
pub(super) struct Ahead<F> {
    loader: Loader,
    /// Micro-batches of each step.
    counts: VecDeque<usize>,
    /// Makes inputs of a batch.
    inputs: F,
    device: Device,
    next: Option<(Result<Vec<Inputs>>, Option<Flight>)>,
}

impl<F: Fn(Batch) -> Inputs> Ahead<F> {
    /// Steps of `counts` micro-batches each, from `loader`, for a model on `device`.
    pub(super) fn new(loader: Loader, counts: Vec<usize>, inputs: F, device: Device) -> Self {
        Self { loader, counts: counts.into(), inputs, device, next: None }
    }

    /// The next `count` micro-batches, on their way to the card where there is one.
    fn load(&mut self, count: usize) -> (Result<Vec<Inputs>>, Option<Flight>) {
        let _category = ledger::enter(ledger::Category::Inputs);
        let mut flight = Flight::to(self.device);
        let batches = self.loader.by_ref().take(count);
        let step = batches.map(|batch| {
            let inputs = (self.inputs)(batch?);
            Ok(match &mut flight {
                Some(flight) => inputs.send(flight),
                None => inputs,
            })
        });
        (step.collect(), flight)
    }
}

impl<F: Fn(Batch) -> Inputs> Iterator for Ahead<F> {
    type Item = Result<Vec<Inputs>>;

    fn next(&mut self) -> Option<Self::Item> {
        let sent = self.next.take();
        let (step, flight) = if let Some(sent) = sent {
            sent
        } else {
            let count = self.counts.pop_front()?;
            self.load(count)
        };
        if let Some(flight) = flight {
            flight.land();
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
