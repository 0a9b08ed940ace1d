//! Exponential moving average of the trained weights, used for validation and `best/`.

use super::Parameter;
use crate::tensor::{Tensor, ledger, no_grad, scope};

/// The average, in the order of the parameters.
#[derive(Debug)]
pub struct Ema {
    decay: f64,
    average: Vec<Tensor>,
}

impl Ema {
    /// Starts at the current weights.
    pub fn new(decay: f64, params: &[Parameter]) -> Self {
        let _place = (ledger::enter(ledger::Category::Ema), scope::enter("ema"));
        Self { decay, average: no_grad(|| params.iter().map(|p| p.tensor.detach().copy()).collect()) }
    }

    /// Moves the average towards the weights after step `step` (from 1); early steps weigh more, so that the random
    /// start is forgotten.
    pub fn update(&mut self, step: u64, params: &[Parameter]) {
        let _scope = scope::enter("ema");
        #[expect(clippy::cast_precision_loss, reason = "step counts are far below 2^52")]
        let step = step as f64;
        let decay = self.decay.min((1.0 + step) / (10.0 + step));
        no_grad(|| {
            for (average, param) in self.average.iter_mut().zip(params) {
                let _ = average.lerp_(&param.tensor.detach(), 1.0 - decay);
            }
        });
    }

    /// Exchanges weights and average; calling it twice changes nothing.
    pub fn swap(&mut self, params: &[Parameter]) {
        no_grad(|| {
            for (average, param) in self.average.iter_mut().zip(params) {
                let weights = param.tensor.detach().copy();
                param.tensor.detach().copy_(average);
                average.copy_(&weights);
            }
        });
    }

    /// Named tensors `ema.NAME`.
    pub fn state(&self, params: &[Parameter]) -> Vec<(String, Tensor)> {
        params.iter().zip(&self.average).map(|(p, a)| (format!("ema.{}", p.name), a.shallow_clone())).collect()
    }

    /// Where stored averages go, by name.
    pub fn targets(&self, params: &[Parameter]) -> Vec<(String, Tensor)> {
        self.state(params)
    }
}
