//! Whole jobs on a card, against their plans: what `scripts/gpu-check` prints for benches/RESULTS.md.

use super::{config_of, ready};
use prsmed::plan::detect;
use prsmed::plan::device_terms::Facts;
use prsmed::plan::rehearse::{self, Job, Measured};
use prsmed::plan::report::{Machine, Plan};
use prsmed::segment::rehearsal::Rehearsal;
use prsmed::segment::setup;
use prsmed::tensor::Device;
use prsmed::tensor::meta::Target;
use serde_json::json;

/// Settings that are compared; those of the full model have its sizes and random weights.
const SETTINGS: [(&str, &str); 6] = [
    ("tiny", "train.precision=fp32"),
    ("tiny", "train.precision=bf16 train.accumulation=2 train.ema_decay=0.9"),
    ("full", "train.micro_batch=1 train.accumulation=2 train.checkpointing=full"),
    ("full", "train.micro_batch=1 train.accumulation=1 train.checkpointing=none"),
    ("full", "train.micro_batch=4 train.accumulation=1 train.checkpointing=16"),
    ("full", "train.micro_batch=8 train.accumulation=1 train.checkpointing=none model.image_size=512"),
];

/// Each phase's tensors within 1 % of the plan; the other columns are printed.
#[test]
#[ignore = "needs CUDA"]
#[expect(clippy::print_stdout, reason = "scripts/gpu-check keeps it")]
fn jobs_on_cuda_as_planned() {
    let _alone = ready();
    let card = detect::detect(None).into_iter().next().expect("a card");
    let machine = Machine::Cuda(card.budget(), Facts { other_processes: card.in_use(), ..Facts::default() });
    let mut wrong = Vec::new();
    for (preset, sets) in SETTINGS {
        let config = config_of(preset, sets);
        let example = config.longest_example();
        let sizes = setup::planned_sizes(&config.model, config.lora, example.num_classes).unwrap();
        for job in [Job::Train, Job::Predict] {
            let plan = Plan::of(&config.rehearse(job, example, Target::Cuda, false).unwrap(), &machine);
            let build = || Rehearsal::new(&config.model, &sizes, &config.train, example, Device::Cuda(0));
            let mut meter = Measured::begin(Device::Cuda(0)).unwrap();
            rehearse::rehearse(job, &config.train, &build, &mut meter).unwrap();
            for (planned, measured) in plan.phases.iter().zip(meter.finish().unwrap()) {
                let line = json!({
                    "kind": "phase", "card": card.name, "preset": preset, "sets": sets, "phase": measured.name,
                    "planned": [planned.memory.allocated_peak, planned.memory.reserved_peak, planned.device_peak],
                    "measured": [measured.allocated_peak, measured.reserved_peak, measured.device_used.unwrap_or_default()],
                });
                println!("{line}");
                let (planned, measured) = (planned.memory.allocated_peak.0, measured.allocated_peak.0);
                if planned.abs_diff(measured) > planned / 100 {
                    wrong.push(line.to_string());
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
