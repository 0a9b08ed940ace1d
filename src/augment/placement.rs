//! Where and in which dtype the networks of a pipeline are, and how they get their weights.

use super::pipeline_config::{PipelineConfig, PipelinePart, Weights};
use crate::Result;
use crate::tensor::store::{Role, Store, StoreOptions, VarPath};
use crate::tensor::{Device, Kind, META, Tensor, guard, meta, no_grad, rng};

/// Device and dtype of the networks, and seed of random weights.
#[derive(Debug, Clone, Copy)]
pub struct Placement {
    /// Device of every tensor.
    pub device: Device,
    /// Dtype of UNet, ControlNet and text encoders.
    pub kind: Kind,
    /// Seed of random weights.
    pub seed: u64,
}

impl Placement {
    /// A store for a network with frozen tensors of dtype `kind`.
    pub(super) fn store(self, pipeline_config: &PipelineConfig, kind: Kind) -> Store {
        let initialise = pipeline_config.weights == Weights::Random;
        Store::new(StoreOptions { device: self.device, frozen_kind: kind, initialise })
    }

    /// Builds a network with frozen tensors of a dtype, and loads its weights.
    pub(super) fn network<T>(
        self,
        pipeline_config: &PipelineConfig,
        part: PipelinePart,
        kind: Kind,
        build: impl FnOnce(&VarPath) -> T,
    ) -> Result<(T, Store)> {
        let store = self.store(pipeline_config, kind);
        self.network_filled(store, Role::Frozen, build, |store| pipeline_config.fill(part, store))
    }

    /// As [`Self::network`], with tensors in `store`; `fill` loads the weights. It is not called on the meta device.
    pub(super) fn network_filled<T>(
        self,
        store: Store,
        role: Role,
        build: impl FnOnce(&VarPath) -> T,
        fill: impl FnOnce(&Store) -> Result<()>,
    ) -> Result<(T, Store)> {
        // a network's random weights do not depend on the networks built before it
        rng::seed(self.seed);
        let network = guard::guard(|| Ok(no_grad(|| build(&store.root(role)))))?;
        if self.device != META {
            no_grad(|| fill(&store))?;
        }
        Ok((network, store))
    }
}

/// A copy in host memory, which is not counted in a plan for a GPU.
pub(super) fn to_host(tensor: &Tensor) -> Tensor {
    match tensor.device() {
        Device::Cpu => tensor.copy(),
        META if meta::target() == meta::PlanTarget::Cpu => tensor.copy(),
        META => Tensor::empty(tensor.size(), (tensor.kind(), Device::Cpu)),
        _ => tensor.to_device(Device::Cpu),
    }
}
