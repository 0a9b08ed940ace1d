//! Measures the matrix product rate of a device, against which the utilisation of a step is computed.

use crate::Result;
use crate::tensor::{Device, Kind, Tensor, guard, no_grad, synchronize};
use std::time::Instant;

/// Sides of the square matrices on a GPU and on the CPU: large enough for tensor cores, small enough for a CPU.
const SIDES: (i64, i64) = (8192, 1024);
/// Number of products per timing, on a GPU and on the CPU.
const PRODUCTS: (u32, u32) = (10, 2);
/// Seconds of measurement; the fastest timing counts.
const SECONDS: f64 = 1.0;

/// FLOP/s of products of square matrices of `kind` on `device` (sides of 8,192 on a GPU, 1,024 on the CPU), the best of
/// one second.
///
/// # Errors
/// [`crate::Error::OutOfMemory`] and other typed errors of libtorch.
pub fn rate(device: Device, kind: Kind) -> Result<f64> {
    let side = if matches!(device, Device::Cuda(_)) { SIDES.0 } else { SIDES.1 };
    rate_of_side(device, kind, side, SECONDS)
}

/// FLOP/s of products of matrices of `side` by `side`, the best of `seconds`.
///
/// # Errors
/// As [`rate`].
pub fn rate_of_side(device: Device, kind: Kind, side: i64, seconds: f64) -> Result<f64> {
    let products = if matches!(device, Device::Cuda(_)) { PRODUCTS.0 } else { PRODUCTS.1 };
    guard::guard(|| {
        no_grad(|| {
            let [a, b] = [(); 2].map(|()| Tensor::randn([side, side], (Kind::Float, device)).to_kind(kind));
            let fastest = fastest(device, seconds, || (0..products).for_each(|_| drop(a.matmul(&b))));
            Ok(2.0 * (side as f64).powi(3) * f64::from(products) / fastest)
        })
    })
}

/// Runs `work` again and again for so many seconds, after a first run that initialises the libraries; the seconds of the
/// fastest run.
pub(super) fn fastest(device: Device, seconds: f64, mut work: impl FnMut()) -> f64 {
    work();
    synchronize(device);
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    while start.elapsed().as_secs_f64() < seconds {
        let begun = Instant::now();
        work();
        synchronize(device);
        best = best.min(begun.elapsed().as_secs_f64());
    }
    // a fake GPU may need no time at all
    best.max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_a_cpu_is_plausible() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let rate = rate(Device::Cpu, kind).unwrap();
            assert!((1e8..1e14).contains(&rate), "{kind:?}: {rate}");
        }
    }
}
