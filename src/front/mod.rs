//! A trained model in use: open it, encode an image once, ask questions about it.
//!
//! Commands, the page, evaluations and programs that use the library answer through [`Model`], so that all of them give
//! the same answer to the same image and question.
//!
//! ```no_run
//! use prsmed::prelude::*;
//!
//! let model = Model::open("runs/a", &OpenOptions::default(), &Runtime::guest())?;
//! let image = model.encode(&Image::File("scan.png".into()))?;
//! let prediction = model.ask(&image, &Ask::new("Where is the lesion?"))?;
//! println!("{} ({} pixels)", prediction.answer, prediction.target().num_foreground());
//! # Ok::<(), prsmed::Error>(())
//! ```

mod ensemble;
pub mod evaluate;
pub mod image_files;
pub mod image_list;
pub mod input;
pub mod many;
mod open;
mod prediction;
pub mod volume;

pub use input::{Image, ImageOrVolume, ImageReading};
pub use open::OpenOptions;
pub use prediction::{Painted, Prediction};

use crate::data::familiarity::questions::KnownQuestions;
use crate::data::familiarity::{Familiarity, ImageFamiliarity};
use crate::segment::LoadedModel;
use crate::segment::generate::Encoding;
use crate::segment::setup::Description;
use crate::segment::training::Run;
use crate::{Error, Result};
use image::{DynamicImage, GrayImage};
use prediction::{class_of, mean_mask};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Most characters of a question.
pub const MAX_QUESTION: usize = 4_000;

/// Longest answer in tokens, if no other length is chosen.
pub const ANSWER_TOKENS: usize = 128;

/// What a model has ready.
#[derive(Debug, Clone, Copy)]
pub enum Ready<'a> {
    /// The masks, before the first word.
    Masks(&'a Prediction),
    /// The next piece of the answer.
    Text(&'a str),
}

/// Receives masks and the answer piece by piece, and can stop the work.
pub type OnReady<'a> = dyn FnMut(Ready) -> ControlFlow<()> + 'a;

/// A trained model, or several that answer together.
#[derive(Debug)]
pub struct Model {
    /// The run that answers.
    pub(crate) loaded: LoadedModel,
    /// Further runs: masks are means over all of them.
    pub(crate) ensemble: Vec<LoadedModel>,
}

/// An image as the encoders of a model read it. It belongs to the model that made it.
#[derive(Debug)]
pub struct Encoded {
    /// One for each run.
    encodings: Vec<Encoding>,
    /// `(width, height)` in pixels.
    size: (u32, u32),
    familiarity: ImageFamiliarity,
}

impl Encoded {
    /// Bytes of its tensors.
    pub fn bytes(&self) -> usize {
        self.encodings.iter().map(Encoding::bytes).sum()
    }
}

/// A question to a model.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// The question without the prompt template.
    pub question: &'a str,
    /// Longest answer in tokens; 0 for a mask alone.
    pub max_new_tokens: usize,
    /// Paint targets that are reported as not found.
    pub always_paint: bool,
    /// A mask of the image's size, foreground above 0, for the words to follow in place of the painted one.
    pub mask: Option<&'a GrayImage>,
}

impl<'a> Ask<'a> {
    /// A question as `prsmed predict` asks it.
    pub fn new(question: &'a str) -> Self {
        Self { question, max_new_tokens: ANSWER_TOKENS, always_paint: false, mask: None }
    }

    /// A question about the mask alone, without an answer.
    pub fn mask(question: &'a str) -> Self {
        Self { max_new_tokens: 0, ..Self::new(question) }
    }
}

impl Description {
    /// Checks a mask that words are to follow.
    ///
    /// # Errors
    /// [`Error::Config`] for a mask of another size than the image, without foreground, and for a run whose words follow no
    /// mask.
    pub fn check_mask(&self, mask: &GrayImage, size: (u32, u32)) -> Result<()> {
        let refused = |reason: String, hint: &str| Err(Error::argument("mask_in", reason, hint));
        if self.sizes.mask_reader.is_none() {
            let reason = "the words of this run do not follow a mask".to_owned();
            return refused(reason, "train with `model.answer_reads_mask=true`");
        }
        if mask.dimensions() != size {
            let [(width, height), (wide, high)] = [mask.dimensions(), size];
            let reason = format!("the mask has {width}x{height} pixels, its image {wide}x{high}");
            return refused(reason, "give a mask on the grid of the image");
        }
        if mask.iter().all(|value| *value == 0) {
            let hint = "mark the target in it, or leave the mask out: the model then draws its own";
            return refused("the mask has no pixel in it".into(), hint);
        }
        Ok(())
    }
}

impl From<LoadedModel> for Model {
    fn from(loaded: LoadedModel) -> Self {
        Self { loaded, ensemble: Vec::new() }
    }
}

impl From<Run> for Model {
    /// The model of a training, with the weights after its last step.
    fn from(run: Run) -> Self {
        run.task.into_loaded().into()
    }
}

impl Model {
    /// The settings, classes and calibration of the run that answers.
    pub fn description(&self) -> &Description {
        &self.loaded.description
    }

    /// The questions of the training; `None` for a run that does not know them.
    pub fn known_questions(&self) -> Option<&Arc<KnownQuestions>> {
        self.loaded.known_questions.as_ref()
    }

    /// All runs, the one that answers first.
    pub fn runs(&self) -> impl Iterator<Item = &LoadedModel> {
        std::iter::once(&self.loaded).chain(&self.ensemble)
    }

    /// Runs the encoders on an image, for any number of questions about it.
    ///
    /// # Errors
    /// As [`Image::pixels`]; typed errors of libtorch.
    pub fn encode(&self, image: &Image) -> Result<Encoded> {
        self.encode_pixels(&*image.pixels(self.description())?)
    }

    fn encode_pixels(&self, image: &DynamicImage) -> Result<Encoded> {
        let encodings = self.runs().map(|run| run.encode(image)).collect::<Result<_>>()?;
        let familiarity = self.loaded.known_images.as_ref().map(|known| known.compare(image)).unwrap_or_default();
        Ok(Encoded { encodings, size: (image.width(), image.height()), familiarity })
    }

    /// Answers a question about an image.
    ///
    /// # Errors
    /// As [`check_question`] and [`Self::check_mask`]; [`Error::NotFinite`] if the model computes NaN or infinity for the
    /// mask, the modality or the answer; typed errors of libtorch.
    pub fn ask(&self, image: &Encoded, ask: &Ask) -> Result<Prediction> {
        self.ask_with(image, ask, &mut |_| ControlFlow::Continue(()))
    }

    /// As [`Self::ask`]. `on_ready` receives the masks and then the answer piece by piece, and can stop the work.
    ///
    /// # Errors
    /// As [`Self::ask`]; [`Error::Interrupted`] if `on_ready` stopped it.
    pub fn ask_with(&self, image: &Encoded, ask: &Ask, on_ready: &mut OnReady) -> Result<Prediction> {
        check_question(ask.question)?;
        if let Some(mask) = ask.mask {
            self.check_mask(mask, image.size)?;
        }
        let (loaded, description) = (&self.loaded, &self.loaded.description);
        let [first, others @ ..] = image.encodings.as_slice() else {
            return Err(Error::Internal { reason: "an image without encodings".into() });
        };
        let mut asked = loaded.ask(first, image.size, ask.question, ask.max_new_tokens)?;
        let of_others = self.ensemble.iter().zip(others);
        let others = of_others.map(|(run, image_of_run)| Ok(run.ask(image_of_run, image.size, ask.question, 0)?.masks));
        let (mut masks, classes) = (std::mem::take(&mut asked.masks), std::mem::take(&mut asked.classes));
        let agreements = mean_with(&mut masks, &others.collect::<Result<Vec<_>>>()?);
        let calibration = description.calibration.as_ref();
        let drawn = (masks, classes);
        let mut prediction = Prediction::painted(drawn, image.size, description.zones, calibration, ask.always_paint);
        for (target, agreement) in prediction.targets.iter_mut().zip(agreements) {
            target.agreement = Some(agreement);
        }
        prediction.class = class_of(&description.modalities, &prediction.classes);
        if let Some(mask) = ask.mask {
            prediction = prediction.with_mask(mask);
        }
        if on_ready(Ready::Masks(&prediction)).is_break() {
            return Err(Error::Interrupted);
        }
        let written = asked.write(&prediction.binary_masks()?, &mut |text| on_ready(Ready::Text(text)))?;
        prediction = prediction.with_answer(written);
        let class = prediction.class.as_ref().map(|(name, probability)| (name.as_str(), *probability));
        prediction.familiarity =
            self.familiarity(ask.question, Some(&prediction.answer), class, image.familiarity.clone());
        Ok(prediction)
    }

    /// The answers to a question about an image for each of several masks of the image's size, which the words follow.
    ///
    /// # Errors
    /// As [`Self::ask`], and [`Self::check_mask`] for each mask.
    pub fn words_for(&self, image: &Encoded, ask: &Ask, masks: &[GrayImage]) -> Result<Vec<String>> {
        check_question(ask.question)?;
        masks.iter().try_for_each(|mask| self.check_mask(mask, image.size))?;
        let first = &image.encodings[0];
        let mut asked = self.loaded.ask(first, image.size, ask.question, ask.max_new_tokens)?;
        let mut silent = |_: &str| ControlFlow::Continue(());
        let write = |mask| Ok(asked.write(std::slice::from_ref(mask), &mut silent)?.answer);
        masks.iter().map(write).collect()
    }

    /// Whether the words of answers follow the masks.
    pub fn reads_masks(&self) -> bool {
        self.loaded.model.reads_masks()
    }

    /// As [`Description::check_mask`].
    ///
    /// # Errors
    /// As there.
    pub fn check_mask(&self, mask: &GrayImage, size: (u32, u32)) -> Result<()> {
        self.description().check_mask(mask, size)
    }

    /// Encodes an image and answers a question about it.
    ///
    /// # Errors
    /// As [`Self::encode`] and [`Self::ask`].
    pub fn predict(&self, image: &Image, ask: &Ask) -> Result<Prediction> {
        check_question(ask.question)?;
        self.ask(&self.encode(image)?, ask)
    }

    /// How a question, its answer and its image compare with the training. Nothing is claimed of what the run does not know.
    fn familiarity(
        &self,
        question: &str,
        answer: Option<&str>,
        class: Option<(&str, f32)>,
        image: ImageFamiliarity,
    ) -> Familiarity {
        let known = self.known_questions();
        let familiarity = known.map(|known| known.compare(question)).unwrap_or_default();
        let other = known.zip(answer).and_then(|(known, answer)| known.other_target(question, answer, class));
        familiarity.beside(class).answered(image, other)
    }
}

/// Replaces `masks` with their means over several runs. Gives how well the runs agree on each of them;
/// nothing of one run.
fn mean_with(masks: &mut [Vec<f32>], others: &[Vec<Vec<f32>>]) -> Vec<f64> {
    let mean_of = |(target, own): (usize, &mut Vec<f32>)| {
        let all: Vec<Vec<f32>> =
            std::iter::once(std::mem::take(own)).chain(others.iter().map(|other| other[target].clone())).collect();
        let (mean, agreement) = mean_mask(&all);
        *own = mean;
        agreement
    };
    if others.is_empty() { Vec::new() } else { masks.iter_mut().enumerate().map(mean_of).collect() }
}

/// Checks a question before the model is loaded.
///
/// # Errors
/// [`Error::Config`] for an empty question, and for one of more than [`MAX_QUESTION`] characters: the memory of
/// attention grows with the square of its length.
pub fn check_question(question: &str) -> Result<()> {
    if question.trim().is_empty() {
        return Err(Error::argument("question", "the question is empty", "ask for example: Where is the lesion?"));
    }
    let count = question.chars().count();
    if count > MAX_QUESTION {
        let reason = format!("the question has {count} characters; at most {MAX_QUESTION} are allowed");
        return Err(Error::argument("question", reason, "ask a shorter question"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_can_move_to_another_thread() {
        fn is_send<T: Send>() {}
        is_send::<Model>();
        is_send::<Encoded>();
    }

    #[test]
    fn questions_without_words_or_with_too_many_are_refused() {
        for (question, reason) in [(" ".to_owned(), "is empty"), ("a".repeat(MAX_QUESTION + 1), "4001 characters")] {
            let error = check_question(&question).unwrap_err().to_string();
            assert!(error.starts_with("argument `question`: the question ") && error.contains(reason), "{error}");
        }
        check_question("Where?").unwrap();
    }
}
