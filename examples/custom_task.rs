//! A training of your own: a task and its settings are all that it needs to get what `prsmed train` has.
//!
//! The task is a small convolutional network that estimates the mean brightness of noise images. It has nothing to do
//! with PRS-Med.
//!
//! ```text
//! cargo run --example custom_task
//! ```
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use prsmed::config::Settings;
use prsmed::console::{DataOutput, ProgressDisplay, Style};
use prsmed::job::resume::ResumeFrom;
use prsmed::job::task::{TaskSettings, TaskTraining};
use prsmed::prelude::*;
use prsmed::setting::{Setting, settings};
use prsmed::tensor::weights::{Archive, Staged};
use prsmed::tensor::{Kind, Tensor, no_grad, rng};
use prsmed::trainer::distributed::{Rendezvous, World};
use prsmed::trainer::precision::Precision;
use prsmed::trainer::{BatchSize, Batches, Loss, Parameter, Ranks, Shard, TrainingOutcome};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const STEPS_PER_EPOCH: u64 = 4;
const SIDE: i64 = 16;

/// Images `[b, 1, s, s]` and their targets `[b]`.
type Batch = (Tensor, Tensor);

/// The network.
pub(crate) struct Brightness {
    weights: [(&'static str, Tensor); 2],
    micro_batch: i64,
    accumulation: usize,
}

impl Brightness {
    fn new(device: Device, config: &Config) -> Self {
        let (channels, config) = (config.net.channels, &config.train);
        rng::seed(config.seed);
        let weight = |shape: &[i64]| (Tensor::randn(shape, (Kind::Float, device)) * 0.1).set_requires_grad(true);
        let weights = [("conv", weight(&[channels, 1, 3, 3])), ("head", weight(&[channels, 1]))];
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
        parameters.map(|(name, w)| Parameter::new(format!("brightness/{name}"), w.shallow_clone())).collect()
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

settings! {
    /// Settings of the network (`net.*`).
    pub struct NetConfig in "net" {
        /// Channels of the convolution.
        channels: i64 = 8, results(Changes), resume(Fixed), range(1.0..), memory("activations grow with it");
    }
}

/// All settings of the training.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    net: NetConfig,
    train: TrainConfig,
}

impl Default for Config {
    fn default() -> Self {
        let train = TrainConfig { precision: Precision::Fp32, ..TrainConfig::default() };
        Self { net: NetConfig::default(), train }
    }
}

impl Settings for Config {
    fn settings() -> Vec<Setting> {
        [NetConfig::settings(), TrainConfig::settings()].concat()
    }
}

impl TaskSettings for Config {
    type Task = Brightness;

    fn train(&self) -> &TrainConfig {
        &self.train
    }

    fn train_mut(&mut self) -> &mut TrainConfig {
        &mut self.train
    }

    fn build(&self, device: Device, _ranks: Ranks) -> prsmed::Result<Brightness> {
        Ok(Brightness::new(device, self))
    }
}

/// Trains as `prsmed train` does: with lock, memory plan, resume check, progress, report and, where several processes
/// were started (`torchrun`, `srun`), together with them.
fn train(folder: &Path, resume: ResumeFrom, sets: &[&str]) -> prsmed::Result<TrainingOutcome> {
    let sets = sets.iter().map(|set| ((*set).to_owned(), "--set".to_owned())).collect();
    let settings = Sources { sets, ..Sources::default() }.resolve_as::<Config>()?;
    let style = Style { is_terminal: false, color: false, every_steps: 1 };
    let progress = ProgressDisplay::new(style, Arc::new(DataOutput::stdout(false)));
    let runtime = Runtime::new().on(Device::Cpu).with_observer(Arc::new(progress));
    let joined = Rendezvous::from_vars(|name| std::env::var(name).ok())?;
    let join = |joined| World::join(joined, runtime.device(), runtime.interrupt(), &|text| println!("{text}"));
    let world = joined.as_ref().map(join).transpose()?;
    let how = How { resume, ..How::new(folder, &runtime)?.with_ranks(Ranks::of_some(world.as_ref())) };
    Ok(job::run(&how, |how| Ok(TaskTraining::new(settings, how)))?.outcome)
}

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let sets = ["train.micro_batch=4", "train.accumulation=2", "train.epochs=2", "train.max_steps=3"];
    let first = train(folder.path(), ResumeFrom::New, &sets)?;
    let second = train(folder.path(), ResumeFrom::Last, &[&sets[..3], &["train.max_steps=4"]].concat())?;
    println!("{} steps, then {} after resuming", first.steps, second.steps);
    assert_eq!((first.steps, second.steps), (3, 4));
    assert!(folder.path().join("report.html").is_file());

    let refused = train(folder.path(), ResumeFrom::Last, &["net.channels=16"]).map(drop).expect_err("another network");
    println!("{refused}");
    Ok(())
}
