//! Memory timeline of a plan as a Chrome trace, for <https://ui.perfetto.dev>.
//!
//! A plan has an order of events but no clock: one microsecond of the trace is one allocation or release. Tracks: the
//! phases, the modules that ran, the bytes of each category and their total, and the blocks of at least 1/1000 of the
//! peak.

use crate::replay::Live;
use crate::tensor::ledger::CATEGORIES;
use crate::tensor::module_path;
use crate::tensor::trace::{BlockChange, Trace};
use crate::units::Bytes;
use serde_json::{Value, json};
use std::collections::HashSet;

/// Blocks smaller than the peak over this are left out.
const SMALL: u64 = 1000;
/// Tracks of phases and modules.
const PHASES: u64 = 1;
const MODULES: u64 = 2;

/// The trace of a planned job; `budget` is the memory of the device.
pub fn chrome_trace(trace: &Trace, title: &str, budget: Bytes) -> Value {
    let mut live = Live::default();
    let mut peak = (0, 0);
    for (at, event) in trace.events.iter().enumerate() {
        live.apply(event);
        peak = if live.total > peak.0 { (live.total, at) } else { peak };
    }
    let name = |what: &str, thread: u64, name: &str| {
        let args = json!({ "name": name });
        json!({ "ph": "M", "pid": 0, "tid": thread, "name": what, "args": args })
    };
    let peak_name = format!("peak {}", Bytes(peak.0));
    let mut events = vec![
        name("process_name", 0, title),
        name("thread_name", PHASES, "phases"),
        name("thread_name", MODULES, "modules"),
        counter("budget", 0, budget.0),
        json!({ "ph": "i", "s": "g", "pid": 0, "tid": PHASES, "ts": peak.1, "name": peak_name }),
    ];
    let ends = trace.marks.iter().skip(1).map(|mark| mark.1).chain([trace.events.len()]);
    for (&(name, start, _), end) in trace.marks.iter().zip(ends) {
        events.push(json!({ "ph": "X", "pid": 0, "tid": PHASES, "ts": start, "dur": end - start, "name": name }));
    }
    add_events(trace, peak.0 / SMALL, &mut events);
    json!({ "displayTimeUnit": "ns", "traceEvents": events })
}

/// Counters, modules and blocks of at least `large` bytes.
fn add_events(trace: &Trace, large: u64, out: &mut Vec<Value>) {
    let (mut live, mut modules, mut shown) = (Live::default(), Vec::new(), HashSet::new());
    for (at, event) in trace.events.iter().enumerate() {
        let before = live.by_category;
        live.apply(event);
        for ((_, name), (now, before)) in CATEGORIES.iter().zip(live.by_category.iter().zip(before)) {
            if *now != before {
                out.push(counter(name, at, *now));
            }
        }
        out.push(counter("total", at, live.total));
        let module = module_path::path(event.module);
        enter(&mut modules, &module, at, out);
        let block = |kind: &str| json!({ "ph": kind, "cat": "block", "id": event.block, "pid": 0, "tid": 0, "ts": at });
        match event.change {
            BlockChange::Allocate(bytes) if bytes >= large => {
                let op = trace.ops[usize::from(event.op)].trim_start_matches("aten::");
                let mut begin = block("b");
                begin["name"] = json!(format!("{} {op}", Bytes(bytes)));
                begin["args"] = json!({ "module": module, "category": CATEGORIES[usize::from(event.category)].1 });
                out.push(begin);
                shown.insert(event.block);
            }
            BlockChange::Release if shown.remove(&event.block) => out.push(block("e")),
            _ => {}
        }
    }
    enter(&mut modules, "", trace.events.len(), out);
}

fn counter(name: &str, at: usize, bytes: u64) -> Value {
    json!({ "ph": "C", "pid": 0, "ts": at, "name": name, "args": { "bytes": bytes } })
}

/// Ends the open modules that `path` is not inside of, and begins those that it is.
fn enter(open: &mut Vec<String>, path: &str, at: usize, out: &mut Vec<Value>) {
    let parts: Vec<&str> = path.split('.').filter(|part| !part.is_empty()).collect();
    let same = open.iter().zip(&parts).take_while(|(open, part)| open == *part).count();
    for name in open.drain(same..).rev() {
        out.push(json!({ "ph": "E", "pid": 0, "tid": MODULES, "ts": at, "name": name }));
    }
    for name in &parts[same..] {
        out.push(json!({ "ph": "B", "pid": 0, "tid": MODULES, "ts": at, "name": name }));
        open.push((*name).to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::module_path::ModuleId;
    use crate::tensor::trace::TraceEvent;

    #[test]
    fn the_trace_has_counters_phases_and_large_blocks() {
        let event = |block, change| TraceEvent { block, change, category: 0, op: 1, module: ModuleId(0) };
        let events = vec![
            event(0, BlockChange::Allocate(1 << 20)),
            event(1, BlockChange::Allocate(16)),
            event(1, BlockChange::Release),
            event(0, BlockChange::Release),
        ];
        let ops = vec![String::new(), "aten::mm".into()];
        let trace = Trace { events, ops, marks: vec![("load", 0, 0), ("step", 1, 0)], ..Trace::default() };
        let json = chrome_trace(&trace, "a plan", Bytes(5));
        let of = |kind: &str| {
            let all = json["traceEvents"].as_array().unwrap().iter();
            all.filter(|event| event["ph"] == kind).cloned().collect::<Vec<_>>()
        };
        let phases: Vec<_> = of("X").iter().map(|e| (e["name"].clone(), e["ts"].clone(), e["dur"].clone())).collect();
        assert_eq!(phases, [(json!("load"), json!(0), json!(1)), (json!("step"), json!(1), json!(3))]);
        assert_eq!((of("b").len(), &of("b")[0]["name"]), (1, &json!("1.00 MiB mm")), "16 bytes are no large block");
        assert_eq!((of("i")[0]["ts"].clone(), of("i")[0]["name"].clone()), (json!(1), json!("peak 1.00 MiB")));
        let totals = of("C").into_iter().filter(|e| e["name"] == "total").map(|e| e["args"]["bytes"].clone());
        assert_eq!(totals.collect::<Vec<_>>(), [json!(1 << 20), json!((1 << 20) + 16), json!(1 << 20), json!(0)]);
    }

    #[test]
    fn modules_begin_and_end_as_their_paths_change() {
        let (mut open, mut out) = (Vec::new(), Vec::new());
        for (at, path) in ["llm.layers.0", "llm.layers.1", "", "decoder"].into_iter().enumerate() {
            enter(&mut open, path, at, &mut out);
        }
        let written: Vec<String> =
            out.iter().map(|e| format!("{}{}", e["ph"].as_str().unwrap(), e["name"].as_str().unwrap())).collect();
        assert_eq!(written, ["Bllm", "Blayers", "B0", "E0", "B1", "E1", "Elayers", "Ellm", "Bdecoder"]);
    }
}
