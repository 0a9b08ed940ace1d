//! How long the operators of a trace take on a card: a roofline over each of them.
//!
//! An operator takes the longer of its arithmetic and its memory traffic at a stated share of the card's rates, and no less
//! than a launch. Host work is counted for each operator; where it is longer than the card's, it decides. The shares are
//! those that well-kept trainers reach in public (`EFFICIENCY`); nothing here was measured by this project.

use super::cards::Rates;
use crate::tensor::scope::{self, Scope};
use crate::tensor::trace::{Cost, Trace};
use crate::units::Bytes;
use std::collections::HashMap;

/// Share of the tensor-core rate that large matrix products reach. Public 7B LoRA trainers reach 0.35 to 0.43 of it over a
/// whole step, host gaps and memory-bound operators included.
const PRODUCTS: f64 = 0.65;
/// Share for convolutions and attention.
const IRREGULAR: f64 = 0.4;
/// Share of the memory bandwidth of memory-bound operators.
const BANDWIDTH: f64 = 0.8;
/// Seconds between two kernels on the card.
const LAUNCH: f64 = 3e-6;
/// Seconds of host work for an operator: dispatch, autograd, allocation.
const HOST: f64 = 8e-6;
/// Bytes a second between pinned host memory and the card, in each direction: PCI Express 3.0 x16, which every listed card
/// reaches. What is brought over is counted in full, though some of it runs beside the arithmetic.
const BUS: f64 = 12e9;

/// What a phase costs in time.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize)]
pub struct PhaseTime {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes moved between the chip and its memory.
    pub bytes: f64,
    /// Operators.
    pub operators: f64,
    /// Predicted seconds.
    pub seconds: f64,
    /// Those of the card alone: what a step takes whose kernels are recorded.
    pub card_seconds: f64,
    /// Whether the host is predicted to be slower than the card.
    pub host_bound: bool,
}

impl PhaseTime {
    /// The same with moments that are in host memory, which are brought over and back.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "sizes in bytes lie far below 2^53")]
    pub fn bringing(self, moments: Bytes) -> Self {
        let bus = 2.0 * moments.0 as f64 / BUS;
        Self { seconds: self.seconds + bus, card_seconds: self.card_seconds + bus, ..self }
    }

    /// The same for recorded steps: the host starts them and waits.
    #[must_use]
    pub fn recorded(self) -> Self {
        Self { seconds: self.card_seconds, host_bound: false, ..self }
    }
}

/// The time of the phase `name` of `trace`; `None` when there is no such phase. Everything but the optimizer and the
/// moving average counts `repeats` times: a plan runs fewer micro-batches than a step has.
pub fn phase(trace: &Trace, name: &str, repeats: f64, rates: &Rates) -> Option<PhaseTime> {
    let place = trace.marks.iter().position(|mark| mark.0 == name)?;
    let end = trace.marks.get(place + 1).map_or(trace.costs.len(), |mark| mark.2);
    let once = ["optimizer", "ema"];
    let (mut time, mut card, mut operators) = (PhaseTime::default(), 0.0, 0.0);
    let mut factors: HashMap<Scope, f64> = HashMap::new();
    for cost in &trace.costs[trace.marks[place].2..end] {
        let factor = *factors.entry(cost.scope).or_insert_with(|| {
            let path = scope::path(cost.scope);
            if once.contains(&path.split('.').next().unwrap_or_default()) { 1.0 } else { repeats }
        });
        time.flops += factor * cost.flops;
        time.bytes += factor * cost.bytes;
        card += factor * seconds(cost, trace, rates);
        operators += factor;
    }
    let host = operators * HOST;
    Some(PhaseTime { operators, seconds: card.max(host), card_seconds: card, host_bound: host > card, ..time })
}

/// The operations of the phase `name`, counted as [`phase`] does; 0 without costs.
pub fn flops(trace: &Trace, name: &str, repeats: f64) -> f64 {
    flops_where(trace, name, repeats, |_| true)
}

/// Of these, the ones of modules whose path `keep`s them.
pub fn flops_where(trace: &Trace, name: &str, repeats: f64, keep: impl Fn(&str) -> bool) -> f64 {
    let Some(place) = trace.marks.iter().position(|mark| mark.0 == name) else { return 0.0 };
    let end = trace.marks.get(place + 1).map_or(trace.costs.len(), |mark| mark.2);
    let mut kept: HashMap<Scope, bool> = HashMap::new();
    let costs = trace.costs[trace.marks[place].2..end].iter();
    let costs = costs.filter(|cost| *kept.entry(cost.scope).or_insert_with(|| keep(&scope::path(cost.scope))));
    // the optimizer multiplies no matrices
    repeats * costs.map(|cost| cost.flops).sum::<f64>()
}

/// Seconds for people.
pub fn text(seconds: f64) -> String {
    if seconds < 0.1 { format!("{:.1} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}

fn seconds(cost: &Cost, trace: &Trace, rates: &Rates) -> f64 {
    let memory = cost.bytes / (BANDWIDTH * rates.bandwidth);
    let name = &trace.ops[usize::from(cost.op)];
    let share = if name.contains("convolution") || name.contains("attention") { IRREGULAR } else { PRODUCTS };
    // libtorch multiplies fp32 without TF32 unless told otherwise
    let peak = if cost.element_bytes == 2 { rates.half } else { rates.fp32 };
    let arithmetic = cost.flops / (share * peak);
    memory.max(arithmetic).max(LAUNCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::cards;

    #[test]
    fn large_products_are_bound_by_arithmetic_and_small_operators_by_the_host() {
        let rates = cards::find("RTX 4090").unwrap().rates;
        let cost =
            |flops, bytes| Cost { flops, bytes, element_bytes: 2, backward: false, op: 1, scope: Scope(0), event: 0 };
        let ops = vec![String::new(), "aten::mm".into()];
        let of = |costs: Vec<Cost>| {
            let trace = Trace { costs, ops: ops.clone(), marks: vec![("step", 0, 0)], ..Trace::default() };
            phase(&trace, "step", 1.0, &rates).unwrap()
        };
        let large = of(vec![cost(1e13, 1e8)]);
        assert!((large.seconds - 1e13 / (PRODUCTS * rates.half)).abs() < 1e-9 && !large.host_bound);
        let streaming = of(vec![cost(0.0, 1e9)]);
        assert!((streaming.seconds - 1e9 / (BANDWIDTH * rates.bandwidth)).abs() < 1e-9);
        let small = of(vec![cost(0.0, 1.0); 100]);
        assert!((small.seconds - 100.0 * HOST).abs() < 1e-12 && small.host_bound);
        assert!((small.recorded().seconds - 100.0 * LAUNCH).abs() < 1e-12 && !small.recorded().host_bound);
        let brought = small.bringing(Bytes(6_000_000_000));
        assert!((brought.seconds - small.seconds - 1.0).abs() < 1e-9, "6 GB and back at 12 GB/s");
        assert!((brought.recorded().seconds - small.recorded().seconds - 1.0).abs() < 1e-9);
    }
}
