//! Measures the time of planning: `cargo bench --profile dev --bench plan`. Prints one JSON object.

#![expect(clippy::expect_used, clippy::print_stdout, reason = "a benchmark")]

use prsmed::config::{Resolved, Sources};
use prsmed::job::training_settings::search_for;
use prsmed::plan::device_terms::DeviceUsage;
use prsmed::plan::dry_run::Job;
use prsmed::plan::gpus;
use prsmed::plan::machine::Machine;
use prsmed::plan::report::Plan;
use prsmed::tensor::ledger;
use serde_json::json;
use std::time::Instant;

fn full(sets: &[&str]) -> Resolved {
    let sets = sets.iter().map(|set| ((*set).to_owned(), "--set".to_owned())).collect();
    Sources { preset: Some("full".into()), sets, ..Sources::default() }.resolve().expect("a preset")
}

/// Milliseconds of `work`, the minimum of five runs.
fn best(mut work: impl FnMut()) -> f64 {
    let once = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64() * 1e3
    };
    (0..5).map(|_| once(&mut work)).fold(f64::INFINITY, f64::min)
}

/// A line of `/proc/self/status`, in bytes.
fn status(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn main() {
    ledger::install();
    let rss_before = status("VmHWM:");
    let anonymous_before = status("RssAnon:");
    let budget = gpus::find("141gb").expect("a size");
    let machine = Machine::Cuda(budget, DeviceUsage::default());
    let config = full(&[]).config;
    let first = Instant::now();
    config.plan_for(Job::Train, &machine).expect("a plan");
    let first = first.elapsed().as_secs_f64() * 1e3;
    let mut times = vec![("first plan", first)];
    for (name, job) in [
        ("dry run of training", Job::Train),
        ("dry run of a step", Job::Step),
        ("dry run of a prediction", Job::Predict),
    ] {
        times.push((
            name,
            best(|| {
                drop(config.dry_run(job, config.longest_example(), &machine, job != Job::Step).expect("a plan"));
            }),
        ));
    }
    let dry_run = config.dry_run(Job::Train, config.longest_example(), &machine, true).expect("a plan");
    times.push(("replay and report", best(|| drop(Plan::of(&dry_run, &machine)))));
    let resolved = full(&["data.questions_per_image=1"]);
    let start = Instant::now();
    let found = search_for(&resolved, &machine, 5040, false).expect("plans");
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{}",
        json!({
            "milliseconds": times.iter().map(|(name, ms)| json!({ *name: ms })).collect::<Vec<_>>(),
            "events": dry_run.trace.events.len(),
            "operators": dry_run.trace.costs.len(),
            "search": { "seconds": seconds, "considered": found.num_considered, "planned": found.num_planned },
            "rss_before": rss_before,
            "rss_peak": status("VmHWM:"),
            "anonymous_before": anonymous_before,
            "anonymous_after": status("RssAnon:"),
            "files_after": status("RssFile:"),
        })
    );
}
