//! JPEG files: decoded with libjpeg, and what their headers say.

use std::ffi::c_int;

use ::image::{DynamicImage, GrayImage, RgbImage};
use mozjpeg::ColorSpace;

use super::shared::MAX_PIXELS;

/// Decodes a grey or colour JPEG; `None` for CMYK, which libjpeg does not convert to RGB. Colours become RGB, or are taken as
/// they are.
pub(super) fn decode(bytes: &[u8], scans: &JpegHeader, to_rgb: bool) -> Result<Option<DynamicImage>, String> {
    let decode = || -> std::io::Result<Option<DynamicImage>> {
        let refuse = |reason: String| Err(std::io::Error::other(reason));
        let header = mozjpeg::Decompress::builder().with_err(strict_errors()).from_mem(bytes)?;
        let (width, height) = header.size();
        let num_pixels = width.saturating_mul(height);
        let components = header.components();
        let coefficients = components.iter().map(|part| {
            let blocks = (part.width_in_blocks as usize).saturating_mul(part.height_in_blocks as usize);
            blocks.saturating_mul(64 * size_of::<i16>())
        });
        let keeps_coefficients = scans.is_progressive || scans.first_components < components.len();
        let needed = if keeps_coefficients { coefficients.fold(0, usize::saturating_add) } else { 0 };
        if num_pixels.saturating_mul(components.len()).max(needed) > MAX_PIXELS {
            return refuse(format!("{width}x{height} pixels are too many"));
        }
        if scans.num_scans > MAX_SCANS {
            return refuse(format!("{} scans are too many", scans.num_scans));
        }
        if num_pixels / MAX_PIXELS_PER_BYTE > bytes.len() {
            return refuse(format!("{} bytes are too few for {width}x{height} pixels", bytes.len()));
        }
        let space = match header.color_space() {
            ColorSpace::JCS_YCbCr if to_rgb => ColorSpace::JCS_RGB,
            space @ (ColorSpace::JCS_GRAYSCALE | ColorSpace::JCS_YCbCr | ColorSpace::JCS_RGB) => space,
            _ => return Ok(None),
        };
        let mut scan = header.to_colorspace(space)?;
        let pixels = scan.read_scanlines::<u8>()?;
        let (width, height) = (u32::try_from(width).unwrap_or(0), u32::try_from(height).unwrap_or(0));
        Ok(if space == ColorSpace::JCS_GRAYSCALE {
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
pub(super) extern "C-unwind" fn stop_at_corrupt_data(info: &mut mozjpeg_sys::jpeg_common_struct, level: c_int) {
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

/// What the headers of a JPEG file say.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct JpegHeader<'a> {
    num_scans: usize,
    is_progressive: bool,
    /// Colour components of the first scan. If it has not all of them, libjpeg keeps the coefficients of the image.
    first_components: usize,
    /// The first EXIF block.
    pub(super) exif: Option<&'a [u8]>,
    /// Quantisation step of the mean of a block: the file stores eight times the mean as a multiple of it.
    dc_step: u16,
}

impl JpegHeader<'_> {
    /// Differences up to this many levels are noise of the compression.
    pub(super) fn noise(&self) -> u8 {
        u8::try_from((self.dc_step / 4).clamp(2, 31)).unwrap_or(31)
    }
}

/// Reads the headers up to the first scan; `None` without a scan header that an end marker follows. libjpeg fills a
/// truncated JPEG with grey and only warns.
pub(super) fn header(bytes: &[u8]) -> Option<JpegHeader<'_>> {
    let mut at = 2; // after the start marker
    let mut header = JpegHeader::default();
    while let [0xFF, marker, ..] = bytes[at.min(bytes.len())..] {
        match marker {
            // The start of the first scan: from here on 0xFF 0xD9 can only be the end of the image.
            0xDA => {
                let pairs = || bytes[at..].windows(2);
                header.num_scans = pairs().filter(|pair| *pair == [0xFF, 0xDA]).count();
                header.first_components = bytes.get(at + 4).copied().unwrap_or(0).into();
                return pairs().any(|pair| pair == [0xFF, 0xD9]).then_some(header);
            }
            // Padding and markers without a length.
            0xFF => at += 1,
            0x01 | 0xD0..=0xD8 => at += 2,
            _ => {
                let end = at + 2 + usize::from(u16::from_be_bytes(*bytes[at + 2..].first_chunk()?));
                let content = bytes.get(at + 4..end).unwrap_or_default();
                match marker {
                    0xC2 => header.is_progressive = true,
                    0xDB => header.dc_step = luma_dc_step(content).unwrap_or(header.dc_step),
                    0xE1 => header.exif = header.exif.or_else(|| content.strip_prefix(b"Exif\0\0")),
                    _ => {}
                }
                at = end;
            }
        }
    }
    None
}

/// The first step of quantisation table 0, which is that of the grey levels.
fn luma_dc_step(mut tables: &[u8]) -> Option<u16> {
    loop {
        let (&kind, steps) = tables.split_first()?;
        let wide = kind >> 4 != 0;
        if kind.is_multiple_of(16) {
            let [first, second] = *steps.first_chunk()?;
            return Some(if wide { u16::from_be_bytes([first, second]) } else { first.into() });
        }
        tables = steps.get(if wide { 128 } else { 64 }..)?;
    }
}
