//! Reading of files from outside, and writing of files and folders.
//!
//! [`open`] and [`read`] are the only way in which the program reads a file that somebody else may have made: images,
//! CSV files, JSON, weights, tokenizers, manifests. They read regular files only, of a limited size, never a device or a
//! pipe.
//!
//! [`write()`], [`NewFile`], [`NewFolder`] and [`open_to_change`] are the only way in which the program writes below an
//! output folder, the cache and temporary folders. They follow no symbolic links, and nothing that somebody else has
//! made is renamed or deleted.

mod write;

pub use write::{
    CHECKSUMS, NewFile, NewFolder, check_replaceable, clear_leftovers, clear_leftovers_of, create_below,
    create_folders, discard, is_ours, open_to_change, previous, sync, unless_missing, write, write_output,
};

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::Error;

/// Limit of settings and other short JSON and TOML texts, in bytes. Parsed, they may take 100 times the memory.
pub const MAX_SETTINGS: u64 = 1 << 20;
/// Limit of a tokenizer's vocabulary, in bytes. Parsed, it may take 20 times the memory.
pub const MAX_VOCABULARY: u64 = 24 << 20;
/// Limit of other texts that describe something (lists of files or tensors), in bytes.
pub const MAX_TEXT: u64 = 64 << 20;
/// Limit of an image file, in bytes.
pub const MAX_IMAGE: u64 = 1 << 30;
/// Limit of a table (CSV, JSON lines), in bytes.
pub const MAX_TABLE: u64 = 4 << 30;

/// True for a name that begins with a dot: settings and notes of other programs, such as the `._0001.png` that macOS writes
/// beside `0001.png` on disks of other systems.
pub fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))
}

/// The paths in a folder but for hidden ones, sorted.
///
/// # Errors
/// [`Error::Io`].
pub fn visible_entries(folder: &Path) -> crate::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    let mut paths: Vec<PathBuf> = entries.map_err(Error::io(folder, "read"))?;
    paths.retain(|path| !is_hidden(path));
    paths.sort();
    Ok(paths)
}

/// Opens a regular file to read it. Symbolic links are followed.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for a folder, pipe, device or socket (a pipe does not block); other errors of the
/// operating system.
pub fn open(path: &Path) -> io::Result<File> {
    // without O_NONBLOCK, opening a pipe waits for its writer; regular files ignore the flag
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file (a folder, pipe or device)"))
}

/// Reads a whole regular file of at most `max` bytes.
///
/// # Errors
/// As [`open`]; [`io::ErrorKind::FileTooLarge`] for a larger file, also one that grows while it is read.
pub fn read(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let too_large = || io::Error::new(io::ErrorKind::FileTooLarge, format!("it is larger than {max} bytes"));
    let size = file.metadata()?.len();
    if size > max {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
    file.take(max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max { Err(too_large()) } else { Ok(bytes) }
}

/// Reads a whole regular UTF-8 file of at most `max` bytes.
///
/// # Errors
/// As [`read`]; [`io::ErrorKind::InvalidData`] for text that is not UTF-8.
pub fn read_to_string(path: &Path, max: u64) -> io::Result<String> {
    String::from_utf8(read(path, max)?).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))
}

/// Writes `bytes` to `path`, atomically, and without following a link.
///
/// # Errors
/// [`Error::Io`].
pub fn write_bytes(path: &Path, bytes: &[u8]) -> crate::Result<()> {
    write(path, bytes).map_err(Error::io(path, "write"))
}

/// The SHA-256 of a file, in hexadecimal digits.
///
/// # Errors
/// [`Error::Io`].
pub fn sha256(path: &Path) -> crate::Result<String> {
    let mut file = open(path).map_err(Error::io(path, "open"))?;
    let mut hash = Sha256::new();
    io::copy(&mut file, &mut hash).map_err(Error::io(path, "read"))?;
    Ok(format!("{:x}", hash.finalize()))
}

/// Serialises a path as text. Bytes that are not UTF-8, an error otherwise, become the replacement character.
///
/// # Errors
/// Those of the serialiser.
pub fn serialize_path<S: serde::Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn pipes_devices_folders_and_large_files_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        let name = std::ffi::CString::new(pipe.to_str().expect("a path")).expect("no NUL");
        // SAFETY: a NUL-terminated path.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let kind = |path: &Path| read(path, 10).expect_err("refused").kind();
        for path in [pipe.as_path(), Path::new("/dev/zero"), folder.path()] {
            assert_eq!(kind(path), io::ErrorKind::InvalidInput, "{}", path.display());
        }
        let file = folder.path().join("file");
        fs::write(&file, "0123456789").expect("written");
        assert_eq!(read(&file, 10).expect("fits"), b"0123456789");
        assert_eq!(read(&file, 9).expect_err("too large").kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(kind(&folder.path().join("nothing")), io::ErrorKind::NotFound);
    }
}
