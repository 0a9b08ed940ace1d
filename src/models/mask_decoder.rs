//! PRS-Med's mask decoder (`PromptedMaskDecoder` v5 and v6, Trinh et al. 2025): image cells attend to the language
//! model's hidden states, then convolutions compute a mask.
//!
//! Legend: b batch, n image cells (h w, row-major), t prompt tokens, d prompt width, c image channels.
//!
//! Unusual parts are as published, for its checkpoints: a 1x1 convolution with padding 1, whose border is the bias and
//! enters the instance norm; an FFN without outer residual; no positions; a norm (`ffn.norm1`) that is not used.
//!
//! Optional additions: masked prompt padding, no dropout on attention probabilities (which allows the fused kernel),
//! and fixed positions for the image cells. Without positions, "the left one of two" can be inferred only from the
//! effect of zero padding on the image features.

use super::image_encoder::ImageEmbedding;
use super::limits::{MAX_WIDTH, check_multiple, check_ranges};
use super::mask_head::family::{Head, HeadOptions, HeadPrompts, HeadSizes, Version};
use crate::Result;
use crate::nn::attention::{merge_heads, split_heads};
use crate::nn::conv::Conv2dConfig;
use crate::nn::{Conv2d, InstanceNorm2d, LayerNorm, Linear, Mask, attention, sine_positions};
use crate::tensor::store::{Init, VarPath};
use crate::tensor::weights::Archive;
use crate::tensor::{self, Kind, Tensor, dims};

/// Sizes and options of the decoder.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Published version.
    pub version: Version,
    /// Width of the language model's hidden states.
    pub prompt_dim: i64,
    /// Channels of the image embedding.
    pub image_dim: i64,
    /// Width of the prompt MLP.
    pub hidden_dim: i64,
    /// Number of heads of the cross-attention.
    pub cross_heads: i64,
    /// Number of heads of the self-attention.
    pub self_heads: i64,
    /// Width of the encoder layer's feed-forward network.
    pub feed_forward_dim: i64,
    /// Dropout of the encoder layer (residual branches and feed-forward), 0..1.
    pub dropout: f64,
    /// Dropout of attention probabilities too, as published. It prevents the fused kernel and needs about 4 GB per
    /// sample at 64x64 cells.
    pub attention_dropout: bool,
    /// Add fixed sine positions to the image cells (not published; needs no keys).
    #[serde(default)]
    pub positions: bool,
    /// Initial value of the biases that the published code sets to 1.
    pub initial_bias: f64,
}

/// Sizes of a decoder that reads states of width `prompt_dim` and images of `image_dim` channels, with the width of its
/// prompt MLP and its heads (cross-attention, self-attention); without them those of the published one.
pub fn sizes(prompt_dim: i64, image_dim: i64, own: Option<(i64, [i64; 2])>, options: &HeadOptions) -> Config {
    let published = Config::published();
    let (hidden_dim, [cross_heads, self_heads]) =
        own.unwrap_or((published.hidden_dim, [published.cross_heads, published.self_heads]));
    let feed_forward_dim = 2 * image_dim;
    let mut sizes =
        Config { prompt_dim, image_dim, hidden_dim, cross_heads, self_heads, feed_forward_dim, ..published };
    sizes.follow(options);
    sizes
}

/// Sizes of the decoder in a `mask_decoder.pth` of the original code, and its version.
///
/// # Errors
/// [`crate::Error::Weights`] for another file.
pub fn of_weights(archive: &Archive, attention_dropout: bool) -> Result<(Config, HeadOptions)> {
    let hint = "use a `mask_decoder.pth` of PRS-Med v5 or v6";
    let [hidden_dim, prompt_dim] = archive.shape("prompt_projection.0.weight", hint)?;
    let [image_dim] = archive.shape("norm1.weight", hint)?;
    let [feed_forward_dim, _] = archive.shape("encoder_layer.linear1.weight", hint)?;
    let version = if archive.contains("image_norm.weight") { Version::V5 } else { Version::V6 };
    let published = Config::published();
    let options = HeadOptions {
        version,
        dropout: published.dropout,
        attention_dropout,
        positions: published.positions,
        initial_bias: published.initial_bias,
    };
    let mut sizes = Config { prompt_dim, image_dim, hidden_dim, feed_forward_dim, ..published };
    sizes.follow(&options);
    Ok((sizes, options))
}

impl Config {
    /// The published v5 for a language model of width 4096.
    pub fn published() -> Self {
        Self {
            version: Version::V5,
            prompt_dim: 4096,
            image_dim: 256,
            hidden_dim: 512,
            cross_heads: 8,
            self_heads: 16,
            feed_forward_dim: 512,
            dropout: 0.1,
            attention_dropout: true,
            positions: false,
            initial_bias: 1.0,
        }
    }
}

impl HeadSizes for Config {
    fn prompt_dim(&self) -> i64 {
        self.prompt_dim
    }

    fn image_dim(&self) -> i64 {
        self.image_dim
    }

    fn follow(&mut self, options: &HeadOptions) {
        let HeadOptions { version, dropout, attention_dropout, positions, initial_bias } = *options;
        *self = Self { version, dropout, attention_dropout, positions, initial_bias, ..self.clone() };
    }

    fn initial_bias(&self) -> f64 {
        self.initial_bias
    }

    fn check(&self) -> Result<()> {
        check_ranges(&[
            ("model.sizes.decoder_hidden_dim", self.hidden_dim, MAX_WIDTH),
            ("model.sizes.decoder.feed_forward_dim", self.feed_forward_dim, MAX_WIDTH),
        ])?;
        if self.positions {
            let what = "channels and the four parts of positions";
            check_multiple("model.sizes.encoder.out_dim", what, self.image_dim, 4)?;
        }
        let mut heads = [self.cross_heads, self.self_heads].into_iter();
        heads.try_for_each(|heads| {
            check_multiple("model.sizes.decoder_heads", "channels and heads", self.image_dim, heads)
        })
    }
}

/// PyTorch's `MultiheadAttention`: fused input projection `in_proj_weight [3c, c]`.
#[derive(Debug)]
struct MultiheadAttention {
    in_proj_weight: Tensor,
    in_proj_bias: Tensor,
    out_proj: Linear,
    num_heads: i64,
}

impl MultiheadAttention {
    fn new(vs: &VarPath, dim: i64, num_heads: i64, bias: f64) -> Self {
        let out = (Init::XavierUniform, Some(Init::Const(bias)));
        Self {
            in_proj_weight: vs.param("in_proj_weight", &[3 * dim, dim], Init::XavierUniform),
            in_proj_bias: vs.param("in_proj_bias", &[3 * dim], Init::Const(bias)),
            out_proj: Linear::with_init(&vs.sub("out_proj"), dim, dim, out.0, out.1),
            num_heads,
        }
    }

    fn forward(&self, query: &Tensor, key_value: &Tensor, mask: &Mask, dropout: f64) -> Tensor {
        let kind = query.kind();
        let (weight, bias) = (self.in_proj_weight.to_kind(kind), self.in_proj_bias.to_kind(kind));
        let c = weight.size()[1];
        let part = |xs: &Tensor, first: i64, parts: i64| {
            xs.linear(&weight.narrow(0, first * c, parts * c), Some(&bias.narrow(0, first * c, parts * c)))
        };
        let q = split_heads(&part(query, 0, 1), self.num_heads);
        let kv = part(key_value, 1, 2);
        let k = split_heads(&kv.narrow(2, 0, c), self.num_heads);
        let v = split_heads(&kv.narrow(2, c, c), self.num_heads);
        self.out_proj.forward(&merge_heads(&attention(&q, &k, &v, mask, dropout)), false)
    }
}

/// PyTorch's post-norm `TransformerEncoderLayer`.
#[derive(Debug)]
struct EncoderLayer {
    self_attn: MultiheadAttention,
    linear1: Linear,
    linear2: Linear,
    norm1: LayerNorm,
    norm2: LayerNorm,
}

impl EncoderLayer {
    fn new(vs: &VarPath, config: &Config) -> Self {
        let (c, wide, bias) = (config.image_dim, config.feed_forward_dim, Init::Const(config.initial_bias));
        let xavier = Init::XavierUniform;
        Self {
            self_attn: MultiheadAttention::new(&vs.sub("self_attn"), c, config.self_heads, config.initial_bias),
            linear1: Linear::with_init(&vs.sub("linear1"), c, wide, xavier, Some(bias)),
            linear2: Linear::with_init(&vs.sub("linear2"), wide, c, xavier, Some(bias)),
            norm1: LayerNorm::new(&vs.sub("norm1"), c, 1e-5),
            norm2: LayerNorm::new(&vs.sub("norm2"), c, 1e-5),
        }
    }

    fn forward(&self, xs: &Tensor, dropout: f64, attention_dropout: f64) -> Tensor {
        let drop = |ys: Tensor| if dropout > 0.0 { ys.dropout(dropout, true) } else { ys };
        let attended = self.self_attn.forward(xs, xs, &Mask::None, attention_dropout);
        let xs = self.norm1.forward(&(xs + drop(attended)));
        let wide = drop(self.linear1.forward(&xs, false).relu());
        self.norm2.forward(&(&xs + drop(self.linear2.forward(&wide, false))))
    }
}

#[derive(Debug)]
struct Ffn {
    fc1: Linear,
    fc2: Linear,
    norm: LayerNorm,
    _norm1: LayerNorm,
}

impl Ffn {
    fn forward(&self, xs: &Tensor) -> Tensor {
        let ys = self.fc1.forward(xs, false).relu() + xs;
        self.norm.forward(&self.fc2.forward(&ys, false).relu())
    }
}

#[derive(Debug)]
struct BasicBlock {
    conv1: Conv2d,
    bn1: InstanceNorm2d,
    conv2: Conv2d,
    bn2: InstanceNorm2d,
    conv3: Conv2d,
}

impl BasicBlock {
    fn new(vs: &VarPath, in_dim: i64, out_dim: i64) -> Self {
        let conv = |name: &str, i, o, kernel, padding| {
            Conv2d::new(&vs.sub(name), Conv2dConfig { padding, ..Conv2dConfig::new(i, o, kernel) })
        };
        Self {
            conv1: conv("conv1", in_dim, in_dim, 3, 1),
            bn1: InstanceNorm2d::new(&vs.sub("bn1"), in_dim),
            conv2: conv("conv2", in_dim, out_dim, 1, 1),
            bn2: InstanceNorm2d::new(&vs.sub("bn2"), out_dim),
            conv3: conv("conv3", out_dim, out_dim, 3, 0),
        }
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        let ys = self.bn1.forward(&self.conv1.forward(xs)).relu() + xs;
        self.conv3.forward(&self.bn2.forward(&self.conv2.forward(&ys)))
    }
}

/// Mask decoder: from image embedding and prompt states to mask logits.
#[derive(Debug)]
pub struct MaskDecoder {
    prompt_projection: (Linear, LayerNorm, Linear, LayerNorm),
    attn: MultiheadAttention,
    norm1: LayerNorm,
    ffn: Ffn,
    encoder_layer: EncoderLayer,
    mask_generation: [BasicBlock; 3],
    out_dec: Conv2d,
    input_norms: Option<(LayerNorm, LayerNorm)>,
    config: Config,
}

impl MaskDecoder {
    /// `vs` is the root of `mask_decoder.pth`.
    pub fn new(vs: &VarPath, config: &Config) -> Self {
        let (c, bias) = (config.image_dim, Init::Const(config.initial_bias));
        let xavier = |s: &VarPath, i, o, b| Linear::with_init(s, i, o, Init::XavierUniform, Some(b));
        let out = Conv2dConfig::new(c / 4, 1, 1);
        let (prompt, ffn, blocks) = (vs.sub("prompt_projection"), vs.sub("ffn"), vs.sub("mask_generation"));
        Self {
            prompt_projection: (
                xavier(&prompt.sub(0), config.prompt_dim, config.hidden_dim, bias),
                LayerNorm::with_bias(&prompt.sub(1), config.hidden_dim, 1e-5, config.initial_bias),
                xavier(&prompt.sub(3), config.hidden_dim, c, bias),
                LayerNorm::with_bias(&prompt.sub(4), c, 1e-5, config.initial_bias),
            ),
            attn: MultiheadAttention::new(&vs.sub("attn"), c, config.cross_heads, config.initial_bias),
            norm1: LayerNorm::new(&vs.sub("norm1"), c, 1e-5),
            ffn: Ffn {
                fc1: xavier(&ffn.sub("fc1"), c, c, bias),
                fc2: xavier(&ffn.sub("fc2"), c, c, Init::Const(0.0)),
                norm: LayerNorm::new(&ffn.sub("norm"), c, 1e-5),
                _norm1: LayerNorm::new(&ffn.sub("norm1"), c, 1e-5),
            },
            encoder_layer: EncoderLayer::new(&vs.sub("encoder_layer"), config),
            mask_generation: [(0, c, c), (1, c, c / 2), (2, c / 2, c / 4)]
                .map(|(i, from, to)| BasicBlock::new(&blocks.sub(i), from, to)),
            out_dec: Conv2d::with_init(&vs.sub("out_dec"), out, Init::XavierUniform, Some(Init::Const(0.0))),
            input_norms: (config.version == Version::V5).then(|| {
                (LayerNorm::new(&vs.sub("image_norm"), c, 1e-5), LayerNorm::new(&vs.sub("prompt_norm"), c, 1e-5))
            }),
            config: config.clone(),
        }
    }

    /// Logits at the resolution of the embedding.
    ///
    /// # Shapes
    /// `image [b, c, h, w]`; `prompt [b, t, d]`; `keep [b, t]` bool, true = a real token (`None`: all are real); to
    /// `[b, 1, h, w]`.
    pub fn forward(&self, image: &Tensor, prompt: &Tensor, keep: Option<&Tensor>, train: bool) -> Tensor {
        let [b, c, h, w] = dims(image);
        let (proj0, norm0, proj1, norm1) = &self.prompt_projection;
        let prompt = norm0.forward(&proj0.forward(prompt, false)).relu();
        let prompt = norm1.forward(&proj1.forward(&prompt, false)).relu();
        let cells = image.flatten(2, 3).transpose(1, 2);
        let keep = keep.map(|keep| keep.unsqueeze(1).unsqueeze(1));
        let mask = keep.as_ref().map_or(Mask::None, Mask::Keep);
        let placed = |cells: Tensor| {
            if self.config.positions {
                &cells + sine_positions(h, w, c, cells.device()).to_kind(cells.kind())
            } else {
                cells
            }
        };
        let xs = if let Some((image_norm, prompt_norm)) = &self.input_norms {
            let cells = placed(image_norm.forward(&cells));
            self.norm1.forward(&(self.attn.forward(&cells, &prompt_norm.forward(&prompt), &mask, 0.0) + &cells))
        } else {
            self.norm1.forward(&self.attn.forward(&placed(cells), &prompt, &mask, 0.0))
        };
        let dropout = if train { self.config.dropout } else { 0.0 };
        let attention_dropout = if self.config.attention_dropout { dropout } else { 0.0 };
        let xs = self.ffn.forward(&self.encoder_layer.forward(&xs, dropout, attention_dropout));
        let mut xs = xs.transpose(1, 2).reshape([b, c, h, w]) + image;
        for block in &self.mask_generation {
            xs = block.forward(&xs);
        }
        self.out_dec.forward(&xs)
    }
}

/// Enlarges logits to rows and columns of the image: bilinear, with aligned corners.
///
/// # Shapes
/// `[b, 1, h, w]` to `[b, 1, rows, columns]`, fp32.
pub fn enlarge(logits: &Tensor, size: [i64; 2]) -> Tensor {
    let logits = logits.to_kind(Kind::Float);
    // a GPU adds the gradient of the interpolation with atomics, but not that of matrix products
    if tensor::is_deterministic() {
        interpolate_by_products(&logits, size)
    } else {
        logits.upsample_bilinear2d(size, true, None, None)
    }
}

impl Head for MaskDecoder {
    fn logits(&self, embedding: &ImageEmbedding, prompts: &HeadPrompts, train: bool) -> Tensor {
        self.forward(&embedding.map, prompts.states, prompts.keep, train)
    }

    fn enlarge(&self, logits: &Tensor, size: [i64; 2]) -> Tensor {
        enlarge(logits, size)
    }
}

/// Bilinear interpolation with aligned corners: two matrix products.
fn interpolate_by_products(xs: &Tensor, [rows, columns]: [i64; 2]) -> Tensor {
    let [_b, _one, h, w] = dims(xs);
    let weights = |from: i64, to: i64| {
        let each = Tensor::eye(from, (xs.kind(), xs.device())).unsqueeze(1);
        each.upsample_linear1d([to], true, None).squeeze_dim(1)
    };
    weights(h, rows).tr().matmul(xs).matmul(&weights(w, columns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Device, rng};

    #[test]
    fn only_positions_need_channels_in_four_parts() {
        let sizes =
            |positions| Config { image_dim: 6, cross_heads: 2, self_heads: 3, positions, ..Config::published() };
        sizes(false).check().unwrap();
        let error = sizes(true).check().unwrap_err().to_string();
        assert!(error.contains("four parts of positions: 6 is not a positive multiple of 4"), "{error}");
    }

    #[test]
    fn products_interpolate_like_libtorch() {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(5);
        let options = (Kind::Double, Device::Cpu);
        let weights = Tensor::randn([2, 1, 80, 112], options);
        let [got, want] = [true, false].map(|by_products| {
            rng::seed(6);
            let xs = Tensor::randn([2, 1, 5, 7], options).set_requires_grad(true);
            let ys = if by_products {
                interpolate_by_products(&xs, [80, 112])
            } else {
                xs.upsample_bilinear2d([80, 112], true, None, None)
            };
            (&ys * &weights).sum(Kind::Double).backward();
            [ys.detach(), xs.grad()]
        });
        for (got, want) in got.iter().zip(&want) {
            assert_eq!(got.size(), want.size());
            assert!((got - want).abs().max().double_value(&[]) < 1e-9);
        }
    }
}
