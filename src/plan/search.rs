//! Searches for the fastest settings that fit a device, and for the largest value of one setting that fits.
//!
//! The search knows settings as `key=value` assignments only, separated by spaces. A job says which assignments to try
//! ([`Space`], [`Ladder`]) and plans them ([`SearchProblem`]). Every candidate is planned by a full dry run; nothing is
//! interpolated. The search tries memory savings in this order:
//!
//! 1. [`Ladder::savings`]: change no result (activation checkpointing, frozen weights and optimizer state in host memory).
//! 2. [`Space::compromises`]: change the arithmetic (4-bit frozen layers, 8-bit optimizer state). Tried only if nothing
//!    fits, or if only settings fit that copy weights from host memory; then used if [`MUCH_FASTER`].
//! 3. [`Space::sizes`]: smaller images. Tried only if nothing fits with all of that.
//!
//! Some settings are tried on the result ([`Extra`]). The vision feature cache is worth its disk space if the vision
//! tower takes a part of the step's time. CUDA graphs are worth their memory if the CPU limits the speed of a step.
//!
//! Not every candidate is planned, because some cannot be the fastest:
//!
//! - Each further saving needs less memory and more time. So the first saving that fits is found by bisection.
//! - A larger micro-batch needs more memory. So micro-batches beyond the first that does not fit are skipped.
//! - Of the micro-batches that fit without a saving only the two largest are planned: they read the weights least often
//!   and launch the fewest operators.
//! - A micro-batch that is already slower with the first saving than settings that fit is skipped.

use super::report::{GraphPlan, Plan};
use crate::Result;
use crate::units::Bytes;
use rayon::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The value that assignments give to `key`; the last one counts.
pub fn value_of<'a>(sets: &'a str, key: &str) -> Option<&'a str> {
    sets.rsplit(' ').filter_map(|set| set.split_once('=')).find(|(known, _)| *known == key).map(|(_, value)| value)
}

/// Assignments to settings, one after another: first every setting has its first value, and then one setting after the
/// other takes its further values.
pub fn steps(settings: &[(&str, Vec<String>)]) -> Vec<String> {
    let mut now: Vec<String> = settings.iter().map(|(key, values)| format!("{key}={}", values[0])).collect();
    let mut all = vec![now.join(" ")];
    for (place, (key, values)) in settings.iter().enumerate() {
        for value in &values[1..] {
            now[place] = format!("{key}={value}");
            all.push(now.join(" "));
        }
    }
    all
}

/// Memory savings and batches that are searched together.
#[derive(Debug, Clone, Default)]
pub struct Ladder {
    /// Assignments that save memory and cost time, the cheapest first.
    pub savings: Vec<Saving>,
    /// Batches, each list with the smallest first.
    pub batches: Vec<Vec<BatchChoice>>,
}

/// A memory saving that costs time and does not change results.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Saving {
    /// Its assignments.
    pub sets: String,
    /// Whether layers are computed again in the backward pass. Only then a later ladder is tried.
    pub recomputes: bool,
    /// Whether weights are copied from host memory.
    pub copies_weights: bool,
}

/// Samples of a step.
#[derive(Debug, Clone)]
pub struct BatchChoice {
    /// Its assignments.
    pub sets: String,
    /// Images of a forward and backward pass.
    pub micro_batch: usize,
    /// Samples of an optimizer step.
    pub samples: usize,
}

/// Part of a job that a plan covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub enum Effort {
    /// The memory of a step.
    Memory,
    /// Memory and time of a step.
    Time,
    /// Every phase.
    Whole,
}

/// A job whose settings are searched.
pub trait SearchProblem: Sync {
    /// The plan of the job with these assignments.
    ///
    /// # Errors
    /// Errors of the task.
    fn plan(&self, sets: &str, effort: Effort) -> Result<Plan>;

    /// Ladders with a compromise. The last ladder saves most.
    ///
    /// # Errors
    /// Errors of the task.
    fn ladders(&self, compromise: &str) -> Result<Vec<Ladder>>;

    /// Whether several threads may plan at the same time.
    fn parallel(&self) -> bool {
        false
    }

    /// Whether a plan with time has every phase.
    fn has_all_phases(&self) -> bool {
        false
    }

    /// Number of results that a search keeps.
    fn num_kept(&self) -> usize {
        1
    }

    /// Indices of the micro-batches whose time is compared, the smallest first: `unhindered` of them fit without a saving,
    /// and `possible` with the last one.
    fn compared(&self, unhindered: usize, possible: usize) -> Vec<usize> {
        (unhindered.saturating_sub(self.num_kept())..possible).collect()
    }

    /// Sorts candidates, the best first.
    fn sort(&self, candidates: &mut [PlannedSettings]) {
        candidates.sort_by(faster);
    }

    /// Whether an [`Extra`] can be tried on a candidate.
    fn may_try(&self, _extra: &Extra, _candidate: &PlannedSettings) -> bool {
        true
    }
}

/// The search space. All lists begin with what the settings ask for.
#[derive(Debug, Clone, Default)]
pub struct Space {
    /// Assignments of every candidate.
    pub base: String,
    /// Sizes of images, best first; a later one is tried only if nothing fits with the earlier ones.
    pub sizes: Vec<String>,
    /// Assignments that change the arithmetic, the smallest change first.
    pub compromises: Vec<String>,
    /// Tried on the result.
    pub extras: Vec<Extra>,
    /// Fraction of the budget that must stay free, 0..1.
    pub headroom_frac: f64,
}

/// A setting that is tried on the result of a search.
#[derive(Debug, Clone)]
pub struct Extra {
    /// Its name.
    pub what: &'static str,
    /// Its assignments.
    pub sets: String,
    /// Whether it captures steps as CUDA graphs.
    pub captures: bool,
}

/// Settings with their plan.
#[derive(Debug, Clone)]
pub struct PlannedSettings {
    /// The settings as assignments; the last one of a key counts.
    pub sets: String,
    /// Its batch.
    pub batch: BatchChoice,
    /// Its saving.
    pub saving: Saving,
    /// Whether steps are captured as CUDA graphs.
    pub captures: bool,
    /// Its place in the search.
    pub(super) point: GridPoint,
    /// Their plan.
    pub plan: Plan,
    /// Further settings that were tried on them.
    pub tried: Vec<Tried>,
}

/// A setting that was tried on the result of a search.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Tried {
    /// The setting.
    pub what: &'static str,
    /// Fraction of a step's predicted time (on the CPU: of its operations) that it saves.
    pub saves_frac: f64,
    /// Whether it fits.
    pub fits: bool,
    /// Whether the resulting settings use it.
    pub is_used: bool,
}

/// Fraction of a step's time that a setting must save to be used.
const WORTH: f64 = 0.02;

/// Fraction of a machine's memory that searched settings keep free, because plans have not been compared with a GPU yet.
pub const HEADROOM_FRAC: f64 = 0.03;

/// A compromise is preferred to copying weights from host memory if that takes more than this many times as long.
pub const MUCH_FASTER: f64 = 1.3;

impl PlannedSettings {
    /// The candidate with `extra`, if that fits and saves enough; else this one.
    fn or(self, extra: &Extra, problem: &dyn SearchProblem, headroom_frac: f64) -> Result<Self> {
        let sets = format!("{} {}", self.sets, extra.sets);
        let plan = problem.plan(&sets, Effort::Whole)?;
        let then = Self { sets, plan, captures: self.captures || extra.captures, ..self.clone() };
        let part = |then: f64, now: f64| if now > 0.0 { 1.0 - then / now } else { 0.0 };
        let by_time = part(then.seconds(), self.seconds());
        let saves_frac = if self.plan.compared_time.is_some() { by_time } else { part(then.flops(), self.flops()) };
        let fits = leaves(then.device_peak(), &then.plan, headroom_frac);
        let is_used = fits && saves_frac >= WORTH;
        let mut kept = if is_used { then } else { self };
        kept.tried.push(Tried { what: extra.what, saves_frac, fits, is_used });
        Ok(kept)
    }

    /// Seconds per sample, by which candidates are compared.
    pub fn seconds(&self) -> f64 {
        let with_graphs = self.graph_plan().and_then(|graphs| graphs.compared_seconds);
        let step = with_graphs.or_else(|| self.plan.compared_time.map(|time| time.seconds));
        step.map_or(0.0, |seconds| seconds / self.batch.samples as f64)
    }

    /// Predicted seconds of a step, with CUDA graphs if they are tried; `None` if the rates of the device are not known.
    pub fn step_seconds(&self) -> Option<f64> {
        let with_graphs = self.graph_plan().and_then(|graphs| graphs.seconds);
        with_graphs.or_else(|| self.plan.time.map(|time| time.seconds))
    }

    /// Peak of device memory, with CUDA graphs if they are tried.
    pub fn device_peak(&self) -> Bytes {
        self.graph_plan().map_or(self.plan.device_peak, |graphs| graphs.device_peak)
    }

    fn graph_plan(&self) -> Option<GraphPlan> {
        self.plan.with_graphs.filter(|_| self.captures)
    }

    fn flops(&self) -> f64 {
        self.plan.flops / self.batch.samples as f64
    }
}

/// Result of a search.
#[derive(Debug, Clone, Default)]
pub struct FoundPlans {
    /// The fastest settings that fit, and the runner-up with another micro-batch.
    pub fitting: Vec<PlannedSettings>,
    /// If nothing fits: the settings that need the least memory.
    pub smallest: Option<PlannedSettings>,
    /// Settings with a compromise that are faster than these, but not [`MUCH_FASTER`].
    pub a_little_faster: Option<PlannedSettings>,
    /// Number of settings in the search space.
    pub num_considered: usize,
    /// Number of settings that were planned.
    pub num_planned: usize,
}

/// Whether `plan` leaves the fraction `headroom_frac` of its budget free.
pub fn has_headroom(plan: &Plan, headroom_frac: f64) -> bool {
    leaves(plan.device_peak, plan, headroom_frac)
}

fn leaves(peak: Bytes, plan: &Plan, headroom_frac: f64) -> bool {
    peak.0 as f64 <= plan.budget.bytes.0 as f64 * (1.0 - headroom_frac)
}

/// A search over micro-batch and saving; all other settings are fixed.
struct Grid<'a> {
    stage: &'a Stage<'a>,
    savings: &'a [Saving],
    batches: &'a [BatchChoice],
    known: Mutex<HashMap<(usize, usize), (Effort, Plan)>>,
}

impl Grid<'_> {
    fn candidate(&self, point: GridPoint, effort: Effort) -> Result<PlannedSettings> {
        let (stage, key) = (self.stage, (point.micro_batch, point.saving));
        stage.planned.fetch_add(1, Ordering::Relaxed);
        let (batch, saving) = (self.batches[point.micro_batch].clone(), self.savings[point.saving].clone());
        let sets = format!("{} {} {}", stage.sets, saving.sets, batch.sets);
        let is_enough = |known: Effort| known >= effort || known == Effort::Time && stage.problem.has_all_phases();
        let known = lock(&self.known).get(&key).filter(|(known, _)| is_enough(*known)).map(|(_, plan)| plan.clone());
        let is_new = known.is_none();
        let plan = known.map_or_else(|| stage.problem.plan(&sets, effort), Ok)?;
        if is_new {
            lock(&self.known).insert(key, (effort, plan.clone()));
        }
        Ok(PlannedSettings { sets, batch, saving, captures: false, point, plan, tried: Vec::new() })
    }

    fn fits(&self, point: GridPoint) -> Result<bool> {
        Ok(self.has_headroom(&self.candidate(point, Effort::Memory)?))
    }

    fn has_headroom(&self, candidate: &PlannedSettings) -> bool {
        has_headroom(&candidate.plan, self.stage.space.headroom_frac)
    }

    /// How many of the first `count` micro-batches fit with a saving.
    fn num_fitting(&self, count: usize, saving: usize) -> Result<usize> {
        let found = largest(0..=count, |count| match count.checked_sub(1) {
            Some(micro_batch) => self.fits(GridPoint { micro_batch, saving }),
            None => Ok(true),
        })?;
        Ok(found.unwrap_or(0))
    }

    /// The cheapest saving with which a micro-batch fits, with its time. The micro-batch fits with the last saving.
    fn cheapest(&self, micro_batch: usize, needs_none: bool) -> Result<PlannedSettings> {
        let (mut low, mut high) = (1, if needs_none { 0 } else { self.savings.len() - 1 });
        while low < high {
            let saving = usize::midpoint(low, high);
            if self.fits(GridPoint { micro_batch, saving })? { high = saving } else { low = saving + 1 }
        }
        self.candidate(GridPoint { micro_batch, saving: high }, Effort::Time)
    }

    /// The whole plan of `point`. If a phase other than the step does not fit, that of the next saving that does.
    fn whole(&self, point: GridPoint) -> Result<Option<PlannedSettings>> {
        for saving in point.saving..self.savings.len() {
            let candidate = self.candidate(GridPoint { saving, ..point }, Effort::Whole)?;
            if self.has_headroom(&candidate) {
                return Ok(Some(candidate));
            }
        }
        Ok(None)
    }

    /// Runs `work` on each item, in parallel if the problem allows it.
    fn each<T: Sync, R: Send>(&self, items: &[T], work: impl Fn(&T) -> Result<R> + Send + Sync) -> Result<Vec<R>> {
        if self.stage.problem.parallel() {
            items.par_iter().map(work).collect()
        } else {
            items.iter().map(work).collect()
        }
    }

    /// The fastest settings, fastest first.
    fn best(&self) -> Result<Vec<PlannedSettings>> {
        let (problem, last) = (self.stage.problem, self.savings.len() - 1);
        let possible = self.num_fitting(self.batches.len(), last)?;
        let unhindered = self.num_fitting(possible, 0)?;
        let (worthwhile, kept) = (problem.compared(unhindered, possible), problem.num_kept());
        let fastest = Mutex::new(f64::INFINITY);
        // `None` for a micro-batch that is slower with the first saving than settings that are known to fit
        let cheapest = |&micro_batch: &usize| -> Result<Option<PlannedSettings>> {
            let needs_none = micro_batch < unhindered;
            if !needs_none {
                let bound = self.candidate(GridPoint { micro_batch, saving: 1 }, Effort::Time)?.seconds();
                if bound > 0.0 && bound >= *lock(&fastest) {
                    return Ok(None);
                }
            }
            let found = self.cheapest(micro_batch, needs_none)?;
            let mut fastest = lock(&fastest);
            *fastest = fastest.min(found.seconds());
            Ok(Some(found))
        };
        let (first, rest) = worthwhile.split_at(worthwhile.len().min(kept));
        let mut found: Vec<PlannedSettings> = self.each(first, cheapest)?.into_iter().flatten().collect();
        found.extend(self.each(rest, cheapest)?.into_iter().flatten());
        problem.sort(&mut found);
        let (first, rest) = found.split_at(found.len().min(kept));
        let whole = self.each(first, |one| self.whole(one.point))?;
        let mut whole: Vec<PlannedSettings> = whole.into_iter().flatten().collect();
        for one in rest {
            if whole.len() == kept {
                break;
            }
            whole.extend(self.whole(one.point)?);
        }
        // a phase other than the step does not fit: take the last saving
        for micro_batch in (0..if whole.is_empty() { possible } else { 0 }).rev() {
            whole.extend(self.whole(GridPoint { micro_batch, saving: last })?);
            if !whole.is_empty() {
                break;
            }
        }
        Ok(whole)
    }
}

/// Part of a step's time that copied weights must save: that the copies take no time is an assumption.
const MARGIN: f64 = 0.05;

/// Orders by time; on the CPU, whose rates are unknown, by operations and then by the number of passes.
fn faster(a: &PlannedSettings, b: &PlannedSettings) -> std::cmp::Ordering {
    let seconds = |one: &PlannedSettings| one.seconds() * if one.saving.copies_weights { 1.0 + MARGIN } else { 1.0 };
    let time = seconds(a).total_cmp(&seconds(b)).then_with(|| a.flops().total_cmp(&b.flops()));
    time.then_with(|| b.batch.micro_batch.cmp(&a.batch.micro_batch))
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Indices of a micro-batch and a saving.
#[derive(Debug, Clone, Copy)]
pub(super) struct GridPoint {
    micro_batch: usize,
    saving: usize,
}

/// A search with one image size and one compromise.
struct Stage<'a> {
    problem: &'a dyn SearchProblem,
    space: &'a Space,
    sets: String,
    ladders: Vec<Ladder>,
    planned: &'a AtomicUsize,
}

impl<'a> Stage<'a> {
    fn new(
        problem: &'a dyn SearchProblem,
        space: &'a Space,
        pair: [&str; 2],
        planned: &'a AtomicUsize,
    ) -> Result<Self> {
        let [size, compromise] = pair;
        let sets = format!("{} {size} {compromise}", space.base);
        Ok(Self { problem, space, sets, ladders: problem.ladders(compromise)?, planned })
    }

    fn grid<'b>(&'b self, savings: &'b [Saving], batches: &'b [BatchChoice]) -> Grid<'b> {
        Grid { stage: self, savings, batches, known: Mutex::default() }
    }

    /// The fastest settings that fit, fastest first, and the number of settings in the search space. A later ladder is
    /// tried only if an earlier one recomputes layers.
    fn best(&self) -> Result<(Vec<PlannedSettings>, usize)> {
        let (mut found, mut considered): (Vec<PlannedSettings>, usize) = (Vec::new(), 0);
        for ladder in &self.ladders {
            if found.first().is_some_and(|best| !best.saving.recomputes) {
                break;
            }
            for batches in &ladder.batches {
                considered += batches.len() * ladder.savings.len();
                found.extend(self.grid(&ladder.savings, batches).best()?);
            }
            self.problem.sort(&mut found);
        }
        Ok((found, considered))
    }
}

/// The fastest settings of `space` that fit.
///
/// # Errors
/// Errors of planning.
pub fn search(problem: &dyn SearchProblem, space: &Space) -> Result<FoundPlans> {
    let planned = AtomicUsize::new(0);
    let mut found = FoundPlans::default();
    for size in &space.sizes {
        for compromise in &space.compromises {
            let (fitting, count) = Stage::new(problem, space, [size, compromise], &planned)?.best()?;
            found.num_considered += count;
            let Some(best) = fitting.first() else { continue };
            let copies_weights = best.saving.copies_weights;
            let slow = found.fitting.first().map(PlannedSettings::seconds);
            if slow.is_none_or(|slow| slow > MUCH_FASTER * best.seconds()) {
                (found.fitting, found.a_little_faster) = (fitting, None);
            } else if found.a_little_faster.is_none() && slow.is_some_and(|slow| slow > best.seconds()) {
                found.a_little_faster = fitting.into_iter().next();
            }
            if !copies_weights {
                break;
            }
        }
        if !found.fitting.is_empty() {
            break;
        }
    }
    let mut tried = Vec::new();
    for candidate in std::mem::take(&mut found.fitting) {
        let candidate = try_last(problem, space, candidate)?;
        found.num_considered += candidate.tried.len();
        planned.fetch_add(candidate.tried.len(), Ordering::Relaxed);
        tried.push(candidate);
    }
    found.a_little_faster = found.a_little_faster.map(|candidate| try_last(problem, space, candidate)).transpose()?;
    problem.sort(&mut tried);
    tried.truncate(problem.num_kept());
    found.fitting = tried;
    found.num_planned = planned.into_inner();
    Ok(found)
}

/// The settings of `space` that need the least memory.
///
/// # Errors
/// Errors of planning.
pub fn smallest(problem: &dyn SearchProblem, space: &Space) -> Result<Option<PlannedSettings>> {
    let (Some(size), Some(compromise)) = (space.sizes.last(), space.compromises.last()) else { return Ok(None) };
    let planned = AtomicUsize::new(0);
    let stage = Stage::new(problem, space, [size, compromise], &planned)?;
    let Some(Ladder { savings, batches }) = stage.ladders.last() else { return Ok(None) };
    // fewer questions about an image need less memory
    let Some(batches) = batches.last() else { return Ok(None) };
    let point = GridPoint { micro_batch: 0, saving: savings.len() - 1 };
    stage.grid(savings, batches).candidate(point, Effort::Whole).map(Some)
}

/// Tries the extras on `candidate`, one after another.
fn try_last(problem: &dyn SearchProblem, space: &Space, mut candidate: PlannedSettings) -> Result<PlannedSettings> {
    for extra in &space.extras {
        if problem.may_try(extra, &candidate) {
            candidate = candidate.or(extra, problem, space.headroom_frac)?;
        }
    }
    Ok(candidate)
}

/// The largest number in `range` for which `fits` is true, if it is true for all smaller ones; `None` if there is none.
///
/// # Errors
/// Errors of `fits`.
pub fn largest(
    range: std::ops::RangeInclusive<usize>,
    mut fits: impl FnMut(usize) -> Result<bool>,
) -> Result<Option<usize>> {
    let (first, last) = (*range.start(), *range.end());
    if !fits(first)? {
        return Ok(None);
    }
    let (mut good, mut step) = (first, 1);
    // double the step until a number does not fit, then bisect
    let mut bad = loop {
        if good == last {
            return Ok(Some(good));
        }
        let next = (good + step).min(last);
        if !fits(next)? {
            break next;
        }
        (good, step) = (next, step * 2);
    };
    while bad - good > 1 {
        let middle = usize::midpoint(good, bad);
        if fits(middle)? { good = middle } else { bad = middle }
    }
    Ok(Some(good))
}

#[cfg(test)]
#[path = "search_tests.rs"]
mod tests;
