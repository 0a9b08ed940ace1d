//! The encoding of a data set by its first elements, for files without file meta or with a wrong transfer syntax.

use dicom_core::dictionary::DataDictionary;
use dicom_core::{Tag, VR};
use dicom_object::StandardDataDictionary;

use super::element::Reader;
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
    let implicit = || Reader::of(bytes, syntax).element(0).ok().map(|element| element.tag);
    let found = if syntax == IMPLICIT { implicit() } else { element(bytes, syntax).map(|(tag, _)| tag) };
    found.is_some_and(|second| second > first)
}

/// The tag of the first element, and the position after its value.
fn element(bytes: &[u8], syntax: &str) -> Option<(Tag, usize)> {
    let element = Reader::of(bytes, syntax).element(0).ok()?;
    let is_valid = match element.vr {
        Some(vr) => VR::from_binary(vr).is_some() && (element.value == 8 || bytes[6..8] == [0, 0]),
        None => syntax == IMPLICIT && element.length < MAX_LENGTH && element.length % 2 == 0,
    };
    let next = element.value.checked_add(element.length as usize)?;
    is_valid.then_some((element.tag, next))
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
