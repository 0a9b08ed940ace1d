//! A small image encoder of another family, for tests: stride 8, a finer map, and only its last layer is trained.

use super::image_encoder::family::{EncoderNetwork, EncoderPass, EncoderSizes, ImageEmbedding, TrainedWeights};
use super::limits::{MAX_WIDTH, check_ranges};
use crate::Result;
use crate::data::image::Fit;
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
    fn fit(&self) -> Fit {
        Fit::Corner([124, 116, 104])
    }
    fn trained(&self) -> TrainedWeights {
        TrainedWeights::Adapters
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

impl EncoderNetwork for ToyEncoder {
    fn embed(&self, images: &Tensor, _pass: EncoderPass) -> ImageEmbedding {
        let [_b, _c, h, w] = dims(images);
        let finer = self.patches.forward(images).relu();
        ImageEmbedding { map: self.merge.forward(&finer), finer: vec![finer], size: [h, w] }
    }
}
