//! Plans of an [`AugmentRun`]: generation rehearsed, the batch that fits a card, and what to change when nothing does.

use super::AugmentRun;
use super::planned::Remedy;
use crate::augment::blueprint::Blueprint;
use crate::augment::rehearsal::{Rehearsal, SHOWN_STEPS};
use crate::augment::settings::{AugmentConfig, Decode, Mode};
use crate::plan::rehearse::{self, Buffers, Job, Rehearsed, Steps};
use crate::plan::report::{Machine, Plan};
use crate::plan::search;
use crate::segment::rehearsal::Judging;
use crate::tensor::META;
use crate::trainer::precision::Precision;
use crate::units::Bytes;
use crate::{Error, Result};

/// Different texts of a plan without data: one prompt and one negative.
const PROMPTS: usize = 2;
/// Largest batch that is searched.
const MOST: usize = 64;

impl AugmentRun {
    /// The generator's sizes where they are known without its files: `random:` models; the family is guessed for others.
    ///
    /// # Errors
    /// [`Error::Config`] for an unknown `random:` size.
    pub fn planned_blueprint(&self) -> Result<Blueprint> {
        let control = self.augment.mode == Mode::MaskToImage;
        let model = self.augment.model.as_str();
        let size = model.strip_prefix(crate::augment::settings::RANDOM).unwrap_or_else(|| family_of(model));
        Blueprint::random(size, control || !self.augment.controlnet.is_empty())
    }

    /// Runs a batch of these settings on the meta device; `prompts` different texts are encoded first, `judging` filters
    /// the pairs at the end.
    ///
    /// # Errors
    /// [`Error::Config`] for a precision that the machine does not have.
    pub fn rehearse(
        &self,
        blueprint: &Blueprint,
        (prompts, judging): (usize, Option<&Judging>),
        machine: &Machine,
        costs: bool,
    ) -> Result<Rehearsed> {
        if self.augment.precision == Precision::Bf16 && !machine.has_bf16() {
            let reason = format!("{} has no bf16", machine.offer().device);
            return Err(Error::config("augment.precision", reason, "set `augment.precision=fp16`"));
        }
        machine.stand_for();
        let run = planned_steps(&self.augment);
        let shown = AugmentConfig { steps: run.shown, strength: 1.0, ..self.augment.clone() };
        let rehearsal = Rehearsal { config: &shown, blueprint, prompts, judging, device: META };
        let mut rehearsed =
            rehearse::plan_walk(Job::Augment, run, machine.target(), costs, |begin| rehearsal.walk(begin))?;
        rehearsed.buffers = Buffers { half_precision: self.augment.precision != Precision::Fp32, ..Buffers::default() };
        Ok(rehearsed)
    }

    /// The plan of these settings without data.
    ///
    /// # Errors
    /// As [`Self::rehearse`].
    pub fn plan(&self, blueprint: &Blueprint, machine: &Machine) -> Result<Plan> {
        Ok(Plan::of(&self.rehearse(blueprint, (PROMPTS, None), machine, true)?, machine))
    }

    /// The fastest batch that leaves `headroom_frac` of the machine free, the smallest of those that are as fast; pictures
    /// are decoded all at once where that fits, else one by one, else in tiles. `None` when nothing fits.
    ///
    /// # Errors
    /// As [`Self::rehearse`].
    pub fn fitted(&self, blueprint: &Blueprint, machine: &Machine, headroom_frac: f64) -> Result<Option<(Self, Plan)>> {
        let with = |batch: usize, decode: Decode| {
            // tiles of half the side where the side is one tile
            let half = (self.augment.image_size / 2).max(64) / 64 * 64;
            let tile_px = if decode == Decode::Tiled { self.augment.tile_px.min(half) } else { self.augment.tile_px };
            let augment = AugmentConfig { batch, decode, tile_px, ..self.augment.clone() };
            Self { augment, ..self.clone() }
        };
        let fits = |run: &Self, costs: bool| -> Result<Option<Plan>> {
            let plan = Plan::of(&run.rehearse(blueprint, (PROMPTS, None), machine, costs)?, machine);
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

    /// Changes that save memory, each planned by itself, those that keep the pictures first.
    pub fn remedies(&self, blueprint: &Blueprint, machine: &Machine, plan: &Plan) -> Vec<Remedy> {
        let now = &self.augment;
        let mut found = Vec::new();
        let mut add = |change: String, cost: &str, keeps_results: bool, augment: AugmentConfig| {
            let Ok(then) = (Self { augment, ..self.clone() }).plan(blueprint, machine) else { return };
            let saves = Bytes(plan.device_peak.0.saturating_sub(then.device_peak.0));
            if saves.0 > 0 {
                let device_peak = then.device_peak;
                found.push(Remedy { change, saves, device_peak, fits: then.fits, cost: cost.into(), keeps_results });
            }
        };
        if now.batch > 1 {
            add("augment.batch=1".into(), "more batches", true, AugmentConfig { batch: 1, ..now.clone() });
        }
        if now.decode() == Decode::Whole {
            let changed = AugmentConfig { decode: Decode::Sliced, ..now.clone() };
            add("augment.decode=sliced".into(), "one picture after another", true, changed);
        }
        if now.decode() != Decode::Tiled && now.image_size > now.tile_px {
            let changed = AugmentConfig { decode: Decode::Tiled, ..now.clone() };
            add("augment.decode=tiled".into(), "seams are possible", false, changed);
        }
        if now.precision == Precision::Fp32 {
            let changed = AugmentConfig { precision: Precision::Bf16, ..now.clone() };
            add("augment.precision=bf16".into(), "networks in bf16", false, changed);
        }
        for side in [768, 512] {
            if now.image_size > side {
                let changed = AugmentConfig { image_size: side, ..now.clone() };
                add(format!("augment.image_size={side}"), "coarser pictures", false, changed);
            }
        }
        found.sort_by_key(|remedy| (!remedy.keeps_results, std::cmp::Reverse(remedy.saves)));
        found
    }
}

/// The first whose time for a picture is at most 2 % above the best; without times the last, the largest batch.
fn as_fast_as_the_fastest(found: Vec<(AugmentRun, Plan)>) -> Option<(AugmentRun, Plan)> {
    #[expect(clippy::cast_precision_loss, reason = "batch sizes")]
    let seconds = |(run, plan): &(AugmentRun, Plan)| plan.time.map(|time| time.seconds / run.augment.batch as f64);
    let best = found.iter().filter_map(seconds).min_by(f64::total_cmp);
    let chosen = match best {
        Some(best) => found.iter().position(|candidate| seconds(candidate).is_some_and(|s| s <= best * 1.02))?,
        None => found.len().checked_sub(1)?,
    };
    found.into_iter().nth(chosen)
}

/// Steps of a batch, and those that its plan runs.
fn planned_steps(config: &AugmentConfig) -> Steps {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "step counts"
    )]
    let run = ((config.steps as f64 * config.strength) as usize).clamp(1, config.steps);
    Steps { whole: run, shown: run.min(SHOWN_STEPS) }
}

/// Whose sizes a model has that was not read: by its name, else SDXL's, the largest.
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
///
/// # Panics
/// Never: plain values serialise.
pub fn augment_toml(run: &AugmentRun, plan: &Plan) -> String {
    let mut lines = vec![
        format!("# prsmed preset --task augment for {} ({}).", plan.budget.device, plan.budget.bytes),
        "#".to_owned(),
    ];
    lines.extend(plan.table().lines().map(|line| format!("# {line}").trim_end().to_owned()));
    lines.push(String::new());
    lines.push(toml::to_string(run).expect("plain values serialise"));
    lines.join("\n")
}
