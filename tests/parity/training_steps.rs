//! Parity of whole training steps with PyTorch: fp16 loss scaling with an overflow, clipping, AdamW, moving average. And
//! what 8-bit optimizer state costs.

use crate::adamw::config;
use crate::fixture::{Fixture, generator, leaf};
use prsmed::Result;
use prsmed::event::Silent;
use prsmed::tensor::weights::{Archive, Staged};
use prsmed::tensor::{Device, Kind, Reduction, Tensor, kind_bytes, rng};
use prsmed::trainer::precision::Precision;
use prsmed::trainer::{
    BatchSize, Batches, Loss, OptimizerKind, Parameter, Ranks, Session, Shard, StepInfo, Stepper, Task, TrainConfig,
    run,
};
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// A network of two layers.
struct Layers {
    first: Tensor,
    second: Tensor,
    batches: Vec<Batch>,
}

#[derive(Debug)]
struct Batch {
    xs: Tensor,
    ys: Tensor,
    /// Multiplies the loss.
    factor: f64,
}

impl Batch {
    fn copied(&self) -> Self {
        Self { xs: self.xs.copy(), ys: self.ys.copy(), factor: self.factor }
    }
}

impl Layers {
    /// The same task with its own weights.
    fn copied(&self) -> Self {
        let [first, second] = [&self.first, &self.second].map(|weight| leaf(&weight.detach(), Kind::Float));
        Self { first, second, batches: self.batches.iter().map(Batch::copied).collect() }
    }
}

impl Task for Layers {
    type Batch = Batch;

    fn parameters(&self) -> Vec<Parameter> {
        let named = [("first", &self.first), ("second", &self.second)];
        named.map(|(name, tensor)| Parameter::new(name, tensor.shallow_clone())).into()
    }

    fn steps_per_epoch(&self) -> u64 {
        self.batches.len() as u64
    }

    fn batches(&self, _epoch: u64, first: u64, _shard: Shard) -> Result<Batches<'_, Batch>> {
        let first = usize::try_from(first).expect("a few steps");
        Ok(Box::new(self.batches.iter().skip(first).map(move |batch| Ok(vec![batch.copied()]))))
    }

    fn batch_size(&self, _batch: &Batch) -> BatchSize {
        BatchSize { samples: 1.0, ..BatchSize::default() }
    }

    fn loss(&self, batch: &Batch, _whole: BatchSize, _epoch: u64) -> Result<Loss> {
        let output = batch.xs.matmul(&self.first.tr()).gelu("none").matmul(&self.second.tr());
        Ok(Loss { total: output.mse_loss(&batch.ys, Reduction::Mean) * batch.factor, parts: Vec::new() })
    }

    fn save(&self, _folder: &mut Staged) -> Result<()> {
        Ok(())
    }

    fn load(&self, _folder: &Path) -> Result<()> {
        Ok(())
    }
}

#[test]
fn scaled_steps_and_their_average_agree() {
    let _generator = generator();
    let fixture = Fixture::open("training_steps");
    let number = |name: &str| fixture.numbers(name)[0];
    let rate = number("lr");
    let config = TrainConfig {
        precision: Precision::Fp16,
        ema_decay: number("ema_decay"),
        min_learning_rate: rate,
        warmup_frac: 0.0,
        epochs: 1,
        accumulation: 1,
        ..config(&fixture, number("max_norm"))
    };
    let batch = |step: u32| Batch {
        xs: fixture.input(&format!("{step}.xs")),
        ys: fixture.input(&format!("{step}.ys")),
        factor: if f64::from(step) == number("overflow") { number("factor") } else { 1.0 },
    };
    let task = Layers {
        first: leaf(&fixture.input("first"), Kind::Float),
        second: leaf(&fixture.input("second"), Kind::Float),
        batches: (0..6).map(batch).collect(),
    };
    assert!((number("steps") - 6.0).abs() < 0.5);
    let folder = tempfile::tempdir().expect("a folder");
    let session = Session {
        config: &config,
        folder: folder.path(),
        settings: "",
        resume: false,
        profile: None,
        observer: &Silent,
        interrupt: &AtomicBool::new(false),
        has_room_for_graphs: false,
        ranks: Ranks::default(),
    };
    let outcome = run(&task, &session).expect("a training");
    assert_eq!((outcome.steps, outcome.skipped_steps), (6, 0), "an overflow only lowers the scale");
    let progress = std::fs::read(folder.path().join("last/trainer.json")).expect("the progress");
    let progress: Value = serde_json::from_slice(&progress).expect("JSON");
    assert_eq!(progress["scaler"]["scale"], 32768.0);
    let state = Archive::open(&folder.path().join("last/trainer.safetensors")).expect("the state");
    let (mut end, mut average) = (fixture.case("end"), fixture.case("average"));
    for (name, tensor) in [("first", &task.first), ("second", &task.second)] {
        end.check(name, &tensor.detach());
        average.check(name, &state.read(&format!("ema.{name}")).expect("an average"));
    }
    end.finish();
    average.finish();
}

/// A random task that a network of 8,192 and 4,096 weights learns in part.
fn random_task() -> Layers {
    rng::seed(5);
    let normal = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
    let batch = |_| {
        let xs = normal(&[32, 64]);
        let ys = (xs.narrow(1, 0, 32) * xs.narrow(1, 32, 32)).tanh();
        Batch { xs, ys, factor: 1.0 }
    };
    let batches = (0..300).map(batch).collect();
    let first = leaf(&(normal(&[128, 64]) / 8.0), Kind::Float);
    Layers { first, second: leaf(&(normal(&[32, 128]) / 11.0), Kind::Float), batches }
}

#[test]
fn eight_bit_state_has_two_bytes_a_weight_and_trains_alike() {
    let _generator = generator();
    let task = random_task();
    let train = |optimizer: OptimizerKind| {
        let task = task.copied();
        let config = TrainConfig { optimizer, precision: Precision::Fp32, accumulation: 1, ..TrainConfig::default() };
        let mut stepper = Stepper::new(&task, &config, false);
        let mut losses = Vec::new();
        for (number, batches) in (1..).zip(task.batches(0, 0, Shard::WHOLE).expect("batches")) {
            let info = StepInfo { number, epoch: 0, learning_rate: 1e-3 };
            let result = stepper.step(&batches.expect("a batch"), info, &mut |_, _| Ok(())).expect("a step");
            losses.push(result.losses.iter().find(|(name, _)| *name == "total").expect("the loss").1);
        }
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        (mean(&losses[..30]), mean(&losses[270..]))
    };
    let ((start, full), (_, eight)) = (train(OptimizerKind::AdamW), train(OptimizerKind::AdamW8bit));
    assert!(full < 0.9 * start, "the task is learned: {start} {full}");
    assert!((full - eight).abs() < 0.005 * full, "{full} and {eight} with 8 bits");

    let weight = Tensor::zeros([1 << 20], (Kind::Float, Device::Cpu));
    let moments = prsmed::tensor::adamw::Moments::zeros(&weight, true, false);
    let bytes: u64 = moments.named().iter().map(|(_, t)| t.numel() as u64 * kind_bytes(t.kind())).sum();
    assert!((bytes as f64) < 2.04 * weight.numel() as f64, "{bytes}");
    assert_eq!(prsmed::tensor::adamw::state_bytes(&weight, true).0, bytes);
}
