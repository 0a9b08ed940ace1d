//! `prsmed doctor`: what this machine offers, and why a GPU cannot be used.

use super::context::Context;
use super::report::Outcome;
use crate::hub;
use crate::plan::detect::{self, Detected};
use crate::plan::host::Host;
use crate::tensor::{self, Device, Kind, Tensor, guard};
use crate::units::Bytes;
use serde_json::json;

/// Check this machine: libtorch, GPU and driver, disk, hub
///
/// Prints the versions of libtorch and CUDA, the GPUs with their free memory or the reason why none is usable, the
/// cache folder with its free disk, whether an access token is set (never the token itself), and whether the hub
/// answers.
///
/// Exit code 0 when training is possible on some device, 1 when it is not.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  prsmed doctor")]
pub(super) struct Args {}

pub(super) fn run(_: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let visible = context.env.cuda_visible_devices.as_deref();
    let (built, driver, gpus) = (tensor::cuda_version(), detect::driver(), detect::detect(visible));
    let device = tensor::default_device();
    let no_gpu = (device == Device::Cpu).then(|| detect::why_no_gpu(built, visible));
    let works = [device, Device::Cpu].into_iter().find(|device| computes(*device));
    let host = Host::detect();
    let (options, free) = (&context.env.hub, hub::free_bytes(&context.env.hub.cache_dir));
    let reached = if options.offline { Err("HF_HUB_OFFLINE is set".to_owned()) } else { hub::reach(options) };

    let mut lines = Vec::new();
    let mut add = |label: &str, text: &str| lines.push(format!("{label:<10}{text}"));
    let cuda = built.map_or_else(|| "without CUDA".to_owned(), |(major, minor)| format!("for CUDA {major}.{minor}"));
    add("libtorch", &format!("{}, built {cuda}", tensor::libtorch_version()));
    let driver_text = match &driver {
        Ok(driver) => format!("{}, supports CUDA {}.{}", driver.version, driver.cuda.0, driver.cuda.1),
        Err(reason) => format!("none found ({reason})"),
    };
    add("driver", &driver_text);
    for gpu in &gpus {
        add("GPU", &gpu_text(gpu));
    }
    if let Some(reason) = &no_gpu {
        add("GPU", &format!("none is usable: {reason}"));
    }
    add("CPU", &format!("{} threads, {} of memory available", host.num_threads, host.available));
    let space = free.map_or_else(|| "free disk unknown".to_owned(), |free| format!("{} free", Bytes(free)));
    add("cache", &format!("{}: {space}", options.cache_dir.display()));
    let token = if options.token.is_some() { "set" } else { "not set (only private and gated repositories need one)" };
    add("token", token);
    let hub = reached.as_ref().map_or_else(|reason| format!("not reachable: {reason}"), |()| "reachable".to_owned());
    add("hub", &format!("{}: {hub}", options.endpoint));
    add("training", advice(works));
    context.output.line(lines.join("\n"))?;
    context.output.record(&json!({
        "kind": "result",
        "libtorch": tensor::libtorch_version(),
        "cuda": built.map(|(major, minor)| format!("{major}.{minor}")),
        "driver": driver.as_ref().ok(),
        "driver_error": driver.as_ref().err(),
        "gpus": gpus,
        "no_gpu_reason": no_gpu,
        "num_threads": host.num_threads,
        "available_memory": host.available,
        "cache": options.cache_dir,
        "cache_free_bytes": free,
        "token_is_set": options.token.is_some(),
        "hub": options.endpoint,
        "hub_error": reached.err(),
        "training_device": works.map(|device| if device == Device::Cpu { "cpu" } else { "gpu" }),
    }))?;
    Ok(if works.is_some() { Outcome::Done } else { Outcome::No })
}

fn gpu_text(gpu: &Detected) -> String {
    format!("{}, {} of {} free", gpu.name, Bytes(gpu.free), Bytes(gpu.offered()))
}

/// Whether a small product can be computed on `device`.
fn computes(device: Device) -> bool {
    let product = guard::guard(|| {
        let ones = Tensor::ones([8, 8], (Kind::Float, device));
        Ok(ones.matmul(&ones).sum(Kind::Float).double_value(&[]))
    });
    product.is_ok_and(|sum| (sum - 512.0).abs() < 1e-3)
}

fn advice(device: Option<Device>) -> &'static str {
    match device {
        None => "not possible: libtorch cannot compute on any device; install it again",
        Some(Device::Cpu) => {
            "possible on the CPU: `prsmed train --data-root DATA --preset tiny`, or slowly the full model with \
             `--preset cpu`"
        }
        Some(_) => "possible on the GPU: `prsmed train --data-root DATA` finds the settings that fit it",
    }
}
