//! Memory of a device: bytes of tensors, bytes that the allocator reserves, and what the operating system reports.
//!
//! The CPU's numbers come from the [`ledger`]. A GPU's come from libtorch's caching allocator, which has no categories.

use super::native::{self, RawDeviceMemory};
use super::{Device, ledger};
use ledger::{AllocationFailure, CategoryBytes};
use prsmed_base::units::Bytes;
use prsmed_base::{Error, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Memory of a device at one moment. Peaks count from the last [`begin_window`].
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct MemoryReading {
    /// Bytes of live tensors.
    pub allocated: Bytes,
    /// Peak of `allocated`.
    pub allocated_peak: Bytes,
    /// Bytes that the allocator reserves: live blocks, rounded, and freed blocks that are cached for reuse.
    pub reserved: Bytes,
    /// Peak of `reserved`.
    pub reserved_peak: Bytes,
    /// `allocated` by category; empty on a GPU.
    pub categories: CategoryBytes,
    /// `allocated_peak` by category; empty on a GPU.
    pub categories_at_peak: CategoryBytes,
    /// Numbers of the operating system and the driver.
    pub system: System,
}

/// Memory as the operating system and the driver report it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct System {
    /// Resident CPU memory of this process, code included.
    pub resident: Bytes,
    /// Peak of `resident` since the process started.
    pub resident_peak: Bytes,
    /// Used bytes of the GPU by all processes; `None` on the CPU, or if the driver does not report it.
    pub device_used: Option<Bytes>,
    /// Total bytes of the GPU.
    pub device_total: Option<Bytes>,
}

/// Reads `device`.
///
/// # Errors
/// [`Error::Torch`] for a GPU that is not in use.
pub fn read(device: Device) -> Result<MemoryReading> {
    let mut system = process()?;
    let Device::Cuda(index) = device else {
        let (usage, window) = (ledger::usage(), ledger::window());
        return Ok(MemoryReading {
            allocated: usage.allocated,
            allocated_peak: window.window_peak,
            reserved: window.reserved,
            reserved_peak: window.window_reserved_peak,
            categories: usage.categories.iter().map(|category| (category.name, category.allocated)).collect(),
            categories_at_peak: window.at_window_peak,
            system,
        });
    };
    let raw = of_gpu(index, true)?;
    if raw.total > 0 {
        system.device_used = Some(Bytes(raw.total.saturating_sub(raw.free)));
        system.device_total = Some(Bytes(raw.total));
    }
    Ok(MemoryReading {
        allocated: Bytes(raw.allocated),
        allocated_peak: Bytes(raw.allocated_peak),
        reserved: Bytes(raw.reserved),
        reserved_peak: Bytes(raw.reserved_peak),
        categories: CategoryBytes::new(),
        categories_at_peak: CategoryBytes::new(),
        system,
    })
}

/// Bytes of live tensors on a GPU as they were asked for, without the rounding of blocks, and their peak since the last
/// [`begin_window`].
///
/// # Errors
/// Like [`read`]; [`Error::Torch`] for the CPU.
pub fn requested(device: Device) -> Result<(u64, u64)> {
    let Device::Cuda(index) = device else { return Err(Error::Torch { reason: "not a GPU".into() }) };
    let raw = of_gpu(index, false)?;
    Ok((raw.requested, raw.requested_peak))
}

/// What libtorch's allocator counts, and what the driver reports if it is asked.
fn of_gpu(index: usize, asks_driver: bool) -> Result<RawDeviceMemory> {
    let gpu = gpu(index)?;
    // SAFETY: the callee fills the structure on success.
    unsafe { native::written(RawDeviceMemory::default(), |out| native::prsmed_device_memory(gpu, asks_driver, out)) }
}

/// Highest peak of a GPU in earlier windows, bytes.
static GPU_PEAK: AtomicU64 = AtomicU64::new(0);

/// Peak bytes of tensors on `device` since the process started; 0 for a GPU that is not in use. Asks no driver.
pub fn overall_peak(device: Device) -> Bytes {
    match device {
        Device::Cuda(index) => {
            let now = of_gpu(index, false).map_or(0, |raw| raw.allocated_peak);
            Bytes(GPU_PEAK.fetch_max(now, Ordering::Relaxed).max(now))
        }
        _ => ledger::usage().allocated_peak,
    }
}

/// Resets the peaks to the current bytes. The ledger keeps its overall peak; a GPU has no other peaks.
///
/// # Errors
/// Like [`read`].
pub fn begin_window(device: Device) -> Result<()> {
    let Device::Cuda(index) = device else {
        ledger::begin_window();
        return Ok(());
    };
    overall_peak(device);
    // SAFETY: resets counters of libtorch's allocator.
    unsafe { native::check(native::prsmed_device_reset_peaks(gpu(index)?)) }
}

/// Returns the allocator's cached free blocks to the system. Returns their bytes.
///
/// # Errors
/// Like [`read`].
pub fn release_cache(device: Device) -> Result<Bytes> {
    if !matches!(device, Device::Cuda(_)) {
        return Ok(ledger::release_cached());
    }
    let before = read(device)?.reserved;
    // SAFETY: frees blocks that no tensor uses.
    unsafe { native::check(native::prsmed_device_release_cache())? };
    Ok(Bytes(before.0.saturating_sub(read(device)?.reserved.0)))
}

/// Limits tensor memory of this process: live bytes on the CPU, reserved bytes on a GPU of `total` bytes. Call it
/// before the first use of the GPU.
///
/// # Errors
/// [`Error::Torch`] from libtorch.
pub fn set_limit(device: Device, limit: Bytes, total: Bytes) -> Result<()> {
    if !matches!(device, Device::Cuda(_)) {
        ledger::set_limit(Some(limit));
        return Ok(());
    }
    let share = (limit.0 as f64 / total.0.max(1) as f64).clamp(0.0, 1.0);
    // SAFETY: changes a setting of libtorch's allocator.
    unsafe { native::check(native::prsmed_device_limit(share)) }
}

/// Resident memory of this process at the first call, which [`ledger::install`] makes before the first tensor. Zero
/// without `/proc`.
pub fn resident_at_start() -> Bytes {
    static START: OnceLock<Bytes> = OnceLock::new();
    *START.get_or_init(|| process().unwrap_or_default().resident)
}

/// Limits the caches of prepared kernels in oneDNN and libtorch, which hold 1,024 each by default. Texts of many
/// lengths would fill them with half a GiB in bf16, for no gain in speed. (A limit of 128 for oneDNN slows a step of
/// the tiny preset by a quarter.) Values that are set in the environment stay.
///
/// # Safety
/// No other thread may run, and no operator may have run.
pub unsafe fn bound_kernel_caches() {
    for (name, kernels) in [("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256"), ("LRU_CACHE_CAPACITY", "16")] {
        if std::env::var_os(name).is_none() {
            // SAFETY: no other thread reads the environment, as the caller promises.
            unsafe { std::env::set_var(name, kernels) };
        }
    }
}

static GPU_FAILURE: Mutex<Option<AllocationFailure>> = Mutex::new(None);

/// Saves the GPU's memory numbers when memory ran out. Only the first call counts.
pub(super) fn note_gpu_failure() {
    let module = super::module_path::current();
    let Ok(MemoryReading { allocated, reserved, .. }) = read(super::default_device()) else { return };
    let (categories, largest) = (CategoryBytes::new(), Vec::new());
    let failure =
        AllocationFailure { requested: None, category: None, module, allocated, reserved, categories, largest };
    GPU_FAILURE.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
}

/// State at the first out-of-memory error since [`clear_failure`], on the CPU or a GPU.
pub fn failure() -> Option<AllocationFailure> {
    ledger::failure().or_else(|| GPU_FAILURE.lock().unwrap_or_else(PoisonError::into_inner).clone())
}

/// Clears the last failure, after it was handled.
pub fn clear_failure() {
    ledger::clear_failure();
    *GPU_FAILURE.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

/// Number of a GPU in the native layer.
pub(super) fn gpu(index: usize) -> Result<i32> {
    i32::try_from(index).map_err(|_| Error::Torch { reason: format!("there is no GPU {index}") })
}

/// Resident memory of this process; zero without `/proc`.
fn process() -> Result<System> {
    let path = "/proc/self/status";
    match std::fs::read_to_string(path) {
        Ok(status) => Ok(resident(&status)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(System::default()),
        Err(error) => Err(Error::io(path, "read")(error)),
    }
}

/// `VmRSS` and `VmHWM` of a `/proc/PID/status`, in KiB.
fn resident(status: &str) -> System {
    let bytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|rest| rest.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok());
        Bytes(kib.unwrap_or(0) << 10)
    };
    System { resident: bytes("VmRSS"), resident_peak: bytes("VmHWM"), ..System::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kind, Tensor};

    const MIB: u64 = 1 << 20;

    fn block(mib: i64) -> Tensor {
        Tensor::zeros([mib << 20], (Kind::Uint8, Device::Cpu))
    }

    #[test]
    fn proc_status_is_read_in_kib() {
        let status = "Name:\tprsmed\nVmPeak:\t  99 kB\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nThreads:\t3\n";
        let system = resident(status);
        assert_eq!((system.resident, system.resident_peak), (Bytes(MIB), Bytes(2 * MIB)));
        assert_eq!(resident("odd"), System::default());
    }

    #[test]
    fn a_missing_gpu_gives_an_error() {
        assert!(matches!(read(Device::Cuda(99)), Err(Error::Torch { .. })));
    }

    #[test]
    fn a_failed_allocation_reports_the_state_before_anything_was_freed() {
        let _lock = ledger::TEST_LOCK.lock();
        ledger::install();
        clear_failure();
        let asked: i64 = 1 << 50;
        let error = crate::guard::guard(|| {
            let _scope = crate::module_path::enter("failing");
            let _category = ledger::enter(ledger::Category::Ema);
            let _lives = block(150);
            let _also = block(160);
            Ok(Tensor::empty([asked], (Kind::Uint8, Device::Cpu)))
        });
        assert!(matches!(error, Err(Error::OutOfMemory { .. })), "{error:?}");
        let noted = failure().unwrap();
        assert_eq!(
            (noted.requested, noted.category, noted.module.as_str()),
            (Some(Bytes(1 << 50)), Some("ema"), "failing")
        );
        let largest: Vec<(u64, &str)> = noted.largest.iter().take(2).map(|b| (b.bytes.0, b.module.as_str())).collect();
        assert_eq!(largest, [(160 * MIB, "failing"), (150 * MIB, "failing")]);
        assert!(noted.largest.windows(2).all(|pair| pair[0].bytes >= pair[1].bytes) && noted.largest.len() <= 10);
        let ema = noted.categories.iter().find(|(name, _)| *name == "ema").unwrap().1;
        assert!(ema.0 >= 310 * MIB && noted.allocated >= ema && noted.reserved >= noted.allocated, "{noted:?}");
        let again = crate::guard::guard(|| Ok(Tensor::empty([asked + 1], (Kind::Uint8, Device::Cpu))));
        assert!(again.is_err());
        assert_eq!(failure().unwrap().requested, Some(Bytes(1 << 50)), "the first failure is kept");
        clear_failure();
        assert_eq!(failure(), None);
    }
}
