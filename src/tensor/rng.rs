//! The only seeding point: libtorch's generator and every seeded stream of the crate.

use super::{Device, Tensor, native};
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

/// States of libtorch's generators: the host's, and that of a card that computes.
#[derive(Debug)]
pub struct State {
    host: Tensor,
    card: Option<(i32, Tensor)>,
}

impl State {
    /// As they are now, for what computes on `device`.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] when libtorch refuses.
    pub fn take(device: Device) -> Result<Self> {
        let card = match device {
            Device::Cuda(index) => Some(i32::try_from(index).expect("a few cards")),
            _ => None,
        };
        let card = card.map(|index| Ok::<_, crate::Error>((index, generator(index)?))).transpose()?;
        Ok(Self { host: generator(HOST)?, card })
    }

    /// Puts them back.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] when libtorch refuses.
    pub fn restore(&self) -> Result<()> {
        let all = [Some((HOST, &self.host)), self.card.as_ref().map(|(index, state)| (*index, state))];
        for (index, state) in all.into_iter().flatten() {
            // SAFETY: the tensor outlives the call.
            unsafe { native::check(native::prsmed_set_rng_state(index, native::raw(state)))? };
        }
        Ok(())
    }
}

/// The host's generator, where a card's number is expected.
const HOST: i32 = -1;

/// The state of a generator, `u8 [N]` on the host.
fn generator(index: i32) -> Result<Tensor> {
    let mut out = std::ptr::null_mut();
    // SAFETY: `out` receives an owned tensor when no message is returned.
    unsafe {
        native::check(native::prsmed_rng_state(index, &raw mut out))?;
        Ok(native::owned(out))
    }
}

/// Tests that draw from libtorch's one generator take turns.
#[cfg(test)]
pub(crate) static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Kind;

    #[test]
    fn a_restored_state_repeats_the_numbers() {
        let _turn = TURN.lock();
        seed(7);
        let state = State::take(Device::Cpu).unwrap();
        let first = Tensor::rand([8], (Kind::Float, Device::Cpu));
        state.restore().unwrap();
        assert_eq!(first, Tensor::rand([8], (Kind::Float, Device::Cpu)));
    }
}
