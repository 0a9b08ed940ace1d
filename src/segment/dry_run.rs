//! The training task without data: example batches of given sizes, for planning memory and for measuring it.
//!
//! It runs the same functions as [`super::task::SegmentTask`]; only the values in the batches are arbitrary.

pub use super::example::Example;

use super::example::Largest;
use super::layout::{Layout, Sizes};
use super::measures::validation;
use super::setup::{self, Build, ModelConfig};
use super::step::{self, Inputs, Prepared};
use super::vision_features::{VisionInput, feature_shape};
use super::{generate, task, weights};
use crate::Result;
use crate::data::features::FeatureShape;
use crate::data::text::IMAGE_TOKEN;
use crate::event::Observer;
use crate::models::prsmed::{self, BuildOptions, PrsMed};
use crate::segment::batch::{TowerInput, View};
use crate::tensor::host_weights::HostWeights;
use crate::tensor::weights::Staged;
use crate::tensor::{Device, Kind, META, Tensor, guard, ledger, meta, no_grad};
use crate::trainer::graph::Capturable;
use crate::trainer::profile::ModelPart;
use crate::trainer::{
    BatchSize, Batches, DryRunTask, HostUse, Loss, Parameter, Ranks, Shard, Task, TrainConfig, Validation,
};
use crate::units::Bytes;
use std::path::Path;

/// A model and what its training needs, without data.
#[derive(Debug)]
pub struct SegmentDryRun {
    model: PrsMed,
    settings: ModelConfig,
    train: TrainConfig,
    example: Example,
    shorter: usize,
    caches_features: bool,
    steps: u64,
    language_alone: bool,
}

impl SegmentDryRun {
    /// Builds a model of `sizes` on `device`; on [`crate::tensor::META`] bytes are counted but not allocated. Parts
    /// with weights are not initialised; a checkpoint can be loaded into them.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn new(
        settings: &ModelConfig,
        sizes: &prsmed::Config,
        train: &TrainConfig,
        example: Example,
        (device, ranks): (Device, Ranks),
    ) -> Result<Self> {
        let initialise = settings.base == setup::RANDOM && settings.image_encoder == setup::RANDOM;
        Self::build(settings, sizes, train, example, (device, ranks, initialise))
    }

    /// As [`Self::new`], with random values in every part, for steps that really run. Its checkpoints do not contain
    /// the base.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn random(
        settings: &ModelConfig,
        sizes: &prsmed::Config,
        train: &TrainConfig,
        example: Example,
        (device, ranks): (Device, Ranks),
    ) -> Result<Self> {
        let mut built = Self::build(settings, sizes, train, example, (device, ranks, true))?;
        built.settings.base = TRANSIENT_BASE.into();
        Ok(built)
    }

    fn build(
        settings: &ModelConfig,
        sizes: &prsmed::Config,
        train: &TrainConfig,
        example: Example,
        (device, ranks, initialise): (Device, Ranks, bool),
    ) -> Result<Self> {
        let kind = train.precision.kind();
        let peers = if settings.divide_layers { ranks.peers(device)? } else { None };
        let locate = |spec: &str| Ok(spec.into());
        let build = Build { peers: peers.as_ref(), ..Build::new(device, kind, &locate) };
        let options = build.options(settings, initialise);
        let options = BuildOptions { loads_base: options.loads_base && !initialise, ..options };
        let mut model = guard::guard(|| Ok(PrsMed::new(sizes, options)))?;
        // for a GPU, the host quantizes
        let is_gpu = matches!(device, Device::Cuda(_)) || device == META && meta::target() == meta::PlanTarget::Cuda;
        if !options.initialise && !is_gpu {
            let stored = weights::stored_kind(settings).unwrap_or(kind);
            guard::guard(|| {
                model.stores().base.quantized().iter().for_each(|(_, matrix)| matrix.dry_run_quantization(stored));
                Ok(())
            })?;
        }
        if let Some(peers) = &peers {
            guard::guard(|| model.divide(peers, settings.base == setup::RANDOM))?;
        }
        let (settings, train) = (settings.clone(), train.clone());
        Ok(Self {
            model,
            settings,
            train,
            example,
            shorter: 0,
            caches_features: false,
            steps: 1,
            language_alone: false,
        })
    }

    /// Sets the number of optimizer steps of an epoch. Each step has new examples.
    #[must_use]
    pub fn with_steps(mut self, steps: u64) -> Self {
        self.steps = steps;
        self
    }

    /// Trains only the adapters of the language model on the text loss, with zeros for the image tokens. The other
    /// parts do not run.
    #[must_use]
    pub fn language_alone(mut self) -> Self {
        self.language_alone = true;
        self
    }

    /// Number of tokens of `inputs` that the language model processes.
    pub fn tokens(&self, inputs: &Inputs) -> u64 {
        (inputs.layout.sequences() * inputs.layout.sizes().sequence) as u64
    }

    /// Text loss of a pass through the language model only.
    fn language_loss(&self, inputs: &Prepared, images: usize) -> Loss {
        let pass = task::training_pass(&self.settings, &self.train).llm;
        let total = step::language_loss(&self.model, inputs, images, pass);
        Loss { parts: vec![("text", total.detach())], total }
    }

    /// Batches whose texts, except the first, are `ids` shorter, half of it before the answer. Rows are then padded.
    #[must_use]
    pub fn with_shorter_rows(mut self, ids: usize) -> Self {
        self.shorter = ids;
        self
    }

    /// Turns the vision feature cache on or off.
    #[must_use]
    pub fn with_feature_cache(mut self, caches_features: bool) -> Self {
        self.caches_features = caches_features;
        self
    }

    /// `count` images for the vision tower, on `device`. `seen`: their features are in the cache.
    fn vision(&self, count: i64, seen: bool, device: Device) -> VisionInput {
        let tower = &self.model.config().tower;
        let side = tower.image_size();
        let images = |count| blank([count, 3, side, side], Kind::Uint8, device);
        if !self.caches_features {
            return images(count).into();
        }
        let kind = self.model.options().compute;
        let FeatureShape { tokens, width, .. } = feature_shape(tower, kind);
        let view = |_| {
            if seen {
                View::Features(blank([1, tokens, width], kind, device))
            } else {
                View::New { key: [0; 32], pixels: images(1) }
            }
        };
        let views = (0..count).map(view);
        VisionInput::new(TowerInput::Views(views.collect()), None)
    }

    /// Device of loaded batches: the CPU; in a planned CPU run, the meta device.
    fn input_device(&self) -> Device {
        match self.model.options().device {
            META if meta::target() == meta::PlanTarget::Cpu => META,
            _ => Device::Cpu,
        }
    }

    /// A micro-batch of images with `questions` questions each.
    fn batch(&self, questions: usize, largest: Option<Largest>, seen: bool, device: Device) -> Inputs {
        let _category = ledger::enter(ledger::Category::Inputs);
        let images = self.train.micro_batch;
        let rows = images * questions;
        let targets = rows * self.model.num_masks();
        let [b, q, m] = [images, rows, targets].map(|count| i64::try_from(count).expect("a small batch"));
        let side = self.settings.image_size;
        let layout = self.layout(questions, largest);
        Inputs {
            geometry: layout.geometry([]),
            layout,
            vision: self.vision(b, seen, device),
            sam_image: blank([b, 3, side, side], Kind::Uint8, device),
            mask: blank([m, 1, side, side], Kind::Uint8, device),
            has_mask: self.example.has_unknown_masks.then(|| (0..targets).map(|target| target % 2 == 0).collect()),
            class_label: Tensor::zeros([q], (Kind::Int64, device)),
            rows: Vec::new(),
        }
    }

    fn layout(&self, questions: usize, largest: Option<Largest>) -> Layout {
        let (images, semantics, masks) = (self.train.micro_batch, self.settings.semantics, self.model.num_masks());
        // of texts with so many ids, and so many before the answer
        let layout = |rows: &[(usize, usize)]| {
            let texts = rows.iter().map(|(ids, _)| self.text(*ids)).collect();
            let starts: Vec<usize> = rows.iter().map(|(_, start)| *start).collect();
            Layout::new(texts, &starts, &vec![questions; images], semantics, self.model.spans(images))
                .with_targets(vec![masks; rows.len()], masks)
                .with_read_masks(self.model.reads_masks())
        };
        let Example { text_tokens, answer_tokens, .. } = self.example;
        let answer_start = text_tokens - answer_tokens;
        let num_rows = images * questions;
        let Some(largest) = largest else {
            let shorter = |row: usize| if row == 0 { 0 } else { self.shorter };
            let rows: Vec<_> =
                (0..num_rows).map(|row| (text_tokens - shorter(row), answer_start - shorter(row) / 2)).collect();
            return layout(&rows);
        };
        let Largest { sequence, prompt, answers, is_ragged } = largest;
        if !semantics.hides_answer() {
            // the published decoder reads padding, so that texts of several lengths need a mask
            let last = |row: usize| usize::from(is_ragged && row + 1 == num_rows);
            let rows: Vec<_> = (0..num_rows).map(|row| (sequence - last(row), prompt.min(sequence - 1))).collect();
            return layout(&rows);
        }
        if is_ragged || questions > 1 {
            let layout = layout(&vec![(3, 2); num_rows]);
            let [sequence, prompt] = [sequence, prompt].map(|ids| layout.tokens_with_image(ids));
            let sequence = sequence.max(layout.needed().sequence);
            return layout.padded_to(Sizes { sequence, supervised: answers.max(num_rows), prompt });
        }
        let (longest, others) = (sequence - prompt, num_rows - 1);
        let rest = answers.saturating_sub(longest);
        let shared = |row: usize| rest / others + usize::from(row <= rest % others);
        let rows: Vec<_> =
            (0..num_rows).map(|row| (prompt + if row == 0 { longest } else { shared(row) }, prompt)).collect();
        layout(&rows)
    }

    fn text(&self, tokens: usize) -> Vec<i64> {
        example_text(self.model.config().llm.vocab_size, tokens)
    }
}

/// `tokens` ids of a vocabulary of `vocab_size` ids, without the three special ones. The second is the image token.
fn example_text(vocab_size: i64, tokens: usize) -> Vec<i64> {
    let known = vocab_size.min(300);
    (0_i64..).take(tokens).map(|i| if i == 1 { IMAGE_TOKEN } else { 3 + i % (known - 3) }).collect()
}

/// An image of zeros. In a planned GPU run, where host memory is not counted, one expanded number represents it.
fn blank<const N: usize>(shape: [i64; N], kind: Kind, device: Device) -> Tensor {
    let is_dry_run = meta::target() == meta::PlanTarget::Cuda && device == Device::Cpu;
    if is_dry_run {
        Tensor::zeros([1_i64; N], (kind, device)).expand(shape, false)
    } else {
        Tensor::zeros(shape, (kind, device))
    }
}

/// Tokens that the dry run of a prediction generates; later ones need the same memory.
const SHOWN_TOKENS: usize = 3;

/// Name of a base that exists only in this process.
const TRANSIENT_BASE: &str = "not kept";

impl Task for SegmentDryRun {
    type Batch = Inputs;

    fn parameters(&self) -> Vec<Parameter> {
        let mut all = task::parameters(&self.model);
        all.retain(|parameter| !self.language_alone || parameter.name.starts_with("lora_adapter/"));
        all
    }

    fn components(&self) -> Vec<ModelPart> {
        task::components(&self.model)
    }

    fn steps_per_epoch(&self) -> u64 {
        self.steps
    }

    fn batches(&self, _epoch: u64, first: u64, _shard: Shard) -> Result<Batches<'_, Inputs>> {
        let make = |step| (0..self.train.accumulation).map(|_| self.example(step > 0)).collect();
        Ok(Box::new((first..self.steps).map(move |step| Ok(make(step)))))
    }

    fn batch_size(&self, batch: &Inputs) -> BatchSize {
        batch.batch_size()
    }

    fn loss(&self, inputs: &Inputs, effective_batch: BatchSize, epoch: u64) -> Result<Loss> {
        if self.language_alone {
            let prepared = inputs.to_device(inputs.vision.resolve(&self.model), effective_batch);
            return Ok(self.language_loss(&prepared, inputs.layout.images()));
        }
        let pass = task::training_pass(&self.settings, &self.train);
        Ok(task::loss(&self.model, &self.settings, pass, inputs, effective_batch, epoch))
    }

    fn capturable(&self, inputs: &Inputs, effective_batch: BatchSize, epoch: u64) -> Result<Option<Capturable<'_>>> {
        if self.language_alone {
            let images = inputs.layout.images();
            let loss = move |prepared: &Prepared| self.language_loss(prepared, images);
            return Ok(task::capturable_loss(&self.model, inputs, effective_batch, false, loss));
        }
        let pass = task::training_pass(&self.settings, &self.train);
        Ok(task::capturable(&self.model, &self.settings, pass, inputs, effective_batch, epoch))
    }

    fn split(&self, inputs: &Inputs, most: usize) -> Option<Vec<Inputs>> {
        Some(inputs.split(most))
    }

    fn validate(&self, _observer: &dyn Observer, _ranks: Ranks) -> Result<Option<Validation>> {
        // validation is not packed, and the first validation has new images
        let inputs = self.batch(1, self.example.largest.map(|[_, largest]| largest), false, self.input_device());
        let mut sums = validation::Sums::default();
        guard::guard(|| validation::score(&self.model, &inputs, &mut sums, |_, _, _| Ok(())))?;
        Ok(None)
    }

    fn is_divided(&self) -> bool {
        self.model.is_divided()
    }

    fn join_pass(&self, trains: bool) {
        self.model.join_pass(trains);
    }

    fn save(&self, folder: &mut Staged) -> Result<()> {
        weights::save_tensors(folder, &self.model, self.settings.base == setup::RANDOM)
    }

    fn load(&self, folder: &Path) -> Result<()> {
        weights::load_parts(folder, &self.model, false, &mut Vec::new())?;
        weights::load_own_base(folder, &self.model)
    }
}

impl DryRunTask for SegmentDryRun {
    fn example(&self, seen: bool) -> Inputs {
        let largest = self.example.largest.map(|[largest, _]| largest);
        self.batch(self.example.questions, largest, seen, self.model.options().device)
    }

    fn host_weights(&self) -> HostUse {
        let sum = |bytes: fn(&HostWeights) -> Bytes| {
            Bytes(self.model.host_weights().into_iter().map(|weights| bytes(weights).0).sum())
        };
        let paths = ["vision_tower.layers", "llm.layers"].into_iter();
        let layers = paths.zip(self.model.host_weights().map(HostWeights::len));
        HostUse {
            bytes: sum(HostWeights::bytes),
            sent: sum(HostWeights::sent),
            collected: sum(HostWeights::collected),
            divided_block: self.model.llm().host_weights().divided_block(),
            layers: layers.collect(),
        }
    }

    fn sends_whole_steps(&self) -> bool {
        match self.model.options().device {
            META => meta::target() == meta::PlanTarget::Cuda,
            device => device != Device::Cpu,
        }
    }

    fn has_cache(&self) -> bool {
        self.caches_features
    }

    fn calibrate(&self) -> Result<()> {
        let Some(images) = task::calibration_images(&self.settings) else { return Ok(()) };
        let images = i64::try_from(images).expect("a few images");
        let (device, side) = (self.input_device(), self.settings.image_size);
        let _sight = self.vision(images, false, device);
        let _mask = blank([images, 1, side, side], Kind::Uint8, device);
        let _classes = blank([images], Kind::Int64, device);
        task::calibrate(&self.model, &blank([images, 3, side, side], Kind::Uint8, device))
    }

    fn predict(&self) -> Result<()> {
        let device = self.input_device();
        let (tower, side) = (self.model.config().tower.image_size(), self.settings.image_size);
        let images = {
            let _category = ledger::enter(ledger::Category::Inputs);
            [blank([1, 3, tower, tower], Kind::Uint8, device), blank([1, 3, side, side], Kind::Uint8, device)]
        };
        let Example { text_tokens, new_tokens, .. } = self.example;
        let text = self.text(text_tokens);
        let side = u32::try_from(side).expect("an image's side");
        // the cache has its full size from the first token on
        let mut made = 0;
        let mut on_token = |_| {
            made += 1;
            Ok(made < SHOWN_TOKENS)
        };
        guard::guard(|| {
            no_grad(|| {
                let image = generate::encode(&self.model, &images);
                let (.., mut prompt) = generate::ask(&self.model, &image, text, (side, side), new_tokens)?;
                generate::write(&self.model, &mut prompt, &[], &mut on_token)
            })
        })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_example_text_has_ids_of_the_vocabulary_and_the_image_token_in_second_place() {
        for (vocab_size, tokens) in [(32_000, 5), (32_000, 700), (20, 50)] {
            let text = example_text(vocab_size, tokens);
            assert_eq!((text.len(), text[0], text[1], text[2]), (tokens, 3, IMAGE_TOKEN, 5));
            let others: Vec<i64> = text.iter().copied().filter(|id| *id != IMAGE_TOKEN).collect();
            assert_eq!(others.len(), tokens - 1);
            assert!(others.iter().all(|id| (3..vocab_size).contains(id)), "{text:?}");
        }
    }
}
