//! Training state of a checkpoint, in addition to the files of the task: `trainer.safetensors` (optimizer state, moving
//! average) and `trainer.json` (progress).
//!
//! Random states are not saved: every step seeds the generators from the run's seed and its own number.

use super::ema::Ema;
use super::optimizer::AdamW;
use super::precision::Scaler;
use prsmed_base::{Error, Result, files};
use prsmed_tensor::weights::Archive;
use prsmed_tensor::weights::Staged;
use prsmed_tensor::{Tensor, no_grad};
use std::collections::BTreeMap;
use std::path::Path;

const TENSORS: &str = "trainer.safetensors";
/// File of the progress.
const PROGRESS: &str = "trainer.json";
/// Both files: only a training that continues needs them.
pub const STATE: [&str; 2] = [TENSORS, PROGRESS];

/// Progress of a run.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TrainingProgress {
    /// Optimizer steps done.
    pub step: u64,
    /// Best validation score so far.
    pub best_score: Option<f64>,
    /// The values of the validation with that score.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub best_values: Vec<(String, f64)>,
    /// Validations since the best one.
    pub without_gain: u64,
    /// The last scores that have an interval.
    #[serde(default)]
    pub scores: Vec<f64>,
    /// What the scores measure. Scores of different kinds are not compared.
    #[serde(default)]
    pub score_kind: String,
    /// True if a validation after the last step was due and was interrupted.
    #[serde(default)]
    pub unvalidated: bool,
    /// The loss scaler.
    pub scaler: Scaler,
    /// Steps of one epoch at the time of saving; another number means other data or batch sizes.
    pub steps_per_epoch: u64,
    /// Steps of the whole training at the time of saving, by which the learning rate falls; 0 if they are not known.
    #[serde(default)]
    pub total_steps: u64,
}

impl TrainingProgress {
    /// The progress of a training that begins.
    pub(super) fn new(scaler: Scaler, steps_per_epoch: u64, total_steps: u64) -> Self {
        Self {
            step: 0,
            best_score: None,
            best_values: Vec::new(),
            without_gain: 0,
            scores: Vec::new(),
            score_kind: String::new(),
            unvalidated: false,
            scaler,
            steps_per_epoch,
            total_steps,
        }
    }
}

/// Writes progress and the tensors of [`Stepper::state`](super::Stepper::state) into a checkpoint folder.
///
/// # Errors
/// [`Error::Io`].
pub fn save(folder: &mut Staged, progress: &TrainingProgress, tensors: &[(String, Tensor)]) -> Result<()> {
    save_tensors(folder, tensors)?;
    folder.write_bytes(PROGRESS, &serde_json::to_vec_pretty(progress).expect("plain numbers serialise"))
}

/// Writes the tensors of [`Stepper::state`](super::Stepper::state).
///
/// # Errors
/// [`Error::Io`].
pub fn save_tensors(folder: &mut Staged, tensors: &[(String, Tensor)]) -> Result<()> {
    let named: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    folder.write_tensors(TENSORS, &named, &BTreeMap::new())
}

/// The progress in a checkpoint folder.
///
/// # Errors
/// [`Error::Weights`] for a damaged file; [`Error::Io`].
pub fn read_progress(folder: &Path) -> Result<TrainingProgress> {
    let path = folder.join(PROGRESS);
    let text = files::read(&path, files::MAX_TEXT).map_err(Error::io(&path, "read"))?;
    serde_json::from_slice(&text).map_err(|e| {
        Error::weights(&path, format!("not a training state: {e}"), "resume from another checkpoint folder")
    })
}

/// Restores optimizer state and moving average; returns the progress.
///
/// # Errors
/// [`Error::Weights`] when a file is missing or does not fit; [`Error::Io`].
pub fn load(folder: &Path, optimizer: &mut AdamW, ema: Option<&mut Ema>) -> Result<TrainingProgress> {
    let progress = read_progress(folder)?;
    let archive = Archive::open(&folder.join(TENSORS))?;
    optimizer.restore(|name| if archive.contains(name) { archive.read(name).map(Some) } else { Ok(None) })?;
    if let Some(ema) = ema {
        for (name, mut target) in ema.state(optimizer.params()) {
            // if the average is turned on at a resume, it starts at the current weights
            if archive.contains(&name) {
                no_grad(|| archive.copy_into(&name, &mut target))?;
            }
        }
    }
    Ok(progress)
}
