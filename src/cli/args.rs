//! Command-line arguments that several commands share.

use super::context::Context;
use crate::config::{FlagSet, Sources};
use crate::data::labels::Labels;
use crate::data::manifest::Manifest;
use crate::data::volume::Geometry;
use crate::job::resume::ResumeFrom;
use crate::job::rows::Rows;
use crate::shell::ShellCommand;
use crate::{Error, Result};
use std::path::PathBuf;

/// Settings of a job.
#[derive(Debug, clap::Args)]
pub(super) struct SettingsArgs {
    /// Named settings: tiny, full, cpu, gpu-24gb, ...
    #[arg(long, value_name = "NAME")]
    pub(super) preset: Option<String>,
    /// TOML file whose values override the preset
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// One setting, for example `train.micro_batch=4`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(super) sets: Vec<String>,
}

impl SettingsArgs {
    /// These settings, overridden by `flags`.
    pub(super) fn sources(&self, default_preset: &str, flags: impl IntoIterator<Item = FlagSet>) -> Sources {
        let given = self.sets.iter().map(|set| (set.clone(), "--set".to_owned()));
        let (preset, file, sets) = (self.preset.clone(), self.config.clone(), given.chain(flags).collect());
        Sources { preset, default_preset: default_preset.into(), file, sets, ..Sources::default() }
    }

    /// Adds these flags to another command.
    pub(super) fn add_to(&self, command: ShellCommand) -> ShellCommand {
        let command = command.flag("--preset", &self.preset).flag("--config", &self.config);
        command.flag("--set", &self.sets)
    }
}

/// Assignments to settings by other flags than `--set`, of those that are given, with the flags.
pub(super) fn assignments<const N: usize>(flags: [(&str, &str, Option<String>); N]) -> Vec<FlagSet> {
    let given = flags.into_iter();
    given.filter_map(|(key, flag, value)| Some((format!("{key}={}", value?), flag.to_owned()))).collect()
}

/// The labels of a flag.
pub(super) fn labels_of(flag: &str, text: &str) -> Result<Labels> {
    text.parse().map_err(|reason: String| Error::config(flag, reason, format!("give for example `{flag} 1,3`")))
}

/// The position of NIfTI volumes.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(super) struct GeometryArgs {
    /// The affine that counts for NIfTI files whose header has two that differ: sform or qform [default: sform; files with
    /// two voxel sizes are refused]
    #[arg(long, value_name = "FORM")]
    pub(super) geometry: Option<Geometry>,
}

/// Whether memory is planned before a job starts.
#[derive(Debug, clap::Args)]
pub(super) struct PlanArgs {
    /// Do not plan memory first; start even what may not fit
    #[arg(long)]
    no_plan: bool,
}

impl PlanArgs {
    /// True without `--no-plan`.
    pub(super) fn is_made(&self) -> bool {
        !self.no_plan
    }
}

/// Whether a training continues an earlier one.
#[derive(Debug, clap::Args)]
pub(super) struct ResumeArgs {
    /// Continue from `last/` in the run folder, or from another checkpoint
    ///
    /// Without a value and with `latest`: from `last/` in the run folder. With a checkpoint folder such as runs/a/best:
    /// from a copy of it in a new run folder; with another run folder, from its `last/`. `none`, the default, begins a
    /// new run.
    #[arg(long, value_name = "FROM", num_args = 0..=1, default_missing_value = "latest")]
    resume: Option<PathBuf>,
}

impl ResumeArgs {
    /// What the flag says.
    pub(super) fn resume(&self) -> ResumeFrom {
        match self.resume.as_deref().map(|from| (from, from.to_str())) {
            None | Some((_, Some("none"))) => ResumeFrom::New,
            Some((_, Some("latest"))) => ResumeFrom::Last,
            Some((from, _)) => ResumeFrom::From(from.to_owned()),
        }
    }
}

/// What happens with images that train and are scored.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(super) struct LeakArgs {
    /// Go on with a warning if images or patients of test rows are also in rows that train
    #[arg(long)]
    pub(super) allow_leak: bool,
}

/// Location of the rows for training or evaluation.
#[derive(Debug, clap::Args)]
pub(super) struct RootArgs {
    /// Data root: a folder with one folder for each modality, and `annotations/` (required)
    #[arg(long, value_name = "DIR")]
    data_root: Option<PathBuf>,
    /// CSV file or folder of CSV files, if not in the data root
    #[arg(long, value_name = "DIR")]
    annotations: Option<PathBuf>,
    /// Skip bad rows instead of stopping with an error; a warning names the first of them
    #[arg(long)]
    skip_bad_rows: bool,
}

impl RootArgs {
    /// The rows that the flags name, with those of `extra` as synthetic rows.
    pub(super) fn rows(&self, extra: &[PathBuf]) -> Result<Rows> {
        let root = self.data_root.clone().ok_or_else(|| {
            let hint = "add `--data-root DIR`; to try the program, generate one with `prsmed data phantom phantoms`";
            Error::config("--data-root", "is required", hint)
        })?;
        let annotations = self.annotations.clone();
        let (extra, skip_bad) = (extra.to_vec(), self.skip_bad_rows);
        Ok(Rows { root, annotations, extra, skip_bad, allow_leak: false })
    }

    /// Adds these flags to another command on the same rows.
    pub(super) fn add_to(&self, command: ShellCommand) -> ShellCommand {
        let command = command.flag("--data-root", &self.data_root).flag("--annotations", &self.annotations);
        command.switch("--skip-bad-rows", self.skip_bad_rows)
    }

    /// The rows; a warning names the bad rows that `--skip-bad-rows` left out.
    pub(super) fn open(&self, context: &Context) -> Result<Manifest> {
        self.rows(&[])?.open(&context.runtime)
    }
}
