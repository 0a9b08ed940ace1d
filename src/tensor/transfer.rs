//! Copies to a card beside the arithmetic: from pinned host memory, on a stream of their own (`native/transfer.cpp`). On the
//! CPU there is nothing to copy. **Not yet run on a card.**

use super::{Device, Tensor, native};
use std::ffi::c_void;

/// Copies under way to one card. The arithmetic waits for them from [`Self::land`] on; the tensors must not be used before.
#[derive(Debug)]
#[must_use]
pub struct Flight {
    card: i32,
    arrivals: Vec<*mut c_void>,
}

impl Flight {
    /// Copies to `device`; `None` where that is the host.
    pub fn to(device: Device) -> Option<Self> {
        let Device::Cuda(card) = device else { return None };
        Some(Self { card: i32::try_from(card).expect("a few cards"), arrivals: Vec::new() })
    }

    /// Begins to copy a tensor of the host.
    ///
    /// # Panics
    /// With libtorch's words, as its operators do.
    pub fn send(&mut self, host: &Tensor) -> Tensor {
        let (mut out, mut arrival) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the tensor outlives the call; `out` and `arrival` are set when no message is returned.
        let sent = unsafe {
            let sent = native::prsmed_transfer_send(native::raw(host), self.card, &raw mut out, &raw mut arrival);
            native::check(sent).map(|()| native::owned(out))
        };
        match sent {
            Ok(tensor) => {
                self.arrivals.push(arrival);
                tensor
            }
            Err(error) => error.raise(),
        }
    }

    /// The arithmetic waits for the copies; the host does not.
    pub fn land(self) {
        drop(self);
    }
}

impl Drop for Flight {
    /// A copy that nobody waits for would write into memory that is somebody else's by then.
    fn drop(&mut self) {
        for arrival in self.arrivals.drain(..) {
            // SAFETY: each arrival comes from `prsmed_transfer_send` and is given back once.
            let landed = unsafe { native::check(native::prsmed_transfer_land(arrival)) };
            debug_assert!(landed.is_ok(), "{landed:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Kind, default_device};

    #[test]
    fn the_host_sends_nothing() {
        assert!(Flight::to(Device::Cpu).is_none() && Flight::to(crate::tensor::META).is_none());
    }

    #[test]
    #[ignore = "needs CUDA"]
    fn what_lands_is_what_was_sent() {
        let card = default_device();
        let host: Vec<Tensor> = (0..8).map(|i| Tensor::full([1 << 20], i, (Kind::Uint8, Device::Cpu))).collect();
        for _ in 0..20 {
            let mut flight = Flight::to(card).expect("a card");
            let there: Vec<Tensor> = host.iter().map(|tensor| flight.send(tensor)).collect();
            flight.land();
            for (sent, landed) in host.iter().zip(there) {
                assert_eq!(*sent, landed.to_device(Device::Cpu));
            }
        }
    }
}
