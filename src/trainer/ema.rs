//! Exponential moving average of the trained weights, used for validation and `best/`.

use super::Parameter;
use prsmed_tensor::{Tensor, ledger, module_path, no_grad};

/// The average, in the order of the parameters.
#[derive(Debug)]
pub struct Ema {
    decay: f64,
    average: Vec<Tensor>,
}

impl Ema {
    /// Starts at the current weights.
    pub fn new(decay: f64, params: &[Parameter]) -> Self {
        let _entered = (ledger::enter(ledger::Category::Ema), module_path::enter("ema"));
        Self { decay, average: no_grad(|| params.iter().map(|p| p.tensor.detach().copy()).collect()) }
    }

    /// Updates the average after step `step` (from 1). Early steps use a smaller decay, so that the random start has
    /// little influence.
    pub fn update(&mut self, step: u64, params: &[Parameter]) {
        let _module = module_path::enter("ema");
        let step = step as f64;
        let decay = self.decay.min((1.0 + step) / (10.0 + step));
        no_grad(|| {
            for (average, param) in self.average.iter_mut().zip(params) {
                let _ = average.lerp_(&param.tensor.detach(), 1.0 - decay);
            }
        });
    }

    /// Exchanges weights and average; a second call exchanges them back.
    pub fn swap(&mut self, params: &[Parameter]) {
        no_grad(|| {
            for (average, param) in self.average.iter_mut().zip(params) {
                let weights = param.tensor.detach().copy();
                param.tensor.detach().copy_(average);
                average.copy_(&weights);
            }
        });
    }

    /// Named tensors `ema.NAME`, to save or to restore.
    pub fn state(&self, params: &[Parameter]) -> Vec<(String, Tensor)> {
        params.iter().zip(&self.average).map(|(p, a)| (format!("ema.{}", p.name), a.shallow_clone())).collect()
    }
}
