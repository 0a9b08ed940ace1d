//! CUDA graphs: the kernels of a piece of work, recorded once and started again with one call (libtorch's `CUDAGraph`).
//!
//! A recording reads and writes the tensors it was made with, at their places: inputs are copied into them before a replay.
//! Random numbers are new in each replay, the same that the work would have drawn: libtorch's generator of the card counts on,
//! and seeds that the host draws for our own kernels are put where the recorded kernels look for them (`native/seeds.cpp`).

use super::native::{self, RawTensor};
use super::{Device, Kind, Tensor, guard, rng};
use crate::{Error, Result};
use std::cell::RefCell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::rc::{Rc, Weak};

/// Seeds that a recording may draw.
const MOST_SEEDS: i64 = 1 << 14;

/// Memory that recordings share: what one of them holds while it runs, the others use when it does not.
#[derive(Debug)]
pub struct Pool {
    /// What libtorch calls it while there are recordings.
    id: RefCell<Weak<[u64; 2]>>,
    device: i32,
}

impl Pool {
    /// A pool on `device`.
    ///
    /// # Errors
    /// [`Error::Torch`] where that is no card.
    pub fn new(device: Device) -> Result<Self> {
        Ok(Self { id: RefCell::default(), device: card(device)? })
    }

    /// libtorch's pool for one more recording, which keeps what this returns. A new one after the last recording is gone: the
    /// old one's memory is free then, and libtorch takes no new recordings into it.
    fn for_recording(&self) -> Result<Rc<[u64; 2]>> {
        if let Some(id) = self.id.borrow().upgrade() {
            return Ok(id);
        }
        let mut id = [0; 2];
        // SAFETY: the callee writes two numbers.
        unsafe { native::check(native::prsmed_graph_pool(id.as_mut_ptr()))? };
        let id = Rc::new(id);
        *self.id.borrow_mut() = Rc::downgrade(&id);
        Ok(id)
    }
}

/// While it lives, this thread's work on a card runs on a side stream, where recording is possible.
#[derive(Debug)]
pub struct SideStream {
    device: i32,
    /// Streams are the thread's.
    _stays: PhantomData<*const ()>,
}

impl SideStream {
    /// Waits for the card, then switches.
    ///
    /// # Errors
    /// [`Error::Torch`] without CUDA.
    pub fn enter(device: Device) -> Result<Self> {
        let device = card(device)?;
        // SAFETY: changes this thread's current stream.
        unsafe { native::check(native::prsmed_stream_enter(device))? };
        Ok(Self { device, _stays: PhantomData })
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        // SAFETY: as in `enter`; `self` is not `Send`. A card that fails here fails again where it is noticed.
        let _ = unsafe { native::check(native::prsmed_stream_leave(self.device)) };
    }
}

/// A recorded piece of work.
#[derive(Debug)]
pub struct Graph {
    raw: *mut c_void,
    /// i64, on the card: where recorded kernels look for seeds.
    seeds: Tensor,
    num_seeds: i64,
    _pool: Rc<[u64; 2]>,
}

impl Graph {
    /// Records what `work` starts on this thread's current stream (a [`SideStream`]); nothing of it runs. What it returns
    /// holds the tensors that a replay writes.
    ///
    /// # Errors
    /// What `work` says, and [`Error::Torch`] for what cannot be recorded, such as waiting for the card.
    pub fn record<T>(pool: &Pool, work: impl FnOnce() -> Result<T>) -> Result<(Self, T)> {
        let index =
            usize::try_from(pool.device).map_err(|_| Error::Torch { reason: "there is no such card".into() })?;
        let seeds = Tensor::zeros([MOST_SEEDS], (Kind::Int64, Device::Cuda(index)));
        let numbers = rng::State::take(Device::Cpu)?;
        let id = pool.for_recording()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pool's two numbers are read; `raw` is set on success.
        unsafe { native::check(native::prsmed_graph_begin(pool.device, id.as_ptr(), &raw mut raw))? };
        let mut graph = Self { raw, seeds, num_seeds: 0, _pool: id };
        // SAFETY: a live tensor, of which the callee keeps a copy until the second call.
        unsafe { native::prsmed_seeds_record(native::raw(&graph.seeds)) };
        let outcome = guard::guard(work);
        // SAFETY: null is documented.
        graph.num_seeds = unsafe { native::prsmed_seeds_record(std::ptr::null_mut()) };
        numbers.restore()?;
        match outcome {
            Ok(recorded) => {
                // SAFETY: a graph whose recording began.
                unsafe { native::check(native::prsmed_graph_end(raw))? };
                Ok((graph, recorded))
            }
            Err(error) => {
                // SAFETY: as above.
                unsafe { native::prsmed_graph_abandon(raw) };
                Err(error)
            }
        }
    }

    /// Starts the recorded work on this thread's current stream.
    ///
    /// # Errors
    /// [`Error::Torch`] from the card.
    pub fn replay(&self) -> Result<()> {
        // SAFETY: a live tensor of enough places, and a graph that was recorded.
        unsafe {
            native::check(native::prsmed_seeds_draw(native::raw(&self.seeds), self.num_seeds))?;
            native::check(native::prsmed_graph_replay(self.raw))
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `record`, freed once.
        unsafe { native::prsmed_graph_free(self.raw) };
    }
}

/// Waits until everything on `device` has run; nothing to do on the CPU.
///
/// # Errors
/// [`Error::Torch`] from the card.
pub fn synchronize(device: Device) -> Result<()> {
    let Device::Cuda(_) = device else { return Ok(()) };
    // SAFETY: waits.
    unsafe { native::check(native::prsmed_synchronize(card(device)?)) }
}

/// Makes `grad` the gradient of `tensor`; the next backward pass adds to it in place.
pub fn set_grad(tensor: &Tensor, grad: &Tensor) {
    let (tensor, grad): (RawTensor, RawTensor) = (native::raw(tensor), native::raw(grad));
    // SAFETY: two live tensors of one shape; the callee takes a reference to the second.
    unsafe { native::prsmed_set_grad(tensor, grad) };
}

/// Fills `tensors` with zeros, on a card by a few kernels for all of them.
///
/// # Errors
/// [`Error::Torch`] from libtorch.
pub fn zero(tensors: &[&Tensor]) -> Result<()> {
    let mut raw: Vec<RawTensor> = tensors.iter().map(|tensor| native::raw(tensor)).collect();
    let count = i64::try_from(raw.len()).expect("fewer tensors than 2^63");
    // SAFETY: `count` live tensors.
    guard::guard(|| unsafe { native::check(native::prsmed_zero(raw.as_mut_ptr(), count)) })
}

fn card(device: Device) -> Result<i32> {
    match device {
        Device::Cuda(index) => {
            i32::try_from(index).map_err(|_| Error::Torch { reason: format!("there is no card {index}") })
        }
        other => Err(Error::Torch { reason: format!("graphs are recorded on a card, not on {other:?}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_card_says_so() {
        assert!(matches!(Pool::new(Device::Cpu), Err(Error::Torch { .. })));
        assert!(matches!(SideStream::enter(Device::Cpu), Err(Error::Torch { .. })));
        synchronize(Device::Cpu).unwrap();
    }

    #[test]
    fn recordings_share_a_pool_while_there_are_any() {
        let pool = Pool::new(Device::Cuda(0)).unwrap();
        let first = match pool.for_recording() {
            Ok(first) => first,
            Err(error) => return assert!(error.to_string().contains("this libtorch has no CUDA"), "{error}"),
        };
        let second = pool.for_recording().unwrap();
        assert_eq!(first, second);
        let before = *first;
        drop(first);
        assert_eq!(*pool.for_recording().unwrap(), before);
        drop(second);
        assert_ne!(*pool.for_recording().unwrap(), before, "libtorch takes nothing into a pool that was left");
    }

    #[test]
    fn a_given_gradient_is_added_to_in_place() {
        let xs = Tensor::ones([3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let grad = Tensor::ones([3], (Kind::Float, Device::Cpu));
        set_grad(&xs, &grad);
        (&xs * 2.0).sum(Kind::Float).backward();
        assert_eq!(grad, Tensor::full([3], 3.0, (Kind::Float, Device::Cpu)));
    }

    /// A number that the host draws for a kernel, and the place where the recorded kernel would find it.
    fn drawn() -> (i64, i64) {
        let mut place = 0;
        // SAFETY: the callee writes one number.
        let seed = unsafe { native::prsmed_seeds_example(&raw mut place) };
        (seed, place)
    }

    #[test]
    fn a_replay_draws_the_seeds_that_the_work_would_have_drawn() {
        let _turn = rng::TURN.lock();
        let places = Tensor::zeros([8], (Kind::Int64, Device::Cpu));
        rng::seed(3);
        assert_eq!(drawn().1, -1, "outside a recording seeds are numbers");
        // SAFETY: a live tensor, then null, as documented.
        unsafe { native::prsmed_seeds_record(native::raw(&places)) };
        let before = rng::State::take(Device::Cpu).unwrap();
        let first = drawn();
        let second = drawn();
        before.restore().unwrap();
        assert_eq!(drawn(), first, "a segment that runs twice draws its seed twice");
        // SAFETY: as above.
        assert_eq!(unsafe { native::prsmed_seeds_record(std::ptr::null_mut()) }, 2);
        assert_eq!((first.1, second.1), (0, 1));
        before.restore().unwrap();
        // SAFETY: a live tensor with that many places.
        unsafe { native::check(native::prsmed_seeds_draw(native::raw(&places), 2)) }.unwrap();
        assert_eq!(Vec::<i64>::try_from(&places.narrow(0, 0, 2)).unwrap(), [first.0, second.0]);
    }

    /// Dropout of libtorch's generator, checkpointed, recorded and replayed against the same work run.
    #[test]
    #[ignore = "needs CUDA"]
    fn a_replay_repeats_the_work_with_new_random_numbers() {
        let _turn = rng::TURN.lock();
        let device = Device::Cuda(0);
        let _stream = SideStream::enter(device).unwrap();
        let pool = Pool::new(device).unwrap();
        rng::seed(1);
        let weight = Tensor::randn([64, 64], (Kind::Float, device)).set_requires_grad(true);
        let input = Tensor::randn([32, 64], (Kind::Float, device));
        let grad = weight.zeros_like();
        let work = || {
            let inner = weight.shallow_clone();
            let ys = crate::tensor::autograd::checkpoint(&[&input], move |xs| xs[0].matmul(&inner).dropout(0.5, true));
            let loss = ys.square().mean(Kind::Float);
            loss.backward();
            Ok(loss.detach())
        };
        set_grad(&weight, &grad);
        for _ in 0..3 {
            let _warm = work().unwrap();
        }
        let (graph, output) = Graph::record(&pool, work).unwrap();
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
    fn what_cannot_be_recorded_leaves_the_card_usable() {
        let device = Device::Cuda(0);
        let _stream = SideStream::enter(device).unwrap();
        let pool = Pool::new(device).unwrap();
        let xs = Tensor::ones([8], (Kind::Float, device));
        let refused = Graph::record(&pool, || Ok((&xs * 2.0).sum(Kind::Float).double_value(&[])));
        assert!(refused.is_err());
        assert_eq!((&xs * 2.0).sum(Kind::Float).double_value(&[]), 16.0);
        assert!(Tensor::rand([4], (Kind::Float, device)).sum(Kind::Float).double_value(&[]) > 0.0);
        let (graph, ys) = Graph::record(&pool, || Ok(&xs * 3.0)).unwrap();
        graph.replay().unwrap();
        assert_eq!(ys.sum(Kind::Float).double_value(&[]), 24.0);
        let refused = Graph::record(&pool, || Ok((&xs * 2.0).sum(Kind::Float).double_value(&[])));
        assert!(refused.is_err(), "beside a recording that lives, too");
        let (other, zs) = Graph::record(&pool, || Ok(&xs * 5.0)).unwrap();
        other.replay().unwrap();
        assert_eq!(zs.sum(Kind::Float).double_value(&[]), 40.0);
        graph.replay().unwrap();
    }

    #[test]
    #[ignore = "needs CUDA"]
    fn memory_of_recordings_that_failed_or_are_gone_is_free_again() {
        let device = Device::Cuda(0);
        let _stream = SideStream::enter(device).unwrap();
        let pool = Pool::new(device).unwrap();
        let xs = Tensor::ones([64 << 20], (Kind::Uint8, device));
        let reserved = || {
            crate::tensor::memory::release_cache(device).unwrap();
            crate::tensor::memory::read(device).unwrap().reserved.0
        };
        let before = reserved();
        for round in 0..3 {
            let refused = Graph::record(&pool, || Ok((&xs + 1).max().int64_value(&[])));
            assert!(refused.is_err());
            assert!(reserved() < before + (32 << 20), "a recording that failed holds its memory, round {round}");
            let (graph, ys) = Graph::record(&pool, || Ok(&xs + 1)).unwrap();
            graph.replay().unwrap();
            assert_eq!(ys.max().int64_value(&[]), 2);
            assert!(reserved() >= before + (64 << 20));
            drop((graph, ys));
            assert!(reserved() < before + (32 << 20), "recordings that are gone hold memory, round {round}");
        }
    }
}
