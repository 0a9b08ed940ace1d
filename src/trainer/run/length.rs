//! The length of a run that is resumed: what fits its checkpoint, and what changes.

use crate::checkpoint::TrainingProgress;
use crate::{TrainConfig, schedule};
use prsmed_base::{Error, Result};
use std::path::Path;

/// Refuses to resume a run with another number of steps per epoch.
pub(super) fn check_steps_per_epoch(progress: &TrainingProgress, steps_per_epoch: u64, last: &Path) -> Result<()> {
    let before = progress.steps_per_epoch;
    if before == steps_per_epoch {
        return Ok(());
    }
    let reason =
        format!("this run had {before} steps an epoch, the data and batch sizes given now make {steps_per_epoch}");
    let hint = "resume with the same data, `train.micro_batch` and `train.accumulation`, or start a new run";
    Err(Error::weights(last, reason, hint))
}

/// Refuses to resume a run that is longer than the settings ask for.
pub(super) fn check_length(progress: &TrainingProgress, total_steps: u64, config: &TrainConfig) -> Result<()> {
    let done = progress.step;
    if done <= total_steps {
        return Ok(());
    }
    let key = limit_of(total_steps, config);
    let reason = format!("the run to resume has done {done} steps, and the settings end it after {total_steps}");
    Err(Error::config(key, reason, "give a larger number, or start a new run with another argument `out`"))
}

/// Says how the learning rate jumps if the training has become longer or shorter.
pub(super) fn jump(progress: &TrainingProgress, total_steps: u64, config: &TrainConfig) -> Option<String> {
    let (before, done) = (progress.total_steps, progress.step);
    if before == 0 || before == total_steps || done == total_steps {
        return None;
    }
    let [was, is] = [before, total_steps].map(|total| schedule::learning_rate(config, done, total));
    (was != is).then(|| format!(
        "the training had {before} steps and now has {total_steps}: the learning rate falls over all of them, and jumps from \
         {was:.2e} to {is:.2e} at step {done}"
    ))
}

/// Which of two limits ends the training; `None` with one limit.
pub(super) fn which_limit(config: &TrainConfig, steps_per_epoch: u64) -> Option<String> {
    let TrainConfig { epochs, max_steps, .. } = config;
    let all = epochs * steps_per_epoch;
    (*max_steps > 0).then(|| {
        if all <= *max_steps {
            format!(
                "`train.epochs={epochs}` ends the training after {all} steps ({steps_per_epoch} an epoch), before \
                 `train.max_steps={max_steps}`"
            )
        } else {
            let epoch = max_steps.div_ceil(steps_per_epoch.max(1));
            format!("`train.max_steps={max_steps}` ends the training in epoch {epoch} of {epochs} (`train.epochs`)")
        }
    })
}

/// The setting that ends a training after `total_steps`.
fn limit_of(total_steps: u64, config: &TrainConfig) -> &'static str {
    if config.max_steps == total_steps { "train.max_steps" } else { "train.epochs" }
}

pub(super) fn resumed_at(done: u64, total_steps: u64, config: &TrainConfig) -> String {
    if done < total_steps {
        return format!("resumed at step {done} of {total_steps}");
    }
    let key = limit_of(total_steps, config);
    format!("nothing to train: all {done} steps are done; a larger `{key}` makes the training longer")
}
