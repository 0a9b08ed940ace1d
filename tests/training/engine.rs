//! Optimizers, steps inside the backward pass, and going on after memory ran out.

use super::config_of as config;
use super::{Losses, PARTS, TURN, Trained, assemble, build, data, distance, train};
use prsmed::config::RunConfig;
use prsmed::data::manifest::Manifest;
use prsmed::segment::task::SegmentTask;
use prsmed::tensor::weights::{Archive, verify_folder};
use prsmed::tensor::{Device, Kind, Tensor, ledger, no_grad};
use prsmed::trainer::run::Session;
use prsmed::trainer::{self, Ranks, Task, TrainingOutcome};
use prsmed::units::Bytes;
use std::path::Path;
use std::sync::Arc;

const TRAINER: &str = "trainer.safetensors";

/// A new tiny model and its data.
fn task(device: Device, config: &RunConfig, manifest: Manifest) -> SegmentTask {
    let loaded = assemble(config, &manifest, build(config, device, None));
    let (train, data) = (config.train.clone(), config.data.clone());
    let task = SegmentTask::new(loaded, &Arc::new(manifest), train, data, String::new(), None).unwrap();
    task.calibrate().unwrap();
    task
}

/// Trains in `folder`, or continues there.
fn session(
    task: &SegmentTask,
    config: &RunConfig,
    folder: &Path,
    resume: bool,
    losses: &Losses,
) -> prsmed::Result<TrainingOutcome> {
    let session = Session {
        config: &config.train,
        folder,
        settings: "",
        resume,
        profile: None,
        observer: losses,
        interrupt: &losses.interrupt,
        has_room_for_graphs: false,
        ranks: Ranks::default(),
    };
    trainer::run(task, &session)
}

/// Names and tensors of a checkpoint's file.
fn tensors(last: &Path, part: &str) -> Vec<(String, Tensor)> {
    let archive = Archive::open(&last.join(part)).unwrap();
    archive.names().iter().map(|name| (name.clone(), archive.read(name).unwrap())).collect()
}

fn assert_same(a: &Path, b: &Path) {
    for part in PARTS.into_iter().chain([TRAINER]) {
        let (a, b) = (tensors(a, part), tensors(b, part));
        assert_eq!(a.len(), b.len(), "{part}");
        for ((name, a), (other, b)) in a.iter().zip(&b) {
            assert!(name == other && a.equal(b), "{part}: {name} differs");
        }
    }
}

fn last(run: &Trained) -> std::path::PathBuf {
    run.folder.path().join("last")
}

#[test]
fn stepping_in_the_backward_pass_gives_the_same_weights() {
    let _turn = TURN.lock();
    let common = ["train.micro_batch=2", "train.accumulation=1", "train.clip_norm=0", "train.checkpointing=full"];
    for optimizer in ["train.optimizer=adamw", "train.optimizer=adamw8bit"] {
        let ordinary = train(&[&common[..], &[optimizer]].concat());
        let stepped = train(&[&common[..], &[optimizer, "train.step_in_backward=true"]].concat());
        assert_eq!(ordinary.losses, stepped.losses);
        assert_same(&last(&ordinary), &last(&stepped));
    }
}

#[test]
fn moments_in_8_bits_train_like_those_in_fp32() {
    let _turn = TURN.lock();
    let sets = ["train.max_steps=12", "train.learning_rate=1e-3"];
    let full = train(&sets);
    let eight = train(&[&sets[..], &["train.optimizer=adamw8bit", "train.offload_optimizer=true"]].concat());
    let start = full.losses[0];
    let gained = start - full.losses.last().unwrap();
    let apart = (full.losses.last().unwrap() - eight.losses.last().unwrap()).abs();
    assert!(gained > 0.1 * start && apart < 0.1 * gained, "fp32 {:?}, 8 bits {:?}", full.losses, eight.losses);
    let state = eight.tensors(TRAINER);
    let codes = state.iter().filter(|(name, _)| name.starts_with("first_codes."));
    assert!(codes.clone().count() > 20 && codes.clone().all(|(_, t)| t.kind() == Kind::Uint8 && t.numel() >= 4096));
    let bytes = |state: &[(String, Tensor)]| state.iter().map(|(_, t)| t.numel() * t.kind().elt_size_in_bytes()).sum();
    let (all, of_full): (usize, usize) = (bytes(&state), bytes(&full.tensors(TRAINER)));
    assert!(all * 3 < of_full, "{all} bytes against {of_full}");
    let distance = PARTS.map(|part| distance(&full, &eight, part));
    assert!(distance.iter().all(|d| *d > 0.0 && *d < 0.05), "{distance:?}");
}

/// Runs two steps with the settings `first` and continues to four with `then`.
fn resumed(first: &[&str], then: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (sets, steps, resume) in [(first, "train.max_steps=2", false), (then, "train.max_steps=4", true)] {
        let (_data, manifest) = data();
        let config = config(&[sets, &[steps]].concat());
        let task = task(Device::Cpu, &config, manifest);
        session(&task, &config, folder.path(), resume, &Losses::default()).unwrap();
    }
    folder
}

#[test]
fn moments_in_8_bits_resume_to_the_byte_and_kinds_convert() {
    let _turn = TURN.lock();
    let constant = ["train.learning_rate=1e-3", "train.min_learning_rate=1e-3"];
    let [full, eight] = ["adamw", "adamw8bit"].map(|kind| format!("train.optimizer={kind}"));
    let (full, eight) = ([&constant[..], &[&full]].concat(), [&constant[..], &[&eight]].concat());
    let whole = train(&eight);
    assert_same(&last(&whole), &resumed(&eight, &eight).path().join("last"));
    let of_full = train(&full);
    for (first, then, like) in [(&full, &eight, &whole), (&eight, &full, &of_full)] {
        let folder = resumed(first, then);
        let converted = tensors(&folder.path().join("last"), TRAINER);
        let expected = tensors(&last(like), TRAINER);
        let shape = |all: &[(String, Tensor)]| -> Vec<_> {
            all.iter().map(|(name, tensor)| (name.clone(), tensor.size(), tensor.kind())).collect()
        };
        assert_eq!(shape(&converted), shape(&expected));
        let moment = |all: &[(String, Tensor)]| -> f64 {
            let scales = all.iter().filter(|(name, _)| name.starts_with("second"));
            scales.map(|(_, t)| t.to_kind(Kind::Double).abs().max().double_value(&[])).sum()
        };
        assert!(moment(&converted) > 0.0);
    }
}

/// The most that lived during `work`, above what lived before.
fn peak<T>(work: impl FnOnce() -> T) -> (T, u64) {
    ledger::install();
    let before = ledger::usage().allocated.0;
    ledger::begin_window();
    let result = work();
    (result, ledger::window().window_peak.0 - before)
}

/// Runs `work` while no more than `bytes` above what lives now may live.
fn limited<T>(bytes: u64, work: impl FnOnce() -> T) -> T {
    ledger::set_limit(Some(Bytes(ledger::usage().allocated.0 + bytes)));
    let result = work();
    ledger::set_limit(None);
    result
}

#[test]
fn a_step_without_memory_is_repeated_with_smaller_micro_batches() {
    let _turn = TURN.lock();
    ledger::install();
    let sets = ["lora.dropout=0.1", "model.decoder_dropout=0.1", "train.max_steps=3"];
    let run = |micro: &str, limit: u64| {
        let (_data, manifest) = data();
        let config = config(&[&sets[..], &micro.split(' ').collect::<Vec<_>>()].concat());
        let task = task(Device::Cpu, &config, manifest);
        let (folder, losses) = (tempfile::tempdir().unwrap(), Losses::default());
        let (outcome, peak) =
            peak(|| limited(limit, || session(&task, &config, folder.path(), false, &losses).unwrap()));
        (folder, outcome, losses.notes.into_inner().unwrap(), peak)
    };
    let any = 1 << 40;
    let (small, _, none, needs4) = run("train.micro_batch=4 train.accumulation=2", any);
    let (_, outcome, _, needs8) = run("train.micro_batch=8 train.accumulation=1", any);
    assert!(none.is_empty() && outcome.reduced_micro_batch.is_none() && needs8 > needs4 + (1 << 20));
    // so little that the first step already, which makes the moments, does not fit
    let limit = needs4 + (needs8 - needs4) / 8;
    let (halved, outcome, notes, used) = run("train.micro_batch=8 train.accumulation=1", limit);
    assert_eq!((outcome.steps, outcome.reduced_micro_batch), (3, Some(4)));
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(notes[0].contains("with micro-batches of 4") && notes[0].contains("train.accumulation=2"), "{notes:?}");
    assert!(used <= limit, "{used} {needs4} {needs8}");
    assert_same(&small.path().join("last"), &halved.path().join("last"));
}

#[test]
fn validation_without_memory_goes_on_in_smaller_batches() {
    let _turn = TURN.lock();
    ledger::install();
    let validated = |micro_batch: &str, limit: u64| {
        let (_data, manifest) = data();
        let manifest = everything_to_validate_on(manifest);
        let task = task(Device::Cpu, &config(&[micro_batch]), manifest);
        let losses = Losses::default();
        let (found, peak) =
            peak(|| limited(limit, || no_grad(|| task.validate(&losses, Ranks::default())).unwrap().unwrap()));
        (found, peak, losses.notes.into_inner().unwrap())
    };
    let any = 1 << 40;
    let ((whole, needs8, _), (_, needs4, _)) =
        (validated("train.micro_batch=8", any), validated("train.micro_batch=4", any));
    let (halved, _, notes) = validated("train.micro_batch=8", u64::midpoint(needs4, needs8));
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(notes[0].ends_with("continues with batches of 4"), "{notes:?}");
    for ((name, value), (_, other)) in whole.values.iter().zip(&halved.values) {
        assert!((value - other).abs() <= 1e-6 * value.abs().max(1e-3), "{name}: {value} and {other}");
    }
}

/// Training rows count for validation too.
fn everything_to_validate_on(mut manifest: Manifest) -> Manifest {
    use prsmed::data::manifest::Split;
    let train: Vec<_> = manifest.rows.iter().filter(|row| row.split == Split::Train).cloned().collect();
    manifest.rows.extend(train.into_iter().map(|mut row| {
        row.split = Split::Val;
        row
    }));
    manifest
}

#[test]
fn a_limit_that_no_sample_fits_ends_the_run_and_keeps_what_was_saved() {
    let _turn = TURN.lock();
    ledger::install();
    let folder = tempfile::tempdir().unwrap();
    let run = |sets: &[&str], resume: bool, limit: u64| {
        let (_data, manifest) = data();
        let config = config(&[&["train.micro_batch=4"], sets].concat());
        let task = task(Device::Cpu, &config, manifest);
        let losses = Losses::default();
        let (outcome, peak) = peak(|| limited(limit, || session(&task, &config, folder.path(), resume, &losses)));
        (outcome, peak, losses.notes.into_inner().unwrap())
    };
    let any = 1 << 40;
    run(&["train.max_steps=2"], false, any).0.unwrap();
    let before = tensors(&folder.path().join("last"), TRAINER);
    // moments are twice the weights: room for them, not for a step
    let moments: usize = before.iter().map(|(_, tensor)| tensor.numel() * 4).sum();
    let (outcome, _, notes) = run(&["train.max_steps=4"], true, moments as u64 + (6 << 20));
    let error = outcome.unwrap_err();
    assert!(matches!(error, prsmed::Error::OutOfMemory { .. }), "{error}");
    assert!(error.hint().contains("micro_batch"));
    assert_eq!(notes.iter().filter(|note| note.contains("out of memory")).count(), 2, "4 to 2 to 1: {notes:?}");
    verify_folder(&folder.path().join("last")).unwrap();
    let after = tensors(&folder.path().join("last"), TRAINER);
    assert!(before.iter().zip(&after).all(|(a, b)| a.0 == b.0 && a.1.equal(&b.1)));
    assert_eq!(run(&["train.max_steps=4"], true, any).0.unwrap().steps, 4);
}

/// Words that follow masks change no weight of the other parts, also where gradients are clipped.
#[test]
fn words_that_follow_masks_leave_the_other_parts_as_they_are() {
    let _turn = TURN.lock();
    let common = ["train.clip_norm=0.1", "lora.dropout=0.1", "model.decoder_dropout=0.1"];
    let with = |reads: &'static str| train(&[&common[..], &[reads]].concat());
    let (on, off) = (with("model.answer_reads_mask=true"), with("model.answer_reads_mask=false"));
    for part in PARTS {
        assert_eq!(distance(&on, &off, part), 0.0, "{part}");
    }
    let reader = on.tensors("mask_reader.safetensors");
    let (_, weight) = reader.iter().find(|(name, _)| name == "last.weight").unwrap();
    assert!(weight.abs().max().double_value(&[]) > 0.0, "the reader was not trained");
    assert!(!last(&off).join("mask_reader.safetensors").exists());
}
