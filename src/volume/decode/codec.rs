//! Decoders of flat images, each with the palette and the noise that masks need.

use std::io::Cursor;

use ::image::metadata::Orientation;
use ::image::{DynamicImage, ImageFormat, ImageReader, Rgb, RgbImage};

use super::shared::{DecodeFailure, Decoded, Indexed, MAX_PIXELS, MAX_SIDE, Palette};
use super::{jpeg, png, tiff, unpack_lzw};

type SizeResult = Result<(u32, u32), DecodeFailure>;

/// How files of one format become images.
#[derive(Clone, Copy)]
pub(crate) struct Codec {
    pub(super) decode: fn(&[u8], Palette) -> Result<Decoded, DecodeFailure>,
    /// Width and height as the file stores them, before its orientation is applied.
    pub(super) size: fn(&[u8]) -> SizeResult,
    /// The orientation of the EXIF block, or of the tag of a TIFF file; `None` also for an invalid one.
    pub(super) orientation: fn(&[u8]) -> Option<Orientation>,
}

pub(crate) const PNG: Codec = Codec {
    decode: png_file,
    size: |bytes| size_of(&png::without_profile(bytes), ImageFormat::Png),
    orientation: |bytes| png::exif(bytes).and_then(Orientation::from_exif_chunk),
};

pub(crate) const JPEG: Codec = Codec {
    decode: |bytes, _| jpeg_file(bytes),
    size: |bytes| size_of(bytes, ImageFormat::Jpeg),
    orientation: |bytes| jpeg::header(bytes)?.exif.and_then(Orientation::from_exif_chunk),
};

pub(crate) const TIFF: Codec = Codec {
    decode: tiff_file,
    size: |bytes| Ok(tiff::header(bytes)?.size),
    orientation: |bytes| Orientation::from_exif(tiff::header(bytes).ok()?.orientation),
};

fn png_file(bytes: &[u8], palette: Palette) -> Result<Decoded, DecodeFailure> {
    match png::num_frames(bytes) {
        0 | 1 => {}
        count => return Err(DecodeFailure::Frames(count)),
    }
    if palette == Palette::Keep
        && let Some(indexed) = png::indexed(bytes)?
    {
        return Ok(indexed.decoded(palette));
    }
    usual(&png::without_profile(bytes), ImageFormat::Png)
}

fn jpeg_file(bytes: &[u8]) -> Result<Decoded, DecodeFailure> {
    let header = jpeg::header(bytes).ok_or_else(|| "the JPEG is truncated".to_owned())?;
    match jpeg::decode(bytes, &header, true)? {
        Some(image) => Ok(Decoded { noise: header.noise(), ..Decoded::from(image) }),
        None => usual(bytes, ImageFormat::Jpeg),
    }
}

fn tiff_file(bytes: &[u8], palette: Palette) -> Result<Decoded, DecodeFailure> {
    let decoded = tiff_page(bytes, palette);
    if !matches!(decoded, Err(DecodeFailure::Corrupt(_))) {
        return decoded;
    }
    match unpack_lzw::uncompressed(bytes) {
        Some(plain) => tiff_page(&plain, palette).or(decoded),
        None => decoded,
    }
}

pub(super) fn tiff_page(bytes: &[u8], palette: Palette) -> Result<Decoded, DecodeFailure> {
    let header = tiff::header(bytes)?;
    let decoded = match header.page(bytes, palette)? {
        Some(decoded) => decoded,
        None => usual(bytes, ImageFormat::Tiff)?,
    };
    Ok(Decoded { noise: header.noise, ..decoded })
}

/// Width and height, by the `image` crate.
pub(super) fn size_of(bytes: &[u8], format: ImageFormat) -> SizeResult {
    Ok(ImageReader::with_format(Cursor::new(bytes), format).into_dimensions()?)
}

/// Decodes with the `image` crate.
pub(super) fn usual(bytes: &[u8], format: ImageFormat) -> Result<Decoded, DecodeFailure> {
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut limits = ::image::Limits::default();
    (limits.max_image_width, limits.max_image_height) = (Some(MAX_SIDE), Some(MAX_SIDE));
    limits.max_alloc = Some(MAX_PIXELS as u64);
    reader.limits(limits);
    Ok(reader.decode()?.into())
}

impl From<DynamicImage> for Decoded {
    fn from(image: DynamicImage) -> Self {
        Self { image, palette: None, noise: 0, is_turned: false }
    }
}

impl Indexed {
    pub(super) fn decoded(self, palette: Palette) -> Decoded {
        if palette == Palette::Keep {
            return Decoded { palette: Some(self.palette), ..DynamicImage::ImageLuma8(self.image).into() };
        }
        let colour = |index: u8| self.palette.get(usize::from(index)).map_or([0; 3], |&[r, g, b, _]| [r, g, b]);
        let (width, height) = self.image.dimensions();
        let rgb = RgbImage::from_fn(width, height, |x, y| Rgb(colour(self.image.get_pixel(x, y).0[0])));
        DynamicImage::ImageRgb8(rgb).into()
    }
}
