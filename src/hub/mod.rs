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

use hf_hub::{Repo, RepoType};

pub use check::{Checked, Need, check, free_bytes};
pub use files::{Files, of_variant};
pub use options::{HubOptions, Timeouts};
pub use pinned::{Pinned, pinned};
pub use spec::{RepoKind, Source, Spec};
pub use verify::{State, VerifiedFile, verify};

use cache::RepoCache;
use client::{Client, Fault};
use files::Refusal;
use prsmed_base::error::{Error, Result};
use prsmed_base::event::{Event, Observer};

const NO_HUB: &str = "check HF_ENDPOINT and the proxy: the server does not behave like a hub";
const TOKEN_HINT: &str = "check HF_TOKEN, or the file that a login wrote";
/// How long [`reach`] waits for an answer.
const REACH_TIMEOUT: Duration = Duration::from_secs(4);

/// A file of a repository or folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFile {
    /// Path inside the repository, with `/`.
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
    remote: Option<(Source, String)>,
}

impl Located {
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
    match hub.listing() {
        Ok(listing) => hub.locate(listing, files),
        Err(Failure::Offline) => hub.cached(files),
        Err(Failure::Unreachable(reason)) => {
            let cached = hub.cached(files).map_err(|_| hub.unreachable(&reason))?;
            observer.on(&hub.uses_cache(&reason));
            Ok(cached)
        }
        Err(Failure::Refused(error)) => Err(error),
    }
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
    let mut files = match hub.listing() {
        Ok(listing) => listing.files,
        Err(Failure::Offline) => files::local(&hub.snapshot()?)?,
        Err(Failure::Unreachable(reason)) => {
            let folder = hub.snapshot().map_err(|_| hub.unreachable(&reason))?;
            observer.on(&hub.uses_cache(&reason));
            files::local(&folder)?
        }
        Err(Failure::Refused(error)) => return Err(error),
    };
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
    if path.exists() {
        return Ok(path);
    }
    Err(Error::weights(
        path,
        "there is no such file or folder",
        "check the path; a repository of the hub is written `hub:owner/name`",
    ))
}

/// The files of a path. A folder must contain weight files.
fn local(path: PathBuf, files: &Files) -> Result<Located> {
    let path = existing(path)?;
    let listed = files::local(&path)?;
    let (files, inside) = if path.is_dir() && matches!(files, Files::Checkpoint | Files::OnlyWeights) {
        files.pick(&listed).map_err(|Refusal { reason, candidate }| {
            let hint = candidate.map_or_else(
                || "check the path".to_owned(),
                |name| format!("name one of them, for example `{}`", path.join(name).display()),
            );
            Error::weights(&path, reason, hint)
        })?
    } else {
        (listed, String::new())
    };
    let path = if inside.is_empty() { path } else { path.join(inside) };
    Ok(Located { path, files, num_missing: 0, download_bytes: 0, remote: None })
}

/// Failure of a request.
enum Failure {
    /// No answer; the cache may be used instead.
    Unreachable(String),
    /// The settings forbid requests.
    Offline,
    /// The hub refused, or gave an invalid answer.
    Refused(Error),
}

/// Commit and files of a revision.
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
    source: &'a Source,
    revision: &'a str,
    options: &'a HubOptions,
}

impl<'a> Hub<'a> {
    fn new(source: &'a Source, options: &'a HubOptions) -> Self {
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

    fn unreachable(&self, reason: &str) -> Error {
        self.error(
            format!("`{}` cannot be reached: {reason}", self.options.shown_endpoint()),
            "check the network, the proxy and HF_ENDPOINT, or give a local folder",
        )
    }

    fn uses_cache(&self, reason: &str) -> Event {
        Event::Warning(format!("`{}` cannot be reached ({reason}): the cached files are used", self.spec()))
    }

    fn cache(&self) -> RepoCache<'_> {
        let kind = match self.source.kind {
            RepoKind::Model => RepoType::Model,
            RepoKind::Dataset => RepoType::Dataset,
        };
        let repo = Repo::new(self.source.repo.clone(), kind);
        RepoCache { folder: &self.options.cache_dir, name: repo.folder_name() }
    }

    fn client(&self) -> Result<Client<'_>> {
        Client::new(self.options).map_err(|fault| self.error(fault.to_string(), "check HF_ENDPOINT"))
    }

    /// The address of a file.
    fn address_of(&self, commit: &str, file: &str) -> String {
        let endpoint = self.options.endpoint.trim_end_matches('/');
        let datasets = if self.source.kind == RepoKind::Dataset { "datasets/" } else { "" };
        format!("{endpoint}/{datasets}{}/resolve/{commit}/{}", self.source.repo, client::encode(file))
    }

    /// Asks the hub for the commit and the files.
    fn listing(&self) -> Result<Listing, Failure> {
        if self.options.offline {
            return Err(Failure::Offline);
        }
        let endpoint = self.options.endpoint.trim_end_matches('/');
        let revision = self.revision.replace('/', "%2F");
        let kind = if self.source.kind == RepoKind::Dataset { "datasets" } else { "models" };
        let address = format!("{endpoint}/api/{kind}/{}/revision/{revision}?blobs=true", self.source.repo);
        let text = self.client().map_err(Failure::Refused)?.text(&address).map_err(|fault| match fault {
            Fault::Connection(reason) => Failure::Unreachable(reason),
            Fault::Status(status) => Failure::Refused(self.status(status, None)),
            Fault::Protocol(reason) => Failure::Refused(self.error(reason, NO_HUB)),
            Fault::Token => Failure::Refused(self.error(fault.to_string(), TOKEN_HINT)),
        })?;
        self.read_info(&text).map_err(Failure::Refused)
    }

    fn read_info(&self, text: &str) -> Result<Listing> {
        let info: Info = serde_json::from_str(text)
            .map_err(|error| self.error(format!("the answer of the hub is invalid: {error}"), "check HF_ENDPOINT"))?;
        if !spec::is_plain(&info.sha) {
            let commit = info.sha.escape_debug();
            return Err(self.error(format!("the hub gave the invalid commit `{commit}`"), "check HF_ENDPOINT"));
        }
        // a file that is listed twice is downloaded once
        let mut names = BTreeSet::new();
        let mut files: Vec<RemoteFile> =
            info.siblings.into_iter().map(|file| RemoteFile { name: file.rfilename, size: file.size }).collect();
        files.retain(|file| names.insert(file.name.clone()));
        if let Some(file) = files.iter().find(|file| !spec::stays_inside(&file.name)) {
            return Err(self.error(
                format!("has the file `{}`, whose path leaves its folder", file.name.escape_debug()),
                "do not use this repository",
            ));
        }
        let is_folder = |name: &str| {
            let folder = format!("{name}/");
            names.range(folder.clone()..).next().is_some_and(|next| next.starts_with(&folder))
        };
        if let Some(file) = files.iter().find(|file| is_folder(&file.name)) {
            let reason = format!("has `{}` as a file and as a folder", file.name.escape_debug());
            return Err(self.error(reason, "do not use this repository"));
        }
        Ok(Listing { commit: info.sha, files })
    }

    /// The files of `listed` that `files` selects, and the path that represents them, relative to the repository.
    fn choose(&self, listed: &[RemoteFile], files: &Files) -> Result<(Vec<RemoteFile>, String), Refusal> {
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
            return Err(Refusal::lacking(&format!("`{inside}`"), listed));
        }
        let join = |name: &str| if name.is_empty() { inside.to_owned() } else { format!("{inside}/{name}") };
        let named = |refusal: Refusal| Refusal { candidate: refusal.candidate.map(|name| join(&name)), ..refusal };
        let (chosen, path) = files.pick(&below).map_err(named)?;
        let chosen = chosen.into_iter().map(|file| RemoteFile { name: join(&file.name), size: file.size });
        Ok((chosen.collect(), join(&path)))
    }

    fn refuse(&self, Refusal { reason, candidate }: Refusal) -> Error {
        let hint = candidate.map_or_else(
            || "check the name of the repository".to_owned(),
            |name| format!("name one of them, for example `{}`", self.source.with_inside(&name)),
        );
        self.error(reason, hint)
    }

    fn locate(&self, listing: Listing, files: &Files) -> Result<Located> {
        let (files, path) = self.choose(&listing.files, files).map_err(|refusal| self.refuse(refusal))?;
        let folder = self.cache().snapshots().join(&listing.commit);
        let missing: Vec<u64> =
            files.iter().filter(|file| !is_in(&folder, file)).map(|file| file.size.unwrap_or(0)).collect();
        let total = sum(missing.iter().copied());
        Ok(Located {
            path: if path.is_empty() { folder } else { folder.join(path) },
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
                let bar = download::Bar { observer, before };
                let target = download::Target { hub: self, client: &client, cache: &cache, commit, file, bar };
                before += target.download()?;
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
            self.error(
                format!("the cache `{}` has only a part of it: {}", folder.display(), refusal.reason),
                self.fetch_hint(),
            )
        })?;
        let path = if path.is_empty() { folder } else { folder.join(path) };
        Ok(Located { path, files, num_missing: 0, download_bytes: 0, remote: None })
    }

    /// The error for an HTTP status.
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
                "check the spelling of `hub:owner/name@revision`; a data set is written `dataset:owner/name`",
            ),
            _ => self.error(format!("the hub answered HTTP {status} for {what}"), "try again later"),
        }
    }

    /// The error for a failed download of a file.
    fn fault(&self, fault: Fault, file: &str) -> Error {
        match fault {
            Fault::Status(status) => self.status(status, Some(file)),
            Fault::Connection(reason) => self.error(
                format!("the connection failed repeatedly during the download of `{file}`: {reason}"),
                "run the same command again: it continues where it stopped",
            ),
            Fault::Protocol(reason) => self.error(format!("`{file}`: {reason}"), NO_HUB),
            Fault::Token => self.error(fault.to_string(), TOKEN_HINT),
        }
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
