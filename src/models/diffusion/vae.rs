//! The latent autoencoder of Stable Diffusion (diffusers' `AutoencoderKL`): whole pictures, one at a time, or in tiles.
//!
//! Legend: b batch, l latent channels, f pixels of a latent (8 at the published sizes). Not here: sampling from the
//! moments and the scaling factor, which belong to the caller.

use super::block::{Downsample, Norm, Resnet, Upsample, conv1, conv3};
use super::fields::{block_types, check_others, multiple, positive, refused};
use crate::error::Result;
use crate::nn::attention::{merge_heads, split_heads};
use crate::nn::{Conv2d, GroupNorm, Linear, Mask, attention};
use crate::tensor::store::Scope;
use crate::tensor::{Kind, Tensor, dims, scope};
use serde_json::{Map, Value, json};

/// Epsilon of all norms.
const EPS: f64 = 1e-6;

/// Sizes of the network, with the names and defaults of diffusers' `vae/config.json`.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Config {
    /// Channels of the picture.
    pub in_channels: i64,
    /// Channels of the decoded picture.
    pub out_channels: i64,
    /// `DownEncoderBlock2D`, by resolution.
    pub down_block_types: Vec<String>,
    /// `UpDecoderBlock2D`, by resolution.
    pub up_block_types: Vec<String>,
    /// Channels by resolution, the highest first; each after the first halves the sides.
    pub block_out_channels: Vec<i64>,
    /// Residual blocks at each resolution of the encoder; the decoder has one more.
    pub layers_per_block: i64,
    /// Channels of the latents.
    pub latent_channels: i64,
    /// Groups of the group norms.
    pub norm_num_groups: i64,
    /// Side of the pictures it was trained on, pixels.
    pub sample_size: i64,
    /// Latents of a UNet are these ones times this factor.
    pub scaling_factor: f64,
    /// Whether fp16 may overflow; files that do not say are taken to.
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

    /// Two resolutions (a latent is 2 pixels wide), for tests and trials.
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

    /// Pixels of a latent's side.
    pub fn downscale(&self) -> i64 {
        self.block_out_channels.iter().skip(1).fold(1, |scale, _| 2 * scale)
    }

    /// # Errors
    /// [`crate::Error::Config`] naming the field (`vae.…`) that asks for another network, or sizes that do not fit
    /// together.
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
            return refused("vae.block_out_channels", format!("has {blocks} numbers"));
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
            refused("vae.scaling_factor", format!("is {}, expected a positive number", self.scaling_factor))
        }
    }

    fn norm(&self) -> Norm {
        Norm { groups: self.norm_num_groups, eps: EPS }
    }
}

/// Attention among the places of a map, one head, on top of the map.
#[derive(Debug)]
struct Attention {
    group_norm: GroupNorm,
    to_q: Linear,
    to_k: Linear,
    to_v: Linear,
    to_out: Linear,
}

impl Attention {
    fn new(scope: &Scope, dim: i64, norm: Norm) -> Self {
        let linear = |scope: &Scope| Linear::new(scope, dim, dim);
        Self {
            group_norm: GroupNorm::new(&scope.sub("group_norm"), norm.groups, dim, norm.eps),
            to_q: linear(&scope.sub("to_q")),
            to_k: linear(&scope.sub("to_k")),
            to_v: linear(&scope.sub("to_v")),
            to_out: linear(&scope.sub("to_out").sub(0)),
        }
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        let [b, c, h, w] = dims(xs);
        let tokens = self.group_norm.forward(xs).flatten(2, 3).transpose(1, 2);
        let [q, k, v] = [&self.to_q, &self.to_k, &self.to_v].map(|p| split_heads(&p.forward(&tokens, false), 1));
        let ys = self.to_out.forward(&merge_heads(&attention(&q, &k, &v, &Mask::None, 0.0)), false);
        ys.transpose(1, 2).reshape([b, c, h, w]) + xs
    }
}

#[derive(Debug)]
struct MidBlock {
    resnets: [Resnet; 2],
    attention: Attention,
}

impl MidBlock {
    fn new(scope: &Scope, dim: i64, norm: Norm) -> Self {
        let resnets = scope.sub("resnets");
        Self {
            resnets: [0, 1].map(|j| Resnet::new(&resnets.sub(j), dim, dim, None, norm)),
            attention: Attention::new(&scope.sub("attentions").sub(0), dim, norm),
        }
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        let _scope = scope::enter("mid_block");
        let xs = self.attention.forward(&self.resnets[0].forward(xs, None));
        self.resnets[1].forward(&xs, None)
    }
}

/// Residual blocks of one resolution.
fn resnets(scope: &Scope, in_dim: i64, dim: i64, count: i64, norm: Norm) -> Vec<Resnet> {
    let scope = scope.sub("resnets");
    (0..count).map(|j| Resnet::new(&scope.sub(j), if j == 0 { in_dim } else { dim }, dim, None, norm)).collect()
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
    fn new(scope: &Scope, config: &Config) -> Self {
        let (channels, norm) = (&config.block_out_channels, config.norm());
        let last = channels.len() - 1;
        let blocks = scope.sub("down_blocks");
        let block = |i: usize| {
            let (scope, dim) = (blocks.sub(i), channels[i]);
            let resnets = resnets(&scope, channels[i.saturating_sub(1)], dim, config.layers_per_block, norm);
            let half = (i < last).then(|| Downsample::new(&scope.sub("downsamplers").sub(0), dim, true));
            (resnets, half)
        };
        Self {
            conv_in: conv3(&scope.sub("conv_in"), config.in_channels, channels[0]),
            down_blocks: (0..=last).map(block).collect(),
            mid_block: MidBlock::new(&scope.sub("mid_block"), channels[last], norm),
            conv_norm_out: GroupNorm::new(&scope.sub("conv_norm_out"), norm.groups, channels[last], norm.eps),
            conv_out: conv3(&scope.sub("conv_out"), channels[last], 2 * config.latent_channels),
        }
    }

    fn forward(&self, pixels: &Tensor) -> Tensor {
        let _scope = scope::enter("encoder");
        let mut xs = self.conv_in.forward(pixels);
        for (i, (resnets, half)) in self.down_blocks.iter().enumerate() {
            let _scope = scope::enter_at("down_blocks", i);
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
    fn new(scope: &Scope, config: &Config) -> Self {
        let (channels, norm) = (&config.block_out_channels, config.norm());
        let last = channels.len() - 1;
        let blocks = scope.sub("up_blocks");
        // counted from the lowest resolution
        let block = |i: usize| {
            let (scope, dim) = (blocks.sub(i), channels[last - i]);
            let resnets = resnets(&scope, channels[last.min(last - i + 1)], dim, config.layers_per_block + 1, norm);
            (resnets, (i < last).then(|| Upsample::new(&scope.sub("upsamplers").sub(0), dim)))
        };
        Self {
            conv_in: conv3(&scope.sub("conv_in"), config.latent_channels, channels[last]),
            mid_block: MidBlock::new(&scope.sub("mid_block"), channels[last], norm),
            up_blocks: (0..=last).map(block).collect(),
            conv_norm_out: GroupNorm::new(&scope.sub("conv_norm_out"), norm.groups, channels[0], norm.eps),
            conv_out: conv3(&scope.sub("conv_out"), channels[0], config.out_channels),
        }
    }

    fn forward(&self, latents: &Tensor) -> Tensor {
        let _scope = scope::enter("decoder");
        let mut xs = self.mid_block.forward(&self.conv_in.forward(latents));
        for (i, (resnets, double)) in self.up_blocks.iter().enumerate() {
            let _scope = scope::enter_at("up_blocks", i);
            xs = resnets.iter().fold(xs, |xs, resnet| resnet.forward(&xs, None));
            if let Some(double) = double {
                let [_b, _c, h, w] = dims(&xs);
                xs = double.forward(&xs, (2 * h, 2 * w));
            }
        }
        self.conv_out.forward(&self.conv_norm_out.forward(&xs).silu())
    }
}

/// The distribution of the latents of a picture, before the scaling factor.
#[derive(Debug)]
pub struct Moments {
    /// `[b, l, h / f, w / f]`.
    pub mean: Tensor,
    /// Logarithm of the variance, same shape, -30..20.
    pub logvar: Tensor,
}

impl Moments {
    fn of(both: &Tensor) -> Self {
        let halves = both.chunk(2, 1);
        Self { mean: halves[0].shallow_clone(), logvar: halves[1].clamp(-30.0, 20.0) }
    }
}

/// The network.
#[derive(Debug)]
pub struct Vae {
    encoder: Encoder,
    decoder: Decoder,
    quant_conv: Conv2d,
    post_quant_conv: Conv2d,
    downscale: i64,
}

impl Vae {
    /// `scope` is the root of the file; `config` was checked.
    pub fn new(scope: &Scope, config: &Config) -> Self {
        let latents = config.latent_channels;
        Self {
            encoder: Encoder::new(&scope.sub("encoder"), config),
            decoder: Decoder::new(&scope.sub("decoder"), config),
            quant_conv: conv1(&scope.sub("quant_conv"), 2 * latents, 2 * latents),
            post_quant_conv: conv1(&scope.sub("post_quant_conv"), latents, latents),
            downscale: config.downscale(),
        }
    }

    /// # Shapes
    /// `pixels [b, 3, h, w]` in -1..1, sides multiples of f, in the compute dtype.
    pub fn encode(&self, pixels: &Tensor) -> Moments {
        Moments::of(&self.moments(pixels))
    }

    /// # Shapes
    /// `latents [b, l, h, w]`, divided by the scaling factor, in the compute dtype, to `[b, 3, fh, fw]` around -1..1.
    pub fn decode(&self, latents: &Tensor) -> Tensor {
        let [_b, _l, _h, _w] = dims(latents);
        self.decoder.forward(&self.post_quant_conv.forward(latents))
    }

    /// [`Vae::decode`] one picture at a time: the same pictures with the memory of one.
    pub fn decode_sliced(&self, latents: &Tensor) -> Tensor {
        one_at_a_time(latents, |latents| self.decode(latents))
    }

    /// [`Vae::decode`] one picture and one tile of `tile_px` pixels at a time; a quarter overlaps and is blended. Tiles
    /// see other group statistics than the whole, so the picture differs a little.
    pub fn decode_tiled(&self, latents: &Tensor, tile_px: i64) -> Tensor {
        let tile = tile_px / self.downscale;
        one_at_a_time(latents, |latents| tiled(latents, tile, tile_px, |tile| self.decode(tile)))
    }

    /// [`Vae::encode`] as [`Vae::decode_tiled`] decodes.
    pub fn encode_tiled(&self, pixels: &Tensor, tile_px: i64) -> Moments {
        let tile = tile_px / self.downscale;
        Moments::of(&one_at_a_time(pixels, |pixels| tiled(pixels, tile_px, tile, |tile| self.moments(tile))))
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

/// `run` on overlapping tiles of side `from`, each of which becomes a tile of side `to`; linear transitions over a
/// quarter, from the tile above first, then from the left.
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

/// `tile` with its first `extent` places along `dim` a transition from the last ones of `before`.
fn blended(before: &Tensor, tile: &Tensor, extent: i64, dim: i64) -> Tensor {
    let side = |tensor: &Tensor| if dim == 2 { dims::<4>(tensor)[2] } else { dims::<4>(tensor)[3] };
    let (last, own) = (side(before), side(tile));
    let extent = extent.min(last).min(own);
    if extent == 0 {
        return tile.shallow_clone();
    }
    #[expect(clippy::cast_precision_loss, reason = "sides are small")]
    let weight = Tensor::arange(extent, (Kind::Double, tile.device())) / extent as f64;
    let weight = weight.to_kind(tile.kind()).reshape(if dim == 2 { [-1, 1] } else { [1, -1] });
    let mixed = before.narrow(dim, last - extent, extent) * (1.0 - &weight) + tile.narrow(dim, 0, extent) * &weight;
    Tensor::cat(&[mixed, tile.narrow(dim, extent, own - extent)], dim)
}

/// The present name of a stored tensor: old files call attention's layers `query`, `key`, `value` and `proj_attn`.
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
    fn old_names_have_present_ones() {
        for (stored, now) in [
            ("encoder.mid_block.attentions.0.query.weight", "encoder.mid_block.attentions.0.to_q.weight"),
            ("decoder.mid_block.attentions.0.proj_attn.bias", "decoder.mid_block.attentions.0.to_out.0.bias"),
            ("decoder.mid_block.attentions.0.to_k.weight", "decoder.mid_block.attentions.0.to_k.weight"),
        ] {
            assert_eq!(current_name(stored), now);
        }
    }
}
