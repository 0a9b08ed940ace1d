//! WebP files of one image.

use std::io::Cursor;

use ::image::codecs::webp::WebPDecoder;
use ::image::metadata::Orientation;
use ::image::{ImageDecoder, ImageFormat};

use super::codec::{Codec, size_of, usual};
use super::shared::{DecodeFailure, Decoded};

/// Noise of lossy compression, in levels.
const NOISE: u8 = 8;

pub(crate) const WEBP: Codec = Codec {
    decode: |bytes, _| file(bytes),
    size: |bytes| size_of(bytes, ImageFormat::WebP),
    orientation: |bytes| {
        let exif = WebPDecoder::new(Cursor::new(bytes)).ok()?.exif_metadata().ok()??;
        Orientation::from_exif_chunk(exif.strip_prefix(b"Exif\0\0").unwrap_or(&exif))
    },
};

fn file(bytes: &[u8]) -> Result<Decoded, DecodeFailure> {
    if WebPDecoder::new(Cursor::new(bytes))?.has_animation() {
        return Err(DecodeFailure::Unsupported("is an animation".into()));
    }
    let noise = if is_lossy(bytes) { NOISE } else { 0 };
    Ok(Decoded { noise, ..usual(bytes, ImageFormat::WebP)? })
}

/// True with a chunk of lossy pixels.
fn is_lossy(bytes: &[u8]) -> bool {
    let mut at = 12; // after `RIFF`, the size and `WEBP`
    while let Some((name, length)) = bytes.get(at..at + 8).map(|head| head.split_at(4)) {
        if name == b"VP8 " {
            return true;
        }
        let length = length.first_chunk().map_or(0, |length| u32::from_le_bytes(*length) as usize);
        // chunks begin at even places
        at = at.saturating_add(8 + length + length % 2).min(bytes.len());
    }
    false
}
