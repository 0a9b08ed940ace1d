//! Vision features of a micro-batch: computed by the vision tower, or read from a cache (`data.cache_vision`).
//!
//! With a cache, the tower runs on one image at a time. Features of an image then depend only on the image, not on the
//! rest of the batch or on the content of the cache. Cached and computed features are equal bit for bit on one kind of
//! device and one version of libtorch. A resumed run therefore equals an uninterrupted one, and a run with an empty
//! cache equals one with a full cache.
//!
//! Without a cache, matrix products of the tower have other shapes and round differently. Losses then differ by 1e-6
//! in fp32, and by the rounding of the dtype in bf16 and fp16.

use crate::data::classical::Augment;
use crate::data::features::{Dtype, FeatureShape, Features, TowerIdentity};
use crate::event::{Event, Observer};
use crate::models::prsmed::PrsMed;
use crate::models::tower;
use crate::segment::batch::{TowerInput, View, feature_bytes, feature_tensor};
use crate::segment::config::{CacheVision, DataConfig};
use crate::segment::run_folder::loaded::LoadedModel;
use crate::tensor::async_copy::AsyncCopy;
use crate::tensor::{Device, Kind, Tensor, ledger, no_grad};
use crate::{Error, Result};
use sha2::{Digest, Sha256};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Images of a micro-batch for the vision tower, or their cached features.
#[derive(Debug)]
pub struct VisionInput {
    input: TowerInput,
    cache: Option<Arc<FeatureCache>>,
}

/// The vision feature cache of a training, with its messages.
#[derive(Debug)]
pub struct FeatureCache {
    features: Arc<Features>,
    note: Mutex<Option<String>>,
}

impl FeatureCache {
    /// A cache over `features`, without messages.
    pub fn new(features: Arc<Features>) -> Self {
        Self { features, note: Mutex::default() }
    }

    /// Storage of the features, for the loader.
    pub fn features(&self) -> &Arc<Features> {
        &self.features
    }

    /// Reason why the cache stopped storing features; returned once.
    pub fn take_note(&self) -> Option<String> {
        self.note.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn get(&self, key: &[u8; 32]) -> Option<Tensor> {
        Some(feature_tensor(self.features.shape, &self.features.get(key)?))
    }

    fn put(&self, key: &[u8; 32], features: &Tensor) {
        let note = self.features.put(key, &feature_bytes(self.features.shape, features));
        if note.is_some() {
            *self.note.lock().unwrap_or_else(PoisonError::into_inner) = note;
        }
    }
}

impl From<Tensor> for VisionInput {
    /// Images `[b, 3, s, s]` (u8, or normalised floats) without cached features.
    fn from(images: Tensor) -> Self {
        Self { input: TowerInput::Pixels(images), cache: None }
    }
}

impl VisionInput {
    /// Images of a batch. Newly computed features are stored in `cache`.
    pub fn new(input: TowerInput, cache: Option<Arc<FeatureCache>>) -> Self {
        Self { input, cache }
    }

    /// The input of [`PrsMed::image_tokens`] on the model's device: the images, or, with a feature cache, the features
    /// of all images. Runs the vision tower on images that the cache does not have.
    ///
    /// # Shapes
    /// Result `[b, 3, s, s]`, or `[b, p, w]` in the compute dtype.
    pub fn resolve(&self, model: &PrsMed) -> Tensor {
        let views = match &self.input {
            TowerInput::Pixels(images) => {
                let _category = ledger::enter(ledger::Category::Inputs);
                return images.to_device(model.options().device);
            }
            TowerInput::Views(views) => views,
        };
        let mut features: Vec<Tensor> = views.iter().map(|view| self.features(model, view)).collect();
        let _category = ledger::enter(ledger::Category::Inputs);
        if features.len() == 1 { features.remove(0) } else { Tensor::cat(&features, 0) }
    }

    /// The images of `range`; tensors are views.
    pub(crate) fn part(&self, range: &Range<usize>) -> Self {
        let input = match &self.input {
            TowerInput::Pixels(images) => {
                let [first, count] = [range.start, range.len()].map(|n| i64::try_from(n).expect("a few images"));
                TowerInput::Pixels(images.narrow(0, first, count))
            }
            TowerInput::Views(views) => TowerInput::Views(views[range.clone()].iter().map(View::shared).collect()),
        };
        Self { input, cache: self.cache.clone() }
    }

    /// Starts the copy to a GPU; the result is valid once `copy` completes.
    pub(crate) fn send(self, copy: &mut AsyncCopy) -> Self {
        let mut view = |view| match view {
            View::Features(features) => View::Features(copy.send(&features)),
            View::New { key, pixels } => View::New { key, pixels: copy.send(&pixels) },
        };
        let input = match self.input {
            TowerInput::Views(views) => TowerInput::Views(views.into_iter().map(&mut view).collect()),
            TowerInput::Pixels(images) => TowerInput::Pixels(copy.send(&images)),
        };
        Self { input, cache: self.cache }
    }

    /// `[1, p, w]`, contiguous, on the model's device.
    fn features(&self, model: &PrsMed, view: &View) -> Tensor {
        let device = model.options().device;
        let (key, pixels) = match view {
            View::Features(features) => return features.to_device(device),
            View::New { key, pixels } => (key, pixels),
        };
        // an earlier question about the same image may have stored its features
        if let Some(features) = self.cache.as_ref().and_then(|cache| cache.get(key)) {
            return features.to_device(device);
        }
        // a copy, so that later kernels do not depend on the strides of the tower's output
        let features = no_grad(|| model.vision_features(pixels).copy());
        if let Some(cache) = &self.cache {
            cache.put(key, &features);
        }
        features
    }
}

/// Size of an image's features of a tower that computes in `kind`.
///
/// # Panics
/// For a dtype that no tower computes in.
pub fn feature_shape(tower: &tower::Config, kind: Kind) -> FeatureShape {
    let dtype = match kind {
        Kind::Float => Dtype::F32,
        Kind::Half => Dtype::F16,
        Kind::BFloat16 => Dtype::Bf16,
        kind => panic!("a tower does not compute in {kind:?}"),
    };
    FeatureShape { tokens: tower.max_tokens(), width: tower.width(), dtype }
}

impl DataConfig {
    /// True if features are cached. Classical augmentation never repeats an image, so it excludes the cache.
    pub fn caches_features(&self) -> bool {
        self.cache_vision != CacheVision::Off && self.augment != Augment::Classical
    }
}

/// Opens the feature cache of a training of `loaded` as set by `data.cache_vision`. `folder` is the cache folder, if
/// there is one. Reports the content and the limit of the cache.
///
/// # Errors
/// [`Error::Config`] if the tower is trained; [`Error::Io`] if the cache file cannot be created or read.
pub fn open_cache(
    loaded: &LoadedModel,
    data: &DataConfig,
    folder: Option<&Path>,
    observer: &dyn Observer,
) -> Result<Option<FeatureCache>> {
    if data.cache_vision == CacheVision::Off {
        return Ok(None);
    }
    refuse_trained_tower(data, loaded.description.model.train_base)?;
    if !data.caches_features() {
        let text = "vision features are not cached: classical augmentation never repeats an image";
        observer.on(&Event::Note(text.into()));
        return Ok(None);
    }
    let model = &loaded.model;
    let shape = feature_shape(&model.config().tower, model.options().compute);
    let limit = (data.cache_vision_mib as u64) << 20;
    let features = match data.cache_vision {
        CacheVision::Disk => {
            let hint = "set `PRSMED_CACHE` to a folder, or use `data.cache_vision=ram`";
            let none = || Error::config("data.cache_vision", "there is no cache folder", hint);
            Features::on_disk(&folder.ok_or_else(none)?.join("vision"), &identity(model), shape, limit)?
        }
        _ => Features::in_memory(shape, limit),
    };
    observer.on(&Event::Note(features.describe()));
    Ok(Some(FeatureCache::new(Arc::new(features))))
}

/// Refuses a feature cache for a vision tower that is trained.
///
/// # Errors
/// [`Error::Config`] if the tower is trained and the cache is on.
pub fn refuse_trained_tower(data: &DataConfig, train_base: bool) -> Result<()> {
    if data.cache_vision == CacheVision::Off || !train_base {
        return Ok(());
    }
    let reason = "the features of a trained vision tower change with every step";
    let hint = "set `data.cache_vision=off`, or `model.train_base=false`";
    Err(Error::config("data.cache_vision", reason, hint))
}

/// Cache key: everything that affects the vision tower's output. All of its weights, sizes, dtypes, kind of device.
fn identity(model: &PrsMed) -> TowerIdentity {
    let options = model.options();
    let device = if options.device == Device::Cpu { "cpu" } else { "cuda" };
    let (stored, compute) = (options.stored, options.compute);
    let mut hash = Sha256::new();
    hash.update(format!("{:?} {stored:?} {compute:?} {device}", model.config().tower));
    let mut entries = model.stores().base.entries();
    entries.retain(|entry| entry.name.starts_with(model.config().family.keys.tower));
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    for entry in entries {
        let (size, kind) = (entry.tensor.size(), entry.tensor.kind());
        hash.update(format!("\n{} {size:?} {kind:?} ", entry.name));
        let mut bytes = vec![0; entry.tensor.numel() * kind.elt_size_in_bytes()];
        entry.tensor.copy_data_u8(&mut bytes, entry.tensor.numel());
        hash.update(bytes);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_about_a_failed_write_stays_until_it_is_taken() {
        let shape = FeatureShape { tokens: 2, width: 3, dtype: Dtype::F32 };
        let note = Mutex::new(Some("the disk is full".to_owned()));
        let cache = FeatureCache { features: Arc::new(Features::in_memory(shape, 1 << 20)), note };
        let features = Tensor::ones([1, 2, 3], (Kind::Float, Device::Cpu));
        cache.put(&[7; 32], &features);
        assert_eq!(cache.get(&[7; 32]), Some(features));
        assert_eq!(cache.take_note().as_deref(), Some("the disk is full"));
        assert_eq!(cache.take_note(), None);
    }
}
