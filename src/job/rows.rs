//! Rows of a job: a data root, and further ones with synthetic rows.

use crate::data::identity::Seen;
use crate::data::leaks::Leaks;
use crate::data::manifest::{Manifest, OpenOptions, Row};
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
    /// Goes on with a warning where images or patients of test rows are also in rows that train.
    pub allow_leak: bool,
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
                return Err(Error::argument("extra", reason, "give every data root once"));
            }
            known.push(canonical);
            manifest = manifest.with_extra(Manifest::open_with(root, None, options())?)?;
        }
        manifest.skipped_note().into_iter().for_each(|note| runtime.warn(note));
        Ok(manifest)
    }

    /// Warns about leaks. Refuses those into test rows, unless they are allowed.
    ///
    /// # Errors
    /// [`Error::Data`] that names files of both sides.
    pub fn check_leaks(&self, leaks: &Leaks, runtime: &Runtime) -> Result<()> {
        leaks.warnings().into_iter().for_each(|warning| runtime.warn(warning));
        let errors = leaks.errors();
        if self.allow_leak {
            for error in errors {
                runtime.warn(error);
            }
        } else if !errors.is_empty() {
            let reason = format!("{}; scores of these test images would be too good", errors.join("; "));
            let hint = format!("{}; the argument `allow_leak` continues", leaks.remedy());
            return Err(Error::data(&self.root, reason, hint));
        }
        Ok(())
    }

    /// Refuses test rows that the weights to start from have seen in a training, unless they are allowed.
    ///
    /// # Errors
    /// [`Error::Data`] that names a few of them.
    pub fn check_init(&self, seen: &[(&Row, Seen)], runtime: &Runtime) -> Result<()> {
        if seen.is_empty() {
            return Ok(());
        }
        let patients = seen.iter().filter(|(_, seen)| *seen == Seen::Patient).count();
        let named = seen.iter().take(3).map(|(row, _)| row.image_path.display().to_string());
        let reason = format!(
            "the run of the argument `init` was trained on the images of {} test questions, and on other images of the patients of \
             {patients} more (the first: {})",
            seen.len() - patients,
            named.collect::<Vec<_>>().join(", ")
        );
        if self.allow_leak {
            runtime.warn(reason);
            return Ok(());
        }
        let hint = "start from another run, or remove these test rows; the argument `allow_leak` continues";
        Err(Error::data(&self.root, format!("{reason}; scores of these test images would be too good"), hint))
    }
}
