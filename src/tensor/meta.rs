//! The meta device: tensors with sizes and no memory. The ledger counts them, and each operator allocates on it exactly what
//! libtorch's CPU kernel would (`native/meta.cpp`), so that a rehearsed step has the peak of a real one.

use super::{Device, Result, Tensor, native};

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

/// The number in a scalar; 1 for a meta scalar, which has none.
pub fn number(scalar: &Tensor) -> f64 {
    if scalar.device() == META { 1.0 } else { scalar.double_value(&[]) }
}

/// Whose kernels the meta device imitates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// libtorch's CPU kernels.
    Cpu,
    /// libtorch's CUDA kernels.
    Cuda,
}

/// While it lives, its thread plans for a target.
#[derive(Debug)]
pub struct EnteredTarget;

/// Plans for `target` on this thread until the result is dropped.
#[must_use]
pub fn enter_target(_target: Target) -> EnteredTarget {
    EnteredTarget
}
