//! BMP files, whose palettes the usual decoder replaces by colours.

use std::io::Cursor;

use ::image::codecs::bmp::BmpDecoder;
use ::image::{DynamicImage, GrayImage, ImageDecoder, ImageFormat};

use super::codec::{Codec, size_of, usual};
use super::shared::{DecodeFailure, Decoded, Indexed, Palette, fits};

pub(crate) const BMP: Codec =
    Codec { decode: file, size: |bytes| size_of(bytes, ImageFormat::Bmp), orientation: |_| None };

fn file(bytes: &[u8], palette: Palette) -> Result<Decoded, DecodeFailure> {
    if palette == Palette::Keep {
        let mut decoder = BmpDecoder::new(Cursor::new(bytes))?;
        if let Some(colours) = decoder.get_palette() {
            let palette: Vec<[u8; 4]> = colours.iter().map(|&[red, green, blue]| [red, green, blue, 255]).collect();
            let (width, height) = decoder.dimensions();
            fits(width, height, 4)?;
            decoder.set_indexed_color(true);
            let mut indexes = vec![0; width as usize * height as usize];
            decoder.read_image(&mut indexes)?;
            let image = GrayImage::from_vec(width, height, indexes).unwrap_or_default();
            // a grey image is stored with the palette of its levels
            let is_grey = palette
                .iter()
                .enumerate()
                .all(|(level, colour)| colour[..3].iter().all(|part| usize::from(*part) == level));
            let indexed = Indexed { image, palette };
            return Ok(if is_grey { DynamicImage::from(indexed.image).into() } else { indexed.decoded(Palette::Keep) });
        }
    }
    usual(bytes, ImageFormat::Bmp)
}
