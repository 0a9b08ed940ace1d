//! The only reader of environment variables.

use crate::hub::HubOptions;
use std::path::PathBuf;

/// The environment variables that this program reads.
#[derive(Debug)]
pub struct Env {
    /// `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` and others: as `huggingface_hub` reads
    /// them.
    pub hub: HubOptions,
    /// Cache folder shared by runs: `PRSMED_CACHE`, else `XDG_CACHE_HOME/prsmed` or `~/.cache/prsmed`.
    pub cache: Option<PathBuf>,
    /// Whether the user has set the number of threads: `OMP_NUM_THREADS` or `MKL_NUM_THREADS`.
    pub sets_threads: bool,
    /// `CUDA_VISIBLE_DEVICES`: the GPUs that are visible to this process.
    pub cuda_visible_devices: Option<String>,
    /// `PRSMED_TOKEN`: the token of `prsmed serve`.
    pub token: Option<String>,
    /// Whether `NO_COLOR` is set and not empty.
    pub no_color: bool,
}

impl Env {
    /// Reads the environment of this process.
    pub fn read() -> Self {
        let var = |name: &str| std::env::var(name).ok();
        let folder = |name: &str| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let user = || folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")));
        Self {
            cache: folder("PRSMED_CACHE").or_else(|| user().map(|user| user.join("prsmed"))),
            hub: HubOptions::from_vars(var),
            sets_threads: ["OMP_NUM_THREADS", "MKL_NUM_THREADS"].iter().any(|name| var(name).is_some()),
            cuda_visible_devices: var("CUDA_VISIBLE_DEVICES"),
            token: var("PRSMED_TOKEN").filter(|token| !token.is_empty()),
            no_color: var("NO_COLOR").is_some_and(|value| !value.is_empty()),
        }
    }
}
