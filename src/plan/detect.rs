//! The NVIDIA devices of this machine, through the driver's own library.
//!
//! NVML is loaded when [`devices`] runs; without a driver there are no devices. What a device offers to a process is its
//! total less what the driver reserves, so detection needs no table; the table only adds rates.

use nvml_wrapper::{Device, Nvml};
use serde::Serialize;

use crate::plan::cards::{Budget, Card, GIB, MIB, by_name, find};

/// One device that a process can use: a GPU, or a slice of one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Detected {
    /// NVML's index of the GPU (order of the PCI bus); slices carry that of their GPU.
    pub index: u32,
    /// NVML's name.
    pub name: String,
    /// `GPU-...` or `MIG-...`, as `CUDA_VISIBLE_DEVICES` takes it.
    pub uuid: String,
    /// Total as `nvidia-smi` shows it, bytes.
    pub total: u64,
    /// What the driver keeps of it, bytes.
    pub reserved: u64,
    /// What nobody uses now, bytes.
    pub free: u64,
    /// Compute capability; `None` when the driver does not say.
    pub capability: Option<(u32, u32)>,
    /// Whether it is a slice.
    pub mig: Mig,
}

/// A device's part in Multi-Instance GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mig {
    /// A whole GPU.
    Off,
    /// A slice of the GPU with this UUID.
    Slice(String),
    /// A GPU in MIG mode without a slice that this process may see: CUDA cannot use it.
    NoSlices,
}

impl Detected {
    /// What CUDA offers to a process on the idle device, bytes.
    pub fn offered(&self) -> u64 {
        self.total.saturating_sub(self.reserved)
    }

    /// What other processes hold now, bytes.
    pub fn in_use(&self) -> u64 {
        self.offered().saturating_sub(self.free)
    }

    /// The card of the table that this is, if listed with this much memory.
    pub fn card(&self) -> Option<&'static Card> {
        let by_size = format!("{} {}gb", self.name, self.total.div_ceil(GIB));
        [by_size.as_str(), self.name.as_str()]
            .into_iter()
            .filter_map(by_name)
            .find(|card| card.smi_mib.abs_diff(self.total / MIB) <= card.smi_mib / 12)
    }

    /// The budget: memory as detected, rates of the listed card (of its share, for a slice), else of a card of that size.
    pub fn budget(&self) -> Budget {
        let note = format!(
            "{}: {} MiB, of which the driver keeps {} MiB and others use {} MiB",
            self.name,
            self.total / MIB,
            self.reserved / MIB,
            self.in_use() / MIB
        );
        let gb = self.total.div_ceil(GIB).clamp(1, 1024);
        let slice = matches!(self.mig, Mig::Slice(_)).then(|| find(&self.name).ok()).flatten();
        let card = || self.card().map(|card| card.budget(String::new()));
        let like = slice.or_else(card).or_else(|| find(&format!("{gb}gb")).ok()).expect("1 to 1024 GB are budgets");
        Budget { total_bytes: self.offered(), capability: self.capability.unwrap_or(like.capability), note, ..like }
    }
}

/// The devices that a process with this `CUDA_VISIBLE_DEVICES` sees, in its order; none without a driver.
pub fn detect(visible: Option<&str>) -> Vec<Detected> {
    select(&devices().unwrap_or_default(), visible)
}

/// Every device of the machine, a GPU in MIG mode replaced by its slices.
///
/// # Errors
/// In the driver library's words: it is missing, or it does not fit the driver in use.
pub fn devices() -> Result<Vec<Detected>, String> {
    let nvml = Nvml::init().map_err(|error| error.to_string())?;
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
        // The driver may tell the architecture only of the GPU.
        let capability = whole.capability;
        if slices.is_empty() {
            found.push(Detected { mig: Mig::NoSlices, ..whole });
        }
        found.extend(slices.into_iter().map(|slice| Detected { capability: slice.capability.or(capability), ..slice }));
    }
    // GPUs that share the host's memory report none of their own; they are not planned for.
    found.retain(|device| device.total > 0 || device.mig == Mig::NoSlices);
    Ok(found)
}

fn describe(device: &Device, index: u32, mig: Mig) -> Option<Detected> {
    // A GPU in MIG mode may hide its own memory from a process that sees only a slice.
    let (total, reserved, free) =
        device.memory_info().map_or((0, 0, 0), |memory| (memory.total, memory.reserved, memory.free));
    let capability = device
        .cuda_compute_capability()
        .ok()
        .and_then(|version| Some((u32::try_from(version.major).ok()?, u32::try_from(version.minor).ok()?)));
    let (name, uuid) = (device.name().ok()?, device.uuid().ok()?);
    Some(Detected { index, name, uuid, total, reserved, free, capability, mig })
}

/// The devices that `CUDA_VISIBLE_DEVICES` leaves, in its order, by CUDA's rules:
///
/// * unset: all; empty: none;
/// * an entry is an index of a GPU or the beginning of a UUID that fits one device only;
/// * the first entry that fits nothing ends the list; a device named twice counts once;
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
    // Several slices of one GPU, asked for by the GPU, are one answer.
    let same = |other: &Detected| other == first || (entry.starts_with("GPU-") && other.index == first.index);
    devices.iter().filter(fits).all(same).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn cuda_visible_devices_is_honoured() {
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
    fn a_device_is_budgeted_by_what_it_reports() {
        let machine = machine();
        let budget = machine[0].budget();
        assert_eq!((budget.total_bytes / MIB, budget.card.unwrap().name.as_str()), (24_080, "RTX 4090"));
        assert!(budget.note.ends_with("the driver keeps 484 MiB and others use 100 MiB"), "{}", budget.note);
        assert_eq!(machine[1].budget().card.unwrap().gb, 16, "the model exists with 8 and 16 GB");
        let slice = machine[2].budget();
        assert_eq!((slice.total_bytes / MIB, slice.capability), (9_728, (8, 0)));
        assert!((slice.rates.half - 312e12 / 7.0).abs() < 1e6);
    }

    #[test]
    fn an_unlisted_device_takes_the_rates_of_its_size() {
        let device = gpu(0, "NVIDIA GeForce RTX 2080 Ti", "GPU-x", 11_264, 280);
        let budget = device.budget();
        assert_eq!((budget.card, budget.total_bytes / MIB, budget.marketing_bytes / GIB), (None, 10_984, 11));
        assert_eq!(budget.rates, find("11gb").unwrap().rates);
        let laptop = gpu(0, "NVIDIA GeForce RTX 4090 Laptop GPU", "GPU-y", 16_376, 430);
        assert_eq!(laptop.budget().card, None);
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
