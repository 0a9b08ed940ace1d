//! How a question and an image compare with those of a training, to warn about what a model was not trained for.
//!
//! A run folder keeps the questions of its training ([`questions`]) and how its images look ([`images`]).
//! What is still like them is decided by the distances among the training rows and those of the validation rows.

pub mod images;
mod look;
pub mod questions;
mod targets;

use prsmed_base::{Error, Result, files};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Probability from which the model's class of an image counts as known.
const SURE: f32 = 0.75;

/// How a question and its image compare with those of the training.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Familiarity {
    /// Whether it is like the training questions; `None` if the run does not know them, or has no limits.
    pub question_known: Option<bool>,
    /// The training question with the smallest distance.
    pub nearest_question: Option<String>,
    /// Words of the question that are in no training question.
    pub new_words: Vec<String>,
    /// Distance to the nearest question, from 0 (the same words) to 1 (no common word).
    pub question_distance: Option<f64>,
    /// The classes that the training has this question about, if the image is surely of another class.
    pub question_classes: Vec<String>,
    /// The target that the answer is about, if the question asks about another one.
    pub other_target: Option<String>,
    /// The classes whose questions in the training have that target.
    pub other_target_classes: Vec<String>,
    /// How the image compares with those of the training.
    #[serde(flatten)]
    pub image: ImageFamiliarity,
    /// For a class of the training that is not asked this, the classes that are.
    #[serde(skip)]
    asked_of_others: BTreeMap<String, BTreeSet<String>>,
}

impl Familiarity {
    /// The same beside the class that the model sees in the image, with its probability. A question that the training has only
    /// about other classes is not known for this image.
    #[must_use]
    pub fn beside(mut self, class: Option<(&str, f32)>) -> Self {
        let sure = class.filter(|(_, probability)| *probability >= SURE);
        if let Some(others) = sure.and_then(|(class, _)| self.asked_of_others.get(class))
            && self.question_known == Some(true)
        {
            self.question_known = Some(false);
            self.question_classes = others.iter().cloned().collect();
        }
        self
    }

    /// The same with how the image compares, and with the target of the answer, if it is another one than that of the question.
    #[must_use]
    pub fn answered(self, image: ImageFamiliarity, other: Option<OtherTarget>) -> Self {
        let (other_target, other_target_classes) = other.map(|other| (other.name, other.classes)).unzip();
        Self { image, other_target, other_target_classes: other_target_classes.unwrap_or_default(), ..self }
    }

    /// Adds these fields to a JSON object.
    pub fn add_to(&self, record: &mut Value) {
        add_fields(record, self);
    }

    /// What to tell about an image and a question that are unlike those of the training, and about an answer to another
    /// question.
    pub fn warnings(&self) -> impl Iterator<Item = String> {
        self.image.warning().into_iter().chain(self.question_warning()).chain(self.target_warning())
    }

    fn target_warning(&self) -> Option<String> {
        let name = self.other_target.as_deref()?;
        Some(format!(
            "the answer is about `{name}`, which the question does not ask about (the training has it in questions about {}), \
             so do not rely on the answer and the mask",
            self.other_target_classes.join(", ")
        ))
    }

    fn question_warning(&self) -> Option<String> {
        if self.question_known != Some(false) {
            return None;
        }
        if !self.question_classes.is_empty() {
            return Some(format!(
                "the training has this question about {} only, and this image looks like another class, so do not rely on the \
                 answer and the mask",
                self.question_classes.join(", ")
            ));
        }
        let words = match self.new_words.as_slice() {
            [] => String::new(),
            words => format!(" (no training question has: {})", words.join(", ")),
        };
        let nearest = self.nearest_question.as_deref().unwrap_or_default();
        Some(format!(
            "this question is unlike those of the training{words}, so do not rely on the answer and the mask; the nearest \
             training question is `{nearest}`"
        ))
    }
}

/// A target in an answer that the question does not ask about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherTarget {
    /// The words.
    pub name: String,
    /// The classes whose questions in the training have them.
    pub classes: Vec<String>,
}

/// How an image compares with those of the training.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageFamiliarity {
    /// Whether it looks like the training images; `None` if the run does not know them, or has too few.
    pub image_known: Option<bool>,
    /// Distance to the nearest training image, in units of the limit: above 1 it looks unlike them.
    pub image_distance: Option<f64>,
    /// What differs most from that training image.
    pub image_differs: Option<String>,
}

impl ImageFamiliarity {
    /// That of a volume: unlike if more than a quarter of its slices are. Nothing is known of no slice.
    pub fn of_slices(mut slices: Vec<Self>) -> Self {
        slices.sort_by(|a, b| a.image_distance.unwrap_or_default().total_cmp(&b.image_distance.unwrap_or_default()));
        if slices.is_empty() { Self::default() } else { slices.swap_remove(slices.len() - 1 - slices.len() / 4) }
    }

    /// What to tell about an image that looks unlike those of the training.
    pub fn warning(&self) -> Option<String> {
        let differs = self.image_differs.as_deref().filter(|_| self.image_known == Some(false))?;
        Some(format!(
            "this image looks unlike those of the training (most of all its {differs}), so do not rely on the answer and \
             the mask"
        ))
    }
}

/// Adds the fields of a record to a JSON object.
///
/// # Panics
/// If they do not serialise.
pub fn add_fields(record: &mut Value, fields: &impl Serialize) {
    let fields = serde_json::to_value(fields).expect("plain values serialise");
    for (name, value) in fields.as_object().into_iter().flatten() {
        record[name] = value.clone();
    }
}

/// The content of a file in a checkpoint folder; `None` if there is none.
fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let text = match files::read(path, files::MAX_TEXT) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(path, "read")(error)),
    };
    serde_json::from_slice(&text).map(Some).map_err(|error| damaged(path, error.to_string()))
}

fn damaged(path: &Path, reason: String) -> Error {
    Error::weights(path, reason, "use another checkpoint of the run (`last` or `best`), or copy this one again")
}

/// The smallest value that this fraction of the values does not exceed.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index of the list")]
fn quantile(mut values: Vec<f64>, fraction: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let rank = (fraction * values.len() as f64).ceil() as usize;
    values.get(rank.checked_sub(1)?).copied()
}
