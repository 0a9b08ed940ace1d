//! What would make a training faster.

use super::training_settings::search_for;
use crate::Result;
use crate::config::Resolved;
use crate::plan::report::Machine;
use crate::plan::search::Candidate;

/// An effective batch that several GPUs divide evenly.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct EvenBatch {
    /// Samples of a step.
    pub effective_batch: usize,
    /// Predicted samples per second, divided by those of the settings as they are.
    pub times_faster: f64,
}

impl EvenBatch {
    /// These batches in words.
    pub fn text(all: &[Self], machine: &Machine) -> Option<String> {
        if all.is_empty() {
            return None;
        }
        let flags =
            all.iter().map(|even| format!("`--effective-batch {}` {:.1}", even.effective_batch, even.times_faster));
        let flags: Vec<String> = flags.collect();
        let count = machine.num_ranks();
        Some(format!("{count} GPUs cannot divide this batch evenly. Times as fast: {}", flags.join(", ")))
    }
}

/// Effective batches near that of `best` that the GPUs of `machine` divide evenly, if they do not divide its own. Only those
/// that are at least a tenth faster, the fastest first.
///
/// # Errors
/// Those of [`search_for`].
pub fn even_batches(
    resolved: &Resolved,
    machine: &Machine,
    best: &Candidate,
    may_shrink: bool,
) -> Result<Vec<EvenBatch>> {
    let (ranks, choice) = (machine.num_ranks(), &best.choice);
    let Some(seconds) =
        best.step_seconds().filter(|_| !(choice.micro_batch * choice.accumulation).is_multiple_of(ranks))
    else {
        return Ok(Vec::new());
    };
    let samples = choice.samples();
    let packed = resolved.config.data.questions_per_image;
    let mut near = vec![samples / ranks * ranks, samples.next_multiple_of(ranks), ranks * packed];
    near.sort_unstable();
    near.dedup();
    let mut found = Vec::new();
    for effective_batch in near.into_iter().filter(|batch| *batch >= ranks && *batch != samples) {
        let searched = search_for(resolved, machine, effective_batch, may_shrink)?;
        let rate = |seconds: f64, samples: usize| samples as f64 / seconds;
        let other = searched.fitting.first().and_then(Candidate::step_seconds);
        let times_faster = other.map_or(0.0, |other| rate(other, effective_batch) / rate(seconds, samples));
        if times_faster >= 1.1 {
            found.push(EvenBatch { effective_batch, times_faster });
        }
    }
    found.sort_by(|a, b| b.times_faster.total_cmp(&a.times_faster));
    Ok(found)
}
