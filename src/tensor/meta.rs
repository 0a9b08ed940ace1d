//! Meta device: tensors that have a size but no memory, for dry runs.
//!
//! The ledger counts their bytes. Each operator allocates exactly what libtorch's kernel of the [`PlanTarget`] would
//! allocate (`native/meta_cpu.cpp`, `native/meta_cuda.cpp`), so that a dry run has the peak of a real step.

use super::{Device, Result, Tensor, native};
use std::marker::PhantomData;

/// The device of meta tensors. tch has no name for it: it reports them as `Mps`, which no Linux build of libtorch has.
pub const META: Device = Device::Mps;

/// Enables [`META`] in this process. Call it and [`super::ledger::install`] before the first meta tensor.
///
/// # Errors
/// [`prsmed_base::Error::Torch`] from libtorch.
pub fn install() -> Result<()> {
    // SAFETY: registers kernels once; the callee guards against a second time.
    unsafe { native::check(native::prsmed_meta_install()) }
}

/// The integer in a tensor of one element; 1 for a meta tensor, which has no value.
pub fn index(scalar: &Tensor) -> i64 {
    if scalar.device() == META { 1 } else { scalar.reshape([-1]).int64_value(&[0]) }
}

/// The device that meta tensors simulate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanTarget {
    /// libtorch's CPU kernels. Tests compare the bytes with them.
    Cpu,
    /// libtorch's CUDA kernels on a GPU of compute capability 8.0 or more, modelled from libtorch's sources. Not yet
    /// compared with a GPU.
    Cuda,
}

impl PlanTarget {
    fn number(self) -> i32 {
        i32::from(self == Self::Cuda)
    }
}

/// Restores the former target when dropped.
#[derive(Debug)]
#[must_use]
pub struct EnteredTarget {
    former: i32,
    /// The target is thread-local, so this is not `Send`.
    _stays: PhantomData<*const ()>,
}

impl Drop for EnteredTarget {
    fn drop(&mut self) {
        // SAFETY: changes a number of this thread.
        unsafe { native::prsmed_meta_target(self.former) };
    }
}

/// Sets the target of this thread's meta tensors until the result is dropped. The default is [`PlanTarget::Cpu`].
pub fn enter_target(target: PlanTarget) -> EnteredTarget {
    // SAFETY: changes a number of this thread.
    EnteredTarget { former: unsafe { native::prsmed_meta_target(target.number()) }, _stays: PhantomData }
}

/// The target of this thread's meta tensors.
pub fn target() -> PlanTarget {
    // SAFETY: reads a number of this thread.
    if unsafe { native::prsmed_meta_target_now() } == 1 { PlanTarget::Cuda } else { PlanTarget::Cpu }
}

/// Sets the GPU that the CUDA target simulates on this thread: compute capability (80 for 8.0) and number of
/// multiprocessors. The default is an A100 (80 and 108).
pub fn set_gpu(capability: i32, multiprocessors: i32) {
    // SAFETY: changes two numbers of this thread.
    unsafe { native::prsmed_meta_gpu(capability, multiprocessors) };
}

/// True if CUDA kernels run on `tensor`, or would run in the dry run's real counterpart.
pub fn runs_as_cuda(tensor: &Tensor) -> bool {
    match tensor.device() {
        Device::Cuda(_) => true,
        META => target() == PlanTarget::Cuda,
        _ => false,
    }
}

/// The number in a scalar; 1 for a meta tensor, which has no value.
pub fn number(scalar: &Tensor) -> f64 {
    if scalar.device() == META { 1.0 } else { scalar.double_value(&[]) }
}
