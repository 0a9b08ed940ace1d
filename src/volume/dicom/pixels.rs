//! Pixels of DICOM images as numbers or colours.

mod jpeg;
mod lossless_jpeg;

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use dicom_core::Tag;
use dicom_core::value::Value;
use dicom_dictionary_std::tags;
use dicom_object::InMemDicomObject;
use dicom_pixeldata::PixelDecoder;

use super::super::limits::check_ratio;
use super::header::{Photometric, PixelFormat};
use super::object::Object;
use super::syntax;
use crate::decode;
use prsmed_base::error::{Error, Result};

/// Marks JPEG images that are stored as RGB by the names of their components; the decoder takes others for YCbCr.
pub(super) fn mark_rgb(object: &mut Object, format: &PixelFormat) {
    if format.photometric != Photometric::Rgb || !syntax::is_lossy_jpeg(&format.syntax) {
        return;
    }
    object.update_value(tags::PIXEL_DATA, |value| {
        if let Value::PixelSequence(sequence) = value {
            sequence.fragments_mut().iter_mut().for_each(|fragment| jpeg::name_components(fragment));
        }
    });
}

/// The pixel data of one file.
pub(super) struct Pixels<'a> {
    path: &'a Path,
    object: &'a Object,
    format: &'a PixelFormat,
    /// Bytes of native pixel data, little-endian; `None` if they are encapsulated.
    native: Option<Cow<'a, [u8]>>,
}

fn damaged(path: &Path, reason: impl Into<String>) -> Error {
    Error::data(path, reason, "copy the file again, or export the series again from the archive")
}

impl<'a> Pixels<'a> {
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
                if format.syntax == syntax::BIG_ENDIAN
                    && format.bits_allocated == 32
                    && element.vr().to_string() == "OW"
                {
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
        Ok(Self { path, object, format, native })
    }

    /// Samples of one frame in the order red, green, blue of each pixel, or the grey values.
    fn samples(&self, frame: usize) -> Result<Vec<i64>> {
        let format = self.format;
        let [width, height] = format.size;
        let count = width * height * format.samples;
        let bytes = self.bytes(frame, count)?;
        let values = bytes.chunks_exact(usize::from(format.bits_allocated / 8)).map(|sample| format.value(sample));
        let values: Vec<i64> = values.collect();
        if values.len() != count {
            let reason = format!("a frame of {width}x{height} pixels has {} values instead of {count}", values.len());
            return Err(damaged(self.path, reason));
        }
        Ok(if format.is_planar && self.native.is_some() { interleaved(&values) } else { values })
    }

    /// Bytes of one frame, little-endian.
    fn bytes(&self, frame: usize, count: usize) -> Result<Cow<'_, [u8]>> {
        let size = count * usize::from(self.format.bits_allocated / 8);
        let Some(native) = &self.native else {
            self.check_jpeg(frame)?;
            let index = u32::try_from(frame).unwrap_or(u32::MAX);
            // decoders may panic for damaged data
            let decoded = catch_unwind(AssertUnwindSafe(|| self.object.decode_pixel_data_frame(index)));
            return match decoded {
                Ok(Ok(decoded)) => Ok(Cow::Owned(decoded.into_data())),
                Ok(Err(error)) => {
                    let reason = format!("the pixels of frame {} cannot be decoded: {}", frame + 1, cause(&error));
                    let hint = "decompress it with another program, for example GDCM: `gdcmconv --raw IN OUT`; if that fails \
                                too, the file is damaged";
                    Err(Error::data(self.path, reason, hint))
                }
                Err(_) => Err(damaged(self.path, format!("the compressed pixels of frame {} are damaged", frame + 1))),
            };
        };
        let is_422 = self.format.photometric == Photometric::YbrFull422;
        // two pixels share their colour
        let stored = if is_422 { size / 3 * 2 } else { size };
        let start = frame.saturating_mul(stored);
        let bytes = native.get(start..start.saturating_add(stored)).ok_or_else(|| {
            damaged(self.path, format!("it is truncated: it has no pixels for frame {} of {size} bytes", frame + 1))
        })?;
        Ok(if is_422 { Cow::Owned(from_422(bytes)) } else { Cow::Borrowed(bytes) })
    }

    /// Refuses a JPEG image with missing data, which the decoder fills without an error.
    fn check_jpeg(&self, frame: usize) -> Result<()> {
        let fragments = self.object.get(tags::PIXEL_DATA).and_then(|element| element.fragments()).unwrap_or_default();
        let is_start = |fragment: &[u8]| fragment.starts_with(&[0xff, 0xd8]);
        let starts: Vec<usize> = (0..fragments.len()).filter(|index| is_start(&fragments[*index])).collect();
        // a frame that is not found is refused by its decoder
        let Some(start) = starts.get(frame) else { return Ok(()) };
        let end = starts.get(frame + 1).copied().unwrap_or(fragments.len());
        let jpeg = fragments[*start..end].concat();
        let allocated = self.format.bits_allocated;
        // the header of the image, because transfer syntaxes may be wrong
        let checked = match jpeg::frame(&jpeg) {
            Some((0xc0..=0xcf, bits, _)) if u16::from(bits).next_multiple_of(8) != allocated => {
                Err(format!("the JPEG samples have {bits} bits, and BitsAllocated is {allocated}"))
            }
            _ if lossless_jpeg::is_incomplete(&jpeg) => Err("the JPEG data end before the last pixel".to_owned()),
            Some((0xc0..=0xc2, 8, _)) => decode::check_jpeg(&jpeg),
            _ => Ok(()),
        };
        checked.map_err(|reason| {
            damaged(self.path, format!("the pixels of frame {} cannot be decoded: {reason}", frame + 1))
        })
    }

    /// Grey values of one frame, before slope and intercept.
    pub(super) fn grey(&self, frame: usize) -> Result<Vec<i64>> {
        self.samples(frame)
    }

    /// Colours of one frame.
    pub(super) fn colours(&self, frame: usize) -> Result<Vec<[u8; 3]>> {
        let samples = self.samples(frame)?;
        if self.format.photometric == Photometric::Palette {
            let palette = Palette::read(self.path, self.object)?;
            return Ok(samples.into_iter().map(|value| palette.colour(value)).collect());
        }
        let shift = self.format.bits_stored.saturating_sub(8);
        let byte = |value: i64| u8::try_from((value >> shift).clamp(0, 255)).unwrap_or(0);
        let colours = samples.chunks_exact(3).map(|pixel| [byte(pixel[0]), byte(pixel[1]), byte(pixel[2])]);
        Ok(if self.is_ybr() { colours.map(rgb_of_ybr).collect() } else { colours.collect() })
    }

    /// True if the decoded samples are still YBR. The decoders of JPEG and JPEG 2000 convert them.
    fn is_ybr(&self) -> bool {
        let is_full = matches!(self.format.photometric, Photometric::YbrFull | Photometric::YbrFull422);
        let syntax = self.format.syntax.as_str();
        is_full && (self.native.is_some() || syntax == syntax::RLE || syntax::is_jpeg_2000(syntax))
    }
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

    /// The value of a sample of 1, 2 or 4 bytes.
    fn value(&self, bytes: &[u8]) -> i64 {
        let raw = bytes.iter().rev().fold(0_u32, |value, byte| value << 8 | u32::from(*byte));
        // bits above the high bit may hold an overlay
        let unused = 31 - u32::from(self.high_bit);
        let left = raw << unused;
        let shift = 32 - u32::from(self.bits_stored);
        if self.is_signed { i64::from(left.cast_signed() >> shift) } else { i64::from(left >> shift) }
    }
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
    let found = if fragment.starts_with(&[0xff, 0xd8]) {
        jpeg::frame(fragment).map(|(.., size)| size)
    } else {
        jpeg_2000_size(fragment)
    };
    match found {
        Some(found) if found != size => {
            let ([a, b], [width, height]) = (found, size);
            let reason = format!("its compressed image has {a}x{b} pixels, and its header says {width}x{height}");
            Err(damaged(path, reason))
        }
        _ => Ok(()),
    }
}

/// Width and height of a JPEG 2000 code stream, also in a JP2 file.
fn jpeg_2000_size(bytes: &[u8]) -> Option<[usize; 2]> {
    let start = bytes.get(..4096).unwrap_or(bytes).windows(4).position(|four| four == [0xff, 0x4f, 0xff, 0x51])?;
    let at = |offset: usize| bytes.get(start + offset..start + offset + 4).map(jpeg::big_endian);
    Some([at(8)?.checked_sub(at(16)?)?, at(12)?.checked_sub(at(20)?)?])
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
        let channel = |(descriptor, data)| {
            channel(object, descriptor, data).ok_or_else(|| damaged(path, "its palette is incomplete"))
        };
        let [red, green, blue] = channels;
        let (first, red) = channel(red)?;
        Ok(Self { first, colours: [red, channel(green)?.1, channel(blue)?.1] })
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
    let descriptor = object.get(descriptor)?.to_multi_int::<i32>().ok()?;
    let [count, first, bits] = descriptor.as_slice() else { return None };
    let count = match count & 0xffff {
        0 => 1 << 16,
        count => usize::try_from(count).ok()?,
    };
    let bytes = object.get(data)?.to_bytes().ok()?;
    let entries: Vec<u8> = if bytes.len() >= 2 * count {
        let byte = usize::from(*bits != 8);
        bytes.chunks_exact(2).take(count).map(|word| word[byte]).collect()
    } else {
        bytes.iter().take(count).copied().collect()
    };
    (entries.len() == count).then_some((*first, entries))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_compressed_images_are_read() {
        let jpeg = [0xff, 0xd8, 0xff, 0xe0, 0, 4, 1, 2, 0xff, 0xff, 0xc3, 0, 11, 16, 1, 0, 2, 3, 1];
        assert_eq!(jpeg::frame(&jpeg), Some((0xc3, 16, [0x203, 0x100])));
        assert_eq!(jpeg::frame(&jpeg[..12]), None);
        let mut stream = vec![0, 0, 0xff, 0x4f, 0xff, 0x51, 0, 41, 0, 0];
        for value in [300_u32, 200, 10, 20] {
            stream.extend(value.to_be_bytes());
        }
        assert_eq!(jpeg_2000_size(&stream), Some([290, 180]));
        assert!(check_size(Path::new("a.dcm"), &stream, [290, 180]).is_ok());
        let error = check_size(Path::new("a.dcm"), &jpeg, [512, 512]).unwrap_err().to_string();
        assert!(error.contains("515x256 pixels, and its header says 512x512"), "{error}");
    }

    #[test]
    fn bits_are_taken_up_to_the_high_bit() {
        let format = |bits_stored, high_bit, is_signed| PixelFormat {
            syntax: String::new(),
            size: [1, 1],
            samples: 1,
            photometric: Photometric::Monochrome2,
            bits_allocated: 16,
            bits_stored,
            high_bit,
            is_signed,
            is_planar: false,
        };
        let bytes = 0xf8a5_u16.to_le_bytes();
        assert_eq!(format(12, 11, false).value(&bytes), 0x8a5);
        assert_eq!(format(12, 11, true).value(&bytes), 0x8a5 - 0x1000);
        assert_eq!(format(12, 15, false).value(&bytes), 0xf8a);
        assert_eq!(format(16, 15, true).value(&bytes), i64::from(0xf8a5_u16.cast_signed()));
    }
}
