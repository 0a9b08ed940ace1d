//! Download of one file into the cache, with retries, resumption and checks.
//!
//! A download goes to `blobs/ETAG.incomplete`, as in Python's client, and an interrupted one continues there. Size and
//! hash are compared before the file becomes a blob, and also before a blob of another revision is used again.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::cache::{self, RepoCache, State};
use super::client::{Client, Fault, Metadata};
use super::{Hub, RemoteFile};
use prsmed_base::error::{Error, Result};
use prsmed_base::event::{Event, Observer};

/// Consecutive failures without a new byte after which a download fails.
const ATTEMPTS: u32 = 5;
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// Bytes between two progress events.
const STEP: u64 = 1 << 20;
const CHUNK: usize = 1 << 16;
/// Ending of a download that is not complete.
pub(super) const PARTIAL: &str = "incomplete";

/// A file of a repository at one commit.
pub(super) struct FileDownload<'a> {
    pub(super) hub: &'a Hub<'a>,
    pub(super) client: &'a Client<'a>,
    pub(super) cache: &'a RepoCache<'a>,
    pub(super) commit: &'a str,
    pub(super) file: &'a RemoteFile,
    pub(super) observer: &'a dyn Observer,
    /// Bytes of the files before this one.
    pub(super) before: u64,
}

enum Attempt {
    /// Complete, with this size.
    Done(u64),
    /// Complete with a wrong size or hash, and deleted.
    Damaged(String),
    /// Failed, with so many bytes on disk.
    Failed(Fault, u64),
}

impl FileDownload<'_> {
    fn advance(&self, done: u64) {
        self.observer.on(&Event::Advanced { done: self.before + done });
    }

    /// Downloads the file and links it into the snapshot. Returns its size.
    pub(super) fn download(&self) -> Result<u64> {
        let name = &self.file.name;
        let (mut failures, mut reached, mut is_second) = (0, 0, false);
        loop {
            let (fault, length) = match self.attempt()? {
                Attempt::Done(size) => return Ok(size),
                Attempt::Damaged(reason) if is_second => {
                    return Err(self.hub.error(
                        format!("`{name}` is not the file that the hub lists, even after a second download: {reason}"),
                        "try again later, and check HF_ENDPOINT and the proxy",
                    ));
                }
                // the start was of another download, or the connection changed bytes
                Attempt::Damaged(_) => {
                    is_second = true;
                    continue;
                }
                Attempt::Failed(fault, length) => (fault, length),
            };
            failures = if length > reached { 1 } else { failures + 1 };
            reached = reached.max(length);
            if is_final(&fault) || failures >= ATTEMPTS {
                return Err(self.hub.fault(fault, Some(name)));
            }
            let reason = fault.to_string();
            let note = format!("`{name}`: the download stopped at {length} bytes ({reason}), resuming");
            self.observer.on(&Event::Note(note));
            std::thread::sleep(FIRST_WAIT * 2_u32.pow(failures - 1));
        }
    }

    fn attempt(&self) -> Result<Attempt> {
        let address = self.hub.address_of(self.commit, &self.file.name);
        let metadata = match self.client.metadata(&address, self.commit, self.file.size) {
            Ok(metadata) => metadata,
            Err(fault) => return Ok(Attempt::Failed(fault, 0)),
        };
        let folder = self.cache.make_folder(&Path::new(&self.cache.name).join("blobs"))?;
        let Some(_lock) = self.cache.lock(&metadata.etag)? else {
            let (name, etag) = (&self.file.name, &metadata.etag);
            let reason = format!("another process is downloading `{name}` (its lock is `{etag}.lock`)");
            return Err(self.hub.error(reason, "wait for it and run the command again"));
        };
        let blob = folder.join(&metadata.etag);
        let attempt = if self.reuse(&blob, &metadata)? {
            Attempt::Done(metadata.size)
        } else {
            self.transfer(&address, &folder, &metadata)?
        };
        if matches!(attempt, Attempt::Done(_)) {
            self.cache.link(&metadata.etag, self.commit, &self.file.name)?;
            self.advance(metadata.size);
        }
        Ok(attempt)
    }

    /// True if another revision downloaded the same content. A blob with other content is deleted.
    fn reuse(&self, blob: &Path, metadata: &Metadata) -> Result<bool> {
        let Ok(found) = fs::symlink_metadata(blob) else { return Ok(false) };
        let damage = if found.is_file() { damage(blob, metadata)? } else { Some("it is not a file".into()) };
        let Some(reason) = damage else { return Ok(true) };
        let text = format!(
            "`{}` in the cache is damaged ({reason}): it is downloaded again; `prsmed hub verify hub:{}` checks the others",
            self.file.name,
            self.hub.label()
        );
        self.observer.on(&Event::Warning(text));
        cache::remove(blob)?;
        Ok(false)
    }

    fn transfer(&self, address: &str, folder: &Path, metadata: &Metadata) -> Result<Attempt> {
        let path = folder.join(format!("{}.{PARTIAL}", metadata.etag));
        let mut part = Part::open(path, metadata.size)?;
        if part.length < metadata.size
            && let Err(fault) = self.receive(address, &mut part)?
        {
            if !matches!(fault, Fault::Status(416)) {
                return Ok(Attempt::Failed(fault, part.length));
            }
            part.restart(0)?;
        }
        if let Some(reason) = damage(&part.path, metadata)? {
            cache::remove(&part.path)?;
            return Ok(Attempt::Damaged(reason));
        }
        self.cache.publish(&part.path, &part.file, &metadata.etag)?;
        Ok(Attempt::Done(metadata.size))
    }

    /// Appends what is missing to the part. Errors of the disk are the outer error.
    fn receive(&self, address: &str, part: &mut Part) -> Result<Result<(), Fault>> {
        let mut download = match self.client.download(address, part.length) {
            Ok(download) => download,
            Err(fault) => return Ok(Err(fault)),
        };
        if download.start > part.length {
            return Ok(Err(Fault::Protocol(format!("the server sent the bytes from {} on", download.start))));
        }
        part.restart(download.start)?;
        let (mut chunk, mut reported) = (vec![0; CHUNK], part.length);
        self.advance(part.length);
        loop {
            let count = match download.body.read(&mut chunk) {
                Ok(0) if part.length < part.size => {
                    return Ok(Err(Fault::Connection("the connection was closed too early".into())));
                }
                Ok(0) => return Ok(Ok(())),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Ok(Err(self.client.fault(error))),
            };
            part.append(&chunk[..count])?;
            if part.length > part.size {
                // the comparison says that it is too long
                return Ok(Ok(()));
            }
            if part.length >= reported + STEP {
                reported = part.length;
                self.advance(part.length);
            }
        }
    }
}

/// The file of a download that is not complete.
struct Part {
    path: PathBuf,
    file: File,
    length: u64,
    /// Size of the complete file.
    size: u64,
}

impl Part {
    fn open(path: PathBuf, size: u64) -> Result<Self> {
        let mut file = cache::open_own(&path).map_err(Error::io(&path, "open"))?;
        let length = file.seek(SeekFrom::End(0)).map_err(Error::io(&path, "read"))?;
        let mut part = Self { path, file, length, size };
        if length > size {
            part.restart(0)?;
        }
        Ok(part)
    }

    /// Continues at the byte `length`.
    fn restart(&mut self, length: u64) -> Result<()> {
        let moved = self.file.set_len(length).and_then(|()| self.file.seek(SeekFrom::Start(length)));
        self.length = moved.map_err(Error::io(&self.path, "write"))?;
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io(&self.path, "write"))?;
        self.length += bytes.len() as u64;
        Ok(())
    }
}

/// The difference of a file from what the hub lists, if there is one.
fn damage(path: &Path, metadata: &Metadata) -> Result<Option<String>> {
    let length = fs::metadata(path).map_err(Error::io(path, "read"))?.len();
    if length != metadata.size {
        return Ok(Some(format!("it has {length} bytes instead of {}", metadata.size)));
    }
    Ok(match cache::compare(path, &metadata.etag, |_| {}).map_err(Error::io(path, "read"))? {
        State::Damaged(reason) => Some(reason),
        State::Good | State::Unknown => None,
    })
}

/// True if the same request would fail again.
fn is_final(fault: &Fault) -> bool {
    match fault {
        Fault::Status(status) => (400..500).contains(status) && !matches!(status, 408 | 429),
        Fault::Connection(_) => false,
        Fault::Protocol(_) | Fault::Token => true,
    }
}
