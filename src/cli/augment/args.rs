//! Command-line arguments that the `augment` commands share, and the pipeline config that they name.

use crate::Result;
use crate::cli::args::{RootArgs, sets_of};
use crate::cli::context::Context;
use crate::cli::next;
use crate::config::{AugmentRun, Resolved, RunConfig, Sources};
use crate::data::manifest::Manifest;
use crate::job::training::check_memory;
use crate::job::{machine, weight_files};
use crate::segment::needs;
use crate::shell::ShellCommand;
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

/// Checks the files of a segmenter that is trained on `real`, and its memory if a plan is made.
pub(super) fn check_segmenter(
    config: &mut RunConfig,
    real: &Manifest,
    is_planned: bool,
    context: &Context,
) -> Result<()> {
    let runtime = &context.runtime;
    weight_files::check_architectures(config, runtime)?;
    weight_files::check(needs::of_model(&config.model), runtime)?;
    if is_planned {
        check_memory(&config.with_cache_for(real), &machine::here(runtime)?, &context.memory, runtime)?;
    }
    Ok(())
}

/// The ablation of the pairs in `extra`, made from `num_real` images of these rows.
pub(in crate::cli) fn ablation_command(data: &RootArgs, extra: &Path, num_real: usize) -> ShellCommand {
    let command = data.add_to(ShellCommand::new("prsmed augment ablation")).flag("--extra", [extra]);
    let command = command.flag("--real-images", Some(num_real.to_string()).filter(|_| num_real > 0));
    command.flag("--out", next::free_instead_of("runs/ablation"))
}

impl SegmenterArgs {
    /// Adds these flags to another command.
    pub(in crate::cli) fn add_to(&self, command: ShellCommand) -> ShellCommand {
        let command = command.flag("--preset", &self.preset).flag("--config", &self.config);
        command.flag("--set", &self.sets)
    }

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
