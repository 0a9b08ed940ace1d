//! ControlNet (Zhang et al. 2023): a copy of the UNet's down path that reads an image and guides the UNet.
//!
//! Source: diffusers' `controlnet.py`. Guess mode and pooled conditions are left out.

use super::block::{conv3, zero_conv};
use super::fields::{positive, unsupported};
use super::unet::{self, Conditioning, Pass, Residuals, Trunk};
use crate::error::Result;
use crate::nn::Conv2d;
use crate::nn::conv::Conv2dConfig;
use crate::tensor::store::VarPath;
use crate::tensor::{Tensor, dims, module_path};

/// Sizes of the network, with the names and defaults of diffusers' `config.json`.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Config {
    /// Channels of the conditioning image.
    pub conditioning_channels: i64,
    /// Channels while the image is downsampled to the latents. Each entry after the first halves height and width.
    pub conditioning_embedding_out_channels: Vec<i64>,
    /// `rgb` or `bgr`.
    pub controlnet_conditioning_channel_order: String,
    /// Options that the ControlNet shares with its UNet.
    #[serde(flatten)]
    pub unet: unet::Config,
}

impl Default for Config {
    fn default() -> Self {
        Self::of(unet::Config::default())
    }
}

impl Config {
    /// For a UNet whose images are eight times as wide as its latents.
    pub fn of(unet: unet::Config) -> Self {
        Self {
            conditioning_channels: 3,
            conditioning_embedding_out_channels: vec![16, 32, 96, 256],
            controlnet_conditioning_channel_order: "rgb".into(),
            unet,
        }
    }

    /// For [`unet::Config::tiny`] and [`super::vae::Config::tiny`]: the image is twice as wide as the latents.
    pub fn tiny() -> Self {
        Self { conditioning_embedding_out_channels: vec![16, 32], ..Self::of(unet::Config::tiny()) }
    }

    /// # Errors
    /// [`crate::Error::Config`] with the field (`controlnet.…`) whose option is not supported, or whose size is wrong.
    pub fn check(&self) -> Result<()> {
        self.unet.check_trunk("controlnet")?;
        positive("controlnet.conditioning_channels", self.conditioning_channels)?;
        let key = "controlnet.conditioning_embedding_out_channels";
        if self.conditioning_embedding_out_channels.is_empty() {
            return unsupported(key, "is empty");
        }
        self.conditioning_embedding_out_channels.iter().try_for_each(|value| positive(key, *value))?;
        let key = "controlnet.controlnet_conditioning_channel_order";
        match self.controlnet_conditioning_channel_order.as_str() {
            "rgb" | "bgr" => Ok(()),
            other => unsupported(key, format!("is `{other}`, supported is `rgb` or `bgr`")),
        }
    }

    /// Channels of each skip map of the down path.
    fn skips(&self) -> Vec<i64> {
        let channels = &self.unet.block_out_channels;
        let mut all = vec![channels[0]];
        for (i, dim) in channels.iter().enumerate() {
            let count = self.unet.layers_per_block + i64::from(i + 1 < channels.len());
            all.extend((0..count).map(|_| *dim));
        }
        all
    }
}

/// Downsamples the image to the size of the latents.
#[derive(Debug)]
struct ConditioningEmbedding {
    conv_in: Conv2d,
    blocks: Vec<Conv2d>,
    conv_out: Conv2d,
}

impl ConditioningEmbedding {
    fn new(vs: &VarPath, config: &Config) -> Self {
        let channels = &config.conditioning_embedding_out_channels;
        let blocks = vs.sub("blocks");
        let pairs = channels.windows(2).enumerate().flat_map(|(i, pair)| {
            let wide = Conv2dConfig { stride: 2, padding: 1, ..Conv2dConfig::new(pair[0], pair[1], 3) };
            [conv3(&blocks.sub(2 * i), pair[0], pair[0]), Conv2d::new(&blocks.sub(2 * i + 1), wide)]
        });
        let last = channels[channels.len() - 1];
        let out = Conv2dConfig { padding: 1, ..Conv2dConfig::new(last, config.unet.block_out_channels[0], 3) };
        Self {
            conv_in: conv3(&vs.sub("conv_in"), config.conditioning_channels, channels[0]),
            blocks: pairs.collect(),
            conv_out: zero_conv(&vs.sub("conv_out"), out),
        }
    }

    fn forward(&self, image: &Tensor) -> Tensor {
        let xs = self.conv_in.forward(image).silu();
        let xs = self.blocks.iter().fold(xs, |xs, conv| conv.forward(&xs).silu());
        self.conv_out.forward(&xs)
    }
}

/// The ControlNet.
#[derive(Debug)]
pub struct ControlNet {
    trunk: Trunk,
    controlnet_cond_embedding: ConditioningEmbedding,
    controlnet_down_blocks: Vec<Conv2d>,
    controlnet_mid_block: Conv2d,
    reversed: bool,
}

impl ControlNet {
    /// `vs` is the root of the file. The caller has checked `config`.
    pub fn new(vs: &VarPath, config: &Config) -> Self {
        let zero = |vs: &VarPath, dim: i64| zero_conv(vs, Conv2dConfig::new(dim, dim, 1));
        let (skips, down) = (config.skips(), vs.sub("controlnet_down_blocks"));
        Self {
            trunk: Trunk::new(vs, &config.unet, None),
            controlnet_cond_embedding: ConditioningEmbedding::new(&vs.sub("controlnet_cond_embedding"), config),
            controlnet_down_blocks: skips.iter().enumerate().map(|(i, dim)| zero(&down.sub(i), *dim)).collect(),
            controlnet_mid_block: zero(&vs.sub("controlnet_mid_block"), skips[skips.len() - 1]),
            reversed: config.controlnet_conditioning_channel_order == "bgr",
        }
    }

    /// Residuals for the UNet.
    ///
    /// # Shapes
    /// `sample [b, c, h, w]` in the compute dtype, `timesteps [b]` fp32, `image [b, 3, 8h, 8w]` in 0..1.
    ///
    /// # Panics
    /// If [`Conditioning::added`] is missing and [`unet::Config::is_sdxl`].
    pub fn forward(
        &self,
        sample: &Tensor,
        timesteps: &Tensor,
        conditioning: &Conditioning,
        (image, scale): (&Tensor, f64),
        pass: Pass,
    ) -> Residuals {
        let _module = module_path::enter("controlnet");
        let [_b, _c, _h, _w] = dims(sample);
        let kind = sample.kind();
        let image = if self.reversed { image.flip([1]) } else { image.shallow_clone() };
        let inputs = self.trunk.inputs(timesteps, conditioning, kind, pass);
        let embedded = {
            let _module = module_path::enter("controlnet_cond_embedding");
            self.controlnet_cond_embedding.forward(&image.to_kind(kind))
        };
        let xs = self.trunk.conv_in.forward(sample) + embedded;
        let (skips, mid) = self.trunk.forward(&xs, &inputs);
        let outputs = self.controlnet_down_blocks.iter().zip(&skips);
        Residuals {
            down: outputs.map(|(conv, skip)| conv.forward(skip) * scale).collect(),
            mid: self.controlnet_mid_block.forward(&mid) * scale,
        }
    }
}
