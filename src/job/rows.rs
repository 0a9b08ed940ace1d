//! Rows of a job: a data root, and further ones with synthetic rows.

use crate::data::manifest::{Manifest, OpenOptions};
use crate::runtime::Runtime;
use crate::{Error, Result};
use std::path::PathBuf;

/// Location of the rows.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    /// The data root.
    pub root: PathBuf,
    /// CSV file or folder of CSV files, if not in the data root.
    pub annotations: Option<PathBuf>,
    /// Data roots of synthetic rows.
    pub extra: Vec<PathBuf>,
    /// Skips bad rows instead of stopping with an error.
    pub skip_bad: bool,
}

impl Rows {
    /// The rows of a data root.
    pub fn of(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), ..Self::default() }
    }

    /// Reads the rows, those of the further data roots marked as synthetic. A warning names the bad rows that were
    /// skipped.
    ///
    /// # Errors
    /// [`Error::Data`] for a bad row; [`Error::Config`] for a data root that is given twice; [`Error::Io`].
    pub fn open(&self, runtime: &Runtime) -> Result<Manifest> {
        let options = || OpenOptions { skip_bad: self.skip_bad };
        let mut manifest = Manifest::open_with(&self.root, self.annotations.as_deref(), options())?;
        let mut known: Vec<PathBuf> = self.root.canonicalize().ok().into_iter().collect();
        for root in &self.extra {
            let canonical = root.canonicalize().unwrap_or_else(|_| root.clone());
            if known.contains(&canonical) {
                let reason = format!("`{}` is given twice", root.display());
                return Err(Error::config("--extra", reason, "give every data root once"));
            }
            known.push(canonical);
            manifest = manifest.with_extra(Manifest::open_with(root, None, options())?)?;
        }
        manifest.skipped_note().into_iter().for_each(|note| runtime.warn(note));
        Ok(manifest)
    }
}
