//! How fast a device really multiplies matrices: what the utilisation of a step is measured against.

use crate::tensor::{Device, Kind, Tensor, guard, no_grad, synchronize};
use crate::{Error, Result};
use std::time::Instant;

/// Sides of the square matrices: large enough for a card's tensor cores, small enough for a CPU to be done soon.
const SIDES: (i64, i64) = (8192, 1024);
/// Products between two looks at the clock, on a card and on the CPU.
const PRODUCTS: (u32, u32) = (10, 2);
/// Seconds that are tried; the fastest products count.
const SECONDS: f64 = 1.0;

/// FLOP/s of products of square matrices of `kind` on `device` (sides of 8,192 on a card, 1,024 on the CPU), the best of
/// one second.
///
/// # Errors
/// [`Error::OutOfMemory`] and other typed errors of libtorch.
pub fn rate(device: Device, kind: Kind) -> Result<f64> {
    let is_card = matches!(device, Device::Cuda(_));
    let (side, products) = if is_card { (SIDES.0, PRODUCTS.0) } else { (SIDES.1, PRODUCTS.1) };
    let rate = guard::guard(|| {
        no_grad(|| {
            let [a, b] = [(); 2].map(|()| Tensor::rand([side, side], (Kind::Float, device)).to_kind(kind));
            // the first one sets libraries up
            drop(a.matmul(&b));
            synchronize(device);
            let (start, mut best) = (Instant::now(), f64::INFINITY);
            while start.elapsed().as_secs_f64() < SECONDS {
                let begun = Instant::now();
                (0..products).for_each(|_| drop(a.matmul(&b)));
                synchronize(device);
                best = best.min(begun.elapsed().as_secs_f64() / f64::from(products));
            }
            #[expect(clippy::cast_precision_loss, reason = "a side is small")]
            Ok::<f64, Error>(2.0 * (side as f64).powi(3) / best)
        })
    })?;
    Ok(rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_does_more_than_a_hundred_million_and_less_than_a_card() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let rate = rate(Device::Cpu, kind).unwrap();
            assert!((1e8..1e14).contains(&rate), "{kind:?}: {rate}");
        }
    }
}
