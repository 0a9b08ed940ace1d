//! PNG files: palettes, which the usual decoder replaces by colours, and EXIF blocks.

use std::io::Cursor;

use ::image::GrayImage;

use super::shared::{DecodeFailure, Indexed, MAX_PIXELS, fits, unpacked};

/// Offset of the colour type in the file, and its value for a palette.
const PALETTE: (usize, u8) = (25, 3);

/// The indexes and the palette of a file with a palette; `None` for another file.
pub(super) fn indexed(bytes: &[u8]) -> Result<Option<Indexed>, DecodeFailure> {
    if bytes.get(PALETTE.0) != Some(&PALETTE.1) {
        return Ok(None);
    }
    let failure = |error: png::DecodingError| match error {
        png::DecodingError::LimitsExceeded => DecodeFailure::TooLarge,
        error => DecodeFailure::Corrupt(error.to_string()),
    };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(bytes), png::Limits { bytes: MAX_PIXELS });
    decoder.set_transformations(png::Transformations::IDENTITY);
    let mut reader = decoder.read_info().map_err(failure)?;
    let (width, height) = reader.info().size();
    fits(width, height, 1)?;
    let mut packed = vec![0; reader.output_buffer_size().unwrap_or(0)];
    reader.next_frame(&mut packed).map_err(failure)?;
    let info = reader.info();
    let indexes = unpacked(&packed, (width, height), info.bit_depth as u16);
    let alpha = info.trns.as_deref().unwrap_or_default();
    let colours = info.palette.as_deref().unwrap_or_default().as_chunks::<3>().0;
    let alpha = alpha.iter().copied().chain(std::iter::repeat(255));
    let palette = colours.iter().zip(alpha).map(|(&[red, green, blue], alpha)| [red, green, blue, alpha]);
    Ok(GrayImage::from_vec(width, height, indexes).map(|image| Indexed { image, palette: palette.collect() }))
}

/// The EXIF block, wherever it is in the file.
pub(super) fn exif(bytes: &[u8]) -> Option<&[u8]> {
    let mut at = 8; // after the signature
    loop {
        let length = u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?) as usize;
        let content = bytes.get(at + 8..at.checked_add(8)?.checked_add(length)?)?;
        if bytes[at + 4..at + 8] == *b"eXIf" {
            // some writers keep the prefix that the block has in JPEG files
            return Some(content.strip_prefix(b"Exif\0\0").unwrap_or(content));
        }
        at += 12 + length;
    }
}
