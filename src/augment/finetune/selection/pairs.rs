//! Pairs of the candidates: the same images, masks, prompts and seeds for all of them, as `augment generate` makes pairs.

use crate::augment::ablation::limited_to;
use crate::augment::export::LoraUse;
use crate::augment::filter::Thresholds;
use crate::augment::finetune::network::{CONTROLNET_FOLDER, LORA_FILE, UNET_FOLDER};
use crate::augment::finetune::{FinetuneRun, Mode as Learned};
use crate::augment::generate::{Generation, GenerationSummary};
use crate::augment::pipeline_config::PipelineConfig;
use crate::augment::settings::{AugmentConfig, Decode, Mode};
use crate::data::decode;
use crate::data::image::foreground;
use crate::data::manifest::{Manifest, Row, Split};
use crate::models::diffusion::lora::{self, Adapter};
use crate::runtime::Runtime;
use crate::tensor::weights::{sha256, verify_folder, write_bytes};
use crate::trainer::Ranks;
use crate::{Error, Result, files};
use rayon::prelude::*;
use serde_json::json;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Side of the largest images that are decoded at once, as for the samples of a validation: the memory plan of the
/// training then has room for larger ones too.
const DECODED_AT_ONCE: i64 = 512;

/// What every candidate makes.
pub(super) struct PairJob {
    /// Settings of the generator.
    pub(super) config: AugmentConfig,
    /// Training rows of the images that pairs are made from.
    sources: Manifest,
    /// Most images with their masks.
    limit: usize,
}

/// The pairs of a candidate. It is written to a file when they are complete.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Made {
    /// Pairs in the data root.
    pub(super) pairs: usize,
    /// Pairs that passed the pixel tests.
    pub(super) accepted: usize,
    /// Why none of them can be used.
    pub(super) problem: Option<String>,
}

impl PairJob {
    /// The pairs for a fine-tuning with settings `run` on the rows of `manifest`.
    ///
    /// # Errors
    /// [`Error::Data`] without training masks that show something, and for a mask that cannot be read;
    /// [`Error::Config`] for too few denoising steps.
    pub(super) fn new(run: &FinetuneRun, manifest: &Manifest) -> Result<Self> {
        let most = run.finetune.select_pairs;
        let (images, masks) = (distinct(manifest, |row| &row.image_path), distinct(manifest, |row| &row.mask_path));
        let (num_images, masks) = (images.len(), masks.len().max(1));
        let (limit_images, per_image) =
            if masks > most { ((most * num_images / masks).max(1), 1) } else { (0, most / masks) };
        let sources = with_lesions(limited_to(manifest.clone(), limit_images))?;
        if sources.rows.is_empty() {
            let reason = "there are no training rows with a mask that shows something";
            let hint = "pairs are made from masks: add such rows, or set `finetune.select_by=metric`";
            return Err(Error::data(&manifest.root, reason, hint));
        }
        let config = settings(run, per_image);
        if config.mode != Mode::MaskToImage && config.steps as f64 * config.strength < 1.0 {
            let reason = format!("{} is too few for pairs: they run {} of the steps", config.steps, config.strength);
            return Err(Error::config("finetune.inference_steps_training", reason, "use for example 25"));
        }
        Ok(Self { config, sources, limit: most })
    }

    /// The same sources with the generator's settings in `run`.
    pub(super) fn with_settings(mut self, run: &FinetuneRun) -> Self {
        self.config = settings(run, self.config.per_image);
        self
    }

    /// Everything that the pairs depend on, besides the weights and the rows of the run.
    pub(super) fn identity(&self) -> serde_json::Value {
        let root = std::path::absolute(&self.sources.root).unwrap_or_else(|_| self.sources.root.clone());
        json!({ "augment": self.config, "filter": Thresholds::default(), "limit": self.limit, "data_root": root })
    }

    /// Makes the missing pairs of the candidate `name`, whose checkpoint is in `checkpoint`, in the data root `out`.
    ///
    /// # Errors
    /// [`Error::Weights`]; [`Error::Data`] for an image that cannot be read; [`Error::OutOfMemory`] when a single
    /// image does not fit; [`Error::Interrupted`].
    pub(super) fn make(
        &self,
        (name, checkpoint): (&str, &Path),
        out: &Path,
        pipeline_config: &PipelineConfig,
        runtime: &Runtime,
    ) -> Result<Made> {
        let marker = out.with_extension("json");
        if let Some(made) =
            files::read(&marker, files::MAX_TEXT).ok().and_then(|text| serde_json::from_slice(&text).ok())
        {
            return Ok(made);
        }
        verify_folder(checkpoint)?;
        let FineTuned { pipeline_config, adapters, loras } = FineTuned::open(name, checkpoint, pipeline_config)?;
        let generation = Generation {
            config: &self.config,
            thresholds: &Thresholds::default(),
            filters: true,
            pipeline_config: &pipeline_config,
            adapters: &adapters,
            loras: &loras,
            manifest: &self.sources,
            limit: self.limit,
            out,
            device: runtime.device(),
            ranks: Ranks::default(),
            observer: runtime.observer().as_ref(),
            interrupt: runtime.interrupt(),
        };
        let made = match generation.run() {
            Ok(summary) => Made::of(&summary.expect("a process alone is the first one")),
            // the weights of this candidate are useless, others may be good
            Err(Error::Diverged { reason }) => Made { pairs: 0, accepted: 0, problem: Some(reason) },
            Err(error) => return Err(error),
        };
        write_bytes(&marker, &serde_json::to_vec_pretty(&made).expect("plain values serialise"))?;
        Ok(made)
    }
}

impl Made {
    fn of(summary: &GenerationSummary) -> Self {
        let reasons: Vec<String> = summary.rejected.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        let problem = (summary.accepted == 0)
            .then(|| format!("the pixel tests rejected all {} pairs: {}", summary.pairs, reasons.join(", ")));
        Self { pairs: summary.pairs, accepted: summary.accepted, problem }
    }
}

/// Settings of the pairs.
fn settings(run: &FinetuneRun, per_image: usize) -> AugmentConfig {
    let config = &run.finetune;
    AugmentConfig {
        model: config.model.clone(),
        variant: config.variant.clone(),
        base_pipeline: config.base_pipeline.clone(),
        prediction_type: config.prediction_type,
        mode: config.select_mode.resolved(config.mode == Learned::MaskToImage),
        per_image,
        image_size: config.image_size,
        steps: config.inference_steps_training,
        guidance: config.guidance_scale,
        seed: run.train.seed,
        batch: config.generation_batch_size,
        precision: run.train.precision,
        decode: if config.image_size > DECODED_AT_ONCE { Decode::Tiled } else { Decode::Sliced },
        preview_every: 0,
        prompts: config.prompts.clone(),
        ..AugmentConfig::default()
    }
}

/// The different files that training rows name.
fn distinct(manifest: &Manifest, file: fn(&Row) -> &PathBuf) -> BTreeSet<&PathBuf> {
    manifest.rows.iter().filter(|row| row.split == Split::Train).map(file).collect()
}

/// The training rows whose masks are not empty.
fn with_lesions(mut manifest: Manifest) -> Result<Manifest> {
    let masks: Vec<PathBuf> = distinct(&manifest, |row| &row.mask_path).into_iter().cloned().collect();
    let shows = |path: PathBuf| {
        let has_lesion = foreground(&decode::mask(&path)?).iter().any(|value| *value > 0);
        Ok(has_lesion.then_some(path))
    };
    let shown: Vec<Option<PathBuf>> = masks.into_par_iter().map(shows).collect::<Result<_>>()?;
    let shown: BTreeSet<PathBuf> = shown.into_iter().flatten().collect();
    manifest.rows.retain(|row| row.split == Split::Train && shown.contains(&row.mask_path));
    Ok(manifest)
}

/// The generator with the networks of a checkpoint.
struct FineTuned {
    pipeline_config: PipelineConfig,
    adapters: Vec<(Vec<Adapter>, f64)>,
    loras: Vec<LoraUse>,
}

impl FineTuned {
    fn open(name: &str, checkpoint: &Path, base: &PipelineConfig) -> Result<Self> {
        let (unet, controlnet) = (checkpoint.join(UNET_FOLDER), checkpoint.join(CONTROLNET_FOLDER));
        let mut pipeline_config = base.clone();
        if unet.is_dir() {
            pipeline_config = pipeline_config.with_unet(&unet)?;
        }
        if controlnet.is_dir() {
            pipeline_config = pipeline_config.with_controlnet(&controlnet)?;
        }
        let (mut adapters, mut loras) = (Vec::new(), Vec::new());
        let file = checkpoint.join(LORA_FILE);
        if file.is_file() {
            adapters.push((lora::read(&file)?, 1.0));
            loras.push(LoraUse { name: format!("{name}/{LORA_FILE}"), sha256: sha256(&file)?, scale: 1.0 });
        }
        Ok(Self { pipeline_config, adapters, loras })
    }
}
