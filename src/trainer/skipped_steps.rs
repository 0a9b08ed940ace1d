//! Steps that are skipped because their loss or gradients are NaN or infinite. Their weights and optimizer state stay.

use super::Task;
use super::step::StepResult;
use prsmed_tensor::guard;
use prsmed_tensor::store::Role;

/// Names of samples in a message, at most.
const MAX_NAMES: usize = 8;

/// Number of skipped steps of a session.
#[derive(Debug, Default)]
pub(super) struct SkippedSteps {
    /// All of them.
    pub(super) total: u64,
    /// Those since the last step that was applied.
    pub(super) in_a_row: u64,
}

/// Description of a step whose gradients are not finite, with the samples that may be the cause.
pub(super) fn describe<T: Task>(task: &T, step: u64, result: &StepResult, samples: &[usize], epoch: u64) -> String {
    let losses: Vec<String> = result.losses.iter().map(|(name, value)| format!("{name} {value}")).collect();
    let text = format!("step {step}: the gradient norm is {} ({})", result.grad_norm, losses.join(", "));
    // a pass of one process alone would wait for the others
    let named = if task.is_divided() { Ok(Vec::new()) } else { guard::guard(|| task.suspects(samples, epoch)) };
    // the cause is worth a report even if its samples cannot be found
    let samples = named.unwrap_or_default();
    if samples.is_empty() {
        return text;
    }
    let more = match samples.len().saturating_sub(MAX_NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{text}; samples: {}{more}", samples[..samples.len().min(MAX_NAMES)].join(", "))
}

/// True if a buffer (running statistics of batch normalisation) contains NaN or infinity. Every later result is then NaN
/// too, although the weights are good.
pub(super) fn has_bad_buffers<T: Task>(task: &T) -> bool {
    let entries = task.components().into_iter().flat_map(|component| component.entries);
    let mut buffers = entries.filter(|entry| entry.role == Role::Buffer);
    buffers.any(|entry| !entry.tensor.isfinite().all().int64_value(&[]).eq(&1))
}
