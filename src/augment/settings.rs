//! Settings of making pairs (`augment.*`).

use crate::models::diffusion::sampler;
use crate::tensor::Kind;
use crate::trainer::precision::Precision;
use crate::{Error, Result};

/// What `model` says for random weights, followed by a size: `random:tiny`, `random:sdxl`.
pub const RANDOM: &str = "random:";

/// Settings of the generator.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AugmentConfig {
    /// A folder in diffusers' layout, `hub:owner/name[@rev]`, or `random:tiny|sd15|sd21|sdxl` for trying things out.
    pub model: String,
    /// Variant of weight files that is preferred (`fp16`); empty = the plain files.
    pub variant: String,
    /// ControlNet for `mask_to_image`, a folder or `hub:...`; empty = none.
    pub controlnet: String,
    /// Factor of ControlNet's residuals, 0..=2.
    pub control_scale: f64,
    /// How a pair is made.
    pub mode: Mode,
    /// New pictures for each source picture, 1 or more.
    pub per_image: usize,
    /// Side of the generated square, pixels; a multiple of 64. Memory and time grow with its square and more.
    pub image_size: i64,
    /// Denoising steps of a whole trajectory, 1..=1000. Time grows with them, memory does not.
    pub steps: usize,
    /// Part of the trajectory that is run, 0..=1: how much is made new. `mask_to_image` and SD inpainting models at 1
    /// start from noise alone.
    pub strength: f64,
    /// Classifier-free guidance scale; 1 = none, at half the time.
    pub guidance: f64,
    /// Seed of everything random.
    pub seed: u64,
    /// How the held pixels come back.
    pub paste: Paste,
    /// `euler`, `ddim`, `dpm++2m`, `dpm++2m-karras`, or `model`: as its scheduler file says.
    pub sampler: SamplerChoice,
    /// Pictures made at once, 1 or more. Memory grows with it; halved when memory runs out.
    pub batch: usize,
    /// Dtype of networks: `fp32`, `bf16` or `fp16`. Latents are fp32 always.
    pub precision: Precision,
    /// How latents become pixels.
    pub decode: Decode,
    /// Side of the tiles of `decode = "tiled"`, pixels; a multiple of 64.
    pub tile_px: i64,
    /// Write a preview sheet after every so many pictures; 0 = never.
    pub preview_every: usize,
    /// Prompts, a TOML file of `src/augment/prompts.toml`'s form; empty = the embedded ones.
    pub prompts: String,
}

/// How a pair is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Mode {
    /// The lesion stays, pixel by pixel; the background is made new. The label is exact.
    KeepLesion,
    /// The background stays; the lesion is made new inside its own mask.
    EditLesion,
    /// A lesion is made at a new place, with the mask of another picture of the class.
    InsertLesion,
    /// Everything is made new from the mask, by a ControlNet.
    MaskToImage,
    /// The whole picture is changed a little; the mask stays.
    Img2img,
}

impl Mode {
    /// The word of flags and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::KeepLesion => "keep_lesion",
            Self::EditLesion => "edit_lesion",
            Self::InsertLesion => "insert_lesion",
            Self::MaskToImage => "mask_to_image",
            Self::Img2img => "img2img",
        }
    }

    /// Whether latents outside the repainted region are held.
    pub fn holds(self) -> bool {
        matches!(self, Self::KeepLesion | Self::EditLesion | Self::InsertLesion)
    }

    /// Whether the mask is another one than the source's.
    pub fn moves_mask(self) -> bool {
        matches!(self, Self::InsertLesion)
    }
}

/// How the held pixels come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Paste {
    /// Held pixels are the source's own, byte for byte.
    Exact,
    /// All pixels are the autoencoder's: one texture everywhere, at the price of byte equality.
    Vae,
}

/// Which sampler runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum SamplerChoice {
    /// The one that the model's `scheduler_config.json` names.
    #[serde(rename = "model")]
    Model,
    /// Euler (Karras et al. 2022, algorithm 2 without noise).
    #[serde(rename = "euler")]
    Euler,
    /// DDIM (Song et al. 2021), eta 0.
    #[serde(rename = "ddim")]
    Ddim,
    /// DPM-Solver++ 2M (Lu et al. 2022).
    #[serde(rename = "dpm++2m")]
    DpmPlusPlus2M,
    /// The same on Karras' noise levels.
    #[serde(rename = "dpm++2m-karras")]
    DpmPlusPlus2MKarras,
}

impl SamplerChoice {
    /// The sampler, `None` for the model's own.
    pub fn kind(self) -> Option<(sampler::Kind, bool)> {
        match self {
            Self::Model => None,
            Self::Euler => Some((sampler::Kind::Euler, false)),
            Self::Ddim => Some((sampler::Kind::Ddim, false)),
            Self::DpmPlusPlus2M => Some((sampler::Kind::DpmPlusPlus2M, false)),
            Self::DpmPlusPlus2MKarras => Some((sampler::Kind::DpmPlusPlus2M, true)),
        }
    }
}

/// How latents become pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decode {
    /// The whole batch at once: fastest, largest.
    Whole,
    /// One picture after another.
    Sliced,
    /// One tile after another. Tiles have their own statistics: seams are possible.
    Tiled,
    /// `sliced` up to 1024 pixels, `tiled` above.
    Auto,
}

impl AugmentConfig {
    /// Dtype of UNet, ControlNet and text encoders.
    pub fn kind(&self) -> Kind {
        self.precision.kind()
    }

    /// What `auto` stands for.
    pub fn decode(&self) -> Decode {
        match self.decode {
            Decode::Auto if self.image_size > 1024 => Decode::Tiled,
            Decode::Auto => Decode::Sliced,
            chosen => chosen,
        }
    }

    /// Whether each step runs the prompt and its negative.
    pub fn is_guided(&self) -> bool {
        self.guidance > 1.0
    }

    /// Refuses values out of range.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key.
    pub fn check(&self) -> Result<()> {
        let wrong = |key: &str, reason: String, hint: &str| Err(Error::config(format!("augment.{key}"), reason, hint));
        let at_least_one = [("per_image", self.per_image), ("batch", self.batch), ("steps", self.steps)];
        for (key, value) in at_least_one {
            if value == 0 {
                return wrong(key, "must be 1 or more, got 0".into(), "use 1 or more");
            }
        }
        if self.steps > 1000 {
            return wrong("steps", format!("must be at most 1000, got {}", self.steps), "20 to 50 are usual");
        }
        for (key, side) in [("image_size", self.image_size), ("tile_px", self.tile_px)] {
            if side < 64 || side % 64 != 0 {
                return wrong(key, format!("must be a multiple of 64, got {side}"), "use for example 512 or 1024");
            }
        }
        let (strength, scale) = (self.strength, self.control_scale);
        if !(0.0..=1.0).contains(&strength) || strength == 0.0 {
            return wrong("strength", format!("must be above 0 and at most 1, got {strength}"), "0.4 to 0.8 are usual");
        }
        #[expect(clippy::cast_precision_loss, reason = "at most 1000 steps")]
        if self.mode != Mode::MaskToImage && strength * (self.steps as f64) < 1.0 {
            let reason = format!("{strength} of {} steps is less than one step: nothing would be made", self.steps);
            return wrong("strength", reason, "raise it, or `augment.steps`");
        }
        if !(1.0..=50.0).contains(&self.guidance) {
            return wrong("guidance", format!("must lie in 1..=50, got {}", self.guidance), "3 to 7.5 are usual");
        }
        if !(0.0..=2.0).contains(&scale) {
            return wrong("control_scale", format!("must lie in 0..=2, got {scale}"), "use 1");
        }
        if self.mode == Mode::MaskToImage && self.controlnet.is_empty() && !self.model.starts_with(RANDOM) {
            let hint = "set `augment.controlnet` to a ControlNet trained on masks, or choose another `--mode`";
            return wrong("controlnet", "`mask_to_image` needs one".into(), hint);
        }
        Ok(())
    }
}
