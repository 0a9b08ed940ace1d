//! Download of one file through `hf-hub`, with retries, resumption and checks.
//!
//! After a failed resumption the crate's own retries append without checking the length of the file, and it accepts any
//! number of bytes as complete. So this module asks it for one attempt at a time. Each attempt continues the `.part`
//! file.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::CacheRepo;
use hf_hub::api::Progress;
use hf_hub::api::sync::{ApiError, ApiRepo, Metadata};

use super::{Hub, spec};
use crate::error::{Error, Result};
use crate::event::{Event, Observer};
use crate::tensor::weights::sha256;

/// Consecutive failures without a new byte after which a download fails.
const ATTEMPTS: u32 = 5;
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// Bytes between two progress events.
const STEP: u64 = 1 << 20;

/// Progress over several files.
#[derive(Clone, Copy)]
pub(super) struct Bar<'a> {
    pub(super) observer: &'a dyn Observer,
    /// Bytes of the files before this one.
    pub(super) before: u64,
}

struct FileBar<'a> {
    bar: Bar<'a>,
    done: u64,
    reported: u64,
}

impl Progress for FileBar<'_> {
    fn init(&mut self, _size: usize, _filename: &str) {
        // the crate calls this before every attempt, and then reports the bytes that are already on disk
        (self.done, self.reported) = (0, 0);
    }

    fn update(&mut self, size: usize) {
        self.done += size as u64;
        if self.done >= self.reported + STEP {
            self.reported = self.done;
            self.bar.observer.on(&Event::Advanced { done: self.bar.before + self.done });
        }
    }

    fn finish(&mut self) {
        self.bar.observer.on(&Event::Advanced { done: self.bar.before + self.done });
    }
}

/// Downloads `name` at the given commit into the cache. Returns its size.
pub(super) fn file(hub: &Hub, api: &ApiRepo, cache: &CacheRepo, commit: &str, name: &str, bar: Bar) -> Result<u64> {
    let pointer = cache.pointer_path(commit).join(name);
    let (mut failures, mut reached, mut fresh) = (0, 0, false);
    loop {
        let (error, part) = match attempt(hub, api, cache, name, &pointer, bar)? {
            Attempt::Done(size) => return Ok(size),
            Attempt::Broken(blob) if fresh => {
                return Err(hub.error(
                    format!(
                        "`{name}` does not have the size or SHA-256 that the hub lists, even after a second download"
                    ),
                    format!("try again later; check HF_ENDPOINT (the file would be `{}`)", blob.display()),
                ));
            }
            Attempt::Broken(blob) => {
                // the part of another download, or a server that ignores ranges: start again once
                fresh = true;
                remove(&pointer)?;
                remove(&blob)?;
                remove(&blob.with_extension("part"))?;
                continue;
            }
            Attempt::Failed(error, part) => (error, part),
        };
        let length = part.as_deref().and_then(|part| fs::metadata(part).ok()).map_or(0, |meta| meta.len());
        failures = if length > reached { 1 } else { failures + 1 };
        reached = reached.max(length);
        if is_final(&error) || failures >= ATTEMPTS {
            return Err(hub.api_error(error, name, &pointer));
        }
        bar.observer.on(&Event::Note(format!("`{name}`: the download stopped at {length} bytes ({error}), resuming")));
        std::thread::sleep(FIRST_WAIT * 2_u32.pow(failures - 1));
    }
}

enum Attempt {
    /// Complete, with this size.
    Done(u64),
    /// The blob or part at this path has the wrong size or SHA-256.
    Broken(PathBuf),
    /// Failed, with the part downloaded so far.
    Failed(ApiError, Option<PathBuf>),
}

fn attempt(hub: &Hub, api: &ApiRepo, cache: &CacheRepo, name: &str, pointer: &Path, bar: Bar) -> Result<Attempt> {
    let promised = match api_metadata(hub, api, name) {
        Ok(promised) => promised,
        Err(error) => return Ok(Attempt::Failed(error, None)),
    };
    let (size, etag) = (promised.size() as u64, promised.etag());
    if !spec::is_plain(etag) {
        let hint = "check HF_ENDPOINT: the server does not behave like a hub";
        return Err(hub.error(format!("`{name}` has the ETag `{etag}`, which cannot name a file"), hint));
    }
    let blob = cache.blob_path(etag);
    // another revision may have downloaded the same content
    if fs::metadata(&blob).is_ok_and(|meta| meta.len() == size) {
        link(&blob, pointer).map_err(Error::io(pointer, "link"))?;
        return Ok(Attempt::Done(size));
    }
    let part = blob.with_extension("part");
    if fs::symlink_metadata(pointer).is_ok() && !pointer.exists() {
        remove(pointer)?;
    }
    // the part is complete, but was not renamed: the crate would request the empty range after it, which servers
    // refuse
    if fs::metadata(&part).is_ok_and(|meta| meta.len() >= size && size > 0) {
        if !is_promised(&part, size, etag)? {
            return Ok(Attempt::Broken(blob));
        }
        fs::rename(&part, &blob).map_err(Error::io(&part, "rename"))?;
        link(&blob, pointer).map_err(Error::io(pointer, "link"))?;
        return Ok(Attempt::Done(size));
    }
    match api.download_with_progress(name, FileBar { bar, done: 0, reported: 0 }) {
        Err(ApiError::InvalidResume) => Ok(Attempt::Broken(blob)),
        Err(error) => Ok(Attempt::Failed(error, Some(part))),
        Ok(path) => Ok(if is_promised(&path, size, etag)? { Attempt::Done(size) } else { Attempt::Broken(blob) }),
    }
}

/// True if size and SHA-256 match. The ETag is the SHA-256 of a large file; other files have none.
fn is_promised(path: &Path, size: u64, etag: &str) -> Result<bool> {
    let held = fs::metadata(path).map_err(Error::io(path, "read"))?.len();
    Ok(held == size && (etag.len() != 64 || sha256(path)? == etag))
}

fn api_metadata(hub: &Hub, api: &ApiRepo, name: &str) -> std::result::Result<Metadata, ApiError> {
    let client = hub.api().map_err(|error| ApiError::IoError(io::Error::other(error.to_string())))?;
    client.metadata(&api.url(name))
}

/// True if the same request would fail again.
fn is_final(error: &ApiError) -> bool {
    match error {
        ApiError::RequestError(error) => match **error {
            ureq::Error::StatusCode(status) => (400..500).contains(&status) && !matches!(status, 408 | 416 | 429),
            _ => false,
        },
        ApiError::IoError(error) => is_of_disk(error),
        _ => true,
    }
}

/// True for an error of the disk, not of the connection.
pub(super) fn is_of_disk(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::StorageFull
            | ErrorKind::QuotaExceeded
            | ErrorKind::PermissionDenied
            | ErrorKind::ReadOnlyFilesystem
            | ErrorKind::NotADirectory
            | ErrorKind::AlreadyExists
    )
}

/// A relative link from the snapshot to the blob, like that of the Python client.
fn link(blob: &Path, pointer: &Path) -> io::Result<()> {
    let folder = pointer.parent().ok_or(ErrorKind::InvalidInput)?;
    fs::create_dir_all(folder)?;
    let root = blob.parent().and_then(Path::parent).ok_or(ErrorKind::InvalidInput)?;
    let depth = folder.strip_prefix(root).map_err(io::Error::other)?.components().count();
    let target: PathBuf = std::iter::repeat_n("..", depth).chain(["blobs"]).collect();
    let target = target.join(blob.file_name().unwrap_or_default());
    if fs::symlink_metadata(pointer).is_ok() {
        fs::remove_file(pointer)?;
    }
    #[cfg(unix)]
    return std::os::unix::fs::symlink(target, pointer);
    #[cfg(not(unix))]
    return fs::copy(blob, pointer).map(|_| drop(target));
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io(path, "delete")(error)),
        _ => Ok(()),
    }
}
