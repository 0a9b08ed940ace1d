//! What is known of a pair: one line of the journal.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::augment::donor::Transform;
use crate::augment::settings::{Mode, Paste};

/// An adapter that took part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraUse {
    /// File or repository.
    pub name: String,
    /// SHA-256 of its weights.
    pub sha256: String,
    /// Its factor.
    pub scale: f64,
}

/// One row of the annotation file; no field is empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Text {
    /// What PRS-Med's own files had before they had questions: the question.
    pub description: String,
    /// Where the target is.
    pub position: String,
    /// What is asked.
    pub question: String,
    /// What is to be answered.
    pub answer: String,
}

impl Text {
    /// The texts with the question for a description.
    pub fn new(question: &str, answer: &str, position: &str) -> Self {
        let [description, position, question, answer] = [question, position, question, answer].map(str::to_owned);
        Self { description, position, question, answer }
    }

    /// Whether a cell holds nothing but spaces: the original loader drops such rows.
    pub fn has_empty_cell(&self) -> bool {
        [&self.description, &self.position, &self.question, &self.answer].iter().any(|cell| cell.trim().is_empty())
    }
}

/// How a pair was made and what the filter said.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Number of the pair, unique in its data root; the seed of its random choices is drawn from it.
    pub index: u64,
    /// Name of its files, see [`super::name`].
    pub name: String,
    /// The class folder.
    pub class: String,
    /// The picture that it was made from.
    pub source_image: PathBuf,
    /// SHA-256 of that file.
    pub source_sha256: String,
    /// How it was made.
    pub mode: Mode,
    /// What became of the held pixels.
    pub paste: Paste,
    /// The model's name.
    pub model: String,
    /// SHA-256 over the model's weights.
    pub model_sha256: String,
    /// Adapters, in the order of their use.
    pub loras: Vec<LoraUse>,
    /// The prompt.
    pub prompt: String,
    /// The negative prompt.
    pub negative: String,
    /// Seed of the noise.
    pub seed: u64,
    /// Sampler steps before `strength` shortens them.
    pub steps: u32,
    /// Guidance scale.
    pub guidance: f64,
    /// Part of the noise schedule that is run, 0..=1.
    pub strength: f64,
    /// The sampler's name.
    pub sampler: String,
    /// The donor of the mask, where it is not the source's.
    pub donor: Option<String>,
    /// How the donor was moved.
    pub mask_transform: Option<Transform>,
    /// Width of the held rim in pixels of the picture.
    pub rim_px: f64,
    /// Boxes of the decoys in pixels, both ends included: left, top, right, bottom.
    pub decoys: Vec<[u32; 4]>,
    /// Rows of the annotation file.
    pub texts: Vec<Text>,
    /// The filter's numbers; one that is not finite is written as `null` and read as NaN.
    #[serde(serialize_with = "write_scores", deserialize_with = "read_scores")]
    pub scores: BTreeMap<String, f64>,
    /// Whether the pair is part of the data root.
    pub accepted: bool,
    /// Why it is not; empty when it is.
    pub reason: String,
}

fn write_scores<S: Serializer>(scores: &BTreeMap<String, f64>, out: S) -> Result<S::Ok, S::Error> {
    out.collect_map(scores.iter().map(|(name, value)| (name, value.is_finite().then_some(value))))
}

fn read_scores<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let scores = BTreeMap::<String, Option<f64>>::deserialize(from)?;
    Ok(scores.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect())
}
