//! AdamW over all trained tensors, with clipping by the global norm.
//!
//! As in PyTorch, tensors without a gradient are skipped (no decay either), and every other one is decayed, norms and
//! biases included.

use super::{Parameter, TrainConfig};
use crate::tensor::adamw::{self, Slot, Step};
use crate::tensor::autograd::clear_grad;
use crate::tensor::{Device, Kind, Tensor, ledger, meta, no_grad, scope};
use crate::{Error, Result};

#[derive(Debug)]
struct State {
    first: Tensor,
    second: Tensor,
    step: Tensor,
}

/// Parameters and their moments (fp32). A moment is made at its parameter's first step.
#[derive(Debug)]
pub struct AdamW {
    params: Vec<Parameter>,
    states: Vec<Option<State>>,
    betas: (f64, f64),
    weight_decay: f64,
    epsilon: f64,
    clip_norm: f64,
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gradients {
    /// Global norm before clipping.
    pub norm: f64,
}

impl AdamW {
    /// Starts without moments.
    pub fn new(params: Vec<Parameter>, config: &TrainConfig) -> Self {
        let states = params.iter().map(|_| None).collect();
        Self {
            params,
            states,
            betas: (config.beta1, config.beta2),
            weight_decay: config.weight_decay,
            epsilon: config.epsilon,
            clip_norm: config.clip_norm,
        }
    }

    /// The trained tensors.
    pub fn params(&self) -> &[Parameter] {
        &self.params
    }

    /// Where the trained tensors are.
    pub fn device(&self) -> Device {
        self.params.first().map_or(Device::Cpu, |param| param.tensor.device())
    }

    /// Multiplies all gradients by `factor` and measures their global norm.
    pub fn measure(&self, factor: f64) -> Gradients {
        let _scope = scope::enter("optimizer");
        no_grad(|| {
            let norms: Vec<Tensor> = self
                .gradients()
                .map(|(_, mut grad)| {
                    ledger::recategorize(&grad, ledger::Category::Gradients);
                    if (factor - 1.0).abs() > 0.0 {
                        let _ = grad.g_mul_scalar_(factor);
                    }
                    grad.norm()
                })
                .collect();
            let norm = if norms.is_empty() { 0.0 } else { meta::number(&Tensor::stack(&norms, 0).norm()) };
            Gradients { norm }
        })
    }

    /// Clips by the measured norm, steps, and drops the gradients.
    ///
    /// # Errors
    /// [`Error::Torch`] from libtorch.
    pub fn step(&mut self, learning_rate: f64, gradients: Gradients) -> Result<()> {
        let _scope = scope::enter("optimizer");
        let clip = if self.clip_norm > 0.0 { (self.clip_norm / (gradients.norm + 1e-6)).min(1.0) } else { 1.0 };
        let with_grad: Vec<(usize, Tensor)> = self.gradients().collect();
        no_grad(|| {
            for (i, grad) in &with_grad {
                if clip < 1.0 {
                    let _ = grad.shallow_clone().g_mul_scalar_(clip);
                }
                let state = self.states[*i].get_or_insert_with(|| State::new(grad));
                let _ = state.step.g_add_scalar_(1.0);
            }
        });
        let slots: Vec<Slot> = with_grad
            .iter()
            .filter_map(|(i, grad)| {
                let state = self.states[*i].as_ref()?;
                let State { first, second, step } = state;
                Some(Slot { param: &self.params[*i].tensor, grad, first, second, step })
            })
            .collect();
        let step = Step { learning_rate, betas: self.betas, weight_decay: self.weight_decay, epsilon: self.epsilon };
        adamw::fused(&slots, step)?;
        self.clear();
        Ok(())
    }

    /// Makes the moments of every parameter now, as its first gradient would.
    pub fn make_moments(&mut self) {
        for (param, state) in self.params.iter().zip(&mut self.states) {
            state.get_or_insert_with(|| State::new(&param.tensor));
        }
    }

    /// Drops all gradients.
    pub fn clear(&self) {
        self.params.iter().for_each(|p| clear_grad(&p.tensor));
    }

    fn gradients(&self) -> impl Iterator<Item = (usize, Tensor)> {
        self.params.iter().enumerate().map(|(i, p)| (i, p.tensor.grad())).filter(|(_, grad)| grad.defined())
    }

    /// The moments as named tensors: `first.NAME`, `second.NAME`, `step.NAME`.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let mut out = Vec::new();
        for (param, state) in self.params.iter().zip(&self.states) {
            if let Some(State { first, second, step }) = state {
                for (what, tensor) in [("first", first), ("second", second), ("step", step)] {
                    out.push((format!("{what}.{}", param.name), tensor.shallow_clone()));
                }
            }
        }
        out
    }

    /// Takes moments back from `read(name)`; a parameter without stored moments starts without.
    ///
    /// # Errors
    /// What `read` says, and [`Error::Shape`] when a moment does not fit its parameter.
    pub fn restore(&mut self, mut read: impl FnMut(&str) -> Result<Option<Tensor>>) -> Result<()> {
        let _category = ledger::enter(ledger::Category::Optimizer);
        for (param, state) in self.params.iter().zip(&mut self.states) {
            let device = param.tensor.device();
            let mut take =
                |what: &str| Ok::<_, Error>(read(&format!("{what}.{}", param.name))?.map(|t| t.to_device(device)));
            let (first, second, step) = (take("first")?, take("second")?, take("step")?);
            let (Some(first), Some(second), Some(step)) = (first, second, step) else {
                *state = None;
                continue;
            };
            if first.size() != param.tensor.size() || second.size() != param.tensor.size() {
                let reason = format!(
                    "optimizer state of `{}` has shape {:?}, expected {:?}",
                    param.name,
                    first.size(),
                    param.tensor.size()
                );
                return Err(Error::Shape { reason });
            }
            *state = Some(State { first, second, step });
        }
        Ok(())
    }
}

impl State {
    fn new(like: &Tensor) -> Self {
        let _category = ledger::enter(ledger::Category::Optimizer);
        let device: Device = like.device();
        Self {
            first: like.zeros_like(),
            second: like.zeros_like(),
            step: Tensor::zeros([] as [i64; 0], (Kind::Float, device)),
        }
    }
}
