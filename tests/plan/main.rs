//! Planned bytes equal measured bytes: random configurations run on the meta device and on the CPU.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use prsmed::config::{RunConfig, Sources};
use prsmed::plan::dry_run::{self, Job, PhaseMeter};
use prsmed::replay::{self, PhaseMemory};
use prsmed::segment::dry_run::{Example, SegmentDryRun};
use prsmed::segment::setup;
use prsmed::tensor::meta::PlanTarget;
use prsmed::tensor::{Device, META, kernels, ledger, meta, no_grad, set_num_threads, use_flash_attention};
use prsmed::trainer::{Ranks, Switch};
use prsmed::units::Bytes;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::{Mutex, MutexGuard, PoisonError};

mod augment;
mod cpu;
mod cuda;
mod finetune;
mod gpu;
mod layer;
mod operands;
mod quantized;
mod readings;
mod recorded;

/// Sets up a test. All tests share the process-wide ledger, so only one may run at a time. One compute thread, because
/// the scratch memory of several threads overlaps by chance.
fn ready() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    ledger::install();
    meta::install().unwrap();
    set_num_threads(1);
    use_flash_attention();
    kernels::set_folder_for_tests();
    alone
}

/// The number of drawn settings that a test compares: `all` in `scripts/soak`, a third of them in `scripts/check`.
fn share(all: usize) -> usize {
    if std::env::var_os("PRSMED_SOAK").is_some() { all } else { all / 3 }
}

/// A phase, its peak, and the peak by category.
type Peak = (&'static str, Bytes, Vec<(&'static str, Bytes)>);

/// Random settings that affect memory, a random example, and how many ids all texts but the first are shorter.
#[expect(clippy::too_many_lines, reason = "a drawing")]
fn draw(rng: &mut ChaCha8Rng) -> (Vec<String>, Example, usize) {
    let mut one = |key: &str, values: &[&str]| format!("{key}={}", values.choose(rng).unwrap());
    let mut sets = vec![
        one("model.image_size", &["64", "80", "128"]),
        one("train.micro_batch", &["1", "2", "3"]),
        one("train.accumulation", &["1", "2", "4"]),
        one("train.precision", &["fp32", "bf16", "fp16"]),
        one("train.checkpointing", &["none", "full", "0", "1", "2"]),
        one("train.checkpoint_encoder", &["none", "full", "1", "3"]),
        one("train.checkpoint_decoder", &["true", "false"]),
        one("train.ema_decay", &["0.0", "0.9"]),
        one("train.optimizer", &["adamw", "adamw8bit"]),
        one("train.offload_optimizer", &["false", "true"]),
        one("train.step_in_backward", &["false", "true"]),
        one("train.graph", &["off", "on", "on"]),
        one("lora.rank", &["2", "8", "16"]),
        one("lora.dropout", &["0.0", "0.1"]),
        one("model.train_base", &["true", "false"]),
        one("model.decoder", &["v5", "v6"]),
        one("model.decoder_dropout", &["0.0", "0.1"]),
        one("model.decoder_positions", &["true", "false"]),
        one("model.semantics", &["corrected", "reference"]),
        one("model.batch_norm", &["frozen", "batch"]),
        one("model.sizes.llm.num_hidden_layers", &["1", "3", "5"]),
        one("model.sizes.llm.intermediate_size", &["256", "640"]),
        one("model.sizes.clip.image_size", &["84", "112"]),
        one("model.sizes.encoder.embed_dims", &["[8,16,32,32]", "[32,64,80,160]"]),
        one("model.sizes.encoder.depths", &["[1,1,1,1]", "[2,2,2,2]"]),
        one("model.sizes.encoder.window_sizes", &["[7,8,16,8]", "[7,7,14,7]"]),
        one("model.sizes.encoder.out_dim", &["32", "64"]),
        one("data.cache_vision", &["off", "ram"]),
        one("model.packed_attention", &["mask", "flash"]),
    ];
    with_small_steps_in_fp16(&mut sets, "model.image_size=");
    if sets.contains(&"data.cache_vision=ram".to_owned()) {
        // only a frozen vision tower can have a feature cache
        for set in &mut sets {
            *set = set.replace("train_base=true", "train_base=false");
        }
    }
    if sets.contains(&"model.train_base=false".to_owned()) {
        // trained weights cannot be quantized
        sets.push(one("model.quantization", &["none", "nf4", "nf4-double"]));
    }
    let can_pack = !sets.iter().any(|set| set == "model.semantics=reference" || set == "model.batch_norm=batch");
    let questions = if can_pack { rng.random_range(1..4) } else { 1 };
    sets.push(format!("data.questions_per_image={questions}"));
    if sets.iter().any(|set| set == "train.step_in_backward=true") {
        sets.retain(|set| !set.starts_with("train.accumulation=") && set != "train.precision=fp16");
        sets.extend(["train.accumulation=1", "train.clip_norm=0"].map(str::to_owned));
    }
    let excludes_graphs = ["train.step_in_backward=true", "model.semantics=reference"];
    if sets.iter().any(|set| excludes_graphs.contains(&set.as_str())) {
        sets.retain(|set| !set.starts_with("train.graph="));
    }
    let can_stream =
        sets.contains(&"model.train_base=false".to_owned()) && !sets.contains(&"train.graph=on".to_owned());
    if can_stream {
        let layers = ["none", "1", "full"].choose(rng).unwrap();
        sets.push(format!("model.stream_layers={layers}"));
        sets.push(format!("model.stream_vision={}", rng.random_bool(0.5)));
    }
    let text_tokens = rng.random_range(12..60);
    let answer_tokens = rng.random_range(2..text_tokens - 4);
    let has_unknown_masks = rng.random_range(0..4) == 0;
    let example = Example {
        text_tokens,
        answer_tokens,
        num_classes: 6,
        new_tokens: 4,
        questions,
        has_unknown_masks,
        largest: None,
    };
    (sets, example, rng.random_range(0..5))
}

/// libtorch multiplies matrices of halves by a plain loop on the CPU, a hundred times as slow as other types. The memory of
/// its steps is checked with small images and few micro-batches.
fn with_small_steps_in_fp16(sets: &mut [String], image_size: &str) {
    if sets.iter().any(|set| set.ends_with(".precision=fp16")) {
        let small = [(image_size, "64"), ("train.micro_batch=", "1"), ("train.accumulation=", "2")];
        for (key, value) in small {
            for set in sets.iter_mut().filter(|set| set.starts_with(key)) {
                *set = format!("{key}{value}");
            }
        }
    }
}

/// A preset with `key=value` settings, separated by spaces.
fn config_of(preset: &str, sets: &str) -> RunConfig {
    let sets = sets.split_whitespace().map(|set| (set.to_owned(), "--set".to_owned())).collect();
    Sources { preset: Some(preset.into()), sets, ..Sources::default() }.resolve().unwrap().config
}

fn phases(config: &RunConfig, example: Example, shorter: usize, device: Device) -> Vec<Peak> {
    let sizes = setup::planned_sizes(&config.model, &config.configs, config.lora, example.num_classes).unwrap();
    let build = |ranks: Ranks| {
        let dry_run = SegmentDryRun::new(&config.model, &sizes, &config.train, example, (device, ranks))?;
        Ok(dry_run.with_shorter_rows(shorter).with_feature_cache(config.data.caches_features()))
    };
    let jobs = [Job::Train, Job::Eval, Job::Predict];
    let of = |job| -> Vec<Peak> {
        if device == META {
            let trace = dry_run::plan(job, &config.train, PlanTarget::Cpu, false, build).unwrap().trace;
            let phases = replay::phases(&trace, replay::ReplayTarget::Cpu).into_iter();
            return phases.map(|p: PhaseMemory| (p.name, p.allocated_peak, p.categories)).collect();
        }
        let mut meter = PhaseMeter::begin(device).unwrap();
        dry_run::dry_run(job, &config.train, Ranks::default(), &build, &mut meter).unwrap();
        meter.finish().unwrap().into_iter().map(|p| (p.name, p.allocated_peak, p.categories)).collect()
    };
    jobs.into_iter().flat_map(of).collect()
}

#[test]
fn planned_memory_equals_measured_memory() {
    let _alone = ready();
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let (mut different, mut num_with_graphs) = (Vec::new(), 0);
    for _ in 0..share(60) {
        let (sets, example, shorter) = draw(&mut rng);
        let pairs = sets.iter().map(|set| (set.clone(), "--set".to_owned())).collect();
        let sources = Sources { preset: Some("tiny".into()), sets: pairs, ..Sources::default() };
        let config = sources.resolve().unwrap().config;
        let planned = phases(&config, example, shorter, META);
        let measured = phases(&config, example, shorter, Device::Cpu);
        let more = [config.data.caches_features(), config.train.graph == Switch::On];
        assert_eq!(planned.len(), 10 + more.into_iter().filter(|is_there| *is_there).count());
        num_with_graphs += usize::from(more[1]);
        assert!(measured.iter().all(|phase| phase.1.0 > 1_000_000), "{measured:?}");
        for (plan, truth) in planned.iter().zip(&measured) {
            if plan != truth {
                different.push(format!("{sets:?} {example:?} {shorter}\n  planned {plan:?}\n  measured {truth:?}"));
            }
        }
    }
    assert!(num_with_graphs > 1, "{num_with_graphs}");
    assert!(different.is_empty(), "{} phases differ:\n{}", different.len(), different.join("\n"));
}
