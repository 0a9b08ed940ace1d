//! Sequences and values whose value representation is unknown (UN).

use super::*;

const ITEM: [u8; 4] = [0xfe, 0xff, 0x00, 0xe0];
const ITEM_END: [u8; 8] = [0xfe, 0xff, 0x0d, 0xe0, 0, 0, 0, 0];
const SEQUENCE_END: [u8; 8] = [0xfe, 0xff, 0xdd, 0xe0, 0, 0, 0, 0];
const WITHOUT: [u8; 4] = [0xff; 4];

fn length(count: usize) -> [u8; 4] {
    u32::try_from(count).expect("short").to_le_bytes()
}

/// An element in Implicit VR Little Endian.
fn implicit(tag: Tag, value: &[u8]) -> Vec<u8> {
    [&tag.group().to_le_bytes(), &tag.element().to_le_bytes(), length(value.len()).as_slice(), value].concat()
}

/// A sequence in Implicit VR Little Endian, with or without lengths.
fn sequence(tag: Tag, item: &[u8], has_length: bool) -> Vec<u8> {
    let whole = items(item, has_length);
    let stated = if has_length { length(whole.len()) } else { WITHOUT };
    [&tag.group().to_le_bytes(), &tag.element().to_le_bytes(), stated.as_slice(), &whole].concat()
}

fn items(item: &[u8], has_length: bool) -> Vec<u8> {
    if has_length {
        return [&ITEM, length(item.len()).as_slice(), item].concat();
    }
    [&ITEM, WITHOUT.as_slice(), item, &ITEM_END, &SEQUENCE_END].concat()
}

/// An element of VR UN in an explicit data set; a length of `None` is an undefined one.
fn unknown(tag: Tag, value: &[u8], stated: Option<usize>) -> Vec<u8> {
    let stated = stated.map_or(WITHOUT, length);
    [&tag.group().to_le_bytes(), tag.element().to_le_bytes().as_slice(), b"UN\0\0", &stated, value].concat()
}

/// Saves a slice with bytes before its pixel data, or before the element with a tag.
fn saved(object: InMemDicomObject, before: Tag, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let mut file = bytes_of(object);
    let tag = [before.group().to_le_bytes(), before.element().to_le_bytes()].concat();
    let at = file.windows(4).rposition(|four| four == tag).expect("the element");
    file.splice(at..at, bytes.iter().copied());
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.dcm");
    fs::write(&path, file).expect("written");
    (folder, path)
}

const PRIVATE: Tag = Tag(0x0029, 0x1110);
const INNER: Tag = Tag(0x0029, 0x1120);

#[test]
fn private_sequences_of_unknown_representation_are_skipped() {
    let wanted = volume(vec![slice(0)]);
    let text = implicit(Tag(0x0008, 0x0104), b"a text");
    let explicit = b"\x08\0\x04\x01LO\x06\0a text".to_vec();
    let deep = |has_length| (0..6).fold(text.clone(), |inner, _| sequence(INNER, &inner, has_length));
    for (name, value) in [
        ("an item without a length", items(&text, false)),
        ("an item with a length", [items(&text, true), SEQUENCE_END.to_vec()].concat()),
        ("two items", [items(&text, true), items(&text, true), SEQUENCE_END.to_vec()].concat()),
        ("no item", SEQUENCE_END.to_vec()),
        ("an empty item", items(&[], false)),
        ("nested ones", items(&deep(false), false)),
        ("nested ones with lengths", items(&deep(true), false)),
        ("explicit items", items(&explicit, false)),
        ("explicit items with unknown ones", items(&unknown(INNER, &items(&text, false), None), false)),
    ] {
        let (_folder, path) = saved(slice(0), tags::PIXEL_DATA, &unknown(PRIVATE, &value, None));
        let found = open(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((&found.voxels, &found.grid, &found.notes), (&wanted.voxels, &wanted.grid, &wanted.notes), "{name}");
        // before other attributes, and several of them
        let two = [unknown(PRIVATE, &value, None), unknown(INNER, &value, None)].concat();
        let (_folder, path) = saved(slice(0), tags::PIXEL_DATA, &two);
        assert_eq!(open(&path).unwrap_or_else(|error| panic!("{name}: {error}")).voxels, wanted.voxels, "{name}");
        // its end is missing
        let cut = &value[..value.len() - SEQUENCE_END.len()];
        let (_folder, path) = saved(slice(0), tags::PIXEL_DATA, &unknown(PRIVATE, cut, None));
        assert!(refused(&path).contains("damaged"), "{name}");
    }
}

#[test]
fn attributes_of_the_standard_are_read_in_spite_of_an_unknown_representation() {
    let wanted = volume(vec![slice(3)]);
    let measures = implicit(tags::PIXEL_SPACING, b"0.5\\0.5 ");
    let position = implicit(tags::IMAGE_POSITION_PATIENT, b"0\\0\\3 ");
    let orientation = implicit(tags::IMAGE_ORIENTATION_PATIENT, b"1\\0\\0\\0\\1\\0 ");
    for has_length in [false, true] {
        let groups = [
            sequence(tags::PLANE_POSITION_SEQUENCE, &position, has_length),
            sequence(tags::PLANE_ORIENTATION_SEQUENCE, &orientation, has_length),
            sequence(tags::PIXEL_MEASURES_SEQUENCE, &measures, has_length),
        ];
        let value = items(&groups.concat(), has_length);
        let stated = has_length.then_some(value.len());
        let bytes = unknown(tags::PER_FRAME_FUNCTIONAL_GROUPS_SEQUENCE, &value, stated);
        let mut object = slice(3);
        for tag in [tags::PIXEL_SPACING, tags::IMAGE_POSITION_PATIENT, tags::IMAGE_ORIENTATION_PATIENT] {
            object.remove_element(tag);
        }
        let (_folder, path) = saved(object, tags::PIXEL_DATA, &bytes);
        let found = open(&path).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((&found.grid, &found.notes), (&wanted.grid, &wanted.notes), "lengths: {has_length}");
    }
    let mut object = slice(3);
    object.remove_element(tags::BITS_STORED);
    let (_folder, path) = saved(object, tags::HIGH_BIT, &unknown(tags::BITS_STORED, &[16, 0], Some(2)));
    assert_eq!(open(&path).unwrap_or_else(|error| panic!("{error}")).voxels, wanted.voxels);
}

#[test]
fn many_hostile_sequences_are_refused_quickly() {
    let odd = unknown(PRIVATE, &[1; 16], None);
    let (_folder, path) = saved(slice(0), tags::PIXEL_DATA, &odd.repeat(100_000));
    assert!(refused(&path).contains("damaged"));
    let nested = (0..100_000).fold(Vec::new(), |mut bytes, _| {
        bytes.extend(unknown(PRIVATE, &[&ITEM, WITHOUT.as_slice()].concat(), None));
        bytes
    });
    let (_folder, path) = saved(slice(0), tags::PIXEL_DATA, &nested);
    let found = refused(&path);
    assert!(found.contains("nested too deeply") || found.contains("damaged"), "{found}");
}
