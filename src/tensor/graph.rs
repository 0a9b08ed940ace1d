//! CUDA graphs: captures the kernels of some work once and replays them with one call (libtorch's `CUDAGraph`).
//!
//! A graph reads and writes the tensors of its capture, at their addresses: copy new inputs into them before a replay.
//! Each replay has new random numbers, the same as eager work would draw. libtorch's GPU generator advances. Seeds that
//! the CPU draws for custom CUDA kernels are copied to a buffer that the captured kernels read (`native/seeds.cpp`).

use super::native::{self, RawTensor};
use super::{Device, Kind, Tensor, guard, memory, rng};
use prsmed_base::{Error, Result};
use std::cell::RefCell;
use std::ffi::c_void;
use std::rc::{Rc, Weak};

/// Maximum number of seeds in one capture.
const MAX_SEEDS: i64 = 1 << 14;

/// Memory pool that several graphs share: only one of them runs at a time.
#[derive(Debug)]
pub struct GraphPool {
    /// libtorch's id of the pool, while there are graphs in it.
    id: RefCell<Weak<[u64; 2]>>,
    device: i32,
}

impl GraphPool {
    /// Creates a pool on `device`.
    ///
    /// # Errors
    /// [`Error::Torch`] if `device` is not a GPU.
    pub fn new(device: Device) -> Result<Self> {
        Ok(Self { id: RefCell::default(), device: gpu(device)? })
    }

    /// libtorch's pool for one more graph, which keeps the result. Once the last graph is dropped, libtorch has freed
    /// the old pool and accepts no new graphs in it, so that this returns a new one.
    fn for_capture(&self) -> Result<Rc<[u64; 2]>> {
        if let Some(id) = self.id.borrow().upgrade() {
            return Ok(id);
        }
        // SAFETY: the callee writes two numbers.
        let id = Rc::new(unsafe { native::written([0; 2], |id| native::prsmed_graph_pool(id.cast())) }?);
        *self.id.borrow_mut() = Rc::downgrade(&id);
        Ok(id)
    }
}

/// Runs this thread's GPU work on a side stream until it is dropped. A capture needs such a stream.
#[derive(Debug)]
pub struct SideStream {
    /// The stream that was current before. The current stream is thread-local, so this is not `Send`.
    before: *mut c_void,
}

impl SideStream {
    /// Waits for the GPU, then switches.
    ///
    /// # Errors
    /// [`Error::Torch`] without CUDA.
    pub fn enter(device: Device) -> Result<Self> {
        let (device, null) = (gpu(device)?, std::ptr::null_mut());
        // SAFETY: changes this thread's current stream; the callee writes the former one.
        let before = unsafe { native::written(null, |out| native::prsmed_stream_enter(device, out)) };
        before.map(|before| Self { before })
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        // SAFETY: `before` comes from `enter` and is given back once, on its thread. If the GPU fails here, the next use of
        // it fails with an error.
        let _ = unsafe { native::check(native::prsmed_stream_leave(self.before)) };
    }
}

/// A captured CUDA graph.
#[derive(Debug)]
pub struct CudaGraph {
    raw: *mut c_void,
    /// i64 on the GPU: the captured kernels read their seeds here.
    seeds: Tensor,
    num_seeds: i64,
    _pool: Rc<[u64; 2]>,
}

impl CudaGraph {
    /// Captures the kernels that `work` launches on this thread's current stream (a [`SideStream`]), without running
    /// them. The result of `work` holds the tensors that a replay writes.
    ///
    /// # Errors
    /// An error of `work`, and [`Error::Torch`] if something cannot be captured, such as a synchronisation.
    pub fn capture<T>(pool: &GraphPool, work: impl FnOnce() -> Result<T>) -> Result<(Self, T)> {
        let index = usize::try_from(pool.device).map_err(|_| Error::Torch { reason: "there is no such GPU".into() })?;
        let seeds = Tensor::zeros([MAX_SEEDS], (Kind::Int64, Device::Cuda(index)));
        let rng_state = rng::RngState::take(Device::Cpu)?;
        let id = pool.for_capture()?;
        // SAFETY: the pool's two numbers are read; the graph is written on success.
        let begin = |out| unsafe { native::prsmed_graph_begin(pool.device, id.as_ptr(), out) };
        // SAFETY: as above.
        let raw = unsafe { native::written(std::ptr::null_mut(), begin) }?;
        let mut graph = Self { raw, seeds, num_seeds: 0, _pool: id };
        // SAFETY: a live tensor, of which the callee keeps a copy until the second call.
        unsafe { native::prsmed_seeds_capture(native::raw(&graph.seeds)) };
        let outcome = guard::guard(work);
        // SAFETY: null is documented.
        graph.num_seeds = unsafe { native::prsmed_seeds_capture(std::ptr::null_mut()) };
        rng_state.restore()?;
        match outcome {
            Ok(captured) => {
                // SAFETY: a graph whose capture began.
                unsafe { native::check(native::prsmed_graph_end(raw))? };
                Ok((graph, captured))
            }
            Err(error) => {
                // SAFETY: as above.
                unsafe { native::prsmed_graph_abandon(raw) };
                Err(error)
            }
        }
    }

    /// Launches the captured work on this thread's current stream.
    ///
    /// # Errors
    /// [`Error::Torch`] from the GPU.
    pub fn replay(&self) -> Result<()> {
        // SAFETY: a live tensor that is long enough, and a captured graph.
        unsafe {
            native::check(native::prsmed_seeds_draw(native::raw(&self.seeds), self.num_seeds))?;
            native::check(native::prsmed_graph_replay(self.raw))
        }
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        // SAFETY: made by `record`, freed once.
        unsafe { native::prsmed_graph_free(self.raw) };
    }
}

/// Waits until all work on `device` is complete. Returns at once for the CPU.
///
/// # Errors
/// [`Error::Torch`] from the GPU.
pub fn synchronize(device: Device) -> Result<()> {
    let Device::Cuda(_) = device else { return Ok(()) };
    // SAFETY: waits.
    unsafe { native::check(native::prsmed_synchronize(gpu(device)?)) }
}

/// Fills `tensors` with zeros. On a GPU a few kernels do all of them.
///
/// # Errors
/// [`Error::Torch`] from libtorch.
pub fn zero(tensors: &[&Tensor]) -> Result<()> {
    let mut raw: Vec<RawTensor> = tensors.iter().map(|tensor| native::raw(tensor)).collect();
    let count = i64::try_from(raw.len()).expect("fewer tensors than 2^63");
    // SAFETY: `count` live tensors.
    guard::guard(|| unsafe { native::check(native::prsmed_zero(raw.as_mut_ptr(), count)) })
}

fn gpu(device: Device) -> Result<i32> {
    match device {
        Device::Cuda(index) => memory::gpu(index),
        other => Err(Error::Torch { reason: format!("CUDA graphs need a GPU, not {other:?}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autograd::set_grad;

    #[test]
    fn a_machine_without_a_gpu_gives_an_error() {
        assert!(matches!(GraphPool::new(Device::Cpu), Err(Error::Torch { .. })));
        assert!(matches!(SideStream::enter(Device::Cpu), Err(Error::Torch { .. })));
        synchronize(Device::Cpu).unwrap();
    }

    #[test]
    fn graphs_share_a_pool_while_there_are_any() {
        let pool = GraphPool::new(Device::Cuda(0)).unwrap();
        let first = match pool.for_capture() {
            Ok(first) => first,
            Err(error) => {
                return assert!(error.to_string().contains("the CUDA side of this program is not open"), "{error}");
            }
        };
        let second = pool.for_capture().unwrap();
        assert_eq!(first, second);
        let before = *first;
        drop(first);
        assert_eq!(*pool.for_capture().unwrap(), before);
        drop(second);
        assert_ne!(*pool.for_capture().unwrap(), before, "libtorch takes no graphs into a pool that became empty");
    }

    #[test]
    fn the_backward_pass_adds_to_a_given_gradient_in_place() {
        let xs = Tensor::ones([3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let grad = Tensor::ones([3], (Kind::Float, Device::Cpu));
        set_grad(&xs, &grad);
        (&xs * 2.0).sum(Kind::Float).backward();
        assert_eq!(grad, Tensor::full([3], 3.0, (Kind::Float, Device::Cpu)));
    }

    /// A seed that the CPU draws for a kernel, and the index where the captured kernel would read it.
    fn drawn() -> (i64, i64) {
        let mut place = 0;
        // SAFETY: the callee writes one number.
        let seed = unsafe { native::prsmed_seeds_example(&raw mut place) };
        (seed, place)
    }

    #[test]
    fn a_replay_draws_the_same_seeds_as_eager_work() {
        let _lock = rng::TEST_LOCK.lock();
        let buffer = Tensor::zeros([8], (Kind::Int64, Device::Cpu));
        rng::seed(3);
        assert_eq!(drawn().1, -1, "outside a capture seeds are numbers");
        // SAFETY: a live tensor, then null, as documented.
        unsafe { native::prsmed_seeds_capture(native::raw(&buffer)) };
        let before = rng::RngState::take(Device::Cpu).unwrap();
        let first = drawn();
        let second = drawn();
        before.restore().unwrap();
        assert_eq!(drawn(), first, "a recomputed segment draws its seed again");
        // SAFETY: as above.
        assert_eq!(unsafe { native::prsmed_seeds_capture(std::ptr::null_mut()) }, 2);
        assert_eq!((first.1, second.1), (0, 1));
        before.restore().unwrap();
        // SAFETY: a live tensor with that many places.
        unsafe { native::check(native::prsmed_seeds_draw(native::raw(&buffer), 2)) }.unwrap();
        assert_eq!(Vec::<i64>::try_from(&buffer.narrow(0, 0, 2)).unwrap(), [first.0, second.0]);
    }

    /// Checkpointed dropout with libtorch's generator: a replayed graph against the same eager work.
    #[test]
    #[ignore = "needs CUDA"]
    fn a_replay_repeats_the_work_with_new_random_numbers() {
        let _lock = rng::TEST_LOCK.lock();
        let device = Device::Cuda(0);
        let _stream = SideStream::enter(device).unwrap();
        let pool = GraphPool::new(device).unwrap();
        rng::seed(1);
        let weight = Tensor::randn([64, 64], (Kind::Float, device)).set_requires_grad(true);
        let input = Tensor::randn([32, 64], (Kind::Float, device));
        let grad = weight.zeros_like();
        let work = || {
            let inner = crate::Shared::new(weight.shallow_clone());
            let ys = crate::autograd::checkpoint(&[&input], move |xs| xs[0].matmul(&inner).dropout(0.5, true));
            let loss = ys.square().mean(Kind::Float);
            loss.backward();
            Ok(loss.detach())
        };
        set_grad(&weight, &grad);
        for _ in 0..3 {
            let _warm = work().unwrap();
        }
        let (graph, output) = CudaGraph::capture(&pool, work).unwrap();
        let (mut eager, mut replayed) = (Vec::new(), Vec::new());
        for step in 0..4 {
            for (is_replay, losses) in [(false, &mut eager), (true, &mut replayed)] {
                rng::seed(100 + step);
                let _ = grad.shallow_clone().zero_();
                let loss = if is_replay {
                    graph.replay().unwrap();
                    output.shallow_clone()
                } else {
                    work().unwrap()
                };
                losses.push((loss.double_value(&[]), grad.norm().double_value(&[])));
            }
        }
        assert_eq!(eager, replayed);
        assert!(eager.windows(2).all(|pair| pair[0] != pair[1]), "each step draws its own numbers: {eager:?}");
    }

    #[test]
    #[ignore = "needs CUDA"]
    fn a_failed_capture_leaves_the_gpu_usable() {
        let device = Device::Cuda(0);
        let _stream = SideStream::enter(device).unwrap();
        let pool = GraphPool::new(device).unwrap();
        let xs = Tensor::ones([8], (Kind::Float, device));
        let failed = CudaGraph::capture(&pool, || Ok((&xs * 2.0).sum(Kind::Float).double_value(&[])));
        assert!(failed.is_err());
        assert_eq!((&xs * 2.0).sum(Kind::Float).double_value(&[]), 16.0);
        assert!(Tensor::rand([4], (Kind::Float, device)).sum(Kind::Float).double_value(&[]) > 0.0);
        let (graph, ys) = CudaGraph::capture(&pool, || Ok(&xs * 3.0)).unwrap();
        graph.replay().unwrap();
        assert_eq!(ys.sum(Kind::Float).double_value(&[]), 24.0);
        let failed = CudaGraph::capture(&pool, || Ok((&xs * 2.0).sum(Kind::Float).double_value(&[])));
        assert!(failed.is_err(), "also while another graph is alive");
        let (other, zs) = CudaGraph::capture(&pool, || Ok(&xs * 5.0)).unwrap();
        other.replay().unwrap();
        assert_eq!(zs.sum(Kind::Float).double_value(&[]), 40.0);
        graph.replay().unwrap();
    }

    #[test]
    #[ignore = "needs CUDA"]
    fn memory_of_failed_captures_and_dropped_graphs_is_freed() {
        let device = Device::Cuda(0);
        let _stream = SideStream::enter(device).unwrap();
        let pool = GraphPool::new(device).unwrap();
        let xs = Tensor::ones([64 << 20], (Kind::Uint8, device));
        let reserved = || {
            crate::memory::release_cache(device).unwrap();
            crate::memory::read(device).unwrap().reserved.0
        };
        let before = reserved();
        for round in 0..3 {
            let failed = CudaGraph::capture(&pool, || Ok((&xs + 1).max().int64_value(&[])));
            assert!(failed.is_err());
            assert!(reserved() < before + (32 << 20), "a failed capture still holds memory, round {round}");
            let (graph, ys) = CudaGraph::capture(&pool, || Ok(&xs + 1)).unwrap();
            graph.replay().unwrap();
            assert_eq!(ys.max().int64_value(&[]), 2);
            assert!(reserved() >= before + (64 << 20));
            drop((graph, ys));
            assert!(reserved() < before + (32 << 20), "dropped graphs still hold memory, round {round}");
        }
    }
}
