//! Features of pictures that a frozen vision tower has seen, kept so that it does not run again.
//!
//! What is kept is found by the [`Key`] of a picture, the SHA-256 of its bytes as the tower takes them: another crop, turn or
//! size is another picture. One [`Features`] belongs to one tower ([`Identity`]). Nothing is ever thrown out: epochs visit
//! every picture once, so replacing the oldest would replace all; what came first stays, up to a limit.
//!
//! This module knows bytes; it knows no model.

mod disk;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};

use crate::error::Result;
use crate::tensor::{Kind, Tensor, kind_bytes};
use crate::units::Bytes;
use disk::File;

/// Which picture: the SHA-256 of its bytes as the tower takes them, before they are normalised.
pub type Key = [u8; 32];

/// Which tower, dtype, picture size and kind of device: a hash of all of them.
pub type Identity = [u8; 32];

/// The key of a picture of `[3, C, C]` bytes.
pub fn key_of(pixels: &[u8]) -> Key {
    Sha256::digest(pixels).into()
}

/// Size of one picture's features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeatureShape {
    /// Patches of the tower.
    pub tokens: i64,
    /// Its width.
    pub width: i64,
    /// The dtype that it computes in.
    pub kind: Kind,
}

impl FeatureShape {
    /// Bytes of one picture's features.
    pub fn bytes(&self) -> usize {
        let elements = usize::try_from(self.tokens * self.width).expect("checked sizes");
        elements * usize::try_from(kind_bytes(self.kind)).expect("a few bytes")
    }

    /// One picture's features as a tensor `[1, tokens, width]` on the host.
    pub fn tensor(&self, bytes: &[u8]) -> Tensor {
        Tensor::from_data_size(bytes, &[1, self.tokens, self.width], self.kind)
    }

    /// The bytes of one picture's features, from any device.
    pub fn bytes_of(&self, features: &Tensor) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes()];
        let elements = features.numel();
        features.copy_data_u8(&mut bytes, elements);
        bytes
    }
}

/// What is known about a picture before the tower runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// Its features, row-major `[tokens, width]`.
    Features(Arc<[u8]>),
    /// Nothing: they will be kept under this key.
    New(Key),
}

/// Kept features of one tower; shared by the loader's workers, who look up, and the task, which adds.
#[derive(Debug)]
pub struct Features {
    shape: FeatureShape,
    /// Most pictures.
    room: usize,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Memory(Mutex<HashMap<Key, Arc<[u8]>>>),
    Disk(Box<Mutex<File>>),
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Features {
    /// Keeps at most `limit` bytes in memory.
    pub fn in_memory(shape: FeatureShape, limit: u64) -> Self {
        Self { shape, room: pictures(shape, limit), place: Place::Memory(Mutex::default()) }
    }

    /// Keeps at most `limit` bytes in a file of `folder` that belongs to `identity`; what earlier runs left there is served.
    /// The first process writes, others that open the file meanwhile only read what it held then.
    ///
    /// # Errors
    /// [`crate::Error::Io`] when the folder or the file cannot be made or read.
    pub fn on_disk(folder: &Path, identity: &Identity, shape: FeatureShape, limit: u64) -> Result<Self> {
        let file = File::open(folder, identity, shape.bytes())?;
        Ok(Self { shape, room: pictures(shape, limit), place: Place::Disk(Box::new(Mutex::new(file))) })
    }

    /// Size of one picture's features.
    pub fn shape(&self) -> FeatureShape {
        self.shape
    }

    /// Pictures kept.
    pub fn len(&self) -> usize {
        match &self.place {
            Place::Memory(held) => locked(held).len(),
            Place::Disk(file) => locked(file).len(),
        }
    }

    /// Whether none is kept.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The features of a picture; `None` when they are not kept, or damaged on the disk.
    pub fn get(&self, key: &Key) -> Option<Arc<[u8]>> {
        match &self.place {
            Place::Memory(held) => locked(held).get(key).cloned(),
            Place::Disk(file) => {
                // only the place is looked up under the lock: workers read side by side
                let reader = locked(file).reader(key)?;
                let found = reader.read();
                if found.is_none() {
                    locked(file).forget(key);
                }
                found.map(Arc::from)
            }
        }
    }

    /// Keeps `bytes` where there is room and the key is new. What cannot be written is told once; training goes on.
    ///
    /// # Panics
    /// When `bytes` are not those of one picture.
    pub fn put(&self, key: &Key, bytes: &[u8]) -> Option<String> {
        assert_eq!(bytes.len(), self.shape.bytes(), "features of one picture");
        match &self.place {
            Place::Memory(held) => {
                let mut held = locked(held);
                if held.len() < self.room {
                    held.entry(*key).or_insert_with(|| bytes.into());
                }
                None
            }
            Place::Disk(file) => {
                let mut file = locked(file);
                if file.len() < self.room { file.append(key, bytes) } else { None }
            }
        }
    }

    /// What there is and how much there may be, for a note before a run.
    pub fn describe(&self) -> String {
        let (kept, room, each) = (self.len(), self.room, self.shape.bytes());
        let most = Bytes((room.saturating_mul(each)) as u64);
        let each = Bytes(each as u64);
        match &self.place {
            Place::Memory(_) => format!("vision features in memory: room for {room} pictures of {each}, {most}"),
            Place::Disk(file) => {
                let file = locked(file);
                let reads_only = if file.writes() { "" } else { "; another process writes it, this one only reads" };
                let path = file.path().display();
                format!("vision features in {path}: {kept} pictures, room for {room} of {each}, {most}{reads_only}")
            }
        }
    }
}

/// Pictures whose features fit `limit` bytes.
fn pictures(shape: FeatureShape, limit: u64) -> usize {
    usize::try_from(limit).unwrap_or(usize::MAX) / shape.bytes().max(1)
}

#[cfg(test)]
mod tests;
