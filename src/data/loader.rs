//! Row lists -> batches, made ahead by worker threads and handed out in order.
//!
//! A feeder thread gives each row list to a rayon pool and queues the place where its result will appear; the queue is
//! bounded, so at most `prefetch` batches are in work or waiting. What is handed out depends on the lists, the seed and
//! the epoch, never on the number of workers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::batch::{Batch, Collated};
use super::classical::{self, Augment};
use super::image::PixelConfig;
use super::jitter::{self, Transform};
use super::manifest::{Manifest, Row};
use super::sample::{Pixels, Sample, at_row, decoded};
use crate::error::{Error, Result};

/// Makes token ids of a row's question and answer.
pub trait TextEncoder: Send + Sync {
    /// The ids, and the index of the answer's first id.
    ///
    /// # Errors
    /// Whatever the tokenizer says; the loader adds the row.
    fn encode(&self, row: &Row) -> Result<(Vec<i64>, usize)>;
}

impl<F: Fn(&Row) -> Result<(Vec<i64>, usize)> + Send + Sync> TextEncoder for F {
    fn encode(&self, row: &Row) -> Result<(Vec<i64>, usize)> {
        self(row)
    }
}

/// Everything that turns a row index into a sample; shared by the loaders of all epochs.
pub struct Source {
    manifest: Arc<Manifest>,
    encoder: Arc<dyn TextEncoder>,
    config: PixelConfig,
    augment: Augment,
    seed: u64,
    cache: Option<Cache>,
    /// For each row the first row with the same image and mask.
    pairs: Vec<usize>,
}

/// Sizes of a row's text in ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextLength {
    /// Question, template and answer, the image's id counted once.
    pub tokens: usize,
    /// Of these, the answer's.
    pub answer_tokens: usize,
}

impl Source {
    /// A source without jitter and without cache.
    pub fn new(manifest: Arc<Manifest>, encoder: Arc<dyn TextEncoder>, config: PixelConfig) -> Self {
        let mut first = HashMap::new();
        let pairs = (manifest.rows.iter().enumerate())
            .map(|(index, row)| *first.entry((&row.image_path, &row.mask_path)).or_insert(index))
            .collect();
        Self { manifest, encoder, config, augment: Augment::None, seed: 0, cache: None, pairs }
    }

    /// Changes samples anew every epoch; what is drawn depends on `seed`, epoch and row.
    #[must_use]
    pub fn with_augment(mut self, augment: Augment, seed: u64) -> Self {
        (self.augment, self.seed) = (augment, seed);
        self
    }

    /// Keeps preprocessed pixels in memory until `limit` bytes are used; what came first stays. Classical augmentation
    /// makes other pixels every time: they are never kept.
    #[must_use]
    pub fn with_cache(mut self, limit: usize) -> Self {
        self.cache = Some(Cache { limit, held: Mutex::default() });
        self
    }

    /// The rows.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Sizes and choices of the preprocessing.
    pub fn config(&self) -> PixelConfig {
        self.config
    }

    /// Number of ids of each given row, for [`super::order`]; without jitter.
    ///
    /// # Errors
    /// [`Error::Data`] naming the row whose text cannot be encoded.
    pub fn text_lengths(&self, rows: &[usize]) -> Result<Vec<TextLength>> {
        rows.par_iter()
            .map(|&index| {
                let row = &self.manifest.rows[index];
                let (ids, answer_start) = self.encoder.encode(row).map_err(|error| at_row(row, &error))?;
                Ok(TextLength { tokens: ids.len(), answer_tokens: ids.len().saturating_sub(answer_start) })
            })
            .collect()
    }

    /// One row as a sample.
    ///
    /// # Errors
    /// [`Error::Data`] naming the row's CSV file and line.
    pub fn sample(&self, index: usize, epoch: u64) -> Result<Sample> {
        let row = self.manifest.rows.get(index).ok_or_else(|| Error::Shape {
            reason: format!("row {index} was asked for, the data set has {}", self.manifest.rows.len()),
        })?;
        if self.augment == Augment::Classical {
            return self.classical(row, index, epoch).map_err(|error| at_row(row, &error));
        }
        let is_turned = self.augment == Augment::Turn;
        let turned = is_turned.then(|| jitter::apply(row, self.seed, epoch, index as u64)).flatten();
        let (row, transform) = turned.as_ref().map_or((row, Transform::IDENTITY), |(row, turn)| (row, *turn));
        self.make(row, index, transform).map_err(|error| at_row(row, &error))
    }

    /// The text depends on the mask here, so files come first.
    fn classical(&self, row: &Row, index: usize, epoch: u64) -> Result<Sample> {
        let (picture, mask) = decoded(row)?;
        let (row, picture, mask) = classical::apply(row, picture, mask, [self.seed, epoch, index as u64]);
        let (ids, answer_start) = self.encoder.encode(&row)?;
        let pixels = Arc::new(Pixels::of(&picture, &mask, &self.config)?);
        Ok(Sample { row: index, label: self.label(&row)?, ids, answer_start, pixels })
    }

    fn label(&self, row: &Row) -> Result<usize> {
        self.manifest.label(&row.modality).ok_or_else(|| Error::Shape {
            reason: format!("class `{}` is not among `{}`", row.modality, self.manifest.modalities.join("`, `")),
        })
    }

    fn make(&self, row: &Row, index: usize, transform: Transform) -> Result<Sample> {
        let (ids, answer_start) = self.encoder.encode(row)?;
        let label = self.label(row)?;
        let key = (self.pairs[index], transform);
        let pixels = if let Some(pixels) = self.cache.as_ref().and_then(|cache| cache.get(key)) {
            pixels
        } else {
            let pixels = Arc::new(Pixels::load(row, &self.config, transform)?);
            if let Some(cache) = &self.cache {
                cache.put(key, &pixels);
            }
            pixels
        };
        Ok(Sample { row: index, label, ids, answer_start, pixels })
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

    /// Nothing is ever thrown out: epochs visit every row once, so replacing the oldest would replace all.
    fn put(&self, key: Key, pixels: &Arc<Pixels>) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let used = held.0 + pixels.bytes();
        if used <= self.limit && held.1.insert(key, Arc::clone(pixels)).is_none() {
            held.0 = used;
        }
    }
}

/// How a [`Loader`] works; the numbers change speed and memory, never the batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Worker threads, at least 1.
    pub workers: usize,
    /// Batches in work or waiting, at least 1; each holds about `13 C^2 + 7 S^2` bytes a sample.
    pub prefetch: usize,
    /// Epoch, for the jitter.
    pub epoch: u64,
    /// Batches at the start of the list that are left out without being read (resume).
    pub skip: usize,
}

type Slot = Receiver<Result<Collated>>;

/// Hands out the batches of a list in order; ends after the first error.
pub struct Loader {
    queue: Option<Receiver<Slot>>,
    feeder: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    waited: Duration,
    left: usize,
}

impl Loader {
    /// Starts the workers on `batches` (row indices of each batch).
    ///
    /// # Errors
    /// [`Error::Config`] when the threads cannot be started.
    pub fn start(source: Arc<Source>, batches: Vec<Vec<usize>>, options: LoaderOptions) -> Result<Self> {
        let refused = |reason: String| Error::config("data.workers", reason, "lower `data.workers`");
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(options.workers.max(1))
            .thread_name(|index| format!("data-{index}"))
            // A job that panics drops its slot's sender, which `next` reports.
            .panic_handler(|_| {})
            .build()
            .map_err(|error| refused(error.to_string()))?;
        let left = batches.len().saturating_sub(options.skip);
        let (sender, queue) = sync_channel(options.prefetch.max(1) - 1);
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let feeder = std::thread::Builder::new()
            .name("data-feeder".into())
            .spawn(move || feed(&pool, &source, batches.into_iter().skip(options.skip), options.epoch, &sender, &flag))
            .map_err(|error| refused(error.to_string()))?;
        Ok(Self { queue: Some(queue), feeder: Some(feeder), stop, waited: Duration::ZERO, left })
    }

    /// Time spent waiting for batches so far: near zero when the workers keep up.
    pub fn waited(&self) -> Duration {
        self.waited
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
            // A panic of the feeder was printed by its thread; there is nothing to add here.
            let _ = feeder.join();
        }
    }
}

fn feed(
    pool: &rayon::ThreadPool,
    source: &Arc<Source>,
    batches: impl Iterator<Item = Vec<usize>>,
    epoch: u64,
    queue: &SyncSender<Slot>,
    stop: &Arc<AtomicBool>,
) {
    for rows in batches {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let (done, slot) = sync_channel(1);
        let (source, stop) = (Arc::clone(source), Arc::clone(stop));
        // First in, first out: the batch that is needed next must not wait for later ones.
        pool.spawn_fifo(move || {
            if let Some(result) = collate(&source, &rows, epoch, &stop) {
                // The consumer may be gone; then nobody misses the batch.
                let _ = done.send(result);
            }
        });
        if queue.send(slot).is_err() {
            return;
        }
    }
}

/// `None` when the loader was dropped meanwhile.
fn collate(source: &Source, rows: &[usize], epoch: u64, stop: &AtomicBool) -> Option<Result<Collated>> {
    let samples: Vec<Option<Result<Sample>>> =
        rows.par_iter().map(|&row| (!stop.load(Ordering::Relaxed)).then(|| source.sample(row, epoch))).collect();
    let samples: Option<Result<Vec<Sample>>> = samples.into_iter().collect();
    Some(samples?.and_then(|samples| Collated::new(&samples, source.config)))
}

impl Iterator for Loader {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let start = Instant::now();
        let result = self.queue.as_ref().and_then(|queue| queue.recv().ok()).and_then(|slot| slot.recv().ok());
        self.waited += start.elapsed();
        self.left -= 1;
        let result = result.unwrap_or_else(|| {
            Err(Error::Shape { reason: "a data worker stopped without a result; its message stands above".into() })
        });
        if result.is_err() {
            self.finish();
        }
        Some(result.map(Collated::into_tensors))
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.finish();
    }
}
