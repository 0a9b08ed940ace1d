//! Compares whole jobs on a GPU with their plans, and prints the numbers that `scripts/gpu-check` collects.

use super::{config_of, ready};
use prsmed::augment::dry_run::{GenerationDryRun as Generation, PHASES};
use prsmed::config::{AugmentRun, Sources};
use prsmed::plan::device_terms::DeviceUsage;
use prsmed::plan::dry_run::{self, Job, Meter, PhaseMeter, RealPhase};
use prsmed::plan::machine::Machine;
use prsmed::plan::report::Plan;
use prsmed::plan::{detect, gpus};
use prsmed::segment::dry_run::SegmentDryRun;
use prsmed::segment::setup;
use prsmed::tensor::{Device, memory};
use prsmed::trainer::Ranks;
use serde_json::json;

/// Bytes that handles of cuBLAS, cuBLASLt and cuDNN may take from the allocator.
const LIBRARIES: u64 = 200 << 20;

/// Training settings; the full model has random weights.
const SETTINGS: [(&str, &str); 6] = [
    ("tiny", "train.precision=fp32"),
    ("tiny", "train.precision=bf16 train.accumulation=2 train.ema_decay=0.9"),
    ("full", "train.micro_batch=1 train.accumulation=2 train.checkpointing=full train.checkpoint_encoder=full"),
    ("full", "train.micro_batch=1 train.accumulation=1 train.checkpointing=none"),
    ("full", "train.micro_batch=4 train.accumulation=1 train.checkpointing=16"),
    ("full", "train.micro_batch=8 train.accumulation=1 train.checkpointing=none model.image_size=512"),
];

/// Generation settings without the prefix `augment.`, with as many steps as a plan runs, from pure noise.
const GENERATION: [&str; 4] = [
    "model=random:tiny steps=3 strength=1 batch=4",
    "model=random:tiny steps=3 strength=1 batch=2 precision=bf16 mode=mask_to_image decode=tiled tile_px=64",
    "model=random:sd15 steps=3 strength=1 batch=4 precision=bf16 image_size=512 decode=whole",
    "model=random:sdxl steps=3 strength=1 batch=4 precision=bf16 image_size=1024 decode=sliced",
];

/// Number of different prompts.
const PROMPTS: usize = 2;

/// Tensors of each phase are within 1 % of a plan without library workspaces. Workspaces are allowed up to
/// [`LIBRARIES`].
#[test]
#[ignore = "needs CUDA"]
fn memory_of_jobs_on_cuda_is_as_planned() {
    let _alone = ready();
    let (gpu, machine, tensors_alone) = first_gpu();
    let mut wrong = Vec::new();
    for (preset, sets) in SETTINGS {
        let config = config_of(preset, sets);
        let example = config.longest_example();
        let sizes = setup::planned_sizes(&config.model, &config.configs, config.lora, example.num_classes).unwrap();
        for job in [Job::Train, Job::Predict] {
            let dry_run = config.dry_run(job, example, &machine, false).unwrap();
            let (plan, tensors) = (Plan::of(&dry_run, &machine), Plan::of(&dry_run, &tensors_alone));
            memory::release_cache(Device::Cuda(0)).unwrap();
            let build = |ranks: Ranks| {
                SegmentDryRun::new(&config.model, &sizes, &config.train, example, (Device::Cuda(0), ranks))
            };
            let mut meter = PhaseMeter::begin(Device::Cuda(0)).unwrap();
            dry_run::dry_run(job, &config.train, Ranks::default(), &build, &mut meter).unwrap();
            wrong.extend(different(&gpu, preset, sets, &plan, &tensors, meter.finish().unwrap()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Tensors of each phase of image generation are within 1 % of the plan, for small networks and for published sizes.
#[test]
#[ignore = "needs CUDA"]
fn memory_of_generation_on_cuda_is_as_planned() {
    let _alone = ready();
    let (gpu, machine, tensors_alone) = first_gpu();
    let mut wrong = Vec::new();
    for sets in GENERATION {
        let pairs = sets.split_whitespace().map(|set| (format!("augment.{set}"), "--set".to_owned())).collect();
        let sources = Sources { preset: Some("tiny".into()), sets: pairs, ..Sources::default() };
        let run: AugmentRun = sources.resolve_as().unwrap().config;
        let pipeline_config = run.planned_pipeline_config().unwrap();
        let planned = run.dry_run(&pipeline_config, PROMPTS, &machine, false).unwrap();
        let (plan, tensors) = (Plan::of(&planned, &machine), Plan::of(&planned, &tensors_alone));
        memory::release_cache(Device::Cuda(0)).unwrap();
        let device = Device::Cuda(0);
        let generation =
            Generation { config: &run.augment, pipeline_config: &pipeline_config, prompts: PROMPTS, device };
        let mut meter = PhaseMeter::begin(device).unwrap();
        generation.walk(&mut |phase| meter.begin(phase)).unwrap();
        let measured = meter.finish().unwrap();
        assert_eq!(measured.iter().map(|phase| phase.name).collect::<Vec<_>>(), PHASES);
        wrong.extend(different(&gpu, "generation", sets, &plan, &tensors, measured));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Name of the first GPU, the machine to plan for, and the same machine without library workspaces.
fn first_gpu() -> (String, Machine, Machine) {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let detected = detect::detect(visible.as_deref()).into_iter().next();
    let other_processes = detected.as_ref().map_or(0, detect::Detected::in_use);
    // the fake CUDA runtime has no management library
    let budget = detected.map_or_else(|| gpus::find("H200").unwrap(), |gpu| gpu.budget());
    let usage = DeviceUsage { other_processes, ..DeviceUsage::default() };
    let tensors_alone = DeviceUsage { num_blas_threads: 0, cudnn_workspace: 0, ..usage };
    let name = budget.name.clone().unwrap();
    (name, Machine::Cuda(budget.clone(), usage), Machine::Cuda(budget, tensors_alone))
}

/// Prints one line for each phase of a job; returns the lines of phases whose tensors differ from the plan.
#[expect(clippy::print_stdout, reason = "scripts/gpu-check reads the output")]
fn different(
    gpu: &str,
    preset: &str,
    sets: &str,
    plan: &Plan,
    tensors: &Plan,
    measured: Vec<RealPhase>,
) -> Vec<String> {
    let mut wrong = Vec::new();
    for ((planned, tensors), measured) in plan.phases.iter().zip(&tensors.phases).zip(measured) {
        let line = json!({
            "kind": "phase", "gpu": gpu, "preset": preset, "sets": sets, "phase": measured.name,
            "planned": [planned.memory.allocated_peak, planned.memory.reserved_peak, planned.device_peak],
            "measured": [measured.allocated_peak, measured.reserved_peak, measured.device_used.unwrap_or_default()],
        });
        println!("{line}");
        let (tensors, measured) = (tensors.memory.allocated_peak.0, measured.allocated_peak.0);
        if tensors.abs_diff(measured) > tensors / 100 + LIBRARIES {
            wrong.push(line.to_string());
        }
    }
    wrong
}
