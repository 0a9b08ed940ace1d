//! Generation of image+mask pairs: lock, files, memory plan, pairs, filter.

use super::lock::RunLock;
use super::memory::{accept, suggest};
use super::rows::Rows;
use super::together::{check_data, main_only};
use super::{How, generator, weight_files};
use crate::augment::ablation;
use crate::augment::export::{Export, LoraUse};
use crate::augment::filter::model::{FilterModels, FilterReport};
use crate::augment::generate::{Generation, GenerationSummary};
use crate::augment::pipeline_config::PipelineConfig;
use crate::config::AugmentRun;
use crate::data::manifest::Manifest;
use crate::hub::{Files, Need};
use crate::models::diffusion::lora::{self, Adapter};
use crate::plan::dry_run::Job;
use crate::plan::report::Plan;
use crate::runtime::Runtime;
use crate::tensor::memory;
use crate::tensor::weights::sha256;
use crate::units::{Bytes, clock};
use crate::{Error, Result};
use std::path::PathBuf;
use std::time::Duration;

/// A generation that has not started.
#[derive(Debug)]
pub struct PairGeneration {
    /// All settings.
    pub run: AugmentRun,
    /// The real rows.
    pub rows: Rows,
    /// Number of real training images that are used; 0 = all.
    pub limit_real: usize,
    /// Number of images that get new versions; 0 = all.
    pub limit: usize,
    /// LoRA files, each optionally with `=STRENGTH`.
    pub loras: Vec<String>,
    /// Tests the pixels of each pair.
    pub filters: bool,
    /// Folder of the filter models for [`Generated::filter`].
    pub filter_models: Option<PathBuf>,
}

/// Pairs of a generation, whose memory is free again.
pub struct Generated {
    /// Numbers of pairs and reasons of rejections.
    pub summary: GenerationSummary,
    /// The memory plan of this job.
    pub plan: Option<Plan>,
    /// Peak of all tensors.
    pub peak: Bytes,
    real: Manifest,
    filter_models: Option<FilterModels>,
    /// Nobody else writes into the folder until the pairs are filtered.
    _lock: Option<RunLock>,
}

impl Generated {
    /// Filters the pairs with the filter models, if there are some.
    ///
    /// # Errors
    /// Those of [`FilterModels::filter`].
    pub fn filter(&self, job: &PairGeneration, how: &How) -> Result<Option<FilterReport>> {
        let Some(models) = &self.filter_models else { return Ok(None) };
        models.filter(&self.real, &mut Export::open(&how.out)?, &job.run.filter, 0, how.runtime).map(Some)
    }
}

impl PairGeneration {
    /// Makes the pairs; `None` for a process that writes no files.
    ///
    /// # Errors
    /// [`Error::Config`] for a folder of something else or in which another process writes, and for settings that do not
    /// fit; errors of files and data; [`Error::Interrupted`].
    pub fn run(&self, how: &How) -> Result<Option<Generated>> {
        let (run, runtime, ranks) = (&self.run, how.runtime, how.ranks);
        let real = ablation::limited_to(self.rows.open(runtime)?, self.limit_real);
        check_data(ranks, &real)?;
        let lock = ranks.agree_on(main_only(ranks, || {
            Export::refuse_foreign(&how.out)?;
            RunLock::on("--out", &how.out, runtime.observer().as_ref())
        }))?;
        let filter_models = self.filter_models.as_deref().map(FilterModels::open).transpose()?;
        self.find_files(filter_models.as_ref(), runtime)?;
        note_random_weights(run, runtime);
        let (adapters, loras) = read_loras(&self.loras, runtime)?;
        let pipeline_config = generator::to_generate(run, runtime)?;
        let generation = Generation {
            config: &run.augment,
            thresholds: &run.filter,
            filters: self.filters,
            pipeline_config: &pipeline_config,
            adapters: &adapters,
            loras: &loras,
            manifest: &real,
            limit: self.limit,
            out: &how.out,
            device: runtime.device(),
            ranks,
            observer: runtime.observer().as_ref(),
            interrupt: runtime.interrupt(),
        };
        let planned = (&generation, &pipeline_config, filter_models.as_ref());
        let plan = how.plans.then(|| self.plan(planned, how)).transpose()?;
        let Some(summary) = generation.run()? else { return Ok(None) };
        let peak = memory::overall_peak(runtime.device());
        Ok(Some(Generated { summary, plan, peak, real, filter_models, _lock: lock }))
    }

    fn find_files(&self, filter_models: Option<&FilterModels>, runtime: &Runtime) -> Result<()> {
        let mut needs = self.run.augment.needs();
        needs.extend(filter_models.map(FilterModels::needs).transpose()?.unwrap_or_default());
        for spec in &self.loras {
            needs.push(Need::new("--lora", lora_of(spec)?.0, Files::Checkpoint));
        }
        weight_files::check(needs, runtime)
    }

    /// The plan of exactly this job, with its predicted time; refuses what cannot fit.
    fn plan(
        &self,
        (generation, pipeline_config, filter_models): (&Generation, &PipelineConfig, Option<&FilterModels>),
        how: &How,
    ) -> Result<Plan> {
        let (run, runtime) = (&self.run, how.runtime);
        let filter = filter_models.map(|models| models.dry_run(generation.manifest, generation.device)).transpose()?;
        let texts = generation.texts()?;
        let needs = (texts.texts.len(), filter.as_ref());
        let plan = Plan::of(&run.dry_run(pipeline_config, needs, &how.machine, true)?, &how.machine);
        runtime.note(format!("memory plan for a batch of {}:{}", run.augment.batch, plan.brief()));
        let suggest = suggest(run, pipeline_config, Job::Augment, &how.machine, &plan);
        let otherwise = "`prsmed preset --task augment` searches for settings that fit";
        accept(plan.clone(), suggest, ("augment", otherwise), &how.memory, runtime)?;
        if let Some(time) = plan.time {
            let batches = texts.pairs.len().div_ceil(run.augment.batch);
            let all = Duration::try_from_secs_f64(time.seconds).unwrap_or_default();
            let all = clock(all.saturating_mul(u32::try_from(batches).unwrap_or(u32::MAX)));
            runtime.note(format!("predicted time: {all} for {batches} batches"));
        }
        Ok(plan)
    }
}

type Adapters = Vec<(Vec<Adapter>, f64)>;

fn read_loras(specs: &[String], runtime: &Runtime) -> Result<(Adapters, Vec<LoraUse>)> {
    let mut adapters = Vec::new();
    let mut uses = Vec::new();
    for spec in specs {
        let (path, strength) = lora_of(spec)?;
        let file = runtime.locate(path)?;
        let sum = if file.is_file() { sha256(&file)? } else { String::new() };
        adapters.push((lora::read(&file)?, strength));
        uses.push(LoraUse { name: path.to_owned(), sha256: sum, scale: strength });
    }
    Ok((adapters, uses))
}

/// The file and the strength of a `--lora FILE[=STRENGTH]`.
fn lora_of(spec: &str) -> Result<(&str, f64)> {
    let Some((path, number)) = spec.rsplit_once('=') else { return Ok((spec, 1.0)) };
    let wrong = || {
        let reason = format!("`{number}` is not a number");
        Error::config("--lora", reason, "write for example `file.safetensors=0.8`")
    };
    Ok((path, number.parse().map_err(|_| wrong())?))
}

/// Says that random weights make noise, and how to try the tool faster.
fn note_random_weights(run: &AugmentRun, runtime: &Runtime) {
    let config = &run.augment;
    if !config.is_random() {
        return;
    }
    let (side, steps) = (config.image_size, config.num_steps());
    let slow = if side > 256 {
        format!("; {side} pixels and {steps} steps are slow, `--preset tiny` has 128 pixels and 2 steps")
    } else {
        String::new()
    };
    let text =
        format!("`{}` has random weights: the images will be noise, only for trying the tool{slow}", config.model);
    runtime.note(text);
}
