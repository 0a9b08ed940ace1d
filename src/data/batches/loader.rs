//! Data loader: worker threads prefetch batches and return them in order.
//!
//! A feeder thread submits each row list to a rayon pool and queues the channel of its result. The queue is bounded, so
//! at most `prefetch` batches are in work or waiting. Batches depend on the lists, the seed and the epoch, not on the
//! number of workers.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use crate::batch::Collated;
use crate::classical::{self, Augment};
use crate::decode;
use crate::features::{self, FeatureLookup, FeatureShape, Features};
use crate::flip_rotate::{self, Transform};
use crate::geometry::MaskNoise;
use crate::image::PixelConfig;
use crate::manifest::{Manifest, Presence, Row};
pub use crate::sample::TextEncoder;
use crate::sample::{Pixels, Sample, at_row, masks_of};
use crate::text::IMAGE_TOKEN;
use crate::unreadable::Unreadable;
use prsmed_base::error::{Error, Result};
use prsmed_base::panics;

/// Dataset: converts row indices to samples. Loaders of all epochs share it.
pub struct Source {
    manifest: Arc<Manifest>,
    encoder: Arc<dyn TextEncoder>,
    config: PixelConfig,
    augment: Augment,
    seed: u64,
    cache: Option<Cache>,
    vision: Option<Vision>,
    /// Rows that are skipped because their files cannot be read; `None` makes such a row an error.
    unreadable: Option<Arc<Unreadable>>,
    /// For each row the first row with the same image and mask.
    pairs: Vec<usize>,
    /// For each row the first row with the same image.
    images: Vec<usize>,
    /// Whether some rows of the manifest have no mask, or several.
    has_unknown_masks: bool,
}

/// Length of a row's text in ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextLength {
    /// Ids of question, template and answer; the image token counts once.
    pub tokens: usize,
    /// Ids of the answer.
    pub answer_tokens: usize,
    /// Ids up to the image token, which questions about one image share.
    pub prefix_tokens: usize,
}

impl Source {
    /// A source without augmentation and without cache.
    pub fn new(manifest: Arc<Manifest>, encoder: Arc<dyn TextEncoder>, config: PixelConfig) -> Self {
        let mut first_pair = HashMap::<(PathBuf, Vec<PathBuf>), usize>::new();
        let mut first_image = HashMap::new();
        let rows = || manifest.rows.iter().enumerate();
        let pair =
            |row: &Row| (row.image_path.clone(), row.targets.iter().map(|target| target.mask_path.clone()).collect());
        let pairs = rows().map(|(index, row)| *first_pair.entry(pair(row)).or_insert(index)).collect();
        let images = rows().map(|(index, row)| *first_image.entry(&row.image_path).or_insert(index)).collect();
        let augment = Augment::None;
        let (cache, vision, unreadable) = (None, None, None);
        let has_unknown_masks = manifest.has_unknown_masks();
        Self {
            manifest,
            encoder,
            config,
            augment,
            seed: 0,
            cache,
            vision,
            unreadable,
            pairs,
            images,
            has_unknown_masks,
        }
    }

    /// Adds augmentation, new in every epoch. Its random numbers depend on `seed`, epoch and row (or image).
    #[must_use]
    pub fn with_augment(mut self, augment: Augment, seed: u64) -> Self {
        (self.augment, self.seed) = (augment, seed);
        self
    }

    /// Caches preprocessed pixels in memory, up to `limit` bytes; a full cache keeps its entries. Classical
    /// augmentation never repeats pixels, so it excludes the cache.
    #[must_use]
    pub fn with_cache(mut self, limit: usize) -> Self {
        self.cache = Some(Cache { limit, held: Mutex::default() });
        self
    }

    /// Adds a vision feature cache. Samples of images with cached features have no pixels for the tower.
    #[must_use]
    pub fn with_features(mut self, features: Arc<Features>) -> Self {
        self.vision = Some(Vision { features, keys: Mutex::default() });
        self
    }

    /// Lets loaders skip rows whose image or mask cannot be read, up to the limit of `unreadable`. Without it, such a
    /// row is an error.
    #[must_use]
    pub fn skipping(mut self, unreadable: Arc<Unreadable>) -> Self {
        self.unreadable = Some(unreadable);
        self
    }

    /// Shape of cached features, if there is a cache.
    pub fn feature_shape(&self) -> Option<FeatureShape> {
        self.vision.as_ref().map(|vision| vision.features.shape)
    }

    /// The rows.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Settings of the preprocessing.
    pub fn config(&self) -> PixelConfig {
        self.config
    }

    /// Text length of each given row, for the sampler; without augmentation.
    ///
    /// # Errors
    /// [`Error::Data`] naming the row whose text cannot be encoded.
    pub fn text_lengths(&self, rows: &[usize]) -> Result<Vec<TextLength>> {
        rows.par_iter()
            .map(|&index| {
                let row = &self.manifest.rows[index];
                let (ids, answer_start) = self.encoder.encode(row).map_err(|error| at_row(row, &error))?;
                let image_at = ids.iter().position(|id| *id == IMAGE_TOKEN);
                Ok(TextLength {
                    tokens: ids.len(),
                    answer_tokens: ids.len().saturating_sub(answer_start),
                    prefix_tokens: image_at.map_or(0, |index| index + 1),
                })
            })
            .collect()
    }

    /// Groups `rows` by image, at most `most` in a group. Groups are in the order of their first rows.
    pub fn by_image(&self, rows: &[usize], most: usize) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut open = HashMap::new();
        for &row in rows {
            let group = open.entry(self.images[row]).or_insert(usize::MAX);
            if let Some(rows) = groups.get_mut(*group).filter(|group| group.len() < most) {
                rows.push(row);
            } else {
                *group = groups.len();
                groups.push(vec![row]);
            }
        }
        groups
    }

    /// One row as a sample.
    ///
    /// # Errors
    /// [`Error::Data`] naming the row's CSV file and line.
    pub fn sample(&self, index: usize, epoch: u64) -> Result<Sample> {
        let mut samples = self.samples(&[index], index as u64, epoch)?;
        samples.pop().ok_or_else(|| Error::Shape { reason: "a row without a sample".into() })
    }

    /// Rows of one image as samples with the same augmentation.
    ///
    /// # Errors
    /// As [`Self::sample`].
    pub fn group(&self, indices: &[usize], epoch: u64) -> Result<Vec<Sample>> {
        let key = indices.first().and_then(|&index| self.images.get(index)).copied().unwrap_or(0);
        self.samples(indices, key as u64, epoch)
    }

    /// The samples of rows of one image, without the rows that are skipped.
    fn usable(&self, rows: &[usize], options: LoaderOptions) -> Result<Vec<Sample>> {
        let make = |rows: &[usize]| match rows {
            [row] if !options.by_image => self.sample(*row, options.epoch).map(|sample| vec![sample]),
            rows => self.group(rows, options.epoch),
        };
        let (error, unreadable) = match (make(rows), &self.unreadable) {
            (Err(error @ (Error::Data { .. } | Error::Io { .. })), Some(unreadable)) => (error, unreadable),
            (outcome, _) => return outcome,
        };
        let mut readable = Vec::new();
        for &index in rows {
            let Some(row) = self.manifest.rows.get(index) else { return Err(error) };
            let mut masks = row.targets.iter().filter(|target| !target.lacks_mask());
            let read = |_| masks.try_for_each(|target| decode::stored_mask(&target.mask_path).map(drop));
            match decode::image(&row.image_path).and_then(read) {
                Ok(()) => readable.push(index),
                Err(cause) => unreadable.add(index, at_row(row, &cause))?,
            }
        }
        // files that do not fit together are an error of the data set: it fails again
        if readable.is_empty() { Ok(Vec::new()) } else { make(&readable) }
    }

    /// `key` selects the random numbers of augmentation.
    fn samples(&self, indices: &[usize], key: u64, epoch: u64) -> Result<Vec<Sample>> {
        let row = |&index: &usize| {
            self.manifest.rows.get(index).ok_or_else(|| Error::Shape {
                reason: format!("row {index} was requested, the data set has {}", self.manifest.rows.len()),
            })
        };
        let rows = indices.iter().map(row).collect::<Result<Vec<&Row>>>()?;
        if self.augment == Augment::Classical {
            return self.classical(indices, &rows, key, epoch);
        }
        let is_turned = self.augment == Augment::FlipRotate;
        let turned = is_turned.then(|| flip_rotate::apply(&rows, self.seed, epoch, key)).flatten();
        let (rows, transform) =
            turned.as_ref().map_or((rows, Transform::IDENTITY), |(rows, turn)| (rows.iter().collect(), *turn));
        let mut samples = Vec::with_capacity(indices.len());
        for (row, &index) in rows.into_iter().zip(indices) {
            let pixels = self.known_pixels(&samples, index);
            samples.push(self.make(row, index, transform, pixels).map_err(|error| at_row(row, &error))?);
        }
        Ok(samples)
    }

    /// Loads the files first, because the texts depend on the masks.
    fn classical(&self, indices: &[usize], rows: &[&Row], key: u64, epoch: u64) -> Result<Vec<Sample>> {
        let Some(first) = rows.first() else { return Ok(Vec::new()) };
        let image = decode::image(&first.image_path).map_err(|error| at_row(first, &error))?;
        let masks =
            rows.iter().map(|row| masks_of(row, &image, self.config.labels).map_err(|error| at_row(row, &error)));
        let masks = masks.collect::<Result<Vec<_>>>()?;
        let (image, changed) = classical::apply(image, rows, masks, [self.seed, epoch, key]);
        let mut samples = Vec::with_capacity(indices.len());
        for ((row, masks), &index) in changed.iter().zip(indices) {
            let make = || {
                let (ids, answer_start) = self.encoder.encode(row)?;
                let pixels = match self.known_pixels(&samples, index) {
                    Some(pixels) => pixels,
                    None => Arc::new(Pixels::of(&image, masks, &self.config)?),
                };
                let seen = self.vision.as_ref().map(|vision| vision.of(features::key_of(&pixels.tower)));
                Ok(Sample {
                    row: index,
                    label: self.label(row)?,
                    ids,
                    answer_start,
                    has_mask: has_mask(row),
                    pixels,
                    geometry: Vec::new(),
                    moved: Vec::new(),
                    text: row.clone(),
                    seen,
                })
            };
            let sample = make().map_err(|error| at_row(row, &error))?;
            samples.push(sample);
        }
        Ok(samples)
    }

    /// The pixels of an earlier sample of the same image and mask.
    fn known_pixels(&self, samples: &[Sample], index: usize) -> Option<Arc<Pixels>> {
        let same = samples.iter().find(|sample| self.pairs[sample.row] == self.pairs[index]);
        same.map(|sample| Arc::clone(&sample.pixels))
    }

    fn label(&self, row: &Row) -> Result<usize> {
        self.manifest.label(&row.modality).ok_or_else(|| Error::Shape {
            reason: format!("class `{}` is not among `{}`", row.modality, self.manifest.modalities.join("`, `")),
        })
    }

    fn make(&self, row: &Row, index: usize, transform: Transform, known: Option<Arc<Pixels>>) -> Result<Sample> {
        let (ids, answer_start) = self.encoder.encode(row)?;
        let label = self.label(row)?;
        let key = (self.pairs[index], transform);
        let seen = self.vision.as_ref().and_then(|vision| vision.known(key));
        let pixels = match known.filter(|pixels| seen.is_some() || !pixels.tower.is_empty()) {
            Some(pixels) => pixels,
            None => self.pixels(row, key, seen.is_some())?,
        };
        let seen = match (&self.vision, seen) {
            (Some(vision), None) => Some(vision.remember(key, &pixels.tower)),
            (_, seen) => seen,
        };
        let (has_mask, geometry, moved, text) = (has_mask(row), Vec::new(), Vec::new(), row.clone());
        Ok(Sample { row: index, label, ids, answer_start, has_mask, pixels, geometry, moved, text, seen })
    }

    /// Pixels from the cache or the files. The tower's pixels are left out if they are not needed.
    fn pixels(&self, row: &Row, key: Key, without_tower: bool) -> Result<Arc<Pixels>> {
        let cached = self.cache.as_ref().and_then(|cache| cache.get(key));
        if let Some(pixels) = cached.filter(|pixels| without_tower || !pixels.tower.is_empty()) {
            return Ok(pixels);
        }
        let load = if without_tower { Pixels::load_for_segmenter } else { Pixels::load };
        let pixels = Arc::new(load(row, &self.config, key.1)?);
        if let Some(cache) = &self.cache {
            cache.put(key, &pixels);
        }
        Ok(pixels)
    }
}

/// For each target of a row, whether its mask is known.
fn has_mask(row: &Row) -> Vec<bool> {
    row.targets.iter().map(|target| target.presence != Presence::Unknown).collect()
}

/// Vision feature cache, and the keys of images that were loaded before.
struct Vision {
    features: Arc<Features>,
    keys: Mutex<HashMap<Key, features::Key>>,
}

impl Vision {
    fn of(&self, image: features::Key) -> FeatureLookup {
        self.features.get(&image).map_or(FeatureLookup::New(image), FeatureLookup::Features)
    }

    /// The features of an image that was loaded before; `None` when its pixels are needed.
    fn known(&self, key: Key) -> Option<FeatureLookup> {
        let image = *self.keys.lock().unwrap_or_else(PoisonError::into_inner).get(&key)?;
        self.features.get(&image).map(FeatureLookup::Features)
    }

    fn remember(&self, key: Key, tower: &[u8]) -> FeatureLookup {
        let image = features::key_of(tower);
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).insert(key, image);
        self.of(image)
    }
}

type Key = (usize, Transform);

struct Cache {
    limit: usize,
    held: Mutex<(usize, HashMap<Key, Arc<Pixels>>)>,
}

impl Cache {
    fn get(&self, key: Key) -> Option<Arc<Pixels>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).1.get(&key).cloned()
    }

    /// A full cache keeps its entries. Epochs visit every row once, so replacing the oldest would replace all.
    fn put(&self, key: Key, pixels: &Arc<Pixels>) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let used = held.0 + pixels.bytes();
        if used <= self.limit && held.1.insert(key, Arc::clone(pixels)).is_none() {
            held.0 = used;
        }
    }
}

/// Groups of one row each.
pub fn single_rows(batches: Vec<Vec<usize>>) -> Vec<Vec<Vec<usize>>> {
    batches.into_iter().map(|rows| rows.into_iter().map(|row| vec![row]).collect()).collect()
}

/// Settings of a [`Loader`]. Workers and waiting batches affect speed and memory only.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoaderOptions {
    /// Worker threads, at least 1.
    pub workers: usize,
    /// Batches in work or waiting, at least 1; each holds about `3 C^2 + 4 S^2` bytes a sample.
    pub prefetch: usize,
    /// Epoch, for augmentation.
    pub epoch: u64,
    /// Draw augmentations by image, as groups of several rows need it; otherwise by row.
    pub by_image: bool,
    /// Give samples their masks in numbers, changed by this noise.
    pub geometry: Option<MaskNoise>,
}

/// `None`: every row of the batch was skipped.
type Loaded = Result<Option<Collated>>;
type Slot = Receiver<Loaded>;

/// Iterator over the batches of a list, in order, without those whose rows were all skipped. Ends after the first error.
pub struct Loader {
    queue: Option<Receiver<Slot>>,
    feeder: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    waited: Duration,
    left: usize,
}

impl Loader {
    /// Starts the workers on `batches`: groups of row indices, where the rows of a group share an image.
    ///
    /// # Errors
    /// [`Error::Config`] if the threads cannot be started.
    pub fn start(source: Arc<Source>, batches: Vec<Vec<Vec<usize>>>, options: LoaderOptions) -> Result<Self> {
        let refused = |reason: String| Error::config("data.workers", reason, "lower `data.workers`");
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(options.workers.max(1))
            .thread_name(|index| format!("data-{index}"))
            // without a handler, a panic outside of `collate` would end the process
            .panic_handler(|_| {})
            .build()
            .map_err(|error| refused(error.to_string()))?;
        let left = batches.len();
        let (sender, queue) = sync_channel(options.prefetch.max(1) - 1);
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let feeder = std::thread::Builder::new()
            .name("data-feeder".into())
            .spawn(move || feed(&pool, &source, batches, options, &sender, &flag))
            .map_err(|error| refused(error.to_string()))?;
        let (feeder, waited) = (Some(feeder), Duration::ZERO);
        Ok(Self { queue: Some(queue), feeder, stop, waited, left })
    }

    /// Time spent waiting for batches so far: near zero when the workers keep up.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The next batch; waits for it.
    fn take_next(&mut self) -> Loaded {
        let slot = self.queue.as_ref().and_then(|queue| queue.recv().ok());
        slot.and_then(|slot| slot.recv().ok()).unwrap_or_else(|| Err(stopped()))
    }

    /// Batches still to come.
    pub fn remaining(&self) -> usize {
        self.left
    }

    fn finish(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.left = 0;
        // Closing the queue wakes a feeder that waits for room in it.
        self.queue = None;
        if let Some(feeder) = self.feeder.take() {
            // Without a feeder there are no more batches, which `next` reports.
            let _ = feeder.join();
        }
    }
}

fn stopped() -> Error {
    Error::Internal { reason: "a data worker stopped without a result".into() }
}

fn panicked(payload: &(dyn Any + Send)) -> Error {
    Error::Internal { reason: format!("a data worker panicked: {}", panics::describe(payload)) }
}

fn feed(
    pool: &rayon::ThreadPool,
    source: &Arc<Source>,
    batches: Vec<Vec<Vec<usize>>>,
    options: LoaderOptions,
    queue: &SyncSender<Slot>,
    stop: &Arc<AtomicBool>,
) {
    for groups in batches {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let (done, slot) = sync_channel(1);
        let (source, stop) = (Arc::clone(source), Arc::clone(stop));
        // First in, first out: the batch that is needed next must not wait for later ones.
        pool.spawn_fifo(move || {
            let work = AssertUnwindSafe(|| collate(&source, &groups, options, &stop));
            if let Some(result) = catch_unwind(work).unwrap_or_else(|panic| Some(Err(panicked(&*panic)))) {
                // The consumer may have ended; the batch is then not needed.
                let _ = done.send(result);
            }
        });
        if queue.send(slot).is_err() {
            return;
        }
    }
}

/// `None` when the loader was dropped meanwhile.
fn collate(source: &Source, groups: &[Vec<usize>], options: LoaderOptions, stop: &AtomicBool) -> Option<Loaded> {
    let side = source.config.sam_size;
    let make = |group: &Vec<usize>| {
        let samples = source.usable(group, options)?;
        let Some(noise) = options.geometry else { return Ok(samples) };
        Ok(samples
            .into_iter()
            .map(|sample| sample.with_geometry(side, noise, options.epoch, &*source.encoder))
            .collect())
    };
    let samples: Vec<Option<Result<Vec<Sample>>>> =
        groups.par_iter().map(|group| (!stop.load(Ordering::Relaxed)).then(|| make(group))).collect();
    let samples: Option<Result<Vec<Vec<Sample>>>> = samples.into_iter().collect();
    Some(samples?.and_then(|mut samples| {
        samples.retain(|group| !group.is_empty());
        if samples.is_empty() && source.unreadable.is_some() {
            return Ok(None);
        }
        let batch = Collated::new(&samples, source.config, source.feature_shape())?;
        Ok(Some(if source.has_unknown_masks { batch.with_unknown_masks() } else { batch }))
    }))
}

impl Iterator for Loader {
    type Item = Result<Collated>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(batch) = self.next_or_skipped()?.transpose() {
                return Some(batch);
            }
        }
    }
}

impl Loader {
    /// The next batch of the list: `Ok(None)` if all of its rows were skipped. `None` at the end and after an error.
    pub fn next_or_skipped(&mut self) -> Option<Result<Option<Collated>>> {
        if self.left == 0 {
            return None;
        }
        let start = Instant::now();
        let result = self.take_next();
        self.waited += start.elapsed();
        self.left -= 1;
        if result.is_err() {
            self.finish();
        }
        Some(result)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.finish();
    }
}
