//! The machine that a process computes on, as a plan sees it: its GPU or CPU with the readings of `prsmed calibrate`.

use crate::Result;
use crate::plan::detect::{self, Detected};
use crate::plan::device_terms::DeviceUsage;
use crate::plan::gpus::{self, GpuBudget};
use crate::plan::host::Host;
use crate::plan::machine::Machine;
use crate::plan::{calibrate, reading};
use crate::runtime::Runtime;
use crate::tensor::{Device, Kind, Tensor, memory};

/// The machine on which a process computes that has this runtime.
///
/// # Errors
/// [`crate::Error::Config`] for a GPU that this program cannot use.
pub fn here(runtime: &Runtime) -> Result<Machine> {
    if runtime.device() == Device::Cpu { Ok(this_cpu(runtime)) } else { detected(runtime) }
}

/// This machine's CPU.
pub fn this_cpu(runtime: &Runtime) -> Machine {
    with_reading(Machine::Cpu(Host::detect()), Device::Cpu, None, runtime)
}

/// `machine` with its reading, if `prsmed calibrate` has made one.
fn with_reading(machine: Machine, device: Device, gpu: Option<&Detected>, runtime: &Runtime) -> Machine {
    let Ok(identity) = calibrate::identity(device, gpu) else { return machine };
    let (reading, problem) = reading::find(runtime.cache(), &identity);
    if let Some(problem) = problem {
        runtime.warn(problem);
    }
    machine.with_reading(reading)
}

/// The GPU of this process, whatever the device of its runtime (the first one that is visible to it, or its own of several processes), with the memory that
/// other processes use on it; without any, the CPU.
///
/// # Errors
/// As [`here`].
pub fn detected(runtime: &Runtime) -> Result<Machine> {
    let devices = detect::detect(runtime.visible_gpus());
    let local_rank = runtime.local_rank().unwrap_or(0);
    let Some((index, own)) = detect::of_process(&devices, local_rank) else {
        return Ok(libtorch_device(runtime).unwrap_or_else(|| this_cpu(runtime)));
    };
    if devices.len() > 1 && runtime.local_rank().is_none() {
        let (count, name) = (devices.len(), &own.name);
        let first = format!("planning for the first, {name}");
        runtime.note(format!("{count} GPUs found; {first}. `train --gpus {count}` uses all of them"));
    }
    let usage = DeviceUsage { other_processes: own.in_use(), ..DeviceUsage::default() };
    let machine = Machine::Cuda(own.budget(), usage);
    machine.check_gpu()?;
    Ok(with_reading(machine, Device::Cuda(index), Some(own), runtime))
}

/// The GPU that libtorch uses, if the driver's management library (NVML) is missing.
fn libtorch_device(runtime: &Runtime) -> Option<Machine> {
    let device = runtime.device();
    if device == Device::Cpu {
        return None;
    }
    let _in_use = Tensor::zeros([1], (Kind::Float, device));
    let system = memory::read(device).ok()?.system;
    let (total, used) = (system.device_total?.0, system.device_used?.0);
    let like = gpus::find(&format!("{}gb", total.div_ceil(gpus::GIB))).ok()?;
    let host_free = Some(Host::detect().available);
    let budget = GpuBudget { total_bytes: total, note: "as libtorch reports it".into(), host_free, ..like };
    let usage = DeviceUsage { other_processes: used, ..DeviceUsage::default() };
    Some(with_reading(Machine::Cuda(budget, usage), device, None, runtime))
}
