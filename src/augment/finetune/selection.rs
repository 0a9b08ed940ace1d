//! Choice of the best checkpoint of a fine-tuning by its use: the pairs of which candidate help a small U-Net most?
//!
//! After the training, each candidate (see [`candidates`]) makes pairs from the same training images, with the same
//! masks, prompts and seeds. The small U-Net of the ablation is trained on real images alone, and on real images with
//! the pairs of each candidate, for equal steps and with the same seeds. It is scored on the `val` rows; test rows are
//! never read. The candidate with the largest mean gain in Dice becomes `best/`.
//!
//! ```text
//! RUN/selection/pairs-HASH/step-000120/     pairs of a candidate, a data root
//! RUN/selection/unets-HASH/step-000120-0/   run folder of a U-Net, with its scores
//! RUN/selection/selection.json, selection.txt
//! ```
//!
//! HASH is that of the settings, so that results of other settings are not mixed. Whatever is complete is read and not
//! made again.

mod pairs;
mod report;

pub use report::{CandidateReport, SelectionReport};

use super::network::{new_controlnet, trained_sizes};
use super::settings::{FinetuneRun, Mode};
use crate::augment::ablation::rows::ArmRows;
use crate::augment::ablation::scores::{Metric, Scoring, TestSet};
use crate::augment::ablation::trained::Trained;
use crate::augment::ablation::{Arm, Segmenter};
use crate::augment::pipeline_config::PipelineConfig;
use crate::augment::settings::AugmentConfig;
use crate::data::labels::Labels;
use crate::data::manifest::{Manifest, Target};
use crate::data::mixing_sampler::Ratio;
use crate::event::{Observer, Silent};
use crate::runtime::Runtime;
use crate::segment::RunConfig;
use crate::tensor::weights::{readable_folder, write_bytes};
use crate::trainer::candidates::{self, Candidate};
use crate::trainer::precision::Precision;
use crate::trainer::{FirstLayers, TrainConfig};
use crate::{Error, Result, files};
use pairs::{Made, PairJob};
use report::{Dice, Results};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Folder of pairs, U-Nets and the result in a run folder.
pub const FOLDER: &str = "selection";
/// Synthetic rows per real row, as the ablation has by default.
const RATIO: f64 = 0.5;
/// Samples of an optimizer step.
const BATCH: usize = 8;
/// Largest side of the images that the U-Net reads.
const SIDE: i64 = 256;
/// Host memory for decoded images.
const CACHE_MIB: usize = 512;
/// A choice on fewer validation images gives a warning.
const FEW_IMAGES: usize = 20;
/// Tolerance of the surface Dice, which does not decide.
const TOLERANCE_PX: f64 = 2.0;

/// A choice by segmenter that has not started.
pub struct Selection<'a> {
    run: FinetuneRun,
    folder: &'a Path,
    runtime: &'a Runtime,
    /// Rows with a target and a mask.
    manifest: Manifest,
    pairs: PairJob,
}

/// A U-Net's training rows.
struct TrainingRows {
    /// Name of its run folders.
    name: String,
    rows: ArmRows,
    arm: Arm,
}

impl<'a> Selection<'a> {
    /// The choice for a fine-tuning with settings `run` on the rows of `manifest`, in the run folder `folder`. Call this
    /// before the training: it refuses what cannot work.
    ///
    /// # Errors
    /// [`Error::Data`] without `val` rows of images that are not trained, and without training masks; as
    /// [`FinetuneRun::check`].
    pub fn new(run: &FinetuneRun, manifest: &Manifest, folder: &'a Path, runtime: &'a Runtime) -> Result<Self> {
        run.check()?;
        let mut manifest = manifest.clone();
        // the Dice of an absent or unknown target says nothing about pairs with lesions
        manifest.rows.retain(|row| row.target == Target::Present);
        let pairs = PairJob::new(run, &manifest)?;
        let this = Self { run: run.clone(), folder, runtime, manifest, pairs };
        let images = this.val_rows(&Silent)?.groups().len();
        if images < FEW_IMAGES {
            runtime.warn(format!(
                "the choice by segmenter has {images} validation images: with fewer than {FEW_IMAGES} it is mostly chance"
            ));
        }
        Ok(this)
    }

    /// The same choice after a search has changed settings for the memory of a machine.
    #[must_use]
    pub fn with_settings(self, run: &FinetuneRun) -> Self {
        Self { run: run.clone(), pairs: self.pairs.with_settings(run), ..self }
    }

    /// Settings of the pairs, for a memory plan.
    pub fn pair_settings(&self) -> &AugmentConfig {
        &self.pairs.config
    }

    /// Sizes of the generator `base` after its fine-tuning, for a memory plan.
    ///
    /// # Errors
    /// [`Error::Config`] for a generator that the settings cannot train.
    pub fn planned_generator(&self, base: &PipelineConfig) -> Result<PipelineConfig> {
        let config = &self.run.finetune;
        let mut planned = PipelineConfig { unet: trained_sizes(base, config)?, ..base.clone() };
        if config.mode == Mode::MaskToImage && planned.controlnet.is_none() {
            planned.controlnet = Some(new_controlnet(&planned.unet, base.vae.downscale())?);
        }
        Ok(planned)
    }

    /// Makes the missing pairs, trains and scores the missing U-Nets, writes the result, and replaces `best/` by the
    /// chosen candidate.
    ///
    /// # Errors
    /// [`Error::Config`] without candidates; [`Error::Weights`] for a damaged one; [`Error::Data`]; [`Error::Io`];
    /// [`Error::OutOfMemory`]; [`Error::Interrupted`]: the next call continues.
    pub fn run(&self, pipeline_config: &PipelineConfig) -> Result<SelectionReport> {
        let (mut all, metric) = candidates::of_run(self.folder)?;
        all.truncate(self.run.finetune.keep_best);
        if all.is_empty() {
            let reason = "there are no candidates: checkpoints are kept for `segmenter` at validations";
            let hint = "start a new run with `--select-by segmenter`, or leave it out";
            return Err(Error::config("finetune.select_by", reason, hint));
        }
        let set = self.val_rows(self.runtime.observer().as_ref())?;
        let made = self.make_pairs(&all, pipeline_config)?;
        let (real, dice) = self.dice(&set, &all, &made)?;
        let groups = set.groups();
        let candidates = all.iter().zip(made).zip(dice).map(|((one, made), dice)| (*one, made, dice)).collect();
        let results = Results {
            metric,
            pair_mode: self.pairs.config.mode,
            unet_steps: self.run.finetune.select_steps,
            synthetic_ratio: RATIO,
            seeds: self.seeds(),
            val_rows: set.len(),
            groups: &groups,
            real,
            candidates,
        };
        let report = results.report()?;
        self.keep(&report, &all)?;
        Ok(report)
    }

    fn seeds(&self) -> Vec<u64> {
        (0..self.run.finetune.select_seeds as u64).map(|number| self.run.train.seed + number).collect()
    }

    /// The rows that U-Nets are scored on.
    fn val_rows(&self, observer: &dyn Observer) -> Result<TestSet<'_>> {
        let scoring = Scoring { labels: Labels::NONE, tolerance_px: TOLERANCE_PX, limit: 0 };
        TestSet::of_val_rows(&self.manifest, scoring, observer)
    }

    /// A folder below that of the choice, created if it does not exist.
    fn folder_of(&self, what: &str, settings: &serde_json::Value) -> Result<PathBuf> {
        let hash = format!("{:x}", Sha256::digest(settings.to_string()));
        let all = self.folder.join(FOLDER);
        let folder = all.join(format!("{what}-{}", &hash[..8]));
        create(self.folder, &all)?;
        create(&all, &folder)?;
        Ok(folder)
    }

    fn pairs_folder(&self) -> Result<PathBuf> {
        self.folder_of("pairs", &self.pairs.identity())
    }

    fn unets_folder(&self) -> Result<PathBuf> {
        let settings = json!({
            "pairs": self.pairs.identity(),
            "unet": self.unet(0, 0.0).to_toml(),
            "ratio": RATIO,
        });
        self.folder_of("unets", &settings)
    }

    /// The pairs of each candidate.
    fn make_pairs(&self, all: &[Candidate], pipeline_config: &PipelineConfig) -> Result<Vec<Made>> {
        let folder = self.pairs_folder()?;
        let mut found = Vec::new();
        for (number, candidate) in all.iter().enumerate() {
            let name = candidate.name();
            self.runtime.note(format!("choice by segmenter: pairs of {name} ({} of {})", number + 1, all.len()));
            let checkpoint = readable_folder(&candidate.folder(self.folder))?;
            let out = folder.join(&name);
            let made = self.pairs.make((&name, &checkpoint), &out, pipeline_config, self.runtime)?;
            match &made.problem {
                Some(problem) => self.runtime.warn(format!("{name} is not scored: {problem}")),
                None => self.runtime.note(format!("{} of {} pairs accepted", made.accepted, made.pairs)),
            }
            found.push(made);
        }
        Ok(found)
    }

    /// Dice of each seed and image: with real images alone, and with the pairs of each candidate that has usable ones.
    fn dice(&self, set: &TestSet, all: &[Candidate], made: &[Made]) -> Result<(Dice, Vec<Option<Dice>>)> {
        let usable: Vec<usize> = (0..all.len()).filter(|&number| made[number].problem.is_none()).collect();
        if usable.is_empty() {
            return Ok((Vec::new(), vec![None; all.len()]));
        }
        let pairs = self.pairs_folder()?;
        let mut arms =
            vec![TrainingRows { name: "real".into(), rows: ArmRows::of_real(&self.manifest), arm: Arm::Real }];
        for &number in &usable {
            let name = all[number].name();
            let rows = ArmRows::new(&self.manifest, &Manifest::open(&pairs.join(&name), None)?, 0)?;
            arms.push(TrainingRows { name, rows, arm: Arm::Synthetic(Ratio::PerReal(RATIO)) });
        }
        let mut dice: Vec<Dice> = vec![Vec::new(); arms.len()];
        let (seeds, folder) = (self.seeds(), self.unets_folder()?);
        let total = seeds.len() * arms.len();
        for (round, &seed) in seeds.iter().enumerate() {
            for (number, arm) in arms.iter().enumerate() {
                let done = round * arms.len() + number + 1;
                self.runtime.note(format!("choice by segmenter: U-Net {done} of {total}, {}, seed {seed}", arm.name));
                dice[number].push(self.scores(arm, seed, set, &folder)?);
            }
        }
        let mut dice = dice.into_iter();
        let real = dice.next().unwrap_or_default();
        let of_candidates = (0..all.len()).map(|number| if usable.contains(&number) { dice.next() } else { None });
        Ok((real, of_candidates.collect()))
    }

    /// Dice of each validation image, by the U-Net that is trained on `arm`.
    fn scores(&self, arm: &TrainingRows, seed: u64, set: &TestSet, unets: &Path) -> Result<Vec<f64>> {
        let folder = unets.join(format!("{}-{seed}", arm.name));
        create(unets, &folder)?;
        let mut scores = set.known(&folder)?;
        if scores.len() < set.len() {
            let steps = usize::try_from(self.run.finetune.select_steps).unwrap_or(usize::MAX);
            let manifest = Arc::new(arm.rows.manifest(arm.arm, steps.saturating_mul(BATCH)));
            let config = self.unet(seed, if arm.arm == Arm::Real { 0.0 } else { RATIO });
            let model = Trained::train(Segmenter::Unet, config, manifest, &folder, self.runtime)?;
            scores = set.score(&model, &folder, self.runtime)?;
        }
        Ok(set.by_image(&scores, Metric::Dice))
    }

    /// Training settings of a U-Net: those of the preset `tiny`, which the ablation uses.
    fn unet(&self, seed: u64, ratio: f64) -> RunConfig {
        let steps = self.run.finetune.select_steps;
        let mut config = RunConfig::default();
        config.model.image_size = self.run.finetune.image_size.min(SIDE);
        config.data.cache_mib = CACHE_MIB;
        config.data.synthetic_ratio = Ratio::PerReal(ratio);
        config.train = TrainConfig {
            seed,
            micro_batch: BATCH,
            accumulation: 1,
            epochs: steps,
            max_steps: steps,
            validate_every_epochs: 0,
            learning_rate: 1e-3,
            min_learning_rate: 1e-5,
            warmup_frac: 0.05,
            beta2: 0.95,
            precision: Precision::Fp32,
            checkpointing: FirstLayers::None,
            checkpoint_encoder: FirstLayers::None,
            ..TrainConfig::default()
        };
        config
    }

    /// Writes the result, and makes the chosen candidate `best/`.
    fn keep(&self, report: &SelectionReport, all: &[Candidate]) -> Result<()> {
        let folder = self.folder.join(FOLDER);
        write_bytes(
            &folder.join("selection.json"),
            &serde_json::to_vec_pretty(report).expect("plain values serialise"),
        )?;
        write_bytes(&folder.join("selection.txt"), report.table().as_bytes())?;
        let Some(chosen) = all.iter().find(|one| one.step == report.chosen_step) else { return Ok(()) };
        let (score, kind) = report.best_score(chosen);
        candidates::promote(self.folder, chosen, score, kind)
    }
}

/// Creates the folder `folder` below `root`, or clears what a crash has left in it.
fn create(root: &Path, folder: &Path) -> Result<()> {
    files::create_below(root, folder).map_err(Error::io(folder, "create"))?;
    files::clear_leftovers(folder).map_err(Error::io(folder, "clear temporary files in"))
}

#[cfg(test)]
#[path = "selection_tests.rs"]
mod tests;
