//! Trace of one thread: its allocations and operator costs. The planner traces a whole training step on the meta
//! device.
//!
//! While a trace runs, tensors on [`super::META`] count for the trace of their thread, and not for the
//! [`super::ledger`].

pub use prsmed_replay::trace::{BlockChange, Cost, Trace, TraceEvent};

use super::meta::PlanTarget;
use super::module_path::ModuleId;
use super::native::{self, RawCost, RawEvent, RawTraceView};
use std::ffi::CStr;
use std::marker::PhantomData;

/// A running trace of this thread.
#[derive(Debug)]
pub struct TraceBuilder {
    marks: Vec<(&'static str, usize, usize)>,
    thread: PhantomData<*const ()>,
}

/// Starts a trace on this thread for a plan of a run on `target`: on the CPU it includes CPU tensors. `costs`: with names and
/// costs of operators, which doubles the time.
///
/// # Errors
/// [`prsmed_base::Error::Torch`] from libtorch.
pub fn begin(target: PlanTarget, costs: bool) -> prsmed_base::Result<TraceBuilder> {
    // SAFETY: starts thread-local bookkeeping.
    unsafe { native::check(native::prsmed_trace_begin(target == PlanTarget::Cpu, costs))? };
    Ok(TraceBuilder { marks: Vec::new(), thread: PhantomData })
}

impl TraceBuilder {
    /// Names the current moment.
    pub fn mark(&mut self, name: &'static str) {
        let view = view();
        self.marks.push((name, count(view.num_events), count(view.num_costs)));
    }

    /// Ends the trace.
    pub fn finish(mut self) -> Trace {
        let view = view();
        // SAFETY: the view is of this thread's trace, which runs until `self` is dropped, and nothing is traced
        // meanwhile.
        let (events, costs) = unsafe {
            (
                slice(view.events, count(view.num_events)).iter().map(RawEvent::event).collect(),
                slice(view.costs, count(view.num_costs)).iter().map(RawCost::cost).collect(),
            )
        };
        let ops = (0..)
            .map_while(|index| {
                // SAFETY: gives null past the last name, else a string that lives as long as the trace.
                let name = unsafe { native::prsmed_trace_name(index) };
                // SAFETY: as above.
                (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
            })
            .collect();
        Trace { events, costs, ops, marks: std::mem::take(&mut self.marks) }
    }
}

impl Drop for TraceBuilder {
    fn drop(&mut self) {
        // SAFETY: ends thread-local bookkeeping; `self` is not `Send`.
        unsafe { native::prsmed_trace_end() };
    }
}

fn view() -> RawTraceView {
    let mut view = RawTraceView { events: std::ptr::null(), num_events: 0, costs: std::ptr::null(), num_costs: 0 };
    // SAFETY: the callee fills the structure.
    unsafe { native::prsmed_trace_view(&raw mut view) };
    view
}

fn count(number: u64) -> usize {
    usize::try_from(number).expect("it is in memory")
}

/// # Safety
/// `start` must be null or point to `len` values that live and stay unchanged while the result is used.
unsafe fn slice<'a, T>(start: *const T, len: usize) -> &'a [T] {
    // SAFETY: the caller's promise.
    if start.is_null() { &[] } else { unsafe { std::slice::from_raw_parts(start, len) } }
}

impl RawEvent {
    fn event(&self) -> TraceEvent {
        let change = match self.kind {
            0 => BlockChange::Allocate(self.bytes),
            1 => BlockChange::Release,
            _ => BlockChange::Move,
        };
        TraceEvent { block: self.block, change, category: self.category, op: self.op, module: ModuleId(self.module) }
    }
}

impl RawCost {
    fn cost(&self) -> Cost {
        Cost {
            flops: self.flops,
            bytes: self.bytes,
            element_bytes: self.element_bytes,
            backward: self.backward != 0,
            op: self.op,
            module: ModuleId(self.module),
            event: self.event,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kind, META, Tensor, ledger, meta, module_path};

    #[test]
    fn a_small_step_is_traced_with_its_costs_and_modules() {
        ledger::install();
        meta::install().unwrap();
        let mut builder = begin(PlanTarget::Cuda, true).unwrap();
        let weight = Tensor::zeros([8, 4], (Kind::Float, META)).set_requires_grad(true);
        builder.mark("forward");
        let loss = {
            let _module = module_path::enter("llm");
            let xs = Tensor::zeros([2, 4], (Kind::Float, META));
            xs.matmul(&weight.tr()).relu().sum(Kind::Float)
        };
        builder.mark("backward");
        loss.backward();
        let trace = builder.finish();
        let first = trace.events[0];
        assert_eq!((first.block, first.change), (0, BlockChange::Allocate(8 * 4 * 4)));
        let products: Vec<&Cost> = trace.costs.iter().filter(|c| trace.ops[usize::from(c.op)] == "aten::mm").collect();
        // x w^T, and in the backward pass the gradient of w
        assert_eq!(products.len(), 2);
        for product in &products {
            assert_eq!(
                (product.flops, product.bytes),
                (2.0 * 2.0 * 4.0 * 8.0, 4.0 * (2.0 * 4.0 + 4.0 * 8.0 + 2.0 * 8.0))
            );
            assert_eq!(module_path::path(product.module), "llm");
        }
        assert_eq!((products[0].backward, products[1].backward), (false, true));
        assert_eq!(trace.marks[0], ("forward", 1, 1));
        let made = trace.events.iter().filter(|e| matches!(e.change, BlockChange::Allocate(_))).count();
        let gone = trace.events.iter().filter(|e| e.change == BlockChange::Release).count();
        // alive: the weight, its gradient and the loss
        assert_eq!(made - gone, 3, "{:?}", trace.events);
    }
}
