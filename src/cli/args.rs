//! Command-line arguments that several commands share.

use super::context::Context;
use crate::config::{Settings, Sources};
use crate::data::labels::Labels;
use crate::data::manifest::{Manifest, OpenOptions};
use crate::data::volume::Geometry;
use crate::event::{Event, Observer};
use crate::segment::training::checkpoint_in;
use crate::tensor::weights::{copy_folder, verify_folder};
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// Values of `--set` with those of other flags over them, as [`Sources`] takes them.
pub(super) fn sets_of(sets: &[String], flags: impl IntoIterator<Item = (String, String)>) -> Vec<(String, String)> {
    sets.iter().map(|set| (set.clone(), "--set".to_owned())).chain(flags).collect()
}

/// The labels of a flag.
pub(super) fn labels_of(text: &str) -> Result<Labels> {
    text.parse().map_err(|reason: String| Error::config("--labels", reason, "give for example `--labels 1,3`"))
}

/// The position of NIfTI volumes.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(super) struct GeometryArgs {
    /// The affine that counts for NIfTI files whose header has two that differ: sform or qform [default: sform; files with
    /// two voxel sizes are refused]
    #[arg(long, value_name = "FORM")]
    pub(super) geometry: Option<Geometry>,
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
    /// Whether the run in the run folder is continued, once [`Self::adopt`] has copied a checkpoint there.
    pub(super) fn resumes(&self) -> bool {
        self.resume.as_ref().is_some_and(|from| from.as_os_str() != "none")
    }

    /// The checkpoint of another folder to continue from.
    fn other(&self) -> Option<PathBuf> {
        let from = self.resume.as_deref().filter(|from| from.as_os_str() != "none" && from.as_os_str() != "latest")?;
        let last = from.join("last");
        Some(if last.is_dir() { last } else { from.to_owned() })
    }

    /// The settings of the run to continue.
    pub(super) fn settings(&self, run: &Path) -> Option<PathBuf> {
        let folder = self.other().unwrap_or_else(|| run.to_owned());
        Some(folder.join("config.toml")).filter(|file| self.resumes() && file.exists())
    }

    /// The sources of the settings of a run: a run that is continued keeps its own, and only `--set` and the like change them.
    /// A warning says what else was given.
    ///
    /// # Errors
    /// Those of [`Sources::resolve_as`].
    pub(super) fn sources<T: Settings>(&self, run: &Path, given: Sources, observer: &dyn Observer) -> Result<Sources> {
        let asks = given.preset.is_some() || given.file.is_some();
        let has_begun = self.other().is_some() || run.join("last").is_dir();
        let Some(file) = self.settings(run).filter(|_| has_begun || !asks) else { return Ok(given) };
        let own = Sources {
            preset: None,
            default_preset: T::DEFAULT_PRESET.into(),
            file: Some(file),
            continues: true,
            sets: given.sets,
        };
        if asks {
            let without_sets = |sources: &Sources| Sources { sets: Vec::new(), ..sources.clone() }.resolve_as::<T>();
            let given = Sources { sets: Vec::new(), ..given };
            let changes = without_sets(&given)?.config.changes_from(&without_sets(&own)?.config);
            let key = |change: &str| change.split('=').next().unwrap_or_default().trim().to_owned();
            let is_set = |change: &String| own.sets.iter().any(|(set, _)| key(set) == key(change));
            let changes: Vec<String> = changes.into_iter().filter(|change| !is_set(change)).collect();
            if let Some(first) = changes.first() {
                let keys = changes.iter().map(|change| format!("`{}`", key(change))).collect::<Vec<_>>().join(", ");
                observer.on(&Event::Warning(format!(
                    "the run keeps its settings; `--preset` and `--config` do not change them, and would differ in {keys}. \
                     To change one, give for example `--set {first}`"
                )));
            }
        }
        Ok(own)
    }

    /// Refuses to continue in a run folder that has another run, or from a folder that is no checkpoint.
    ///
    /// # Errors
    /// [`Error::Config`]; [`Error::Weights`].
    pub(super) fn check(&self, run: &Path) -> Result<()> {
        let Some(other) = self.other() else { return checkpoint_in(run, self.resumes()).map(drop) };
        checkpoint_in(run, false)?;
        verify_folder(&other)
    }

    /// Copies the checkpoint of another folder into the run folder.
    ///
    /// # Errors
    /// [`Error::Weights`] for a folder that is not complete; [`Error::Io`].
    pub(super) fn adopt(&self, run: &Path) -> Result<()> {
        self.other().map_or(Ok(()), |other| copy_folder(&other, &run.join("last")))
    }
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
    /// The data root for messages.
    pub(super) fn shown(&self) -> String {
        self.data_root.as_ref().map_or_else(|| "DATA".to_owned(), |root| root.display().to_string())
    }

    /// The rows; a warning names the bad rows that `--skip-bad-rows` left out.
    pub(super) fn open(&self, context: &Context) -> Result<Manifest> {
        let manifest = self.read()?;
        warn_of_skipped(&manifest, context);
        Ok(manifest)
    }

    fn read(&self) -> Result<Manifest> {
        let root = self.data_root.as_deref().ok_or_else(|| {
            let hint = "add `--data-root DIR`; to try the program, generate one with `prsmed data phantom phantoms`";
            Error::config("--data-root", "is required", hint)
        })?;
        Manifest::open_with(root, self.annotations.as_deref(), OpenOptions { skip_bad: self.skip_bad_rows })
    }

    /// The rows of [`RootArgs::open`], followed by the rows of the extra data roots, marked as synthetic.
    pub(super) fn open_with_extra(&self, extra: &[PathBuf], context: &Context) -> Result<Manifest> {
        let mut manifest = self.read()?;
        let mut known: Vec<PathBuf> = self.data_root.iter().filter_map(|root| root.canonicalize().ok()).collect();
        for root in extra {
            let canonical = root.canonicalize().unwrap_or_else(|_| root.clone());
            if known.contains(&canonical) {
                let reason = format!("`{}` is given twice", root.display());
                return Err(Error::config("--extra", reason, "give every data root once"));
            }
            known.push(canonical);
            let rows = Manifest::open_with(root, None, OpenOptions { skip_bad: self.skip_bad_rows })?;
            manifest = manifest.with_extra(rows)?;
        }
        warn_of_skipped(&manifest, context);
        Ok(manifest)
    }
}

fn warn_of_skipped(manifest: &Manifest, context: &Context) {
    manifest.skipped_note().into_iter().for_each(|note| context.progress.on(&Event::Warning(note)));
}
