//! Limits of sizes that settings and files state, checked before memory for them is asked for.

use crate::{Error, Result};

/// Largest side of an image in pixels.
pub const MAX_SIDE: i64 = 1 << 14;
/// Largest width of a layer. The largest language models have 2^14.
pub const MAX_WIDTH: i64 = 1 << 18;
/// Largest inner width of an MLP. It is the size of tensors only, and libtorch reports what does not fit into memory.
pub const MAX_INNER_WIDTH: i64 = 1 << 40;
/// Most heads.
pub const MAX_COUNT: i64 = 1 << 12;
/// Most layers of the language model or the vision tower. The largest models have some hundreds.
pub const MAX_LAYERS: i64 = 1 << 10;
/// Most tokens of a vocabulary, and most classes.
pub const MAX_VOCABULARY: i64 = 1 << 22;

/// Checks that each size is from 1 to its limit: key, size and limit.
///
/// # Errors
/// [`Error::Config`] naming the first key whose size is not.
pub fn check_ranges(sizes: &[(&str, i64, i64)]) -> Result<()> {
    match sizes.iter().find(|(_, size, most)| !(1..=*most).contains(size)) {
        None => Ok(()),
        Some((key, size, most)) => {
            Err(Error::config(*key, format!("must be from 1 to {most}, got {size}"), "use the size of the model"))
        }
    }
}

/// Checks that `whole` is a positive multiple of `part`; `what` names the two.
///
/// # Errors
/// [`Error::Config`] naming `key`.
pub fn check_multiple(key: &str, what: &str, whole: i64, part: i64) -> Result<()> {
    if part > 0 && whole > 0 && whole % part == 0 {
        return Ok(());
    }
    Err(Error::config(key, format!("{what}: {whole} is not a positive multiple of {part}"), "change one of the two"))
}
