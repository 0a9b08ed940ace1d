//! The meta device: tensors with sizes and no memory. The ledger counts them, and each operator allocates on it exactly
//! what libtorch's kernel of the [`Target`] would (`native/meta_cpu.cpp`, `native/meta_cuda.cpp`), so that a rehearsed
//! step has the peak of a real one.

use super::{Device, Result, Tensor, native};
use std::marker::PhantomData;

/// The device of meta tensors. tch has no name for it: it reports them as `Mps`, which no Linux build of libtorch has.
pub const META: Device = Device::Mps;

/// Makes [`META`] usable in this process; call it, and [`super::ledger::install`], before the first meta tensor.
///
/// # Errors
/// [`crate::Error::Torch`] from libtorch.
pub fn install() -> Result<()> {
    // SAFETY: registers kernels once; the callee guards against a second time.
    unsafe { native::check(native::prsmed_meta_install()) }
}

/// The only integer in a tensor of one element; 1 for a meta tensor, which has none.
pub fn index(scalar: &Tensor) -> i64 {
    if scalar.device() == META { 1 } else { scalar.reshape([-1]).int64_value(&[0]) }
}

/// The device that meta tensors stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// libtorch's CPU kernels; compared with them byte for byte.
    Cpu,
    /// libtorch's CUDA kernels on a card of compute capability 8.0 or more, after libtorch's sources; not yet compared
    /// with a card.
    Cuda,
}

impl Target {
    fn number(self) -> i32 {
        i32::from(self == Self::Cuda)
    }
}

/// Restores the former target when dropped.
#[derive(Debug)]
#[must_use]
pub struct EnteredTarget {
    former: i32,
    /// The target is the thread's.
    _stays: PhantomData<*const ()>,
}

impl Drop for EnteredTarget {
    fn drop(&mut self) {
        // SAFETY: changes a number of this thread.
        unsafe { native::prsmed_meta_target(self.former) };
    }
}

/// From now on this thread's meta tensors stand for those of `target` ([`Target::Cpu`] until the first call).
pub fn enter_target(target: Target) -> EnteredTarget {
    // SAFETY: changes a number of this thread.
    EnteredTarget { former: unsafe { native::prsmed_meta_target(target.number()) }, _stays: PhantomData }
}

/// What this thread's meta tensors stand for.
pub fn target() -> Target {
    // SAFETY: reads a number of this thread.
    if unsafe { native::prsmed_meta_target_now() } == 1 { Target::Cuda } else { Target::Cpu }
}

/// What kernels choose by when the target is CUDA: compute capability (80 for 8.0) and multiprocessors. An A100's (80
/// and 108) until this is called on the thread.
pub fn set_card(capability: i32, multiprocessors: i32) {
    // SAFETY: changes two numbers of this thread.
    unsafe { native::prsmed_meta_card(capability, multiprocessors) };
}

/// Whether CUDA's kernels run on `tensor`, or would in the rehearsed run.
pub fn runs_as_cuda(tensor: &Tensor) -> bool {
    match tensor.device() {
        Device::Cuda(_) => true,
        META => target() == Target::Cuda,
        _ => false,
    }
}

/// The number in a scalar; 1 for a meta scalar, which has none.
pub fn number(scalar: &Tensor) -> f64 {
    if scalar.device() == META { 1.0 } else { scalar.double_value(&[]) }
}
