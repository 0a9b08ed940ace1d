//! Vision feature cache: features of a frozen vision tower, stored so that the tower need not run again for the same
//! image.
//!
//! Features are stored under the [`Key`] of an image, the SHA-256 of its preprocessed bytes. Another crop, rotation
//! or size is therefore another image. One [`Features`] belongs to one tower ([`TowerIdentity`]). Nothing is evicted: an
//! epoch uses every image once, so replacing the oldest entry would in time replace all of them. The first images are
//! kept, up to a limit.
//!
//! This module stores bytes and does not depend on any model.

mod disk;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};

use disk::File;
use prsmed_base::error::Result;
use prsmed_base::units::Bytes;

/// Identifies an image: SHA-256 of its preprocessed bytes, before normalisation.
pub type Key = [u8; 32];

/// Identifies a tower: hash of its weights, dtype, image size and kind of device.
pub type TowerIdentity = [u8; 32];

/// The key of an image of `[3, C, C]` bytes.
pub fn key_of(pixels: &[u8]) -> Key {
    Sha256::digest(pixels).into()
}

/// Size of one image's features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeatureShape {
    /// Number of patches.
    pub tokens: i64,
    /// Width of the tower.
    pub width: i64,
    /// Dtype of the tower's activations.
    pub dtype: Dtype,
}

/// Dtype of cached features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE 754, 32 bits.
    F32,
    /// IEEE 754, 16 bits.
    F16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl FeatureShape {
    /// Bytes of one image's features.
    pub fn bytes(&self) -> usize {
        let elements = usize::try_from(self.tokens * self.width).expect("checked sizes");
        elements * self.dtype.bytes()
    }
}

/// Result of a cache lookup for an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FeatureLookup {
    /// Cached features, row-major `[tokens, width]`.
    Features(Arc<[u8]>),
    /// Not cached; the features will be stored under this key.
    New(Key),
}

/// Vision feature cache of one tower. The loader's workers look features up, and the task adds them.
#[derive(Debug)]
pub struct Features {
    /// Size of one image's features.
    pub shape: FeatureShape,
    /// Maximum number of images.
    max_images: usize,
    storage: Storage,
}

#[derive(Debug)]
enum Storage {
    Memory(Mutex<HashMap<Key, Arc<[u8]>>>),
    Disk(Box<Mutex<File>>),
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Features {
    /// Caches at most `limit` bytes in memory.
    pub fn in_memory(shape: FeatureShape, limit: u64) -> Self {
        Self { shape, max_images: images(shape, limit), storage: Storage::Memory(Mutex::default()) }
    }

    /// Caches at most `limit` bytes in a file of `folder` that belongs to `identity`. Features of earlier runs are
    /// used. The first process writes; other processes that open the file at the same time read only what it
    /// contained then.
    ///
    /// # Errors
    /// [`prsmed_base::Error::Io`] when the folder or the file cannot be created or read.
    pub fn on_disk(folder: &Path, identity: &TowerIdentity, shape: FeatureShape, limit: u64) -> Result<Self> {
        let file = File::open(folder, identity, shape.bytes())?;
        Ok(Self { shape, max_images: images(shape, limit), storage: Storage::Disk(Box::new(Mutex::new(file))) })
    }

    /// Number of cached images.
    fn num_images(&self) -> usize {
        match &self.storage {
            Storage::Memory(entries) => locked(entries).len(),
            Storage::Disk(file) => locked(file).len(),
        }
    }

    /// The features of an image; `None` when they are not cached, or damaged on disk.
    pub fn get(&self, key: &Key) -> Option<Arc<[u8]>> {
        match &self.storage {
            Storage::Memory(entries) => locked(entries).get(key).cloned(),
            Storage::Disk(file) => {
                // the lock covers only the index, so that workers read in parallel
                let read = locked(file).reader(key)?;
                let found = read();
                if found.is_none() {
                    locked(file).forget(key);
                }
                found.map(Arc::from)
            }
        }
    }

    /// Stores `bytes` if the key is new and the limit is not reached. The first failed write returns a message;
    /// training continues.
    ///
    /// # Panics
    /// When `bytes` do not have the size of one image's features.
    pub fn put(&self, key: &Key, bytes: &[u8]) -> Option<String> {
        assert_eq!(bytes.len(), self.shape.bytes(), "features of one image");
        match &self.storage {
            Storage::Memory(entries) => {
                let mut entries = locked(entries);
                if entries.len() < self.max_images {
                    entries.entry(*key).or_insert_with(|| bytes.into());
                }
                None
            }
            Storage::Disk(file) => {
                let mut file = locked(file);
                if file.len() < self.max_images { file.append(key, bytes) } else { None }
            }
        }
    }

    /// Contents and limit, for a note before a run.
    pub fn describe(&self) -> String {
        let (num_images, max_images, each) = (self.num_images(), self.max_images, self.shape.bytes());
        let most = Bytes((max_images.saturating_mul(each)) as u64);
        let each = Bytes(each as u64);
        match &self.storage {
            Storage::Memory(_) => format!("vision features in memory: room for {max_images} images of {each}, {most}"),
            Storage::Disk(file) => {
                let file = locked(file);
                let reads_only =
                    if file.end.is_some() { "" } else { "; another process writes to it, this one only reads" };
                let path = file.path.display();
                format!(
                    "vision features in {path}: {num_images} images, room for {max_images} of {each}, {most}\
                     {reads_only}"
                )
            }
        }
    }
}

/// Number of images whose features fit `limit` bytes.
fn images(shape: FeatureShape, limit: u64) -> usize {
    usize::try_from(limit).unwrap_or(usize::MAX) / shape.bytes().max(1)
}

#[cfg(test)]
mod tests;
