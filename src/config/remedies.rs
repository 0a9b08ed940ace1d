//! Remedies: changes of settings that reduce the memory of a job, each with its plan.
//!
//! Most of them are declared with their setting ([`Setting::saves_at`]); the others depend on several settings.

use super::{RunConfig, Settings, declaration, table_of};
use crate::plan::dry_run::Job;
use crate::plan::report::{Machine, Plan};
use crate::segment::setup::BatchNorm;
use crate::segment::task::CacheVision;
use crate::setting::table::{parse_value, value_at, widen};
use crate::setting::{Results, Setting};
use crate::trainer::precision::Precision;
use crate::trainer::{Switch, TrainConfig};
use crate::units::Bytes;
use std::collections::HashSet;

/// A change that reduces the memory of a job.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Remedy {
    /// `--set` assignments.
    pub change: String,
    /// Reduction of the device peak in bytes.
    pub saves: Bytes,
    /// The device peak with the change.
    pub device_peak: Bytes,
    /// True if the job fits with the change.
    pub fits: bool,
    /// Cost of the change.
    pub cost: String,
    /// True if results stay the same (up to rounding).
    pub keeps_results: bool,
}

impl Remedy {
    /// The change as flags.
    pub fn flags(&self) -> String {
        format!("--set {}", self.change.replace(' ', " --set "))
    }

    /// Everything in one line.
    pub fn line(&self) -> String {
        let outcome = if self.fits { "fits" } else { "still too large" };
        let (flags, cost) = (self.flags(), &self.cost);
        format!("{flags}: saves {}, then {} ({outcome}); {cost}", self.saves, self.device_peak)
    }
}

/// Assignments separated by spaces, and their cost.
struct Change {
    sets: String,
    cost: String,
}

impl Change {
    fn new(sets: impl Into<String>, cost: impl Into<String>) -> Self {
        Self { sets: sets.into(), cost: cost.into() }
    }
}

/// Changes that save memory, each planned separately, and one that combines all changes without an effect on results.
/// Changes without an effect on results come first, then those that save most.
pub fn remedies(config: &RunConfig, job: Job, machine: &Machine, plan: &Plan) -> Vec<Remedy> {
    let mut found = Vec::new();
    let mut harmless = Vec::new();
    for change in changes(config, job) {
        // the host is the device
        if machine.host_limit().is_none() && change.sets.contains("model.stream_") {
            continue;
        }
        // changes that are not possible or cannot be planned are left out
        let Ok(changed) = config.with_sets(&change.sets) else { continue };
        if keeps_results(config, &changed) {
            harmless.push(change.sets.clone());
        }
        found.extend(remedy(config, &changed, job, machine, plan, &change));
    }
    if harmless.len() > 1 {
        let mut seen = HashSet::new();
        let sets = harmless.iter().flat_map(|sets| sets.split(' ')).filter(|set| seen.insert(*set));
        let all = Change::new(sets.collect::<Vec<_>>().join(" "), "time only");
        let changed = config.with_sets(&all.sets).ok();
        found.extend(changed.and_then(|changed| remedy(config, &changed, job, machine, plan, &all)));
    }
    found.retain(|remedy| remedy.saves.0 > 0);
    found.sort_by_key(|remedy| (!remedy.keeps_results, std::cmp::Reverse(remedy.saves)));
    found
}

fn remedy(
    config: &RunConfig,
    changed: &RunConfig,
    job: Job,
    machine: &Machine,
    plan: &Plan,
    change: &Change,
) -> Option<Remedy> {
    let then = changed.plan_for(job, machine).ok()?;
    let slower = match (plan.time, then.time) {
        (Some(now), Some(then)) if job == Job::Train && now.seconds > 0.0 => {
            let ratio = then.seconds / now.seconds;
            if (ratio - 1.0).abs() < 0.005 { String::new() } else { format!(", a step takes {ratio:.2} of the time") }
        }
        _ => String::new(),
    };
    Some(Remedy {
        change: change.sets.clone(),
        saves: Bytes(plan.device_peak.0.saturating_sub(then.device_peak.0)),
        device_peak: then.device_peak,
        fits: then.fits,
        cost: format!("{}{slower}", change.cost),
        keeps_results: keeps_results(config, changed),
    })
}

/// True if no setting that changes results differs. Micro-batch and accumulation count by their product, if statistics
/// do not depend on the micro-batch.
pub(super) fn keeps_results(before: &RunConfig, now: &RunConfig) -> bool {
    let same_batch = before.samples_of_a_step() == now.samples_of_a_step();
    now.changes_from(before).iter().all(|assignment| match assignment.split_once('=').map_or("", |(key, _)| key) {
        "train.accumulation" => same_batch,
        "train.micro_batch" => same_batch && now.model.batch_norm == BatchNorm::Frozen,
        key => declaration(key).results != Results::Changes,
    })
}

fn changes(config: &RunConfig, job: Job) -> Vec<Change> {
    let train = &config.train;
    let mut found: Vec<Change> =
        RunConfig::settings().iter().filter_map(|setting| declared_change(config, job, setting)).collect();
    if job == Job::Train {
        found.extend(step_in_backward(train));
        if config.data.cache_vision == CacheVision::Ram {
            found.push(Change::new("data.cache_vision=disk", "vision features in the cache folder"));
        }
        if train.graph == Switch::On {
            found.push(Change::new("train.graph=off", "no captured steps"));
        }
    }
    if job != Job::Predict && train.micro_batch > 1 {
        let whole = train.micro_batch * train.accumulation;
        let off = if train.step_in_backward { " train.step_in_backward=false" } else { "" };
        let sets = format!("train.micro_batch=1 train.accumulation={whole}{off}");
        found.push(Change::new(sets, "the same effective batch in smaller parts"));
    }
    if config.model.max_text_tokens > 128 {
        found.push(Change::new("model.max_text_tokens=128", "longer texts are cut"));
    }
    let smaller = [768, 512].into_iter().filter(|side| config.model.image_size > *side);
    found.extend(smaller.map(|side| Change::new(format!("model.image_size={side}"), "coarser masks")));
    if config.lora.rank > 4 {
        found.push(Change::new(format!("lora.rank={}", config.lora.rank / 2), "smaller adapters"));
    }
    found
}

/// The change to the value that is declared to save memory.
fn declared_change(config: &RunConfig, job: Job, setting: &Setting) -> Option<Change> {
    let (value, cost) = setting.saving?;
    let has_effect = job == Job::Train || !setting.key.starts_with("train.") || setting.key == "train.precision";
    let table = table_of(config);
    let now = value_at(&table, setting.key)?;
    let differs = widen(now, parse_value(value)) != *now;
    (has_effect && differs).then(|| Change::new(format!("{}={value}", setting.key), cost))
}

/// Updates in the backward pass, where a step has one micro-batch.
fn step_in_backward(train: &TrainConfig) -> Option<Change> {
    if train.step_in_backward || train.accumulation > 1 || train.precision == Precision::Fp16 {
        return None;
    }
    let off = if train.graph == Switch::On { " train.graph=off" } else { "" };
    if train.clip_norm > 0.0 {
        let sets = format!("train.step_in_backward=true train.clip_norm=0{off}");
        return Some(Change::new(sets, "each gradient is used at once, and none is clipped"));
    }
    // larger micro-batches can be made smaller, and a step then has several
    let sets = format!("train.step_in_backward=true{off}");
    (train.micro_batch == 1).then(|| Change::new(sets, "each gradient is used at once"))
}
