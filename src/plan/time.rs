//! Predicted time of a job on a device: a roofline model of each operator in its trace.
//!
//! The time of an operator is the longer of its arithmetic and its memory traffic, and at least one kernel launch
//! ([`Speed::seconds`]). The CPU needs a fixed time for each operator; if that sum is longer, the step is host-bound.

use super::speed::Speed;
use crate::tensor::module_path::{self, ModuleId};
use crate::tensor::trace::{Cost, Trace};
use crate::units::Bytes;
use std::collections::HashMap;

/// Predicted time of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize)]
pub struct PhaseTime {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes moved between the GPU and its memory.
    pub bytes: f64,
    /// Number of operators.
    pub operators: f64,
    /// Predicted seconds.
    pub seconds: f64,
    /// Predicted seconds without CPU work: the time of a step that is replayed as a CUDA graph.
    pub gpu_seconds: f64,
    /// Of these, seconds in which it exchanges data with other GPUs.
    pub communication_seconds: f64,
    /// Whether the CPU is predicted to need longer than the GPU.
    pub host_bound: bool,
}

impl PhaseTime {
    /// The time with `seconds` in which the GPU waits for copies.
    #[must_use]
    pub fn waiting(self, seconds: f64) -> Self {
        let (all, gpu_seconds) = (self.seconds.max(self.gpu_seconds + seconds), self.gpu_seconds + seconds);
        Self { seconds: all, gpu_seconds, host_bound: self.host_bound && all > gpu_seconds, ..self }
    }

    /// The time with `seconds` in which it exchanges data with other GPUs and does nothing else.
    #[must_use]
    pub fn communicating(self, seconds: f64) -> Self {
        Self { communication_seconds: seconds, ..self.waiting(seconds) }
    }

    /// Adds the time of `copied` bytes between host memory and the GPU. It is counted in full, although some of it
    /// overlaps with computation.
    #[must_use]
    pub fn with_transfers(self, copied: Bytes, speed: &Speed) -> Self {
        let bus = speed.transfer_seconds(copied.0 as f64);
        Self { seconds: self.seconds + bus, gpu_seconds: self.gpu_seconds + bus, ..self }
    }

    /// The time with CUDA graphs, where the CPU only launches the graph.
    #[must_use]
    pub fn with_graphs(self) -> Self {
        Self { seconds: self.gpu_seconds, host_bound: false, ..self }
    }
}

/// The time of the phase `name` of `trace`; `None` if there is no such phase. All operators except those of the
/// optimizer and the moving average count `repeats` times, because a plan runs fewer micro-batches than a step has.
pub fn phase(trace: &Trace, name: &str, repeats: f64, speed: &Speed) -> Option<PhaseTime> {
    let index = trace.marks.iter().position(|mark| mark.0 == name)?;
    let end = trace.marks.get(index + 1).map_or(trace.costs.len(), |mark| mark.2);
    let once = ["optimizer", "ema"];
    let (mut time, mut gpu, mut operators) = (PhaseTime::default(), 0.0, 0.0);
    let mut factors: HashMap<ModuleId, f64> = HashMap::new();
    for cost in &trace.costs[trace.marks[index].2..end] {
        let factor = *factors.entry(cost.module).or_insert_with(|| {
            let path = module_path::path(cost.module);
            if once.contains(&path.split('.').next().unwrap_or_default()) { 1.0 } else { repeats }
        });
        time.flops += factor * cost.flops;
        time.bytes += factor * cost.bytes;
        gpu += factor * seconds(cost, trace, speed);
        operators += factor;
    }
    let host = operators * speed.host;
    Some(PhaseTime { operators, seconds: gpu.max(host), gpu_seconds: gpu, host_bound: host > gpu, ..time })
}

/// Seconds of the GPU in layers whose weights come from host memory or from other GPUs, once in the forward and once in the
/// backward pass. Meanwhile the next layer comes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LayerTime {
    forward: f64,
    backward: f64,
}

impl LayerTime {
    /// Seconds in which the GPU waits for the weights of `layers`, which take `coming` seconds: for those that take longer
    /// than the computation of a layer, and for the first one of each pass.
    pub fn waiting(self, layers: usize, coming: f64) -> f64 {
        let passes = if self.backward > 0.0 { 2.0 } else { 1.0 };
        let copies = coming / passes;
        let first = copies / (layers as f64).max(1.0);
        let computed = if passes > 1.0 { vec![self.forward, self.backward] } else { vec![self.forward] };
        computed.into_iter().map(|seconds| first + (copies - first - seconds).max(0.0)).sum()
    }
}

/// The time of the first `count` layers of each module path in `layers`, in the phase `name`.
pub fn of_layers(trace: &Trace, name: &str, layers: &[(&'static str, usize)], speed: &Speed) -> LayerTime {
    let mut time = LayerTime::default();
    let Some(index) = trace.marks.iter().position(|mark| mark.0 == name) else { return time };
    let end = trace.marks.get(index + 1).map_or(trace.costs.len(), |mark| mark.2);
    let is_one = |path: &str| {
        layers.iter().any(|(module, count)| {
            let rest = path.strip_prefix(module).and_then(|rest| rest.strip_prefix('.'));
            let number = rest.and_then(|rest| rest.split('.').next()).and_then(|number| number.parse::<usize>().ok());
            number.is_some_and(|number| number < *count)
        })
    };
    let mut kept: HashMap<ModuleId, bool> = HashMap::new();
    for cost in &trace.costs[trace.marks[index].2..end] {
        if *kept.entry(cost.module).or_insert_with(|| is_one(&module_path::path(cost.module))) {
            let part = if cost.backward { &mut time.backward } else { &mut time.forward };
            *part += seconds(cost, trace, speed);
        }
    }
    time
}

/// Floating-point operations of the phase `name`, counted as in [`phase`]; 0 without costs.
pub fn flops(trace: &Trace, name: &str, repeats: f64) -> f64 {
    flops_where(trace, name, repeats, |_| true)
}

/// Floating-point operations of the modules for whose path `keep` returns true.
pub fn flops_where(trace: &Trace, name: &str, repeats: f64, keep: impl Fn(&str) -> bool) -> f64 {
    let Some(index) = trace.marks.iter().position(|mark| mark.0 == name) else { return 0.0 };
    let end = trace.marks.get(index + 1).map_or(trace.costs.len(), |mark| mark.2);
    let mut kept: HashMap<ModuleId, bool> = HashMap::new();
    let costs = trace.costs[trace.marks[index].2..end].iter();
    let costs = costs.filter(|cost| *kept.entry(cost.module).or_insert_with(|| keep(&module_path::path(cost.module))));
    // no matrix products in the optimizer: everything counts `repeats` times
    repeats * costs.map(|cost| cost.flops).sum::<f64>()
}

/// Seconds as text.
pub fn text(seconds: f64) -> String {
    if seconds < 0.1 { format!("{:.1} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}

fn seconds(cost: &Cost, trace: &Trace, speed: &Speed) -> f64 {
    let name = &trace.ops[usize::from(cost.op)];
    let irregular = name.contains("convolution") || name.contains("attention");
    speed.seconds(cost.flops, cost.bytes, cost.element_bytes, irregular)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::gpus;
    use crate::plan::speed::{BANDWIDTH, HOST, LAUNCH, PRODUCTS};

    #[test]
    fn an_unmeasured_gpu_has_shares_of_its_published_rates() {
        let rates = gpus::find("RTX 4090").unwrap().rates;
        let speed = Speed::assumed(&rates);
        assert!(speed.is_valid());
        assert!((speed.seconds(1e13, 1e8, 2, false) - 1e13 / rates.products).abs() < 1e-9);
        assert!((speed.seconds(1e13, 1e8, 4, false) - 1e13 / (PRODUCTS * rates.fp32)).abs() < 1e-9);
        assert!((speed.transfer_seconds(12e9) - 1.0).abs() < 1e-9, "12 GB/s");
        let cpu = Speed { bus: None, ..speed };
        assert_eq!(cpu.transfer_seconds(12e9), 0.0, "the CPU copies nothing over a bus");
    }

    #[test]
    fn large_products_are_compute_bound_and_small_operators_are_host_bound() {
        let rates = gpus::find("RTX 4090").unwrap().rates;
        let speed = Speed::assumed(&rates);
        let cost = |flops, bytes| Cost {
            flops,
            bytes,
            element_bytes: 2,
            backward: false,
            op: 1,
            module: ModuleId(0),
            event: 0,
        };
        let ops = vec![String::new(), "aten::mm".into()];
        let of = |costs: Vec<Cost>| {
            let trace = Trace { costs, ops: ops.clone(), marks: vec![("step", 0, 0)], ..Trace::default() };
            phase(&trace, "step", 1.0, &speed).unwrap()
        };
        let large = of(vec![cost(1e13, 1e8)]);
        assert!((large.seconds - 1e13 / rates.products).abs() < 1e-9 && !large.host_bound);
        let streaming = of(vec![cost(0.0, 1e9)]);
        assert!((streaming.seconds - 1e9 / (BANDWIDTH * rates.bandwidth)).abs() < 1e-9);
        let small = of(vec![cost(0.0, 1.0); 100]);
        assert!((small.seconds - 100.0 * HOST).abs() < 1e-12 && small.host_bound);
        assert!((small.with_graphs().seconds - 100.0 * LAUNCH).abs() < 1e-12 && !small.with_graphs().host_bound);
        let brought = small.with_transfers(Bytes(12_000_000_000), &speed);
        assert!((brought.seconds - small.seconds - 1.0).abs() < 1e-9, "12 GB at 12 GB/s");
        assert!((brought.with_graphs().seconds - small.with_graphs().seconds - 1.0).abs() < 1e-9);
    }

    #[test]
    fn copies_hide_behind_the_layers_that_are_copied_and_nothing_else() {
        let speed = Speed::assumed(&gpus::find("RTX 4090").unwrap().rates);
        // 2 s of copies, half of them in each pass, the first of four layers with nothing to hide behind
        let waiting = |forward, backward| LayerTime { forward, backward }.waiting(4, 2.0);
        assert!((waiting(0.75, 3.0) - 2.0 * 0.25).abs() < 1e-9);
        assert!((waiting(0.5, 3.0) - (0.25 + 0.25 + 0.25)).abs() < 1e-9, "the forward pass is too short");
        assert!((waiting(0.0, 0.0) - 2.0).abs() < 1e-9, "without a backward pass all copies are one pass's");
        let cost = |module: ModuleId, backward: bool| Cost {
            flops: 1e13,
            bytes: 1e8,
            element_bytes: 2,
            backward,
            op: 1,
            module,
            event: 0,
        };
        let module = |path: &'static [&'static str], layer: usize| {
            let _part = module_path::enter(path[0]);
            let _layer = module_path::enter_at("layers", layer);
            module_path::current_id()
        };
        let [streamed, resident, other] = [module(&["llm"], 3), module(&["llm"], 4), module(&["image_encoder"], 0)];
        let costs = vec![cost(streamed, false), cost(streamed, true), cost(resident, false), cost(other, true)];
        let ops = vec![String::new(), "aten::mm".into()];
        let trace = Trace { costs, ops, marks: vec![("step", 0, 0)], ..Trace::default() };
        let time = of_layers(&trace, "step", &[("llm.layers", 4)], &speed);
        let one = speed.seconds(1e13, 1e8, 2, false);
        assert!((time.forward - one).abs() < 1e-12 && (time.backward - one).abs() < 1e-12, "{time:?}");
    }
}
