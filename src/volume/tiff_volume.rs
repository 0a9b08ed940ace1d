//! TIFF files whose pages are slices of a volume, or whose pixels are measurements: signed, of 32 or 64 bits, or
//! floating-point numbers. Other TIFF files are flat images ([`super::decode::tiff`]).

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;
use std::vec;

use tiff::decoder::{Decoder, Limits};
use tiff::tags::Tag;
use tiff::{TiffError, TiffResult};

use super::decode::shared::MAX_PIXELS;
use super::decode::tiff::{hidden_pages, is_tiff, number_in, pages};
use super::format::row::{Choice, Format, NO_FORMAT};
use super::limits::{check_ratio, check_size};
use super::modality::Modality;
use super::path::number_of;
use super::source::VolumeSource;
use super::stored::{Content, Number, Part, StoredVolume, StoredVoxels, affine_of, check_file, chosen};
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

pub(crate) const TIFF_VOLUME: Format = Format {
    name: "a TIFF file of several pages, or of measurements",
    is_known_by_name: false,
    knows: |path, start| is_tiff(start) && is_volume(path),
    volume: Some(|path, choice| open(path, choice)?.volume()),
    labels: Some(|path, choice| open(path, choice)?.labels()),
    ..NO_FORMAT
};

/// `SampleFormat`, `BitsPerSample`, and the type of numbers.
const TYPES: [([u16; 2], Number); 10] = [
    ([1, 8], Number::U8),
    ([1, 16], Number::U16),
    ([1, 32], Number::U32),
    ([1, 64], Number::U64),
    ([2, 8], Number::I8),
    ([2, 16], Number::I16),
    ([2, 32], Number::I32),
    ([2, 64], Number::I64),
    ([3, 32], Number::F32),
    ([3, 64], Number::F64),
];

type FileDecoder = Decoder<BufReader<File>>;

/// What the tags of a page say.
#[derive(PartialEq)]
struct Page {
    size: (u32, u32),
    /// `SampleFormat` and `BitsPerSample`.
    kind: [u16; 2],
    samples: u16,
    photometric: u16,
}

impl Page {
    /// Of the current page.
    fn of(decoder: &mut FileDecoder) -> TiffResult<Self> {
        let mut first = |tag, usual| -> TiffResult<u16> {
            Ok(decoder.find_tag_unsigned_vec(tag)?.and_then(|values| values.first().copied()).unwrap_or(usual))
        };
        let kind = [first(Tag::SampleFormat, 1)?, first(Tag::BitsPerSample, 1)?];
        let (samples, photometric) = (first(Tag::SamplesPerPixel, 1)?, first(Tag::PhotometricInterpretation, 1)?);
        Ok(Self { size: decoder.dimensions()?, kind, samples, photometric })
    }

    fn is_measured(&self) -> bool {
        self.kind[0] != 1 || self.kind[1] > 16
    }
}

fn decoder(path: &Path) -> TiffResult<FileDecoder> {
    let mut limits = Limits::default();
    (limits.decoding_buffer_size, limits.intermediate_buffer_size) = (MAX_PIXELS, MAX_PIXELS);
    Ok(Decoder::new(BufReader::new(files::open(path)?))?.with_limits(limits))
}

fn is_volume(path: &Path) -> bool {
    let is_volume = || -> TiffResult<bool> {
        let mut decoder = decoder(path)?;
        let is_stack = pages(&mut decoder).len() > 1 || hidden_pages(&mut decoder, path.metadata()?.len()) > 0;
        Ok(is_stack || Page::of(&mut decoder)?.is_measured())
    };
    is_volume().unwrap_or(false)
}

fn open(path: &Path, choice: &Choice) -> Result<StoredVolume> {
    let failed = |error: TiffError| {
        Error::data(path, format!("cannot be decoded: {error}"), "save it again, for example with ImageJ")
    };
    let num_bytes = path.metadata().map_err(Error::io(path, "read"))?.len();
    check_file(path, num_bytes)?;
    let mut decoder = decoder(path).map_err(failed)?;
    let mut pages = pages(&mut decoder);
    let hidden = if pages.len() == 1 { hidden_pages(&mut decoder, num_bytes) } else { 0 };
    if hidden > 0 {
        let reason = format!("ImageJ has written {} images into it, of which only the first one is listed", hidden + 1);
        let hint = "save it again with a list of its pages, for example `tifffile.imwrite(new, tifffile.imread(old))`, or as an \
                    image sequence in ImageJ";
        return Err(Error::data(path, reason, hint));
    }
    let kind_of_pages = if choice.selected.is_some() { None } else { pages_of(path, &mut decoder, pages.len())? };
    if choice.selected.is_some() {
        let at = chosen(path, pages.len().max(1), number_of(path, choice.selected)?, String::new)?;
        pages = pages.get(at..=at).map(<[_]>::to_vec).unwrap_or_default();
    }
    let mut read = |page: &usize| -> TiffResult<Page> {
        decoder.seek_to_image(*page)?;
        Page::of(&mut decoder)
    };
    let first = pages.first().map(&mut read).transpose().map_err(failed)?;
    let first = first.ok_or_else(|| Error::data(path, "it has no page", "save it again"))?;
    for (page, index) in pages.iter().zip(0..) {
        if read(page).map_err(failed)? != first {
            let reason = format!("page {index} has another size or type than page 0");
            let hint = format!(
                "choose one page, from `{0}#0` on, or save the pages of a volume in a file of their own",
                path.display()
            );
            return Err(Error::data(path, reason, hint));
        }
    }
    let number = TYPES.iter().find(|(kind, _)| *kind == first.kind).map(|(_, number)| *number);
    let (Some(number), 1, 1) = (number, first.samples, first.photometric) else {
        let reason = format!(
            "its pages have {} values of {} bits at each pixel, or a palette or inverted levels",
            first.samples, first.kind[1]
        );
        return Err(Error::data(path, reason, "save each page as a PNG file, or grey values of 8, 16, 32 or 64 bits"));
    };
    let size = [first.size.0 as usize, first.size.1 as usize, pages.len()];
    let count = check_size(path, size)?;
    check_ratio(path, num_bytes, (count * number.size()) as u64)?;
    let mut notes = vec![
        "a TIFF file has no position in the patient: the voxel axes are assumed to be left, posterior and superior (LPS), of 1 mm"
            .to_owned(),
    ];
    notes.extend(kind_of_pages);
    let steps = [[-1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 1.0]];
    let affine = affine_of(path, &steps, [0.0; 3], &mut notes)?;
    let bytes = BufReader::new(Pages { decoder, pages: pages.into_iter(), current: Vec::new(), used: 0 });
    let content = Content { path: path.to_owned(), bytes: Box::new(bytes), is_compressed: false, num_bytes };
    let is_big_endian = cfg!(target_endian = "big");
    let stored = StoredVoxels { content, number, is_big_endian, scaling: [1.0, 0.0], size, part: Part::ALL };
    Ok(StoredVolume { stored, affine, modality: Modality::Unknown, source: VolumeSource::Other, notes })
}

/// A note if ImageJ or OME call the pages otherwise than slices.
///
/// # Errors
/// [`Error::Data`] for pages of several slices and also of several channels or times, which are one row of pages.
fn pages_of(path: &Path, decoder: &mut FileDecoder, num_pages: usize) -> Result<Option<String>> {
    let Ok(description) = decoder.get_tag_ascii_string(Tag::ImageDescription) else { return Ok(None) };
    let names = if description.starts_with("ImageJ=") {
        ["channels=", "slices=", "frames="]
    } else if description.contains("<OME") {
        ["SizeC=\"", "SizeZ=\"", "SizeT=\""]
    } else {
        return Ok(None);
    };
    let [channels, slices, times] = names.map(|name| number_in(&description, name).unwrap_or(1).max(1));
    let all = channels.checked_mul(slices).and_then(|all| all.checked_mul(times));
    if num_pages < 2 || all != Some(num_pages) || slices == num_pages {
        return Ok(None);
    }
    if slices == 1 && (channels == 1 || times == 1) {
        let name = if times == 1 { "channels" } else { "points in time" };
        return Ok(Some(format!("its description calls its {num_pages} pages {name}: they are taken for slices")));
    }
    let reason =
        format!("its pages are {channels} channels of {slices} slices at {times} points in time, one after the other");
    let hint = format!(
        "save one channel at one time as a file of its own (in ImageJ: `Image > Duplicate`), or choose a page, from `{}#0` on",
        path.display()
    );
    Err(Error::data(path, reason, hint))
}

/// The pixels of pages, one after the other, in the byte order of this machine.
struct Pages {
    decoder: FileDecoder,
    pages: vec::IntoIter<usize>,
    current: Vec<u8>,
    /// Bytes of the current page that were read.
    used: usize,
}

impl Read for Pages {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.used == self.current.len() {
            let Some(page) = self.pages.next() else { return Ok(0) };
            let failed = |error: TiffError| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
            self.decoder.seek_to_image(page).map_err(failed)?;
            self.current = self.decoder.read_image().map_err(failed)?.as_buffer(0).as_bytes().to_vec();
            self.used = 0;
        }
        let count = buffer.len().min(self.current.len() - self.used);
        buffer[..count].copy_from_slice(&self.current[self.used..self.used + count]);
        self.used += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests;
