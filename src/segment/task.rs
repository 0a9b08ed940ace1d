//! Training PRS-Med: rows of a data root as a [`Task`] for the engine.

use super::ahead::Ahead;
use super::layout::Sizes;
use super::rehearsal::Example;
use super::setup::{Assembly, BatchNorm, ModelConfig};
use super::sight::Kept;
use super::step::{self, Inputs, Pass, Prepared};
use super::weights;
use crate::data::classical::Augment;
use crate::data::loader::{Loader, LoaderOptions, Source, TextEncoder, TextLength};
use crate::data::manifest::{Manifest, Row, Split};
use crate::data::mix::{Lengths, Mix, Ratio};
use crate::data::order;
use crate::data::text::{self, TextTokenizer};
use crate::event::{Event, Observer};
use crate::metrics::segmentation::ImageScore;
use crate::models::prsmed::{PrsMed, TOWER_PREFIX};
use crate::models::{mask_decoder, mistral, tiny_vit};
use crate::nn::BatchStatistics;
use crate::segment::Semantics;
use crate::tensor::store::{Entry, Role};
use crate::tensor::weights::Staged;
use crate::tensor::{Device, Kind, META, Tensor, guard, meta, no_grad};
use crate::trainer::graph::Recordable;
use crate::trainer::profile::Component;
use crate::trainer::recovery::Fitting;
use crate::trainer::{Batches, Loss, Parameter, Task, TrainConfig, Validation, Weight};
use crate::{Error, Result};
use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

/// Where features of the frozen vision tower are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheVision {
    /// Nowhere: computed in every step.
    Off,
    /// In host memory, until the run ends.
    Ram,
    /// In a memory-mapped file of the cache folder, for later runs too.
    Disk,
}

/// Settings of the input pipeline (`data.*`).
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Decoding threads; 0 = one for each core, at most 8, where a card computes, and [`workers`] of them where they share the
    /// cores with the arithmetic.
    pub workers: usize,
    /// Micro-batches made ahead.
    pub prefetch: usize,
    /// Host memory for preprocessed pictures, MiB; 0 = decode every epoch.
    pub cache_mib: usize,
    /// Most questions about one picture that share its features in one sequence, 1 or more; `train.micro_batch` counts
    /// pictures then. Needs batch normalisation with frozen statistics.
    pub questions_per_picture: usize,
    /// Keep what the frozen vision tower says about a picture: off, ram (this run) or disk (for later runs too).
    pub cache_vision: CacheVision,
    /// Most MiB of vision features, in memory or in the file; what came first stays.
    #[serde(default = "cache_vision_mib")]
    pub cache_vision_mib: usize,
    /// Changes of training samples, new every epoch: none, turn (flips and quarter turns) or classical (also rotation,
    /// scale, elastic deformation, intensities). Texts follow; where they cannot, the geometry stays.
    pub augment: Augment,
    /// Synthetic rows (of extra data roots) for each real row of an epoch, or `all` of them. Pictures, where several questions
    /// share one.
    pub synthetic_ratio: Ratio,
    /// Part of the training after which only real rows are used, 0..=1.
    pub synthetic_until: f64,
    /// Part of the training pictures cut for validation when the CSV has no `val` rows, 0..1.
    pub val_frac: f64,
    /// Most training rows, spread evenly over all of them; 0 = all. For trying whether a model can fit a few samples.
    pub max_train_rows: usize,
    /// Most rows used for validation; 0 = all.
    pub max_val_rows: usize,
}

/// Room for 3600 pictures of LLaVA-Med's tower in bf16.
fn cache_vision_mib() -> usize {
    4096
}

/// Makes token ids of rows as the semantics wants them.
#[derive(Debug)]
pub struct Encoder {
    /// The model's tokenizer.
    pub tokenizer: Arc<TextTokenizer>,
    /// Decides on the end token.
    pub semantics: Semantics,
    /// Longer texts are cut.
    pub max_tokens: usize,
}

impl TextEncoder for Encoder {
    fn encode(&self, row: &Row) -> Result<(Vec<i64>, usize)> {
        let with_eos = self.semantics.labels_answer_only();
        let prompt = text::training_prompt(&self.tokenizer, &row.question, &row.answer, with_eos)?;
        if prompt.answer_start >= self.max_tokens {
            let reason = format!("the question has {} ids, the limit is {}", prompt.answer_start, self.max_tokens);
            return Err(Error::data_line(
                &row.csv,
                row.line,
                reason,
                "shorten the question or raise `model.max_text_tokens`",
            ));
        }
        let mut ids = prompt.ids;
        ids.truncate(self.max_tokens);
        Ok((ids, prompt.answer_start))
    }
}

/// A model, its data and the settings of its training.
pub struct SegmentTask {
    assembly: Assembly,
    train: Arc<Source>,
    plain: Arc<Source>,
    /// Real training rows.
    rows: Lengths,
    /// Real and synthetic rows by picture: what an epoch puts in order.
    groups: Vec<Vec<usize>>,
    /// The order of epochs; its rows are indices of groups.
    mix: Mix,
    longest: Example,
    val_rows: Vec<usize>,
    kept: Option<Arc<Kept>>,
    config: TrainConfig,
    data: DataConfig,
    /// The resolved configuration, written into every checkpoint.
    resolved: String,
    /// Pictures of a validation batch.
    validated_at_once: Fitting,
}

impl std::fmt::Debug for SegmentTask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SegmentTask").field("rows", &self.rows.rows.len()).finish_non_exhaustive()
    }
}

impl SegmentTask {
    /// Trains `assembly` on the train rows of `manifest` and on its synthetic rows, with `kept` vision features where
    /// [`super::sight::keep`] gave some.
    ///
    /// # Errors
    /// [`Error::Data`] without train rows, or for a row whose text cannot be encoded; [`Error::Config`] when synthetic rows
    /// would leave a step without a real one.
    pub fn new(
        assembly: Assembly,
        manifest: &Arc<Manifest>,
        config: TrainConfig,
        data: DataConfig,
        resolved: String,
        kept: Option<Kept>,
    ) -> Result<Self> {
        let model = &assembly.description.model;
        let encoder = Arc::new(Encoder {
            tokenizer: Arc::clone(&assembly.tokenizer),
            semantics: model.semantics,
            max_tokens: model.max_text_tokens,
        });
        let kept = kept.map(Arc::new);
        let source = || {
            let source = Source::new(Arc::clone(manifest), encoder.clone(), assembly.description.pixels)
                .with_cache(data.cache_mib << 20);
            match &kept {
                Some(kept) => source.with_features(Arc::clone(kept.features())),
                None => source,
            }
        };
        let plain = Arc::new(source());
        let train = match data.augment {
            Augment::None => Arc::clone(&plain),
            augment => Arc::new(source().with_augment(augment, config.seed)),
        };
        let rows = spread(manifest.rows_of(Split::Train), data.max_train_rows);
        if rows.is_empty() {
            let hint = "give at least one row the split `train`";
            return Err(Error::data(&manifest.root, "there are no training rows", hint));
        }
        let synthetic = match data.synthetic_ratio.rows(rows.len(), usize::MAX) {
            0 => Vec::new(),
            _ => manifest.synthetic_rows(),
        };
        let (mut texts, more) = (plain.text_lengths(&rows)?, plain.text_lengths(&synthetic)?);
        let tokens = |texts: &[TextLength]| texts.iter().map(|text| text.tokens).collect();
        let rows = Lengths { lengths: tokens(&texts), rows };
        let synthetic = Lengths { lengths: tokens(&more), rows: synthetic };
        let effective_batch = config.micro_batch * config.accumulation;
        let mut groups = Vec::new();
        let real_groups = grouped(&plain, &rows, data.questions_per_picture, &mut groups);
        let synthetic_groups = grouped(&plain, &synthetic, data.questions_per_picture, &mut groups);
        let mix = Mix::new(real_groups, synthetic_groups, data.synthetic_ratio, effective_batch, config.seed)?
            .with_real_end(data.synthetic_until, config.epochs, config.max_steps);
        texts.extend(more);
        let longest = Example {
            text_tokens: texts.iter().map(|text| text.tokens).max().unwrap_or(0),
            answer_tokens: texts.iter().map(|text| text.answer_tokens).max().unwrap_or(0),
            num_classes: manifest.modalities.len(),
            new_tokens: 1,
            questions: data.questions_per_picture,
        };
        let val_rows = spread(manifest.rows_of(Split::Val), data.max_val_rows);
        let validated_at_once = Fitting::new(config.micro_batch);
        Ok(Self {
            assembly,
            train,
            plain,
            rows,
            groups,
            mix,
            longest,
            val_rows,
            kept,
            config,
            data,
            resolved,
            validated_at_once,
        })
    }

    /// The longest texts of the training rows.
    pub fn longest(&self) -> Example {
        self.longest
    }

    /// The model and its description.
    pub fn assembly(&self) -> &Assembly {
        &self.assembly
    }

    /// Measures the running statistics of an encoder with random weights on a few training pictures, layer after layer
    /// in one pass, so that frozen batch normalisation normalises. Does nothing for loaded encoders.
    ///
    /// # Errors
    /// [`Error::Data`] from a sample.
    pub fn calibrate(&self) -> Result<()> {
        let Some(pictures) = calibration_pictures(&self.assembly.description.model) else { return Ok(()) };
        let order = order::epoch_batches(&self.rows.rows, &self.rows.lengths, self.config.seed, 0, pictures);
        let Some(first) = order.into_iter().next() else { return Ok(()) };
        let batch = self.load(&self.plain, vec![first], 0, 1)?.next();
        let Some(batch) = batch.transpose()? else { return Ok(()) };
        calibrate(&self.assembly.model, &batch.sam_image)
    }

    /// Real training rows, and the synthetic ones of an epoch (their mean over epochs).
    pub fn rows_of_an_epoch(&self) -> (usize, usize) {
        let real = self.rows.rows.len();
        let all: usize = self.groups.iter().map(Vec::len).sum();
        (real, (all - real) * self.mix.synthetic_rows() / self.mix.all_synthetic_rows().max(1))
    }

    /// Batches of rows, of which up to `questions` share a picture.
    fn load(&self, source: &Arc<Source>, batches: Vec<Vec<usize>>, epoch: u64, questions: usize) -> Result<Loader> {
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let device = self.assembly.model.options().device;
        let workers = if self.data.workers == 0 { workers(device, cores) } else { self.data.workers };
        let options = LoaderOptions { workers, prefetch: self.data.prefetch, epoch, skip: 0, questions };
        Loader::start(Arc::clone(source), batches, options)
    }

    fn semantics(&self) -> Semantics {
        self.assembly.description.model.semantics
    }
}

impl Task for SegmentTask {
    type Batch = Inputs;

    fn parameters(&self) -> Vec<Parameter> {
        parameters(&self.assembly.model)
    }

    fn components(&self) -> Vec<Component> {
        components(&self.assembly.model)
    }

    fn steps_per_epoch(&self) -> u64 {
        self.mix.steps_per_epoch()
    }

    fn batches(&self, epoch: u64, first: u64) -> Result<Batches<'_, Inputs>> {
        let steps = self.mix.batches(epoch);
        let skip = usize::try_from(first).unwrap_or(usize::MAX).min(steps.len());
        let steps = &steps[skip..];
        let micro = self.config.micro_batch;
        let counts: Vec<usize> = steps.iter().map(|step| step.len().div_ceil(micro)).collect();
        let rows = |groups: &[usize]| groups.iter().flat_map(|group| &self.groups[*group]).copied().collect();
        let micros = steps.iter().flat_map(|step| step.chunks(micro).map(rows)).collect();
        let loader = self.load(&self.train, micros, epoch, self.data.questions_per_picture)?;
        let (semantics, image_tokens) = (self.semantics(), self.assembly.model.num_image_tokens());
        let inputs = move |batch| Inputs::from_batch(batch, semantics, image_tokens, self.kept.as_ref());
        Ok(Box::new(Ahead::new(loader, counts, inputs, self.assembly.model.options().device)))
    }

    fn weight(&self, batch: &Inputs) -> Weight {
        batch.weight()
    }

    fn loss(&self, inputs: &Inputs, whole: Weight, epoch: u64) -> Result<Loss> {
        let Assembly { model, description, .. } = &self.assembly;
        Ok(loss(model, &description.model, training_pass(&description.model, &self.config), inputs, whole, epoch))
    }

    fn recordable(&self, inputs: &Inputs, whole: Weight, epoch: u64) -> Result<Option<Recordable<'_>>> {
        let Assembly { model, description, .. } = &self.assembly;
        let pass = training_pass(&description.model, &self.config);
        Ok(recordable(model, &description.model, pass, inputs, whole, epoch))
    }

    fn split(&self, inputs: &Inputs, most: usize) -> Option<Vec<Inputs>> {
        Some(inputs.split(most))
    }

    /// Dice at 0.5, IoU and the share of answer tokens that the teacher-forced model puts first; the score is the mean
    /// of Dice and that share.
    fn validate(&self, observer: &dyn Observer) -> Result<Option<Validation>> {
        if self.val_rows.is_empty() {
            return Ok(None);
        }
        let total = self.val_rows.len() as u64;
        observer.on(&Event::Started { phase: "validate".into(), total, unit: "images" });
        let mut sums = Sums::default();
        let batches = order::plain_batches(&self.val_rows, self.config.micro_batch);
        for batch in self.load(&self.plain, batches, 0, 1)? {
            let image_tokens = self.assembly.model.num_image_tokens();
            let inputs = Inputs::from_batch(batch?, self.semantics(), image_tokens, self.kept.as_ref());
            self.score_what_fits(inputs, &mut sums, observer)?;
            observer.on(&Event::Advanced { done: sums.images });
        }
        observer.on(&Event::Finished);
        let mean = sums.means();
        let values = ["dice", "iou", "token_accuracy", "loss_text", "loss_mask"];
        Ok(Some(Validation {
            score: f64::midpoint(mean[0], mean[2]),
            values: values.iter().zip(mean).map(|(name, value)| ((*name).to_owned(), value)).collect(),
        }))
    }

    fn note(&self) -> Option<String> {
        self.kept.as_ref()?.told()
    }

    fn save(&self, folder: &mut Staged) -> Result<()> {
        weights::save(folder, &self.assembly)?;
        folder.write_bytes("config.toml", self.resolved.as_bytes())
    }

    fn load(&self, folder: &Path) -> Result<()> {
        let mut warnings = Vec::new();
        weights::load_parts(folder, &self.assembly.model, false, &mut warnings)?;
        weights::load_own_base(folder, &self.assembly.model)
    }
}

/// Decoding threads where the settings leave them open. On the CPU they take time from the arithmetic, which uses every core.
pub fn workers(device: Device, cores: usize) -> usize {
    if device == Device::Cpu { (cores / 4).clamp(1, 8) } else { cores.clamp(1, 8) }
}

/// Pictures that an encoder of random weights is calibrated on, `None` where it is not: eight up to 512 pixels, fewer above to
/// save memory. It must not depend on the micro-batch, which changes no result.
pub(super) fn calibration_pictures(model: &ModelConfig) -> Option<usize> {
    const PIXELS: i64 = 8 * 512 * 512;
    let random = model.batch_norm == BatchNorm::Frozen && model.image_encoder == super::setup::RANDOM;
    random.then(|| usize::try_from(PIXELS / model.image_size.pow(2).max(1)).unwrap_or(0).clamp(2, 8))
}

/// Sets the encoder's running statistics to those of `sam_image`.
pub(super) fn calibrate(model: &PrsMed, sam_image: &Tensor) -> Result<()> {
    let statistics = BatchStatistics::Batch { momentum: 1.0 };
    guard::guard(|| {
        let pass = tiny_vit::Pass { statistics, checkpoint: 0 };
        let _embedding = no_grad(|| model.embed_image(sam_image, pass));
        Ok(())
    })
}

/// How training runs the model.
pub(super) fn training_pass(model: &ModelConfig, train: &TrainConfig) -> Pass {
    let statistics = match model.batch_norm {
        BatchNorm::Frozen => BatchStatistics::Running,
        BatchNorm::Batch => BatchStatistics::Batch { momentum: 0.1 },
    };
    Pass {
        llm: mistral::Pass { train: true, checkpoint: train.checkpointing.layers() },
        encoder: tiny_vit::Pass { statistics, checkpoint: train.checkpoint_encoder.layers() },
        decoder: mask_decoder::Pass { train: true, checkpoint: train.checkpoint_decoder },
    }
}

/// Everything `model` trains, by file and key.
pub(super) fn parameters(model: &PrsMed) -> Vec<Parameter> {
    let parts = model.stores().parts();
    let trained = parts.iter().flat_map(|(file, store)| {
        let entries = store.entries().into_iter().filter(|e| e.role == Role::Trainable);
        entries.map(move |e| Parameter { name: format!("{file}/{}", e.name), tensor: e.tensor })
    });
    trained.collect()
}

/// Parts of the model, by the module scope they run in.
const PARTS: [&str; 7] =
    ["llm", "projector", "vision_tower", "lora_adapter", "image_encoder", "mask_decoder", "class_head"];

/// The part that `key` of a file belongs to.
fn part_of<'a>(file: &'a str, key: &str) -> &'a str {
    match file {
        "base" if key.starts_with(TOWER_PREFIX) => "vision_tower",
        "base" if key.starts_with("model.mm_projector.") => "projector",
        "base" => "llm",
        "cls" => "class_head",
        own => own,
    }
}

/// All tensors of `model` by part, named as [`parameters`] are.
pub(super) fn components(model: &PrsMed) -> Vec<Component> {
    let mut components: Vec<Component> = PARTS.map(|name| Component { name, entries: Vec::new() }).into();
    for (file, store) in model.stores().parts() {
        for entry in store.entries() {
            let part = part_of(file, &entry.name);
            let entry = Entry { name: format!("{file}/{}", entry.name), ..entry };
            if let Some(component) = components.iter_mut().find(|component| component.name == part) {
                component.entries.push(entry);
            }
        }
    }
    components
}

/// The training loss of `inputs` as their share of an effective batch weighing `whole`.
pub(super) fn loss(
    model: &PrsMed,
    settings: &ModelConfig,
    pass: Pass,
    inputs: &Inputs,
    whole: Weight,
    epoch: u64,
) -> Loss {
    let inputs = inputs.to_device(model, whole);
    loss_of(model, settings, pass, &inputs, epoch < settings.class_loss_epochs)
}

fn loss_of(model: &PrsMed, settings: &ModelConfig, pass: Pass, inputs: &Prepared, learns_class: bool) -> Loss {
    let outputs = step::forward(model, inputs, pass);
    let parts = step::losses(model, inputs, &outputs);
    let mut total = &parts.mask + &parts.text * settings.text_loss_weight;
    if learns_class {
        total += &parts.class * settings.class_loss_weight;
    }
    let parts = vec![("mask", parts.mask.detach()), ("text", parts.text.detach()), ("class", parts.class.detach())];
    Loss { total, parts }
}

/// Steps of the lengths of passes that are recorded, tokens.
const BUCKETS: Sizes = Sizes { sequence: 64, supervised: 32, prompt: 64 };

/// `inputs` padded to the next lengths of [`BUCKETS`]; `None` under semantics whose decoder would read the padding.
pub(super) fn recordable<'a>(
    model: &'a PrsMed,
    settings: &'a ModelConfig,
    pass: Pass,
    inputs: &Inputs,
    whole: Weight,
    epoch: u64,
) -> Option<Recordable<'a>> {
    if !inputs.layout.semantics().hides_answer() {
        return None;
    }
    let layout = inputs.layout.padded_to(inputs.layout.needed().rounded_up(BUCKETS));
    let prepared = inputs.to_device_apart(&layout, model, whole);
    let learns_class = epoch < settings.class_loss_epochs;
    let inputs: Vec<Tensor> = prepared.tensors().into_iter().map(Tensor::shallow_clone).collect();
    let mut bucket = vec![i64::from(learns_class)];
    for tensor in &inputs {
        bucket.push(i64::try_from(tensor.dim()).expect("a few dimensions"));
        bucket.extend(tensor.size());
    }
    let loss = Box::new(move || Ok(loss_of(model, settings, pass, &prepared, learns_class)));
    let (sequences, tokens) = (layout.sequences(), layout.sizes().sequence);
    let label = format!("{sequences} sequences of {tokens} tokens");
    Some(Recordable { bucket, label, family: u64::from(learns_class), inputs, loss })
}

/// At most `limit` of `rows`, evenly spread; all of them for 0.
pub fn spread(rows: Vec<usize>, limit: usize) -> Vec<usize> {
    if limit == 0 || limit >= rows.len() {
        return rows;
    }
    (0..limit).map(|i| rows[i * rows.len() / limit]).collect()
}

/// Adds what a batch of validation says to `sums`; `image` hears the mask probabilities and the truth of each sample.
pub(super) fn score(
    model: &PrsMed,
    inputs: &Inputs,
    sums: &mut Sums,
    mut image: impl FnMut(Vec<f32>, Vec<bool>, &mut Sums) -> Result<()>,
) -> Result<()> {
    let one = Weight { samples: 1.0, tokens: 1.0 };
    let prepared = inputs.to_device(model, one);
    let outputs = step::forward(model, &prepared, Pass::evaluation());
    let losses = step::losses(model, &prepared, &outputs);
    sums.text += meta::number(&losses.text);
    sums.mask += meta::number(&losses.mask);
    sums.tokens_right += step::tokens_right(model, &prepared, &outputs);
    sums.tokens += inputs.weight().tokens;
    let probability = outputs.mask_logits.sigmoid();
    for i in 0..i64::try_from(inputs.layout.questions()).expect("a few samples") {
        let truth = values(&inputs.mask.get(i)).iter().map(|byte| *byte > 127.5).collect();
        image(values(&probability.get(i)), truth, sums)?;
    }
    Ok(())
}

/// Sums over validation samples.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sums {
    images: u64,
    dice: f64,
    iou: f64,
    tokens: f64,
    tokens_right: f64,
    text: f64,
    mask: f64,
}

impl Sums {
    fn means(&self) -> [f64; 5] {
        #[expect(clippy::cast_precision_loss, reason = "a count of images")]
        let images = (self.images as f64).max(1.0);
        let tokens = self.tokens.max(1.0);
        [self.dice / images, self.iou / images, self.tokens_right / tokens, self.text / tokens, self.mask / images]
    }
}

impl SegmentTask {
    /// Scores a batch; where memory runs out, in halves, and later batches too.
    fn score_what_fits(&self, inputs: Inputs, sums: &mut Sums, observer: &dyn Observer) -> Result<()> {
        let mut open = VecDeque::from([inputs]);
        while let Some(part) = open.pop_front() {
            let most = self.validated_at_once.most();
            if part.layout.pictures() > most {
                part.split(most).into_iter().rev().for_each(|part| open.push_front(part));
                continue;
            }
            let before = *sums;
            match guard::guard(|| self.score(&part, sums)) {
                Err(Error::OutOfMemory { reason }) => {
                    *sums = before;
                    let smaller = self.validated_at_once.halve(reason, self.assembly.model.options().device)?;
                    let text = format!("validation: {}; it goes on with batches of {}", smaller.what, smaller.most);
                    observer.on(&Event::Note(text));
                    open.push_front(part);
                }
                outcome => outcome?,
            }
        }
        Ok(())
    }

    fn score(&self, inputs: &Inputs, sums: &mut Sums) -> Result<()> {
        score(&self.assembly.model, inputs, sums, |prediction, truth, sums| {
            let score = ImageScore::of(&prediction, &truth)?;
            sums.dice += score.dice;
            sums.iou += score.iou;
            sums.images += 1;
            Ok(())
        })
    }
}

/// Adds `rows` by picture to `groups`; the groups' numbers and their ids.
fn grouped(source: &Source, rows: &Lengths, most: usize, groups: &mut Vec<Vec<usize>>) -> Lengths {
    let first = groups.len();
    if most > 1 {
        groups.extend(source.by_picture(&rows.rows, most));
    } else {
        groups.extend(rows.rows.iter().map(|row| vec![*row]));
    }
    let tokens: HashMap<usize, usize> = rows.rows.iter().copied().zip(rows.lengths.iter().copied()).collect();
    let length = |group: &Vec<usize>| group.iter().map(|row| tokens[row]).sum();
    Lengths { rows: (first..groups.len()).collect(), lengths: groups[first..].iter().map(length).collect() }
}

/// A tensor's elements in row-major order; none of a meta tensor.
pub(super) fn values(tensor: &Tensor) -> Vec<f32> {
    let flat = tensor.to_device(crate::tensor::Device::Cpu).to_kind(Kind::Float).reshape([-1]);
    if flat.device() == META {
        return Vec::new();
    }
    Vec::<f32>::try_from(&flat).expect("a flat fp32 tensor")
}
