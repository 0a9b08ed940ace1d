//! Dry run of a fine-tuning: its encoding and its training steps without data, for planning memory and for measuring it.
//!
//! It calls the functions of the training; the values in its batches have no meaning.

use super::cache::{Condition, Latents, return_memory};
use super::samples::{self, Conditions};
use super::settings::FinetuneRun;
use super::step::{Denoiser, EncodedSample, NoisyLatents, SampleDraw};
use super::task::VALIDATED_TIMESTEPS;
use crate::Result;
use crate::augment::autoencoder::Autoencoder;
use crate::augment::pipeline::{Placement, PromptEmbedding, blank, encode_prompts, input_device};
use crate::augment::pipeline_config::PipelineConfig;
use crate::data::text::clip_bpe::CONTEXT;
use crate::event::Observer;
use crate::models::diffusion::unet::Pass;
use crate::models::inception::{self, Inception};
use crate::tensor::store::{Mastered, Role, Store, StoreOptions};
use crate::tensor::weights::Staged;
use crate::tensor::{Device, Kind, Tensor, guard, ledger, no_grad};
use crate::trainer::profile::ModelPart;
use crate::trainer::{BatchSize, Batches, DryRunTask, Loss, Parameter, Ranks, Shard, Task, Validation};
use std::path::Path;

/// Denoising steps of the samples that a dry run runs; later ones need the same memory.
const SHOWN_STEPS: usize = 3;
/// Images of which features are computed at a time.
pub const FEATURES_BATCH: i64 = 4;

/// Encodes captions and an image as a new run does before its first step. Calls `begin` with the name of each phase.
///
/// # Errors
/// Errors of `begin`; typed errors of libtorch.
pub fn encode(
    pipeline_config: &PipelineConfig,
    run: &FinetuneRun,
    device: Device,
    begin: &mut dyn FnMut(&'static str) -> Result<()>,
) -> Result<()> {
    let placement = Placement { device, kind: run.train.precision.kind(), seed: run.train.seed };
    begin("encode captions")?;
    let ids = vec![vec![vec![0; CONTEXT]; 2]; pipeline_config.texts.len()];
    drop(encode_prompts(pipeline_config, placement, &ids, &[false, true], &[])?);
    return_memory(device)?;
    begin("encode images")?;
    {
        let autoencoder = Autoencoder::load(pipeline_config, placement, Kind::Float)?;
        let size = run.finetune.image_size;
        let bytes = blank([size, size, 3], Kind::Uint8, input_device(device));
        let _latents = guard::guard(|| Ok(no_grad(|| autoencoder.distribution(&bytes, None))))?;
    }
    return_memory(device)
}

/// A network in training, without data.
pub struct FinetuneDryRun {
    denoiser: Denoiser,
    pipeline_config: PipelineConfig,
    steps: u64,
}

impl FinetuneDryRun {
    /// Builds the network of `run` on `device`; on [`crate::tensor::META`] bytes are counted but not allocated.
    ///
    /// # Errors
    /// As [`Denoiser::new`].
    pub fn new(pipeline_config: &PipelineConfig, run: &FinetuneRun, device: Device) -> Result<Self> {
        let denoiser = Denoiser::new(pipeline_config, run, device)?;
        Ok(Self { denoiser, pipeline_config: pipeline_config.clone(), steps: 1 })
    }

    /// Sets the number of optimizer steps of an epoch.
    #[must_use]
    pub fn with_steps(mut self, steps: u64) -> Self {
        self.steps = steps;
        self
    }

    /// `count` samples as read from the cache; those of a training draw their latents.
    fn batch(&self, count: usize, is_trained: bool) -> NoisyLatents {
        let _category = ledger::enter(ledger::Category::Inputs);
        let draws = (0..count).map(|item| SampleDraw { item, draws_latents: is_trained, ..SampleDraw::default() });
        let samples = draws.map(|draw| self.sample(draw)).collect();
        self.denoiser.batch(samples).expect("blank samples have the shapes of the model")
    }

    /// Makes a batch of samples and computes its Inception features.
    fn measure_samples(&self) -> Result<()> {
        let device = self.denoiser.device;
        {
            let conditions = self.conditions();
            let run = || samples::latents(&self.denoiser, &self.pipeline_config, &conditions, SHOWN_STEPS);
            let latents = guard::guard(|| no_grad(run))?.narrow(0, 0, 1).copy();
            drop(conditions);
            let decoder = samples::decoder(&self.pipeline_config, &self.denoiser)?;
            drop(guard::guard(|| no_grad(|| samples::decoded(&decoder, &latents)))?);
        }
        let store = Store::new(StoreOptions { device, frozen_kind: Kind::Float, initialise: false });
        guard::guard(|| {
            no_grad(|| {
                let network = Inception::new(&store.root(Role::Frozen));
                let side = inception::SIZE;
                let images = blank([FEATURES_BATCH, 3, side, side], Kind::Float, input_device(device));
                drop(network.features(&images));
            });
            Ok(())
        })
    }

    /// What a batch of samples is made from.
    fn conditions(&self) -> Conditions {
        let _category = ledger::enter(ledger::Category::Inputs);
        let (config, seed) = (&self.denoiser.config, self.denoiser.engine.seed);
        let draw = SampleDraw { seed, ..SampleDraw::default() };
        let samples: Vec<EncodedSample> = (0..config.sample_batch).map(|_| self.sample(draw)).collect();
        let condition = || {
            let each = samples.iter().filter_map(|sample| sample.condition.as_ref());
            Tensor::stack(&each.collect::<Vec<_>>(), 0)
        };
        let condition = (config.condition().count() > 0).then(condition);
        let negative = samples.iter().map(|_| self.sample(draw).embedding).collect();
        let seeds = vec![seed; samples.len()];
        let positive = samples.into_iter().map(|sample| sample.embedding).collect();
        Conditions { positive, negative, condition, seeds }
    }

    fn sample(&self, draw: SampleDraw) -> EncodedSample {
        let (sizes, vae) = (&self.pipeline_config.unet, &self.pipeline_config.vae);
        let device = input_device(self.denoiser.device);
        let side = self.denoiser.config.image_size / vae.downscale();
        let map = |channels: i64| blank([channels, side, side], Kind::Float, device);
        let channels = vae.latent_channels;
        let latents = Latents { mean: map(channels), std: map(channels), lesion: map(1), inside: map(1) };
        let context = i64::try_from(CONTEXT).expect("a short text");
        let embedding = PromptEmbedding {
            context: blank([context, sizes.cross_attention_dim], Kind::Float, device),
            pooled: sizes.pooled_dim().map(|width| blank([width], Kind::Float, device)),
        };
        let size = self.denoiser.config.image_size;
        let condition = match self.denoiser.config.condition() {
            Condition::None => None,
            Condition::Regions(_) => Some(blank([1 + channels, side, side], Kind::Float, device)),
            Condition::Mask => Some(blank([1, size, size], Kind::Uint8, device)),
        };
        EncodedSample { latents, embedding, condition, draw }
    }
}

impl Task for FinetuneDryRun {
    type Batch = NoisyLatents;

    fn parameters(&self) -> Vec<Parameter> {
        self.denoiser.network.parameters()
    }

    fn mastered(&self) -> Vec<Mastered> {
        self.denoiser.network.mastered()
    }

    fn components(&self) -> Vec<ModelPart> {
        self.denoiser.network.components()
    }

    fn steps_per_epoch(&self) -> u64 {
        self.steps
    }

    fn batches(&self, _epoch: u64, first: u64, shard: Shard) -> Result<Batches<'_, NoisyLatents>> {
        let own = shard.range(self.denoiser.engine.accumulation);
        let step = move |_| Ok(own.clone().map(|_| self.example(true)).collect());
        Ok(Box::new((first..self.steps).map(step)))
    }

    fn batch_size(&self, batch: &NoisyLatents) -> BatchSize {
        batch.size()
    }

    fn loss(&self, batch: &NoisyLatents, effective_batch: BatchSize, _epoch: u64) -> Result<Loss> {
        Ok(self.denoiser.loss(batch, effective_batch))
    }

    fn split(&self, batch: &NoisyLatents, most: usize) -> Option<Vec<NoisyLatents>> {
        Some(batch.split(most))
    }

    fn validate(&self, _observer: &dyn Observer, _ranks: Ranks) -> Result<Option<Validation>> {
        self.denoiser.validation_loss(self.batch(VALIDATED_TIMESTEPS, false))?;
        if self.denoiser.config.samples > 0 {
            self.measure_samples()?;
        }
        Ok(None)
    }

    fn save(&self, folder: &mut Staged) -> Result<()> {
        self.denoiser.network.save(folder)
    }

    fn load(&self, folder: &Path) -> Result<()> {
        self.denoiser.network.load(folder)
    }
}

impl DryRunTask for FinetuneDryRun {
    fn example(&self, _seen: bool) -> NoisyLatents {
        let batch = self.batch(self.denoiser.engine.micro_batch, true);
        let _category = ledger::enter(ledger::Category::Inputs);
        // the training sends its micro-batches before the first pass
        batch.map(batch.draws.clone(), &mut |tensor| tensor.to_device(self.denoiser.device))
    }

    /// The whole effective batch is read before its first pass.
    fn sends_whole_steps(&self) -> bool {
        true
    }

    /// One validation pass: the generator has no prediction of its own.
    fn predict(&self) -> Result<()> {
        let batch = self.batch(1, false);
        guard::guard(|| Ok(no_grad(|| self.denoiser.loss_sum(&batch, Pass::default())))).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::augment::finetune::settings::SamplePrecision;
    use crate::augment::pipeline::Placement;

    fn task(sample_precision: SamplePrecision) -> FinetuneDryRun {
        let mut run = FinetuneRun::default();
        run.finetune.model = "random:tiny".into();
        (run.finetune.image_size, run.finetune.rank) = (64, 4);
        (run.finetune.sample_precision, run.finetune.samples) = (sample_precision, 4);
        run.train.precision = crate::trainer::precision::Precision::Fp32;
        let sizes = PipelineConfig::random("tiny", false).expect("sizes");
        FinetuneDryRun::new(&sizes, &run, Device::Cpu).expect("a tiny network")
    }

    /// Bytes of a batch of samples. Random autoencoders of two dtypes differ, so it is fp32.
    fn images(task: &FinetuneDryRun) -> Tensor {
        let placement = Placement { device: Device::Cpu, kind: Kind::Float, seed: 0 };
        let decoder = Autoencoder::load(&task.pipeline_config, placement, Kind::Float).expect("an autoencoder");
        let latents = || samples::latents(&task.denoiser, &task.pipeline_config, &task.conditions(), SHOWN_STEPS);
        let made = || samples::decoded(&decoder, &latents()?);
        no_grad(made).expect("images").to_kind(Kind::Float)
    }

    /// Values of the trained tensors after some steps of plain gradient descent.
    fn trained(task: &FinetuneDryRun, steps: usize, samples_between: bool) -> Vec<Vec<f32>> {
        for _ in 0..steps {
            let mut batch = task.example(true);
            // blank latents have no pixel that counts
            batch.pixels = batch.pixels.ones_like();
            let size = task.batch_size(&batch);
            task.loss(&batch, size, 0).expect("a loss").total.backward();
            for mut parameter in task.parameters() {
                let gradient = parameter.tensor.grad();
                let _ = no_grad(|| parameter.tensor.g_sub_(&(&gradient * 0.1)));
                parameter.tensor.zero_grad();
            }
            if samples_between {
                drop(images(task));
            }
        }
        let values = |parameter: Parameter| Vec::<f32>::try_from(parameter.tensor.flatten(0, -1)).expect("values");
        task.parameters().into_iter().map(values).collect()
    }

    #[test]
    fn samples_in_bf16_are_near_those_of_a_training_in_fp32() {
        let _lock = crate::tensor::rng::TEST_LOCK.lock();
        let [exact, rounded, default] =
            [SamplePrecision::Fp32, SamplePrecision::Bf16, SamplePrecision::Auto].map(|kind| images(&task(kind)));
        let difference = (&exact - &rounded).abs().mean(Kind::Float).double_value(&[]);
        assert!(difference > 0.0 && difference < 6.0, "{difference} of 255");
        assert_eq!(exact, default, "the CPU samples in the precision of the training");
    }

    #[test]
    fn a_training_continues_bit_for_bit_after_samples_in_bf16() {
        let _lock = crate::tensor::rng::TEST_LOCK.lock();
        let [without, with] = [false, true].map(|samples| trained(&task(SamplePrecision::Bf16), 2, samples));
        assert_eq!(without, with);
        assert_ne!(without, trained(&task(SamplePrecision::Bf16), 0, false));
    }
}
