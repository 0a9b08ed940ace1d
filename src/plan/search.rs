//! Finds the fastest settings that fit a device, and the largest value of one setting that does.
//!
//! Every answer is a whole plan, nothing is interpolated. More checkpointing needs less memory and more time, and a larger
//! micro-batch needs more memory: so for each micro-batch the least checkpointing that fits is found by bisection, and
//! micro-batches beyond the first that does not fit at all are not planned.

use super::report::Plan;
use crate::Result;
use crate::trainer::Checkpointing;
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

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

/// A job whose settings are searched.
pub trait Problem: Sync {
    /// The plan of the job with these settings.
    ///
    /// # Errors
    /// What the task says.
    fn plan(&self, choice: &Choice) -> Result<Plan>;

    /// Its steps alone, without times.
    ///
    /// # Errors
    /// What the task says.
    fn steps(&self, choice: &Choice) -> Result<Plan>;

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
    /// The fastest settings that fit, then the other ones that no setting here beats in both time and memory.
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

/// The fastest settings of `space` that fit.
///
/// # Errors
/// What planning says.
pub fn search(problem: &dyn Problem, space: &Space) -> Result<Found> {
    let levels = levels(problem.llm_layers());
    let micro_batches: Vec<usize> =
        (1..=space.effective_batch).filter(|micro| space.effective_batch.is_multiple_of(*micro)).collect();
    let planned = AtomicUsize::new(0);
    let steps = |choice: Choice| {
        planned.fetch_add(1, Ordering::Relaxed);
        problem.steps(&choice).map(|plan| Candidate { choice, plan })
    };
    let fits = |candidate: &Candidate| has_headroom(&candidate.plan, space.headroom_frac);
    let mut smallest: Option<Candidate> = None;
    let mut fitting: Vec<Candidate> = Vec::new();
    let mut considered = 0;
    for &image_size in &space.image_sizes {
        considered += micro_batches.len() * levels.len();
        let choice = |micro_batch: usize, level: usize| Choice {
            image_size,
            micro_batch,
            accumulation: space.effective_batch / micro_batch,
            checkpointing: levels[level],
        };
        // with everything run twice: how many of the micro-batches fit at all?
        let mut least = None;
        let possible = largest(0..=micro_batches.len(), |count| {
            let Some(last) = count.checked_sub(1) else { return Ok(true) };
            let candidate = steps(choice(micro_batches[last], levels.len() - 1))?;
            let fits = fits(&candidate);
            if last == 0 && !fits {
                least = Some(candidate);
            }
            Ok(fits)
        })?;
        if let Some(least) = least
            && smallest.as_ref().is_none_or(|known| least.plan.device_peak < known.plan.device_peak)
        {
            smallest = Some(least);
        }
        let best_of = |&micro_batch: &usize| -> Result<Option<Candidate>> {
            let (mut low, mut high) = (0, levels.len() - 1);
            while low < high {
                let middle = usize::midpoint(low, high);
                if fits(&steps(choice(micro_batch, middle))?) { high = middle } else { low = middle + 1 }
            }
            // the other phases rarely need more than a step; where they do, more is run twice
            for level in high..levels.len() {
                let choice = choice(micro_batch, level);
                let candidate = Candidate { choice, plan: problem.plan(&choice)? };
                planned.fetch_add(1, Ordering::Relaxed);
                if fits(&candidate) {
                    return Ok(Some(candidate));
                }
            }
            Ok(None)
        };
        let possible = &micro_batches[..possible.unwrap_or(0)];
        let best: Vec<Option<Candidate>> = if problem.parallel() {
            possible.par_iter().map(best_of).collect::<Result<_>>()?
        } else {
            possible.iter().map(best_of).collect::<Result<_>>()?
        };
        fitting = best.into_iter().flatten().collect();
        if !fitting.is_empty() {
            break;
        }
    }
    fitting.sort_by(|a, b| {
        let time = a.seconds().total_cmp(&b.seconds());
        // without times: fewer passes, then less run twice
        time.then_with(|| b.choice.micro_batch.cmp(&a.choice.micro_batch))
    });
    Ok(Found { fitting, smallest, considered, planned: planned.into_inner() })
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
