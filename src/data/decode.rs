//! Image decoding: PNG, JPEG and TIFF (first page), 8 or 16 bits, grey or RGB, with or without alpha or palette.
//!
//! The result equals Pillow's `convert("RGB")`: alpha is dropped, grey is repeated, EXIF orientation and colour
//! profiles are ignored. 16-bit images are scaled by 1/257 over their full range (Pillow clips or truncates them).
//! The format is detected from the content, not from the file name. Floating-point images are rejected. JPEG files
//! are decoded with libjpeg, as in Pillow. The decoders `zune-jpeg` and `jpeg-decoder` differ from it by more than
//! 1/255 in 2-5 % of the pixels of a 4:2:0 image.

use std::fs;
use std::io::Cursor;
use std::path::Path;

use ::image::{DynamicImage, GrayImage, ImageFormat, ImageReader, Luma, Rgb, RgbImage};

use crate::error::{Error, Result};

const REPLACE: &str = "replace the file or remove its row";

/// Decodes an image as 8-bit grey (`ImageLuma8`) or RGB (`ImageRgb8`).
///
/// # Errors
/// [`Error::Data`] when the file is missing, of another format, truncated or corrupt; [`Error::Io`].
pub fn image(path: &Path) -> Result<DynamicImage> {
    Ok(match decode(path)? {
        grey @ (DynamicImage::ImageLuma8(_)
        | DynamicImage::ImageLumaA8(_)
        | DynamicImage::ImageLuma16(_)
        | DynamicImage::ImageLumaA16(_)) => DynamicImage::ImageLuma8(grey.into_luma8()),
        colour => DynamicImage::ImageRgb8(colour.into_rgb8()),
    })
}

/// Decodes a mask as 8-bit grey with its stored values. Colour is converted with the weights of Pillow's
/// `convert("L")`.
///
/// 16-bit masks keep their values when none exceeds 255 (label maps); otherwise they are scaled by 1/257.
///
/// # Errors
/// As [`image()`].
pub fn mask(path: &Path) -> Result<GrayImage> {
    Ok(match decode(path)? {
        DynamicImage::ImageLuma8(grey) => grey,
        grey @ DynamicImage::ImageLumaA8(_) => grey.into_luma8(),
        deep @ (DynamicImage::ImageLuma16(_) | DynamicImage::ImageLumaA16(_)) => {
            let deep = deep.into_luma16();
            let scaled = deep.pixels().any(|pixel| pixel.0[0] > 255);
            let value = |value: u16| if scaled { (u32::from(value) + 128) / 257 } else { u32::from(value) };
            GrayImage::from_fn(deep.width(), deep.height(), |x, y| Luma([byte(value(deep.get_pixel(x, y).0[0]))]))
        }
        colour => {
            let rgb = colour.into_rgb8();
            GrayImage::from_fn(rgb.width(), rgb.height(), |x, y| Luma([grey_of(*rgb.get_pixel(x, y))]))
        }
    })
}

fn byte(value: u32) -> u8 {
    u8::try_from(value).unwrap_or(u8::MAX)
}

/// Pillow's fixed-point ITU-R 601 weights.
fn grey_of(Rgb([r, g, b]): Rgb<u8>) -> u8 {
    byte((u32::from(r) * 19_595 + u32::from(g) * 38_470 + u32::from(b) * 7_471 + 0x8000) >> 16)
}

fn decode(path: &Path) -> Result<DynamicImage> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::data(path, "the file is missing", "restore the file or remove its row"));
        }
        Err(error) => return Err(Error::io(path, "read")(error)),
    };
    let corrupt = |reason: String| Error::data(path, format!("cannot be decoded: {reason}"), REPLACE);
    let reader =
        ImageReader::new(Cursor::new(&bytes)).with_guessed_format().map_err(|error| corrupt(error.to_string()))?;
    match reader.format() {
        Some(ImageFormat::Png | ImageFormat::Tiff) => {}
        Some(ImageFormat::Jpeg) if !jpeg_is_complete(&bytes) => return Err(corrupt("the JPEG is truncated".into())),
        Some(ImageFormat::Jpeg) => {
            if let Some(decoded) = jpeg(&bytes).map_err(corrupt)? {
                return Ok(decoded);
            }
        }
        _ => return Err(Error::data(path, "is not a PNG, JPEG or TIFF image", "convert it to PNG")),
    }
    let decoded = reader.decode().map_err(|error| corrupt(error.to_string()))?;
    if matches!(decoded, DynamicImage::ImageRgb32F(_) | DynamicImage::ImageRgba32F(_)) {
        return Err(Error::data(path, "has floating-point pixels", "convert it to 8 or 16 bits, windowed as needed"));
    }
    Ok(decoded)
}

/// Decodes a grey or colour JPEG; `None` for CMYK, which libjpeg does not convert to RGB.
fn jpeg(bytes: &[u8]) -> std::result::Result<Option<DynamicImage>, String> {
    let decode = || -> std::io::Result<Option<DynamicImage>> {
        let header = mozjpeg::Decompress::new_mem(bytes)?;
        let (width, height) = header.size();
        if width.saturating_mul(height) > MAX_JPEG_PIXELS {
            return Err(std::io::Error::other(format!("{width}x{height} pixels are too many")));
        }
        let grey = match header.color_space() {
            mozjpeg::ColorSpace::JCS_GRAYSCALE => true,
            mozjpeg::ColorSpace::JCS_YCbCr | mozjpeg::ColorSpace::JCS_RGB => false,
            _ => return Ok(None),
        };
        let mut scan = if grey { header.grayscale()? } else { header.rgb()? };
        let pixels = scan.read_scanlines::<u8>()?;
        let (width, height) = (u32::try_from(width).unwrap_or(0), u32::try_from(height).unwrap_or(0));
        Ok(if grey {
            GrayImage::from_vec(width, height, pixels).map(DynamicImage::ImageLuma8)
        } else {
            RgbImage::from_vec(width, height, pixels).map(DynamicImage::ImageRgb8)
        })
    };
    // A fatal libjpeg error becomes a panic with its message as payload; the panic hook is not called.
    match std::panic::catch_unwind(decode) {
        Ok(decoded) => decoded.map_err(|error| error.to_string()),
        Err(cause) => Err(cause.downcast::<String>().map_or_else(|_| "libjpeg gave up".into(), |message| *message)),
    }
}

/// Half a gigapixel. A larger size means a corrupt header, or an image that must be tiled first.
const MAX_JPEG_PIXELS: usize = 1 << 29;

/// Whether the end marker follows the first scan header. libjpeg fills a truncated JPEG with grey and only warns.
fn jpeg_is_complete(bytes: &[u8]) -> bool {
    let mut at = 2; // after the start marker
    while let [0xFF, marker, ..] = bytes[at.min(bytes.len())..] {
        match marker {
            // The start of the first scan: from here on 0xFF 0xD9 can only be the end of the image.
            0xDA => return bytes[at..].windows(2).any(|pair| pair == [0xFF, 0xD9]),
            // Padding and markers without a length.
            0xFF => at += 1,
            0x01 | 0xD0..=0xD8 => at += 2,
            _ => match bytes.get(at + 2..at + 4) {
                Some(&[high, low]) => at += 2 + usize::from(u16::from_be_bytes([high, low])),
                _ => return false,
            },
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use ::image::{ImageBuffer, LumaA, Rgba};

    use super::*;
    use crate::data::fixture::Root;

    fn refused(path: &Path) -> String {
        image(path).expect_err("refused").to_string()
    }

    #[test]
    fn decoding_errors_name_the_file_and_the_reason() {
        let root = Root::new();
        assert!(refused(&root.path().join("none.png")).ends_with("none.png: the file is missing"));

        let text = root.file("text.png");
        fs::write(&text, "hello").expect("written");
        assert!(refused(&text).ends_with("text.png: is not a PNG, JPEG or TIFF image"));

        root.image("a.png", 40, 30);
        let png = fs::read(root.file("a.png")).expect("read");
        fs::write(root.file("cut.png"), &png[..png.len() / 2]).expect("written");
        assert!(refused(&root.file("cut.png")).contains("cut.png: cannot be decoded: "));
        let mut bent = png.clone();
        let middle = bent.len() / 2;
        bent[middle] ^= 0x55;
        fs::write(root.file("bent.png"), &bent).expect("written");
        assert!(refused(&root.file("bent.png")).contains("bent.png: cannot be decoded: "));

        root.image("a.jpg", 64, 64);
        let jpeg = fs::read(root.file("a.jpg")).expect("read");
        assert!(image(&root.file("a.jpg")).is_ok());
        for part in [jpeg.len() / 4, jpeg.len() / 2, jpeg.len() - 2] {
            fs::write(root.file("cut.jpg"), &jpeg[..part]).expect("written");
            assert!(
                refused(&root.file("cut.jpg")).ends_with("cut.jpg: cannot be decoded: the JPEG is truncated"),
                "{part}"
            );
        }
        // An image of 0 rows: fatal for libjpeg.
        let mut flat = jpeg.clone();
        let frame = flat.windows(2).position(|pair| pair == [0xFF, 0xC0]).expect("a frame header");
        flat[frame + 5..frame + 7].fill(0);
        fs::write(root.file("flat.jpg"), &flat).expect("written");
        assert!(refused(&root.file("flat.jpg")).contains("flat.jpg: cannot be decoded: libjpeg fatal error: "));
    }

    #[test]
    fn the_format_is_detected_from_the_content() {
        let root = Root::new();
        root.image("a.png", 4, 4);
        let renamed: PathBuf = root.file("b.jpg");
        fs::copy(root.file("a.png"), &renamed).expect("copied");
        assert_eq!(image(&renamed).expect("a PNG").into_rgb8(), image(&root.file("a.png")).expect("a PNG").into_rgb8());
    }

    #[test]
    fn all_pixel_formats_become_eight_bits() {
        let root = Root::new();
        let deep: ImageBuffer<Luma<u16>, Vec<u16>> = ImageBuffer::from_vec(3, 1, vec![0, 129, 65_535]).expect("sized");
        for name in ["deep.png", "deep.tif"] {
            deep.save(root.file(name)).expect("written");
            assert_eq!(image(&root.file(name)).expect("decoded").as_luma8().expect("grey").as_raw(), &[0, 1, 255]);
        }
        let rgb: ImageBuffer<Rgb<u16>, Vec<u16>> = ImageBuffer::from_pixel(1, 1, Rgb([257, 514, 65_535]));
        rgb.save(root.file("rgb16.png")).expect("written");
        assert_eq!(image(&root.file("rgb16.png")).expect("decoded").into_rgb8().as_raw(), &[1, 2, 255]);
        let rgba: ImageBuffer<Rgba<u8>, Vec<u8>> = ImageBuffer::from_pixel(1, 1, Rgba([1, 2, 3, 0]));
        rgba.save(root.file("rgba.png")).expect("written");
        assert_eq!(image(&root.file("rgba.png")).expect("decoded").into_rgb8().as_raw(), &[1, 2, 3]);
        let grey: ImageBuffer<LumaA<u8>, Vec<u8>> = ImageBuffer::from_pixel(1, 1, LumaA([7, 0]));
        grey.save(root.file("la.png")).expect("written");
        assert_eq!(image(&root.file("la.png")).expect("decoded").as_luma8().expect("grey").as_raw(), &[7]);
    }

    #[test]
    fn masks_keep_small_labels_and_convert_colour_like_pillow() {
        let root = Root::new();
        let labels: ImageBuffer<Luma<u16>, Vec<u16>> = ImageBuffer::from_vec(2, 1, vec![0, 1]).expect("sized");
        labels.save(root.file("labels.png")).expect("written");
        assert_eq!(mask(&root.file("labels.png")).expect("decoded").as_raw(), &[0, 1]);
        RgbImage::from_pixel(1, 1, Rgb([200, 100, 50])).save(root.file("rgb.png")).expect("written");
        // PIL: Image.new("RGB", (1, 1), (200, 100, 50)).convert("L").getpixel((0, 0)) == 124
        assert_eq!(mask(&root.file("rgb.png")).expect("decoded").as_raw(), &[124]);
    }

    #[test]
    fn floating_point_images_are_rejected() {
        let root = Root::new();
        let float: ImageBuffer<Rgb<f32>, Vec<f32>> = ImageBuffer::from_pixel(2, 2, Rgb([0.5, 0.5, 0.5]));
        DynamicImage::ImageRgb32F(float).save(root.file("float.tif")).expect("written");
        assert!(refused(&root.file("float.tif")).ends_with("has floating-point pixels"));
    }
}
