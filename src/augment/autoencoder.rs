//! The autoencoder of a pipeline with its weights, for generation and for the latents and samples of a fine-tuning.

use super::pipeline_config::{PipelineConfig, PipelinePart};
use super::placement::{Placement, to_host};
use crate::Result;
use crate::models::diffusion::vae::Vae;
use crate::tensor::store::Store;
use crate::tensor::{Kind, Tensor, meta};

/// An autoencoder with its weights.
pub(super) struct Autoencoder {
    pub(super) pipeline_config: PipelineConfig,
    pub(super) placement: Placement,
    /// Dtype of its weights.
    pub(super) kind: Kind,
    pub(super) vae: Vae,
    // owns its tensors
    _store: Store,
}

impl Autoencoder {
    /// Loads the autoencoder of `pipeline_config` in `kind`.
    pub(super) fn load(pipeline_config: &PipelineConfig, placement: Placement, kind: Kind) -> Result<Self> {
        let build = |scope: &_| Vae::new(scope, &pipeline_config.vae);
        let (vae, store) = placement.network(pipeline_config, PipelinePart::Vae, kind, build)?;
        Ok(Self { pipeline_config: pipeline_config.clone(), placement, kind, vae, _store: store })
    }

    /// Mean and standard deviation of the latents of `bytes [H, W, 3]`, each `[c, h, w]` in host memory. Pixels where `keep
    /// [1, 1, H, W]` is 0 are grey.
    pub(super) fn distribution(&self, bytes: &Tensor, keep: Option<&Tensor>) -> (Tensor, Tensor) {
        let mut pixels = (bytes.permute([2, 0, 1]).to_kind(Kind::Float) / 127.5 - 1.0).unsqueeze(0);
        if let Some(keep) = keep {
            pixels *= keep;
        }
        let distribution = self.vae.encode(&pixels.to_device(self.placement.device));
        let scale = self.pipeline_config.vae.scaling_factor;
        let host = |tensor: Tensor| to_host(&(tensor * scale).squeeze_dim(0));
        (host(distribution.mean), host((distribution.logvar * 0.5).exp()))
    }

    /// Images of `latents [b, c, s, s]` by `decode`, `[b, 3, S, S]` fp32. If they are not finite, they are decoded again in
    /// fp32, because 16-bit decoders can overflow; `None` if that does not help.
    pub(super) fn images(&self, latents: &Tensor, decode: &dyn Fn(&Vae, &Tensor) -> Tensor) -> Result<Option<Tensor>> {
        let scaled = latents / self.pipeline_config.vae.scaling_factor;
        let pixels = decode(&self.vae, &scaled.to_kind(self.kind)).to_kind(Kind::Float);
        // the sum is finite only if every term is; this needs no tensor of flags
        if meta::number(&pixels.sum(Kind::Float)).is_finite() {
            return Ok(Some(pixels));
        }
        drop((pixels, scaled));
        if self.kind == Kind::Float {
            return Ok(None);
        }
        Self::load(&self.pipeline_config, self.placement, Kind::Float)?.images(latents, decode)
    }
}
