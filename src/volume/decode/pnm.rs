//! PGM and PPM files, with values from 0 to the largest one of the header.

use std::io::Cursor;

use ::image::codecs::pnm::PnmDecoder;
use ::image::{DynamicImage, ImageFormat};

use super::codec::{Codec, size_of, usual};
use super::shared::{DecodeFailure, Decoded, Palette};

pub(crate) const PNM: Codec =
    Codec { decode: file, size: |bytes| size_of(bytes, ImageFormat::Pnm), orientation: |_| None };

/// True for grey and colours, as text or binary; bitmaps are not read.
pub(crate) fn is_pnm(start: &[u8]) -> bool {
    matches!(start, [b'P', b'2' | b'3' | b'5' | b'6', b' ' | b'\t' | b'\r' | b'\n' | b'#', ..])
}

/// The decoder scales values to the full range of 8 or 16 bits. Masks get their stored values.
fn file(bytes: &[u8], palette: Palette) -> Result<Decoded, DecodeFailure> {
    let mut decoded = usual(bytes, ImageFormat::Pnm)?;
    if palette == Palette::Keep {
        let largest = PnmDecoder::new(Cursor::new(bytes))?.header().maximal_sample();
        match &mut decoded.image {
            DynamicImage::ImageLuma8(grey) => unscale(grey, largest, 255),
            DynamicImage::ImageRgb8(rgb) => unscale(rgb, largest, 255),
            DynamicImage::ImageLuma16(grey) => unscale(grey, largest, 65535),
            DynamicImage::ImageRgb16(rgb) => unscale(rgb, largest, 65535),
            _ => {}
        }
    }
    Ok(decoded)
}

/// From the `full` range to values up to the `largest` one, which is smaller, so that each stored value has one scaled value.
fn unscale<T: Copy + Into<u32> + TryFrom<u32>>(values: &mut [T], largest: u32, full: u32) {
    for value in values {
        let scaled: u32 = (*value).into();
        *value = T::try_from((scaled * largest + full / 2) / full).unwrap_or(*value);
    }
}
