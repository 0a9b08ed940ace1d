//! The only reader of environment variables.

use crate::hub::HubOptions;

/// What the environment says.
#[derive(Debug)]
pub struct Env {
    /// `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`: as Python's `huggingface_hub` reads them.
    pub hub: HubOptions,
    /// `CUDA_VISIBLE_DEVICES`: the devices that this process may use.
    pub cuda_visible_devices: Option<String>,
    /// `NO_COLOR` is set and not empty.
    pub no_color: bool,
}

impl Env {
    /// The environment of this process.
    pub fn read() -> Self {
        let var = |name: &str| std::env::var(name).ok();
        Self {
            hub: HubOptions::from_vars(var),
            cuda_visible_devices: var("CUDA_VISIBLE_DEVICES"),
            no_color: var("NO_COLOR").is_some_and(|value| !value.is_empty()),
        }
    }
}
