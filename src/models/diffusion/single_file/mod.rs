//! Checkpoints of Stable Diffusion 1.x, 2.x and SDXL in one file, with the keys of Stability's code, as kohya's tools and
//! most web sites have them: reads sizes and family from keys and shapes, and converts keys to the names of diffusers.
//!
//! | part | keys |
//! |---|---|
//! | UNet | `model.diffusion_model.…` |
//! | autoencoder | `first_stage_model.…` |
//! | text encoder of SD 1.x (CLIP) | `cond_stage_model.transformer.…` |
//! | text encoder of SD 2.x (OpenCLIP) | `cond_stage_model.model.…` |
//! | text encoders of SDXL (CLIP, OpenCLIP) | `conditioner.embedders.0.transformer.…`, `conditioner.embedders.1.model.…` |
//!
//! Source: `single_file_utils.py` of diffusers 0.42. Deviations: the family is recognised by the structure of the
//! UNet, so small models are read too; a key that belongs to no layer is an error; weights of an exponential moving
//! average (`model_ema.…`) are never used. Nothing but the header of the file is read here.

mod layout;
mod names;
mod refusal;
mod sizes;

pub use layout::{Cut, Family, Network, Piece, SingleFile};
pub(in crate::models::diffusion) use names::{OUTSIDE, RESNET};

use layout::{CLIP, OPEN_CLIP, SD2_LAYERS, UNET, VAE};

use super::sampler::{PredictionType, SchedulerConfig};
use super::shapes::{self, Shapes};
use super::text::{self, ClipText};
use super::unet::Unet;
use super::vae::Vae;
use crate::error::{Error, Result};
use crate::tensor::weights::Archive;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

impl SingleFile {
    /// Reads family and sizes, and checks that every tensor has a place and every network of the file is complete.
    ///
    /// # Errors
    /// [`Error::Weights`] with the first offending key for a file of another kind, unknown keys, other shapes and missing
    /// tensors; [`Error::Io`].
    pub fn open(file: &Path) -> Result<Self> {
        let archive = Archive::open(file)?;
        refusal::check(&archive)?;
        let this = sizes::read(&archive)?;
        this.check(&archive)?;
        Ok(this)
    }

    /// The networks of the file.
    pub fn networks(&self) -> Vec<Network> {
        let mut found = vec![Network::Unet];
        found.extend(self.vae.is_some().then_some(Network::Vae));
        let texts = self.texts.iter().enumerate();
        found.extend(texts.filter(|(_, text)| text.is_some()).map(|(i, _)| Network::Text(i)));
        found
    }

    /// The networks of the family that the file lacks.
    pub fn lacking(&self) -> Vec<Network> {
        let (own, texts) = (self.networks(), (0..self.texts.len()).map(Network::Text));
        [Network::Vae].into_iter().chain(texts).filter(|network| !own.contains(network)).collect()
    }

    /// The noise schedule of the family's published models. They differ in the meaning of the UNet's output.
    pub fn scheduler(&self) -> SchedulerConfig {
        let by_family = if self.family == Family::Sd2 { PredictionType::Velocity } else { PredictionType::Epsilon };
        let prediction_type = self.prediction.unwrap_or(by_family);
        SchedulerConfig {
            prediction_type,
            rescale_betas_zero_snr: self.zero_snr && prediction_type == PredictionType::Velocity,
            ..SchedulerConfig::stable_diffusion()
        }
    }

    /// True if only the published models of the family tell what the UNet predicts, and they differ.
    pub fn prediction_is_assumed(&self) -> bool {
        self.prediction.is_none() && self.family == Family::Sd2
    }

    /// The network of the stored tensor `key` and the tensors of diffusers in it. The list is empty for a tensor that is
    /// not used. `None` for an unknown key.
    pub fn pieces(&self, key: &str) -> Option<(Network, Vec<Piece>)> {
        let whole = |name: String| vec![Piece { name, cut: Cut::Whole }];
        if let Some(rest) = key.strip_prefix(UNET) {
            let layers = usize::try_from(self.unet.layers_per_block).ok()?;
            return Some((Network::Unet, whole(names::unet(rest, layers)?)));
        }
        if let Some(rest) = key.strip_prefix(VAE) {
            let vae = self.vae.as_ref()?;
            return Some((Network::Vae, whole(names::vae(rest, vae.block_out_channels.len())?)));
        }
        if let Some(rest) = CLIP.iter().find_map(|prefix| key.strip_prefix(prefix)) {
            let pieces = if text::is_leftover(rest) { Vec::new() } else { whole(text::current_name(rest)) };
            return Some((Network::Text(0), pieces));
        }
        let rest = OPEN_CLIP.iter().find_map(|prefix| key.strip_prefix(prefix))?;
        let network = Network::Text(usize::from(self.family == Family::Sdxl));
        if matches!(rest, "logit_scale" | "attn_mask") || self.family == Family::Sd2 && is_unused_by_sd2(rest) {
            return Some((network, Vec::new()));
        }
        Some((network, names::open_clip(rest)?))
    }

    /// Names and shapes of a network's tensors.
    fn shapes(&self, network: Network) -> Result<Shapes> {
        match network {
            Network::Unet => shapes::of(|scope| drop(Unet::new(scope, &self.unet))),
            Network::Vae => {
                self.vae.as_ref().map_or(Ok(Shapes::new()), |vae| shapes::of(|scope| drop(Vae::new(scope, vae))))
            }
            Network::Text(number) => match self.texts.get(number) {
                Some(Some(text)) => shapes::of(|scope| drop(ClipText::new(scope, text, number == 1))),
                _ => Ok(Shapes::new()),
            },
        }
    }

    fn check(&self, archive: &Archive) -> Result<()> {
        let path = archive.path();
        let mut wanted: BTreeMap<Network, Shapes> = BTreeMap::new();
        for network in self.networks() {
            let _none = wanted.insert(network, self.shapes(network)?);
        }
        let mut found: BTreeSet<(Network, String)> = BTreeSet::new();
        for key in archive.names().iter().filter(|key| !refusal::is_unused(key)) {
            let unknown = || refusal::unknown(archive, key, &|key| self.pieces(key).is_none());
            let (network, pieces) = self.pieces(key).ok_or_else(unknown)?;
            let stored = archive.info(key).map(|info| info.shape.clone()).unwrap_or_default();
            for Piece { name, cut } in pieces {
                let shape = cut.shape(&stored);
                let expected = wanted.get(&network).and_then(|names| names.get(&name)).ok_or_else(unknown)?;
                if !is_same_matrix(&shape, expected) || matches!(cut, Cut::Third(_)) && stored[0] % 3 != 0 {
                    let reason = format!("`{key}` gives `{name}` the shape {shape:?}, expected {expected:?}");
                    let hint = "use an unchanged Stable Diffusion 1.x, 2.x or SDXL base model";
                    return Err(Error::weights(path, reason, hint));
                }
                found.insert((network, name));
            }
        }
        for (network, names) in &wanted {
            let missing: Vec<&String> =
                names.keys().filter(|name| !found.contains(&(*network, (*name).clone()))).collect();
            if let Some(first) = missing.first() {
                let (count, network) = (missing.len(), network.name());
                let reason = format!("lacks {count} tensors of its {network}, first `{first}` (name of diffusers)");
                return Err(Error::weights(path, reason, "download or copy the file again, or use the whole model"));
            }
        }
        Ok(())
    }
}

/// The last layer of the original tower and its projection.
fn is_unused_by_sd2(key: &str) -> bool {
    key.starts_with("text_projection") || key.starts_with(&format!("transformer.resblocks.{SD2_LAYERS}."))
}

/// True for equal shapes, and for a 1x1 convolution and the linear layer with the same weights.
pub fn is_same_matrix(stored: &[i64], wanted: &[i64]) -> bool {
    stored == wanted || stored.len() == 4 && stored[2..] == [1, 1] && stored[..2] == *wanted
}
