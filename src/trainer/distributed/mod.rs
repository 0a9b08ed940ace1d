//! Several processes that train one model together, one for each GPU: data parallelism and ZeRO.
//!
//! All ranks run the same loop. The micro-batches of an optimizer step are divided among them, so that
//! `micro_batch * accumulation` stays the effective batch for any number of ranks, and a run continues with another
//! number of ranks at the same sample. Gradients are summed over the ranks ([`reducer`]), and each rank then has the same
//! weights. Decisions that all ranks must take together (a smaller micro-batch after memory ran out, an early stop, an
//! interrupt) are exchanged as numbers of the host over Gloo; gradients go over NCCL or, on the CPU, over Gloo too.
//!
//! A run of one process uses none of this: see [`Ranks`].
//!
//! Sources: PyTorch Distributed (Li et al. 2020); ZeRO (Rajbhandari et al. 2020).

pub mod launch;
mod meeting;
pub mod monitor;
mod optimizer_state;
pub mod reducer;
pub mod variables;
mod world;

pub use meeting::Rendezvous;
pub use world::{Ranks, Shard, World};

pub(super) use optimizer_state::complete_state;

use super::{Parameter, Switch, TrainConfig};
use prsmed_base::{Error, Result};
use prsmed_tensor::collective::Pending;
use prsmed_tensor::{Kind, no_grad};

/// Refuses settings that several processes cannot use.
///
/// # Errors
/// [`Error::Config`] naming the key.
pub(super) fn check(config: &TrainConfig, ranks: Ranks) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let several = format!("{} processes train together", ranks.size());
    let switches =
        [(config.offload_weights, "train.offload_weights"), (config.step_in_backward, "train.step_in_backward")];
    if let Some((_, key)) = switches.into_iter().find(|(is_on, _)| *is_on) {
        let hint = format!(
            "add the setting `{key}=false`; the setting `train.zero_stage=2` divides gradients and optimizer state"
        );
        return Err(Error::config(key, format!("it cannot be used while {several}"), hint));
    }
    if config.graph == Switch::On {
        let hint = "add the setting `train.graph=off`";
        return Err(Error::config("train.graph", format!("steps are not captured while {several}"), hint));
    }
    if config.accumulation < ranks.size() {
        let reason = format!("{several}, and a step has only {} micro-batches", config.accumulation);
        let hint = format!("add the setting `train.accumulation={}`, or start fewer processes", ranks.size());
        return Err(Error::config("train.accumulation", reason, hint));
    }
    Ok(())
}

/// Gives all ranks the parameters of the first one, and checks that they have them.
///
/// # Errors
/// [`Error::Torch`] if another rank does not answer; [`Error::Config`] for ranks with other parameters.
pub(super) fn share_start(params: &[Parameter], ranks: Ranks) -> Result<()> {
    let Some(world) = ranks.world() else { return Ok(()) };
    let hint = "start all processes with the same command and the same version";
    let names: Vec<_> = params.iter().map(|param| (param.name.as_str(), param.tensor.size())).collect();
    ranks.check_equal("parameters", &format!("{names:?}"), hint)?;
    for param in params {
        world.broadcast(&param.tensor.detach(), 0)?.map_or(Ok(()), Pending::wait)?;
    }
    let sums = no_grad(|| {
        let sum = |param: &Parameter| param.tensor.detach().to_kind(Kind::Double).sum(Kind::Double).double_value(&[]);
        params.iter().map(|param| sum(param).to_bits()).collect::<Vec<u64>>()
    });
    ranks.check_equal("weights after they were copied", &format!("{sums:?}"), "please report this")
}
