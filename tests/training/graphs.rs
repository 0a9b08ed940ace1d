//! Recorded passes, and kernels of our own on a card, in whole trainings.

use super::{PARTS, Trained, distance, train_on};
use prsmed::tensor::Device;

fn of_graphs(run: &Trained) -> Vec<&String> {
    run.notes.iter().filter(|note| note.starts_with("graphs: ")).collect()
}

/// Texts are padded to the lengths of a bucket, which changes the order of sums, and the numbers that dropout draws.
fn recorded_passes_train_like_others(device: Device, sets: &[&str]) {
    let with = |more: &[&'static str]| {
        let common = ["train.micro_batch=1", "train.accumulation=4", "lora.dropout=0", "model.decoder_dropout=0"];
        train_on(device, &[common.as_slice(), sets, more].concat())
    };
    let (plain, recorded) = (with(&[]), with(&["train.graph=on"]));
    assert!(of_graphs(&plain).is_empty());
    let notes = of_graphs(&recorded);
    assert!(notes.iter().any(|note| note.contains("sequences of")), "{notes:?}");
    assert!(!notes.iter().any(|note| note.contains("off")), "{notes:?}");
    for (a, b) in recorded.losses.iter().zip(&plain.losses) {
        assert!((a - b).abs() <= 1e-4 * b.abs(), "losses {:?} and {:?}", recorded.losses, plain.losses);
    }
    for part in PARTS {
        let error = distance(&plain, &recorded, part);
        eprintln!("{part}: {error:.2e}");
        assert!(error <= 1e-4, "{part} differs by {error:.2e}");
    }
}

#[test]
fn recorded_passes_train_alike() {
    recorded_passes_train_like_others(Device::Cpu, &[]);
}

#[test]
#[ignore = "needs CUDA"]
fn recorded_passes_train_alike_on_a_card() {
    let card = prsmed::tensor::default_device();
    assert_ne!(card, Device::Cpu, "libtorch sees no CUDA card");
    recorded_passes_train_like_others(card, &[]);
    recorded_passes_train_like_others(card, &["train.checkpointing=full", "train.fused_kernels=on"]);
    let dropped =
        train_on(card, &["train.micro_batch=1", "train.accumulation=4", "train.graph=on", "train.fused_kernels=on"]);
    assert!(!of_graphs(&dropped).iter().any(|note| note.contains("off")), "{:?}", dropped.notes);
}

#[test]
#[ignore = "needs CUDA"]
fn kernels_of_our_own_train_alike_on_a_card() {
    let card = prsmed::tensor::default_device();
    assert_ne!(card, Device::Cpu, "libtorch sees no CUDA card");
    let common = ["lora.dropout=0", "model.decoder_dropout=0"];
    let plain = train_on(card, &common);
    for mode in ["train.fused_kernels=on", "train.fused_kernels=auto"] {
        let fused = train_on(card, &[common.as_slice(), &[mode]].concat());
        for (a, b) in fused.losses.iter().zip(&plain.losses) {
            assert!((a - b).abs() <= 1e-4 * b.abs(), "{mode}: losses {:?} and {:?}", fused.losses, plain.losses);
        }
    }
}
