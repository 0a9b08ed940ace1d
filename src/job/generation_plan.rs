//! Plans of an [`AugmentRun`]: dry runs of the generator, the fastest batch that fits a GPU, and changes that save
//! memory.

use super::planned::{Fitted, Planned, SavingChange, SettingsSearch};
use crate::Result;
use crate::augment::dry_run::{GenerationDryRun, SHOWN_STEPS};
use crate::augment::pipeline_config::PipelineConfig;
use crate::augment::settings::{AugmentConfig, Decode, Mode, RANDOM};
use crate::config::{AugmentRun, Settings as _};
use crate::plan::dry_run::{self, Buffers, DryRun, Job, Meter, PhaseMeter, PlannedSteps, RealPhase};
use crate::plan::machine::Machine;
use crate::plan::report::Plan;
use crate::plan::search::{BatchChoice, Effort, Ladder, PlannedSettings, Saving, SearchProblem, Space};
use crate::tensor::{Device, META};
use crate::trainer::precision::Precision;

/// Different texts of a plan without data: one prompt and one negative.
const PROMPTS: usize = 2;
/// Largest batch that is searched.
const MOST: usize = 64;

impl AugmentRun {
    /// The generator's sizes without its files: those of a `random:` model, else of the family that its name suggests.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for an unknown `random:` size.
    pub fn planned_pipeline_config(&self) -> Result<PipelineConfig> {
        let control = self.augment.mode == Mode::MaskToImage;
        family_config(&self.augment.model, control || !self.augment.controlnet.is_empty())
    }

    /// Runs a batch of these settings on the meta device. `prompts` different texts are encoded first.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for a precision that the machine does not have.
    pub fn dry_run(&self, sizes: &PipelineConfig, prompts: usize, machine: &Machine, costs: bool) -> Result<DryRun> {
        machine.check_precision("augment.precision", self.augment.precision)?;
        machine.set_planned_gpu();
        let run = planned_steps(&self.augment);
        let shown = self.shown();
        let dry_run = GenerationDryRun { config: &shown, pipeline_config: sizes, prompts, device: META };
        let mut dry_run = dry_run::plan_walk(Job::Augment, run, machine.target(), costs, |begin| dry_run.walk(begin))?;
        dry_run.buffers = Buffers { half_precision: self.augment.precision != Precision::Fp32, ..Buffers::default() };
        Ok(dry_run)
    }

    /// Runs a batch of these settings with random weights on `device`, and measures its memory.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn measure(&self, sizes: &PipelineConfig, device: Device) -> Result<Vec<RealPhase>> {
        let config = &self.shown();
        let dry_run = GenerationDryRun { config, pipeline_config: sizes, prompts: PROMPTS, device };
        let mut meter = PhaseMeter::begin(device)?;
        dry_run.walk(&mut |phase| meter.begin(phase))?;
        meter.finish()
    }

    /// The settings of a dry run: with only the steps that it runs.
    fn shown(&self) -> AugmentConfig {
        AugmentConfig { steps: planned_steps(&self.augment).shown, strength: 1.0, ..self.augment.clone() }
    }
}

impl Planned for AugmentRun {
    /// Sizes of the generator.
    type Facts = PipelineConfig;

    const TASK: &'static str = "augment";

    fn plan_of(&self, sizes: &PipelineConfig, _job: Job, machine: &Machine) -> Result<Plan> {
        Ok(Plan::of(&self.dry_run(sizes, PROMPTS, machine, true)?, machine))
    }

    fn changes(&self, _job: Job) -> Vec<SavingChange> {
        let now = &self.augment;
        let sliced = SavingChange::exact("augment.decode=sliced", "one image after another");
        let tiled = SavingChange::new("augment.decode=tiled", "seams are possible");
        let smaller = [768, 512].into_iter().filter(|side| now.image_size > *side);
        let smaller = smaller.map(|side| SavingChange::new(format!("augment.image_size={side}"), "coarser images"));
        let sliced = Some(sliced).filter(|_| now.decode() == Decode::Whole);
        let tiled = Some(tiled).filter(|_| now.decode() != Decode::Tiled && now.image_size > now.tile_px);
        sliced.into_iter().chain(tiled).chain(smaller).collect()
    }
}

/// The search for the fastest batch that fits a machine.
impl SearchProblem for SettingsSearch<'_, AugmentRun> {
    fn plan(&self, sets: &str, effort: Effort) -> Result<Plan> {
        let run = self.settings.with_sets(sets)?;
        let dry_run = run.dry_run(self.facts, PROMPTS, self.machine, effort != Effort::Memory)?;
        Ok(Plan::of(&dry_run, self.machine))
    }

    /// Images are decoded all at once where that fits, else one by one, else in tiles.
    fn ladders(&self, compromise: &str) -> Result<Vec<Ladder>> {
        let decodings: &[&str] = if compromise.is_empty() { &["whole", "sliced"] } else { &["tiled"] };
        let saving = |decode: &&str| Saving { sets: format!("augment.decode={decode}"), ..Saving::default() };
        let batch =
            |size: usize| BatchChoice { sets: format!("augment.batch={size}"), micro_batch: size, samples: size };
        let batches = vec![(1..=MOST).map(batch).collect()];
        Ok(vec![Ladder { savings: decodings.iter().map(saving).collect(), batches }])
    }

    fn has_all_phases(&self) -> bool {
        true
    }

    fn compared(&self, _unhindered: usize, possible: usize) -> Vec<usize> {
        let sizes = std::iter::successors(Some(1), |size| Some(size * 2)).take_while(|&size| size < possible);
        sizes.chain((possible > 0).then_some(possible)).map(|size| size - 1).collect()
    }

    /// The smallest batch whose time per image is at most 2 % above the best; without times the largest.
    fn sort(&self, candidates: &mut [PlannedSettings]) {
        candidates.sort_by_key(|one| one.batch.micro_batch);
        let best = candidates.iter().map(PlannedSettings::seconds).min_by(f64::total_cmp).filter(|best| *best > 0.0);
        let chosen = best.and_then(|best| candidates.iter().position(|one| one.seconds() <= best * 1.02));
        if let Some(chosen) = chosen.or_else(|| candidates.len().checked_sub(1)) {
            candidates.swap(0, chosen);
        }
    }
}

impl Fitted for AugmentRun {
    fn fitted(&self, sizes: &PipelineConfig, machine: &Machine, _may_shrink: bool) -> Result<Option<(Self, Plan)>> {
        // tiles of half the side where one tile would cover the image
        let half = (self.augment.image_size / 2).max(64) / 64 * 64;
        let tiled =
            (self.augment.image_size >= 128).then(|| format!("augment.tile_px={}", self.augment.tile_px.min(half)));
        let space = Space {
            sizes: vec![String::new()],
            compromises: std::iter::once(String::new()).chain(tiled).collect(),
            ..Space::default()
        };
        SettingsSearch { settings: self, facts: sizes, machine }.best_of(space)
    }
}

/// Steps of a batch, and those that its plan runs.
fn planned_steps(config: &AugmentConfig) -> PlannedSteps {
    let run = config.num_steps();
    PlannedSteps { whole: run, shown: run.min(SHOWN_STEPS) }
}

/// Sizes of `model` without its files: those of a `random:` model, else of the family that its name suggests.
pub(super) fn family_config(model: &str, control: bool) -> Result<PipelineConfig> {
    PipelineConfig::random(model.strip_prefix(RANDOM).unwrap_or_else(|| family_of(model)), control)
}

/// The family of a model by its name; SDXL, the largest, if its name is not known.
fn family_of(model: &str) -> &'static str {
    let name = model.to_lowercase();
    let is = |words: &[&str]| words.iter().any(|word| name.contains(word));
    if is(&["xl"]) {
        "sdxl"
    } else if is(&["diffusion-2", "sd2", "v2-"]) {
        "sd21"
    } else if is(&["v1-", "1-5", "1.5", "sd15", "sd-v1"]) {
        "sd15"
    } else {
        "sdxl"
    }
}
