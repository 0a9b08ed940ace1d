//! libtorch's fused AdamW step (Loshchilov & Hutter 2019) on lists of tensors.

use super::native::{self, RawTensor};
use super::{Tensor, guard};
use crate::Result;

/// Numbers of one step.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay of the first and second moment.
    pub betas: (f64, f64),
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
}

/// One parameter with its state: fp32, same shape; `step` is a one-element fp32 tensor holding the steps done,
/// *already increased* for the step to come.
#[derive(Debug)]
pub struct Slot<'a> {
    /// The parameter, changed in place.
    pub param: &'a Tensor,
    /// Its gradient.
    pub grad: &'a Tensor,
    /// First moment, changed in place.
    pub first: &'a Tensor,
    /// Second moment, changed in place.
    pub second: &'a Tensor,
    /// Step count.
    pub step: &'a Tensor,
}

/// Does one AdamW step on all `slots`.
///
/// # Errors
/// [`crate::Error::Torch`] when shapes or dtypes differ.
pub fn fused(slots: &[Slot], step: Step) -> Result<()> {
    let column = |pick: fn(&Slot) -> RawTensor| slots.iter().map(pick).collect::<Vec<_>>();
    let mut params = column(|s| native::raw(s.param));
    let mut grads = column(|s| native::raw(s.grad));
    let mut first = column(|s| native::raw(s.first));
    let mut second = column(|s| native::raw(s.second));
    let mut steps = column(|s| native::raw(s.step));
    let settings = [step.learning_rate, step.betas.0, step.betas.1, step.weight_decay, step.epsilon];
    guard::guard(|| {
        // SAFETY: all lists have the same length and hold live tensors.
        unsafe {
            native::check(native::prsmed_fused_adamw(
                params.as_mut_ptr(),
                grads.as_mut_ptr(),
                first.as_mut_ptr(),
                second.as_mut_ptr(),
                steps.as_mut_ptr(),
                i64::try_from(slots.len()).expect("fewer parameters than 2^63"),
                settings.as_ptr(),
            ))
        }
    })
}
