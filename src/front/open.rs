//! Opening of trained models: a run folder, a checkpoint, a published folder, or `hub:owner/name`; alone or as an ensemble.

use super::Model;
use crate::Result;
use crate::runtime::Runtime;
use crate::segment::LoadedModel;
use crate::segment::calibration::Calibration;
use crate::segment::setup::{self, Build, RunOverrides};
use crate::segment::weight_files::{described, read_run};
use crate::tensor::Device;
use crate::trainer::precision::Precision;
use std::path::{Path, PathBuf};

/// How a trained model is opened: its stored settings where nothing else is chosen.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Settings that replace the stored ones.
    pub overrides: RunOverrides,
    /// Numbers of the computation; by default fp32 on the CPU and bf16 on a GPU.
    pub precision: Option<Precision>,
    /// Keys of a checkpoint that do not match the model are only listed.
    pub allow_partial: bool,
    /// Further runs: masks are means over all of them, and answers are those of the first one. Each model is in memory as a
    /// whole.
    pub ensemble: Vec<PathBuf>,
}

impl Model {
    /// Opens a run folder (`best/`, else `last/`), a checkpoint folder, a published PRS-Med folder or `hub:owner/name` on
    /// the device of `runtime`.
    ///
    /// # Errors
    /// Those of [`read_run`] and [`setup::open`]; [`crate::Error::Config`] for runs that cannot be one ensemble, as far as
    /// possible before a model is loaded.
    pub fn open(run: impl AsRef<Path>, options: &OpenOptions, runtime: &Runtime) -> Result<Self> {
        let run = run.as_ref();
        check_ensemble(run, &options.ensemble, runtime)?;
        let mut model = Self::from(open_one(run, options, runtime)?);
        for other in &options.ensemble {
            let loaded = open_one(other, options, runtime)?;
            // a published run has a description only now
            model.description().check_member(&loaded.description, [run, other])?;
            model.ensemble.push(loaded);
        }
        let threshold =
            |of: &LoadedModel| of.description.calibration.and_then(|calibration| calibration.presence_threshold);
        let had_threshold = model.runs().any(|run| threshold(run).is_some());
        model.loaded.description.calibration = model.mean_calibration();
        if had_threshold && threshold(&model.loaded).is_none() {
            runtime
                .warn("not every run of the ensemble has a presence threshold, so no target is reported as not found");
        }
        Ok(model)
    }

    /// The mean temperature and presence threshold of all runs, where all have one.
    fn mean_calibration(&self) -> Option<Calibration> {
        if self.ensemble.is_empty() {
            return self.description().calibration;
        }
        let all = self.ensemble.iter().chain([&self.loaded]).map(|run| run.description.calibration);
        let all = all.collect::<Option<Vec<_>>>()?;
        let count = all.len() as f64;
        let thresholds: Option<Vec<f64>> = all.iter().map(|one| one.presence_threshold).collect();
        Some(Calibration {
            temperature: all.iter().map(|one| one.temperature).sum::<f64>() / count,
            presence_threshold: thresholds.map(|thresholds| thresholds.iter().sum::<f64>() / count),
            num_present: all.iter().map(|one| one.num_present).sum(),
            num_absent: all.iter().map(|one| one.num_absent).sum(),
        })
    }
}

/// Opens the model of one run.
fn open_one(run: &Path, options: &OpenOptions, runtime: &Runtime) -> Result<LoadedModel> {
    let default = if runtime.device() == Device::Cpu { Precision::Fp32 } else { Precision::Bf16 };
    let locate = |spec: &str| runtime.locate(spec);
    let kind = options.precision.unwrap_or(default).kind();
    let build = Build {
        allow_partial: options.allow_partial,
        cache: runtime.cache(),
        ..Build::new(runtime.device(), kind, &locate)
    };
    let overrides = RunOverrides { divide_layers: Some(false), ..options.overrides.clone() };
    let (base, tower) = (overrides.base.as_deref(), overrides.vision_tower.as_deref());
    let loaded = read_run(run, base, tower, runtime, &|folder| {
        setup::verify(folder)?;
        setup::open(folder, &overrides, build)
    })?;
    loaded.warnings.iter().for_each(|warning| runtime.warn(warning.as_str()));
    Ok(loaded)
}

/// Checks that runs can be one ensemble by their descriptions; published runs have none.
fn check_ensemble(run: &Path, others: &[PathBuf], runtime: &Runtime) -> Result<()> {
    if others.is_empty() {
        return Ok(());
    }
    let Some(first) = described(run, runtime)? else { return Ok(()) };
    for other in others {
        if let Some(member) = described(other, runtime)? {
            first.check_member(&member, [run, other])?;
        }
    }
    Ok(())
}
