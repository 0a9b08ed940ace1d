//! Atomic writes of files and folders: after a crash the old content or the complete new content is there.
//!
//! A file is written under a temporary name in its own folder, synced and renamed; then the folder is synced.
//!
//! A folder (a checkpoint) is written as `DIR.tmp-…`, with SHA-256 sums in `checksums.json`. When all files are on
//! disk, [`Staged::publish`]
//!
//! 1. renames `DIR` to `DIR.previous` (if there is one),
//! 2. renames `DIR.tmp-…` to `DIR`,
//! 3. deletes `DIR.previous`,
//!
//! and syncs the parent folder after each step. At every moment `DIR` is complete, or `DIR.previous` between 1 and 2.
//! [`readable_folder`] finds the complete one. [`recover_folder`], which the next [`Staged::begin`] calls, restores it
//! and deletes leftovers of a crash. Only one process at a time may write `DIR`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tch::Tensor;

use super::stream::{CHUNK, TensorSpec, all as stream, one_by_one};
use crate::error::{Error, Result};

/// Name of the file with the checksums in a published folder.
pub const CHECKSUMS: &str = "checksums.json";

#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Sum {
    bytes: u64,
    sha256: String,
}

#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
struct Checksums {
    files: BTreeMap<String, Sum>,
}

/// Writes `tensors` to the safetensors file `path`, atomically.
///
/// Tensors are written one at a time, from any device and with any strides, without a second copy of all of them.
/// `metadata` is added to the header, after `format = pt`, which Python's `transformers` requires.
///
/// # Errors
/// [`Error::Io`] from the file system; [`Error::Weights`] for an unsupported dtype or a repeated name.
pub fn write_safetensors<N: AsRef<str>>(
    path: &Path,
    tensors: &[(N, &Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    write_with(path, |out| stream(path, out, tensors, metadata)).map(drop)
}

/// Writes `bytes` to `path`, atomically.
///
/// # Errors
/// [`Error::Io`].
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Result<()> {
    write_with(path, |out| out.write_all(bytes).map_err(Error::io(path, "write"))).map(drop)
}

/// A folder that is being written. If it is dropped without [`Staged::publish`], it is deleted.
#[derive(Debug)]
pub struct Staged {
    target: PathBuf,
    temporary: PathBuf,
    checksums: Checksums,
    discarding: bool,
}

impl Staged {
    /// Starts new content for the folder `target`, after [`recover_folder`].
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn begin(target: &Path) -> Result<Self> {
        recover_folder(target)?;
        let parent = parent(target);
        fs::create_dir_all(&parent).map_err(Error::io(&parent, "create"))?;
        let prefix = with_suffix(target, ".tmp-");
        let temporary = tempfile::Builder::new()
            .prefix(prefix.file_name().unwrap_or_default())
            // not `tempdir_in`, which makes the folder private: a checkpoint is as readable as the user's other files
            .make_in(&parent, |path| fs::create_dir(path))
            .map_err(Error::io(&parent, "create a folder in"))?
            .into_temp_path()
            .keep()
            .map_err(|error| Error::io(&parent, "create a folder in")(error.error))?;
        Ok(Self { target: target.to_owned(), temporary, checksums: Checksums::default(), discarding: false })
    }

    /// A folder that discards all data, to plan or measure the memory of saving.
    pub fn discarding() -> Self {
        Self { target: PathBuf::new(), temporary: PathBuf::new(), checksums: Checksums::default(), discarding: true }
    }

    /// Folder for files that the methods below do not write.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Writes a safetensors file `name` (may contain `/`); see [`write_safetensors`].
    ///
    /// # Errors
    /// Like [`write_safetensors`].
    pub fn write_tensors<N: AsRef<str>>(
        &mut self,
        name: &str,
        tensors: &[(N, &Tensor)],
        metadata: &BTreeMap<String, String>,
    ) -> Result<()> {
        if self.discarding {
            return stream(Path::new(name), &mut io::sink(), tensors, metadata);
        }
        let path = self.prepare(name)?;
        let sum = write_with(&path, |out| stream(&path, out, tensors, metadata))?;
        self.checksums.files.insert(name.to_owned(), sum);
        Ok(())
    }

    /// Writes a safetensors file `name` (may contain `/`). `read` returns the tensors one at a time; they must match
    /// `specs`.
    ///
    /// # Errors
    /// Like [`write_safetensors`], and errors of `read`.
    pub fn write_one_by_one(
        &mut self,
        name: &str,
        specs: &[TensorSpec],
        read: &mut dyn FnMut(&str) -> Result<Tensor>,
    ) -> Result<()> {
        let path = self.prepare(name)?;
        let sum = write_with(&path, |out| one_by_one(&path, out, specs, &BTreeMap::new(), read))?;
        self.checksums.files.insert(name.to_owned(), sum);
        Ok(())
    }

    /// Writes a file `name` (may contain `/`).
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write_bytes(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        if self.discarding {
            return Ok(());
        }
        let path = self.prepare(name)?;
        let sum = write_with(&path, |out| out.write_all(bytes).map_err(Error::io(&path, "write")))?;
        self.checksums.files.insert(name.to_owned(), sum);
        Ok(())
    }

    fn prepare(&self, name: &str) -> Result<PathBuf> {
        let path = self.temporary.join(name);
        let folder = parent(&path);
        fs::create_dir_all(&folder).map_err(Error::io(folder, "create"))?;
        Ok(path)
    }

    /// Adds the checksums, syncs everything and publishes the folder in the steps of the module docs.
    ///
    /// # Errors
    /// [`Error::Io`]; the previous content is then still in place.
    pub fn publish(mut self) -> Result<()> {
        if self.discarding {
            return Ok(());
        }
        for name in files_under(&self.temporary)? {
            if !self.checksums.files.contains_key(&name) {
                let path = self.temporary.join(&name);
                let sum = sum_of(&path)?;
                sync(&path)?;
                self.checksums.files.insert(name, sum);
            }
        }
        let checksums = serde_json::to_vec_pretty(&self.checksums).expect("a map of strings is JSON");
        write_bytes(&self.temporary.join(CHECKSUMS), &checksums)?;
        sync_tree(&self.temporary)?;

        let previous = with_suffix(&self.target, ".previous");
        let parent = parent(&self.target);
        let replaces = self.target.exists();
        if replaces {
            fs::rename(&self.target, &previous).map_err(Error::io(&self.target, "rename"))?;
            sync(&parent)?;
        }
        if let Err(error) = fs::rename(&self.temporary, &self.target) {
            if replaces {
                fs::rename(&previous, &self.target).map_err(Error::io(&previous, "rename"))?;
            }
            return Err(Error::io(&self.temporary, "rename")(error));
        }
        sync(&parent)?;
        if replaces {
            // the new content is in place; the next `begin` deletes what cannot be deleted now
            let _ = fs::remove_dir_all(&previous);
            sync(&parent)?;
        }
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if self.discarding {
            return;
        }
        // after `publish` nothing has this name; after an error the next `begin` deletes the rest
        let _ = fs::remove_dir_all(&self.temporary);
    }
}

/// The folder to read for `target`: itself, or `DIR.previous` after a crash between the two renames. Changes nothing.
///
/// # Errors
/// [`Error::Weights`] if there is neither.
pub fn readable_folder(target: &Path) -> Result<PathBuf> {
    let previous = with_suffix(target, ".previous");
    if target.is_dir() {
        Ok(target.to_owned())
    } else if previous.is_dir() {
        Ok(previous)
    } else {
        Err(Error::weights(target, "there is no such folder", "check the path, or train first"))
    }
}

/// Restores the last complete content of `target` and deletes leftovers of a crash. Only the writer may call it.
///
/// # Errors
/// [`Error::Io`].
pub fn recover_folder(target: &Path) -> Result<()> {
    let (previous, parent) = (with_suffix(target, ".previous"), parent(target));
    if !parent.is_dir() {
        return Ok(());
    }
    if previous.is_dir() {
        if target.is_dir() {
            fs::remove_dir_all(&previous).map_err(Error::io(&previous, "delete"))?;
        } else {
            fs::rename(&previous, target).map_err(Error::io(&previous, "rename"))?;
        }
        sync(&parent)?;
    }
    let prefix = with_suffix(target, ".tmp-");
    let prefix = prefix.file_name().unwrap_or_default().to_string_lossy().into_owned();
    for entry in fs::read_dir(&parent).map_err(Error::io(&parent, "list"))? {
        let entry = entry.map_err(Error::io(&parent, "list"))?;
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with(&prefix) && path.is_dir() {
            fs::remove_dir_all(&path).map_err(Error::io(&path, "delete"))?;
        }
    }
    Ok(())
}

/// Checks every file of a published folder against its checksums.
///
/// # Errors
/// [`Error::Weights`] with each file that is missing or has another size or content, or if there are no checksums.
pub fn verify_folder(folder: &Path) -> Result<()> {
    const HINT: &str = "use another checkpoint of the run (`last` or `best`), or copy this one again";
    let path = folder.join(CHECKSUMS);
    let text = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Error::weights(folder, format!("has no `{CHECKSUMS}`, so it is no complete checkpoint"), HINT));
        }
        text => text.map_err(Error::io(&path, "read"))?,
    };
    let checksums: Checksums =
        serde_json::from_slice(&text).map_err(|error| Error::weights(&path, format!("is damaged: {error}"), HINT))?;
    let mut wrong = Vec::new();
    for (name, expected) in &checksums.files {
        let path = folder.join(name);
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => wrong.push(format!("`{name}` is missing")),
            Err(error) => return Err(Error::io(&path, "read")(error)),
            Ok(found) if found.len() != expected.bytes => {
                wrong.push(format!("`{name}` has {} bytes, expected {}", found.len(), expected.bytes));
            }
            Ok(_) if sum_of(&path)? != *expected => wrong.push(format!("`{name}` has another content (SHA-256)")),
            Ok(_) => {}
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(Error::weights(folder, wrong.join("; "), HINT)) }
}

/// Counts and hashes the bytes that are written.
struct Summing<W> {
    inner: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> Write for Summing<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(buffer)?;
        self.hash.update(&buffer[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<W> Summing<W> {
    fn new(inner: W) -> Self {
        Self { inner, hash: Sha256::new(), bytes: 0 }
    }

    fn sum(self) -> Sum {
        Sum { bytes: self.bytes, sha256: format!("{:x}", self.hash.finalize()) }
    }
}

/// Runs `fill` on a temporary file next to `path`, then syncs and renames it. It writes to a device or pipe directly.
fn write_with(path: &Path, fill: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<Sum> {
    if fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        let file = OpenOptions::new().write(true).open(path).map_err(Error::io(path, "open"))?;
        let mut out = Summing::new(&file);
        fill(&mut out)?;
        return Ok(out.sum());
    }
    let folder = parent(path);
    let name = with_suffix(path, ".tmp-");
    let temporary = tempfile::Builder::new()
        .prefix(name.file_name().unwrap_or_default())
        .make_in(&folder, |path| OpenOptions::new().write(true).create_new(true).open(path))
        .map_err(Error::io(&folder, "create a file in"))?;
    let (file, temporary) = temporary.into_parts();
    let mut out = Summing::new(&file);
    fill(&mut out)?;
    let sum = out.sum();
    file.sync_all().map_err(Error::io(path, "write"))?;
    temporary.persist(path).map_err(|error| Error::io(path, "rename")(error.error))?;
    sync(&folder)?;
    Ok(sum)
}

/// The SHA-256 of a file, in hexadecimal digits.
///
/// # Errors
/// [`Error::Io`].
pub fn sha256(path: &Path) -> Result<String> {
    sum_of(path).map(|sum| sum.sha256)
}

fn sum_of(path: &Path) -> Result<Sum> {
    let mut reader = BufReader::with_capacity(CHUNK, File::open(path).map_err(Error::io(path, "open"))?);
    let mut summing = Summing::new(io::sink());
    io::copy(&mut reader.by_ref(), &mut summing).map_err(Error::io(path, "read"))?;
    Ok(summing.sum())
}

/// Names of all files below `folder`, with `/` between the parts.
fn files_under(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::io(folder, "list"))? {
        let entry = entry.map_err(Error::io(folder, "list"))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.path().is_dir() {
            names.extend(files_under(&entry.path())?.into_iter().map(|inner| format!("{name}/{inner}")));
        } else {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

fn sync_tree(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::io(folder, "list"))? {
        let path = entry.map_err(Error::io(folder, "list"))?.path();
        if path.is_dir() {
            sync_tree(&path)?;
        }
    }
    sync(folder)
}

fn sync(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::io(path, "sync"))
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => PathBuf::from("."),
        Some(parent) => parent.to_owned(),
        None => path.to_owned(),
    }
}

/// `path` with `suffix` after its whole name.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = path.file_name().unwrap_or_default().to_owned();
    name.push(suffix);
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Device, Kind};

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn publish(target: &Path, content: &str) {
        let mut staged = Staged::begin(target).unwrap();
        staged.write_bytes("state.txt", content.as_bytes()).unwrap();
        let tensor = Tensor::ones([3], (Kind::Float, Device::Cpu));
        staged.write_tensors("part/x.safetensors", &[("a", &tensor)], &BTreeMap::new()).unwrap();
        fs::write(staged.path().join("other.txt"), "written by hand").unwrap();
        staged.publish().unwrap();
    }

    fn state(target: &Path) -> String {
        fs::read_to_string(readable_folder(target).unwrap().join("state.txt")).unwrap()
    }

    #[test]
    fn publishing_replaces_the_whole_folder_and_leaves_no_other_files() {
        let run = tempfile::tempdir().unwrap();
        let last = run.path().join("last");
        assert!(readable_folder(&last).is_err());
        for content in ["one", "two"] {
            publish(&last, content);
            assert_eq!(state(&last), content);
            assert_eq!(names(run.path()), ["last"]);
            verify_folder(&last).unwrap();
        }
        assert_eq!(names(&last), [CHECKSUMS, "other.txt", "part", "state.txt"]);
    }

    #[test]
    fn a_dropped_or_killed_writer_keeps_the_old_content() {
        let run = tempfile::tempdir().unwrap();
        let last = run.path().join("last");
        publish(&last, "one");
        let mut staged = Staged::begin(&last).unwrap();
        staged.write_bytes("state.txt", b"two").unwrap();
        drop(staged);
        assert_eq!((state(&last).as_str(), names(run.path())), ("one", vec!["last".to_owned()]));

        // killed while writing: the incomplete folder stays until the next writer starts
        fs::create_dir(run.path().join("last.tmp-dead")).unwrap();
        assert_eq!(state(&last), "one");
        publish(&last, "two");
        assert_eq!(names(run.path()), ["last"]);
    }

    #[test]
    fn a_crash_between_any_two_steps_is_recovered() {
        let run = tempfile::tempdir().unwrap();
        let (last, previous) = (run.path().join("last"), run.path().join("last.previous"));
        // after step 1 only the previous content has a full name
        publish(&last, "one");
        fs::rename(&last, &previous).unwrap();
        fs::create_dir(run.path().join("last.tmp-dead")).unwrap();
        assert_eq!(state(&last), "one");
        recover_folder(&last).unwrap();
        assert_eq!((state(&last).as_str(), names(run.path())), ("one", vec!["last".to_owned()]));
        // after step 2 both exist, and the new content counts
        fs::rename(&last, &previous).unwrap();
        publish_beside(&last, "two");
        assert_eq!(state(&last), "two");
        recover_folder(&last).unwrap();
        assert_eq!((state(&last).as_str(), names(run.path())), ("two", vec!["last".to_owned()]));
    }

    fn publish_beside(last: &Path, content: &str) {
        fs::create_dir(last).unwrap();
        fs::write(last.join("state.txt"), content).unwrap();
    }

    #[test]
    fn verification_names_every_bad_file() {
        let run = tempfile::tempdir().unwrap();
        let last = run.path().join("last");
        publish(&last, "one");
        fs::write(last.join("state.txt"), "two").unwrap();
        fs::write(last.join("other.txt"), "longer than it was before").unwrap();
        fs::remove_file(last.join("part/x.safetensors")).unwrap();
        let text = verify_folder(&last).unwrap_err().to_string();
        for part in ["`state.txt` has another content", "`other.txt` has 25 bytes", "`part/x.safetensors` is missing"] {
            assert!(text.contains(part), "{text}");
        }
        fs::remove_file(last.join(CHECKSUMS)).unwrap();
        assert!(verify_folder(&last).unwrap_err().to_string().contains("no complete checkpoint"));
    }

    #[test]
    fn a_full_disk_gives_an_error_with_a_hint() {
        let full = Path::new("/dev/full");
        if !full.exists() {
            return;
        }
        let tensor = Tensor::ones([3], (Kind::Float, Device::Cpu));
        let mut out = OpenOptions::new().write(true).open(full).unwrap();
        let error = stream(full, &mut out, &[("a", &tensor)], &BTreeMap::new()).unwrap_err();
        assert!(matches!(&error, Error::Io { action: "write", .. }), "{error}");
        assert!(error.hint().contains("free some space"), "{}", error.hint());
    }

    #[test]
    fn a_device_is_written_to_directly() {
        let full = Path::new("/dev/full");
        if !full.exists() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(full, &link).unwrap();
        assert!(write_bytes(&link, b"x").unwrap_err().hint().contains("free some space"));
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink() && names(folder.path()) == ["link"]);
    }

    #[test]
    fn a_failed_write_keeps_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.json");
        write_bytes(&file, b"old").unwrap();
        let result = write_with(&file, |out| {
            out.write_all(b"half").unwrap();
            Err(Error::Interrupted)
        });
        assert!(result.is_err());
        assert_eq!(fs::read(&file).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["x.json"]);
    }
}
