//! Hugging Face hub: turns `hub:owner/name[/INSIDE][@revision]`, `dataset:owner/name...` or a path into local files.
//!
//! Downloads go into the cache of the Python client (`models--owner--name/{blobs, refs, snapshots}`, `datasets--...`), so
//! both share the files. All files of a repository are of one commit. Interrupted downloads continue. Contents are compared with their
//! hashes before they are used ([`verify()`] compares those in the cache again). The list of files and their sizes is
//! known before anything is downloaded ([`check()`]). Errors have hints.
//!
//! The crate `hf-hub` gives the names of the cache folders. The requests are this module's own; `docs/dev/hub-client.md`
//! compares them with the client of hf-hub 1.0, test by test.
//!
//! This module reads no environment variables: `cli` passes a look-up to [`HubOptions::from_vars`]. The HTTP client
//! reads the proxy variables.

mod cache;
mod check;
mod client;
mod download;
mod files;
mod options;
mod pinned;
mod spec;
mod verify;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::Repo;

pub use cache::State;
pub use check::{CheckedWeights, Need, check, free_bytes};
pub use files::{Files, of_variant};
pub use options::{HubOptions, Timeouts};
pub use pinned::{Pinned, pinned};
pub use spec::{HubSource, RepoKind, Spec};
pub use verify::{VerifiedFile, verify};

use cache::RepoCache;
use client::{Client, Fault};
use download::FileDownload;
use files::PickRefusal;
use prsmed_base::error::{Error, Result};
use prsmed_base::event::{Event, Observer};

const NO_HUB: &str = "check HF_ENDPOINT and the proxy: the server does not behave like a hub";
const TOKEN_HINT: &str = "check HF_TOKEN, or the file that a login wrote";
/// How long [`reach`] waits for an answer.
const REACH_TIMEOUT: Duration = Duration::from_secs(4);

/// A file of a repository or folder.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub struct RemoteFile {
    /// Path inside the repository, with `/`.
    #[serde(rename = "rfilename")]
    pub name: String,
    /// Size in bytes, if known.
    pub size: Option<u64>,
}

/// The files that a spec names. They exist, but hub files may not be downloaded yet.
#[derive(Debug, Clone)]
pub struct Located {
    /// The local file or folder; [`Self::fetch`] puts hub files there.
    pub path: PathBuf,
    /// All files, named relative to the repository or folder.
    pub files: Vec<RemoteFile>,
    /// Number of files that are not in the cache.
    pub num_missing: usize,
    /// Bytes to download, not counting those that an interrupted download left in the cache.
    pub download_bytes: u64,
    /// Repository and commit; `None` for local files.
    remote: Option<(HubSource, String)>,
}

impl Located {
    /// Files on this machine; `inside` is empty for the folder that has them.
    fn local(folder: PathBuf, inside: &str, files: Vec<RemoteFile>) -> Self {
        Self { path: joined(folder, inside), files, num_missing: 0, download_bytes: 0, remote: None }
    }

    /// Bytes of all files whose size is known.
    pub fn bytes(&self) -> u64 {
        sum(self.files.iter().filter_map(|file| file.size))
    }

    /// Downloads the missing files and returns [`Self::path`].
    ///
    /// # Errors
    /// Like [`resolve`].
    pub fn fetch(&self, options: &HubOptions, observer: &dyn Observer) -> Result<PathBuf> {
        if let Some((source, commit)) = &self.remote {
            Hub::new(source, options).fetch(commit, &self.files, observer)?;
        }
        Ok(self.path.clone())
    }
}

/// Finds the files of `spec` without downloading them.
///
/// If the hub cannot be reached and the cache has the files, the cached files are used with a warning.
///
/// # Errors
/// Like [`resolve`].
pub fn find(spec: &str, files: &Files, options: &HubOptions, observer: &dyn Observer) -> Result<Located> {
    let source = match Spec::parse(spec)? {
        Spec::Local(path) => return local(path, files),
        Spec::Hub(source) => source,
    };
    let hub = Hub::new(&source, options);
    hub.listed_or_cached(|listing| hub.locate(listing, files), || hub.cached(files), observer)
}

/// The local folder (or file) of `spec`, after downloading the missing files.
///
/// A path that exists is returned unchanged. A download emits `Started`, `Advanced` in bytes and `Finished`. If the hub
/// cannot be reached and the cache has the files, the cached files are used with a warning.
///
/// # Errors
/// [`Error::Config`] for a malformed `spec`; [`Error::Weights`] for a missing path; [`Error::Hub`] if the repository,
/// revision or files do not exist, access is denied, the connection keeps failing, a download has the wrong content, or
/// `offline` is set and the cache lacks the files; [`Error::Io`] from the disk.
pub fn resolve(spec: &str, files: &Files, options: &HubOptions, observer: &dyn Observer) -> Result<PathBuf> {
    find(spec, files, options, observer)?.fetch(options, observer)
}

/// The files of `spec` with their sizes, sorted by name. If `spec` has `INSIDE`, only the files below it.
///
/// # Errors
/// Like [`resolve`].
pub fn ls(spec: &str, options: &HubOptions, observer: &dyn Observer) -> Result<Vec<RemoteFile>> {
    let source = match Spec::parse(spec)? {
        Spec::Local(path) => return files::local(&existing(path)?),
        Spec::Hub(source) => source,
    };
    let hub = Hub::new(&source, options);
    let cached = || files::local(&hub.snapshot()?);
    let mut files = hub.listed_or_cached(|listing| Ok(listing.files), cached, observer)?;
    let below = format!("{}/", source.inside);
    files.retain(|file| source.inside.is_empty() || file.name == source.inside || file.name.starts_with(&below));
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

/// Checks that the hub answers, with a short timeout.
///
/// # Errors
/// The message of the failed connection.
pub fn reach(options: &HubOptions) -> Result<(), String> {
    let config = ureq::Agent::config_builder().timeout_global(Some(REACH_TIMEOUT)).build();
    let address = format!("{}/api/models?limit=1", options.endpoint.trim_end_matches('/'));
    match ureq::Agent::new_with_config(config).get(&address).call() {
        Ok(_) | Err(ureq::Error::StatusCode(_)) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

fn existing(path: PathBuf) -> Result<PathBuf> {
    let hint = "check the path; a repository of the hub is written `hub:owner/name`";
    if path.exists() { Ok(path) } else { Err(Error::weights(path, "there is no such file or folder", hint)) }
}

/// The files of a path. A folder must contain weight files.
fn local(path: PathBuf, files: &Files) -> Result<Located> {
    let path = existing(path)?;
    let listed = files::local(&path)?;
    let (files, inside) = if path.is_dir() && matches!(files, Files::Checkpoint | Files::OnlyWeights) {
        files.pick(&listed).map_err(|refusal| {
            let hint = refusal.hint("check the path", |name| path.join(name).display().to_string());
            Error::weights(&path, refusal.reason, hint)
        })?
    } else {
        (listed, String::new())
    };
    Ok(Located::local(path, &inside, files))
}

/// A path `inside` a folder, or the folder itself.
fn joined(folder: PathBuf, inside: &str) -> PathBuf {
    if inside.is_empty() { folder } else { folder.join(inside) }
}

/// Commit and files of a revision, as the hub lists them.
#[derive(serde::Deserialize)]
struct Listing {
    #[serde(rename = "sha")]
    commit: String,
    #[serde(rename = "siblings", default)]
    files: Vec<RemoteFile>,
}

/// One repository at one revision.
struct Hub<'a> {
    source: &'a HubSource,
    revision: &'a str,
    options: &'a HubOptions,
}

impl<'a> Hub<'a> {
    fn new(source: &'a HubSource, options: &'a HubOptions) -> Self {
        Self { source, revision: source.revision.as_deref().unwrap_or("main"), options }
    }

    fn label(&self) -> String {
        let repo = &self.source.repo;
        if self.revision == "main" { repo.clone() } else { format!("{repo}@{}", self.revision) }
    }

    /// The repository as the user writes it.
    fn spec(&self) -> String {
        format!("{}{}", self.source.kind.prefix(), self.label())
    }

    fn error(&self, reason: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::hub(self.spec(), reason, hint)
    }

    /// How to get what the cache lacks.
    fn fetch_hint(&self) -> String {
        let get = format!("`prsmed hub get {}`", self.spec());
        format!("run {get} with a connection and without HF_HUB_OFFLINE; from another machine, copy its cache")
    }

    fn cache(&self) -> RepoCache<'_> {
        let new = if self.is_dataset() { Repo::dataset } else { Repo::model };
        RepoCache { folder: &self.options.cache_dir, name: new(self.source.repo.clone()).folder_name() }
    }

    fn client(&self) -> Result<Client<'_>> {
        Client::new(self.options).map_err(|fault| self.error(fault.to_string(), "check HF_ENDPOINT"))
    }

    fn is_dataset(&self) -> bool {
        self.source.kind == RepoKind::Dataset
    }

    /// The address of a file.
    fn address_of(&self, commit: &str, file: &str) -> String {
        let endpoint = self.options.endpoint.trim_end_matches('/');
        let datasets = if self.is_dataset() { "datasets/" } else { "" };
        format!("{endpoint}/{datasets}{}/resolve/{commit}/{}", self.source.repo, client::encode(file))
    }

    /// Asks the hub for the commit and the files. Without a connection it uses the cache, with a warning.
    fn listed_or_cached<T>(
        &self,
        listed: impl FnOnce(Listing) -> Result<T>,
        cached: impl FnOnce() -> Result<T>,
        observer: &dyn Observer,
    ) -> Result<T> {
        if self.options.offline {
            return cached();
        }
        let endpoint = self.options.endpoint.trim_end_matches('/');
        let revision = self.revision.replace('/', "%2F");
        let kind = if self.is_dataset() { "datasets" } else { "models" };
        let address = format!("{endpoint}/api/{kind}/{}/revision/{revision}?blobs=true", self.source.repo);
        match self.client()?.text(&address) {
            Ok(text) => listed(self.read_listing(&text)?),
            Err(Fault::Connection(reason)) => {
                let cached = cached().map_err(|error| {
                    if matches!(error, Error::Io { .. }) {
                        return error;
                    }
                    let reason = format!("`{}` cannot be reached: {reason}", self.options.shown_endpoint());
                    self.error(reason, "check the network, the proxy and HF_ENDPOINT, or give a local folder")
                })?;
                let warning = format!("`{}` cannot be reached ({reason}): the cached files are used", self.spec());
                observer.on(&Event::Warning(warning));
                Ok(cached)
            }
            Err(fault) => Err(self.fault(fault, None)),
        }
    }

    fn read_listing(&self, text: &str) -> Result<Listing> {
        let Listing { commit, mut files } = serde_json::from_str(text)
            .map_err(|error| self.error(format!("the answer of the hub is invalid: {error}"), "check HF_ENDPOINT"))?;
        if !spec::is_plain(&commit) {
            let commit = commit.escape_debug();
            return Err(self.error(format!("the hub gave the invalid commit `{commit}`"), "check HF_ENDPOINT"));
        }
        // a file that is listed twice is downloaded once
        let mut names = BTreeSet::new();
        files.retain(|file| names.insert(file.name.clone()));
        if let Some(file) = files.iter().find(|file| !spec::stays_inside(&file.name)) {
            let reason = format!("has the file `{}`, whose path leaves its folder", file.name.escape_debug());
            return Err(self.error(reason, "do not use this repository"));
        }
        let is_folder = |name: &str| {
            let folder = format!("{name}/");
            names.range(folder.clone()..).next().is_some_and(|next| next.starts_with(&folder))
        };
        if let Some(file) = files.iter().find(|file| is_folder(&file.name)) {
            let reason = format!("has `{}` as a file and as a folder", file.name.escape_debug());
            return Err(self.error(reason, "do not use this repository"));
        }
        Ok(Listing { commit, files })
    }

    /// The files of `listed` that `files` selects, and the path that represents them, relative to the repository.
    fn choose(&self, listed: &[RemoteFile], files: &Files) -> Result<(Vec<RemoteFile>, String), PickRefusal> {
        let inside = self.source.inside.as_str();
        if inside.is_empty() {
            return files.pick(listed);
        }
        if let Some(file) = listed.iter().find(|file| file.name == inside) {
            return Ok((vec![file.clone()], inside.to_owned()));
        }
        let below = |file: &RemoteFile| {
            let name = file.name.strip_prefix(inside)?.strip_prefix('/')?.to_owned();
            Some(RemoteFile { name, size: file.size })
        };
        let below: Vec<RemoteFile> = listed.iter().filter_map(below).collect();
        if below.is_empty() {
            return Err(PickRefusal::lacking(&format!("`{inside}`"), listed));
        }
        let join = |name: &str| if name.is_empty() { inside.to_owned() } else { format!("{inside}/{name}") };
        let named =
            |refusal: PickRefusal| PickRefusal { candidate: refusal.candidate.map(|name| join(&name)), ..refusal };
        let (chosen, path) = files.pick(&below).map_err(named)?;
        let chosen = chosen.into_iter().map(|file| RemoteFile { name: join(&file.name), size: file.size });
        Ok((chosen.collect(), join(&path)))
    }

    fn locate(&self, listing: Listing, files: &Files) -> Result<Located> {
        let (files, path) = self.choose(&listing.files, files).map_err(|refusal| {
            let full = |name: &str| self.source.with_inside(name).to_string();
            let hint = refusal.hint("check the name of the repository", full);
            self.error(refusal.reason, hint)
        })?;
        let folder = self.cache().snapshots().join(&listing.commit);
        let missing: Vec<u64> =
            files.iter().filter(|file| !is_in(&folder, file)).map(|file| file.size.unwrap_or(0)).collect();
        let total = sum(missing.iter().copied());
        Ok(Located {
            path: joined(folder, &path),
            files,
            num_missing: missing.len(),
            download_bytes: total.saturating_sub(self.partial_bytes()),
            remote: Some((self.source.clone(), listing.commit)),
        })
    }

    /// Bytes that interrupted downloads of this repository left in the cache.
    fn partial_bytes(&self) -> u64 {
        let files = std::fs::read_dir(self.cache().blobs()).into_iter().flatten().filter_map(std::result::Result::ok);
        let parts = files.filter(|file| file.path().extension().is_some_and(|end| end == download::PARTIAL));
        parts.filter_map(|file| Some(file.metadata().ok()?.len())).sum()
    }

    /// Downloads the missing files of `wanted`.
    fn fetch(&self, commit: &str, wanted: &[RemoteFile], observer: &dyn Observer) -> Result<()> {
        let cache = self.cache();
        let folder = cache.snapshots().join(commit);
        let missing: Vec<&RemoteFile> = wanted.iter().filter(|file| !is_in(&folder, file)).collect();
        if !missing.is_empty() {
            let client = self.client()?;
            let total = sum(missing.iter().map(|file| file.size.unwrap_or(0)));
            let phase = format!("download {}", self.label());
            observer.on(&Event::Started { phase, total, unit: "bytes" });
            let mut before = 0;
            for file in missing {
                let (hub, client, cache) = (self, &client, &cache);
                before += FileDownload { hub, client, cache, commit, file, observer, before }.download()?;
            }
            observer.on(&Event::Finished);
        }
        // last, so that a revision in the cache always has its files
        if self.revision == commit { Ok(()) } else { cache.set_commit(self.revision, commit) }
    }

    /// The snapshot folder of the revision in the cache.
    fn snapshot(&self) -> Result<PathBuf> {
        let cache = self.cache();
        let commit = cache.commit_of(self.revision).unwrap_or_else(|| self.revision.to_owned());
        let folder = cache.snapshots().join(&commit);
        if spec::is_plain(&commit) && folder.is_dir() {
            return Ok(folder);
        }
        Err(self.error(format!("is not in the cache `{}`", self.options.cache_dir.display()), self.fetch_hint()))
    }

    /// The files in the cache, if it has all that `files` selects.
    fn cached(&self, files: &Files) -> Result<Located> {
        let folder = self.snapshot()?;
        let (files, path) = self.choose(&files::local(&folder)?, files).map_err(|refusal| {
            let reason = format!("the cache `{}` has only a part of it: {}", folder.display(), refusal.reason);
            self.error(reason, self.fetch_hint())
        })?;
        Ok(Located::local(folder, &path, files))
    }

    /// The error for a failed request for the listing or a file.
    fn fault(&self, fault: Fault, file: Option<&str>) -> Error {
        let what = file.map_or_else(|| "the repository".to_owned(), |file| format!("`{file}`"));
        let (reason, hint) = match (fault, &self.options.token) {
            (Fault::Connection(reason), _) => (
                format!("the connection failed repeatedly during the download of {what}: {reason}"),
                "run the same command again: it continues where it stopped",
            ),
            (Fault::Protocol(reason), _) if file.is_some() => (format!("{what}: {reason}"), NO_HUB),
            (Fault::Protocol(reason), _) => (reason, NO_HUB),
            (Fault::Token, _) => (Fault::Token.to_string(), TOKEN_HINT),
            (Fault::Status(401), None) => (
                format!("{what} is private, gated or does not exist (HTTP 401)"),
                "check the name; for a private or gated repository set HF_TOKEN to a token that may read it",
            ),
            (Fault::Status(401), Some(_)) => (
                format!("the token was refused for {what}, or it does not exist (HTTP 401)"),
                "check the name, and HF_TOKEN: it may be expired or of another account",
            ),
            (Fault::Status(403), _) => (
                format!("access to {what} is denied (HTTP 403)"),
                "accept the terms of the gated repository on its page and set HF_TOKEN to a token of that account",
            ),
            (Fault::Status(404), _) => (
                format!("{what} does not exist at revision `{}` (HTTP 404)", self.revision),
                "check the spelling of `hub:owner/name@revision`; a data set is written `dataset:owner/name`",
            ),
            (Fault::Status(status), _) => (format!("the hub answered HTTP {status} for {what}"), "try again later"),
        };
        self.error(reason, hint)
    }
}

/// The sum of sizes. A hub may list sizes whose sum is larger than any number.
pub fn sum(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

/// True if a snapshot has a file, with the size that the hub lists.
fn is_in(snapshot: &Path, file: &RemoteFile) -> bool {
    let found = std::fs::metadata(snapshot.join(&file.name));
    found.is_ok_and(|found| file.size.is_none_or(|size| size == found.len()))
}
