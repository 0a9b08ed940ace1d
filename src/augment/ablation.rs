//! Ablation of synthetic pairs: trainings with and without them, at equal optimizer steps, scored on the same real
//! images.
//!
//! There are four kinds of arms: real images only, real images with classical augmentation, real images with synthetic
//! pairs, and real images with duplicated real rows in place of the synthetic ones ([`arms`]). Each arm is trained with
//! every seed, for the same number of steps and with the same batch size. The classical arm shows what simple
//! augmentation alone gains. Equal steps rule out a gain from longer training. The duplicates rule out a gain from the
//! number and the choice of the sources. What decides is fixed before the first training ([`report`]).

pub mod arms;
pub mod probe;
pub mod report;
pub(in crate::augment) mod rows;
pub mod scores;
pub(in crate::augment) mod trained;

pub use arms::{Arm, RunKey};
pub use report::AblationReport;
pub use rows::{limited_to, training_rows};

use super::saved_settings::same_settings;
use crate::data::classical::Augment;
use crate::data::manifest::{Manifest, Row};
use crate::data::mixing_sampler::Ratio;
use crate::runtime::Runtime;
use crate::segment::RunConfig;
use crate::tensor::weights::write_bytes;
use crate::units::counted;
use crate::{Error, Result, files};
use probe::Probe;
use report::{AblationRuns, RunScores};
use rows::ArmRows;
use scores::TestSet;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use trained::ArmSegmenter;

/// Settings of an ablation.
#[derive(Debug)]
pub struct Ablation<'a> {
    /// Real data: `train` rows are trained on, `test` rows are scored.
    pub real: &'a Manifest,
    /// Pairs that `prsmed augment generate` made.
    pub synthetic: &'a Manifest,
    /// Real data of another source, which is scored too. Its `test` rows, or all rows if there are none.
    pub external: Option<&'a Manifest>,
    /// Training settings. The ablation sets augmentation, synthetic rows, seed and number of steps itself.
    pub config: &'a RunConfig,
    /// Text of the settings. A folder of runs belongs to one text.
    pub toml: &'a str,
    /// Number of real training images, spread evenly over the classes; 0 = all.
    pub real_images: usize,
    /// Synthetic rows per real row; the first one decides.
    pub ratios: Vec<Ratio>,
    /// Optimizer steps of every training.
    pub steps: u64,
    /// First seed.
    pub first_seed: u64,
    /// Number of seeds.
    pub num_seeds: usize,
    /// Most rows of each set that is scored, spread evenly; 0 = all.
    pub limit_test: usize,
    /// Output folder of runs and report.
    pub out: &'a Path,
}

impl Ablation<'_> {
    /// Runs the trainings that are missing, scores and compares all of them, and writes `ablation.json` and
    /// `ablation.txt`.
    ///
    /// # Errors
    /// [`Error::Config`] for a ratio that the batch is too small for; [`Error::Data`] without test rows or without
    /// pairs made from these images; as [`Training::run`](crate::segment::Training::run); [`Error::Interrupted`].
    pub fn run(&self, runtime: &Runtime) -> Result<AblationReport> {
        let sets = self.sets(runtime)?;
        let rows = ArmRows::new(self.real, self.synthetic, self.real_images)?;
        self.check(&rows)?;
        self.check_settings()?;
        self.describe(&rows, runtime);
        let runs = self.runs();
        let mut scores = HashMap::new();
        for (done, &key) in runs.iter().enumerate() {
            runtime.note(format!("run {} of {}: {key}", done + 1, runs.len()));
            scores.insert(key.to_string(), self.scores(key, &rows, &sets, runtime)?);
        }
        let report = AblationRuns { ablation: self, rows: &rows, sets: &sets, runs: &scores }.report()?;
        self.write(&report)?;
        Ok(report)
    }

    /// Images of an optimizer step.
    fn batch(&self) -> usize {
        self.config.train.micro_batch * self.config.train.accumulation
    }

    fn check(&self, rows: &ArmRows) -> Result<()> {
        let batch = self.batch();
        for ratio in self.ratios.iter().map(|&ratio| rows.ratio(ratio)) {
            if ratio <= 0.0 {
                return Err(Error::argument("ratios", "0 adds no synthetic rows", "use for example 0.5"));
            }
            if (batch as f64) < 1.0 + ratio {
                let reason = format!(
                    "with {ratio} synthetic rows per real row, some steps of {batch} would contain no real row"
                );
                let hint = "lower the ratio, or raise `train.micro_batch` or `train.accumulation`";
                return Err(Error::argument("ratios", reason, hint));
            }
        }
        Ok(())
    }

    /// The scored rows: `test` rows, then those of the external data root.
    fn sets(&self, runtime: &Runtime) -> Result<Vec<TestSet<'_>>> {
        let how = (self.config.data.labels, self.limit_test);
        let set = |scored| TestSet::new(self.real, scored, how, runtime.observer().as_ref());
        [None].into_iter().chain(self.external.map(Some)).map(set).collect()
    }

    fn seeds(&self) -> Vec<u64> {
        (0..self.num_seeds as u64).map(|i| self.first_seed + i).collect()
    }

    /// All trainings: every arm has every seed. Seeds come last, so that an unfinished ablation has complete comparisons
    /// of its first seeds.
    fn runs(&self) -> Vec<RunKey> {
        let (arms, limit_real) = (Arm::all(&self.ratios), self.real_images);
        let of_seed = |seed| arms.iter().map(move |&arm| RunKey { limit_real, arm, seed });
        self.seeds().into_iter().flat_map(of_seed).collect()
    }

    /// Prints the number of trainings and what is compared.
    fn describe(&self, rows: &ArmRows, runtime: &Runtime) {
        let arms = Arm::all(&self.ratios).len();
        runtime.note(format!(
            "{} of {} steps: {}, {}",
            counted(arms * self.num_seeds, "training"),
            self.steps,
            counted(arms, "arm"),
            counted(self.num_seeds, "seed"),
        ));
        for &ratio in &self.ratios {
            let (wanted, pairs) = (rows.ratio(ratio) * rows.num_real() as f64, rows.synthetic.len());
            if wanted > 1.01 * pairs as f64 {
                runtime.note(format!(
                    "with ratio {ratio}, each of the {pairs} synthetic rows is used {:.1} times as often as a real row",
                    wanted / pairs as f64
                ));
            }
        }
    }

    /// Settings of a training. Arms differ in the augmentation and in their extra rows only.
    fn config_of(&self, key: RunKey, rows: &ArmRows) -> RunConfig {
        let mut config = self.config.clone();
        config.train.seed = key.seed;
        config.train.max_steps = self.steps;
        config.train.epochs = self.steps;
        config.train.validate_every_epochs = 0;
        config.train.patience = 0;
        config.data.augment = if key.arm == Arm::Classical { Augment::Classical } else { Augment::None };
        config.data.synthetic_ratio = Ratio::PerReal(key.arm.ratio().map_or(0.0, |ratio| rows.ratio(ratio)));
        config
    }

    /// Writes the settings and a hash of the training rows at the first call; later calls fail when they differ. Seeds,
    /// ratios, the number of real images and scored rows are not compared: they can be added later.
    fn check_settings(&self) -> Result<()> {
        let hash_of = |rows: &mut dyn Iterator<Item = &Row>| {
            let mut hash = Sha256::new();
            for row in rows {
                hash.update(format!(
                    "{:?}",
                    (&row.modality, row.target().mask_path.file_name(), &row.question, &row.answer)
                ));
            }
            format!("{:x}", hash.finalize())
        };
        let real = self.real.rows_of(crate::data::manifest::Split::Train);
        let now = json!({
            "format": 2,
            "steps": self.steps,
            "real_rows_sha256": hash_of(&mut real.iter().map(|&row| &self.real.rows[row])),
            "synthetic_rows_sha256": hash_of(&mut self.synthetic.rows.iter()),
            "recipe": self.toml,
        });
        files::create_folders(self.out).map_err(Error::io(self.out, "create"))?;
        same_settings(&self.out.join("settings.json"), &now, "out", "runs")
    }

    /// Scores of one run. A finished training is not repeated, and neither
    /// are finished scores.
    fn scores(&self, key: RunKey, rows: &ArmRows, sets: &[TestSet], runtime: &Runtime) -> Result<RunScores> {
        let folder = self.out.join("runs").join(key.to_string());
        files::create_below(self.out, &folder).map_err(Error::io(&folder, "create"))?;
        let is_probed = matches!(key.arm, Arm::Real | Arm::Synthetic(_));
        let labels = self.config.data.labels;
        let probe = if is_probed { Probe::new(&rows.synthetic, &rows.records, labels) } else { None };
        let known = sets.iter().map(|set| set.known(&folder)).collect::<Result<Vec<_>>>()?;
        let counts = probe.as_ref().and_then(|probe| probe.known(&folder));
        let is_scored = known.iter().zip(sets).all(|(scores, set)| scores.len() == set.rows.len());
        if is_scored && counts.is_some() == probe.is_some() {
            return Ok(RunScores { sets: known, probe: counts });
        }
        let samples = usize::try_from(self.steps).unwrap_or(usize::MAX).saturating_mul(self.batch());
        let manifest = Arc::new(rows.manifest(key.arm, samples));
        let config = self.config_of(key, rows);
        let model = ArmSegmenter::train(config, manifest, &folder, runtime)?;
        let sets = sets.iter().map(|set| set.score(&model, &folder, runtime)).collect::<Result<_>>()?;
        let probe = probe.map(|probe| probe.measure(&model, &folder, runtime)).transpose()?;
        Ok(RunScores { sets, probe })
    }

    fn write(&self, report: &AblationReport) -> Result<()> {
        let json = serde_json::to_vec_pretty(report).expect("plain numbers serialise");
        write_bytes(&self.out.join("ablation.json"), &json)?;
        write_bytes(&self.out.join("ablation.txt"), report.table().as_bytes())
    }
}

#[cfg(test)]
#[path = "ablation_tests.rs"]
mod tests;
