//! Names of a single-file checkpoint: prefixes of its keys, families, networks, and parts of stored tensors.

use crate::models::diffusion::sampler::PredictionType;
use crate::models::diffusion::{text, unet, vae};

pub(super) const UNET: &str = "model.diffusion_model.";
pub(super) const VAE: &str = "first_stage_model.";
pub(super) const CLIP: [&str; 2] = ["cond_stage_model.transformer.", "conditioner.embedders.0.transformer."];
pub(super) const OPEN_CLIP: [&str; 2] = ["cond_stage_model.model.", "conditioner.embedders.1.model."];
/// Layers of OpenCLIP's tower that SD 2.x uses; original files have one more.
pub(super) const SD2_LAYERS: i64 = 23;
/// Optimizer step of the published SD 2.x base model, which predicts the noise. The other 2.x models predict the velocity.
pub(super) const SD2_BASE_STEP: i64 = 875_000;

/// Family of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Stable Diffusion 1.x.
    Sd1,
    /// Stable Diffusion 2.x.
    Sd2,
    /// SDXL base.
    Sdxl,
}

impl Family {
    /// Name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sd1 => "SD 1.x",
            Self::Sd2 => "SD 2.x",
            Self::Sdxl => "SDXL",
        }
    }
}

/// A network of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Network {
    /// The denoising network.
    Unet,
    /// The autoencoder.
    Vae,
    /// A text encoder, from 0.
    Text(usize),
}

impl Network {
    /// Name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unet => "UNet",
            Self::Vae => "autoencoder",
            Self::Text(0) => "text encoder",
            Self::Text(_) => "second text encoder",
        }
    }
}

/// The part of a stored tensor that is one tensor of diffusers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// All of it.
    Whole,
    /// The first, second or last third of its rows.
    Third(usize),
    /// All of it, transposed.
    Transposed,
}

impl Cut {
    /// Shape of this part of a tensor of shape `stored`.
    pub fn shape(self, stored: &[i64]) -> Vec<i64> {
        match (self, stored) {
            (Self::Third(_), [rows, rest @ ..]) => [&[rows / 3], rest].concat(),
            (Self::Transposed, [rows, columns]) => vec![*columns, *rows],
            _ => stored.to_vec(),
        }
    }
}

/// A tensor of diffusers in a stored tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Name in diffusers.
    pub name: String,
    /// Its part of the stored tensor.
    pub cut: Cut,
}

/// Family and sizes of a single-file checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct SingleFile {
    /// The family.
    pub family: Family,
    /// The denoising network.
    pub unet: unet::Config,
    /// The autoencoder, if the file has it.
    pub vae: Option<vae::Config>,
    /// The text encoders of the family, those that the file has.
    pub texts: Vec<Option<text::Config>>,
    /// Meaning of the UNet's output, if the file tells it.
    pub prediction: Option<PredictionType>,
    /// Whether the model was trained with pure noise at the last timestep.
    pub zero_snr: bool,
}
