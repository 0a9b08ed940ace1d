//! Files of a series that end too early, and files that rightly have no image.

use super::*;
use dicom_dictionary_std::uids::{IMPLICIT_VR_LITTLE_ENDIAN, MR_IMAGE_STORAGE};

/// Bytes of a file before its first element.
const PREAMBLE: usize = 132;

/// A folder with these files.
fn files(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).expect("written");
    }
    folder
}

/// A file of Implicit VR Little Endian.
fn implicit(object: InMemDicomObject) -> Vec<u8> {
    let mut bytes = Vec::new();
    let meta = FileMetaTableBuilder::new().transfer_syntax(IMPLICIT_VR_LITTLE_ENDIAN);
    object.with_meta(meta).expect("meta").write_all(&mut bytes).expect("written");
    bytes
}

/// An element of a large text before the position, as private data are.
fn with_comment(mut object: InMemDicomObject) -> InMemDicomObject {
    set(&mut object, tags::IMAGE_COMMENTS, &"a comment ".repeat(20));
    object
}

#[test]
fn a_file_of_a_series_that_is_cut_anywhere_is_named() {
    let mr = |index| {
        let mut object = with_comment(slice_of("MR", index));
        set(&mut object, tags::SOP_CLASS_UID, MR_IMAGE_STORAGE);
        object
    };
    let bare = |object: InMemDicomObject| {
        let mut bytes = implicit(object);
        let length = u32::from_le_bytes(bytes[140..144].try_into().expect("four bytes"));
        bytes.drain(..PREAMBLE + 12 + length as usize);
        bytes
    };
    // explicit, implicit, and without preamble and file meta
    let series: [[Vec<u8>; 3]; 3] = [
        [0, 1, 2].map(|index| bytes_of(slice(index))),
        [0, 1, 2].map(|index| implicit(mr(index))),
        [0, 1, 2].map(|index| bare(slice(index))),
    ];
    for (kind, series) in series.iter().enumerate() {
        let least = if kind < 2 { PREAMBLE } else { 1 };
        for place in 0..3 {
            for end in least..series[place].len() {
                let mut parts: Vec<(&str, &[u8])> =
                    ["0.dcm", "1.dcm", "2.dcm"].into_iter().zip(series.iter().map(Vec::as_slice)).collect();
                parts[place].1 = &parts[place].1[..end];
                let folder = files(&parts);
                let text = match open(folder.path()) {
                    Ok(volume) => panic!("kind {kind}, {end} bytes of {place}.dcm: {:?}", volume.notes),
                    Err(error) => error.to_string(),
                };
                assert!(text.contains(&format!("{place}.dcm: ")), "kind {kind}, {end} bytes: {text}");
                let is_short = end < PREAMBLE && text.contains("does not begin like one");
                let is_named = text.contains("truncated or damaged") || is_short;
                assert!(is_named, "kind {kind}, {end} bytes: {text}");
            }
        }
    }
}

#[test]
fn a_single_file_that_is_cut_in_its_header_is_named() {
    let bytes = bytes_of(slice(0));
    for end in (PREAMBLE..bytes.len()).step_by(7) {
        let folder = files(&[("scan", &bytes[..end])]);
        let text = refused(&folder.path().join("scan"));
        assert!(text.contains("truncated or damaged") && text.contains("copy the file again"), "{end}: {text}");
    }
}

#[test]
fn files_without_an_ending_that_are_named_like_the_images_are_not_skipped() {
    let images: Vec<Vec<u8>> = (0..3).map(|index| bytes_of(slice(index))).collect();
    for (begin, is_refused) in [(&[][..], true), (&[0; 500], true), (&images[2][..100], true), (b"notes", true)] {
        for names in [["IM0001", "IM0002", "IM0003"], ["1.2.5.1", "1.2.5.2", "1.2.5.11"], ["1", "2", "3"]] {
            let folder = files(&[(names[0], &images[0]), (names[1], &images[1]), (names[2], begin)]);
            let text = refused(folder.path());
            assert!(is_refused && text.contains(names[2]) && text.contains("does not begin like one"), "{text}");
        }
    }
    for name in ["README", "IM0003.txt", ".IM0003", "._IM0003"] {
        let folder = files(&[("IM0001", &images[0]), ("IM0002", &images[1]), (name, b"notes")]);
        assert!(has_note(&open(folder.path()).expect("a volume"), &format!("were skipped: {name}")), "{name}");
    }
}

#[test]
fn whole_objects_without_an_image_are_skipped_with_a_note() {
    let other = |class: &str, modality: &str| {
        let mut object = item(&[(tags::SOP_CLASS_UID, class), (tags::SERIES_INSTANCE_UID, "1.2.9")]);
        set(&mut object, tags::SOP_INSTANCE_UID, "1.2.9.1");
        if !modality.is_empty() {
            set(&mut object, tags::MODALITY, modality);
        }
        bytes_of(object)
    };
    let padded = [other(uids::BASIC_TEXT_SR_STORAGE, "SR"), vec![0; 5]].concat();
    let mut capture = slice(7);
    set(&mut capture, tags::SOP_CLASS_UID, uids::SECONDARY_CAPTURE_IMAGE_STORAGE);
    set(&mut capture, tags::MODALITY, "SR");
    let mut directory = InMemDicomObject::new_empty();
    set(&mut directory, tags::FILE_SET_ID, "DISK");
    let meta = FileMetaTableBuilder::new()
        .transfer_syntax(uids::EXPLICIT_VR_LITTLE_ENDIAN)
        .media_storage_sop_class_uid(uids::MEDIA_STORAGE_DIRECTORY_STORAGE)
        .media_storage_sop_instance_uid("1.2.9.2");
    let mut of_directory = Vec::new();
    directory.with_meta(meta).expect("meta").write_all(&mut of_directory).expect("written");
    for (name, bytes) in [
        ("report", other(uids::BASIC_TEXT_SR_STORAGE, "SR")),
        ("padded", padded),
        ("state", other(uids::GRAYSCALE_SOFTCOPY_PRESENTATION_STATE_STORAGE, "PR")),
        ("key", other(uids::KEY_OBJECT_SELECTION_DOCUMENT_STORAGE, "KO")),
        ("registration", other(uids::SPATIAL_REGISTRATION_STORAGE, "REG")),
        ("raw", other(uids::RAW_DATA_STORAGE, "MR")),
        ("private", other("1.3.12.2.1107.5.9.1", "CT")),
        ("lost class", other("", "SR")),
        ("capture", bytes_of(capture)),
        ("DICOMDIR", of_directory),
    ] {
        let images = [bytes_of(slice(0)), bytes_of(slice(1))];
        let folder = files(&[("0.dcm", &images[0]), ("1.dcm", &images[1]), (name, &bytes)]);
        let volume = open(folder.path()).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(has_note(&volume, &format!("1 files that are not images of this kind were skipped: {name}")), "{name}");
    }
}

#[test]
fn a_cut_image_of_a_private_class_is_found_by_its_siblings() {
    let private = |index| {
        let mut object = slice(index);
        set(&mut object, tags::SOP_CLASS_UID, "1.3.46.670589.11.0.0.12.1");
        bytes_of(object)
    };
    let (first, second, third) = (private(0), private(1), private(2));
    for end in (PREAMBLE..third.len()).step_by(3) {
        let folder = files(&[("0.dcm", &first), ("1.dcm", &second), ("2.dcm", &third[..end])]);
        let text = refused(folder.path());
        assert!(text.contains("2.dcm: ") && text.contains("truncated or damaged"), "{end}: {text}");
    }
}
