//! `prsmed augment`: make image+mask pairs, filter them, measure them, prove whether they help.

mod filter;
mod generate;
mod quality;
mod study;

use super::report::Outcome;
use super::{Context, sets_of};
use crate::Result;
use crate::augment::blueprint::Blueprint;
use crate::augment::settings::RANDOM;
use crate::config::{AugmentRun, Resolved, RunConfig, Sources};
use crate::hub::Files;
use std::path::PathBuf;

/// Make image+mask pairs from Stable Diffusion, filter them, prove whether they help
///
/// The label of a pair is known because the lesion, or its mask, is a real one. What looks real need not help: `study`
/// tells, before pairs are trained on.
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Examples, in this order:
  prsmed augment generate --data-root data --out pairs
  prsmed augment filter --data-root data --synthetic pairs --preset gpu-24gb
  prsmed augment study --data-root data --extra pairs --preset gpu-24gb
  prsmed train --data-root data --extra pairs --out runs/a")]
pub(super) enum Command {
    Generate(Box<generate::Args>),
    Filter(Box<filter::Args>),
    Quality(quality::Args),
    Study(Box<study::Args>),
}

pub(super) fn run(command: &Command, context: &Context) -> anyhow::Result<Outcome> {
    match command {
        Command::Generate(args) => generate::run(args, context),
        Command::Filter(args) => filter::run(args, context),
        Command::Quality(args) => quality::run(args, context),
        Command::Study(args) => study::run(args, context),
    }
}

/// Settings of the generator.
#[derive(Debug, clap::Args)]
pub(super) struct SettingsArgs {
    /// Named settings: augment (SDXL), or tiny (random weights, for trying) [default: augment]
    #[arg(long, value_name = "NAME")]
    pub(super) preset: Option<String>,
    /// TOML file over the preset
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// One setting, for example `augment.steps=20`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(super) sets: Vec<String>,
}

impl SettingsArgs {
    /// The settings with those of flags over them.
    pub(super) fn resolve(&self, flags: Vec<(String, String)>) -> Result<Resolved<AugmentRun>> {
        let sets = sets_of(&self.sets, flags);
        let sources =
            Sources { preset: self.preset.clone(), default_preset: "augment".into(), file: self.config.clone(), sets };
        sources.resolve_as()
    }
}

/// Settings of the segmenters that are trained on the way.
#[derive(Debug, clap::Args)]
struct SegmenterArgs {
    /// Named settings of the segmenter: tiny, full, cpu, gpu-24gb, ... [default: tiny]
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// TOML file over the preset
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One setting, for example `train.micro_batch=4`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

impl SegmenterArgs {
    /// The settings with those of flags over them.
    fn resolve(&self, flags: impl IntoIterator<Item = (String, String)>) -> Result<Resolved<RunConfig>> {
        let sets = sets_of(&self.sets, flags);
        let sources =
            Sources { preset: self.preset.clone(), default_preset: "tiny".into(), file: self.config.clone(), sets };
        sources.resolve()
    }
}

/// The generator's sizes and files, fetched where they are on the hub.
pub(super) fn blueprint(run: &AugmentRun, context: &Context) -> Result<Blueprint> {
    let config = &run.augment;
    let find = |spec: &str| -> Result<PathBuf> {
        if spec.starts_with("hub:") {
            let files = Files::Diffusers(&config.variant);
            return crate::hub::resolve(spec, &files, &context.env.hub, context.progress.as_ref());
        }
        context.locate(spec)
    };
    let control = if config.controlnet.is_empty() { None } else { Some(find(&config.controlnet)?) };
    if let Some(size) = config.model.strip_prefix(RANDOM) {
        let wanted = control.is_some() || config.mode == crate::augment::settings::Mode::MaskToImage;
        return Blueprint::random(size, wanted);
    }
    let root = find(&config.model)?;
    let blueprint = Blueprint::open(&config.model, &root, control.as_deref(), &config.variant)?;
    blueprint.check_files()?;
    Ok(blueprint)
}

/// The generator's sizes for a plan: read where its files are here, else those of its family by its name.
pub(super) fn planned_blueprint(run: &AugmentRun, context: &Context) -> Result<Blueprint> {
    let config = &run.augment;
    if config.model.starts_with("hub:") || config.model.starts_with(RANDOM) {
        return run.planned_blueprint();
    }
    blueprint(run, context)
}
