//! A whole training from settings and rows: for jobs that train several models.

use super::setup::{self, Assembly, Build, ModelConfig, RunOverrides};
use super::sight;
use super::task::{DataConfig, SegmentTask};
use crate::data::manifest::Manifest;
use crate::event::Observer;
use crate::nn::LoraConfig;
use crate::tensor::weights::{readable_folder, verify_folder};
use crate::tensor::{Device, guard};
use crate::trainer::run::Session;
use crate::trainer::{self, TrainConfig};
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Everything that a training is told.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// The model and its semantics.
    pub model: ModelConfig,
    /// Its adapters.
    pub lora: LoraConfig,
    /// The engine.
    pub train: TrainConfig,
    /// The input pipeline.
    pub data: DataConfig,
    /// All of it as text, kept in checkpoints.
    pub text: String,
}

/// Where and under whose eyes models are trained.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// Device of every tensor.
    pub device: Device,
    /// Turns `hub:...` into a local folder.
    pub locate: &'a dyn Fn(&str) -> Result<PathBuf>,
    /// Folder for what later loads can use again; `None` keeps nothing.
    pub cache: Option<&'a Path>,
    /// Hears about everything.
    pub observer: &'a dyn Observer,
    /// Set by Ctrl-C: the run saves and ends with [`Error::Interrupted`].
    pub interrupt: &'a AtomicBool,
}

impl std::fmt::Debug for Surroundings<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Surroundings").field("device", &self.device).finish_non_exhaustive()
    }
}

/// The model of `recipe` for the rows of `manifest`: new, or that of the checkpoint folder `resume`.
///
/// # Errors
/// As [`setup::create`] and [`setup::open`]; [`Error::Weights`] for a checkpoint of other classes.
pub fn assemble(recipe: &Recipe, manifest: &Manifest, resume: Option<&Path>, around: Surroundings) -> Result<Assembly> {
    let build = Build {
        device: around.device,
        kind: recipe.train.precision.kind(),
        seed: recipe.train.seed,
        locate: around.locate,
        allow_partial: false,
        cache: around.cache,
    };
    let Some(folder) = resume else {
        // without the extra rows: a run with them starts from the model of the run without
        let real = manifest.rows.iter().filter(|row| !row.synthetic);
        let texts: Vec<&str> = real.flat_map(|row| [row.question.as_str(), row.answer.as_str()]).collect();
        return setup::create(&recipe.model, recipe.lora, &manifest.modalities, &texts, build);
    };
    verify_folder(folder).map_err(suggest_best)?;
    // frozen layers are read again: a run may go on with them stored in another way
    let overrides = RunOverrides { quantization: Some(recipe.model.quantization), ..RunOverrides::default() };
    let assembly = setup::open(folder, &overrides, build)?;
    if assembly.description.modalities != manifest.modalities {
        let reason =
            format!("its classes are {:?}, the data has {:?}", assembly.description.modalities, manifest.modalities);
        return Err(Error::weights(folder, reason, "resume with the data the run was started on"));
    }
    Ok(assembly)
}

/// Only `last/` is resumed from.
fn suggest_best(error: Error) -> Error {
    match error {
        Error::Weights { path, reason, .. } => {
            let hint = "put a copy of the run's `best/` in its place and resume from there, or copy it again";
            Error::weights(path, reason, hint)
        }
        other => other,
    }
}

/// Trains in `folder`, or goes on there, and returns the model as it is at the end.
///
/// # Errors
/// As [`assemble`] and [`trainer::run()`].
pub fn fit(recipe: &Recipe, manifest: &Arc<Manifest>, folder: &Path, around: Surroundings) -> Result<SegmentTask> {
    std::fs::create_dir_all(folder).map_err(Error::io(folder, "create"))?;
    let resume = readable_folder(&folder.join("last")).ok();
    let assembly = assemble(recipe, manifest, resume.as_deref(), around)?;
    let kept = sight::keep(&assembly, &recipe.data, around.cache, around.observer)?;
    let task =
        SegmentTask::new(assembly, manifest, recipe.train.clone(), recipe.data.clone(), recipe.text.clone(), kept)?;
    if resume.is_none() {
        guard::guard(|| task.calibrate())?;
    }
    let session = Session {
        config: &recipe.train,
        folder,
        resume: resume.is_some(),
        profile: None,
        observer: around.observer,
        interrupt: around.interrupt,
        has_room_for_graphs: false,
    };
    trainer::run(&task, &session)?;
    Ok(task)
}
