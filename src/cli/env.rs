//! The only reader of environment variables.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

/// What the environment says, as Python's `huggingface_hub` reads it where it reads it too.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Env {
    /// `HF_HOME`, else `$XDG_CACHE_HOME/huggingface`, else `~/.cache/huggingface`; `None` without a home folder.
    pub hf_home: Option<PathBuf>,
    /// `HF_HUB_CACHE`, else `hub` in `hf_home`.
    pub hf_hub_cache: Option<PathBuf>,
    /// `HF_TOKEN`, trimmed; `None` when empty.
    pub hf_token: Option<String>,
    /// `HF_ENDPOINT` without a trailing slash; `None` for the hub itself.
    pub hf_endpoint: Option<String>,
    /// `HF_HUB_OFFLINE` is 1, on, yes or true.
    pub hf_hub_offline: bool,
    /// `NO_COLOR` is set and not empty.
    pub no_color: bool,
    /// `CUDA_VISIBLE_DEVICES`, for reports only: libtorch reads it itself.
    pub cuda_visible_devices: Option<String>,
}

impl Env {
    /// The environment of this process.
    pub fn read() -> Self {
        Self::from_lookup(|name| std::env::var_os(name))
    }

    /// From any lookup of names; empty values count as unset.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Self {
        let value = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let text = |name: &str| value(name).map(|value| value.to_string_lossy().trim().to_owned());
        let home = value("HOME").map(PathBuf::from);
        // The hub's client expands a leading `~` in these.
        let folder = |name: &str| {
            value(name).map(PathBuf::from).map(|path| match (path.strip_prefix("~"), &home) {
                (Ok(inside), Some(home)) => home.join(inside),
                _ => path,
            })
        };
        let hf_home = folder("HF_HOME").or_else(|| {
            let caches = folder("XDG_CACHE_HOME").or_else(|| home.as_ref().map(|home| home.join(".cache")));
            caches.map(|caches| caches.join("huggingface"))
        });
        Self {
            hf_hub_cache: folder("HF_HUB_CACHE").or_else(|| hf_home.as_ref().map(|home| home.join("hub"))),
            hf_home,
            hf_token: text("HF_TOKEN").filter(|token| !token.is_empty()),
            hf_endpoint: text("HF_ENDPOINT").map(|url| url.trim_end_matches('/').to_owned()),
            hf_hub_offline: text("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value)),
            no_color: value("NO_COLOR").is_some(),
            cuda_visible_devices: text("CUDA_VISIBLE_DEVICES"),
        }
    }
}

fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
}

impl fmt::Debug for Env {
    /// Never shows the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Env")
            .field("hf_home", &self.hf_home)
            .field("hf_hub_cache", &self.hf_hub_cache)
            .field("hf_token", &self.hf_token.as_ref().map(|_| "..."))
            .field("hf_endpoint", &self.hf_endpoint)
            .field("hf_hub_offline", &self.hf_hub_offline)
            .field("no_color", &self.no_color)
            .field("cuda_visible_devices", &self.cuda_visible_devices)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Env {
        Env::from_lookup(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn the_caches_default_as_in_python() {
        let plain = env(&[("HOME", "/home/me")]);
        assert_eq!(plain.hf_hub_cache.as_deref(), Some(Path::new("/home/me/.cache/huggingface/hub")));
        let xdg = env(&[("HOME", "/home/me"), ("XDG_CACHE_HOME", "/scratch")]);
        assert_eq!(xdg.hf_home.as_deref(), Some(Path::new("/scratch/huggingface")));
        let set = env(&[("HOME", "/home/me"), ("HF_HOME", "~/hf"), ("HF_HUB_CACHE", "/big/hub")]);
        assert_eq!(set.hf_home.as_deref(), Some(Path::new("/home/me/hf")));
        assert_eq!(set.hf_hub_cache.as_deref(), Some(Path::new("/big/hub")));
        assert_eq!(env(&[]), Env::default());
    }

    #[test]
    fn switches_and_tokens() {
        for (value, expected) in [("1", true), ("TRUE", true), ("yes", true), ("0", false), ("", false), ("no", false)]
        {
            assert_eq!(env(&[("HF_HUB_OFFLINE", value)]).hf_hub_offline, expected, "{value}");
        }
        assert!(env(&[("NO_COLOR", "0")]).no_color && !env(&[("NO_COLOR", "")]).no_color);
        let secret = env(&[("HF_TOKEN", " hf_secret\n"), ("HF_ENDPOINT", "http://127.0.0.1:8080/")]);
        assert_eq!(secret.hf_token.as_deref(), Some("hf_secret"));
        assert_eq!(secret.hf_endpoint.as_deref(), Some("http://127.0.0.1:8080"));
        assert!(!format!("{secret:?}").contains("secret"));
    }
}
