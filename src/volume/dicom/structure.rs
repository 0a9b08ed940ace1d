//! Checks the structure of a DICOM file before it is parsed: lengths that exceed the file, and deep nesting.
//!
//! The parser allocates the length that an element promises and calls itself for each nested sequence. A damaged or
//! hostile file could make it use gigabytes of memory or overflow the stack. Source: DICOM PS3.5, chapter 7.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::io::Read;
use std::ops::Range;

use dicom_core::dictionary::{DataDictionary, DataDictionaryEntry, VirtualVr};
use dicom_core::{Tag, VR};
use dicom_dictionary_std::tags::PIXEL_DATA;
use dicom_object::StandardDataDictionary;
use flate2::read::DeflateDecoder;

use super::super::limits::{FREE, MAX_RATIO};
use super::element::{Damage, Element, ITEM, Reader, UNDEFINED};
use super::encoding;
use super::syntax::{self, BIG_ENDIAN, DEFLATED, EXPLICIT, IMPLICIT};

/// Deepest nesting of sequences. Enhanced multi-frame files have 3 to 6 levels.
const MAX_DEPTH: usize = 24;
/// Most sequences that are tried in several encodings.
const MAX_ODD: usize = 256;
/// What the UID of Deflated Explicit VR Little Endian adds to that of Explicit VR Little Endian.
const DEFLATED_PART: &str = ".99";
/// Bytes before the first element of a file: the preamble and the magic number.
const PREAMBLE: usize = 132;
/// Most bytes of a deflated data set.
const MAX_INFLATED: u64 = 2 << 30;
const ITEM_END: Tag = Tag(0xfffe, 0xe00d);
const SEQUENCE_END: Tag = Tag(0xfffe, 0xe0dd);
/// Group of the pixel data, also of floating-point ones.
const PIXELS: u16 = 0x7fe0;

/// True for a DICOM file (PS3.10), by its magic number, and for one that lacks it, by its first elements. 132 bytes suffice.
pub fn is_dicom(bytes: &[u8]) -> bool {
    start(bytes) > 0 || has_meta(bytes) || encoding::of(bytes).is_some()
}

/// The position after the magic number; 0 without one.
fn start(bytes: &[u8]) -> usize {
    match bytes {
        [b'D', b'I', b'C', b'M', ..] => 4,
        _ if bytes.get(PREAMBLE - 4..PREAMBLE) == Some(b"DICM") => PREAMBLE,
        _ => 0,
    }
}

/// True for bytes that begin with an element of the file meta.
fn has_meta(bytes: &[u8]) -> bool {
    matches!(bytes, [2, 0, 0 | 1 | 2 | 0x10, 0, b'U' | b'O', b'L' | b'B' | b'I', ..])
}

/// A checked DICOM file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CheckedFile<'a> {
    /// The bytes before the pixel data.
    pub header: Cow<'a, [u8]>,
    /// The bytes with the pixel data. What follows is not checked and must not be parsed.
    pub whole: Cow<'a, [u8]>,
    /// The transfer syntax, if the bytes are a data set without file meta.
    pub syntax: Option<String>,
    /// What was assumed about the encoding.
    pub note: Option<&'static str>,
}

/// Checks a DICOM file up to the end of its pixel data. A deflated data set is inflated, with its syntax changed
/// accordingly. Without a transfer syntax, and for a wrong one, the encoding is found from the data set.
///
/// # Errors
/// What is wrong.
pub(super) fn check(bytes: &[u8]) -> Result<CheckedFile<'_>, Damage> {
    let start = start(bytes);
    let meta = Reader::of(bytes, EXPLICIT);
    let (dataset, place) = meta.file_meta(start)?;
    let stated = std::str::from_utf8(&bytes[place.clone()]).unwrap_or_default();
    let found = encoding::of(bytes.get(dataset..).unwrap_or_default());
    let (used, note) = match found {
        // the file ends within its meta, or directly after it
        None if stated.is_empty() && bytes.len() < dataset + 8 => return Err(Damage::TRUNCATED),
        None if stated.is_empty() => return Err(Damage::NO_SYNTAX),
        Some(found) if stated.is_empty() => {
            (found, Some("the DICOM file meta is missing, and the encoding was found from the first elements"))
        }
        Some(found) if found != stated && syntax::is_native(stated) => {
            (found, Some("the file meta says another encoding than that of the data set, which was used"))
        }
        Some(IMPLICIT | BIG_ENDIAN) if !syntax::is_native(stated) && syntax::check(stated).is_ok() => {
            return Err(Damage::OTHER_SYNTAX);
        }
        _ if !meta.has_group_length(start, dataset) => (
            stated,
            Some("the DICOM file meta has no length (0002,0000), or a wrong one; its elements were read one by one"),
        ),
        _ => (stated, None),
    };
    // the parser needs a magic number, the length of the file meta and the right syntax
    let is_bare = start == 0 || note.is_some();
    let from = if is_bare { dataset } else { 0 };
    let unknown = Unknown::default();
    if used == DEFLATED {
        let mut inflated = inflate(bytes.get(dataset..).unwrap_or_default())?;
        let ends = Walker { reader: Reader::of(&inflated, used), unknown: &unknown }.pixels(0)?;
        state_lengths(&mut inflated, &unknown.values.take(), false);
        let mut meta = if is_bare { Vec::new() } else { bytes[..dataset].to_vec() };
        if !is_bare {
            // the UID without its last part, padded
            meta[place.end - DEFLATED_PART.len()..place.end].fill(0);
        }
        let [header, whole] = ends.map(|end| Cow::Owned([&meta, &inflated[..end]].concat()));
        return Ok(CheckedFile { header, whole, syntax: is_bare.then(|| EXPLICIT.to_owned()), note });
    }
    let ends = Walker { reader: Reader::of(bytes, used), unknown: &unknown }.pixels(dataset)?;
    let unknown = unknown.values.take();
    let [header, whole] = ends.map(|end| {
        let mut part = Cow::Borrowed(&bytes[from..end]);
        if !unknown.is_empty() {
            let moved: Vec<_> = unknown.iter().map(|value| value.start - from..value.end - from).collect();
            state_lengths(part.to_mut(), &moved, used == BIG_ENDIAN);
        }
        part
    });
    Ok(CheckedFile { header, whole, syntax: is_bare.then(|| used.to_owned()), note })
}

/// Writes the lengths of values into the four bytes before them.
fn state_lengths(bytes: &mut [u8], values: &[Range<usize>], is_big: bool) {
    for value in values {
        let length = u32::try_from(value.len()).unwrap_or(UNDEFINED);
        let length = if is_big { length.to_be_bytes() } else { length.to_le_bytes() };
        // those of a header end before the pixel data
        if let Some(place) = value.start.checked_sub(4).and_then(|start| bytes.get_mut(start..value.start)) {
            place.copy_from_slice(&length);
        }
    }
}

/// Fails for a data set in Implicit VR Little Endian that the parser could not read safely.
pub(super) fn check_implicit(dataset: &[u8]) -> Result<(), Damage> {
    let [_, end] = Walker { reader: Reader::of(dataset, IMPLICIT), unknown: &Unknown::default() }.pixels(0)?;
    if end == dataset.len() { Ok(()) } else { Err(Damage::TRUNCATED) }
}

fn inflate(source: &[u8]) -> Result<Vec<u8>, Damage> {
    let mut inflated = Vec::new();
    let most = (source.len() as u64).saturating_mul(MAX_RATIO).clamp(FREE, MAX_INFLATED);
    let read = DeflateDecoder::new(source).take(most + 1).read_to_end(&mut inflated);
    if read.is_err() || inflated.len() as u64 > most { Err(Damage::DEFLATE) } else { Ok(inflated) }
}

#[derive(Clone, Copy)]
struct Walker<'a> {
    reader: Reader<'a>,
    unknown: &'a Unknown,
}

/// Sequences without a length whose value representation is unknown (UN), which the parser cannot read. Its vendors use them
/// for private attributes.
#[derive(Default)]
struct Unknown {
    /// Their values.
    values: RefCell<Vec<Range<usize>>>,
    /// How many of them are not written as the standard says.
    num_odd: Cell<usize>,
}

impl Walker<'_> {
    /// Start and end of the pixel data of a data set; its end if there are none.
    fn pixels(&self, mut at: usize) -> Result<[usize; 2], Damage> {
        let limit = self.reader.bytes.len();
        while at + 8 <= limit {
            let element = self.reader.element(at)?;
            let end = self.value(&element, 0, limit)?;
            // the group may begin with its length and offsets of frames
            if element.tag.0 == PIXELS && matches!(element.tag.1, 0x08..=0x10) {
                return Ok([at, end]);
            }
            at = end;
        }
        // less than the header of an element is padding, or what is left of one
        let is_padding = self.reader.bytes.get(at..).unwrap_or_default().iter().all(|byte| *byte == 0);
        if is_padding { Ok([at.min(limit); 2]) } else { Err(Damage::TRUNCATED) }
    }

    /// Walks over the elements of an item, which ends at `limit` or (`has_length` is false) at its delimiter; the position
    /// after it. The parser reads beyond an item that its elements do not fill exactly, and takes values for lengths.
    fn dataset(&self, mut at: usize, depth: usize, (limit, has_length): (usize, bool)) -> Result<usize, Damage> {
        while at + 8 <= limit {
            let element = self.reader.element(at)?;
            if element.tag == ITEM_END && !has_length {
                return Ok(element.value);
            }
            at = self.value(&element, depth, limit)?;
        }
        if has_length && at == limit { Ok(limit) } else { Err(Damage::TRUNCATED) }
    }

    /// The position after the value of an element.
    fn value(&self, element: &Element, depth: usize, limit: usize) -> Result<usize, Damage> {
        if is_encapsulated(element) {
            return self.sequence(element, depth, limit);
        }
        let is_sequence = match &element.vr {
            Some(vr) => vr == b"SQ" || (vr == b"UN" && element.length == UNDEFINED),
            None => element.length == UNDEFINED || is_sequence_in_dictionary(element.tag),
        };
        if !is_sequence {
            // the parser would take it for a sequence
            if element.length == UNDEFINED {
                return Err(Damage::NO_LENGTH);
            }
            let size = element.vr.map_or_else(|| size_in_dictionary(element.tag), number_size);
            return if element.length.is_multiple_of(size) { element.end(limit) } else { Err(Damage::LENGTH) };
        }
        match element.vr {
            Some([b'U', b'N']) => self.unknown_sequence(element, depth + 1, limit),
            _ => self.sequence(element, depth + 1, limit),
        }
    }

    /// A sequence whose value representation is unknown (PS3.5, 6.2.2): its items are in Implicit VR Little Endian. Some
    /// programs write them in the encoding of the file.
    fn unknown_sequence(&self, element: &Element, depth: usize, limit: usize) -> Result<usize, Damage> {
        let Self { reader, unknown } = *self;
        let known = unknown.values.borrow().len();
        let end = |reader: Reader| {
            let end = Walker { reader, unknown }.sequence(element, depth, limit);
            // the parser gets the whole value as bytes
            unknown.values.borrow_mut().truncate(known);
            end
        };
        let implicit = Reader { is_implicit: true, ..reader };
        let end = end(Reader { is_big: false, ..implicit }).or_else(|damage| {
            unknown.num_odd.update(|count| count + 1);
            let others = [implicit, reader].into_iter().filter(|_| unknown.num_odd.get() <= MAX_ODD);
            others.map(end).find_map(Result::ok).ok_or(damage)
        })?;
        unknown.values.borrow_mut().push(element.value..end);
        Ok(end)
    }

    fn sequence(&self, element: &Element, depth: usize, limit: usize) -> Result<usize, Damage> {
        if depth > MAX_DEPTH {
            return Err(Damage::TOO_DEEP);
        }
        let has_length = element.length != UNDEFINED;
        let end = if has_length { element.end(limit)? } else { limit };
        let mut at = element.value;
        while at + 8 <= end {
            let item = self.reader.element(at)?;
            match item.tag {
                SEQUENCE_END => return Ok(if has_length { end } else { item.value }),
                ITEM if is_encapsulated(element) => at = item.end(end)?,
                ITEM if item.length == UNDEFINED => at = self.dataset(item.value, depth, (end, false))?,
                ITEM => at = self.dataset(item.value, depth, (item.end(end)?, true))?,
                _ => return Err(Damage::NO_ITEM),
            }
        }
        if has_length && at == end { Ok(end) } else { Err(Damage::TRUNCATED) }
    }
}

/// True for compressed pixel data, which are a sequence of fragments.
fn is_encapsulated(element: &Element) -> bool {
    element.length == UNDEFINED && element.tag == PIXEL_DATA
}

/// Bytes of one number of a value representation; 1 for text and bytes.
fn number_size(vr: [u8; 2]) -> u32 {
    match &vr {
        b"US" | b"SS" | b"OW" => 2,
        b"UL" | b"SL" | b"FL" | b"AT" | b"OF" | b"OL" => 4,
        b"FD" | b"OD" | b"OV" | b"SV" | b"UV" => 8,
        _ => 1,
    }
}

fn size_in_dictionary(tag: Tag) -> u32 {
    match StandardDataDictionary.by_tag(tag).map(DataDictionaryEntry::vr) {
        Some(VirtualVr::Exact(vr)) => number_size(vr.to_bytes()),
        Some(VirtualVr::Xs | VirtualVr::Ox | VirtualVr::Px) => 2,
        _ => 1,
    }
}

fn is_sequence_in_dictionary(tag: Tag) -> bool {
    StandardDataDictionary.by_tag(tag).is_some_and(|entry| entry.vr() == VirtualVr::Exact(VR::SQ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file in a transfer syntax with these bytes as its data set.
    fn file(syntax: &str, dataset: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 128];
        bytes.extend(b"DICM");
        let length = u16::try_from(syntax.len()).unwrap();
        bytes.extend([2, 0, 0, 0, b'U', b'L', 4, 0]);
        bytes.extend((8 + u32::from(length)).to_le_bytes());
        bytes.extend([2, 0, 0x10, 0]);
        bytes.extend(b"UI");
        bytes.extend(length.to_le_bytes());
        bytes.extend(syntax.as_bytes());
        bytes.extend(dataset);
        bytes
    }

    const EXPLICIT: &str = "1.2.840.10008.1.2.1\0";

    #[test]
    fn a_length_beyond_the_file_is_found() {
        let element = [0x28, 0, 0x10, 0, b'U', b'S', 2, 0, 1, 0];
        assert!(check(&file(EXPLICIT, &element)).is_ok());
        assert_eq!(check(&file(EXPLICIT, &element[..9])), Err(Damage::TRUNCATED));
        let huge = [0xe0, 0x7f, 0x10, 0, b'O', b'W', 0, 0, 0xfe, 0xff, 0xff, 0xff, 1, 2];
        assert_eq!(check(&file(EXPLICIT, &huge)), Err(Damage::TRUNCATED));
        let implicit = [0x28, 0, 0x10, 0, 0xfe, 0xff, 0xff, 0x7f];
        assert_eq!(check(&file("1.2.840.10008.1.2\0", &implicit)), Err(Damage::TRUNCATED));
    }

    #[test]
    fn lengths_that_numbers_cannot_have_are_found() {
        let element = [0x28, 0, 0x10, 0, b'U', b'S', 3, 0, 1, 0, 0];
        assert_eq!(check(&file(EXPLICIT, &element)), Err(Damage::LENGTH));
        let implicit = [0x28, 0, 0x10, 0, 3, 0, 0, 0, 1, 0, 0];
        assert_eq!(check(&file("1.2.840.10008.1.2\0", &implicit)), Err(Damage::LENGTH));
    }

    #[test]
    fn an_item_that_its_elements_do_not_fill_is_found() {
        let sequence = |item: &[u8], spare: usize| {
            let length = |count: usize| u32::try_from(count).unwrap().to_le_bytes();
            let mut bytes = [0x08, 0, 0x40, 0x11, b'S', b'Q', 0, 0].to_vec();
            bytes.extend(length(8 + item.len() + spare));
            bytes.extend([0xfe, 0xff, 0x00, 0xe0]);
            bytes.extend(length(item.len() + spare));
            bytes.extend(item);
            // seven bytes are less than the header of an element
            bytes.extend(vec![1; spare]);
            bytes.extend([0; 16]);
            file(EXPLICIT, &bytes)
        };
        let element = [0x28, 0, 0x10, 0, b'U', b'S', 2, 0, 1, 0];
        assert!(check(&sequence(&element, 0)).is_ok());
        assert_eq!(check(&sequence(&element, 7)), Err(Damage::TRUNCATED));
    }

    #[test]
    fn only_pixel_data_and_sequences_may_have_no_length() {
        let fragments = |tag: [u8; 4]| {
            let mut bytes = tag.to_vec();
            bytes.extend([b'O', b'B', 0, 0, 0xff, 0xff, 0xff, 0xff]);
            // one empty fragment and the end
            bytes.extend([0xfe, 0xff, 0x00, 0xe0, 0, 0, 0, 0]);
            bytes.extend([0xfe, 0xff, 0xdd, 0xe0, 0, 0, 0, 0]);
            file(EXPLICIT, &bytes)
        };
        assert!(check(&fragments([0xe0, 0x7f, 0x10, 0])).is_ok());
        assert_eq!(check(&fragments([0x1e, 0x7f, 0x10, 0])), Err(Damage::NO_LENGTH));
        assert_eq!(check(&fragments([0xe0, 0x7f, 0x09, 0])), Err(Damage::NO_LENGTH));
    }

    #[test]
    fn deep_nesting_is_found() {
        let mut nested = Vec::new();
        for _ in 0..100_000 {
            nested.extend([0x08, 0, 0x40, 0x11, b'S', b'Q', 0, 0, 0xff, 0xff, 0xff, 0xff]);
            nested.extend([0xfe, 0xff, 0x00, 0xe0, 0xff, 0xff, 0xff, 0xff]);
        }
        assert_eq!(check(&file(EXPLICIT, &nested)), Err(Damage::TOO_DEEP));
        assert_eq!(check(&file(EXPLICIT, &nested[..200])), Err(Damage::TRUNCATED));
        let mut implicit = Vec::new();
        for _ in 0..1000 {
            implicit.extend([0x08, 0, 0x40, 0x11, 0xff, 0xff, 0xff, 0xff]);
            implicit.extend([0xfe, 0xff, 0x00, 0xe0, 0xff, 0xff, 0xff, 0xff]);
        }
        assert_eq!(check(&file("1.2.840.10008.1.2\0", &implicit)), Err(Damage::TOO_DEEP));
    }

    #[test]
    fn fragments_and_what_follows_the_pixel_data_are_accepted() {
        let mut pixels = vec![0xe0, 0x7f, 0x10, 0, b'O', b'B', 0, 0, 0xff, 0xff, 0xff, 0xff];
        pixels.extend([0xfe, 0xff, 0x00, 0xe0, 0, 0, 0, 0]);
        pixels.extend([0xfe, 0xff, 0x00, 0xe0, 2, 0, 0, 0, 9, 9]);
        let without_end = file(EXPLICIT, &pixels);
        pixels.extend([0xfe, 0xff, 0xdd, 0xe0, 0, 0, 0, 0]);
        pixels.extend([1; 20]);
        // the parser gets nothing of what follows
        let whole = file(EXPLICIT, &pixels);
        let found = check(&whole).unwrap();
        assert_eq!((whole.len() - found.header.len(), whole.len() - found.whole.len()), (pixels.len(), 20));
        assert_eq!(check(&without_end), Err(Damage::TRUNCATED));
    }
}
