//! Learning rate: linear warm-up, then a cosine over the real number of steps (Loshchilov & Hutter 2017).

use super::TrainConfig;

/// The learning rate of optimizer step `step` (from 0) of `total`.
pub fn learning_rate(config: &TrainConfig, step: u64, total: u64) -> f64 {
    let (step, total) = (step as f64, total.max(1) as f64);
    let warmup = (config.warmup_frac * total).ceil();
    if step < warmup {
        return config.learning_rate * (step + 1.0) / warmup;
    }
    let progress = ((step - warmup) / (total - warmup).max(1.0)).min(1.0);
    let cosine = f64::midpoint(1.0, (std::f64::consts::PI * progress).cos());
    config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * cosine
}
