//! A small mask head of another family, for tests: two masks of each question, from the finer map if there is one.

use super::image_encoder::family::ImageEmbedding;
use super::limits::{MAX_WIDTH, check_ranges};
use super::mask_head::family::{Head, HeadOptions, HeadPrompts, HeadSizes};
use crate::Result;
use crate::nn::Linear;
use crate::tensor::store::VarPath;
use crate::tensor::{Kind, Tensor, dims};

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub prompt_dim: i64,
    pub image_dim: i64,
}

impl HeadSizes for Config {
    fn prompt_dim(&self) -> i64 {
        self.prompt_dim
    }

    fn image_dim(&self) -> i64 {
        self.image_dim
    }

    fn masks(&self) -> usize {
        2
    }

    fn follow(&mut self, _options: &HeadOptions) {}

    fn check(&self) -> Result<()> {
        check_ranges(&[("model.sizes.head.image_dim", self.image_dim, MAX_WIDTH)])
    }
}

#[derive(Debug)]
pub struct ToyHead(Linear);

impl ToyHead {
    pub fn new(vs: &VarPath, config: &Config) -> Self {
        Self(Linear::new(&vs.sub("weights"), config.prompt_dim, 2 * config.image_dim))
    }
}

impl Head for ToyHead {
    fn logits(&self, embedding: &ImageEmbedding, prompts: &HeadPrompts, _train: bool) -> Tensor {
        let map = embedding.finer.first().unwrap_or(&embedding.map);
        let [q, c, h, w] = dims(map);
        let question = prompts.states.mean_dim(1, false, prompts.states.kind());
        self.0.forward(&question, false).view([q, 2, c]).bmm(&map.flatten(2, 3)).view([q, 2, h, w])
    }

    fn enlarge(&self, logits: &Tensor, size: [i64; 2]) -> Tensor {
        logits.to_kind(Kind::Float).upsample_bilinear2d(size, false, None, None)
    }
}
