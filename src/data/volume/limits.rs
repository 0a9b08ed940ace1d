//! Limits of the sizes of volumes and files.

use std::path::Path;

use crate::error::{Error, Result};

/// Most voxels of a volume.
pub const MAX_VOXELS: usize = 1 << 30;
/// Most bytes of a file with a volume or an image, and of all files of a series.
pub(crate) const MAX_FILE: u64 = 8 << 30;

/// Compressed content with more bytes than this may not be larger than [`MAX_RATIO`] times the compressed bytes.
pub(crate) const FREE: u64 = 64 << 20;
/// Most bytes for each compressed byte. Images of air compress to about 1 %.
pub(crate) const MAX_RATIO: u64 = 200;

/// Fails for pixels that need far more memory than the compressed bytes that promise them.
pub(crate) fn check_ratio(path: &Path, compressed: u64, size: u64) -> Result<()> {
    if size <= FREE || size <= compressed.saturating_mul(MAX_RATIO) {
        return Ok(());
    }
    let reason = format!("its header promises {} MiB, more than {MAX_RATIO} times its compressed bytes", size >> 20);
    Err(Error::data(path, reason, "check where the file comes from; decompress it with another program if it is right"))
}

/// Fails for an empty volume and one with more than [`MAX_VOXELS`].
pub(crate) fn check_size(path: &Path, size: [usize; 3]) -> Result<usize> {
    let [x, y, z] = size;
    let count = size.iter().try_fold(1_usize, |all, side| all.checked_mul(*side)).unwrap_or(usize::MAX);
    if count == 0 {
        return Err(Error::data(path, format!("the volume of {x}x{y}x{z} voxels is empty"), "export it again"));
    }
    if count > MAX_VOXELS {
        let reason = format!("{x}x{y}x{z} voxels are more than {MAX_VOXELS}, the most that can be used");
        return Err(Error::data(path, reason, "crop the volume or resample it to larger voxels"));
    }
    Ok(count)
}
