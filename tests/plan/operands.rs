//! Helpers that create operands for tests of single operators.

use prsmed::tensor::{Device, Kind, Tensor};

/// The measured work. It owns its operands; the returned tensors stay allocated.
pub(super) type Work = Box<dyn FnMut() -> Vec<Tensor>>;

pub(super) const BF16: Kind = Kind::BFloat16;
pub(super) const FP32: Kind = Kind::Float;

pub(super) fn zeros(size: &[i64], kind: Kind, device: Device) -> Tensor {
    Tensor::zeros(size, (kind, device))
}

pub(super) fn leaf(size: &[i64], kind: Kind, device: Device) -> Tensor {
    zeros(size, kind, device).set_requires_grad(true)
}

/// A tensor `[b, h, t, d]` with memory layout `[b, t, h, d]`, like the split output of a projection, and its leaf.
pub(super) fn heads(size: [i64; 4], kind: Kind, device: Device) -> (Tensor, Tensor) {
    let [b, h, t, d] = size;
    let xs = leaf(&[b, t, h, d], kind, device);
    (xs.transpose(1, 2), xs)
}

pub(super) fn forward(mut work: impl FnMut() -> Tensor + 'static) -> Work {
    Box::new(move || vec![work()])
}

/// Computes gradients of `leaves`. The gradient of `ys` (ones) and `others` stay allocated during that.
pub(super) fn backward<const N: usize>(ys: Tensor, leaves: Vec<Tensor>, others: [Tensor; N]) -> Work {
    Box::new(move || {
        let _operands = &others;
        Tensor::run_backward(&[&ys], &leaves, false, false)
    })
}
