//! Settings of fine-tuning the generator (`finetune.*`, and `train.*` of the engine).

use super::cache::Condition;
use crate::augment::settings::{GeneratorSettings, RANDOM};
use crate::nn::LoraConfig;
use crate::setting::{Setting, settings};
use crate::trainer::precision::Precision;
use crate::trainer::{Switch, TrainConfig};
use crate::{Error, Result};
use std::ops::Bound::{Excluded, Unbounded};

settings! {
    /// Settings of fine-tuning the generator (`finetune.*`).
    pub struct FinetuneConfig in "finetune" {
        /// Stable Diffusion 1.x, 2.x or SDXL: a folder in diffusers' layout, `hub:owner/name[@rev]`, or random weights
        /// (`random:tiny`, `random:sd15`, `random:sd21`, `random:sdxl`) for trying the tool.
        model: String = "hub:stabilityai/stable-diffusion-xl-base-1.0".into(), results(Changes), resume(Fixed);
        /// Preferred variant of weight files (`fp16`); empty = the plain files.
        variant: String = "fp16".into(), results(Changes), resume(Fixed);
        /// What the generator learns: `images` (to make images from captions), `inpaint` (to fill a region; the UNet has 9
        /// input channels, and one with 4 is converted if all weights are trained) or `mask_to_image` (a ControlNet
        /// that reads lesion masks).
        mode: FinetuneMode = FinetuneMode::Images, results(Changes), resume(Fixed);
        /// What is trained: `lora` (small matrices beside the frozen weights) or `full` (all weights of the UNet).
        method: Method = Method::Lora, results(Changes), resume(Fixed),
            memory("`full` needs 16 bytes per weight of the UNet"),
            saves_at("lora", "trains small matrices beside the frozen weights");
        /// Side of the training images in pixels; other images are scaled and padded to a square. Far below the size
        /// that the model was made for (512 for SD 1.x, 768 for SD 2.1, 1024 for SDXL), images become unusable.
        image_size: i64 = 1024, results(Changes), resume(Fixed), range(64.0..), multiple_of(64),
            memory("activations grow with its square or faster");
        /// Rank of the LoRA.
        rank: i64 = 16, results(Changes), resume(Fixed), range(1.0..),
            memory("adapters, their gradients and their optimizer state grow with it");
        /// Scale numerator of the LoRA: the output of an adapter is multiplied by alpha / rank.
        alpha: f64 = 16.0, results(Changes), resume(Fixed), range((Excluded(0.0), Unbounded));
        /// Layers of the UNet's transformers that get an adapter, by the last components of their names, with commas
        /// between them. `to_q,to_k,to_v,to_out.0` are those of the attention, `ff.net.0.proj,ff.net.2` those of the
        /// feed-forward part.
        targets: String = "to_q,to_k,to_v,to_out.0".into(), results(Changes), resume(Fixed),
            memory("each adapted layer keeps its input");
        /// Weight the loss of each timestep by min(SNR, gamma) / SNR (Hang et al. 2023), which gives timesteps with
        /// little noise less weight; 5 is usual. 0 = no weights.
        min_snr_gamma: f64 = 5.0, results(Changes), resume(Fixed), range(0.0..);
        /// Add this much noise that is constant over each channel (Guttenberg 2023), so that very dark and very bright
        /// images can be learned; 0.05 to 0.1 are usual. 0 = none.
        noise_offset: f64 = 0.0, results(Changes), resume(Fixed), range(0.0..1.0);
        /// Part of the samples whose caption is replaced by an empty one, which guidance needs.
        caption_dropout: f64 = 0.1, results(Changes), resume(Fixed), range(0.0..=1.0);
        /// Weight of the loss inside the lesion, relative to 1 outside. The weights of an image are divided by their
        /// mean.
        lesion_weight: f64 = 1.0, results(Changes), resume(Fixed), range(1.0..);
        /// With `mode=inpaint`: regions of each image. They take turns: the lesion with a rim, the lesion moved and bent, a
        /// random shape, everything but the lesion. Their latents are cached.
        masks_per_image: usize = 8, results(Changes), resume(Fixed), range(1.0..);
        /// With `mode=mask_to_image`: a ControlNet to start from, as `augment.controlnet`; empty = a copy of the UNet's
        /// down path.
        controlnet: String = String::new(), results(Changes), resume(Fixed);
        /// Images that the network in training makes at each validation, spread over the classes, at least four of each
        /// class with four training images or more. They are written to
        /// `samples` in the run folder, and their kernel distance (KID) to real training images chooses `best/` and ends the
        /// training (`train.patience`) instead of the validation loss. 0 = none.
        samples was "num_samples_for_metrics": usize = 0, results(Changes), resume(Warn);
        /// Of these, images that are made at once; halved if memory runs out. One by one they need less memory than a
        /// training step, and more are faster.
        sample_batch was "generation_batch_size": usize = 1, results(Rounding), resume(Free), range(1.0..),
            memory("activations of the samples grow with it");
        /// Dtype in which these images are made and decoded: `auto` (bf16 on a GPU that has it, else `train.precision`),
        /// `fp32`, `bf16` or `fp16`. The weights in training are rounded layer by layer and do not change.
        sample_precision: SamplePrecision = SamplePrecision::Auto, results(Changes), resume(Warn),
            memory("activations of the samples are twice as large in fp32");
        /// Denoising steps of these images.
        sample_steps was "inference_steps_training": usize = 25, results(Changes), resume(Warn), range(1.0..);
        /// Guidance of these images; 1 = none.
        sample_guidance was "guidance_scale": f64 = 5.0, results(Changes), resume(Warn), range(1.0..);
        /// Features of the distance: weights of InceptionV3 (a file, a folder or `hub:owner/name`), or the folder of a
        /// trained segmenter, whose image encoder is used. A segmenter stays in memory during the whole training, which is not
        /// planned: use a small one.
        features: String = crate::models::inception::WEIGHTS.into(), results(Changes), resume(Warn);
        /// TOML file with captions, in the form of `data/prompts.toml` (the list `whole`); empty = the embedded ones.
        prompts: String = String::new(), results(Changes), resume(Fixed);
    }
}

/// Dtype of samples during a training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SamplePrecision {
    /// bf16 on a GPU that has it, else that of the training.
    Auto,
    /// 32 bit.
    Fp32,
    /// bfloat16.
    Bf16,
    /// float16.
    Fp16,
}

impl SamplePrecision {
    /// The precision beside a training in `trained`. `auto` is that of the training; whoever knows the GPU replaces it.
    pub fn beside(self, trained: Precision) -> Precision {
        match self {
            Self::Auto => trained,
            Self::Fp32 => Precision::Fp32,
            Self::Bf16 => Precision::Bf16,
            Self::Fp16 => Precision::Fp16,
        }
    }
}

/// What the generator learns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum), value(rename_all = "snake_case"))]
#[serde(rename_all = "snake_case")]
pub enum FinetuneMode {
    /// Images from captions.
    Images,
    /// To fill a region of an image.
    Inpaint,
    /// Images from lesion masks, by a ControlNet.
    MaskToImage,
}

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum), value(rename_all = "snake_case"))]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Adapters of low rank.
    Lora,
    /// All weights of the UNet.
    Full,
}

impl FinetuneConfig {
    /// Whether the generator has random weights.
    pub fn is_random(&self) -> bool {
        self.model.starts_with(RANDOM)
    }

    /// The settings that name the generator.
    pub fn generator(&self) -> GeneratorSettings<'_> {
        let Self { model, variant, controlnet, .. } = self;
        GeneratorSettings { section: "finetune", model, variant, controlnet }
    }

    /// Whether a LoRA is trained. A ControlNet is always trained whole.
    pub fn has_adapters(&self) -> bool {
        self.method == Method::Lora && self.mode != FinetuneMode::MaskToImage
    }

    /// What the network reads besides noise and caption.
    pub fn condition(&self) -> Condition {
        match self.mode {
            FinetuneMode::Images => Condition::None,
            FinetuneMode::Inpaint => Condition::Regions(self.masks_per_image),
            FinetuneMode::MaskToImage => Condition::Mask,
        }
    }

    /// Settings of the adapters.
    pub fn lora(&self) -> LoraConfig {
        LoraConfig { rank: self.rank, alpha: self.alpha, dropout: 0.0 }
    }

    /// The adapted layers.
    pub fn targets(&self) -> Vec<String> {
        self.targets.split(',').map(str::trim).filter(|target| !target.is_empty()).map(str::to_owned).collect()
    }
}

/// Settings of a fine-tuning.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FinetuneRun {
    /// Model and objective.
    pub finetune: FinetuneConfig,
    /// The training engine.
    pub train: TrainConfig,
}

impl FinetuneRun {
    /// Declarations of all settings.
    pub fn declarations() -> Vec<Setting> {
        [FinetuneConfig::settings(), TrainConfig::settings()].concat()
    }

    /// Refuses settings that cannot be used together.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key.
    pub fn check(&self) -> Result<()> {
        let config = &self.finetune;
        config.generator().check()?;
        if config.has_adapters() && config.targets().is_empty() {
            return Err(Error::config("finetune.targets", "names no layer", "use for example `to_q,to_v`"));
        }
        if config.mode != FinetuneMode::MaskToImage && !config.controlnet.is_empty() {
            let hint = "set `finetune.mode=mask_to_image`, or leave it out";
            return Err(Error::config("finetune.controlnet", "belongs to a ControlNet", hint));
        }
        if config.samples > 0 && self.train.validate_every_epochs == 0 {
            let (key, reason) = ("finetune.samples", "samples are made at validations, which are off");
            return Err(Error::config(key, reason, "set `train.validate_every_epochs=1`, or this to 0"));
        }
        if config.is_random() && !config.controlnet.is_empty() {
            let hint = "leave it out: a model of random weights gets a new ControlNet";
            return Err(Error::config("finetune.controlnet", "has no effect on a `random:` model", hint));
        }
        if self.train.graph == Switch::On {
            let hint = "leave it out: a fine-tuning does not use CUDA graphs";
            return Err(Error::config("train.graph", "belongs to the segmenter's training", hint));
        }
        self.train.check()
    }
}
