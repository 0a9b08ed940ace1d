//! `prsmed bench`: times training steps and predictions, and measures their memory.

use super::context::Context;
use super::plan::SettingsArgs;
use super::report::Outcome;
use crate::config::RunConfig;
use crate::data::manifest::Manifest;
use crate::event::Event;
use crate::job::machine;
use crate::job::measure::{self, Count, Job, Measurement, Work};
use crate::job::memory::suggest;
use crate::metrics::order::median;
use crate::models::prsmed;
use crate::plan::dry_run::{self, Buffers, DryRun, Job as Planned, Measured, Meter};
use crate::plan::host::Host;
use crate::plan::matmul;
use crate::plan::report::{Machine, Plan};
use crate::plan::time;
use crate::segment::dry_run::{Example, SegmentDryRun};
use crate::segment::{Training, init, vision_features};
use crate::tensor::meta::Target;
use crate::tensor::{self, Device, Kind, META, memory};
use crate::trainer::graph::settling_steps;
use crate::trainer::precision::Precision;
use crate::trainer::{DryRunTask, FirstLayers, Ranks, Switch};
use crate::units::Bytes;
use crate::{Error, Result};
use serde_json::{Value, json};

/// Time real training steps, with their memory and use of the processor
///
/// Runs the engine's own steps on example batches, with random weights at the sizes of the settings: no data, no
/// download. Memory is planned first, and what cannot fit is refused.
///
/// FLOP of a step: for each token and weight of the language model's layers 4 (2 forward, 2 for the gradient of the
/// activations; frozen weights get none), 6 where the base is trained too; everything else as the plan counts it,
/// nothing that is computed again. Utilisation is their rate over that of the GPU's table, or with `--measure-peak` and
/// on the CPU over the rate of a large product of the same dtype, measured before.
///
/// `--compare` runs the settings without and with a change in turn and prints the ratios of their medians.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed bench --preset tiny --steps 20
  prsmed bench --preset gpu-24gb --measure-peak --parts
  prsmed bench --preset tiny --compare \"train.optimizer=adamw8bit\"
  prsmed bench --preset tiny --data-root data")]
pub(super) struct Args {
    #[command(flatten)]
    settings: SettingsArgs,
    /// Data root: time the loader and its batches too, with a model that needs no download
    #[arg(long, value_name = "DIR")]
    data_root: Option<std::path::PathBuf>,
    /// Timed steps
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Steps before them; with CUDA graphs (`train.graph`), at least until the capture
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    warmup: u64,
    /// Timed work
    #[arg(long, value_enum, default_value_t = Work::Train)]
    task: Work,
    /// The whole model, or the language model with its adapters alone
    #[arg(long, value_enum, default_value_t = Part::All)]
    part: Part,
    /// Where it runs [default: the GPU, else the CPU]
    #[arg(long, value_enum)]
    device: Option<On>,
    /// Ids of a text, the image's one and the answer included [default: `model.max_text_tokens`]
    #[arg(long, value_name = "N")]
    text_tokens: Option<usize>,
    /// Of these, ids of the answer [default: all but 24]
    #[arg(long, value_name = "N")]
    answer_tokens: Option<usize>,
    /// Measure the rate of a large product instead of taking the GPU's from the table
    #[arg(long)]
    measure_peak: bool,
    /// Time the parts of one more step: modules of the forward pass, backward pass, optimizer
    #[arg(long)]
    parts: bool,
    /// Settings to compare with those given: `KEY=VALUE`, several with spaces between them
    #[arg(long, value_name = "SETTINGS")]
    compare: Option<String>,
    /// With `--compare`: how often both are run
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Do not plan memory before, and start even what would not fit; FLOP are not counted then
    #[arg(long)]
    no_plan: bool,
}

/// Part of the model that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Everything
    All,
    /// The language model on its own loss, zeros for the image
    Llm,
}

/// A device by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum On {
    /// The processor
    Cpu,
    /// The first GPU
    Cuda,
}

/// Timed settings.
struct Case {
    config: RunConfig,
    sizes: prsmed::Config,
    example: Example,
    machine: Machine,
    part: Part,
    work: Work,
}

/// Phases of a plan that `bench` runs.
const RUN: [&str; 5] = ["load", "first step", "capture", "step", "predict"];

/// FLOP of a step.
#[derive(Debug, Clone, Copy, serde::Serialize)]
struct Flops {
    /// FLOP as defined in the help.
    model: f64,
    /// FLOP of every product that runs, including recomputation.
    executed: f64,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let device = device(args.device)?;
    let case = Case::new(args, device, Vec::new(), context)?;
    let other = args.compare.as_ref().map(|sets| {
        let sets = sets.split_whitespace().map(|set| (set.to_owned(), "--compare".to_owned())).collect();
        Case::new(args, device, sets, context)
    });
    let other = other.transpose()?;
    let planned = case.plan_or_refuse(args, context)?;
    if let Some(other) = &other {
        other.plan_or_refuse(args, context)?;
        return compare(args, (&case, other), device, context);
    }
    let measurement = case.measure(args, device, context)?;
    let rate = peak_rate(args, &case, device)?;
    let flops = planned.as_ref().and_then(|(_, flops)| *flops).filter(|_| args.data_root.is_none());
    print_result(&case, &measurement, planned.as_ref().map(|(plan, _)| plan), (flops, rate), context)
}

fn device(on: Option<On>) -> Result<Device> {
    match (on, tensor::default_device()) {
        (Some(On::Cpu), _) => Ok(Device::Cpu),
        (Some(On::Cuda), Device::Cpu) => {
            Err(Error::config("--device", "libtorch finds no GPU", "leave the flag out to use the CPU"))
        }
        (_, found) => Ok(found),
    }
}

impl Case {
    fn new(args: &Args, device: Device, sets: Vec<(String, String)>, context: &Context) -> Result<Self> {
        let config = args.settings.resolve(sets)?;
        let longest = config.longest_example();
        let text_tokens = args.text_tokens.unwrap_or(longest.text_tokens);
        let rest = longest.text_tokens - longest.answer_tokens;
        let answer_tokens = args.answer_tokens.unwrap_or_else(|| text_tokens.saturating_sub(rest).max(1));
        if text_tokens < answer_tokens + 2 {
            let reason = format!("{answer_tokens} ids of an answer leave no room for a question in {text_tokens}");
            return Err(Error::config("--answer-tokens", reason, "give a text at least two ids more than its answer"));
        }
        let example = Example { text_tokens, answer_tokens, ..longest };
        let sizes = init::planned_sizes(&config.model, config.lora, example.num_classes)?;
        let machine = match device {
            Device::Cpu => Machine::Cpu(Host::detect()),
            _ => machine::here(&context.runtime)?,
        };
        Ok(Self { config, sizes, example, machine, part: args.part, work: args.task })
    }

    /// The task on `device`.
    fn build(&self, device: Device) -> Result<SegmentDryRun> {
        let RunConfig { model, train, .. } = &self.config;
        let task = SegmentDryRun::random(model, &self.sizes, train, self.example, (device, Ranks::default()))?;
        let task = task.with_feature_cache(self.config.data.caches_features());
        Ok(if self.part == Part::Llm { task.language_alone() } else { task })
    }

    fn dry_run(&self) -> Result<DryRun> {
        self.machine.check_precision("train.precision", self.config.train.precision)?;
        vision_features::refuse_trained_tower(&self.config.data, self.config.model.train_base)?;
        self.machine.set_planned_gpu();
        let job = if self.work == Work::Train { Planned::Train } else { Planned::Predict };
        let mut dry_run = dry_run::plan(job, &self.config.train, self.machine.target(), true, |_| self.build(META))?;
        let half_precision = self.config.train.precision != Precision::Fp32;
        dry_run.buffers = Buffers { half_precision, ..Buffers::default() };
        Ok(dry_run)
    }

    /// The plan of a step, and its FLOP where they are known; `None` with `--no-plan`.
    fn plan_or_refuse(&self, args: &Args, context: &Context) -> Result<Option<(Plan, Option<Flops>)>> {
        if args.no_plan {
            return Ok(None);
        }
        let dry_run = self.dry_run()?;
        let plan = Plan::of(&dry_run, &self.machine);
        let run = plan.phases.iter().filter(|phase| RUN.contains(&phase.memory.name));
        if run.map(|phase| phase.device_peak).max() > Some(plan.budget.bytes) {
            context.progress.on(&Event::Note(format!("memory plan\n{}", plan.table())));
            let hint = "`prsmed plan` lists changes that save memory; `--no-plan` skips this check";
            return Err(Error::config("bench", plan.summary(), hint));
        }
        context.memory.remember(plan.clone(), suggest(&self.config, &(), dry_run::Job::Train, &self.machine, &plan));
        let flops = if self.work == Work::Train { Some(self.flops(dry_run)?) } else { None };
        Ok(Some((plan, flops)))
    }

    /// True if steps with CUDA graphs fit; needed for `train.graph=auto`.
    fn has_room_for_graphs(&self) -> Result<bool> {
        let is_open = self.config.train.graph_switch() == Switch::Auto && self.machine.target() == Target::Cuda;
        if !is_open || self.work != Work::Train {
            return Ok(true);
        }
        let mut config = self.config.clone();
        config.train.graph = Switch::On;
        let captured = Self { config, sizes: self.sizes.clone(), machine: self.machine.clone(), ..*self };
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
            Self { config, sizes: self.sizes.clone(), machine: self.machine.clone(), ..*self }.dry_run()?
        };
        let others = time::flops_where(&plain.trace, "step", plain.repeats(), |path| !path.starts_with("llm.layers"));
        let task = self.build(META)?;
        let tokens = task.tokens(&task.example(true)) as f64 * train.accumulation as f64;
        let layers = layer_flops(&self.sizes, self.config.model.train_base, tokens);
        Ok(Flops { model: others + layers, executed })
    }

    fn measure(&self, args: &Args, device: Device, context: &Context) -> Result<Measurement> {
        let settling = match self.work {
            Work::Train => settling_steps(self.config.train.graph_switch(), device),
            Work::Predict => 0,
        };
        let count = Count { warmup: args.warmup.max(settling), steps: args.steps };
        let has_room = args.no_plan || self.has_room_for_graphs()?;
        let job = Job { device, count, has_room, observer: context.progress.as_ref(), interrupt: &context.interrupt };
        match &args.data_root {
            Some(root) => self.on_data(job, root, context),
            None => measure::examples(job, self.work, &self.config.train, args.parts, || self.build(device)),
        }
    }

    /// Times steps on real rows, with the loader of a training.
    fn on_data(&self, job: Job, root: &std::path::Path, context: &Context) -> Result<Measurement> {
        if (self.work, self.part) != (Work::Train, Part::All) {
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
        let mut meter = Measured::begin(job.device)?;
        meter.begin("load")?;
        let folder = tempfile::tempdir().map_err(Error::io("the folder of temporary files", "write"))?;
        let runtime = context.runtime.clone().on(job.device);
        let training = Training::new(config.clone(), Manifest::open(root, None)?, folder.path(), &runtime)?;
        measure::training(job, &training.prepare()?.task, &config.train, meter)
    }
}

/// FLOP of the language model's layers in a step of `tokens` tokens.
fn layer_flops(sizes: &prsmed::Config, trains_base: bool, tokens: f64) -> f64 {
    // 2 forward, 2 for the gradient of the activations, 2 for that of a trained weight
    let each = if trains_base { 6.0 } else { 4.0 };
    each * layer_weights(sizes) * tokens
}

/// Weights of the language model's layers that every token passes; adapters and norms are not counted.
fn layer_weights(sizes: &prsmed::Config) -> f64 {
    let llm = &sizes.llm;
    let (d, groups) = (llm.hidden_size, llm.num_key_value_heads * llm.head_dim());
    let layer = 2 * d * d + 2 * d * groups + 3 * d * llm.intermediate_size;
    (layer * llm.num_hidden_layers) as f64
}

/// Peak rate of the device, and its source.
#[derive(Debug, Clone, serde::Serialize)]
struct Peak {
    flops_per_s: f64,
    source: String,
}

fn peak_rate(args: &Args, case: &Case, device: Device) -> Result<Peak> {
    let kind = case.config.train.precision.kind();
    let name = if kind == Kind::Float { "fp32" } else { "half-precision" };
    match &case.machine {
        Machine::Cuda(budget, _) if !args.measure_peak && budget.has_own_rates => {
            let rates = &budget.rates;
            let flops_per_s = if kind == Kind::Float { rates.fp32 } else { rates.half };
            Ok(Peak { flops_per_s, source: format!("{name}, table of GPUs: {}", rates.of) })
        }
        _ => {
            memory::release_cache(device)?;
            Ok(Peak { flops_per_s: matmul::rate(device, kind)?, source: format!("{name} products measured here") })
        }
    }
}

/// Runs the settings without and with the change, in turn.
fn compare(args: &Args, (base, other): (&Case, &Case), device: Device, context: &Context) -> anyhow::Result<Outcome> {
    let change = args.compare.as_deref().unwrap_or_default();
    let mut pairs = Vec::new();
    for _ in 0..args.rounds {
        let pair = [base, other].map(|case| {
            let measured = case.measure(args, device, context);
            memory::release_cache(device).and(measured)
        });
        let [without, with] = pair;
        pairs.push((without?, with?));
    }
    let per_sample = |m: &Measurement| m.median() / m.samples.max(1.0);
    let peak = |m: &Measurement| m.memory.allocated_peak.0 as f64;
    let ratios = |of: &dyn Fn(&Measurement) -> f64| -> Vec<f64> {
        pairs.iter().map(|(without, with)| of(with) / of(without).max(f64::MIN_POSITIVE)).collect()
    };
    let (times, peaks) = (ratios(&per_sample), ratios(&peak));
    let (time, bytes) = (median(&times), median(&peaks));
    let spread = |values: &[f64]| {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(0.0, f64::max);
        format!("{least:.3} .. {most:.3}")
    };
    let [without, with] =
        [0, 1].map(|i| median(&pairs.iter().map(|p| per_sample(if i == 0 { &p.0 } else { &p.1 })).collect::<Vec<_>>()));
    context.output.line(format!(
        "{change}: time of a sample x {time:.3} ({}), peak of tensors x {bytes:.3}; {without:.4} s without, \
         {with:.4} s with; medians of {} pairs",
        spread(&times),
        pairs.len()
    ))?;
    let (without, with): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    context.output.record(&json!({
        "kind": "compare", "change": change, "time_ratio": time, "peak_ratio": bytes,
        "time_ratios": times, "peak_ratios": peaks, "without": without, "with": with,
    }))?;
    Ok(Outcome::Done)
}

/// Prints the results as lines and as a record.
fn print_result(
    case: &Case,
    measurement: &Measurement,
    planned: Option<&Plan>,
    (flops, peak): (Option<Flops>, Peak),
    context: &Context,
) -> anyhow::Result<Outcome> {
    let seconds = measurement.median();
    let wait = measurement.wait_seconds.as_deref().map(median);
    let whole = measurement.median_with_wait();
    let used = flops.map(|flops| flops.model / seconds / peak.flops_per_s);
    context.output.line(lines(case, measurement, planned, (flops, &peak)).join("\n"))?;
    let tokens_per_s = measurement.tokens.map(|tokens| tokens as f64 / whole);
    let mut record = serde_json::to_value(measurement)?;
    let more = json!({
        "kind": "bench",
        "device": case.machine.offer().device,
        "threads": tensor::num_threads(),
        "median_seconds": seconds,
        "median_wait_seconds": wait,
        "steps_per_s": 1.0 / whole,
        "samples_per_s": measurement.samples / whole,
        "tokens_per_s": tokens_per_s,
        "flops": flops,
        "flops_per_s": flops.map(|flops| flops.model / seconds),
        "peak": peak,
        "utilisation": used,
        "planned": planned.map(planned_peaks),
        "config": case.config,
    });
    if let (Value::Object(record), Value::Object(more)) = (&mut record, more) {
        record.extend(more);
    }
    context.output.record(&record)?;
    Ok(Outcome::Done)
}

/// Peaks and time of the planned step; the time is `None` on the CPU.
fn planned_peaks(plan: &Plan) -> Value {
    let step = plan.phases.iter().find(|phase| matches!(phase.memory.name, "step" | "predict"));
    json!(step.map(|phase| json!({
        "allocated_peak": phase.memory.allocated_peak,
        "reserved_peak": phase.memory.reserved_peak,
        "device_peak": phase.device_peak,
        "categories": phase.memory.categories,
        "terms": plan.terms,
        "seconds": plan.time.map(|time| time.seconds),
        "gpu_seconds": plan.time.map(|time| time.gpu_seconds),
    })))
}

fn lines(
    case: &Case,
    measurement: &Measurement,
    planned: Option<&Plan>,
    (flops, peak): (Option<Flops>, &Peak),
) -> Vec<String> {
    let seconds = measurement.median();
    let train = &case.config.train;
    let least = measurement.seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let most = measurement.seconds.iter().copied().fold(0.0, f64::max);
    let wait = measurement.wait_seconds.as_deref().map(median);
    let whole = measurement.median_with_wait();
    let tokens = measurement.tokens.map_or_else(String::new, |t| format!(", {:.0} tokens/s", t as f64 / whole));
    let mut lines = vec![
        format!(
            "{} on {}, micro-batch {} x {}",
            if case.work == Work::Train { "training steps" } else { "predictions" },
            case.machine.offer().device,
            train.micro_batch,
            train.accumulation
        ),
        format!(
            "time: {seconds:.4} s ({least:.4} .. {most:.4}), {:.3} steps/s, {:.3} samples/s{tokens}",
            1.0 / whole,
            measurement.samples / whole
        ),
        wait.map_or_else(
            || "loader: not measured (examples; give --data-root)".to_owned(),
            |wait| format!("loader: {wait:.4} s waited before a step"),
        ),
    ];
    if let Some(flops) = flops {
        lines.push(format!(
            "arithmetic: {:.4} TFLOP a step ({:.4} with everything that runs), {:.4} TFLOP/s: {:.1} % of {:.4} TFLOP/s \
             ({})",
            flops.model / 1e12,
            flops.executed / 1e12,
            flops.model / seconds / 1e12,
            100.0 * flops.model / seconds / peak.flops_per_s,
            peak.flops_per_s / 1e12,
            peak.source
        ));
    }
    lines.push(memory_line(measurement, planned));
    if let Some(parts) = &measurement.parts {
        let parts: Vec<String> = parts.iter().map(|(name, seconds)| format!("{name} {seconds:.4} s")).collect();
        lines.push(format!("parts of a step: {}", parts.join(", ")));
    }
    lines
}

fn memory_line(measurement: &Measurement, planned: Option<&Plan>) -> String {
    let memory = &measurement.memory;
    let step = planned.and_then(|plan| plan.phases.iter().find(|phase| phase.memory.name == memory.name));
    let in_words =
        |bytes: Option<Bytes>| bytes.map_or_else(|| "not planned".to_owned(), |bytes| format!("planned {bytes}"));
    let (outside, what) = match memory.device_used {
        Some(used) => (used, "device"),
        None => (measurement.resident.0, "resident"),
    };
    format!(
        "memory: tensors {} ({}), reserved {} ({}), {what} {outside} ({})",
        memory.allocated_peak,
        in_words(step.map(|step| step.memory.allocated_peak)),
        memory.reserved_peak,
        in_words(step.map(|step| step.memory.reserved_peak)),
        in_words(step.map(|step| step.device_peak)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_takes_4_flop_for_each_weight_of_a_frozen_layer_and_6_for_a_trained_one() {
        let sizes = RunConfig::preset_with("tiny", &[]).unwrap().planned_sizes().unwrap();
        // three layers: queries and output, keys and values, feed-forward network
        let weights = 3.0 * f64::from(2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256);
        let found = [false, true].map(|trains_base| layer_flops(&sizes, trains_base, 10.0));
        assert_eq!(found, [40.0 * weights, 60.0 * weights]);
    }
}
