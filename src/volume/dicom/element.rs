//! The elements of a DICOM data set, one by one.

use std::ops::Range;

use dicom_core::Tag;

use super::syntax::{BIG_ENDIAN, IMPLICIT};

/// The group of the file meta.
pub(super) const META: u16 = 2;
pub(super) const ITEM: Tag = Tag(0xfffe, 0xe000);
pub(super) const UNDEFINED: u32 = u32::MAX;
/// Value representations with a length of 16 bits.
const SHORT: [&[u8; 2]; 21] = [
    b"AE", b"AS", b"AT", b"CS", b"DA", b"DS", b"DT", b"FL", b"FD", b"IS", b"LO", b"LT", b"PN", b"SH", b"SL", b"SS",
    b"ST", b"TM", b"UI", b"UL", b"US",
];

/// What is wrong with the structure of a DICOM file, for an error message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Damage(pub(crate) &'static str);

impl Damage {
    /// An element needs more bytes than there are.
    pub(super) const TRUNCATED: Self = Self("it is truncated or damaged: an element is longer than the file");
    /// An image without pixels, or no object at all: the file ends within its header.
    pub(super) const NO_IMAGE: Self = Self("it is truncated or damaged: its header ends before an image");
    /// The length of numbers is no multiple of their size, after which the parser would lose its place.
    pub(super) const LENGTH: Self = Self("it is damaged: an element has a length that its numbers cannot have");
    /// An element without a length is neither a sequence nor pixel data.
    pub(super) const NO_LENGTH: Self =
        Self("it is damaged: an element has no length, and it is neither a sequence nor pixel data");
    /// Sequences are nested too deeply.
    pub(super) const TOO_DEEP: Self = Self("its sequences are nested too deeply for a DICOM image");
    /// A sequence contains something else than items.
    pub(super) const NO_ITEM: Self = Self("it is damaged: a sequence has no items");
    /// A deflated file cannot be inflated.
    pub(super) const DEFLATE: Self = Self("its deflated data set is damaged, or 200 times as large as the file");
    /// No transfer syntax, and no data set that could be recognised without it.
    pub(super) const NO_SYNTAX: Self =
        Self("it has no transfer syntax, and its data set begins unlike that of an image");
    /// Compressed pixels in a data set whose encoding does not allow them.
    pub(super) const OTHER_SYNTAX: Self = Self("its data set has not the encoding that its transfer syntax says");
}

/// Reads elements in the encoding of a transfer syntax.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) is_implicit: bool,
    pub(super) is_big: bool,
}

/// Tag, value representation (`None` if implicit), length and start of the value of an element.
pub(super) struct Element {
    pub tag: Tag,
    pub vr: Option<[u8; 2]>,
    pub length: u32,
    pub value: usize,
}

impl Element {
    /// End of the value, if its length is known.
    pub(super) fn end(&self, limit: usize) -> Result<usize, Damage> {
        let end = self.value.checked_add(self.length as usize).ok_or(Damage::TRUNCATED)?;
        if self.length == UNDEFINED || end > limit { Err(Damage::TRUNCATED) } else { Ok(end) }
    }
}

impl<'a> Reader<'a> {
    pub(super) fn of(bytes: &'a [u8], syntax: &str) -> Self {
        Self { bytes, is_implicit: syntax == IMPLICIT, is_big: syntax == BIG_ENDIAN }
    }

    pub(super) fn part<const N: usize>(&self, at: usize) -> Result<[u8; N], Damage> {
        self.bytes.get(at..at + N).and_then(|bytes| bytes.try_into().ok()).ok_or(Damage::TRUNCATED)
    }

    pub(super) fn u16(&self, at: usize) -> Result<u16, Damage> {
        self.part(at).map(|bytes| if self.is_big { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) })
    }

    pub(super) fn u32(&self, at: usize) -> Result<u32, Damage> {
        self.part(at).map(|bytes| if self.is_big { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
    }

    /// Start of the data set, and the place of the transfer syntax.
    pub(super) fn file_meta(&self, start: usize) -> Result<(usize, Range<usize>), Damage> {
        let (mut at, mut syntax) = (start, 0..0);
        while at + 8 <= self.bytes.len() && self.u16(at)? == META {
            let element = self.element(at)?;
            let end = element.end(self.bytes.len())?;
            if element.tag == Tag(META, 0x10) {
                let value = self.bytes.get(element.value..end).unwrap_or_default();
                let length = value.iter().take_while(|byte| byte.is_ascii_digit() || **byte == b'.').count();
                syntax = element.value..element.value + length;
            }
            at = end;
        }
        Ok((at, syntax))
    }

    /// True for a file meta that begins with its length, up to the start of the data set.
    pub(super) fn has_group_length(&self, start: usize, dataset: usize) -> bool {
        let is_length = |element: &Element| element.tag == Tag(META, 0) && element.length == 4;
        let first = self.element(start).ok().filter(is_length);
        let length = first.and_then(|first| Some(first.value + 4 + self.u32(first.value).ok()? as usize));
        length == Some(dataset)
    }

    pub(super) fn element(&self, at: usize) -> Result<Element, Damage> {
        let tag = Tag(self.u16(at)?, self.u16(at + 2)?);
        if self.is_implicit || tag.0 == ITEM.0 {
            return Ok(Element { tag, vr: None, length: self.u32(at + 4)?, value: at + 8 });
        }
        let vr = self.part(at + 4)?;
        if SHORT.contains(&&vr) {
            return Ok(Element { tag, vr: Some(vr), length: u32::from(self.u16(at + 6)?), value: at + 8 });
        }
        Ok(Element { tag, vr: Some(vr), length: self.u32(at + 8)?, value: at + 12 })
    }
}
