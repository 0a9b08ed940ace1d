//! Comparison of the files in the cache with the hashes in their names.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::cache::{self, State};
use super::{Hub, HubOptions, Spec, files, spec};
use prsmed_base::error::{Error, Result};
use prsmed_base::event::{Event, Observer};

/// Bytes between two progress events.
const STEP: u64 = 64 << 20;

/// A file of a repository in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedFile {
    /// Path inside the repository, with `/`.
    pub name: String,
    /// The file with the content.
    pub path: PathBuf,
    /// Commit of the snapshot that contains the file.
    pub commit: String,
    /// Result of the comparison.
    pub state: State,
}

/// Compares every cached file of a repository with its hash, without requests. With a revision in `spec` it reads the
/// files of that revision, else those of all revisions in the cache; with `INSIDE` only the files below it. Files are
/// sorted by commit and name; content that several files share is read once.
///
/// # Errors
/// [`Error::Config`] if `spec` is no repository; [`Error::Hub`] if the cache has none of its files; [`Error::Io`].
pub fn verify(spec: &str, options: &HubOptions, observer: &dyn Observer) -> Result<Vec<VerifiedFile>> {
    let Spec::Hub(source) = Spec::parse(spec)? else {
        let hint = "write `hub:owner/name`; the checksums of a run folder are checked when it is opened";
        return Err(Error::config(spec, "is not a repository of the hub", hint));
    };
    let hub = Hub::new(&source, options);
    let snapshots = if source.revision.is_some() { vec![hub.snapshot()?] } else { all_snapshots(&hub)? };
    let mut links = Vec::new();
    for snapshot in &snapshots {
        let commit = snapshot.file_name().unwrap_or_default().to_string_lossy();
        let is_folder = |path: &Path| path.is_dir() && !path.is_symlink();
        files::walk(snapshot, "", is_folder, &mut |name, path| links.push((commit.to_string(), name, path)))?;
    }
    let below = format!("{}/", source.inside);
    links.retain(|(_, name, _)| source.inside.is_empty() || *name == source.inside || name.starts_with(&below));
    links.sort();
    let mut known = HashSet::new();
    links.retain(|(_, _, path)| known.insert(content_of(path)));
    if links.is_empty() {
        return Err(hub.error("the cache has no files of it", format!("download them with `prsmed hub get {source}`")));
    }
    let total = links.iter().filter_map(|(_, _, path)| Some(fs::metadata(path).ok()?.len())).sum();
    observer.on(&Event::Started { phase: format!("verify {}", hub.label()), total, unit: "bytes" });
    let (mut done, mut reported) = (0, 0);
    let mut on_bytes = |bytes| {
        done += bytes;
        if done >= reported + STEP {
            reported = done;
            observer.on(&Event::Advanced { done });
        }
    };
    let repository = hub.cache().snapshots().parent().and_then(|folder| folder.canonicalize().ok());
    let blobs = repository.unwrap_or_default().join("blobs");
    let verify = |(commit, name, path): (String, String, PathBuf)| {
        let content = content_of(&path);
        if content != path && content.parent() != Some(&blobs) {
            let state = State::Damaged(format!("it is a link to `{}`, outside of the cache", content.display()));
            return VerifiedFile { name, path, commit, state };
        }
        let state = compare(&path, &mut on_bytes);
        VerifiedFile { name, path: content, commit, state }
    };
    let verified = links.into_iter().map(verify).collect();
    observer.on(&Event::Finished);
    Ok(verified)
}

/// The snapshots of all revisions in the cache.
fn all_snapshots(hub: &Hub) -> Result<Vec<PathBuf>> {
    let folder = hub.cache().snapshots();
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(&folder).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let entries = entries.map_err(Error::io(&folder, "list"))?;
    let is_commit = |entry: &fs::DirEntry| entry.file_name().to_str().is_some_and(spec::is_plain);
    Ok(entries.iter().filter(|entry| is_commit(entry)).map(fs::DirEntry::path).filter(|path| path.is_dir()).collect())
}

/// The file that a link of a snapshot names, or the file itself.
fn content_of(path: &Path) -> PathBuf {
    let (Ok(target), Some(folder)) = (fs::read_link(path), path.parent()) else { return path.to_owned() };
    let real = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    target.components().fold(real, |mut path, part| {
        match part {
            std::path::Component::ParentDir => drop(path.pop()),
            part => path.push(part),
        }
        path
    })
}

fn compare(path: &Path, on_bytes: &mut impl FnMut(u64)) -> State {
    if fs::metadata(path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
        return State::Damaged("it is missing".into());
    }
    let Some(hash) = cache::hash_of(path) else { return State::Unknown };
    cache::compare(path, &hash, on_bytes).unwrap_or_else(|error| State::Damaged(format!("it cannot be read: {error}")))
}
