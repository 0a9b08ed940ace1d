//! Noise schedule of training: ᾱ at every training step, and the timesteps and noise levels of a run.
//!
//! Precision and order of arithmetic are those of diffusers (ᾱ and its square roots in fp32, interpolation in fp64), so
//! that whole runs agree to the last digits.

use super::{BetaSchedule, SamplerKind, SchedulerConfig, TimestepSpacing};
use crate::tensor::{Device, Kind as Dtype, Tensor, no_grad};

/// ρ of Karras et al. 2022.
const RHO: f64 = 7.0;

/// Noise schedule: signal and noise at every training step.
#[derive(Debug, Clone, PartialEq)]
pub struct NoiseSchedule {
    /// ᾱ of every training step: the fraction of the variance that is signal.
    pub alphas_cumprod: Vec<f32>,
}

impl NoiseSchedule {
    /// The schedule of a model with this config. With zero terminal SNR the last ᾱ is exactly 0.
    pub fn new(config: &SchedulerConfig) -> Self {
        no_grad(|| {
            let place = (Dtype::Float, Device::Cpu);
            let steps = signed(config.num_train_timesteps);
            let betas = match config.beta_schedule {
                BetaSchedule::Linear => Tensor::linspace(config.beta_start, config.beta_end, steps, place),
                BetaSchedule::ScaledLinear => {
                    Tensor::linspace(config.beta_start.sqrt(), config.beta_end.sqrt(), steps, place).square()
                }
            };
            let betas = if config.rescale_betas_zero_snr { zero_terminal_snr(&betas) } else { betas };
            let products = one_minus(&betas).cumprod(0, Dtype::Float);
            let alphas_cumprod = Vec::<f32>::try_from(&products).expect("a vector of fp32 on the CPU");
            Self { alphas_cumprod }
        })
    }

    /// Noise divided by signal, √((1-ᾱ)/ᾱ), at every training step; 4096 if ᾱ is 0.
    pub(super) fn sigmas(&self) -> Vec<f32> {
        let floor = 2_f32.powi(-24);
        let alphas = self.alphas_cumprod.iter().map(|&alpha| if alpha < floor { floor } else { alpha });
        alphas.map(|alpha| ((1.0 - alpha) / alpha).sqrt()).collect()
    }
}

/// β after √ᾱ is shifted to end at 0 and rescaled to keep its first value (Lin et al. 2024, algorithm 1).
fn zero_terminal_snr(betas: &Tensor) -> Tensor {
    let roots = one_minus(betas).cumprod(0, Dtype::Float).sqrt();
    let steps = roots.size()[0];
    let (first, last) = (roots.get(0), roots.get(steps - 1));
    let roots = (&roots - &last) * (&first / (&first - &last));
    let products = roots.square();
    let ratios = products.narrow(0, 1, steps - 1) / products.narrow(0, 0, steps - 1);
    one_minus(&Tensor::cat(&[products.narrow(0, 0, 1), ratios], 0))
}

fn one_minus(values: &Tensor) -> Tensor {
    1.0 - values
}

/// The timesteps of a run of `n` steps, noisiest first. Euler keeps the fractions of `linspace`. DPM++ computes `n + 1`
/// points and drops the last one, except with `trailing`.
pub(super) fn timesteps(kind: SamplerKind, config: &SchedulerConfig, spacing: TimestepSpacing, n: usize) -> Vec<f64> {
    let train = config.num_train_timesteps;
    let points = if kind == SamplerKind::DpmPlusPlus2M { n + 1 } else { n };
    let skipped = points - n;
    match spacing {
        TimestepSpacing::Leading => {
            let stride = train / points;
            (skipped..points).rev().map(|k| real(k * stride + config.steps_offset)).collect()
        }
        TimestepSpacing::Linspace => {
            let all = linspace(0.0, real(train - 1), points).into_iter().skip(skipped).rev();
            all.map(|t| if kind == SamplerKind::Euler { f64::from(narrow(t)) } else { t.round_ties_even() }).collect()
        }
        TimestepSpacing::Trailing => {
            let stride = real(train) / real(n);
            (0..n).map(|k| (real(train) - real(k) * stride).round_ties_even() - 1.0).collect()
        }
    }
}

/// The noise levels at `times`, by linear interpolation, and 0 at the end.
pub(super) fn sigmas_at(times: &[f64], sigmas: &[f32]) -> Vec<f32> {
    let last = sigmas.len() - 1;
    let at = |t: f64| {
        let low = index(t).min(last);
        let (a, b) = (f64::from(sigmas[low]), f64::from(sigmas[(low + 1).min(last)]));
        narrow((b - a) * (t - real(low)) + a)
    };
    times.iter().map(|&t| at(t)).chain([0.0]).collect()
}

/// Karras' noise levels for `n` steps from `most` to `least`.
pub(super) fn karras(most: f32, least: f32, n: usize) -> Vec<f64> {
    let (most, least) = (f64::from(most).powf(1.0 / RHO), f64::from(least).powf(1.0 / RHO));
    linspace(0.0, 1.0, n).into_iter().map(|ramp| (most + ramp * (least - most)).powf(RHO)).collect()
}

/// The (fractional) timestep of the noise level `sigma`, by interpolation of the logarithms.
pub(super) fn time_of(sigma: f64, log_sigmas: &[f32]) -> f64 {
    let log = sigma.max(1e-10).ln();
    let below = log_sigmas.partition_point(|&level| f64::from(level) <= log);
    let low = below.saturating_sub(1).min(log_sigmas.len() - 2);
    let (a, b) = (log_sigmas[low], log_sigmas[low + 1]);
    let share = ((f64::from(a) - log) / f64::from(a - b)).clamp(0.0, 1.0);
    (1.0 - share) * real(low) + share * real(low + 1)
}

fn linspace(from: f64, to: f64, n: usize) -> Vec<f64> {
    let stride = if n > 1 { (to - from) / real(n - 1) } else { 0.0 };
    (0..n).map(|k| if k > 0 && k == n - 1 { to } else { from + real(k) * stride }).collect()
}

/// Converts a count to a float.
pub(super) fn real(count: usize) -> f64 {
    count as f64
}

/// Integer part of a timestep.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are small and not negative")]
pub(super) fn index(time: f64) -> usize {
    time as usize
}

#[expect(clippy::cast_possible_truncation, reason = "noise levels and times are kept in fp32, as diffusers does")]
pub(super) fn narrow(value: f64) -> f32 {
    value as f32
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).expect("a count of steps is small")
}
