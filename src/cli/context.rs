//! Run context of a command: runtime, environment and outputs.

use super::env::Env;
use crate::console::Output;
use crate::event::Observer;
use crate::job::memory::Memory;
use crate::runtime::Runtime;
use crate::trainer::distributed::Rendezvous;
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Runtime, environment and outputs of this process.
pub(super) struct Context {
    pub(super) runtime: Runtime,
    pub(super) env: Env,
    pub(super) output: Arc<Output>,
    pub(super) progress: Arc<dyn Observer>,
    pub(super) memory: Memory,
    pub(super) interrupt: Arc<AtomicBool>,
    /// The command line, without `--json`.
    pub(super) command: String,
    /// How this process finds the others of its training; `None` if it is alone.
    pub(super) rendezvous: Option<Rendezvous>,
}

impl Context {
    /// The local path of a file, a folder or a repository `hub:owner/name`.
    pub(super) fn locate(&self, spec: &str) -> Result<PathBuf> {
        self.runtime.locate(spec)
    }
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
