//! Detects the NVIDIA GPUs of this machine through NVML, the driver's management library.
//!
//! NVML is loaded when [`devices`] runs; without a driver there are no devices. A device offers its total memory minus
//! what the driver reserves. Detection therefore needs no table; the table of GPUs only adds rates.

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use serde::Serialize;

use crate::plan::gpus::{GIB, Gpu, GpuBudget, MIB, by_name, find};
use crate::plan::host::Host;
use crate::tensor::{self, CudaSide};

/// One device that a process can use: a GPU, or a slice of one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Detected {
    /// NVML's index of the GPU (order of the PCI bus); slices have the index of their GPU.
    pub index: u32,
    /// NVML's name.
    pub name: String,
    /// `GPU-...` or `MIG-...`, as `CUDA_VISIBLE_DEVICES` takes it.
    pub uuid: String,
    /// Total as `nvidia-smi` shows it, bytes.
    pub total: u64,
    /// Memory that the driver reserves, bytes.
    pub reserved: u64,
    /// Unused memory now, bytes.
    pub free: u64,
    /// Compute capability; `None` when the driver does not report it.
    pub capability: Option<(u32, u32)>,
    /// Whether it is a MIG slice.
    pub mig: Mig,
}

/// Multi-Instance GPU (MIG) mode of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mig {
    /// A whole GPU.
    Off,
    /// A slice of the GPU with this UUID.
    Slice(String),
    /// A GPU in MIG mode without a slice that is visible to this process: CUDA cannot use it.
    NoSlices,
}

impl Detected {
    /// Memory that CUDA offers to a process on the idle device, bytes.
    pub fn offered(&self) -> u64 {
        self.total.saturating_sub(self.reserved)
    }

    /// Memory that other processes use now, bytes.
    pub fn in_use(&self) -> u64 {
        self.offered().saturating_sub(self.free)
    }

    /// The matching GPU of the table, if one is listed with this much memory.
    pub fn gpu(&self) -> Option<&'static Gpu> {
        let by_size = format!("{} {}gb", self.name, self.total.div_ceil(GIB));
        [by_size.as_str(), self.name.as_str()]
            .into_iter()
            .filter_map(by_name)
            .find(|gpu| gpu.smi_mib.abs_diff(self.total / MIB) <= gpu.smi_mib / 12)
    }

    /// Memory as detected; rates of the listed GPU (for a slice, its share of them), else none.
    pub fn budget(&self) -> GpuBudget {
        let note = format!(
            "{}: {} MiB, of which the driver reserves {} MiB and other processes use {} MiB",
            self.name,
            self.total / MIB,
            self.reserved / MIB,
            self.in_use() / MIB
        );
        let gb = self.total.div_ceil(GIB).clamp(1, 1024);
        let slice = matches!(self.mig, Mig::Slice(_)).then(|| find(&self.name).ok()).flatten();
        let gpu = || self.gpu().map(|gpu| gpu.budget(String::new()));
        let of_size = || Some(GpuBudget { has_own_rates: false, ..find(&format!("{gb}gb")).ok()? });
        let like = slice.or_else(gpu).or_else(of_size).expect("1 to 1024 GB are budgets");
        let host_free = Some(Host::detect().available);
        let capability = self.capability.unwrap_or(like.capability);
        let name = like.name.clone().or_else(|| Some(self.name.clone()));
        GpuBudget { total_bytes: self.offered(), name, capability, note, host_free, ..like }
    }
}

/// The devices visible to a process with this `CUDA_VISIBLE_DEVICES`, in its order; none without a driver.
pub fn detect(visible: Option<&str>) -> Vec<Detected> {
    select(&devices().unwrap_or_default(), visible)
}

/// The device of the process with number `local_rank` on its machine, and its index. A process may see its own only.
pub fn of_process(devices: &[Detected], local_rank: usize) -> Option<(usize, &Detected)> {
    let index = if devices.len() == 1 { 0 } else { local_rank };
    Some((index, devices.get(index)?))
}

/// Every device of the machine, a GPU in MIG mode replaced by its slices.
///
/// # Errors
/// The message of the driver library: it is missing, or it does not fit the driver in use.
pub fn devices() -> Result<Vec<Detected>, String> {
    let nvml = nvml()?;
    let count = nvml.device_count().map_err(|error| error.to_string())?;
    let mut found = Vec::new();
    for index in 0..count {
        let Ok(gpu) = nvml.device_by_index(index) else { continue };
        let Some(whole) = describe(&gpu, index, Mig::Off) else { continue };
        if !gpu.mig_mode().is_ok_and(|mode| mode.current == 1) {
            found.push(whole);
            continue;
        }
        let slots = 0..gpu.mig_device_count().unwrap_or(0);
        let handles = slots.filter_map(|slot| gpu.mig_device_by_index(slot).ok());
        let slices: Vec<Detected> =
            handles.filter_map(|slice| describe(&slice, index, Mig::Slice(whole.uuid.clone()))).collect();
        // The driver may report the architecture of the whole GPU only.
        let capability = whole.capability;
        if slices.is_empty() {
            found.push(Detected { mig: Mig::NoSlices, ..whole });
        }
        found.extend(slices.into_iter().map(|slice| Detected { capability: slice.capability.or(capability), ..slice }));
    }
    // GPUs that share the host's memory report none of their own. The planner does not support them.
    found.retain(|device| device.total > 0 || device.mig == Mig::NoSlices);
    Ok(found)
}

/// The NVIDIA driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Driver {
    /// Its version, for example `580.65.06`.
    pub version: String,
    /// The newest CUDA that it supports: major, minor.
    pub cuda: (i64, i64),
}

/// The driver of this machine.
///
/// # Errors
/// In the driver library's words, as [`devices`].
pub fn driver() -> Result<Driver, String> {
    let nvml = nvml()?;
    let cuda = i64::from(nvml.sys_cuda_driver_version().map_err(|error| error.to_string())?);
    let version = nvml.sys_driver_version().map_err(|error| error.to_string())?;
    Ok(Driver { version, cuda: (cuda / 1000, cuda % 1000 / 10) })
}

/// The driver library, or why there is none, in its words or those of the dynamic linker.
fn nvml() -> Result<Nvml, String> {
    Nvml::init().map_err(|error| match error {
        NvmlError::LibloadingError(words) => words.to_string(),
        other => other.to_string(),
    })
}

/// Why this process, with this `CUDA_VISIBLE_DEVICES`, has no GPU.
pub fn why_no_gpu(visible: Option<&str>) -> String {
    let (side, built) = (CudaSide::current(), tensor::cuda_version());
    no_gpu_reason(&side, built, driver(), &devices().unwrap_or_default(), visible)
}

/// The oldest Linux driver of a major CUDA version (NVIDIA's release notes of the CUDA toolkit).
const OLDEST_DRIVERS: [(i64, &str); 3] = [(11, "450"), (12, "525"), (13, "580")];

fn no_gpu_reason(
    side: &CudaSide,
    built: Option<(i64, i64)>,
    driver: Result<Driver, String>,
    devices: &[Detected],
    visible: Option<&str>,
) -> String {
    let reason = side.reason().filter(|_| !matches!(side, CudaSide::NoDriver(_)));
    let (Some((major, minor)), None) = (built, &reason) else {
        return reason.or_else(|| side.reason()).unwrap_or_else(|| "libtorch is built without CUDA".to_owned());
    };
    let oldest = OLDEST_DRIVERS.iter().find(|(cuda, _)| *cuda == major).map_or("a newer one", |(_, driver)| driver);
    match driver {
        Err(words) => {
            format!("no NVIDIA driver was found ({words}); CUDA {major}.{minor} needs driver {oldest} or newer")
        }
        Ok(driver) if driver.cuda.0 < major => format!(
            "driver {} supports CUDA up to {}.{}, this libtorch is built for CUDA {major}.{minor} and needs driver \
             {oldest} or newer",
            driver.version, driver.cuda.0, driver.cuda.1
        ),
        Ok(_) if devices.is_empty() => "the driver lists no GPU".to_owned(),
        Ok(_) if select(devices, visible).is_empty() => {
            format!("`CUDA_VISIBLE_DEVICES={}` hides all {} GPUs", visible.unwrap_or_default(), devices.len())
        }
        Ok(_) if devices.iter().all(|device| device.mig == Mig::NoSlices) => {
            "the GPU is in MIG mode and this process may use no slice of it".to_owned()
        }
        Ok(driver) => format!(
            "driver {} lists {} GPUs, but CUDA does not start; check that this process may use /dev/nvidia*",
            driver.version,
            devices.len()
        ),
    }
}

fn describe(device: &Device, index: u32, mig: Mig) -> Option<Detected> {
    // A GPU in MIG mode may hide its own memory from a process to which only a slice is visible.
    let (total, reserved, free) =
        device.memory_info().map_or((0, 0, 0), |memory| (memory.total, memory.reserved, memory.free));
    let capability = device
        .cuda_compute_capability()
        .ok()
        .and_then(|version| Some((u32::try_from(version.major).ok()?, u32::try_from(version.minor).ok()?)));
    let (name, uuid) = (device.name().ok()?, device.uuid().ok()?);
    Some(Detected { index, name, uuid, total, reserved, free, capability, mig })
}

/// The devices that `CUDA_VISIBLE_DEVICES` selects, in its order, by CUDA's rules:
///
/// * unset: all; empty: none;
/// * an entry is an index of a GPU or the beginning of a UUID that matches one device only;
/// * the first entry that matches nothing ends the list; a device named twice counts once;
/// * a GPU in MIG mode means its first slice.
///
/// Indices are NVML's, which follow the PCI bus. CUDA sorts by speed unless `CUDA_DEVICE_ORDER=PCI_BUS_ID`, so on
/// machines with different GPUs only UUIDs are certain.
pub fn select(devices: &[Detected], visible: Option<&str>) -> Vec<Detected> {
    let Some(visible) = visible else { return devices.to_vec() };
    let mut chosen: Vec<Detected> = Vec::new();
    for entry in visible.split(',').map(str::trim) {
        let Some(device) = named(devices, entry) else { break };
        if !chosen.contains(device) {
            chosen.push(device.clone());
        }
    }
    chosen
}

fn named<'a>(devices: &'a [Detected], entry: &str) -> Option<&'a Detected> {
    if let Ok(index) = entry.parse::<u32>() {
        return devices.iter().find(|device| device.index == index);
    }
    let fits = |device: &&Detected| match &device.mig {
        Mig::Slice(gpu) if entry.starts_with("GPU-") => gpu.starts_with(entry),
        _ => device.uuid.starts_with(entry),
    };
    let first = devices.iter().find(fits).filter(|_| entry.len() > 4)?;
    // An entry that names a GPU may match several of its slices; that is not ambiguous.
    let same = |other: &Detected| other == first || (entry.starts_with("GPU-") && other.index == first.index);
    devices.iter().filter(fits).all(same).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::device_terms::DeviceUsage;
    use crate::plan::machine::Machine;

    fn gpu(index: u32, name: &str, uuid: &str, total_mib: u64, reserved_mib: u64) -> Detected {
        Detected {
            index,
            name: name.into(),
            uuid: uuid.into(),
            total: total_mib * MIB,
            reserved: reserved_mib * MIB,
            free: (total_mib - reserved_mib - 100) * MIB,
            capability: Some((8, 9)),
            mig: Mig::Off,
        }
    }

    fn machine() -> Vec<Detected> {
        let slice = |uuid: &str, profile: &str, mib| Detected {
            mig: Mig::Slice("GPU-cc".into()),
            capability: Some((8, 0)),
            ..gpu(2, &format!("NVIDIA A100 80GB PCIe MIG {profile}"), uuid, mib, 0)
        };
        vec![
            gpu(0, "NVIDIA GeForce RTX 4090", "GPU-aa1", 24_564, 484),
            gpu(1, "NVIDIA GeForce RTX 4060 Ti", "GPU-ab2", 16_380, 436),
            slice("MIG-11", "1g.10gb", 9_728),
            slice("MIG-22", "2g.20gb", 19_968),
        ]
    }

    fn uuids(visible: Option<&str>) -> Vec<String> {
        select(&machine(), visible).into_iter().map(|device| device.uuid).collect()
    }

    #[test]
    fn cuda_visible_devices_selects_devices_by_cudas_rules() {
        assert_eq!(uuids(None).len(), 4);
        assert_eq!(uuids(Some("")), [""; 0]);
        assert_eq!(uuids(Some("1, 0")), ["GPU-ab2", "GPU-aa1"]);
        assert_eq!(uuids(Some("0,7,1")), ["GPU-aa1"]);
        assert_eq!(uuids(Some("-1,0")), [""; 0]);
        assert_eq!(uuids(Some("0,0")), ["GPU-aa1"]);
        assert_eq!(uuids(Some("GPU-ab")), ["GPU-ab2"]);
        assert_eq!(uuids(Some("GPU-a")), [""; 0], "fits two");
        assert_eq!(uuids(Some("MIG-22,0")), ["MIG-22", "GPU-aa1"]);
        assert_eq!(uuids(Some("MIG-")), [""; 0], "fits two");
        assert_eq!(uuids(Some("2")), ["MIG-11"]);
        assert_eq!(uuids(Some("GPU-cc")), ["MIG-11"]);
        assert_eq!(uuids(Some("none")), [""; 0]);
    }

    #[test]
    fn the_budget_of_a_device_is_the_memory_that_it_reports() {
        let machine = machine();
        let budget = machine[0].budget();
        assert_eq!((budget.total_bytes / MIB, budget.gpu.unwrap().name.as_str()), (24_080, "RTX 4090"));
        let expected = "the driver reserves 484 MiB and other processes use 100 MiB";
        assert!(budget.note.ends_with(expected), "{}", budget.note);
        assert_eq!(machine[1].budget().gpu.unwrap().gb, 16, "the model exists with 8 and 16 GB");
        let slice = machine[2].budget();
        assert_eq!((slice.total_bytes / MIB, slice.capability), (9_728, (8, 0)));
        assert!((slice.rates.half - 312e12 / 7.0).abs() < 1e6);
    }

    #[test]
    fn an_unlisted_device_has_no_rates_of_its_own() {
        let device = gpu(0, "NVIDIA GeForce RTX 2999", "GPU-x", 11_264, 280);
        let budget = device.budget();
        assert_eq!((budget.gpu, budget.total_bytes / MIB, budget.marketing_bytes / GIB), (None, 10_984, 11));
        assert_eq!((budget.name.as_deref(), budget.has_own_rates), (Some("NVIDIA GeForce RTX 2999"), false));
        assert_eq!(budget.rates, find("11gb").unwrap().rates, "to compare settings");
        let laptop = gpu(0, "NVIDIA GeForce RTX 4090 Laptop GPU", "GPU-y", 16_376, 430).budget();
        assert_eq!((laptop.name.as_deref(), laptop.has_own_rates), (Some("RTX 4090 Laptop"), false));
        let listed = gpu(0, "NVIDIA GeForce RTX 2080 Ti", "GPU-z", 11_264, 280).budget();
        assert_eq!((listed.gpu.unwrap().name.as_str(), listed.has_own_rates), ("RTX 2080 Ti", true));
    }

    #[test]
    fn each_process_has_its_own_device() {
        let machine = machine();
        let of = |rank| of_process(&machine, rank).map(|(index, device)| (index, device.uuid.as_str()));
        assert_eq!([of(0), of(1)], [Some((0, "GPU-aa1")), Some((1, "GPU-ab2"))]);
        assert_eq!((of(3), of(4)), (Some((3, "MIG-22")), None), "more processes than devices");
        assert_eq!(of_process(&machine[1..2], 3).map(|(index, _)| index), Some(0), "each process sees its own");
        assert_eq!(of_process(&[], 0), None);
    }

    #[test]
    fn a_detected_gpu_without_kernels_is_refused() {
        let old = Detected { capability: Some((7, 0)), ..gpu(0, "Tesla V100-SXM2-16GB", "GPU-v", 16_384, 250) };
        let machine = Machine::Cuda(old.budget(), DeviceUsage::default());
        let error = machine.check_gpu().unwrap_err().to_string();
        assert!(error.contains("V100 16GB: compute capability 7.0; "), "{error}");
        let unknown = Detected { name: "NVIDIA Test".into(), capability: Some((6, 1)), ..old };
        let error = Machine::Cuda(unknown.budget(), DeviceUsage::default()).check_gpu().unwrap_err().to_string();
        assert!(error.contains("NVIDIA Test: compute capability 6.1; "), "{error}");
        let turing = Detected { capability: Some((7, 5)), ..gpu(0, "Tesla T4", "GPU-t", 15_360, 450) };
        let turing = Machine::Cuda(turing.budget(), DeviceUsage::default());
        assert!(turing.check_gpu().is_ok() && !turing.has_bf16());
    }

    #[test]
    fn the_reason_why_no_gpu_is_usable_names_what_to_change() {
        let driver = |cuda| Ok(Driver { version: "550.54".into(), cuda });
        let open = CudaSide::Open;
        let reason = |driver, visible| no_gpu_reason(&open, Some((13, 0)), driver, &machine(), visible);
        let without = no_gpu_reason(&CudaSide::TorchWithoutCuda, None, driver((13, 0)), &[], None);
        assert!(without.contains("built without CUDA; install its CUDA build"), "{without}");
        let no_driver = CudaSide::NoDriver("libcuda.so.1: not found".into());
        let cpu_build = no_gpu_reason(&no_driver, None, Err("no library".into()), &[], None);
        assert_eq!(cpu_build, "there is no NVIDIA driver (libcuda.so.1: not found)");
        let not_built = no_gpu_reason(&CudaSide::NotBuilt, Some((13, 0)), driver((13, 0)), &machine(), None);
        assert!(not_built.contains("then build again"), "{not_built}");
        let text = reason(driver((12, 4)), None);
        assert!(text.contains("up to 12.4") && text.contains("CUDA 13.0 and needs driver 580"), "{text}");
        assert!(reason(Err("no library".into()), None).contains("(no library); CUDA 13.0 needs driver 580"));
        assert!(reason(driver((13, 0)), Some("")).contains("`CUDA_VISIBLE_DEVICES=` hides all 4 GPUs"));
        assert!(reason(driver((13, 0)), None).contains("/dev/nvidia"));
        assert_eq!(no_gpu_reason(&open, Some((13, 0)), driver((13, 0)), &[], None), "the driver lists no GPU");
    }

    #[test]
    fn a_machine_without_a_driver_has_no_devices() {
        if std::path::Path::new("/dev/nvidiactl").exists() {
            return;
        }
        assert_eq!(detect(None), []);
        assert!(devices().is_err_and(|words| !words.is_empty()));
    }
}
