//! Planned bytes equal measured bytes: each configuration is rehearsed on the meta device and on the CPU.

#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "a test fails by panicking and shows its numbers")]

use prsmed::config::{RunConfig, Sources};
use prsmed::plan::rehearse::{self, Phase};
use prsmed::segment::rehearsal::{Example, Rehearsal};
use prsmed::tensor::{Device, META, ledger, meta, set_num_threads};

fn config(sets: &[&str]) -> RunConfig {
    let sets = sets.iter().map(|s| ((*s).to_owned(), "--set".to_owned())).collect();
    Sources { preset: Some("tiny".into()), sets, ..Sources::default() }.resolve().unwrap().config
}

fn phases(config: &RunConfig, device: Device) -> Vec<Phase> {
    let example = Example { text_tokens: 30, answer_tokens: 12, num_classes: 6 };
    let build = || Rehearsal::new(&config.model, config.lora, &config.train, example, device);
    rehearse::phases(&config.train, build).unwrap()
}

/// One test, because the ledger is one for the process.
#[test]
fn planned_equals_measured() {
    ledger::install();
    meta::install().unwrap();
    set_num_threads(1);
    let mut different = Vec::new();
    for sets in [
        &["model.image_size=64", "train.micro_batch=2"][..],
        &["model.image_size=64", "train.micro_batch=3", "train.accumulation=2"],
        &["model.image_size=96", "train.micro_batch=1", "model.train_base=false"],
        &["model.image_size=64", "train.micro_batch=2", "train.checkpointing=full"],
        &["model.image_size=64", "train.micro_batch=2", "train.ema_decay=0.9", "lora.rank=4"],
        &["model.image_size=64", "train.micro_batch=2", "model.decoder=v6", "lora.dropout=0.1"],
        &["model.image_size=64", "train.micro_batch=2", "train.precision=bf16"],
        &["model.image_size=64", "train.micro_batch=2", "model.semantics=reference", "model.batch_norm=batch"],
    ] {
        let config = config(sets);
        let planned = phases(&config, META);
        let measured = phases(&config, Device::Cpu);
        for (plan, truth) in planned.iter().zip(&measured) {
            eprintln!("{sets:?} {}: planned {} measured {}", plan.name, plan.allocated_peak.0, truth.allocated_peak.0);
            if plan != truth {
                different.push(format!("{sets:?}\n  planned {plan:?}\n  measured {truth:?}"));
            }
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
}
