//! Colour spaces of headers and of compressed images.

use dicom_core::value::Value;
use dicom_object::open_file;

use super::*;
use crate::Voxels;

const JFIF: &[u8] = b"\xff\xe0\0\x10JFIF\0\x01\x01\0\0\x01\0\x01\0\0";

fn adobe(transform: u8) -> Vec<u8> {
    [b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0".as_slice(), &[transform]].concat()
}

fn colours(path: &Path) -> Vec<[u8; 3]> {
    let volume = open(path).unwrap_or_else(|error| panic!("{error}"));
    let Voxels::Rgb(colours) = volume.voxels else { panic!("no colours") };
    colours
}

/// Saves a fixture after its JPEG stream and its header were changed.
fn saved(name: &str, photometric: &str, change: impl Fn(&[u8]) -> Vec<u8>) -> (tempfile::TempDir, PathBuf) {
    let mut object = open_file(fixture(name)).expect("a fixture");
    set(&mut object, tags::PHOTOMETRIC_INTERPRETATION, photometric);
    object.update_value(tags::PIXEL_DATA, |value| {
        let Value::PixelSequence(sequence) = value else { panic!("not compressed") };
        let mut jpeg = change(&sequence.fragments()[0]);
        jpeg.resize(jpeg.len().next_multiple_of(2), 0);
        sequence.fragments_mut()[0] = jpeg;
    });
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.dcm");
    object.write_to_file(&path).expect("written");
    (folder, path)
}

/// A JPEG without the JFIF segment that libjpeg writes, with other segments.
fn with_segments(jpeg: &[u8], segments: &[u8]) -> Vec<u8> {
    let rest = if jpeg[2..4] == [0xff, 0xe0] { &jpeg[20..] } else { &jpeg[2..] };
    [&jpeg[..2], segments, rest].concat()
}

#[test]
fn markers_of_jpeg_say_the_colours_and_the_header_without_them() {
    let converted = colours(&fixture("jpeg_colour.dcm"));
    let stored = {
        let (_folder, path) = saved("jpeg_colour.dcm", "RGB", |jpeg| with_segments(jpeg, &[]));
        colours(&path)
    };
    assert_ne!(converted, stored);
    let both = [JFIF, &adobe(0)].concat();
    for (segments, photometric, is_converted) in [
        (JFIF, "RGB", true),
        (JFIF, "YBR_FULL", true),
        (JFIF, "YBR_FULL_422", true),
        (&adobe(1), "RGB", true),
        (&adobe(1), "YBR_FULL_422", true),
        (&adobe(0), "RGB", false),
        (&adobe(0), "YBR_FULL", false),
        (&both, "RGB", true),
        (&[], "RGB", false),
        (&[], "YBR_FULL", true),
        (&[], "YBR_FULL_422", true),
    ] {
        let (_folder, path) = saved("jpeg_colour.dcm", photometric, |jpeg| with_segments(jpeg, segments));
        let wanted = if is_converted { &converted } else { &stored };
        assert!(&colours(&path) == wanted, "{photometric}, {segments:?}");
    }
}

#[test]
fn colour_spaces_that_cannot_be_read_are_named() {
    for name in ["jpeg_colour.dcm", "rgb.dcm", "rgb_planar.dcm", "ybr_rle.dcm"] {
        let file = |photometric: &str| {
            let mut object = open_file(fixture(name)).expect("a fixture");
            set(&mut object, tags::PHOTOMETRIC_INTERPRETATION, photometric);
            let folder = tempfile::tempdir().expect("a folder");
            object.write_to_file(folder.path().join("a.dcm")).expect("written");
            refused(&folder.path().join("a.dcm"))
        };
        for code in ["YBR_PARTIAL_422", "YBR_PARTIAL_420", "HSV", "ARGB", "CMYK", "YBR_ICT", "YBR_RCT"] {
            let found = file(code);
            assert!(found.contains(&format!("PhotometricInterpretation is {code}")), "{name}: {found}");
        }
        let found = file("SMITH^JOHN");
        assert!(found.contains("none of the standard") && !found.contains("SMITH"), "{name}: {found}");
    }
}

/// One frame of 4x2 pixels in pairs `Y1 Y2 B R`.
fn in_pairs(width: u16, bytes: &[u8], planar: u16) -> InMemDicomObject {
    let mut object = slice_of("US", 0);
    set(&mut object, tags::PHOTOMETRIC_INTERPRETATION, "YBR_FULL_422");
    for (tag, value) in [
        (tags::SAMPLES_PER_PIXEL, 3),
        (tags::COLUMNS, width),
        (tags::ROWS, 2),
        (tags::BITS_ALLOCATED, 8),
        (tags::BITS_STORED, 8),
        (tags::HIGH_BIT, 7),
        (tags::PLANAR_CONFIGURATION, planar),
    ] {
        set_u16(&mut object, tag, value);
    }
    object.put(DataElement::new(tags::PIXEL_DATA, VR::OB, PrimitiveValue::from(bytes)));
    object
}

#[test]
fn pixels_in_pairs_are_read_or_refused_if_they_are_none() {
    let pairs = [10, 20, 128, 128, 30, 40, 128, 128, 50, 60, 128, 128, 70, 80, 128, 128];
    for planar in [0, 1] {
        let folder = folder(vec![in_pairs(4, &pairs, planar)]);
        let wanted: Vec<[u8; 3]> = (1..9).map(|value| [10 * value; 3]).collect();
        assert_eq!(colours(&folder.path().join("0.dcm")), wanted, "planar configuration {planar}");
    }
    for (width, bytes) in [(4, &[9; 24][..]), (3, &[9; 18]), (3, &[9; 12])] {
        let folder = folder(vec![in_pairs(width, bytes, 0)]);
        let found = refused(&folder.path().join("0.dcm"));
        assert!(found.contains("YBR_FULL_422"), "{width}, {}: {found}", bytes.len());
    }
}
