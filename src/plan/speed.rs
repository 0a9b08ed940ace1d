//! Speed of a device's operators: assumed from the table of GPUs, or measured by `prsmed calibrate`.

use serde::{Deserialize, Serialize};

/// Published peak rates of a device, in operations and bytes per second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rates {
    /// Dense bf16 (fp16 where there is no bf16) on tensor cores, FLOP/s.
    pub half: f64,
    /// FLOP/s that half-precision products of a training reach.
    pub products: f64,
    /// fp32 outside the tensor cores, FLOP/s.
    pub fp32: f64,
    /// Dense TF32, FLOP/s; `None` where the format does not exist.
    pub tf32: Option<f64>,
    /// Memory bandwidth, bytes/s.
    pub bandwidth: f64,
    /// Name of the GPU with these rates.
    pub of: String,
}

/// Share of the tensor-core rate for matrix products. Published 7B LoRA trainers reach 0.35 to 0.43 over a whole step,
/// including idle time and memory-bound operators.
pub(super) const PRODUCTS: f64 = 0.65;
/// Share of the rate that large square products were measured at, where that is known: [`PRODUCTS`] of an A100's rate is
/// 0.82 of the 247 TFLOPS that it reaches in them.
pub(super) const LARGE_PRODUCTS: f64 = 0.8;
/// Share for convolutions and attention.
pub(super) const IRREGULAR: f64 = 0.4;
/// Share of the memory bandwidth for memory-bound operators.
pub(super) const BANDWIDTH: f64 = 0.8;
/// Minimum seconds of a kernel on the GPU.
pub(super) const LAUNCH: f64 = 3e-6;
/// Seconds of CPU work for an operator: dispatch, autograd, allocation.
pub(super) const HOST: f64 = 8e-6;
/// Bytes per second between pinned host memory and the GPU, in each direction: PCI Express 3.0 x16, which every listed
/// GPU reaches.
const BUS: f64 = 12e9;

/// The rate of matrix products of one size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProductRate {
    /// Floating-point operations of one product.
    pub flops: f64,
    /// Floating-point operations per second.
    pub flops_per_s: f64,
}

/// Rates that real programs reach, from which the time of operators is predicted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speed {
    /// Matrix products in fp32, from small to large; at least one.
    pub fp32: Vec<ProductRate>,
    /// Matrix products in bf16 (fp16 where the device has no bf16), from small to large; at least one.
    pub half: Vec<ProductRate>,
    /// Bytes per second that memory-bound operators read and write.
    pub bandwidth: f64,
    /// Minimum seconds of an operator on the device.
    pub launch: f64,
    /// Seconds of CPU work for an operator, beside the device's work; 0 on the CPU.
    pub host: f64,
    /// Bytes per second between pinned host memory and the GPU, in each direction; `None` on the CPU.
    pub bus: Option<f64>,
    /// Bytes per second read from the disk of the cache folder; `None` when it was not measured.
    pub disk: Option<f64>,
}

impl Speed {
    /// The speed of a device that was not measured: fixed shares of its published rates.
    pub fn assumed(rates: &Rates) -> Self {
        let one = |flops_per_s: f64| vec![ProductRate { flops: 1.0, flops_per_s }];
        Self {
            // libtorch's default for fp32 matrix products is no TF32
            fp32: one(PRODUCTS * rates.fp32),
            half: one(rates.products),
            bandwidth: BANDWIDTH * rates.bandwidth,
            launch: LAUNCH,
            host: HOST,
            bus: Some(BUS),
            disk: None,
        }
    }

    /// Seconds of an operator with `flops` of arithmetic on elements of `element_bytes`, and `bytes` of memory traffic.
    /// `irregular`: a convolution or attention, which reach a smaller share of the peak than matrix products.
    pub fn seconds(&self, flops: f64, bytes: f64, element_bytes: u8, irregular: bool) -> f64 {
        let rates = if element_bytes == 2 { &self.half } else { &self.fp32 };
        let share = if irregular { IRREGULAR / PRODUCTS } else { 1.0 };
        let arithmetic = flops / (share * rate_at(rates, flops));
        arithmetic.max(bytes / self.bandwidth).max(self.launch)
    }

    /// Seconds to copy `bytes` from host memory to the GPU, or back.
    pub fn transfer_seconds(&self, bytes: f64) -> f64 {
        self.bus.map_or(0.0, |bus| bytes / bus)
    }

    /// Whether every rate is a positive, finite number.
    pub fn is_valid(&self) -> bool {
        let positive = |value: f64| value.is_finite() && value > 0.0;
        let products = |rates: &[ProductRate]| {
            let sizes = rates.windows(2).all(|pair| pair[0].flops < pair[1].flops);
            !rates.is_empty() && sizes && rates.iter().all(|rate| positive(rate.flops) && positive(rate.flops_per_s))
        };
        products(&self.fp32)
            && products(&self.half)
            && positive(self.bandwidth)
            && positive(self.launch)
            && (self.host == 0.0 || positive(self.host))
            && [self.bus, self.disk].into_iter().flatten().all(positive)
    }
}

/// The rate of a product of `flops`: that of the measured size, or in between on a logarithmic scale of sizes.
fn rate_at(rates: &[ProductRate], flops: f64) -> f64 {
    let above = rates.iter().position(|rate| rate.flops >= flops).unwrap_or(rates.len());
    if above == 0 || above == rates.len() {
        return rates[above.min(rates.len() - 1)].flops_per_s;
    }
    let (low, high) = (rates[above - 1], rates[above]);
    let share = (flops / low.flops).ln() / (high.flops / low.flops).ln();
    low.flops_per_s + share * (high.flops_per_s - low.flops_per_s)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::plan) fn measured() -> Speed {
        let rates =
            |rates: [(f64, f64); 3]| rates.map(|(flops, flops_per_s)| ProductRate { flops, flops_per_s }).to_vec();
        Speed {
            fp32: rates([(1e6, 1e10), (1e8, 2e10), (1e10, 4e10)]),
            half: rates([(1e6, 2e10), (1e8, 4e10), (1e10, 8e10)]),
            bandwidth: 1e10,
            launch: 2e-6,
            host: 0.0,
            bus: None,
            disk: Some(1e9),
        }
    }

    #[test]
    fn the_rate_of_a_product_depends_on_its_size() {
        let speed = measured();
        let rate = |flops| flops / speed.seconds(flops, 0.0, 4, false);
        assert!((rate(1e5) - 1e10).abs() < 1.0, "below the smallest size");
        assert!((rate(1e7) - 1.5e10).abs() < 1.0, "half way between two sizes");
        assert!((rate(1e12) - 4e10).abs() < 1.0, "above the largest size");
        assert!((speed.seconds(1e10, 0.0, 2, false) - 0.125).abs() < 1e-9, "bf16");
        assert!((speed.seconds(1e10, 0.0, 2, true) - 0.125 * PRODUCTS / IRREGULAR).abs() < 1e-9, "a convolution");
        assert_eq!(speed.seconds(1.0, 1e10, 4, false), 1.0, "memory-bound");
        assert_eq!(speed.seconds(1.0, 1.0, 4, false), 2e-6, "no operator is faster");
    }

    #[test]
    fn rates_that_are_no_positive_numbers_are_invalid() {
        assert!(measured().is_valid());
        let with = |change: fn(&mut Speed)| {
            let mut speed = measured();
            change(&mut speed);
            speed.is_valid()
        };
        assert!(!with(|speed| speed.fp32.clear()));
        assert!(!with(|speed| speed.half[1].flops_per_s = f64::NAN));
        assert!(!with(|speed| speed.half.reverse()));
        assert!(!with(|speed| speed.bandwidth = 0.0));
        assert!(!with(|speed| speed.launch = f64::INFINITY));
        assert!(!with(|speed| speed.host = -1.0));
        assert!(!with(|speed| speed.disk = Some(0.0)));
    }
}
