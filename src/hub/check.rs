//! The weight files that a command needs, checked before any of them is downloaded.

use std::path::{Path, PathBuf};

use super::{Files, HubOptions, Located, find};
use prsmed_base::error::{Error, Result};
use prsmed_base::event::Observer;
use prsmed_base::units::Bytes;

/// A file or folder of weights that a setting or argument names.
#[derive(Debug, Clone)]
pub struct Need<'a> {
    /// The setting (`model.base`) or argument (`lora`).
    pub key: String,
    /// A path or `hub:...`.
    pub spec: String,
    /// The files that are read.
    pub files: Files<'a>,
}

impl<'a> Need<'a> {
    /// The files of `spec`, which `key` names.
    pub fn new(key: &str, spec: impl Into<String>, files: Files<'a>) -> Self {
        Self { key: key.to_owned(), spec: spec.into(), files }
    }
}

/// Weight files by their state on this machine.
#[derive(Debug)]
pub struct CheckedWeights<'a> {
    /// Files that exist, on this machine or on the hub.
    pub found: Vec<(Need<'a>, Located)>,
    /// Files that do not exist, with the reason.
    pub missing: Vec<(Need<'a>, Error)>,
    /// The cache folder.
    pub cache: PathBuf,
    /// Free bytes of the cache's file system, if the system reports them.
    pub free_bytes: Option<u64>,
}

/// Finds every file of `needs`, locally or on the hub, and downloads nothing.
pub fn check<'a>(needs: Vec<Need<'a>>, options: &HubOptions, observer: &dyn Observer) -> CheckedWeights<'a> {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for need in needs {
        match find(&need.spec, &need.files, options, observer) {
            Ok(located) => found.push((need, located)),
            Err(error) => missing.push((need, error)),
        }
    }
    CheckedWeights { found, missing, cache: options.cache_dir.clone(), free_bytes: free_bytes(&options.cache_dir) }
}

impl CheckedWeights<'_> {
    /// Bytes to download.
    pub fn download_bytes(&self) -> u64 {
        super::sum(self.found.iter().map(|(_, located)| located.download_bytes))
    }

    /// An error if files are missing, or the disk has no room for the download.
    ///
    /// # Errors
    /// The error of the only missing file; [`Error::Config`] with the names of several; [`Error::Config`] with both
    /// sizes if the disk is too small.
    pub fn into_result(mut self) -> Result<Vec<(String, Located)>> {
        if self.missing.len() == 1 {
            let (need, error) = self.missing.remove(0);
            return Err(named(&need, error));
        }
        if let Some((first, _)) = self.missing.first() {
            let named = self.missing.iter().map(|(need, _)| format!("`{}` ({})", need.key, need.spec));
            let reason = format!("weights are missing: {}", named.collect::<Vec<_>>().join(", "));
            let mut hints: Vec<String> = self.missing.iter().map(|(_, error)| error.hint()).collect();
            hints.dedup();
            return Err(Error::config(&first.key, reason, hints.join("\n      ")));
        }
        let (needed, cache) = (self.download_bytes(), self.cache.display());
        match self.free_bytes {
            Some(free) if needed > free => {
                let (needed, free) = (Bytes(needed), Bytes(free));
                let reason = format!("the download needs {needed}, the disk of the cache `{cache}` has {free} free");
                let hint = "free some space, or set HF_HOME to a folder on a larger disk";
                Err(Error::config("download", reason, hint))
            }
            _ => Ok(self.found.into_iter().map(|(need, located)| (need.spec, located)).collect()),
        }
    }
}

/// The error with the setting or argument that names the file.
fn named(need: &Need, error: Error) -> Error {
    let (key, hint) = (&need.key, error.hint());
    let is_argument = key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    match error {
        Error::Weights { path, reason, .. } => {
            let new = if is_argument { Error::argument } else { Error::config };
            new(key, format!("`{}`: {reason}", path.display()), hint)
        }
        Error::Hub { repo, reason, .. } => {
            let kind = if is_argument { "argument " } else { "" };
            Error::hub(repo, format!("{reason} ({kind}`{key}`)"), hint)
        }
        other => other,
    }
}

/// Free bytes of the file system of `folder`, which need not exist yet.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    let absolute = std::path::absolute(folder).ok()?;
    let existing = absolute.ancestors().find(|folder| folder.exists())?;
    rustix::fs::statvfs(existing).ok().map(|system| system.f_bavail.saturating_mul(system.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use prsmed_base::event::Silent;
    use std::fs;

    #[test]
    fn missing_files_are_errors_that_name_the_setting() {
        let folder = tempfile::tempdir().unwrap();
        let options = HubOptions { offline: true, ..HubOptions::new(folder.path()) };
        let file = folder.path().join("tinysam.pth");
        fs::write(&file, "weights").unwrap();
        let need = |key: &str, path: &Path| Need::new(key, path.display().to_string(), Files::OnlyWeights);
        let checked = check(vec![need("model.image_encoder", &file)], &options, &Silent);
        let found = checked.into_result().unwrap();
        assert_eq!((found.len(), &found[0].1.path, found[0].1.bytes()), (1, &file, 7));
        let absent = folder.path().join("absent.pth");
        let one = check(vec![need("a", &file), need("b", &absent)], &options, &Silent).into_result().unwrap_err();
        assert!(one.to_string().starts_with("argument `b`: ") && one.to_string().contains("no such file"), "{one}");
        let two = check(vec![need("a", &absent), need("b", &absent)], &options, &Silent).into_result().unwrap_err();
        assert!(two.to_string().contains("`a` (") && two.to_string().contains("`b` ("), "{two}");
    }

    #[test]
    fn a_folder_with_two_weight_files_is_an_error_that_names_one() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a.pth", "b.safetensors"] {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        let options = HubOptions::new(folder.path());
        let error = find(&folder.path().display().to_string(), &Files::OnlyWeights, &options, &Silent).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("contains 2 weight files") && text.contains("`a.pth`"), "{text}");
        assert!(error.hint().contains("/a.pth"), "{}", error.hint());
    }

    #[test]
    fn a_download_larger_than_the_disk_is_an_error_with_both_sizes() {
        let located =
            Located { path: "x".into(), files: Vec::new(), num_missing: 1, download_bytes: 3 << 30, remote: None };
        let checked = |free_bytes| CheckedWeights {
            found: vec![(Need::new("model.base", "hub:o/n", Files::Checkpoint), located.clone())],
            missing: Vec::new(),
            cache: "/cache".into(),
            free_bytes,
        };
        let error = checked(Some(1 << 30)).into_result().unwrap_err().to_string();
        assert!(error.contains("needs 3.00 GiB") && error.contains("has 1.00 GiB free"), "{error}");
        assert!(checked(Some(4 << 30)).into_result().is_ok() && checked(None).into_result().is_ok());
    }

    #[test]
    fn free_space_is_read_through_the_nearest_folder_that_exists() {
        let folder = tempfile::tempdir().unwrap();
        assert!(free_bytes(&folder.path().join("not/yet")).is_some_and(|bytes| bytes > 0));
    }
}
