//! Pixels of DICOM images as numbers or colours.

mod fragments;
mod jpeg;
mod jpeg_2000;
mod lossless_jpeg;

use std::borrow::Cow;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use dicom_core::value::Value;
use dicom_core::{Tag, VR};
use dicom_dictionary_std::tags;
use dicom_object::InMemDicomObject;
use dicom_pixeldata::PixelDecoder;
use flate2::read::DeflateDecoder;

use super::super::limits::check_ratio;
use super::header::{CONVERT, Photometric, PixelFormat};
use super::numbers::lookup_table;
use super::object::Object;
use super::syntax;
use crate::decode;
use prsmed_base::error::{Error, Result};

/// Joins the fragments of compressed pixel data, so that each is a frame.
///
/// # Errors
/// [`Error::Data`] if it is not known which fragments belong to a frame.
pub(super) fn join_fragments(path: &Path, object: &mut Object, num_frames: usize) -> Result<()> {
    fragments::join(object, num_frames).map_err(|reason| damaged(path, reason))
}

/// The pixel data of one file.
pub(super) struct DicomPixels<'a> {
    path: &'a Path,
    object: &'a Object,
    format: &'a PixelFormat,
    /// Bytes of native pixel data, little-endian; `None` if they are encapsulated.
    native: Option<Cow<'a, [u8]>>,
    num_frames: usize,
}

fn damaged(path: &Path, reason: impl Into<String>) -> Error {
    Error::data(path, reason, "copy the file again, or export the series again from the archive")
}

impl<'a> DicomPixels<'a> {
    pub(super) fn new(path: &'a Path, object: &'a Object, format: &'a PixelFormat, num_frames: usize) -> Result<Self> {
        let Some(element) = object.get(tags::PIXEL_DATA) else {
            let has_floats =
                [tags::FLOAT_PIXEL_DATA, tags::DOUBLE_FLOAT_PIXEL_DATA].iter().any(|tag| object.get(*tag).is_some());
            let reason = if has_floats { "its pixels are floating-point numbers" } else { "it has no pixels" };
            return Err(Error::data(path, reason, "export the series again, or convert it to NIfTI"));
        };
        let native = match element.value() {
            Value::Primitive(value) if syntax::is_native(&format.syntax) => {
                let mut bytes = value.to_bytes();
                if format.syntax == syntax::BIG_ENDIAN && format.bits_allocated == 32 && element.vr() == VR::OW {
                    // words were swapped by the reader, and their order is still that of the file
                    bytes.to_mut().chunks_exact_mut(4).for_each(|word| word.rotate_left(2));
                }
                Some(bytes)
            }
            Value::PixelSequence(sequence) if !syntax::is_native(&format.syntax) => {
                let fragments = sequence.fragments();
                fragments.iter().try_for_each(|fragment| check_fragment(path, fragment, format))?;
                let compressed: usize = fragments.iter().map(Vec::len).sum();
                check_ratio(path, compressed as u64, format.num_bytes(num_frames))?;
                None
            }
            Value::PixelSequence(_) => {
                let hint = "decompress it with the program that wrote it, or export the series again";
                let reason = "its pixels are compressed, but no transfer syntax says how";
                return Err(Error::data(path, reason, hint));
            }
            _ => return Err(damaged(path, "its pixels are not compressed as its transfer syntax says")),
        };
        Ok(Self { path, object, format, native, num_frames })
    }

    /// Samples of one frame in the order red, green, blue of each pixel, or the grey values, and how they were stored.
    fn samples(&self, frame: usize) -> Result<(Vec<i64>, Stored<'_>)> {
        let format = self.format;
        let [width, height] = format.size;
        let count = width * height * format.samples;
        let stored = match &self.native {
            Some(native) => self.part(native, frame, self.num_frames)?,
            None => self.decoded(frame)?,
        };
        let values = stored.bytes.chunks_exact(usize::from(format.bits_allocated / 8));
        let values: Vec<i64> = values.map(|sample| value(sample, stored.bits, format.is_signed)).collect();
        if values.len() != count {
            let reason = format!("a frame of {width}x{height} pixels has {} values instead of {count}", values.len());
            return Err(damaged(self.path, reason));
        }
        Ok((if stored.is_planar { interleaved(&values) } else { values }, stored))
    }

    /// A frame of uncompressed pixels.
    fn part<'b>(&self, native: &'b [u8], frame: usize, num_frames: usize) -> Result<Stored<'b>> {
        let format = self.format;
        let size = usize::try_from(format.num_bytes(1)).unwrap_or(usize::MAX);
        let is_422 = format.photometric == Photometric::YbrFull422;
        // two pixels share their colour
        let stored = if is_422 { size / 3 * 2 } else { size };
        if is_422 && (format.size[0] % 2 == 1 || native.len() >= size.saturating_mul(num_frames)) {
            let reason = "its pixels are not stored as YBR_FULL_422 says, in pairs that share their colour";
            return Err(Error::data(self.path, reason, CONVERT));
        }
        let start = frame.saturating_mul(stored);
        let bytes = native.get(start..start.saturating_add(stored)).ok_or_else(|| {
            damaged(self.path, format!("it is truncated: it has no pixels for frame {} of {size} bytes", frame + 1))
        })?;
        Ok(Stored {
            bytes: if is_422 { Cow::Owned(from_422(bytes)) } else { Cow::Borrowed(bytes) },
            bits: [format.bits_stored, format.high_bit],
            is_planar: format.is_planar && format.samples > 1 && !is_422,
            is_ybr: format.photometric.is_ybr(),
        })
    }

    /// A frame of compressed pixels.
    fn decoded(&self, frame: usize) -> Result<Stored<'_>> {
        let fragments = self.object.get(tags::PIXEL_DATA).and_then(|element| element.fragments()).unwrap_or_default();
        let data = fragments.get(frame).ok_or_else(|| damaged(self.path, format!("it has no frame {}", frame + 1)))?;
        let decoded = match self.format.syntax.as_str() {
            syntax::ENCAPSULATED => return self.part(data, 0, 1),
            syntax::DEFLATED_FRAME => {
                let inflated = self.inflated(data, frame)?;
                let Stored { bytes, bits, is_planar, is_ybr } = self.part(&inflated, 0, 1)?;
                return Ok(Stored { bytes: Cow::Owned(bytes.into_owned()), bits, is_planar, is_ybr });
            }
            syntax::RLE => self.rle(data, frame),
            uid if syntax::is_jpeg_2000(uid) => self.jpeg_2000(data, frame),
            _ => self.jpeg(data, frame),
        };
        decoded.map_err(|reason| {
            let reason = format!("the pixels of frame {} cannot be decoded: {reason}", frame + 1);
            let hint = "decompress it with another program, for example GDCM: `gdcmconv --raw IN OUT`; if that fails too, the \
                        file is damaged";
            Error::data(self.path, reason, hint)
        })
    }

    fn inflated(&self, data: &[u8], frame: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let most = self.format.num_bytes(1).saturating_add(2);
        let read = DeflateDecoder::new(data).take(most).read_to_end(&mut bytes);
        read.map_err(|_| damaged(self.path, format!("the deflated pixels of frame {} are damaged", frame + 1)))?;
        Ok(bytes)
    }

    /// A frame in RLE: one segment for each byte of a sample (PS3.5, G).
    fn rle(&self, data: &[u8], frame: usize) -> Result<Stored<'static>, String> {
        let format = self.format;
        let wanted = format.samples * usize::from(format.bits_allocated / 8);
        if data.first().copied().map(usize::from) != Some(wanted) {
            return Err(format!("its RLE data do not have the {wanted} segments of its samples"));
        }
        let bits = [format.bits_stored, format.high_bit];
        Ok(Stored { bytes: self.by_library(frame)?, bits, is_planar: false, is_ybr: format.photometric.is_ybr() })
    }

    fn jpeg_2000(&self, data: &[u8], frame: usize) -> Result<Stored<'static>, String> {
        let format = self.format;
        let header = jpeg_2000::header(data).ok_or("it has no header of a JPEG 2000 image")?;
        header.check(format.samples, format.bits_allocated)?;
        let is_ybr = format.photometric.is_ybr();
        let is_converted = format.photometric == Photometric::YbrJpeg2000;
        if (is_ybr && header.has_transform) || (is_converted && !header.has_transform) {
            let with = if header.has_transform { "a" } else { "no" };
            let name = match format.photometric {
                Photometric::YbrFull => "YBR_FULL",
                Photometric::YbrFull422 => "YBR_FULL_422",
                _ => "YBR_ICT or YBR_RCT",
            };
            return Err(format!("its header says {name}, and its data have {with} colour transform"));
        }
        let bits = [header.bits, header.bits - 1];
        Ok(Stored { bytes: self.by_library(frame)?, bits, is_planar: false, is_ybr })
    }

    /// A frame in JPEG or JPEG-LS. Transfer syntaxes may be wrong, so that the header of the image counts.
    fn jpeg(&self, data: &[u8], frame: usize) -> Result<Stored<'static>, String> {
        let format = self.format;
        let (samples, allocated) = (format.samples, format.bits_allocated);
        let header = jpeg::frame(data).ok_or("it has no header of a JPEG image")?;
        if let Some(process) = header.unknown_process() {
            return Err(format!("it is {process}, which cannot be read"));
        }
        let bits = u16::from(header.bits);
        if bits.next_multiple_of(8) != allocated {
            return Err(format!("the JPEG samples have {bits} bits, and BitsAllocated is {allocated}"));
        }
        if usize::from(header.num_components) != samples {
            return Err(format!("the JPEG has {} components, and not {samples}", header.num_components));
        }
        let is_ybr = samples == 3 && header.is_ybr.unwrap_or(format.photometric.is_ybr());
        // the unused bits of a sample are not stored
        let in_word = [format.bits_stored, format.high_bit.min(format.bits_stored.max(bits) - 1)];
        Ok(match header.marker {
            0xc3 => {
                let values = lossless_jpeg::decode(data, format.size, samples, format.is_signed)?;
                let words = values.iter().map(|value| value.to_le_bytes());
                let bytes =
                    if allocated == 8 { words.map(|word| word[0]).collect() } else { words.flatten().collect() };
                Stored { bytes: Cow::Owned(bytes), bits: in_word, is_planar: false, is_ybr }
            }
            0xf7 => {
                // the planes of a scan for each component are decoded as planes
                let is_planar = samples > 1 && jpeg::interleave(data) == Some(0);
                Stored { bytes: self.by_library(frame)?, bits: [bits, bits - 1], is_planar, is_ybr }
            }
            _ => {
                let bytes = decode::jpeg_components(data, is_ybr)?;
                Stored { bytes: Cow::Owned(bytes), bits: in_word, is_planar: false, is_ybr: false }
            }
        })
    }

    /// Bytes of a frame, little-endian, by the decoders of dicom-rs.
    fn by_library(&self, frame: usize) -> Result<Cow<'static, [u8]>, String> {
        let index = u32::try_from(frame).unwrap_or(u32::MAX);
        // decoders may panic for damaged data
        match catch_unwind(AssertUnwindSafe(|| self.object.decode_pixel_data_frame(index))) {
            Ok(Ok(decoded)) => Ok(Cow::Owned(decoded.into_data())),
            Ok(Err(error)) => Err(cause(&error)),
            Err(_) => Err("the compressed data are damaged".to_owned()),
        }
    }

    /// Grey values of one frame, before slope and intercept.
    pub(super) fn grey(&self, frame: usize) -> Result<Vec<i64>> {
        Ok(self.samples(frame)?.0)
    }

    /// Colours of one frame.
    pub(super) fn colours(&self, frame: usize) -> Result<Vec<[u8; 3]>> {
        let (values, Stored { bits: [bits_stored, _], is_ybr, .. }) = self.samples(frame)?;
        if self.format.photometric == Photometric::Palette {
            let palette = Palette::read(self.path, self.object)?;
            return Ok(values.into_iter().map(|value| palette.colour(value)).collect());
        }
        let shift = bits_stored.saturating_sub(8);
        let byte = |value: i64| u8::try_from((value >> shift).clamp(0, 255)).unwrap_or(0);
        let colours = values.chunks_exact(3).map(|pixel| [byte(pixel[0]), byte(pixel[1]), byte(pixel[2])]);
        Ok(if is_ybr { colours.map(rgb_of_ybr).collect() } else { colours.collect() })
    }
}

/// A frame as it is stored, or decoded.
struct Stored<'a> {
    /// Little-endian.
    bytes: Cow<'a, [u8]>,
    /// Number of bits of a sample, and the highest of them in its word.
    bits: [u16; 2],
    /// The planes of the colours follow each other.
    is_planar: bool,
    /// The colours are YBR, and not RGB.
    is_ybr: bool,
}

/// The innermost cause of an error of a decoder. These texts are about the compressed data only.
fn cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

impl PixelFormat {
    /// Bytes of the decoded frames.
    fn num_bytes(&self, num_frames: usize) -> u64 {
        let [width, height] = self.size;
        let parts = [width, height, self.samples, usize::from(self.bits_allocated / 8), num_frames];
        parts.iter().fold(1, |bytes, part| bytes.saturating_mul(*part as u64))
    }
}

/// The value of a sample of 1, 2 or 4 bytes.
fn value(bytes: &[u8], [bits_stored, high_bit]: [u16; 2], is_signed: bool) -> i64 {
    let raw = bytes.iter().rev().fold(0_u32, |value, byte| value << 8 | u32::from(*byte));
    // bits above the high bit may hold an overlay
    let left = raw << (31 - u32::from(high_bit));
    let shift = 32 - u32::from(bits_stored);
    if is_signed { i64::from(left.cast_signed() >> shift) } else { i64::from(left >> shift) }
}

/// Red, green and blue of each pixel from three planes.
fn interleaved(planes: &[i64]) -> Vec<i64> {
    let count = planes.len() / 3;
    (0..count).flat_map(|pixel| [planes[pixel], planes[count + pixel], planes[2 * count + pixel]]).collect()
}

/// Y, B and R of each pixel from pairs of pixels `Y1 Y2 B R`.
fn from_422(bytes: &[u8]) -> Vec<u8> {
    bytes.chunks_exact(4).flat_map(|pair| [pair[0], pair[2], pair[3], pair[1], pair[2], pair[3]]).collect()
}

/// DICOM PS3.3, C.7.6.3.1.2, `YBR_FULL`.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clipped to 0..=255")]
fn rgb_of_ybr([y, b, r]: [u8; 3]) -> [u8; 3] {
    let (y, b, r) = (f32::from(y), f32::from(b) - 128.0, f32::from(r) - 128.0);
    let colours = [y + 1.402 * r, y - 0.344_136 * b - 0.714_136 * r, y + 1.772 * b];
    colours.map(|value| (value + 0.5).floor().clamp(0.0, 255.0) as u8)
}

/// Fails if a compressed fragment says something that makes its decoder allocate more than the image needs.
fn check_fragment(path: &Path, fragment: &[u8], format: &PixelFormat) -> Result<()> {
    if format.syntax != syntax::RLE {
        return check_size(path, fragment, format.size);
    }
    // a header of 64 bytes: the number of segments, and their offsets (PS3.5, G.5)
    let is_valid = fragment.len() >= 64 && matches!(fragment[..4], [1..=15, 0, 0, 0]);
    if is_valid { Ok(()) } else { Err(damaged(path, "the header of its RLE data is damaged")) }
}

/// Fails if a JPEG or JPEG 2000 image has another size than the header: the decoder would allocate that size.
fn check_size(path: &Path, fragment: &[u8], size: [usize; 2]) -> Result<()> {
    let found = if fragment.starts_with(&jpeg::START) {
        jpeg::frame(fragment).map(|frame| frame.size)
    } else {
        jpeg_2000::header(fragment).map(|header| header.size)
    };
    match found {
        // the height of a JPEG image may follow
        Some([width, height]) if width != size[0] || (height != size[1] && height != 0) => {
            let [columns, rows] = size;
            let found = format!("its compressed image has {width}x{height} pixels");
            Err(damaged(path, format!("{found}, and its header says {columns}x{rows}")))
        }
        _ => Ok(()),
    }
}

/// A palette: colours of 8 bits, and the value of its first entry.
struct Palette {
    first: i32,
    colours: [Vec<u8>; 3],
}

impl Palette {
    fn read(path: &Path, object: &InMemDicomObject) -> Result<Self> {
        if object.get(tags::SEGMENTED_RED_PALETTE_COLOR_LOOKUP_TABLE_DATA).is_some() {
            let hint = "convert it to RGB, for example with pydicom: `pydicom.pixels.apply_color_lut`";
            return Err(Error::data(path, "its palette is segmented, which cannot be read", hint));
        }
        let channels = [
            (tags::RED_PALETTE_COLOR_LOOKUP_TABLE_DESCRIPTOR, tags::RED_PALETTE_COLOR_LOOKUP_TABLE_DATA),
            (tags::GREEN_PALETTE_COLOR_LOOKUP_TABLE_DESCRIPTOR, tags::GREEN_PALETTE_COLOR_LOOKUP_TABLE_DATA),
            (tags::BLUE_PALETTE_COLOR_LOOKUP_TABLE_DESCRIPTOR, tags::BLUE_PALETTE_COLOR_LOOKUP_TABLE_DATA),
        ];
        let damaged = || damaged(path, "its palette is incomplete");
        let [red, green, blue] =
            channels.map(|(descriptor, data)| channel(object, descriptor, data).ok_or_else(damaged));
        let (first, red) = red?;
        Ok(Self { first, colours: [red, green?.1, blue?.1] })
    }

    /// Values outside have the colour of the first or the last entry.
    fn colour(&self, value: i64) -> [u8; 3] {
        let index = usize::try_from(value.saturating_sub(self.first.into())).unwrap_or(0);
        [0, 1, 2].map(|channel: usize| {
            let entries = &self.colours[channel];
            entries.get(index).or(entries.last()).copied().unwrap_or(0)
        })
    }
}

/// First value and entries of one channel of a palette.
fn channel(object: &InMemDicomObject, descriptor: Tag, data: Tag) -> Option<(i32, Vec<u8>)> {
    let (first, bits, entries) = lookup_table(object, descriptor, data)?;
    // some programs write 8 bits into entries that should have 16
    let byte = usize::from(bits != 8 && entries.iter().any(|entry| *entry > 0xff));
    Some((first, entries.iter().map(|entry| entry.to_le_bytes()[byte]).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_compressed_images_are_compared_with_the_header() {
        let jpeg = [0xff, 0xd8, 0xff, 0xc3, 0, 11, 16, 1, 0, 2, 3, 1, 1, 0x11, 0];
        assert!(check_size(Path::new("a.dcm"), &jpeg, [0x203, 0x100]).is_ok());
        let error = check_size(Path::new("a.dcm"), &jpeg, [512, 512]).unwrap_err().to_string();
        assert!(error.contains("515x256 pixels, and its header says 512x512"), "{error}");
    }

    #[test]
    fn bits_are_taken_up_to_the_high_bit() {
        let bytes = 0xf8a5_u16.to_le_bytes();
        assert_eq!(value(&bytes, [12, 11], false), 0x8a5);
        assert_eq!(value(&bytes, [12, 11], true), 0x8a5 - 0x1000);
        assert_eq!(value(&bytes, [12, 15], false), 0xf8a);
        assert_eq!(value(&bytes, [16, 15], true), i64::from(0xf8a5_u16.cast_signed()));
    }
}
