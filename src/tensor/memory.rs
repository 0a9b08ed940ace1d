//! One reading of a device's memory: what tensors use, what the allocator holds for them, what the system says.
//!
//! On the CPU the numbers are the [`ledger`]'s, on a card those of libtorch's caching allocator (which knows no categories).

use super::native::{self, RawDeviceMemory};
use super::{Device, ledger};
use crate::units::Bytes;
use crate::{Error, Result};
use ledger::{Failure, Shares};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// A device's memory at one moment. Peaks are those since the last [`begin_window`].
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Reading {
    /// Bytes of live tensors.
    pub allocated: Bytes,
    /// The most that lived at once.
    pub allocated_peak: Bytes,
    /// Bytes that the allocator holds: live blocks with their rounding, and freed ones kept for reuse.
    pub reserved: Bytes,
    /// The most that it held.
    pub reserved_peak: Bytes,
    /// `allocated` by category; empty on a card.
    pub categories: Shares,
    /// `allocated_peak` by category; empty on a card.
    pub categories_at_peak: Shares,
    /// What the system says.
    pub system: System,
}

/// What the kernel and the driver say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct System {
    /// Resident host memory of this process, code and everything else included.
    pub resident: Bytes,
    /// Its maximum since the process started.
    pub resident_peak: Bytes,
    /// Used bytes of the card by all processes; `None` on the CPU, or where the driver does not say.
    pub device_used: Option<Bytes>,
    /// Bytes of the card.
    pub device_total: Option<Bytes>,
}

/// Reads `device`.
///
/// # Errors
/// [`Error::Torch`] for a card that is not in use.
pub fn read(device: Device) -> Result<Reading> {
    let mut system = process()?;
    let Device::Cuda(index) = device else {
        let (usage, window) = (ledger::usage(), ledger::window());
        return Ok(Reading {
            allocated: usage.allocated,
            allocated_peak: window.window_peak,
            reserved: window.reserved,
            reserved_peak: window.window_reserved_peak,
            categories: usage.categories.iter().map(|category| (category.name, category.allocated)).collect(),
            categories_at_peak: window.at_window_peak,
            system,
        });
    };
    let mut raw = RawDeviceMemory::default();
    // SAFETY: the callee fills the structure on success.
    unsafe { native::check(native::prsmed_device_memory(card(index)?, &raw mut raw))? };
    if raw.total > 0 {
        system.device_used = Some(Bytes(raw.total.saturating_sub(raw.free)));
        system.device_total = Some(Bytes(raw.total));
    }
    Ok(Reading {
        allocated: Bytes(raw.allocated),
        allocated_peak: Bytes(raw.allocated_peak),
        reserved: Bytes(raw.reserved),
        reserved_peak: Bytes(raw.reserved_peak),
        categories: Shares::new(),
        categories_at_peak: Shares::new(),
        system,
    })
}

/// Highest peak of closed windows of a card, bytes.
static CARD_PEAK: AtomicU64 = AtomicU64::new(0);

/// The most bytes of tensors that lived at once on `device` since the process started; 0 for a card that is not in use.
pub fn overall_peak(device: Device) -> Bytes {
    match device {
        Device::Cuda(_) => {
            let now = read(device).map_or(0, |reading| reading.allocated_peak.0);
            Bytes(CARD_PEAK.fetch_max(now, Ordering::Relaxed).max(now))
        }
        _ => ledger::usage().allocated_peak,
    }
}

/// Starts new peaks from what lives now. The ledger's overall peak stays; a card has no other peak than these.
///
/// # Errors
/// As [`read`].
pub fn begin_window(device: Device) -> Result<()> {
    let Device::Cuda(index) = device else {
        ledger::begin_window();
        return Ok(());
    };
    overall_peak(device);
    // SAFETY: resets counters of libtorch's allocator.
    unsafe { native::check(native::prsmed_device_reset_peaks(card(index)?)) }
}

/// Gives freed blocks that the allocator keeps for reuse back to the system; returns how many bytes.
///
/// # Errors
/// As [`read`].
pub fn release_cache(device: Device) -> Result<Bytes> {
    if !matches!(device, Device::Cuda(_)) {
        return Ok(ledger::release_kept());
    }
    let before = read(device)?.reserved;
    // SAFETY: frees blocks that no tensor uses.
    unsafe { native::check(native::prsmed_device_release_cache())? };
    Ok(Bytes(before.0.saturating_sub(read(device)?.reserved.0)))
}

/// Lets tensors of this process take no more than `limit`: live bytes on the CPU, what the caching allocator reserves of a card
/// of `total` bytes. Call it before the card is first used.
///
/// # Errors
/// [`Error::Torch`] from libtorch.
pub fn set_limit(device: Device, limit: Bytes, total: Bytes) -> Result<()> {
    if !matches!(device, Device::Cuda(_)) {
        ledger::set_limit(Some(limit));
        return Ok(());
    }
    #[expect(clippy::cast_precision_loss, reason = "a share of a card")]
    let share = (limit.0 as f64 / total.0.max(1) as f64).clamp(0.0, 1.0);
    // SAFETY: changes a setting of libtorch's allocator.
    unsafe { native::check(native::prsmed_device_limit(share)) }
}

/// Resident memory of this process when it first asked, which [`ledger::install`] does: before the first tensor. Zero on
/// systems without `/proc`.
pub fn at_start() -> Bytes {
    static START: OnceLock<Bytes> = OnceLock::new();
    *START.get_or_init(|| process().unwrap_or_default().resident)
}

/// Bounds what oneDNN and libtorch keep of prepared kernels, 1,024 each otherwise: texts of many lengths fill that with half a
/// GiB in bf16, and steps are no faster for it (with 128 of oneDNN's a step of the tiny preset takes a quarter longer). What the
/// environment says stays.
///
/// # Safety
/// No other thread may run, and no operator may have run.
pub unsafe fn bound_kernel_caches() {
    for (name, kernels) in [("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256"), ("LRU_CACHE_CAPACITY", "16")] {
        if std::env::var_os(name).is_none() {
            // SAFETY: nobody reads the environment meanwhile, as the caller promises.
            unsafe { std::env::set_var(name, kernels) };
        }
    }
}

static CARD_FAILURE: Mutex<Option<Failure>> = Mutex::new(None);

/// Writes down what the card holds when memory ran out; the first time counts.
pub(super) fn note_card_failure() {
    let scope = super::scope::current();
    let Ok(Reading { allocated, reserved, .. }) = read(super::default_device()) else { return };
    let (categories, largest) = (Shares::new(), Vec::new());
    let failure = Failure { requested: None, category: None, scope, allocated, reserved, categories, largest };
    CARD_FAILURE.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
}

/// What lived when memory first ran out since [`clear_failure`], on the CPU or on a card.
pub fn failure() -> Option<Failure> {
    ledger::failure().or_else(|| CARD_FAILURE.lock().unwrap_or_else(PoisonError::into_inner).clone())
}

/// Forgets a failure that was dealt with.
pub fn clear_failure() {
    ledger::clear_failure();
    *CARD_FAILURE.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

fn card(index: usize) -> Result<i32> {
    i32::try_from(index).map_err(|_| Error::Torch { reason: format!("there is no card {index}") })
}

/// Resident memory of this process; zero on systems without `/proc`.
fn process() -> Result<System> {
    let path = "/proc/self/status";
    match std::fs::read_to_string(path) {
        Ok(status) => Ok(resident(&status)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(System::default()),
        Err(error) => Err(Error::io(path, "read")(error)),
    }
}

/// `VmRSS` and `VmHWM` of a `/proc/PID/status`, which counts in KiB.
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
    use crate::tensor::{Kind, Tensor};

    const MIB: u64 = 1 << 20;

    fn block(mib: i64) -> Tensor {
        Tensor::zeros([mib << 20], (Kind::Uint8, Device::Cpu))
    }

    #[test]
    fn the_kernel_counts_in_kib() {
        let status = "Name:\tprsmed\nVmPeak:\t  99 kB\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nThreads:\t3\n";
        let system = resident(status);
        assert_eq!((system.resident, system.resident_peak), (Bytes(MIB), Bytes(2 * MIB)));
        assert_eq!(resident("odd"), System::default());
    }

    #[test]
    fn a_card_that_is_not_there_is_an_error() {
        assert!(matches!(read(Device::Cuda(99)), Err(Error::Torch { .. })));
    }

    #[test]
    fn a_failure_shows_what_lived_before_anything_was_freed() {
        let _turn = ledger::TURN.lock();
        ledger::install();
        clear_failure();
        let asked: i64 = 1 << 50;
        let error = crate::tensor::guard::guard(|| {
            let _scope = crate::tensor::scope::enter("failing");
            let _category = ledger::enter(ledger::Category::Ema);
            let _lives = block(150);
            let _also = block(160);
            Ok(Tensor::empty([asked], (Kind::Uint8, Device::Cpu)))
        });
        assert!(matches!(error, Err(Error::OutOfMemory { .. })), "{error:?}");
        let noted = failure().unwrap();
        assert_eq!(
            (noted.requested, noted.category, noted.scope.as_str()),
            (Some(Bytes(1 << 50)), Some("ema"), "failing")
        );
        let largest: Vec<(u64, &str)> = noted.largest.iter().take(2).map(|b| (b.bytes.0, b.scope.as_str())).collect();
        assert_eq!(largest, [(160 * MIB, "failing"), (150 * MIB, "failing")]);
        assert!(noted.largest.windows(2).all(|pair| pair[0].bytes >= pair[1].bytes) && noted.largest.len() <= 10);
        let ema = noted.categories.iter().find(|(name, _)| *name == "ema").unwrap().1;
        assert!(ema.0 >= 310 * MIB && noted.allocated >= ema && noted.reserved >= noted.allocated, "{noted:?}");
        let again = crate::tensor::guard::guard(|| Ok(Tensor::empty([asked + 1], (Kind::Uint8, Device::Cpu))));
        assert!(again.is_err());
        assert_eq!(failure().unwrap().requested, Some(Bytes(1 << 50)), "the first failure is the cause");
        clear_failure();
        assert_eq!(failure(), None);
    }
}
