//! What the decoders of the formats share: limits, reasons of failure, packed indexes.

use std::path::Path;

use image::{DynamicImage, GrayImage, ImageError};

use prsmed_base::error::Error;

/// A decoded file, upright.
pub(crate) struct Decoded {
    pub(crate) image: DynamicImage,
    /// Red, green, blue and alpha of each index; the image then has the indexes.
    pub(crate) palette: Option<Vec<[u8; 4]>>,
    /// Differences up to this many levels are noise of the compression.
    pub(crate) noise: u8,
    /// The EXIF orientation was not upright.
    pub(crate) is_turned: bool,
}

/// What happens with the palette of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Palette {
    /// Each pixel gets the colour of its index.
    Expand,
    Keep,
}

/// What to do about a file that cannot be decoded.
pub const REPLACE: &str = "replace the file";
/// What to do about a file that is missing.
pub const RESTORE: &str = "restore the file";
pub(super) const TILES: &str = "cut the image into tiles or make it smaller";
const PAGES: &str = "save each page as a file of its own, for example as PNG";
const FRAMES: &str = "save the frame that is meant as a PNG without animation";
const SAVE: &str = "save it as a PNG of 8 or 16 bits; an image windowed as needed, a mask with its values as they are";

/// Most pixels of an image's side.
pub const MAX_SIDE: u32 = 1 << 17;
/// Most bytes of an image's pixels, as they are stored in the file.
pub(crate) const MAX_PIXELS: usize = 256 << 20;

/// Indexes into a palette of red, green, blue and alpha.
pub(super) struct Indexed {
    pub(super) image: GrayImage,
    pub(super) palette: Vec<[u8; 4]>,
}

/// Why a file cannot be decoded.
pub(crate) enum DecodeFailure {
    Corrupt(String),
    /// The file is in order, but its pixels cannot be used.
    Unsupported(String),
    /// The file has so many pages.
    Pages(usize),
    /// The file is an animation of so many frames.
    Frames(usize),
    TooLarge,
}

impl From<String> for DecodeFailure {
    fn from(reason: String) -> Self {
        Self::Corrupt(reason)
    }
}

impl From<ImageError> for DecodeFailure {
    fn from(error: ImageError) -> Self {
        match error {
            ImageError::Limits(_) => Self::TooLarge,
            ImageError::Unsupported(error) => Self::Unsupported(format!("is not supported: {error}")),
            error => Self::Corrupt(error.to_string()),
        }
    }
}

impl DecodeFailure {
    pub(super) fn of(self, path: &Path) -> Error {
        match self {
            Self::Corrupt(reason) => Error::data(path, format!("cannot be decoded: {reason}"), REPLACE),
            Self::Unsupported(reason) => Error::data(path, reason, SAVE),
            Self::Pages(count) => Error::data(path, format!("has {count} pages instead of one"), PAGES),
            Self::Frames(count) => Error::data(path, format!("is an animation of {count} frames"), FRAMES),
            Self::TooLarge => {
                let reason = format!("has more than {MAX_SIDE} pixels on a side, or needs more than 256 MiB of memory");
                Error::data(path, reason, TILES)
            }
        }
    }
}

/// Refuses an image with longer sides or more bytes of pixels than are allowed.
pub(super) fn fits(width: u32, height: u32, bytes_per_pixel: u32) -> Result<(), DecodeFailure> {
    let bytes = u64::from(width) * u64::from(height) * u64::from(bytes_per_pixel);
    if width.max(height) > MAX_SIDE || bytes > MAX_PIXELS as u64 { Err(DecodeFailure::TooLarge) } else { Ok(()) }
}

/// One byte for each value of `bits` bits, at most 8. Rows begin at whole bytes.
pub(super) fn unpacked(packed: &[u8], (width, height): (u32, u32), bits: u16) -> Vec<u8> {
    let (width, bits) = (width as usize, usize::from(bits.clamp(1, 8)));
    let mut values = Vec::with_capacity(width * height as usize);
    for row in packed.chunks_exact((width * bits).div_ceil(8).max(1)).take(height as usize) {
        let value = |at: usize| row[at * bits / 8] << (at * bits % 8) >> (8 - bits);
        values.extend((0..width).map(value));
    }
    values
}
