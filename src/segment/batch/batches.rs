//! Batches of steps, on the device. The engine asks for those of the next step while a GPU computes the step before.
//! The CPU prepares them meanwhile; their copy runs when that step has ended, since it may use its memory.

use crate::Result;
use crate::data::loader::Loader;
use crate::segment::batch::Batch;
use crate::segment::step::Inputs;
use crate::tensor::async_copy::AsyncCopy;
use crate::tensor::{Device, ledger};

/// Iterator over steps; each item has the micro-batches of one step.
pub(crate) struct Steps<F> {
    loader: Loader,
    /// Number of micro-batches of each step.
    counts: std::vec::IntoIter<usize>,
    /// Converts a loaded batch to inputs.
    inputs: F,
    device: Device,
}

impl<F: Fn(Batch) -> Inputs> Steps<F> {
    /// Steps of `counts` micro-batches each, from `loader`, for a model on `device`.
    pub(crate) fn new(loader: Loader, counts: Vec<usize>, inputs: F, device: Device) -> Self {
        Self { loader, counts: counts.into_iter(), inputs, device }
    }
}

impl<F: Fn(Batch) -> Inputs> Iterator for Steps<F> {
    type Item = Result<Vec<Inputs>>;

    /// The micro-batches of a step, without those whose rows were all skipped.
    fn next(&mut self) -> Option<Self::Item> {
        let count = self.counts.next()?;
        let _category = ledger::enter(ledger::Category::Inputs);
        let mut copy = AsyncCopy::to(self.device);
        let batches = std::iter::from_fn(|| self.loader.next_or_skipped()).take(count).filter_map(Result::transpose);
        let step = batches.map(|batch| {
            let inputs = (self.inputs)(batch?.into());
            Ok(match &mut copy {
                Some(copy) => inputs.send(copy),
                None => inputs,
            })
        });
        let step = step.collect();
        if let Some(copy) = copy {
            copy.complete();
        }
        Some(step)
    }
}
