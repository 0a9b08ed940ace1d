//! Trained weights whose fp32 values ("masters") are in host memory (`train.offload_weights`).
//!
//! The device has the weights in the dtype of its arithmetic. During the backward pass each gradient is copied to the
//! host as soon as it is complete, and freed on the device; the host adds up those of all micro-batches in fp32. The
//! optimizer updates the masters with the CPU, and the device gets their rounded values. So a GPU holds 2 bytes for a
//! trained weight instead of 16, and never all gradients. Source: ZeRO-Offload (Ren et al. 2021), for one GPU.
//!
//! The passes read the same values as with fp32 weights on the device, which are rounded at each use. **Not yet run on
//! a GPU.**

use super::{OptimizerKind, TrainConfig};
use prsmed_base::Result;
use prsmed_base::units::Bytes;
use prsmed_tensor::async_copy::Fetch;
use prsmed_tensor::autograd::{clear_grad, set_grad, with_gradient_hooks};
use prsmed_tensor::host_weights::is_stand_in;
use prsmed_tensor::store::Mastered;
use prsmed_tensor::{Device, Kind, Tensor, adamw, ledger, module_path, no_grad};
use std::collections::VecDeque;

/// Gradients that may be on their way to the host at the same time.
const MOST_PENDING: usize = 16;

/// Trained weights on a device, and their masters.
#[derive(Debug)]
pub struct HostMasters(Vec<Mastered>);

impl HostMasters {
    /// `weights` in the order of the task's parameters.
    pub fn new(weights: Vec<Mastered>) -> Self {
        Self(weights)
    }

    /// Device of the weights.
    pub fn device(&self) -> Device {
        self.0.first().map_or(Device::Cpu, |one| one.weight.device())
    }

    /// Runs `backward` and adds the gradients of the weights to those of the masters.
    ///
    /// # Errors
    /// Those of `backward`; errors of the device.
    pub fn collect<T>(&self, backward: impl FnOnce() -> Result<T>) -> Result<T> {
        let weights: Vec<Tensor> = self.0.iter().map(|one| one.weight.shallow_clone()).collect();
        // the CPU and the meta device have nothing to wait for
        let most = if matches!(self.device(), Device::Cuda(_)) { MOST_PENDING } else { 0 };
        let mut pending = VecDeque::new();
        let outcome = with_gradient_hooks(
            &weights,
            |index| {
                let grad = weights[index].grad();
                ledger::recategorize(&grad, ledger::Category::Gradients);
                clear_grad(&weights[index]);
                pending.push_back((index, Fetch::begin(&grad)));
                drop(grad);
                self.add_up(&mut pending, most)
            },
            backward,
        )?;
        self.add_up(&mut pending, 0)?;
        Ok(outcome)
    }

    /// Adds the oldest gradients to those of the masters until `most` are left.
    fn add_up(&self, pending: &mut VecDeque<(usize, Fetch)>, most: usize) -> Result<()> {
        let _entered = (ledger::enter(ledger::Category::Gradients), module_path::enter("masters"));
        while pending.len() > most {
            let Some((index, grad)) = pending.pop_front() else { break };
            let master = &self.0[index].master;
            if is_stand_in(master) {
                set_grad(master, &master.zeros_like());
                continue;
            }
            let grad = grad.tensor()?.to_kind(Kind::Float);
            let mut sum = master.grad();
            if sum.defined() {
                let _ = no_grad(|| sum.g_add_(&grad));
            } else {
                set_grad(master, &grad);
            }
        }
        Ok(())
    }

    /// Gives the device the rounded values of the masters.
    ///
    /// # Errors
    /// [`prsmed_base::Error::Torch`] from the GPU.
    pub fn round(&self) -> Result<()> {
        let _module = module_path::enter("masters");
        self.0.iter().try_for_each(Mastered::round)
    }

    /// Drops gradients that a failed backward pass left on the device.
    pub fn clear(&self) {
        self.0.iter().for_each(|one| clear_grad(&one.weight));
    }

    /// Host memory of masters, their gradients, optimizer state and moving average.
    pub fn host_bytes(&self, config: &TrainConfig) -> Bytes {
        let ema = if config.ema_decay > 0.0 { 4 } else { 0 };
        let eight_bit = config.optimizer == OptimizerKind::AdamW8bit;
        let bytes = |one: &Mastered| {
            let state = adamw::state_bytes(&one.weight, eight_bit).0;
            one.weight.numel() as u64 * (4 + 4 + ema) + state
        };
        Bytes(self.0.iter().map(bytes).sum())
    }

    /// Bytes that a step of `micro_batches` copies: a gradient for each, and the rounded weights.
    pub fn copied_bytes(&self, micro_batches: usize) -> Bytes {
        let bytes = |one: &Mastered| (one.weight.numel() * one.weight.kind().elt_size_in_bytes()) as u64;
        Bytes(self.0.iter().map(bytes).sum::<u64>() * (micro_batches as u64 + 1))
    }
}
