//! A training step of the denoiser: samples become a micro-batch, and the micro-batch a loss.
//!
//! The training and its dry run both call these functions; they differ only in where the samples come from.

use super::cache::Latents;
use super::network::Network;
use super::objective::{NoisyBatch, Objective};
use super::settings::{FinetuneConfig, FinetuneRun};
use crate::augment::pipeline::{Placement, PromptEmbedding, on, time_ids};
use crate::augment::pipeline_config::PipelineConfig;
use crate::models::diffusion::unet::{Added, Conditioning, Pass};
use crate::tensor::{Device, Kind, META, Tensor, guard, ledger, no_grad, rng};
use crate::trainer::{BatchSize, Loss, TrainConfig};
use crate::{Error, Result};

/// A network in training, with its objective and its settings.
pub struct Denoiser {
    /// The networks.
    pub network: Network,
    /// Its objective.
    pub objective: Objective,
    /// Settings of the fine-tuning.
    pub config: FinetuneConfig,
    /// Settings of the engine.
    pub engine: TrainConfig,
    /// Device of the network.
    pub device: Device,
}

/// An encoded image and one of its captions.
#[derive(Debug)]
pub struct EncodedSample {
    /// The image.
    pub latents: Latents,
    /// The caption.
    pub embedding: PromptEmbedding,
    /// Condition besides latents and caption: region and mask, or none.
    pub condition: Option<Tensor>,
    /// Random choices: timestep, noise seed.
    pub draw: SampleDraw,
}

/// Random choices of a sample.
#[derive(Debug, Clone, Copy, Default)]
pub struct SampleDraw {
    /// Number of the image in the cache.
    pub item: usize,
    /// Training timestep.
    pub timestep: usize,
    /// Seed of its noise.
    pub seed: u64,
    /// Whether the latents are drawn from their distribution; else they are its mean.
    pub draws_latents: bool,
}

/// A micro-batch; all tensors but masks are fp32.
#[derive(Debug)]
pub struct NoisyLatents {
    /// `[b, c, h, w]`.
    clean: Tensor,
    /// `[b, c, h, w]`.
    noise: Tensor,
    /// `[b, 1, h, w]`: weights of the loss.
    pub(super) pixels: Tensor,
    /// `[b, 3]`: see [`NoisyBatch::factors`].
    factors: Tensor,
    /// `[b]`.
    timesteps: Tensor,
    /// Captions.
    conditioning: Conditioning,
    /// See [`Condition`](super::cache::Condition), with a batch dimension.
    condition: Option<Tensor>,
    /// What was drawn for the rows.
    pub draws: Vec<SampleDraw>,
}

impl NoisyLatents {
    /// What the objective reads.
    fn noisy(&self) -> NoisyBatch<'_> {
        NoisyBatch { clean: &self.clean, noise: &self.noise, factors: &self.factors, pixels: &self.pixels }
    }

    /// This batch with `change(tensor)` in place of each tensor.
    #[must_use]
    pub fn map(&self, draws: Vec<SampleDraw>, change: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        Self {
            clean: change(&self.clean),
            noise: change(&self.noise),
            pixels: change(&self.pixels),
            factors: change(&self.factors),
            timesteps: change(&self.timesteps),
            conditioning: self.conditioning.map(change),
            condition: self.condition.as_ref().map(change),
            draws,
        }
    }

    /// Numbers of the training or validation images.
    pub fn items(&self) -> Vec<usize> {
        self.draws.iter().map(|draw| draw.item).collect()
    }

    /// Number of samples.
    pub fn size(&self) -> BatchSize {
        BatchSize { samples: self.draws.len() as f64, ..BatchSize::default() }
    }

    /// The same samples, at most `most` per batch.
    pub fn split(&self, most: usize) -> Vec<Self> {
        let most = most.max(1);
        let parts = self.draws.chunks(most).enumerate().map(|(i, draws)| {
            let [first, count] = [i * most, draws.len()].map(|n| i64::try_from(n).expect("a few samples"));
            self.map(draws.to_vec(), &mut |tensor| tensor.narrow(0, first, count))
        });
        parts.collect()
    }

    /// The same samples, each timestep with the weight 1.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn unweighted(mut self) -> Result<Self> {
        self.factors = guard::guard(|| {
            let factors = self.factors.copy();
            let _ = factors.narrow(1, 2, 1).fill_(1.0);
            Ok(factors)
        })?;
        Ok(self)
    }
}

/// A sample without its batch dimension.
struct Row {
    clean: Tensor,
    noise: Tensor,
    pixels: Tensor,
    context: Tensor,
    pooled: Option<Tensor>,
    condition: Option<Tensor>,
}

impl Denoiser {
    /// Builds the network of a generator on `device` and loads its weights.
    ///
    /// # Errors
    /// As [`Network::new`].
    pub fn new(pipeline_config: &PipelineConfig, run: &FinetuneRun, device: Device) -> Result<Self> {
        let placement = Placement { device, kind: run.train.precision.kind(), seed: run.train.seed };
        let masters = run.train.offload_weights.then_some(placement.kind);
        Ok(Self {
            network: Network::new(pipeline_config, &run.finetune, placement, masters)?,
            objective: Objective::new(&pipeline_config.scheduler, &run.finetune),
            config: run.finetune.clone(),
            engine: run.train.clone(),
            device,
        })
    }

    /// Dtype in which samples are made.
    pub fn sample_kind(&self) -> Kind {
        self.config.sample_precision.beside(self.engine.precision).kind()
    }

    /// Images of an optimizer step.
    pub fn effective_batch(&self) -> usize {
        self.engine.micro_batch * self.engine.accumulation
    }

    /// The micro-batch of `samples`, on the device of their latents.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn batch(&self, samples: Vec<EncodedSample>) -> Result<NoisyLatents> {
        let _category = ledger::enter(ledger::Category::Inputs);
        let draws: Vec<SampleDraw> = samples.iter().map(|sample| sample.draw).collect();
        let rows: Vec<Row> = samples.into_iter().map(|sample| self.row(sample)).collect::<Result<_>>()?;
        guard::guard(|| {
            let stacked = |of: &dyn Fn(&Row) -> &Tensor| {
                Tensor::stack(&rows.iter().map(|row| of(row).shallow_clone()).collect::<Vec<_>>(), 0)
            };
            let device = rows.first().map_or(Device::Cpu, |row| row.clean.device());
            let size = self.config.image_size;
            let numbers = |values: &[f32]| on(device, &Tensor::from_slice(values));
            let factors: Vec<f32> = draws.iter().flat_map(|draw| self.objective.factors(draw.timestep)).collect();
            let timesteps: Vec<f32> = draws.iter().map(|draw| draw.timestep as f32).collect();
            let of_all = |of: &dyn Fn(&Row) -> Option<&Tensor>| {
                let tensors: Option<Vec<Tensor>> = rows.iter().map(|row| of(row).map(Tensor::shallow_clone)).collect();
                tensors.map(|tensors| Tensor::stack(&tensors, 0))
            };
            Ok(NoisyLatents {
                clean: stacked(&|row| &row.clean),
                noise: stacked(&|row| &row.noise),
                pixels: stacked(&|row| &row.pixels),
                factors: numbers(&factors).view([-1, 3]),
                timesteps: numbers(&timesteps),
                conditioning: Conditioning {
                    context: stacked(&|row| &row.context),
                    added: of_all(&|row| row.pooled.as_ref())
                        .map(|pooled| Added { pooled, time_ids: on(device, &time_ids(size, draws.len())) }),
                },
                condition: of_all(&|row| row.condition.as_ref()),
                draws,
            })
        })
    }

    fn row(&self, sample: EncodedSample) -> Result<Row> {
        let EncodedSample { latents, embedding, condition, draw, .. } = sample;
        guard::guard(|| {
            rng::seed(draw.seed);
            let place = (Kind::Float, latents.mean.device());
            let size = latents.mean.size();
            let mut noise = Tensor::randn(&size, place);
            if self.config.noise_offset > 0.0 {
                noise += Tensor::randn([size[0], 1, 1], place) * self.config.noise_offset;
            }
            let clean = if draw.draws_latents {
                latents.mean + latents.std * Tensor::randn(&size, place)
            } else {
                latents.mean
            };
            let weights = latents.inside * (latents.lesion * (self.config.lesion_weight - 1.0) + 1.0);
            let mean = weights.mean(Kind::Float).clamp_min(1e-6);
            let PromptEmbedding { context, pooled } = embedding;
            Ok(Row { clean, noise, pixels: weights / mean, context, pooled, condition })
        })
    }

    /// Sum of the denoising losses of the samples, an fp64 scalar.
    pub fn loss_sum(&self, batch: &NoisyLatents, pass: Pass) -> Tensor {
        let batch = batch.map(Vec::new(), &mut |tensor| tensor.to_device(self.device));
        let NoisyLatents { timesteps, conditioning, condition, .. } = &batch;
        let kind = self.engine.precision.kind();
        self.objective.loss(&batch.noisy(), |noisy| {
            self.predict(&noisy.to_kind(kind), timesteps, conditioning, condition.as_ref(), pass)
        })
    }

    /// The prediction of the networks.
    ///
    /// # Shapes
    /// `noisy [b, c, h, w]` in the compute dtype, `timesteps [b]` fp32, `condition` as in [`NoisyLatents`], to `[b, c, h,
    /// w]`.
    pub fn predict(
        &self,
        noisy: &Tensor,
        timesteps: &Tensor,
        conditioning: &Conditioning,
        condition: Option<&Tensor>,
        pass: Pass,
    ) -> Tensor {
        let Network { unet, controlnet, .. } = &self.network;
        match (controlnet, condition) {
            (Some(controlnet), Some(condition)) => {
                let image = condition.expand([-1, 3, -1, -1], true);
                let residuals = controlnet.forward(noisy, timesteps, conditioning, (&image, 1.0), pass);
                unet.forward(noisy, timesteps, conditioning, Some(&residuals), pass)
            }
            (_, Some(region)) => {
                let input = Tensor::cat(&[noisy, &region.to_kind(noisy.kind())], 1);
                unet.forward(&input, timesteps, conditioning, None, pass)
            }
            (_, None) => unet.forward(noisy, timesteps, conditioning, None, pass),
        }
    }

    /// The loss of a micro-batch as the engine expects it: its part of the mean over the effective batch.
    pub fn loss(&self, batch: &NoisyLatents, effective_batch: BatchSize) -> Loss {
        let pass = Pass { checkpoint: self.engine.checkpointing.count() };
        Loss { total: self.loss_sum(batch, pass) / effective_batch.samples, parts: Vec::new() }
    }

    /// Whether the loss of a batch of training images is finite.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn has_finite_loss(&self, batch: &NoisyLatents) -> Result<bool> {
        let loss = || no_grad(|| self.loss_sum(batch, Pass::default())).double_value(&[]);
        Ok(guard::guard(|| Ok(loss()))?.is_finite())
    }

    /// Sum of the losses of a micro-batch of validation images, without weights of timesteps.
    ///
    /// # Errors
    /// [`Error::Diverged`] for a loss that is not finite; typed errors of libtorch.
    pub fn validation_loss(&self, batch: NoisyLatents) -> Result<f64> {
        let mut sum = 0.0;
        for part in batch.unweighted()?.split(self.engine.micro_batch) {
            sum += guard::guard(|| Ok(no_grad(|| number(&self.loss_sum(&part, Pass::default())))))?;
        }
        if sum.is_finite() {
            Ok(sum)
        } else {
            Err(Error::Diverged { reason: "the validation loss is not finite".into() })
        }
    }
}

/// The value of a scalar; 0 on the meta device.
fn number(scalar: &Tensor) -> f64 {
    if scalar.device() == META { 0.0 } else { scalar.double_value(&[]) }
}
