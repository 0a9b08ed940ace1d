//! Latent autoencoder of Stable Diffusion (diffusers' `AutoencoderKL`): whole batches, one image at a time, or tiles.
//!
//! Legend: b batch, l latent channels, f pixels per latent in each direction (8 at the published sizes). The caller
//! samples from the distribution and applies the scaling factor.

use super::block::{Attention, Downsample, Norm, Resnet, Upsample, conv1, conv3};
use super::fields::{block_types, check_others, multiple, positive, unsupported};
use crate::error::Result;
use crate::nn::{Conv2d, GroupNorm, Linear};
use crate::tensor::store::VarPath;
use crate::tensor::{Kind, Tensor, dims, module_path};
use serde_json::{Map, Value, json};

/// Epsilon of all norms.
const EPS: f64 = 1e-6;

/// Sizes of the network, with the names and defaults of diffusers' `vae/config.json`.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Config {
    /// Channels of the image.
    pub in_channels: i64,
    /// Channels of the decoded image.
    pub out_channels: i64,
    /// `DownEncoderBlock2D`, per resolution.
    pub down_block_types: Vec<String>,
    /// `UpDecoderBlock2D`, per resolution.
    pub up_block_types: Vec<String>,
    /// Channels per resolution, the highest first. Each entry after the first halves height and width.
    pub block_out_channels: Vec<i64>,
    /// Number of residual blocks per resolution in the encoder; the decoder has one more.
    pub layers_per_block: i64,
    /// Channels of the latents.
    pub latent_channels: i64,
    /// Number of groups of the group norms.
    pub norm_num_groups: i64,
    /// Size of the training images, pixels.
    pub sample_size: i64,
    /// The UNet's latents are the VAE's latents times this factor.
    pub scaling_factor: f64,
    /// True if fp16 may overflow, which is also the default.
    pub force_upcast: bool,
    /// All other fields.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

const DOWN: &str = "DownEncoderBlock2D";
const UP: &str = "UpDecoderBlock2D";

impl Default for Config {
    fn default() -> Self {
        Self {
            in_channels: 3,
            out_channels: 3,
            down_block_types: vec![DOWN.into()],
            up_block_types: vec![UP.into()],
            block_out_channels: vec![64],
            layers_per_block: 1,
            latent_channels: 4,
            norm_num_groups: 32,
            sample_size: 32,
            scaling_factor: 0.182_15,
            force_upcast: true,
            other: Map::new(),
        }
    }
}

impl Config {
    /// Stable Diffusion 1 and 2.
    pub fn sd() -> Self {
        Self { sample_size: 512, ..Self::sized(&[128, 256, 512, 512], 2) }
    }

    /// SDXL.
    pub fn sdxl() -> Self {
        Self { sample_size: 1024, scaling_factor: 0.130_25, ..Self::sd() }
    }

    /// Two resolutions (2 pixels per latent), for tests.
    pub fn tiny() -> Self {
        Self { norm_num_groups: 8, ..Self::sized(&[16, 32], 2) }
    }

    fn sized(channels: &[i64], layers_per_block: i64) -> Self {
        Self {
            down_block_types: vec![DOWN.into(); channels.len()],
            up_block_types: vec![UP.into(); channels.len()],
            block_out_channels: channels.to_vec(),
            layers_per_block,
            ..Self::default()
        }
    }

    /// Pixels per latent in each direction.
    pub fn downscale(&self) -> i64 {
        self.block_out_channels.iter().skip(1).fold(1, |scale, _| 2 * scale)
    }

    /// # Errors
    /// [`crate::Error::Config`] with the field (`vae.…`) whose option is not supported, or whose size is wrong.
    pub fn check(&self) -> Result<()> {
        let null = || json!([null]);
        let supported = [
            ("act_fn", json!(["silu", "swish"])),
            ("latents_mean", null()),
            ("latents_std", null()),
            ("mid_block_add_attention", json!(true)),
            ("shift_factor", json!([null, 0])),
            ("use_post_quant_conv", json!(true)),
            ("use_quant_conv", json!(true)),
        ];
        check_others("vae", &self.other, &supported)?;
        let blocks = self.block_out_channels.len();
        if !(1..=16).contains(&blocks) {
            return unsupported("vae.block_out_channels", format!("has {blocks} numbers"));
        }
        block_types("vae.down_block_types", &self.down_block_types, &[DOWN], blocks)?;
        block_types("vae.up_block_types", &self.up_block_types, &[UP], blocks)?;
        for (key, value) in [
            ("vae.in_channels", self.in_channels),
            ("vae.out_channels", self.out_channels),
            ("vae.layers_per_block", self.layers_per_block),
            ("vae.latent_channels", self.latent_channels),
        ] {
            positive(key, value)?;
        }
        for channels in &self.block_out_channels {
            multiple("vae.block_out_channels", *channels, self.norm_num_groups)?;
        }
        if self.scaling_factor.is_finite() && self.scaling_factor > 0.0 {
            Ok(())
        } else {
            unsupported("vae.scaling_factor", format!("is {}, expected a positive number", self.scaling_factor))
        }
    }

    fn norm(&self) -> Norm {
        Norm { groups: self.norm_num_groups, eps: EPS }
    }
}

/// Residual self-attention among the pixels of a map, with one head.
#[derive(Debug)]
struct PixelAttention {
    group_norm: GroupNorm,
    attention: Attention,
}

impl PixelAttention {
    fn new(vs: &VarPath, dim: i64, norm: Norm) -> Self {
        let linear = |vs: &VarPath, in_dim| Linear::new(vs, in_dim, dim);
        Self {
            group_norm: GroupNorm::new(&vs.sub("group_norm"), norm.groups, dim, norm.eps),
            attention: Attention::new(vs, [dim, dim], 1, linear, linear),
        }
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        let [b, c, h, w] = dims(xs);
        let tokens = self.group_norm.forward(xs).flatten(2, 3).transpose(1, 2);
        self.attention.forward(&tokens, &tokens).transpose(1, 2).reshape([b, c, h, w]) + xs
    }
}

#[derive(Debug)]
struct MidBlock {
    resnets: [Resnet; 2],
    attention: PixelAttention,
}

impl MidBlock {
    fn new(vs: &VarPath, dim: i64, norm: Norm) -> Self {
        let resnets = vs.sub("resnets");
        Self {
            resnets: [0, 1].map(|j| Resnet::new(&resnets.sub(j), dim, dim, None, norm)),
            attention: PixelAttention::new(&vs.sub("attentions").sub(0), dim, norm),
        }
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        let _module = module_path::enter("mid_block");
        let xs = self.attention.forward(&self.resnets[0].forward(xs, None));
        self.resnets[1].forward(&xs, None)
    }
}

/// Residual blocks of one resolution.
fn resnets(vs: &VarPath, in_dim: i64, dim: i64, count: i64, norm: Norm) -> Vec<Resnet> {
    let vs = vs.sub("resnets");
    (0..count).map(|j| Resnet::new(&vs.sub(j), if j == 0 { in_dim } else { dim }, dim, None, norm)).collect()
}

#[derive(Debug)]
struct Encoder {
    conv_in: Conv2d,
    down_blocks: Vec<(Vec<Resnet>, Option<Downsample>)>,
    mid_block: MidBlock,
    conv_norm_out: GroupNorm,
    conv_out: Conv2d,
}

impl Encoder {
    fn new(vs: &VarPath, config: &Config) -> Self {
        let (channels, norm) = (&config.block_out_channels, config.norm());
        let last = channels.len() - 1;
        let blocks = vs.sub("down_blocks");
        let block = |i: usize| {
            let (vs, dim) = (blocks.sub(i), channels[i]);
            let resnets = resnets(&vs, channels[i.saturating_sub(1)], dim, config.layers_per_block, norm);
            let half = (i < last).then(|| Downsample::new(&vs.sub("downsamplers").sub(0), dim, true));
            (resnets, half)
        };
        Self {
            conv_in: conv3(&vs.sub("conv_in"), config.in_channels, channels[0]),
            down_blocks: (0..=last).map(block).collect(),
            mid_block: MidBlock::new(&vs.sub("mid_block"), channels[last], norm),
            conv_norm_out: GroupNorm::new(&vs.sub("conv_norm_out"), norm.groups, channels[last], norm.eps),
            conv_out: conv3(&vs.sub("conv_out"), channels[last], 2 * config.latent_channels),
        }
    }

    fn forward(&self, pixels: &Tensor) -> Tensor {
        let _module = module_path::enter("encoder");
        let mut xs = self.conv_in.forward(pixels);
        for (i, (resnets, half)) in self.down_blocks.iter().enumerate() {
            let _module = module_path::enter_at("down_blocks", i);
            xs = resnets.iter().fold(xs, |xs, resnet| resnet.forward(&xs, None));
            xs = half.as_ref().map_or_else(|| xs.shallow_clone(), |half| half.forward(&xs));
        }
        let xs = self.mid_block.forward(&xs);
        self.conv_out.forward(&self.conv_norm_out.forward(&xs).silu())
    }
}

#[derive(Debug)]
struct Decoder {
    conv_in: Conv2d,
    mid_block: MidBlock,
    up_blocks: Vec<(Vec<Resnet>, Option<Upsample>)>,
    conv_norm_out: GroupNorm,
    conv_out: Conv2d,
}

impl Decoder {
    fn new(vs: &VarPath, config: &Config) -> Self {
        let (channels, norm) = (&config.block_out_channels, config.norm());
        let last = channels.len() - 1;
        let blocks = vs.sub("up_blocks");
        // index from the lowest resolution
        let block = |i: usize| {
            let (vs, dim) = (blocks.sub(i), channels[last - i]);
            let resnets = resnets(&vs, channels[last.min(last - i + 1)], dim, config.layers_per_block + 1, norm);
            (resnets, (i < last).then(|| Upsample::new(&vs.sub("upsamplers").sub(0), dim)))
        };
        Self {
            conv_in: conv3(&vs.sub("conv_in"), config.latent_channels, channels[last]),
            mid_block: MidBlock::new(&vs.sub("mid_block"), channels[last], norm),
            up_blocks: (0..=last).map(block).collect(),
            conv_norm_out: GroupNorm::new(&vs.sub("conv_norm_out"), norm.groups, channels[0], norm.eps),
            conv_out: conv3(&vs.sub("conv_out"), channels[0], config.out_channels),
        }
    }

    fn forward(&self, latents: &Tensor) -> Tensor {
        let _module = module_path::enter("decoder");
        let mut xs = self.mid_block.forward(&self.conv_in.forward(latents));
        for (i, (resnets, double)) in self.up_blocks.iter().enumerate() {
            let _module = module_path::enter_at("up_blocks", i);
            xs = resnets.iter().fold(xs, |xs, resnet| resnet.forward(&xs, None));
            if let Some(double) = double {
                let [_b, _c, h, w] = dims(&xs);
                xs = double.forward(&xs, (2 * h, 2 * w));
            }
        }
        self.conv_out.forward(&self.conv_norm_out.forward(&xs).silu())
    }
}

/// Distribution of the latents of an image, before the scaling factor.
#[derive(Debug)]
pub struct LatentDistribution {
    /// Mean, `[b, l, h / f, w / f]`.
    pub mean: Tensor,
    /// Logarithm of the variance, same shape, -30..20.
    pub logvar: Tensor,
}

impl LatentDistribution {
    fn of(both: &Tensor) -> Self {
        let halves = both.chunk(2, 1);
        Self { mean: halves[0].shallow_clone(), logvar: halves[1].clamp(-30.0, 20.0) }
    }
}

/// The autoencoder.
#[derive(Debug)]
pub struct Vae {
    encoder: Encoder,
    decoder: Decoder,
    quant_conv: Conv2d,
    post_quant_conv: Conv2d,
    downscale: i64,
}

impl Vae {
    /// `vs` is the root of the file. The caller has checked `config`.
    pub fn new(vs: &VarPath, config: &Config) -> Self {
        let latents = config.latent_channels;
        Self {
            encoder: Encoder::new(&vs.sub("encoder"), config),
            decoder: Decoder::new(&vs.sub("decoder"), config),
            quant_conv: conv1(&vs.sub("quant_conv"), 2 * latents, 2 * latents),
            post_quant_conv: conv1(&vs.sub("post_quant_conv"), latents, latents),
            downscale: config.downscale(),
        }
    }

    /// # Shapes
    /// `pixels [b, 3, h, w]` in -1..1, height and width multiples of f, in the compute dtype.
    pub fn encode(&self, pixels: &Tensor) -> LatentDistribution {
        LatentDistribution::of(&self.moments(pixels))
    }

    /// # Shapes
    /// `latents [b, l, h, w]`, divided by the scaling factor, in the compute dtype, to `[b, 3, fh, fw]` around -1..1.
    pub fn decode(&self, latents: &Tensor) -> Tensor {
        let [_b, _l, _h, _w] = dims(latents);
        self.decoder.forward(&self.post_quant_conv.forward(latents))
    }

    /// Like [`Vae::decode`], one image at a time: the same result with less memory.
    pub fn decode_sliced(&self, latents: &Tensor) -> Tensor {
        one_at_a_time(latents, |latents| self.decode(latents))
    }

    /// Like [`Vae::decode`], in tiles of `tile_px` pixels that overlap by a quarter and are blended. The result differs
    /// slightly, because each tile has its own group norm statistics.
    pub fn decode_tiled(&self, latents: &Tensor, tile_px: i64) -> Tensor {
        let tile = tile_px / self.downscale;
        one_at_a_time(latents, |latents| tiled(latents, tile, tile_px, |tile| self.decode(tile)))
    }

    /// Like [`Vae::encode`], one image at a time.
    pub fn encode_sliced(&self, pixels: &Tensor) -> LatentDistribution {
        LatentDistribution::of(&one_at_a_time(pixels, |pixels| self.moments(pixels)))
    }

    /// Like [`Vae::encode`], in tiles as in [`Vae::decode_tiled`].
    pub fn encode_tiled(&self, pixels: &Tensor, tile_px: i64) -> LatentDistribution {
        let tile = tile_px / self.downscale;
        LatentDistribution::of(&one_at_a_time(pixels, |pixels| tiled(pixels, tile_px, tile, |tile| self.moments(tile))))
    }

    fn moments(&self, pixels: &Tensor) -> Tensor {
        let [_b, _c, _h, _w] = dims(pixels);
        self.quant_conv.forward(&self.encoder.forward(pixels))
    }
}

fn one_at_a_time(xs: &Tensor, run: impl Fn(&Tensor) -> Tensor) -> Tensor {
    let all: Vec<_> = (0..xs.size()[0]).map(|i| run(&xs.narrow(0, i, 1))).collect();
    Tensor::cat(&all, 0)
}

/// Runs `run` on overlapping tiles of side `from`, whose results have side `to`. Overlaps of a quarter are blended
/// linearly, with the tile above first, then with the tile on the left.
fn tiled(xs: &Tensor, from: i64, to: i64, run: impl Fn(&Tensor) -> Tensor) -> Tensor {
    let [_b, _c, h, w] = dims(xs);
    if h <= from && w <= from {
        return run(xs);
    }
    let (step, blend) = ((from - from / 4).max(1), to / 4);
    let starts = |side: i64| (0..).map(move |i| i * step).take_while(move |start| *start < side);
    let mut rows = Vec::new();
    let mut above: Vec<Tensor> = Vec::new();
    for top in starts(h) {
        let mut row: Vec<Tensor> = Vec::new();
        for (j, left) in starts(w).enumerate() {
            let mut tile = run(&xs.narrow(2, top, from.min(h - top)).narrow(3, left, from.min(w - left)));
            if let Some(before) = above.get(j) {
                tile = blended(before, &tile, blend, 2);
            }
            if let Some(before) = row.last() {
                tile = blended(before, &tile, blend, 3);
            }
            row.push(tile);
        }
        let kept: Vec<_> = row.iter().map(|tile| cropped(tile, to - blend)).collect();
        rows.push(Tensor::cat(&kept, 3));
        above = row;
    }
    Tensor::cat(&rows, 2)
}

fn cropped(tile: &Tensor, side: i64) -> Tensor {
    let [_b, _c, h, w] = dims(tile);
    tile.narrow(2, 0, side.min(h)).narrow(3, 0, side.min(w))
}

/// Blends the first `extent` rows (or columns) of `tile` along `dim` with the last ones of `before`.
fn blended(before: &Tensor, tile: &Tensor, extent: i64, dim: i64) -> Tensor {
    let side = |tensor: &Tensor| if dim == 2 { dims::<4>(tensor)[2] } else { dims::<4>(tensor)[3] };
    let (last, own) = (side(before), side(tile));
    let extent = extent.min(last).min(own);
    if extent == 0 {
        return tile.shallow_clone();
    }
    let weight = Tensor::arange(extent, (Kind::Double, tile.device())) / extent as f64;
    let weight = weight.to_kind(tile.kind()).reshape(if dim == 2 { [-1, 1] } else { [1, -1] });
    let mixed = before.narrow(dim, last - extent, extent) * (1.0 - &weight) + tile.narrow(dim, 0, extent) * &weight;
    Tensor::cat(&[mixed, tile.narrow(dim, extent, own - extent)], dim)
}

/// The current name of a stored tensor. Old files name attention layers `query`, `key`, `value` and `proj_attn`.
pub fn current_name(stored: &str) -> String {
    const OLD: [(&str, &str); 4] =
        [(".query.", ".to_q."), (".key.", ".to_k."), (".value.", ".to_v."), (".proj_attn.", ".to_out.0.")];
    OLD.iter().fold(stored.to_owned(), |name, (old, new)| name.replace(old, new))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configs_are_checked() {
        let parsed = |text: &str| serde_json::from_str::<Config>(text).unwrap();
        for config in [Config::sd(), Config::sdxl(), Config::tiny()] {
            config.check().unwrap();
        }
        assert_eq!((Config::sd().downscale(), Config::tiny().downscale()), (8, 2));
        assert_eq!(parsed("{}").scaling_factor, 0.182_15);
        for (field, value) in [
            ("shift_factor", "0.1159"),
            ("latents_mean", "[0.1, 0.2]"),
            ("mid_block_add_attention", "false"),
            ("use_quant_conv", "false"),
            ("down_block_types", "[\"DownBlock2D\"]"),
            ("block_out_channels", "[48]"),
            ("scaling_factor", "0"),
            ("latent_channels", "0"),
        ] {
            let error = parsed(&format!("{{\"{field}\": {value}}}")).check().unwrap_err().to_string();
            assert!(error.starts_with(&format!("`vae.{field}`")), "{error}");
        }
        parsed(r#"{"shift_factor": null, "latents_mean": null, "act_fn": "silu"}"#).check().unwrap();
    }

    #[test]
    fn old_tensor_names_are_renamed() {
        for (stored, now) in [
            ("encoder.mid_block.attentions.0.query.weight", "encoder.mid_block.attentions.0.to_q.weight"),
            ("decoder.mid_block.attentions.0.proj_attn.bias", "decoder.mid_block.attentions.0.to_out.0.bias"),
            ("decoder.mid_block.attentions.0.to_k.weight", "decoder.mid_block.attentions.0.to_k.weight"),
        ] {
            assert_eq!(current_name(stored), now);
        }
    }
}
