//! Run context of a command: runtime, environment and outputs.

use super::env::Env;
use super::memory::Memory;
use super::output::Output;
use crate::event::{Event, Observer};
use crate::runtime::Runtime;
use crate::trainer::distributed::Rendezvous;
use crate::{Error, Result, files};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Runtime, environment and outputs of this process.
pub(super) struct Context {
    pub(super) runtime: Runtime,
    pub(super) env: Env,
    pub(super) output: Arc<Output>,
    pub(super) progress: Arc<dyn Observer>,
    pub(super) memory: Memory,
    pub(super) interrupt: Arc<AtomicBool>,
    /// How this process finds the others of its training; `None` if it is alone.
    pub(super) rendezvous: Option<Rendezvous>,
}

/// How long a search lasts before a note says that it does.
const PATIENCE: Duration = Duration::from_secs(2);

impl Context {
    /// Runs `work`, and prints a note if it takes more than two seconds.
    pub(super) fn with_patience<T>(&self, note: &str, work: impl FnOnce() -> T) -> T {
        let (working, ended) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                if ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                    self.progress.on(&Event::Note(note.to_owned()));
                }
            });
            let done = work();
            drop(working);
            done
        })
    }

    /// The local path of a file, a folder or a repository `hub:owner/name`.
    pub(super) fn locate(&self, spec: &str) -> Result<PathBuf> {
        self.runtime.locate(spec)
    }
}

/// Creates the output folder of a command and checks that it is writable, before the expensive work.
pub(super) fn make_folder(flag: &str, folder: &Path) -> Result<()> {
    if folder.exists() && !folder.is_dir() {
        let reason = format!("`{}` is a file", folder.display());
        return Err(Error::config(flag, reason, "choose another folder"));
    }
    files::create_folders(folder).map_err(Error::io(folder, "create"))?;
    tempfile::tempfile_in(folder).map(drop).map_err(Error::io(folder, "write"))
}

/// Checks the folder of an output path before the expensive work.
pub(super) fn check_parent(flag: &str, path: &Path) -> Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        let reason = format!("`{}` is not a folder", parent.display());
        return Err(Error::config(flag, reason, "create the folder first, or choose another path"));
    }
    Ok(())
}
