//! A fine-tuning from settings and rows to a run folder: [`Finetuning`] and the finished [`FinetunedRun`].

use super::cache::{Cache, Encoding, ImageFiles};
use super::network::Network;
use super::objective::Objective;
use super::settings::FinetuneRun;
use super::task::{FinetuneTask, Item, Parts};
use crate::augment::pipeline::Placement;
use crate::augment::pipeline_config::PipelineConfig;
use crate::augment::prompt::Prompts;
use crate::augment::settings::Mode;
use crate::data::identity::DataIdentity;
use crate::data::manifest::{Manifest, Row, Split};
use crate::runtime::Runtime;
use crate::segment::resume;
use crate::segment::training::checkpoint_in;
use crate::tensor::rng;
use crate::tensor::weights::verify_folder;
use crate::trainer::{self, Outcome, Session};
use crate::{Error, Result, files};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Folder of encoded images and captions in a run folder.
const CACHE: &str = "cache";

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
    /// Device, observer and interrupt flag.
    pub runtime: &'a Runtime,
}

/// A finished fine-tuning.
pub struct FinetunedRun {
    /// Steps, time and best score.
    pub outcome: Outcome,
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
        let task = self.prepare()?;
        let (trained, all) = task.network().num_weights();
        let share = trained as f64 / all as f64 * 100.0;
        let (trained, all) = (with_commas(trained), with_commas(all));
        self.runtime.note(format!("trainable params: {trained} || all params: {all} || trainable%: {share:.4}"));
        let session = Session {
            config: &self.run.train,
            folder: self.folder,
            settings: &self.toml,
            resume: checkpoint.is_some(),
            profile: None,
            observer: self.runtime.observer().as_ref(),
            interrupt: self.runtime.interrupt(),
            has_room_for_graphs: false,
        };
        let outcome = trainer::run(&task, &session)?;
        Ok(FinetunedRun { outcome, task })
    }

    fn prepare(&self) -> Result<FinetuneTask> {
        let mut texts = Captions::new(self.run)?;
        let train = self.items(Split::Train, &mut texts);
        if train.is_empty() {
            let hint = "the generator learns from train rows: give at least one row the split `train`";
            return Err(Error::data(&self.manifest.root, "there are no training rows", hint));
        }
        let validated = self.items(Split::Val, &mut texts);
        let empty = texts.number(String::new());
        let device = self.runtime.device();
        let placement = Placement { device, kind: self.run.train.precision.kind(), seed: self.run.train.seed };
        let images: Vec<ImageFiles> =
            train.iter().chain(&validated).map(|item| ImageFiles { image: &item.image, mask: &item.mask }).collect();
        let encoding = Encoding {
            pipeline_config: self.pipeline_config,
            model_sha256: &self.pipeline_config.digest()?,
            placement,
            image_size: self.run.finetune.image_size,
            observer: self.runtime.observer().as_ref(),
            interrupt: self.runtime.interrupt(),
        };
        let cache = Cache::fill(&self.folder.join(CACHE), &images, &texts.texts, &encoding)?;
        let network = Network::new(self.pipeline_config, &self.run.finetune, placement)?;
        let objective = Objective::new(&self.pipeline_config.scheduler, &self.run.finetune);
        let identity = DataIdentity::of(self.manifest)?;
        let parts = Parts { network, objective, cache, train, validated, empty, device, identity };
        Ok(FinetuneTask::new(parts, self.run, self.toml.clone()))
    }

    /// The images of a split in the order of their first rows, with one caption for each row. Synthetic rows are left
    /// out.
    fn items(&self, split: Split, texts: &mut Captions) -> Vec<Item> {
        let mut items: Vec<Item> = Vec::new();
        let mut index_of: HashMap<(&Path, &Path), usize> = HashMap::new();
        for number in self.manifest.rows_of(split) {
            let row = &self.manifest.rows[number];
            let index = *index_of.entry((&row.image_path, &row.mask_path)).or_insert_with(|| {
                let (image, mask) = (row.image_path.clone(), row.mask_path.clone());
                items.push(Item { image, mask, captions: Vec::new() });
                items.len() - 1
            });
            items[index].captions.push(texts.of_row(row, number as u64));
        }
        items
    }
}

/// The different captions of a training.
struct Captions {
    prompts: Prompts,
    seed: u64,
    texts: Vec<String>,
    index_of: HashMap<String, usize>,
}

impl Captions {
    fn new(run: &FinetuneRun) -> Result<Self> {
        let file = &run.finetune.prompts;
        let prompts = if file.is_empty() { Prompts::embedded() } else { Prompts::open(Path::new(file))? };
        Ok(Self { prompts, seed: run.train.seed, texts: Vec::new(), index_of: HashMap::new() })
    }

    /// The caption of a row: a prompt for whole images, as for generating them.
    fn of_row(&mut self, row: &Row, number: u64) -> usize {
        let mut rng = rng::stream(self.seed, "finetune caption", &[number]);
        let text = self.prompts.for_row(row, Mode::Img2img, &mut rng).positive;
        self.number(text)
    }

    fn number(&mut self, text: String) -> usize {
        *self.index_of.entry(text.clone()).or_insert_with(|| {
            self.texts.push(text);
            self.texts.len() - 1
        })
    }
}

/// `1234567` as `1,234,567`.
fn with_commas(count: usize) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_commas() {
        assert_eq!([0, 999, 1000, 334_888_960].map(with_commas), ["0", "999", "1,000", "334,888,960"]);
    }
}
