//! Image decoding: PNG, JPEG, TIFF (of one page; also BigTIFF), BMP, GIF, WebP, PGM and PPM, 8 or 16 bits, grey or RGB, with or without alpha or
//! palette.
//!
//! The result of an image equals Pillow's `exif_transpose` and `convert("RGB")`: the EXIF orientation is applied, alpha is
//! dropped, grey is repeated, colour profiles are ignored. 16-bit images are scaled by 1/257 over their full range (Pillow
//! clips or truncates them). The format is detected from the content, not from the file name. Floating-point, signed
//! and 32-bit pixels are rejected. JPEG files are decoded with libjpeg, as in Pillow. The decoders `zune-jpeg` and
//! `jpeg-decoder` differ from it by more than 1/255 in 2-5 % of the pixels of a 4:2:0 image.
//!
//! Masks keep what images lose: see [`StoredMask`].

pub(crate) mod bmp;
pub(crate) mod codec;
mod content;
pub(crate) mod gif;
mod jpeg;
mod png;
pub(crate) mod pnm;
pub(super) mod shared;
pub(crate) mod tiff;
mod unpack_lzw;
pub(crate) mod webp;

use std::io::ErrorKind;
use std::path::Path;

use ::image::metadata::Orientation;
use ::image::{DynamicImage, GrayImage};

use super::format::FORMATS;
pub use super::mask_file::{MaskRefusal, ONE_TARGET, StoredMask};
use crate::foreground::Labels;
use codec::Codec;
pub use content::unknown_format;
use prsmed_base::error::{Error, Result};
use prsmed_base::files;
use prsmed_base::panics::guard_file;
use shared::TILES;
use shared::{Decoded, Palette};
pub use shared::{MAX_SIDE, REPLACE, RESTORE};
pub use tiff::is_tiff;

/// What to do about a file whose decoder fails.
const ANOTHER_PROGRAM: &str = "open it with another program and save it as PNG; if that fails too, the file is damaged";

/// A decoded image, and what is known of its file.
#[derive(Debug, Clone)]
pub struct ImageFile {
    /// 8-bit grey (`ImageLuma8`) or RGB (`ImageRgb8`), upright.
    pub pixels: DynamicImage,
    /// Smallest and largest value of a 16-bit image.
    pub range: Option<[u16; 2]>,
    /// Its EXIF orientation was applied, because it was not upright.
    pub is_turned: bool,
}

/// Decodes an image as 8-bit grey (`ImageLuma8`) or RGB (`ImageRgb8`).
///
/// # Errors
/// [`Error::Data`] when the file is missing, not a regular file, of another format, truncated, corrupt or too large;
/// [`Error::Io`].
pub fn image(path: &Path) -> Result<DynamicImage> {
    Ok(eight_bits(decode(path, Palette::Expand)?.image))
}

/// As [`image()`], with what is known of the file.
///
/// # Errors
/// As [`image()`].
pub fn image_file(path: &Path) -> Result<ImageFile> {
    let Decoded { image, is_turned, .. } = decode(path, Palette::Expand)?;
    let range = |values: &[u16]| Some([*values.iter().min()?, *values.iter().max()?]);
    let range = match &image {
        DynamicImage::ImageLuma16(grey) => range(grey.as_raw()),
        DynamicImage::ImageRgb16(rgb) => range(rgb.as_raw()),
        DynamicImage::ImageLumaA16(_) => range(image.to_luma16().as_raw()),
        DynamicImage::ImageRgba16(_) => range(image.to_rgb16().as_raw()),
        _ => None,
    };
    Ok(ImageFile { pixels: eight_bits(image), range, is_turned })
}

/// As [`image()`], for a file in memory; errors call it `name`. Refuses an image of more than `max_pixels` pixels before
/// it is decoded.
///
/// # Errors
/// As [`image()`].
pub fn image_of(bytes: &[u8], name: &Path, max_pixels: u64) -> Result<DynamicImage> {
    check_pixels(bytes, name, max_pixels)?;
    Ok(eight_bits(decode_bytes(bytes, name, Palette::Expand)?.image))
}

/// Width and height of an image as [`image()`] decodes it, upright, without decoding its pixels.
///
/// # Errors
/// As [`image()`].
pub fn dimensions(path: &Path) -> Result<(u32, u32)> {
    let bytes = bytes_of(path)?;
    let codec = known_codec(&bytes, path)?;
    guard_file(path, ANOTHER_PROGRAM, || {
        let (width, height) = (codec.size)(&bytes).map_err(|failure| failure.of(path))?;
        Ok(if (codec.orientation)(&bytes).is_some_and(is_sideways) { (height, width) } else { (width, height) })
    })
}

/// True if a file in memory is an image by its first bytes.
pub fn is_image(bytes: &[u8]) -> bool {
    codec_of(bytes).is_some()
}

/// As [`stored_mask`], for a file in memory, with the limit of [`image_of`].
///
/// # Errors
/// As [`image()`].
pub fn stored_mask_of(bytes: &[u8], name: &Path, max_pixels: u64) -> Result<StoredMask> {
    check_pixels(bytes, name, max_pixels)?;
    stored(decode_bytes(bytes, name, Palette::Keep)?, name)
}

fn check_pixels(bytes: &[u8], name: &Path, max_pixels: u64) -> Result<()> {
    let size = codec_of(bytes).and_then(|codec| {
        let size = || (codec.size)(bytes).map_err(|failure| failure.of(name));
        guard_file(name, ANOTHER_PROGRAM, size).ok()
    });
    // a file whose size cannot be read is refused by its decoder
    let Some((width, height)) = size.filter(|(width, height)| u64::from(*width) * u64::from(*height) > max_pixels)
    else {
        return Ok(());
    };
    Err(Error::data(name, format!("has {width}x{height} pixels, at most {max_pixels} pixels are allowed"), TILES))
}

fn eight_bits(decoded: DynamicImage) -> DynamicImage {
    if decoded.color().has_color() { decoded.into_rgb8().into() } else { decoded.into_luma8().into() }
}

/// Decodes the mask of one target as 8-bit grey, ready for `prsmed_data::image::foreground`.
///
/// # Errors
/// As [`image()`]; [`Error::Data`] for a mask with several labels.
pub fn mask(path: &Path) -> Result<GrayImage> {
    labelled_mask(path, Labels::NONE)
}

/// As [`mask`]. With `labels`, exactly these labels are foreground (255) and everything else is background.
///
/// # Errors
/// As [`image()`]; [`Error::Data`] for a mask with several labels if `labels` is empty.
pub fn labelled_mask(path: &Path, labels: Labels) -> Result<GrayImage> {
    let target = stored_mask(path)?.target(labels);
    target.map_err(|refusal| Error::data(path, refusal.to_string(), refusal.hint()))
}

/// Decodes a mask with the values of its file.
///
/// # Errors
/// As [`image()`]; [`Error::Data`] for a mask whose colours and transparency contradict each other.
pub fn stored_mask(path: &Path) -> Result<StoredMask> {
    stored(decode(path, Palette::Keep)?, path)
}

fn stored(decoded: Decoded, path: &Path) -> Result<StoredMask> {
    StoredMask::new(decoded).map_err(|reason| Error::data(path, reason, "save the mask without transparency"))
}

/// Says so if two sizes are equal but for a turn by 90 degrees.
pub fn turned_by_90((width, height): (u32, u32), other: (u32, u32)) -> &'static str {
    if (height, width) == other && width != height { "; one of them is turned by 90 degrees" } else { "" }
}

/// The bytes of an image file.
///
/// # Errors
/// [`Error::Data`] for a file that is missing or too large.
pub fn bytes_of(path: &Path) -> Result<Vec<u8>> {
    files::read(path, files::MAX_IMAGE).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Error::data(path, "the file is missing", RESTORE),
        ErrorKind::InvalidInput | ErrorKind::FileTooLarge => Error::data(path, error.to_string(), REPLACE),
        _ => Error::io(path, "read")(error),
    })
}

fn decode(path: &Path, palette: Palette) -> Result<Decoded> {
    decode_bytes(&bytes_of(path)?, path, palette)
}

/// The codec of an image in memory, by its first bytes.
fn codec_of(bytes: &[u8]) -> Option<Codec> {
    FORMATS.iter().filter(|format| format.image.is_some()).find(|format| format.knows(bytes))?.image
}

fn known_codec(bytes: &[u8], path: &Path) -> Result<Codec> {
    let unknown = || unknown_format(path, bytes, concat!("a ", crate::image_formats!(), " image"), "convert it to PNG");
    codec_of(bytes).ok_or_else(unknown)
}

fn decode_bytes(bytes: &[u8], path: &Path, palette: Palette) -> Result<Decoded> {
    let codec = known_codec(bytes, path)?;
    guard_file(path, ANOTHER_PROGRAM, || {
        #[cfg(test)]
        assert!(!path.ends_with("panics.png"), "a panic of a test");
        let mut decoded = (codec.decode)(bytes, palette).map_err(|failure| failure.of(path))?;
        let orientation = (codec.orientation)(bytes).unwrap_or(Orientation::NoTransforms);
        decoded.is_turned = orientation != Orientation::NoTransforms;
        decoded.image.apply_orientation(orientation);
        Ok(decoded)
    })
}

/// Whether the orientation exchanges width and height.
fn is_sideways(orientation: Orientation) -> bool {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    matches!(orientation, Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH)
}

/// The samples of a JPEG of 8 bits with one or three components, those of a pixel after each other. Three components are
/// converted from YCbCr to RGB, or taken as they are. Damaged and missing data are an error.
///
/// # Errors
/// What is wrong.
pub(crate) fn jpeg_components(bytes: &[u8], is_ybr: bool) -> std::result::Result<Vec<u8>, String> {
    let header = jpeg::header(bytes).ok_or("the JPEG data end before the last pixel")?;
    let image = jpeg::decode(bytes, &header, is_ybr)?.ok_or("the JPEG is neither grey nor has it three colours")?;
    Ok(image.into_bytes())
}

#[cfg(test)]
mod format_tests;
#[cfg(test)]
mod other_tests;
#[cfg(test)]
mod tests;
