//! Images from the network in training: samples, their grid, and their distance to real images (KID, FID, MMD).
//!
//! The network in training itself makes the images: there is no second copy of it. The autoencoder and the feature
//! network are loaded for this pass alone.

use super::cache::Cache;
use super::step::Denoiser;
use crate::augment::autoencoder::Autoencoder;
use crate::augment::check_interrupt;
use crate::augment::inpaint_mask::SquareFrame;
use crate::augment::pipeline::{
    Placement, PromptEmbedding, bytes, conditioning, doubled, guided, noise, on, pictures, placed, vae_kind,
};
use crate::augment::pipeline_config::PipelineConfig;
use crate::augment::quality::{FeatureSource, QualityReport};
use crate::data::decode;
use crate::data::sheet::{Tile, sheet};
use crate::event::{Event, Observer};
use crate::models::diffusion::sampler::{History, Sampler};
use crate::models::diffusion::unet::Pass;
use crate::tensor::{Device, Kind, Tensor, guard, ledger, memory, module_path, no_grad};
use crate::trainer::{Ranks, ValidationPicture, ValidationScore};
use crate::{Error, Result, files};
use image::{RgbImage, imageops};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Images on a grid.
const SHOWN: usize = 24;
/// Columns of a grid.
const COLUMNS: usize = 6;
/// Name of the mean kernel distance in the records.
const KID: &str = "kid";

/// Computes features of images, `[n, d]`.
pub type Extract = Rc<dyn Fn(&[PathBuf]) -> Result<Tensor>>;

/// Where the samples of a training go, and what they are compared with.
pub struct Quality {
    /// Folder of the images.
    pub folder: PathBuf,
    /// Sizes and files of the generator.
    pub pipeline_config: PipelineConfig,
    /// What computes the features.
    pub source: FeatureSource,
    /// Computes features of images. Inception is loaded each time, so that it takes no memory otherwise; a segmenter stays
    /// loaded.
    pub extract: Extract,
    /// The classes of the training images.
    pub classes: Vec<SampledClass>,
    /// Set by Ctrl-C: the pass ends with [`Error::Interrupted`].
    pub interrupt: Arc<AtomicBool>,
}

/// A class of images.
pub struct SampledClass {
    /// Its name.
    pub modality: String,
    /// Features of its real training images.
    pub real: Tensor,
    /// Samples to make.
    pub samples: Vec<Request>,
}

/// A sample to make.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Number of the image whose region or mask is used.
    pub item: usize,
    /// Number of its caption.
    pub caption: usize,
    /// Number of its negative caption.
    pub negative: usize,
    /// Seed of its noise.
    pub seed: u64,
    /// The place of that image in the square: only this part of the sample was trained.
    pub frame: SquareFrame,
}

/// A measured pass.
pub struct MeasuredSamples {
    /// `kid`, `kid_low`, ... for the records.
    pub values: Vec<(String, f64)>,
    /// The score: minus the mean KID of all classes.
    pub score: ValidationScore,
    /// The grid, on the first rank.
    pub picture: Option<ValidationPicture>,
}

/// Side of the tiles in which larger images are decoded, so that this needs less memory than a training step.
const TILE: i64 = 192;

/// Loads the autoencoder of `pipeline_config` in the dtype of the samples.
///
/// # Errors
/// [`Error::Weights`]; typed errors of libtorch.
pub(super) fn decoder(pipeline_config: &PipelineConfig, denoiser: &Denoiser) -> Result<Autoencoder> {
    let kind = denoiser.sample_kind();
    let placement = Placement { device: denoiser.device, kind, seed: denoiser.engine.seed };
    Autoencoder::load(pipeline_config, placement, vae_kind(pipeline_config, kind))
}

/// Images of `latents [b, c, s, s]`, one after another, `[b, S, S, 3]` bytes on the host.
///
/// # Errors
/// [`Error::Diverged`] for an image that is not finite, also in fp32; typed errors of libtorch.
pub(super) fn decoded(decoder: &Autoencoder, latents: &Tensor) -> Result<Tensor> {
    let _module = module_path::enter("samples");
    let latents = placed(decoder.placement.device, latents);
    let is_large = latents.size()[2] * decoder.pipeline_config.vae.downscale() > TILE;
    let pixels = decoder.images(&latents, &|vae, latents| {
        if is_large { vae.decode_tiled(latents, TILE) } else { vae.decode_sliced(latents) }
    })?;
    let reason = "a sample of the network in training is not finite";
    pixels.map(|pixels| bytes(&pixels)).ok_or_else(|| Error::Diverged { reason: reason.into() })
}

/// What the network reads to make a batch of images, in host memory.
pub struct Conditions {
    /// Captions.
    pub positive: Vec<PromptEmbedding>,
    /// Negative captions, used with guidance.
    pub negative: Vec<PromptEmbedding>,
    /// Regions or masks, stacked.
    pub condition: Option<Tensor>,
    /// Seeds of the noise.
    pub seeds: Vec<u64>,
}

impl Quality {
    /// Makes the samples, divided among `ranks`, writes them as files, and compares them with the real images. All ranks
    /// get the values; the first one has the grid.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Diverged`] for images that are not finite; [`Error::Interrupted`]; [`Error::Peer`]; typed
    /// errors of libtorch.
    pub fn measure(
        &self,
        denoiser: &Denoiser,
        cache: &Cache,
        ranks: Ranks,
        observer: &dyn Observer,
    ) -> Result<MeasuredSamples> {
        memory_line("Computing quality metrics... before", denoiser.device, observer);
        ranks.agree(guard::guard(|| self.write_samples(denoiser, cache, ranks, observer)))?;
        let compared = ranks.is_main().then(|| guard::guard(|| self.compare(denoiser, observer)));
        let mut compared = ranks.gather_if_all(compared.transpose())?;
        // blocks of the autoencoder would only divide the memory of the next steps
        memory::release_cache(denoiser.device)?;
        memory_line("Computing quality metrics... after", denoiser.device, observer);
        let values = compared.swap_remove(0).expect("the first rank compares");
        let values: Vec<(String, f64)> = values.into_iter().map(|(name, bits)| (name, f64::from_bits(bits))).collect();
        let score = score(&values);
        let picture = ranks.is_main().then(|| self.grid()).transpose()?;
        Ok(MeasuredSamples { values, score, picture })
    }

    /// The file of sample `number` of class `index`.
    fn file(&self, index: usize, number: usize) -> PathBuf {
        let name = file_name(&self.classes[index].modality);
        self.folder.join(format!("{index:02}-{name}-{number:03}.png"))
    }

    /// Makes and writes the samples of this rank.
    fn write_samples(&self, denoiser: &Denoiser, cache: &Cache, ranks: Ranks, observer: &dyn Observer) -> Result<()> {
        let batch = denoiser.config.sample_batch.max(1);
        let own = |class: &SampledClass| {
            let count = class.samples.len();
            let batches = ranks.shard().range(count.div_ceil(batch));
            (batches.start * batch).min(count)..(batches.end * batch).min(count)
        };
        let total: usize = self.classes.iter().map(|class| own(class).len()).sum();
        observer.on(&Event::Started { phase: "samples".into(), total: total as u64, unit: "images" });
        files::create_folders(&self.folder).map_err(Error::io(&self.folder, "create"))?;
        let mut done = 0;
        let mut latents = Vec::new();
        for class in &self.classes {
            latents.push(self.latents(&class.samples[own(class)], denoiser, cache, observer, &mut |count| {
                done += count;
                observer.on(&Event::Advanced { done: done as u64 });
            })?);
        }
        // after all of them, so that the autoencoder and the network's passes are never in memory together
        let decoder = decoder(&self.pipeline_config, denoiser)?;
        for (index, (class, latents)) in self.classes.iter().zip(latents).enumerate() {
            let own = own(class);
            for (number, latents) in own.zip(latents) {
                check_interrupt(&self.interrupt)?;
                let made = pictures(&guard::guard(|| no_grad(|| decoded(&decoder, &latents)))?);
                let image = inner(&made[0], class.samples[number].frame);
                crate::data::sheet::save(&image.into(), &self.file(index, number))?;
            }
        }
        observer.on(&Event::Finished);
        Ok(())
    }

    /// Compares the samples with real images: names and values, these as bits.
    fn compare(&self, denoiser: &Denoiser, observer: &dyn Observer) -> Result<Vec<(String, u64)>> {
        let mut report = QualityReport::default();
        for (index, class) in self.classes.iter().enumerate() {
            let made: Vec<PathBuf> = (0..class.samples.len()).map(|number| self.file(index, number)).collect();
            let features = (self.extract)(&made)?;
            report.add(&self.source, &class.modality, [&class.real, &features], denoiser.engine.seed)?;
        }
        observer.on(&Event::Note(format!("quality of the samples against real training images\n{report}")));
        Ok(summary(&report)?.into_iter().map(|(name, value)| (name, value.to_bits())).collect())
    }

    /// A picture of the first samples of each class.
    fn grid(&self) -> Result<ValidationPicture> {
        let mut tiles = Vec::new();
        for (index, class) in self.classes.iter().enumerate() {
            for number in 0..class.samples.len().min(SHOWN.div_ceil(self.classes.len())) {
                let image = decode::image(&self.file(index, number))?.to_rgb8();
                let name = class.modality.clone();
                tiles.push(Tile { image, name, shows: "sample", notes: String::new() });
            }
        }
        Ok(ValidationPicture { name: "samples".into(), image: sheet(&tiles, COLUMNS) })
    }

    /// The latents of each of `samples`, in host memory. If memory runs out, batches are halved.
    fn latents(
        &self,
        samples: &[Request],
        denoiser: &Denoiser,
        cache: &Cache,
        observer: &dyn Observer,
        advance: &mut dyn FnMut(usize),
    ) -> Result<Vec<Tensor>> {
        let mut all = Vec::new();
        let mut most = denoiser.config.sample_batch.max(1);
        while all.len() < samples.len() {
            check_interrupt(&self.interrupt)?;
            let first = all.len();
            let requests = &samples[first..samples.len().min(first + most)];
            let conditions = Conditions::read(requests, denoiser, cache)?;
            let made = guard::guard(|| no_grad(|| latents(denoiser, &self.pipeline_config, &conditions, usize::MAX)));
            match made {
                Err(Error::OutOfMemory { .. }) if most > 1 => {
                    most /= 2;
                    memory::clear_failure();
                    memory::release_cache(denoiser.device)?;
                    let text = format!("memory ran out: samples are made in batches of {most}");
                    observer.on(&Event::Warning(text));
                }
                made => {
                    all.extend(on(Device::Cpu, &made?).split(1, 0));
                    advance(requests.len());
                }
            }
        }
        Ok(all)
    }
}

impl Conditions {
    fn read(requests: &[Request], denoiser: &Denoiser, cache: &Cache) -> Result<Self> {
        let _category = ledger::enter(ledger::Category::Inputs);
        let texts = |of: fn(&Request) -> usize| -> Result<Vec<PromptEmbedding>> {
            requests.iter().map(|request| cache.embedding(of(request))).collect()
        };
        let conditions = requests.iter().map(|request| cache.condition(request.item, 0));
        let has_conditions = denoiser.config.condition().count() > 0;
        let stacked = || guard::guard(|| Ok(Tensor::stack(&conditions.collect::<Result<Vec<_>>>()?, 0)));
        Ok(Self {
            positive: texts(|request| request.caption)?,
            negative: texts(|request| request.negative)?,
            condition: has_conditions.then(stacked).transpose()?,
            seeds: requests.iter().map(|request| request.seed).collect(),
        })
    }
}

/// Makes the latents of a batch of images, `[b, c, s, s]` fp32. At most `steps` denoising steps run.
///
/// # Errors
/// [`Error::Config`] for too many steps; typed errors of libtorch.
pub fn latents(
    denoiser: &Denoiser,
    pipeline_config: &PipelineConfig,
    conditions: &Conditions,
    steps: usize,
) -> Result<Tensor> {
    let _module = module_path::enter("samples");
    let (config, device) = (&denoiser.config, denoiser.device);
    let sampler = Sampler::new(pipeline_config.sampler, &pipeline_config.scheduler, config.sample_steps)?;
    let (kind, guidance) = (denoiser.sample_kind(), config.sample_guidance);
    let negative = conditions.negative.iter().filter(|_| guidance > 1.0);
    let rows: Vec<&PromptEmbedding> = negative.chain(&conditions.positive).collect();
    let conditioning = conditioning(device, &rows, config.image_size);
    let condition = conditions.condition.as_ref().map(|condition| doubled(&placed(device, condition), guidance));
    let noise = noise(pipeline_config, config.image_size, device, &conditions.seeds);
    let mut latents = noise * sampler.init_noise_scale;
    let mut history = History::default();
    for (i, &time) in sampler.timesteps.iter().enumerate().take(steps) {
        let input = doubled(&sampler.scale_model_input(&latents, i).to_kind(kind), guidance);
        let times = Tensor::full([input.size()[0]], time, (Kind::Float, device));
        let output = denoiser.predict(&input, &times, &conditioning, condition.as_ref(), Pass::default());
        drop(input);
        let output = guided(output.to_kind(Kind::Float), guidance);
        latents = sampler.step(i, &output, &latents, &mut history);
    }
    Ok(latents)
}

/// The part of a square that shows the image, without the padding.
fn inner(square: &RgbImage, frame: SquareFrame) -> RgbImage {
    let (left, top) = frame.offset;
    imageops::crop_imm(square, left, top, frame.inner.0, frame.inner.1).to_image()
}

/// A class as a part of a file's name.
fn file_name(modality: &str) -> String {
    modality.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect()
}

fn memory_line(what: &str, device: Device, observer: &dyn Observer) {
    if let Ok(reading) = memory::read(device) {
        let (allocated, reserved) = (reading.allocated, reading.reserved);
        observer.on(&Event::Note(format!("{what}: tensors {allocated}, reserved {reserved}")));
    }
}

/// Values for the records; `kid` is the mean of the kernel distances of the classes.
fn summary(report: &QualityReport) -> Result<Vec<(String, f64)>> {
    let mut values = Vec::new();
    let (mut sum, mut variance, mut count) = (0.0, 0.0, 0.0);
    for row in &report.rows {
        let Some(value) = row.value else { continue };
        values.push((format!("{}/{}", row.metric, row.modality), value));
        if row.metric.starts_with("KID")
            && let Some((low, high)) = row.low.zip(row.high)
        {
            sum += value;
            variance += ((high - low) / 2.0).powi(2);
            count += 1.0;
        }
    }
    if count == 0.0 {
        let reason = "no class has the four real images and four samples that a kernel distance needs";
        let hint = "raise `finetune.samples`, or set it to 0";
        return Err(Error::config("finetune.samples", reason, hint));
    }
    let (kid, half) = (sum / count, f64::sqrt(variance) / count);
    values.extend([(KID.to_owned(), kid), ("kid_low".to_owned(), kid - half), ("kid_high".to_owned(), kid + half)]);
    Ok(values)
}

/// Minus the mean KID.
fn score(values: &[(String, f64)]) -> ValidationScore {
    let kid = values.iter().find(|(name, _)| name == KID).expect("a part of every summary").1;
    ValidationScore { value: -kid, is_noisy: true, kind: "KID" }
}
