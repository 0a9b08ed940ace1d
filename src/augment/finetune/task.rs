//! Fine-tuning as a [`Task`] of the engine.

use super::cache::Cache;
use super::samples::Quality;
use super::step::{Denoiser, Draw, NoisyLatents, Sample};
use crate::Result;
use crate::data::identity::DataIdentity;
use crate::event::{Event, Observer};
use crate::models::diffusion::unet::Pass;
use crate::segment::resume;
use crate::tensor::async_copy::AsyncCopy;
use crate::tensor::store::Mastered;
use crate::tensor::weights::Staged;
use crate::tensor::{guard, ledger, no_grad, rng};
use crate::trainer::profile::Component;
use crate::trainer::{BatchSize, Batches, Loss, Parameter, Score, Task, Validation};
use rand::Rng;
use rand::seq::{IndexedRandom, SliceRandom};
use std::path::{Path, PathBuf};

/// The score that decides which checkpoint is the best.
pub const SCORE: &str = "minus the mean validation loss";
/// The score if samples are measured.
pub const SAMPLES_SCORE: &str = "minus the mean KID of the samples";
/// Timesteps at which each validation image is scored, spread evenly.
pub(super) const VALIDATED_TIMESTEPS: usize = 8;

/// An image of the training.
#[derive(Debug, Clone)]
pub struct Item {
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
    pub train: Vec<Item>,
    /// Validation images; in the cache they follow the training images.
    pub validated: Vec<Item>,
    /// Number of the empty caption.
    pub empty: usize,
    /// Identity of the rows, written into every checkpoint.
    pub identity: DataIdentity,
}

impl FinetuneTask {
    /// The order of the training images in `epoch`.
    fn order(&self, epoch: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.data.train.len()).collect();
        order.shuffle(&mut rng::stream(self.denoiser.engine.seed, "finetune order", &[epoch]));
        order
    }

    /// The training images `items` with the noise, timesteps and captions of `epoch`.
    fn drawn(&self, items: &[usize], epoch: u64) -> Result<NoisyLatents> {
        let Data { train, empty, .. } = &self.data;
        let draw = |&item: &usize| {
            let mut rng = rng::stream(self.denoiser.engine.seed, "finetune sample", &[epoch, item as u64]);
            let timestep = rng.random_range(0..self.denoiser.objective.num_timesteps());
            let caption = train[item].captions.choose(&mut rng).copied().unwrap_or(*empty);
            let is_dropped = rng.random::<f64>() < self.denoiser.config.caption_dropout;
            let draw = Draw { item, timestep, seed: rng.random(), draws_latents: true };
            let condition = rng.random_range(0..self.data.cache.num_conditions().max(1));
            self.sample(draw, if is_dropped { *empty } else { caption }, condition)
        };
        self.denoiser.batch(items.iter().map(draw).collect::<Result<_>>()?)
    }

    /// The validation image `item` at its timesteps; the same in every validation.
    fn fixed(&self, item: usize) -> Result<NoisyLatents> {
        let steps = self.denoiser.objective.num_timesteps();
        let caption = self.data.validated[item].captions.first().copied().unwrap_or(self.data.empty);
        let at = |i: usize| {
            let seed = rng::stream(self.denoiser.engine.seed, "finetune validation", &[item as u64, i as u64]).random();
            let timestep = (2 * i + 1) * steps / (2 * VALIDATED_TIMESTEPS);
            self.sample(Draw { item: self.data.train.len() + item, timestep, seed, draws_latents: false }, caption, 0)
        };
        self.denoiser.batch((0..VALIDATED_TIMESTEPS).map(at).collect::<Result<_>>()?)
    }

    /// Reads an image, a caption and condition `number` of the image, if there are any, from the cache.
    fn sample(&self, draw: Draw, caption: usize, number: usize) -> Result<Sample> {
        let _category = ledger::enter(ledger::Category::Inputs);
        let cache = &self.data.cache;
        let (latents, embedding) = (cache.latents(draw.item)?, cache.embedding(caption)?);
        let condition = (cache.num_conditions() > 0).then(|| cache.condition(draw.item, number)).transpose()?;
        Ok(Sample { latents, embedding, condition, draw })
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

    fn components(&self) -> Vec<Component> {
        self.denoiser.network.components()
    }

    fn steps_per_epoch(&self) -> u64 {
        self.data.train.len().div_ceil(self.denoiser.effective_batch()) as u64
    }

    fn batches(&self, epoch: u64, first: u64) -> Result<Batches<'_, NoisyLatents>> {
        let order = self.order(epoch);
        let steps: Vec<Vec<usize>> = order.chunks(self.denoiser.effective_batch()).map(<[usize]>::to_vec).collect();
        let first = usize::try_from(first).unwrap_or(usize::MAX);
        Ok(Box::new(steps.into_iter().skip(first).map(move |step| {
            let _category = ledger::enter(ledger::Category::Inputs);
            let mut copy = AsyncCopy::to(self.denoiser.device);
            let batches = step.chunks(self.denoiser.engine.micro_batch).map(|items| {
                let batch = self.drawn(items, epoch)?;
                Ok(match &mut copy {
                    Some(copy) => batch.map(batch.items.clone(), &mut |tensor| copy.send(tensor)),
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
        batch.items.clone()
    }

    fn suspects(&self, items: &[usize], epoch: u64) -> Result<Vec<String>> {
        let mut suspects = Vec::new();
        for &item in items {
            let batch = self.drawn(&[item], epoch)?;
            let loss = || no_grad(|| self.denoiser.loss_sum(&batch, Pass::default())).double_value(&[]);
            if !guard::guard(|| Ok(loss()))?.is_finite() {
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
    fn validate(&self, observer: &dyn Observer) -> Result<Option<Validation>> {
        let total = self.data.validated.len();
        let mut validation = None;
        if total > 0 {
            observer.on(&Event::Started { phase: "validate".into(), total: total as u64, unit: "images" });
            let mut sum = 0.0;
            for item in 0..total {
                sum += self.denoiser.validation_loss(self.fixed(item)?)?;
                observer.on(&Event::Advanced { done: item as u64 + 1 });
            }
            observer.on(&Event::Finished);
            let loss = sum / (total * VALIDATED_TIMESTEPS) as f64;
            let score = Score { kind: "loss", ..(-loss).into() };
            validation = Some((score, vec![("loss_denoising".to_owned(), loss)]));
        }
        let Some(quality) = &self.quality else {
            return Ok(validation.map(|(score, values)| Validation { score, values, pictures: Vec::new() }));
        };
        let measured = quality.measure(&self.denoiser, &self.data.cache, observer)?;
        let mut values = validation.map_or_else(Vec::new, |(_, values)| values);
        values.extend(measured.values);
        Ok(Some(Validation { score: measured.score, values, pictures: vec![measured.picture] }))
    }

    fn save(&self, folder: &mut Staged) -> Result<()> {
        self.denoiser.network.save(folder)?;
        folder.write_bytes(resume::DATA_FILE, self.data.identity.to_json().as_bytes())?;
        folder.write_bytes(resume::CONFIG_FILE, self.resolved.as_bytes())
    }

    fn load(&self, folder: &Path) -> Result<()> {
        self.denoiser.network.load(folder)
    }
}
