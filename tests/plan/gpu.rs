//! Whole jobs on a card, against their plans: what `scripts/gpu-check` prints for benches/RESULTS.md.

use super::{config_of, ready};
use prsmed::plan::detect;
use prsmed::plan::device_terms::Facts;
use prsmed::plan::rehearse::{self, Job, Measured};
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
    ("full", "train.micro_batch=1 train.accumulation=2 train.checkpointing=full"),
    ("full", "train.micro_batch=1 train.accumulation=1 train.checkpointing=none"),
    ("full", "train.micro_batch=4 train.accumulation=1 train.checkpointing=16"),
    ("full", "train.micro_batch=8 train.accumulation=1 train.checkpointing=none model.image_size=512"),
];

/// Each phase's tensors within 1 % of the plan, which then has no workspaces of libraries; the other columns are printed.
/// What libraries keep from the first job on is below [`LIBRARIES`].
#[test]
#[ignore = "needs CUDA"]
#[expect(clippy::print_stdout, reason = "scripts/gpu-check keeps it")]
fn jobs_on_cuda_as_planned() {
    let _alone = ready();
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let card = detect::detect(visible.as_deref()).into_iter().next().expect("a card");
    let facts = Facts { other_processes: card.in_use(), ..Facts::default() };
    let machine = Machine::Cuda(card.budget(), facts);
    let tensors_alone = Machine::Cuda(card.budget(), Facts { blas_threads: 0, cudnn_workspace: 0, ..facts });
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
            let phases = plan.phases.iter().zip(&tensors.phases).zip(meter.finish().unwrap());
            for ((planned, tensors), measured) in phases {
                let line = json!({
                    "kind": "phase", "card": card.name, "preset": preset, "sets": sets, "phase": measured.name,
                    "planned": [planned.memory.allocated_peak, planned.memory.reserved_peak, planned.device_peak],
                    "measured": [measured.allocated_peak, measured.reserved_peak, measured.device_used.unwrap_or_default()],
                });
                println!("{line}");
                let (tensors, measured) = (tensors.memory.allocated_peak.0, measured.allocated_peak.0);
                if tensors.abs_diff(measured) > tensors / 100 + LIBRARIES {
                    wrong.push(line.to_string());
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
