//! Training objective of a denoiser: noise is added to clean latents, and the network predicts the noise or the
//! velocity (Ho et al. 2020; Salimans & Ho 2022), with min-SNR weights (Hang et al. 2023).
//!
//! Legend: b batch, c channels, s side of the latents.

use super::settings::FinetuneConfig;
use crate::models::diffusion::sampler::{NoiseSchedule, PredictionType, SchedulerConfig};
use crate::tensor::{Kind, Tensor};

/// Objective of a model with a given noise schedule.
#[derive(Debug, Clone)]
pub struct Objective {
    schedule: NoiseSchedule,
    prediction: PredictionType,
    min_snr_gamma: f64,
}

/// What a pass over a micro-batch reads.
#[derive(Debug)]
pub struct NoisyBatch<'a> {
    /// `[b, c, s, s]` fp32.
    pub clean: &'a Tensor,
    /// `[b, c, s, s]` fp32.
    pub noise: &'a Tensor,
    /// Factors of the timesteps: `[b, 3]` fp32, signal, noise and weight.
    pub factors: &'a Tensor,
    /// Weights of the pixels, `[b, 1, s, s]` fp32.
    pub pixels: &'a Tensor,
}

impl Objective {
    /// The objective of a model.
    pub fn new(scheduler: &SchedulerConfig, config: &FinetuneConfig) -> Self {
        Self {
            schedule: NoiseSchedule::new(scheduler),
            prediction: scheduler.prediction_type,
            min_snr_gamma: config.min_snr_gamma,
        }
    }

    /// Number of training timesteps.
    pub fn num_timesteps(&self) -> usize {
        self.schedule.alphas_cumprod.len()
    }

    /// Factors of the clean latents and of the noise at timestep `t`, and the weight of the loss.
    pub fn factors(&self, t: usize) -> [f32; 3] {
        let alpha = self.schedule.alphas_cumprod[t];
        let (signal, noise) = (alpha.sqrt(), (1.0 - alpha).sqrt());
        [signal, noise, self.weight(f64::from(signal / noise).powi(2))]
    }

    #[expect(clippy::cast_possible_truncation, reason = "weights are fp32")]
    fn weight(&self, snr: f64) -> f32 {
        if self.min_snr_gamma == 0.0 {
            return 1.0;
        }
        let weight = match self.prediction {
            // min(SNR, gamma) / SNR, which is 1 without any signal
            PredictionType::Epsilon => (self.min_snr_gamma / snr).min(1.0),
            PredictionType::Velocity => snr.min(self.min_snr_gamma) / (snr + 1.0),
        };
        weight as f32
    }

    /// The noisy latents of a batch, `[b, c, s, s]`.
    fn noisy(batch: &NoisyBatch) -> Tensor {
        batch.clean * &batch.column(0) + batch.noise * &batch.column(1)
    }

    /// What the network should predict, `[b, c, s, s]`.
    fn target(&self, batch: &NoisyBatch) -> Tensor {
        match self.prediction {
            PredictionType::Epsilon => batch.noise.shallow_clone(),
            PredictionType::Velocity => batch.noise * batch.column(0) - batch.clean * batch.column(1),
        }
    }

    /// Sum over the samples of their losses, an fp64 scalar; the loss of a sample is the weighted mean square error of
    /// `predict(noisy)`, which has the shape of the latents.
    pub fn loss(&self, batch: &NoisyBatch, predict: impl FnOnce(&Tensor) -> Tensor) -> Tensor {
        let prediction = predict(&Self::noisy(batch)).to_kind(Kind::Float);
        batch.sum(&batch.square_errors(prediction, &self.target(batch)))
    }
}

impl NoisyBatch<'_> {
    /// A column of the factors, for each pixel: `[b, 1, 1, 1]`.
    fn column(&self, column: i64) -> Tensor {
        self.factors.narrow(1, column, 1).unsqueeze(-1).unsqueeze(-1)
    }

    /// Mean square error of each sample with the weights of its pixels, `[b]`.
    fn square_errors(&self, prediction: Tensor, target: &Tensor) -> Tensor {
        let mut errors = (prediction - target).square();
        errors *= self.pixels;
        errors.mean_dim([1_i64, 2, 3].as_slice(), false, Kind::Float)
    }

    /// Sum of the samples' `losses [b]` with the weights of their timesteps, an fp64 scalar.
    fn sum(&self, losses: &Tensor) -> Tensor {
        (losses * self.factors.select(1, 2)).sum(Kind::Double)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objective(prediction: PredictionType, gamma: f64) -> Objective {
        let scheduler = SchedulerConfig { prediction_type: prediction, ..SchedulerConfig::stable_diffusion() };
        Objective::new(&scheduler, &FinetuneConfig { min_snr_gamma: gamma, ..FinetuneConfig::default() })
    }

    #[test]
    fn weights_are_limited_by_gamma_and_finite_without_signal() {
        let epsilon = objective(PredictionType::Epsilon, 5.0);
        assert!((epsilon.weight(10.0) - 0.5).abs() < 1e-6);
        assert_eq!([epsilon.weight(5.0), epsilon.weight(0.01), epsilon.weight(0.0)], [1.0; 3]);
        let velocity = objective(PredictionType::Velocity, 5.0);
        assert!((velocity.weight(9.0) - 0.5).abs() < 1e-6 && (velocity.weight(1.0) - 0.5).abs() < 1e-6);
        assert_eq!(velocity.weight(0.0), 0.0);
        assert_eq!(objective(PredictionType::Velocity, 0.0).weight(9.0), 1.0);
    }

    #[test]
    fn a_perfect_prediction_has_no_loss_and_pixels_are_weighted() {
        use crate::tensor::Device;
        let wave = |shift: f64| ((Tensor::arange(32, (Kind::Float, Device::Cpu)) + shift) * 0.7).sin();
        let (clean, noise) = (wave(0.0).view([2, 1, 4, 4]), wave(9.0).view([2, 1, 4, 4]));
        for prediction in [PredictionType::Epsilon, PredictionType::Velocity] {
            let objective = objective(prediction, 0.0);
            let [signal, level, weight] = objective.factors(400);
            let factors = Tensor::from_slice(&[signal, level, weight]).repeat([2, 1]);
            let mask = Tensor::ones([2, 1, 4, 4], (Kind::Float, Device::Cpu));
            let equal = mask.copy();
            let batch = NoisyBatch { clean: &clean, noise: &noise, factors: &factors, pixels: &equal };
            let perfect = |noisy: &Tensor| match prediction {
                PredictionType::Epsilon => (noisy - &clean * f64::from(signal)) / f64::from(level),
                PredictionType::Velocity => &noise * f64::from(signal) - &clean * f64::from(level),
            };
            assert!(objective.loss(&batch, perfect).double_value(&[]) < 1e-9);
            // one wrong pixel, and a weight of 3 on it
            let _ = mask.get(0).get(0).get(0).get(0).fill_(3.0);
            let off = |noisy: &Tensor| {
                let out = perfect(noisy);
                let _ = out.get(0).get(0).get(0).get(0).g_add_scalar_(2.0);
                out
            };
            let plain = objective.loss(&batch, off).double_value(&[]);
            let weighted = objective.loss(&NoisyBatch { pixels: &mask, ..batch }, off).double_value(&[]);
            assert!((plain - 4.0 / 16.0).abs() < 1e-5 && (weighted - 12.0 / 16.0).abs() < 1e-5, "{plain} {weighted}");
        }
    }
}
