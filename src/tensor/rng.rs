//! The only seeding point: libtorch's generator and every seeded stream of the crate.

use super::{Tensor, native};
use crate::Result;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

/// Seeds libtorch's generators (dropout, initialisation, sampling).
pub fn seed(seed: u64) {
    tch::manual_seed(i64::from_ne_bytes(seed.to_ne_bytes()));
}

/// An independent stream for `(seed, purpose, indices)`: the same on every machine and for every thread count.
pub fn stream(seed: u64, purpose: &str, indices: &[u64]) -> ChaCha8Rng {
    let mut hash = Sha256::new();
    hash.update(seed.to_le_bytes());
    hash.update(purpose.as_bytes());
    for index in indices {
        hash.update(index.to_le_bytes());
    }
    ChaCha8Rng::from_seed(hash.finalize().into())
}

/// The state of libtorch's CPU generator, `u8 [N]`; saved in checkpoints.
///
/// # Errors
/// [`crate::Error::Torch`] when libtorch refuses.
pub fn state() -> Result<Tensor> {
    let mut out = std::ptr::null_mut();
    // SAFETY: `out` receives an owned tensor when no message is returned.
    unsafe {
        native::check(native::prsmed_rng_state(&raw mut out))?;
        Ok(native::owned(out))
    }
}

/// Puts the CPU generator back to a state from [`state`].
///
/// # Errors
/// [`crate::Error::Torch`] when the tensor is no generator state.
pub fn set_state(state: &Tensor) -> Result<()> {
    // SAFETY: the tensor outlives the call.
    unsafe { native::check(native::prsmed_set_rng_state(native::raw(state))) }
}

/// Tests that draw from libtorch's one generator take turns.
#[cfg(test)]
pub(crate) static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Device, Kind};

    #[test]
    fn a_restored_state_repeats_the_numbers() {
        let _turn = TURN.lock();
        seed(7);
        let state = state().unwrap();
        let first = Tensor::rand([8], (Kind::Float, Device::Cpu));
        set_state(&state).unwrap();
        assert_eq!(first, Tensor::rand([8], (Kind::Float, Device::Cpu)));
    }
}
