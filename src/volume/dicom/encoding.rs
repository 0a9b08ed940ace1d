//! The encoding of a data set by its first elements, for files without file meta or with a wrong transfer syntax.

use dicom_core::dictionary::DataDictionary;
use dicom_core::{Tag, VR};
use dicom_object::StandardDataDictionary;

use super::syntax::{BIG_ENDIAN, EXPLICIT, IMPLICIT};

/// The group of the first element of an image.
const FIRST_GROUP: u16 = 8;
/// Longest value of the first element. A longer one would begin with the letters of a value representation.
const MAX_LENGTH: u32 = 0x4000;

/// The transfer syntax of a data set that begins as that of an image: with a known element of group 8, and a second element
/// behind it if there are so many bytes.
pub(super) fn of(bytes: &[u8]) -> Option<&'static str> {
    [EXPLICIT, BIG_ENDIAN, IMPLICIT].into_iter().find(|syntax| {
        let Some((tag, next)) = element(bytes, syntax) else { return false };
        let is_known = StandardDataDictionary.by_tag(tag).is_some() || tag.element() == 0;
        let is_first = tag.group() == FIRST_GROUP && is_known;
        is_first && (bytes.len() < next + 12 || is_second(bytes.get(next..).unwrap_or_default(), tag, syntax))
    })
}

/// True if bytes begin with an element that follows `first`.
fn is_second(bytes: &[u8], first: Tag, syntax: &str) -> bool {
    // an implicit one may have any length
    let found = if syntax == IMPLICIT { tag(bytes, syntax) } else { element(bytes, syntax).map(|(tag, _)| tag) };
    found.is_some_and(|second| second > first)
}

fn u16_at(bytes: &[u8], at: usize, syntax: &str) -> Option<u16> {
    let pair = bytes.get(at..at + 2)?.try_into().ok()?;
    Some(if syntax == BIG_ENDIAN { u16::from_be_bytes(pair) } else { u16::from_le_bytes(pair) })
}

fn tag(bytes: &[u8], syntax: &str) -> Option<Tag> {
    Some(Tag(u16_at(bytes, 0, syntax)?, u16_at(bytes, 2, syntax)?))
}

/// The tag of the first element, and the position after its value.
fn element(bytes: &[u8], syntax: &str) -> Option<(Tag, usize)> {
    let u16_at = |at: usize| u16_at(bytes, at, syntax);
    let u32_at = |at: usize| {
        let (first, second) = (u32::from(u16_at(at)?), u32::from(u16_at(at + 2)?));
        Some(if syntax == BIG_ENDIAN { first << 16 | second } else { second << 16 | first })
    };
    let tag = tag(bytes, syntax)?;
    if syntax == IMPLICIT {
        let length = u32_at(4).filter(|length| *length < MAX_LENGTH && length % 2 == 0)?;
        return Some((tag, 8 + length as usize));
    }
    let letters: [u8; 2] = bytes.get(4..6)?.try_into().ok()?;
    let vr = VR::from_binary(letters)?;
    let is_long = matches!(
        vr,
        VR::OB
            | VR::OD
            | VR::OF
            | VR::OL
            | VR::OV
            | VR::OW
            | VR::SQ
            | VR::SV
            | VR::UC
            | VR::UN
            | VR::UR
            | VR::UT
            | VR::UV
    );
    if is_long {
        let is_reserved = bytes.get(6..8)? == [0, 0];
        return is_reserved.then_some((tag, 12_usize.checked_add(u32_at(8)? as usize)?));
    }
    Some((tag, 8 + usize::from(u16_at(6)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoding_is_found_by_the_first_elements() {
        let charset = b"ISO_IR 100";
        let uid = b"1.2.840.10008.5.1.4.1.1.2\0";
        let explicit =
            [&[8, 0, 5, 0], b"CS".as_slice(), &[10, 0], charset, &[8, 0, 0x16, 0], b"UI", &[26, 0], uid].concat();
        let big = [&[0, 8, 0, 5], b"CS".as_slice(), &[0, 10], charset, &[0, 8, 0, 0x16], b"UI", &[0, 26], uid].concat();
        let implicit = [&[8, 0, 5, 0, 10, 0, 0, 0], charset.as_slice(), &[8, 0, 0x16, 0, 26, 0, 0, 0], uid].concat();
        assert_eq!([of(&explicit), of(&big), of(&implicit)], [Some(EXPLICIT), Some(BIG_ENDIAN), Some(IMPLICIT)]);
        let length = [&[8, 0, 0, 0, 4, 0, 0, 0, 90, 0, 0, 0], implicit.as_slice()].concat();
        assert_eq!(of(&length), Some(IMPLICIT));
        // a second element before the first one, another group, and texts
        let wrong = [&implicit[..18], &[8, 0, 1, 0, 4, 0, 0, 0], &[0; 20]].concat();
        assert_eq!(of(&wrong), None);
        assert_eq!(of(&[&[16, 0], &implicit[2..]].concat()), None);
        assert_eq!(of(b"solid text of a file that is no image at all"), None);
        assert_eq!(of(&[0; 132]), None);
        assert_eq!(of(&[8, 0, 5]), None);
    }
}
