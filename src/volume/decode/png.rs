//! PNG files: palettes, which the usual decoder replaces by colours, and chunks beside the pixels.

use std::borrow::Cow;
use std::io::Cursor;
use std::ops::Range;

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
    decoder.set_ignore_iccp_chunk(true);
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

/// The chunks of a file: the kind of each, and where it is, without its checksum.
fn chunks(bytes: &[u8]) -> impl Iterator<Item = ([u8; 4], Range<usize>)> {
    let mut at = 8; // after the signature
    std::iter::from_fn(move || {
        let start = at;
        let length = u32::from_be_bytes(*bytes.get(start..)?.first_chunk()?) as usize;
        let end = start.checked_add(8)?.checked_add(length)?;
        let kind = *bytes.get(start..end)?[4..].first_chunk()?;
        at = end + 4;
        Some((kind, start..end))
    })
}

/// The EXIF block, wherever it is in the file.
pub(super) fn exif(bytes: &[u8]) -> Option<&[u8]> {
    let (_, chunk) = chunks(bytes).find(|(kind, _)| kind == b"eXIf")?;
    let content = &bytes[chunk][8..];
    // some writers keep the prefix that the block has in JPEG files
    Some(content.strip_prefix(b"Exif\0\0").unwrap_or(content))
}

/// The number of frames of an animation; 1 for another file.
pub(super) fn num_frames(bytes: &[u8]) -> usize {
    let animation = chunks(bytes).take_while(|(kind, _)| kind != b"IDAT").find(|(kind, _)| kind == b"acTL");
    let count = animation.and_then(|(_, chunk)| bytes[chunk][8..].first_chunk().copied().map(u32::from_be_bytes));
    count.map_or(1, |count| count as usize)
}

/// The file without colour profiles, which are not applied. One of 1 GB takes 1 MB, and the usual decoder unpacks it.
pub(super) fn without_profile(bytes: &[u8]) -> Cow<'_, [u8]> {
    let before_pixels = chunks(bytes).take_while(|(kind, _)| kind != b"IDAT");
    let profiles: Vec<_> = before_pixels.filter(|(kind, _)| kind == b"iCCP").map(|(_, chunk)| chunk).collect();
    if profiles.is_empty() {
        return Cow::Borrowed(bytes);
    }
    let mut rest = Vec::with_capacity(bytes.len());
    let mut from = 0;
    for profile in profiles {
        rest.extend_from_slice(&bytes[from..profile.start]);
        from = (profile.end + 4).min(bytes.len());
    }
    rest.extend_from_slice(&bytes[from..]);
    Cow::Owned(rest)
}
