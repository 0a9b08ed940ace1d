//! `prsmed calibrate`: measures this machine's memory and speed for later plans.

use super::context::Context;
use super::report::{CommandEnd, CommandResult};
use crate::Error;
use crate::plan::reading::{self, DeviceReading};
use crate::plan::speed::ProductRate;
use crate::plan::{calibrate, detect};
use crate::tensor::Device;
use crate::units::Bytes;
use serde_json::json;

/// Measure this machine once, so that plans need not assume
///
/// Takes less than a minute. Measures the memory of the process beside its tensors (CUDA context, libraries,
/// workspaces) and the speed of matrix products, copies, small operators and the disk, on the first GPU, or on the CPU
/// without one. The reading is saved in the cache folder. Later plans, presets and trainings on this machine use it,
/// and their texts say so. Run it again after an update of libtorch or the driver. Run it on an idle machine: other
/// programs make it look slower than it is.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed calibrate
  prsmed calibrate --cpu")]
pub(super) struct Args {
    /// Measure the CPU, also where a GPU is visible
    #[arg(long)]
    cpu: bool,
}

pub(super) fn run(args: &Args, context: &Context) -> CommandResult {
    let device = if args.cpu { Device::Cpu } else { crate::tensor::default_device() };
    let cache = context.env.cache.as_deref().ok_or_else(|| {
        Error::config("PRSMED_CACHE", "there is no cache folder for the reading", "set `PRSMED_CACHE` to a folder")
    })?;
    let gpu = detect::detect(context.env.cuda_visible_devices.as_deref()).into_iter().next();
    let gpu = gpu.filter(|_| device != Device::Cpu);
    let reading = calibrate::measure(device, gpu.as_ref(), Some(cache), &mut |step| {
        context.runtime.note(format!("measuring: {step}"));
    })?;
    let path = reading::save(cache, &reading)?;
    context.output.line(lines(&reading).join("\n"))?;
    context.output.line(format!("saved to {}", path.display()))?;
    let mut record = serde_json::to_value(&reading)?;
    record["kind"] = json!("calibration");
    record["out"] = json!(path);
    context.output.record(&record)?;
    Ok(CommandEnd::Done)
}

fn lines(reading: &DeviceReading) -> Vec<String> {
    let speed = &reading.speed;
    let mut lines = vec![format!("{}, libtorch {}", reading.identity.name, reading.identity.libtorch)];
    lines.push("memory after the first use of:".into());
    for level in &reading.memory {
        let used = level.used.map_or_else(|| "unknown".into(), |used| Bytes(used).to_string());
        let workspace = level.workspace.map_or_else(String::new, |bytes| format!(", workspace {}", Bytes(bytes)));
        lines.push(format!("  {}: process {used}, allocator {}{workspace}", level.step, Bytes(level.reserved)));
    }
    let products = |rates: &[ProductRate]| {
        let rates: Vec<String> = rates.iter().map(|rate| format!("{:.3}", rate.flops_per_s / 1e12)).collect();
        format!("{} TFLOP/s (small, middle, large)", rates.join(", "))
    };
    lines.push(format!("matrix products in fp32: {}", products(&speed.fp32)));
    lines.push(format!("matrix products in bf16: {}", products(&speed.half)));
    lines.push(format!("copies within the device: {:.1} GB/s", speed.bandwidth / 1e9));
    lines.push(format!("a small operator: {:.1} us", 1e6 * speed.launch));
    if speed.host > 0.0 {
        lines.push(format!("the CPU's work for an operator: {:.1} us", 1e6 * speed.host));
    }
    if let Some(bus) = speed.bus {
        lines.push(format!("copies from host to GPU: {:.1} GB/s", bus / 1e9));
    }
    if let Some(disk) = speed.disk {
        lines.push(format!("reading from the cache folder's disk: {:.2} GB/s", disk / 1e9));
    }
    lines
}
