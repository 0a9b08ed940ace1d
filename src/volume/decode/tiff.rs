//! TIFF and BigTIFF files of one page, and why a file cannot be used.

use std::collections::BTreeSet;
use std::io::{Cursor, Read, Seek};

use ::image::{DynamicImage, GrayAlphaImage, GrayImage, ImageBuffer};
use tiff::decoder::{ChunkType, Decoder, DecodingResult, Limits};
use tiff::tags::Tag;
use tiff::{TiffError, TiffResult};

use super::shared::{DecodeFailure, Decoded, Indexed, MAX_PIXELS, Palette, fits, unpacked};

const GREY: [u16; 2] = [0, 1];
const RGB: u16 = 2;
const PALETTE: u16 = 3;
/// Noise of JPEG compression inside of a TIFF file, in levels.
const JPEG_NOISE: u8 = 8;

/// What the tags of the first page say.
pub(super) struct TiffHeader {
    pub(super) size: (u32, u32),
    /// EXIF's numbers, 1 to 8.
    pub(super) orientation: u8,
    /// Differences up to this many levels are noise of the compression.
    pub(super) noise: u8,
    photometric: u16,
    bits: u16,
    samples: u16,
    sample_format: u16,
    has_alpha: bool,
    /// Each colour has strips or tiles of its own.
    is_planar: bool,
    is_tiled: bool,
}

impl From<TiffError> for DecodeFailure {
    fn from(error: TiffError) -> Self {
        match error {
            TiffError::UnsupportedError(error) => Self::Unsupported(format!("is not supported: {error}")),
            TiffError::LimitsExceeded => Self::TooLarge,
            error => Self::Corrupt(error.to_string()),
        }
    }
}

/// True for TIFF and for BigTIFF, whose offsets have 64 bits.
pub fn is_tiff(bytes: &[u8]) -> bool {
    [b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"].iter().any(|magic| bytes.starts_with(*magic))
}

pub(super) fn decoder(bytes: &[u8]) -> TiffResult<Decoder<Cursor<&[u8]>>> {
    let mut limits = Limits::default();
    (limits.decoding_buffer_size, limits.intermediate_buffer_size) = (MAX_PIXELS, MAX_PIXELS);
    Ok(Decoder::new(Cursor::new(bytes))?.with_limits(limits))
}

/// The numbers of the pages, from 0, without reduced copies of others, as thumbnails are. If the first page is reduced, all
/// pages count. The decoder is at the first page.
pub(crate) fn pages<R: Read + Seek>(decoder: &mut Decoder<R>) -> Vec<usize> {
    let mut next = decoder.ifd_pointer();
    let (mut seen, mut are_reduced) = (BTreeSet::new(), Vec::new());
    while let Some(pointer) = next.filter(|pointer| seen.insert(pointer.0)) {
        // some programs write a pointer to nothing after the last page
        let Ok(directory) = decoder.read_directory(pointer) else { break };
        let kind = decoder.read_directory_tags(&directory).find_tag_unsigned::<u32>(Tag::NewSubfileType);
        are_reduced.push(kind.ok().flatten().is_some_and(|kind| kind & 1 == 1));
        next = directory.next();
    }
    let all = are_reduced.first() == Some(&true);
    (0..are_reduced.len()).filter(|page| all || !are_reduced[*page]).collect()
}

/// Pages that have no directory: ImageJ writes stacks of more than 4 GiB with one directory, and all images behind each other
/// (0 for other files). The decoder is at the first page.
pub(crate) fn hidden_pages<R: Read + Seek>(decoder: &mut Decoder<R>, num_bytes: u64) -> usize {
    let mut hidden = || -> TiffResult<usize> {
        let description = decoder.get_tag_ascii_string(Tag::ImageDescription)?;
        let images = description.strip_prefix("ImageJ=").and_then(|lines| number_in(lines, "images=")).unwrap_or(0);
        let mut numbers = |tag| -> TiffResult<Vec<u64>> { Ok(decoder.find_tag_unsigned_vec(tag)?.unwrap_or_default()) };
        let size = numbers(Tag::StripByteCounts)?.iter().fold(0, |all: u64, size| all.saturating_add(*size));
        let start = numbers(Tag::StripOffsets)?.first().copied().unwrap_or(u64::MAX);
        // a page that another program has cut out may have the description of its stack
        let end = size.saturating_mul(images as u64).saturating_add(start);
        Ok(if images > 1 && size > 0 && end <= num_bytes { images - 1 } else { 0 })
    };
    hidden().unwrap_or(0)
}

/// The whole number behind a name.
pub(crate) fn number_in(text: &str, name: &str) -> Option<usize> {
    let (_, rest) = text.split_once(name)?;
    let end = rest.find(|digit: char| !digit.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

pub(super) fn header(bytes: &[u8]) -> Result<TiffHeader, DecodeFailure> {
    let mut decoder = decoder(bytes)?;
    let mut first = |tag, usual| -> TiffResult<u16> {
        Ok(decoder.find_tag_unsigned_vec(tag)?.and_then(|values| values.first().copied()).unwrap_or(usual))
    };
    Ok(TiffHeader {
        photometric: first(Tag::PhotometricInterpretation, 1)?,
        bits: first(Tag::BitsPerSample, 1)?,
        samples: first(Tag::SamplesPerPixel, 1)?,
        sample_format: first(Tag::SampleFormat, 1)?,
        has_alpha: matches!(first(Tag::ExtraSamples, 0)?, 1 | 2),
        is_planar: first(Tag::PlanarConfiguration, 1)? == 2,
        orientation: first(Tag::Orientation, 1).ok().and_then(|value| u8::try_from(value).ok()).unwrap_or(1),
        noise: if first(Tag::Compression, 1)? == 7 { JPEG_NOISE } else { 0 },
        size: decoder.dimensions()?,
        is_tiled: decoder.get_chunk_type() == ChunkType::Tile,
    })
}

impl TiffHeader {
    /// The page, if the usual decoder does not read its kind.
    ///
    /// # Errors
    /// The reason, for several pages and for a kind that cannot be used.
    pub(super) fn page(&self, bytes: &[u8], palette: Palette) -> Result<Option<Decoded>, DecodeFailure> {
        let Self { bits, samples, size: (width, height), .. } = *self;
        let refuse = |reason: String| Err(DecodeFailure::Unsupported(reason));
        let mut decoder_of_pages = decoder(bytes)?;
        let mut num_pages = pages(&mut decoder_of_pages).len();
        if num_pages == 1 {
            num_pages += hidden_pages(&mut decoder_of_pages, bytes.len() as u64);
        }
        if num_pages > 1 {
            return Err(DecodeFailure::Pages(num_pages));
        }
        match self.sample_format {
            1 => {}
            2 => return refuse(format!("has signed {bits}-bit pixels")),
            3 => return refuse(format!("has {bits}-bit floating-point pixels")),
            _ => return refuse("does not say which kind of numbers its pixels are".into()),
        }
        if ![1, 2, 4, 8, 16].contains(&bits) {
            return refuse(format!("has {bits}-bit pixels"));
        }
        let is_grey = GREY.contains(&self.photometric);
        match (self.photometric, samples) {
            (PALETTE, 1) if bits <= 8 => self.indexed(bytes).map(|indexed| Some(indexed.decoded(palette))),
            (_, 1) if is_grey && matches!(bits, 2 | 4) => {
                let mut grey = self.packed(bytes)?;
                let most = (1 << bits) - 1;
                grey.iter_mut().for_each(|value| *value *= 255 / most);
                Ok(Some(DynamicImage::from(grey).into()))
            }
            (_, 1) if is_grey => Ok(None),
            (_, 2) if is_grey && self.has_alpha => {
                fits(width, height, u32::from(bits) / 4)?;
                let page = match decoder(bytes)?.read_image()? {
                    DecodingResult::U8(values) => {
                        GrayAlphaImage::from_vec(width, height, values).map(DynamicImage::ImageLumaA8)
                    }
                    DecodingResult::U16(values) => {
                        ImageBuffer::from_vec(width, height, values).map(DynamicImage::ImageLumaA16)
                    }
                    _ => None,
                };
                match page {
                    Some(page) => Ok(Some(page.into())),
                    None => refuse("has its channels in separate planes".into()),
                }
            }
            (RGB, 3..) if matches!(bits, 8 | 16) && self.is_planar && self.is_tiled => {
                Ok(Some(self.colours(bytes)?.into()))
            }
            (RGB | 5, _) => Ok(None),
            (6, _) => refuse("has YCbCr colours".into()),
            (8..=10, _) => refuse("has Lab colours".into()),
            _ => refuse(format!("has {samples} channels that are neither grey nor RGB")),
        }
    }

    /// Pixels of 1 to 8 bits as they are stored.
    fn packed(&self, bytes: &[u8]) -> Result<GrayImage, DecodeFailure> {
        let (width, height) = self.size;
        fits(width, height, 1)?;
        let values = match decoder(bytes)?.read_image()? {
            DecodingResult::U8(values) => unpacked(&values, self.size, self.bits),
            _ => Vec::new(),
        };
        GrayImage::from_vec(width, height, values).ok_or_else(|| DecodeFailure::Corrupt("pixels are missing".into()))
    }

    /// Red, green and blue from tiles of their own. The decoder takes the tiles at the lower border of green and blue for
    /// inner ones, and stops with a panic.
    fn colours(&self, bytes: &[u8]) -> Result<DynamicImage, DecodeFailure> {
        let (width, height) = self.size;
        fits(width, height, 3 * u32::from(self.bits) / 8)?;
        let mut decoder = decoder(bytes)?;
        let (tile_width, tile_height) = decoder.chunk_dimensions();
        let (across, down) = (width.div_ceil(tile_width), height.div_ceil(tile_height));
        let mut values = vec![0_u16; 3 * width as usize * height as usize];
        for index in 0..3 * across * down {
            let (plane, place) = (index / (across * down), index % (across * down));
            let (left, top) = (place % across * tile_width, place / across * tile_height);
            let tile: Vec<u16> = match decoder.read_chunk(index)? {
                DecodingResult::U8(tile) => tile.into_iter().map(u16::from).collect(),
                DecodingResult::U16(tile) => tile,
                _ => return Err(DecodeFailure::Corrupt("its tiles are neither of 8 nor of 16 bits".into())),
            };
            let shown = tile_width.min(width - left) as usize;
            let rows = tile.chunks_exact(decoder.chunk_data_dimensions(index).0.max(1) as usize);
            for (y, row) in (top..height.min(top + tile_height)).zip(rows) {
                let start = 3 * (y as usize * width as usize + left as usize) + plane as usize;
                values[start..].iter_mut().step_by(3).zip(&row[..shown]).for_each(|(value, stored)| *value = *stored);
            }
        }
        let image = if self.bits == 16 {
            ImageBuffer::from_vec(width, height, values).map(DynamicImage::ImageRgb16)
        } else {
            let bytes = values.into_iter().map(|value| u8::try_from(value).unwrap_or(u8::MAX)).collect();
            ImageBuffer::from_vec(width, height, bytes).map(DynamicImage::ImageRgb8)
        };
        image.ok_or_else(|| DecodeFailure::Corrupt("pixels are missing".into()))
    }

    /// The decoder refuses palettes, but reads the same pixels as grey.
    fn indexed(&self, bytes: &[u8]) -> Result<Indexed, DecodeFailure> {
        let map: Vec<u16> = decoder(bytes)?.find_tag_unsigned_vec(Tag::ColorMap)?.unwrap_or_default();
        let num = 1 << self.bits;
        if map.len() != 3 * num {
            return Err(DecodeFailure::Corrupt(format!("the palette has {} values instead of {}", map.len(), 3 * num)));
        }
        // some writers store 8 bits instead of 16
        let shift = if map.iter().all(|value| *value < 256) { 0 } else { 8 };
        let value = |at: usize| u8::try_from(map[at] >> shift).unwrap_or(u8::MAX);
        let palette = (0..num).map(|i| [value(i), value(num + i), value(2 * num + i), 255]).collect();
        let mut grey = bytes.to_vec();
        let set = Directory::first(bytes).and_then(|first| first.set(&mut grey, Tag::PhotometricInterpretation, 1));
        set.ok_or_else(|| DecodeFailure::Corrupt("its directory is damaged".into()))?;
        Ok(Indexed { image: self.packed(&grey)?, palette })
    }
}

/// The entries of a directory, to change them in a copy of the file.
pub(super) struct Directory {
    is_big_endian: bool,
    /// Bytes of a count or a value.
    value_size: usize,
    /// Tag and position of each entry.
    entries: Vec<(u16, usize)>,
}

impl Directory {
    /// The first directory of a file.
    pub(super) fn first(bytes: &[u8]) -> Option<Self> {
        let is_big_endian = bytes.starts_with(b"MM");
        let number = |at: usize, size: usize| -> Option<usize> {
            let part = bytes.get(at..at.checked_add(size)?)?;
            let join = |value: u64, byte: &u8| value << 8 | u64::from(*byte);
            let value = if is_big_endian { part.iter().fold(0, join) } else { part.iter().rev().fold(0, join) };
            usize::try_from(value).ok()
        };
        let wide = number(2, 2)? == 43;
        let (start, count_size, value_size) = if wide { (number(8, 8)?, 8, 8) } else { (number(4, 4)?, 2, 4) };
        let first = start.checked_add(count_size)?;
        let (count, entry_size) = (number(start, count_size)?, 4 + 2 * value_size);
        let places = (0..count).map_while(|index| first.checked_add(index.checked_mul(entry_size)?));
        let entries = places.map_while(|at| Some((u16::try_from(number(at, 2)?).ok()?, at))).collect();
        Some(Self { is_big_endian, value_size, entries })
    }

    fn find(&self, tag: Tag) -> Option<usize> {
        self.entries.iter().find(|(found, _)| *found == tag.to_u16()).map(|(_, at)| *at)
    }

    /// Writes a number into the bytes from `at` on.
    fn write(&self, bytes: &mut [u8], at: usize, size: usize, value: u64) -> Option<()> {
        let field = bytes.get_mut(at..at.checked_add(size)?)?;
        let little = value.to_le_bytes();
        field.iter_mut().zip(little).for_each(|(byte, new)| *byte = new);
        if self.is_big_endian {
            field.reverse();
        }
        Some(())
    }

    /// Sets the number of an entry.
    pub(super) fn set(&self, bytes: &mut [u8], tag: Tag, value: u16) -> Option<()> {
        const SHORT: u64 = 3;
        let at = self.find(tag)?;
        self.write(bytes, at + 2, 2, SHORT)?;
        self.write(bytes, at + 4 + self.value_size, 2, value.into())
    }

    /// Gives an entry other numbers, which are appended to the file.
    pub(super) fn replace(&self, bytes: &mut Vec<u8>, tag: Tag, values: &[u64]) -> Option<()> {
        let (long, long8) = (4, 16);
        let (at, size) = (self.find(tag)?, self.value_size);
        self.write(bytes, at + 2, 2, if size == 4 { long } else { long8 })?;
        self.write(bytes, at + 4, size, values.len() as u64)?;
        let place = at + 4 + size;
        if let [value] = values {
            return self.write(bytes, place, size, *value);
        }
        let end = bytes.len() as u64;
        self.write(bytes, place, size, end)?;
        for value in values {
            let end = bytes.len();
            bytes.resize(end + size, 0);
            self.write(bytes, end, size, *value)?;
        }
        Some(())
    }
}
