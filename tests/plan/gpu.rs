//! Whole jobs on a card, against their plans: what `scripts/gpu-check` prints for benches/RESULTS.md.

use super::{config_of, ready};
use prsmed::augment::rehearsal::{PHASES, Rehearsal as Generation};
use prsmed::config::{AugmentRun, Sources};
use prsmed::plan::detect;
use prsmed::plan::device_terms::Facts;
use prsmed::plan::rehearse::{self, Job, Measured, Meter, Phase};
use prsmed::plan::report::{Machine, Plan};
use prsmed::segment::rehearsal::Rehearsal;
use prsmed::segment::setup;
use prsmed::tensor::{Device, memory};
use serde_json::json;

/// Bytes that handles of cuBLAS, cuBLASLt and cuDNN may take from the allocator.
const LIBRARIES: u64 = 200 << 20;

/// Settings that are compared; those of the full model have its sizes and random weights.
const SETTINGS: [(&str, &str); 6] = [
    ("tiny", "train.precision=fp32"),
    ("tiny", "train.precision=bf16 train.accumulation=2 train.ema_decay=0.9"),
    ("full", "train.micro_batch=1 train.accumulation=2 train.checkpointing=full train.checkpoint_encoder=full"),
    ("full", "train.micro_batch=1 train.accumulation=1 train.checkpointing=none"),
    ("full", "train.micro_batch=4 train.accumulation=1 train.checkpointing=16"),
    ("full", "train.micro_batch=8 train.accumulation=1 train.checkpointing=none model.image_size=512"),
];

/// Generation that is compared, as many steps as a plan runs and from noise alone; `augment.` stands before every key.
const GENERATION: [&str; 4] = [
    "model=random:tiny steps=3 strength=1 batch=4",
    "model=random:tiny steps=3 strength=1 batch=2 precision=bf16 mode=mask_to_image decode=tiled tile_px=64",
    "model=random:sd15 steps=3 strength=1 batch=4 precision=bf16 image_size=512 decode=whole",
    "model=random:sdxl steps=3 strength=1 batch=4 precision=bf16 image_size=1024 decode=sliced",
];

/// Different texts of these.
const PROMPTS: usize = 2;

/// Each phase's tensors within 1 % of the plan, which then has no workspaces of libraries; the other columns are printed.
/// What libraries keep from the first job on is below [`LIBRARIES`].
#[test]
#[ignore = "needs CUDA"]
fn jobs_on_cuda_as_planned() {
    let _alone = ready();
    let (card, machine, tensors_alone) = first_card();
    let mut wrong = Vec::new();
    for (preset, sets) in SETTINGS {
        let config = config_of(preset, sets);
        let example = config.longest_example();
        let sizes = setup::planned_sizes(&config.model, config.lora, example.num_classes).unwrap();
        for job in [Job::Train, Job::Predict] {
            let rehearsed = config.rehearse(job, example, &machine, false).unwrap();
            let (plan, tensors) = (Plan::of(&rehearsed, &machine), Plan::of(&rehearsed, &tensors_alone));
            memory::release_cache(Device::Cuda(0)).unwrap();
            let build = || Rehearsal::new(&config.model, &sizes, &config.train, example, Device::Cuda(0));
            let mut meter = Measured::begin(Device::Cuda(0)).unwrap();
            rehearse::rehearse(job, &config.train, &build, &mut meter).unwrap();
            wrong.extend(different((&card, preset, sets), &plan, &tensors, meter.finish().unwrap()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The same for a batch of generated pictures, of small networks and of the published sizes with random weights.
#[test]
#[ignore = "needs CUDA"]
fn generation_on_cuda_as_planned() {
    let _alone = ready();
    let (card, machine, tensors_alone) = first_card();
    let mut wrong = Vec::new();
    for sets in GENERATION {
        let pairs = sets.split_whitespace().map(|set| (format!("augment.{set}"), "--set".to_owned())).collect();
        let sources = Sources { preset: Some("tiny".into()), sets: pairs, ..Sources::default() };
        let run: AugmentRun = sources.resolve_as().unwrap().config;
        let blueprint = run.planned_blueprint().unwrap();
        let planned = run.rehearse(&blueprint, (PROMPTS, None), &machine, false).unwrap();
        let (plan, tensors) = (Plan::of(&planned, &machine), Plan::of(&planned, &tensors_alone));
        memory::release_cache(Device::Cuda(0)).unwrap();
        let device = Device::Cuda(0);
        let generation =
            Generation { config: &run.augment, blueprint: &blueprint, prompts: PROMPTS, judging: None, device };
        let mut meter = Measured::begin(device).unwrap();
        generation.walk(&mut |phase| meter.begin(phase)).unwrap();
        let measured = meter.finish().unwrap();
        assert_eq!(measured.iter().map(|phase| phase.name).collect::<Vec<_>>(), PHASES);
        wrong.extend(different((&card, "generation", sets), &plan, &tensors, measured));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Name of the first card, plans for it with everything and with tensors alone.
fn first_card() -> (String, Machine, Machine) {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let card = detect::detect(visible.as_deref()).into_iter().next().expect("a card");
    let facts = Facts { other_processes: card.in_use(), ..Facts::default() };
    let tensors_alone = Machine::Cuda(card.budget(), Facts { blas_threads: 0, cudnn_workspace: 0, ..facts });
    (card.name.clone(), Machine::Cuda(card.budget(), facts), tensors_alone)
}

/// Prints every phase of a job, named by card, preset and settings; lines of those whose tensors are not as planned.
#[expect(clippy::print_stdout, reason = "scripts/gpu-check keeps it")]
fn different(name: (&str, &str, &str), plan: &Plan, tensors: &Plan, measured: Vec<Phase>) -> Vec<String> {
    let (card, preset, sets) = name;
    let mut wrong = Vec::new();
    for ((planned, tensors), measured) in plan.phases.iter().zip(&tensors.phases).zip(measured) {
        let line = json!({
            "kind": "phase", "card": card, "preset": preset, "sets": sets, "phase": measured.name,
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
