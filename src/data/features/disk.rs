//! Vision feature cache on disk: one append-only file for each tower.
//!
//! ```text
//! header   64 bytes: magic, version, bytes of a record's features, identity of the tower, checksum
//! record   64 bytes: key, checksum of the features, checksum of this head, zeros; then the features, padded to 64
//! record   ...
//! ```
//!
//! All records have the same length. The index is rebuilt from their heads alone, and a damaged record does not hide
//! those after it. A head with a wrong checksum is ignored. Features with a wrong checksum are detected when they are
//! read, and computed again. An incomplete tail after a crash is cut off by the next process that writes. Files of
//! another version are replaced.
//!
//! One process writes: it holds the system's lock on the file, which ends with the process. Bytes are read by
//! position and not memory-mapped, because a process is killed when another process truncates a mapped file.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::{Key, TowerIdentity};
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

const MAGIC: &[u8; 8] = b"PRSMEDVF";
/// Changes with the layout, the preprocessing and the computation of the tower.
const VERSION: u32 = 1;
const BLOCK: usize = 64;

/// An open cache file.
#[derive(Debug)]
pub(super) struct File {
    pub(super) path: PathBuf,
    identity: TowerIdentity,
    /// Bytes of one image's features.
    length: usize,
    file: Arc<fs::File>,
    index: HashMap<Key, u64>,
    /// Offset of the next record; `None` when this process does not write.
    pub(super) end: Option<u64>,
}

impl File {
    /// Opens or creates the file of `identity`.
    pub(super) fn open(folder: &Path, identity: &TowerIdentity, length: usize) -> Result<Self> {
        files::create_folders(folder).map_err(Error::io(folder, "create"))?;
        let path = folder.join(name_of(identity));
        let (file, writes) = match files::open_to_change(&path) {
            Ok(file) => {
                let writes = file.try_lock().is_ok();
                (file, writes)
            }
            // a cache on a read-only disk can still be read, and so can one behind a link
            Err(_) if path.exists() => (files::open(&path).map_err(Error::io(&path, "read"))?, false),
            Err(error) => return Err(Error::io(&path, "create")(error)),
        };
        let file = Arc::new(file);
        let mut opened = Self { path, identity: *identity, length, file, index: HashMap::new(), end: None };
        let end = opened.build_index().map_err(Error::io(&opened.path, "read"))?;
        if writes {
            opened.end = Some(end);
            opened.begin(end).map_err(Error::io(&opened.path, "write"))?;
        }
        Ok(opened)
    }

    /// Reads the heads of all records. Returns the end of the last valid record, or 0 when the file header does not
    /// match.
    fn build_index(&mut self) -> std::io::Result<u64> {
        let mut head = [0; BLOCK];
        if self.file.read_exact_at(&mut head, 0).is_err() || head != self.file_head() {
            return Ok(0);
        }
        let stride = self.stride();
        let records = (self.file.metadata()?.len() - BLOCK as u64) / stride;
        let mut end = BLOCK as u64;
        for record in 0..records {
            let at = BLOCK as u64 + record * stride;
            self.file.read_exact_at(&mut head, at)?;
            if let Some(key) = key_in(&self.identity, &head) {
                self.index.insert(key, at);
                end = at + stride;
            }
        }
        Ok(end)
    }

    /// Cuts off what follows the records, and writes the header of a new file.
    fn begin(&mut self, end: u64) -> std::io::Result<()> {
        self.file.set_len(end)?;
        if end == 0 {
            self.file.write_all_at(&self.file_head(), 0)?;
            self.end = Some(BLOCK as u64);
        }
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    /// Reads one image's features without the index: `None` when they are damaged.
    pub(super) fn reader(&self, key: &Key) -> Option<impl FnOnce() -> Option<Vec<u8>> + use<>> {
        let at = *self.index.get(key)?;
        let (file, length, key, identity) = (Arc::clone(&self.file), self.length, *key, self.identity);
        Some(move || {
            let mut head = [0; BLOCK];
            file.read_exact_at(&mut head, at).ok()?;
            let mut bytes = vec![0; length];
            file.read_exact_at(&mut bytes, at + BLOCK as u64).ok()?;
            (head == record_head(&identity, &key, &bytes)).then_some(bytes)
        })
    }

    /// Removes a damaged record from the index.
    pub(super) fn forget(&mut self, key: &Key) {
        self.index.remove(key);
    }

    /// Adds a record. The first failed write returns a message.
    pub(super) fn append(&mut self, key: &Key, bytes: &[u8]) -> Option<String> {
        let at = self.end?;
        if self.index.contains_key(key) {
            return None;
        }
        let mut record = Vec::with_capacity(usize::try_from(self.stride()).unwrap_or(0));
        record.extend(record_head(&self.identity, key, bytes));
        record.extend(bytes);
        record.resize(record.len().next_multiple_of(BLOCK), 0);
        match self.file.write_all_at(&record, at) {
            Ok(()) => {
                self.index.insert(*key, at);
                self.end = Some(at + self.stride());
                None
            }
            Err(error) => {
                // cut off the incomplete record
                let _ = self.file.set_len(at);
                self.end = None;
                let path = self.path.display();
                Some(format!(
                    "vision features are no longer written to {path} ({error}); the stored ones are still used"
                ))
            }
        }
    }

    fn stride(&self) -> u64 {
        (BLOCK + self.length.next_multiple_of(BLOCK)) as u64
    }

    fn file_head(&self) -> [u8; BLOCK] {
        let mut head = [0; BLOCK];
        head[..8].copy_from_slice(MAGIC);
        head[8..12].copy_from_slice(&VERSION.to_le_bytes());
        head[12..20].copy_from_slice(&(self.length as u64).to_le_bytes());
        head[20..52].copy_from_slice(&self.identity);
        let check = Sha256::digest(&head[..52]);
        head[52..].copy_from_slice(&check[..12]);
        head
    }
}

/// File name of a tower's cache.
pub(super) fn name_of(identity: &TowerIdentity) -> String {
    let head = u128::from_be_bytes(identity[..16].try_into().expect("sixteen of thirty-two bytes"));
    format!("{:024x}.features", head >> 32)
}

/// Head of the record of `key`: the key and a checksum of its features.
fn record_head(identity: &TowerIdentity, key: &Key, bytes: &[u8]) -> [u8; BLOCK] {
    let mut head = [0; BLOCK];
    head[..32].copy_from_slice(key);
    head[32..48].copy_from_slice(&Sha256::digest(bytes)[..16]);
    let check = head_check(identity, &head);
    head[48..].copy_from_slice(&check);
    head
}

fn head_check(identity: &TowerIdentity, head: &[u8; BLOCK]) -> [u8; 16] {
    let sum = Sha256::new().chain_update(identity).chain_update(&head[..48]).finalize();
    sum[..16].try_into().expect("sixteen of thirty-two bytes")
}

/// The key in a record's head; `None` when the checksum is wrong.
fn key_in(identity: &TowerIdentity, head: &[u8; BLOCK]) -> Option<Key> {
    (head[48..] == head_check(identity, head)).then(|| head[..32].try_into().expect("thirty-two bytes"))
}

#[cfg(test)]
impl File {
    /// Continues with another file; returns the previous one.
    pub(super) fn swap_file(&mut self, file: Arc<fs::File>) -> Arc<fs::File> {
        std::mem::replace(&mut self.file, file)
    }
}
