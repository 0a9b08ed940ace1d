//! What makes recordings: a card records kernels; the CPU runs the work again.

use crate::Result;
use crate::tensor::graph::{self, Graph, Pool, SideStream};
use crate::tensor::{Device, Tensor, guard, memory, no_grad};

/// Named numbers, on the task's device.
pub type Numbers = Vec<(&'static str, Tensor)>;

/// What is recorded: a micro-batch's forward and backward, or the optimizer's step.
pub type Work<'w> = dyn Fn() -> Result<Numbers> + 'w;

/// Makes recordings.
pub trait Recorder {
    /// Records `work`; nothing of it happens on the device.
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

/// A recorded piece of work.
pub trait Recording {
    /// Lets what was recorded happen; `work` is what was recorded, over the same inputs.
    ///
    /// # Errors
    /// Of the device.
    fn replay(&mut self, work: &Work) -> Result<Numbers>;
}

/// The recorder of `device`.
///
/// # Errors
/// [`crate::Error::Torch`] of the card.
pub fn of(device: Device) -> Result<Box<dyn Recorder>> {
    match device {
        Device::Cuda(_) => guard::guard(|| {
            let stream = SideStream::enter(device)?;
            Ok(Box::new(Card { pool: Pool::new(device)?, device, _stream: stream }) as Box<dyn Recorder>)
        }),
        _ => Ok(Box::new(Host)),
    }
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
    numbers: Numbers,
}

impl Recorder for Card {
    fn record(&mut self, work: &Work) -> Result<Box<dyn Recording>> {
        // freed blocks of earlier passes make room for the pool
        memory::release_cache(self.device)?;
        let (graph, numbers) = Graph::record(&self.pool, work)?;
        Ok(Box::new(OnCard { graph, numbers }))
    }

    fn wait(&self) -> Result<()> {
        graph::synchronize(self.device)
    }
}

impl Recording for OnCard {
    fn replay(&mut self, _work: &Work) -> Result<Numbers> {
        self.graph.replay()?;
        // the next replay, of any recording of the pool, may write over them
        Ok(no_grad(|| self.numbers.iter().map(|(name, number)| (*name, number.copy())).collect()))
    }
}

/// "Records" on the CPU: a replay runs the work again.
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
    fn replay(&mut self, work: &Work) -> Result<Numbers> {
        work()
    }
}
