//! The generator that settings name: its sizes for a plan, and its files for a run.

use super::weight_files;
use crate::Result;
use crate::augment::pipeline;
use crate::augment::pipeline_config::PipelineConfig;
use crate::augment::settings::{GeneratorSettings, Mode, PredictionChoice, RANDOM};
use crate::augment::single_file;
use crate::config::{AugmentRun, FinetuneRun};
use crate::hub::{Files, Need};
use crate::models::diffusion::sampler::Sampler;
use crate::models::diffusion::single_file::SingleFile;
use crate::runtime::Runtime;
use std::path::Path;

/// The pipeline config of the generator. Downloads the files if they are on the hub.
///
/// # Errors
/// [`crate::Error::Hub`] or [`crate::Error::Weights`] for files that are missing or cannot be used; [`crate::Error::Config`].
pub fn to_generate(run: &AugmentRun, runtime: &Runtime) -> Result<PipelineConfig> {
    let config = &run.augment;
    if let Some(size) = config.model.strip_prefix(RANDOM) {
        weight_files::check(config.needs(), runtime)?;
        let wanted = !config.controlnet.is_empty() || config.mode == Mode::MaskToImage;
        return PipelineConfig::random(size, wanted);
    }
    let pipeline_config = open(&config.generator(), Use::Weights, runtime)?;
    // a schedule that cannot be followed is refused before anything is loaded
    pipeline::sampler(&pipeline_config, config)?;
    Ok(pipeline_config)
}

/// The pipeline config for a plan: read from local files, or guessed from the name of a hub model.
///
/// # Errors
/// [`crate::Error::Hub`] or [`crate::Error::Weights`] for files that are missing or cannot be used; [`crate::Error::Config`].
pub fn planned(run: &AugmentRun, runtime: &Runtime) -> Result<PipelineConfig> {
    let config = &run.augment;
    if config.model.starts_with("hub:") || config.model.starts_with(RANDOM) {
        return run.planned_pipeline_config();
    }
    open(&config.generator(), Use::Sizes, runtime)
}

/// The pipeline config of a generator that is fine-tuned. Downloads the files if they are on the hub.
///
/// # Errors
/// [`crate::Error::Hub`] or [`crate::Error::Weights`] for files that are missing or cannot be used; [`crate::Error::Config`].
pub fn to_finetune(run: &FinetuneRun, runtime: &Runtime) -> Result<PipelineConfig> {
    let config = &run.finetune;
    if config.is_random() {
        return run.planned_pipeline_config();
    }
    let pipeline_config = open(&config.generator(), Use::Weights, runtime)?;
    if config.samples > 0 {
        Sampler::new(pipeline_config.sampler, &pipeline_config.scheduler, config.sample_steps)?;
    }
    Ok(pipeline_config)
}

/// As [`planned`], for a generator that is fine-tuned.
///
/// # Errors
/// [`crate::Error::Hub`] or [`crate::Error::Weights`] for files that are missing or cannot be used; [`crate::Error::Config`].
pub fn planned_to_finetune(run: &FinetuneRun, runtime: &Runtime) -> Result<PipelineConfig> {
    let model = &run.finetune.model;
    if model.starts_with("hub:") || model.starts_with(RANDOM) {
        return run.planned_pipeline_config();
    }
    open(&run.finetune.generator(), Use::Sizes, runtime)
}

/// What a pipeline config is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// For a plan.
    Sizes,
    /// For a run.
    Weights,
}

/// The generator in a folder or in one file.
fn open(settings: &GeneratorSettings, purpose: Use, runtime: &Runtime) -> Result<PipelineConfig> {
    weight_files::check(settings.needs(), runtime)?;
    let control = if settings.controlnet.is_empty() { None } else { Some(runtime.locate(settings.controlnet)?) };
    let root = runtime.locate(settings.model)?;
    let pipeline_config = if root.is_file() {
        open_single_file(settings, &root, control.as_deref(), purpose, runtime)?
    } else {
        PipelineConfig::open(settings.model, &root, control.as_deref(), settings.variant)?
    };
    if purpose == Use::Weights || root.is_dir() {
        pipeline_config.check_files()?;
    }
    pipeline_config.with_prediction(settings.prediction_type)
}

fn open_single_file(
    settings: &GeneratorSettings,
    path: &Path,
    control: Option<&Path>,
    purpose: Use,
    runtime: &Runtime,
) -> Result<PipelineConfig> {
    let contents = SingleFile::open(path)?;
    let base = settings.base_pipeline;
    if purpose == Use::Sizes && (base.is_empty() || base.starts_with("hub:")) {
        return single_file::open(path, contents, None, control, settings.variant);
    }
    let (key, folders) = (format!("{}.base_pipeline", settings.section), single_file::folders(&contents));
    let (spec, files) = if base.is_empty() {
        single_file::refuse_lacking(path, &contents, &key)?;
        (single_file::TOKENIZER, Files::Matching(&single_file::TOKENIZER_FILES))
    } else {
        (base, Files::Folders { names: &folders, variant: settings.variant })
    };
    weight_files::check(vec![Need::new(&key, spec, files)], runtime)?;
    let folder = runtime.locate(spec)?;
    let says_it = contents.prediction.is_some() || folder.join("scheduler").is_dir();
    if settings.prediction_type == PredictionChoice::Model && contents.prediction_is_assumed() && !says_it {
        let name = path.display();
        runtime.warn(format!(
            "`{name}` does not say what its UNet predicts: `{}.prediction_type=v_prediction` is assumed, as in SD 2.0 and \
             2.1 for 768 pixels; the `base` models for 512 pixels need `epsilon`",
            settings.section
        ));
    }
    single_file::open(path, contents, Some(&folder), control, settings.variant)
}
