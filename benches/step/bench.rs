//! Timed training steps and predictions, with their memory and arithmetic.

use super::measure::{self, Count, Measurement, TimedJob, TimedWork};
use prsmed::config::RunConfig;
use prsmed::data::manifest::Manifest;
use prsmed::event::Event;
use prsmed::job::machine;
use prsmed::models::prsmed::Config as Sizes;
use prsmed::plan::dry_run::{self, Buffers, DryRun, Job as Planned, Meter, PhaseMeter};
use prsmed::plan::host::Host;
use prsmed::plan::machine::Machine;
use prsmed::plan::matmul;
use prsmed::plan::report::Plan;
use prsmed::plan::time;
use prsmed::runtime::Runtime;
use prsmed::segment::dry_run::{Example, SegmentDryRun};
use prsmed::segment::{Training, setup, vision_features};
use prsmed::tensor::meta::PlanTarget;
use prsmed::tensor::{Device, Kind, META, memory};
use prsmed::trainer::graph::settling_steps;
use prsmed::trainer::precision::Precision;
use prsmed::trainer::{DryRunTask, FirstLayers, Ranks, Switch};
use prsmed::{Error, Result};
use std::path::{Path, PathBuf};

/// Part of the model that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TimedPart {
    /// Everything
    All,
    /// The language model on its own loss, zeros for the image
    Llm,
}

/// Timed settings.
#[derive(Debug, Clone)]
pub(crate) struct Bench {
    /// All settings.
    pub(crate) config: RunConfig,
    /// Timed work.
    pub(crate) work: TimedWork,
    /// Part of the model.
    pub(crate) part: TimedPart,
    /// Steps.
    pub(crate) count: Count,
    /// Where they run.
    pub(crate) device: Device,
    /// Real rows instead of examples.
    pub(crate) data_root: Option<PathBuf>,
    /// Times the parts of one more step.
    pub(crate) parts: bool,
    /// Plans memory first, and refuses what cannot fit.
    pub(crate) plans: bool,
    sizes: Sizes,
    example: Example,
    machine: Machine,
}

/// Phases of a plan that `bench` runs.
const RUN: [&str; 5] = ["load", "first step", "capture", "step", "predict"];

/// FLOP of a step.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub(crate) struct Flops {
    /// FLOP of the model's arithmetic: for each token and weight of the language model's layers 4, and 6 where the base is
    /// trained too; everything else as a plan counts it. Nothing that is computed again.
    pub(crate) model: f64,
    /// FLOP of every product that runs, including recomputation.
    pub(crate) executed: f64,
}

impl Bench {
    /// Timed steps of these settings on `device`. Texts have `text_tokens` ids, `answer_tokens` of them of the answer; by
    /// default as many as the settings allow.
    ///
    /// # Errors
    /// [`Error::Config`] for an answer that leaves no room for a question, and for a GPU that cannot be used.
    pub(crate) fn new(
        config: RunConfig,
        device: Device,
        (text_tokens, answer_tokens): (Option<usize>, Option<usize>),
        runtime: &Runtime,
    ) -> Result<Self> {
        let longest = config.longest_example();
        let text_tokens = text_tokens.unwrap_or(longest.text_tokens);
        let rest = longest.text_tokens - longest.answer_tokens;
        let answer_tokens = answer_tokens.unwrap_or_else(|| text_tokens.saturating_sub(rest).max(1));
        if text_tokens < answer_tokens + 2 {
            let reason = format!("{answer_tokens} ids of an answer leave no room for a question in {text_tokens}");
            return Err(Error::config("--answer-tokens", reason, "give a text at least two ids more than its answer"));
        }
        let example = Example { text_tokens, answer_tokens, ..longest };
        let sizes = setup::planned_sizes(&config.model, &config.configs, config.lora, example.num_classes)?;
        let machine = match device {
            Device::Cpu => Machine::Cpu(Host::detect()),
            _ => machine::here(runtime)?,
        };
        Ok(Self {
            config,
            work: TimedWork::Train,
            part: TimedPart::All,
            count: Count { warmup: 2, steps: 10 },
            device,
            data_root: None,
            parts: false,
            plans: true,
            sizes,
            example,
            machine,
        })
    }

    /// Name of the device.
    pub(crate) fn device_name(&self) -> String {
        self.machine.offer().device
    }

    /// The task on `device`.
    fn build(&self, device: Device) -> Result<SegmentDryRun> {
        let RunConfig { model, train, .. } = &self.config;
        let task = SegmentDryRun::random(model, &self.sizes, train, self.example, (device, Ranks::default()))?;
        let task = task.with_feature_cache(self.config.data.caches_features());
        Ok(if self.part == TimedPart::Llm { task.language_alone() } else { task })
    }

    fn dry_run(&self) -> Result<DryRun> {
        self.machine.check_precision("train.precision", self.config.train.precision)?;
        vision_features::refuse_trained_tower(&self.config.data, self.config.model.train_base)?;
        self.machine.set_planned_gpu();
        let job = if self.work == TimedWork::Train { Planned::Train } else { Planned::Predict };
        let mut dry_run = dry_run::plan(job, &self.config.train, self.machine.target(), true, |_| self.build(META))?;
        let half_precision = self.config.train.precision != Precision::Fp32;
        dry_run.buffers = Buffers { half_precision, ..Buffers::default() };
        Ok(dry_run)
    }

    /// The plan of a step, and its FLOP where they are known; `None` without `plans`.
    ///
    /// # Errors
    /// [`Error::Config`] for what cannot fit.
    pub(crate) fn plan(&self, runtime: &Runtime) -> Result<Option<(Plan, Option<Flops>)>> {
        if !self.plans {
            return Ok(None);
        }
        let dry_run = self.dry_run()?;
        let plan = Plan::of(&dry_run, &self.machine);
        let run = plan.phases.iter().filter(|phase| RUN.contains(&phase.memory.name));
        if run.map(|phase| phase.device_peak).max() > Some(plan.budget.bytes) {
            runtime.observer().on(&Event::Note(format!("memory plan\n{}", plan.table())));
            let hint = "`prsmed plan` lists changes that save memory; `--no-plan` skips this check";
            return Err(Error::config("bench", plan.summary(), hint));
        }
        let flops = if self.work == TimedWork::Train { Some(self.flops(dry_run)?) } else { None };
        Ok(Some((plan, flops)))
    }

    /// True if steps with CUDA graphs fit; needed for `train.graph=auto`.
    fn has_room_for_graphs(&self) -> Result<bool> {
        let is_open = self.config.train.graph_switch() == Switch::Auto && self.machine.target() == PlanTarget::Cuda;
        if !is_open || self.work != TimedWork::Train {
            return Ok(true);
        }
        let mut config = self.config.clone();
        config.train.graph = Switch::On;
        let captured = Self { config, ..self.clone() };
        Ok(Plan::of(&captured.dry_run()?, &self.machine).fits)
    }

    fn flops(&self, dry_run: DryRun) -> Result<Flops> {
        let executed = time::flops(&dry_run.trace, "step", dry_run.repeats());
        let train = &self.config.train;
        let once = (train.checkpointing, train.checkpoint_encoder) == (FirstLayers::None, FirstLayers::None);
        let plain = if once && !train.checkpoint_decoder {
            dry_run
        } else {
            let mut config = self.config.clone();
            config.train.checkpointing = FirstLayers::None;
            config.train.checkpoint_encoder = FirstLayers::None;
            config.train.checkpoint_decoder = false;
            Self { config, ..self.clone() }.dry_run()?
        };
        let others = time::flops_where(&plain.trace, "step", plain.repeats(), |path| !path.starts_with("llm.layers"));
        let task = self.build(META)?;
        let tokens = task.tokens(&task.example(true)) as f64 * train.accumulation as f64;
        let layers = layer_flops(&self.sizes, self.config.model.train_base, tokens);
        Ok(Flops { model: others + layers, executed })
    }

    /// Times the steps.
    ///
    /// # Errors
    /// Typed errors of libtorch, and errors of the data; [`Error::Interrupted`].
    pub(crate) fn measure(&self, runtime: &Runtime) -> Result<Measurement> {
        let (device, observer, interrupt) = (self.device, runtime.observer().as_ref(), runtime.interrupt());
        let settling = match self.work {
            TimedWork::Train => settling_steps(self.config.train.graph_switch(), device),
            TimedWork::Predict => 0,
        };
        let count = Count { warmup: self.count.warmup.max(settling), ..self.count };
        let has_room = !self.plans || self.has_room_for_graphs()?;
        let job = TimedJob { device, count, has_room, observer, interrupt };
        match &self.data_root {
            Some(root) => self.on_data(job, root, runtime),
            None => measure::examples(job, self.work, &self.config.train, self.parts, || self.build(device)),
        }
    }

    /// Times steps on real rows, with the loader of a training.
    fn on_data(&self, job: TimedJob, root: &Path, runtime: &Runtime) -> Result<Measurement> {
        if (self.work, self.part) != (TimedWork::Train, TimedPart::All) {
            let hint = "leave out `--task`, `--part` or `--data-root`";
            return Err(Error::config("--data-root", "only whole training steps take data", hint));
        }
        let mut config = self.config.clone();
        config.train = measure::settings(&config.train, job.count);
        let model = &config.model;
        if let Some(spec) =
            [&model.base, &model.vision_tower, &model.image_encoder].iter().find(|s| s.starts_with("hub:"))
        {
            let hint = "set `model.base` to a folder or `random`, or leave out `--data-root`";
            return Err(Error::config("model.base", format!("`{spec}` may need a download"), hint));
        }
        let mut meter = PhaseMeter::begin(job.device)?;
        meter.begin("load")?;
        let folder = tempfile::tempdir().map_err(Error::io("the folder of temporary files", "write"))?;
        let runtime = runtime.clone().on(job.device);
        let training = Training::new(config.clone(), Manifest::open(root, None)?, folder.path(), &runtime)?;
        measure::training(job, &training.prepare()?.task, &config.train, meter)
    }

    /// Peak rate of the device in the dtype of the settings: that of the table of GPUs, or where there is none, and if
    /// `measures`, that of a large product now.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub(crate) fn peak(&self, measures: bool) -> Result<Peak> {
        let kind = self.config.train.precision.kind();
        let name = if kind == Kind::Float { "fp32" } else { "half-precision" };
        match &self.machine {
            Machine::Cuda(budget, _) if !measures && budget.has_own_rates => {
                let rates = &budget.rates;
                let flops_per_s = if kind == Kind::Float { rates.fp32 } else { rates.half };
                Ok(Peak { flops_per_s, source: format!("{name}, table of GPUs: {}", rates.of) })
            }
            _ => {
                memory::release_cache(self.device)?;
                let flops_per_s = matmul::rate(self.device, kind)?;
                Ok(Peak { flops_per_s, source: format!("{name} products measured here") })
            }
        }
    }
}

/// FLOP of the language model's layers in a step of `tokens` tokens.
fn layer_flops(sizes: &Sizes, trains_base: bool, tokens: f64) -> f64 {
    // 2 forward, 2 for the gradient of the activations, 2 for that of a trained weight
    let each = if trains_base { 6.0 } else { 4.0 };
    each * layer_weights(sizes) * tokens
}

/// Weights of the language model's layers that every token passes; adapters and norms are not counted.
fn layer_weights(sizes: &Sizes) -> f64 {
    let llm = &sizes.llm;
    let (d, groups) = (llm.hidden_size, llm.num_key_value_heads * llm.head_dim());
    let layer = 2 * d * d + 2 * d * groups + 3 * d * llm.intermediate_size;
    (layer * llm.num_hidden_layers) as f64
}

/// Peak rate of the device, and its source.
#[derive(Debug, Clone, serde::Serialize)]
pub(crate) struct Peak {
    /// Floating-point operations per second.
    pub(crate) flops_per_s: f64,
    /// Where the number comes from, for the user.
    pub(crate) source: String,
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_token_takes_4_flop_for_each_weight_of_a_frozen_layer_and_6_for_a_trained_one() {
        use super::*;
        let sizes = RunConfig::preset_with("tiny", &[]).unwrap().planned_sizes().unwrap();
        // three layers: queries and output, keys and values, feed-forward network
        let weights = 3.0 * f64::from(2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256);
        let found = [false, true].map(|trains_base| layer_flops(&sizes, trains_base, 10.0));
        assert_eq!(found, [40.0 * weights, 60.0 * weights]);
    }
}
