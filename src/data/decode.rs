//! Image decoding: PNG, JPEG and TIFF (first page), 8 or 16 bits, grey or RGB, with or without alpha or palette.
//!
//! The result equals Pillow's `convert("RGB")`: alpha is dropped, grey is repeated, EXIF orientation and colour
//! profiles are ignored. 16-bit images are scaled by 1/257 over their full range (Pillow clips or truncates them).
//! The format is detected from the content, not from the file name. Floating-point images are rejected. JPEG files
//! are decoded with libjpeg, as in Pillow. The decoders `zune-jpeg` and `jpeg-decoder` differ from it by more than
//! 1/255 in 2-5 % of the pixels of a 4:2:0 image.

use std::ffi::c_int;
use std::io::{Cursor, ErrorKind};
use std::path::Path;

use ::image::{DynamicImage, GrayImage, ImageBuffer, ImageError, ImageFormat, ImageReader, Luma, Rgb, RgbImage};

use super::labels::{self, Labels};
use crate::error::{Error, Result};
use crate::files;

const REPLACE: &str = "replace the file or remove its row";
const TILES: &str = "cut the image into tiles or make it smaller";

/// Most pixels of an image's side.
pub const MAX_SIDE: u32 = 1 << 17;
/// Most bytes of an image's pixels, as they are stored in the file.
const MAX_PIXELS: usize = 256 << 20;

/// Decodes an image as 8-bit grey (`ImageLuma8`) or RGB (`ImageRgb8`).
///
/// # Errors
/// [`Error::Data`] when the file is missing, not a regular file, of another format, truncated, corrupt or too large;
/// [`Error::Io`].
pub fn image(path: &Path) -> Result<DynamicImage> {
    Ok(eight_bits(decode(path)?))
}

/// As [`image()`], with the smallest and largest value that a 16-bit image stores.
///
/// # Errors
/// As [`image()`].
pub fn image_with_range(path: &Path) -> Result<(DynamicImage, Option<[u16; 2]>)> {
    let decoded = decode(path)?;
    let range = |values: &[u16]| Some([*values.iter().min()?, *values.iter().max()?]);
    let range = match &decoded {
        DynamicImage::ImageLuma16(grey) => range(grey.as_raw()),
        DynamicImage::ImageRgb16(rgb) => range(rgb.as_raw()),
        DynamicImage::ImageLumaA16(_) => range(decoded.to_luma16().as_raw()),
        DynamicImage::ImageRgba16(_) => range(decoded.to_rgb16().as_raw()),
        _ => None,
    };
    Ok((eight_bits(decoded), range))
}

/// As [`image()`], for a file in memory; errors call it `name`. Refuses an image of more than `max_pixels` pixels before
/// it is decoded.
///
/// # Errors
/// As [`image()`].
pub fn image_of(bytes: &[u8], name: &Path, max_pixels: u64) -> Result<DynamicImage> {
    check_pixels(bytes, name, max_pixels)?;
    Ok(eight_bits(decode_bytes(bytes, name)?))
}

/// As [`stored_mask`], for a file in memory, with the limit of [`image_of`].
///
/// # Errors
/// As [`image()`].
pub fn stored_mask_of(bytes: &[u8], name: &Path, max_pixels: u64) -> Result<StoredMask> {
    check_pixels(bytes, name, max_pixels)?;
    Ok(as_stored(decode_bytes(bytes, name)?))
}

fn check_pixels(bytes: &[u8], name: &Path, max_pixels: u64) -> Result<()> {
    let size = ImageReader::new(Cursor::new(bytes)).with_guessed_format().ok().and_then(|reader| {
        let is_known = matches!(reader.format(), Some(ImageFormat::Png | ImageFormat::Tiff | ImageFormat::Jpeg));
        if is_known { reader.into_dimensions().ok() } else { None }
    });
    // a file whose size cannot be read is refused by its decoder
    let Some((width, height)) = size.filter(|(width, height)| u64::from(*width) * u64::from(*height) > max_pixels)
    else {
        return Ok(());
    };
    Err(Error::data(name, format!("has {width}x{height} pixels, at most {max_pixels} pixels are allowed"), TILES))
}

fn eight_bits(decoded: DynamicImage) -> DynamicImage {
    match decoded {
        grey @ (DynamicImage::ImageLuma8(_)
        | DynamicImage::ImageLumaA8(_)
        | DynamicImage::ImageLuma16(_)
        | DynamicImage::ImageLumaA16(_)) => DynamicImage::ImageLuma8(grey.into_luma8()),
        colour => DynamicImage::ImageRgb8(colour.into_rgb8()),
    }
}

/// Decodes the mask of one target as 8-bit grey, ready for [`super::image::foreground`].
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
    let stored = stored_mask(path)?;
    if !labels.is_empty() {
        return Ok(stored.select(labels));
    }
    match stored.labels().as_slice() {
        several @ [_, _, ..] => {
            let reason = format!("the mask has several labels: {}", labels::describe(several));
            Err(Error::data(path, reason, CHOOSE_LABELS))
        }
        _ => Ok(stored.into_grey()),
    }
}

/// What to do about a mask with several labels.
pub const CHOOSE_LABELS: &str = "choose the labels of the target, for example `--labels 1,3`, or write one mask for \
                                 each label";

/// A mask with the values of its file. Colour is converted with the weights of Pillow's `convert("L")`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoredMask {
    /// 8 bits.
    Grey8(GrayImage),
    /// 16 bits, grey.
    Grey16(ImageBuffer<Luma<u16>, Vec<u16>>),
}

impl StoredMask {
    /// Width and height in pixels.
    pub fn dimensions(&self) -> (u32, u32) {
        match self {
            Self::Grey8(grey) => grey.dimensions(),
            Self::Grey16(deep) => deep.dimensions(),
        }
    }

    /// Its labels and their numbers of pixels; see [`labels::labels_of`].
    pub fn labels(&self) -> Vec<(u16, u64)> {
        let width = self.dimensions().0 as usize;
        match self {
            Self::Grey8(grey) => labels::labels_of(grey.as_raw(), width),
            Self::Grey16(deep) => labels::labels_of(deep.as_raw(), width),
        }
    }

    /// 255 where the value is one of `labels`, else 0.
    pub fn select(&self, labels: Labels) -> GrayImage {
        let set = |value: u16| Luma([if labels.contains(value) { 255 } else { 0 }]);
        let (width, height) = self.dimensions();
        GrayImage::from_fn(width, height, |x, y| match self {
            Self::Grey8(grey) => set(u16::from(grey.get_pixel(x, y).0[0])),
            Self::Grey16(deep) => set(deep.get_pixel(x, y).0[0]),
        })
    }

    /// 8-bit values. 16-bit values above 255 are scaled, so that the largest becomes 255.
    pub fn into_grey(self) -> GrayImage {
        let deep = match self {
            Self::Grey8(grey) => return grey,
            Self::Grey16(deep) => deep,
        };
        let most = deep.iter().copied().max().map_or(0, u32::from);
        let value = |value: u32| if most > 255 { (value * 255 + most / 2) / most } else { value };
        GrayImage::from_fn(deep.width(), deep.height(), |x, y| Luma([byte(value(deep.get_pixel(x, y).0[0].into()))]))
    }
}

/// Decodes a mask with the values of its file.
///
/// # Errors
/// As [`image()`].
pub fn stored_mask(path: &Path) -> Result<StoredMask> {
    Ok(as_stored(decode(path)?))
}

fn as_stored(decoded: DynamicImage) -> StoredMask {
    match decoded {
        DynamicImage::ImageLuma8(grey) => StoredMask::Grey8(grey),
        grey @ DynamicImage::ImageLumaA8(_) => StoredMask::Grey8(grey.into_luma8()),
        deep @ (DynamicImage::ImageLuma16(_) | DynamicImage::ImageLumaA16(_)) => StoredMask::Grey16(deep.into_luma16()),
        colour => {
            let rgb = colour.into_rgb8();
            StoredMask::Grey8(GrayImage::from_fn(rgb.width(), rgb.height(), |x, y| {
                Luma([grey_of(*rgb.get_pixel(x, y))])
            }))
        }
    }
}

fn byte(value: u32) -> u8 {
    u8::try_from(value).unwrap_or(u8::MAX)
}

/// Pillow's fixed-point ITU-R 601 weights.
fn grey_of(Rgb([r, g, b]): Rgb<u8>) -> u8 {
    byte((u32::from(r) * 19_595 + u32::from(g) * 38_470 + u32::from(b) * 7_471 + 0x8000) >> 16)
}

/// The bytes of an image file.
pub(super) fn bytes_of(path: &Path) -> Result<Vec<u8>> {
    files::read(path, files::MAX_IMAGE).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Error::data(path, "the file is missing", "restore the file or remove its row"),
        ErrorKind::InvalidInput | ErrorKind::FileTooLarge => Error::data(path, error.to_string(), REPLACE),
        _ => Error::io(path, "read")(error),
    })
}

fn decode(path: &Path) -> Result<DynamicImage> {
    decode_bytes(&bytes_of(path)?, path)
}

fn decode_bytes(bytes: &[u8], path: &Path) -> Result<DynamicImage> {
    let corrupt = |reason: String| Error::data(path, format!("cannot be decoded: {reason}"), REPLACE);
    let mut reader =
        ImageReader::new(Cursor::new(bytes)).with_guessed_format().map_err(|error| corrupt(error.to_string()))?;
    match reader.format() {
        Some(ImageFormat::Png | ImageFormat::Tiff) => {}
        Some(ImageFormat::Jpeg) => {
            let scans = jpeg_scans(bytes).ok_or_else(|| corrupt("the JPEG is truncated".into()))?;
            if let Some(decoded) = jpeg(bytes, scans).map_err(corrupt)? {
                return Ok(decoded);
            }
        }
        _ => return Err(Error::data(path, "is not a PNG, JPEG or TIFF image", "convert it to PNG")),
    }
    let mut limits = ::image::Limits::default();
    (limits.max_image_width, limits.max_image_height) = (Some(MAX_SIDE), Some(MAX_SIDE));
    limits.max_alloc = Some(MAX_PIXELS as u64);
    reader.limits(limits);
    let decoded = reader.decode().map_err(|error| match error {
        ImageError::Limits(_) => {
            let reason = format!("has more than {MAX_SIDE} pixels on a side, or needs more than 256 MiB of memory");
            Error::data(path, reason, TILES)
        }
        error => corrupt(error.to_string()),
    })?;
    if matches!(decoded, DynamicImage::ImageRgb32F(_) | DynamicImage::ImageRgba32F(_)) {
        return Err(Error::data(path, "has floating-point pixels", "convert it to 8 or 16 bits, windowed as needed"));
    }
    Ok(decoded)
}

/// Decodes a grey or colour JPEG; `None` for CMYK, which libjpeg does not convert to RGB.
fn jpeg(bytes: &[u8], scans: Scans) -> std::result::Result<Option<DynamicImage>, String> {
    let decode = || -> std::io::Result<Option<DynamicImage>> {
        let header = mozjpeg::Decompress::builder().with_err(strict_errors()).from_mem(bytes)?;
        let (width, height) = header.size();
        let num_pixels = width.saturating_mul(height);
        let components = header.components();
        let coefficients = components.iter().map(|part| {
            [part.width_in_blocks as usize, part.height_in_blocks as usize, 64 * size_of::<i16>()]
                .into_iter()
                .fold(1, usize::saturating_mul)
        });
        let keeps_coefficients = scans.progressive || scans.first_components < components.len();
        let needed = if keeps_coefficients { coefficients.fold(0, usize::saturating_add) } else { 0 };
        if num_pixels.saturating_mul(components.len()).max(needed) > MAX_PIXELS {
            return Err(std::io::Error::other(format!("{width}x{height} pixels are too many")));
        }
        if scans.num > MAX_SCANS {
            return Err(std::io::Error::other(format!("{} scans are too many", scans.num)));
        }
        if num_pixels / MAX_PIXELS_PER_BYTE > bytes.len() {
            let size = bytes.len();
            return Err(std::io::Error::other(format!("{size} bytes are too few for {width}x{height} pixels")));
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
    // an error of libjpeg unwinds with its message as payload; the panic hook is not called
    match std::panic::catch_unwind(decode) {
        Ok(decoded) => decoded.map_err(|error| error.to_string()),
        Err(cause) => Err(cause.downcast::<String>().map_or_else(|_| "libjpeg gave up".into(), |message| *message)),
    }
}

/// An error manager for which corrupt data is an error. By default libjpeg fills missing parts with grey and warns.
fn strict_errors() -> mozjpeg_sys::jpeg_error_mgr {
    // SAFETY: the struct has integers and nullable pointers, and `jpeg_std_error` sets all that libjpeg reads.
    let mut errors: mozjpeg_sys::jpeg_error_mgr = unsafe { std::mem::zeroed() };
    // SAFETY: it writes to the struct only.
    unsafe { mozjpeg_sys::jpeg_std_error(&mut errors) };
    errors.error_exit = Some(stop_at_error);
    errors.emit_message = Some(stop_at_corrupt_data);
    errors
}

extern "C-unwind" fn stop_at_error(info: &mut mozjpeg_sys::jpeg_common_struct) {
    std::panic::resume_unwind(Box::new(format!("libjpeg fatal error: {}", message_of(info))));
}

/// Levels below 0 are warnings, others are traces.
extern "C-unwind" fn stop_at_corrupt_data(info: &mut mozjpeg_sys::jpeg_common_struct, level: c_int) {
    const HARMLESS: [&str; 4] = ["Unknown Adobe", "Warning: unknown JFIF", "Invalid SOS parameters", "bad ICC marker"];
    if level >= 0 {
        return;
    }
    let message = message_of(info);
    if !HARMLESS.iter().any(|part| message.contains(part)) {
        std::panic::resume_unwind(Box::new(message));
    }
}

fn message_of(info: &mut mozjpeg_sys::jpeg_common_struct) -> String {
    type Declared = unsafe extern "C-unwind" fn(&mut mozjpeg_sys::jpeg_common_struct, &[u8; 80]);
    type Real = unsafe extern "C-unwind" fn(&mut mozjpeg_sys::jpeg_common_struct, &mut [u8; 80]);
    let mut buffer = [0_u8; 80];
    // SAFETY: libjpeg sets `err` to the manager of this decoder, which outlives the call.
    if let Some(format) = unsafe { info.err.as_ref() }.and_then(|errors| errors.format_message) {
        // SAFETY: the same function; the binding declares the buffer as shared, but the function writes to it.
        let format = unsafe { std::mem::transmute::<Declared, Real>(format) };
        // SAFETY: it writes at most 80 bytes, with a NUL at the end.
        unsafe { format(info, &mut buffer) };
    }
    let text = buffer.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// A block of 64 pixels takes at least one bit.
const MAX_PIXELS_PER_BYTE: usize = 512;
/// Most scans of a JPEG. Usual progressive files have about 10. A scan of a few bytes can take as long as the first one.
const MAX_SCANS: usize = 100;

/// The scans of a JPEG file.
#[derive(Debug, Clone, Copy)]
struct Scans {
    num: usize,
    progressive: bool,
    /// Colour components of the first scan. If it has not all of them, libjpeg keeps the coefficients of the image.
    first_components: usize,
}

/// The scans by their headers; `None` without a scan header that an end marker follows. libjpeg fills a truncated JPEG
/// with grey and only warns.
fn jpeg_scans(bytes: &[u8]) -> Option<Scans> {
    let mut at = 2; // after the start marker
    let mut progressive = false;
    while let [0xFF, marker, ..] = bytes[at.min(bytes.len())..] {
        match marker {
            // The start of the first scan: from here on 0xFF 0xD9 can only be the end of the image.
            0xDA => {
                let pairs = || bytes[at..].windows(2);
                let is_complete = pairs().any(|pair| pair == [0xFF, 0xD9]);
                let num = pairs().filter(|pair| *pair == [0xFF, 0xDA]).count();
                let first_components = bytes.get(at + 4).copied().unwrap_or(0).into();
                return is_complete.then_some(Scans { num, progressive, first_components });
            }
            // Padding and markers without a length.
            0xFF => at += 1,
            0x01 | 0xD0..=0xD8 => at += 2,
            _ => match bytes.get(at + 2..at + 4) {
                Some(&[high, low]) => {
                    progressive |= marker == 0xC2;
                    at += 2 + usize::from(u16::from_be_bytes([high, low]));
                }
                _ => return None,
            },
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use ::image::{LumaA, Rgba};

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
    fn masks_keep_small_values_and_convert_colour_like_pillow() {
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

    #[test]
    fn corrupt_and_hollow_jpegs_are_errors() {
        let root = Root::new();
        root.image("a.jpg", 512, 512);
        let whole = fs::read(root.file("a.jpg")).expect("read");
        let scan = whole.windows(2).position(|pair| pair == [0xFF, 0xDA]).expect("a scan");
        let data = scan + 2 + usize::from(u16::from_be_bytes([whole[scan + 2], whole[scan + 3]]));
        // one byte, or a half, of the image's data before the end marker
        for end in [data + 1, data + (whole.len() - data) / 2] {
            fs::write(root.file("cut.jpg"), [&whole[..end], &[0xFF, 0xD9]].concat()).expect("written");
            let reason = refused(&root.file("cut.jpg"));
            assert!(reason.contains("Corrupt JPEG data") || reason.contains("too few"), "{reason}");
        }
        let mut zeros = whole.clone();
        let middle = data + (whole.len() - data) / 2;
        zeros[middle..middle + 64].fill(0xAA);
        fs::write(root.file("bent.jpg"), &zeros).expect("written");
        let damaged = image(&root.file("bent.jpg"));
        assert!(damaged.is_err_and(|error| error.to_string().contains("cannot be decoded")));
        let frame = whole.windows(2).position(|pair| pair == [0xFF, 0xC0]).expect("a frame header");
        let claims = |[high, low]: [u8; 2]| {
            let mut huge = whole[..data + 8].to_vec();
            huge[frame + 5..frame + 9].copy_from_slice(&[high, low, high, low]);
            huge.extend([0xFF, 0xD9]);
            fs::write(root.file("huge.jpg"), &huge).expect("written");
            refused(&root.file("huge.jpg"))
        };
        assert!(claims([0x1F, 0x40]).contains("are too few for 8000x8000 pixels"));
        assert!(claims([0x59, 0xD8]).contains("23000x23000 pixels are too many"));
    }

    #[test]
    fn traces_and_harmless_warnings_do_not_stop_the_jpeg_decoder() {
        let root = Root::new();
        root.image("a.jpg", 64, 48);
        let mut bytes = fs::read(root.file("a.jpg")).expect("read");
        let header = bytes.windows(5).position(|part| part == b"JFIF\0").expect("a JFIF header");
        // libjpeg warns of a JFIF version that it does not know
        bytes[header + 5] = 9;
        fs::write(root.file("newer.jpg"), &bytes).expect("written");
        let decoded = |name: &str| image(&root.file(name)).expect("decoded");
        assert_eq!(decoded("newer.jpg"), decoded("a.jpg"));

        // SAFETY: the struct has integers and nullable pointers.
        let mut info: mozjpeg_sys::jpeg_common_struct = unsafe { std::mem::zeroed() };
        for trace in [0, 1] {
            stop_at_corrupt_data(&mut info, trace);
        }
    }

    #[test]
    fn the_longest_side_is_limited() {
        let root = Root::new();
        GrayImage::new(MAX_SIDE, 1).save(root.file("long.png")).expect("written");
        assert!(image(&root.file("long.png")).is_ok());
        GrayImage::new(1, MAX_SIDE + 1).save(root.file("longer.png")).expect("written");
        assert!(refused(&root.file("longer.png")).contains("has more than 131072 pixels on a side"));
    }

    #[test]
    fn pipes_and_devices_are_no_images() {
        let root = Root::new();
        let pipe = root.file("pipe.png");
        let name = std::ffi::CString::new(pipe.to_str().expect("a path")).expect("no NUL");
        // SAFETY: a NUL-terminated path.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        for path in [pipe.as_path(), Path::new("/dev/zero")] {
            assert!(refused(path).contains("it is not a regular file"));
        }
    }

    #[test]
    fn a_mask_with_several_labels_needs_a_choice() {
        let root = Root::new();
        root.mask("map.png", 40, 20, |x, _| [0, 5, 20, 20][x as usize / 10]);
        let error = mask(&root.file("map.png")).expect_err("two labels");
        let expected = "map.png: the mask has several labels: 5 (200 pixels), 20 (400 pixels)";
        assert!(error.to_string().ends_with(expected), "{error}");
        assert!(error.hint().contains("`--labels 1,3`"));
        let count = |labels: &[u16]| {
            let labels = Labels::new(labels).expect("labels");
            let mask = labelled_mask(&root.file("map.png"), labels).expect("chosen");
            assert!(mask.iter().all(|value| [0, 255].contains(value)));
            mask.pixels().filter(|pixel| pixel.0 == [255]).count()
        };
        assert_eq!([count(&[5]), count(&[20]), count(&[5, 20]), count(&[7])], [200, 400, 600, 0]);
    }

    #[test]
    fn labels_of_16_bit_masks_are_kept() {
        let root = Root::new();
        let deep = |values: [u16; 3]| {
            ImageBuffer::<Luma<u16>, _>::from_fn(30, 9, |x, _| Luma([values[x as usize / 10]]))
                .save(root.file("deep.png"))
                .expect("written");
            root.file("deep.png")
        };
        let path = deep([0, 100, 1000]);
        let error = mask(&path).expect_err("two labels").to_string();
        assert!(error.ends_with("several labels: 100 (90 pixels), 1000 (90 pixels)"), "{error}");
        let chosen = labelled_mask(&path, Labels::new(&[100]).expect("labels")).expect("chosen");
        assert_eq!(chosen.pixels().filter(|pixel| pixel.0 == [255]).count(), 90);
        for value in [1, 100, 300, 4095, 65_535] {
            let mask = mask(&deep([0, value, value])).expect("one label");
            let foreground = super::super::image::foreground(&mask);
            assert_eq!(foreground.pixels().filter(|pixel| pixel.0 == [255]).count(), 180, "{value}");
        }
    }
}
