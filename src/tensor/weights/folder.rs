//! Checkpoint folders with SHA-256 sums of their files in `checksums.json`, and single weight files.
//!
//! [`prsmed_base::files`] writes them, so that a folder or file is complete or the old one is there. [`readable_folder`] finds
//! the complete one. Only one process at a time may replace a folder. Others may read it meanwhile with
//! [`read_unchanged`].

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use sha2::{Digest, Sha256};
use tch::Tensor;

use super::stream::{CHUNK, TensorSpec, all as stream, one_by_one};
use prsmed_base::error::{Error, Result};
use prsmed_base::files::{self, NewFile, NewFolder};

pub use prsmed_base::files::{CHECKSUMS, sha256, write_bytes};

/// Most damaged files that a message names.
const MAX_SHOWN: usize = 20;
/// Most bytes of a file name with its folders.
const MAX_NAME: usize = 1000;
/// How often a folder is read again because a training has replaced it.
const ATTEMPTS: usize = 100;

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

/// A folder that is being written. If it is dropped without [`Staged::publish`], it is deleted.
#[derive(Debug)]
pub struct Staged {
    target: PathBuf,
    /// `None` discards all data.
    folder: Option<NewFolder>,
    checksums: Checksums,
    replaces: bool,
}

impl Staged {
    /// Starts new content for the folder `target`, which may contain older content, and clears what a crash has left
    /// next to it.
    ///
    /// # Errors
    /// [`Error::Io`], also for a `target` that this program has not written.
    pub fn begin(target: &Path) -> Result<Self> {
        files::check_replaceable(target).map_err(Error::io(target, "replace"))?;
        let staged = Self::at(target, true)?;
        let parent = parent(target);
        files::clear_leftovers(&parent).map_err(Error::io(&parent, "clear temporary files in"))?;
        Ok(staged)
    }

    /// Starts a folder `target` that does not exist, and clears what a crash of an earlier attempt has left. Everything
    /// else next to it stays as it is.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(target: &Path) -> Result<Self> {
        let staged = Self::at(target, false)?;
        let parent = parent(target);
        files::clear_leftovers_of(target, lists_all_files).map_err(Error::io(&parent, "clear temporary files in"))?;
        Ok(staged)
    }

    fn at(target: &Path, replaces: bool) -> Result<Self> {
        let folder = NewFolder::create(target).map_err(Error::io(target, "create a temporary folder for"))?;
        Ok(Self { target: target.to_owned(), folder: Some(folder), checksums: Checksums::default(), replaces })
    }

    /// A folder that discards all data, to plan or measure the memory of saving.
    pub fn discarding() -> Self {
        Self { target: PathBuf::new(), folder: None, checksums: Checksums::default(), replaces: false }
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
        self.write(name, |path, out| stream(path, out, tensors, metadata))
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
        self.write(name, |path, out| one_by_one(path, out, specs, &BTreeMap::new(), read))
    }

    /// Writes a file `name` (may contain `/`).
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write_bytes(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.write(name, |path, out| out.write_all(bytes).map_err(Error::io(path, "write")))
    }

    /// Copies the file `name` of the folder `source`.
    fn copy(&mut self, name: &str, source: &Path) -> Result<()> {
        let path = source.join(name);
        let mut file = files::open(&path).map_err(Error::io(&path, "read"))?;
        self.write(name, |to, out| io::copy(&mut file, out).map(drop).map_err(Error::io(to, "write")))
    }

    /// Writes a file and notes its checksum.
    fn write(&mut self, name: &str, fill: impl FnOnce(&Path, &mut dyn Write) -> Result<()>) -> Result<()> {
        let Some(folder) = &self.folder else { return fill(Path::new(name), &mut io::sink()) };
        let path = folder.path().join(name);
        let inside = parent(&path);
        files::create_folders(&inside).map_err(Error::io(&inside, "create"))?;
        let sum = write_with(&path, |out| fill(&path, out))?;
        self.checksums.files.insert(name.to_owned(), sum);
        Ok(())
    }

    /// Adds the checksums, syncs everything and publishes the folder.
    ///
    /// # Errors
    /// [`Error::Io`]; the previous content is then still in place.
    pub fn publish(self) -> Result<()> {
        let Some(folder) = self.folder else { return Ok(()) };
        let checksums = serde_json::to_vec_pretty(&self.checksums).expect("a map of strings is JSON");
        write_bytes(&folder.path().join(CHECKSUMS), &checksums)?;
        let published = if self.replaces { folder.replace() } else { folder.publish() };
        published.map_err(Error::io(self.target, "publish"))
    }
}

/// Copies the complete checkpoint folder `source` to `target`, which does not exist.
///
/// # Errors
/// [`Error::Weights`] for a folder that is not complete; [`Error::Io`].
pub fn copy_folder(source: &Path, target: &Path) -> Result<()> {
    verify_folder(source)?;
    let mut staged = Staged::create(target)?;
    for name in read_checksums(source)?.files.keys() {
        staged.copy(name, source)?;
    }
    staged.publish()
}

/// Replaces `target` by a copy of the complete checkpoint folder `source` in which the file `changed.0` has the content
/// `changed.1`.
///
/// # Errors
/// As [`copy_folder`]; [`Error::Io`] for a `target` that this program has not written.
pub fn replace_folder(source: &Path, target: &Path, changed: (&str, &[u8])) -> Result<()> {
    verify_folder(source)?;
    let mut staged = Staged::begin(target)?;
    for name in read_checksums(source)?.files.keys().filter(|name| *name != changed.0) {
        staged.copy(name, source)?;
    }
    staged.write_bytes(changed.0, changed.1)?;
    staged.publish()
}

/// The folder to read for `target`: itself, or the previous content after a crash between the two renames of
/// [`NewFolder::replace`]. Older versions called that `DIR.previous`. Changes nothing.
///
/// # Errors
/// [`Error::Weights`] if there is none.
pub fn readable_folder(target: &Path) -> Result<PathBuf> {
    // repeated, since another process may rename both between the tests
    for _ in 0..ATTEMPTS {
        if target.is_dir() {
            return Ok(target.to_owned());
        }
        let previous = [files::previous(target), with_suffix(target, ".previous")];
        if let Some(previous) = previous.into_iter().find(|folder| files::is_ours(folder)) {
            return Ok(previous);
        }
    }
    Err(Error::weights(target, "there is no such folder", "check the path, or train first"))
}

/// Reads a checkpoint folder that a training may replace meanwhile. `find` names the folder and `read` reads it. Both are
/// repeated until the folder is the same before and after, so that everything belongs to one checkpoint.
///
/// # Errors
/// Those of `find` and of `read`; [`Error::Weights`] for a folder that is replaced all the time.
pub fn read_unchanged<T>(find: impl Fn() -> Result<PathBuf>, read: impl Fn(&Path) -> Result<T>) -> Result<T> {
    let mut path = PathBuf::new();
    for _ in 0..ATTEMPTS {
        path = find()?;
        // the number of an open folder is not given to another one
        let folder = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            opened => opened.map_err(Error::io(&path, "open"))?,
        };
        let result = read(&path);
        if is_same(&folder, &path) {
            return result;
        }
    }
    let reason = format!("was replaced {ATTEMPTS} times while it was read");
    Err(Error::weights(path, reason, "copy the folder, or read it after the training has ended"))
}

/// True if `path` still names the open `folder`.
fn is_same(folder: &File, path: &Path) -> bool {
    let number = |found: &fs::Metadata| (found.dev(), found.ino());
    matches!((folder.metadata(), fs::metadata(path)), (Ok(before), Ok(now)) if number(&before) == number(&now))
}

const VERIFY_HINT: &str = "use another checkpoint of the run (`last` or `best`), or copy this one again";

/// Checks every file of a published folder against its checksums.
///
/// # Errors
/// [`Error::Weights`] with each file that is missing or has another size or content, or if there are no checksums.
pub fn verify_folder(folder: &Path) -> Result<()> {
    verify_folder_without(folder, &[])
}

/// As [`verify_folder`], for a reader that does not need the files `optional`: they may be missing.
///
/// # Errors
/// As [`verify_folder`].
pub fn verify_folder_without(folder: &Path, optional: &[&str]) -> Result<()> {
    let mut wrong = Vec::new();
    for (name, expected) in &read_checksums(folder)?.files {
        let path = folder.join(name);
        match files::open(&path).and_then(|file| Ok(file.metadata()?.len())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && optional.contains(&name.as_str()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => wrong.push(format!("`{name}` is missing")),
            Err(error) => return Err(Error::io(&path, "read")(error)),
            Ok(found) if found != expected.bytes => {
                wrong.push(format!("`{name}` has {found} bytes, expected {}", expected.bytes));
            }
            Ok(_) if sum_of(&path)? != *expected => wrong.push(format!("`{name}` has another content (SHA-256)")),
            Ok(_) => {}
        }
    }
    match wrong.len().checked_sub(MAX_SHOWN) {
        _ if wrong.is_empty() => return Ok(()),
        Some(more @ 1..) => wrong.splice(MAX_SHOWN.., [format!("and {more} more")]).for_each(drop),
        _ => {}
    }
    Err(Error::weights(folder, wrong.join("; "), VERIFY_HINT))
}

/// The checksums of a folder. They may only name files inside of it.
fn read_checksums(folder: &Path) -> Result<Checksums> {
    let path = folder.join(CHECKSUMS);
    let text = match files::read(&path, files::MAX_TEXT) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let reason = format!("has no `{CHECKSUMS}`, so it is no complete checkpoint");
            return Err(Error::weights(folder, reason, VERIFY_HINT));
        }
        text => text.map_err(Error::io(&path, "read"))?,
    };
    let checksums: Checksums = serde_json::from_slice(&text)
        .map_err(|error| Error::weights(&path, format!("is damaged: {error}"), VERIFY_HINT))?;
    let is_inside = |name: &str| {
        let is_plain = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        (1..=MAX_NAME).contains(&name.len()) && is_plain
    };
    let Some(name) = checksums.files.keys().find(|name| !is_inside(name)) else { return Ok(checksums) };
    let reason = format!("names `{name}`, which is not a file in its folder");
    Err(Error::weights(&path, reason, "do not use this checkpoint: checksums must name files of their own folder"))
}

/// True if the checksums of a folder name all of its files, and no others.
fn lists_all_files(folder: &Path) -> bool {
    let Ok(checksums) = read_checksums(folder) else { return false };
    let (mut left, mut found) = (vec![folder.to_owned()], 0);
    while let Some(next) = left.pop() {
        let Ok(entries) = fs::read_dir(&next) else { return false };
        for entry in entries {
            let Ok((kind, path)) = entry.and_then(|entry| Ok((entry.file_type()?, entry.path()))) else { return false };
            let name = path.strip_prefix(folder).unwrap_or(&path).to_string_lossy().into_owned();
            if kind.is_dir() {
                left.push(path);
            } else if checksums.files.contains_key(&name) && kind.is_file() {
                found += 1;
            } else if name != CHECKSUMS {
                return false;
            }
        }
    }
    found == checksums.files.len()
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

    fn finish(self) -> (W, Sum) {
        (self.inner, Sum { bytes: self.bytes, sha256: format!("{:x}", self.hash.finalize()) })
    }
}

/// Writes a file with `fill`, atomically.
fn write_with(path: &Path, fill: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<Sum> {
    let mut out = Summing::new(NewFile::create(path).map_err(Error::io(path, "create"))?);
    fill(&mut out)?;
    let (file, sum) = out.finish();
    file.publish().map_err(Error::io(path, "write"))?;
    Ok(sum)
}

fn sum_of(path: &Path) -> Result<Sum> {
    let file = files::open(path).map_err(Error::io(path, "open"))?;
    let mut summing = Summing::new(io::sink());
    io::copy(&mut BufReader::with_capacity(CHUNK, file), &mut summing).map_err(Error::io(path, "read"))?;
    Ok(summing.finish().1)
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
#[path = "folder_tests.rs"]
mod tests;
