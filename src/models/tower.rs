//! The vision tower of a base with its projector: the kinds that exist, and what all of them answer.

use crate::Result;
use crate::models::clip::{self, ClipVision};
use crate::models::limits::{
    MAX_COUNT, MAX_INNER_WIDTH, MAX_LAYERS, MAX_SIDE, MAX_WIDTH, check_multiple, check_ranges,
};
use crate::models::llava::Projector;
use crate::tensor::host_weights::HostWeights;
use crate::tensor::store::VarPath;
use crate::tensor::{Kind, Tensor, module_path};

/// The tokens of one image in a sequence of the language model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageSpan {
    /// Tokens that replace the image's id in the text.
    pub tokens: usize,
    /// Rows and columns of the tokens, if positions have the axes time, height and width. Else each token has the next
    /// position.
    pub grid: Option<[usize; 2]>,
}

impl ImageSpan {
    /// A span of `tokens` tokens, each at the next position.
    pub fn in_a_row(tokens: usize) -> Self {
        Self { tokens, grid: None }
    }

    /// Position of the first token after the image, counted from the image's first one.
    pub fn next_position(self) -> usize {
        self.grid.map_or(self.tokens, |[rows, columns]| rows.max(columns))
    }
}

/// Sizes of a vision tower.
#[derive(Clone, PartialEq, serde::Serialize)]
#[serde(untagged)]
pub enum Config {
    /// CLIP's ViT with LLaVA's projector.
    Clip(clip::Config),
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self::Clip(config) = self;
        config.fmt(f)
    }
}

impl<'de> serde::Deserialize<'de> for Config {
    /// The fields are those of the tower's own `config.json`.
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        clip::Config::deserialize(deserializer).map(Self::Clip)
    }
}

impl Config {
    /// Width of the features.
    pub fn width(&self) -> i64 {
        let Self::Clip(config) = self;
        config.hidden_size
    }

    /// Side of the square input in pixels.
    pub fn image_size(&self) -> i64 {
        let Self::Clip(config) = self;
        config.image_size
    }

    /// Padding colour of images that are not square.
    pub fn padding(&self) -> [u8; 3] {
        match self {
            Self::Clip(_) => clip::PADDING,
        }
    }

    /// Most tokens of an image.
    pub fn max_tokens(&self) -> i64 {
        let Self::Clip(config) = self;
        config.num_patches()
    }

    /// The spans of so many images of a batch.
    pub fn spans(&self, images: usize) -> Vec<ImageSpan> {
        let Self::Clip(config) = self;
        let tokens = usize::try_from(config.num_patches()).expect("a count of tokens");
        vec![ImageSpan::in_a_row(tokens); images]
    }

    /// Checks that the sizes are possible and fit together.
    ///
    /// # Errors
    /// [`crate::Error::Config`] naming the setting.
    pub fn check(&self) -> Result<()> {
        let Self::Clip(config) = self;
        check_ranges(&[
            ("model.sizes.clip.image_size", config.image_size, MAX_SIDE),
            ("model.sizes.clip.patch_size", config.patch_size, MAX_SIDE),
            ("model.sizes.clip.hidden_size", config.hidden_size, MAX_WIDTH),
            ("model.sizes.clip.intermediate_size", config.intermediate_size, MAX_INNER_WIDTH),
            ("model.sizes.clip.num_hidden_layers", config.num_hidden_layers, MAX_LAYERS),
            ("model.sizes.clip.num_attention_heads", config.num_attention_heads, MAX_COUNT),
        ])?;
        check_multiple("model.sizes.clip", "image and patch", config.image_size, config.patch_size)?;
        check_multiple("model.sizes.clip", "width and heads", config.hidden_size, config.num_attention_heads)
    }
}

/// A vision tower with its projector.
#[derive(Debug)]
pub enum Tower {
    /// CLIP's ViT with LLaVA's projector.
    Clip {
        /// The tower.
        vision: Box<ClipVision>,
        /// From its width to the language model's.
        projector: Projector,
        /// Channel means and standard deviations of its images.
        statistics: [Tensor; 2],
    },
}

impl Tower {
    /// The paths are those of the tower and of the projector, `width` that of the language model. `on_host`: the weights of
    /// the layers stay in host memory.
    pub fn new([tower, projector]: [&VarPath; 2], config: &Config, width: i64, on_host: bool) -> Self {
        let Config::Clip(sizes) = config;
        let vision = {
            let _module = module_path::enter("vision_tower");
            Box::new(ClipVision::new(tower, sizes, on_host))
        };
        let _module = module_path::enter("projector");
        let statistics = clip::pixel_statistics(tower.device());
        Self::Clip { vision, projector: Projector::new(projector, sizes.hidden_size, width), statistics }
    }

    /// Frozen weights in host memory.
    pub fn host_weights(&self) -> &HostWeights {
        let Self::Clip { vision, .. } = self;
        vision.host_weights()
    }

    /// Features of images, before the projector.
    ///
    /// # Shapes
    /// `images [b, 3, s, s]` u8, or floats that are normalised, on the tower's device; to `[b, p, w]` in `compute`.
    pub fn features(&self, images: &Tensor, compute: Kind) -> Tensor {
        let Self::Clip { vision, statistics, .. } = self;
        let normalised = (images.kind() == Kind::Uint8).then(|| clip::normalise(images, statistics));
        vision.forward(&normalised.as_ref().unwrap_or(images).to_kind(compute))
    }

    /// Tokens for the language model.
    ///
    /// # Shapes
    /// `features [b, p, w]` to `[b, p, d]`.
    pub fn tokens(&self, features: &Tensor) -> Tensor {
        let Self::Clip { projector, .. } = self;
        projector.forward(features)
    }
}
