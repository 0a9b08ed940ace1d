//! Times real training steps and predictions, and measures their memory: the program of `scripts/gpu-check` and
//! `scripts/bench`. `cargo bench --profile dev --bench step -- --help` shows its flags.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark")]

mod bench;
mod measure;

use bench::{Bench, Flops, Peak, TimedPart};
use clap::Parser as _;
use measure::{Count, Measurement, TimedWork};
use prsmed::cli::env::Env;
use prsmed::config::Sources;
use prsmed::event::{Event, Observer};
use prsmed::metrics::order::median;
use prsmed::plan::detect;
use prsmed::plan::report::Plan;
use prsmed::runtime::Runtime;
use prsmed::tensor::{self, Device, memory};
use prsmed::{Error, Result};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

/// Time real training steps, with their memory and use of the processor
///
/// Runs the engine's own steps on example batches, with random weights at the sizes of the settings: no data, no
/// download. Memory is planned first, and what cannot fit is refused. Prints one JSON object.
///
/// FLOP of a step (not counted with `--no-plan`): for each token and weight of the language model's layers 4 (2 forward, 2 for the gradient of the
/// activations; frozen weights get none), 6 where the base is trained too; everything else as the plan counts it,
/// nothing that is computed again. Utilisation is their rate over that of the GPU's table, or with `--measure-peak` and
/// on the CPU over the rate of a large product of the same dtype, measured before.
///
/// `--compare` runs the settings without and with a change in turn and reports the ratios of their medians.
#[expect(clippy::struct_excessive_bools, reason = "independent flags")]
#[derive(Debug, clap::Parser)]
struct Args {
    /// Named settings [default: full]
    #[arg(long)]
    preset: Option<String>,
    /// TOML file whose values override the preset
    #[arg(long)]
    config: Option<PathBuf>,
    /// One setting, for example `train.micro_batch=4`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Data root: time the loader and its batches too, with a model that needs no download
    #[arg(long)]
    data_root: Option<PathBuf>,
    /// Timed steps
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Steps before them; with CUDA graphs (`train.graph`), at least until the capture
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    warmup: u64,
    /// Timed work
    #[arg(long, value_enum, default_value_t = TimedWork::Train)]
    task: TimedWork,
    /// The whole model, or the language model with its adapters alone
    #[arg(long, value_enum, default_value_t = TimedPart::All)]
    part: TimedPart,
    /// Where it runs [default: the GPU, else the CPU]
    #[arg(long, value_parser = ["cpu", "cuda"])]
    device: Option<String>,
    /// Ids of a text, the image's one and the answer included [default: `model.max_text_tokens`]
    #[arg(long)]
    text_tokens: Option<usize>,
    /// Of these, ids of the answer [default: all but 24]
    #[arg(long)]
    answer_tokens: Option<usize>,
    /// Measure the rate of a large product instead of taking the GPU's from the table
    #[arg(long)]
    measure_peak: bool,
    /// Time the parts of one more step (modules of the forward pass, backward pass, optimizer), and the kernels of another
    #[arg(long)]
    parts: bool,
    /// Settings to compare with those given: `KEY=VALUE`, several with spaces between them
    #[arg(long)]
    compare: Option<String>,
    /// With `--compare`: how often both are run
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Skip the memory plan
    #[arg(long)]
    no_plan: bool,
    /// `cargo bench` adds this
    #[arg(long, hide = true)]
    bench: bool,
}

/// Prints notes and warnings.
struct Messages;

impl Observer for Messages {
    fn on(&self, event: &Event) {
        match event {
            Event::Note(text) => eprintln!("note: {text}"),
            Event::Warning(text) => eprintln!("warning: {text}"),
            _ => {}
        }
    }
}

fn main() {
    start(std::env::args());
}

/// Runs the command line `words` (program name first).
#[expect(clippy::exit, reason = "the program ends")]
pub(crate) fn start(words: impl Iterator<Item = String>) {
    match run(&Args::parse_from(words)) {
        Ok(record) => println!("{record}"),
        Err(error) => {
            eprintln!("error: {error}\nhint: {}", error.hint());
            std::process::exit(2);
        }
    }
}

/// Measures what the arguments ask for; returns the record.
fn run(args: &Args) -> Result<Value> {
    let env = Env::read();
    let runtime = Runtime::new().with_hub(env.hub).with_observer(Arc::new(Messages));
    let runtime = match &env.cache {
        Some(cache) => runtime.with_cache(cache),
        None => runtime,
    };
    let runtime = runtime.with_visible_gpus(env.cuda_visible_devices);
    let base = bench(args, &[], &runtime)?;
    let compared: Option<Vec<&str>> = args.compare.as_ref().map(|sets| sets.split_whitespace().collect());
    let other = compared.map(|sets| bench(args, &sets, &runtime)).transpose()?;
    let planned = base.plan(&runtime)?;
    if let Some(other) = &other {
        other.plan(&runtime)?;
        return compare(args, (&base, other), &runtime);
    }
    let measurement = base.measure(&runtime)?;
    let peak = base.peak(args.measure_peak)?;
    let flops = planned.as_ref().and_then(|(_, flops)| *flops).filter(|_| args.data_root.is_none());
    Ok(record(&base, &measurement, planned.as_ref().map(|(plan, _)| plan), (flops, peak)))
}

/// The settings with those of `compared`.
fn bench(args: &Args, compared: &[&str], runtime: &Runtime) -> Result<Bench> {
    let given = args.sets.iter().map(|set| (set.clone(), "--set".to_owned()));
    let sets = given.chain(compared.iter().map(|set| ((*set).to_owned(), "--compare".to_owned()))).collect();
    let (preset, file, default_preset) = (args.preset.clone(), args.config.clone(), "full".into());
    let sources = Sources { preset, file, sets, default_preset, ..Sources::default() };
    let device = match (args.device.as_deref(), tensor::default_device()) {
        (Some("cpu"), _) => Device::Cpu,
        (Some(_), Device::Cpu) => {
            let reason = format!("no GPU can be used: {}", detect::why_no_gpu(runtime.visible_gpus()));
            return Err(Error::config("--device", reason, "leave the flag out to use the CPU"));
        }
        (_, found) => found,
    };
    let mut bench = Bench::new(sources.resolve()?.config, device, (args.text_tokens, args.answer_tokens), runtime)?;
    (bench.work, bench.part) = (args.task, args.part);
    bench.count = Count { warmup: args.warmup, steps: args.steps };
    bench.data_root.clone_from(&args.data_root);
    (bench.parts, bench.plans) = (args.parts, !args.no_plan);
    Ok(bench)
}

/// Runs the settings without and with the change, in turn.
fn compare(args: &Args, (base, other): (&Bench, &Bench), runtime: &Runtime) -> Result<Value> {
    let change = args.compare.as_deref().unwrap_or_default();
    let mut pairs = Vec::new();
    for _ in 0..args.rounds {
        let pair = [base, other].map(|case| {
            let measured = case.measure(runtime);
            memory::release_cache(case.device).and(measured)
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
    let (without, with): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    Ok(json!({
        "kind": "compare", "change": change, "time_ratio": time, "peak_ratio": bytes,
        "time_ratios": times, "peak_ratios": peaks, "without": without, "with": with,
    }))
}

/// The results.
fn record(
    case: &Bench,
    measurement: &Measurement,
    planned: Option<&Plan>,
    (flops, peak): (Option<Flops>, Peak),
) -> Value {
    let seconds = measurement.median();
    let wait = measurement.wait_seconds.as_deref().map(median);
    let whole = measurement.median_with_wait();
    let used = flops.map(|flops| flops.model / seconds / peak.flops_per_s);
    let tokens_per_s = measurement.tokens.map(|tokens| tokens as f64 / whole);
    let mut record = json!(measurement);
    let more = json!({
        "kind": "bench",
        "device": case.device_name(),
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
    record
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
