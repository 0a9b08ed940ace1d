//! Run context of a command: runtime, environment and outputs.

use super::env::Env;
use super::report::{CommandEnd, CommandResult};
use crate::console::DataOutput;
use crate::event::Observer;
use crate::job::memory::Memory;
use crate::runtime::Runtime;
use crate::trainer::distributed::Rendezvous;
use crate::{Error, Result};
use serde::Serialize;
use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

/// Runtime, environment and outputs of this process.
pub(super) struct Context {
    pub(super) runtime: Runtime,
    pub(super) env: Env,
    pub(super) output: Arc<DataOutput>,
    pub(super) progress: Arc<dyn Observer>,
    pub(super) memory: Memory,
    /// The command line, without `--json`.
    pub(super) command: String,
    /// How this process finds the others of its training; `None` if it is alone.
    pub(super) rendezvous: Option<Rendezvous>,
}

impl Context {
    /// Ends a command with its result: a text, or with `--json` a record.
    pub(super) fn done(&self, text: impl Display, record: &impl Serialize) -> CommandResult {
        self.output.line(text)?;
        self.output.record(record)?;
        Ok(CommandEnd::Done)
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
