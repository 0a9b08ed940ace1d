//! The only door to `tch`, libtorch and our C++: the rest of the crate never names them.
//!
//! [`store`] holds parameters, [`nf4`] matrices in 4 bits, [`weights`] reads and writes them, [`autograd`] checkpoints
//! activations, [`functions`] keep less,
//! [`ledger`] counts bytes, [`memory`] reads a device's, [`meta`] runs without memory, [`trace`] writes down what runs
//! there, [`scope`] names the modules, [`guard`] turns libtorch's panics into typed errors, [`rng`] is the only seeding
//! point, [`graph`] records kernels and replays them, [`kernels`] are our own.

pub mod adamw;
pub mod autograd;
pub mod dims;
pub mod functions;
pub mod graph;
pub mod guard;
pub mod kernels;
pub mod ledger;
pub mod memory;
pub mod meta;
mod native;
pub mod nf4;
pub mod rng;
pub mod scope;
pub mod store;
pub mod trace;
pub mod transfer;
pub mod weights;

pub use dims::dims;
pub use meta::META;
pub use tch::{Device, Kind, Reduction, Tensor, no_grad};

use crate::Result;

/// Bytes of one element of `kind`.
pub fn kind_bytes(kind: Kind) -> u64 {
    kind.elt_size_in_bytes() as u64
}

/// The device training runs on: the first CUDA card that libtorch sees, else the CPU.
pub fn default_device() -> Device {
    Device::cuda_if_available()
}

/// Keeps cuDNN's attention off, which libtorch may prefer on Hopper and Blackwell: its workspace follows from no source, so
/// that no plan could hold. Call it before the first attention on a card.
pub fn use_flash_attention() {
    // SAFETY: sets a flag of libtorch's context.
    unsafe { native::prsmed_flash_attention() };
}

/// Waits until a card has done what it was given; the CPU has already.
pub fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        tch::Cuda::synchronize(i64::try_from(index).expect("few cards"));
    }
}

/// How many threads libtorch's CPU kernels use.
pub fn num_threads() -> u64 {
    u64::try_from(tch::get_num_threads()).unwrap_or(1).max(1)
}

/// Sets how many threads libtorch's CPU kernels use.
pub fn set_num_threads(threads: i32) {
    tch::set_num_threads(threads);
}
