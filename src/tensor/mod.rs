//! Tensors and everything that touches libtorch: no other module of the crate names `tch`, libtorch or our C++.
//!
//! [`store`] holds parameters, [`nf4`] holds 4-bit matrices, [`host_weights`] keeps frozen layers in host memory, and
//! [`weights`] reads and writes all of them. [`autograd`] has
//! activation checkpointing, [`functions`] has fused functions of the language model, and [`kernels`] are custom CUDA
//! kernels for them. [`graph`] captures and replays CUDA graphs. [`ledger`] counts bytes, [`memory`] reads a device's
//! memory, [`meta`] is the device that needs none, [`trace`] records what runs there, and [`mod@module_path`] names the
//! running module. [`mod@cuda_side`] says whether this program can use GPUs. [`collective`] connects the processes of a job. [`guard`] converts libtorch's panics to typed errors; [`rng`] is the only place that seeds;
//! [`threads`] follows the load of the machine.

pub mod adamw;
pub mod async_copy;
pub mod autograd;
pub mod collective;
pub mod cuda_side;
pub mod dims;
pub mod functions;
pub mod graph;
pub mod guard;
pub mod host_weights;
pub mod kernel_times;
pub mod kernels;
pub mod ledger;
pub mod memory;
pub mod meta;
pub mod module_path;
mod native;
pub mod nf4;
pub mod rng;
mod shared;
pub mod store;
pub mod threads;
pub mod trace;
pub mod weights;

pub use cuda_side::{
    CudaSide, GpuCode, built_for_torch, cuda_version, gpu_code, gpu_code_of, libtorch_folder, libtorch_version,
};
pub use dims::dims;
pub use meta::META;
pub use shared::Shared;
pub use tch::{Device, Kind, Reduction, Tensor};

use prsmed_base::Result;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs `work` without autograd on this thread. The former setting returns when `work` returns or panics.
pub fn no_grad<T>(work: impl FnOnce() -> T) -> T {
    let _guard = tch::no_grad_guard();
    work()
}

/// Bytes of one element of `kind`.
pub fn kind_bytes(kind: Kind) -> u64 {
    kind.elt_size_in_bytes() as u64
}

/// The GPU of this process.
static DEFAULT_GPU: AtomicUsize = AtomicUsize::new(0);

/// The default device for training: the first CUDA GPU that libtorch finds or that of [`set_default_gpu`], else the CPU.
pub fn default_device() -> Device {
    if has_gpu() { Device::Cuda(DEFAULT_GPU.load(Ordering::Relaxed)) } else { Device::Cpu }
}

/// Number of CUDA GPUs that this process can use.
pub fn num_gpus() -> usize {
    if has_gpu() { usize::try_from(tch::Cuda::device_count()).unwrap_or(0) } else { 0 }
}

/// Whether libtorch has a GPU, and this program everything that it needs for it.
fn has_gpu() -> bool {
    CudaSide::current().is_open() && tch::Cuda::is_available()
}

/// Makes GPU number `index` the one of this process and of the current thread.
///
/// # Errors
/// [`prsmed_base::Error::Torch`] if there is no such GPU.
pub fn set_default_gpu(index: usize) -> Result<()> {
    let number = i32::try_from(index).expect("a few GPUs");
    // SAFETY: a plain number.
    unsafe { native::check(native::prsmed_set_device(number))? };
    DEFAULT_GPU.store(index, Ordering::Relaxed);
    Ok(())
}

/// The version of cuDNN as a number (90100 for 9.1.0); `None` without it.
pub fn cudnn_version() -> Option<i64> {
    // SAFETY: the callee writes one number.
    unsafe { native::written(0, |out| native::prsmed_cudnn_version(out)) }.ok().filter(|version| *version > 0)
}

/// Turns off cuDNN's attention, which libtorch may prefer on Hopper and Blackwell. Its workspace size is not published,
/// so a plan could not predict it. Call this before the first attention on a GPU.
pub fn use_flash_attention() {
    // SAFETY: sets a flag of libtorch's context.
    unsafe { native::prsmed_flash_attention() };
}

/// Whether fp32 convolutions and matrix products of a GPU may round their inputs to TF32, which has the 10-bit mantissas
/// of fp16. libtorch's own default allows it for convolutions. It has no effect on the CPU.
///
/// # Panics
/// With libtorch's message, like its operators.
pub fn allow_tf32(is_allowed: bool) {
    // SAFETY: sets flags of libtorch's context.
    unsafe { native::check(native::prsmed_allow_tf32(is_allowed)) }.unwrap_or_else(|error| native::raise(error));
}

/// True if fp32 convolutions and matrix products of a GPU compute in fp32: after `allow_tf32(false)`.
///
/// # Panics
/// As [`allow_tf32`].
pub fn is_ieee_fp32() -> bool {
    // SAFETY: the callee writes one flag.
    native::answer(|out| unsafe { native::prsmed_is_ieee_fp32(out) })
}

/// A flag of libtorch that has another value until this is dropped.
#[must_use]
pub struct FlagGuard {
    before: bool,
    set: fn(bool),
}

impl Drop for FlagGuard {
    fn drop(&mut self) {
        (self.set)(self.before);
    }
}

/// [`allow_tf32`] until the result is dropped.
///
/// # Panics
/// As [`allow_tf32`].
pub fn enter_tf32(is_allowed: bool) -> FlagGuard {
    let before = !is_ieee_fp32();
    allow_tf32(is_allowed);
    FlagGuard { before, set: allow_tf32 }
}

/// Whether a GPU adds numbers in a fixed order, so that the same inputs give the same bits. Operators that cannot do so
/// raise an error. Set it before the first matrix product of the process: cuBLAS takes 32 MiB for each thread then.
///
/// # Panics
/// As [`allow_tf32`].
pub fn set_deterministic(is_on: bool) {
    // SAFETY: sets flags of libtorch's context.
    unsafe { native::check(native::prsmed_set_deterministic(is_on)) }.unwrap_or_else(|error| native::raise(error));
}

/// True after `set_deterministic(true)`.
pub fn is_deterministic() -> bool {
    // SAFETY: reads a flag of libtorch's context.
    unsafe { native::prsmed_is_deterministic() }
}

/// [`set_deterministic`] until the result is dropped.
///
/// # Panics
/// As [`allow_tf32`].
pub fn enter_deterministic(is_on: bool) -> FlagGuard {
    let before = is_deterministic();
    set_deterministic(is_on);
    FlagGuard { before, set: set_deterministic }
}

/// Waits until a GPU has completed all queued work. Returns at once for the CPU.
pub fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        tch::Cuda::synchronize(i64::try_from(index).expect("few GPUs"));
    }
}

/// Number of threads of libtorch's CPU kernels.
pub fn num_threads() -> u64 {
    u64::try_from(tch::get_num_threads()).unwrap_or(1).max(1)
}

/// Sets the number of threads of libtorch's CPU kernels.
pub fn set_num_threads(threads: i32) {
    tch::set_num_threads(threads);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_grad_ends_after_a_panic() {
        let weight = Tensor::ones([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let outcome = guard::guard(|| -> Result<()> { no_grad(|| panic!("out of memory")) });
        assert!(outcome.is_err());
        assert!((&weight * 2.0).requires_grad());
        assert!(!no_grad(|| &weight * 2.0).requires_grad());
    }
}
