//! Files without file meta, with a wrong transfer syntax, and with damaged pixels or numbers.

use super::*;

/// File and start of its data set.
fn parts(name: &str) -> (Vec<u8>, usize) {
    let bytes = fs::read(fixture(name)).expect("a fixture");
    let length = u32::from_le_bytes(bytes[140..144].try_into().expect("the length of the file meta"));
    (bytes, 144 + length as usize)
}

fn saved(bytes: &[u8], name: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    fs::write(&path, bytes).expect("written");
    (folder, path)
}

const MISSING: &str = "the DICOM file meta is missing, and the encoding was found";
const OTHER: &str = "the file meta says another encoding";

#[test]
fn files_without_file_meta_are_read() {
    for name in ["explicit_le.dcm", "implicit_le.dcm", "explicit_be.dcm"] {
        let wanted = open(&fixture(name)).expect("a fixture");
        let (bytes, dataset) = parts(name);
        let bare = bytes[dataset..].to_vec();
        let magic_only = [&bytes[..132], &bytes[dataset..]].concat();
        let meta_only = bytes[132..].to_vec();
        for (bytes, note) in [(bare, true), (magic_only, true), (meta_only, false)] {
            for file in ["a.dcm", "IM0001"] {
                let (folder, path) = saved(&bytes, file);
                assert!(crate::is_volume(&path).expect("readable"));
                for path in [path.as_path(), folder.path()] {
                    let found = open(path).unwrap_or_else(|error| panic!("{name}, {path:?}: {error}"));
                    assert_eq!((&found.voxels, &found.grid), (&wanted.voxels, &wanted.grid), "{name}");
                    assert_eq!(has_note(&found, MISSING), note, "{name}: {:?}", found.notes);
                }
            }
        }
    }
    let (bytes, _) = parts("deflated.dcm");
    let (_folder, path) = saved(&bytes[132..], "a.dcm");
    assert_eq!(open(&path).expect("deflated").voxels, open(&fixture("deflated.dcm")).expect("a fixture").voxels);
}

/// The file meta of one file and the data set of another one.
fn mixed(meta: &str, dataset: &str) -> Vec<u8> {
    let ((meta, end), (bytes, start)) = (parts(meta), parts(dataset));
    [&meta[..end], &bytes[start..]].concat()
}

#[test]
fn a_wrong_transfer_syntax_is_noticed() {
    let native = ["explicit_le.dcm", "implicit_le.dcm", "explicit_be.dcm"];
    for dataset in native {
        for meta in native.into_iter().chain(["deflated.dcm"]).filter(|meta| *meta != dataset) {
            let (_folder, path) = saved(&mixed(meta, dataset), "a.dcm");
            let found = open(&path).unwrap_or_else(|error| panic!("{dataset} as {meta}: {error}"));
            assert_eq!(found.voxels, open(&fixture(dataset)).expect("a fixture").voxels, "{dataset} as {meta}");
            assert!(has_note(&found, OTHER), "{:?}", found.notes);
        }
    }
    for (meta, dataset, part) in [
        ("rle.dcm", "implicit_le.dcm", "not the encoding that its transfer syntax says"),
        ("jpeg_baseline.dcm", "explicit_be.dcm", "not the encoding that its transfer syntax says"),
        ("rle.dcm", "explicit_le.dcm", "not compressed as its transfer syntax says"),
        ("explicit_le.dcm", "rle.dcm", "compressed, but no transfer syntax says how"),
    ] {
        let (_folder, path) = saved(&mixed(meta, dataset), "a.dcm");
        let found = refused(&path);
        assert!(found.contains(part) && found.contains("a.dcm"), "{dataset} as {meta}: {found}");
    }
    let (bytes, dataset) = parts("rle.dcm");
    let (_folder, path) = saved(&bytes[dataset..], "a.dcm");
    assert!(refused(&path).contains("compressed, but no transfer syntax says how"));
}

#[test]
fn files_that_are_no_dicom_by_their_content_are_named() {
    let mut cut = bytes_of(slice(1));
    cut[..200].fill(0);
    for (name, bytes) in [("1.dcm", cut.as_slice()), ("1.DCM", b""), ("1.ima", b"a text")] {
        let folder = folder(vec![slice(0), slice(2)]);
        fs::write(folder.path().join(name), bytes).expect("written");
        let found = refused(folder.path());
        assert!(found.contains(name) && found.contains("does not begin like one"), "{found}");
        fs::rename(folder.path().join(name), folder.path().join(format!("._{name}"))).expect("renamed");
        assert!(has_note(&open(folder.path()).expect("a volume"), "1 files that are not images"));
    }
    let folder = folder(vec![slice(0), slice(1)]);
    let path = folder.path().join("1.dcm");
    let bytes = fs::read(&path).expect("a file");
    fs::write(&path, &bytes[..bytes.len() - 5]).expect("written");
    assert!(refused(folder.path()).contains("1.dcm: it is truncated"));
}

#[test]
fn attributes_that_are_no_numbers_are_named_with_their_value() {
    for (tag, value, part) in [
        (tags::PIXEL_SPACING, "0,8\\0,7", "PixelSpacing is `0,8\\0,7`"),
        (tags::PIXEL_SPACING, "-0.5\\0.5", "PixelSpacing is `-0.5\\0.5`"),
        (tags::PIXEL_SPACING, "0\\0", "larger than 0"),
        (tags::PIXEL_SPACING, "0.5", "PixelSpacing has 1 numbers, and must have 2"),
        (tags::IMAGE_POSITION_PATIENT, "0\\0\\1,5", "ImagePositionPatient is `0\\0\\1,5`"),
        (tags::IMAGE_POSITION_PATIENT, "0\\0\\NaN", "ImagePositionPatient is `0\\0\\NaN`"),
        (tags::IMAGE_ORIENTATION_PATIENT, "1\\0\\0\\0\\x\\0", "ImageOrientationPatient is `1\\0\\0\\0\\x\\0`"),
        (tags::IMAGE_ORIENTATION_PATIENT, "1\\0\\0\\1\\0\\0", "two perpendicular directions"),
        (tags::IMAGE_ORIENTATION_PATIENT, "1\\0\\0\\0\\0.5\\0", "two perpendicular directions"),
        (tags::RESCALE_SLOPE, "1,0", "RescaleSlope is `1,0`"),
        (tags::RESCALE_INTERCEPT, "-1024 HU", "RescaleIntercept is a text"),
    ] {
        // in one slice of a series, and in a single image
        let wrong = || {
            changed(|index, object| {
                if index == 1 {
                    set(object, tag, value);
                }
            })
        };
        for path in ["", "1.dcm"] {
            let folder = wrong();
            let found = refused(&folder.path().join(path));
            assert!(found.contains("1.dcm: ") && found.contains(part), "{value}: {found}");
        }
    }
    for (tag, name) in [(tags::WINDOW_WIDTH, "WindowWidth"), (tags::WINDOW_CENTER, "WindowCenter")] {
        let mut object = slice_of("DX", 0);
        set(&mut object, tags::WINDOW_WIDTH, "40");
        set(&mut object, tags::WINDOW_CENTER, "20");
        set(&mut object, tag, "40,5");
        let volume = volume(vec![object]);
        let error = crate::Window::Auto.levels(&volume).expect_err("no number").to_string();
        assert!(error.contains("0.dcm") && error.contains(&format!("{name} is `40,5`")), "{error}");
    }
}

#[test]
fn what_a_slice_lacks_is_named() {
    for (tag, name) in [
        (tags::PIXEL_SPACING, "PixelSpacing"),
        (tags::IMAGE_POSITION_PATIENT, "ImagePositionPatient"),
        (tags::IMAGE_ORIENTATION_PATIENT, "ImageOrientationPatient"),
    ] {
        for missing in [0, 2] {
            let folder = changed(|index, object| {
                if index == missing {
                    object.remove_element(tag);
                }
            });
            let found = refused(folder.path());
            assert!(
                found.contains(&format!("3 images are not slices of a volume: {missing}.dcm has no {name}")),
                "{found}"
            );
        }
    }
    // the thickness of a single slice
    for (thickness, part) in [(None, "does not say the thickness"), (Some("1,5"), "SliceThickness is `1,5`")] {
        let mut object = slice(0);
        object.remove_element(tags::SLICE_THICKNESS);
        if let Some(text) = thickness {
            set(&mut object, tags::SLICE_THICKNESS, text);
        }
        let volume = volume(vec![object]);
        assert!(has_note(&volume, part) && has_note(&volume, "1 mm is assumed"), "{:?}", volume.notes);
    }
}

#[test]
fn codes_of_a_header_are_cleaned() {
    for text in ["CT\u{1b}[31m", "Doe^John", "A CODE THAT IS MUCH TOO LONG", "MR\nX"] {
        let mut object = slice(0);
        set(&mut object, tags::MODALITY, text);
        assert_eq!(volume(vec![object]).modality.code(), "unknown", "{text}");
    }
}

/// The data of a scan end early, and the end marker follows.
#[test]
fn jpeg_with_missing_data_is_refused() {
    let files = ["jpeg_baseline.dcm", "jpeg_colour.dcm", "jpeg_rgb.dcm", "jpeg_lossless.dcm"].map(|name| (name, None));
    // the other transfer syntaxes of lossless JPEG data
    let others = ["57", "51"].map(|last| ("jpeg_lossless.dcm", Some(last)));
    for (name, syntax) in files.into_iter().chain(others) {
        let mut bytes = fs::read(fixture(name)).expect("a fixture");
        if let Some(last) = syntax {
            let uid = b"1.2.840.10008.1.2.4.70";
            let at = bytes.windows(uid.len()).position(|found| found == uid).expect("the transfer syntax") + uid.len();
            bytes[at - 2..at].copy_from_slice(last.as_bytes());
        }
        let scan = bytes.windows(2).rposition(|pair| pair == [0xff, 0xda]).expect("a scan");
        let end = bytes.windows(2).rposition(|pair| pair == [0xff, 0xd9]).expect("an end");
        for (share, is_whole) in [(2, false), (50, false), (80, false), (90, false), (100, true)] {
            // zeros after the end marker keep the length of the fragment
            let kept = scan + 14 + (end - scan - 14) * share / 100;
            let mut cut = bytes.clone();
            cut[kept..end + 2].fill(0);
            cut[kept..kept + 2].copy_from_slice(&[0xff, 0xd9]);
            let (_folder, path) = saved(&cut, "a.dcm");
            assert_eq!(open(&path).is_ok(), is_whole, "{name} {syntax:?}, {share} %");
            if !is_whole {
                let found = refused(&path);
                assert!(found.contains("a.dcm") && found.contains("pixels of frame 1 cannot be decoded"), "{found}");
            }
        }
    }
}

/// A decoder would take pairs of bytes for one number, and leave half of the image empty.
#[test]
fn jpeg_samples_of_another_size_than_the_header_says_are_refused() {
    let mut bytes = fs::read(fixture("jpeg_baseline.dcm")).expect("a fixture");
    let allocated = b"\x28\0\0\x01US\x02\0";
    let at = bytes.windows(allocated.len()).position(|found| found == allocated).expect("BitsAllocated");
    bytes[at + allocated.len()] = 16;
    let (_folder, path) = saved(&bytes, "a.dcm");
    let found = refused(&path);
    assert!(found.contains("the JPEG samples have 8 bits, and BitsAllocated is 16"), "{found}");
}

#[test]
fn a_series_may_have_files_with_and_without_file_meta() {
    let folder = folder((0..3).map(slice).collect());
    let wanted = open(folder.path()).expect("a volume");
    assert_eq!(wanted.notes, [""; 0]);
    let path = folder.path().join("1.dcm");
    let bytes = fs::read(&path).expect("a file");
    let length = u32::from_le_bytes(bytes[140..144].try_into().expect("the length of the file meta"));
    fs::write(&path, &bytes[144 + length as usize..]).expect("written");
    let found = open(folder.path()).expect("a volume");
    assert_eq!((&found.voxels, &found.grid), (&wanted.voxels, &wanted.grid));
    assert!(has_note(&found, &format!("1 of 3 files: {MISSING}")), "{:?}", found.notes);
}

#[test]
fn numbers_in_every_form_of_dicom_are_read() {
    for spacing in ["5E-1\\5e-1", " 0.50 \\ 0.5", "+0.5\\.5"] {
        let folder = changed(|_, object| set(object, tags::PIXEL_SPACING, spacing));
        let volume = open(folder.path()).unwrap_or_else(|error| panic!("{spacing}: {error}"));
        assert_eq!(volume.grid.spacing(), [0.5, 0.5, 1.0], "{spacing}");
    }
}

#[test]
fn file_meta_without_a_right_length_are_read() {
    let note = "the DICOM file meta has no length (0002,0000), or a wrong one";
    for name in
        ["explicit_le.dcm", "implicit_le.dcm", "explicit_be.dcm", "deflated.dcm", "rle.dcm", "jpeg_lossless.dcm"]
    {
        let bytes = fs::read(fixture(name)).expect("a fixture");
        let wanted = open(&fixture(name)).expect("a fixture");
        assert!(!has_note(&wanted, note), "{name}");
        // the element of 12 bytes is the first one
        let missing = [&bytes[..132], &bytes[144..]].concat();
        let mut wrong = bytes.clone();
        wrong[140..144].copy_from_slice(&7_u32.to_le_bytes());
        for bytes in [missing, wrong] {
            let (_folder, path) = saved(&bytes, "a.dcm");
            let found = open(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!((&found.voxels, &found.grid), (&wanted.voxels, &wanted.grid), "{name}");
            assert!(has_note(&found, note), "{name}: {:?}", found.notes);
        }
    }
}

#[test]
fn skipped_files_are_named() {
    let folder = folder((0..3).map(slice).collect());
    let skipped = |names: &[&str]| {
        for name in names {
            fs::write(folder.path().join(name), "no image").expect("written");
        }
        open(folder.path()).expect("a volume").notes.join("; ")
    };
    let what = "files that are not images of this kind were skipped";
    assert_eq!(skipped(&["IM0003"]), format!("1 {what}: IM0003"));
    assert_eq!(skipped(&["IM0004", "README"]), format!("3 {what}: IM0003, IM0004, README"));
    assert_eq!(skipped(&["a", "b"]), format!("5 {what}: IM0003, IM0004, README and 2 more"));
}

#[test]
fn pixels_that_are_too_large_for_a_patient_have_a_note() {
    let folder = changed(|_, object| set(object, tags::PIXEL_SPACING, "700\\700"));
    let notes = open(folder.path()).expect("a volume").notes;
    let note = "voxels of 700.0 x 700.0 x 1.0 mm are too large for an image of a patient: check the voxel size of the header \
                and its unit";
    assert_eq!(notes, [note]);
}
