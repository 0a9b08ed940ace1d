//! The denoising UNet of Stable Diffusion 1, 2 and SDXL (Rombach et al. 2022; Podell et al. 2023).
//!
//! Source: diffusers' `unet_2d_condition.py`, with its sizes and keys. Only the options of these model families are
//! supported ([`Config::check`]). Deviation: `upcast_attention` applies to fp16 only. Legend: b batch, c channels, h
//! and w height and width of the latents, d width of the text embedding.

mod config;

pub use super::fields::PerBlock;
pub use config::Config;

pub use super::block::Adapters;
use super::block::{Checkpoints, Downsample, Resnet, TimeEmbedding, Transformer2d, Upsample, conv3, sinusoid};
use crate::nn::{Conv2d, GroupNorm};
use crate::tensor::store::VarPath;
use crate::tensor::{Kind, Shared, Tensor, dims, module_path};
use config::{CROSS_DOWN, CROSS_UP};

/// Conditioning of the prediction, besides the latents and the time.
#[derive(Debug)]
pub struct Conditioning {
    /// Text embedding, `[b, 77, d]`.
    pub context: Tensor,
    /// Additional conditioning, for SDXL only.
    pub added: Option<Added>,
}

/// Additional conditioning of SDXL.
#[derive(Debug)]
pub struct Added {
    /// Pooled text embedding, `[b, 1280]`.
    pub pooled: Tensor,
    /// Original height and width, top and left of the crop, target height and width, `[b, 6]`, fp32, pixels.
    pub time_ids: Tensor,
}

/// Residuals that a ControlNet adds to the UNet.
#[derive(Debug)]
pub struct Residuals {
    /// For the skip maps of the down path, that of `conv_in` first.
    pub down: Vec<Tensor>,
    /// For the map after the mid block.
    pub mid: Tensor,
}

/// What all blocks of a pass read besides the map.
pub(super) struct BlockInputs {
    /// SiLU of the time embedding, `[b, time_dim]`.
    pub(super) time: Tensor,
    /// Text embedding, `[b, 77, d]`.
    pub(super) context: Tensor,
    pub(super) checkpoints: Checkpoints,
}

#[derive(Debug)]
struct DownBlock {
    resnets: Vec<Shared<Resnet>>,
    /// Empty in a block without attention.
    attentions: Vec<Transformer2d>,
    downsample: Option<Downsample>,
}

impl DownBlock {
    fn new(vs: &VarPath, config: &Config, i: usize, adapters: Option<&Adapters>) -> Self {
        let channels = &config.block_out_channels;
        let (before, dim) = (channels[i.saturating_sub(1)], channels[i]);
        let (resnets, attentions) = (vs.sub("resnets"), vs.sub("attentions"));
        let layers = 0..config.layers_per_block;
        let transformers = if config.down_block_types[i] == CROSS_DOWN { layers.clone() } else { 0..0 };
        Self {
            resnets: layers
                .map(|j| {
                    let in_dim = if j == 0 { before } else { dim };
                    Shared::new(Resnet::new(&resnets.sub(j), in_dim, dim, Some(config.time_dim()), config.norm()))
                })
                .collect(),
            attentions: transformers
                .map(|j| Transformer2d::new(&attentions.sub(j), config.transformer(i), adapters))
                .collect(),
            downsample: (i + 1 < channels.len()).then(|| Downsample::new(&vs.sub("downsamplers").sub(0), dim, false)),
        }
    }

    /// Appends every map to `skips` and returns the last.
    fn forward(&self, xs: &Tensor, inputs: &BlockInputs, skips: &mut Vec<Tensor>) -> Tensor {
        let mut xs = xs.shallow_clone();
        for (j, resnet) in self.resnets.iter().enumerate() {
            xs = layer(resnet, self.attentions.get(j), &xs, inputs, j);
            skips.push(xs.shallow_clone());
        }
        if let Some(downsample) = &self.downsample {
            xs = downsample.forward(&xs);
            skips.push(xs.shallow_clone());
        }
        xs
    }
}

/// Residual block `j` and its transformer, if there is one.
fn layer(
    resnet: &Shared<Resnet>,
    attention: Option<&Transformer2d>,
    xs: &Tensor,
    inputs: &BlockInputs,
    j: usize,
) -> Tensor {
    let BlockInputs { time, context, checkpoints } = inputs;
    let xs = {
        let _module = module_path::enter_at("resnets", j);
        Resnet::forward_in(resnet, xs, time, checkpoints)
    };
    let Some(attention) = attention else { return xs };
    let _module = module_path::enter_at("attentions", j);
    attention.forward(&xs, context, checkpoints)
}

#[derive(Debug)]
struct MidBlock {
    resnets: [Shared<Resnet>; 2],
    attention: Transformer2d,
}

impl MidBlock {
    fn new(vs: &VarPath, config: &Config, adapters: Option<&Adapters>) -> Self {
        let last = config.block_out_channels.len() - 1;
        let dim = config.block_out_channels[last];
        let resnets = vs.sub("resnets");
        let resnet = |j| Resnet::new(&resnets.sub(j), dim, dim, Some(config.time_dim()), config.norm());
        Self {
            resnets: [0, 1].map(|j| Shared::new(resnet(j))),
            attention: Transformer2d::new(&vs.sub("attentions").sub(0), config.transformer(last), adapters),
        }
    }

    fn forward(&self, xs: &Tensor, inputs: &BlockInputs) -> Tensor {
        let xs = layer(&self.resnets[0], Some(&self.attention), xs, inputs, 0);
        layer(&self.resnets[1], None, &xs, inputs, 1)
    }
}

/// Time embedding, down path and mid block, which UNet and ControlNet share.
#[derive(Debug)]
pub(super) struct Trunk {
    pub(super) conv_in: Conv2d,
    time_embedding: TimeEmbedding,
    add_embedding: Option<TimeEmbedding>,
    down_blocks: Vec<DownBlock>,
    mid_block: MidBlock,
    time_channels: i64,
    size_channels: i64,
}

impl Trunk {
    pub(super) fn new(vs: &VarPath, config: &Config, adapters: Option<&Adapters>) -> Self {
        let (channels, time_dim) = (config.block_out_channels[0], config.time_dim());
        let down_blocks = vs.sub("down_blocks");
        let added = config.projection_class_embeddings_input_dim.filter(|_| config.is_sdxl());
        Self {
            conv_in: conv3(&vs.sub("conv_in"), config.in_channels, channels),
            time_embedding: TimeEmbedding::new(&vs.sub("time_embedding"), channels, time_dim),
            add_embedding: added.map(|width| TimeEmbedding::new(&vs.sub("add_embedding"), width, time_dim)),
            down_blocks: (0..config.block_out_channels.len())
                .map(|i| DownBlock::new(&down_blocks.sub(i), config, i, adapters))
                .collect(),
            mid_block: MidBlock::new(&vs.sub("mid_block"), config, adapters),
            time_channels: channels,
            size_channels: config.addition_time_embed_dim.unwrap_or(0),
        }
    }

    /// From `timesteps [b]` to the SiLU of the time embedding, `[b, time_dim]` in `kind`. Every residual block begins
    /// with this SiLU.
    pub(super) fn time(&self, timesteps: &Tensor, conditioning: &Conditioning, kind: Kind) -> Tensor {
        let mut time = self.time_embedding.forward(&sinusoid(timesteps, self.time_channels).to_kind(kind));
        if let Some(embedding) = &self.add_embedding {
            let added = conditioning.added.as_ref().expect("SDXL needs the pooled text and the sizes");
            let [b, _n] = dims(&added.time_ids);
            let sizes = sinusoid(&added.time_ids.flatten(0, 1), self.size_channels).reshape([b, -1]);
            let joined = Tensor::cat(&[added.pooled.to_kind(kind), sizes.to_kind(kind)], -1);
            time += embedding.forward(&joined);
        }
        time.silu()
    }

    /// From the map after `conv_in` to the skip maps (that map first) and the map after the mid block.
    pub(super) fn forward(&self, xs: &Tensor, inputs: &BlockInputs) -> (Vec<Tensor>, Tensor) {
        let mut skips = vec![xs.shallow_clone()];
        let mut xs = xs.shallow_clone();
        for (i, block) in self.down_blocks.iter().enumerate() {
            let _module = module_path::enter_at("down_blocks", i);
            xs = block.forward(&xs, inputs, &mut skips);
        }
        let _module = module_path::enter("mid_block");
        let mid = self.mid_block.forward(&xs, inputs);
        (skips, mid)
    }
}

#[derive(Debug)]
struct UpBlock {
    resnets: Vec<Shared<Resnet>>,
    /// Empty in a block without attention.
    attentions: Vec<Transformer2d>,
    upsample: Option<Upsample>,
}

impl UpBlock {
    /// Block `i`, counted from the lowest resolution.
    fn new(vs: &VarPath, config: &Config, i: usize, adapters: Option<&Adapters>) -> Self {
        let channels = &config.block_out_channels;
        let last = channels.len() - 1;
        // index from the highest resolution
        let place = last - i;
        let (dim, before, higher) = (channels[place], channels[last.min(place + 1)], channels[place.saturating_sub(1)]);
        let (resnets, attentions) = (vs.sub("resnets"), vs.sub("attentions"));
        let layers = 0..=config.layers_per_block;
        let transformers = if config.up_block_types[i] == CROSS_UP { config.layers_per_block + 1 } else { 0 };
        Self {
            resnets: layers
                .map(|j| {
                    let skip = if j == config.layers_per_block { higher } else { dim };
                    let in_dim = if j == 0 { before } else { dim } + skip;
                    Shared::new(Resnet::new(&resnets.sub(j), in_dim, dim, Some(config.time_dim()), config.norm()))
                })
                .collect(),
            attentions: (0..transformers)
                .map(|j| Transformer2d::new(&attentions.sub(j), config.transformer(place), adapters))
                .collect(),
            upsample: (place > 0).then(|| Upsample::new(&vs.sub("upsamplers").sub(0), dim)),
        }
    }

    /// Takes its skip maps from the end of `skips`.
    fn forward(&self, xs: &Tensor, inputs: &BlockInputs, skips: &mut Vec<Tensor>) -> Tensor {
        let mut xs = xs.shallow_clone();
        for (j, resnet) in self.resnets.iter().enumerate() {
            let skip = skips.pop().expect("as many maps as residual blocks");
            xs = layer(resnet, self.attentions.get(j), &Tensor::cat(&[xs, skip], 1), inputs, j);
        }
        if let Some(upsample) = &self.upsample {
            // twice the size; for odd sizes the next skip map has the right one
            let [_b, _c, h, w] = dims(skips.last().expect("a map of the next block"));
            xs = upsample.forward(&xs, (h, w));
        }
        xs
    }
}

/// Settings of a training pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pass {
    /// Number of first residual and transformer blocks with activation checkpointing: they save only their inputs and
    /// are recomputed. The gradients of a skip map are then added in another order.
    pub checkpoint: usize,
}

/// The denoising UNet.
#[derive(Debug)]
pub struct Unet {
    trunk: Trunk,
    up_blocks: Vec<UpBlock>,
    conv_norm_out: GroupNorm,
    conv_out: Conv2d,
}

impl Unet {
    /// `vs` is the root of the file. The caller has checked `config`.
    pub fn new(vs: &VarPath, config: &Config) -> Self {
        Self::with_adapters(vs, config, None)
    }

    /// [`Self::new`], with adapters on the linear layers of its transformers.
    pub fn with_adapters(vs: &VarPath, config: &Config, adapters: Option<&Adapters>) -> Self {
        let channels = config.block_out_channels[0];
        let up_blocks = vs.sub("up_blocks");
        let norm = &vs.sub("conv_norm_out");
        Self {
            trunk: Trunk::new(vs, config, adapters),
            up_blocks: (0..config.block_out_channels.len())
                .map(|i| UpBlock::new(&up_blocks.sub(i), config, i, adapters))
                .collect(),
            conv_norm_out: GroupNorm::new(norm, config.norm_num_groups, channels, config.norm_eps),
            conv_out: conv3(&vs.sub("conv_out"), channels, config.out_channels),
        }
    }

    /// Predicts the noise (or velocity) of `sample`.
    ///
    /// # Shapes
    /// `sample [b, c, h, w]` in the compute dtype, `timesteps [b]` fp32, to `[b, out_channels, h, w]`.
    ///
    /// # Panics
    /// If [`Conditioning::added`] is missing for [`Config::is_sdxl`].
    pub fn forward(
        &self,
        sample: &Tensor,
        timesteps: &Tensor,
        conditioning: &Conditioning,
        residuals: Option<&Residuals>,
        pass: Pass,
    ) -> Tensor {
        let [_b, _c, _h, _w] = dims(sample);
        let kind = sample.kind();
        let inputs = BlockInputs {
            time: self.trunk.time(timesteps, conditioning, kind),
            context: conditioning.context.to_kind(kind),
            checkpoints: Checkpoints::of(pass.checkpoint),
        };
        let (mut skips, mut xs) = self.trunk.forward(&self.trunk.conv_in.forward(sample), &inputs);
        if let Some(residuals) = residuals {
            assert_eq!(residuals.down.len(), skips.len(), "the ControlNet does not match the UNet");
            for (skip, residual) in skips.iter_mut().zip(&residuals.down) {
                *skip = &*skip + residual;
            }
            xs += &residuals.mid;
        }
        for (i, block) in self.up_blocks.iter().enumerate() {
            let _module = module_path::enter_at("up_blocks", i);
            xs = block.forward(&xs, &inputs, &mut skips);
        }
        self.conv_out.forward(&self.conv_norm_out.forward(&xs).silu())
    }
}
