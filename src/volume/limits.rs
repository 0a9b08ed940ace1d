//! Limits of the sizes of volumes and files.

use std::cell::Cell;
use std::path::Path;

use prsmed_base::error::{Error, Result};

/// Most voxels of a volume.
pub const MAX_VOXELS: usize = 1 << 30;
/// Between the voxels of a volume and the most that can be used, in the error of `check_size`.
pub const TOO_MANY: &str = " voxels are more than ";
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

thread_local! {
    static MOST: Cell<usize> = const { Cell::new(MAX_VOXELS) };
}

/// Does work of this thread, with another limit than [`MAX_VOXELS`].
pub(crate) fn within<T>(voxels: usize, work: impl FnOnce() -> T) -> T {
    let before = MOST.replace(voxels);
    let result = work();
    MOST.set(before);
    result
}

/// Fails for an empty volume and one with more than [`MAX_VOXELS`], or the limit of [`within`].
pub(crate) fn check_size(path: &Path, size: [usize; 3]) -> Result<usize> {
    let [x, y, z] = size;
    let count = size.iter().try_fold(1_usize, |all, side| all.checked_mul(*side)).unwrap_or(usize::MAX);
    if count == 0 {
        return Err(Error::data(path, format!("the volume of {x}x{y}x{z} voxels is empty"), "export it again"));
    }
    let most = MOST.get();
    if count > most {
        let reason = format!("{x}x{y}x{z}{TOO_MANY}{most}, the most that can be used");
        return Err(Error::data(path, reason, "crop the volume or resample it to larger voxels"));
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_holds_for_its_work_only() {
        let size = |size| check_size(Path::new("a.nii"), size).map_err(|error| error.to_string());
        let error = within(100, || size([5, 5, 5])).expect_err("more than 100");
        assert_eq!(error, "a.nii: 5x5x5 voxels are more than 100, the most that can be used");
        assert_eq!(within(125, || size([5, 5, 5])), Ok(125));
        assert_eq!(size([5, 5, 5]), Ok(125));
    }
}
