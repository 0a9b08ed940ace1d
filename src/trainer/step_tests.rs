use super::*;
use crate::fixture::plain;
use crate::precision::Precision;
use crate::{Batches, Loss, Session, Shard, run};
use prsmed_base::event::{Event, Observer};
use prsmed_base::{Error, Result};
use prsmed_tensor::weights::{Archive, Staged};
use prsmed_tensor::{Device, Tensor, no_grad, rng};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Two trained numbers, 1 and 2 at first. The gradient of a step is its batch.
struct Toy(Tensor);

impl Toy {
    fn new() -> Self {
        Self(Tensor::from_slice(&[1.0_f32, 2.0]).set_requires_grad(true))
    }

    fn values(&self) -> Vec<f32> {
        Vec::try_from(self.0.detach()).unwrap()
    }
}

impl Task for Toy {
    type Batch = [f32; 2];

    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter::new("toy/weight", self.0.shallow_clone())]
    }

    fn steps_per_epoch(&self) -> u64 {
        4
    }

    fn batches(&self, _epoch: u64, first: u64, _shard: Shard) -> Result<Batches<'_, [f32; 2]>> {
        let all: [[f32; 2]; 4] = [[0.5, -0.25], [1.0, 0.5], [-0.5, 2.0], [0.25, 1.0]];
        Ok(Box::new(all.into_iter().skip(usize::try_from(first).unwrap()).map(|batch| Ok(vec![batch]))))
    }

    fn batch_size(&self, _batch: &[f32; 2]) -> BatchSize {
        BatchSize { samples: 1.0, ..BatchSize::default() }
    }

    fn loss(&self, batch: &[f32; 2], _whole: BatchSize, _epoch: u64) -> Result<Loss> {
        Ok(Loss { total: (&self.0 * Tensor::from_slice(batch)).sum(Kind::Float), parts: Vec::new() })
    }

    fn save(&self, folder: &mut Staged) -> Result<()> {
        folder.write_bytes("weight.json", &serde_json::to_vec(&self.values()).unwrap())
    }

    fn load(&self, folder: &Path) -> Result<()> {
        let values: Vec<f32> = serde_json::from_slice(&std::fs::read(folder.join("weight.json")).unwrap()).unwrap();
        no_grad(|| self.0.shallow_clone().copy_(&Tensor::from_slice(&values)));
        Ok(())
    }
}

fn assert_close(found: &[f32], expected: &[f32]) {
    let is_close = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(found.len() == expected.len() && is_close, "{found:?} {expected:?}");
}

/// Weights and gradient norm after one step with the gradient `[0.3, 0.4]`, whose norm is 0.5.
fn after_a_step(precision: Precision, clip_norm: f64) -> (Vec<f32>, f64) {
    let task = Toy::new();
    // with a large epsilon the size of a gradient matters in AdamW's first step
    let config = TrainConfig { precision, clip_norm, epsilon: 1.0, ..plain() };
    let mut stepper = Stepper::new(&task, &config, false);
    let info = StepInfo { number: 1, epoch: 0, learning_rate: 0.1 };
    let result = stepper.step(&[[0.3, 0.4]], info, &mut |_, _| Ok(())).unwrap();
    assert_eq!(result.update, Update::Applied);
    (task.values(), result.grad_norm)
}

#[test]
fn gradients_are_unscaled_before_they_are_clipped() {
    let _lock = rng::TEST_LOCK.lock();
    let stepped = |a: f32, b: f32| [1.0 - 0.1 * a / (a + 1.0), 2.0 - 0.1 * b / (b + 1.0)];
    for precision in [Precision::Fp32, Precision::Fp16] {
        let (weights, norm) = after_a_step(precision, 1.0);
        assert!((norm - 0.5).abs() < 1e-6, "{precision:?}: {norm}");
        assert_close(&weights, &stepped(0.3, 0.4));
        let (weights, norm) = after_a_step(precision, 0.25);
        assert!((norm - 0.5).abs() < 1e-6, "{precision:?}: the norm before clipping, {norm}");
        assert_close(&weights, &stepped(0.15, 0.2));
    }
}

#[test]
fn the_average_adapts_faster_in_early_steps() {
    let weight = Tensor::from_slice(&[0.0_f32]);
    let params = [Parameter::new("toy/weight", weight.shallow_clone())];
    let mut ema = Ema::new(0.9, &params);
    let average = |ema: &Ema| Vec::<f32>::try_from(&ema.state(&params)[0].1).unwrap();
    let _ = weight.shallow_clone().fill_(1.0);
    // decay 2/11 in the first step and 3/12 in the second, 0.9 after many
    ema.update(1, &params);
    assert_close(&average(&ema), &[9.0 / 11.0]);
    ema.update(2, &params);
    assert_close(&average(&ema), &[0.25 * 9.0 / 11.0 + 0.75]);
    let _ = weight.shallow_clone().fill_(0.0);
    let before = average(&ema)[0];
    ema.update(1000, &params);
    assert_close(&average(&ema), &[0.9 * before]);
}

/// Asks the run to stop after a number of steps.
struct StopAfter {
    steps: u64,
    stop: AtomicBool,
}

impl Observer for StopAfter {
    fn on(&self, event: &Event) {
        if let Event::Step(report) = event
            && report.step == self.steps
        {
            self.stop.store(true, Ordering::SeqCst);
        }
    }
}

/// Trains in `folder` until the end, or until `stop_after` steps.
fn trained(folder: &Path, resume: bool, stop_after: u64) -> Vec<f32> {
    let _lock = rng::TEST_LOCK.lock();
    let task = Toy::new();
    let config = TrainConfig { ema_decay: 0.6, min_learning_rate: 1e-2, ..plain() };
    let observer = StopAfter { steps: stop_after, stop: AtomicBool::new(false) };
    let session = Session {
        config: &config,
        folder,
        settings: "",
        resume,
        profile: None,
        observer: &observer,
        interrupt: &observer.stop,
        has_room_for_graphs: false,
        ranks: Ranks::default(),
    };
    match run(&task, &session) {
        Ok(outcome) => assert_eq!((outcome.steps, stop_after), (4, 0)),
        Err(error) => assert!(matches!(error, Error::Interrupted) && stop_after > 0, "{error}"),
    }
    task.values()
}

#[test]
fn a_resumed_run_continues_its_moving_average() {
    let average = |folder: &Path| {
        let archive = Archive::open(&folder.join("last/trainer.safetensors")).unwrap();
        let tensor = archive.read("ema.toy/weight").unwrap();
        assert_eq!(tensor.device(), Device::Cpu);
        Vec::<f32>::try_from(&tensor).unwrap()
    };
    let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let weights = trained(whole.path(), false, 0);
    trained(parts.path(), false, 2);
    assert_eq!(trained(parts.path(), true, 0), weights);
    assert_eq!(average(parts.path()), average(whole.path()));
    assert_ne!(average(whole.path()), weights);
}
