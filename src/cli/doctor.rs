//! `prsmed doctor`: what this machine offers, and why a GPU cannot be used.

use super::context::Context;
use super::report::{CommandEnd, CommandResult};
use crate::hub;
use crate::plan::detect::{self, Detected, Driver};
use crate::plan::host::Host;
use crate::plan::unsupported::refusal;
use crate::tensor::{self, CudaSide, Device, Kind, Tensor, guard};
use crate::units::Bytes;
use serde_json::json;
use std::collections::BTreeSet;
use std::path::Path;

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

pub(super) fn run(_: &Args, context: &Context) -> CommandResult {
    let visible = context.env.cuda_visible_devices.as_deref();
    let (built, driver, gpus) = (tensor::cuda_version(), detect::driver(), detect::detect(visible));
    let device = tensor::default_device();
    let no_gpu = (device == Device::Cpu).then(|| detect::why_no_gpu(visible));
    let (side, torch_problem) = (CudaSide::current(), torch_problem());
    let works = [device, Device::Cpu].into_iter().find(|device| computes(*device));
    let host = Host::detect();
    let (options, free) = (&context.env.hub, hub::free_bytes(&context.env.hub.cache_dir));
    let reached = if options.offline { Err("HF_HUB_OFFLINE is set".to_owned()) } else { hub::reach(options) };

    let mut lines = Vec::new();
    let mut add = |label: &str, text: &str| lines.push(format!("{label:<10}{text}"));
    let cuda = built.map_or_else(|| "without CUDA".to_owned(), |(major, minor)| format!("for CUDA {major}.{minor}"));
    let folder = tensor::libtorch_folder();
    add("libtorch", &format!("{}, built {cuda}, in {}", tensor::libtorch_version(), folder.display()));
    if let Some(problem) = &torch_problem {
        add("libtorch", &format!("warning: {problem}"));
    }
    add("CUDA side", side.reason().as_deref().map_or("open", |_| "not open"));
    let supports = |driver: &Driver| format!("{}, supports CUDA {}.{}", driver.version, driver.cuda.0, driver.cuda.1);
    add("driver", &driver.as_ref().map_or_else(|_| "none found".to_owned(), supports));
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
    add("hub", &format!("{}: {hub}", options.shown_endpoint()));
    let is_hidden = if works == Some(Device::Cpu) && device != Device::Cpu { HIDES_GPUS } else { "" };
    add("training", &format!("{}{is_hidden}", advice(works)));
    context.output.line(lines.join("\n"))?;
    context.output.record(&json!({
        "kind": "result",
        "libtorch": tensor::libtorch_version(),
        "libtorch_folder": folder,
        "libtorch_problem": torch_problem,
        "cuda_side": side.reason().unwrap_or_else(|| "open".to_owned()),
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
        "hub": options.shown_endpoint(),
        "hub_error": reached.err(),
        "training_device": works.map(|device| if device == Device::Cpu { "cpu" } else { "gpu" }),
    }))?;
    Ok(if works.is_some() { CommandEnd::Done } else { CommandEnd::No })
}

fn gpu_text(gpu: &Detected) -> String {
    let refusal = gpu.capability.and_then(refusal);
    let refused = refusal.map_or_else(String::new, |reason| format!("; it cannot be used: {reason}"));
    format!("{}, {} of {} free{refused}", gpu.name, Bytes(gpu.free), Bytes(gpu.offered()))
}

/// What is wrong with the loaded libraries of torch: another version than this program was compiled for, or libraries of
/// two installations.
fn torch_problem() -> Option<String> {
    let (loaded, wanted) = (tensor::libtorch_version(), tensor::built_for_torch());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    mixed_torch(&maps).or_else(|| {
        (loaded != wanted).then(|| {
            format!(
                "this prsmed was compiled for torch {wanted}; install that version, or build prsmed again (`scripts/setup`)"
            )
        })
    })
}

/// The folders of torch's libraries in the memory map of a process, if there are several.
fn mixed_torch(maps: &str) -> Option<String> {
    let is_torch = |name: &str| name.starts_with("libtorch") || name.starts_with("libc10");
    let paths = maps.lines().filter_map(|line| Some(Path::new(line.get(line.find('/')?..)?)));
    let torch = paths.filter(|path| path.file_name().is_some_and(|name| is_torch(&name.to_string_lossy())));
    let folders: BTreeSet<&Path> = torch.filter_map(Path::parent).collect();
    let names: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    let all = names.join(" and ");
    let text = format!("libraries of several torch installations are loaded, from {all}: check LD_LIBRARY_PATH");
    Some(text).filter(|_| names.len() > 1)
}

/// Whether a small product can be computed on `device`.
fn computes(device: Device) -> bool {
    let product = guard::guard(|| {
        let ones = Tensor::ones([8, 8], (Kind::Float, device));
        Ok(ones.matmul(&ones).sum(Kind::Float).double_value(&[]))
    });
    product.is_ok_and(|sum| (sum - 512.0).abs() < 1e-3)
}

/// Said where the GPU fails.
const HIDES_GPUS: &str = "; set `CUDA_VISIBLE_DEVICES=` (empty), which hides the GPU that cannot be used";

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_without_kernels_in_libtorch_is_named() {
        let gpu = |name: &str, capability| Detected {
            index: 0,
            name: name.into(),
            uuid: "GPU-a".into(),
            total: 16 << 30,
            reserved: 0,
            free: 15 << 30,
            capability: Some(capability),
            mig: detect::Mig::Off,
        };
        for (name, capability) in [("Tesla V100-SXM2-16GB", (7, 0)), ("NVIDIA P100", (6, 0)), ("K80", (3, 7))] {
            let text = gpu_text(&gpu(name, capability));
            let expected = format!("it cannot be used: compute capability {}.{}; ", capability.0, capability.1);
            assert!(text.contains(&expected), "{text}");
        }
        assert_eq!(gpu_text(&gpu("Tesla T4", (7, 5))), "Tesla T4, 15.00 GiB of 16.00 GiB free");
    }

    #[test]
    fn libraries_of_two_torch_installations_are_named() {
        let line = |path: &str| format!("7f0000000000-7f0000001000 r-xp 00000000 fe:00 12 {path}\n");
        let one = line("/a/lib/libtorch_cpu.so") + &line("/a/lib/libc10.so") + &line("/usr/lib/libc.so.6");
        assert_eq!(mixed_torch(&one), None);
        let two = mixed_torch(&(one + &line("/b/lib/libc10.so"))).unwrap();
        assert!(two.contains("/a/lib and /b/lib"), "{two}");
        assert_eq!(torch_problem(), None);
    }
}
