//! AdamW over all trained tensors, with clipping by the global norm.
//!
//! As in PyTorch, tensors without a gradient are skipped, also by weight decay. All other tensors are decayed,
//! including norms and biases. A step does not wait for the device. If gradients are not finite, the step changes
//! nothing. The host reads their norm when it needs it ([`Gradients::on_device`]).
//!
//! The optimizer state (two moments for each weight) is in fp32 or, for large tensors, in 8 bits. It is on the device
//! or offloaded to host memory; on the CPU, offloading has no effect. A run with one kind of state can resume from a
//! checkpoint with the other.

use super::graph::backend::Numbers;
use super::{OptimizerKind, Parameter, TrainConfig};
use prsmed_base::units::Bytes;
use prsmed_base::{Error, Result};
use prsmed_tensor::adamw::{self, Coded, Maps, Moments, Rate, Slot, Step};
use prsmed_tensor::autograd::{clear_grad, with_gradient_hooks};
use prsmed_tensor::{Device, Kind, META, Tensor, kind_bytes, ledger, meta, module_path};

#[derive(Debug)]
struct State {
    moments: Moments,
    step: Tensor,
}

/// AdamW: parameters and their moments. The first update of a parameter allocates its moments.
#[derive(Debug)]
pub struct AdamW {
    params: Vec<Parameter>,
    states: Vec<Option<State>>,
    /// Code maps of the 8-bit moments; `None` before the first 8-bit moments.
    maps: Option<Maps>,
    betas: (f64, f64),
    weight_decay: f64,
    epsilon: f64,
    clip_norm: f64,
    in_8_bits: bool,
    on_host: bool,
    /// True if a step failed half-way and left the weights partially updated.
    pub partially_updated: bool,
    /// Whether this process updates each parameter; `None`: all.
    owned: Option<Vec<bool>>,
}

/// Norm and clip scale of a step's gradients, on the device.
#[derive(Debug)]
pub struct Gradients {
    /// Global norm before clipping, an fp32 scalar.
    pub on_device: Tensor,
    /// fp32 `[2]`: clip scale, and `found_inf` (1 where the norm is not finite).
    clip: Tensor,
}

impl Gradients {
    /// 1 where gradients are not finite and no weight may change; an fp32 scalar on the device.
    pub fn found_inf(&self) -> Tensor {
        self.clip.select(0, 1)
    }

    /// As named tensors: the result of a captured update.
    pub fn named(self) -> Numbers {
        vec![("norm", self.on_device), ("clip", self.clip)]
    }

    /// Back from [`Self::named`].
    ///
    /// # Errors
    /// [`Error::Torch`] for other tensors.
    pub fn from_named(numbers: Numbers) -> Result<Self> {
        match <[_; 2]>::try_from(numbers) {
            Ok([("norm", on_device), ("clip", clip)]) => Ok(Self { on_device, clip }),
            _ => Err(Error::Torch { reason: "a captured update has other results".into() }),
        }
    }
}

impl AdamW {
    /// Starts without moments.
    pub fn new(params: Vec<Parameter>, config: &TrainConfig) -> Self {
        let states = params.iter().map(|_| None).collect();
        Self {
            params,
            states,
            maps: None,
            betas: (config.beta1, config.beta2),
            weight_decay: config.weight_decay,
            epsilon: config.epsilon,
            clip_norm: config.clip_norm,
            in_8_bits: config.optimizer == OptimizerKind::AdamW8bit,
            on_host: config.offload_optimizer,
            partially_updated: false,
            owned: None,
        }
    }

    /// Updates only the parameters that are `owned`; other processes update the rest.
    pub fn set_owned(&mut self, owned: Vec<bool>) {
        self.owned = Some(owned);
    }

    fn owns(&self, index: usize) -> bool {
        self.owned.as_ref().is_none_or(|owned| owned[index])
    }

    /// The trained tensors.
    pub fn params(&self) -> &[Parameter] {
        &self.params
    }

    /// Device of the trained tensors.
    pub fn device(&self) -> Device {
        self.params.first().map_or(Device::Cpu, |param| param.tensor.device())
    }

    /// Multiplies all gradients by `factor` and computes their global norm and clip scale.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn measure(&self, factor: f64) -> Result<Gradients> {
        let norm = self.norm(factor)?;
        self.gradients_of(norm)
    }

    /// Multiplies all gradients by `factor` and computes their norm, an fp32 scalar. Those of parameters beside the model
    /// are no part of it, unless they are not finite: then it is not either.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn norm(&self, factor: f64) -> Result<Tensor> {
        let _module = module_path::enter("optimizer");
        let (beside, own): (Vec<_>, Vec<_>) = self.gradients().partition(|(index, _)| self.params[*index].is_beside);
        let norm = |grads: Vec<(usize, Tensor)>| {
            let grads: Vec<Tensor> = grads.into_iter().map(|(_, grad)| grad).collect();
            for grad in &grads {
                ledger::recategorize(grad, ledger::Category::Gradients);
            }
            if grads.is_empty() { Ok(scalar(Kind::Float, self.device())) } else { adamw::norm(&grads, factor) }
        };
        let own = norm(own)?;
        if beside.is_empty() { Ok(own) } else { Ok(own + norm(beside)? * 0.0) }
    }

    /// The clip scale of gradients with this norm.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn gradients_of(&self, norm: Tensor) -> Result<Gradients> {
        let _module = module_path::enter("optimizer");
        let clip = adamw::clip_scale(&norm, self.clip_norm)?;
        Ok(Gradients { on_device: norm, clip })
    }

    /// Clips by the measured norm, steps, and drops the gradients; changes no weight when the norm is not finite.
    ///
    /// # Errors
    /// Typed errors of libtorch; see [`Self::partially_updated`].
    pub fn step(&mut self, learning_rate: f64, gradients: &Gradients) -> Result<()> {
        self.step_at(Rate::Number(learning_rate), gradients)
    }

    /// True if a step can be captured: every parameter with a gradient has its moments on the device.
    pub fn can_be_captured(&self) -> bool {
        !self.on_host && self.gradients().all(|(index, _)| self.states[index].is_some())
    }

    /// A learning rate for [`Self::step_on_device`].
    pub fn rate_on_device(&self) -> Tensor {
        let _category = ledger::enter(ledger::Category::Optimizer);
        let device = self.device();
        let is_host = device == Device::Cpu || (device == META && meta::target() == meta::PlanTarget::Cpu);
        // libtorch's kernels read one in fp32, its loops on the host one in fp64
        let kind = if is_host { Kind::Double } else { Kind::Float };
        scalar(kind, device)
    }

    /// Measures and steps as [`Self::measure`] and [`Self::step`] do, with a learning rate on the device
    /// ([`Self::rate_on_device`]). It needs no host synchronisation, so it can be captured.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn step_on_device(&mut self, learning_rate: &Tensor, factor: f64) -> Result<Gradients> {
        let gradients = self.measure(factor)?;
        self.step_at(Rate::OnDevice(learning_rate), &gradients)?;
        Ok(gradients)
    }

    fn step_at(&mut self, rate: Rate, gradients: &Gradients) -> Result<()> {
        let _module = module_path::enter("optimizer");
        let with_grad: Vec<(usize, Tensor)> = self.gradients().collect();
        if self.clip_norm > 0.0 {
            let grads: Vec<Tensor> = with_grad.iter().map(|(_, grad)| grad.shallow_clone()).collect();
            adamw::scale_gradients(&grads, &gradients.clip)?;
        }
        for (index, _) in &with_grad {
            self.prepare(*index);
        }
        self.partially_updated = true;
        self.apply(&with_grad, rate, &gradients.found_inf())?;
        self.partially_updated = false;
        self.clear();
        Ok(())
    }

    /// Runs `backward`, updates each parameter as soon as its gradient is complete, and drops the gradient. Gradients
    /// are not clipped; only those that are not finite are ignored. The norm is that of all gradients together.
    ///
    /// # Errors
    /// Those of `backward`; [`Error::Torch`] for a parameter whose gradient arrives in parts, for example one that
    /// several checkpointed segments share. See [`Self::partially_updated`].
    pub fn step_during<T>(
        &mut self,
        learning_rate: f64,
        backward: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Gradients)> {
        let params: Vec<Tensor> = self.params.iter().map(|param| param.tensor.shallow_clone()).collect();
        let mut norms: Vec<Option<Tensor>> = params.iter().map(|_| None).collect();
        let outcome = with_gradient_hooks(
            &params,
            |index| {
                if norms[index].is_some() {
                    let name = &self.params[index].name;
                    let reason =
                        format!("the gradient of `{name}` arrives in parts: set `train.step_in_backward=false`");
                    return Err(Error::Torch { reason });
                }
                norms[index] = Some(self.step_one(index, learning_rate)?);
                Ok(())
            },
            backward,
        )?;
        let _module = module_path::enter("optimizer");
        let norms: Vec<Tensor> = norms.into_iter().flatten().collect();
        let on_device = if norms.is_empty() {
            scalar(Kind::Float, self.device())
        } else {
            prsmed_tensor::no_grad(|| Tensor::stack(&norms, 0).norm())
        };
        let clip = adamw::clip_scale(&on_device, 0.0)?;
        Ok((outcome, Gradients { on_device, clip }))
    }

    /// Updates one parameter and drops its gradient; returns the gradient's norm.
    fn step_one(&mut self, index: usize, learning_rate: f64) -> Result<Tensor> {
        let _module = module_path::enter("optimizer");
        let grad = self.params[index].tensor.grad();
        ledger::recategorize(&grad, ledger::Category::Gradients);
        self.prepare(index);
        let norm = prsmed_tensor::no_grad(|| grad.norm());
        let clip = adamw::clip_scale(&norm, 0.0)?;
        self.partially_updated = true;
        self.apply(&[(index, grad)], Rate::Number(learning_rate), &clip.select(0, 1))?;
        clear_grad(&self.params[index].tensor);
        Ok(norm)
    }

    /// Allocates the moments of a parameter that has none.
    fn prepare(&mut self, index: usize) {
        let param = &self.params[index].tensor;
        if self.states[index].is_none() {
            if adamw::in_8_bits(param, self.in_8_bits) && self.maps.is_none() {
                self.maps = Some(Maps::new(param.device()));
            }
            self.states[index] = Some(State::new(param, self.in_8_bits, self.on_host));
        }
    }

    /// Updates parameters that have moments.
    fn apply(&self, with_grad: &[(usize, Tensor)], rate: Rate, found_inf: &Tensor) -> Result<()> {
        let slots: Vec<Slot> = with_grad
            .iter()
            .filter_map(|(index, grad)| {
                let State { moments, step } = self.states[*index].as_ref()?;
                Some(Slot { param: &self.params[*index].tensor, grad, moments, step })
            })
            .collect();
        // on the CPU, offloaded moments are on the device of the parameters
        let is_apart = self.on_host && meta::runs_as_cuda(found_inf);
        let _category = is_apart.then(|| ledger::enter(ledger::Category::Optimizer));
        let step = Step {
            rate,
            betas: self.betas,
            weight_decay: self.weight_decay,
            epsilon: self.epsilon,
            found_inf,
            maps: self.maps.as_ref(),
            chunk: if is_apart { adamw::OFFLOAD_CHUNK } else { 0 },
        };
        adamw::step(&slots, step)
    }

    /// Allocates the moments of every parameter now.
    pub fn make_moments(&mut self) {
        for index in 0..self.params.len() {
            if self.owns(index) {
                self.prepare(index);
            }
        }
    }

    /// Drops all gradients.
    pub fn clear(&self) {
        self.params.iter().for_each(|p| clear_grad(&p.tensor));
    }

    fn gradients(&self) -> impl Iterator<Item = (usize, Tensor)> {
        self.params.iter().enumerate().map(|(i, p)| (i, p.tensor.grad())).filter(|(_, grad)| grad.defined())
    }

    /// Bytes of all moments, on any device.
    pub fn moment_bytes(&self) -> Bytes {
        let moments = self.states.iter().flatten().flat_map(|state| state.moments.named());
        Bytes(moments.map(|(_, moment)| moment.numel() as u64 * kind_bytes(moment.kind())).sum())
    }

    /// The moments as named tensors: `first.NAME`, `second.NAME` and `step.NAME`, or `first_codes.NAME`,
    /// `first_scales.NAME` and so on for moments in 8 bits.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let states = self.params.iter().zip(&self.states);
        states.filter_map(|(param, state)| Some(state.as_ref()?.named(param))).flatten().collect()
    }

    /// Zeros of the state that other processes have for the parameters that are `used`, as named tensors in host memory, for
    /// plans. On a planned GPU, where host memory is not counted, there are none.
    pub(super) fn state_of_others(&self, used: &[bool]) -> Vec<(String, Tensor)> {
        if meta::target() == meta::PlanTarget::Cuda {
            return Vec::new();
        }
        let others = (0..self.params.len()).filter(|index| !self.owns(*index) && used[*index]);
        let zeros = others.map(|index| &self.params[index]).flat_map(|param| {
            let moments = Moments::zeros(&param.tensor, self.in_8_bits, false);
            State { moments, step: scalar(Kind::Float, param.tensor.device()) }.named(param)
        });
        zeros.collect()
    }

    /// Restores moments from `read(name)`; a parameter without stored moments starts without. Moments of the other kind
    /// (8-bit or fp32) are converted.
    ///
    /// # Errors
    /// Those of `read`, and [`Error::Shape`] when a moment does not fit its parameter.
    pub fn restore(&mut self, mut read: impl FnMut(&str) -> Result<Option<Tensor>>) -> Result<()> {
        let _category = ledger::enter(ledger::Category::Optimizer);
        for index in 0..self.params.len() {
            self.states[index] = None;
            if !self.owns(index) {
                continue;
            }
            let Parameter { name, tensor: param, .. } = &self.params[index];
            let stored = Stored { name, param, read: &mut read }.moments()?;
            let step = read(&format!("step.{name}"))?;
            let (Some(stored), Some(step)) = (stored, step) else { continue };
            let eight = adamw::in_8_bits(param, self.in_8_bits);
            if eight && self.maps.is_none() {
                self.maps = Some(Maps::new(param.device()));
            }
            let moments = converted(stored, eight)?.to_device(param.device(), self.on_host);
            self.states[index] = Some(State { moments, step: step.to_device(param.device()) });
        }
        Ok(())
    }
}

/// A zero without a shape.
fn scalar(kind: Kind, device: Device) -> Tensor {
    Tensor::zeros([] as [i64; 0], (kind, device))
}

/// Moments of one parameter in a checkpoint.
struct Stored<'a, R> {
    name: &'a str,
    param: &'a Tensor,
    read: &'a mut R,
}

impl<R: FnMut(&str) -> Result<Option<Tensor>>> Stored<'_, R> {
    fn moments(&mut self) -> Result<Option<Moments>> {
        let size = self.param.size();
        if let (Some(first), Some(second)) = (self.take("first", &size)?, self.take("second", &size)?) {
            return Ok(Some(Moments::Full([first, second])));
        }
        let (first, second) =
            (self.coded(["first_codes", "first_scales"])?, self.coded(["second_codes", "second_scales"])?);
        Ok(first.zip(second).map(|(first, second)| Moments::EightBit([first, second])))
    }

    fn coded(&mut self, names: [&str; 2]) -> Result<Option<Coded>> {
        let scales = [adamw::blocks(self.param.numel())];
        let (codes, scales) = (self.take(names[0], &self.param.size())?, self.take(names[1], &scales)?);
        Ok(codes.zip(scales).map(|(codes, scales)| Coded { codes, scales }))
    }

    fn take(&mut self, what: &str, size: &[i64]) -> Result<Option<Tensor>> {
        let Some(tensor) = (self.read)(&format!("{what}.{}", self.name))? else { return Ok(None) };
        if tensor.size() != size {
            let reason = format!("optimizer state of `{}` has shape {:?}, expected {size:?}", self.name, tensor.size());
            return Err(Error::Shape { reason });
        }
        Ok(Some(tensor))
    }
}

/// Moments in the optimizer's own kind; those of a checkpoint are on the CPU.
fn converted(stored: Moments, eight: bool) -> Result<Moments> {
    match (stored, eight) {
        (Moments::Full([first, second]), true) => {
            let maps = Maps::new(Device::Cpu);
            let codes = [Coded::encode(&first, &maps.signed)?, Coded::encode(&second, &maps.unsigned)?];
            Ok(Moments::EightBit(codes))
        }
        (Moments::EightBit([first, second]), false) => {
            let maps = Maps::new(Device::Cpu);
            Ok(Moments::Full([first.decode(&maps.signed)?, second.decode(&maps.unsigned)?]))
        }
        (fitting, _) => Ok(fitting),
    }
}

impl State {
    fn new(param: &Tensor, eight: bool, on_host: bool) -> Self {
        let _category = ledger::enter(ledger::Category::Optimizer);
        let step = scalar(Kind::Float, param.device());
        Self { moments: Moments::zeros(param, eight, on_host), step }
    }

    /// The tensors of a parameter, named `first.NAME` and so on.
    fn named(&self, param: &Parameter) -> Vec<(String, Tensor)> {
        let tensors = self.moments.named().into_iter().chain([("step", &self.step)]);
        tensors.map(|(what, tensor)| (format!("{what}.{}", param.name), tensor.shallow_clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::plain;

    #[test]
    fn weights_are_partially_updated_after_a_step_that_fails() {
        let weight = Tensor::from_slice(&[1.0_f32, 2.0]).set_requires_grad(true);
        let param = Parameter::new("toy/weight", weight.shallow_clone());
        let mut optimizer = AdamW::new(vec![param], &plain());
        weight.sum(Kind::Float).backward();
        let gradients = optimizer.measure(1.0).unwrap();
        // `found_inf` has one number in a step that succeeds
        let clip = Tensor::zeros([2, 2], (Kind::Float, Device::Cpu));
        let unusable = Gradients { on_device: gradients.on_device.shallow_clone(), clip };
        assert!(!optimizer.partially_updated);
        optimizer.step(0.1, &unusable).unwrap_err();
        assert!(optimizer.partially_updated);
        optimizer.step(0.1, &gradients).unwrap();
        assert!(!optimizer.partially_updated);
    }
}
