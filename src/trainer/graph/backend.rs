//! Backends that capture graphs: a GPU captures kernels; the CPU runs the work again.

use prsmed_base::Result;
use prsmed_tensor::graph::{self, CudaGraph, GraphPool, SideStream};
use prsmed_tensor::{Device, Tensor, guard, memory, no_grad};

/// Named numbers, on the task's device.
pub type Numbers = Vec<(&'static str, Tensor)>;

/// Work of a capture: forward and backward of a micro-batch, or the optimizer's update.
pub type GraphWork<'w> = dyn Fn() -> Result<Numbers> + 'w;

/// Captures graphs.
pub trait GraphBackend {
    /// Captures `work` without running it on the device.
    ///
    /// # Errors
    /// If `work` cannot be captured.
    fn capture(&mut self, work: &GraphWork) -> Result<Box<dyn CapturedGraph>>;

    /// Waits until the device is idle.
    ///
    /// # Errors
    /// Errors of the device.
    fn wait(&self) -> Result<()> {
        Ok(())
    }
}

/// A captured piece of work.
pub trait CapturedGraph {
    /// Replays the graph. `work` is the captured work, over the same inputs.
    ///
    /// # Errors
    /// Errors of the device.
    fn replay(&mut self, work: &GraphWork) -> Result<Numbers>;
}

/// The backend of `device`.
///
/// # Errors
/// [`prsmed_base::Error::Torch`] of the GPU.
pub fn of(device: Device) -> Result<Box<dyn GraphBackend>> {
    match device {
        Device::Cuda(_) => guard::guard(|| {
            let stream = SideStream::enter(device)?;
            Ok(Box::new(GpuBackend { pool: GraphPool::new(device)?, device, _stream: stream }) as Box<dyn GraphBackend>)
        }),
        _ => Ok(Box::new(CpuBackend)),
    }
}

/// Captures on a GPU, on this thread's side stream.
#[derive(Debug)]
struct GpuBackend {
    pool: GraphPool,
    device: Device,
    _stream: SideStream,
}

struct GpuGraph {
    graph: CudaGraph,
    numbers: Numbers,
}

impl GraphBackend for GpuBackend {
    fn capture(&mut self, work: &GraphWork) -> Result<Box<dyn CapturedGraph>> {
        // freed blocks of earlier passes make room for the pool
        memory::release_cache(self.device)?;
        let (graph, numbers) = CudaGraph::capture(&self.pool, work)?;
        Ok(Box::new(GpuGraph { graph, numbers }))
    }

    fn wait(&self) -> Result<()> {
        graph::synchronize(self.device)
    }
}

impl CapturedGraph for GpuGraph {
    fn replay(&mut self, _work: &GraphWork) -> Result<Numbers> {
        self.graph.replay()?;
        // the next replay of any graph of the pool may overwrite them
        Ok(no_grad(|| self.numbers.iter().map(|(name, number)| (*name, number.copy())).collect()))
    }
}

/// "Captures" on the CPU: a replay runs the work again.
#[derive(Debug)]
struct CpuBackend;

impl GraphBackend for CpuBackend {
    fn capture(&mut self, _work: &GraphWork) -> Result<Box<dyn CapturedGraph>> {
        Ok(Box::new(Self))
    }
}

impl CapturedGraph for CpuBackend {
    fn replay(&mut self, work: &GraphWork) -> Result<Numbers> {
        work()
    }
}
