//! Training as a whole: accumulation, precisions, checkpointing, moving average, devices, Python interoperability.

#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "a test fails by panicking and says what it skips")]

use prsmed::config::{RunConfig, Sources};
use prsmed::data::manifest::Manifest;
use prsmed::data::phantom::{self, PhantomOptions};
use prsmed::event::{Event, Observer, Silent};
use prsmed::segment::setup::{self, Assembly, Build};
use prsmed::segment::task::SegmentTask;
use prsmed::tensor::weights::Archive;
use prsmed::tensor::{Device, Kind, Tensor};
use prsmed::trainer;
use prsmed::trainer::run::Session;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

#[path = "training/packing.rs"]
mod packing;

/// Keeps the loss of every step, and the first step whose gradients overflowed (fp16).
#[derive(Default)]
struct Losses {
    totals: Mutex<Vec<f64>>,
    first_skipped: Mutex<Option<usize>>,
}

impl Observer for Losses {
    fn on(&self, event: &Event) {
        let mut totals = self.totals.lock().unwrap();
        match event {
            Event::Step(report) => totals.push(report.losses.iter().find(|(name, _)| name == "total").unwrap().1),
            Event::Note(text) if text.contains("fp16 overflow") => {
                self.first_skipped.lock().unwrap().get_or_insert(totals.len());
            }
            _ => (),
        }
    }
}

struct Trained {
    folder: tempfile::TempDir,
    losses: Vec<f64>,
    first_skipped: Option<usize>,
}

impl Trained {
    fn tensors(&self, part: &str) -> Vec<(String, Tensor)> {
        let archive = Archive::open(&self.folder.path().join("last").join(part)).unwrap();
        archive.names().iter().map(|n| (n.clone(), archive.read(n).unwrap())).collect()
    }
}

fn data() -> (tempfile::TempDir, Manifest) {
    data_with(1)
}

/// So many questions about each lesion, and one or two lesions in a picture.
fn data_with(questions: usize) -> (tempfile::TempDir, Manifest) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("data");
    let options = PhantomOptions {
        count: 18,
        seed: 3,
        image_size_px: 64,
        rows_per_lesion: questions,
        ..PhantomOptions::default()
    };
    phantom::generate(&root, &options, &Silent).unwrap();
    let manifest = Manifest::open(&root, None).unwrap();
    (folder, manifest)
}

/// libtorch has one generator for all threads: trainings take turns.
static TURN: Mutex<()> = Mutex::new(());

/// The tiny preset at 64 pixels with `sets` over it.
fn config_of(sets: &[&str]) -> RunConfig {
    let common = ["model.image_size=64", "train.max_steps=4", "train.warmup_frac=0", "train.validate_every_epochs=0"];
    let sets = common.iter().chain(sets).map(|s| ((*s).to_owned(), "--set".to_owned())).collect();
    let sources = Sources { preset: Some("tiny".into()), sets, ..Sources::default() };
    sources.resolve().unwrap().config
}

fn assemble(config: &RunConfig, manifest: &Manifest, device: Device) -> Assembly {
    let texts: Vec<&str> = manifest.rows.iter().flat_map(|r| [r.question.as_str(), r.answer.as_str()]).collect();
    let locate = |spec: &str| Ok(PathBuf::from(spec));
    let kind = config.train.precision.kind();
    let build = Build { device, kind, seed: 5, locate: &locate, allow_partial: false };
    setup::create(&config.model, config.lora, &manifest.modalities, &texts, build).unwrap()
}

/// Four steps of a tiny model at 64 pixels with `sets` over the preset.
fn train_on(device: Device, sets: &[&str]) -> Trained {
    train_with(device, sets, data())
}

fn train_with(device: Device, sets: &[&str], (_data, manifest): (tempfile::TempDir, Manifest)) -> Trained {
    let _turn = TURN.lock();
    let config = config_of(sets);
    let assembly = assemble(&config, &manifest, device);
    let task =
        SegmentTask::new(assembly, &Arc::new(manifest), config.train.clone(), config.data, String::new()).unwrap();
    task.calibrate().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let losses = Losses::default();
    let session = Session {
        config: &config.train,
        folder: folder.path(),
        resume: false,
        profile: None,
        observer: &losses,
        interrupt: &AtomicBool::new(false),
    };
    trainer::run(&task, &session).unwrap();
    let Losses { totals, first_skipped } = losses;
    Trained { folder, losses: totals.into_inner().unwrap(), first_skipped: first_skipped.into_inner().unwrap() }
}

fn train(sets: &[&str]) -> Trained {
    train_on(Device::Cpu, sets)
}

/// Relative L2 distance over all tensors of a part.
fn distance(a: &Trained, b: &Trained, part: &str) -> f64 {
    let (mut difference, mut size) = (0.0, 0.0);
    let (a, b) = (a.tensors(part), b.tensors(part));
    assert_eq!(a.len(), b.len());
    for ((name, x), (_, y)) in a.iter().zip(&b) {
        let (x, y) = (x.to_kind(Kind::Double), y.to_kind(Kind::Double));
        assert_eq!(x.size(), y.size(), "{name}");
        difference += (&x - &y).square().sum(Kind::Double).double_value(&[]);
        size += x.square().sum(Kind::Double).double_value(&[]);
    }
    (difference / size).sqrt()
}

const PARTS: [&str; 4] = [
    "lora_adapter/adapter_model.safetensors",
    "image_encoder.safetensors",
    "mask_decoder.safetensors",
    "cls.safetensors",
];

#[test]
fn accumulating_four_equals_a_batch_of_four() {
    let split = train(&["train.micro_batch=1", "train.accumulation=4"]);
    let whole = train(&["train.micro_batch=4", "train.accumulation=1"]);
    for (a, b) in split.losses.iter().zip(&whole.losses) {
        assert!((a - b).abs() <= 1e-6 * b.abs(), "losses {:?} and {:?}", split.losses, whole.losses);
    }
    for part in PARTS {
        let error = distance(&split, &whole, part);
        eprintln!("{part}: {error:.2e}");
        assert!(error <= 1e-6, "{part} differs by {error:.2e} after {} steps", whole.losses.len());
    }
}

#[test]
fn questions_of_a_picture_train_together_as_they_do_alone() {
    // the whole data set is one step, so that both runs see the same rows in it
    let whole = ["train.micro_batch=4", "train.accumulation=50", "train.epochs=2", "train.max_steps=2"];
    let run = |questions: &str| train_with(Device::Cpu, &[whole.as_slice(), &[questions]].concat(), data_with(2));
    let (single, packed) = (run("data.questions_per_picture=1"), run("data.questions_per_picture=3"));
    assert_eq!(packed.losses.len(), 2);
    for (a, b) in packed.losses.iter().zip(&single.losses) {
        assert!((a - b).abs() <= 1e-5 * b.abs(), "losses {:?} and {:?}", packed.losses, single.losses);
    }
    for part in PARTS {
        let error = distance(&packed, &single, part);
        eprintln!("{part}: {error:.2e}");
        assert!(error <= 1e-5, "{part} differs by {error:.2e}");
        assert!(error > 0.0, "nothing was packed");
    }
}

#[test]
fn checkpointing_changes_nothing_but_memory() {
    let plain = train(&["lora.dropout=0.1", "model.decoder_dropout=0.1"]);
    let checkpointed = train(&[
        "lora.dropout=0.1",
        "model.decoder_dropout=0.1",
        "train.checkpointing=full",
        "train.checkpoint_encoder=full",
    ]);
    for part in PARTS {
        let error = distance(&plain, &checkpointed, part);
        assert!(error <= 1e-5, "{part} differs by {error:.2e}");
    }
}

#[test]
fn half_precisions_train_like_fp32() {
    let full = train(&[]);
    for precision in ["bf16", "fp16"] {
        let half = train(&[&format!("train.precision={precision}")]);
        // fp16 skips steps while its scaler looks for a scale that does not overflow; weights differ from then on
        let comparable = half.first_skipped.map_or(full.losses.len(), |step| step + 1);
        assert!(precision == "fp16" || half.first_skipped.is_none());
        for (a, b) in half.losses.iter().zip(&full.losses).take(comparable) {
            assert!((a - b).abs() <= 0.05 * b, "{precision}: losses {:?} and {:?}", half.losses, full.losses);
        }
        assert!(half.losses.last() < half.losses.first(), "{precision}: losses {:?}", half.losses);
        let masters = half.tensors("mask_decoder.safetensors");
        assert!(masters.iter().all(|(_, t)| t.kind() == Kind::Float), "trained weights are stored in fp32");
    }
}

#[test]
fn a_moving_average_is_kept_and_differs_from_the_weights() {
    let run = train(&["train.ema_decay=0.9"]);
    let weights = run.tensors("cls.safetensors");
    let state = run.tensors("trainer.safetensors");
    let (_, average) = state.iter().find(|(name, _)| name == "ema.cls/2.weight").unwrap();
    let (_, weight) = weights.iter().find(|(name, _)| name == "2.weight").unwrap();
    let gap = (average - weight).norm().double_value(&[]);
    assert!(gap > 0.0 && gap < weight.norm().double_value(&[]), "gap {gap}");
}

#[test]
fn a_run_loads_in_python() {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python");
    let ready = Command::new(&python).args(["-c", "import peft, transformers"]).status();
    if !ready.is_ok_and(|status| status.success()) {
        eprintln!("skipped: {} has no peft (run scripts/setup --checks)", python.display());
        return;
    }
    let run = train(&[]);
    let output = Command::new(&python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/interop_check.py"))
        .arg(run.folder.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

#[test]
#[ignore = "needs CUDA"]
fn a_gpu_trains_like_the_cpu() {
    let card = prsmed::tensor::default_device();
    assert_ne!(card, Device::Cpu, "libtorch sees no CUDA card");
    let (cpu, gpu) = (train(&[]), train_on(card, &[]));
    for (a, b) in gpu.losses.iter().zip(&cpu.losses) {
        assert!((a - b).abs() <= 1e-3 * b, "losses {:?} and {:?}", gpu.losses, cpu.losses);
    }
}
