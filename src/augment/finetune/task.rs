//! Fine-tuning as a [`Task`] of the engine.

use super::cache::Cache;
use super::network::Network;
use super::objective::{Factors, NoisyBatch, Objective};
use super::settings::{FinetuneConfig, FinetuneRun};
use crate::data::identity::DataIdentity;
use crate::event::{Event, Observer};
use crate::models::diffusion::unet::{Added, Conditioning, Pass};
use crate::segment::resume;
use crate::tensor::async_copy::AsyncCopy;
use crate::tensor::weights::Staged;
use crate::tensor::{Device, Kind, Tensor, guard, ledger, no_grad, rng};
use crate::trainer::profile::Component;
use crate::trainer::{BatchSize, Batches, Loss, Parameter, Task, TrainConfig, Validation};
use crate::{Error, Result};
use rand::Rng;
use rand::seq::{IndexedRandom, SliceRandom};
use std::path::{Path, PathBuf};

/// The score that decides which checkpoint is the best.
pub const SCORE: &str = "minus the mean validation loss";
/// Timesteps at which each validation image is scored, spread evenly.
const VALIDATED_TIMESTEPS: usize = 8;

/// An image of the training.
#[derive(Debug, Clone)]
pub struct Item {
    /// Its file.
    pub image: PathBuf,
    /// Its mask.
    pub mask: PathBuf,
    /// Numbers of its captions.
    pub captions: Vec<usize>,
}

/// A micro-batch; all tensors are fp32.
#[derive(Debug)]
pub struct NoisyLatents {
    /// `[b, c, s, s]`.
    clean: Tensor,
    /// `[b, c, s, s]`.
    noise: Tensor,
    /// `[b, 1, s, s]`.
    pixels: Tensor,
    /// `[b, 3]`: see [`NoisyBatch::factors`].
    factors: Tensor,
    /// `[b]`.
    timesteps: Tensor,
    /// `[b, 77, d]`.
    context: Tensor,
    /// SDXL: `[b, p]`.
    pooled: Option<Tensor>,
    /// Numbers of the items.
    items: Vec<usize>,
}

impl NoisyLatents {
    /// This batch with `change(tensor)` in place of each tensor.
    fn map(&self, items: Vec<usize>, change: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        Self {
            clean: change(&self.clean),
            noise: change(&self.noise),
            pixels: change(&self.pixels),
            factors: change(&self.factors),
            timesteps: change(&self.timesteps),
            context: change(&self.context),
            pooled: self.pooled.as_ref().map(change),
            items,
        }
    }
}

/// A generator, its images and the settings of its training.
pub struct FinetuneTask {
    network: Network,
    objective: Objective,
    cache: Cache,
    train: Vec<Item>,
    /// Validation items; in the cache they follow the training items.
    validated: Vec<Item>,
    /// Number of the empty caption.
    empty: usize,
    config: FinetuneConfig,
    engine: TrainConfig,
    device: Device,
    identity: DataIdentity,
    resolved: String,
}

/// The parts of a [`FinetuneTask`].
pub struct Parts {
    /// The UNet.
    pub network: Network,
    /// Its objective.
    pub objective: Objective,
    /// Encoded images, those of `train` first, and captions.
    pub cache: Cache,
    /// Training images, at least one.
    pub train: Vec<Item>,
    /// Validation images.
    pub validated: Vec<Item>,
    /// Number of the empty caption.
    pub empty: usize,
    /// Device of the network.
    pub device: Device,
    /// Identity of the rows, written into every checkpoint.
    pub identity: DataIdentity,
}

impl FinetuneTask {
    /// A task with the settings of `run`; `resolved` are these settings as TOML, written into every checkpoint.
    pub fn new(parts: Parts, run: &FinetuneRun, resolved: String) -> Self {
        let Parts { network, objective, cache, train, validated, empty, device, identity } = parts;
        let (config, engine) = (run.finetune.clone(), run.train.clone());
        Self { network, objective, cache, train, validated, empty, config, engine, device, identity, resolved }
    }

    /// The UNet.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Images of an optimizer step.
    fn effective_batch(&self) -> usize {
        self.engine.micro_batch * self.engine.accumulation
    }

    /// The order of the training images in `epoch`.
    fn order(&self, epoch: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.train.len()).collect();
        order.shuffle(&mut rng::stream(self.engine.seed, "finetune order", &[epoch]));
        order
    }

    /// The training images `items` with the noise, timesteps and captions of `epoch`.
    fn drawn(&self, items: &[usize], epoch: u64) -> Result<NoisyLatents> {
        let draw = |&item: &usize| {
            let mut rng = rng::stream(self.engine.seed, "finetune sample", &[epoch, item as u64]);
            let timestep = rng.random_range(0..self.objective.num_timesteps());
            let caption = self.train[item].captions.choose(&mut rng).copied().unwrap_or(self.empty);
            let is_dropped = rng.random::<f64>() < self.config.caption_dropout;
            Sample { item, timestep, caption: if is_dropped { self.empty } else { caption }, seed: rng.random() }
        };
        self.batch(&items.iter().map(draw).collect::<Vec<_>>(), true)
    }

    /// The validation image `item` at its timesteps; the same in every validation.
    fn fixed(&self, item: usize) -> Result<NoisyLatents> {
        let steps = self.objective.num_timesteps();
        let at = |i: usize| Sample {
            item: self.train.len() + item,
            timestep: (2 * i + 1) * steps / (2 * VALIDATED_TIMESTEPS),
            caption: self.validated[item].captions.first().copied().unwrap_or(self.empty),
            seed: rng::stream(self.engine.seed, "finetune validation", &[item as u64, i as u64]).random(),
        };
        self.batch(&(0..VALIDATED_TIMESTEPS).map(at).collect::<Vec<_>>(), false)
    }

    fn batch(&self, samples: &[Sample], samples_latents: bool) -> Result<NoisyLatents> {
        let _category = ledger::enter(ledger::Category::Inputs);
        let rows: Vec<RowTensors> =
            samples.iter().map(|sample| self.row(*sample, samples_latents)).collect::<Result<_>>()?;
        guard::guard(|| {
            let stacked = |of: &dyn Fn(&RowTensors) -> &Tensor| {
                Tensor::stack(&rows.iter().map(|row| of(row).shallow_clone()).collect::<Vec<_>>(), 0)
            };
            let factors: Vec<f32> =
                rows.iter().flat_map(|row| [row.factors.signal, row.factors.noise, row.factors.weight]).collect();
            let timesteps: Vec<f32> = samples.iter().map(|sample| sample.timestep as f32).collect();
            let pooled = rows.iter().all(|row| row.pooled.is_some());
            Ok(NoisyLatents {
                clean: stacked(&|row| &row.clean),
                noise: stacked(&|row| &row.noise),
                pixels: stacked(&|row| &row.pixels),
                factors: Tensor::from_slice(&factors).view([-1, 3]),
                timesteps: Tensor::from_slice(&timesteps),
                context: stacked(&|row| &row.context),
                pooled: pooled.then(|| stacked(&|row| row.pooled.as_ref().expect("all rows have one"))),
                items: samples.iter().map(|sample| sample.item).collect(),
            })
        })
    }

    fn row(&self, sample: Sample, samples_latents: bool) -> Result<RowTensors> {
        let latents = self.cache.latents(sample.item)?;
        let embedding = self.cache.embedding(sample.caption)?;
        guard::guard(|| {
            rng::seed(sample.seed);
            let place = (Kind::Float, Device::Cpu);
            let size = latents.mean.size();
            let mut noise = Tensor::randn(&size, place);
            if self.config.noise_offset > 0.0 {
                noise += Tensor::randn([size[0], 1, 1], place) * self.config.noise_offset;
            }
            let clean =
                if samples_latents { latents.mean + latents.std * Tensor::randn(&size, place) } else { latents.mean };
            let weights = latents.inside * (latents.lesion * (self.config.lesion_weight - 1.0) + 1.0);
            let mean = weights.mean(Kind::Float).clamp_min(1e-6);
            Ok(RowTensors {
                clean,
                noise,
                pixels: weights / mean,
                factors: self.objective.factors(sample.timestep),
                context: embedding.context,
                pooled: embedding.pooled,
            })
        })
    }

    /// Sum of the losses of the samples, an fp64 scalar.
    fn loss_sum(&self, batch: &NoisyLatents, pass: Pass) -> Tensor {
        let batch = batch.map(Vec::new(), &mut |tensor| tensor.to_device(self.device));
        let rows = batch.clean.size()[0];
        let added = batch.pooled.as_ref().map(|pooled| {
            let side = self.config.image_size as f32;
            let ids = Tensor::from_slice(&[side, side, 0.0, 0.0, side, side]).repeat([rows, 1]);
            Added { pooled: pooled.shallow_clone(), time_ids: ids.to_device(self.device) }
        });
        let conditioning = Conditioning { context: batch.context.shallow_clone(), added };
        let NoisyLatents { clean, noise, factors, pixels, timesteps, .. } = &batch;
        let kind = self.engine.precision.kind();
        self.objective.loss(&NoisyBatch { clean, noise, factors, pixels: Some(pixels) }, |noisy| {
            self.network.unet.forward_with(&noisy.to_kind(kind), timesteps, &conditioning, None, pass)
        })
    }
}

/// Random choices of a sample.
#[derive(Debug, Clone, Copy)]
struct Sample {
    item: usize,
    timestep: usize,
    caption: usize,
    seed: u64,
}

/// A sample without its batch dimension.
struct RowTensors {
    clean: Tensor,
    noise: Tensor,
    pixels: Tensor,
    factors: Factors,
    context: Tensor,
    pooled: Option<Tensor>,
}

impl Task for FinetuneTask {
    type Batch = NoisyLatents;

    fn parameters(&self) -> Vec<Parameter> {
        self.network.parameters()
    }

    fn components(&self) -> Vec<Component> {
        self.network.components()
    }

    fn steps_per_epoch(&self) -> u64 {
        self.train.len().div_ceil(self.effective_batch()) as u64
    }

    fn batches(&self, epoch: u64, first: u64) -> Result<Batches<'_, NoisyLatents>> {
        let order = self.order(epoch);
        let steps: Vec<Vec<usize>> = order.chunks(self.effective_batch()).map(<[usize]>::to_vec).collect();
        let first = usize::try_from(first).unwrap_or(usize::MAX);
        Ok(Box::new(steps.into_iter().skip(first).map(move |step| {
            let _category = ledger::enter(ledger::Category::Inputs);
            let mut copy = AsyncCopy::to(self.device);
            let batches = step.chunks(self.engine.micro_batch).map(|items| {
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
        BatchSize { samples: batch.items.len() as f64, tokens: 0.0 }
    }

    fn loss(&self, batch: &NoisyLatents, effective_batch: BatchSize, _epoch: u64) -> Result<Loss> {
        let pass = Pass { checkpoint: self.engine.checkpointing.count() };
        let total = self.loss_sum(batch, pass) / effective_batch.samples;
        let parts = vec![("denoising", total.detach())];
        Ok(Loss { total, parts })
    }

    fn samples(&self, batch: &NoisyLatents) -> Vec<usize> {
        batch.items.clone()
    }

    fn suspects(&self, items: &[usize], epoch: u64) -> Result<Vec<String>> {
        let mut suspects = Vec::new();
        for &item in items {
            let batch = self.drawn(&[item], epoch)?;
            let loss = guard::guard(|| Ok(no_grad(|| self.loss_sum(&batch, Pass::default())).double_value(&[])))?;
            if !loss.is_finite() {
                suspects.push(item);
            }
        }
        let items = if suspects.is_empty() { items } else { &suspects };
        Ok(items.iter().map(|&item| self.train[item].image.display().to_string()).collect())
    }

    fn split(&self, batch: &NoisyLatents, most: usize) -> Option<Vec<NoisyLatents>> {
        let parts = batch.items.chunks(most.max(1)).enumerate().map(|(i, items)| {
            let [first, count] = [i * most.max(1), items.len()].map(|n| i64::try_from(n).expect("a few samples"));
            batch.map(items.to_vec(), &mut |tensor| tensor.narrow(0, first, count))
        });
        Some(parts.collect())
    }

    /// The loss of the validation images at fixed timesteps, with fixed noise and without the weights of timesteps.
    fn validate(&self, observer: &dyn Observer) -> Result<Option<Validation>> {
        if self.validated.is_empty() {
            return Ok(None);
        }
        let total = self.validated.len();
        observer.on(&Event::Started { phase: "validate".into(), total: total as u64, unit: "images" });
        let mut sum = 0.0;
        for item in 0..total {
            let mut batch = self.fixed(item)?;
            batch.factors = guard::guard(|| {
                let factors = batch.factors.copy();
                let _ = factors.narrow(1, 2, 1).fill_(1.0);
                Ok(factors)
            })?;
            for part in self.split(&batch, self.engine.micro_batch).unwrap_or_default() {
                sum += guard::guard(|| Ok(no_grad(|| self.loss_sum(&part, Pass::default())).double_value(&[])))?;
            }
            observer.on(&Event::Advanced { done: item as u64 + 1 });
        }
        observer.on(&Event::Finished);
        let loss = sum / (total * VALIDATED_TIMESTEPS) as f64;
        if !loss.is_finite() {
            return Err(Error::Diverged { reason: "the validation loss is not finite".into() });
        }
        Ok(Some(Validation { score: -loss, values: vec![("loss_denoising".into(), loss)] }))
    }

    fn save(&self, folder: &mut Staged) -> Result<()> {
        self.network.save(folder)?;
        folder.write_bytes(resume::DATA_FILE, self.identity.to_json().as_bytes())?;
        folder.write_bytes(resume::CONFIG_FILE, self.resolved.as_bytes())
    }

    fn load(&self, folder: &Path) -> Result<()> {
        self.network.load(folder)
    }
}
