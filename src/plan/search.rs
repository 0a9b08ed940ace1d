//! Finds the fastest settings that fit a device, and the largest value of one setting that does.
//!
//! Every answer is a whole plan, nothing is interpolated. What changes no result ([`Saving`]: running layers twice, moments on
//! the host) is searched first; what changes the arithmetic ([`Compromise`]) is tried only when nothing fits without it, and
//! smaller pictures only when nothing fits with all of that.
//!
//! Two settings change little of this and are tried on what was found ([`Tried`]): kept vision features, which are worth their
//! place on the disk where the tower is a part of the step's time, and recorded steps, which are worth their memory where the
//! host holds the card back.
//!
//! What is left out is not expected to win: every next saving needs less memory and more time, so for each micro-batch the
//! first that fits is found by bisection; a larger micro-batch needs more memory, so those beyond the first that does not fit
//! are not planned; of those that fit without any saving only the two largest are, because they read the weights the least
//! often and start the fewest operators; and a micro-batch that with the first saving is already slower than settings that fit
//! is not planned further.

use super::report::{Plan, Recorded};
use crate::Result;
use crate::nn::Quantization;
use crate::trainer::{Checkpointing, OptimizerKind};
use crate::units::Bytes;
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Settings that the search may set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Choice {
    /// Side of the segmenter's picture, pixels.
    pub image_size: i64,
    /// Most questions about one picture in one sequence.
    pub questions: usize,
    /// Pictures of a forward and backward pass.
    pub micro_batch: usize,
    /// Micro-batches of an optimizer step.
    pub accumulation: usize,
    /// Whether what the frozen vision tower says about a picture is kept for later epochs.
    pub keep_features: bool,
    /// Whether recorded steps are tried in the first ones.
    pub record: bool,
    /// Whether kernels of our own are.
    pub own_kernels: bool,
    /// What saves memory and changes no result.
    #[serde(flatten)]
    pub saving: Saving,
    /// What saves memory and changes the arithmetic.
    #[serde(flatten)]
    pub compromise: Compromise,
}

impl Choice {
    /// Samples of an optimizer step, when every picture has as many questions as are packed.
    pub fn samples(&self) -> usize {
        self.questions * self.micro_batch * self.accumulation
    }
}

/// Less memory for more time, same results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Saving {
    /// Whether parameters are stepped in the backward pass, in steps of one micro-batch.
    pub step_in_backward: bool,
    /// Layers of the language model that are run twice.
    pub checkpointing: Checkpointing,
    /// Blocks of the image encoder that are.
    pub checkpoint_encoder: Checkpointing,
    /// Whether the mask decoder is.
    pub checkpoint_decoder: bool,
    /// Whether the optimizer's moments are on the host.
    pub offload_optimizer: bool,
}

impl Saving {
    /// All there are for a language model of `layers` layers, the cheapest first.
    pub fn ladder(layers: usize, stepping: Use) -> Vec<Self> {
        let none = Self {
            step_in_backward: stepping == Use::Wanted,
            checkpointing: Checkpointing::None,
            checkpoint_encoder: Checkpointing::None,
            checkpoint_decoder: false,
            offload_optimizer: false,
        };
        let stepped = Self { step_in_backward: stepping != Use::Never, ..none };
        let encoder = Self { checkpoint_encoder: Checkpointing::Full, ..stepped };
        let partly = (1..layers).map(|layers| Self { checkpointing: Checkpointing::Layers(layers), ..encoder });
        let full = Self { checkpointing: Checkpointing::Full, ..encoder };
        let decoder = Self { checkpoint_decoder: true, ..full };
        let offloaded = Self { offload_optimizer: true, ..decoder };
        let possible = stepping == Use::Possible;
        let first = [Some(none), possible.then_some(stepped), Some(encoder)];
        first.into_iter().flatten().chain(partly).chain([full, decoder, offloaded]).collect()
    }
}

/// Whether something may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// It cannot be, or would change results.
    Never,
    /// It changes none.
    Possible,
    /// The settings ask for it.
    Wanted,
}

/// Less memory for coarser numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Compromise {
    /// How frozen layers are stored.
    pub quantization: Quantization,
    /// How moments are.
    pub optimizer: OptimizerKind,
}

impl Compromise {
    /// What may follow when nothing fits with `wanted`, the least first; `wanted` is the first. Weights that are trained are
    /// never quantized.
    pub fn ladder(wanted: Self, may_quantize: bool) -> Vec<Self> {
        let mut found = vec![wanted];
        let mut add = |next: Self| {
            if found.last() != Some(&next) {
                found.push(next);
            }
        };
        let mut now = wanted;
        if may_quantize && now.quantization == Quantization::None {
            now.quantization = Quantization::Nf4;
            add(now);
        }
        if may_quantize {
            now.quantization = Quantization::Nf4Double;
            add(now);
        }
        add(Self { optimizer: OptimizerKind::AdamW8bit, ..now });
        found
    }
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

    /// Savings, the cheapest first.
    fn savings(&self) -> Vec<Saving>;

    /// What the settings ask for, then what may follow when nothing fits.
    fn compromises(&self) -> Vec<Compromise>;

    /// Whether plans may be made on several threads.
    fn parallel(&self) -> bool;
}

/// What is searched.
#[derive(Debug, Clone, PartialEq)]
pub struct Space {
    /// Samples of an optimizer step; with several questions about a picture, the next number of pictures that gives as many.
    pub effective_batch: usize,
    /// Numbers of questions that may share a picture.
    pub questions: Vec<usize>,
    /// Sides of the segmenter's picture, best first; a later one is tried only when nothing fits with the ones before.
    pub image_sizes: Vec<i64>,
    /// Whether vision features are kept.
    pub keep_features: Use,
    /// Whether steps may be recorded.
    pub record: bool,
    /// Whether kernels of our own may be tried.
    pub own_kernels: bool,
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
    /// What was tried on them at the end.
    pub tried: Vec<Tried>,
}

/// A setting that was tried on what a search found.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Tried {
    /// The setting.
    pub what: &'static str,
    /// The part of a step's predicted time (on the CPU: of its operations) that it saves.
    pub saves_frac: f64,
    /// Whether it fits.
    pub fits: bool,
    /// Whether the settings have it.
    pub is_used: bool,
}

/// The part of a step's time that a setting must save to be used.
const WORTH: f64 = 0.02;

impl Candidate {
    /// This with `choice` in its place, where that fits and saves enough.
    fn or(self, what: &'static str, choice: Choice, problem: &dyn Problem, headroom_frac: f64) -> Result<Self> {
        let then = Self { choice, plan: problem.plan(&choice, Effort::Whole)?, tried: Vec::new() };
        let part = |then: f64, now: f64| if now > 0.0 { 1.0 - then / now } else { 0.0 };
        let by_time = part(then.seconds(), self.seconds());
        let saves_frac = if self.plan.time.is_some() { by_time } else { part(then.flops(), self.flops()) };
        let fits = leaves(then.device_peak(), &then.plan, headroom_frac);
        let is_used = fits && saves_frac >= WORTH;
        let mut kept = if is_used { Self { tried: self.tried, ..then } } else { self };
        kept.tried.push(Tried { what, saves_frac, fits, is_used });
        Ok(kept)
    }

    /// Predicted seconds for each sample.
    #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
    pub fn seconds(&self) -> f64 {
        self.step_seconds().map_or(0.0, |seconds| seconds / self.choice.samples() as f64)
    }

    /// Predicted seconds of a step; recorded, where that is tried.
    pub fn step_seconds(&self) -> Option<f64> {
        let recorded = self.recorded().and_then(|recorded| recorded.seconds);
        recorded.or_else(|| self.plan.time.map(|time| time.seconds))
    }

    /// What it needs at its peak; with recordings, where they are tried.
    pub fn device_peak(&self) -> Bytes {
        self.recorded().map_or(self.plan.device_peak, |recorded| recorded.device_peak)
    }

    fn recorded(&self) -> Option<Recorded> {
        self.plan.recorded.filter(|_| self.choice.record)
    }

    #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
    fn flops(&self) -> f64 {
        self.plan.flops / self.choice.samples() as f64
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

/// Whether `plan` leaves the wanted part of its budget free.
pub fn has_headroom(plan: &Plan, headroom_frac: f64) -> bool {
    leaves(plan.device_peak, plan, headroom_frac)
}

#[expect(clippy::cast_precision_loss, reason = "sizes in bytes lie far below 2^53")]
fn leaves(peak: Bytes, plan: &Plan, headroom_frac: f64) -> bool {
    peak.0 as f64 <= plan.budget.bytes.0 as f64 * (1.0 - headroom_frac)
}

/// A search under way, of what stays the same in all of its settings.
struct Search<'a> {
    problem: &'a dyn Problem,
    headroom_frac: f64,
    image_size: i64,
    compromise: Compromise,
    questions: usize,
    keep_features: bool,
    own_kernels: bool,
    /// Pictures of a step.
    pictures: usize,
    savings: &'a [Saving],
    micro_batches: Vec<usize>,
    planned: &'a AtomicUsize,
}

impl Search<'_> {
    fn candidate(&self, place: Place, effort: Effort) -> Result<Candidate> {
        self.planned.fetch_add(1, Ordering::Relaxed);
        let micro_batch = self.micro_batches[place.micro_batch];
        let (accumulation, saving) = (self.pictures / micro_batch, self.savings[place.saving]);
        let choice = Choice {
            image_size: self.image_size,
            questions: self.questions,
            micro_batch,
            accumulation,
            keep_features: self.keep_features,
            record: false,
            own_kernels: self.own_kernels,
            // several micro-batches have gradients to add up
            saving: Saving { step_in_backward: saving.step_in_backward && accumulation == 1, ..saving },
            compromise: self.compromise,
        };
        Ok(Candidate { choice, plan: self.problem.plan(&choice, effort)?, tried: Vec::new() })
    }

    fn fits(&self, place: Place) -> Result<bool> {
        Ok(self.has_headroom(&self.candidate(place, Effort::Memory)?))
    }

    fn has_headroom(&self, candidate: &Candidate) -> bool {
        has_headroom(&candidate.plan, self.headroom_frac)
    }

    /// The first micro-batches of these that fit with a saving.
    fn fitting(&self, count: usize, saving: usize) -> Result<usize> {
        let found = largest(0..=count, |count| match count.checked_sub(1) {
            Some(micro_batch) => self.fits(Place { micro_batch, saving }),
            None => Ok(true),
        })?;
        Ok(found.unwrap_or(0))
    }

    /// The cheapest saving with which a micro-batch fits that fits with all of them, with its time.
    fn cheapest(&self, micro_batch: usize, needs_none: bool) -> Result<(Place, Candidate)> {
        let (mut low, mut high) = (1, if needs_none { 0 } else { self.savings.len() - 1 });
        while low < high {
            let saving = usize::midpoint(low, high);
            if self.fits(Place { micro_batch, saving })? { high = saving } else { low = saving + 1 }
        }
        let place = Place { micro_batch, saving: high };
        Ok((place, self.candidate(place, Effort::Time)?))
    }

    /// The whole plan of `place`, or where another phase needs more than its step of the first saving above that fits.
    fn whole(&self, place: Place) -> Result<Option<Candidate>> {
        for saving in place.saving..self.savings.len() {
            let candidate = self.candidate(Place { saving, ..place }, Effort::Whole)?;
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

    /// The fastest settings, fastest first.
    fn best(&self) -> Result<Vec<Candidate>> {
        let last = self.savings.len() - 1;
        let possible = self.fitting(self.micro_batches.len(), last)?;
        let unhindered = self.fitting(possible, 0)?;
        let worthwhile: Vec<usize> = (unhindered.saturating_sub(KEPT)..possible).collect();
        let fastest = Mutex::new(f64::INFINITY);
        // none for a micro-batch that even with the next to no saving is slower than what is known to fit
        let cheapest = |&micro_batch: &usize| -> Result<Option<(Place, Candidate)>> {
            let needs_none = micro_batch < unhindered;
            if !needs_none {
                let bound = self.candidate(Place { micro_batch, saving: 1 }, Effort::Time)?.seconds();
                if bound > 0.0 && bound >= *lock(&fastest) {
                    return Ok(None);
                }
            }
            let found = self.cheapest(micro_batch, needs_none)?;
            let mut fastest = lock(&fastest);
            *fastest = fastest.min(found.1.seconds());
            Ok(Some(found))
        };
        let (first, rest) = worthwhile.split_at(worthwhile.len().min(KEPT));
        let mut found: Vec<(Place, Candidate)> = self.each(first, cheapest)?.into_iter().flatten().collect();
        found.extend(self.each(rest, cheapest)?.into_iter().flatten());
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
            whole.extend(self.whole(Place { micro_batch, saving: last })?);
            if !whole.is_empty() {
                break;
            }
        }
        Ok(whole)
    }
}

/// Orders by time; on the CPU, whose rates nobody states, by operations and then by the number of passes.
fn faster(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    let time = a.seconds().total_cmp(&b.seconds()).then_with(|| a.flops().total_cmp(&b.flops()));
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
    micro_batch: usize,
    saving: usize,
}

/// The fastest settings of `space` that fit.
///
/// # Errors
/// What planning says.
pub fn search(problem: &dyn Problem, space: &Space) -> Result<Found> {
    let (savings, compromises, planned) = (problem.savings(), problem.compromises(), AtomicUsize::new(0));
    let stage = |image_size: i64, compromise: Compromise, questions: usize| {
        let pictures = space.effective_batch.div_ceil(questions);
        Search {
            problem,
            headroom_frac: space.headroom_frac,
            image_size,
            compromise,
            questions,
            keep_features: space.keep_features == Use::Wanted,
            own_kernels: space.own_kernels,
            pictures,
            savings: &savings,
            micro_batches: (1..=pictures).filter(|micro| pictures.is_multiple_of(*micro)).collect(),
            planned: &planned,
        }
    };
    let (mut fitting, mut considered) = (Vec::new(), 0);
    'found: for &image_size in &space.image_sizes {
        for &compromise in &compromises {
            for &questions in &space.questions {
                let search = stage(image_size, compromise, questions);
                considered += search.micro_batches.len() * savings.len();
                fitting.extend(search.best()?);
            }
            if !fitting.is_empty() {
                break 'found;
            }
        }
    }
    let mut tried = Vec::new();
    for candidate in fitting {
        let candidate = try_last(problem, space, candidate)?;
        considered += candidate.tried.len();
        planned.fetch_add(candidate.tried.len(), Ordering::Relaxed);
        tried.push(candidate);
    }
    let mut fitting = tried;
    fitting.sort_by(faster);
    fitting.truncate(KEPT);
    let least = (space.image_sizes.last(), compromises.last(), space.questions.iter().min());
    let smallest = match least {
        (Some(&image_size), Some(&compromise), Some(&questions)) if fitting.is_empty() => {
            let search = stage(image_size, compromise, questions);
            Some(search.candidate(Place { micro_batch: 0, saving: savings.len() - 1 }, Effort::Whole)?)
        }
        _ => None,
    };
    Ok(Found { fitting, smallest, considered, planned: planned.into_inner() })
}

/// `candidate` with what is worth its place.
fn try_last(problem: &dyn Problem, space: &Space, mut candidate: Candidate) -> Result<Candidate> {
    if space.keep_features == Use::Possible {
        let choice = Choice { keep_features: true, ..candidate.choice };
        candidate = candidate.or("data.cache_vision=disk", choice, problem, space.headroom_frac)?;
    }
    let drops_gradients = candidate.choice.saving.step_in_backward;
    if space.record && !drops_gradients && candidate.plan.time.is_some_and(|time| time.host_bound) {
        let choice = Choice { record: true, ..candidate.choice };
        candidate = candidate.or("train.graph=auto", choice, problem, space.headroom_frac)?;
    }
    Ok(candidate)
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
#[path = "search_tests.rs"]
mod tests;
