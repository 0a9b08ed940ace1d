//! BMP files, whose palettes the usual decoder replaces by colours.

use std::io::Cursor;

use ::image::codecs::bmp::BmpDecoder;
use ::image::{GrayImage, ImageDecoder, ImageFormat};

use super::codec::{Codec, size_of, usual};
use super::shared::{DecodeFailure, Decoded, Indexed, Palette, fits};

pub(crate) const BMP: Codec =
    Codec { decode: file, size: |bytes| size_of(bytes, ImageFormat::Bmp), orientation: |_| None };

/// Bytes of the file header, before the one with the size of the image.
const FILE_HEADER: usize = 14;
/// Size of the oldest header, whose palettes have three bytes for each colour.
const CORE_HEADER: usize = 12;

fn file(bytes: &[u8], palette: Palette) -> Result<Decoded, DecodeFailure> {
    if palette == Palette::Keep {
        let decoder = BmpDecoder::new(Cursor::new(bytes))?;
        let (width, height) = decoder.dimensions();
        if let Some(colours) = decoder.get_palette() {
            fits(width, height, 3)?;
            return indexed(bytes, colours);
        }
    }
    usual(bytes, ImageFormat::Bmp)
}

/// The decoder gives colours only, so that a copy of the file gets a palette in which each index is its own grey level.
fn indexed(bytes: &[u8], colours: &[[u8; 3]]) -> Result<Decoded, DecodeFailure> {
    let damaged = || DecodeFailure::Corrupt("its palette is damaged".into());
    let number =
        |at: usize| -> Option<usize> { usize::try_from(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?)).ok() };
    let (pixels, header) = (number(10).ok_or_else(damaged)?, number(FILE_HEADER).ok_or_else(damaged)?);
    let mut grey = bytes.to_vec();
    let palette = grey.get_mut(FILE_HEADER.saturating_add(header)..pixels).ok_or_else(damaged)?;
    let entries = palette.chunks_exact_mut(if header == CORE_HEADER { 3 } else { 4 });
    entries.zip(0..=u8::MAX).for_each(|(entry, level)| entry[..3].fill(level));
    let levels = usual(&grey, ImageFormat::Bmp)?.image.into_rgb8();
    let (width, height) = levels.dimensions();
    let image = GrayImage::from_fn(width, height, |x, y| ::image::Luma([levels.get_pixel(x, y).0[0]]));
    // a grey image is stored with the palette of its levels
    if colours.iter().zip(0..=u8::MAX).all(|(colour, level)| *colour == [level; 3]) {
        return Ok(::image::DynamicImage::from(image).into());
    }
    let palette = colours.iter().map(|&[red, green, blue]| [red, green, blue, 255]).collect();
    Ok(Indexed { image, palette }.decoded(Palette::Keep))
}
