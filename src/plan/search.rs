//! Finds the fastest settings that fit a device, and the largest value of one setting that does.
//!
//! Every answer is a whole plan, nothing is interpolated. What is left out is not expected to win: more checkpointing needs
//! less memory and more time, so for each micro-batch the least that fits is found by bisection; a larger micro-batch needs more
//! memory, so those beyond the first that does not fit are not planned; of those that fit without checkpointing only the two
//! largest are, because they read the weights the least often and start the fewest operators; and a micro-batch that with the
//! least amount of checkpointing is already slower than settings that fit is not planned further.

use super::report::Plan;
use crate::Result;
use crate::trainer::Checkpointing;
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Settings that the search may set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Choice {
    /// Side of the segmenter's picture, pixels.
    pub image_size: i64,
    /// Samples of a forward and backward pass.
    pub micro_batch: usize,
    /// Micro-batches of an optimizer step.
    pub accumulation: usize,
    /// What is run twice.
    pub checkpointing: Checkpointing,
}

/// How much of a job is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// The memory of a step.
    Memory,
    /// Memory and time of a step.
    Time,
    /// Every phase.
    Whole,
}

/// A job whose settings are searched.
pub trait Problem: Sync {
    /// The plan of the job with these settings.
    ///
    /// # Errors
    /// What the task says.
    fn plan(&self, choice: &Choice, effort: Effort) -> Result<Plan>;

    /// Layers of the language model, for selective checkpointing.
    fn llm_layers(&self) -> usize;

    /// Whether plans may be made on several threads.
    fn parallel(&self) -> bool;
}

/// What is searched.
#[derive(Debug, Clone, PartialEq)]
pub struct Space {
    /// Samples of an optimizer step: micro-batch times accumulation.
    pub effective_batch: usize,
    /// Sides of the segmenter's picture, best first; a later one is tried only when nothing fits with the ones before.
    pub image_sizes: Vec<i64>,
    /// Part of the budget that stays free, 0..1.
    pub headroom_frac: f64,
}

/// Settings with their plan.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Candidate {
    /// The settings.
    pub choice: Choice,
    /// Their plan.
    pub plan: Plan,
}

impl Candidate {
    fn seconds(&self) -> f64 {
        self.plan.time.map_or(0.0, |time| time.seconds)
    }
}

/// What a search found.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Found {
    /// The fastest settings that fit, and the runner-up with another micro-batch.
    pub fitting: Vec<Candidate>,
    /// Without any: the settings that need the least.
    pub smallest: Option<Candidate>,
    /// Settings that the answer is the best of.
    pub considered: usize,
    /// Those for which a plan was made.
    pub planned: usize,
}

/// Amounts of checkpointing, the least first.
fn levels(layers: usize) -> Vec<Checkpointing> {
    let partly = (0..layers).map(Checkpointing::Layers);
    [Checkpointing::None].into_iter().chain(partly).chain([Checkpointing::Full]).collect()
}

/// Whether `plan` leaves the wanted part of its budget free.
#[expect(clippy::cast_precision_loss, reason = "sizes in bytes lie far below 2^53")]
pub fn has_headroom(plan: &Plan, headroom_frac: f64) -> bool {
    plan.device_peak.0 as f64 <= plan.budget.bytes.0 as f64 * (1.0 - headroom_frac)
}

/// A search under way.
struct Search<'a> {
    problem: &'a dyn Problem,
    space: &'a Space,
    levels: Vec<Checkpointing>,
    micro_batches: Vec<usize>,
    planned: AtomicUsize,
}

impl Search<'_> {
    fn candidate(&self, place: Place, effort: Effort) -> Result<Candidate> {
        self.planned.fetch_add(1, Ordering::Relaxed);
        let micro_batch = self.micro_batches[place.micro_batch];
        let choice = Choice {
            image_size: place.image_size,
            micro_batch,
            accumulation: self.space.effective_batch / micro_batch,
            checkpointing: self.levels[place.level],
        };
        Ok(Candidate { choice, plan: self.problem.plan(&choice, effort)? })
    }

    fn fits(&self, place: Place) -> Result<bool> {
        Ok(self.has_headroom(&self.candidate(place, Effort::Memory)?))
    }

    fn has_headroom(&self, candidate: &Candidate) -> bool {
        has_headroom(&candidate.plan, self.space.headroom_frac)
    }

    /// The first micro-batches of these that fit at a level.
    fn fitting(&self, count: usize, image_size: i64, level: usize) -> Result<usize> {
        let found = largest(0..=count, |count| match count.checked_sub(1) {
            Some(micro_batch) => self.fits(Place { image_size, micro_batch, level }),
            None => Ok(true),
        })?;
        Ok(found.unwrap_or(0))
    }

    /// The least checkpointing of a micro-batch that fits with all of it, with its time.
    fn least(&self, image_size: i64, micro_batch: usize, needs_none: bool) -> Result<(Place, Candidate)> {
        let (mut low, mut high) = (1, if needs_none { 0 } else { self.levels.len() - 1 });
        while low < high {
            let level = usize::midpoint(low, high);
            if self.fits(Place { image_size, micro_batch, level })? { high = level } else { low = level + 1 }
        }
        let place = Place { image_size, micro_batch, level: high };
        Ok((place, self.candidate(place, Effort::Time)?))
    }

    /// The whole plan of `place`, or where another phase needs more than its step of the first level above that fits.
    fn whole(&self, place: Place) -> Result<Option<Candidate>> {
        for level in place.level..self.levels.len() {
            let candidate = self.candidate(Place { level, ..place }, Effort::Whole)?;
            if self.has_headroom(&candidate) {
                return Ok(Some(candidate));
            }
        }
        Ok(None)
    }

    /// `work` on every item, side by side where the problem allows it.
    fn each<T: Sync, R: Send>(&self, items: &[T], work: impl Fn(&T) -> Result<R> + Send + Sync) -> Result<Vec<R>> {
        if self.problem.parallel() { items.par_iter().map(work).collect() } else { items.iter().map(work).collect() }
    }

    /// The fastest settings for pictures of this size, fastest first.
    fn best(&self, image_size: i64) -> Result<Vec<Candidate>> {
        let possible = self.fitting(self.micro_batches.len(), image_size, self.levels.len() - 1)?;
        let unhindered = self.fitting(possible, image_size, 0)?;
        let worthwhile: Vec<usize> = (unhindered.saturating_sub(KEPT)..possible).collect();
        let fastest = Mutex::new(f64::INFINITY);
        // none for a micro-batch that even with the next to no checkpointing is slower than what is known to fit
        let least = |&micro_batch: &usize| -> Result<Option<(Place, Candidate)>> {
            let needs_none = micro_batch < unhindered;
            if !needs_none {
                let bound = self.candidate(Place { image_size, micro_batch, level: 1 }, Effort::Time)?.seconds();
                if bound > 0.0 && bound >= *lock(&fastest) {
                    return Ok(None);
                }
            }
            let found = self.least(image_size, micro_batch, needs_none)?;
            let mut fastest = lock(&fastest);
            *fastest = fastest.min(found.1.seconds());
            Ok(Some(found))
        };
        let (first, rest) = worthwhile.split_at(worthwhile.len().min(KEPT));
        let mut found: Vec<(Place, Candidate)> = self.each(first, least)?.into_iter().flatten().collect();
        found.extend(self.each(rest, least)?.into_iter().flatten());
        found.sort_by(|(_, a), (_, b)| faster(a, b));
        let (first, rest) = found.split_at(found.len().min(KEPT));
        let mut whole: Vec<Candidate> =
            self.each(first, |(place, _)| self.whole(*place))?.into_iter().flatten().collect();
        for (place, _) in rest {
            if whole.len() == KEPT {
                break;
            }
            whole.extend(self.whole(*place)?);
        }
        // a phase other than the step decided: take what needs the least
        for micro_batch in (0..if whole.is_empty() { possible } else { 0 }).rev() {
            whole.extend(self.whole(Place { image_size, micro_batch, level: self.levels.len() - 1 })?);
            if !whole.is_empty() {
                break;
            }
        }
        whole.sort_by(faster);
        Ok(whole)
    }
}

/// Orders by time; on the CPU, whose rates nobody states, by operations and then by the number of passes.
fn faster(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    let time = a.seconds().total_cmp(&b.seconds()).then_with(|| a.plan.flops.total_cmp(&b.plan.flops));
    time.then_with(|| b.choice.micro_batch.cmp(&a.choice.micro_batch))
}

fn lock(fastest: &Mutex<f64>) -> MutexGuard<'_, f64> {
    fastest.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The best settings and the runner-up.
const KEPT: usize = 2;

/// Settings of a search, by index.
#[derive(Debug, Clone, Copy)]
struct Place {
    image_size: i64,
    micro_batch: usize,
    level: usize,
}

/// The fastest settings of `space` that fit.
///
/// # Errors
/// What planning says.
pub fn search(problem: &dyn Problem, space: &Space) -> Result<Found> {
    let all = 1..=space.effective_batch;
    let search = Search {
        problem,
        space,
        levels: levels(problem.llm_layers()),
        micro_batches: all.filter(|micro| space.effective_batch.is_multiple_of(*micro)).collect(),
        planned: AtomicUsize::new(0),
    };
    let (mut fitting, mut considered) = (Vec::new(), 0);
    for &image_size in &space.image_sizes {
        considered += search.micro_batches.len() * search.levels.len();
        fitting = search.best(image_size)?;
        if !fitting.is_empty() {
            break;
        }
    }
    let smallest = match space.image_sizes.last() {
        Some(&image_size) if fitting.is_empty() => {
            let place = Place { image_size, micro_batch: 0, level: search.levels.len() - 1 };
            Some(search.candidate(place, Effort::Whole)?)
        }
        _ => None,
    };
    Ok(Found { fitting, smallest, considered, planned: search.planned.into_inner() })
}

/// The largest number in `range` for which `fits`, when every smaller one fits too; `None` when not even the first does.
///
/// # Errors
/// What `fits` says.
pub fn largest(
    range: std::ops::RangeInclusive<usize>,
    mut fits: impl FnMut(usize) -> Result<bool>,
) -> Result<Option<usize>> {
    let (first, last) = (*range.start(), *range.end());
    if !fits(first)? {
        return Ok(None);
    }
    let (mut good, mut step) = (first, 1);
    // doubling steps up to the first that does not fit, then bisection
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
mod tests {
    use super::*;

    #[test]
    fn the_largest_that_fits_is_found() {
        for limit in 1..=40 {
            let mut asked = 0;
            let found = largest(1..=30, |n| {
                asked += 1;
                Ok(n < limit)
            });
            let expected = if limit > 1 { Some((limit - 1).min(30)) } else { None };
            assert_eq!(found.unwrap(), expected);
            assert!(asked <= 11, "{asked}");
        }
    }

    #[test]
    fn checkpointing_grows_from_nothing_to_everything() {
        let levels = levels(2);
        let expected = [Checkpointing::None, Checkpointing::Layers(0), Checkpointing::Layers(1), Checkpointing::Full];
        assert_eq!(levels, expected);
    }
}
