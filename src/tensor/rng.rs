//! Random numbers: the only place that seeds libtorch's generator and the crate's own random streams.

use super::{Device, Tensor, native};
use prsmed_base::Result;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use prsmed_base::rng::stream;

/// Seeds libtorch's generators (dropout, initialisation, sampling).
pub fn seed(seed: u64) {
    TEST_LOCK.check();
    tch::manual_seed(i64::from_ne_bytes(seed.to_ne_bytes()));
}

/// Saved states of libtorch's generators: that of the CPU, and that of one GPU.
#[derive(Debug)]
pub struct RngState {
    cpu: Tensor,
    gpu: Option<(i32, Tensor)>,
}

impl RngState {
    /// Reads the current states. `device` says which GPU's generator is included, if any.
    ///
    /// # Errors
    /// [`prsmed_base::Error::Torch`] from libtorch.
    pub fn take(device: Device) -> Result<Self> {
        let gpu = match device {
            Device::Cuda(index) => Some(i32::try_from(index).expect("a few GPUs")),
            _ => None,
        };
        let gpu = gpu.map(|index| Ok::<_, prsmed_base::Error>((index, generator(index)?))).transpose()?;
        Ok(Self { cpu: generator(CPU)?, gpu })
    }

    /// Restores the saved states.
    ///
    /// # Errors
    /// [`prsmed_base::Error::Torch`] from libtorch.
    pub fn restore(&self) -> Result<()> {
        let all = [Some((CPU, &self.cpu)), self.gpu.as_ref().map(|(index, state)| (*index, state))];
        for (index, state) in all.into_iter().flatten() {
            // SAFETY: the tensor outlives the call.
            unsafe { native::check(native::prsmed_set_rng_state(index, native::raw(state)))? };
        }
        Ok(())
    }
}

/// Value for the CPU's generator where the native layer expects the index of a GPU.
const CPU: i32 = -1;

/// The state of a generator, `u8 [N]` on the CPU.
fn generator(index: i32) -> Result<Tensor> {
    // SAFETY: an owned tensor is written when no message is returned.
    unsafe { native::made(|out| native::prsmed_rng_state(index, out)) }
}

/// Tests that use libtorch's global generator hold this lock: a test that seeds it or draws from it at the same time
/// would change their random numbers. From the first one on, the process panics where another thread does so.
#[doc(hidden)]
pub static TEST_LOCK: TestLock = TestLock { turn: Mutex::new(()), is_used: AtomicBool::new(false) };

#[doc(hidden)]
pub struct TestLock {
    turn: Mutex<()>,
    is_used: AtomicBool,
}

#[doc(hidden)]
pub struct TestTurn(#[expect(dead_code, reason = "held until it is dropped")] MutexGuard<'static, ()>);

thread_local! {
    static HAS_TURN: Cell<bool> = const { Cell::new(false) };
}

impl TestLock {
    /// Waits for the turn of this thread.
    pub fn lock(&'static self) -> TestTurn {
        self.is_used.store(true, Ordering::Relaxed);
        let guard = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        HAS_TURN.set(true);
        TestTurn(guard)
    }

    /// In tests, panics unless this thread holds the lock.
    pub fn check(&self) {
        let may_draw = !(cfg!(test) || self.is_used.load(Ordering::Relaxed)) || HAS_TURN.get();
        assert!(may_draw, "a test that uses libtorch's global generator holds `rng::TEST_LOCK`");
    }
}

impl Drop for TestTurn {
    fn drop(&mut self) {
        HAS_TURN.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    #[test]
    fn a_restored_state_repeats_the_random_numbers() {
        let _lock = TEST_LOCK.lock();
        seed(7);
        let state = RngState::take(Device::Cpu).unwrap();
        let first = Tensor::rand([8], (Kind::Float, Device::Cpu));
        state.restore().unwrap();
        assert_eq!(first, Tensor::rand([8], (Kind::Float, Device::Cpu)));
    }
}
