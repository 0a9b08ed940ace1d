//! Settings of the model (`model.*`) and of the input pipeline (`data.*`).

use super::Semantics;
use crate::data::classical::Augment;
use crate::data::labels::Labels;
use crate::data::mixing_sampler::Ratio;
use crate::data::split::Fold;
use crate::models::base::{Family, LLAVA_MED, Parts};
use crate::models::decoder::{self, PackedAttention};
use crate::models::{image_encoder, mask_head, tower};
use crate::nn::Quantization;
use crate::setting::settings;
use crate::trainer::FirstLayers;

/// Value of `model.base` and `model.image_encoder` for random weights.
pub const RANDOM: &str = "random";

settings! {
    /// Settings of the model (`model.*`).
    pub struct ModelConfig in "model" {
        /// `reference` is the published arithmetic, `corrected` the same without its mistakes.
        semantics: Semantics = Semantics::Corrected, results(Changes), resume(Fixed);
        /// Side of the segmenter's square input in pixels.
        image_size: i64 = 1024, results(Changes), resume(Fixed), range(16.0..), multiple_of(16),
            memory("activations of the encoder and of the mask grow with its square");
        /// Trained run that the training starts from: a run folder, a checkpoint, a published folder or
        /// `hub:owner/name`; empty = none. Its classes may be others.
        init: String = String::new(), results(Changes), resume(Fixed);
        /// Language model with vision tower and projector: `hub:owner/name[@rev]`, a folder, or `random`.
        base: String = LLAVA_MED.into(), results(Changes), resume(Fixed);
        /// A separate CLIP repository or folder; empty = the tower inside `model.base`.
        vision_tower: String = String::new(), results(Changes), resume(Fixed);
        /// TinySAM or MobileSAM weights: a file or folder, `hub:owner/name` with one weight file,
        /// `hub:owner/name/FILE`, or `random`.
        image_encoder: String = "hub:merve/tinysam".into(), results(Changes), resume(Fixed);
        /// How the frozen layers of the language model are stored: `none` (in the dtype of `train.precision`), `nf4` (4
        /// bits and a scale per 64 weights) or `nf4-double` (the scales in 8 bits too). Embeddings, norms, head,
        /// projector and tower are not quantized.
        quantization: Quantization = Quantization::None, results(Changes), resume(Warn),
            memory("frozen layers take about 4.5 (`nf4`) or 4.1 (`nf4-double`) bits per weight"),
            saves_at("nf4", "frozen layers in 4 bits"),
            searched(8, &[
                ("none", ""),
                ("nf4", "frozen layers in 4 bits"),
                ("nf4-double", "frozen layers in 4 bits with 8-bit scales")
            ]);
        /// First layers of the language model whose frozen weights stay in host memory: `none`, `full` (all), or their
        /// number. Each micro-batch copies them to the GPU twice, one layer ahead of their use, and recomputes these layers
        /// in the backward pass as `train.checkpointing` does. Generation copies them for every token.
        stream_layers: FirstLayers = FirstLayers::None, results(Same), resume(Free),
            memory("frozen layers move from the GPU to pinned host memory, except two at a time"),
            saves_at("full", "copies frozen layers to the GPU in each step"),
            searched(4, &[("none", ""), ("full", "weights of {} in host memory")]);
        /// Keep the layers of the vision tower in host memory too, and copy them to the GPU for each batch of images.
        stream_vision: bool = false, results(Same), resume(Free),
            memory("the vision tower moves from the GPU to pinned host memory, except two layers at a time"),
            saves_at("true", "copies the vision tower to the GPU for each batch"),
            searched(5, &[("false", ""), ("true", "vision tower in host memory")]);
        /// With several processes, divide the frozen layers of the language model among them: each process keeps its part,
        /// and collects one layer ahead of its use, twice for each micro-batch. Recomputes all layers in the backward pass
        /// as `train.checkpointing` does. Without effect on one process. With `model.stream_layers` the parts of these
        /// layers stay in host memory.
        divide_layers: bool = false, results(Same), resume(Free),
            memory("each process keeps its part of the frozen layers, and two whole layers at a time");
        /// Attention of several questions about one image, which share its tokens: `mask` is one call with a mask that
        /// hides the other questions. `flash` is one call of the flash kernel without a mask; it computes no hidden scores
        /// and needs bf16 or fp16 and a GPU of compute capability 8.0 or more (on the CPU it computes one question after
        /// another). `auto` is `flash` on GPUs that support it, else `mask`.
        packed_attention: PackedAttention = PackedAttention::Auto, results(Rounding), resume(Free),
            memory("`flash` repeats the keys and values of the image for each question while it runs; `mask` repeats them for \
                    each head, and needs a mask");
        /// Train the language model, tower and projector too. Only for models that start from random weights.
        train_base: bool = false, results(Changes), resume(Fixed),
            memory("gradients and optimizer state of the whole language model");
        /// Statistics of batch normalisation in training: `frozen` (the loaded ones) or `batch` (of each micro-batch,
        /// as published).
        batch_norm: BatchNorm = BatchNorm::Frozen, results(Changes), resume(Fixed);
        /// Published mask decoder.
        decoder: mask_head::Version = mask_head::Version::V5, results(Changes), resume(Fixed);
        /// Dropout of the mask decoder.
        decoder_dropout: f64 = 0.1, results(Changes), resume(Fixed), range(0.0..1.0);
        /// Add fixed position encodings to the image cells of the mask decoder; the published decoder has none. Helps
        /// to distinguish the left lesion from the right one when training from random weights.
        decoder_positions: bool = false, results(Changes), resume(Fixed);
        /// Let the words of answers follow the mask: the model paints first, and a small network adds the place and size of
        /// the painted mask to the states that become words. It trains on the true masks, by a text loss of its own, and
        /// changes no gradient of the other parts. Answers then agree with their masks, and with masks that a user has
        /// corrected. Without effect with `model.semantics=reference`, whose masks depend on the words.
        answer_reads_mask: bool = false, results(Changes), resume(Fixed);
        /// Factor of the text loss.
        text_loss_weight: f64 = 1.0, results(Changes), resume(Fixed), range(0.0..);
        /// Factor of the class loss.
        class_loss_weight: f64 = 0.5, results(Changes), resume(Fixed), range(0.0..);
        /// Number of first epochs with a class loss.
        class_loss_epochs: u64 = 5, results(Changes), resume(Fixed);
        /// Longest text in token ids (the image counts as one); longer texts are cut. Published: 512. Texts of PRS-Med
        /// have at most about 100.
        max_text_tokens: usize = 192, results(Changes), resume(Fixed), range(1.0..),
            memory("activations of the language model grow with the length of texts");
        /// Sizes of parts that start from random weights. Parts with weights have their own sizes.
        sizes: Option<Sizes> = None, results(Changes), resume(Fixed);
    }
}

impl ModelConfig {
    /// Whether the words of answers follow the masks.
    pub fn reads_masks(&self) -> bool {
        self.answer_reads_mask && self.semantics.hides_answer()
    }

    /// Options of the mask head.
    pub(super) fn head_options(&self) -> mask_head::HeadOptions {
        mask_head::HeadOptions {
            version: self.decoder,
            dropout: self.decoder_dropout,
            attention_dropout: self.semantics.drops_attention(),
            positions: self.decoder_positions,
            initial_bias: self.semantics.initial_bias(),
        }
    }
}

/// Statistics of batch normalisation in training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BatchNorm {
    /// The running statistics stay as loaded (measured once on the first samples when the encoder starts from random
    /// weights). A gradient then does not depend on how samples are grouped into micro-batches.
    Frozen,
    /// The statistics of each micro-batch, as published.
    Batch,
}

/// Sizes of a model that starts from random weights.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sizes {
    /// Family of the base.
    #[serde(default, skip_serializing_if = "Family::is_default")]
    pub family: &'static Family,
    /// Vision tower.
    #[serde(rename = "clip")]
    pub tower: tower::Config,
    /// Language model; `vocab_size` is replaced by the tokenizer's.
    pub llm: decoder::Config,
    /// Image encoder.
    pub encoder: image_encoder::Config,
    /// Mask head of another family than PRS-Med's. The sizes of PRS-Med's are below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<mask_head::Config>,
    /// Width of the decoder's prompt MLP.
    pub decoder_hidden_dim: i64,
    /// Heads of the decoder's cross- and self-attention.
    pub decoder_heads: [i64; 2],
    /// Pieces of a tokenizer trained on the data's texts.
    pub vocab_size: usize,
}

impl Sizes {
    /// The parts of a base with random weights and a vocabulary of `vocab_size` tokens.
    pub fn base(&self, vocab_size: i64) -> Parts {
        let llm = decoder::Config { vocab_size, ..self.llm.clone() };
        Parts { family: self.family, tower: self.tower.clone(), llm }
    }
}

/// Vision feature cache: location of the frozen tower's cached output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheVision {
    /// No cache: features are computed in every step.
    Off,
    /// In host memory, until the run ends.
    Ram,
    /// In a memory-mapped file of the cache folder, for later runs too.
    Disk,
}

settings! {
    /// Settings of the input pipeline (`data.*`).
    pub struct DataConfig in "data" {
        /// Decoding threads. 0 = one per core, at most 8, when a GPU computes; a quarter of the cores when the CPU
        /// computes.
        workers: usize = 0, results(Same), resume(Free);
        /// Micro-batches prepared in advance.
        prefetch: usize = 4, results(Same), resume(Free), range(1.0..), memory("host: this many micro-batches");
        /// Host memory for preprocessed images, MiB; 0 = decode every image in every epoch.
        cache_mib: usize = 0, results(Same), resume(Free), memory("host: this many MiB");
        /// Most questions about one image that share its vision features in one sequence. Above 1, `train.micro_batch`
        /// counts images, and `model.batch_norm=frozen` and `model.semantics=corrected` are needed.
        questions_per_image was "questions_per_picture": usize = 3, results(Changes), resume(Fixed), range(1.0..),
            memory("activations grow with it, less than with `train.micro_batch`");
        /// Keep the output of the frozen vision tower for each image: `off`, `ram` (until the run ends) or `disk` (in
        /// the cache folder, for later runs too).
        cache_vision: CacheVision = CacheVision::Off, results(Same), resume(Free),
            memory("host (`ram`) or disk (`disk`): up to `data.cache_vision_mib`");
        /// Largest vision feature cache, MiB. A full cache keeps its entries. 4096 MiB hold 3600 images of LLaVA-Med in
        /// bf16.
        cache_vision_mib: usize = 4096, results(Same), resume(Free), memory("host or disk: at most this many MiB");
        /// Augmentation of training samples, new in every epoch: `none`, `flip_rotate` (flips and quarter turns) or
        /// `classical` (also rotation, scale, elastic deformation, intensities, noise, blur). Texts are updated to match; if a text
        /// cannot be updated safely, the image is not flipped, rotated or deformed.
        augment: Augment = Augment::None, results(Changes), resume(Warn),
            memory("host: `flip_rotate` keeps images for training and validation in separate caches");
        /// Training and validation rows that may be skipped because their image or mask became unreadable during the run;
        /// one more ends it. 0 = the first one ends it.
        max_bad_samples: usize = 10, results(Same), resume(Free);
        /// Labels of masks that are foreground, for example `1,3`; all other values are background. Empty: each mask has
        /// one label, and a mask with several labels is an error.
        labels: Labels = Labels::NONE, results(Changes), resume(Fixed);
        /// Synthetic rows (from extra data roots) per real row in an epoch, or `all` of them. With several questions
        /// per sequence, images are counted instead of rows.
        synthetic_ratio: Ratio = Ratio::All, results(Changes), resume(Fixed);
        /// Part of the training after which only real rows are used.
        synthetic_until: f64 = 1.0, results(Changes), resume(Warn), range(0.0..=1.0);
        /// Part of the training images that is kept for validation when the data has no `val` rows. Images of a patient stay
        /// together.
        val_frac: f64 = 0.1, results(Changes), resume(Fixed), range(0.0..1.0);
        /// Cross-validation: divides training and validation images into so many folds, of which `data.fold` is validated and
        /// the others are trained; 0 = off. Images of a patient stay together, and folds do not depend on the seed. Test rows
        /// are not part of it.
        folds: usize = 0, results(Changes), resume(Fixed);
        /// The fold that is validated, from 0.
        fold: usize = 0, results(Changes), resume(Fixed);
        /// Most training rows, spread evenly over all rows; 0 = all. Useful to check that a model can fit a few
        /// samples.
        max_train_rows: usize = 0, results(Changes), resume(Fixed);
        /// Most rows used for validation; 0 = all.
        max_val_rows: usize = 0, results(Same), resume(Free);
    }
}

impl DataConfig {
    /// The fold that is validated, if there are folds.
    pub fn own_fold(&self) -> Option<Fold> {
        (self.folds > 0).then_some(Fold { number: self.fold, of: self.folds })
    }
}
