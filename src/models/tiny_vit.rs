//! TinyViT as SAM's `vit_t` image encoder, with its neck (Wu et al. 2022; MobileSAM and TinySAM checkpoints).
//!
//! Legend: b batch, c channels, h w rows and columns of the map, t tokens.
//!
//! Deviations from the published code: the attention biases are gathered in every pass (a cached copy, as in the
//! original, would be outdated after an optimizer step); the unused classifier (`norm_head`, `head`) is left out; the
//! size of the map follows the size of the image.

use super::image_encoder::family::{EncoderNetwork, EncoderPass, EncoderSizes, ImageEmbedding};
use super::limits::{MAX_COUNT, MAX_WIDTH, check_multiple, check_ranges};
use crate::nn::attention::split_heads;
use crate::nn::conv::Conv2dConfig;
use crate::nn::{BatchStatistics, Conv2d, Conv2dBn, LayerNorm, LayerNorm2d, Linear, Mask, attention};
use crate::tensor::autograd::checkpoint;
use crate::tensor::store::{Init, VarPath};
use crate::tensor::{Shared, Tensor, dims, module_path};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Sizes of the encoder.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Channels of the four stages.
    pub embed_dims: [i64; 4],
    /// Number of blocks of the four stages.
    pub depths: [i64; 4],
    /// Number of heads of the four stages; the first is unused (convolutions).
    pub num_heads: [i64; 4],
    /// Window sizes of the four stages; the first is unused.
    pub window_sizes: [i64; 4],
    /// Channels of the image embedding.
    pub out_dim: i64,
}

impl Config {
    /// SAM's `vit_t` (TinyViT-5M).
    pub fn vit_t() -> Self {
        Self {
            embed_dims: [64, 128, 160, 320],
            depths: [2, 2, 6, 2],
            num_heads: [2, 4, 5, 10],
            window_sizes: [7, 7, 14, 7],
            out_dim: 256,
        }
    }

    /// Strides of the three reductions. The last one keeps the size of the map.
    const MERGE_STRIDES: [i64; 3] = [2, 2, 1];
}

/// Pixels of the image per cell of the embedding, in each direction.
const STRIDE: i64 = 16;
/// Most blocks of a stage.
const MAX_DEPTH: i64 = 1 << 8;
/// Largest side of an attention window, in cells.
const MAX_WINDOW: i64 = 1 << 6;
/// Most pairs of cells in the windows of all blocks. Each pair is a number in a table.
const MAX_WINDOW_PAIRS: i64 = 1 << 22;

impl EncoderSizes for Config {
    fn stride(&self) -> i64 {
        STRIDE
    }

    fn channels(&self) -> i64 {
        self.out_dim
    }

    fn is_unused(&self, key: &str) -> bool {
        key.starts_with("norm_head.") || key.starts_with("head.")
    }

    fn check(&self) -> Result<()> {
        check_ranges(&[("model.sizes.encoder.out_dim", self.out_dim, MAX_WIDTH)])?;
        for (key, values, most) in [
            ("model.sizes.encoder.embed_dims", self.embed_dims, MAX_WIDTH),
            ("model.sizes.encoder.depths", self.depths, MAX_DEPTH),
            ("model.sizes.encoder.num_heads", self.num_heads, MAX_COUNT),
            ("model.sizes.encoder.window_sizes", self.window_sizes, MAX_WINDOW),
        ] {
            check_ranges(&values.map(|value| (key, value, most)))?;
        }
        let pairs: i64 = (1..4).map(|i| self.depths[i] * self.window_sizes[i].pow(4)).sum();
        if pairs > MAX_WINDOW_PAIRS {
            let reason = format!("the windows have {pairs} pairs of cells, {MAX_WINDOW_PAIRS} are the limit");
            let hint = "use the size of the model, usually 7";
            return Err(Error::config("model.sizes.encoder.window_sizes", reason, hint));
        }
        (1..4).try_for_each(|i| {
            check_multiple("model.sizes.encoder", "channels and heads", self.embed_dims[i], self.num_heads[i])
        })
    }
}

/// Inverted bottleneck: 1x1, depthwise 3x3, 1x1, residual.
#[derive(Debug)]
struct MbConv {
    conv1: Conv2dBn,
    conv2: Conv2dBn,
    conv3: Conv2dBn,
}

impl MbConv {
    fn new(vs: &VarPath, dim: i64) -> Self {
        let wide = 4 * dim;
        Self {
            conv1: Conv2dBn::new(&vs.sub("conv1"), Conv2dConfig::new(dim, wide, 1), 1.0),
            conv2: Conv2dBn::new(&vs.sub("conv2"), depthwise(wide, 1), 1.0),
            conv3: Conv2dBn::new(&vs.sub("conv3"), Conv2dConfig::new(wide, dim, 1), 0.0),
        }
    }

    fn forward(&self, xs: &Tensor, statistics: BatchStatistics) -> Tensor {
        let ys = self.conv1.forward(xs, statistics);
        let ys = self.conv2.forward_gelu(&ys, statistics);
        (self.conv3.forward_gelu(&ys, statistics) + xs).gelu("none")
    }
}

fn depthwise(dim: i64, stride: i64) -> Conv2dConfig {
    Conv2dConfig { stride, padding: 1, groups: dim, ..Conv2dConfig::new(dim, dim, 3) }
}

/// Reduction between two stages.
#[derive(Debug)]
struct PatchMerging {
    conv1: Conv2dBn,
    conv2: Conv2dBn,
    conv3: Conv2dBn,
}

impl PatchMerging {
    fn new(vs: &VarPath, dim: i64, out_dim: i64, stride: i64) -> Self {
        Self {
            conv1: Conv2dBn::new(&vs.sub("conv1"), Conv2dConfig::new(dim, out_dim, 1), 1.0),
            conv2: Conv2dBn::new(&vs.sub("conv2"), depthwise(out_dim, stride), 1.0),
            conv3: Conv2dBn::new(&vs.sub("conv3"), Conv2dConfig::new(out_dim, out_dim, 1), 1.0),
        }
    }

    fn forward(&self, xs: &Tensor, statistics: BatchStatistics) -> Tensor {
        let xs = self.conv1.forward(xs, statistics);
        let xs = self.conv2.forward_gelu(&xs, statistics);
        self.conv3.forward_gelu(&xs, statistics)
    }
}

/// Attention in windows, with a learned bias for each absolute offset.
#[derive(Debug)]
struct Attention {
    norm: LayerNorm,
    qkv: Linear,
    proj: Linear,
    attention_biases: Tensor,
    offsets: Tensor,
    num_heads: i64,
}

/// The distance of each pair of tokens in a window, as an index of a bias. A search builds models a hundred times.
fn offsets(window: i64) -> Arc<[i64]> {
    static KNOWN: Mutex<BTreeMap<i64, Arc<[i64]>>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let all = known.entry(window).or_insert_with(|| {
        let pairs = (0..window * window).flat_map(|p| (0..window * window).map(move |q| (p, q)));
        pairs.map(|(p, q)| (p / window - q / window).abs() * window + (p % window - q % window).abs()).collect()
    });
    Arc::clone(all)
}

impl Attention {
    fn new(vs: &VarPath, dim: i64, num_heads: i64, window: i64) -> Self {
        Self {
            norm: LayerNorm::new(&vs.sub("norm"), dim, 1e-5),
            qkv: Linear::new(&vs.sub("qkv"), dim, 3 * dim),
            proj: Linear::new(&vs.sub("proj"), dim, dim),
            attention_biases: vs.param("attention_biases", &[num_heads, window * window], Init::Const(0.0)),
            offsets: Tensor::from_slice(&offsets(window)).to_device(vs.device()),
            num_heads,
        }
    }

    /// `xs [windows, t, c]` to the same.
    fn forward(&self, xs: &Tensor) -> Tensor {
        let [n, t, c] = dims(xs);
        let head = c / self.num_heads;
        let qkv = split_heads(&self.qkv.forward(&self.norm.forward(xs), false), self.num_heads);
        // the weight rows are interleaved per head as (q, k, v)
        let [q, k, v] = [0, 1, 2].map(|part| qkv.narrow(3, part * head, head));
        let bias = self.attention_biases.index_select(1, &self.offsets).view([1, self.num_heads, t, t]);
        let ys = attention(&q, &k, &v, &Mask::Bias(&bias.to_kind(xs.kind())), 0.0);
        self.proj.forward(&ys.transpose(1, 2).reshape([n, t, c]), false)
    }
}

#[derive(Debug)]
struct Mlp {
    norm: LayerNorm,
    fc1: Linear,
    fc2: Linear,
}

impl Mlp {
    fn new(vs: &VarPath, dim: i64) -> Self {
        Self {
            norm: LayerNorm::new(&vs.sub("norm"), dim, 1e-5),
            fc1: Linear::new(&vs.sub("fc1"), dim, 4 * dim),
            fc2: Linear::new(&vs.sub("fc2"), 4 * dim, dim),
        }
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        self.fc2.forward_gelu(&self.fc1.forward(&self.norm.forward(xs), false))
    }
}

/// Windowed attention, depthwise convolution, MLP.
#[derive(Debug)]
struct TinyVitBlock {
    attn: Attention,
    local_conv: Conv2dBn,
    mlp: Mlp,
    window: i64,
}

impl TinyVitBlock {
    fn new(vs: &VarPath, dim: i64, num_heads: i64, window: i64) -> Self {
        Self {
            attn: Attention::new(&vs.sub("attn"), dim, num_heads, window),
            local_conv: Conv2dBn::new(&vs.sub("local_conv"), depthwise(dim, 1), 1.0),
            mlp: Mlp::new(&vs.sub("mlp"), dim),
            window,
        }
    }

    /// `xs [b, c, h, w]` to the same.
    fn forward(&self, xs: &Tensor, statistics: BatchStatistics) -> Tensor {
        let [_b, _c, h, w] = dims(xs);
        let maps = xs.permute([0, 2, 3, 1]);
        let maps = &maps + self.windowed(&maps, h, w);
        let xs = self.local_conv.forward(&maps.permute([0, 3, 1, 2]), statistics);
        let maps = xs.permute([0, 2, 3, 1]);
        (&maps + self.mlp.forward(&maps)).permute([0, 3, 1, 2])
    }

    /// Attention of `[b, h, w, c]` in windows. Padding cells of the last windows are not masked, as published: after
    /// the norm they equal its bias, and they take part in the softmax.
    fn windowed(&self, maps: &Tensor, h: i64, w: i64) -> Tensor {
        let [b, _h, _w, c] = dims(maps);
        let side = self.window;
        if h == side && w == side {
            return self.attn.forward(&maps.reshape([b, h * w, c])).view([b, h, w, c]);
        }
        let (down, right) = ((side - h % side) % side, (side - w % side) % side);
        let (rows, columns) = ((h + down) / side, (w + right) / side);
        let windows = maps
            .constant_pad_nd([0, 0, 0, right, 0, down])
            .view([b, rows, side, columns, side, c])
            .transpose(2, 3)
            .reshape([b * rows * columns, side * side, c]);
        self.attn
            .forward(&windows)
            .view([b, rows, columns, side, side, c])
            .transpose(2, 3)
            .reshape([b, h + down, w + right, c])
            .narrow(1, 0, h)
            .narrow(2, 0, w)
    }
}

#[derive(Debug)]
enum Block {
    Conv(MbConv),
    Attention(TinyVitBlock),
}

impl Block {
    fn forward(&self, xs: &Tensor, statistics: BatchStatistics) -> Tensor {
        match self {
            Self::Conv(block) => block.forward(xs, statistics),
            Self::Attention(block) => block.forward(xs, statistics),
        }
    }
}

#[derive(Debug)]
struct Stage {
    blocks: Vec<Shared<Block>>,
    downsample: Option<Shared<PatchMerging>>,
}

#[derive(Debug)]
struct Neck {
    reduce: Conv2d,
    norm1: LayerNorm2d,
    conv: Conv2d,
    norm2: LayerNorm2d,
}

/// Runs `part(xs)`, with activation checkpointing if `recompute`.
fn maybe_checkpoint(recompute: bool, xs: &Tensor, part: impl Fn(&Tensor) -> Tensor + Send + Sync + 'static) -> Tensor {
    if recompute { checkpoint(&[xs], move |inputs| part(&inputs[0])) } else { part(xs) }
}

/// The TinyViT image encoder.
#[derive(Debug)]
pub struct TinyVit {
    patch_embed: [Conv2dBn; 2],
    layers: Vec<Stage>,
    neck: Neck,
}

impl TinyVit {
    /// `vs` is the path that contains `patch_embed` (`image_encoder.` in a TinySAM file).
    pub fn new(vs: &VarPath, config: &Config) -> Self {
        let dims = config.embed_dims;
        let patch = vs.sub("patch_embed").sub("seq");
        let stride_2 =
            |in_dim, out_dim| Conv2dConfig { stride: 2, padding: 1, ..Conv2dConfig::new(in_dim, out_dim, 3) };
        let layers = vs.sub("layers");
        let neck = vs.sub("neck");
        let wide = Conv2dConfig { padding: 1, ..Conv2dConfig::new(config.out_dim, config.out_dim, 3) };
        Self {
            patch_embed: [
                Conv2dBn::new(&patch.sub(0), stride_2(3, dims[0] / 2), 1.0),
                Conv2dBn::new(&patch.sub(2), stride_2(dims[0] / 2, dims[0]), 1.0),
            ],
            layers: (0..4).map(|i| Self::stage(&layers.sub(i), config, i)).collect(),
            neck: Neck {
                reduce: Conv2d::no_bias(&neck.sub(0), Conv2dConfig::new(dims[3], config.out_dim, 1)),
                norm1: LayerNorm2d::new(&neck.sub(1), config.out_dim, 1e-6),
                conv: Conv2d::no_bias(&neck.sub(2), wide),
                norm2: LayerNorm2d::new(&neck.sub(3), config.out_dim, 1e-6),
            },
        }
    }

    fn stage(vs: &VarPath, config: &Config, i: usize) -> Stage {
        let dim = config.embed_dims[i];
        let blocks = (0..config.depths[i]).map(|j| {
            let vs = vs.sub("blocks").sub(j);
            Shared::new(if i == 0 {
                Block::Conv(MbConv::new(&vs, dim))
            } else {
                Block::Attention(TinyVitBlock::new(&vs, dim, config.num_heads[i], config.window_sizes[i]))
            })
        });
        let blocks = blocks.collect();
        let downsample = (i < 3).then(|| {
            let strides = Config::MERGE_STRIDES;
            Shared::new(PatchMerging::new(&vs.sub("downsample"), dim, config.embed_dims[i + 1], strides[i]))
        });
        Stage { blocks, downsample }
    }

    /// With activation checkpointing, the first blocks, over all stages, save only their inputs and are recomputed. The
    /// reduction after a stage is checkpointed if all blocks of the stage are. Ignored with batch statistics, because a
    /// second run would update them twice.
    ///
    /// # Shapes
    /// `images [b, 3, s, s]`, normalised, in the compute dtype, to `[b, out_dim, s / 16, s / 16]`.
    pub fn forward(&self, images: &Tensor, pass: EncoderPass) -> Tensor {
        let [_b, _c, _h, _w] = dims(images);
        let statistics = pass.statistics;
        // channels-last memory, which all convolutions keep: oneDNN and cuDNN need not reorder their maps. Not with
        // batch statistics, which libtorch's CPU sums less exactly in that order.
        let images = match statistics {
            BatchStatistics::Running => images.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]),
            BatchStatistics::Batch { .. } => images.shallow_clone(),
        };
        let xs = self.patch_embed[0].forward(&images, statistics);
        let mut xs = self.patch_embed[1].forward_gelu(&xs, statistics);
        let mut left = if statistics == BatchStatistics::Running { pass.checkpoint } else { 0 };
        for (i, stage) in self.layers.iter().enumerate() {
            let _module = module_path::enter_at("layers", i);
            let mut recompute = left > 0;
            for (j, block) in stage.blocks.iter().enumerate() {
                let _module = module_path::enter_at("blocks", j);
                recompute = left > 0;
                left = left.saturating_sub(1);
                let block = block.clone();
                xs = maybe_checkpoint(recompute, &xs, move |xs| block.forward(xs, statistics));
            }
            if let Some(downsample) = &stage.downsample {
                let downsample = downsample.clone();
                xs = maybe_checkpoint(recompute, &xs, move |xs| downsample.forward(xs, statistics));
            }
        }
        let xs = self.neck.norm1.forward(&self.neck.reduce.forward(&xs));
        self.neck.norm2.forward(&self.neck.conv.forward(&xs))
    }
}

impl EncoderNetwork for TinyVit {
    fn embed(&self, images: &Tensor, pass: EncoderPass) -> ImageEmbedding {
        let [_b, _c, h, w] = dims(images);
        ImageEmbedding { map: self.forward(images, pass), finer: Vec::new(), size: [h, w] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::store::{Role, Store, StoreOptions};
    use crate::tensor::{Device, Kind, no_grad, rng};

    #[test]
    fn batch_statistics_change_the_running_ones_with_the_momentum_of_pytorch() {
        let _lock = rng::TEST_LOCK.lock();
        let config = Config { depths: [1; 4], embed_dims: [8; 4], num_heads: [1; 4], out_dim: 8, ..Config::vit_t() };
        let mean = |statistics| {
            rng::seed(1);
            let store = Store::new(StoreOptions::cpu());
            let encoder = TinyVit::new(&store.root(Role::Trainable), &config);
            let images = Tensor::ones([2, 3, 32, 32], (Kind::Float, Device::Cpu));
            no_grad(|| encoder.embed(&images, EncoderPass { statistics, checkpoint: 0 }));
            store.get("patch_embed.seq.0.bn.running_mean").expect("a buffer")
        };
        let [same, batch, measured] =
            [BatchStatistics::Running, BatchStatistics::TRAIN, BatchStatistics::MEASURE].map(mean);
        let largest = |xs: Tensor| xs.abs().max().double_value(&[]);
        assert!(largest(same) == 0.0 && largest(measured.shallow_clone()) > 0.01);
        assert!(largest(batch * 10.0 - measured) < 1e-6);
    }
}
