//! Ablation of synthetic pairs: trainings with and without them, at equal optimizer steps, scored on the same real
//! images.
//!
//! There are four kinds of arms: real images only, real images with classical augmentation, real images with synthetic
//! pairs, and real images with duplicated real rows in place of the synthetic ones ([`arms`]). Each arm is trained with
//! every seed, for the same number of steps and with the same batch size. The classical arm shows what simple
//! augmentation alone gains. Equal steps rule out a gain from longer training. The duplicates rule out a gain from the
//! number and the choice of the sources. What decides is fixed before the first training ([`report`]).

pub mod arms;
mod figure;
pub mod probe;
pub mod report;
pub(in crate::augment) mod rows;
pub mod scores;
pub(in crate::augment) mod trained;
mod unet;

pub use arms::{Arm, Condition, RunKey, Segmenter};
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
use report::{Results, RunScores};
use rows::ArmRows;
use scores::{Scoring, TestSet};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trained::Trained;

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
    /// The trained models; the first one decides.
    pub segmenters: Vec<Segmenter>,
    /// Numbers of real training images, each spread evenly over the classes; 0 = all. The largest one decides.
    pub real_images: Vec<usize>,
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
    /// Tolerance of the surface Dice in pixels.
    pub tolerance_px: f64,
    /// Output folder of runs and report.
    pub out: &'a Path,
}

impl Ablation<'_> {
    /// Runs the trainings that are missing, scores and compares all of them, and writes `ablation.json`,
    /// `ablation.txt` and `ablation.svg`.
    ///
    /// # Errors
    /// [`Error::Config`] for a ratio that the batch is too small for; [`Error::Data`] without test rows or without
    /// pairs made from these images; as [`Training::run`](crate::segment::Training::run); [`Error::Interrupted`].
    pub fn run(&self, runtime: &Runtime) -> Result<AblationReport> {
        let sets = self.sets(runtime)?;
        let limits = self.limits();
        let rows: Vec<ArmRows> =
            limits.iter().map(|&limit| ArmRows::new(self.real, self.synthetic, limit)).collect::<Result<_>>()?;
        self.check(&rows)?;
        self.check_settings()?;
        self.describe(&rows, runtime);
        let rows_of = |limit: usize| limits.iter().position(|&one| one == limit).map(|i| &rows[i]);
        let runs = self.runs();
        let mut clock = Clock::default();
        let mut scores = HashMap::new();
        for (done, &key) in runs.iter().enumerate() {
            let Some(rows) = rows_of(key.condition.limit_real) else { continue };
            runtime.note(format!("run {} of {}: {key}", done + 1, runs.len()));
            let start = Instant::now();
            let (found, is_new) = self.scores(key, rows, &sets, runtime)?;
            if is_new {
                clock.add(key.condition.segmenter, start.elapsed());
                clock.estimate(&runs[done + 1..]).into_iter().for_each(|text| runtime.note(text));
            }
            scores.insert(key.to_string(), found);
        }
        let conditions = self.conditions().into_iter();
        let results = Results {
            steps: self.steps,
            seeds: self.seeds(),
            ratios: &self.ratios,
            tolerance_px: self.tolerance_px,
            conditions: conditions.filter_map(|c| Some((c, rows_of(c.limit_real)?))).collect(),
            sets: &sets,
            runs: &scores,
        };
        let report = results.report()?;
        self.write(&report)?;
        Ok(report)
    }

    fn check(&self, rows: &[ArmRows]) -> Result<()> {
        let batch = self.config.train.micro_batch * self.config.train.accumulation;
        for ratio in rows.iter().flat_map(|rows| self.ratios.iter().map(|&ratio| rows.ratio(ratio))) {
            if ratio <= 0.0 {
                return Err(Error::config("--ratios", "0 adds no synthetic rows", "use for example 0.5"));
            }
            if (batch as f64) < 1.0 + ratio {
                let reason = format!(
                    "with {ratio} synthetic rows per real row, some steps of {batch} would contain no real row"
                );
                let hint = "lower the ratio, or raise `train.micro_batch` or `train.accumulation`";
                return Err(Error::config("--ratios", reason, hint));
            }
        }
        if self.tolerance_px.is_nan() || self.tolerance_px < 0.0 {
            return Err(Error::config("--tolerance", "must be 0 or more", "use for example 2"));
        }
        Ok(())
    }

    /// The scored rows: `test` rows, then those of the external data root.
    fn sets(&self, runtime: &Runtime) -> Result<Vec<TestSet<'_>>> {
        let labels = self.config.data.labels;
        let scoring = Scoring { labels, tolerance_px: self.tolerance_px, limit: self.limit_test };
        let observer = runtime.observer().as_ref();
        let mut sets = vec![TestSet::of_test_rows(self.real, scoring, observer)?];
        if let Some(external) = self.external {
            sets.push(TestSet::of_external(self.real, external, scoring, observer)?);
        }
        Ok(sets)
    }

    fn seeds(&self) -> Vec<u64> {
        (0..self.num_seeds as u64).map(|i| self.first_seed + i).collect()
    }

    /// Numbers of real images, each once, the one that decides first: all images (0) or the largest number.
    fn limits(&self) -> Vec<usize> {
        let mut limits = self.real_images.clone();
        limits.sort_unstable_by_key(|&limit| std::cmp::Reverse(limit.wrapping_sub(1)));
        limits.dedup();
        limits
    }

    /// Segmenters and numbers of real images; the first one decides.
    fn conditions(&self) -> Vec<Condition> {
        let limits = self.limits();
        let of_segmenter = |&segmenter: &Segmenter| {
            limits.iter().map(|&limit_real| Condition { segmenter, limit_real }).collect::<Vec<_>>()
        };
        self.segmenters.iter().flat_map(of_segmenter).collect()
    }

    /// All trainings: every arm has every seed under every condition. Seeds come last, so that an unfinished ablation
    /// has complete comparisons of its first seeds.
    fn runs(&self) -> Vec<RunKey> {
        let (conditions, arms) = (self.conditions(), Arm::all(&self.ratios));
        let mut runs = Vec::new();
        for seed in self.seeds() {
            for &condition in &conditions {
                runs.extend(arms.iter().map(|&arm| RunKey { condition, arm, seed }));
            }
        }
        runs
    }

    /// Prints the number of trainings and what is compared.
    fn describe(&self, rows: &[ArmRows], runtime: &Runtime) {
        let (arms, seeds) = (Arm::all(&self.ratios).len(), self.num_seeds);
        let conditions = self.conditions();
        let trainings = arms * seeds * conditions.len();
        runtime.note(format!(
            "{} of {} steps: {}, {}, {}, {} of real images",
            counted(trainings, "training"),
            self.steps,
            counted(arms, "arm"),
            counted(seeds, "seed"),
            counted(self.segmenters.len(), "segmenter"),
            counted(rows.len(), "number"),
        ));
        if let (Some(first), Some(ratio), Some(rows)) = (conditions.first(), self.ratios.first(), rows.first()) {
            runtime.note(format!(
                "the verdict compares synthetic-{ratio} with real and with duplicates-{ratio}: Dice of {} with {} real \
                 images on the test rows",
                first.segmenter, rows.num_images,
            ));
        }
        for rows in rows {
            for &ratio in &self.ratios {
                let (wanted, pairs) = (rows.ratio(ratio) * rows.num_real() as f64, rows.synthetic.len());
                if wanted > 1.01 * pairs as f64 {
                    runtime.note(format!(
                        "with {} real images and ratio {ratio}, each of the {pairs} synthetic rows is used {:.1} times \
                         as often as a real row",
                        rows.num_images,
                        wanted / pairs as f64
                    ));
                }
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
    /// ratios, segmenters, numbers of real images and scored rows are not compared: they can be added later.
    fn check_settings(&self) -> Result<()> {
        let hash_of = |rows: &mut dyn Iterator<Item = &Row>| {
            let mut hash = Sha256::new();
            for row in rows {
                hash.update(format!("{:?}", (&row.modality, row.mask_path.file_name(), &row.question, &row.answer)));
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
        same_settings(&self.out.join("settings.json"), &now, "--out", "runs")
    }

    /// Scores of one run, and whether it had to be trained or scored. A finished training is not repeated, and neither
    /// are finished scores.
    fn scores(&self, key: RunKey, rows: &ArmRows, sets: &[TestSet], runtime: &Runtime) -> Result<(RunScores, bool)> {
        let folder = self.out.join("runs").join(key.to_string());
        files::create_below(self.out, &folder).map_err(Error::io(&folder, "create"))?;
        let is_probed = matches!(key.arm, Arm::Real | Arm::Synthetic(_));
        let labels = self.config.data.labels;
        let probe = if is_probed { Probe::new(&rows.synthetic, &rows.records, labels) } else { None };
        let known = sets.iter().map(|set| set.known(&folder)).collect::<Result<Vec<_>>>()?;
        let counts = probe.as_ref().and_then(|probe| probe.known(&folder));
        let is_scored = known.iter().zip(sets).all(|(scores, set)| scores.len() == set.len());
        if is_scored && counts.is_some() == probe.is_some() {
            return Ok((RunScores { sets: known, probe: counts }, false));
        }
        let train = &self.config.train;
        let batch = train.micro_batch * train.accumulation;
        let samples = usize::try_from(self.steps).unwrap_or(usize::MAX).saturating_mul(batch);
        let manifest = Arc::new(rows.manifest(key.arm, samples));
        let config = self.config_of(key, rows);
        let model = Trained::train(key.condition.segmenter, config, manifest, &folder, runtime)?;
        let sets = sets.iter().map(|set| set.score(&model, &folder, runtime)).collect::<Result<_>>()?;
        let probe = probe.map(|probe| probe.measure(&model, &folder, runtime)).transpose()?;
        Ok((RunScores { sets, probe }, true))
    }

    fn write(&self, report: &AblationReport) -> Result<()> {
        let json = serde_json::to_vec_pretty(report).expect("plain numbers serialise");
        write_bytes(&self.out.join("ablation.json"), &json)?;
        write_bytes(&self.out.join("ablation.txt"), report.table().as_bytes())?;
        write_bytes(&self.out.join("ablation.svg"), figure::svg(report).as_bytes())
    }
}

/// Times of the trainings of this process.
#[derive(Default)]
struct Clock {
    /// Segmenter, number and time of its trainings.
    spent: Vec<(Segmenter, u32, Duration)>,
    /// Number of segmenters when the last estimate was printed.
    estimated: usize,
}

impl Clock {
    fn add(&mut self, segmenter: Segmenter, time: Duration) {
        match self.spent.iter_mut().find(|(one, ..)| *one == segmenter) {
            Some((_, count, sum)) => (*count, *sum) = (*count + 1, *sum + time),
            None => self.spent.push((segmenter, 1, time)),
        }
    }

    /// The time that the runs `left` take, after the first training of each segmenter.
    fn estimate(&mut self, left: &[RunKey]) -> Option<String> {
        if self.estimated == self.spent.len() || left.is_empty() {
            return None;
        }
        self.estimated = self.spent.len();
        let mut seconds = 0.0;
        let mut unknown = 0;
        for key in left {
            match self.spent.iter().find(|(one, ..)| *one == key.condition.segmenter) {
                Some((_, count, sum)) => seconds += sum.as_secs_f64() / f64::from(*count),
                None => unknown += 1,
            }
        }
        let rest = if unknown == 0 { String::new() } else { format!(", and {unknown} of another segmenter") };
        let last = self.spent.last().map_or(0.0, |(_, _, sum)| sum.as_secs_f64());
        let minutes = Duration::from_secs_f64(seconds).as_secs().div_ceil(60);
        let minutes = usize::try_from(minutes).unwrap_or(usize::MAX);
        Some(format!(
            "the first training took {last:.0} s; {} more like it need about {} at most{rest}",
            left.len() - unknown,
            counted(minutes, "minute")
        ))
    }
}

#[cfg(test)]
#[path = "ablation_tests.rs"]
mod tests;
