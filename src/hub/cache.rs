//! The cache of Python's client on disk: `models--owner--name/{blobs, refs, snapshots}` and `.locks`.
//!
//! A blob contains a file and has its hash as name. A snapshot is a folder of links to blobs. Below the cache folder,
//! nothing is written through a symbolic link: a cache that somebody copied to this machine may contain links to other
//! places.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest, Sha256};

use prsmed_base::error::{Error, Result};
use prsmed_base::files;

/// Seconds for which a lock of another process is awaited.
const LOCK_SECONDS: u32 = 5;
const CHUNK: usize = 1 << 20;

/// The cache of one repository.
pub(super) struct RepoCache<'a> {
    /// The cache folder.
    pub(super) folder: &'a Path,
    /// `models--owner--name` or `datasets--owner--name`.
    pub(super) name: String,
}

impl RepoCache<'_> {
    pub(super) fn blobs(&self) -> PathBuf {
        self.folder.join(&self.name).join("blobs")
    }

    pub(super) fn snapshots(&self) -> PathBuf {
        self.folder.join(&self.name).join("snapshots")
    }

    /// The commit of a branch or tag, if it is known.
    pub(super) fn commit_of(&self, revision: &str) -> Option<String> {
        let path = self.folder.join(&self.name).join("refs").join(revision);
        files::read_to_string(&path, files::MAX_TEXT).ok().map(|text| text.trim().to_owned())
    }

    /// Stores the commit of a branch or tag.
    pub(super) fn set_commit(&self, revision: &str, commit: &str) -> Result<()> {
        if self.commit_of(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let inside = Path::new(&self.name).join("refs").join(revision);
        let folder = self.make_folder(inside.parent().unwrap_or(&inside))?;
        let path = self.folder.join(&inside);
        files::write_bytes(&path, commit.as_bytes())?;
        files::clear_leftovers(&folder).map_err(Error::io(&folder, "clear temporary files in"))
    }

    /// Creates the folder `inside` the cache folder. The cache folder may be a link, the folders inside may not.
    pub(super) fn make_folder(&self, inside: &Path) -> Result<PathBuf> {
        fs::create_dir_all(self.folder).map_err(Error::io(self.folder, "create"))?;
        let mut folder = self.folder.to_owned();
        for part in inside.components() {
            folder.push(part);
            match fs::create_dir(&folder) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists && !folder.exists() => {
                    return Err(Error::io(&folder, "create")(error));
                }
                _ if fs::symlink_metadata(&folder).is_ok_and(|meta| meta.is_dir()) => {}
                _ => return Err(not_a_folder(&folder)),
            }
        }
        Ok(folder)
    }

    /// Locks a blob as Python's client does, until the file is closed; `None` if another process keeps the lock.
    pub(super) fn lock(&self, etag: &str) -> Result<Option<File>> {
        let folder = self.make_folder(&Path::new(".locks").join(&self.name))?;
        let path = folder.join(format!("{etag}.lock"));
        let file = open_own(&path).map_err(Error::io(&path, "open"))?;
        for _ in 0..LOCK_SECONDS {
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_secs(1)),
                // on a file system without locks, the hash detects two downloads into one file
                Ok(()) | Err(TryLockError::Error(_)) => return Ok(Some(file)),
            }
        }
        Ok(None)
    }

    /// Makes a complete download a blob. It is on disk before it has its name.
    pub(super) fn publish(&self, part: &Path, file: &File, etag: &str) -> Result<()> {
        let (folder, blob) = (self.blobs(), self.blobs().join(etag));
        file.sync_all().map_err(Error::io(part, "write"))?;
        fs::rename(part, &blob).map_err(Error::io(part, "rename"))?;
        File::open(&folder).and_then(|folder| files::sync(&folder)).map_err(Error::io(&folder, "write"))
    }

    /// Links a file of a snapshot to its blob, with a relative link like that of Python's client.
    pub(super) fn link(&self, etag: &str, commit: &str, name: &str) -> Result<()> {
        let inside = Path::new(&self.name).join("snapshots").join(commit).join(name);
        let parent = inside.parent().unwrap_or(&inside);
        self.make_folder(parent)?;
        let target: PathBuf = std::iter::repeat_n("..", parent.components().count() - 1).collect();
        let pointer = self.folder.join(&inside);
        remove(&pointer)?;
        match symlink(target.join("blobs").join(etag), &pointer) {
            // another process linked it
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            result => result.map_err(Error::io(&pointer, "link")),
        }
    }
}

fn not_a_folder(path: &Path) -> Error {
    let reason = format!("`{}` is a link or a file, and downloads are written to real folders only", path.display());
    Error::config("HF_HUB_CACHE", reason, "delete it, or set HF_HUB_CACHE to the folder that you want to use")
}

/// Opens a file of the cache to read and write it. A link, or a file that has another name elsewhere, is replaced.
pub(super) fn open_own(path: &Path) -> io::Result<File> {
    if fs::symlink_metadata(path).is_ok_and(|meta| !meta.is_file() || meta.nlink() > 1) {
        fs::remove_file(path)?;
    }
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    OpenOptions::new().read(true).write(true).create(true).truncate(false).custom_flags(flags).open(path)
}

/// Deletes a file or link, if there is one.
pub(super) fn remove(path: &Path) -> Result<()> {
    files::unless_missing(fs::remove_file(path)).map_err(Error::io(path, "delete"))
}

/// The name of the blob that a file of a snapshot links to: its hash.
pub(super) fn hash_of(pointer: &Path) -> Option<String> {
    let blob = fs::read_link(pointer).ok()?;
    let name = blob.file_name()?.to_str()?;
    (blob.parent()?.file_name()? == "blobs").then(|| name.to_owned())
}

/// Result of the comparison of a file with its hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// The content has the hash.
    Good,
    /// The content has another hash, or is missing; with the reason.
    Damaged(String),
    /// The cache has no hash of this file.
    Unknown,
}

/// Compares a file with an ETag: the SHA-256 of a large file (64 digits), or the SHA-1 that Git gives a small file (40
/// digits; some mirrors give the SHA-1 of the content alone). `on_bytes` gets the number of bytes of each read.
pub(super) fn compare(path: &Path, etag: &str, mut on_bytes: impl FnMut(u64)) -> io::Result<State> {
    let is_hash = matches!(etag.len(), 40 | 64) && etag.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !is_hash {
        return Ok(State::Unknown);
    }
    let mut file = files::open(path)?;
    let header = format!("blob {}\0", file.metadata()?.len());
    let (mut sha256, mut plain, mut git) = (Sha256::new(), Sha1::new(), Sha1::new_with_prefix(header));
    let mut chunk = vec![0; CHUNK];
    loop {
        let count = file.read(&mut chunk)?;
        if count == 0 {
            break;
        }
        if etag.len() == 64 {
            sha256.update(&chunk[..count]);
        } else {
            plain.update(&chunk[..count]);
            git.update(&chunk[..count]);
        }
        on_bytes(count as u64);
    }
    let (kind, sums) = if etag.len() == 64 {
        ("SHA-256", vec![format!("{:x}", sha256.finalize())])
    } else {
        ("Git hash", vec![format!("{:x}", git.finalize()), format!("{:x}", plain.finalize())])
    };
    if sums.iter().any(|sum| sum.eq_ignore_ascii_case(etag)) {
        return Ok(State::Good);
    }
    Ok(State::Damaged(format!("its {kind} is {} instead of {etag}", sums[0])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn contents_are_compared_with_the_hashes_that_hubs_give() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "hello\n").unwrap();
        let compare = |etag: &str| compare(&path, etag, |_| {}).unwrap();
        // `git hash-object`, `sha1sum` and `sha256sum` of the same file
        for good in [
            "ce013625030ba8dba906f756967f9e9ca394464a",
            "f572d396fae9206628714fb2ce00f72e94f2258f",
            "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
        ] {
            assert_eq!(compare(good), State::Good, "{good}");
            let wrong = good.replace('a', "b");
            assert!(matches!(compare(&wrong), State::Damaged(reason) if reason.contains(&wrong)), "{wrong}");
        }
        assert_eq!(compare("an-etag-of-another-kind"), State::Unknown);
    }

    #[test]
    fn links_in_the_cache_are_replaced_or_refused_and_never_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (cache_dir, outside) = (folder.path().join("cache"), folder.path().join("outside"));
        fs::create_dir_all(cache_dir.join("models--o--n")).unwrap();
        fs::write(&outside, "precious").unwrap();
        let cache = RepoCache { folder: &cache_dir, name: "models--o--n".into() };
        let (part, hard) = (cache_dir.join("part"), cache_dir.join("hard"));
        symlink(&outside, &part).unwrap();
        fs::hard_link(&outside, &hard).unwrap();
        for path in [&part, &hard] {
            open_own(path).unwrap().write_all(b"download").unwrap();
            assert_eq!(fs::read_to_string(path).unwrap(), "download");
        }
        fs::create_dir(cache_dir.join("models--o--n/refs")).unwrap();
        symlink(&outside, cache_dir.join("models--o--n/refs/main")).unwrap();
        cache.set_commit("main", "c0ffee").unwrap();
        assert_eq!(cache.commit_of("main").as_deref(), Some("c0ffee"));
        assert_eq!(fs::read_to_string(&outside).unwrap(), "precious");
        // a crash has left a temporary file
        let left = cache_dir.join("models--o--n/refs/.main.prsmed-tmp-a1B2c3");
        fs::write(&left, "c0f").unwrap();
        cache.set_commit("main", "decade").unwrap();
        assert!(!left.exists() && cache.commit_of("main").as_deref() == Some("decade"));

        symlink(folder.path(), cache_dir.join("models--o--n/blobs")).unwrap();
        let error = cache.make_folder(Path::new("models--o--n/blobs")).unwrap_err();
        assert!(error.to_string().contains("is a link or a file") && error.hint().contains("HF_HUB_CACHE"), "{error}");
    }
}
