//! Fine-tuning as a [`Task`] of the engine.

use super::cache::Cache;
use super::samples::Quality;
use super::step::{Denoiser, EncodedSample, NoisyLatents, SampleDraw};
use crate::Result;
use crate::augment::inputs::JobInputs;
use crate::data::identity::DataIdentity;
use crate::event::{Event, Observer};
use crate::segment::resume;
use crate::tensor::async_copy::AsyncCopy;
use crate::tensor::store::Mastered;
use crate::tensor::weights::Staged;
use crate::tensor::{guard, ledger, rng};
use crate::trainer::profile::ModelPart;
use crate::trainer::{BatchSize, Batches, Loss, Parameter, Ranks, Shard, Task, Validation, ValidationScore};
use rand::Rng;
use rand::seq::{IndexedRandom, SliceRandom};
use std::path::{Path, PathBuf};

/// Timesteps at which each validation image is scored, spread evenly.
pub(super) const VALIDATED_TIMESTEPS: usize = 8;

/// An image of the training.
#[derive(Debug, Clone)]
pub struct TrainingImage {
    /// Its file.
    pub image: PathBuf,
    /// Its mask.
    pub mask: PathBuf,
    /// Its class.
    pub modality: String,
    /// Numbers of its captions.
    pub captions: Vec<usize>,
    /// Number of the negative prompt of its first row.
    pub negative: usize,
}

/// A generator, its images and the settings of its training.
pub struct FinetuneTask {
    /// The network in training.
    pub denoiser: Denoiser,
    /// The images and captions.
    pub data: Data,
    /// Samples at each validation, if there are any.
    pub quality: Option<Quality>,
    /// The settings as TOML, written into every checkpoint.
    pub resolved: String,
}

/// Encoded images and captions.
#[derive(Debug)]
pub struct Data {
    /// The images, those of `train` first, and the captions.
    pub cache: Cache,
    /// Training images, at least one.
    pub train: Vec<TrainingImage>,
    /// Validation images; in the cache they follow the training images.
    pub validated: Vec<TrainingImage>,
    /// Number of the empty caption.
    pub empty: usize,
    /// Identity of the rows, written into every checkpoint.
    pub identity: DataIdentity,
    /// Everything else that the training reads, written into every checkpoint.
    pub inputs: JobInputs,
}

impl FinetuneTask {
    /// The training images of each step in `epoch`. The last step may be smaller.
    fn steps(&self, epoch: u64) -> Vec<Vec<usize>> {
        let mut order: Vec<usize> = (0..self.data.train.len()).collect();
        order.shuffle(&mut rng::stream(self.denoiser.engine.seed, "finetune order", &[epoch]));
        order.chunks(self.denoiser.effective_batch()).map(<[usize]>::to_vec).collect()
    }

    /// The training images `items` with the noise, timesteps and captions of `epoch`.
    fn drawn(&self, items: &[usize], epoch: u64) -> Result<NoisyLatents> {
        self.denoiser.batch(items.iter().map(|&item| self.drawn_image(item, epoch)).collect::<Result<_>>()?)
    }

    fn drawn_image(&self, item: usize, epoch: u64) -> Result<EncodedSample> {
        let Data { train, empty, .. } = &self.data;
        let mut rng = rng::stream(self.denoiser.engine.seed, "finetune sample", &[epoch, item as u64]);
        let timestep = rng.random_range(0..self.denoiser.objective.num_timesteps());
        let caption = train[item].captions.choose(&mut rng).copied().unwrap_or(*empty);
        let is_dropped = rng.random::<f64>() < self.denoiser.config.caption_dropout;
        let draw = SampleDraw { item, timestep, seed: rng.random(), draws_latents: true };
        let condition = rng.random_range(0..self.data.cache.num_conditions().max(1));
        self.sample(draw, if is_dropped { *empty } else { caption }, condition)
    }

    /// The validation image `item` at its timesteps; the same in every validation.
    fn fixed(&self, item: usize) -> Result<NoisyLatents> {
        let steps = self.denoiser.objective.num_timesteps();
        let caption = self.data.validated[item].captions.first().copied().unwrap_or(self.data.empty);
        let at = |i: usize| {
            let seed = rng::stream(self.denoiser.engine.seed, "finetune validation", &[item as u64, i as u64]).random();
            let timestep = (2 * i + 1) * steps / (2 * VALIDATED_TIMESTEPS);
            let draw = SampleDraw { item: self.data.train.len() + item, timestep, seed, draws_latents: false };
            self.sample(draw, caption, 0)
        };
        self.denoiser.batch((0..VALIDATED_TIMESTEPS).map(at).collect::<Result<_>>()?)
    }

    /// The losses of the validation images of this rank, as bits.
    fn validation_losses(&self, ranks: Ranks, observer: &dyn Observer) -> Result<Vec<u64>> {
        let own = ranks.shard().range(self.data.validated.len());
        observer.on(&Event::Started { phase: "validate".into(), total: own.len() as u64, unit: "images" });
        let mut losses = Vec::new();
        for item in own {
            losses.push(self.denoiser.validation_loss(self.fixed(item)?)?.to_bits());
            observer.on(&Event::Advanced { done: losses.len() as u64 });
        }
        observer.on(&Event::Finished);
        Ok(losses)
    }

    /// Reads an image, a caption and condition `number` of the image, if there are any, from the cache.
    fn sample(&self, draw: SampleDraw, caption: usize, number: usize) -> Result<EncodedSample> {
        let _category = ledger::enter(ledger::Category::Inputs);
        let cache = &self.data.cache;
        let (latents, embedding) = (cache.latents(draw.item)?, cache.embedding(caption)?);
        let condition = (cache.num_conditions() > 0).then(|| cache.condition(draw.item, number)).transpose()?;
        Ok(EncodedSample { latents, embedding, condition, draw })
    }
}

impl Task for FinetuneTask {
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
        self.data.train.len().div_ceil(self.denoiser.effective_batch()) as u64
    }

    fn batches(&self, epoch: u64, first: u64, shard: Shard) -> Result<Batches<'_, NoisyLatents>> {
        let first = usize::try_from(first).unwrap_or(usize::MAX);
        Ok(Box::new(self.steps(epoch).into_iter().skip(first).map(move |step| {
            let _category = ledger::enter(ledger::Category::Inputs);
            let mut copy = AsyncCopy::to(self.denoiser.device);
            let micro_batches: Vec<&[usize]> = step.chunks(self.denoiser.engine.micro_batch).collect();
            let batches = micro_batches[shard.range(micro_batches.len())].iter().map(|items| {
                let batch = self.drawn(items, epoch)?;
                Ok(match &mut copy {
                    Some(copy) => batch.map(batch.draws.clone(), &mut |tensor| copy.send(tensor)),
                    None => batch,
                })
            });
            let batches = batches.collect();
            if let Some(copy) = copy {
                copy.complete();
            }
            batches
        })))
    }

    fn batch_size(&self, batch: &NoisyLatents) -> BatchSize {
        batch.size()
    }

    fn loss(&self, batch: &NoisyLatents, effective_batch: BatchSize, _epoch: u64) -> Result<Loss> {
        Ok(self.denoiser.loss(batch, effective_batch))
    }

    fn samples(&self, batch: &NoisyLatents) -> Vec<usize> {
        batch.items()
    }

    fn suspects(&self, items: &[usize], epoch: u64) -> Result<Vec<String>> {
        let mut suspects = Vec::new();
        for &item in items {
            let batch = self.drawn(&[item], epoch)?;
            if !self.denoiser.has_finite_loss(&batch)? {
                suspects.push(item);
            }
        }
        let items = if suspects.is_empty() { items } else { &suspects };
        Ok(items.iter().map(|&item| self.data.train[item].image.display().to_string()).collect())
    }

    fn split(&self, batch: &NoisyLatents, most: usize) -> Option<Vec<NoisyLatents>> {
        Some(batch.split(most))
    }

    /// The loss of the validation images at fixed timesteps, with fixed noise and without the weights of timesteps.
    fn validate(&self, observer: &dyn Observer, ranks: Ranks) -> Result<Option<Validation>> {
        let (mut score, mut values, mut pictures) = (None, Vec::new(), Vec::new());
        let total = self.data.validated.len();
        if total > 0 {
            // added in the order of the images, so that the sum does not depend on the number of ranks
            let losses = ranks.gather_if_all(guard::guard(|| self.validation_losses(ranks, observer)))?;
            let sum: f64 = losses.into_iter().flatten().map(f64::from_bits).sum();
            let loss = sum / (total * VALIDATED_TIMESTEPS) as f64;
            score = Some(ValidationScore { kind: "loss", ..(-loss).into() });
            values.push(("loss_denoising".to_owned(), loss));
        }
        if let Some(quality) = &self.quality {
            let measured = quality.measure(&self.denoiser, &self.data.cache, ranks, observer)?;
            score = Some(measured.score);
            values.extend(measured.values);
            pictures.extend(measured.picture);
        }
        Ok(score.map(|score| Validation { score, values, pictures }))
    }

    fn save(&self, folder: &mut Staged) -> Result<()> {
        self.denoiser.network.save(folder)?;
        self.data.inputs.save(folder)?;
        folder.write_bytes(resume::DATA_FILE, self.data.identity.to_json().as_bytes())?;
        folder.write_bytes(resume::CONFIG_FILE, self.resolved.as_bytes())
    }

    fn load(&self, folder: &Path) -> Result<()> {
        self.denoiser.network.load(folder)
    }
}
