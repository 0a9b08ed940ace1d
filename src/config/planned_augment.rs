//! Plans of an [`AugmentRun`]: dry runs of the generator, the fastest batch that fits a GPU, and changes that save
//! memory.

use super::planned::commented;
use super::remedies::Remedy;
use super::{AugmentRun, Settings as _};
use crate::Result;
use crate::augment::dry_run::{GenerationDryRun, SHOWN_STEPS};
use crate::augment::pipeline_config::PipelineConfig;
use crate::augment::settings::{AugmentConfig, Decode, Mode, RANDOM};
use crate::plan::dry_run::{self, Buffers, DryRun, Job, Measured, Meter, Phase, Steps};
use crate::plan::report::{Machine, Plan};
use crate::plan::search;
use crate::segment::dry_run::FilterDryRun;
use crate::setting::Results;
use crate::tensor::{Device, META};
use crate::trainer::precision::Precision;
use crate::units::Bytes;

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

    /// Runs a batch of these settings on the meta device. `prompts` different texts are encoded first; `filter`
    /// filters the pairs at the end.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for a precision that the machine does not have.
    pub fn dry_run(
        &self,
        pipeline_config: &PipelineConfig,
        (prompts, filter): (usize, Option<&FilterDryRun>),
        machine: &Machine,
        costs: bool,
    ) -> Result<DryRun> {
        machine.check_precision("augment.precision", self.augment.precision)?;
        machine.set_planned_gpu();
        let run = planned_steps(&self.augment);
        let shown = self.shown();
        let dry_run = GenerationDryRun { config: &shown, pipeline_config, prompts, filter, device: META };
        let mut dry_run = dry_run::plan_walk(Job::Augment, run, machine.target(), costs, |begin| dry_run.walk(begin))?;
        dry_run.buffers = Buffers { half_precision: self.augment.precision != Precision::Fp32, ..Buffers::default() };
        Ok(dry_run)
    }

    /// Runs a batch of these settings with random weights on `device`, and measures its memory.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn measure(&self, pipeline_config: &PipelineConfig, device: Device) -> Result<Vec<Phase>> {
        let config = &self.shown();
        let dry_run = GenerationDryRun { config, pipeline_config, prompts: PROMPTS, filter: None, device };
        let mut meter = Measured::begin(device)?;
        dry_run.walk(&mut |phase| meter.begin(phase))?;
        meter.finish()
    }

    /// The settings of a dry run: with only the steps that it runs.
    fn shown(&self) -> AugmentConfig {
        AugmentConfig { steps: planned_steps(&self.augment).shown, strength: 1.0, ..self.augment.clone() }
    }

    /// The plan of these settings without data.
    ///
    /// # Errors
    /// Those of [`Self::dry_run`].
    pub fn plan(&self, pipeline_config: &PipelineConfig, machine: &Machine) -> Result<Plan> {
        Ok(Plan::of(&self.dry_run(pipeline_config, (PROMPTS, None), machine, true)?, machine))
    }

    /// The fastest batch that leaves `headroom_frac` of the machine free; of equally fast ones the smallest. Images are
    /// decoded all at once where that fits, else one by one, else in tiles. `None` when nothing fits.
    ///
    /// # Errors
    /// Those of [`Self::dry_run`].
    pub fn fitted(
        &self,
        pipeline_config: &PipelineConfig,
        machine: &Machine,
        headroom_frac: f64,
    ) -> Result<Option<(Self, Plan)>> {
        let with = |batch: usize, decode: Decode| {
            // tiles of half the side where one tile would cover the image
            let half = (self.augment.image_size / 2).max(64) / 64 * 64;
            let tile_px = if decode == Decode::Tiled { self.augment.tile_px.min(half) } else { self.augment.tile_px };
            let augment = AugmentConfig { batch, decode, tile_px, ..self.augment.clone() };
            Self { augment, ..self.clone() }
        };
        let fits = |run: &Self, costs: bool| -> Result<Option<Plan>> {
            let plan = Plan::of(&run.dry_run(pipeline_config, (PROMPTS, None), machine, costs)?, machine);
            Ok(search::has_headroom(&plan, headroom_frac).then_some(plan))
        };
        let tiles = self.augment.image_size >= 128;
        for decode in [Decode::Sliced, Decode::Tiled] {
            if decode == Decode::Tiled && !tiles {
                continue;
            }
            let largest = search::largest(1..=MOST, |batch| Ok(fits(&with(batch, decode), false)?.is_some()))?;
            let Some(largest) = largest else { continue };
            let mut found = Vec::new();
            let sizes = std::iter::successors(Some(1), |size| Some(size * 2)).take_while(|&size| size < largest);
            for batch in sizes.chain([largest]) {
                for decode in [Decode::Whole, decode] {
                    let run = with(batch, decode);
                    if let Some(plan) = fits(&run, true)? {
                        found.push((run, plan));
                        break;
                    }
                }
            }
            return Ok(as_fast_as_the_fastest(found));
        }
        Ok(None)
    }

    /// Changes that save memory, each planned separately. Changes that do not affect the images come first.
    pub fn remedies(&self, pipeline_config: &PipelineConfig, machine: &Machine, plan: &Plan) -> Vec<Remedy> {
        let now = &self.augment;
        let mut found = Vec::new();
        let mut add = |change: &str, cost: &str, keeps_results: bool| {
            let changed = self.with_sets(change).ok().filter(|changed| changed != self);
            let Some(Ok(then)) = changed.map(|changed| changed.plan(pipeline_config, machine)) else { return };
            let (change, cost) = (change.to_owned(), cost.to_owned());
            let (device_peak, fits) = (then.device_peak, then.fits);
            let saves = Bytes(plan.device_peak.0.saturating_sub(device_peak.0));
            found.push(Remedy { change, saves, device_peak, fits, cost, keeps_results });
        };
        for setting in Self::settings() {
            if let Some((value, cost)) = setting.saving {
                add(&format!("{}={value}", setting.key), cost, setting.results != Results::Changes);
            }
        }
        if now.decode() == Decode::Whole {
            add("augment.decode=sliced", "one image after another", true);
        }
        if now.decode() != Decode::Tiled && now.image_size > now.tile_px {
            add("augment.decode=tiled", "seams are possible", false);
        }
        for side in [768, 512].into_iter().filter(|side| now.image_size > *side) {
            add(&format!("augment.image_size={side}"), "coarser images", false);
        }
        found.retain(|remedy| remedy.saves.0 > 0);
        found.sort_by_key(|remedy| (!remedy.keeps_results, std::cmp::Reverse(remedy.saves)));
        found
    }
}

/// The first batch whose time per image is at most 2 % above the best; without times the last, the largest.
fn as_fast_as_the_fastest(found: Vec<(AugmentRun, Plan)>) -> Option<(AugmentRun, Plan)> {
    let seconds =
        |(run, plan): &(AugmentRun, Plan)| plan.compared_time.map(|time| time.seconds / run.augment.batch as f64);
    let best = found.iter().filter_map(seconds).min_by(f64::total_cmp);
    let chosen = match best {
        Some(best) => found.iter().position(|candidate| seconds(candidate).is_some_and(|s| s <= best * 1.02))?,
        None => found.len().checked_sub(1)?,
    };
    found.into_iter().nth(chosen)
}

/// Steps of a batch, and those that its plan runs.
fn planned_steps(config: &AugmentConfig) -> Steps {
    let run = config.num_steps();
    Steps { whole: run, shown: run.min(SHOWN_STEPS) }
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

/// Settings as TOML for `prsmed augment generate --config`, with their plan in comments.
pub fn augment_toml(run: &AugmentRun, plan: &Plan) -> String {
    let (device, bytes) = (&plan.budget.device, plan.budget.bytes);
    commented(&format!("prsmed preset --task augment for {device} ({bytes})."), run, plan)
}
