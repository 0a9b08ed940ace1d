//! The training engine: accumulation, precision, optimizer, schedule, moving average, checkpoints, resume, memory profile.
//!
//! It knows only the [`Task`] trait. Read [`run()`] from top to bottom for what a training run is.

pub mod checkpoint;
pub mod ema;
pub mod graph;
pub mod optimizer;
pub mod precision;
pub mod profile;
pub mod records;
pub mod recovery;
pub mod run;
pub mod schedule;
mod waiting;

#[cfg(test)]
mod fixture;

pub use run::{Outcome, run};

use crate::Result;
use crate::tensor::store::{Entry, Role};
use crate::tensor::weights::Staged;
use crate::tensor::{Tensor, kernels};
use precision::Precision;
use profile::Component;

/// A tensor that is trained: fp32, requires a gradient.
#[derive(Debug)]
pub struct Parameter {
    /// `FILE/KEY`.
    pub name: String,
    /// The master copy.
    pub tensor: Tensor,
}

/// How much of an effective batch something is; losses are averaged over the whole batch, not over micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Weight {
    /// Images with their question.
    pub samples: f64,
    /// Supervised text tokens.
    pub tokens: f64,
}

impl std::iter::Sum for Weight {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |a, b| Self { samples: a.samples + b.samples, tokens: a.tokens + b.tokens })
    }
}

/// The loss of one micro-batch, already scaled to its share of the effective batch.
#[derive(Debug)]
pub struct Loss {
    /// Scalar to differentiate.
    pub total: Tensor,
    /// Named parts as scalars without a graph, same scaling.
    pub parts: Vec<(&'static str, Tensor)>,
}

/// A validation result.
#[derive(Debug, Clone, PartialEq)]
pub struct Validation {
    /// What "best" means; higher is better.
    pub score: f64,
    /// Named values for the records.
    pub values: Vec<(String, f64)>,
}

/// The micro-batches of one optimizer step after another.
pub type Batches<'a, B> = Box<dyn Iterator<Item = Result<Vec<B>>> + 'a>;

/// What a training job must offer.
pub trait Task {
    /// One micro-batch.
    type Batch;

    /// All trained tensors, always in the same order.
    fn parameters(&self) -> Vec<Parameter>;

    /// The parts of the model for a memory profile: by default one, of the trained tensors alone.
    fn components(&self) -> Vec<Component> {
        let entry = |p: Parameter| Entry { name: p.name, tensor: p.tensor, role: Role::Trainable };
        vec![Component { name: "model", entries: self.parameters().into_iter().map(entry).collect() }]
    }

    /// Optimizer steps of one epoch.
    fn steps_per_epoch(&self) -> u64;

    /// The effective batches of `epoch` from step `first` on. Depends on the task's seed and these numbers alone.
    ///
    /// # Errors
    /// When reading cannot start; items carry errors of single samples.
    fn batches(&self, epoch: u64, first: u64) -> Result<Batches<'_, Self::Batch>>;

    /// How much of the effective batch `batch` is.
    fn weight(&self, batch: &Self::Batch) -> Weight;

    /// The loss of `batch` as its share of an effective batch weighing `whole`.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    fn loss(&self, batch: &Self::Batch, whole: Weight, epoch: u64) -> Result<Loss>;

    /// `batch` as tensors of a bucket's sizes, with the loss that [`Task::loss`] has for them; `None` where its pass cannot be
    /// recorded.
    ///
    /// # Errors
    /// As [`Task::loss`].
    fn recordable(&self, batch: &Self::Batch, whole: Weight, epoch: u64) -> Result<Option<graph::Recordable<'_>>> {
        let _ = (batch, whole, epoch);
        Ok(None)
    }

    /// Something that happened in the last step and is worth a line, once.
    fn note(&self) -> Option<String> {
        None
    }

    /// The same samples in the same order as batches of at most `most`, in the unit of [`TrainConfig::micro_batch`]: what is
    /// tried when memory runs out. `None` for a task whose batches cannot be split.
    fn split(&self, _batch: &Self::Batch, _most: usize) -> Option<Vec<Self::Batch>> {
        None
    }

    /// Scores the current weights; `None` when there is nothing to validate on.
    ///
    /// # Errors
    /// As [`Task::loss`].
    fn validate(&self, observer: &dyn crate::event::Observer) -> Result<Option<Validation>>;

    /// Writes weights and everything needed to use them into a checkpoint folder.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    fn save(&self, folder: &mut Staged) -> Result<()>;

    /// Reads weights back from a checkpoint folder.
    ///
    /// # Errors
    /// [`crate::Error::Weights`].
    fn load(&self, folder: &std::path::Path) -> Result<()>;
}

/// A task that can be run without data, to plan its memory or to measure it.
pub trait Rehearse: Task {
    /// A micro-batch of full size whose numbers mean nothing; `seen` = the task has kept what it can of such a batch from an
    /// epoch before.
    fn example(&self, seen: bool) -> Self::Batch;

    /// Whether the batches of the next step are on the device while a step runs.
    fn sends_ahead(&self) -> bool {
        false
    }

    /// Whether a step on batches that were seen before takes another way.
    fn keeps(&self) -> bool {
        false
    }

    /// What a new run does to new weights before its first step.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    fn calibrate(&self) -> crate::Result<()>;

    /// Uses the trained weights once as users do, on an example of full size.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    fn predict(&self) -> crate::Result<()>;
}

/// Settings of the engine (`train.*`).
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Pictures in one forward and backward pass, 1 or more, each with up to `data.questions_per_picture` questions.
    /// Activations grow with it.
    pub micro_batch: usize,
    /// Micro-batches per optimizer step, 1 or more. The effective batch is `micro_batch * accumulation`.
    pub accumulation: usize,
    /// Passes over the training rows.
    pub epochs: u64,
    /// Stop after this many optimizer steps; 0 = no limit.
    pub max_steps: u64,
    /// Save `last/` every so many optimizer steps; 0 = after each epoch only.
    pub checkpoint_every_steps: u64,
    /// Validate every so many epochs; 0 = never.
    pub validate_every_epochs: u64,
    /// Stop after this many validations without a better score; 0 = never.
    pub patience: u64,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Learning rate at the end of the cosine.
    pub min_learning_rate: f64,
    /// Part of all steps spent warming up, 0..1.
    pub warmup_frac: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// AdamW's first-moment decay.
    pub beta1: f64,
    /// AdamW's second-moment decay.
    pub beta2: f64,
    /// AdamW's epsilon.
    pub epsilon: f64,
    /// Largest gradient norm; larger ones are scaled down. 0 = no clipping.
    pub clip_norm: f64,
    /// Seed of everything random.
    pub seed: u64,
    /// Dtypes: `fp32`, `bf16` or `fp16`.
    pub precision: Precision,
    /// What the language model keeps for the backward pass: `"none"` (all), `"full"` (layer inputs only), or a number: that
    /// many layers keep their inputs only and are run twice. Less memory, more time.
    pub checkpointing: Checkpointing,
    /// The same for the blocks of the image encoder, the first ones (with the largest maps) first.
    pub checkpoint_encoder: Checkpointing,
    /// The same for the mask decoder: all of it or nothing.
    pub checkpoint_decoder: bool,
    /// `"adamw"` (moments in fp32) or `"adamw8bit"` (moments of large tensors in 8 bits).
    pub optimizer: OptimizerKind,
    /// Keep the optimizer's moments in host memory and bring them over for each step, piece by piece. On the CPU it is the
    /// same memory and nothing changes.
    pub offload_optimizer: bool,
    /// Step each parameter as soon as its gradient is complete and drop the gradient: needs `accumulation` 1, no clipping
    /// and another precision than fp16. A gradient that is not finite ends the run; as other weights were stepped by
    /// then, `last/` stays the one saved before.
    pub step_in_backward: bool,
    /// Record a step's kernels once and replay them: `"auto"` (where a measured comparison in the first steps wins), `"on"`
    /// or `"off"`.
    pub graph: Switch,
    /// Kernels of our own in place of chains of libtorch's: `"auto"` (where they are measured to be faster), `"on"` or
    /// `"off"`. Cards only.
    pub fused_kernels: Switch,
    /// Decay of the moving average of the weights, 0..1; 0 = none. Costs one more fp32 copy of the trained weights.
    pub ema_decay: f64,
}

impl TrainConfig {
    /// Whether steps are recorded: one that steps inside the backward pass drops gradients, which recordings keep.
    pub fn records(&self) -> Switch {
        if self.step_in_backward { Switch::Off } else { self.graph }
    }
}

/// Which optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Moments in fp32: 8 bytes a trained weight.
    AdamW,
    /// Moments of tensors with 4096 elements or more in 8 bits, one scale for each 256 (Dettmers et al. 2022).
    AdamW8bit,
}

/// Whether something is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// Where it is measured to be better.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl Switch {
    /// The same for kernels of our own.
    pub fn kernels(self) -> kernels::Mode {
        match self {
            Self::Auto => kernels::Mode::Auto,
            Self::On => kernels::Mode::On,
            Self::Off => kernels::Mode::Off,
        }
    }
}

/// Activation checkpointing: `"none"`, `"full"`, or a number of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checkpointing {
    /// Keep all activations: fastest, largest.
    None,
    /// Keep the inputs of this many first layers and run them twice.
    Layers(usize),
    /// The same for every layer.
    Full,
}

impl Checkpointing {
    /// Layers that are run twice.
    pub fn layers(self) -> usize {
        match self {
            Self::None => 0,
            Self::Layers(layers) => layers,
            Self::Full => usize::MAX,
        }
    }
}

impl serde::Serialize for Checkpointing {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_str("none"),
            Self::Layers(layers) => serializer.serialize_u64(*layers as u64),
            Self::Full => serializer.serialize_str("full"),
        }
    }
}

impl<'de> serde::Deserialize<'de> for Checkpointing {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Checkpointing;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("`none`, `full` or a number of layers")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<Checkpointing, E> {
                match text {
                    "none" => Ok(Checkpointing::None),
                    "full" => Ok(Checkpointing::Full),
                    other => Err(E::unknown_variant(other, &["none", "full", "a number of layers"])),
                }
            }

            fn visit_i64<E: serde::de::Error>(self, layers: i64) -> std::result::Result<Checkpointing, E> {
                let layers = usize::try_from(layers);
                layers.map(Checkpointing::Layers).map_err(|_| E::custom("a number of layers is 0 or more"))
            }

            fn visit_u64<E: serde::de::Error>(self, layers: u64) -> std::result::Result<Checkpointing, E> {
                self.visit_i64(i64::try_from(layers).unwrap_or(-1))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}
