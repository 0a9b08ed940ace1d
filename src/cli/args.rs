//! Command-line arguments that several commands share.

use super::context::Context;
use crate::data::labels::Labels;
use crate::data::manifest::{Manifest, OpenOptions};
use crate::event::Event;
use crate::{Error, Result};
use std::path::PathBuf;

/// Values of `--set` with those of other flags over them, as [`crate::config::Sources`] takes them.
pub(super) fn sets_of(sets: &[String], flags: impl IntoIterator<Item = (String, String)>) -> Vec<(String, String)> {
    sets.iter().map(|set| (set.clone(), "--set".to_owned())).chain(flags).collect()
}

/// The labels of a flag.
pub(super) fn labels_of(text: &str) -> Result<Labels> {
    text.parse().map_err(|reason: String| Error::config("--labels", reason, "give for example `--labels 1,3`"))
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
