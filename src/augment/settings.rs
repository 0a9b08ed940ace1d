//! Settings of making pairs (`augment.*`).

use crate::hub::{Files, Need};
use crate::models::diffusion::sampler;
use crate::setting::settings;
use crate::tensor::Kind;
use crate::trainer::precision::Precision;
use crate::{Error, Result};
use std::ops::Bound::{Excluded, Included};
use std::path::Path;

/// What `model` says for random weights, followed by a size: `random:tiny`, `random:sdxl`.
pub const RANDOM: &str = "random:";
/// What a generator is.
pub(super) const LAYOUT: &str = "give a folder in diffusers' layout (`model_index.json`, `unet/`, `vae/`, ...). Convert a checkpoint \
                      in one file once with diffusers: `StableDiffusionXLPipeline.from_single_file(FILE).save_pretrained(FOLDER)` \
                      (`StableDiffusionPipeline` for SD 1.x and 2.x)";

settings! {
    /// Settings of the generator (`augment.*`).
    pub struct AugmentConfig in "augment" {
        /// Stable Diffusion 1.x, 2.x or SDXL: a folder in diffusers' layout, `hub:owner/name[@rev]`, or random weights
        /// (`random:tiny`, `random:sd15`, `random:sd21`, `random:sdxl`) for trying the tool.
        model: String = "hub:stabilityai/stable-diffusion-xl-base-1.0".into(), results(Changes), resume(Fixed);
        /// Preferred variant of weight files (`fp16`); empty = the plain files.
        variant: String = "fp16".into(), results(Changes), resume(Fixed);
        /// ControlNet for `mask_to_image`: a folder or `hub:...`; empty = none.
        controlnet: String = String::new(), results(Changes), resume(Fixed), memory("its weights and activations");
        /// Factor of ControlNet's residuals.
        control_scale: f64 = 1.0, results(Changes), resume(Fixed), range(0.0..=2.0);
        /// `keep_lesion` (new background), `edit_lesion` (new lesion in its mask), `insert_lesion` (new lesion at
        /// another location), `mask_to_image` (everything from the mask, with a ControlNet) or `img2img` (a slightly
        /// changed image).
        mode: Mode = Mode::KeepLesion, results(Changes), resume(Fixed);
        /// New images for each source image.
        per_image: usize = 2, results(Changes), resume(Fixed), range(1.0..);
        /// Side of the generated square in pixels. Time grows with its square or faster.
        image_size: i64 = 1024, results(Changes), resume(Fixed), range(64.0..), multiple_of(64),
            memory("activations grow with its square or faster");
        /// Denoising steps of a whole trajectory; 20 to 50 are usual. Time grows with them.
        steps: usize = 30, results(Changes), resume(Fixed), range(1.0..=1000.0);
        /// Part of the trajectory that is run: how much of the image is new. 0.4 to 0.8 are usual. At 1,
        /// `mask_to_image` and SD inpainting models start from pure noise.
        strength: f64 = 0.6, results(Changes), resume(Fixed), range((Excluded(0.0), Included(1.0)));
        /// Classifier-free guidance scale; 3 to 7.5 are usual. 1 = none, at half the time.
        guidance: f64 = 5.0, results(Changes), resume(Fixed), range(1.0..=50.0);
        /// Seed of all random numbers.
        seed: u64 = 0, results(Changes), resume(Fixed);
        /// Pixels of the preserved region: `exact` (the source's, byte for byte) or `vae` (the autoencoder's: one
        /// texture everywhere).
        paste: Paste = Paste::Exact, results(Changes), resume(Fixed);
        /// Sampler; `model` = the one that the model's scheduler file names.
        sampler: SamplerChoice = SamplerChoice::Model, results(Changes), resume(Fixed);
        /// Images generated at once. The batch is halved when memory runs out.
        batch: usize = 1, results(Rounding), resume(Fixed), range(1.0..), memory("activations grow with it"),
            saves_at("1", "more batches");
        /// Dtype of the networks. Latents are always fp32.
        precision: Precision = Precision::Bf16, results(Changes), resume(Fixed),
            memory("weights and activations are twice as large in fp32"), saves_at("bf16", "networks in bf16");
        /// How latents become pixels: `whole` (all images at once), `sliced` (one image after another), `tiled` (one
        /// tile after another; seams are possible) or `auto` (`sliced` up to 1024 pixels, `tiled` above).
        decode: Decode = Decode::Auto, results(Changes), resume(Fixed),
            memory("`whole` needs the most, `tiled` the least");
        /// Side of the tiles of `augment.decode=tiled` in pixels.
        tile_px: i64 = 512, results(Changes), resume(Fixed), range(64.0..), multiple_of(64),
            memory("activations of the decoder grow with its square");
        /// TOML file with prompts, in the form of `data/prompts.toml`; empty = the embedded prompts.
        prompts: String = String::new(), results(Changes), resume(Fixed);
    }
}

/// The word of a choice in flags and files.
///
/// # Panics
/// Never for a setting: choices serialise as words.
pub fn word(choice: impl serde::Serialize) -> String {
    let word = serde_json::to_value(choice).expect("a choice serialises");
    word.as_str().expect("a choice is a word").to_owned()
}

/// Generation mode of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum), value(rename_all = "snake_case"))]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The lesion stays, pixel by pixel; the background is made new. The label is exact.
    KeepLesion,
    /// The background stays; the lesion is made new inside its own mask.
    EditLesion,
    /// A lesion is made at a new place, with the mask of another image of the class.
    InsertLesion,
    /// Everything is made new from the mask, by a ControlNet.
    MaskToImage,
    /// The whole image is changed a little; the mask stays.
    Img2img,
}

impl Mode {
    /// True if latents outside the repainted region are preserved.
    pub fn holds(self) -> bool {
        matches!(self, Self::KeepLesion | Self::EditLesion | Self::InsertLesion)
    }
}

/// Source of the pixels in the preserved region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Paste {
    /// Held pixels are the source's own, byte for byte.
    Exact,
    /// All pixels are the autoencoder's: one texture everywhere, at the price of byte equality.
    Vae,
}

/// The settings that name a generator: those of `augment.*` or of `finetune.*`.
#[derive(Debug, Clone, Copy)]
pub struct GeneratorSettings<'a> {
    /// `augment` or `finetune`.
    pub section: &'static str,
    /// See [`AugmentConfig::model`].
    pub model: &'a str,
    /// See [`AugmentConfig::variant`].
    pub variant: &'a str,
    /// See [`AugmentConfig::controlnet`].
    pub controlnet: &'a str,
}

impl<'a> GeneratorSettings<'a> {
    /// Refuses a checkpoint in one file.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key.
    pub fn check(&self) -> Result<()> {
        let is_file = [".safetensors", ".ckpt", ".pt", ".pth"].iter().any(|end| self.model.ends_with(end));
        if is_file && !Path::new(self.model).is_dir() {
            let reason = format!("`{}` is one file", self.model);
            return Err(Error::config(format!("{}.model", self.section), reason, LAYOUT));
        }
        Ok(())
    }

    /// Weight files that are read.
    pub fn needs(&self) -> Vec<Need<'a>> {
        let parts = [("model", self.model), ("controlnet", self.controlnet)];
        let named = parts.into_iter().filter(|(_, spec)| !spec.is_empty() && !spec.starts_with(RANDOM));
        let key = |name: &str| format!("{}.{name}", self.section);
        named.map(|(name, spec)| Need::new(&key(name), spec, Files::Diffusers(self.variant))).collect()
    }
}

/// Which sampler runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum SamplerChoice {
    /// The one that the model's `scheduler_config.json` names, or the nearest one.
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
    pub fn kind(self) -> Option<(sampler::SamplerKind, bool)> {
        match self {
            Self::Model => None,
            Self::Euler => Some((sampler::SamplerKind::Euler, false)),
            Self::Ddim => Some((sampler::SamplerKind::Ddim, false)),
            Self::DpmPlusPlus2M => Some((sampler::SamplerKind::DpmPlusPlus2M, false)),
            Self::DpmPlusPlus2MKarras => Some((sampler::SamplerKind::DpmPlusPlus2M, true)),
        }
    }
}

/// Decoding of latents to pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decode {
    /// The whole batch at once: fastest, largest.
    Whole,
    /// One image after another.
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

    /// The value that `auto` selects.
    pub fn decode(&self) -> Decode {
        match self.decode {
            Decode::Auto if self.image_size > 1024 => Decode::Tiled,
            Decode::Auto => Decode::Sliced,
            chosen => chosen,
        }
    }

    /// Denoising steps of a batch: the part of the trajectory that `strength` leaves.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "step counts")]
    pub fn num_steps(&self) -> usize {
        ((self.steps as f64 * self.strength) as usize).clamp(1, self.steps)
    }

    /// Whether the generator has random weights, so that its images are noise.
    pub fn is_random(&self) -> bool {
        self.model.starts_with(RANDOM)
    }

    /// The settings that name the generator.
    pub fn generator(&self) -> GeneratorSettings<'_> {
        let Self { model, variant, controlnet, .. } = self;
        GeneratorSettings { section: "augment", model, variant, controlnet }
    }

    /// Whether each step runs the prompt and its negative.
    pub fn is_guided(&self) -> bool {
        self.guidance > 1.0
    }

    /// Refuses settings that cannot be used together.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key.
    pub fn check(&self) -> Result<()> {
        self.generator().check()?;
        if self.mode != Mode::MaskToImage && self.strength * (self.steps as f64) < 1.0 {
            let reason =
                format!("{} of {} steps is less than one step: nothing is generated", self.strength, self.steps);
            return Err(Error::config("augment.strength", reason, "raise it, or `augment.steps`"));
        }
        if self.mode == Mode::MaskToImage && self.controlnet.is_empty() && !self.model.starts_with(RANDOM) {
            let hint = "set `augment.controlnet` to a ControlNet trained on masks, or choose another argument `mode`";
            return Err(Error::config("augment.controlnet", "`mask_to_image` needs one", hint));
        }
        Ok(())
    }
}
