//! The training task without data: example batches of given sizes, for planning memory and for measuring it.
//!
//! It runs the same functions as [`super::task::SegmentTask`]; only the numbers in the batches mean nothing. It cannot be
//! saved, loaded or resumed.

use super::setup::{self, ModelConfig};
use super::step::{self, Inputs, Pass};
use super::task;
use crate::event::Observer;
use crate::models::llava::IMAGE_TOKEN;
use crate::models::prsmed::{BuildOptions, PrsMed};
use crate::nn::LoraConfig;
use crate::tensor::weights::Staged;
use crate::tensor::{Device, Kind, Tensor, guard, ledger, no_grad};
use crate::trainer::{Batches, Loss, Parameter, Rehearse, Task, TrainConfig, Validation, Weight};
use crate::{Error, Result};
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
}

impl Example {
    /// A long question and answer of PRS-Med's data, six modalities.
    pub fn published() -> Self {
        Self { text_tokens: 64, answer_tokens: 28, num_classes: 6 }
    }
}

/// A model and what its training needs, without data.
#[derive(Debug)]
pub struct Rehearsal {
    model: PrsMed,
    settings: ModelConfig,
    train: TrainConfig,
    example: Example,
}

impl Rehearsal {
    /// Builds the model on `device`; on [`crate::tensor::META`] nothing is allocated but counted.
    ///
    /// # Errors
    /// [`Error::Config`] as [`setup::planned_sizes`].
    pub fn new(
        settings: &ModelConfig,
        lora: LoraConfig,
        train: &TrainConfig,
        example: Example,
        device: Device,
    ) -> Result<Self> {
        let sizes = setup::planned_sizes(settings, lora, example.num_classes)?;
        let kind = train.precision.kind();
        let options = BuildOptions {
            device,
            stored: kind,
            compute: kind,
            initialise: settings.base == setup::RANDOM && settings.image_encoder == setup::RANDOM,
            train_base: settings.train_base,
        };
        let model = guard::guard(|| Ok(PrsMed::new(&sizes, options)))?;
        Ok(Self { model, settings: settings.clone(), train: train.clone(), example })
    }
}

fn no_data<T>() -> Result<T> {
    Err(Error::config("rehearsal", "it has no data", "use a task with a data root"))
}

impl Task for Rehearsal {
    type Batch = Inputs;

    fn parameters(&self) -> Vec<Parameter> {
        task::parameters(&self.model)
    }

    fn steps_per_epoch(&self) -> u64 {
        1
    }

    fn batches(&self, _epoch: u64, _first: u64) -> Result<Batches<'_, Inputs>> {
        no_data()
    }

    fn weight(&self, batch: &Inputs) -> Weight {
        batch.weight(self.settings.semantics)
    }

    fn loss(&self, inputs: &Inputs, whole: Weight, epoch: u64) -> Result<Loss> {
        let pass = task::training_pass(&self.settings, &self.train);
        Ok(task::loss(&self.model, &self.settings, pass, inputs, whole, epoch))
    }

    fn validate(&self, _observer: &dyn Observer) -> Result<Option<Validation>> {
        let inputs = self.example();
        guard::guard(|| {
            no_grad(|| {
                let semantics = self.settings.semantics;
                let outputs = step::forward(&self.model, &inputs, semantics, Pass::evaluation());
                let losses = step::losses(&self.model, &inputs, &outputs, semantics, self.weight(&inputs));
                drop((losses, outputs.mask_logits.sigmoid()));
            });
            Ok(None)
        })
    }

    fn save(&self, _folder: &mut Staged) -> Result<()> {
        no_data()
    }

    fn load(&self, _folder: &Path) -> Result<()> {
        no_data()
    }
}

impl Rehearse for Rehearsal {
    fn example(&self) -> Inputs {
        let _category = ledger::enter(ledger::Category::Inputs);
        let (device, sizes) = (self.model.options().device, self.model.config());
        let batch = i64::try_from(self.train.micro_batch).expect("a small batch");
        let (clip, side) = (sizes.clip.image_size, self.settings.image_size);
        let Example { text_tokens, answer_tokens, .. } = self.example;
        let known = sizes.llm.vocab_size.min(300);
        let text = (0_i64..).take(text_tokens).map(|i| if i == 1 { IMAGE_TOKEN } else { 3 + i % (known - 3) });
        let text: Vec<i64> = text.collect();
        Inputs {
            answer_start: vec![text_tokens - answer_tokens; self.train.micro_batch],
            texts: vec![text; self.train.micro_batch],
            clip_image: Tensor::zeros([batch, 3, clip, clip], (Kind::Float, device)),
            sam_image: Tensor::zeros([batch, 3, side, side], (Kind::Uint8, device)),
            mask: Tensor::zeros([batch, 1, side, side], (Kind::Float, device)),
            class_label: Tensor::zeros([batch], (Kind::Int64, device)),
        }
    }
}
