//! The generator that settings name: its sizes for a plan, and its files for a run.

use crate::Result;
use crate::augment::pipeline;
use crate::augment::pipeline_config::PipelineConfig;
use crate::augment::settings::{GeneratorSettings, Mode, RANDOM};
use crate::config::{AugmentRun, FinetuneRun};
use crate::models::diffusion::sampler::Sampler;
use crate::runtime::Runtime;
use crate::segment::weight_files;

/// The pipeline config of the generator. Downloads the files if they are on the hub.
///
/// # Errors
/// [`crate::Error::Hub`] or [`crate::Error::Weights`] for files that are missing or cannot be used; [`crate::Error::Config`].
pub fn to_generate(run: &AugmentRun, runtime: &Runtime) -> Result<PipelineConfig> {
    let config = &run.augment;
    if let Some(size) = config.model.strip_prefix(RANDOM) {
        weight_files::check(config.generator().needs(), runtime)?;
        let wanted = !config.controlnet.is_empty() || config.mode == Mode::MaskToImage;
        return PipelineConfig::random(size, wanted);
    }
    let pipeline_config = open(&config.generator(), runtime)?;
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
    open(&config.generator(), runtime)
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
    let pipeline_config = open(&config.generator(), runtime)?;
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
    open(&run.finetune.generator(), runtime)
}

/// The generator in a folder.
fn open(settings: &GeneratorSettings, runtime: &Runtime) -> Result<PipelineConfig> {
    weight_files::check(settings.needs(), runtime)?;
    let control = if settings.controlnet.is_empty() { None } else { Some(runtime.locate(settings.controlnet)?) };
    let root = runtime.locate(settings.model)?;
    let pipeline_config = PipelineConfig::open(settings.model, &root, control.as_deref(), settings.variant)?;
    pipeline_config.check_files()?;
    Ok(pipeline_config)
}
