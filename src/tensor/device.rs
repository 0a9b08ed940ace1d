//! What libtorch's caching allocator counts on a CUDA device.

use super::{Result, native};
use crate::units::Bytes;

/// Bytes of a device's live blocks, as rounded by the allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceUsage {
    /// Now.
    pub allocated: Bytes,
    /// The most since the start or the last reset.
    pub allocated_peak: Bytes,
}

/// Reads the numbers of CUDA device `index`; `reset` begins a new peak.
///
/// # Errors
/// [`crate::Error::Torch`] without such a device.
pub fn usage(index: i32, reset: bool) -> Result<DeviceUsage> {
    let mut out = [0_u64; 2];
    // SAFETY: `out` has room for the two numbers that the callee writes.
    unsafe { native::check(native::prsmed_device_usage(index, reset, out.as_mut_ptr())) }?;
    Ok(DeviceUsage { allocated: Bytes(out[0]), allocated_peak: Bytes(out[1]) })
}
