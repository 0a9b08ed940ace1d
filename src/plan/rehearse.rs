//! Runs the phases of a task under the ledger: on the meta device that is the plan, on the CPU the measurement.
//!
//! The phases call the engine's own functions; nothing here knows a formula. Not yet: checkpoints, generation.

use crate::Result;
use crate::event::Silent;
use crate::tensor::{ledger, no_grad};
use crate::trainer::ema::Ema;
use crate::trainer::optimizer::AdamW;
use crate::trainer::precision::Scaler;
use crate::trainer::{Rehearse, TrainConfig, run};
use crate::units::Bytes;

/// Memory of one phase.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Phase {
    /// `load`, `first step` (optimizer state appears), `step`, `evaluate`.
    pub name: &'static str,
    /// The most bytes of tensors that lived at once, above what lived before the task.
    pub allocated_peak: Bytes,
    /// That peak by category.
    pub categories: Vec<(&'static str, Bytes)>,
}

/// Runs every phase of the task that `build` makes. Call [`ledger::install`] first; nothing else may allocate tensors
/// meanwhile.
///
/// # Errors
/// What the task says.
pub fn phases<T: Rehearse>(config: &TrainConfig, build: impl FnOnce() -> Result<T>) -> Result<Vec<Phase>> {
    let before = ledger::usage();
    let mut phases = Vec::new();
    ledger::reset_peak();
    let task = build()?;
    let mut optimizer = AdamW::new(task.parameters(), config);
    let mut ema = (config.ema_decay > 0.0).then(|| Ema::new(config.ema_decay, optimizer.params()));
    phases.push(phase("load", &before));
    let scaler = Scaler::new(config.precision);
    for name in ["first step", "step"] {
        ledger::reset_peak();
        let batches: Vec<T::Batch> = (0..config.accumulation).map(|_| task.example()).collect();
        let (_whole, losses) = run::accumulate(&task, &batches, &scaler, 0)?;
        drop(losses);
        let gradients = optimizer.measure(scaler.unscale_factor());
        optimizer.step(config.learning_rate, gradients)?;
        if let Some(ema) = &mut ema {
            ema.update(1, optimizer.params());
        }
        phases.push(phase(name, &before));
    }
    ledger::reset_peak();
    no_grad(|| task.validate(&Silent))?;
    phases.push(phase("evaluate", &before));
    Ok(phases)
}

fn phase(name: &'static str, before: &ledger::Usage) -> Phase {
    let now = ledger::usage();
    let above = |now: Bytes, before: Bytes| Bytes(now.0.saturating_sub(before.0));
    let categories = now.categories.iter().zip(&before.categories);
    Phase {
        name,
        allocated_peak: above(now.allocated_peak, before.allocated),
        categories: categories.map(|(now, before)| (now.name, above(now.at_peak, before.allocated))).collect(),
    }
}
