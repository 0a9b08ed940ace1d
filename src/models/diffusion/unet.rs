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

impl Conditioning {
    /// This conditioning with `change(tensor)` in place of each tensor.
    #[must_use]
    pub fn map(&self, change: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        let context = change(&self.context);
        let added = self.added.as_ref();
        let added = added.map(|added| Added { pooled: change(&added.pooled), time_ids: change(&added.time_ids) });
        Self { context, added }
    }
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

/// Residual blocks of one resolution, the first of them with a transformer each.
#[derive(Debug)]
struct Layers {
    resnets: Vec<Shared<Resnet>>,
    attentions: Vec<Transformer2d>,
}

impl Layers {
    /// `in_dims` are the channels that the residual blocks read, `place` is the resolution, counted from the highest, with
    /// the number of transformers.
    fn new(
        vs: &VarPath,
        config: &Config,
        (place, attentions): (usize, usize),
        in_dims: &[i64],
        adapters: Option<&Adapters>,
    ) -> Self {
        let (dim, time_dim) = (config.block_out_channels[place], Some(config.time_dim()));
        let resnet = |(j, in_dim): (usize, &i64)| {
            Shared::new(Resnet::new(&vs.sub("resnets").sub(j), *in_dim, dim, time_dim, config.norm()))
        };
        let transformer = |j| Transformer2d::new(&vs.sub("attentions").sub(j), config.transformer(place), adapters);
        Self {
            resnets: in_dims.iter().enumerate().map(resnet).collect(),
            attentions: (0..attentions).map(transformer).collect(),
        }
    }

    /// Residual block `j` and its transformer, if there is one.
    fn forward(&self, j: usize, xs: &Tensor, inputs: &BlockInputs) -> Tensor {
        let BlockInputs { time, context, checkpoints } = inputs;
        let xs = {
            let _module = module_path::enter_at("resnets", j);
            Resnet::forward_in(&self.resnets[j], xs, time, checkpoints)
        };
        let Some(attention) = self.attentions.get(j) else { return xs };
        let _module = module_path::enter_at("attentions", j);
        attention.forward(&xs, context, checkpoints)
    }
}

#[derive(Debug)]
struct DownBlock {
    layers: Layers,
    downsample: Option<Downsample>,
}

impl DownBlock {
    fn new(vs: &VarPath, config: &Config, i: usize, adapters: Option<&Adapters>) -> Self {
        let (channels, layers) = (&config.block_out_channels, config.num_layers());
        let mut in_dims = vec![channels[i]; layers];
        in_dims[0] = channels[i.saturating_sub(1)];
        let attentions = if config.down_block_types[i] == CROSS_DOWN { layers } else { 0 };
        let half = || Downsample::new(&vs.sub("downsamplers").sub(0), channels[i], false);
        Self {
            layers: Layers::new(vs, config, (i, attentions), &in_dims, adapters),
            downsample: (i + 1 < channels.len()).then(half),
        }
    }

    /// Appends every map to `skips` and returns the last.
    fn forward(&self, xs: &Tensor, inputs: &BlockInputs, skips: &mut Vec<Tensor>) -> Tensor {
        let mut xs = xs.shallow_clone();
        for j in 0..self.layers.resnets.len() {
            xs = self.layers.forward(j, &xs, inputs);
            skips.push(xs.shallow_clone());
        }
        if let Some(downsample) = &self.downsample {
            xs = downsample.forward(&xs);
            skips.push(xs.shallow_clone());
        }
        xs
    }
}

/// Time embedding, down path and mid block, which UNet and ControlNet share.
#[derive(Debug)]
pub(super) struct Trunk {
    pub(super) conv_in: Conv2d,
    time_embedding: TimeEmbedding,
    add_embedding: Option<TimeEmbedding>,
    down_blocks: Vec<DownBlock>,
    mid_block: Layers,
    time_channels: i64,
    size_channels: i64,
}

impl Trunk {
    pub(super) fn new(vs: &VarPath, config: &Config, adapters: Option<&Adapters>) -> Self {
        let (channels, time_dim) = (config.block_out_channels[0], config.time_dim());
        let (last, down_blocks) = (config.block_out_channels.len() - 1, vs.sub("down_blocks"));
        let added = config.projection_class_embeddings_input_dim.filter(|_| config.is_sdxl());
        Self {
            conv_in: conv3(&vs.sub("conv_in"), config.in_channels, channels),
            time_embedding: TimeEmbedding::new(&vs.sub("time_embedding"), channels, time_dim),
            add_embedding: added.map(|width| TimeEmbedding::new(&vs.sub("add_embedding"), width, time_dim)),
            down_blocks: (0..=last).map(|i| DownBlock::new(&down_blocks.sub(i), config, i, adapters)).collect(),
            mid_block: Layers::new(
                &vs.sub("mid_block"),
                config,
                (last, 1),
                &[config.block_out_channels[last]; 2],
                adapters,
            ),
            time_channels: channels,
            size_channels: config.addition_time_embed_dim.unwrap_or(0),
        }
    }

    /// What all blocks of a pass read, in `kind`: from `timesteps [b]` to the SiLU of the time embedding, with which every
    /// residual block begins.
    pub(super) fn inputs(
        &self,
        timesteps: &Tensor,
        conditioning: &Conditioning,
        kind: Kind,
        pass: Pass,
    ) -> BlockInputs {
        let mut time = self.time_embedding.forward(&sinusoid(timesteps, self.time_channels).to_kind(kind));
        if let Some(embedding) = &self.add_embedding {
            let added = conditioning.added.as_ref().expect("SDXL needs the pooled text and the sizes");
            let [b, _n] = dims(&added.time_ids);
            let sizes = sinusoid(&added.time_ids.flatten(0, 1), self.size_channels).reshape([b, -1]);
            let joined = Tensor::cat(&[added.pooled.to_kind(kind), sizes.to_kind(kind)], -1);
            time += embedding.forward(&joined);
        }
        let context = conditioning.context.to_kind(kind);
        BlockInputs { time: time.silu(), context, checkpoints: Checkpoints::of(pass.checkpoint) }
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
        let mid = (0..2).fold(xs, |xs, j| self.mid_block.forward(j, &xs, inputs));
        (skips, mid)
    }
}

#[derive(Debug)]
struct UpBlock {
    layers: Layers,
    upsample: Option<Upsample>,
}

impl UpBlock {
    /// Block `i`, counted from the lowest resolution.
    fn new(vs: &VarPath, config: &Config, i: usize, adapters: Option<&Adapters>) -> Self {
        let (channels, layers) = (&config.block_out_channels, config.num_layers() + 1);
        let last = channels.len() - 1;
        // index from the highest resolution
        let place = last - i;
        let dim = channels[place];
        // the map of the block before and a skip map
        let mut in_dims = vec![2 * dim; layers];
        in_dims[0] += channels[last.min(place + 1)] - dim;
        in_dims[layers - 1] += channels[place.saturating_sub(1)] - dim;
        let attentions = if config.up_block_types[i] == CROSS_UP { layers } else { 0 };
        Self {
            layers: Layers::new(vs, config, (place, attentions), &in_dims, adapters),
            upsample: (place > 0).then(|| Upsample::new(&vs.sub("upsamplers").sub(0), dim)),
        }
    }

    /// Takes its skip maps from the end of `skips`.
    fn forward(&self, xs: &Tensor, inputs: &BlockInputs, skips: &mut Vec<Tensor>) -> Tensor {
        let mut xs = xs.shallow_clone();
        for j in 0..self.layers.resnets.len() {
            let skip = skips.pop().expect("as many maps as residual blocks");
            xs = self.layers.forward(j, &Tensor::cat(&[xs, skip], 1), inputs);
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
        let inputs = self.trunk.inputs(timesteps, conditioning, sample.kind(), pass);
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
