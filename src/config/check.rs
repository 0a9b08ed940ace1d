//! Settings of a training that cannot be used together.

use super::RunConfig;
use crate::segment::setup::{BatchNorm, check_host_layers};
use crate::segment::vision_features;
use crate::trainer::Switch;
use crate::{Error, Result};

/// The first conflict.
pub(super) fn check(config: &RunConfig) -> Result<()> {
    check_packing(config)?;
    check_host_layers(&config.model)?;
    vision_features::refuse_trained_tower(&config.data, config.model.train_base)?;
    check_graph(config)?;
    check_folds(config)?;
    if config.train.offload_weights {
        let hint = "use `train.offload_optimizer=true`: the segmenter trains few weights, and most memory is elsewhere";
        return Err(Error::config("train.offload_weights", "belongs to `augment finetune`", hint));
    }
    config.train.check()
}

fn check_folds(config: &RunConfig) -> Result<()> {
    let (fold, folds) = (config.data.fold, config.data.folds);
    if folds == 1 {
        return Err(Error::config("data.folds", "one fold leaves nothing to train", "use 5, or 0 for none"));
    }
    if fold > 0 && fold >= folds {
        let hint = format!("use 0 to {}", folds.saturating_sub(1));
        let reason = if folds == 0 { "there are no folds".to_owned() } else { format!("there are {folds} folds") };
        let hint = if folds == 0 { "set `data.folds=5` too".to_owned() } else { hint };
        return Err(Error::config("data.fold", reason, hint));
    }
    Ok(())
}

/// Refuses settings that CUDA graphs cannot capture.
fn check_graph(config: &RunConfig) -> Result<()> {
    let conflicts = [
        (
            config.train.step_in_backward,
            "`train.step_in_backward` frees gradients during the step",
            "train.step_in_backward=false",
        ),
        (
            config.model.stream_layers.count() > 0,
            "they need weights at fixed addresses, and `model.stream_layers` copies layers for each use",
            "model.stream_layers=none",
        ),
        (
            config.model.stream_vision,
            "they need weights at fixed addresses, and `model.stream_vision` copies the tower for each use",
            "model.stream_vision=false",
        ),
        (
            !config.model.semantics.hides_answer(),
            "they pad the texts, and the published mask decoder reads padding",
            "model.semantics=corrected",
        ),
    ];
    let found = conflicts.into_iter().find(|(conflict, ..)| config.train.graph == Switch::On && *conflict);
    found.map_or(Ok(()), |(_, what, remedy)| {
        let reason = format!("steps cannot be captured as CUDA graphs: {what}");
        let hint = format!("add the setting `{remedy}`, or set it to `auto` or `off`");
        Err(Error::config("train.graph", reason, hint))
    })
}

/// Several questions in one sequence need a decoder that reads prompts only, and samples that do not depend on each
/// other.
fn check_packing(config: &RunConfig) -> Result<()> {
    let key = "data.questions_per_image";
    let questions = config.data.questions_per_image;
    if questions > 1 && !config.model.semantics.hides_answer() {
        let reason = format!("{questions} questions share a sequence, and the decoder of `reference` reads all of it");
        return Err(Error::config(key, reason, "set it to 1, or use `model.semantics=corrected`"));
    }
    if questions > 1 && config.model.batch_norm == BatchNorm::Batch {
        let reason = format!("{questions} questions share an image, which changes the statistics of a batch");
        return Err(Error::config(key, reason, "set it to 1, or use `model.batch_norm=frozen`"));
    }
    Ok(())
}
