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

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(total: u64, warmup_frac: f64) -> Vec<f64> {
        let config = TrainConfig { learning_rate: 1.0, min_learning_rate: 0.1, warmup_frac, ..TrainConfig::default() };
        (0..total).map(|step| learning_rate(&config, step, total)).collect()
    }

    fn assert_close(found: &[f64], expected: &[f64]) {
        let is_close = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12);
        assert!(found.len() == expected.len() && is_close, "{found:?} {expected:?}");
    }

    #[test]
    fn the_rate_warms_up_above_zero_and_falls_in_a_cosine() {
        // four steps of warm-up end at the peak; the cosine begins there and would reach the minimum after the last step
        let half = 0.5_f64.sqrt();
        let cosine = [1.0, half, 0.0, -half].map(|cos| 0.1 + 0.9 * (1.0 + cos) / 2.0);
        assert_close(&rates(8, 0.5), &[&[0.25, 0.5, 0.75, 1.0], &cosine[..]].concat());
        assert_close(&rates(4, 0.0), &cosine);
    }

    #[test]
    fn a_part_of_a_step_of_warm_up_is_a_whole_step() {
        assert_close(&rates(10, 0.01)[..1], &[1.0]);
        assert_close(&rates(10, 0.11)[..3], &[0.5, 1.0, 1.0]);
    }

    #[test]
    fn steps_after_the_last_one_have_the_minimum() {
        let config = TrainConfig { learning_rate: 1.0, min_learning_rate: 0.1, ..TrainConfig::default() };
        assert_close(&[learning_rate(&config, 10, 10), learning_rate(&config, 99, 10)], &[0.1, 0.1]);
    }
}
