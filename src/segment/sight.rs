//! What the vision tower says about the pictures of a micro-batch: computed, or kept from before (`data.cache_vision`).
//!
//! Where features are kept, the tower sees one picture at a time. What it says of a picture then depends on the picture
//! alone, not on its neighbours in a batch or on what happens to be kept, so that kept and computed features are equal bit
//! for bit (on one kind of device and one version of libtorch), a resumed run equals an uninterrupted one, and a run with an
//! empty cache equals one with a full one. Against a run without a cache the tower's products have another shape, which
//! moves their rounding: 1e-6 of the losses in fp32, the rounding of the dtype in bf16 and fp16.

use super::setup::Assembly;
use super::task::{CacheVision, DataConfig};
use crate::data::batch::{ClipInput, View};
use crate::data::classical::Augment;
use crate::data::features::{FeatureShape, Features, Identity};
use crate::event::{Event, Observer};
use crate::models::clip;
use crate::models::prsmed::{PrsMed, TOWER_PREFIX};
use crate::tensor::transfer::Flight;
use crate::tensor::{Device, Kind, Tensor, ledger, no_grad};
use crate::{Error, Result};
use sha2::{Digest, Sha256};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The pictures of a micro-batch as the language model will see them.
#[derive(Debug)]
pub struct Sight {
    input: ClipInput,
    kept: Option<Arc<Kept>>,
}

/// Kept features, and who hears when they cannot be written any more.
#[derive(Debug)]
pub struct Kept {
    features: Arc<Features>,
    told: Mutex<Option<String>>,
}

impl Kept {
    /// For one training.
    pub fn new(features: Arc<Features>) -> Self {
        Self { features, told: Mutex::default() }
    }

    /// The features themselves, for the loader.
    pub fn features(&self) -> &Arc<Features> {
        &self.features
    }

    /// Why no more are written, once.
    pub fn told(&self) -> Option<String> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn get(&self, key: &[u8; 32]) -> Option<Tensor> {
        Some(self.features.shape().tensor(&self.features.get(key)?))
    }

    fn put(&self, key: &[u8; 32], features: &Tensor) {
        let told = self.features.put(key, &self.features.shape().bytes_of(features));
        if told.is_some() {
            *self.told.lock().unwrap_or_else(PoisonError::into_inner) = told;
        }
    }
}

impl From<Tensor> for Sight {
    /// Pictures `[b, 3, s, s]` (u8, or normalised floats) of which nothing is kept.
    fn from(pictures: Tensor) -> Self {
        Self { input: ClipInput::Pixels(pictures), kept: None }
    }
}

impl Sight {
    /// The pictures of a batch; what is new to the tower goes to `kept`.
    pub fn new(input: ClipInput, kept: Option<Arc<Kept>>) -> Self {
        Self { input, kept }
    }

    /// The pictures, where none are known.
    pub fn pictures(&self) -> Option<&Tensor> {
        match &self.input {
            ClipInput::Pixels(pictures) => Some(pictures),
            ClipInput::Views(_) => None,
        }
    }

    /// What [`PrsMed::image_tokens`] takes, on the model's device: the pictures, or, where features are kept, features of all.
    ///
    /// # Shapes
    /// Result `[b, 3, s, s]`, or `[b, p, w]` in the compute dtype.
    pub fn prepare(&self, model: &PrsMed) -> Tensor {
        let views = match &self.input {
            ClipInput::Pixels(pictures) => {
                let _category = ledger::enter(ledger::Category::Inputs);
                return pictures.to_device(model.options().device);
            }
            ClipInput::Views(views) => views,
        };
        let mut features: Vec<Tensor> = views.iter().map(|view| self.features(model, view)).collect();
        let _category = ledger::enter(ledger::Category::Inputs);
        if features.len() == 1 { features.remove(0) } else { Tensor::cat(&features, 0) }
    }

    /// The pictures of `range`; tensors are views.
    pub(super) fn part(&self, range: &Range<usize>) -> Self {
        let input = match &self.input {
            ClipInput::Pixels(pictures) => {
                let [first, count] = [range.start, range.len()].map(|n| i64::try_from(n).expect("a few pictures"));
                ClipInput::Pixels(pictures.narrow(0, first, count))
            }
            ClipInput::Views(views) => ClipInput::Views(views[range.clone()].iter().map(View::shared).collect()),
        };
        Self { input, kept: self.kept.clone() }
    }

    /// The same on a card, once `flight` has landed.
    pub(super) fn send(self, flight: &mut Flight) -> Self {
        let mut view = |view| match view {
            View::Features(features) => View::Features(flight.send(&features)),
            View::New { key, pixels } => View::New { key, pixels: flight.send(&pixels) },
        };
        let input = match self.input {
            ClipInput::Views(views) => ClipInput::Views(views.into_iter().map(&mut view).collect()),
            ClipInput::Pixels(pictures) => ClipInput::Pixels(flight.send(&pictures)),
        };
        Self { input, kept: self.kept }
    }

    /// `[1, p, w]`, contiguous, on the model's device.
    fn features(&self, model: &PrsMed, view: &View) -> Tensor {
        let device = model.options().device;
        let (key, pixels) = match view {
            View::Features(features) => return features.to_device(device),
            View::New { key, pixels } => (key, pixels),
        };
        // another question about the same picture may have come first
        if let Some(features) = self.kept.as_ref().and_then(|kept| kept.get(key)) {
            return features.to_device(device);
        }
        // a copy: what follows must not depend on where the tower's own result lies
        let features = no_grad(|| model.see(pixels).copy());
        if let Some(kept) = &self.kept {
            kept.put(key, &features);
        }
        features
    }
}

/// Size of a picture's features of a tower that computes in `kind`.
pub fn feature_shape(tower: &clip::Config, kind: Kind) -> FeatureShape {
    FeatureShape { tokens: tower.num_patches(), width: tower.hidden_size, kind }
}

impl DataConfig {
    /// Whether features are kept: not with classical augmentation, which never makes a picture twice.
    pub fn keeps_features(&self) -> bool {
        self.cache_vision != CacheVision::Off && self.augment != Augment::Classical
    }
}

/// The kept features that a training of `assembly` will use, as `data.cache_vision` says; `folder` is for files (`None`: there are
/// none). Tells what
/// there is, and how much there may be.
///
/// # Errors
/// [`Error::Config`] for a tower that is trained; [`Error::Io`] when the file cannot be made or read.
pub fn keep(
    assembly: &Assembly,
    data: &DataConfig,
    folder: Option<&Path>,
    observer: &dyn Observer,
) -> Result<Option<Kept>> {
    if data.cache_vision == CacheVision::Off {
        return Ok(None);
    }
    refuse_trained_tower(data, assembly.description.model.train_base)?;
    if !data.keeps_features() {
        let text = "vision features are not kept: classical augmentation makes no picture twice";
        observer.on(&Event::Note(text.into()));
        return Ok(None);
    }
    let model = &assembly.model;
    let shape = feature_shape(&model.config().clip, model.options().compute);
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
    Ok(Some(Kept::new(Arc::new(features))))
}

/// # Errors
/// [`Error::Config`] when features would be kept of a tower that changes.
pub fn refuse_trained_tower(data: &DataConfig, train_base: bool) -> Result<()> {
    if data.cache_vision == CacheVision::Off || !train_base {
        return Ok(());
    }
    let reason = "features of a vision tower that is trained change with every step";
    let hint = "set `data.cache_vision=off`, or `model.train_base=false`";
    Err(Error::config("data.cache_vision", reason, hint))
}

/// Everything that changes what the tower says of given bytes: its weights (all of them), sizes, dtypes, kind of device.
fn identity(model: &PrsMed) -> Identity {
    let options = model.options();
    let device = if options.device == Device::Cpu { "cpu" } else { "cuda" };
    let (stored, compute) = (options.stored, options.compute);
    let mut hash = Sha256::new();
    hash.update(format!("{:?} {stored:?} {compute:?} {device}", model.config().clip));
    let mut entries = model.stores().base.entries();
    entries.retain(|entry| entry.name.starts_with(TOWER_PREFIX));
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
