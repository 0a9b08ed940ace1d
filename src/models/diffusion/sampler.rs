//! Samplers of diffusion models as pure functions: Euler, DDIM (η = 0) and DPM-Solver++ 2M, with the noise schedule of
//! the model's `scheduler_config.json`.
//!
//! Sources: Karras et al. 2022 (Euler, noise levels), Song et al. 2021 (DDIM), Lu et al. 2022 (DPM-Solver++), Lin et
//! al. 2024 (spacing, zero terminal SNR); order of arithmetic as in diffusers 0.42. Deviations: a step is given by its
//! index, so that a run may start at any step; latents stay fp32; nothing is clipped, also if the config does not
//! mention it; there is no stochastic sampler.

mod config;
mod schedule;
#[cfg(test)]
mod tests;

pub use config::{BetaSchedule, PredictionType, SchedulerConfig, TimestepSpacing};
pub use schedule::NoiseSchedule;

use crate::tensor::Tensor;
use crate::{Error, Result};
use schedule::{index, karras, narrow, real, sigmas_at, time_of, timesteps};

/// Name of a sampler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum SamplerKind {
    /// Euler steps on the noise level (the default of SDXL).
    #[serde(rename = "euler")]
    Euler,
    /// DDIM without added noise.
    #[serde(rename = "ddim")]
    Ddim,
    /// DPM-Solver++, second order, multistep: the best of the three below 30 steps.
    #[serde(rename = "dpm++2m")]
    DpmPlusPlus2M,
}

impl std::fmt::Display for SamplerKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Euler => "euler",
            Self::Ddim => "ddim",
            Self::DpmPlusPlus2M => "dpm++2m",
        })
    }
}

/// State of a multistep sampler: its last step. Each run needs a new one.
#[derive(Debug, Default)]
pub struct History {
    /// Index of the last step, and its estimate of the clean latents.
    last: Option<(usize, Tensor)>,
}

/// Scales of signal and noise in the latents at one point of a run: `latents = signal·clean + noise·ε`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct NoiseLevel {
    signal: f32,
    noise: f32,
}

/// A sampler with its timesteps and noise levels.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampler {
    kind: SamplerKind,
    prediction: PredictionType,
    /// The timesteps of the run, in order. They may be fractional.
    pub timesteps: Vec<f64>,
    /// Noise divided by signal at the start of each step, and 0 at the end; empty for DDIM.
    sigmas: Vec<f32>,
    /// ᾱ at the start and end of each step, DDIM only.
    alphas: Vec<(f32, f32)>,
    /// Factor of the unit noise with which a run starts at step 0.
    pub init_noise_scale: f64,
}

impl Sampler {
    /// A run of `steps` steps for a model with this scheduler config.
    ///
    /// # Errors
    /// [`Error::Config`] if `steps` is 0 or more than the training steps allow, or if the config has an unsupported
    /// option that changes the results of this sampler.
    pub fn new(kind: SamplerKind, config: &SchedulerConfig, steps: usize) -> Result<Self> {
        config
            .check_others(Some(kind))
            .map_err(|reason| Error::config("scheduler_config", reason, "choose another sampler, or another model"))?;
        let train = config.num_train_timesteps;
        let spacing = config.timestep_spacing.unwrap_or(match kind {
            SamplerKind::Ddim => TimestepSpacing::Leading,
            SamplerKind::Euler | SamplerKind::DpmPlusPlus2M => TimestepSpacing::Linspace,
        });
        let too_many = || {
            let reason = format!("{steps} steps do not fit into the {train} training steps of the model");
            Error::config("steps", reason, "20 to 50 steps are usual")
        };
        if steps == 0 || steps >= train {
            return Err(too_many());
        }
        let schedule = NoiseSchedule::new(config);
        let times = timesteps(kind, config, spacing, steps);
        if times[0] > real(train - 1) {
            return Err(too_many());
        }
        let (timesteps, sigmas, alphas) = if kind == SamplerKind::Ddim {
            let alphas = ddim_alphas(config, &schedule, &times);
            (times, Vec::new(), alphas)
        } else {
            let (times, sigmas) = noise_levels(kind, config, &schedule, times);
            (times, sigmas, Vec::new())
        };
        let init_noise_scale = match (kind, spacing) {
            (SamplerKind::Euler, TimestepSpacing::Leading) => f64::from(sigmas[0].mul_add(sigmas[0], 1.0).sqrt()),
            (SamplerKind::Euler, _) => f64::from(sigmas[0]),
            _ => 1.0,
        };
        Ok(Self { kind, prediction: config.prediction_type, timesteps, sigmas, alphas, init_noise_scale })
    }

    /// First step of an image-to-image run; `strength` (0..=1) is the fraction of the steps that it runs.
    pub fn start_index(&self, strength: f64) -> usize {
        let steps = self.timesteps.len();
        steps - index(real(steps) * strength.clamp(0.0, 1.0)).min(steps)
    }

    /// Input of the model at step `i`: the latents, scaled to unit variance for Euler.
    pub fn scale_model_input(&self, sample: &Tensor, i: usize) -> Tensor {
        match self.kind {
            SamplerKind::Euler => sample / f64::from(norm(self.sigmas[i])),
            SamplerKind::Ddim | SamplerKind::DpmPlusPlus2M => sample.shallow_clone(),
        }
    }

    /// The latents after step `i`.
    ///
    /// # Shapes
    /// `model_output` and `sample` (the latents before the step, not the scaled input) have one shape. The result is
    /// like `sample`, which should be fp32 during a run.
    pub fn step(&self, i: usize, model_output: &Tensor, sample: &Tensor, history: &mut History) -> Tensor {
        let output = model_output.to_kind(sample.kind());
        match self.kind {
            SamplerKind::Euler => self.euler(i, &output, sample),
            SamplerKind::Ddim => self.ddim(i, &output, sample),
            SamplerKind::DpmPlusPlus2M => self.dpm(i, &output, sample, history),
        }
    }

    /// `original` with the noise level at the start of step `i`. After the last step (`i` = number of steps) it is
    /// `original` itself.
    pub fn add_noise(&self, original: &Tensor, noise: &Tensor, i: usize) -> Tensor {
        if i >= self.timesteps.len() {
            return original.shallow_clone();
        }
        let level = self.level(i);
        original * f64::from(level.signal) + noise * f64::from(level.noise)
    }

    fn level(&self, i: usize) -> NoiseLevel {
        match self.kind {
            SamplerKind::Euler => NoiseLevel { signal: 1.0, noise: self.sigmas[i] },
            SamplerKind::Ddim => {
                let (alpha, _) = self.alphas[i];
                NoiseLevel { signal: alpha.sqrt(), noise: (1.0 - alpha).sqrt() }
            }
            SamplerKind::DpmPlusPlus2M => {
                let signal = 1.0 / norm(self.sigmas[i]);
                NoiseLevel { signal, noise: self.sigmas[i] * signal }
            }
        }
    }

    fn euler(&self, i: usize, output: &Tensor, sample: &Tensor) -> Tensor {
        let (sigma, next) = (self.sigmas[i], self.sigmas[i + 1]);
        let clean = match self.prediction {
            PredictionType::Epsilon => sample - output * f64::from(sigma),
            PredictionType::Velocity => {
                output * f64::from(-sigma / norm(sigma)) + sample / f64::from(sigma * sigma + 1.0)
            }
        };
        let derivative = (sample - clean) / f64::from(sigma);
        sample + derivative * f64::from(next - sigma)
    }

    fn ddim(&self, i: usize, output: &Tensor, sample: &Tensor) -> Tensor {
        let (_, next) = self.alphas[i];
        let NoiseLevel { signal, noise } = self.level(i);
        let (signal, noise) = (f64::from(signal), f64::from(noise));
        let (clean, epsilon) = match self.prediction {
            PredictionType::Epsilon => ((sample - output * noise) / signal, output.shallow_clone()),
            PredictionType::Velocity => (sample * signal - output * noise, output * signal + sample * noise),
        };
        clean * f64::from(next.sqrt()) + epsilon * f64::from((1.0 - next).sqrt())
    }

    /// The first and the last step of a run are first order.
    fn dpm(&self, i: usize, output: &Tensor, sample: &Tensor, history: &mut History) -> Tensor {
        let NoiseLevel { signal, noise } = self.level(i);
        let (a, s) = (f64::from(signal), f64::from(noise));
        let clean = match self.prediction {
            PredictionType::Epsilon => (sample - output * s) / a,
            PredictionType::Velocity => sample * a - output * s,
        };
        let before = history.last.replace((i, clean.shallow_clone()));
        if i + 1 == self.timesteps.len() {
            return clean;
        }
        let target = self.level(i + 1);
        let h = log_snr(target) - log_snr(self.level(i));
        let slope = match before {
            Some((at, older)) if at + 1 == i => {
                let ratio = (log_snr(self.level(i)) - log_snr(self.level(at))) / h;
                &clean + (&clean - older) * f64::from(0.5 * (1.0 / ratio))
            }
            _ => clean,
        };
        sample * f64::from(target.noise / noise) - slope * f64::from(target.signal * ((-h).exp() - 1.0))
    }
}

/// √(σ²+1).
fn norm(sigma: f32) -> f32 {
    (sigma * sigma + 1.0).sqrt()
}

/// λ: half the logarithm of the signal-to-noise ratio.
fn log_snr(level: NoiseLevel) -> f32 {
    level.signal.ln() - level.noise.ln()
}

/// Timesteps and noise levels of Euler and DPM++. Karras noise levels have timesteps of their own.
fn noise_levels(
    kind: SamplerKind,
    config: &SchedulerConfig,
    schedule: &NoiseSchedule,
    times: Vec<f64>,
) -> (Vec<f64>, Vec<f32>) {
    let all = schedule.sigmas();
    let sigmas = sigmas_at(&times, &all);
    if !config.use_karras_sigmas {
        return (times, sigmas);
    }
    let n = times.len();
    // Euler uses the range of the run's noise levels, DPM++ that of training
    let (most, least) =
        if kind == SamplerKind::Euler { (sigmas[0], sigmas[n - 1]) } else { (all[all.len() - 1], all[0]) };
    let levels = karras(most, least, n);
    let logs: Vec<f32> = all.iter().map(|sigma| sigma.ln()).collect();
    let time = |&sigma: &f64| {
        let time = time_of(sigma, &logs);
        if kind == SamplerKind::Euler { f64::from(narrow(time)) } else { time.round_ties_even() }
    };
    (levels.iter().map(time).collect(), levels.iter().map(|&sigma| narrow(sigma)).chain([0.0]).collect())
}

/// ᾱ at the start and end of each step. DDIM steps down by a whole stride, regardless of the next timestep.
fn ddim_alphas(config: &SchedulerConfig, schedule: &NoiseSchedule, times: &[f64]) -> Vec<(f32, f32)> {
    let alphas = &schedule.alphas_cumprod;
    let stride = config.num_train_timesteps / times.len();
    let last = if config.set_alpha_to_one { 1.0 } else { alphas[0] };
    let at = |&time: &f64| {
        let time = index(time);
        (alphas[time], time.checked_sub(stride).map_or(last, |next| alphas[next]))
    };
    times.iter().map(at).collect()
}
