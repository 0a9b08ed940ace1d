//! A task of your own: the engine trains it, and the planner predicts its memory.
//!
//! The task is a small convolutional network that estimates the mean brightness of noise images. It has nothing to do
//! with PRS-Med.
//!
//! ```text
//! cargo run --example custom_task
//! ```
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use prsmed::event::Silent;
use prsmed::plan::dry_run::{self, Job, Measured};
use prsmed::prelude::*;
use prsmed::tensor::meta::Target;
use prsmed::tensor::weights::{Archive, Staged};
use prsmed::tensor::{Kind, META, Tensor, no_grad, rng};
use prsmed::trainer::precision::Precision;
use prsmed::trainer::{self, BatchSize, Batches, Loss, Outcome, Parameter, Ranks, Session, Shard};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

const STEPS_PER_EPOCH: u64 = 4;
const SIDE: i64 = 16;
const CHANNELS: i64 = 8;

/// Images `[b, 1, s, s]` and their targets `[b]`.
type Batch = (Tensor, Tensor);

struct Brightness {
    weights: [(&'static str, Tensor); 2],
    micro_batch: i64,
    accumulation: usize,
}

impl Brightness {
    fn new(device: Device, config: &TrainConfig) -> Self {
        rng::seed(config.seed);
        let weight = |shape: &[i64]| (Tensor::randn(shape, (Kind::Float, device)) * 0.1).set_requires_grad(true);
        let weights = [("conv", weight(&[CHANNELS, 1, 3, 3])), ("head", weight(&[CHANNELS, 1]))];
        let micro_batch = i64::try_from(config.micro_batch).unwrap_or(1);
        Self { weights, micro_batch, accumulation: config.accumulation }
    }

    fn images(&self) -> Tensor {
        let device = self.weights[0].1.device();
        Tensor::rand([self.micro_batch, 1, SIDE, SIDE], (Kind::Float, device))
    }
}

impl Task for Brightness {
    type Batch = Batch;

    fn parameters(&self) -> Vec<Parameter> {
        let parameters = self.weights.iter();
        parameters
            .map(|(name, w)| Parameter { name: format!("brightness/{name}"), tensor: w.shallow_clone() })
            .collect()
    }

    fn steps_per_epoch(&self) -> u64 {
        STEPS_PER_EPOCH
    }

    fn batches(&self, epoch: u64, first: u64, shard: Shard) -> prsmed::Result<Batches<'_, Batch>> {
        // a batch depends only on the number of its step: a resumed training equals an uninterrupted one
        Ok(Box::new((first..STEPS_PER_EPOCH).map(move |step| {
            rng::seed(epoch * STEPS_PER_EPOCH + step);
            // every process draws all micro-batches and takes its own
            let all: Vec<Batch> = (0..self.accumulation).map(|_| self.example(true)).collect();
            let own = shard.range(all.len());
            Ok(all.into_iter().skip(own.start).take(own.len()).collect())
        })))
    }

    fn batch_size(&self, (images, _): &Batch) -> BatchSize {
        BatchSize { samples: f64::from(u32::try_from(images.size()[0]).unwrap_or(0)), ..BatchSize::default() }
    }

    fn loss(&self, (images, targets): &Batch, effective_batch: BatchSize, _epoch: u64) -> prsmed::Result<Loss> {
        let [(_, conv), (_, head)] = &self.weights;
        let features = images.conv2d(conv, None::<Tensor>, 1, 1, 1, 1).relu();
        let estimates = features.mean_dim([2_i64, 3].as_slice(), false, Kind::Float).matmul(head).squeeze_dim(1);
        let total = (estimates - targets).square().sum(Kind::Float) / effective_batch.samples;
        Ok(Loss { total, parts: Vec::new() })
    }

    fn save(&self, folder: &mut Staged) -> prsmed::Result<()> {
        let named: Vec<(&str, &Tensor)> = self.weights.iter().map(|(name, tensor)| (*name, tensor)).collect();
        folder.write_tensors("model.safetensors", &named, &BTreeMap::new())
    }

    fn load(&self, folder: &Path) -> prsmed::Result<()> {
        let archive = Archive::open(&folder.join("model.safetensors"))?;
        for (name, weight) in &self.weights {
            no_grad(|| archive.copy_into(name, &mut weight.shallow_clone()))?;
        }
        Ok(())
    }
}

impl DryRunTask for Brightness {
    fn example(&self, _seen: bool) -> Batch {
        let images = self.images();
        let targets = images.mean_dim([1_i64, 2, 3].as_slice(), false, Kind::Float);
        (images, targets)
    }

    fn predict(&self) -> prsmed::Result<()> {
        let batch = self.example(false);
        let _loss = no_grad(|| self.loss(&batch, self.batch_size(&batch), 0))?;
        Ok(())
    }
}

fn train(config: &TrainConfig, folder: &Path, resume: bool) -> prsmed::Result<Outcome> {
    let session = Session {
        config,
        folder,
        settings: "",
        resume,
        profile: None,
        observer: &Silent,
        interrupt: &AtomicBool::new(false),
        has_room_for_graphs: false,
        ranks: Ranks::default(),
    };
    trainer::run(&Brightness::new(Device::Cpu, config), &session)
}

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let _runtime = Runtime::new();
    let config = RunConfig::preset_with("tiny", &["train.micro_batch=4", "train.accumulation=2", "train.max_steps=3"])?;
    let config = TrainConfig { precision: Precision::Fp32, ..config.train };

    // plan on the meta device, then measure the same phases on the CPU
    let planned = dry_run::plan(Job::Train, &config, Target::Cpu, true, |_| Ok(Brightness::new(META, &config)))?;
    let plan = Plan::of(&planned, &Machine::named("cpu")?);
    println!("{}", plan.table());
    let mut meter = Measured::begin(Device::Cpu)?;
    dry_run::dry_run(
        Job::Train,
        &config,
        Ranks::default(),
        &|_: Ranks| Ok(Brightness::new(Device::Cpu, &config)),
        &mut meter,
    )?;
    for (phase, measured) in plan.phases.iter().zip(meter.finish()?) {
        println!("{}: planned {}, measured {}", measured.name, phase.memory.allocated_peak, measured.allocated_peak);
    }

    let folder = tempfile::tempdir()?;
    let first = train(&config, folder.path(), false)?;
    let second = train(&TrainConfig { max_steps: 4, ..config }, folder.path(), true)?;
    println!("{} steps, then {} after resuming", first.steps, second.steps);
    assert_eq!((first.steps, second.steps), (3, 4));
    Ok(())
}
