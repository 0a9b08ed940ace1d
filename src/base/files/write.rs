//! The one writer of files and folders below an output folder, the cache and temporary folders.
//!
//! * A new file is written as `.NAME.prsmed-tmp-XXXXXX` in its own folder, synced and renamed to `NAME`. After a crash
//!   the old content or the complete new content is there.
//! * A new folder is written as `.NAME.prsmed-tmp-XXXXXX` too. [`NewFolder::replace`] publishes it in three steps and
//!   syncs the parent folder after each of them:
//!   1. it renames `NAME` to `.NAME.prsmed-previous`, if there is a `NAME`,
//!   2. it renames the new folder to `NAME`,
//!   3. it renames `.NAME.prsmed-previous` to a temporary name and deletes it.
//!
//!   So at every moment `NAME` is complete, or `.NAME.prsmed-previous` is (between 1 and 2).
//! * A file that is changed in place is opened without following a symbolic link.
//! * Only folders of this program are renamed or deleted, see [`is_ours`].
//! * A writer locks its temporary file or folder. [`clear_leftovers`] deletes those that a crash has left, which nobody
//!   locks. It also deletes a `.NAME.prsmed-previous` whose `NAME` is complete (a crash between 2 and 3).

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use tempfile::{NamedTempFile, TempPath};

/// Name of the file with checksums in every complete folder that this program writes.
pub const CHECKSUMS: &str = "checksums.json";
/// Name of an empty file in a folder that this program has not completed.
const UNFINISHED: &str = ".prsmed-unfinished";
const TEMPORARY: &str = ".prsmed-tmp-";
const PREVIOUS: &str = ".prsmed-previous";
/// Length of the random end of a temporary name.
const RANDOM_CHARS: usize = 6;
/// Attempts to create a temporary file while another process clears leftovers.
const ATTEMPTS: usize = 100;

/// A file under a temporary name, until [`NewFile::publish`]. If it is dropped before, it is deleted.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    temporary: TempPath,
    target: PathBuf,
}

impl NewFile {
    /// Creates a file that becomes `target`, in the existing folder of `target`.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn create(target: &Path) -> io::Result<Self> {
        for _ in 0..ATTEMPTS {
            let create = |path: &Path| OpenOptions::new().write(true).create_new(true).open(path);
            let made = make_temporary(target, create)?;
            let (file, temporary) = made.into_parts();
            if is_locked_by_us(&file)? {
                return Ok(Self { file, temporary, target: target.to_owned() });
            }
        }
        Err(taken(target))
    }

    /// Syncs the file and renames it to its target. A file or link of that name is replaced.
    ///
    /// # Errors
    /// Those of the operating system. The old content is then still in place.
    pub fn publish(self) -> io::Result<()> {
        sync(&self.file)?;
        self.temporary.persist(&self.target).map_err(|error| error.error)?;
        sync_folder(&parent(&self.target))
    }
}

impl Write for NewFile {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.file.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes `bytes` to `path`, atomically. A link of that name is replaced, not followed.
///
/// # Errors
/// Those of the operating system.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = NewFile::create(path)?;
    file.write_all(bytes)?;
    file.publish()
}

/// Writes `bytes` to a path that the user named: atomically, or directly to a device or pipe (`/dev/stdout`).
///
/// # Errors
/// Those of the operating system.
pub fn write_output(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        return OpenOptions::new().write(true).open(path)?.write_all(bytes);
    }
    write(path, bytes)
}

/// Opens a regular file to read it and to change it in place; creates it if it is missing. Follows no symbolic link.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for a link, pipe or device; other errors of the operating system.
pub fn open_to_change(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let file = options
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|error| if error.raw_os_error() == Some(libc::ELOOP) { link(path) } else { error })?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file: remove it, or choose another folder"))
}

/// Creates a folder with its parents. The entries of new folders are synced.
///
/// # Errors
/// Those of the operating system.
pub fn create_folders(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    let parent = parent(folder);
    let mut created = fs::create_dir(folder);
    if parent != folder && matches!(&created, Err(error) if error.kind() == io::ErrorKind::NotFound) {
        create_folders(&parent)?;
        created = fs::create_dir(folder);
    }
    match created {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists || !folder.is_dir() => Err(error),
        _ => sync_folder(&parent),
    }
}

/// Creates the folders of `folder` below `root`, which exists. None of them may be a symbolic link.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for a link, or a `folder` that is not below `root`; errors of the operating system.
pub fn create_below(root: &Path, folder: &Path) -> io::Result<()> {
    let outside = || io::Error::new(io::ErrorKind::InvalidInput, format!("it is not below `{}`", root.display()));
    let mut path = root.to_owned();
    for part in folder.strip_prefix(root).map_err(|_| outside())?.components() {
        let Component::Normal(name) = part else { return Err(outside()) };
        path.push(name);
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_symlink() => return Err(link(&path)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => create_folders(&path)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A folder under a temporary name, until it is published. If it is dropped before, it is deleted.
#[derive(Debug)]
pub struct NewFolder {
    path: PathBuf,
    target: PathBuf,
    _lock: File,
}

impl NewFolder {
    /// Creates an empty folder that becomes `target`, and the parents of `target`.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn create(target: &Path) -> io::Result<Self> {
        let parent = parent(target);
        create_folders(&parent)?;
        for _ in 0..ATTEMPTS {
            // not `tempdir_in`, which makes the folder private: a checkpoint is as readable as the user's other files
            let made = make_temporary(target, |path| fs::create_dir(path))?;
            let path = made.into_temp_path().keep().map_err(|error| error.error)?;
            let lock = File::open(&path);
            // another process may have cleared the empty folder meanwhile
            if let Ok(lock) = lock
                && is_locked_by_us(&lock)?
                && File::create_new(path.join(UNFINISHED)).is_ok()
            {
                return Ok(Self { path, target: target.to_owned(), _lock: lock });
            }
        }
        Err(taken(target))
    }

    /// Its temporary path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Publishes the folder, which must contain [`CHECKSUMS`], under a name that does not exist.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] if there is something of this name; other errors of the operating system.
    pub fn publish(self) -> io::Result<()> {
        self.complete()?;
        if fs::symlink_metadata(&self.target).is_ok() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it exists already: choose another folder"));
        }
        // this system call fails if another process has made a folder with content meanwhile
        fs::rename(&self.path, &self.target)?;
        sync_folder(&parent(&self.target))
    }

    /// Publishes the folder, which must contain [`CHECKSUMS`], in place of an older one of this program.
    ///
    /// # Errors
    /// As [`check_replaceable`]; other errors of the operating system. The previous content is then still readable.
    pub fn replace(self) -> io::Result<()> {
        self.complete()?;
        check_replaceable(&self.target)?;
        let (previous, parent) = (previous(&self.target), parent(&self.target));
        let replaces = self.target.exists();
        let mut renamed = Ok(());
        if replaces {
            discard(&previous)?;
            fs::rename(&self.target, &previous)?;
            renamed = sync_folder(&parent);
        }
        if let Err(error) = renamed.and_then(|()| fs::rename(&self.path, &self.target)) {
            if replaces {
                fs::rename(&previous, &self.target)?;
            }
            return Err(error);
        }
        sync_folder(&parent)?;
        // the new content is in place: the next writer deletes what cannot be deleted now
        let _ = discard(&previous);
        sync_folder(&parent)
    }

    /// Syncs the folder, and marks it as complete.
    fn complete(&self) -> io::Result<()> {
        sync_folders(&self.path)?;
        fs::remove_file(self.path.join(UNFINISHED))?;
        sync_folder(&self.path)
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // after it was published nothing has this name; after an error the next writer deletes the rest
        let _ = remove_ours(&self.path);
    }
}

/// True for a folder that this program has written: it contains [`CHECKSUMS`], or the marker of an unfinished folder.
pub fn is_ours(folder: &Path) -> bool {
    let is_file = |name: &str| fs::symlink_metadata(folder.join(name)).is_ok_and(|found| found.is_file());
    fs::symlink_metadata(folder).is_ok_and(|found| found.is_dir()) && [CHECKSUMS, UNFINISHED].into_iter().any(is_file)
}

/// Refuses a `target` that [`NewFolder::replace`] must not replace.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] for a link, a file, or a folder that this program has not written.
pub fn check_replaceable(target: &Path) -> io::Result<()> {
    for path in [target.to_owned(), previous(target)] {
        if fs::symlink_metadata(&path).is_ok() && !is_ours(&path) {
            let reason = format!("`{}` was not written by prsmed (no `{CHECKSUMS}`): move it away", path.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, reason));
        }
    }
    Ok(())
}

/// Name of the folder that [`NewFolder::replace`] keeps until the new content of `target` is in place.
pub fn previous(target: &Path) -> PathBuf {
    target.with_file_name(hidden(target, PREVIOUS))
}

/// Name of the folder whose previous content has this name.
fn target_of_previous(name: &OsStr) -> Option<&str> {
    name.to_str()?.strip_prefix('.')?.strip_suffix(PREVIOUS).filter(|target| !target.is_empty())
}

/// True for a folder that this program has completed.
fn is_complete(folder: &Path) -> bool {
    is_ours(folder) && fs::symlink_metadata(folder.join(UNFINISHED)).is_err()
}

/// Deletes what a crash has left in `folder`: temporary files and folders, and the previous content of folders that are
/// complete. Those of running processes are locked and stay, and so does everything on a file system without locks.
///
/// # Errors
/// Those of the operating system.
pub fn clear_leftovers(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (kind, name) = (entry.file_type()?, entry.file_name());
        let cleared = if is_temporary(&name) && (kind.is_file() || kind.is_dir()) {
            clear(&entry.path(), kind.is_dir())
        } else if target_of_previous(&name).is_some_and(|target| is_complete(&folder.join(target))) {
            // the new content may not be on disk yet
            sync_folder(folder).and_then(|()| discard(&entry.path()))
        } else {
            Ok(())
        };
        unless_missing(cleared)?;
    }
    Ok(())
}

/// Deletes the temporary folders for `target` that a crash has left: unfinished ones, and those that `is_complete`
/// recognizes. Those of running processes are locked and stay, and so does everything else next to `target`.
///
/// # Errors
/// Those of the operating system.
pub fn clear_leftovers_of(target: &Path, is_complete: impl Fn(&Path) -> bool) -> io::Result<()> {
    let prefix = hidden(target, TEMPORARY);
    for entry in fs::read_dir(parent(target))? {
        let entry = entry?;
        let (name, path) = (entry.file_name(), entry.path());
        let is_own = is_temporary(&name) && name.as_encoded_bytes().starts_with(prefix.as_encoded_bytes());
        let is_unfinished = || fs::symlink_metadata(path.join(UNFINISHED)).is_ok_and(|found| found.is_file());
        let has_checksums = || fs::symlink_metadata(path.join(CHECKSUMS)).is_ok();
        if is_own
            && entry.file_type()?.is_dir()
            // without marker and checksums, only an empty folder is deleted
            && (is_unfinished() || !has_checksums() || is_complete(&path))
        {
            unless_missing(clear(&path, true))?;
        }
    }
    Ok(())
}

fn clear(path: &Path, is_folder: bool) -> io::Result<()> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if file.try_lock().is_err() {
        return Ok(());
    }
    if !is_folder {
        return fs::remove_file(path);
    }
    if is_ours(path) {
        return remove_ours(path);
    }
    // a crash before the marker was written leaves an empty folder
    let _ = fs::remove_dir(path);
    Ok(())
}

/// Deletes a folder of this program, if there is one. It first gets a temporary name, so that no reader takes it for
/// complete.
///
/// # Errors
/// Those of the operating system.
pub fn discard(folder: &Path) -> io::Result<()> {
    if !is_ours(folder) {
        return Ok(());
    }
    let renamed = make_temporary(folder, |path| fs::rename(folder, path))?;
    remove_ours(&renamed.into_temp_path().keep().map_err(|error| error.error)?)
}

/// Deletes a folder of this program. The files that show whose it is are deleted last, so that the next writer can
/// continue after a crash.
fn remove_ours(folder: &Path) -> io::Result<()> {
    let markers = [CHECKSUMS, UNFINISHED];
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else if !markers.iter().any(|name| entry.file_name() == *name) {
            fs::remove_file(entry.path())?;
        }
    }
    markers.iter().try_for_each(|name| unless_missing(fs::remove_file(folder.join(name))))?;
    fs::remove_dir(folder)
}

/// A result that is also good if there is no such file: nothing has to be deleted.
///
/// # Errors
/// All others.
pub fn unless_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder) {
        // a folder may be writable and not readable
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        opened => sync(&opened?),
    }
}

/// Waits until a file or folder is on disk. File systems that cannot sync it are tolerated.
///
/// # Errors
/// Those of the operating system.
pub fn sync(file: &File) -> io::Result<()> {
    tolerate_no_sync(file.sync_all())
}

/// Replaces the error of a file system that cannot sync.
fn tolerate_no_sync(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if [libc::EINVAL, libc::ENOTSUP, libc::ENOSYS].map(Some).contains(&error.raw_os_error()) => Ok(()),
        other => other,
    }
}

fn sync_folders(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_folders(&entry.path())?;
        }
    }
    sync_folder(folder)
}

/// Locks a new temporary file or folder. False if another process clears it as a leftover.
fn is_locked_by_us(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Ok(false),
        // on a file system without locks nobody clears leftovers
        Ok(()) | Err(TryLockError::Error(_)) => Ok(file.metadata()?.nlink() > 0),
    }
}

/// Creates something with `create` under a temporary name for `target`.
fn make_temporary<T>(target: &Path, create: impl FnMut(&Path) -> io::Result<T>) -> io::Result<NamedTempFile<T>> {
    let prefix = hidden(target, TEMPORARY);
    tempfile::Builder::new().prefix(&prefix).rand_bytes(RANDOM_CHARS).make_in(parent(target), create)
}

fn is_temporary(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let parts = name.strip_prefix('.').and_then(|name| name.rsplit_once(TEMPORARY));
    let is_random = |end: &str| end.len() == RANDOM_CHARS && end.bytes().all(|byte| byte.is_ascii_alphanumeric());
    parts.is_some_and(|(target, end)| !target.is_empty() && is_random(end))
}

/// `.NAME` with `suffix`, for the name of `path`.
fn hidden(path: &Path, suffix: &str) -> OsString {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(suffix);
    name
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => PathBuf::from("."),
        Some(parent) => parent.to_owned(),
        None => path.to_owned(),
    }
}

fn link(path: &Path) -> io::Error {
    let reason = format!("`{}` is a symbolic link, which prsmed does not write through: remove it", path.display());
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

fn taken(target: &Path) -> io::Error {
    let reason = format!("another process deletes the temporary files of `{}`", target.display());
    io::Error::new(io::ErrorKind::ResourceBusy, reason)
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
