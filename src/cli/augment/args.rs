//! Command-line arguments that the `augment` commands share, and the pipeline config that they name.

use crate::Result;
use crate::augment::pipeline_config::PipelineConfig;
use crate::augment::settings::{GeneratorSettings, PredictionChoice, RANDOM};
use crate::augment::single_file;
use crate::cli::args::sets_of;
use crate::cli::context::Context;
use crate::config::{AugmentRun, FinetuneRun, Resolved, RunConfig, Sources};
use crate::event::Event;
use crate::hub::{Files, Need};
use crate::models::diffusion::single_file::SingleFile;
use crate::trainer::FirstLayers;
use std::path::{Path, PathBuf};

/// Settings of the generator.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct SettingsArgs {
    /// Named settings: augment (SDXL) or tiny (random weights, for a quick try) [default: augment]
    #[arg(long, value_name = "NAME")]
    pub(in crate::cli) preset: Option<String>,
    /// TOML file whose values override the preset
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) config: Option<PathBuf>,
    /// One setting, for example `augment.steps=20`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(in crate::cli) sets: Vec<String>,
}

impl SettingsArgs {
    /// Resolves the settings; flags have the highest priority.
    pub(in crate::cli) fn resolve(&self, flags: Vec<(String, String)>) -> Result<Resolved<AugmentRun>> {
        let sets = sets_of(&self.sets, flags);
        let sources = Sources {
            preset: self.preset.clone(),
            default_preset: "augment".into(),
            file: self.config.clone(),
            sets,
            ..Sources::default()
        };
        sources.resolve_as()
    }
}

/// Settings of the segmenters that are trained for filtering or an ablation.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct SegmenterArgs {
    /// Named settings of the segmenter: tiny, full, cpu, gpu-24gb, ... [default: tiny]
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// TOML file whose values override the preset
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One setting, for example `train.micro_batch=4`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

impl SegmenterArgs {
    /// Resolves the settings; flags have the highest priority.
    pub(in crate::cli) fn resolve(
        &self,
        flags: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Resolved<RunConfig>> {
        let sets = sets_of(&self.sets, flags);
        let sources = Sources {
            preset: self.preset.clone(),
            default_preset: "tiny".into(),
            file: self.config.clone(),
            sets,
            ..Sources::default()
        };
        sources.resolve()
    }
}

/// The pipeline config of the generator. Downloads the files if they are on the hub.
pub(in crate::cli) fn pipeline_config(run: &AugmentRun, context: &Context) -> Result<PipelineConfig> {
    let config = &run.augment;
    if let Some(size) = config.model.strip_prefix(RANDOM) {
        context.check_files(config.needs())?;
        let wanted = !config.controlnet.is_empty() || config.mode == crate::augment::settings::Mode::MaskToImage;
        return PipelineConfig::random(size, wanted);
    }
    open(&config.generator(), Use::Weights, context)
}

/// The pipeline config for a plan: read from local files, or guessed from the name of a hub model.
pub(in crate::cli) fn planned_pipeline_config(run: &AugmentRun, context: &Context) -> Result<PipelineConfig> {
    let config = &run.augment;
    if config.model.starts_with("hub:") || config.model.starts_with(RANDOM) {
        return run.planned_pipeline_config();
    }
    open(&config.generator(), Use::Sizes, context)
}

/// The pipeline config of a generator that is fine-tuned. Downloads the files if they are on the hub.
pub(in crate::cli) fn finetuned_pipeline_config(run: &FinetuneRun, context: &Context) -> Result<PipelineConfig> {
    let config = &run.finetune;
    if config.is_random() {
        return run.planned_pipeline_config();
    }
    open(&config.generator(), Use::Weights, context)
}

/// As [`planned_pipeline_config`], for a generator that is fine-tuned.
pub(in crate::cli) fn planned_finetuned_config(run: &FinetuneRun, context: &Context) -> Result<PipelineConfig> {
    let model = &run.finetune.model;
    if model.starts_with("hub:") || model.starts_with(RANDOM) {
        return run.planned_pipeline_config();
    }
    open(&run.finetune.generator(), Use::Sizes, context)
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
fn open(settings: &GeneratorSettings, purpose: Use, context: &Context) -> Result<PipelineConfig> {
    context.check_files(settings.needs())?;
    let control = if settings.controlnet.is_empty() { None } else { Some(context.locate(settings.controlnet)?) };
    let root = context.locate(settings.model)?;
    let pipeline_config = if root.is_file() {
        open_single_file(settings, &root, control.as_deref(), purpose, context)?
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
    context: &Context,
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
    context.check_files(vec![Need::new(&key, spec, files)])?;
    let folder = context.locate(spec)?;
    let says_it = contents.prediction.is_some() || folder.join("scheduler").is_dir();
    if settings.prediction_type == PredictionChoice::Model && contents.prediction_is_assumed() && !says_it {
        let name = path.display();
        context.progress.on(&Event::Warning(format!(
            "`{name}` does not say what its UNet predicts: `{}.prediction_type=v_prediction` is assumed, as in SD 2.0 and \
             2.1 for 768 pixels; the `base` models for 512 pixels need `epsilon`",
            settings.section
        )));
    }
    single_file::open(path, contents, Some(&folder), control, settings.variant)
}

/// What a search changed, in words.
pub(in crate::cli) fn finetune_changes(before: &FinetuneRun, now: &FinetuneRun) -> Vec<String> {
    let mut notes = Vec::new();
    let (was, is) = (&before.train, &now.train);
    if (was.micro_batch, was.accumulation) != (is.micro_batch, is.accumulation) {
        let (micro_batch, accumulation, whole) = (is.micro_batch, is.accumulation, now.effective_batch());
        notes.push(format!("effective batch: {micro_batch} x {accumulation} = {whole} images"));
    }
    if was.checkpointing != is.checkpointing {
        notes.push(match is.checkpointing {
            FirstLayers::None => "`train.checkpointing=none`: memory suffices without recomputing blocks".to_owned(),
            _ => "`train.checkpointing`: blocks of the UNet are computed again in the backward pass".to_owned(),
        });
    }
    if was.optimizer != is.optimizer {
        notes.push("`train.optimizer=adamw8bit`: nothing else fits".to_owned());
    }
    if !was.step_in_backward && is.step_in_backward {
        notes.push(
            "`train.step_in_backward=true`: each weight is updated as soon as its gradient is complete, and gradients \
             are not clipped; nothing else fits"
                .to_owned(),
        );
    }
    if !was.offload_optimizer && is.offload_optimizer {
        notes.push("`train.offload_optimizer=true`: optimizer state in host memory; nothing else fits".to_owned());
    }
    if !was.offload_weights && is.offload_weights {
        notes.push(
            "`train.offload_weights=true`: fp32 weights and optimizer state in host memory, updated by the CPU; nothing \
             else fits"
                .to_owned(),
        );
    }
    let makes_samples = now.finetune.num_samples_for_metrics > 0;
    if makes_samples && before.finetune.generation_batch_size != now.finetune.generation_batch_size {
        notes.push("`finetune.generation_batch_size=1`: samples are made one by one".to_owned());
    }
    let (was, is) = (before.finetune.image_size, now.finetune.image_size);
    if was != is {
        notes.push(format!("nothing fits with images of {was} pixels: using {is}, which is unusable for a model made for much larger ones"));
    }
    notes
}
