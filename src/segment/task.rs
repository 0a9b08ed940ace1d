//! PRS-Med's training task: rows of a data root as a [`Task`] for the engine.

pub use super::config::{CacheVision, DataConfig};

use super::batch::Batch;
use super::batch::batches::Steps;
use super::calibration::{Calibration, Calibrator};
use super::config::{BatchNorm, ModelConfig, RANDOM};
use super::example::Example;
use super::layout::Sizes;
use super::measures::validation::{Sums, score};
use super::resume;
use super::rows::{describe, grouped, longest, source_of, texts_of, training_rows};
use super::run_folder::loaded::{Description, LoadedModel};
use super::step::{self, Inputs, Pass, Prepared};
use super::vision_features::FeatureCache;
use super::weights;
use crate::data::classical::Augment;
use crate::data::geometry::MaskNoise;
use crate::data::identity::{DataIdentity, SeenImages};
use crate::data::length_sampler;
use crate::data::loader::{Loader, LoaderOptions, Source, TextLength, single_rows};
use crate::data::manifest::{Manifest, Row, Split};
use crate::data::marks::Marks;
use crate::data::mixing_sampler::{Lengths, MixingSampler};
use crate::data::split::spread;
use crate::data::unreadable::Unreadable;
use crate::event::{Event, Observer};
use crate::models::base::Keys;
use crate::models::prsmed::{MASK_HEAD, MASK_READER, PrsMed};
use crate::models::{decoder, image_encoder, mask_head};
use crate::nn::BatchStatistics;
use crate::segment::Semantics;
use crate::tensor::store::{Role, StoreEntry};
use crate::tensor::weights::Staged;
use crate::tensor::{Device, Tensor, guard, no_grad};
use crate::trainer::graph::{Bucket, Capturable};
use crate::trainer::profile::ModelPart;
use crate::trainer::recovery::Fitting;
use crate::trainer::{BatchSize, Batches, Loss, Parameter, Ranks, Shard, Task, TrainConfig, Validation};
use crate::{Error, Result};
use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The score that decides which checkpoint is the best.
pub const SCORE: &str = "mean of validation Dice and answer-token accuracy";

/// Error of masks before the first validation, as [`Sums::mask_error`].
const FIRST_MASK_ERROR: f64 = 0.05;

/// What the last validation measured.
#[derive(Debug, Clone, Copy)]
struct Measured {
    calibration: Option<Calibration>,
    mask_error: Option<f64>,
}

impl Measured {
    fn of(description: &Description) -> Self {
        Self { calibration: description.calibration, mask_error: description.mask_error }
    }

    fn add_to(self, description: &mut Description) {
        (description.calibration, description.mask_error) = (self.calibration, self.mask_error);
    }
}

/// A model, its data and the settings of its training.
pub struct SegmentTask {
    loaded: LoadedModel,
    train: Arc<Source>,
    plain: Arc<Source>,
    /// Real training rows.
    rows: Lengths,
    /// Groups of real and synthetic rows by image; the sampler orders them.
    groups: Vec<Vec<usize>>,
    /// Sampler of each epoch; its rows are indices of groups.
    sampler: MixingSampler,
    longest: Example,
    val_rows: Vec<usize>,
    feature_cache: Option<Arc<FeatureCache>>,
    config: TrainConfig,
    data: DataConfig,
    /// The resolved configuration, written into every checkpoint.
    resolved: String,
    /// Identity of all rows, written into every checkpoint.
    identity: DataIdentity,
    /// Images of a validation batch.
    validated_at_once: Fitting,
    /// Fitted at the last validation.
    measured: Mutex<Measured>,
    unreadable: Arc<Unreadable>,
}

impl SegmentTask {
    /// A task that trains `loaded` on the train rows of `manifest` and on its synthetic rows. `feature_cache` is the
    /// vision feature cache of [`super::vision_features::open_cache`].
    ///
    /// # Errors
    /// [`Error::Data`] without train rows, or for a row whose text cannot be encoded; [`Error::Config`] when synthetic
    /// rows would leave a step without a real one; [`Error::Io`] for an image or mask that cannot be read.
    pub fn new(
        mut loaded: LoadedModel,
        manifest: &Arc<Manifest>,
        config: TrainConfig,
        data: DataConfig,
        resolved: String,
        feature_cache: Option<FeatureCache>,
    ) -> Result<Self> {
        let feature_cache = feature_cache.map(Arc::new);
        let unreadable = Arc::new(Unreadable::new(data.max_bad_samples));
        let source = || source_of(&loaded, manifest, data.cache_mib << 20, feature_cache.as_deref(), &unreadable);
        let plain = Arc::new(source());
        let train = match data.augment {
            Augment::None => Arc::clone(&plain),
            augment => Arc::new(source().with_augment(augment, config.seed)),
        };
        let (rows, synthetic) = training_rows(manifest, &data)?;
        let (mut texts, more) = (plain.text_lengths(&rows)?, plain.text_lengths(&synthetic)?);
        let tokens = |texts: &[TextLength]| texts.iter().map(|text| text.tokens).collect();
        let rows = Lengths { lengths: tokens(&texts), rows };
        let synthetic = Lengths { lengths: tokens(&more), rows: synthetic };
        let effective_batch = config.micro_batch * config.accumulation;
        let mut groups = Vec::new();
        let real_groups = grouped(&plain, &rows, data.questions_per_image, &mut groups);
        let synthetic_groups = grouped(&plain, &synthetic, data.questions_per_image, &mut groups);
        let sampler =
            MixingSampler::new(real_groups, synthetic_groups, data.synthetic_ratio, effective_batch, config.seed)?
                .with_real_end(data.synthetic_until, config.epochs, config.max_steps);
        let indices = rows.rows.iter().chain(&synthetic.rows).copied();
        texts.extend(more);
        let text_of: HashMap<usize, TextLength> = indices.zip(texts.iter().copied()).collect();
        let hides_answer = loaded.description.model.semantics.hides_answer();
        let train_texts = texts_of(if hides_answer { &groups } else { &[] }, &texts, &text_of);
        let val_rows = spread(manifest.rows_of(Split::Val), data.max_val_rows);
        let val_texts: Vec<_> = plain.text_lengths(&val_rows)?.into_iter().map(|text| vec![text]).collect();
        let questions = groups.iter().map(Vec::len).max().unwrap_or(1);
        let longest = longest(manifest, &texts, questions, [&train_texts, &val_texts], config.micro_batch);
        describe(&mut loaded, manifest, [&rows.rows, &synthetic.rows])?;
        let identity = DataIdentity::of(manifest)?;
        let validated_at_once = Fitting::new(config.micro_batch);
        let measured = Mutex::new(Measured::of(&loaded.description));
        Ok(Self {
            loaded,
            train,
            plain,
            rows,
            groups,
            sampler,
            longest,
            val_rows,
            feature_cache,
            config,
            data,
            resolved,
            identity,
            validated_at_once,
            measured,
            unreadable,
        })
    }

    /// Keeps in the checkpoints which images and patients are trained and validated, beside those that the weights have
    /// seen before. `marks` are those of the images.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] for a damaged journal of synthetic pairs.
    pub fn mark_images(&mut self, marks: &Marks) -> Result<()> {
        let rows: Vec<usize> = self.groups.iter().flatten().copied().collect();
        let mut seen = SeenImages::of(self.plain.manifest(), &rows, &self.val_rows, marks)?;
        seen.add_ancestor(SeenImages::clone(&self.loaded.seen));
        self.identity.seen = Some(seen);
        Ok(())
    }

    /// The longest texts of the training rows.
    pub fn longest(&self) -> Example {
        self.longest
    }

    /// Number of rows that were skipped because their files could not be read.
    pub fn num_skipped(&self) -> usize {
        self.unreadable.count()
    }

    /// True if vision features are cached.
    pub fn has_feature_cache(&self) -> bool {
        self.feature_cache.is_some()
    }

    /// The model and its description.
    pub fn loaded(&self) -> &LoadedModel {
        &self.loaded
    }

    /// The trained model, with the calibration of the last validation.
    #[must_use]
    pub fn into_loaded(self) -> LoadedModel {
        let mut loaded = self.loaded;
        self.measured.into_inner().unwrap_or_else(PoisonError::into_inner).add_to(&mut loaded.description);
        loaded
    }

    /// Measures the running statistics of an encoder with random weights on a few training images, layer after layer
    /// in one pass, for frozen batch normalisation. Does nothing for loaded encoders.
    ///
    /// # Errors
    /// [`Error::Data`] from a sample.
    pub fn calibrate(&self) -> Result<()> {
        let Some(images) = calibration_images(&self.loaded.description.model) else { return Ok(()) };
        let order = length_sampler::epoch_batches(&self.rows.rows, &self.rows.lengths, self.config.seed, 0, images);
        let Some(first) = order.into_iter().next() else { return Ok(()) };
        let batch = self.load(&self.plain, single_rows(vec![first]), (0, false, None))?.next();
        let Some(batch) = batch.transpose()? else { return Ok(()) };
        calibrate(&self.loaded.model, &Batch::from(batch).sam_image)
    }

    /// Real training rows, and the synthetic ones of an epoch (their mean over epochs).
    pub fn rows_of_an_epoch(&self) -> (usize, usize) {
        let real = self.rows.rows.len();
        let all: usize = self.groups.iter().map(Vec::len).sum();
        (real, (all - real) * self.sampler.synthetic_rows() / self.sampler.all_synthetic_rows().max(1))
    }

    /// Batches of groups of rows that share an image.
    fn load(
        &self,
        source: &Arc<Source>,
        batches: Vec<Vec<Vec<usize>>>,
        (epoch, by_image, geometry): (u64, bool, Option<MaskNoise>),
    ) -> Result<Loader> {
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let device = self.loaded.model.options().device;
        let workers = if self.data.workers == 0 { workers(device, cores) } else { self.data.workers };
        let options = LoaderOptions { workers, prefetch: self.data.prefetch, epoch, by_image, geometry };
        Loader::start(Arc::clone(source), batches, options)
    }

    fn measured(&self) -> MutexGuard<'_, Measured> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How training changes the masks that words follow: as much as the masks of the last validation were wrong.
    fn mask_noise(&self) -> Option<MaskNoise> {
        let spread = self.measured().mask_error.unwrap_or(FIRST_MASK_ERROR);
        self.loaded.model.reads_masks().then_some(MaskNoise { seed: self.config.seed, spread })
    }

    fn semantics(&self) -> Semantics {
        self.loaded.description.model.semantics
    }
}

impl Task for SegmentTask {
    type Batch = Inputs;

    fn parameters(&self) -> Vec<Parameter> {
        parameters(&self.loaded.model)
    }

    fn components(&self) -> Vec<ModelPart> {
        components(&self.loaded.model)
    }

    fn steps_per_epoch(&self) -> u64 {
        self.sampler.steps_per_epoch()
    }

    fn batches(&self, epoch: u64, first: u64, shard: Shard) -> Result<Batches<'_, Inputs>> {
        let steps = self.sampler.batches(epoch);
        let skip = usize::try_from(first).unwrap_or(usize::MAX).min(steps.len());
        let steps = &steps[skip..];
        let micro = self.config.micro_batch;
        let (counts, groups) = shard.micro_batches(steps, micro);
        let rows = |groups: Vec<usize>| groups.iter().map(|group| self.groups[*group].clone()).collect();
        let micros = groups.into_iter().map(rows).collect();
        let by_image = self.data.questions_per_image > 1;
        let loader = self.load(&self.train, micros, (epoch, by_image, self.mask_noise()))?;
        let (semantics, model) = (self.semantics(), &self.loaded.model);
        let inputs = move |batch| Inputs::from_batch(batch, semantics, model, self.feature_cache.as_ref());
        Ok(Box::new(Steps::new(loader, counts, inputs, self.loaded.model.options().device)))
    }

    fn batch_size(&self, batch: &Inputs) -> BatchSize {
        batch.batch_size()
    }

    fn loss(&self, inputs: &Inputs, effective_batch: BatchSize, epoch: u64) -> Result<Loss> {
        let LoadedModel { model, description, .. } = &self.loaded;
        Ok(loss(
            model,
            &description.model,
            training_pass(&description.model, &self.config),
            inputs,
            effective_batch,
            epoch,
        ))
    }

    fn capturable(&self, inputs: &Inputs, effective_batch: BatchSize, epoch: u64) -> Result<Option<Capturable<'_>>> {
        let LoadedModel { model, description, .. } = &self.loaded;
        let pass = training_pass(&description.model, &self.config);
        Ok(capturable(model, &description.model, pass, inputs, effective_batch, epoch))
    }

    fn split(&self, inputs: &Inputs, most: usize) -> Option<Vec<Inputs>> {
        Some(inputs.split(most))
    }

    fn is_divided(&self) -> bool {
        self.loaded.model.is_divided()
    }

    fn join_pass(&self, trains: bool) {
        self.loaded.model.join_pass(trains);
    }

    /// Dice at 0.5, IoU and the share of answer tokens that the teacher-forced model puts first; the score is the mean
    /// of Dice and that share. Dice and IoU are those of questions whose target is in the image. With questions about
    /// absent targets also `false_masks`, the part of them with any pixel of at least 0.5.
    fn validate(&self, observer: &dyn Observer, ranks: Ranks) -> Result<Option<Validation>> {
        if self.val_rows.is_empty() {
            return Ok(None);
        }
        let batches = length_sampler::plain_batches(&self.val_rows, self.config.micro_batch);
        let own = batches[ranks.shard().range(batches.len())].to_vec();
        let total = own.iter().map(Vec::len).sum::<usize>() as u64;
        observer.on(&Event::Started { phase: "validate".into(), total, unit: "questions" });
        let own = guard::guard(|| self.scores(own, ranks, observer));
        // with divided layers the others wait in a pass, and the end of this process ends them
        let own = if self.is_divided() { Ok(own?) } else { own };
        let parts = ranks.gather_if_all(own)?;
        observer.on(&Event::Finished);
        let (mut sums, mut calibrator) = (Sums::default(), Calibrator::default());
        for (scores, masks) in parts {
            // in the order of the batches, so that the result does not depend on the number of ranks
            for batch in &scores {
                sums.merge(batch);
            }
            calibrator.merge(masks);
        }
        if sums.questions == 0 {
            // no file could be read
            return Ok(None);
        }
        *self.measured() = Measured { calibration: calibrator.fit(), mask_error: sums.mask_error() };
        Ok(Some(Validation { score: sums.score().into(), values: sums.means(), pictures: Vec::new() }))
    }

    fn take_events(&self) -> Vec<Event> {
        let note = self.feature_cache.as_ref().and_then(|cache| cache.take_note());
        let warnings = self.unreadable.take_messages().into_iter().map(Event::Warning);
        note.map(Event::Note).into_iter().chain(warnings).collect()
    }

    fn samples(&self, inputs: &Inputs) -> Vec<usize> {
        inputs.rows.clone()
    }

    fn suspects(&self, rows: &[usize], epoch: u64) -> Result<Vec<String>> {
        let LoadedModel { model, description, .. } = &self.loaded;
        let mut suspects = Vec::new();
        // one row at a time: NaN of one sample does not reach the others
        let batches = rows.iter().map(|row| vec![*row]).collect();
        for batch in self.load(&self.train, single_rows(batches), (epoch, false, self.mask_noise()))? {
            let inputs = Inputs::from_batch(batch?.into(), self.semantics(), model, None);
            let size = inputs.batch_size();
            let loss = no_grad(|| loss(model, &description.model, Pass::evaluation(), &inputs, size, epoch));
            if !loss.total.double_value(&[]).is_finite() {
                suspects.extend(inputs.rows);
            }
        }
        let rows = if suspects.is_empty() { rows } else { &suspects };
        let manifest = self.train.manifest();
        let name = |row: &Row| format!("{}:{} ({})", row.csv.display(), row.line, row.image_path.display());
        Ok(rows.iter().filter_map(|row| manifest.rows.get(*row)).map(name).collect())
    }

    fn save(&self, folder: &mut Staged) -> Result<()> {
        let mut description = self.loaded.description.clone();
        self.measured().add_to(&mut description);
        weights::save(folder, &self.loaded, &description)?;
        folder.write_bytes(resume::DATA_FILE, self.identity.to_json().as_bytes())?;
        folder.write_bytes(resume::CONFIG_FILE, self.resolved.as_bytes())
    }

    fn load(&self, folder: &Path) -> Result<()> {
        let mut warnings = Vec::new();
        weights::load_parts(folder, &self.loaded.model, false, &mut warnings)?;
        weights::load_own_base(folder, &self.loaded.model)
    }
}

/// Default number of decoding threads. It is smaller on the CPU, where training uses every core.
pub fn workers(device: Device, cores: usize) -> usize {
    if device == Device::Cpu { (cores / 4).clamp(1, 8) } else { cores.clamp(1, 8) }
}

/// Number of images that calibrate an encoder with random weights: eight up to 512 pixels, fewer above to save memory.
/// `None` for other encoders. It must not depend on the micro-batch, which does not affect results.
pub(super) fn calibration_images(model: &ModelConfig) -> Option<usize> {
    const PIXELS: i64 = 8 * 512 * 512;
    let random = model.batch_norm == BatchNorm::Frozen && model.image_encoder == RANDOM;
    random.then(|| usize::try_from(PIXELS / model.image_size.pow(2).max(1)).unwrap_or(0).clamp(2, 8))
}

/// Sets the encoder's running statistics to those of `sam_image`.
pub(super) fn calibrate(model: &PrsMed, sam_image: &Tensor) -> Result<()> {
    guard::guard(|| {
        let pass = image_encoder::EncoderPass { statistics: BatchStatistics::MEASURE, checkpoint: 0 };
        let _embedding = no_grad(|| model.embed_image(sam_image, pass));
        Ok(())
    })
}

/// Options of training passes.
pub(super) fn training_pass(model: &ModelConfig, train: &TrainConfig) -> Pass {
    let statistics = match model.batch_norm {
        BatchNorm::Frozen => BatchStatistics::Running,
        BatchNorm::Batch => BatchStatistics::TRAIN,
    };
    Pass {
        llm: decoder::DecoderPass { train: true, checkpoint: train.checkpointing.count() },
        encoder: image_encoder::EncoderPass { statistics, checkpoint: train.checkpoint_encoder.count() },
        decoder: mask_head::HeadPass { train: true, checkpoint: train.checkpoint_decoder },
    }
}

/// All trained tensors of `model`, by file and key.
pub(super) fn parameters(model: &PrsMed) -> Vec<Parameter> {
    let parts = model.stores().parts();
    let trained = parts.iter().flat_map(|(file, store)| {
        let entries = store.entries().into_iter().filter(|e| e.role == Role::Trainable);
        let is_beside = *file == MASK_READER;
        entries.map(move |e| Parameter::new(format!("{file}/{}", e.name), e.tensor).beside(is_beside))
    });
    trained.collect()
}

/// Parts of the model by module path.
const PARTS: [&str; 8] =
    ["llm", "projector", "vision_tower", "lora_adapter", "image_encoder", MASK_HEAD, "class_head", MASK_READER];

/// The part that `key` of a file belongs to.
fn part_of<'a>(file: &'a str, key: &str, keys: &Keys) -> &'a str {
    match file {
        "base" => keys.part_of(key),
        "cls" => "class_head",
        own => own,
    }
}

/// All tensors of `model` by part, named as [`parameters`] are.
pub(super) fn components(model: &PrsMed) -> Vec<ModelPart> {
    let mut components: Vec<ModelPart> = PARTS.map(|name| ModelPart { name, entries: Vec::new() }).into();
    for (file, store) in model.stores().parts() {
        for entry in store.entries() {
            let part = part_of(file, &entry.name, &model.config().family.keys);
            let entry = StoreEntry { name: format!("{file}/{}", entry.name), ..entry };
            if let Some(component) = components.iter_mut().find(|component| component.name == part) {
                component.entries.push(entry);
            }
        }
    }
    components
}

/// The training loss of `inputs` as their share of the effective batch `whole`.
pub(super) fn loss(
    model: &PrsMed,
    settings: &ModelConfig,
    pass: Pass,
    inputs: &Inputs,
    effective_batch: BatchSize,
    epoch: u64,
) -> Loss {
    let inputs = inputs.to_device(inputs.vision.resolve(model), effective_batch);
    loss_of(model, settings, pass, &inputs, epoch < settings.class_loss_epochs)
}

fn loss_of(model: &PrsMed, settings: &ModelConfig, pass: Pass, inputs: &Prepared, learns_class: bool) -> Loss {
    let outputs = step::forward(model, inputs, pass);
    let parts = step::losses(model, inputs, &outputs);
    let mut total = &parts.mask + &parts.text * settings.text_loss_weight;
    if let Some(words) = &parts.words {
        total += words;
    }
    if learns_class {
        total += &parts.class * settings.class_loss_weight;
    }
    let named =
        [("mask", Some(parts.mask)), ("text", Some(parts.text)), ("words", parts.words), ("class", Some(parts.class))];
    let parts = named.into_iter().filter_map(|(name, part)| Some((name, part?.detach()))).collect();
    Loss { total, parts }
}

/// Lengths of captured passes are multiples of these numbers of tokens.
const BUCKETS: Sizes = Sizes { sequence: 64, supervised: 32, prompt: 64 };

/// The pass of [`loss`] over `inputs`, padded to the next lengths of [`BUCKETS`]; `None` under semantics whose decoder
/// reads padding, and for weights in host memory, whose copies are made by the CPU.
pub(super) fn capturable<'a>(
    model: &'a PrsMed,
    settings: &'a ModelConfig,
    pass: Pass,
    inputs: &Inputs,
    effective_batch: BatchSize,
    epoch: u64,
) -> Option<Capturable<'a>> {
    let learns_class = epoch < settings.class_loss_epochs;
    let loss = move |prepared: &Prepared| loss_of(model, settings, pass, prepared, learns_class);
    capturable_loss(model, inputs, effective_batch, learns_class, loss)
}

/// As [`capturable`], for another loss. Its gradients reach other parameters for each value of `family`.
pub(super) fn capturable_loss<'a>(
    model: &PrsMed,
    inputs: &Inputs,
    effective_batch: BatchSize,
    family: bool,
    loss: impl Fn(&Prepared) -> Loss + 'a,
) -> Option<Capturable<'a>> {
    if !inputs.layout.semantics().hides_answer() || model.host_weights().iter().any(|weights| !weights.is_empty()) {
        return None;
    }
    let layout = inputs.layout.padded_to(inputs.layout.needed().rounded_up(BUCKETS));
    let prepared = inputs.copy_to_device(&layout, inputs.vision.resolve(model), effective_batch);
    let inputs: Vec<Tensor> = prepared.tensors().into_iter().map(Tensor::shallow_clone).collect();
    let bucket = bucket_of(family, &inputs);
    let (sequences, tokens) = (layout.sequences(), layout.sizes().sequence);
    let label = format!("{sequences} sequences of {tokens} tokens");
    let loss = Box::new(move || Ok(loss(&prepared)));
    Some(Capturable { bucket, label, family: u64::from(family), inputs, loss })
}

/// The bucket of a pass over `inputs`: its family, then the number of dimensions and the size of each tensor.
fn bucket_of(family: bool, inputs: &[Tensor]) -> Bucket {
    let mut bucket = vec![i64::from(family)];
    for tensor in inputs {
        bucket.push(i64::try_from(tensor.dim()).expect("a few dimensions"));
        bucket.extend(tensor.size());
    }
    bucket
}

impl SegmentTask {
    /// Scores of each validation batch, and of all masks.
    fn scores(
        &self,
        batches: Vec<Vec<usize>>,
        ranks: Ranks,
        observer: &dyn Observer,
    ) -> Result<(Vec<Sums>, Calibrator)> {
        let (mut all, mut calibrator, mut done) = (Vec::new(), Calibrator::default(), 0);
        for batch in self.load(&self.plain, single_rows(batches), (0, false, None))? {
            let model = &self.loaded.model;
            let inputs = Inputs::from_batch(batch?.into(), self.semantics(), model, self.feature_cache.as_ref());
            let questions = inputs.layout.questions() as u64;
            let mut sums = Sums::default();
            self.score_what_fits(inputs, (&mut sums, &mut calibrator), ranks, observer)?;
            done += questions;
            all.push(sums);
            observer.on(&Event::Advanced { done });
        }
        // each pass needs all ranks
        while self.is_divided() && ranks.any(false)? {
            self.join_pass(false);
        }
        Ok((all, calibrator))
    }

    /// Scores a batch. If memory runs out, this batch and later ones are halved.
    fn score_what_fits(
        &self,
        inputs: Inputs,
        (sums, calibrator): (&mut Sums, &mut Calibrator),
        ranks: Ranks,
        observer: &dyn Observer,
    ) -> Result<()> {
        let mut open = VecDeque::from([inputs]);
        while let Some(part) = open.pop_front() {
            let most = self.validated_at_once.most();
            if part.layout.images() > most {
                part.split(most).into_iter().rev().for_each(|part| open.push_front(part));
                continue;
            }
            let before = *sums;
            if self.is_divided() {
                ranks.any(true)?;
            }
            match guard::guard(|| self.score(&part, sums)) {
                Err(Error::OutOfMemory { reason }) if !self.is_divided() => {
                    *sums = before;
                    let smaller = self.validated_at_once.halve(reason, self.loaded.model.options().device)?;
                    let text = format!("validation: {}; it continues with batches of {}", smaller.what, smaller.most);
                    observer.on(&Event::Note(text));
                    open.push_front(part);
                }
                outcome => calibrator.merge(outcome?),
            }
        }
        Ok(())
    }

    fn score(&self, inputs: &Inputs, sums: &mut Sums) -> Result<Calibrator> {
        let mut calibrator = Calibrator::default();
        let rows = inputs.rows.iter().map(|row| &self.plain.manifest().rows[*row]);
        let mut targets = rows.flat_map(|row| row.targets.iter().map(|target| target.presence));
        score(&self.loaded.model, inputs, sums, |prediction, truth, sums| {
            let target = targets.next().expect("a target for each mask");
            calibrator.add(target, &prediction, &truth);
            sums.add(target, &prediction, &truth)
        })?;
        Ok(calibrator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Kind;

    #[test]
    fn passes_over_tensors_of_other_sizes_have_other_buckets() {
        let bucket = |family: bool, sizes: &[&[i64]]| {
            let zeros = |size: &&[i64]| Tensor::zeros(*size, (Kind::Float, Device::Cpu));
            bucket_of(family, &sizes.iter().map(zeros).collect::<Vec<Tensor>>())
        };
        assert_eq!(bucket(true, &[&[2, 3], &[4]]), [1, 2, 2, 3, 1, 4]);
        assert_ne!(bucket(true, &[&[2, 3]]), bucket(true, &[&[3, 2]]));
        assert_ne!(bucket(true, &[&[2, 3]]), bucket(false, &[&[2, 3]]));
    }
}
