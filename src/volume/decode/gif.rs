//! GIF files of one frame. The usual decoder loses their indexes.

use std::io::Cursor;
use std::num::NonZeroU64;

use ::gif::{ColorOutput, DecodeOptions, Decoder, DecodingError, MemoryLimit};
use ::image::GrayImage;

use super::codec::Codec;
use super::shared::{DecodeFailure, Indexed, MAX_PIXELS, fits};

pub(crate) const GIF: Codec = Codec {
    decode: |bytes, palette| Ok(indexed(bytes)?.decoded(palette)),
    size: |bytes| {
        let decoder = decoder(bytes)?;
        Ok((decoder.width().into(), decoder.height().into()))
    },
    orientation: |_| None,
};

impl From<DecodingError> for DecodeFailure {
    fn from(error: DecodingError) -> Self {
        Self::Corrupt(error.to_string())
    }
}

fn decoder(bytes: &[u8]) -> Result<Decoder<Cursor<&[u8]>>, DecodeFailure> {
    let mut options = DecodeOptions::new();
    options.set_color_output(ColorOutput::Indexed);
    options.check_frame_consistency(true);
    options.set_memory_limit(NonZeroU64::new(MAX_PIXELS as u64).map_or(MemoryLimit::Unlimited, MemoryLimit::Bytes));
    Ok(options.read_info(Cursor::new(bytes))?)
}

fn indexed(bytes: &[u8]) -> Result<Indexed, DecodeFailure> {
    let mut decoder = decoder(bytes)?;
    let (width, height) = (decoder.width(), decoder.height());
    fits(width.into(), height.into(), 1)?;
    let global = decoder.global_palette().map(<[u8]>::to_vec);
    let none = || DecodeFailure::Corrupt("it has no image".into());
    let frame = decoder.read_next_frame()?.ok_or_else(none)?.clone();
    let mut num_frames = 1;
    while decoder.next_frame_info()?.is_some() {
        num_frames += 1;
    }
    if num_frames > 1 {
        return Err(DecodeFailure::Pages(num_frames));
    }
    if (frame.left, frame.top, frame.width, frame.height) != (0, 0, width, height) {
        return Err(DecodeFailure::Unsupported("has an image that does not fill its canvas".into()));
    }
    let colours = frame.palette.or(global).ok_or_else(|| DecodeFailure::Corrupt("it has no palette".into()))?;
    let alpha = |index: usize| if frame.transparent.is_some_and(|at| usize::from(at) == index) { 0 } else { 255 };
    let colours = colours.as_chunks::<3>().0.iter().enumerate();
    let palette = colours.map(|(index, &[red, green, blue])| [red, green, blue, alpha(index)]).collect();
    let image = GrayImage::from_vec(width.into(), height.into(), frame.buffer.into_owned()).ok_or_else(none)?;
    Ok(Indexed { image, palette })
}
