//! Losses of masks and classes, as sums over samples: the caller divides by the effective batch. The text loss is
//! [`crate::tensor::autograd::linear_cross_entropy`].
//!
//! Legend: p logits, m mask in 0..=1, w boundary weight `1 + 5 |avgpool31(m) - m|`, s sigmoid.

use super::Semantics;
use crate::tensor::{self, Kind, Reduction, Tensor, dims, no_grad};

const WINDOW: i64 = 31;

/// Boundary weights of a mask, `1..=6`.
///
/// The 31x31 mean counts zero padding, so that foreground at the border weighs more, as published. It is separable, and
/// a window's sum is the difference of two running sums: a handful of additions a pixel instead of 961.
///
/// # Shapes
/// `mask [b, 1, h, w]` fp32 to the same.
pub fn boundary_weights(mask: &Tensor) -> Tensor {
    let [_b, _one, h, w] = dims(mask);
    let window_sum = |xs: &Tensor, dim: i64, length: i64| {
        let sums = xs.cumsum(dim, Kind::Float);
        sums.narrow(dim, WINDOW, length) - sums.narrow(dim, 0, length)
    };
    no_grad(|| {
        // a GPU's running sums of fp32 numbers can differ from one call to the next
        if tensor::is_deterministic() {
            return (pooled_mean(mask) - mask).abs_() * 5.0 + 1.0;
        }
        // one more row and column before the first window's, so that its running sum starts at 0
        let half = WINDOW / 2;
        let padded = mask.constant_pad_nd([half + 1, half, half + 1, half]);
        let sums = window_sum(&window_sum(&padded, 2, h), 3, w);
        let area = (WINDOW * WINDOW) as f64;
        (sums / area - mask).abs_() * 5.0 + 1.0
    })
}

/// The 31x31 mean by a pooling, which adds all pixels of a window.
fn pooled_mean(mask: &Tensor) -> Tensor {
    mask.avg_pool2d([WINDOW; 2], [1; 2], [WINDOW / 2; 2], false, true, None)
}

/// Structure loss: BCE plus weighted IoU, summed over samples.
///
/// `corrected`: BCE is `sum(w bce) / sum(w)` of each sample. `reference`: the plain mean over all pixels (the published
/// code passes `reduce='none'`, which means "mean", so that its weights cancel).
///
/// `factors` are multiplied with the losses of the samples: 0 for a sample whose mask is not known. `None`: 1.
///
/// # Shapes
/// `logits` and `mask [b, 1, h, w]` fp32, `factors [b]` fp32, to a scalar.
pub fn structure(logits: &Tensor, mask: &Tensor, semantics: Semantics, factors: Option<&Tensor>) -> Tensor {
    let [b, _one, _h, _w] = dims(logits);
    let over = [1_i64, 2, 3];
    let weights = boundary_weights(mask);
    let sum = |xs: &Tensor| xs.sum_dim_intlist(over.as_slice(), false, Kind::Float);
    let of_samples = |each: Tensor| match factors {
        Some(factors) => (each * factors).sum(Kind::Float),
        None => each.sum(Kind::Float),
    };
    let bce = |reduction| logits.binary_cross_entropy_with_logits(mask, None::<&Tensor>, None::<&Tensor>, reduction);
    let bce = if semantics.weighs_pixels() {
        of_samples(sum(&(bce(Reduction::None) * &weights)) / sum(&weights))
    } else if factors.is_some() {
        of_samples(bce(Reduction::None).mean_dim(over.as_slice(), false, Kind::Float))
    } else {
        let samples = b as f64;
        bce(Reduction::Mean) * samples
    };
    let probability = logits.sigmoid();
    let weighted = &probability * &weights;
    let intersection = sum(&(&weighted * mask));
    let union = sum(&weighted) + sum(&(mask * &weights)) - &intersection;
    let iou: Tensor = (&intersection + 1.0) / (union + 1.0);
    bce + of_samples(iou.neg() + 1.0)
}

/// Cross-entropy of the modality, summed over samples.
///
/// # Shapes
/// `logits [b, classes]`, `labels [b]` i64 to a scalar.
pub fn class(logits: &Tensor, labels: &Tensor) -> Tensor {
    logits.cross_entropy_loss(labels, None::<&Tensor>, Reduction::Sum, -100, 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Device, rng};

    #[test]
    fn the_pooled_mean_is_that_of_the_running_sums() {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(4);
        let mask = Tensor::rand([2, 1, 40, 50], (Kind::Float, Device::Cpu)).gt(0.7).to_kind(Kind::Float);
        let pooled = (pooled_mean(&mask) - &mask).abs() * 5.0 + 1.0;
        assert!((pooled - boundary_weights(&mask)).abs().max().double_value(&[]) < 1e-5);
    }

    #[test]
    fn factors_leave_samples_out() {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(3);
        let logits = Tensor::randn([3, 1, 40, 40], (Kind::Float, Device::Cpu));
        let mask = Tensor::rand([3, 1, 40, 40], (Kind::Float, Device::Cpu)).gt(0.8).to_kind(Kind::Float);
        for semantics in [Semantics::Corrected, Semantics::Reference] {
            let number = |logits: &Tensor, mask: &Tensor, factors: Option<&Tensor>| {
                structure(logits, mask, semantics, factors).double_value(&[])
            };
            let rows = Tensor::from_slice(&[0_i64, 2]);
            let want = number(&logits.index_select(0, &rows), &mask.index_select(0, &rows), None);
            let got = number(&logits, &mask, Some(&Tensor::from_slice(&[1.0_f32, 0.0, 1.0])));
            assert!((got - want).abs() < 1e-5 * want, "{semantics:?}: {got} {want}");
            assert_eq!(number(&logits, &mask, Some(&Tensor::from_slice(&[0.0_f32; 3]))), 0.0);
        }
    }
}
