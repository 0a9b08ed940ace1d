//! A small image encoder of another family, for tests: stride 8, a finer map, and only its last layer is trained.

use super::image_encoder::family::{Embedding, Encoder, EncoderSizes, Pass, Trained};
use super::limits::{MAX_WIDTH, check_ranges};
use crate::Result;
use crate::nn::Conv2d;
use crate::nn::conv::Conv2dConfig;
use crate::tensor::store::{Role, VarPath};
use crate::tensor::{Tensor, dims};

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub width: i64,
}

impl EncoderSizes for Config {
    fn stride(&self) -> i64 {
        8
    }

    fn channels(&self) -> i64 {
        self.width
    }

    fn trained(&self) -> Trained {
        Trained::Adapters
    }

    fn check(&self) -> Result<()> {
        check_ranges(&[("model.sizes.encoder.width", self.width, MAX_WIDTH)])
    }
}

#[derive(Debug)]
pub struct ToyEncoder {
    patches: Conv2d,
    merge: Conv2d,
}

impl ToyEncoder {
    pub fn new(vs: &VarPath, config: &Config) -> Self {
        let conv = |from, stride| Conv2dConfig { stride, ..Conv2dConfig::new(from, config.width, stride) };
        let adapter = vs.with_role(Role::Trainable).sub("merge");
        Self {
            patches: Conv2d::new(&vs.sub("patches"), conv(3, 4)),
            merge: Conv2d::new(&adapter, conv(config.width, 2)),
        }
    }
}

impl Encoder for ToyEncoder {
    fn embed(&self, images: &Tensor, _pass: Pass) -> Embedding {
        let [_b, _c, h, w] = dims(images);
        let finer = self.patches.forward(images).relu();
        Embedding { map: self.merge.forward(&finer), finer: vec![finer], size: [h, w] }
    }
}
