//! Diffusion pipeline: prompts and images to generated images in four steps: encode prompts, encode images, denoise,
//! decode.
//!
//! Networks run in one dtype (bf16 by default); latents and the sampler's arithmetic are fp32. Prompts are encoded
//! first, and the text encoders are freed before the other networks are loaded. Legend: b batch, s side of the
//! latents, S side of the images.
//!
//! Deviations from diffusers: latents are not rounded to the networks' dtype after each step. Preserved regions are
//! also kept fixed for 9-channel inpainting networks.

use super::autoencoder::Autoencoder;
use super::pipeline_config::{PipelineConfig, PipelinePart};
pub use super::placement::Placement;
use super::placement::to_host;
use super::settings::{AugmentConfig, Decode};
use crate::event::{Event, Observer};
use crate::models::diffusion::controlnet::ControlNet;
use crate::models::diffusion::lora::{self, Adapter};
use crate::models::diffusion::sampler::{History, Sampler};
use crate::models::diffusion::text::TextTower;
use crate::models::diffusion::unet::{Added, Conditioning, Pass, Unet};
use crate::tensor::store::Store;
use crate::tensor::{Device, Kind, META, Tensor, dims, guard, ledger, meta, module_path, no_grad, rng};
use crate::{Error, Result};
use image::RgbImage;

/// Encoded prompt.
#[derive(Debug)]
pub struct PromptEmbedding {
    /// `[77, d]`
    pub(super) context: Tensor,
    /// SDXL: `[p]`
    pub(super) pooled: Option<Tensor>,
}

/// Indices of a prompt and its negative prompt in a list of texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptPair {
    /// The prompt.
    pub positive: usize,
    /// The negative prompt; unused without guidance.
    pub negative: usize,
}

/// Token ids by text encoder and text, [`crate::data::text::clip_bpe::CONTEXT`] each.
pub type TextIds = Vec<Vec<Vec<i64>>>;

/// Token ids of `texts`. Warns about texts that were cut; `what` is what they are, for example `prompts`.
///
/// # Errors
/// Errors of the tokenizer.
pub fn tokenize(config: &PipelineConfig, texts: &[String], what: &str, observer: &dyn Observer) -> Result<TextIds> {
    let tokenizers = config.tokenizers()?;
    let mut cut = Vec::new();
    let mut ids = vec![Vec::new(); tokenizers.len()];
    for text in texts {
        let mut is_cut = false;
        for (tokenizer, ids) in tokenizers.iter().zip(&mut ids) {
            let encoded = tokenizer.encode(text)?;
            is_cut |= encoded.truncated;
            ids.push(encoded.ids);
        }
        cut.extend(is_cut.then_some(text));
    }
    // every letter is a token of a model with random weights
    if let Some(first) = cut.first().filter(|_| !config.is_random()) {
        let (all, cut) = (texts.len(), cut.len());
        let text = format!("{cut} of {all} {what} are longer than 77 tokens and were cut; the first: {first}");
        observer.on(&Event::Warning(text));
    }
    Ok(ids)
}

/// Encodes texts one after another and frees the encoders. `ids` come from [`tokenize`]. Empty texts become zeros if
/// the pipeline asks for that. LoRA `adapters` are merged into the encoders first.
///
/// # Errors
/// [`Error::Weights`]; typed errors of libtorch.
pub fn encode_prompts(
    pipeline_config: &PipelineConfig,
    placement: Placement,
    ids: &[Vec<Vec<i64>>],
    is_empty: &[bool],
    adapters: &[(Vec<Adapter>, f64)],
) -> Result<Vec<PromptEmbedding>> {
    let sdxl = pipeline_config.unet.is_sdxl();
    let mut contexts: Vec<Vec<Tensor>> = (0..is_empty.len()).map(|_| Vec::new()).collect();
    let mut pooled: Vec<Option<Tensor>> = (0..is_empty.len()).map(|_| None).collect();
    for (number, config) in pipeline_config.texts.iter().enumerate() {
        let projects = sdxl && number == 1;
        let build = |scope: &_| TextTower::new(scope, config, projects);
        let (encoder, store) = placement.network(pipeline_config, PipelinePart::Text(number), placement.kind, build)?;
        let component = if number == 0 { lora::LoraNetwork::TextEncoder } else { lora::LoraNetwork::TextEncoder2 };
        merge(&store, component, adapters)?;
        let _module = module_path::enter_at("text_encoder", number);
        for (text, ids) in ids[number].iter().enumerate() {
            guard::guard(|| {
                no_grad(|| {
                    let ids = on(placement.device, &Tensor::from_slice(ids).view([1, -1]));
                    let out = encoder.forward(&ids);
                    let context = if sdxl { out.penultimate } else { out.last };
                    contexts[text].push(to_host(&context.squeeze_dim(0)));
                    if projects {
                        pooled[text] = out.pooled.map(|p| to_host(&p.squeeze_dim(0)));
                    }
                });
                Ok(())
            })?;
        }
    }
    let joined = contexts.into_iter().zip(pooled).zip(is_empty).map(|((context, pooled), &empty)| {
        let context = match context.as_slice() {
            [one] => one.shallow_clone(),
            several => Tensor::cat(several, -1),
        };
        if empty && pipeline_config.zero_without_negative {
            return PromptEmbedding { context: context.zeros_like(), pooled: pooled.map(|p| p.zeros_like()) };
        }
        PromptEmbedding { context, pooled }
    });
    guard::guard(|| Ok(no_grad(|| joined.collect())))
}

/// Inputs of a batch.
#[derive(Debug)]
pub struct GenerationBatch {
    /// `[b, 3, S, S]` fp32 in -1..=1; `None` for `mask_to_image`.
    pub pixels: Option<Tensor>,
    /// `[b, 1, s, s]` fp32, 1 = repaint; `None` = repaint everything.
    pub repaint: Option<Tensor>,
    /// Whether latents outside `repaint` are reset to the source's at every step (diffusers does not do this for
    /// inpainting networks).
    pub preserves: bool,
    /// `[b, 3, S, S]` fp32 in 0..=1, input of the ControlNet.
    pub control: Option<Tensor>,
    /// `[b, 4, s, s]` fp32, see [`Generator::noise`].
    pub noise: Tensor,
    /// Prompts of each image.
    pub prompts: Vec<PromptPair>,
}

/// The sampler of a generation.
///
/// # Errors
/// [`Error::Config`] for a noise schedule or a number of steps that the sampler does not support.
pub fn sampler(pipeline_config: &PipelineConfig, config: &AugmentConfig) -> Result<Sampler> {
    let mut scheduler = pipeline_config.scheduler.clone();
    let kind = match config.sampler.kind() {
        Some((kind, karras)) => {
            scheduler.use_karras_sigmas = karras;
            kind
        }
        None => pipeline_config.sampler,
    };
    Sampler::new(kind, &scheduler, config.steps)
}

/// UNet, autoencoder and optional ControlNet, ready to generate images.
pub struct Generator {
    config: AugmentConfig,
    autoencoder: Autoencoder,
    unet: Unet,
    controlnet: Option<ControlNet>,
    sampler: Sampler,
    // own the tensors of UNet and ControlNet
    _stores: (Store, Option<Store>),
}

/// Dtype in which the autoencoder decodes beside a UNet in `kind`: SDXL's overflows in fp16.
pub(super) fn vae_kind(pipeline_config: &PipelineConfig, kind: Kind) -> Kind {
    if kind == Kind::Half && pipeline_config.vae.force_upcast { Kind::Float } else { kind }
}

/// `tensor` on the device; on the meta device only its sizes.
pub(super) fn on(device: Device, tensor: &Tensor) -> Tensor {
    if device == META { Tensor::empty(tensor.size(), (tensor.kind(), META)) } else { tensor.to_device(device) }
}

/// Device of what a network on `device` reads from files: the CPU; in a plan for the CPU, the meta device.
pub(super) fn input_device(device: Device) -> Device {
    if device == META && meta::target() == meta::PlanTarget::Cpu { META } else { Device::Cpu }
}

/// Zeros for a dry run. In a plan for a GPU, where host memory is not counted, one expanded number represents them.
pub(super) fn blank<const N: usize>(shape: [i64; N], kind: Kind, device: Device) -> Tensor {
    if device == Device::Cpu && meta::target() == meta::PlanTarget::Cuda {
        return Tensor::zeros([1_i64; N], (kind, device)).expand(shape, false);
    }
    Tensor::zeros(shape, (kind, device))
}

/// Noise for images of `side` pixels, `[b, 4, s, s]` fp32, from each image's own seed, so that it does not depend on the
/// rest of the batch.
pub(super) fn noise(pipeline_config: &PipelineConfig, side: i64, device: Device, seeds: &[u64]) -> Tensor {
    let _category = ledger::enter(ledger::Category::Inputs);
    let vae = &pipeline_config.vae;
    let side = side / vae.downscale();
    let each = seeds.iter().map(|&seed| {
        rng::seed(seed);
        Tensor::randn([1, vae.latent_channels, side, side], (Kind::Float, input_device(device)))
    });
    placed(device, &Tensor::cat(&each.collect::<Vec<_>>(), 0))
}

/// What the networks read of the captions of images of `side` pixels, on `device`.
pub(super) fn conditioning(device: Device, rows: &[&PromptEmbedding], side: i64) -> Conditioning {
    let stacked = |of: &dyn Fn(&PromptEmbedding) -> Tensor| {
        placed(device, &Tensor::stack(&rows.iter().map(|row| of(row)).collect::<Vec<_>>(), 0))
    };
    let context = stacked(&|row| row.context.shallow_clone());
    let added = rows.iter().all(|row| row.pooled.is_some()).then(|| {
        let pooled = stacked(&|row| row.pooled.as_ref().expect("all rows have one").shallow_clone());
        Added { pooled, time_ids: on(device, &time_ids(side, rows.len())) }
    });
    Conditioning { context, added }
}

/// SDXL's numbers of whole square images of `side` pixels: original height and width, top and left of the crop, target
/// height and width, `[rows, 6]`.
pub(super) fn time_ids(side: i64, rows: usize) -> Tensor {
    let side = side as f32;
    let rows = i64::try_from(rows).expect("a small batch");
    Tensor::from_slice(&[side, side, 0.0, 0.0, side, side]).repeat([rows, 1])
}

/// A tensor from the host on the device.
pub(super) fn placed(device: Device, tensor: &Tensor) -> Tensor {
    if tensor.device() == device { tensor.shallow_clone() } else { on(device, tensor) }
}

/// `xs`, twice with guidance: for the prediction without the prompts and that with them.
pub(super) fn doubled(xs: &Tensor, guidance: f64) -> Tensor {
    if guidance > 1.0 { Tensor::cat(&[xs, xs], 0) } else { xs.shallow_clone() }
}

/// Guides from the prediction without the prompts, the first half, towards that with them.
pub(super) fn guided(output: Tensor, guidance: f64) -> Tensor {
    if guidance <= 1.0 {
        return output;
    }
    let halves = output.chunk(2, 0);
    &halves[0] + (&halves[1] - &halves[0]) * guidance
}

fn merge(store: &Store, component: lora::LoraNetwork, adapters: &[(Vec<Adapter>, f64)]) -> Result<()> {
    for (adapters, strength) in adapters {
        let own: Vec<&Adapter> = adapters.iter().filter(|adapter| adapter.component == component).collect();
        if !own.is_empty() {
            lora::merge(store, own, *strength)?;
        }
    }
    Ok(())
}

impl Generator {
    /// Loads UNet, autoencoder and, if the pipeline has one, ControlNet.
    ///
    /// # Errors
    /// [`Error::Weights`]; [`Error::Config`] for a sampler that the model does not allow; [`Error::OutOfMemory`].
    pub fn load(
        pipeline_config: &PipelineConfig,
        config: &AugmentConfig,
        placement: Placement,
        adapters: &[(Vec<Adapter>, f64)],
    ) -> Result<Self> {
        let sampler = sampler(pipeline_config, config)?;
        let kind = placement.kind;
        let autoencoder = Autoencoder::load(pipeline_config, placement, vae_kind(pipeline_config, kind))?;
        let build = |scope: &_| Unet::new(scope, &pipeline_config.unet);
        let (unet, store) = placement.network(pipeline_config, PipelinePart::Unet, kind, build)?;
        merge(&store, lora::LoraNetwork::Unet, adapters)?;
        let controlnet = pipeline_config.controlnet.as_ref().map(|sizes| {
            placement.network(pipeline_config, PipelinePart::ControlNet, kind, |scope| ControlNet::new(scope, sizes))
        });
        let (controlnet, control_store) = controlnet.transpose()?.unzip();
        Ok(Self { config: config.clone(), autoencoder, unet, controlnet, sampler, _stores: (store, control_store) })
    }

    /// Image pixels per latent cell.
    pub fn cell_px(&self) -> i64 {
        self.autoencoder.pipeline_config.vae.downscale()
    }

    /// Generates a batch of images.
    ///
    /// # Shapes
    /// To `[b, S, S, 3]` bytes on the host.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], other typed errors of libtorch, [`Error::Diverged`] when an image is not finite.
    pub fn sample(&self, batch: &GenerationBatch, embeddings: &[PromptEmbedding]) -> Result<Tensor> {
        guard::guard(|| no_grad(|| Ok(bytes(&self.render(batch, embeddings)?))))
    }

    /// As [`Self::sample`], without rounding.
    ///
    /// # Shapes
    /// To `[b, 3, S, S]` fp32 in -1..=1 and a little beyond.
    ///
    /// # Errors
    /// As [`Self::sample`].
    pub fn render(&self, batch: &GenerationBatch, embeddings: &[PromptEmbedding]) -> Result<Tensor> {
        guard::guard(|| {
            no_grad(|| {
                let start = self.start(batch);
                let latents = self.denoise(batch, start, embeddings);
                self.decode(&latents)
            })
        })
    }

    /// Encodes the batch's images and prepares the first step.
    pub(super) fn start(&self, batch: &GenerationBatch) -> Start {
        let _module = module_path::enter("encode");
        let noise = &batch.noise;
        let [b, _c, side, _] = dims(noise);
        let clean = batch.pixels.as_ref().map(|pixels| self.encode(pixels));
        let masked = self.autoencoder.pipeline_config.inpaints().then(|| {
            if let (Some(pixels), Some(repaint)) = (&batch.pixels, &batch.repaint) {
                let [_, _, height, width] = dims(pixels);
                let keep = 1.0 - repaint.upsample_nearest2d([height, width], None, None);
                let latents = self.encode(&(pixels * keep));
                Tensor::cat(&[&repaint.shallow_clone(), &latents], 1)
            } else {
                let (place, size) = ((Kind::Float, self.autoencoder.placement.device), self.config.image_size);
                let everything = Tensor::ones([b, 1, side, side], place);
                Tensor::cat(&[&everything, &self.encode(&Tensor::zeros([b, 3, size, size], place))], 1)
            }
        });
        let first = if clean.is_some() { self.sampler.start_index(self.config.strength) } else { 0 };
        let start = match &clean {
            Some(clean) if self.config.strength < 1.0 || first > 0 => self.sampler.add_noise(clean, noise, first),
            _ => noise * self.sampler.init_noise_scale,
        };
        Start { first, start, clean: clean.filter(|_| batch.preserves), masked }
    }

    fn encode(&self, pixels: &Tensor) -> Tensor {
        let Autoencoder { vae, kind, pipeline_config, .. } = &self.autoencoder;
        let pixels = pixels.to_kind(*kind);
        let latents = match self.config.decode() {
            Decode::Whole | Decode::Auto => vae.encode(&pixels),
            Decode::Sliced => vae.encode_sliced(&pixels),
            Decode::Tiled => vae.encode_tiled(&pixels, self.config.tile_px),
        };
        latents.mean.to_kind(Kind::Float) * pipeline_config.vae.scaling_factor
    }

    /// Noise from each image's own seed, so that it does not depend on the rest of the batch.
    ///
    /// # Shapes
    /// To `[b, 4, s, s]` fp32.
    pub fn noise(&self, seeds: &[u64]) -> Tensor {
        let Autoencoder { pipeline_config, placement, .. } = &self.autoencoder;
        noise(pipeline_config, self.config.image_size, placement.device, seeds)
    }

    fn conditioning(&self, prompts: &[PromptPair], embeddings: &[PromptEmbedding]) -> Conditioning {
        let negative = prompts.iter().map(|pair| pair.negative).filter(|_| self.config.is_guided());
        let rows = negative.chain(prompts.iter().map(|pair| pair.positive)).map(|row| &embeddings[row]);
        conditioning(self.autoencoder.placement.device, &rows.collect::<Vec<_>>(), self.config.image_size)
    }

    pub(super) fn denoise(&self, batch: &GenerationBatch, start: Start, embeddings: &[PromptEmbedding]) -> Tensor {
        let _module = module_path::enter("denoise");
        let Start { first, start: mut latents, clean, masked } = start;
        let conditioning = self.conditioning(&batch.prompts, embeddings);
        let Placement { device, kind, .. } = self.autoencoder.placement;
        let input_of = |xs: &Tensor| doubled(&xs.to_kind(kind), self.config.guidance);
        let control = batch.control.as_ref().map(input_of);
        let masked = masked.map(|masked| input_of(&masked));
        let (pass, mut history) = (Pass::default(), History::default());
        for (i, &time) in self.sampler.timesteps.iter().enumerate().skip(first) {
            let input = input_of(&self.sampler.scale_model_input(&latents, i));
            let times = Tensor::full([input.size()[0]], time, (Kind::Float, device));
            let residuals = match (&self.controlnet, &control) {
                (Some(network), Some(image)) => {
                    Some(network.forward(&input, &times, &conditioning, (image, self.config.control_scale), pass))
                }
                _ => None,
            };
            let input = match &masked {
                Some(masked) => Tensor::cat(&[&input, masked], 1),
                None => input,
            };
            let output = self.unet.forward(&input, &times, &conditioning, residuals.as_ref(), pass);
            drop((input, residuals));
            let output = guided(output.to_kind(Kind::Float), self.config.guidance);
            latents = self.sampler.step(i, &output, &latents, &mut history);
            if let (Some(repaint), Some(clean)) = (&batch.repaint, &clean) {
                let preserved = self.sampler.add_noise(clean, &batch.noise, i + 1);
                latents = &preserved + (latents - &preserved) * repaint;
            }
        }
        latents
    }

    /// Images of latents, `[b, 3, S, S]` fp32.
    pub(super) fn decode(&self, latents: &Tensor) -> Result<Tensor> {
        let _module = module_path::enter("decode");
        let pixels = self.autoencoder.images(latents, &|vae, latents| match self.config.decode() {
            Decode::Whole | Decode::Auto => vae.decode(latents),
            Decode::Sliced => vae.decode_sliced(latents),
            Decode::Tiled => vae.decode_tiled(latents, self.config.tile_px),
        });
        pixels?.ok_or_else(|| {
            let hint = match self.autoencoder.kind {
                Kind::Float => ": the networks are incompatible",
                _ => ", not even in fp32: use `augment.precision=bf16`",
            };
            Error::Diverged { reason: format!("a generated image is not finite{hint}") }
        })
    }
}

/// Start of a denoising trajectory.
#[derive(Debug)]
pub(super) struct Start {
    /// First step to run.
    first: usize,
    /// Latents with the noise of that step.
    start: Tensor,
    /// Latents of the source image, if parts of them are preserved.
    clean: Option<Tensor>,
    /// Mask and latents of the masked image, `[b, 5, s, s]`, for inpainting networks.
    masked: Option<Tensor>,
}

/// Converts `[b, 3, S, S]` in -1..=1 to `[b, S, S, 3]` bytes in host memory.
pub(super) fn bytes(pixels: &Tensor) -> Tensor {
    let _category = ledger::enter(ledger::Category::Activations);
    let scaled = (pixels * 127.5 + 127.5).clamp(0.0, 255.0).round();
    let bytes = scaled.to_kind(Kind::Uint8).permute([0, 2, 3, 1]).contiguous();
    if bytes.device() == META { bytes } else { bytes.to_device(Device::Cpu) }
}

/// `bytes [b, S, S, 3]` as images.
pub(super) fn pictures(bytes: &Tensor) -> Vec<RgbImage> {
    let [count, height, width, _] = dims(bytes);
    let [height, width] = [height, width].map(|side| u32::try_from(side).expect("the side of an image"));
    let each = (0..count).map(|i| Vec::<u8>::try_from(bytes.get(i).flatten(0, -1)).expect("bytes"));
    each.map(|pixels| RgbImage::from_raw(width, height, pixels).expect("three bytes for each pixel")).collect()
}
