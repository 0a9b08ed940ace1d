//! Fine-tuning of the generator: planned bytes equal measured bytes on the CPU, in every phase, for random settings.

use super::*;
use prsmed::augment::finetune::FinetuneRun;
use prsmed::augment::finetune::dry_run::{FinetuneDryRun, encode};
use prsmed::augment::pipeline_config::PipelineConfig;
use prsmed::job::planned::{Fitted as _, Planned as _};
use prsmed::plan::dry_run::Meter;
use prsmed::plan::machine::Machine;
use prsmed::trainer::Ranks;

fn settings(preset: &str, sets: &[String]) -> FinetuneRun {
    let pairs = sets.iter().map(|set| (set.clone(), "--set".to_owned())).collect();
    let sources = Sources { preset: Some(preset.into()), sets: pairs, ..Sources::default() };
    sources.resolve_as::<FinetuneRun>().unwrap().config
}

fn draw_settings(rng: &mut ChaCha8Rng) -> Vec<String> {
    let mut one = |key: &str, values: &[&str]| format!("{key}={}", values.choose(rng).unwrap());
    let mut sets = vec![
        one("finetune.model", &["random:tiny", "random:tiny", "random:tiny-sdxl"]),
        one("finetune.mode", &["images", "inpaint", "mask_to_image"]),
        one("finetune.method", &["lora", "full"]),
        one("finetune.image_size", &["64", "128", "192"]),
        one("finetune.rank", &["2", "8"]),
        one("finetune.targets", &["\"to_q,to_v\"", "\"to_q,to_k,to_v,to_out.0,ff.net.0.proj,ff.net.2\""]),
        one("finetune.noise_offset", &["0.0", "0.05"]),
        one("finetune.lesion_weight", &["1.0", "3.0"]),
        one("train.micro_batch", &["1", "2", "3"]),
        one("train.accumulation", &["1", "2", "4"]),
        one("train.precision", &["fp32", "bf16", "fp16"]),
        one("train.checkpointing", &["none", "full", "1", "4"]),
        one("train.ema_decay", &["0.0", "0.9"]),
        one("train.optimizer", &["adamw", "adamw8bit"]),
        one("train.offload_optimizer", &["false", "true"]),
        one("train.step_in_backward", &["false", "true"]),
    ];
    sets.push(one("finetune.samples", &["0", "0", "8"]));
    sets.push(one("finetune.sample_batch", &["1", "2"]));
    sets.push(one("finetune.sample_guidance", &["1.0", "4.0"]));
    with_small_steps_in_fp16(&mut sets, "finetune.image_size=");
    if sets.contains(&"train.precision=fp16".to_owned()) {
        "finetune.model=random:tiny".clone_into(&mut sets[0]);
    }
    if sets.contains(&"train.step_in_backward=true".to_owned()) {
        sets.retain(|set| !set.starts_with("train.accumulation=") && set != "train.precision=fp16");
        sets.extend(["train.accumulation=1", "train.clip_norm=0"].map(str::to_owned));
    }
    if rng.random_bool(0.3) {
        let excluded = ["train.precision=fp32", "train.offload_optimizer=true", "train.step_in_backward=true"];
        sets.retain(|set| !excluded.contains(&set.as_str()));
        if !sets.iter().any(|set| set.starts_with("train.precision=")) {
            sets.push("train.precision=bf16".to_owned());
        }
        sets.push("train.offload_weights=true".to_owned());
    }
    sets
}

fn phases_of(run: &FinetuneRun, pipeline_config: &PipelineConfig, device: Device) -> Vec<Peak> {
    let build = |_: Ranks| FinetuneDryRun::new(pipeline_config, run, device);
    if device == META {
        let encode =
            |begin: &mut dyn FnMut(&'static str) -> prsmed::Result<()>| encode(pipeline_config, run, META, begin);
        let planned = dry_run::plan_after(Job::Train, &run.train, PlanTarget::Cpu, false, encode, build).unwrap();
        let phases = replay::phases(&planned.trace, replay::ReplayTarget::Cpu).into_iter();
        return phases.map(|p| (p.name, p.allocated_peak, p.categories)).collect();
    }
    let mut meter = PhaseMeter::begin(device).unwrap();
    encode(pipeline_config, run, device, &mut |phase| meter.begin(phase)).unwrap();
    dry_run::dry_run(Job::Train, &run.train, Ranks::default(), &build, &mut meter).unwrap();
    meter.finish().unwrap().into_iter().map(|p| (p.name, p.allocated_peak, p.categories)).collect()
}

#[test]
fn planned_memory_of_fine_tuning_equals_measured_memory() {
    let _alone = ready();
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mut different = Vec::new();
    for _ in 0..share(40) {
        let sets = draw_settings(&mut rng);
        let run = settings("tiny", &sets);
        let pipeline_config = run.planned_pipeline_config().unwrap();
        let planned = phases_of(&run, &pipeline_config, META);
        let measured = phases_of(&run, &pipeline_config, Device::Cpu);
        let names: Vec<&str> = planned.iter().map(|phase| phase.0).collect();
        let expected = ["encode captions", "encode images", "load", "first step", "step", "evaluate", "save", "resume"];
        assert_eq!(names, expected, "{sets:?}");
        assert!(measured.iter().all(|phase| phase.1.0 > 100_000), "{measured:?}");
        for (plan, truth) in planned.iter().zip(&measured) {
            if plan != truth {
                different.push(format!("{sets:?}\n  planned {plan:?}\n  measured {truth:?}"));
            }
        }
    }
    assert!(different.is_empty(), "{} phases differ:\n{}", different.len(), different.join("\n"));
}

/// Plans of the published sizes, without weights: what a search may change, it changes in the documented order.
#[test]
fn fine_tunings_of_published_sizes_fit_named_gpus() {
    let _alone = ready();
    let machine = |name: &str| Machine::named(name).unwrap();
    let sd15 = settings("lora-sd15", &["finetune.model=random:sd15".to_owned()]);
    let sizes = sd15.planned_pipeline_config().unwrap();
    let (roomy, _) = sd15.fitted(&sizes, &machine("24gb"), true).unwrap().expect("a LoRA of SD 1.5 fits 24 GB");
    let (tight, plan) = sd15.fitted(&sizes, &machine("6gb"), true).unwrap().expect("a LoRA of SD 1.5 fits 6 GB");
    for run in [&roomy, &tight] {
        assert_eq!(run.effective_batch(), sd15.effective_batch(), "the effective batch is kept");
        assert_eq!(run.finetune.image_size, 512);
    }
    assert!(tight.train.micro_batch <= roomy.train.micro_batch && plan.fits);
    assert!(tight.plan_of(&sizes, Job::Train, &machine("6gb")).unwrap().device_peak.0 < 6 << 30);
}
