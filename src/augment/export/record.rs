//! Record of a generated pair: one line of the journal `manifest.jsonl`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::augment::mask_bank::MaskTransform;
use crate::augment::settings::{Mode, Paste};

/// A LoRA adapter that was used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraUse {
    /// File or repository.
    pub name: String,
    /// SHA-256 of its weights.
    pub sha256: String,
    /// Strength.
    pub scale: f64,
}

/// One row of the annotation file; no field is empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Text {
    /// The question again: a column of PRS-Med's older annotation files.
    pub description: String,
    /// Location of the target.
    pub position: String,
    /// The question.
    pub question: String,
    /// The answer.
    pub answer: String,
}

impl Text {
    /// Creates a text whose description is the question.
    pub fn new(question: &str, answer: &str, position: &str) -> Self {
        let [description, position, question, answer] = [question, position, question, answer].map(str::to_owned);
        Self { description, position, question, answer }
    }

    /// Whether a cell is empty or only spaces. The original PRS-Med loader drops such rows.
    pub fn has_empty_cell(&self) -> bool {
        [&self.description, &self.position, &self.question, &self.answer].iter().any(|cell| cell.trim().is_empty())
    }
}

/// Journal record of a pair: its generation, filter scores and the filter's decision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Number of the pair, unique in its data root. The seed of its random choices is derived from it.
    pub index: u64,
    /// Name of its files, see [`super::name`].
    pub name: String,
    /// Class folder.
    pub class: String,
    /// Path of the source image.
    pub source_image: PathBuf,
    /// SHA-256 of that file.
    pub source_sha256: String,
    /// Generation mode.
    pub mode: Mode,
    /// Paste mode of preserved pixels.
    pub paste: Paste,
    /// Name of the generator.
    pub model: String,
    /// SHA-256 of the generator's weights.
    pub model_sha256: String,
    /// LoRA adapters, in the order of use.
    pub loras: Vec<LoraUse>,
    /// The prompt.
    pub prompt: String,
    /// The negative prompt.
    pub negative: String,
    /// Seed of the noise.
    pub seed: u64,
    /// Steps of the whole noise schedule, before `strength` shortens it.
    pub steps: u32,
    /// Guidance scale.
    pub guidance: f64,
    /// Fraction of the noise schedule that was run, 0..=1.
    pub strength: f64,
    /// Name of the sampler.
    pub sampler: String,
    /// Name of the inserted source mask (`insert_lesion` only).
    #[serde(alias = "donor")]
    pub source_mask: Option<String>,
    /// How the source mask was transformed.
    pub mask_transform: Option<MaskTransform>,
    /// Width of the preserved rim of `keep_lesion` in pixels of the image. 0 in other modes; in pairs of earlier versions,
    /// width of the rim around a new lesion that was repainted.
    pub rim_px: f64,
    /// Boxes of the decoy regions in pixels, both ends included: left, top, right, bottom.
    pub decoys: Vec<[u32; 4]>,
    /// Rows of the annotation file.
    pub texts: Vec<Text>,
    /// Filter scores by name. A score that is not finite is written as `null` and read as NaN.
    #[serde(serialize_with = "write_scores", deserialize_with = "read_scores")]
    pub scores: BTreeMap<String, f64>,
    /// Whether the pair belongs to the data root.
    pub accepted: bool,
    /// Why the pair was rejected; empty for an accepted pair.
    pub reason: String,
}

fn write_scores<S: Serializer>(scores: &BTreeMap<String, f64>, out: S) -> Result<S::Ok, S::Error> {
    out.collect_map(scores.iter().map(|(name, value)| (name, value.is_finite().then_some(value))))
}

fn read_scores<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let scores = BTreeMap::<String, Option<f64>>::deserialize(from)?;
    Ok(scores.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect())
}
