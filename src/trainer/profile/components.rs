//! Memory of each component of a model: weights, buffers, gradients, optimizer state, moving average.

use crate::tensor::store::{Entry, Role};
use crate::tensor::{Tensor, kind_bytes};
use crate::trainer::Parameter;
use crate::units::Bytes;
use std::collections::HashMap;

/// A part of a model (`llm`, `vision_tower`, `mask_decoder`) with all its tensors, frozen ones too.
#[derive(Debug)]
pub struct Component {
    /// Its module path.
    pub name: &'static str,
    /// Its tensors, named `FILE/KEY` like [`Parameter`]s.
    pub entries: Vec<Entry>,
}

/// Memory of a component.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct ComponentUse {
    /// Its name.
    pub name: String,
    /// Number of weights.
    pub parameters: u64,
    /// Number of trained weights.
    pub trainable: u64,
    /// Bytes of its weights, also of those in host memory.
    pub parameter_bytes: Bytes,
    /// Bytes of its running statistics.
    pub buffer_bytes: Bytes,
    /// Bytes of its gradients between the backward pass and the optimizer step; 0 before the first.
    pub gradient_bytes: Bytes,
    /// Bytes of its optimizer state; 0 before the first step.
    pub optimizer_bytes: Bytes,
    /// Bytes of its moving average.
    pub ema_bytes: Bytes,
}

/// Bytes of training tensors, by parameter.
#[derive(Debug, Default)]
pub struct Held(HashMap<String, u64>);

impl Held {
    /// Bytes of the gradients that exist now.
    pub fn gradients(parameters: &[Parameter]) -> Self {
        let gradients = parameters.iter().map(|p| (p.name.clone(), p.tensor.grad()));
        Self(gradients.filter(|(_, grad)| grad.defined()).map(|(name, grad)| (name, bytes(&grad))).collect())
    }

    /// Bytes of the optimizer's or moving average's tensors, named `WHAT.PARAMETER`.
    pub fn state(tensors: &[(String, Tensor)]) -> Self {
        let mut held = HashMap::new();
        for (name, tensor) in tensors {
            let (_, parameter) = name.split_once('.').unwrap_or(("", name));
            *held.entry(parameter.to_owned()).or_default() += bytes(tensor);
        }
        Self(held)
    }

    fn of(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }
}

/// Measures `components`.
pub fn measure(components: &[Component], gradients: &Held, optimizer: &Held, ema: &Held) -> Vec<ComponentUse> {
    components.iter().map(|component| one(component, gradients, optimizer, ema)).collect()
}

fn one(component: &Component, gradients: &Held, optimizer: &Held, ema: &Held) -> ComponentUse {
    let mut total = ComponentUse { name: component.name.to_owned(), ..ComponentUse::default() };
    for Entry { name, tensor, role } in &component.entries {
        if *role == Role::Buffer {
            total.buffer_bytes.0 += bytes(tensor);
            continue;
        }
        let count = tensor.numel() as u64;
        total.parameters += count;
        total.parameter_bytes.0 += bytes(tensor);
        if *role == Role::Trainable {
            total.trainable += count;
        }
        total.gradient_bytes.0 += gradients.of(name);
        total.optimizer_bytes.0 += optimizer.of(name);
        total.ema_bytes.0 += ema.of(name);
    }
    total
}

fn bytes(tensor: &Tensor) -> u64 {
    tensor.numel() as u64 * kind_bytes(tensor.kind())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Device, Kind};

    #[test]
    fn counts_weights_buffers_and_training_state() {
        let make = |kind: Kind, size: i64| Tensor::zeros([size], (kind, Device::Cpu));
        let trained = make(Kind::Float, 10).set_requires_grad(true);
        let loss = trained.sum(Kind::Float);
        loss.backward();
        let entry = |name: &str, tensor: Tensor, role| Entry { name: name.into(), tensor, role };
        let component = Component {
            name: "part",
            entries: vec![
                entry("file/a.weight", trained.shallow_clone(), Role::Trainable),
                entry("file/b", make(Kind::BFloat16, 100), Role::Frozen),
                entry("file/mean", make(Kind::Float, 7), Role::Buffer),
            ],
        };
        let parameters = [Parameter { name: "file/a.weight".into(), tensor: trained }];
        let state = ["first", "second"].map(|what| (format!("{what}.file/a.weight"), make(Kind::Float, 10)));
        let ema = [("ema.file/a.weight".to_owned(), make(Kind::Float, 10))];
        let found = measure(&[component], &Held::gradients(&parameters), &Held::state(&state), &Held::state(&ema));
        let expected = ComponentUse {
            name: "part".into(),
            parameters: 110,
            trainable: 10,
            parameter_bytes: Bytes(240),
            buffer_bytes: Bytes(28),
            gradient_bytes: Bytes(40),
            optimizer_bytes: Bytes(80),
            ema_bytes: Bytes(40),
        };
        assert_eq!(found, [expected]);
    }
}
