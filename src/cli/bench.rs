//! `prsmed bench`: times training steps and predictions, and measures their memory.

use super::args::{PlanArgs, SettingsArgs};
use super::context::Context;
use super::report::Outcome;
use crate::job::bench::{Bench, Flops, Part, Peak};
use crate::job::measure::{Count, Measurement, Work};
use crate::metrics::order::median;
use crate::plan::detect;
use crate::plan::report::Plan;
use crate::tensor::kernel_times::KernelTime;
use crate::tensor::{self, Device, memory};
use crate::units::Bytes;
use crate::{Error, Result};
use serde_json::{Value, json};

/// Time real training steps, with their memory and use of the processor
///
/// Runs the engine's own steps on example batches, with random weights at the sizes of the settings: no data, no
/// download. Memory is planned first, and what cannot fit is refused.
///
/// FLOP of a step (not counted with `--no-plan`): for each token and weight of the language model's layers 4 (2 forward, 2 for the gradient of the
/// activations; frozen weights get none), 6 where the base is trained too; everything else as the plan counts it,
/// nothing that is computed again. Utilisation is their rate over that of the GPU's table, or with `--measure-peak` and
/// on the CPU over the rate of a large product of the same dtype, measured before.
///
/// `--compare` runs the settings without and with a change in turn and prints the ratios of their medians.
#[derive(Debug, clap::Args)]
#[command(mut_arg("preset", |arg| arg.help("Named settings: tiny, full, cpu, gpu-24gb, ... [default: full]")))]
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
    /// Time the parts of one more step (modules of the forward pass, backward pass, optimizer), and the kernels of another
    #[arg(long)]
    parts: bool,
    /// Settings to compare with those given: `KEY=VALUE`, several with spaces between them
    #[arg(long, value_name = "SETTINGS")]
    compare: Option<String>,
    /// With `--compare`: how often both are run
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    #[command(flatten)]
    plan: PlanArgs,
}

/// A device by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum On {
    /// The processor
    Cpu,
    /// The first GPU
    Cuda,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let base = bench(args, Vec::new(), context)?;
    let other = args.compare.as_ref().map(|sets| {
        let sets = sets.split_whitespace().map(|set| (set.to_owned(), "--compare".to_owned())).collect();
        bench(args, sets, context)
    });
    let other = other.transpose()?;
    let planned = base.plan(&context.memory, &context.runtime)?;
    if let Some(other) = &other {
        other.plan(&context.memory, &context.runtime)?;
        return compare(args, (&base, other), context);
    }
    let measurement = base.measure(&context.runtime)?;
    let peak = base.peak(args.measure_peak)?;
    let flops = planned.as_ref().and_then(|(_, flops)| *flops).filter(|_| args.data_root.is_none());
    print_result(&base, &measurement, planned.as_ref().map(|(plan, _)| plan), (flops, peak), context)
}

fn bench(args: &Args, sets: Vec<(String, String)>, context: &Context) -> Result<Bench> {
    let (texts, device) = ((args.text_tokens, args.answer_tokens), device(args.device, context)?);
    let mut bench = Bench::new(args.settings.resolve(sets)?, device, texts, &context.runtime)?;
    (bench.work, bench.part) = (args.task, args.part);
    bench.count = Count { warmup: args.warmup, steps: args.steps };
    bench.data_root.clone_from(&args.data_root);
    (bench.parts, bench.plans) = (args.parts, args.plan.is_made());
    Ok(bench)
}

fn device(on: Option<On>, context: &Context) -> Result<Device> {
    match (on, tensor::default_device()) {
        (Some(On::Cpu), _) => Ok(Device::Cpu),
        (Some(On::Cuda), Device::Cpu) => {
            let why = detect::why_no_gpu(context.env.cuda_visible_devices.as_deref());
            let reason = format!("no GPU can be used: {why}");
            Err(Error::config("--device", reason, "leave the flag out to use the CPU"))
        }
        (_, found) => Ok(found),
    }
}

/// Runs the settings without and with the change, in turn.
fn compare(args: &Args, (base, other): (&Bench, &Bench), context: &Context) -> anyhow::Result<Outcome> {
    let change = args.compare.as_deref().unwrap_or_default();
    let mut pairs = Vec::new();
    for _ in 0..args.rounds {
        let pair = [base, other].map(|case| {
            let measured = case.measure(&context.runtime);
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
    case: &Bench,
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
    case: &Bench,
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
            case.device_name(),
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
    if let Some(kernels) = &measurement.kernels {
        let all: f64 = kernels.iter().map(|kernel| kernel.seconds).sum();
        lines.push(format!("kernels of a step, {all:.4} s in all; the longest:"));
        let line = |kernel: &KernelTime| format!("{:10.4} s {:6} x {}", kernel.seconds, kernel.calls, kernel.name);
        lines.extend(kernels.iter().take(15).map(line));
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
