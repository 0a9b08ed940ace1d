//! Ablation of synthetic pairs: trainings with and without them, at equal optimizer steps, scored on the same real
//! test images.
//!
//! There are three arms: real images only, real images with classical augmentation, real images with synthetic pairs.
//! Each arm is trained with every seed, for the same number of steps and with the same batch size. The classical arm
//! shows what simple augmentation alone gains. Equal steps rule out a gain from longer training. A synthetic pair is
//! used only when its source is among the real training images of the ablation. Other pairs would bring in images
//! that the real arm does not have.

use super::export::Journal;
use super::saved_settings::same_settings;
use crate::data::classical::Augment;
use crate::data::manifest::{Manifest, Row, Split};
use crate::data::mixing_sampler::Ratio;
use crate::event::{Event, Observer, Silent};
use crate::metrics::paired::{self, Comparison, Conclusion, Interval, Scores};
use crate::runtime::Runtime;
use crate::segment::evaluate;
use crate::segment::task::spread;
use crate::segment::{RunConfig, Training};
use crate::tensor::weights::{sha256, write_bytes};
use crate::{Error, Result, files};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Training data of one arm of the ablation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arm {
    /// Real images without changes.
    Real,
    /// Real images with classical augmentation: flips, rotations, elastic deformation, intensity changes.
    Classical,
    /// Real and synthetic images.
    Synthetic,
}

impl Arm {
    /// All arms, the baseline first.
    pub const ALL: [Self; 3] = [Self::Real, Self::Classical, Self::Synthetic];

    /// Name in folder names and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Real => "real",
            Self::Classical => "classical",
            Self::Synthetic => "synthetic",
        }
    }
}

/// Settings of an ablation.
#[derive(Debug)]
pub struct Ablation<'a> {
    /// Real data: `train` rows are trained on, `test` rows are scored.
    pub real: &'a Manifest,
    /// Pairs that `prsmed augment generate` made.
    pub synthetic: &'a Manifest,
    /// Training settings. The ablation sets augmentation, seed and number of steps itself.
    pub config: &'a RunConfig,
    /// Text of the settings, for the run folders.
    pub toml: &'a str,
    /// Optimizer steps of every training.
    pub steps: u64,
    /// First seed.
    pub first_seed: u64,
    /// Number of seeds.
    pub num_seeds: usize,
    /// Number of real training images, spread evenly over each class; 0 = all.
    pub limit_real: usize,
    /// Number of test rows, spread evenly; 0 = all.
    pub limit_test: usize,
    /// Synthetic rows per real row.
    pub ratio: Ratio,
    /// Output folder of runs and report.
    pub out: &'a Path,
}

/// Results of an ablation.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct AblationReport {
    /// Optimizer steps of every training.
    pub steps: u64,
    /// Seeds.
    pub seeds: Vec<u64>,
    /// Real training images.
    pub real_images: usize,
    /// Synthetic training images, all made from these real images.
    pub synthetic_images: usize,
    /// Scored test rows.
    pub test_rows: usize,
    /// Images of these rows. The scores of an image's rows are averaged before arms are compared.
    pub test_images: usize,
    /// Mean Dice of every run: arm name -> one value per seed.
    pub runs: BTreeMap<&'static str, Vec<f64>>,
    /// Classical against real, by class and overall.
    pub classical: Vec<Comparison>,
    /// Synthetic against real, by class and overall.
    pub synthetic: Vec<Comparison>,
    /// Synthetic against classical, by class and overall.
    pub synthetic_over_classical: Vec<Comparison>,
    /// Conclusion: do synthetic images improve on real images alone?
    pub verdict: Conclusion,
}

/// Rows of the arms.
struct ArmData {
    real: Arc<Manifest>,
    /// Real and synthetic.
    both: Arc<Manifest>,
}

impl ArmData {
    /// Only the synthetic arm has synthetic rows.
    fn of(&self, arm: Arm) -> &Arc<Manifest> {
        match arm {
            Arm::Real | Arm::Classical => &self.real,
            Arm::Synthetic => &self.both,
        }
    }
}

impl Ablation<'_> {
    /// Runs the trainings that are missing, scores and compares all of them, and writes `ablation.json` and
    /// `ablation.txt`.
    ///
    /// # Errors
    /// [`Error::Data`] without test rows or without pairs made from these images; as [`Training::run`];
    /// [`Error::Interrupted`].
    pub fn run(&self, runtime: &Runtime) -> Result<AblationReport> {
        let (rows, images) = limited(self.real, self.limit_real);
        let real = self.repeated(&Manifest { rows, ..self.real.clone() });
        let (synthetic, pairs) = self.pairs_of(&images)?;
        let synthetic = self.repeated(&synthetic);
        let both = Arc::new(real.clone().with_extra(synthetic.clone())?);
        let real = Arc::new(real);
        let test = spread(self.unseen_test_rows(runtime.observer().as_ref())?, self.limit_test);
        if test.is_empty() {
            let hint = "give some rows the split `test`: the ablation scores real images that no arm was trained on";
            return Err(Error::data(&self.real.root, "there are no `test` rows", hint));
        }
        self.check_settings(&real, &synthetic, &test)?;
        let data = ArmData { real, both };
        let runs = self.runs();
        let mut scores: BTreeMap<&'static str, Vec<Vec<f64>>> = BTreeMap::new();
        for (done, &(seed, arm)) in runs.iter().enumerate() {
            runtime.note(format!("run {} of {}: {} images, seed {seed}", done + 1, runs.len(), arm.name()));
            let found = self.scores(arm, seed, data.of(arm), &test, runtime)?;
            scores.entry(arm.name()).or_default().push(found);
        }
        let report = self.report(&scores, &test, self.seeds(), images.len(), pairs)?;
        self.write(&report)?;
        Ok(report)
    }

    fn seeds(&self) -> Vec<u64> {
        (0..self.num_seeds as u64).map(|i| self.first_seed + i).collect()
    }

    /// Seed and arm of each training: every arm has every seed, in the same order.
    fn runs(&self) -> Vec<(u64, Arm)> {
        self.seeds().into_iter().flat_map(|seed| Arm::ALL.map(|arm| (seed, arm))).collect()
    }

    /// Settings of a training. Arms differ in the augmentation only; their rows are those of [`ArmData`].
    fn config_of(&self, arm: Arm, seed: u64) -> RunConfig {
        let mut config = self.config.clone();
        config.train.seed = seed;
        config.train.max_steps = self.steps;
        config.train.epochs = self.steps;
        config.train.validate_every_epochs = 0;
        config.train.patience = 0;
        config.data.augment = if arm == Arm::Classical { Augment::Classical } else { Augment::None };
        config.data.synthetic_ratio = self.ratio;
        config
    }

    /// Repeats the training rows until one epoch is longer than the training. Otherwise the short last batch of an
    /// epoch would give the arm with fewer rows fewer samples per step.
    fn repeated(&self, manifest: &Manifest) -> Manifest {
        let train = &self.config.train;
        let needed =
            usize::try_from(self.steps).unwrap_or(usize::MAX).saturating_mul(train.micro_batch * train.accumulation);
        let once: Vec<Row> = manifest.rows.iter().filter(|row| row.split == Split::Train).cloned().collect();
        let times = needed.div_ceil(once.len().max(1)) + 1;
        let mut rows: Vec<Row> = manifest.rows.iter().filter(|row| row.split != Split::Train).cloned().collect();
        for _ in 0..times {
            rows.extend(once.iter().cloned());
        }
        Manifest { rows, ..manifest.clone() }
    }

    /// Test rows whose images are not also training images.
    fn unseen_test_rows(&self, observer: &dyn Observer) -> Result<Vec<usize>> {
        let sums_of = |split: Split| -> Result<HashSet<String>> {
            let images: HashSet<&PathBuf> =
                self.real.rows_of(split).into_iter().map(|row| &self.real.rows[row].image_path).collect();
            images.into_iter().map(|path| sha256(path)).collect()
        };
        let seen = sums_of(Split::Train)?;
        let all = self.real.rows_of(Split::Test);
        let mut selected = Vec::new();
        for &row in &all {
            if !seen.contains(&sha256(&self.real.rows[row].image_path)?) {
                selected.push(row);
            }
        }
        if selected.len() < all.len() {
            let text =
                format!("left out {} test rows whose images are also training images", all.len() - selected.len());
            observer.on(&Event::Warning(text));
        }
        Ok(selected)
    }

    /// Writes the settings and a hash of the rows at the first call; later calls fail when they differ. The seeds are
    /// not compared, so more can be added.
    fn check_settings(&self, real: &Manifest, synthetic: &Manifest, test: &[usize]) -> Result<()> {
        let mut hash = Sha256::new();
        let train = real.rows.iter().filter(|row| row.split == Split::Train);
        for row in train.chain(&synthetic.rows).chain(test.iter().map(|&i| &self.real.rows[i])) {
            hash.update(format!("{:?}", (&row.modality, row.mask_path.file_name(), &row.question, &row.answer)));
        }
        let now = json!({
            "format": 1,
            "steps": self.steps,
            "limit_real": self.limit_real,
            "limit_test": self.limit_test,
            "synthetic_ratio": self.ratio,
            "rows_sha256": format!("{:x}", hash.finalize()),
            "recipe": self.toml,
        });
        files::create_folders(self.out).map_err(Error::io(self.out, "create"))?;
        same_settings(&self.out.join("settings.json"), &now, "--out", "runs")
    }

    /// Accepted pairs whose sources are among `images`, and their number.
    fn pairs_of(&self, images: &HashSet<PathBuf>) -> Result<(Manifest, usize)> {
        let root = &self.synthetic.root;
        let records = Journal::read(&root.join(super::export::JOURNAL))?;
        // names are compared too: a copy of an image may have a mask that the real arm does not use
        let key = |path: &Path, sum: String| (path.file_name().map(ToOwned::to_owned), sum);
        let real: HashSet<_> = images.iter().map(|path| Ok(key(path, sha256(path)?))).collect::<Result<_>>()?;
        let names: HashSet<String> = records
            .iter()
            .filter(|record| record.accepted && real.contains(&key(&record.source_image, record.source_sha256.clone())))
            .map(|record| record.name.clone())
            .collect();
        let is_selected = |row: &&Row| row.mask_path.file_stem().is_some_and(|s| names.contains(&*s.to_string_lossy()));
        let rows: Vec<Row> = self.synthetic.rows.iter().filter(is_selected).cloned().collect();
        if rows.is_empty() {
            let reason = "contains no pair made from these real training images";
            return Err(Error::data(root, reason, "make some with `prsmed augment generate` on the same data root"));
        }
        Ok((Manifest { rows, ..self.synthetic.clone() }, names.len()))
    }

    /// Dice of every test row after one training. A finished training is read from its `scores.json`.
    fn scores(
        &self,
        arm: Arm,
        seed: u64,
        manifest: &Arc<Manifest>,
        test: &[usize],
        runtime: &Runtime,
    ) -> Result<Vec<f64>> {
        let folder = self.out.join("runs").join(format!("{}-{seed}", arm.name()));
        files::create_below(self.out, &folder).map_err(Error::io(&folder, "create"))?;
        let file = folder.join("scores.json");
        if let Ok(text) = files::read(&file, files::MAX_TABLE)
            && let Ok(known) = serde_json::from_slice::<Vec<f64>>(&text)
            && known.len() == test.len()
        {
            return Ok(known);
        }
        let config = self.config_of(arm, seed);
        let quiet = runtime.clone().with_observer(Arc::new(Quiet { inner: Arc::clone(runtime.observer()) }));
        let training = Training::new(config, Arc::clone(manifest), &folder, &quiet)?;
        let run = training.with_toml(self.toml.to_owned()).resume(true).run()?;
        if runtime.is_interrupted() {
            return Err(Error::Interrupted);
        }
        // one token is enough: the mask depends on the question only, and answers are not scored here
        let evaluation = evaluate::evaluate(run.task.assembly(), self.real, test, 1, &Silent, runtime.interrupt())?;
        let dice: Vec<f64> = evaluation.samples.iter().map(|sample| sample.dice).collect();
        write_bytes(&file, &serde_json::to_vec(&dice).expect("plain numbers serialise"))?;
        Ok(dice)
    }

    fn report(
        &self,
        scores: &BTreeMap<&'static str, Vec<Vec<f64>>>,
        test: &[usize],
        seeds: Vec<u64>,
        real_images: usize,
        synthetic_images: usize,
    ) -> Result<AblationReport> {
        // the data root may contain a copy of an image for each of its masks
        let images: Vec<String> =
            test.iter().map(|&row| sha256(&self.real.rows[row].image_path)).collect::<Result<_>>()?;
        let scores: BTreeMap<&'static str, Vec<Vec<f64>>> = scores
            .iter()
            .map(|(arm, runs)| (*arm, runs.iter().map(|dice| by_image(&images, dice)).collect()))
            .collect();
        let mut seen = HashSet::new();
        let firsts = test.iter().zip(&images).filter(|(_, image)| seen.insert(*image));
        let groups: Vec<String> = firsts.map(|(&row, _)| self.real.rows[row].modality.clone()).collect();
        let compare = |baseline: Arm, other: Arm| {
            let (baseline, other) = (&scores[baseline.name()], &scores[other.name()]);
            paired::compare(&Scores { groups: &groups, baseline, other }, self.first_seed)
        };
        let synthetic = compare(Arm::Real, Arm::Synthetic)?;
        let mean = |dice: &Vec<f64>| dice.iter().sum::<f64>() / dice.len().max(1) as f64;
        Ok(AblationReport {
            steps: self.steps,
            seeds,
            real_images,
            synthetic_images,
            test_rows: test.len(),
            test_images: groups.len(),
            runs: scores.iter().map(|(arm, runs)| (*arm, runs.iter().map(mean).collect())).collect(),
            classical: compare(Arm::Real, Arm::Classical)?,
            verdict: synthetic.last().map_or(Conclusion::NoGain, |all| all.verdict),
            synthetic,
            synthetic_over_classical: compare(Arm::Classical, Arm::Synthetic)?,
        })
    }

    fn write(&self, report: &AblationReport) -> Result<()> {
        let json = serde_json::to_vec_pretty(report).expect("plain numbers serialise");
        write_bytes(&self.out.join("ablation.json"), &json)?;
        write_bytes(&self.out.join("ablation.txt"), report.table().as_bytes())
    }
}

/// Mean score of each image, in the order of first occurrence. Rows about one image are not independent samples;
/// confidence intervals over rows would be too narrow.
fn by_image(images: &[String], scores: &[f64]) -> Vec<f64> {
    let mut index_of: HashMap<&str, usize> = HashMap::new();
    let mut sums: Vec<(f64, f64)> = Vec::new();
    for (image, score) in images.iter().zip(scores) {
        let index = *index_of.entry(image).or_insert(sums.len());
        if index == sums.len() {
            sums.push((0.0, 0.0));
        }
        sums[index].0 += score;
        sums[index].1 += 1.0;
    }
    sums.into_iter().map(|(sum, count)| sum / count).collect()
}

/// Number of training rows when an ablation uses `limit` real images.
pub fn training_rows(manifest: &Manifest, limit: usize) -> usize {
    limited(manifest, limit).0.iter().filter(|row| row.split == Split::Train).count()
}

/// Keeps `limit` real training images (0 = all), the same ones that an ablation with this limit uses. Pairs for that
/// ablation must be generated and filtered with these images only.
#[must_use]
pub fn limited_to(manifest: Manifest, limit: usize) -> Manifest {
    let (rows, _) = limited(&manifest, limit);
    Manifest { rows, ..manifest }
}

/// Rows of at most `limit` training images, spread evenly over each class, plus all rows of the other splits. Also
/// returns the images.
fn limited(manifest: &Manifest, limit: usize) -> (Vec<Row>, HashSet<PathBuf>) {
    let mut by_class: BTreeMap<&str, Vec<&PathBuf>> = BTreeMap::new();
    for row in manifest.rows.iter().filter(|row| row.split == Split::Train) {
        let images = by_class.entry(&row.modality).or_default();
        if images.last() != Some(&&row.image_path) && !images.contains(&&row.image_path) {
            images.push(&row.image_path);
        }
    }
    let classes = by_class.len().max(1);
    let mut selected: HashSet<PathBuf> = HashSet::new();
    for (number, images) in by_class.values().enumerate() {
        // the first classes take the remainder
        let share = if limit == 0 { 0 } else { (limit / classes + usize::from(number < limit % classes)).max(1) };
        let chosen = spread((0..images.len()).collect(), share);
        selected.extend(chosen.into_iter().map(|i| images[i].clone()));
    }
    let rows = manifest.rows.iter().filter(|row| row.split != Split::Train || selected.contains(&row.image_path));
    (rows.cloned().collect(), selected)
}

impl AblationReport {
    /// The results as a text table.
    pub fn table(&self) -> String {
        let mut out = format!(
            "{} steps, {} seeds, {} real and {} synthetic training images, {} test images with {} rows\n\n",
            self.steps,
            self.seeds.len(),
            self.real_images,
            self.synthetic_images,
            self.test_images,
            self.test_rows
        );
        let parts = [
            ("classical augmentation against real alone", &self.classical),
            ("synthetic pairs against real alone", &self.synthetic),
            ("synthetic pairs against classical augmentation", &self.synthetic_over_classical),
        ];
        for (title, comparisons) in parts {
            let _ = writeln!(out, "{title}, Dice:");
            out.push_str(&paired::table(comparisons));
            out.push('\n');
        }
        out.push_str(&self.sentence());
        out
    }

    /// The conclusion in one sentence.
    pub fn sentence(&self) -> String {
        let Some(all) = self.synthetic.last() else { return "nothing was compared".into() };
        let Interval { low, high } = all.bootstrap;
        let change = format!("{:+.4} Dice (95 % of draws {low:+.4} to {high:+.4})", all.difference);
        let conclusion = match self.verdict {
            Conclusion::Gain => "synthetic pairs help",
            Conclusion::NoGain => "no gain was shown: an interval contains 0",
            Conclusion::Harm => "synthetic pairs harm",
        };
        let classical = self.synthetic_over_classical.last().map_or_else(String::new, |all| match all.verdict {
            Conclusion::Gain => "; more than classical augmentation does".into(),
            Conclusion::NoGain => "; classical augmentation does as much".into(),
            Conclusion::Harm => "; classical augmentation alone does better".into(),
        });
        format!("{conclusion}: {change} over {} seeds{classical}", all.seeds)
    }
}

/// Forwards only progress, steps and warnings of a training.
struct Quiet {
    inner: Arc<dyn Observer>,
}

impl Observer for Quiet {
    fn on(&self, event: &Event) {
        if matches!(
            event,
            Event::Warning(_) | Event::Started { .. } | Event::Advanced { .. } | Event::Finished | Event::Step(_)
        ) {
            self.inner.on(event);
        }
    }
}

#[cfg(test)]
#[path = "ablation_tests.rs"]
mod tests;
