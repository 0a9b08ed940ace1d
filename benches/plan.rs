//! How long plans take: `cargo bench --profile dev --bench plan`. Prints one JSON object; nothing is asserted.

#![expect(clippy::expect_used, clippy::print_stdout, reason = "a benchmark")]

use prsmed::config::planned::Searched;
use prsmed::config::{RunConfig, Sources};
use prsmed::plan::cards;
use prsmed::plan::device_terms::Facts;
use prsmed::plan::rehearse::Job;
use prsmed::plan::report::{Machine, Plan};
use prsmed::plan::search::{Space, Use, search};
use prsmed::tensor::ledger;
use serde_json::json;
use std::time::Instant;

fn full(sets: &[&str]) -> RunConfig {
    let sets = sets.iter().map(|set| ((*set).to_owned(), "--set".to_owned())).collect();
    Sources { preset: Some("full".into()), sets, ..Sources::default() }.resolve().expect("a preset").config
}

/// Milliseconds of `work`, the best of five.
fn best(mut work: impl FnMut()) -> f64 {
    let once = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64() * 1e3
    };
    (0..5).map(|_| once(&mut work)).fold(f64::INFINITY, f64::min)
}

/// A line of the process's status, bytes.
fn status(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn main() {
    ledger::install();
    let rss_before = status("VmHWM:");
    let anonymous_before = status("RssAnon:");
    let budget = cards::find("141gb").expect("a size");
    let machine = Machine::Cuda(budget, Facts::default());
    let config = full(&[]);
    let first = Instant::now();
    config.plan(Job::Train, &machine).expect("a plan");
    let first = first.elapsed().as_secs_f64() * 1e3;
    let mut times = vec![("first plan", first)];
    for (name, job) in
        [("rehearse train", Job::Train), ("rehearse a step", Job::Step), ("rehearse predict", Job::Predict)]
    {
        times.push((
            name,
            best(|| {
                drop(config.rehearse(job, config.longest_example(), &machine, job != Job::Step).expect("a plan"));
            }),
        ));
    }
    let rehearsed = config.rehearse(Job::Train, config.longest_example(), &machine, true).expect("a plan");
    times.push(("replay and report", best(|| drop(Plan::of(&rehearsed, &machine)))));
    let space = Space {
        effective_batch: 5040,
        questions: vec![1],
        image_sizes: vec![1024],
        keep_features: Use::Possible,
        record: true,
        own_kernels: true,
        headroom_frac: 0.03,
    };
    let start = Instant::now();
    let problem = Searched::new(&config, &machine).expect("sizes");
    let found = search(&problem, &space).expect("plans");
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{}",
        json!({
            "milliseconds": times.iter().map(|(name, ms)| json!({ *name: ms })).collect::<Vec<_>>(),
            "events": rehearsed.trace.events.len(),
            "operators": rehearsed.trace.costs.len(),
            "search": { "seconds": seconds, "considered": found.considered, "planned": found.planned },
            "rss_before": rss_before,
            "rss_peak": status("VmHWM:"),
            "anonymous_before": anonymous_before,
            "anonymous_after": status("RssAnon:"),
            "files_after": status("RssFile:"),
        })
    );
}
