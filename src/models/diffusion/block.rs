//! Residual blocks, transformer blocks and resampling of UNet, ControlNet and VAE.
//!
//! Source: diffusers' `resnet.py`, `transformer_2d.py`, `attention.py`. Legend: b batch, c channels, h and w height and
//! width of a map, t tokens, d width.

use crate::nn::attention::{merge_heads, split_heads};
use crate::nn::conv::Conv2dConfig;
use crate::nn::{Conv2d, GroupNorm, LayerNorm, Linear, LoraConfig, Mask, attention};
use crate::tensor::autograd::checkpoint;
use crate::tensor::store::{Init, VarPath};
use crate::tensor::{Kind, Shared, Tensor, dims, module_path};
use std::cell::Cell;

/// Epsilon of the group norm before a transformer. It does not depend on the config.
const TRANSFORMER_EPS: f64 = 1e-6;
/// Epsilon of the layer norms inside a transformer.
const LAYER_NORM_EPS: f64 = 1e-5;

/// Activation checkpointing of the first residual and transformer blocks of a pass. They save only their inputs.
#[derive(Debug)]
pub(super) struct Checkpoints(Cell<usize>);

impl Checkpoints {
    /// For the first `blocks` blocks.
    pub(super) fn of(blocks: usize) -> Self {
        Self(Cell::new(blocks))
    }

    /// The output of the next block.
    fn run<B: Send + std::panic::RefUnwindSafe + std::panic::UnwindSafe + 'static>(
        &self,
        block: &Shared<B>,
        inputs: &[&Tensor],
        forward: fn(&B, &[Tensor]) -> Tensor,
    ) -> Tensor {
        if self.0.get() == 0 {
            let inputs: Vec<Tensor> = inputs.iter().map(|input| input.shallow_clone()).collect();
            return forward(block, &inputs);
        }
        self.0.set(self.0.get() - 1);
        let block = block.clone();
        checkpoint(inputs, move |inputs| forward(&block, inputs))
    }
}

/// Adapters for the linear layers of a network's transformers. They have the names of the layers in a store of their
/// own.
#[derive(Debug)]
pub struct Adapters {
    /// Root of the adapters' store.
    pub root: VarPath,
    /// Rank, scale and dropout.
    pub config: LoraConfig,
    /// Last components of the names of the adapted layers, for example `to_q` and `to_out.0`.
    pub targets: Vec<String>,
}

impl Adapters {
    /// `linear` with an adapter if the layer at `vs` is a target.
    fn on(this: Option<&Self>, vs: &VarPath, linear: Linear) -> Linear {
        let is_target = |target: &String| vs.path() == target || vs.path().ends_with(&format!(".{target}"));
        match this.filter(|adapters| adapters.targets.iter().any(is_target)) {
            Some(adapters) => linear.with_lora(&adapters.root.sub(vs.path()), &adapters.config),
            None => linear,
        }
    }
}

/// A 3x3 convolution that keeps the size.
pub(super) fn conv3(vs: &VarPath, in_dim: i64, out_dim: i64) -> Conv2d {
    Conv2d::new(vs, Conv2dConfig { padding: 1, ..Conv2dConfig::new(in_dim, out_dim, 3) })
}

/// A 1x1 convolution.
pub(super) fn conv1(vs: &VarPath, in_dim: i64, out_dim: i64) -> Conv2d {
    Conv2d::new(vs, Conv2dConfig::new(in_dim, out_dim, 1))
}

/// Sinusoidal embedding: cosines, then sines, of `values` at `width / 2` frequencies from 1 down to almost 1/10000.
///
/// Computed in fp32 in the order of diffusers' operators, because at t = 999 the rounding of a frequency matters.
///
/// # Shapes
/// `values [n]` to `[n, width]`, fp32; `width` is even.
pub fn sinusoid(values: &Tensor, width: i64) -> Tensor {
    let [_n] = dims(values);
    let half = width / 2;
    let count = half as f64;
    let exponents = Tensor::arange(half, (Kind::Float, values.device())) * -(10_000_f64.ln()) / count;
    let angles = values.to_kind(Kind::Float).unsqueeze(1) * exponents.exp().unsqueeze(0);
    Tensor::cat(&[angles.cos(), angles.sin()], -1)
}

/// Two linear layers with a SiLU between them (`time_embedding`, `add_embedding`).
#[derive(Debug)]
pub(super) struct TimeEmbedding {
    linear_1: Linear,
    linear_2: Linear,
}

impl TimeEmbedding {
    pub(super) fn new(vs: &VarPath, in_dim: i64, out_dim: i64) -> Self {
        Self {
            linear_1: Linear::new(&vs.sub("linear_1"), in_dim, out_dim),
            linear_2: Linear::new(&vs.sub("linear_2"), out_dim, out_dim),
        }
    }

    /// `xs [b, in]` to `[b, out]`.
    pub(super) fn forward(&self, xs: &Tensor) -> Tensor {
        self.linear_2.forward(&self.linear_1.forward(xs, false).silu(), false)
    }
}

/// Group norm settings of a network.
#[derive(Debug, Clone, Copy)]
pub(super) struct Norm {
    pub(super) groups: i64,
    pub(super) eps: f64,
}

/// Residual block: twice norm, SiLU and convolution. The time embedding is added between the two.
#[derive(Debug)]
pub(super) struct Resnet {
    norm1: GroupNorm,
    conv1: Conv2d,
    time_emb_proj: Option<Linear>,
    norm2: GroupNorm,
    conv2: Conv2d,
    conv_shortcut: Option<Conv2d>,
}

impl Resnet {
    /// `time_dim` is `None` for a network without time (VAE).
    pub(super) fn new(vs: &VarPath, in_dim: i64, out_dim: i64, time_dim: Option<i64>, norm: Norm) -> Self {
        let Norm { groups, eps } = norm;
        Self {
            norm1: GroupNorm::new(&vs.sub("norm1"), groups, in_dim, eps),
            conv1: conv3(&vs.sub("conv1"), in_dim, out_dim),
            time_emb_proj: time_dim.map(|d| Linear::new(&vs.sub("time_emb_proj"), d, out_dim)),
            norm2: GroupNorm::new(&vs.sub("norm2"), groups, out_dim, eps),
            conv2: conv3(&vs.sub("conv2"), out_dim, out_dim),
            conv_shortcut: (in_dim != out_dim).then(|| conv1(&vs.sub("conv_shortcut"), in_dim, out_dim)),
        }
    }

    /// [`Self::forward`], with the checkpoints of a pass.
    pub(super) fn forward_in(this: &Shared<Self>, xs: &Tensor, time: &Tensor, checkpoints: &Checkpoints) -> Tensor {
        checkpoints.run(this, &[xs, time], |block, inputs| block.forward(&inputs[0], Some(&inputs[1])))
    }

    /// `xs [b, in, h, w]` and `time [b, time_dim]`, the embedding after SiLU, to `[b, out, h, w]`.
    pub(super) fn forward(&self, xs: &Tensor, time: Option<&Tensor>) -> Tensor {
        let mut ys = self.conv1.forward(&self.norm1.forward(xs).silu());
        if let (Some(proj), Some(time)) = (&self.time_emb_proj, time) {
            ys += proj.forward(time, false).unsqueeze(-1).unsqueeze(-1);
        }
        let ys = self.conv2.forward(&self.norm2.forward(&ys).silu());
        match &self.conv_shortcut {
            Some(conv) => conv.forward(xs) + ys,
            None => xs + ys,
        }
    }
}

/// Downsampling by a factor of 2.
#[derive(Debug)]
pub(super) struct Downsample {
    conv: Conv2d,
    /// Pad with zeros only on the right and at the bottom, as in the VAE.
    one_sided: bool,
}

impl Downsample {
    pub(super) fn new(vs: &VarPath, dim: i64, one_sided: bool) -> Self {
        let padding = i64::from(!one_sided);
        let conv = Conv2dConfig { stride: 2, padding, ..Conv2dConfig::new(dim, dim, 3) };
        Self { conv: Conv2d::new(&vs.sub("conv"), conv), one_sided }
    }

    pub(super) fn forward(&self, xs: &Tensor) -> Tensor {
        if self.one_sided { self.conv.forward(&xs.constant_pad_nd([0, 1, 0, 1])) } else { self.conv.forward(xs) }
    }
}

/// Nearest-neighbour upsampling, then a convolution.
#[derive(Debug)]
pub(super) struct Upsample {
    conv: Conv2d,
}

impl Upsample {
    pub(super) fn new(vs: &VarPath, dim: i64) -> Self {
        Self { conv: conv3(&vs.sub("conv"), dim, dim) }
    }

    /// `xs [b, c, h, w]` to `[b, c, size.0, size.1]`.
    pub(super) fn forward(&self, xs: &Tensor, size: (i64, i64)) -> Tensor {
        self.conv.forward(&xs.upsample_nearest2d([size.0, size.1], None, None))
    }
}

/// Sizes of the transformers in one block of a UNet.
#[derive(Debug, Clone, Copy)]
pub(super) struct TransformerConfig {
    pub(super) dim: i64,
    pub(super) num_heads: i64,
    pub(super) num_layers: i64,
    pub(super) context_dim: i64,
    pub(super) groups: i64,
    /// Use linear layers instead of 1x1 convolutions before and after the transformer blocks.
    pub(super) linear: bool,
    /// Compute attention scores in fp32 if the compute dtype is fp16.
    pub(super) upcast: bool,
}

/// Attention with several heads.
#[derive(Debug)]
pub(super) struct Attention {
    to_q: Linear,
    to_k: Linear,
    to_v: Linear,
    to_out: Linear,
    num_heads: i64,
    upcast: bool,
}

impl Attention {
    /// `project` makes the layers of a width that read queries and context, `out` the last one.
    pub(super) fn new(
        vs: &VarPath,
        [dim, context_dim]: [i64; 2],
        num_heads: i64,
        project: impl Fn(&VarPath, i64) -> Linear,
        out: impl Fn(&VarPath, i64) -> Linear,
    ) -> Self {
        Self {
            to_q: project(&vs.sub("to_q"), dim),
            to_k: project(&vs.sub("to_k"), context_dim),
            to_v: project(&vs.sub("to_v"), context_dim),
            to_out: out(&vs.sub("to_out").sub(0), dim),
            num_heads,
            upcast: false,
        }
    }

    /// `xs [b, t, d]` and `context [b, t, context_dim]` to `[b, t, d]`.
    pub(super) fn forward(&self, xs: &Tensor, context: &Tensor) -> Tensor {
        let kind = xs.kind();
        // fp16 scores may overflow; bf16 has the range of fp32
        let inner = if self.upcast && kind == Kind::Half { Kind::Float } else { kind };
        let project = |layer: &Linear, xs: &Tensor| split_heads(&layer.forward(xs, false), self.num_heads);
        let q = project(&self.to_q, xs).to_kind(inner);
        let k = project(&self.to_k, context).to_kind(inner);
        let v = project(&self.to_v, context).to_kind(inner);
        self.to_out.forward(&merge_heads(&attention(&q, &k, &v, &Mask::None, 0.0)).to_kind(kind), false)
    }
}

/// Self-attention among the pixels, cross-attention to the text, gated MLP.
#[derive(Debug)]
struct TransformerBlock {
    norm1: LayerNorm,
    attn1: Attention,
    norm2: LayerNorm,
    attn2: Attention,
    norm3: LayerNorm,
    /// `ff.net.0.proj`, to 8d: the hidden half, then the gate.
    proj: Linear,
    /// `ff.net.2`.
    out: Linear,
}

impl TransformerBlock {
    fn new(vs: &VarPath, config: TransformerConfig, adapters: Option<&Adapters>) -> Self {
        let d = config.dim;
        let linear = |vs: &VarPath, in_dim, out_dim| Adapters::on(adapters, vs, Linear::new(vs, in_dim, out_dim));
        let project = |vs: &VarPath, in_dim| Adapters::on(adapters, vs, Linear::no_bias(vs, in_dim, d, Init::FanIn));
        let attention = |name: &str, context_dim| {
            let out = |vs: &VarPath, in_dim| linear(vs, in_dim, d);
            let plain = Attention::new(&vs.sub(name), [d, context_dim], config.num_heads, project, out);
            Attention { upcast: config.upcast, ..plain }
        };
        let norm = |name: &str| LayerNorm::new(&vs.sub(name), d, LAYER_NORM_EPS);
        let ff = vs.sub("ff").sub("net");
        Self {
            norm1: norm("norm1"),
            attn1: attention("attn1", d),
            norm2: norm("norm2"),
            attn2: attention("attn2", config.context_dim),
            norm3: norm("norm3"),
            proj: linear(&ff.sub(0).sub("proj"), d, 8 * d),
            out: linear(&ff.sub(2), 4 * d, d),
        }
    }

    fn forward(&self, xs: &Tensor, context: &Tensor) -> Tensor {
        let normed = self.norm1.forward(xs);
        let xs = self.attn1.forward(&normed, &normed) + xs;
        let xs = self.attn2.forward(&self.norm2.forward(&xs), context) + xs;
        let wide = self.proj.forward(&self.norm3.forward(&xs), false).chunk(2, -1);
        let gated = &wide[0] * wide[1].gelu("none");
        self.out.forward(&gated, false) + xs
    }
}

/// `proj_in` and `proj_out`.
#[derive(Debug)]
enum Projections {
    Linear { proj_in: Linear, proj_out: Linear },
    Conv { proj_in: Conv2d, proj_out: Conv2d },
}

/// Residual transformer: transformer blocks over the pixels of a map.
#[derive(Debug)]
pub(super) struct Transformer2d {
    norm: GroupNorm,
    projections: Projections,
    transformer_blocks: Vec<Shared<TransformerBlock>>,
}

impl Transformer2d {
    pub(super) fn new(vs: &VarPath, config: TransformerConfig, adapters: Option<&Adapters>) -> Self {
        let d = config.dim;
        let linear = |vs: &VarPath| Adapters::on(adapters, vs, Linear::new(vs, d, d));
        let (proj_in, proj_out) = (vs.sub("proj_in"), vs.sub("proj_out"));
        let blocks = vs.sub("transformer_blocks");
        Self {
            norm: GroupNorm::new(&vs.sub("norm"), config.groups, d, TRANSFORMER_EPS),
            projections: if config.linear {
                Projections::Linear { proj_in: linear(&proj_in), proj_out: linear(&proj_out) }
            } else {
                Projections::Conv { proj_in: conv1(&proj_in, d, d), proj_out: conv1(&proj_out, d, d) }
            },
            transformer_blocks: (0..config.num_layers)
                .map(|i| Shared::new(TransformerBlock::new(&blocks.sub(i), config, adapters)))
                .collect(),
        }
    }

    /// `xs [b, c, h, w]` and `context [b, t, context_dim]` to `[b, c, h, w]`.
    pub(super) fn forward(&self, xs: &Tensor, context: &Tensor, checkpoints: &Checkpoints) -> Tensor {
        let [b, c, h, w] = dims(xs);
        let to_tokens = |map: &Tensor| map.permute([0, 2, 3, 1]).reshape([b, h * w, c]);
        let to_map = |tokens: &Tensor| tokens.reshape([b, h, w, c]).permute([0, 3, 1, 2]).contiguous();
        let normed = self.norm.forward(xs);
        let tokens = match &self.projections {
            Projections::Linear { proj_in, .. } => proj_in.forward(&to_tokens(&normed), false),
            Projections::Conv { proj_in, .. } => to_tokens(&proj_in.forward(&normed)),
        };
        let tokens = self.transformer_blocks.iter().enumerate().fold(tokens, |tokens, (i, block)| {
            let _module = module_path::enter_at("transformer_blocks", i);
            checkpoints.run(block, &[&tokens, context], |block, inputs| block.forward(&inputs[0], &inputs[1]))
        });
        let ys = match &self.projections {
            Projections::Linear { proj_out, .. } => to_map(&proj_out.forward(&tokens, false)),
            Projections::Conv { proj_out, .. } => proj_out.forward(&to_map(&tokens)),
        };
        ys + xs
    }
}

/// A convolution with weight and bias 0, which leaves the UNet unchanged at first (ControlNet).
pub(super) fn zero_conv(vs: &VarPath, config: Conv2dConfig) -> Conv2d {
    Conv2d::with_init(vs, config, Init::Const(0.0), Some(Init::Const(0.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Device;

    #[test]
    fn sinusoids_have_published_values() {
        let values = Tensor::from_slice(&[1.0_f32, 500.0, 999.0]).to(Device::Cpu);
        let near = |table: &Tensor, at: [i64; 2], want: f64| {
            let got = table.double_value(&at);
            assert!((got - want).abs() < 2e-6, "{at:?}: {got}, expected {want}");
        };
        let table = sinusoid(&values, 320);
        for (at, want) in [
            ([0, 0], 0.540_302_3),
            ([0, 1], 0.586_503_8),
            ([0, 160], 0.841_471_0),
            ([0, 161], 0.809_946_5),
            ([1, 0], -0.883_849_3),
            ([1, 160], -0.467_771_8),
            ([2, 0], 0.999_649_8),
            ([2, 160], -0.026_460_8),
        ] {
            near(&table, at, want);
        }
        let table = sinusoid(&Tensor::from_slice(&[1024.0_f32]), 256);
        for (column, want) in [(0, 0.987_353_6), (1, -0.537_617_2), (128, -0.158_533_4), (129, -0.843_189_0)] {
            near(&table, [0, column], want);
        }
    }
}
