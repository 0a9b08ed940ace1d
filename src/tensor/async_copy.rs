//! Asynchronous copies of tensors to a GPU, from pinned CPU memory on a separate stream (`native/async_copy.cpp`).
//!
//! The CPU needs no copies. **Not yet run on a GPU.**

use super::{Device, Tensor, native};
use std::ffi::c_void;

/// Asynchronous copies to one GPU. Do not use the copied tensors before [`Self::complete`].
#[derive(Debug)]
#[must_use]
pub struct AsyncCopy {
    gpu: i32,
    pending: Vec<*mut c_void>,
}

impl AsyncCopy {
    /// Starts a set of copies to `device`; `None` if that is the CPU.
    pub fn to(device: Device) -> Option<Self> {
        let Device::Cuda(gpu) = device else { return None };
        Some(Self { gpu: i32::try_from(gpu).expect("a few GPUs"), pending: Vec::new() })
    }

    /// Starts to copy a CPU tensor. Returns the tensor on the GPU.
    ///
    /// # Panics
    /// With libtorch's message, like its operators.
    pub fn send(&mut self, host: &Tensor) -> Tensor {
        let (mut out, mut completion) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the tensor outlives the call; `out` and `completion` are set when no message is returned.
        let sent = unsafe {
            let sent = native::prsmed_async_copy_send(native::raw(host), self.gpu, &raw mut out, &raw mut completion);
            native::check(sent).map(|()| native::owned(out))
        };
        match sent {
            Ok(tensor) => {
                self.pending.push(completion);
                tensor
            }
            Err(error) => error.raise(),
        }
    }

    /// Makes the compute stream wait for the copies. The CPU does not wait.
    pub fn complete(self) {
        drop(self);
    }
}

impl Drop for AsyncCopy {
    /// Waits for the copies, because the memory of an unfinished copy must not be reused.
    fn drop(&mut self) {
        for completion in self.pending.drain(..) {
            // SAFETY: each arrival comes from `prsmed_async_copy_send` and is given back once.
            let completed = unsafe { native::check(native::prsmed_async_copy_complete(completion)) };
            debug_assert!(completed.is_ok(), "{completed:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Kind, default_device};

    #[test]
    fn the_cpu_needs_no_copies() {
        assert!(AsyncCopy::to(Device::Cpu).is_none() && AsyncCopy::to(crate::tensor::META).is_none());
    }

    #[test]
    #[ignore = "needs CUDA"]
    fn a_completed_copy_has_the_values_of_its_source() {
        let gpu = default_device();
        let host: Vec<Tensor> = (0..8).map(|i| Tensor::full([1 << 20], i, (Kind::Uint8, Device::Cpu))).collect();
        for _ in 0..20 {
            let mut copy = AsyncCopy::to(gpu).expect("a GPU");
            let there: Vec<Tensor> = host.iter().map(|tensor| copy.send(tensor)).collect();
            copy.complete();
            for (sent, completed) in host.iter().zip(there) {
                assert_eq!(*sent, completed.to_device(Device::Cpu));
            }
        }
    }
}
