//! Address of the hub, access token and cache folder.

use std::path::{Path, PathBuf};
use std::time::Duration;

use prsmed_base::files;

const ENDPOINT: &str = "https://huggingface.co";

/// Settings of the hub, like those that Python's client reads from the environment.
#[derive(Clone, PartialEq, Eq)]
pub struct HubOptions {
    /// Base address of the hub (`HF_ENDPOINT`).
    pub endpoint: String,
    /// Access token (`HF_TOKEN`, or the file that a login wrote).
    pub token: Option<String>,
    /// Folder that contains folders such as `models--owner--name` (`HF_HUB_CACHE`, `HF_HOME/hub`).
    pub cache_dir: PathBuf,
    /// Use the cache only (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// How long a silent server is awaited.
    pub timeouts: Timeouts,
}

/// How long a silent server is awaited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Until the connection is made (`HF_HUB_ETAG_TIMEOUT`, in seconds).
    pub connect: Duration,
    /// Until the headers of an answer are complete (`HF_HUB_ETAG_TIMEOUT`).
    pub response: Duration,
    /// Between two reads (`HF_HUB_DOWNLOAD_TIMEOUT`).
    pub idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { connect: Duration::from_secs(10), response: Duration::from_secs(30), idle: Duration::from_secs(30) }
    }
}

impl HubOptions {
    /// Options with a cache folder and the public hub, without a token.
    pub fn new(cache_dir: impl Into<PathBuf>) -> Self {
        Self {
            endpoint: ENDPOINT.into(),
            token: None,
            cache_dir: cache_dir.into(),
            offline: false,
            timeouts: Timeouts::default(),
        }
    }

    /// The address of the hub without a name and password, which it may contain.
    pub fn shown_endpoint(&self) -> String {
        without_credentials(&self.endpoint)
    }

    /// Options from environment variables, by the rules of Python's `huggingface_hub`.
    ///
    /// `var` looks up a variable. Empty values count as unset.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Self {
        let var = |name: &str| var(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let user = || var("HOME").or_else(|| var("USERPROFILE")).map_or_else(|| ".".into(), PathBuf::from);
        let path = |name: &str| var(name).map(|text| expand(&text, &user(), &var));
        let home = path("HF_HOME")
            .unwrap_or_else(|| path("XDG_CACHE_HOME").unwrap_or_else(|| user().join(".cache")).join("huggingface"));
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let is_true = |name: &str| {
            var(name).is_some_and(|value| matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"))
        };
        let in_file = || clean_token(&files::read_to_string(&token_file, files::MAX_TEXT).ok()?);
        let implicit = || if is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN") { None } else { in_file() };
        Self {
            endpoint: var("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into()),
            token: var("HF_TOKEN")
                .or_else(|| var("HUGGING_FACE_HUB_TOKEN"))
                .and_then(|text| clean_token(&text))
                .or_else(implicit),
            cache_dir: cache.unwrap_or_else(|| home.join("hub")),
            offline: is_true("HF_HUB_OFFLINE"),
            timeouts: Timeouts::from_vars(var),
        }
    }
}

impl Timeouts {
    /// Values that are not a positive number of seconds count as unset.
    fn from_vars(var: impl Fn(&str) -> Option<String>) -> Self {
        let seconds = |name: &str| {
            let seconds = var(name)?.parse().ok().filter(|seconds| *seconds > 0.0)?;
            Duration::try_from_secs_f64(seconds).ok()
        };
        let (default, answer) = (Self::default(), seconds("HF_HUB_ETAG_TIMEOUT"));
        Self {
            connect: answer.unwrap_or(default.connect),
            response: answer.unwrap_or(default.response),
            idle: seconds("HF_HUB_DOWNLOAD_TIMEOUT").unwrap_or(default.idle),
        }
    }
}

impl std::fmt::Debug for HubOptions {
    /// Hides the token, because options may be logged.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubOptions")
            .field("endpoint", &self.shown_endpoint())
            .field("token", &self.token.as_ref().map(|_| "..."))
            .field("cache_dir", &self.cache_dir)
            .field("offline", &self.offline)
            .field("timeouts", &self.timeouts)
            .finish()
    }
}

/// An address without what is before an `@` in its host.
pub(super) fn without_credentials(address: &str) -> String {
    let start = address.find("://").map_or(0, |found| found + "://".len());
    let (scheme, rest) = address.split_at(start);
    let host = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    match rest[..host].rfind('@') {
        Some(at) => format!("{scheme}{}", &rest[at + 1..]),
        None => address.to_owned(),
    }
}

/// The path with a leading `~` and with `$NAME` and `${NAME}` replaced, as by Python's `expanduser` and `expandvars`: other
/// users' homes and unset variables stay as they are.
fn expand(text: &str, home: &Path, var: &impl Fn(&str) -> Option<String>) -> PathBuf {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let (name, after) = match rest.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            Some(braced) => braced,
            None => rest.split_at(rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())),
        };
        match var(name).filter(|_| !name.is_empty()) {
            Some(value) => {
                out.push_str(&value);
                rest = after;
            }
            None => out.push('$'),
        }
    }
    out.push_str(rest);
    match out.strip_prefix('~').filter(|rest| rest.is_empty() || rest.starts_with('/')) {
        Some(rest) => home.join(rest.trim_start_matches('/')),
        None => out.into(),
    }
}

/// A token without line ends, also those inside of it, and blanks around it, as Python's client sends it.
fn clean_token(text: &str) -> Option<String> {
    Some(text.replace(['\r', '\n'], "").trim().to_owned()).filter(|token| !token.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> HubOptions {
        HubOptions::from_vars(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn variables_mean_the_same_as_in_python() {
        let options = from(&[("HOME", "/h")]);
        assert_eq!(options.cache_dir, Path::new("/h/.cache/huggingface/hub"));
        assert_eq!((options.endpoint.as_str(), options.token, options.offline), (ENDPOINT, None, false));
        assert_eq!(from(&[("XDG_CACHE_HOME", "/x")]).cache_dir, Path::new("/x/huggingface/hub"));
        assert_eq!(from(&[("HF_HOME", "/f"), ("HOME", "/h")]).cache_dir, Path::new("/f/hub"));
        assert_eq!(from(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]).cache_dir, Path::new("/c"));
        // as `os.path.expanduser(os.path.expandvars(..))`
        for (given, expected) in [
            ("~/hf", "/h/hf/hub"),
            ("~", "/h/hub"),
            ("$SCRATCH/hf", "/s/hf/hub"),
            ("${SCRATCH}hf", "/shf/hub"),
            ("$HOME/$MISSING/${ALSO}/$", "/h/$MISSING/${ALSO}/$/hub"),
            ("~other/hf", "~other/hf/hub"),
            ("/a/~/b", "/a/~/b/hub"),
        ] {
            let found = from(&[("HF_HOME", given), ("HOME", "/h"), ("SCRATCH", "/s")]).cache_dir;
            assert_eq!(found, Path::new(expected), "{given}");
        }
        for token in [" t ", "t\n", "\r\nt\r\n "] {
            assert_eq!(from(&[("HF_ENDPOINT", "http://x"), ("HF_TOKEN", token)]).token.unwrap(), "t");
        }
        assert_eq!(from(&[("HF_TOKEN", "hf_ab\ncd\r\n")]).token.unwrap(), "hf_abcd");
        assert!(from(&[("HF_HUB_OFFLINE", "true")]).offline);
        assert!(!from(&[("HF_HUB_OFFLINE", "0")]).offline);
        let timeouts = from(&[("HF_HUB_ETAG_TIMEOUT", "5"), ("HF_HUB_DOWNLOAD_TIMEOUT", "0.5")]).timeouts;
        let [five, half] = [5.0, 0.5].map(Duration::from_secs_f64);
        assert_eq!(timeouts, Timeouts { connect: five, response: five, idle: half });
        for wrong in ["0", "-1", "nan", "inf", "1e300", "soon"] {
            assert_eq!(from(&[("HF_HUB_ETAG_TIMEOUT", wrong)]).timeouts, Timeouts::default(), "{wrong}");
        }
    }

    #[test]
    fn a_password_in_the_address_is_not_printed() {
        for (address, shown) in [
            ("https://hub.co", "https://hub.co"),
            ("https://bob:secret@hub.co:8443/a@b", "https://hub.co:8443/a@b"),
            ("http://a@b:secret@hub.co", "http://hub.co"),
            ("bob:secret@hub.co", "hub.co"),
            ("http://hub.co?x=@", "http://hub.co?x=@"),
        ] {
            let options = from(&[("HF_ENDPOINT", address)]);
            assert_eq!(options.shown_endpoint(), shown);
            assert!(!format!("{options:?}").contains("secret"), "{address}");
        }
    }

    #[test]
    fn the_token_of_a_login_is_found_and_not_printed() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), " sec\r\nret\n\n").unwrap();
        let folder = home.path().to_str().unwrap();
        let options = from(&[("HF_HOME", folder)]);
        assert_eq!(options.token.as_deref(), Some("secret"));
        assert!(!format!("{options:?}").contains("secret"));
        assert_eq!(from(&[("HF_HOME", folder), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]).token, None);
    }
}
