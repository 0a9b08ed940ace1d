//! Traits of a training job: [`Task`] for the engine, [`DryRunTask`] for the planner.

use super::graph::Capturable;
use super::profile::ModelPart;
use super::{BatchSize, Loss, Parameter, Ranks, Shard};
use image::RgbImage;
use prsmed_base::Result;
use prsmed_base::event::Event;
use prsmed_base::units::Bytes;
use prsmed_tensor::store::{Mastered, Role, StoreEntry};
use prsmed_tensor::weights::Staged;

/// A validation result.
#[derive(Debug, Clone, PartialEq)]
pub struct Validation {
    /// Score that selects `best/`.
    pub score: ValidationScore,
    /// Named values for the records.
    pub values: Vec<(String, f64)>,
    /// Images for the run folder and TensorBoard.
    pub pictures: Vec<ValidationPicture>,
}

/// A score; higher is better.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ValidationScore {
    /// Its value.
    pub value: f64,
    /// True for an estimate that varies from one validation to the next without a reason. A training then stops early
    /// when the score has stopped growing, and not because of a few low values.
    pub is_noisy: bool,
    /// What it measures; scores of different kinds are not compared.
    pub kind: &'static str,
}

/// An image that shows the state of a training.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidationPicture {
    /// Its name, for a folder and a tag.
    pub name: String,
    /// The image.
    pub image: RgbImage,
}

impl From<f64> for ValidationScore {
    fn from(value: f64) -> Self {
        Self { value, is_noisy: false, kind: "" }
    }
}

/// The micro-batches of one optimizer step after another.
pub type Batches<'a, B> = Box<dyn Iterator<Item = Result<Vec<B>>> + 'a>;

/// A training job for the engine.
pub trait Task {
    /// One micro-batch.
    type Batch;

    /// All trained tensors in fp32, always in the same order.
    fn parameters(&self) -> Vec<Parameter>;

    /// With [`Self::parameters`] in host memory (`train.offload_weights`): the tensors on the device that have their
    /// rounded values, in the same order. Else empty.
    fn mastered(&self) -> Vec<Mastered> {
        Vec::new()
    }

    /// The parts of the model for a memory profile: by default one part with all trained tensors.
    fn components(&self) -> Vec<ModelPart> {
        let entry = |p: Parameter| StoreEntry { name: p.name, tensor: p.tensor, role: Role::Trainable };
        vec![ModelPart { name: "model", entries: self.parameters().into_iter().map(entry).collect() }]
    }

    /// Optimizer steps of one epoch.
    fn steps_per_epoch(&self) -> u64;

    /// The effective batches of `epoch` from step `first` on, of each the micro-batches of `shard`. Depends only on the
    /// task's seed and these numbers.
    ///
    /// # Errors
    /// When reading cannot start; items carry errors of single samples.
    fn batches(&self, epoch: u64, first: u64, shard: Shard) -> Result<Batches<'_, Self::Batch>>;

    /// Samples and tokens of `batch`.
    fn batch_size(&self, batch: &Self::Batch) -> BatchSize;

    /// The loss of `batch` as its share of the loss of `effective_batch`.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    fn loss(&self, batch: &Self::Batch, effective_batch: BatchSize, epoch: u64) -> Result<Loss>;

    /// `batch` as tensors of a bucket's sizes, with the loss that [`Task::loss`] computes from them; `None` where the
    /// pass cannot be captured as a CUDA graph.
    ///
    /// # Errors
    /// As [`Task::loss`].
    fn capturable(
        &self,
        _batch: &Self::Batch,
        _effective_batch: BatchSize,
        _epoch: u64,
    ) -> Result<Option<Capturable<'_>>> {
        Ok(None)
    }

    /// Returns events about the last steps, each once.
    fn take_events(&self) -> Vec<Event> {
        Vec::new()
    }

    /// Numbers of the samples of `batch`, for [`Self::suspects`].
    fn samples(&self, _batch: &Self::Batch) -> Vec<usize> {
        Vec::new()
    }

    /// Names of those `samples` for which the current weights compute NaN or infinity; of all of them if there is no
    /// such sample. The engine calls it after a step whose gradients are not finite. Must not change the weights.
    ///
    /// # Errors
    /// As [`Task::loss`], and errors of the data.
    fn suspects(&self, _samples: &[usize], _epoch: u64) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    /// Splits batches: the same samples in the same order, at most `most` per batch, in the unit of
    /// [`TrainConfig::micro_batch`](super::TrainConfig::micro_batch). The engine uses them when memory runs out. `None`
    /// for a task whose batches cannot be split.
    fn split(&self, _batch: &Self::Batch, _most: usize) -> Option<Vec<Self::Batch>> {
        None
    }

    /// True if several processes divide frozen weights, so that each pass needs all of them.
    fn is_divided(&self) -> bool {
        false
    }

    /// Takes part in a forward pass of other processes, and if it `trains` in its backward pass; see
    /// [`Self::is_divided`].
    ///
    /// # Panics
    /// With libtorch's message, like its operators.
    fn join_pass(&self, _trains: bool) {}

    /// Scores the current weights; `None` without validation data. All `ranks` call it and get the same result.
    ///
    /// # Errors
    /// As [`Task::loss`].
    fn validate(&self, _observer: &dyn prsmed_base::event::Observer, _ranks: Ranks) -> Result<Option<Validation>> {
        Ok(None)
    }

    /// Writes weights and everything needed to use them into a checkpoint folder.
    ///
    /// # Errors
    /// [`prsmed_base::Error::Io`].
    fn save(&self, folder: &mut Staged) -> Result<()>;

    /// Reads weights back from a checkpoint folder.
    ///
    /// # Errors
    /// [`prsmed_base::Error::Weights`].
    fn load(&self, folder: &std::path::Path) -> Result<()>;
}

/// Use of frozen weights in host memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostUse {
    /// Bytes that they take.
    pub bytes: Bytes,
    /// Bytes that were copied to the device so far.
    pub sent: Bytes,
    /// Bytes of divided layers that were collected from all processes so far.
    pub collected: Bytes,
    /// Size of the largest layer that processes divide; 0 if they divide none.
    pub divided_block: Bytes,
    /// Module path and number of layers, for each part of the model that has some.
    pub layers: Vec<(&'static str, usize)>,
}

impl HostUse {
    /// This use, with the bytes that were copied and collected since `before`.
    #[must_use]
    pub fn since(self, before: &Self) -> Self {
        let collected = Bytes(self.collected.0 - before.collected.0);
        Self { sent: Bytes(self.sent.0 - before.sent.0), collected, ..self }
    }
}

/// A task that can run without data, to plan or to measure its memory.
pub trait DryRunTask: Task {
    /// A micro-batch of full size with arbitrary values. `seen`: its samples were used in an earlier
    /// epoch, so the task has them in its caches.
    fn example(&self, seen: bool) -> Self::Batch;

    /// Frozen weights in host memory.
    fn host_weights(&self) -> HostUse {
        HostUse::default()
    }

    /// True if all micro-batches of a step are on the device before its first pass.
    fn sends_whole_steps(&self) -> bool {
        false
    }

    /// True if the task caches parts of its batches, so that steps on samples of an earlier epoch run other code.
    fn has_cache(&self) -> bool {
        false
    }

    /// Work of a new run before its first step.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    fn calibrate(&self) -> Result<()> {
        Ok(())
    }

    /// One prediction on an example of full size.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    fn predict(&self) -> Result<()>;
}
