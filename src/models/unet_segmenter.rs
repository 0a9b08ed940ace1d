//! A small U-Net (Ronneberger et al. 2015) that segments an image, given the words of a question.
//!
//! It is a second opinion in comparisons: it shares no weights and no design with PRS-Med, and is far smaller. It is
//! not a published model. Deviations from the paper: group normalisation and `SiLU`, padded convolutions, nearest-neighbour
//! upsampling, a first convolution of stride 2, and one condition. The mean of learned embeddings of the question's
//! words is added to the coarsest map, because an image may have a mask for each of several targets and the question
//! names the target. Order and grammar of the words are not used.
//!
//! Legend: b batch, c channels, h and w height and width of a map, s side of the image, n words.

use crate::nn::conv::Conv2dConfig;
use crate::nn::{Conv2d, Embedding, GroupNorm};
use crate::tensor::store::VarPath;
use crate::tensor::{Kind, Tensor, dims};

/// Standard deviation of new word embeddings: small beside the maps that they are added to.
const WORD_STD: f64 = 0.1;
/// Epsilon of the group norms.
const EPS: f64 = 1e-5;

/// Sizes of the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Channels at each resolution, the finest (half of the image's) first.
    pub widths: Vec<i64>,
    /// Groups of the norms; divides all widths.
    pub groups: i64,
    /// Number of word embeddings.
    pub num_words: i64,
}

impl Config {
    /// Half a million weights, most of them in convolutions.
    pub fn small() -> Self {
        Self { widths: vec![16, 32, 64, 128], groups: 8, num_words: 1024 }
    }

    /// The sides of images are multiples of this.
    pub fn stride(&self) -> i64 {
        1 << self.widths.len()
    }
}

/// Two 3x3 convolutions, each followed by a norm and `SiLU`.
#[derive(Debug)]
struct Block {
    conv1: Conv2d,
    norm1: GroupNorm,
    conv2: Conv2d,
    norm2: GroupNorm,
}

impl Block {
    fn new(vs: &VarPath, in_dim: i64, out_dim: i64, stride: i64, groups: i64) -> Self {
        let conv = |name: &str, from: i64, stride: i64| {
            let config = Conv2dConfig { padding: 1, stride, ..Conv2dConfig::new(from, out_dim, 3) };
            Conv2d::new(&vs.sub(name), config)
        };
        Self {
            conv1: conv("conv1", in_dim, stride),
            norm1: GroupNorm::new(&vs.sub("norm1"), groups, out_dim, EPS),
            conv2: conv("conv2", out_dim, 1),
            norm2: GroupNorm::new(&vs.sub("norm2"), groups, out_dim, EPS),
        }
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        let xs = self.norm1.forward(&self.conv1.forward(xs)).silu();
        self.norm2.forward(&self.conv2.forward(&xs)).silu()
    }
}

/// The network.
#[derive(Debug)]
pub struct UnetSegmenter {
    down: Vec<Block>,
    words: Embedding,
    up: Vec<Block>,
    head: Conv2d,
}

impl UnetSegmenter {
    /// A network with new weights.
    pub fn new(vs: &VarPath, config: &Config) -> Self {
        let Config { widths, groups, num_words } = config;
        let inputs = std::iter::once(3).chain(widths.iter().copied());
        let down = inputs.zip(widths).enumerate().map(|(i, (from, &to))| {
            let stride = if i == 0 { 2 } else { 1 };
            Block::new(&vs.sub("down").sub(i), from, to, stride, *groups)
        });
        let down = down.collect();
        let coarsest = widths.last().copied().unwrap_or(0);
        // from coarse to fine: the upsampled map and the map of the way down
        let up = widths
            .windows(2)
            .rev()
            .enumerate()
            .map(|(i, pair)| Block::new(&vs.sub("up").sub(i), pair[0] + pair[1], pair[0], 1, *groups));
        Self {
            down,
            words: Embedding::new(&vs.sub("words"), *num_words, coarsest, WORD_STD),
            up: up.collect(),
            head: Conv2d::new(&vs.sub("head"), Conv2dConfig::new(widths.first().copied().unwrap_or(0), 1, 1)),
        }
    }

    /// Mask logits.
    ///
    /// # Shapes
    /// `image [b, 3, s, s]` in 0..=255; `words [b, n]` i64; `keep [b, n]` bool, true = a word (at least one in each
    /// row); to `[b, 1, s, s]` fp32. Arithmetic is in `kind`.
    pub fn forward(&self, image: &Tensor, words: &Tensor, keep: &Tensor, kind: Kind) -> Tensor {
        let [_b, _three, height, width] = dims(image);
        // about zero mean and unit variance for natural images
        let mut xs = ((image.to_kind(Kind::Float) / 255.0 - 0.5) / 0.25).to_kind(kind);
        let mut skipped = Vec::with_capacity(self.down.len());
        for (i, block) in self.down.iter().enumerate() {
            if i > 0 {
                xs = xs.max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false);
            }
            xs = block.forward(&xs);
            skipped.push(xs.shallow_clone());
        }
        skipped.pop();
        xs = &xs + self.condition(words, keep).to_kind(kind).unsqueeze(-1).unsqueeze(-1);
        for block in &self.up {
            let Some(fine) = skipped.pop() else { break };
            let [_b, _c, h, w] = dims(&fine);
            xs = block.forward(&Tensor::cat(&[xs.upsample_nearest2d([h, w], None, None), fine], 1));
        }
        let logits = self.head.forward(&xs).to_kind(Kind::Float);
        logits.upsample_bilinear2d([height, width], false, None, None)
    }

    /// Mean embedding of the words, `[b, c]` fp32.
    fn condition(&self, words: &Tensor, keep: &Tensor) -> Tensor {
        let keep = keep.to_kind(Kind::Float).unsqueeze(-1);
        let over = [1_i64];
        let sum = (self.words.forward(words) * &keep).sum_dim_intlist(over.as_slice(), false, Kind::Float);
        sum / keep.sum_dim_intlist(over.as_slice(), false, Kind::Float)
    }
}
