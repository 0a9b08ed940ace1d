//! Files of annotation programs that are given where images of masks are expected: what they are, by their content.

use std::io::Read;
use std::path::Path;

use crate::volume::dicom;
use crate::volume::format::FORMATS;
use prsmed_base::files;

/// First bytes that are read: the keys of a JSON file of polygons are before its numbers, or between few of them.
const START: u64 = 64 << 10;
/// UID of RT Structure Set Storage.
const RTSTRUCT: &[u8] = b"1.2.840.10008.5.1.4.1.1.481.3";

/// Kinds of files whose outlines are read.
pub const COCO: &str = "a COCO file with annotations of many images";
/// See [`COCO`].
pub const LABELME: &str = "a LabelMe file with shapes";
/// See [`COCO`]. It may have boxes, which are no masks.
pub const YOLO: &str = "a YOLO file with boxes or polygons";

/// The kind of a file with annotations that is no image; `None` for all others.
pub fn kind_of(path: &Path) -> Option<&'static str> {
    let mut start = Vec::new();
    files::open(path).ok()?.take(START).read_to_end(&mut start).ok()?;
    if dicom::is_dicom(&start) {
        let is_contours = start.windows(RTSTRUCT.len()).any(|part| part == RTSTRUCT);
        return Some(if is_contours { "a DICOM RTSTRUCT with contours" } else { "a DICOM file" });
    }
    if start.starts_with(b"NRRD0") {
        return Some("an NRRD file");
    }
    let text = String::from_utf8_lossy(&start);
    let has = |words: &[&str]| words.iter().all(|word| text.contains(word));
    let ending = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    match ending.as_str() {
        "json" | "geojson" if has(&["\"shapes\""]) => Some(LABELME),
        "json" if has(&["\"shape_attributes\""]) => Some("a VGG Image Annotator file with regions"),
        "json" if has(&["\"annotations\""]) || has(&["\"categories\"", "\"images\""]) => Some(COCO),
        "json" | "geojson" if has(&["\"geometry\"", "\"coordinates\""]) => Some("a GeoJSON file with outlines"),
        "txt" if is_yolo(&text, start.len() as u64 == START) => Some(YOLO),
        "xml" if has(&["<annotation"]) && (has(&["<object"]) || has(&["bndbox"])) => {
            Some("a Pascal VOC file with boxes")
        }
        "xml" if has(&["<Annotation"]) || has(&["<annotation"]) => Some("an XML file with annotations"),
        _ => {
            let format = FORMATS.iter().find(|format| format.is_mask_volume() && format.has_ending(path))?;
            format.name.split(" (").next()
        }
    }
}

/// Lines of a class number and at least four coordinates from 0 to 1. The last line of the first bytes may be a part of one.
fn is_yolo(text: &str, is_cut: bool) -> bool {
    let text = text.trim_start_matches('\u{feff}');
    let mut lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if is_cut {
        lines.pop();
    }
    let is_row = |line: &&str| {
        let mut words = line.split_whitespace();
        let has_class = words.next().is_some_and(|word| word.parse::<u32>().is_ok());
        let numbers: Vec<Option<f64>> = words.map(|word| word.parse().ok()).collect();
        has_class
            && numbers.len() >= 4
            && numbers.iter().all(|number| number.is_some_and(|value| (0.0..=1.0).contains(&value)))
    };
    !lines.is_empty() && lines.iter().all(is_row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_annotation_programs_are_known_by_their_content() {
        let folder = tempfile::tempdir().expect("a folder");
        let of = |name: &str, content: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).expect("written");
            kind_of(&path).unwrap_or("none")
        };
        let dicom = |uid: &str| [&[0; 128], b"DICM".as_slice(), uid.as_bytes()].concat();
        for (name, content, kind) in [
            ("a.json", &br#"{"version": "5.0", "shapes": [{"points": [[1, 2]]}]}"#[..], "LabelMe"),
            ("b.json", br#"{"images": [], "categories": [], "annotations": []}"#, "COCO"),
            ("c.json", br#"{"a.png": {"regions": [{"shape_attributes": {}}]}}"#, "VGG"),
            ("d.geojson", br#"{"type": "Feature", "geometry": {"coordinates": [[1, 2]]}}"#, "GeoJSON"),
            ("e.txt", b"0 0.5 0.5 0.25 0.125\n3 0.1 0.1 0.2 0.2 0.3 0.3\n", "YOLO"),
            ("f.xml", b"<annotation><object><bndbox/></object></annotation>", "Pascal VOC"),
            ("g.dcm", &dicom("1.2.840.10008.5.1.4.1.1.481.3"), "RTSTRUCT"),
            ("h.dcm", &dicom("1.2.840.10008.5.1.4.1.1.2"), "a DICOM file"),
            ("i.seg.nrrd", b"NRRD0004\n", "NRRD"),
            ("j.nii.gz", b"\x1f\x8b", "NIfTI"),
        ] {
            assert!(of(name, content).contains(kind), "{name}: {}", of(name, content));
        }
        for (name, content) in [
            ("a.txt", &b"notes about the images\n"[..]),
            ("b.txt", b"1 2 3 4 5\n"),
            ("c.json", br#"{"model": "scanner"}"#),
            ("d.xml", b"<report/>"),
            ("Thumbs.db", b"\xd0\xcf\x11\xe0"),
        ] {
            assert_eq!(of(name, content), "none", "{name}");
        }
        assert_eq!(kind_of(&folder.path().join("missing.json")), None);
    }
}
