//! Search for planted identifiers in any bytes: compressed, archived, in UTF-16, without separators.

use std::io::{Cursor, Read};

use base64::Engine as _;
use dicom_core::Tag;
use dicom_core::header::Header as _;
use dicom_dictionary_std::tags;
use dicom_object::InMemDicomObject;
use regex::bytes::Regex;

use super::plant::{DATE, ID, NAME, TIME, UIDS, WEIGHT, parse};

/// Deepest nesting of archives.
const MAX_DEPTH: usize = 4;

/// Letters and digits only, in small letters: UTF-16 and other separators become the same text.
fn letters_and_digits(bytes: impl IntoIterator<Item = u8>) -> Vec<u8> {
    bytes.into_iter().filter(u8::is_ascii_alphanumeric).map(|byte| byte.to_ascii_lowercase()).collect()
}

fn contains(bytes: &[u8], needle: &str) -> bool {
    Regex::new(&regex::escape(needle)).expect("a pattern").is_match(bytes)
}

/// True if `number` occurs and is not a part of a longer number, such as a loss with many digits.
fn contains_number(bytes: &[u8], number: &str) -> bool {
    let pattern = format!("(?-u)(?:^|[^0-9.]){}(?:[^0-9]|$)", regex::escape(number));
    Regex::new(&pattern).expect("a pattern").is_match(bytes)
}

/// The planted values that the bytes contain, with where they were found.
pub(super) fn findings(place: &str, bytes: &[u8]) -> Vec<String> {
    let mut found = Vec::new();
    search(place, bytes, 0, &mut found);
    found
}

fn search(place: &str, bytes: &[u8], depth: usize, found: &mut Vec<String>) {
    let plain = letters_and_digits(bytes.iter().copied());
    let [family, given] = NAME.split('^').collect::<Vec<_>>().try_into().expect("two names");
    for needle in [family, given, ID, UIDS] {
        let short = String::from_utf8(letters_and_digits(needle.bytes())).expect("letters and digits");
        if contains(&plain, &short) {
            found.push(format!("{place}: {needle}"));
        }
    }
    let narrow: Vec<u8> = bytes.iter().copied().filter(|byte| *byte != 0).collect();
    let [year, month, day] = [&DATE[..4], &DATE[4..6], &DATE[6..]];
    let dates = ["-", ".", "/"].map(|sign| [year, month, day].join(sign));
    let numbers = [DATE, TIME, WEIGHT].map(str::to_owned).into_iter().chain(dates);
    found.extend(numbers.filter(|number| contains_number(&narrow, number)).map(|number| format!("{place}: {number}")));
    assert!(depth < MAX_DEPTH, "{place} is nested too deeply");
    unpack(place, bytes, &mut |place, bytes| search(&place, &bytes, depth + 1, found));
}

/// Calls `inner` with the contents of an archive, a compressed file or the images of a page.
fn unpack(place: &str, bytes: &[u8], inner: &mut dyn FnMut(String, Vec<u8>)) {
    if bytes.starts_with(&[0x1f, 0x8b]) {
        let mut content = Vec::new();
        flate2::read::MultiGzDecoder::new(bytes).read_to_end(&mut content).expect("a gzip file");
        inner(format!("{place} (gz)"), content);
    } else if bytes.starts_with(b"PK\x03\x04") {
        let mut archive = zip::ZipArchive::new(Cursor::new(bytes)).expect("a zip file");
        for index in 0..archive.len() {
            let mut entry = archive.by_index(index).expect("an entry");
            let mut content = entry.name().as_bytes().to_vec();
            content.push(b'\n');
            let name = entry.name().to_owned();
            inner(format!("{place}, name {name}"), content);
            let mut content = Vec::new();
            entry.read_to_end(&mut content).expect("an entry");
            inner(format!("{place}/{name}"), content);
        }
    } else if bytes.starts_with(b"\x89PNG") {
        text_of_png(place, bytes, inner);
    } else if bytes.starts_with(b"<!") {
        let page = String::from_utf8_lossy(bytes);
        for (number, part) in page.split(";base64,").skip(1).enumerate() {
            let is_base64 = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '=');
            let code: String = part.chars().take_while(is_base64).collect();
            let content = base64::engine::general_purpose::STANDARD.decode(code).expect("base64");
            inner(format!("{place}, image {number}"), content);
        }
    }
}

/// The chunks of a PNG file that may have compressed text.
fn text_of_png(place: &str, bytes: &[u8], inner: &mut dyn FnMut(String, Vec<u8>)) {
    let mut at = 8;
    while at + 8 <= bytes.len() {
        let length = u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes")) as usize;
        let (kind, content) = (&bytes[at + 4..at + 8], &bytes[at + 8..at + 8 + length]);
        if kind == b"zTXt" || kind == b"iTXt" || kind == b"iCCP" {
            // the compressed part begins with the header of zlib
            let start = content.windows(2).position(|two| two[0] == 0x78 && matches!(two[1], 1 | 0x5e | 0x9c | 0xda));
            let mut text = Vec::new();
            if let Some(start) = start {
                let _ = flate2::read::ZlibDecoder::new(&content[start..]).read_to_end(&mut text);
            }
            inner(format!("{place}, {}", String::from_utf8_lossy(kind)), text);
        }
        at += 12 + length;
    }
}

/// Checks a DICOM SEG: of the planted values, it has only the UIDs by which the standard refers to the images (PS3.3
/// A.51): study, frame of reference, series and instances. Returns how many.
pub(super) fn check_segmentation(place: &str, bytes: &[u8]) -> usize {
    let object = parse(bytes);
    let mut num_references = 0;
    walk(&object, &mut |tag, value| {
        let uids = [
            tags::STUDY_INSTANCE_UID,
            tags::FRAME_OF_REFERENCE_UID,
            tags::SERIES_INSTANCE_UID,
            tags::REFERENCED_SOP_INSTANCE_UID,
        ];
        if uids.contains(&tag) && value.starts_with(UIDS.as_bytes()) {
            num_references += 1;
            return;
        }
        assert_eq!(findings(&format!("{place}, {tag}"), value), Vec::<String>::new());
    });
    // nothing outside of the elements: file meta, preamble
    let all = bytes.windows(UIDS.len()).filter(|window| *window == UIDS.as_bytes()).count();
    assert_eq!(all, num_references, "{place}");
    let own_series = object.element(tags::SERIES_INSTANCE_UID).expect("a series").to_str().expect("text");
    assert!(!own_series.starts_with(UIDS), "{place} claims to be a part of the series");
    for tag in [tags::PATIENT_NAME, tags::PATIENT_ID, tags::PATIENT_BIRTH_DATE, tags::STUDY_DATE, tags::STUDY_ID] {
        assert_eq!(object.element(tag).expect("an empty attribute").to_str().expect("text"), "", "{place}, {tag}");
    }
    num_references
}

fn walk(object: &InMemDicomObject, visit: &mut dyn FnMut(Tag, &[u8])) {
    for element in object {
        match element.items() {
            Some(items) => items.iter().for_each(|item| walk(item, visit)),
            None => visit(element.tag(), &element.to_bytes().expect("bytes")),
        }
    }
}

/// The search finds every planted value in every wrapping; without this check, the other tests could not fail.
#[test]
fn planted_values_are_found_in_every_wrapping() {
    use std::io::Write;
    for needle in ["Zyxwvut", "QWENTZYN", ID, "zq4711xk", UIDS, DATE, "1933-03-07", "a041133.331b", WEIGHT] {
        let wide: Vec<u8> = needle.encode_utf16().flat_map(u16::to_be_bytes).collect();
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        gz.write_all(needle.as_bytes()).unwrap();
        let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
        zip.start_file("a.nii.gz", zip::write::SimpleFileOptions::default()).unwrap();
        zip.write_all(&gz.finish().unwrap()).unwrap();
        let zip = zip.finish().unwrap().into_inner();
        let page = base64::engine::general_purpose::STANDARD.encode(&zip);
        let page = format!("<!doctype html><img src=\"data:image/png;base64,{page}\">").into_bytes();
        let mut text = flate2::write::ZlibEncoder::new(b"comment\0\0".to_vec(), flate2::Compression::default());
        text.write_all(needle.as_bytes()).unwrap();
        let text = text.finish().unwrap();
        let length = u32::try_from(text.len()).unwrap().to_be_bytes();
        let png = [b"\x89PNG\r\n\x1a\n".as_slice(), &length, b"zTXt", &text, &[0; 4]].concat();
        for bytes in [needle.as_bytes().to_vec(), wide, zip, page, png] {
            assert_eq!(findings("here", &bytes).len(), 1, "{needle}");
        }
    }
    let others = b"loss 0.19330307, 193303071, 1.3.6.1.4.1, 4711, Zyx, wvu";
    assert_eq!(findings("here", others), Vec::<String>::new());
}
