//! Measured beside planned memory.

use super::dry_run::RealPhase;
use super::report::Plan;
use crate::units::{Bytes, signed};
use crate::{Error, Result};
use serde_json::{Value, json};

/// Measured and planned bytes of each phase as text.
pub fn text(plan: &Plan, measured: &[RealPhase]) -> String {
    let mut lines = vec!["measured with random weights (planned, error of the plan):".to_owned()];
    for phase in measured {
        let parts = compared(plan, phase).into_iter().map(|(label, measured, planned)| {
            let error = 100.0 * relative_error(planned, measured);
            format!("{label} {measured} ({planned}, {} %)", signed(error, 1))
        });
        let parts: Vec<String> = parts.collect();
        if !parts.is_empty() {
            lines.push(format!("  {}: {}", phase.name, parts.join(", ")));
        }
    }
    lines.join("\n")
}

/// The measured phases with the errors of the plan.
///
/// # Errors
/// [`Error::Internal`] for values that JSON does not have.
pub fn record(plan: &Plan, measured: &[RealPhase]) -> Result<Value> {
    let internal = |error: serde_json::Error| Error::Internal { reason: error.to_string() };
    let phase = |phase: &RealPhase| {
        let errors = compared(plan, phase)
            .into_iter()
            .map(|(label, measured, planned)| (label.to_owned(), json!(relative_error(planned, measured))));
        let mut record = serde_json::to_value(phase).map_err(internal)?;
        record["plan_errors"] = Value::Object(errors.collect());
        Ok(record)
    };
    measured.iter().map(phase).collect::<Result<Vec<_>>>().map(Value::Array)
}

/// Measured and planned bytes of a phase: of tensors, of the allocator and, on a GPU, of the device.
fn compared(plan: &Plan, phase: &RealPhase) -> Vec<(&'static str, Bytes, Bytes)> {
    let Some(planned) = plan.phases.iter().find(|planned| planned.memory.name == phase.name) else { return Vec::new() };
    let device = phase.device_used.map(|used| ("device", used, planned.device_peak));
    let tensors = ("allocated", phase.allocated_peak, planned.memory.allocated_peak);
    let reserved = ("reserved", phase.reserved_peak, planned.memory.reserved_peak);
    [tensors, reserved].into_iter().chain(device).collect()
}

/// How much larger the plan is than the measurement, as a share of the measurement.
fn relative_error(planned: Bytes, measured: Bytes) -> f64 {
    planned.0 as f64 / measured.0.max(1) as f64 - 1.0
}
