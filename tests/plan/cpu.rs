//! Single operators on the CPU: planned bytes equal measured bytes, and each operator that the program runs has a case.

use super::operands::{BF16, FP32, Work, leaf, zeros};
use super::*;
use prsmed::tensor::trace::{self, BlockChange, Trace};
use prsmed::tensor::{Kind, Tensor};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

mod coverage;
mod elementwise;
mod factories;
mod kept;
mod maps;
mod products;
mod quantized;
mod reductions;

const FP16: Kind = Kind::Half;
const FLOATS: [Kind; 3] = [FP32, BF16, FP16];

/// One operator on operands of one kind.
struct Case {
    /// Name in a trace, such as `aten::mm`.
    op: &'static str,
    what: String,
    /// Prepares the operands on a device.
    prepare: Box<dyn Fn(Device) -> Work>,
}

fn case(op: &'static str, what: impl Into<String>, prepare: impl Fn(Device) -> Work + 'static) -> Case {
    Case { op, what: what.into(), prepare: Box::new(prepare) }
}

/// Memory layout of an operand.
#[derive(Debug, Clone, Copy)]
enum Layout {
    Contiguous,
    Transposed,
    Expanded,
}

const LAYOUTS: [Layout; 3] = [Layout::Contiguous, Layout::Transposed, Layout::Expanded];

/// `[12, 40, 64]` in a layout, and the leaf that it is a view of.
fn laid(layout: Layout, kind: Kind, on: Device) -> (Tensor, Tensor) {
    let (leaf, xs) = match layout {
        Layout::Contiguous => {
            let leaf = leaf(&[12, 40, 64], kind, on);
            (leaf.shallow_clone(), leaf)
        }
        Layout::Transposed => {
            let leaf = leaf(&[12, 64, 40], kind, on);
            (leaf.shallow_clone(), leaf.transpose(1, 2))
        }
        Layout::Expanded => {
            let leaf = leaf(&[12, 1, 64], kind, on);
            (leaf.shallow_clone(), leaf.expand([12, 40, 64], false))
        }
    };
    (xs, leaf)
}

/// The forward pass without a graph.
fn plain(f: impl Fn() -> Tensor + 'static) -> Work {
    Box::new(move || vec![no_grad(&f)])
}

/// The forward pass and the gradients of `leaves`; gradients and result stay allocated.
fn trained(leaves: Vec<Tensor>, f: impl Fn() -> Tensor + 'static) -> Work {
    Box::new(move || {
        let ys = f();
        let mut kept = Tensor::run_backward(&[&ys], &leaves, false, false);
        kept.push(ys);
        kept
    })
}

/// Three cases named by `what`: without autograd, with a backward pass, and with the backward pass of the sum, whose
/// gradient is one number expanded to all elements.
fn passes<F: Fn() -> Tensor + 'static>(
    op: &'static str,
    what: &str,
    prepare: impl Fn(Device) -> (Vec<Tensor>, F) + Clone + 'static,
) -> [Case; 3] {
    let [second, third] = [prepare.clone(), prepare.clone()];
    [
        case(op, what, move |on| plain(prepare(on).1)),
        case(op, format!("{what}, trained"), move |on| {
            let (leaves, f) = second(on);
            trained(leaves, f)
        }),
        case(op, format!("{what}, trained by its sum"), move |on| {
            let (leaves, f) = third(on);
            trained(leaves, move || {
                let ys = f();
                ys.sum(ys.kind())
            })
        }),
    ]
}

fn cases() -> Vec<Case> {
    let groups = [
        products::cases(),
        quantized::cases(),
        maps::cases(),
        reductions::cases(),
        elementwise::cases(),
        factories::cases(),
        kept::cases(),
    ];
    groups.into_iter().flatten().collect()
}

/// Growth of live bytes, and peak above the live bytes before.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Bytes {
    live: i64,
    peak: i64,
}

fn measured(case: &Case) -> Bytes {
    let mut work = (case.prepare)(Device::Cpu);
    ledger::reset_peak();
    let before = ledger::usage().allocated.0.cast_signed();
    let kept = work();
    let now = ledger::usage();
    drop(kept);
    Bytes { live: now.allocated.0.cast_signed() - before, peak: now.allocated_peak.0.cast_signed() - before }
}

/// Planned bytes on the meta device, and the operators that allocated or computed.
fn planned(case: &Case) -> (Bytes, BTreeSet<String>) {
    let mut recording = trace::begin(PlanTarget::Cpu, true).unwrap();
    let mut work = (case.prepare)(META);
    recording.mark("work");
    let kept = work();
    let trace = recording.finish();
    drop(kept);
    let (_, first_event, first_cost) = trace.marks[0];
    let mut sizes = Vec::new();
    let (mut live, mut before, mut peak) = (0_i64, 0, 0);
    for (index, event) in trace.events.iter().enumerate() {
        if index == first_event {
            (before, peak) = (live, live);
        }
        match event.change {
            BlockChange::Allocate(bytes) => {
                sizes.push(bytes.cast_signed());
                live += bytes.cast_signed();
            }
            BlockChange::Release => live -= sizes[event.block as usize],
            BlockChange::Move => {}
        }
        peak = peak.max(live);
    }
    if trace.events.len() == first_event {
        (before, peak) = (live, live);
    }
    (Bytes { live: live - before, peak: peak - before }, working(&trace, first_event, first_cost))
}

/// Names of operators that allocated after `first_event` or computed after `first_cost`.
fn working(trace: &Trace, first_event: usize, first_cost: usize) -> BTreeSet<String> {
    let allocating =
        trace.events[first_event..].iter().filter(|event| matches!(event.change, BlockChange::Allocate(_)));
    let numbers = allocating.map(|event| event.op).chain(trace.costs[first_cost..].iter().map(|cost| cost.op));
    let names: BTreeSet<String> = numbers.map(|op| trace.ops[usize::from(op)].clone()).collect();
    // allocations outside of operators have no name
    names.into_iter().filter(|name| !name.is_empty()).collect()
}

#[test]
fn planned_memory_of_each_operator_equals_measured_memory() {
    let _alone = ready();
    let cases = cases();
    assert!(cases.len() > 3000, "{}", cases.len());
    let mut wrong = Vec::new();
    for case in &cases {
        let ((plan, names), truth) = (planned(case), measured(case));
        if plan != truth {
            wrong.push(format!("{} ({}): planned {plan:?}, measured {truth:?}", case.op, case.what));
        }
        if !names.contains(case.op) {
            wrong.push(format!("{} ({}): it is not among {names:?}", case.op, case.what));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

/// An operator that is run once for each size, with `rows` that no other test has.
fn summed(rows: i64) -> Case {
    case("aten::cumsum", format!("{rows} rows"), move |on| {
        let xs = Tensor::ones([rows, 333], (Kind::Float, on));
        plain(move || xs.cumsum(1, Kind::Float))
    })
}

#[test]
fn what_other_threads_allocate_is_not_in_a_plan() {
    let _alone = ready();
    let alone: Vec<Bytes> = (2000..2040).map(|rows| planned(&summed(rows)).0).collect();
    let stop = AtomicBool::new(false);
    let beside: Vec<Bytes> = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                drop(Tensor::ones([1000], (Kind::Float, Device::Cpu)));
            }
        });
        let beside = (2040..2080).map(|rows| planned(&summed(rows)).0).collect();
        stop.store(true, Ordering::Relaxed);
        beside
    });
    let grown = |pair: &[Bytes]| pair[1].peak - pair[0].peak;
    let expected = grown(&alone[..2]);
    assert!(
        expected > 0 && alone.windows(2).chain(beside.windows(2)).all(|pair| grown(pair) == expected),
        "{alone:?} {beside:?}"
    );
}
