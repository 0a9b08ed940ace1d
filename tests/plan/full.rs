//! The full task planned for CUDA: how long it takes and what it needs.

use super::*;
use std::time::Instant;

/// Prints times and peaks; nothing to compare with.
#[test]
#[ignore = "prints"]
#[expect(clippy::print_stderr, reason = "that is its purpose")]
fn full_for_cuda() {
    let _alone = ready();
    let _target = meta::enter_target(meta::Target::Cuda);
    for preset in std::env::var("PRESETS").unwrap_or_else(|_| "full".into()).split(',') {
        for extra in std::env::var("SETS").unwrap_or_default().split(';') {
            for (batch, checkpointing, decoder) in
                [(1, "none", "v5"), (1, "full", "v5"), (4, "none", "v5"), (4, "full", "v5"), (4, "full", "v6")]
            {
                let mut sets = vec![
                    format!("train.micro_batch={batch}"),
                    format!("train.checkpointing={checkpointing}"),
                    format!("model.decoder={decoder}"),
                    "train.accumulation=1".to_owned(),
                ];
                sets.extend(extra.split_whitespace().map(str::to_owned));
                let pairs = sets.iter().map(|set| (set.clone(), "--set".to_owned())).collect();
                let sources = Sources { preset: Some(preset.into()), sets: pairs, ..Sources::default() };
                let config = sources.resolve().unwrap().config;
                for round in 0..2 {
                    let start = Instant::now();
                    let planned = phases(&config, Example::published(), META);
                    let peaks: Vec<_> =
                        planned.iter().map(|p| format!("{} {:.3} GiB", p.name, p.allocated_peak.0 as f64 / 1073741824.0)).collect();
                    eprintln!("{sets:?} round {round}: {:.0} ms; {}", start.elapsed().as_secs_f64() * 1e3, peaks.join(", "));
                }
            }
        }
    }
}
