//! `hub:owner/name[@revision]` or a folder -> local files.
//!
//! Downloads go through the `hf-hub` crate into the cache of the Python client (`models--owner--name/{blobs, refs,
//! snapshots}`), so both share what is already there. Around the crate this module adds: one commit for all files of a
//! repository, progress over all files, retries that resume a cut download, a check of size and SHA-256, and errors
//! that say what to do.
//!
//! It reads no environment variables: [`HubOptions::from_vars`] is given a look-up by `cli`.
//!
//! Known limits of the crate: it sends the token to the host of an absolute redirect when it asks for a file's size
//! (not when it downloads), and a connection that stalls without closing waits as long as the system lets it.

mod download;
mod files;
mod options;
mod spec;

use std::path::{Path, PathBuf};

use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};

pub use files::{Files, of_variant};
pub use options::HubOptions;
pub use spec::Spec;

use crate::error::{Error, Result};
use crate::event::{Event, Observer};

/// A file of a repository or folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFile {
    /// Path inside the repository, with `/`.
    pub name: String,
    /// Bytes, when known.
    pub size: Option<u64>,
}

/// The local folder (or file) of `spec`, after downloading what is missing of `files`.
///
/// A plain path is returned as it is when it exists. Emits `Started`, `Advanced` in bytes and `Finished` when something
/// is downloaded. When the hub cannot be reached and the cache holds the files, the cached ones are used with a warning.
///
/// # Errors
/// [`Error::Config`] for a malformed `spec`; [`Error::Weights`] for a path that does not exist; [`Error::Hub`] when the
/// repository, revision or files are not there, access is denied, the connection keeps breaking, a download does not
/// have the promised content, or `offline` is set and the cache lacks the files; [`Error::Io`] from the disk.
pub fn resolve(spec: &str, files: &Files, options: &HubOptions, observer: &dyn Observer) -> Result<PathBuf> {
    let repo = match Spec::parse(spec)? {
        Spec::Local(path) => return existing(path),
        Spec::Hub { repo, revision } => Hub::new(repo, revision, options),
    };
    if options.offline {
        return repo.cached(files);
    }
    let listing = match repo.listing() {
        Ok(listing) => listing,
        Err(Failure::Unreachable(reason)) => {
            return match repo.cached(files) {
                Ok(folder) => {
                    let text =
                        format!("`hub:{}` cannot be reached ({reason}): the cached files are used", repo.label());
                    observer.on(&Event::Warning(text));
                    Ok(folder)
                }
                Err(_) => Err(repo.unreachable(&reason)),
            };
        }
        Err(Failure::Refused(error)) => return Err(error),
    };
    let wanted = files.choose(&listing.files);
    if wanted.is_empty() {
        let names: Vec<&str> = listing.files.iter().map(|file| file.name.as_str()).collect();
        return Err(repo.error(
            format!("holds no {files} (its files: `{}`)", names.join("`, `")),
            "check the name of the repository",
        ));
    }
    repo.fetch(&listing.commit, &wanted, observer)
}

/// The files of `spec` with their sizes, sorted by name.
///
/// # Errors
/// As [`resolve`].
pub fn ls(spec: &str, options: &HubOptions) -> Result<Vec<RemoteFile>> {
    let repo = match Spec::parse(spec)? {
        Spec::Local(path) => return files::local(&existing(path)?),
        Spec::Hub { repo, revision } => Hub::new(repo, revision, options),
    };
    if options.offline {
        return files::local(&repo.snapshot()?);
    }
    let mut listing = repo.listing().map_err(|failure| match failure {
        Failure::Unreachable(reason) => repo.unreachable(&reason),
        Failure::Refused(error) => error,
    })?;
    listing.files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(listing.files)
}

fn existing(path: PathBuf) -> Result<PathBuf> {
    if path.exists() {
        return Ok(path);
    }
    Err(Error::weights(
        path,
        "there is no such file or folder",
        "check the path; a repository of the hub is written `hub:owner/name`",
    ))
}

/// Why a request gave nothing.
enum Failure {
    /// No answer: the cache may do instead.
    Unreachable(String),
    /// The hub said no, or something unusable.
    Refused(Error),
}

/// What a revision holds.
struct Listing {
    commit: String,
    files: Vec<RemoteFile>,
}

#[derive(serde::Deserialize)]
struct Info {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(serde::Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
}

/// One repository at one revision.
struct Hub<'a> {
    repo: String,
    revision: String,
    options: &'a HubOptions,
}

impl<'a> Hub<'a> {
    fn new(repo: String, revision: Option<String>, options: &'a HubOptions) -> Self {
        Self { repo, revision: revision.unwrap_or_else(|| "main".into()), options }
    }

    fn label(&self) -> String {
        if self.revision == "main" { self.repo.clone() } else { format!("{}@{}", self.repo, self.revision) }
    }

    fn error(&self, reason: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::hub(self.label(), reason, hint)
    }

    fn unreachable(&self, reason: &str) -> Error {
        self.error(
            format!("`{}` cannot be reached: {reason}", self.options.endpoint),
            "check the network, the proxy and HF_ENDPOINT, or name a local folder",
        )
    }

    fn cache(&self) -> Cache {
        Cache::new(self.options.cache_dir.clone())
    }

    fn at(&self, revision: &str) -> Repo {
        Repo::with_revision(self.repo.clone(), RepoType::Model, revision.to_owned())
    }

    fn api(&self) -> Result<Api> {
        ApiBuilder::from_cache(self.cache())
            .with_endpoint(self.options.endpoint.trim_end_matches('/').to_owned())
            .with_token(self.options.token.clone())
            .with_progress(false)
            .build()
            .map_err(|error| self.error(error.to_string(), "check HF_ENDPOINT"))
    }

    /// Asks the hub for the commit and the files.
    fn listing(&self) -> Result<Listing, Failure> {
        let api = self.api().map_err(Failure::Refused)?;
        let request = api.repo(self.at(&self.revision)).info_request().query("blobs", "true");
        let text =
            request.call().and_then(|mut response| response.body_mut().read_to_string()).map_err(
                |error| match error {
                    ureq::Error::StatusCode(status) => Failure::Refused(self.status(status, None)),
                    other => Failure::Unreachable(other.to_string()),
                },
            )?;
        self.read_info(&text).map_err(Failure::Refused)
    }

    fn read_info(&self, text: &str) -> Result<Listing> {
        let info: Info = serde_json::from_str(text)
            .map_err(|error| self.error(format!("the hub's answer is not understood: {error}"), "check HF_ENDPOINT"))?;
        if !spec::is_plain(&info.sha) {
            return Err(self.error(format!("the hub names the commit `{}`", info.sha), "check HF_ENDPOINT"));
        }
        let files: Vec<RemoteFile> =
            info.siblings.into_iter().map(|file| RemoteFile { name: file.rfilename, size: file.size }).collect();
        if let Some(file) = files.iter().find(|file| !spec::stays_inside(&file.name)) {
            return Err(self.error(
                format!("names the file `{}`, which would lie outside of its folder", file.name),
                "do not use this repository",
            ));
        }
        Ok(Listing { commit: info.sha, files })
    }

    /// Downloads what is missing of `wanted` and returns the snapshot folder.
    fn fetch(&self, commit: &str, wanted: &[RemoteFile], observer: &dyn Observer) -> Result<PathBuf> {
        let pinned = self.cache().repo(self.at(commit));
        let folder = pinned.pointer_path(commit);
        let missing: Vec<&RemoteFile> = wanted.iter().filter(|file| !folder.join(&file.name).exists()).collect();
        if !missing.is_empty() {
            let api = self.api()?.repo(self.at(commit));
            let total = missing.iter().map(|file| file.size.unwrap_or(0)).sum();
            let phase = format!("download {}", self.label());
            observer.on(&Event::Started { phase, total, unit: "bytes" });
            let mut done = 0;
            for file in missing {
                done +=
                    download::file(self, &api, &pinned, commit, &file.name, download::Bar { observer, before: done })?;
            }
            observer.on(&Event::Finished);
        }
        // Only now: whoever finds the name of the revision in the cache finds the files.
        if self.revision != commit {
            let named = self.cache().repo(self.at(&self.revision));
            named.create_ref(commit).map_err(Error::io(&self.options.cache_dir, "write"))?;
        }
        Ok(folder)
    }

    /// The snapshot folder of the revision in the cache.
    fn snapshot(&self) -> Result<PathBuf> {
        let root = self.options.cache_dir.join(self.at(&self.revision).folder_name());
        let commit = std::fs::read_to_string(root.join("refs").join(&self.revision));
        let commit = commit.map_or_else(|_| self.revision.clone(), |commit| commit.trim().to_owned());
        let folder = root.join("snapshots").join(&commit);
        if spec::is_plain(&commit) && folder.is_dir() {
            return Ok(folder);
        }
        Err(self.error(
            format!("is not in the cache `{}`", self.options.cache_dir.display()),
            "unset HF_HUB_OFFLINE, or run `prsmed hub get` where there is a connection and copy the cache",
        ))
    }

    /// The snapshot folder, if the cache holds `files`.
    fn cached(&self, files: &Files) -> Result<PathBuf> {
        let folder = self.snapshot()?;
        let held = files::local(&folder)?;
        if files.complete_in(&held) {
            return Ok(folder);
        }
        Err(self.error(
            format!("the cache `{}` holds only a part of it: no {files}", folder.display()),
            "unset HF_HUB_OFFLINE, or run `prsmed hub get` where there is a connection and copy the cache",
        ))
    }

    /// The hub's refusal in words.
    fn status(&self, status: u16, file: Option<&str>) -> Error {
        let what = file.map_or_else(|| "the repository".to_owned(), |file| format!("`{file}`"));
        match (status, &self.options.token) {
            (401, None) => self.error(
                format!("{what} is private, gated or does not exist (HTTP 401)"),
                "check the name; for a private or gated repository set HF_TOKEN to a token that may read it",
            ),
            (401, Some(_)) => self.error(
                format!("the token was refused for {what}, or it does not exist (HTTP 401)"),
                "check the name, and HF_TOKEN: it may be expired or of another account",
            ),
            (403, _) => self.error(
                format!("access to {what} is denied (HTTP 403)"),
                "accept the terms of the gated repository on its page and set HF_TOKEN to a token of that account",
            ),
            (404, _) => self.error(
                format!("{what} does not exist at revision `{}` (HTTP 404)", self.revision),
                "check the spelling of `hub:owner/name@revision`",
            ),
            _ => self.error(format!("the hub answered HTTP {status} for {what}"), "try again later"),
        }
    }

    fn broken(&self, reason: &str, file: &str) -> Error {
        self.error(
            format!("the connection keeps breaking while `{file}` is downloaded: {reason}"),
            "run the same command again: it continues where it stopped",
        )
    }

    /// A failure of the crate in words, when trying again is of no use.
    fn api_error(&self, error: ApiError, file: &str, path: &Path) -> Error {
        match error {
            ApiError::RequestError(error) => match *error {
                ureq::Error::StatusCode(status) => self.status(status, Some(file)),
                other => self.broken(&other.to_string(), file),
            },
            ApiError::IoError(error) if download::is_of_disk(&error) => Error::io(path, "write")(error),
            ApiError::IoError(error) => self.broken(&error.to_string(), file),
            ApiError::LockAcquisition(lock) => self.error(
                format!("another process is downloading `{file}` (`{}` is locked)", lock.display()),
                "wait for it and run the command again",
            ),
            other => self.error(format!("`{file}`: {other}"), "check HF_ENDPOINT: it does not answer as a hub does"),
        }
    }
}
