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
use dicom_object::StandardDataDictionary;
use flate2::read::DeflateDecoder;

use super::super::limits::{FREE, MAX_RATIO};
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
/// The group of the file meta.
const META: u16 = 2;
/// Most bytes of a deflated data set.
const MAX_INFLATED: u64 = 2 << 30;
const UNDEFINED: u32 = u32::MAX;
const ITEM: (u16, u16) = (0xfffe, 0xe000);
const ITEM_END: (u16, u16) = (0xfffe, 0xe00d);
const SEQUENCE_END: (u16, u16) = (0xfffe, 0xe0dd);
/// Group of the pixel data, also of floating-point ones.
const PIXELS: u16 = 0x7fe0;
/// Pixel data, the only element that may consist of fragments.
const PIXEL_DATA: (u16, u16) = (PIXELS, 0x10);
/// Value representations with a length of 16 bits.
const SHORT: [&[u8; 2]; 21] = [
    b"AE", b"AS", b"AT", b"CS", b"DA", b"DS", b"DT", b"FL", b"FD", b"IS", b"LO", b"LT", b"PN", b"SH", b"SL", b"SS",
    b"ST", b"TM", b"UI", b"UL", b"US",
];

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

/// What is wrong with the structure of a DICOM file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Damage {
    /// An element needs more bytes than there are.
    Truncated,
    /// An image without pixels, or no object at all: the file ends within its header.
    NoImage,
    /// The length of numbers is no multiple of their size, after which the parser would lose its place.
    Length,
    /// An element without a length is neither a sequence nor pixel data.
    NoLength,
    /// Sequences are nested too deeply.
    TooDeep,
    /// A sequence contains something else than items.
    NoItem,
    /// A deflated file cannot be inflated.
    Deflate,
    /// No transfer syntax, and no data set that could be recognised without it.
    NoSyntax,
    /// Compressed pixels in a data set whose encoding does not allow them.
    OtherSyntax,
}

impl Damage {
    /// For an error message.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Truncated => "it is truncated or damaged: an element is longer than the file",
            Self::NoImage => "it is truncated or damaged: its header ends before an image",
            Self::Length => "it is damaged: an element has a length that its numbers cannot have",
            Self::NoLength => "it is damaged: an element has no length, and it is neither a sequence nor pixel data",
            Self::TooDeep => "its sequences are nested too deeply for a DICOM image",
            Self::NoItem => "it is damaged: a sequence has no items",
            Self::NoSyntax => "it has no transfer syntax, and its data set begins unlike that of an image",
            Self::OtherSyntax => "its data set has not the encoding that its transfer syntax says",
            Self::Deflate => "its deflated data set is damaged, or 200 times as large as the file",
        }
    }
}

/// A checked DICOM file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Checked<'a> {
    /// The bytes before the pixel data.
    pub header: Cow<'a, [u8]>,
    /// The bytes with the pixel data. What follows is not checked and must not be parsed.
    pub whole: Cow<'a, [u8]>,
    /// The transfer syntax, if the bytes are a data set without file meta.
    pub syntax: Option<String>,
    /// What was assumed about the encoding.
    pub note: Option<&'static str>,
}

impl Checked<'_> {
    /// True if the data set has pixels.
    pub(super) fn has_pixels(&self) -> bool {
        self.header.len() < self.whole.len()
    }
}

/// Checks a DICOM file up to the end of its pixel data. A deflated data set is inflated, with its syntax changed
/// accordingly. Without a transfer syntax, and for a wrong one, the encoding is found from the data set.
///
/// # Errors
/// What is wrong.
pub(super) fn check(bytes: &[u8]) -> Result<Checked<'_>, Damage> {
    let start = start(bytes);
    let (unknown_of_meta, num_odd_of_meta) = (RefCell::default(), Cell::default());
    let meta =
        Walker { bytes, is_implicit: false, is_big: false, unknown: &unknown_of_meta, num_odd: &num_odd_of_meta };
    let (dataset, place) = meta.file_meta(start)?;
    let stated = std::str::from_utf8(&bytes[place.clone()]).unwrap_or_default();
    let found = encoding::of(bytes.get(dataset..).unwrap_or_default());
    let (used, note) = match found {
        // the file ends within its meta, or directly after it
        None if stated.is_empty() && bytes.len() < dataset + 8 => return Err(Damage::Truncated),
        None if stated.is_empty() => return Err(Damage::NoSyntax),
        Some(found) if stated.is_empty() => {
            (found, Some("the DICOM file meta is missing, and the encoding was found from the first elements"))
        }
        Some(found) if found != stated && syntax::is_native(stated) => {
            (found, Some("the file meta says another encoding than that of the data set, which was used"))
        }
        Some(IMPLICIT | BIG_ENDIAN) if !syntax::is_native(stated) && syntax::check(stated).is_ok() => {
            return Err(Damage::OtherSyntax);
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
    let (unknown, num_odd) = (RefCell::default(), Cell::default());
    let walker = |is_implicit, is_big| Walker { bytes, is_implicit, is_big, unknown: &unknown, num_odd: &num_odd };
    let [start, end] = match used {
        IMPLICIT => walker(true, false).pixels(dataset)?,
        BIG_ENDIAN => walker(false, true).pixels(dataset)?,
        DEFLATED => {
            let mut inflated = inflate(bytes.get(dataset..).unwrap_or_default())?;
            let ends =
                Walker { bytes: &inflated, is_implicit: false, is_big: false, unknown: &unknown, num_odd: &num_odd }
                    .pixels(0)?;
            state_lengths(&mut inflated, &unknown.take(), false);
            let mut meta = if is_bare { Vec::new() } else { bytes[..dataset].to_vec() };
            if !is_bare {
                // the UID without its last part, padded
                meta[place.end - DEFLATED_PART.len()..place.end].fill(0);
            }
            let [header, whole] = ends.map(|end| Cow::Owned([&meta, &inflated[..end]].concat()));
            return Ok(Checked { header, whole, syntax: is_bare.then(|| EXPLICIT.to_owned()), note });
        }
        _ => walker(false, false).pixels(dataset)?,
    };
    let unknown = unknown.take();
    let [header, whole] = [start, end].map(|end| {
        let mut part = Cow::Borrowed(&bytes[from..end]);
        if !unknown.is_empty() {
            let moved: Vec<_> = unknown.iter().map(|value| value.start - from..value.end - from).collect();
            state_lengths(part.to_mut(), &moved, used == BIG_ENDIAN);
        }
        part
    });
    Ok(Checked { header, whole, syntax: is_bare.then(|| used.to_owned()), note })
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
    let (unknown, num_odd) = (RefCell::default(), Cell::default());
    let end =
        Walker { bytes: dataset, is_implicit: true, is_big: false, unknown: &unknown, num_odd: &num_odd }.pixels(0)?[1];
    if end == dataset.len() { Ok(()) } else { Err(Damage::Truncated) }
}

fn inflate(source: &[u8]) -> Result<Vec<u8>, Damage> {
    let mut inflated = Vec::new();
    let most = (source.len() as u64).saturating_mul(MAX_RATIO).clamp(FREE, MAX_INFLATED);
    let read = DeflateDecoder::new(source).take(most + 1).read_to_end(&mut inflated);
    if read.is_err() || inflated.len() as u64 > most { Err(Damage::Deflate) } else { Ok(inflated) }
}

#[derive(Clone, Copy)]
struct Walker<'a> {
    bytes: &'a [u8],
    is_implicit: bool,
    is_big: bool,
    /// Values of sequences without a length whose value representation is unknown (UN), which the parser cannot read. Its
    /// vendors use them for private attributes.
    unknown: &'a RefCell<Vec<Range<usize>>>,
    /// How many of these sequences are not written as the standard says.
    num_odd: &'a Cell<usize>,
}

/// Tag, value representation (`None` if implicit), length and start of the value of an element.
struct Element {
    tag: (u16, u16),
    vr: Option<[u8; 2]>,
    length: u32,
    value: usize,
}

impl Element {
    /// End of the value, if its length is known.
    fn end(&self, limit: usize) -> Result<usize, Damage> {
        let end = self.value.checked_add(self.length as usize).ok_or(Damage::Truncated)?;
        if self.length == UNDEFINED || end > limit { Err(Damage::Truncated) } else { Ok(end) }
    }
}

impl Walker<'_> {
    fn u16(&self, at: usize) -> Result<u16, Damage> {
        let bytes = self.bytes.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).ok_or(Damage::Truncated)?;
        Ok(if self.is_big { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) })
    }

    fn u32(&self, at: usize) -> Result<u32, Damage> {
        let bytes = self.bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).ok_or(Damage::Truncated)?;
        Ok(if self.is_big { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
    }

    /// Start of the data set, and the place of the transfer syntax.
    fn file_meta(&self, start: usize) -> Result<(usize, Range<usize>), Damage> {
        let (mut at, mut syntax) = (start, 0..0);
        while at + 8 <= self.bytes.len() && self.u16(at)? == META {
            let element = self.element(at)?;
            let end = element.end(self.bytes.len())?;
            if element.tag == (2, 0x10) {
                let value = self.bytes.get(element.value..end).unwrap_or_default();
                let length = value.iter().take_while(|byte| byte.is_ascii_digit() || **byte == b'.').count();
                syntax = element.value..element.value + length;
            }
            at = end;
        }
        Ok((at, syntax))
    }

    /// True for a file meta that begins with its length, up to the start of the data set.
    fn has_group_length(&self, start: usize, dataset: usize) -> bool {
        let is_length = |element: &Element| element.tag == (META, 0) && element.length == 4;
        let first = self.element(start).ok().filter(is_length);
        first
            .is_some_and(|first| self.u32(first.value).is_ok_and(|length| first.value + 4 + length as usize == dataset))
    }

    fn element(&self, at: usize) -> Result<Element, Damage> {
        let tag = (self.u16(at)?, self.u16(at + 2)?);
        if self.is_implicit || tag.0 == 0xfffe {
            return Ok(Element { tag, vr: None, length: self.u32(at + 4)?, value: at + 8 });
        }
        let vr: [u8; 2] =
            self.bytes.get(at + 4..at + 6).and_then(|bytes| bytes.try_into().ok()).ok_or(Damage::Truncated)?;
        if SHORT.contains(&&vr) {
            return Ok(Element { tag, vr: Some(vr), length: u32::from(self.u16(at + 6)?), value: at + 8 });
        }
        Ok(Element { tag, vr: Some(vr), length: self.u32(at + 8)?, value: at + 12 })
    }

    /// Start and end of the pixel data of a data set; its end if there are none.
    fn pixels(&self, mut at: usize) -> Result<[usize; 2], Damage> {
        let limit = self.bytes.len();
        while at + 8 <= limit {
            let element = self.element(at)?;
            let end = self.value(&element, 0, limit)?;
            // the group may begin with its length and offsets of frames
            if element.tag.0 == PIXELS && matches!(element.tag.1, 0x08..=0x10) {
                return Ok([at, end]);
            }
            at = end;
        }
        // less than the header of an element is padding, or what is left of one
        let is_padding = self.bytes.get(at..).unwrap_or_default().iter().all(|byte| *byte == 0);
        if is_padding { Ok([at.min(limit); 2]) } else { Err(Damage::Truncated) }
    }

    /// Walks over the elements of an item, which ends at `limit` or (`has_length` is false) at its delimiter; the position
    /// after it. The parser reads beyond an item that its elements do not fill exactly, and takes values for lengths.
    fn dataset(&self, mut at: usize, depth: usize, (limit, has_length): (usize, bool)) -> Result<usize, Damage> {
        while at + 8 <= limit {
            let element = self.element(at)?;
            if element.tag == ITEM_END && !has_length {
                return Ok(element.value);
            }
            at = self.value(&element, depth, limit)?;
        }
        if has_length && at == limit { Ok(limit) } else { Err(Damage::Truncated) }
    }

    /// The position after the value of an element.
    fn value(&self, element: &Element, depth: usize, limit: usize) -> Result<usize, Damage> {
        if element.length == UNDEFINED && element.tag == PIXEL_DATA {
            return self.fragments(element.value, limit);
        }
        let is_sequence = match &element.vr {
            Some(vr) => vr == b"SQ" || (vr == b"UN" && element.length == UNDEFINED),
            None => element.length == UNDEFINED || is_sequence_in_dictionary(element.tag),
        };
        if !is_sequence {
            // the parser would take it for a sequence
            if element.length == UNDEFINED {
                return Err(Damage::NoLength);
            }
            let size = element.vr.map_or_else(|| size_in_dictionary(element.tag), number_size);
            return if element.length.is_multiple_of(size) { element.end(limit) } else { Err(Damage::Length) };
        }
        match element.vr {
            Some([b'U', b'N']) => self.unknown_sequence(element, depth + 1, limit),
            _ => self.sequence(element, depth + 1, limit),
        }
    }

    /// A sequence whose value representation is unknown (PS3.5, 6.2.2): its items are in Implicit VR Little Endian. Some
    /// programs write them in the encoding of the file.
    fn unknown_sequence(&self, element: &Element, depth: usize, limit: usize) -> Result<usize, Damage> {
        let known = self.unknown.borrow().len();
        let end = |walker: Self| {
            let end = walker.sequence(element, depth, limit);
            // the parser gets the whole value as bytes
            self.unknown.borrow_mut().truncate(known);
            end
        };
        let end = end(Self { is_implicit: true, is_big: false, ..*self }).or_else(|damage| {
            self.num_odd.set(self.num_odd.get() + 1);
            let others =
                [Self { is_implicit: true, ..*self }, *self].into_iter().filter(|_| self.num_odd.get() <= MAX_ODD);
            others.map(end).find_map(Result::ok).ok_or(damage)
        })?;
        self.unknown.borrow_mut().push(element.value..end);
        Ok(end)
    }

    fn sequence(&self, element: &Element, depth: usize, limit: usize) -> Result<usize, Damage> {
        if depth > MAX_DEPTH {
            return Err(Damage::TooDeep);
        }
        let has_length = element.length != UNDEFINED;
        let end = if has_length { element.end(limit)? } else { limit };
        let mut at = element.value;
        while at + 8 <= end {
            let item = self.element(at)?;
            match item.tag {
                SEQUENCE_END => return Ok(if has_length { end } else { item.value }),
                ITEM if item.length == UNDEFINED => at = self.dataset(item.value, depth, (end, false))?,
                ITEM => at = self.dataset(item.value, depth, (item.end(end)?, true))?,
                _ => return Err(Damage::NoItem),
            }
        }
        if has_length && at == end { Ok(end) } else { Err(Damage::Truncated) }
    }

    /// Fragments of encapsulated pixel data.
    fn fragments(&self, mut at: usize, limit: usize) -> Result<usize, Damage> {
        while at + 8 <= limit {
            let item = self.element(at)?;
            match item.tag {
                SEQUENCE_END => return Ok(item.value),
                ITEM => at = item.end(limit)?,
                _ => return Err(Damage::NoItem),
            }
        }
        Err(Damage::Truncated)
    }
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

fn size_in_dictionary(tag: (u16, u16)) -> u32 {
    match StandardDataDictionary.by_tag(Tag(tag.0, tag.1)).map(DataDictionaryEntry::vr) {
        Some(VirtualVr::Exact(vr)) => number_size(vr.to_bytes()),
        Some(VirtualVr::Xs | VirtualVr::Ox | VirtualVr::Px) => 2,
        _ => 1,
    }
}

fn is_sequence_in_dictionary(tag: (u16, u16)) -> bool {
    let entry = StandardDataDictionary.by_tag(Tag(tag.0, tag.1));
    entry.is_some_and(|entry| entry.vr() == VirtualVr::Exact(VR::SQ))
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
        assert_eq!(check(&file(EXPLICIT, &element[..9])), Err(Damage::Truncated));
        let huge = [0xe0, 0x7f, 0x10, 0, b'O', b'W', 0, 0, 0xfe, 0xff, 0xff, 0xff, 1, 2];
        assert_eq!(check(&file(EXPLICIT, &huge)), Err(Damage::Truncated));
        let implicit = [0x28, 0, 0x10, 0, 0xfe, 0xff, 0xff, 0x7f];
        assert_eq!(check(&file("1.2.840.10008.1.2\0", &implicit)), Err(Damage::Truncated));
    }

    #[test]
    fn lengths_that_numbers_cannot_have_are_found() {
        let element = [0x28, 0, 0x10, 0, b'U', b'S', 3, 0, 1, 0, 0];
        assert_eq!(check(&file(EXPLICIT, &element)), Err(Damage::Length));
        let implicit = [0x28, 0, 0x10, 0, 3, 0, 0, 0, 1, 0, 0];
        assert_eq!(check(&file("1.2.840.10008.1.2\0", &implicit)), Err(Damage::Length));
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
        assert_eq!(check(&sequence(&element, 7)), Err(Damage::Truncated));
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
        assert_eq!(check(&fragments([0x1e, 0x7f, 0x10, 0])), Err(Damage::NoLength));
        assert_eq!(check(&fragments([0xe0, 0x7f, 0x09, 0])), Err(Damage::NoLength));
    }

    #[test]
    fn deep_nesting_is_found() {
        let mut nested = Vec::new();
        for _ in 0..100_000 {
            nested.extend([0x08, 0, 0x40, 0x11, b'S', b'Q', 0, 0, 0xff, 0xff, 0xff, 0xff]);
            nested.extend([0xfe, 0xff, 0x00, 0xe0, 0xff, 0xff, 0xff, 0xff]);
        }
        assert_eq!(check(&file(EXPLICIT, &nested)), Err(Damage::TooDeep));
        assert_eq!(check(&file(EXPLICIT, &nested[..200])), Err(Damage::Truncated));
        let mut implicit = Vec::new();
        for _ in 0..1000 {
            implicit.extend([0x08, 0, 0x40, 0x11, 0xff, 0xff, 0xff, 0xff]);
            implicit.extend([0xfe, 0xff, 0x00, 0xe0, 0xff, 0xff, 0xff, 0xff]);
        }
        assert_eq!(check(&file("1.2.840.10008.1.2\0", &implicit)), Err(Damage::TooDeep));
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
        assert_eq!(check(&without_end), Err(Damage::Truncated));
    }
}
