//! A fine-tuning from settings and rows to a run folder: [`Finetuning`] and the finished [`FinetunedRun`].

use super::cache::{Cache, CacheEncoder, ImageFiles, Texts};
use super::samples::{Extract, Quality, Request, SampledClass};
use super::settings::FinetuneRun;
use super::step::Denoiser;
use super::task::{Data, FinetuneTask, TrainingImage};
use crate::augment::inpaint_mask::SquareFrame;
use crate::augment::inputs::JobInputs;
use crate::augment::pipeline::{Placement, tokenize};
use crate::augment::pipeline_config::{PipelineConfig, RANDOM_DIGEST};
use crate::augment::prompt::DrawnPrompts;
use crate::augment::quality::{FeatureSource, MIN_IMAGES};
use crate::augment::settings::Mode;
use crate::data::decode;
use crate::data::identity::DataIdentity;
use crate::data::manifest::{Manifest, Split};
use crate::data::split::spread;
use crate::runtime::Runtime;
use crate::segment::resume::{self, checkpoint_in};
use crate::tensor::rng;
use crate::tensor::weights::{sha256, verify_folder};
use crate::trainer::{self, Ranks, Session, TrainingOutcome, profile};
use crate::{Error, Result, files};
use rand::Rng;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// Folder of encoded images and captions in a run folder.
const CACHE: &str = "cache";
/// Folder of the newest samples in a run folder.
const SAMPLES: &str = "samples/latest";
/// Real images of a class that samples are compared with.
const MOST_REAL_IMAGES: usize = 2048;

/// A fine-tuning that has not started.
pub struct Finetuning<'a> {
    /// All settings.
    pub run: &'a FinetuneRun,
    /// The same as TOML, for the run folder.
    pub toml: String,
    /// Sizes and files of the generator.
    pub pipeline_config: &'a PipelineConfig,
    /// Rows: `train` rows are learned, `val` rows choose the best checkpoint.
    pub manifest: &'a Manifest,
    /// The run folder.
    pub folder: &'a Path,
    /// Continue from `last/` in the run folder if it exists.
    pub resumes: bool,
    /// What computes the features of images, if samples are measured.
    pub features: Option<(FeatureSource, Extract)>,
    /// Settings of the memory profile, if there is one.
    pub profile: Option<&'a profile::ProfileSettings>,
    /// The processes that train together.
    pub ranks: Ranks<'a>,
    /// Device, observer and interrupt flag.
    pub runtime: &'a Runtime,
}

/// A finished fine-tuning.
pub struct FinetunedRun {
    /// Steps, time and best score.
    pub outcome: TrainingOutcome,
    /// The task with the weights after the last step.
    pub task: FinetuneTask,
}

impl Finetuning<'_> {
    /// The checkpoint to continue from, if any, with warnings about settings that make the run differ from an
    /// uninterrupted one. Nothing is loaded or changed.
    ///
    /// # Errors
    /// [`Error::Config`] for a folder that already contains a run, and for a setting that may not change on resume;
    /// [`Error::Data`] for rows that have changed.
    pub fn checkpoint(&self) -> Result<Option<(PathBuf, Vec<String>)>> {
        let Some(folder) = checkpoint_in(self.folder, self.resumes)? else { return Ok(None) };
        let declared = (self.run, FinetuneRun::declarations());
        let warnings = resume::check_settings_and_rows(&folder, (declared.0, &declared.1), self.manifest)?;
        Ok(Some((folder, warnings)))
    }

    /// Encodes images and captions, and trains to the end.
    ///
    /// # Errors
    /// As [`Self::checkpoint`] and [`trainer::run()`]; [`Error::Data`] without training images, or for one that cannot
    /// be read; [`Error::Weights`]; [`Error::Interrupted`].
    pub fn run(&self) -> Result<FinetunedRun> {
        let checkpoint = self.checkpoint()?;
        if let Some((folder, warnings)) = &checkpoint {
            verify_folder(folder)?;
            for warning in warnings {
                self.runtime.warn(warning.as_str());
            }
        }
        files::create_folders(self.folder).map_err(Error::io(self.folder, "create"))?;
        let from = checkpoint.as_ref().map(|(folder, _)| folder.as_path());
        let task = self.prepare(from)?;
        let (trained, all) = task.denoiser.network.num_weights();
        let share = trained as f64 / all as f64 * 100.0;
        let (trained, all) = (with_commas(trained), with_commas(all));
        self.runtime.note(format!("trainable params: {trained} || all params: {all} || trainable%: {share:.4}"));
        let session = Session {
            config: &self.run.train,
            folder: self.folder,
            settings: &self.toml,
            resume: checkpoint.is_some(),
            profile: self.profile,
            observer: self.runtime.observer().as_ref(),
            interrupt: self.runtime.interrupt(),
            has_room_for_graphs: false,
            ranks: self.ranks,
        };
        let outcome = trainer::run(&task, &session)?;
        Ok(FinetunedRun { outcome, task })
    }

    fn prepare(&self, checkpoint: Option<&Path>) -> Result<FinetuneTask> {
        // a caption is a prompt for whole images, as for generating them
        let random = (self.run.train.seed, "finetune caption");
        let mut texts = DrawnPrompts::new(&self.run.finetune.prompts, Mode::Img2img, random)?;
        let train = self.items(Split::Train, &mut texts);
        if train.is_empty() {
            let hint = "the generator learns from train rows: give at least one row the split `train`";
            return Err(Error::data(&self.manifest.root, "there are no training rows", hint));
        }
        let validated = self.items(Split::Val, &mut texts);
        let empty = texts.number(String::new());
        let device = self.runtime.device();
        let placement = Placement { device, kind: self.run.train.precision.kind(), seed: self.run.train.seed };
        let sums = self.sums(&train, &validated)?;
        let sum_of = |path: &'_ Path| sums[path].as_str();
        let files = train.iter().chain(&validated).map(|item| {
            Ok(ImageFiles {
                image: (item.image.as_path(), sum_of(&item.image)),
                mask: (item.mask.as_path(), sum_of(&item.mask)),
                frame: self.frame(&item.image)?,
            })
        });
        let images: Vec<ImageFiles> = files.collect::<Result<_>>()?;
        let weights = self.pipeline_config.weight_digests()?;
        let ids = tokenize(self.pipeline_config, &texts.texts, "captions", self.runtime.observer().as_ref())?;
        let texts = Texts { texts: texts.texts, ids };
        let inputs = self.inputs(&weights, &texts, &sums);
        if let Some(folder) = checkpoint {
            self.ranks.agree_on(inputs.check(folder))?;
        }
        let encoding = CacheEncoder {
            pipeline_config: self.pipeline_config,
            model_sha256: weights.last().map_or(RANDOM_DIGEST, |(_, hash)| hash),
            placement,
            condition: self.run.finetune.condition(),
            ranks: self.ranks,
            observer: self.runtime.observer().as_ref(),
            interrupt: self.runtime.interrupt(),
        };
        let cache = Cache::fill(&self.folder.join(CACHE), &images, &texts, &encoding)?;
        let denoiser = Denoiser::new(self.pipeline_config, self.run, device)?;
        let identity = DataIdentity::of(self.manifest)?;
        let data = Data { cache, train, validated, empty, identity, inputs };
        let quality = match &self.features {
            Some(features) if self.run.finetune.samples > 0 => Some(self.quality(&data, features)?),
            _ => None,
        };
        Ok(FinetuneTask { denoiser, data, quality, resolved: self.toml.clone() })
    }

    /// The hash of each image and mask file.
    fn sums(&self, train: &[TrainingImage], validated: &[TrainingImage]) -> Result<BTreeMap<PathBuf, String>> {
        let paths: BTreeSet<&PathBuf> =
            train.iter().chain(validated).flat_map(|item| [&item.image, &item.mask]).collect();
        let sums = paths.into_par_iter().map(|path| Ok((path.clone(), sha256(path)?)));
        self.ranks.agree_on(sums.collect::<Result<_>>())
    }

    /// Everything that the training reads besides settings and rows.
    fn inputs(&self, weights: &[(String, String)], texts: &Texts, sums: &BTreeMap<PathBuf, String>) -> JobInputs {
        let mut inputs = JobInputs::of_generator(self.pipeline_config, weights);
        inputs.add("the text of the captions", format!("{:?}", texts.texts));
        inputs.add("the tokenizer", format!("{:?}", texts.ids));
        for (path, sum) in sums {
            // a data root may move
            let Ok(inside) = path.strip_prefix(&self.manifest.root) else { continue };
            inputs.add_hash(format!("`{}`", inside.display()), sum);
        }
        inputs
    }

    /// Position of an image in the input of the networks.
    fn frame(&self, path: &Path) -> Result<SquareFrame> {
        let side = u32::try_from(self.run.finetune.image_size)
            .map_err(|_| Error::config("finetune.image_size", "is not a valid side", "use 512 or 1024"))?;
        SquareFrame::new(decode::dimensions(path)?, side)
    }

    /// The samples of each class, and the features of its real training images.
    fn quality(&self, data: &Data, (source, extract): &(FeatureSource, Extract)) -> Result<Quality> {
        let seed = self.run.train.seed;
        let mut classes: BTreeMap<&str, [Vec<usize>; 2]> = BTreeMap::new();
        for (number, item) in data.train.iter().chain(&data.validated).enumerate() {
            classes.entry(&item.modality).or_default()[usize::from(number >= data.train.len())].push(number);
        }
        let least = usize::try_from(MIN_IMAGES).expect("a small number");
        if classes.values().all(|[train, _]| train.len() < least) {
            // no class is large enough for itself
            let mut all = <[Vec<usize>; 2]>::default();
            for [train, validated] in classes.into_values() {
                all[0].extend(train);
                all[1].extend(validated);
            }
            classes = BTreeMap::from([("all classes", all)]);
        }
        let small = classes.iter().filter(|(_, [train, _])| train.len() < least).map(|(modality, _)| *modality);
        let small: Vec<&str> = small.collect();
        if !small.is_empty() {
            let names = small.join(", ");
            self.runtime.warn(format!("samples of these classes are not measured, they have too few images: {names}"));
        }
        classes.retain(|_, [train, _]| train.len() >= least);
        if classes.is_empty() {
            let reason = format!("needs at least {least} real training images");
            return Err(Error::config("finetune.samples", reason, "add images, or set it to 0"));
        }
        let each = self.run.finetune.samples.div_ceil(classes.len()).max(least);
        self.runtime.note(format!("each validation makes {} samples", each * classes.len()));
        let item = |number: usize| data.train.get(number).unwrap_or_else(|| &data.validated[number - data.train.len()]);
        let class = |(class, (modality, [train, validated])): (usize, (&str, [Vec<usize>; 2]))| {
            let files: Vec<PathBuf> =
                spread(train.clone(), MOST_REAL_IMAGES).into_iter().map(|number| item(number).image.clone()).collect();
            // images that are not trained give regions, masks and captions
            let sources = if validated.is_empty() { &train } else { &validated };
            let request = |k: usize| {
                let number = sources[k % sources.len()];
                let TrainingImage { image, captions, negative, .. } = item(number);
                let seed = rng::stream(seed, "finetune samples", &[class as u64, k as u64]).random();
                let caption = captions[k / sources.len() % captions.len()];
                Ok(Request { item: number, caption, negative: *negative, seed, frame: self.frame(image)? })
            };
            let samples = (0..each).map(request).collect::<Result<_>>()?;
            Ok(SampledClass { modality: modality.to_owned(), real: extract(&files)?, samples })
        };
        Ok(Quality {
            folder: self.folder.join(SAMPLES),
            pipeline_config: self.pipeline_config.clone(),
            source: source.clone(),
            extract: Rc::clone(extract),
            interrupt: Arc::clone(self.runtime.interrupt()),
            classes: classes.into_iter().enumerate().map(class).collect::<Result<_>>()?,
        })
    }

    /// The images of a split in the order of their first rows, with one caption for each row. Synthetic rows, and rows
    /// whose mask shows no target, are left out.
    fn items(&self, split: Split, texts: &mut DrawnPrompts) -> Vec<TrainingImage> {
        let mut items: Vec<TrainingImage> = Vec::new();
        let mut index_of: HashMap<(&Path, &Path), usize> = HashMap::new();
        for number in self.manifest.rows_of(split) {
            let row = &self.manifest.rows[number];
            if !row.is_present() {
                continue;
            }
            let index = *index_of.entry((&row.image_path, &row.target().mask_path)).or_insert_with(|| {
                let (image, mask) = (row.image_path.clone(), row.target().mask_path.clone());
                let negative = texts.draw(row, number as u64).negative;
                let modality = row.modality.clone();
                items.push(TrainingImage { image, mask, modality, captions: Vec::new(), negative });
                items.len() - 1
            });
            items[index].captions.push(texts.draw(row, number as u64).positive);
        }
        items
    }
}

/// `1234567` as `1,234,567`.
fn with_commas(count: usize) -> String {
    let digits = count.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy);
    groups.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_commas() {
        assert_eq!([0, 999, 1000, 334_888_960].map(with_commas), ["0", "999", "1,000", "334,888,960"]);
    }
}
