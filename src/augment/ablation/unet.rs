//! Training of the small U-Net as a [`Task`] of the engine: the same rows, sampler, loss and settings as PRS-Med's
//! masks, without texts.
//!
//! The words of the question are its only condition, as numbers of a hash table. Answers are never read.

use crate::data::classical::Augment;
use crate::data::image::{PixelConfig, sam_pixels};
use crate::data::loader::{Loader, LoaderOptions, Source, single_rows};
use crate::data::manifest::{Manifest, Row, Split, Target};
use crate::data::mixing_sampler::{Lengths, MixingSampler};
use crate::data::split::spread;
use crate::models::unet_segmenter::{Config, UnetSegmenter};
use crate::runtime::Runtime;
use crate::segment::RunConfig;
use crate::segment::batch::Batch;
use crate::segment::loss;
use crate::segment::task::workers;
use crate::segment::training::checkpoint_in;
use crate::tensor::store::{Role, Store, StoreOptions};
use crate::tensor::weights::{Archive, Staged};
use crate::tensor::{Device, Kind, Tensor, guard, no_grad, rng};
use crate::trainer::{self, BatchSize, Batches, Loss, Parameter, Ranks, Session, Shard, Task};
use crate::{Error, Result, files};
use image::DynamicImage;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// File of the weights in a checkpoint.
const WEIGHTS_FILE: &str = "unet.safetensors";
/// Side of the CLIP input, which this model does not have: as small as the loader allows.
const NO_CLIP: u32 = 1;

/// The network, its rows and the settings of its training.
pub(super) struct UnetTask {
    model: UnetSegmenter,
    store: Store,
    sizes: Config,
    source: Arc<Source>,
    sampler: MixingSampler,
    config: RunConfig,
    device: Device,
}

/// A micro-batch on the device.
pub(super) struct UnetBatch {
    /// `[b, 3, s, s]` u8.
    image: Tensor,
    /// `[b, 1, s, s]` fp32 in 0..=1.
    mask: Tensor,
    words: Words,
}

/// Padded word numbers of several questions.
struct Words {
    /// `[b, n]` i64.
    numbers: Tensor,
    /// `[b, n]` bool, true = a word.
    keep: Tensor,
}

impl Words {
    fn new(questions: &[Vec<i64>], device: Device) -> Self {
        let longest = questions.iter().map(Vec::len).max().unwrap_or(0);
        let padded = |ids: &Vec<i64>| ids.iter().copied().chain(std::iter::repeat(0)).take(longest).collect::<Vec<_>>();
        let is_word = |ids: &Vec<i64>| (0..longest).map(|i| i < ids.len()).collect::<Vec<_>>();
        let shape = [questions.len(), longest].map(|n| i64::try_from(n).expect("a few words"));
        let numbers: Vec<i64> = questions.iter().flat_map(padded).collect();
        let keep: Vec<bool> = questions.iter().flat_map(is_word).collect();
        Self {
            numbers: Tensor::from_slice(&numbers).view(shape).to_device(device),
            keep: Tensor::from_slice(&keep).view(shape).to_device(device),
        }
    }
}

/// Numbers of the words of a question, `0..num_words`: letters and digits in lower case, hashed with FNV-1a. Questions
/// use far fewer words than there are numbers, so collisions are rare.
fn words_of(question: &str, num_words: i64) -> Vec<i64> {
    let lower = question.to_lowercase();
    let words = lower.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    let hash = |word: &str| {
        word.bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    };
    let number = |word: &str| i64::try_from(hash(word) % num_words.unsigned_abs().max(1)).unwrap_or(0);
    let numbers: Vec<i64> = words.map(number).collect();
    // the mean over no words does not exist
    if numbers.is_empty() { vec![0] } else { numbers }
}

impl UnetTask {
    fn new(config: &RunConfig, manifest: &Arc<Manifest>, device: Device) -> Result<Self> {
        let sizes = Config::small();
        let side = config.model.image_size;
        let Some(sam_size) = u32::try_from(side).ok().filter(|_| side > 0 && side % sizes.stride() == 0) else {
            let reason = format!("the U-Net cannot use images of {side} pixels");
            let hint = format!("use a multiple of {}, or leave out `unet`", sizes.stride());
            return Err(Error::config("model.image_size", reason, hint));
        };
        let semantics = config.model.semantics;
        let pixels = PixelConfig {
            clip_size: NO_CLIP,
            sam_size,
            mask: semantics.mask_mode(),
            pad_offset: semantics.pad_offset(),
            labels: config.data.labels,
        };
        let num_words = sizes.num_words;
        let encoder = Arc::new(move |row: &Row| {
            let words = words_of(&row.question, num_words);
            let answer_start = words.len();
            Ok((words, answer_start))
        });
        let source = Source::new(Arc::clone(manifest), encoder, pixels).with_cache(config.data.cache_mib << 20);
        let source = match config.data.augment {
            Augment::None => source,
            augment => source.with_augment(augment, config.train.seed),
        };
        let has_mask = |row: &usize| manifest.rows[*row].target != Target::Unknown;
        let rows = manifest.rows_of(Split::Train).into_iter().filter(has_mask).collect();
        let rows = spread(rows, config.data.max_train_rows);
        let with_lengths = |rows: Vec<usize>| -> Result<Lengths> {
            let lengths = source.text_lengths(&rows)?.into_iter().map(|text| text.tokens).collect();
            Ok(Lengths { rows, lengths })
        };
        let (real, extra) = (with_lengths(rows)?, with_lengths(manifest.synthetic_rows())?);
        let train = &config.train;
        let effective_batch = train.micro_batch * train.accumulation;
        let sampler = MixingSampler::new(real, extra, config.data.synthetic_ratio, effective_batch, train.seed)?
            .with_real_end(config.data.synthetic_until, train.epochs, train.max_steps);
        let store = Store::new(StoreOptions { device, ..StoreOptions::cpu() });
        rng::seed(train.seed);
        let model = guard::guard(|| Ok(UnetSegmenter::new(&store.root(Role::Trainable), &sizes)))?;
        Ok(Self { model, store, sizes, source: Arc::new(source), sampler, config: config.clone(), device })
    }

    /// Trains to the end, or reads the weights of a finished training. An interrupted training continues.
    pub(super) fn train(
        config: &RunConfig,
        manifest: &Arc<Manifest>,
        folder: &Path,
        runtime: &Runtime,
    ) -> Result<Self> {
        let task = Self::new(config, manifest, runtime.device())?;
        let checkpoint = checkpoint_in(folder, true)?;
        files::create_folders(folder).map_err(Error::io(folder, "create"))?;
        let settings = config.to_toml();
        let session = Session {
            config: &config.train,
            folder,
            settings: &settings,
            resume: checkpoint.is_some(),
            profile: None,
            observer: runtime.observer().as_ref(),
            interrupt: runtime.interrupt(),
            has_room_for_graphs: false,
            ranks: Ranks::default(),
        };
        trainer::run(&task, &session)?;
        Ok(task)
    }

    /// Mask probabilities at the size of the image, row by row.
    pub(super) fn probabilities(&self, image: &DynamicImage, question: &str) -> Result<Vec<f32>> {
        let side = u32::try_from(self.config.model.image_size).unwrap_or(0);
        let pixels = sam_pixels(image, side)?;
        let own_size = [i64::from(image.height()), i64::from(image.width())];
        no_grad(|| {
            guard::guard(|| {
                let pixels =
                    Tensor::from_slice(&pixels).view([1, 3, i64::from(side), i64::from(side)]).to_device(self.device);
                let words = Words::new(&[words_of(question, self.sizes.num_words)], self.device);
                let logits = self.model.forward(&pixels, &words.numbers, &words.keep, self.kind());
                let mask = logits.upsample_bilinear2d(own_size, false, None, None).sigmoid();
                let mask =
                    Vec::<f32>::try_from(&mask.to_device(Device::Cpu).reshape([-1])).expect("a flat fp32 tensor");
                Error::check_finite("mask probabilities", &mask)?;
                Ok(mask)
            })
        })
    }

    fn kind(&self) -> Kind {
        self.config.train.precision.kind()
    }

    fn to_device(&self, batch: &Batch) -> UnetBatch {
        UnetBatch {
            image: batch.sam_image.to_device(self.device),
            mask: batch.mask.to_device(self.device).to_kind(Kind::Float) / 255.0,
            words: Words::new(&batch.texts, self.device),
        }
    }

    fn named_tensors(&self) -> Vec<(String, Tensor)> {
        self.store.entries().into_iter().map(|entry| (entry.name, entry.tensor)).collect()
    }
}

/// The micro-batches of each step.
struct Steps<'a> {
    task: &'a UnetTask,
    loader: Loader,
    /// Number of micro-batches of each step.
    counts: std::vec::IntoIter<usize>,
}

impl Iterator for Steps<'_> {
    type Item = Result<Vec<UnetBatch>>;

    fn next(&mut self) -> Option<Self::Item> {
        let count = self.counts.next()?;
        Some(self.loader.by_ref().take(count).map(|batch| Ok(self.task.to_device(&batch?.into()))).collect())
    }
}

impl Task for UnetTask {
    type Batch = UnetBatch;

    fn parameters(&self) -> Vec<Parameter> {
        self.named_tensors().into_iter().map(|(name, tensor)| Parameter { name, tensor }).collect()
    }

    fn steps_per_epoch(&self) -> u64 {
        self.sampler.steps_per_epoch()
    }

    fn batches(&self, epoch: u64, first: u64, shard: Shard) -> Result<Batches<'_, UnetBatch>> {
        let steps = self.sampler.batches(epoch);
        let steps = &steps[usize::try_from(first).unwrap_or(usize::MAX).min(steps.len())..];
        let micro = self.config.train.micro_batch;
        let (counts, rows) = shard.micro_batches(steps, micro);
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let set = self.config.data.workers;
        let workers = if set == 0 { workers(self.device, cores) } else { set };
        let options = LoaderOptions { workers, prefetch: self.config.data.prefetch, epoch, by_image: false };
        let loader = Loader::start(Arc::clone(&self.source), single_rows(rows), options)?;
        Ok(Box::new(Steps { task: self, loader, counts: counts.into_iter() }))
    }

    fn batch_size(&self, batch: &UnetBatch) -> BatchSize {
        BatchSize { samples: batch.image.size()[0] as f64, ..BatchSize::default() }
    }

    fn loss(&self, batch: &UnetBatch, effective_batch: BatchSize, _epoch: u64) -> Result<Loss> {
        let logits = self.model.forward(&batch.image, &batch.words.numbers, &batch.words.keep, self.kind());
        let total = loss::structure(&logits, &batch.mask, self.config.model.semantics, None) / effective_batch.samples;
        let parts = vec![("mask", total.detach())];
        Ok(Loss { total, parts })
    }

    fn save(&self, folder: &mut Staged) -> Result<()> {
        let tensors = self.named_tensors();
        let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        folder.write_tensors(WEIGHTS_FILE, &tensors, &BTreeMap::new())
    }

    fn load(&self, folder: &Path) -> Result<()> {
        let path = folder.join(WEIGHTS_FILE);
        let archive = Archive::open(&path)?;
        let report = no_grad(|| archive.load(&mut self.named_tensors(), |_| false))?;
        report.into_result(&path)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_bags_of_words() {
        let words = |text: &str| words_of(text, 1024);
        assert_eq!(words("Where is the Tumor?").len(), 4);
        assert_eq!(words("where is the tumor"), words("Where is the Tumor?"));
        assert_ne!(words("the aorta"), words("the liver"));
        assert_eq!(words("?!"), [0]);
        assert!(words("a b c d e f g h").into_iter().all(|number| (0..1024).contains(&number)));
    }

    #[test]
    fn padding_is_not_a_word() {
        let words = Words::new(&[vec![5, 6, 7], vec![8]], Device::Cpu);
        assert_eq!(words.numbers.size(), [2, 3]);
        assert_eq!(words.keep.sum(Kind::Int64).int64_value(&[]), 4);
        assert_eq!(words.numbers.int64_value(&[1, 0]), 8);
        assert_eq!(words.keep.int64_value(&[1, 1]), 0);
    }
}
