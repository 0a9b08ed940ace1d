//! Texts and numbers of DICOM attributes. A value that is not a number is an error that names attribute, value and file.

use std::path::Path;

use dicom_core::dictionary::{DataDictionary, DataDictionaryEntry};
use dicom_core::{Tag, VR};
use dicom_dictionary_std::tags;
use dicom_object::mem::InMemElement;
use dicom_object::{InMemDicomObject, StandardDataDictionary};

use prsmed_base::error::{Error, Result};

/// What to do about a wrong header.
pub(super) const DAMAGED: &str = "export the series again from the archive";
/// Words that may be part of a number or stand for one. Other words of a wrong value could identify a patient.
const WORDS: [&str; 12] = ["e", "d", "x", "nan", "inf", "infinity", "mm", "cm", "m", "null", "none", "na"];
/// Most characters of a value in a message.
const MAX_SHOWN: usize = 64;

pub(super) fn wrong(path: &Path, reason: impl Into<String>) -> Error {
    Error::data(path, reason, DAMAGED)
}

/// The name of an attribute.
pub(super) fn name(tag: Tag) -> &'static str {
    StandardDataDictionary.by_tag(tag).map_or("an attribute", DataDictionaryEntry::alias)
}

pub(super) fn text(object: &InMemDicomObject, tag: Tag) -> Option<String> {
    text_of(object.get(tag)?)
}

fn text_of(element: &InMemElement) -> Option<String> {
    // the bytes of an attribute without a value representation
    let text = match element.vr() {
        VR::UN => String::from_utf8_lossy(&element.to_bytes().ok()?).into_owned(),
        _ => element.to_str().ok()?.into_owned(),
    };
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    (!text.is_empty()).then(|| text.to_owned())
}

pub(super) fn integer(object: &InMemDicomObject, tag: Tag) -> Option<i64> {
    object.get(tag)?.to_int::<i64>().ok()
}

/// The name of a segment, which is shown in messages.
pub(super) fn shown_name(item: &InMemDicomObject, tag: Tag) -> Option<String> {
    Some(text(item, tag)?.chars().filter(|c| !c.is_control()).take(64).collect())
}

/// The items of a sequence; none without it.
pub(super) fn items(object: &InMemDicomObject, tag: Tag) -> &[InMemDicomObject] {
    object.get(tag).and_then(|element| element.items()).unwrap_or_default()
}

/// The SeriesInstanceUID of each item.
pub(super) fn series_uids(items: &[InMemDicomObject]) -> Vec<String> {
    items.iter().filter_map(|item| text(item, tags::SERIES_INSTANCE_UID)).collect()
}

/// The first value, the number of bits and the entries of a lookup table (PS3.3, C.11.1.1); `None` for a damaged one.
/// Entries of 8 bits may be bytes.
pub(super) fn lookup_table(object: &InMemDicomObject, descriptor: Tag, data: Tag) -> Option<(i32, i32, Vec<u16>)> {
    let descriptor = object.get(descriptor)?.to_multi_int::<i32>().ok()?;
    let [count, first, bits] = descriptor.as_slice() else { return None };
    let count = match usize::try_from(count & 0xffff).ok()? {
        0 => 1 << 16,
        count => count,
    };
    let bytes = object.get(data)?.to_bytes().ok()?;
    let entries: Vec<u16> = if bytes.len() >= 2 * count {
        bytes.as_chunks::<2>().0.iter().take(count).map(|word| u16::from_le_bytes(*word)).collect()
    } else {
        bytes.iter().take(count).copied().map(u16::from).collect()
    };
    (entries.len() == count).then_some((*first, *bits, entries))
}

/// The numbers of an attribute, all finite; `None` without a value.
pub(super) fn numbers(path: &Path, object: &InMemDicomObject, tag: Tag) -> Result<Option<Vec<f64>>> {
    let Some(element) = object.get(tag) else { return Ok(None) };
    let Some(text) = text_of(element) else { return Ok(None) };
    let numbers = match element.vr() {
        VR::UN => text.split('\\').map(|part| part.trim().parse().ok()).collect(),
        _ => element.to_multi_float64().ok(),
    };
    let numbers: Option<Vec<f64>> =
        numbers.filter(|numbers: &Vec<f64>| numbers.iter().all(|number| number.is_finite()));
    let reason = || format!("{} is {}, and must consist of numbers", name(tag), shown(&text));
    numbers.map(Some).ok_or_else(|| Error::data(path, reason(), "correct the header, or export the series again"))
}

/// The first number of an attribute.
pub(super) fn number(path: &Path, object: &InMemDicomObject, tag: Tag) -> Result<Option<f64>> {
    Ok(numbers(path, object, tag)?.and_then(|numbers| numbers.first().copied()))
}

/// The `N` numbers of an attribute.
pub(super) fn array<const N: usize>(path: &Path, object: &InMemDicomObject, tag: Tag) -> Result<Option<[f64; N]>> {
    let Some(numbers) = numbers(path, object, tag)? else { return Ok(None) };
    let count = numbers.len();
    let wrong_count = |_| wrong(path, format!("{} has {count} numbers, and must have {N}", name(tag)));
    numbers.try_into().map(Some).map_err(wrong_count)
}

/// Two distances in mm.
pub(super) fn distances(path: &Path, object: &InMemDicomObject, tag: Tag) -> Result<Option<[f64; 2]>> {
    let Some(distances) = array(path, object, tag)? else { return Ok(None) };
    if distances.iter().all(|mm| *mm > 0.0) {
        return Ok(Some(distances));
    }
    let [a, b] = distances;
    Err(wrong(path, format!("{} is `{a}\\{b}`, and distances must be larger than 0", name(tag))))
}

/// A wrong value for a message, unless it has words.
fn shown(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || " .,;:+-*/\\'_".contains(c);
    let mut words = text.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty());
    let is_number_like = text.chars().all(is_plain) && words.all(|word| WORDS.contains(&word.to_lowercase().as_str()));
    if is_number_like && text.len() <= MAX_SHOWN { format!("`{text}`") } else { "a text".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_with_words_are_not_shown() {
        for (value, expected) in [
            ("0,8\\0,7", "`0,8\\0,7`"),
            ("NaN", "`NaN`"),
            ("0.7 mm", "`0.7 mm`"),
            ("1e", "`1e`"),
            ("ZQ-4711", "a text"),
            ("Müller", "a text"),
            ("5\u{1b}[31m", "a text"),
        ] {
            assert_eq!(shown(value), expected);
        }
        assert_eq!(shown(&"1,".repeat(40)), "a text");
    }
}
