//! CUDA graphs, and custom CUDA kernels, in whole trainings.

use super::{PARTS, TURN, Trained, config_of, distance, on_gpu, train_on};
use prsmed::segment::dry_run::SegmentDryRun;
use prsmed::tensor::Device;
use prsmed::trainer::{DryRunTask, Loss, Ranks, Task};

fn of_graphs(run: &Trained) -> Vec<&String> {
    run.notes.iter().filter(|note| note.starts_with("graphs: ")).collect()
}

/// Texts are padded to the lengths of a bucket, which changes the order of sums, and the numbers that dropout draws.
fn captured_passes_train_like_eager_ones(device: Device, sets: &[&str]) {
    let with = |more: &[&'static str]| {
        let common = ["train.micro_batch=1", "train.accumulation=4", "lora.dropout=0", "model.decoder_dropout=0"];
        train_on(device, &[common.as_slice(), sets, more].concat())
    };
    let (eager, captured) = (with(&[]), with(&["train.graph=on"]));
    assert!(of_graphs(&eager).is_empty());
    let notes = of_graphs(&captured);
    assert!(notes.iter().any(|note| note.contains("sequences of")), "{notes:?}");
    assert!(!notes.iter().any(|note| note.contains("off")), "{notes:?}");
    for (a, b) in captured.losses.iter().zip(&eager.losses) {
        assert!((a - b).abs() <= 1e-4 * b.abs(), "losses {:?} and {:?}", captured.losses, eager.losses);
    }
    for part in PARTS {
        let error = distance(&eager, &captured, part);
        eprintln!("{part}: {error:.2e}");
        assert!(error <= 1e-4, "{part} differs by {error:.2e}");
    }
}

/// `prsmed bench --part llm` with CUDA graphs must time the language model, not the whole model.
#[test]
fn a_captured_pass_of_the_language_model_alone_has_its_loss_only() {
    let _turn = TURN.lock();
    let config = config_of(&["lora.dropout=0", "data.questions_per_image=3"]);
    let (sizes, example) = (config.planned_sizes().unwrap(), config.longest_example());
    let task =
        SegmentDryRun::random(&config.model, &sizes, &config.train, example, (Device::Cpu, Ranks::default())).unwrap();
    let task = task.language_alone();
    let batch = task.example(true);
    let whole = task.batch_size(&batch);
    let eager = task.loss(&batch, whole, 0).unwrap();
    let captured = task.capturable(&batch, whole, 0).unwrap().unwrap();
    let captured = (captured.loss)().unwrap();
    let names = |loss: &Loss| loss.parts.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    assert_eq!((names(&eager), names(&captured)), (vec!["text"], vec!["text"]));
    let [eager, captured] = [eager, captured].map(|loss| loss.total.double_value(&[]));
    assert!((captured / eager - 1.0).abs() < 1e-5, "{captured} {eager}");
}

#[test]
fn captured_passes_train_alike() {
    let _turn = TURN.lock();
    captured_passes_train_like_eager_ones(Device::Cpu, &[]);
}

#[test]
#[ignore = "needs CUDA"]
fn captured_passes_train_alike_on_a_gpu() {
    let _turn = TURN.lock();
    let gpu = prsmed::tensor::default_device();
    assert_ne!(gpu, Device::Cpu, "libtorch sees no CUDA GPU");
    on_gpu();
    captured_passes_train_like_eager_ones(gpu, &[]);
    captured_passes_train_like_eager_ones(gpu, &["train.checkpointing=full", "train.fused_kernels=on"]);
    let dropped =
        train_on(gpu, &["train.micro_batch=1", "train.accumulation=4", "train.graph=on", "train.fused_kernels=on"]);
    assert!(!of_graphs(&dropped).iter().any(|note| note.contains("off")), "{:?}", dropped.notes);
}

#[test]
#[ignore = "needs CUDA"]
fn custom_kernels_train_alike_on_a_gpu() {
    let _turn = TURN.lock();
    let gpu = prsmed::tensor::default_device();
    assert_ne!(gpu, Device::Cpu, "libtorch sees no CUDA GPU");
    on_gpu();
    let common = ["lora.dropout=0", "model.decoder_dropout=0"];
    let eager = train_on(gpu, &common);
    for mode in ["train.fused_kernels=on", "train.fused_kernels=auto"] {
        let fused = train_on(gpu, &[common.as_slice(), &[mode]].concat());
        for (a, b) in fused.losses.iter().zip(&eager.losses) {
            assert!((a - b).abs() <= 1e-4 * b.abs(), "{mode}: losses {:?} and {:?}", fused.losses, eager.losses);
        }
    }
}
