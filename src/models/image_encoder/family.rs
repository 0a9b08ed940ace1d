//! What a family of image encoders provides.

use crate::Result;
use crate::data::image::Fit;
use crate::nn::BatchStatistics;
use crate::tensor::Tensor;

/// Facts about an image encoder that are known from its sizes.
pub trait EncoderSizes {
    /// Pixels of the image per cell of the map, in each direction.
    fn stride(&self) -> i64;

    /// Channels of the map.
    fn channels(&self) -> i64;

    /// Means and standard deviations of the channels of its images, of values in 0..=1: those of ImageNet.
    fn pixel_statistics(&self) -> [[f32; 3]; 2] {
        [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]
    }

    /// How images fill its square.
    fn fit(&self) -> Fit {
        Fit::Stretch
    }

    /// Weights that a training changes.
    fn trained(&self) -> TrainedWeights {
        TrainedWeights::All
    }

    /// Whether a key of published weights, without `image_encoder.`, belongs to a part that is not built.
    fn is_unused(&self, _key: &str) -> bool {
        false
    }

    /// Refuses sizes that no encoder has, or that contradict each other.
    ///
    /// # Errors
    /// [`crate::Error::Config`].
    fn check(&self) -> Result<()>;
}

/// Weights of an image encoder that a training changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrainedWeights {
    /// None: the encoder runs without gradients.
    Frozen,
    /// Those that the encoder builds with [`crate::tensor::store::Role::Trainable`].
    Adapters,
    /// All.
    All,
}

/// A network that embeds images.
pub trait EncoderNetwork: std::fmt::Debug {
    /// # Shapes
    /// `images [b, 3, h, w]`, normalised, in the compute dtype.
    fn embed(&self, images: &Tensor, pass: EncoderPass) -> ImageEmbedding;
}

/// Settings of a pass through an image encoder.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EncoderPass {
    /// Source of batch normalisation's statistics, in encoders that have it.
    pub statistics: BatchStatistics,
    /// Number of first blocks with activation checkpointing, as the encoder counts them.
    pub checkpoint: usize,
}

/// Images as an encoder represents them.
#[derive(Debug)]
pub struct ImageEmbedding {
    /// `[b, c, h, w]`.
    pub map: Tensor,
    /// Maps with more rows and columns, the finest first; empty if the encoder has none.
    pub finer: Vec<Tensor>,
    /// Rows and columns of the images, in pixels.
    pub size: [i64; 2],
}

impl ImageEmbedding {
    /// All maps.
    pub fn maps(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.map).chain(&self.finer)
    }

    /// The same maps, each changed by `f`.
    #[must_use]
    pub fn map_each(&self, f: impl Fn(&Tensor) -> Tensor) -> Self {
        Self { map: f(&self.map), finer: self.finer.iter().map(f).collect(), size: self.size }
    }
}
