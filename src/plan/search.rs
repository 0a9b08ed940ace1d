//! Searches for the fastest settings that fit a device, and for the largest value of one setting that fits.
//!
//! Every candidate is planned by a full dry run; nothing is interpolated. The search tries memory savings in this
//! order:
//!
//! 1. [`Saving`]: changes no result (activation checkpointing, frozen weights and optimizer state in host memory).
//! 2. [`Compromise`]: changes the arithmetic (4-bit frozen layers, 8-bit optimizer state). Tried only if nothing fits, or
//!    if only settings fit that copy weights from host memory; then it is used if it is [`MUCH_FASTER`].
//! 3. Smaller images. Tried only if nothing fits with all of that.
//!
//! Two more settings are tried on the result ([`Tried`]). The vision feature cache is worth its disk space if the
//! vision tower takes a part of the step's time. CUDA graphs are worth their memory if the CPU limits the speed of a
//! step.
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
use crate::nn::Quantization;
use crate::trainer::{FirstLayers, OptimizerKind};
use crate::units::Bytes;
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Values of the settings that the search chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Choice {
    /// Side of the segmenter's image, pixels.
    pub image_size: i64,
    /// Maximum number of questions about one image that are packed into one sequence.
    pub questions: usize,
    /// Images of a forward and backward pass.
    pub micro_batch: usize,
    /// Micro-batches of an optimizer step.
    pub accumulation: usize,
    /// Whether the vision features of each image are cached for later epochs.
    pub cache_features: bool,
    /// Whether CUDA graphs are tried in the first steps.
    pub use_graphs: bool,
    /// Whether custom CUDA kernels are tried in the first steps.
    pub custom_kernels: bool,
    /// Memory savings that do not change results.
    #[serde(flatten)]
    pub saving: Saving,
    /// Memory savings that change the arithmetic.
    #[serde(flatten)]
    pub compromise: Compromise,
}

impl Choice {
    /// Samples of an optimizer step, if each image has as many questions as are packed.
    pub fn samples(&self) -> usize {
        self.questions * self.micro_batch * self.accumulation
    }
}

/// Memory savings that cost time and do not change results.
#[expect(clippy::struct_excessive_bools, reason = "independent switches")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Saving {
    /// Whether parameters are updated in the backward pass, in steps of one micro-batch.
    pub step_in_backward: bool,
    /// Language model layers with activation checkpointing.
    pub checkpointing: FirstLayers,
    /// Image encoder blocks with activation checkpointing.
    pub checkpoint_encoder: FirstLayers,
    /// Whether the mask decoder uses activation checkpointing.
    pub checkpoint_decoder: bool,
    /// Language model layers with frozen weights in host memory.
    pub stream_layers: FirstLayers,
    /// Whether the vision tower is in host memory.
    pub stream_vision: bool,
    /// Whether the optimizer state is offloaded to the CPU.
    pub offload_optimizer: bool,
}

impl Saving {
    /// Savings for a language model of `layers` layers, the cheapest first. At most `most` layers may be in host memory:
    /// 0, or as many as possible before other layers are recomputed.
    pub fn ladder(layers: usize, most: usize, stepping: Use) -> Vec<Self> {
        let none = Self {
            step_in_backward: stepping == Use::Wanted,
            checkpointing: FirstLayers::None,
            checkpoint_encoder: FirstLayers::None,
            checkpoint_decoder: false,
            stream_layers: FirstLayers::None,
            stream_vision: false,
            offload_optimizer: false,
        };
        let stepped = Self { step_in_backward: stepping != Use::Never, ..none };
        let encoder = Self { checkpoint_encoder: FirstLayers::Full, ..stepped };
        let first = |count: usize| match count {
            0 => FirstLayers::None,
            count if count == layers => FirstLayers::Full,
            count => FirstLayers::Count(count),
        };
        let partly = (1..=layers).map(|count| Self {
            checkpointing: first(count),
            stream_layers: first(count.min(most)),
            ..encoder
        });
        let possible = stepping == Use::Possible;
        let start = [Some(none), possible.then_some(stepped), Some(encoder)];
        let mut all: Vec<Self> = start.into_iter().flatten().chain(partly).collect();
        let last = *all.last().expect("not empty");
        let vision = Self { stream_vision: most > 0, ..last };
        let decoder = Self { checkpoint_decoder: true, ..vision };
        all.extend((most > 0).then_some(vision));
        all.extend([decoder, Self { offload_optimizer: true, ..decoder }]);
        all
    }
}

/// Permission of the search to use a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// No: it is impossible, or it would change results.
    Never,
    /// Yes, if it helps: it does not change results.
    Possible,
    /// Always: the given settings ask for it.
    Wanted,
}

/// Memory savings that use fewer bits and so change the arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Compromise {
    /// Storage of frozen layers.
    pub quantization: Quantization,
    /// Storage of the optimizer state.
    pub optimizer: OptimizerKind,
}

impl Compromise {
    /// `wanted` and what to try if nothing fits with it, the smallest change first. Trained weights are never
    /// quantized.
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

/// Part of a job that a plan covers.
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
    /// Errors of the task.
    fn plan(&self, choice: &Choice, effort: Effort) -> Result<Plan>;

    /// Ladders of savings with `compromise`, each with the cheapest first. The last ladder saves most.
    ///
    /// # Errors
    /// Errors of the task.
    fn ladders(&self, compromise: Compromise) -> Result<Vec<Vec<Saving>>>;

    /// All compromises: first what the settings ask for, then what to try if nothing fits.
    fn compromises(&self) -> Vec<Compromise>;

    /// Whether several threads may plan at the same time.
    fn parallel(&self) -> bool;
}

/// The search space.
#[derive(Debug, Clone, PartialEq)]
pub struct Space {
    /// Samples of an optimizer step. With several questions per image, the number of images is rounded up.
    pub effective_batch: usize,
    /// Allowed numbers of questions per image.
    pub questions: Vec<usize>,
    /// Sides of the segmenter's image, best first; a later one is tried only if nothing fits with the earlier ones.
    pub image_sizes: Vec<i64>,
    /// Whether vision features are cached.
    pub cache_features: Use,
    /// Whether CUDA graphs may be tried.
    pub use_graphs: bool,
    /// Whether custom CUDA kernels may be tried.
    pub custom_kernels: bool,
    /// Fraction of the budget that must stay free, 0..1.
    pub headroom_frac: f64,
}

/// Settings with their plan.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Candidate {
    /// The settings.
    pub choice: Choice,
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

impl Candidate {
    /// The candidate with `choice`, if that fits and saves enough; else this one.
    fn or(self, what: &'static str, choice: Choice, problem: &dyn Problem, headroom_frac: f64) -> Result<Self> {
        let then = Self { choice, plan: problem.plan(&choice, Effort::Whole)?, tried: Vec::new() };
        let part = |then: f64, now: f64| if now > 0.0 { 1.0 - then / now } else { 0.0 };
        let by_time = part(then.seconds(), self.seconds());
        let saves_frac = if self.plan.compared_time.is_some() { by_time } else { part(then.flops(), self.flops()) };
        let fits = leaves(then.device_peak(), &then.plan, headroom_frac);
        let is_used = fits && saves_frac >= WORTH;
        let mut kept = if is_used { Self { tried: self.tried, ..then } } else { self };
        kept.tried.push(Tried { what, saves_frac, fits, is_used });
        Ok(kept)
    }

    /// Seconds per sample, by which candidates are compared.
    pub fn seconds(&self) -> f64 {
        let with_graphs = self.graph_plan().and_then(|graphs| graphs.compared_seconds);
        let step = with_graphs.or_else(|| self.plan.compared_time.map(|time| time.seconds));
        step.map_or(0.0, |seconds| seconds / self.choice.samples() as f64)
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
        self.plan.with_graphs.filter(|_| self.choice.use_graphs)
    }

    fn flops(&self) -> f64 {
        self.plan.flops / self.choice.samples() as f64
    }
}

/// Result of a search.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Found {
    /// The fastest settings that fit, and the runner-up with another micro-batch.
    pub fitting: Vec<Candidate>,
    /// If nothing fits: the settings that need the least memory.
    pub smallest: Option<Candidate>,
    /// Settings with a compromise that are faster than these, but not [`MUCH_FASTER`].
    pub a_little_faster: Option<Candidate>,
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
struct Search<'a> {
    problem: &'a dyn Problem,
    headroom_frac: f64,
    image_size: i64,
    compromise: Compromise,
    questions: usize,
    cache_features: bool,
    custom_kernels: bool,
    /// Images of a step.
    images: usize,
    savings: &'a [Saving],
    micro_batches: Vec<usize>,
    planned: &'a AtomicUsize,
}

impl Search<'_> {
    fn candidate(&self, point: GridPoint, effort: Effort) -> Result<Candidate> {
        self.planned.fetch_add(1, Ordering::Relaxed);
        let micro_batch = self.micro_batches[point.micro_batch];
        let (accumulation, saving) = (self.images / micro_batch, self.savings[point.saving]);
        let choice = Choice {
            image_size: self.image_size,
            questions: self.questions,
            micro_batch,
            accumulation,
            cache_features: self.cache_features,
            use_graphs: false,
            custom_kernels: self.custom_kernels,
            // several micro-batches need gradient accumulation
            saving: Saving { step_in_backward: saving.step_in_backward && accumulation == 1, ..saving },
            compromise: self.compromise,
        };
        Ok(Candidate { choice, plan: self.problem.plan(&choice, effort)?, tried: Vec::new() })
    }

    fn fits(&self, point: GridPoint) -> Result<bool> {
        Ok(self.has_headroom(&self.candidate(point, Effort::Memory)?))
    }

    fn has_headroom(&self, candidate: &Candidate) -> bool {
        has_headroom(&candidate.plan, self.headroom_frac)
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
    fn cheapest(&self, micro_batch: usize, needs_none: bool) -> Result<(GridPoint, Candidate)> {
        let (mut low, mut high) = (1, if needs_none { 0 } else { self.savings.len() - 1 });
        while low < high {
            let saving = usize::midpoint(low, high);
            if self.fits(GridPoint { micro_batch, saving })? { high = saving } else { low = saving + 1 }
        }
        let point = GridPoint { micro_batch, saving: high };
        Ok((point, self.candidate(point, Effort::Time)?))
    }

    /// The whole plan of `point`. If a phase other than the step does not fit, that of the next saving that does.
    fn whole(&self, point: GridPoint) -> Result<Option<Candidate>> {
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
        if self.problem.parallel() { items.par_iter().map(work).collect() } else { items.iter().map(work).collect() }
    }

    /// The fastest settings, fastest first.
    fn best(&self) -> Result<Vec<Candidate>> {
        let last = self.savings.len() - 1;
        let possible = self.num_fitting(self.micro_batches.len(), last)?;
        let unhindered = self.num_fitting(possible, 0)?;
        let worthwhile: Vec<usize> = (unhindered.saturating_sub(KEPT)..possible).collect();
        let fastest = Mutex::new(f64::INFINITY);
        // `None` for a micro-batch that is slower with the first saving than settings that are known to fit
        let cheapest = |&micro_batch: &usize| -> Result<Option<(GridPoint, Candidate)>> {
            let needs_none = micro_batch < unhindered;
            if !needs_none {
                let bound = self.candidate(GridPoint { micro_batch, saving: 1 }, Effort::Time)?.seconds();
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
        let mut found: Vec<(GridPoint, Candidate)> = self.each(first, cheapest)?.into_iter().flatten().collect();
        found.extend(self.each(rest, cheapest)?.into_iter().flatten());
        found.sort_by(|(_, a), (_, b)| faster(a, b));
        let (first, rest) = found.split_at(found.len().min(KEPT));
        let mut whole: Vec<Candidate> =
            self.each(first, |(point, _)| self.whole(*point))?.into_iter().flatten().collect();
        for (point, _) in rest {
            if whole.len() == KEPT {
                break;
            }
            whole.extend(self.whole(*point)?);
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
fn faster(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    let seconds = |one: &Candidate| {
        let copies = one.choice.saving.stream_layers != FirstLayers::None;
        one.seconds() * if copies { 1.0 + MARGIN } else { 1.0 }
    };
    let time = seconds(a).total_cmp(&seconds(b)).then_with(|| a.flops().total_cmp(&b.flops()));
    time.then_with(|| b.choice.micro_batch.cmp(&a.choice.micro_batch))
}

fn lock(fastest: &Mutex<f64>) -> MutexGuard<'_, f64> {
    fastest.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Number of results that a search keeps: the best settings and the runner-up.
const KEPT: usize = 2;

/// Indices of a micro-batch and a saving.
#[derive(Debug, Clone, Copy)]
struct GridPoint {
    micro_batch: usize,
    saving: usize,
}

/// A search with one image size and one compromise.
struct Stage<'a> {
    problem: &'a dyn Problem,
    space: &'a Space,
    image_size: i64,
    compromise: Compromise,
    planned: &'a AtomicUsize,
}

impl Stage<'_> {
    fn search<'a>(&'a self, savings: &'a [Saving], questions: usize) -> Search<'a> {
        let images = self.space.effective_batch.div_ceil(questions);
        Search {
            problem: self.problem,
            headroom_frac: self.space.headroom_frac,
            image_size: self.image_size,
            compromise: self.compromise,
            questions,
            cache_features: self.space.cache_features == Use::Wanted,
            custom_kernels: self.space.custom_kernels,
            images,
            savings,
            micro_batches: (1..=images).filter(|micro| images.is_multiple_of(*micro)).collect(),
            planned: self.planned,
        }
    }

    /// The fastest settings that fit, fastest first, and the number of settings in the search space. A later ladder is
    /// tried only if an earlier one recomputes layers.
    fn best(&self) -> Result<(Vec<Candidate>, usize)> {
        let (mut found, mut considered): (Vec<Candidate>, usize) = (Vec::new(), 0);
        for savings in self.problem.ladders(self.compromise)? {
            if found.first().is_some_and(|best| best.choice.saving.checkpointing == FirstLayers::None) {
                break;
            }
            for &questions in &self.space.questions {
                let search = self.search(&savings, questions);
                considered += search.micro_batches.len() * savings.len();
                found.extend(search.best()?);
            }
            found.sort_by(faster);
        }
        Ok((found, considered))
    }

    /// The settings that need the least memory.
    fn smallest(&self) -> Result<Option<Candidate>> {
        let ladders = self.problem.ladders(self.compromise)?;
        let (Some(savings), Some(&questions)) = (ladders.last(), self.space.questions.iter().min()) else {
            return Ok(None);
        };
        let point = GridPoint { micro_batch: 0, saving: savings.len() - 1 };
        self.search(savings, questions).candidate(point, Effort::Whole).map(Some)
    }
}

/// The fastest settings of `space` that fit.
///
/// # Errors
/// Errors of planning.
pub fn search(problem: &dyn Problem, space: &Space) -> Result<Found> {
    let (compromises, planned) = (problem.compromises(), AtomicUsize::new(0));
    let (mut fitting, mut a_little_faster, mut considered) = (Vec::new(), None, 0);
    for &image_size in &space.image_sizes {
        for &compromise in &compromises {
            let stage = Stage { problem, space, image_size, compromise, planned: &planned };
            let (found, count) = stage.best()?;
            considered += count;
            let Some(best) = found.first() else { continue };
            let copies_weights = best.choice.saving.stream_layers != FirstLayers::None;
            let slow = fitting.first().map(Candidate::seconds);
            if slow.is_none_or(|slow| slow > MUCH_FASTER * best.seconds()) {
                (fitting, a_little_faster) = (found, None);
            } else if a_little_faster.is_none() && slow.is_some_and(|slow| slow > best.seconds()) {
                a_little_faster = found.into_iter().next();
            }
            if !copies_weights {
                break;
            }
        }
        if !fitting.is_empty() {
            break;
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
    let a_little_faster = a_little_faster.map(|candidate| try_last(problem, space, candidate)).transpose()?;
    fitting.sort_by(faster);
    fitting.truncate(KEPT);
    let smallest = match (space.image_sizes.last(), compromises.last()) {
        (Some(&image_size), Some(&compromise)) if fitting.is_empty() => {
            Stage { problem, space, image_size, compromise, planned: &planned }.smallest()?
        }
        _ => None,
    };
    Ok(Found { fitting, smallest, a_little_faster, num_considered: considered, num_planned: planned.into_inner() })
}

/// Tries the vision feature cache and CUDA graphs on `candidate`.
fn try_last(problem: &dyn Problem, space: &Space, mut candidate: Candidate) -> Result<Candidate> {
    if space.cache_features == Use::Possible {
        let choice = Choice { cache_features: true, ..candidate.choice };
        candidate = candidate.or("data.cache_vision=disk", choice, problem, space.headroom_frac)?;
    }
    let saving = candidate.choice.saving;
    let can_capture = !saving.step_in_backward && saving.stream_layers == FirstLayers::None;
    if space.use_graphs && can_capture && candidate.plan.compared_time.is_some_and(|time| time.host_bound) {
        let choice = Choice { use_graphs: true, ..candidate.choice };
        candidate = candidate.or("train.graph=auto", choice, problem, space.headroom_frac)?;
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
