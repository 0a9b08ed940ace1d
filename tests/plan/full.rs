//! The full task planned for CUDA: how long it takes and what it needs.

use super::*;
use std::time::Instant;

const GIB: f64 = 1_073_741_824.0;

/// Prints times and peaks; nothing to compare with. `PRESETS` (by commas) and `SETS` (`key=value ...` by semicolons)
/// choose others than the full task as it is.
#[test]
#[ignore = "prints"]
#[expect(clippy::print_stderr, clippy::cast_precision_loss, reason = "it shows numbers")]
fn full_for_cuda() {
    let _alone = ready();
    let _target = meta::enter_target(meta::Target::Cuda);
    let variable = |name: &str, otherwise: &str| std::env::var(name).unwrap_or_else(|_| otherwise.into());
    let (presets, extras) = (variable("PRESETS", "full"), variable("SETS", ""));
    let shapes =
        [("1", "none", "v5"), ("1", "full", "v5"), ("4", "none", "v5"), ("4", "full", "v5"), ("4", "full", "v6")];
    for (preset, extra) in presets.split(',').flat_map(|preset| extras.split(';').map(move |extra| (preset, extra))) {
        for (batch, checkpointing, decoder) in shapes {
            let keys = [
                ("train.micro_batch", batch),
                ("train.checkpointing", checkpointing),
                ("model.decoder", decoder),
                ("train.accumulation", "1"),
            ];
            let mut sets: Vec<String> = keys.iter().map(|(key, value)| format!("{key}={value}")).collect();
            sets.extend(extra.split_whitespace().map(str::to_owned));
            let pairs = sets.iter().map(|set| (set.clone(), "--set".to_owned())).collect();
            let sources = Sources { preset: Some(preset.into()), sets: pairs, ..Sources::default() };
            let config = sources.resolve().unwrap().config;
            let start = Instant::now();
            let planned = phases(&config, Example::published(), 0, META);
            let milliseconds = start.elapsed().as_secs_f64() * 1e3;
            let peaks = planned.iter().map(|p| format!("{} {:.3}", p.0, p.1.0 as f64 / GIB));
            eprintln!("{}: {milliseconds:.0} ms; GiB: {}", sets.join(" "), peaks.collect::<Vec<_>>().join(", "));
        }
    }
}
