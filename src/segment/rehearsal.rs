//! The training task without data: example batches of given sizes, for planning memory and for measuring it.
//!
//! It runs the same functions as [`super::task::SegmentTask`]; only the numbers in the batches mean nothing.

use super::layout::Layout;
use super::setup::{self, ModelConfig};
use super::sight::{Sight, feature_shape};
use super::step::{self, Inputs};
use super::{predict, task, weights};
use crate::Result;
use crate::data::batch::{ClipInput, View};
use crate::data::features::FeatureShape;
use crate::event::Observer;
use crate::models::llava::IMAGE_TOKEN;
use crate::models::prsmed::{self, BuildOptions, PrsMed};
use crate::tensor::weights::Staged;
use crate::tensor::{Device, Kind, META, Tensor, guard, ledger, meta, no_grad};
use crate::trainer::graph::Recordable;
use crate::trainer::profile::Component;
use crate::trainer::{Batches, Loss, Parameter, Rehearse, Task, TrainConfig, Validation, Weight};
use std::path::Path;

/// Sizes of the example batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Example {
    /// Ids of a text, the image's one and the answer included.
    pub text_tokens: usize,
    /// Of these, ids of the answer.
    pub answer_tokens: usize,
    /// Modality classes.
    pub num_classes: usize,
    /// Longest generated answer in tokens, for which a prediction's cache has room.
    pub new_tokens: usize,
    /// Questions about each picture.
    pub questions: usize,
}

impl Example {
    /// A long question and answer of PRS-Med's data, six modalities.
    pub fn published() -> Self {
        Self { text_tokens: 64, answer_tokens: 28, num_classes: 6, new_tokens: 8, questions: 1 }
    }
}

/// A model and what its training needs, without data.
#[derive(Debug)]
pub struct Rehearsal {
    model: PrsMed,
    settings: ModelConfig,
    train: TrainConfig,
    example: Example,
    shorter: usize,
    keeping: bool,
    steps: u64,
    language_alone: bool,
}

impl Rehearsal {
    /// Builds a model of `sizes` on `device`; on [`crate::tensor::META`] nothing is allocated but counted. Parts with weights
    /// are left as they come, for a checkpoint to fill.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn new(
        settings: &ModelConfig,
        sizes: &prsmed::Config,
        train: &TrainConfig,
        example: Example,
        device: Device,
    ) -> Result<Self> {
        let initialise = settings.base == setup::RANDOM && settings.image_encoder == setup::RANDOM;
        Self::build(settings, sizes, train, example, (device, initialise))
    }

    /// The same with random values in every part, for steps that really run. A checkpoint of it leaves out the base.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn random(
        settings: &ModelConfig,
        sizes: &prsmed::Config,
        train: &TrainConfig,
        example: Example,
        device: Device,
    ) -> Result<Self> {
        let settings = ModelConfig { base: NOT_KEPT.into(), ..settings.clone() };
        Self::build(&settings, sizes, train, example, (device, true))
    }

    fn build(
        settings: &ModelConfig,
        sizes: &prsmed::Config,
        train: &TrainConfig,
        example: Example,
        (device, initialise): (Device, bool),
    ) -> Result<Self> {
        let kind = train.precision.kind();
        let options = BuildOptions {
            device,
            stored: kind,
            compute: kind,
            initialise,
            train_base: settings.train_base,
            quantization: settings.quantization,
            loads_base: !initialise && settings.base != setup::RANDOM,
        };
        let model = guard::guard(|| Ok(PrsMed::new(sizes, options)))?;
        if !options.initialise {
            let stored = weights::stored_kind(settings).unwrap_or(kind);
            guard::guard(|| {
                model.stores().base.quantized().iter().for_each(|(_, matrix)| matrix.rehearse_reading(stored));
                Ok(())
            })?;
        }
        let (settings, train) = (settings.clone(), train.clone());
        Ok(Self { model, settings, train, example, shorter: 0, keeping: false, steps: 1, language_alone: false })
    }

    /// With `steps` optimizer steps in an epoch, each of new examples; from the second one on the task has seen their like.
    #[must_use]
    pub fn with_steps(mut self, steps: u64) -> Self {
        self.steps = steps;
        self
    }

    /// Trains the adapters of the language model on its own loss, with zeros in place of the image's tokens; everything else
    /// stands by.
    #[must_use]
    pub fn language_alone(mut self) -> Self {
        self.language_alone = true;
        self
    }

    /// Tokens of `inputs` that pass the language model.
    pub fn tokens(&self, inputs: &Inputs) -> u64 {
        (inputs.layout.sequences() * inputs.layout.sizes().sequence) as u64
    }

    /// The text loss of the language model alone.
    fn language_loss(&self, inputs: &Inputs, whole: Weight) -> Loss {
        let pass = task::training_pass(&self.settings, &self.train).llm;
        let prepared = inputs.to_device(&self.model, whole);
        let total = step::language_loss(&self.model, &prepared, inputs.layout.pictures(), pass);
        Loss { parts: vec![("text", total.detach())], total }
    }

    /// Batches whose texts, except the first, have `ids` fewer, half of them before the answer; rows are padded then.
    #[must_use]
    pub fn with_shorter_rows(mut self, ids: usize) -> Self {
        self.shorter = ids;
        self
    }

    /// With vision features kept, if `keeping`.
    #[must_use]
    pub fn keeping_features(mut self, keeping: bool) -> Self {
        self.keeping = keeping;
        self
    }

    /// `count` pictures for the tower, on `device`; `seen` where it has seen them before.
    fn sight(&self, count: i64, seen: bool, device: Device) -> Sight {
        let clip = &self.model.config().clip;
        let pictures = |count| blank([count, 3, clip.image_size, clip.image_size], Kind::Uint8, device);
        if !self.keeping {
            return pictures(count).into();
        }
        let FeatureShape { tokens, width, kind } = feature_shape(clip, self.model.options().compute);
        let view = |_| {
            if seen {
                View::Features(blank([1, tokens, width], kind, device))
            } else {
                View::New { key: [0; 32], pixels: pictures(1) }
            }
        };
        let views = (0..count).map(view);
        Sight::new(ClipInput::Views(views.collect()), None)
    }

    /// Where batches wait: on the host, which for a rehearsed CPU is the meta device too.
    fn input_device(&self) -> Device {
        match self.model.options().device {
            META if meta::target() == meta::Target::Cpu => META,
            _ => Device::Cpu,
        }
    }

    /// A micro-batch of pictures with `questions` each.
    fn batch(&self, questions: usize, seen: bool, device: Device) -> Inputs {
        let _category = ledger::enter(ledger::Category::Inputs);
        let pictures = self.train.micro_batch;
        let rows = pictures * questions;
        let [b, q] = [pictures, rows].map(|count| i64::try_from(count).expect("a small batch"));
        let side = self.settings.image_size;
        let Example { text_tokens, answer_tokens, .. } = self.example;
        let answer_start = text_tokens - answer_tokens;
        let shorter = |row: usize| if row == 0 { 0 } else { self.shorter };
        let answer_starts: Vec<usize> = (0..rows).map(|row| answer_start - shorter(row) / 2).collect();
        let texts = (0..rows).map(|row| self.text(text_tokens - shorter(row))).collect();
        let (semantics, image_tokens) = (self.settings.semantics, self.model.num_image_tokens());
        Inputs {
            layout: Layout::new(texts, &answer_starts, &vec![questions; pictures], semantics, image_tokens),
            sight: self.sight(b, seen, device),
            sam_image: blank([b, 3, side, side], Kind::Uint8, device),
            mask: blank([q, 1, side, side], Kind::Uint8, device),
            class_label: Tensor::zeros([q], (Kind::Int64, device)),
        }
    }

    /// `tokens` ids with the image's one in second place.
    fn text(&self, tokens: usize) -> Vec<i64> {
        let known = self.model.config().llm.vocab_size.min(300);
        (0_i64..).take(tokens).map(|i| if i == 1 { IMAGE_TOKEN } else { 3 + i % (known - 3) }).collect()
    }
}

/// A picture of zeros; one number stands for all of it on the host of a rehearsed card, whose memory nobody counts.
fn blank<const N: usize>(shape: [i64; N], kind: Kind, device: Device) -> Tensor {
    let is_rehearsed = meta::target() == meta::Target::Cuda && device == Device::Cpu;
    if is_rehearsed {
        Tensor::zeros([1_i64; N], (kind, device)).expand(shape, false)
    } else {
        Tensor::zeros(shape, (kind, device))
    }
}

/// Tokens that a rehearsed prediction generates; the next ones do the same.
const SHOWN_TOKENS: usize = 3;

/// What having pictures judged by a trained model takes.
#[derive(Debug, Clone, PartialEq)]
pub struct Judging {
    /// The model's settings.
    pub model: ModelConfig,
    /// Its sizes.
    pub sizes: prsmed::Config,
    /// Dtype of frozen weights and arithmetic.
    pub kind: Kind,
    /// Ids of the longest question, the image's one included.
    pub question_tokens: usize,
    /// Width and height of the largest picture.
    pub picture: (u32, u32),
    /// Pictures whose features are computed at once; 0 = none are.
    pub batch: usize,
    /// Real pictures of a class, whose features are kept to compare with.
    pub reference: usize,
}

impl Judging {
    /// Loads the model on `device` (nothing but sizes on [`META`]), predicts one mask, computes features of one batch.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn rehearse(&self, device: Device) -> Result<()> {
        let options = BuildOptions {
            device,
            stored: self.kind,
            compute: self.kind,
            initialise: false,
            train_base: self.model.train_base,
            quantization: self.model.quantization,
            loads_base: true,
        };
        let model = guard::guard(|| Ok(PrsMed::new(&self.sizes, options)))?;
        let input = if device == META && meta::target() == meta::Target::Cpu { META } else { Device::Cpu };
        let (clip, side) = (self.sizes.clip.image_size, self.model.image_size);
        let images = || {
            let _category = ledger::enter(ledger::Category::Inputs);
            [blank([1, 3, clip, clip], Kind::Uint8, input), blank([1, 3, side, side], Kind::Uint8, input)]
        };
        let known = self.sizes.llm.vocab_size.min(300);
        let text = (0_i64..).take(self.question_tokens).map(|i| if i == 1 { IMAGE_TOKEN } else { 3 + i % (known - 3) });
        let text: Vec<i64> = text.collect();
        guard::guard(|| {
            no_grad(|| {
                drop(predict::answer(&model, &images(), text, self.picture, 1, &mut |_| Ok(true))?);
                if self.batch == 0 {
                    return Ok(());
                }
                let [count, kept] = [self.batch, self.reference].map(|n| i64::try_from(n).expect("counts of pictures"));
                let _reference = blank([kept, self.sizes.encoder.out_dim], Kind::Float, input);
                let pictures = blank([count, 3, side, side], Kind::Uint8, input);
                let _features = model.embed_image(&pictures, PrsMed::evaluation_pass()).to_kind(Kind::Float);
                Ok(())
            })
        })
    }
}

/// The base of a model that is gone when the process ends.
const NOT_KEPT: &str = "not kept";

impl Task for Rehearsal {
    type Batch = Inputs;

    fn parameters(&self) -> Vec<Parameter> {
        let mut all = task::parameters(&self.model);
        all.retain(|parameter| !self.language_alone || parameter.name.starts_with("lora_adapter/"));
        all
    }

    fn components(&self) -> Vec<Component> {
        task::components(&self.model)
    }

    fn steps_per_epoch(&self) -> u64 {
        self.steps
    }

    fn batches(&self, _epoch: u64, first: u64) -> Result<Batches<'_, Inputs>> {
        let make = |step| (0..self.train.accumulation).map(|_| self.example(step > 0)).collect();
        let mut ahead: Option<Vec<Inputs>> = None;
        Ok(Box::new((first..self.steps).map(move |step| {
            let batches = ahead.take().unwrap_or_else(|| make(step));
            ahead = self.sends_ahead().then(|| make(step + 1));
            Ok(batches)
        })))
    }

    fn weight(&self, batch: &Inputs) -> Weight {
        batch.weight()
    }

    fn loss(&self, inputs: &Inputs, whole: Weight, epoch: u64) -> Result<Loss> {
        if self.language_alone {
            return Ok(self.language_loss(inputs, whole));
        }
        let pass = task::training_pass(&self.settings, &self.train);
        Ok(task::loss(&self.model, &self.settings, pass, inputs, whole, epoch))
    }

    fn recordable(&self, inputs: &Inputs, whole: Weight, epoch: u64) -> Result<Option<Recordable<'_>>> {
        let pass = task::training_pass(&self.settings, &self.train);
        Ok(task::recordable(&self.model, &self.settings, pass, inputs, whole, epoch))
    }

    fn split(&self, inputs: &Inputs, most: usize) -> Option<Vec<Inputs>> {
        Some(inputs.split(most))
    }

    fn validate(&self, _observer: &dyn Observer) -> Result<Option<Validation>> {
        // validation is not packed, and the first one has new pictures
        let inputs = self.batch(1, false, self.input_device());
        let mut sums = task::Sums::default();
        guard::guard(|| task::score(&self.model, &inputs, &mut sums, |_, _, _| Ok(())))?;
        Ok(None)
    }

    fn save(&self, folder: &mut Staged) -> Result<()> {
        weights::save_tensors(folder, &self.model, self.settings.base == setup::RANDOM)
    }

    fn load(&self, folder: &Path) -> Result<()> {
        weights::load_parts(folder, &self.model, false, &mut Vec::new())?;
        weights::load_own_base(folder, &self.model)
    }
}

impl Rehearse for Rehearsal {
    fn example(&self, seen: bool) -> Inputs {
        self.batch(self.example.questions, seen, self.model.options().device)
    }

    fn sends_ahead(&self) -> bool {
        match self.model.options().device {
            META => meta::target() == meta::Target::Cuda,
            device => device != Device::Cpu,
        }
    }

    fn keeps(&self) -> bool {
        self.keeping
    }

    fn calibrate(&self) -> Result<()> {
        let Some(pictures) = task::calibration_pictures(&self.settings) else { return Ok(()) };
        let pictures = i64::try_from(pictures).expect("a few pictures");
        let (device, side) = (self.input_device(), self.settings.image_size);
        let _sight = self.sight(pictures, false, device);
        let _mask = blank([pictures, 1, side, side], Kind::Uint8, device);
        task::calibrate(&self.model, &blank([pictures, 3, side, side], Kind::Uint8, device))
    }

    fn predict(&self) -> Result<()> {
        let device = self.input_device();
        let (clip, side) = (self.model.config().clip.image_size, self.settings.image_size);
        let images = {
            let _category = ledger::enter(ledger::Category::Inputs);
            [blank([1, 3, clip, clip], Kind::Uint8, device), blank([1, 3, side, side], Kind::Uint8, device)]
        };
        let Example { text_tokens, new_tokens, .. } = self.example;
        let text = self.text(text_tokens);
        let side = u32::try_from(side).expect("a picture's side");
        // the cache has its full size from the first token on
        let mut made = 0;
        let mut go_on = |_| {
            made += 1;
            Ok(made < SHOWN_TOKENS)
        };
        guard::guard(|| no_grad(|| predict::answer(&self.model, &images, text, (side, side), new_tokens, &mut go_on)))?;
        Ok(())
    }
}
