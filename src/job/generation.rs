//! Generation of image+mask pairs: lock, files, memory plan, pairs.

use super::memory::accept;
use super::rows::Rows;
use super::together::check_data;
use super::{How, generator};
use crate::augment::ablation;
use crate::augment::export::{Export, LoraUse};
use crate::augment::filter::Thresholds;
use crate::augment::generate::{Generation, GenerationSummary, SETTINGS};
use crate::augment::pipeline_config::PipelineConfig;
use crate::config::{AugmentRun, Settings as _};
use crate::data::manifest::Manifest;
use crate::event::Observer;
use crate::hub::{Files, Need};
use crate::models::diffusion::lora::{self, Adapter};
use crate::plan::dry_run::Job;
use crate::plan::report::Plan;
use crate::runtime::Runtime;
use crate::segment::weight_files;
use crate::tensor::memory;
use crate::tensor::weights::{Archive, sha256};
use crate::units::{Bytes, clock};
use crate::{Error, Result, files, report};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// What is generated.
#[derive(Debug, Clone)]
pub struct Pairs {
    /// All settings.
    pub run: AugmentRun,
    /// Number of real training images that are used; 0 = all.
    pub limit_real: usize,
    /// Number of images that get new versions; 0 = all.
    pub limit: usize,
    /// LoRA files, each optionally with `=STRENGTH`.
    pub loras: Vec<String>,
    /// Tests the pixels of each pair.
    pub filters: bool,
}

/// A generation of pairs whose rows are read.
pub struct PairGeneration<'a> {
    how: &'a How<'a>,
    pairs: Pairs,
    real: Manifest,
    /// Once the files are found.
    networks: Option<Networks>,
    plan: Option<Plan>,
}

/// Adapters with their strengths.
type Adapters = Vec<(Vec<Adapter>, f64)>;

/// Files of the generator.
struct Networks {
    pipeline_config: PipelineConfig,
    adapters: Adapters,
    loras: Vec<LoraUse>,
}

/// Pairs of a generation, whose memory is free again.
#[derive(Debug)]
pub struct Generated {
    /// Numbers of pairs and reasons of rejections.
    pub summary: GenerationSummary,
    /// The memory plan of this job.
    pub plan: Option<Plan>,
    /// Peak of all tensors.
    pub peak: Bytes,
}

impl<'a> PairGeneration<'a> {
    /// A generation of `pairs` from the training images of `rows`.
    ///
    /// # Errors
    /// [`Error::Data`] or [`Error::Io`] for rows that cannot be read; [`Error::Weights`] for a folder without filter models.
    pub fn new(pairs: Pairs, rows: &Rows, how: &'a How<'a>) -> Result<Self> {
        let real = ablation::limited_to(rows.open(how.runtime)?, pairs.limit_real);
        check_data(how.ranks, &real)?;
        Ok(Self { how, pairs, real, networks: None, plan: None })
    }

    fn generation<'b>(&'b self, networks: &'b Networks, observer: &'b dyn Observer) -> Generation<'b> {
        Generation {
            config: &self.pairs.run.augment,
            thresholds: &self.pairs.run.filter,
            filters: self.pairs.filters,
            pipeline_config: &networks.pipeline_config,
            adapters: &networks.adapters,
            loras: &networks.loras,
            manifest: &self.real,
            limit: self.pairs.limit,
            out: &self.how.out,
            device: self.how.runtime.device(),
            ranks: self.how.ranks,
            observer,
            interrupt: self.how.runtime.interrupt(),
        }
    }

    fn networks(&self) -> Result<&Networks> {
        self.networks.as_ref().ok_or_else(|| Error::Internal { reason: "the files were not looked for".into() })
    }
}

impl super::Job for PairGeneration<'_> {
    /// `None` for a process that writes no files.
    type Done = Option<Generated>;

    fn refuse_foreign(how: &How) -> Result<()> {
        Export::refuse_foreign(&how.out)
    }

    /// A folder of pairs is continued.
    fn check_folder(_how: &How) -> Result<()> {
        Ok(())
    }

    fn find_files(&mut self, _checkpoint: Option<&Path>) -> Result<()> {
        let (run, runtime) = (&self.pairs.run, self.how.runtime);
        let mut needs = run.augment.generator().needs();
        for spec in &self.pairs.loras {
            needs.push(Need::new("lora", lora_of(spec)?.0, Files::Checkpoint));
        }
        weight_files::check(needs, runtime)?;
        if run.augment.is_random() {
            let model = &run.augment.model;
            runtime.note(format!("`{model}` has random weights: the images will be noise, only for trying the tool"));
        }
        let (adapters, loras) = read_loras(&self.pairs.loras, runtime)?;
        let pipeline_config = generator::to_generate(run, runtime)?;
        self.networks = Some(Networks { pipeline_config, adapters, loras });
        Ok(())
    }

    /// The plan of exactly this job, with its predicted time; refuses what cannot fit.
    fn plan(&mut self) -> Result<()> {
        let (run, how, runtime) = (&self.pairs.run, self.how, self.how.runtime);
        let networks = self.networks()?;
        let pipeline_config = &networks.pipeline_config;
        let texts = self.generation(networks, runtime.observer().as_ref()).texts()?;
        let plan = Plan::of(&run.dry_run(pipeline_config, texts.texts.len(), &how.machine, true)?, &how.machine);
        runtime.note(format!("memory plan for a batch of {}:{}", run.augment.batch, plan.brief()));
        let planned = (run, pipeline_config, Job::Augment, &how.machine);
        let otherwise = "`prsmed preset --task augment` searches for settings that fit";
        accept(plan.clone(), planned, ("augment", otherwise), &how.memory, runtime)?;
        if let Some(time) = plan.time {
            let batches = texts.pairs.len().div_ceil(run.augment.batch);
            let all = Duration::try_from_secs_f64(time.seconds).unwrap_or_default();
            let all = clock(all.saturating_mul(u32::try_from(batches).unwrap_or(u32::MAX)));
            runtime.note(format!("predicted time: {all} for {batches} batches"));
        }
        self.plan = Some(plan);
        Ok(())
    }

    fn train(self) -> Result<Option<Generated>> {
        let (out, runtime) = (&self.how.out, self.how.runtime);
        let made = self.generation(self.networks()?, runtime.observer().as_ref()).run()?;
        let Some(summary) = made else { return Ok(None) };
        let peak = memory::overall_peak(runtime.device());
        write_report(&Export::open(out)?, &self.pairs.run.filter, runtime);
        Ok(Some(Generated { summary, plan: self.plan, peak }))
    }
}

/// Writes `report.html` beside the pairs. They are made, so a failure is a warning only.
pub fn write_report(pairs: &Export, limits: &Thresholds, runtime: &Runtime) {
    if let Err(error) = report::pairs::write(pairs, limits) {
        runtime.warn(format!("no {}: {error}", report::REPORT_FILE));
    }
}

fn read_loras(specs: &[String], runtime: &Runtime) -> Result<(Adapters, Vec<LoraUse>)> {
    let mut adapters = Vec::new();
    let mut uses = Vec::new();
    for spec in specs {
        let (path, strength) = lora_of(spec)?;
        let file = runtime.locate(path)?;
        adapters.push((lora::read(&file)?, strength));
        let weights = if file.is_dir() { Archive::open(&file)?.files().next().map(Path::to_owned) } else { None };
        let sha256 = sha256(weights.as_deref().unwrap_or(&file))?;
        uses.push(LoraUse { name: path.to_owned(), sha256, scale: strength });
    }
    Ok((adapters, uses))
}

/// The file and the strength of a `--lora FILE[=STRENGTH]`.
fn lora_of(spec: &str) -> Result<(&str, f64)> {
    let Some((path, number)) = spec.rsplit_once('=') else { return Ok((spec, 1.0)) };
    let wrong = |reason: &str| {
        Error::argument("lora", format!("`{number}` {reason}"), "write for example `file.safetensors=0.8`")
    };
    let strength: f64 = number.parse().map_err(|_| wrong("is not a number"))?;
    if !strength.is_finite() || strength == 0.0 {
        return Err(wrong("is no strength, which is a finite number other than 0"));
    }
    Ok((path, strength))
}

/// The limits that the pairs in `folder` were generated with, changed by `sets` such as `dice_min=0.7`.
///
/// # Errors
/// [`Error::Config`] for an unknown limit, and for values that cannot be.
pub fn thresholds(folder: &Path, sets: &[String]) -> Result<Thresholds> {
    let made_with = files::read(&folder.join(SETTINGS), files::MAX_TEXT).ok();
    let made_with = made_with.and_then(|text| serde_json::from_slice::<Value>(&text).ok());
    let limits = made_with.map(|settings| settings["filter"].clone()).filter(Value::is_object);
    let Value::Object(mut values) = limits.unwrap_or_else(|| json!(Thresholds::default())) else {
        unreachable!("the limits are fields");
    };
    for set in sets {
        let wrong = |reason: String| {
            let known: Vec<String> = values.keys().map(|key| format!("`{key}`")).collect();
            let hint = format!("write for example `dice_min=0.7`; the limits are {}", known.join(", "));
            Error::argument("threshold", reason, hint)
        };
        let (key, value) = set.split_once('=').ok_or_else(|| wrong(format!("`{set}` is not `key=value`")))?;
        let number: f64 = value.parse().map_err(|_| wrong(format!("`{value}` is not a number")))?;
        if !values.contains_key(key) {
            return Err(wrong(format!("there is no limit `{key}`")));
        }
        values.insert(key.to_owned(), json!(number));
    }
    let found: Thresholds = serde_json::from_value(Value::Object(values))
        .map_err(|error| Error::argument("threshold", error.to_string(), "give numbers"))?;
    let run = AugmentRun { filter: found, ..AugmentRun::default() };
    run.check()?;
    Ok(run.filter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strength_is_a_finite_number_other_than_zero() {
        let strength = |spec: &str| lora_of(spec).map(|(path, strength)| (path.to_owned(), strength));
        assert_eq!(strength("a.safetensors").unwrap(), ("a.safetensors".to_owned(), 1.0));
        assert_eq!(strength("a.safetensors=-0.5").unwrap(), ("a.safetensors".to_owned(), -0.5));
        for number in ["0", "-0.0", "nan", "inf", "-inf", "1e999", "NaN", "strong", ""] {
            let error = strength(&format!("a.safetensors={number}")).unwrap_err().to_string();
            assert!(error.starts_with(&format!("argument `lora`: `{number}` is no")), "{error}");
        }
    }
}
