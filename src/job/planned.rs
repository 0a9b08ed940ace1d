//! Settings that can be planned, and remedies: changes of settings that reduce the memory of a job, each with its plan.
//!
//! Most remedies are declared with their setting ([`Setting::saves_at`](crate::setting::Setting::saves_at)); the others
//! depend on several settings.

use crate::Result;
use crate::config::Settings;
use crate::plan::dry_run::Job;
use crate::plan::machine::Machine;
use crate::plan::report::Plan;
use crate::plan::search::{HEADROOM_FRAC, SearchProblem, Space, search};
use crate::setting::ResultsEffect;
use crate::setting::table::wrapped;
use crate::units::Bytes;
use std::cmp::Reverse;

/// Settings whose job can be planned, and searched for a machine.
pub trait Planned: Settings + PartialEq + 'static {
    /// What a plan depends on besides the settings: the sizes of a generator; nothing for the segmenter.
    type Facts: Clone + 'static;

    /// Name of the task in `prsmed preset --task` and `prsmed plan --task`.
    const TASK: &'static str;

    /// The plan of `job`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for settings that the machine does not have; typed errors of libtorch.
    fn plan_of(&self, facts: &Self::Facts, job: Job, machine: &Machine) -> Result<Plan>;

    /// Changes that save memory, besides those that are declared with a setting.
    fn changes(&self, job: Job) -> Vec<SavingChange>;

    /// True if the setting `key` has an effect on the memory of `job`.
    fn has_effect(_key: &str, _job: Job) -> bool {
        true
    }

    /// True if a step of `now` has the same samples as a step of these settings, in other parts, and statistics do not
    /// depend on the parts.
    fn has_same_batch(&self, _now: &Self) -> bool {
        false
    }

    /// True if no setting that changes results differs. Micro-batch and accumulation count by their product.
    fn keeps_results(&self, now: &Self) -> bool {
        let declared = Self::settings();
        now.changes_from(self).iter().all(|assignment| match key_of(assignment) {
            "train.accumulation" | "train.micro_batch" => self.has_same_batch(now),
            key => declared.iter().any(|setting| setting.key == key && setting.results != ResultsEffect::Changes),
        })
    }

    /// Changes that save memory, each planned separately, and one that combines all changes without an effect on results.
    /// Changes without an effect on results come first, then those that save most.
    fn remedies(&self, facts: &Self::Facts, job: Job, machine: &Machine, plan: &Plan) -> Vec<Remedy> {
        // a change that can be planned, and whether it keeps results; `None` if it is not possible or changes nothing
        let remedy = |change: &SavingChange| {
            let changed = self.with_sets(&change.sets).ok().filter(|changed| changed != self)?;
            let keeps_results = change.keeps_results || self.keeps_results(&changed);
            let remedy = changed.plan_of(facts, job, machine).ok().map(|then| Remedy {
                change: change.sets.clone(),
                saves: Bytes(plan.device_peak.0.saturating_sub(then.device_peak.0)),
                device_peak: then.device_peak,
                fits: then.fits,
                cost: format!("{}{}", change.cost, slower(plan, &then, job)),
                keeps_results,
            });
            Some((remedy, keeps_results))
        };
        let mut found = Vec::new();
        let mut harmless = Vec::new();
        for change in declared_changes::<Self>(job).into_iter().chain(self.changes(job)) {
            // the host is the device
            if machine.host_limit().is_none() && change.sets.contains("model.stream_") {
                continue;
            }
            let Some((remedy, keeps_results)) = remedy(&change) else { continue };
            if keeps_results {
                harmless.push(change.sets);
            }
            found.extend(remedy);
        }
        if harmless.len() > 1 {
            let all = SavingChange::new(combined(&harmless), "time only");
            found.extend(remedy(&all).and_then(|(remedy, _)| remedy));
        }
        found.retain(|remedy| remedy.saves.0 > 0);
        found.sort_by_key(|remedy| (!remedy.keeps_results, Reverse(remedy.saves)));
        found
    }

    /// The settings that differ from the defaults as TOML for `--config`, with their plan in comments.
    fn to_commented_preset(&self, plan: &Plan) -> String {
        let task = if Self::TASK == "train" { String::new() } else { format!(" --task {}", Self::TASK) };
        let title = format!("# prsmed preset{task} for {} ({}).", plan.budget.device, plan.budget.bytes);
        let mut lines = vec![title, "#".to_owned()];
        lines.extend(plan.table().lines().map(|line| wrapped(format!("# {line}").trim_end(), "#   ")));
        lines.extend([String::new(), self.to_preset()]);
        lines.join("\n")
    }
}

/// Settings whose fastest values for a machine are found from the settings and the generator's sizes alone.
pub trait Fitted: Planned {
    /// The fastest settings that leave [`HEADROOM_FRAC`] of the machine free; `None` if nothing fits. With `may_shrink`,
    /// smaller images are tried last.
    ///
    /// # Errors
    /// Those of [`Planned::plan_of`].
    fn fitted(&self, facts: &Self::Facts, machine: &Machine, may_shrink: bool) -> Result<Option<(Self, Plan)>>;
}

/// A search that starts from these settings.
pub(super) struct SettingsSearch<'a, T: Planned> {
    pub(super) settings: &'a T,
    pub(super) facts: &'a T::Facts,
    pub(super) machine: &'a Machine,
}

impl<T: Planned> SettingsSearch<'_, T>
where
    Self: SearchProblem,
{
    /// The best settings of `space`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for settings that cannot be used together.
    pub(super) fn best_of(&self, space: Space) -> Result<Option<(T, Plan)>> {
        self.settings.check()?;
        let best = search(self, &Space { headroom_frac: HEADROOM_FRAC, ..space })?.fitting.into_iter().next();
        best.map(|best| Ok((self.settings.with_sets(&best.sets)?, best.plan))).transpose()
    }
}

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
        self.line_with(&self.flags())
    }

    /// As [`Self::line`], with other flags that make the change.
    pub fn line_with(&self, flags: &str) -> String {
        let outcome = if self.fits { "fits" } else { "still too large" };
        let cost = &self.cost;
        format!("{flags}: saves {}, then {} ({outcome}); {cost}", self.saves, self.device_peak)
    }
}

/// Assignments separated by spaces, and their cost.
#[derive(Debug, Clone)]
pub struct SavingChange {
    sets: String,
    cost: String,
    /// True if results stay the same although the declarations of its settings do not say so.
    keeps_results: bool,
}

impl SavingChange {
    /// A change whose settings declare its effect on results.
    pub fn new(sets: impl Into<String>, cost: impl Into<String>) -> Self {
        Self { sets: sets.into(), cost: cost.into(), keeps_results: false }
    }

    /// A change to values that keep results; others of the same settings would not.
    pub fn exact(sets: impl Into<String>, cost: impl Into<String>) -> Self {
        Self { keeps_results: true, ..Self::new(sets, cost) }
    }
}

/// The changes to the values that are declared to save memory.
fn declared_changes<T: Planned>(job: Job) -> Vec<SavingChange> {
    let saving = T::settings().into_iter().filter(|setting| T::has_effect(setting.key, job));
    saving
        .filter_map(|setting| {
            setting.saving.map(|(value, cost)| SavingChange::new(format!("{}={value}", setting.key), cost))
        })
        .collect()
}

/// The assignments of several changes. A key that several of them set has the value of the last one.
fn combined(changes: &[String]) -> String {
    let mut sets: Vec<&str> = Vec::new();
    for set in changes.iter().flat_map(|sets| sets.split(' ')) {
        match sets.iter_mut().find(|known| key_of(known) == key_of(set)) {
            Some(known) => *known = set,
            None => sets.push(set),
        }
    }
    sets.join(" ")
}

fn key_of(assignment: &str) -> &str {
    assignment.split_once('=').map_or("", |(key, _)| key)
}

/// How much longer a step takes, if that is known and not the same.
fn slower(plan: &Plan, then: &Plan, job: Job) -> String {
    match (plan.time, then.time) {
        (Some(now), Some(then)) if job == Job::Train && now.seconds > 0.0 => {
            let ratio = then.seconds / now.seconds;
            if (ratio - 1.0).abs() < 0.005 { String::new() } else { format!(", a step takes {ratio:.2} of the time") }
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{AugmentRun, FinetuneRun, RunConfig, Sources};
    use std::collections::BTreeSet;

    /// Asserts that no proposal for a preset of `T` sets a key twice, alone or combined, and that each can be set.
    fn assert_each_key_once<T: Planned>(jobs: &[Job]) {
        for (preset, _) in T::PRESETS {
            let sources = Sources { preset: Some((*preset).to_owned()), ..Sources::default() };
            let config: T = sources.resolve_as().unwrap().config;
            for &job in jobs {
                let changes = declared_changes::<T>(job).into_iter().chain(config.changes(job));
                let mut all: Vec<String> = changes.map(|change| change.sets).collect();
                assert!(!all.is_empty(), "{preset}");
                all.push(combined(&all));
                for sets in all {
                    let keys: Vec<&str> = sets.split(' ').map(key_of).collect();
                    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len(), "{} {preset}: {sets}", T::TASK);
                }
            }
        }
    }

    #[test]
    fn no_proposal_sets_a_key_twice() {
        assert_each_key_once::<RunConfig>(&[Job::Train, Job::Predict]);
        assert_each_key_once::<FinetuneRun>(&[Job::Train]);
        assert_each_key_once::<AugmentRun>(&[Job::Augment]);
    }

    #[test]
    fn the_last_of_several_values_counts() {
        let all = |sets: &[&str]| combined(&sets.iter().map(|set| (*set).to_owned()).collect::<Vec<_>>());
        assert_eq!(all(&["a=1", "b=2 a=3", "c=4"]), "a=3 b=2 c=4");
        assert_eq!(all(&["a=1", "a=1"]), "a=1");
        let offloaded =
            all(&["train.offload_optimizer=true", "train.offload_weights=true train.offload_optimizer=false"]);
        assert_eq!(offloaded, "train.offload_optimizer=false train.offload_weights=true");
    }
}
