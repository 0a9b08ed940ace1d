//! Whether a job continues an earlier run.

use crate::Result;
use crate::config::{Settings, Sources};
use crate::event::{Event, Observer};
use crate::segment::resume::checkpoint_in;
use crate::tensor::weights::{copy_folder, verify_folder};
use std::path::{Path, PathBuf};

/// What a job begins with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ResumeFrom {
    /// A new run.
    #[default]
    New,
    /// `last/` in the run folder.
    Last,
    /// A copy of another checkpoint, or of the `last/` of another run folder, in a new run folder.
    From(PathBuf),
}

impl ResumeFrom {
    /// Whether the run in the run folder is continued, once [`Self::adopt`] has copied a checkpoint there.
    pub fn resumes(&self) -> bool {
        *self != Self::New
    }

    /// The checkpoint of another folder to continue from.
    fn other(&self) -> Option<PathBuf> {
        let Self::From(from) = self else { return None };
        let last = from.join("last");
        Some(if last.is_dir() { last } else { from.clone() })
    }

    /// The settings of the run to continue.
    pub fn settings(&self, run: &Path) -> Option<PathBuf> {
        let folder = self.other().unwrap_or_else(|| run.to_owned());
        Some(folder.join("config.toml")).filter(|file| self.resumes() && file.exists())
    }

    /// The sources of the settings of a run: a run that is continued keeps its own, and only `--set` and the like change them.
    /// A warning says what else was given.
    ///
    /// # Errors
    /// Those of [`Sources::resolve_as`].
    pub fn sources<T: Settings>(&self, run: &Path, given: Sources, observer: &dyn Observer) -> Result<Sources> {
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
            if !changes.is_empty() {
                let keys = changes.iter().map(|change| format!("`{}`", key(change))).collect::<Vec<_>>().join(", ");
                observer.on(&Event::Warning(format!(
                    "the run keeps its settings; the argument `preset` and the argument `config` do not change them, and would differ in {keys}. \
                     the setting `KEY=VALUE` changes one"
                )));
            }
        }
        Ok(own)
    }

    /// Refuses to continue in a run folder that has another run, or from a folder that is no checkpoint.
    ///
    /// # Errors
    /// [`crate::Error::Config`]; [`crate::Error::Weights`].
    pub fn check(&self, run: &Path) -> Result<()> {
        let Some(other) = self.other() else { return checkpoint_in(run, self.resumes()).map(drop) };
        checkpoint_in(run, false)?;
        verify_folder(&other)
    }

    /// Copies the checkpoint of another folder into the run folder.
    ///
    /// # Errors
    /// [`crate::Error::Weights`] for a folder that is not complete; [`crate::Error::Io`].
    pub fn adopt(&self, run: &Path) -> Result<()> {
        self.other().map_or(Ok(()), |other| copy_folder(&other, &run.join("last")))
    }
}
