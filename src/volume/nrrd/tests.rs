use std::fs;
use std::path::PathBuf;

use crate::fixture::checkout;
use crate::{Grid, SegmentMask, Volume, labels, open, write};

fn fixture(name: &str) -> PathBuf {
    checkout().join("tests/fixtures/volumes/itk").join(name)
}

/// A header of 3x2x2 bytes without `data file`, and the bytes.
const HEADER: &str = "NRRD0004\ntype: uchar\ndimension: 3\nsizes: 3 2 2\nspace: LPS\nspace origin: (0,0,0)\n\
                      space directions: (1,0,0) (0,1,0) (0,0,2)\n";
const VOXELS: &[u8; 12] = b"\0\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b";

/// The message and the hint of a file with this header and these bytes.
fn refused(folder: &std::path::Path, header: &str, voxels: &[u8]) -> String {
    let path = folder.join("image.nrrd");
    fs::write(&path, [header.as_bytes(), voxels].concat()).expect("written");
    let error = open(&path).expect_err(header);
    assert!(error.to_string().contains("image.nrrd"), "{error}");
    format!("{error}\n{}", error.hint())
}

#[test]
fn headers_that_cannot_be_used_are_errors() {
    let folder = tempfile::tempdir().expect("a folder");
    let raw = format!("{HEADER}encoding: raw\n\n");
    for (from, to, part) in [
        ("NRRD0004", "NRRD0009", "no first line"),
        ("raw", "bzip2", "the encoding `bzip2`; `raw`, `gzip` and `ascii` can be read"),
        ("raw", "hex", "the encoding `hex`"),
        ("encoding: raw\n", "", "no field `encoding`"),
        ("uchar", "block", "the type `block`"),
        ("uchar", "short", "`endian: little` or `endian: big`"),
        ("LPS", "scanner-xyz", "the space `scanner-xyz`, which is not one of the patient"),
        ("LPS", "3D-right-handed", "the space `3d-right-handed`"),
        ("sizes: 3 2 2", "sizes: 3 2", "2 sizes and the dimension [3]"),
        ("sizes: 3 2 2", "sizes: 3 -2 2", "a wrong number in the field `sizes`: `-2`"),
        ("sizes: 3 2 2", "sizes: 3 0 2", "is empty"),
        ("sizes: 3 2 2", "sizes: 99999 99999 99999", "more than 1073741824"),
        ("sizes: 3 2 2", "sizes: 3 2 3", "truncated: the header promises 3x2x3 voxels"),
        ("(0,1,0)", "(1,0,0)", "singular"),
        ("(0,1,0)", "(nan,1,0)", "singular or not finite"),
        ("(0,1,0)", "(0,1,0", "a wrong number in the field `space directions`"),
        ("(0,1,0) ", "", "one kind or direction for each of 3 axes"),
        ("space origin: (0,0,0)", "space units: \"mm\" \"mm\" \"parsec\"", "the units mm, mm, parsec"),
        ("space origin: (0,0,0)", "type: uchar", "the field `type` twice"),
        ("space origin: (0,0,0)", "SECRET", "neither a field nor a key"),
        ("dimension: 3\nsizes: 3 2 2", "dimension: 1\nsizes: 12", "one kind or direction"),
    ] {
        assert!(raw.contains(from), "{from}");
        let found = refused(folder.path(), &raw.replace(from, to), VOXELS);
        assert!(found.contains(part), "{found}");
    }
    let plain = "NRRD0004\ntype: uchar\nencoding: raw\ndimension: 4\nsizes: 3 2 2 1\n\n";
    assert!(refused(folder.path(), plain, VOXELS).contains("does not say which of them"));
    assert!(
        refused(folder.path(), "NRRD0001\ntype: uchar\nencoding: raw\ndimension: 1\nsizes: 12\n\n", VOXELS)
            .contains("1 of its 1 axes")
    );
    let vector = plain.replace("2 1\n", "2 1\nkinds: 3-vector domain domain domain\n");
    let found = refused(folder.path(), &vector, VOXELS);
    assert!(
        found.contains("the kind `3-vector`: 3 values at each of 2x2x1 voxels") && found.contains("image.nrrd#2"),
        "{found}"
    );
    let text = format!("{HEADER}encoding: ascii\n\n");
    assert!(refused(folder.path(), &text, b"1 2 3 x").contains("`x` is not a number"));
    assert!(refused(folder.path(), &text, b"1 2 3").contains("truncated"));
}

#[test]
fn headers_point_to_files_of_their_folder_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let inside = folder.path().join("inside");
    fs::create_dir_all(inside.join("sub")).expect("created");
    for name in ["outside.raw", "inside/good.raw", "inside/sub/good.raw"] {
        fs::write(folder.path().join(name), VOXELS).expect("written");
    }
    std::os::unix::fs::symlink("../outside.raw", inside.join("link.raw")).expect("a link");
    std::os::unix::fs::symlink("good.raw", inside.join("near.raw")).expect("a link");
    let header = inside.join("image.nhdr");
    let read = |file: &str| {
        fs::write(&header, format!("{HEADER}encoding: raw\ndata file: {file}\n")).expect("written");
        open(&header)
    };
    for file in ["good.raw", "./good.raw", "sub/good.raw", "near.raw"] {
        assert_eq!(read(file).unwrap_or_else(|error| panic!("{file}: {error}")).voxels.len(), 12);
    }
    let absolute = folder.path().join("outside.raw");
    for (file, part) in [
        ("../outside.raw", "not in the folder of the header"),
        ("sub/../../outside.raw", "not in the folder of the header"),
        (absolute.to_str().expect("text"), "not in the folder of the header"),
        ("..\\outside.raw", "not in the folder of the header"),
        ("", "not in the folder of the header"),
        ("LIST\n../outside.raw", "not in the folder of the header"),
        ("../outside%d.raw 1 1 1", "not in the folder of the header"),
        ("link.raw", "a link to a file outside"),
        ("none.raw", "which is missing"),
        ("sub", "cannot read"),
        ("LIST", "names 0 files"),
        ("LIST\ngood.raw\ngood.raw\ngood.raw\ngood.raw\ngood.raw", "names 5 files for 12 numbers"),
        ("x%d.raw 1 999999999 1", "no files, or far too many"),
        ("x%d.raw 1 2 0", "no files, or far too many"),
        ("x%s.raw 1 2 1", "no `%d`"),
        ("x%d.raw 1 2", "not followed by the first number"),
    ] {
        let error = read(file).expect_err(file);
        assert!(error.to_string().contains(part), "{file}: {error}");
        assert_eq!(error.hint().is_empty(), file == "sub", "{file}");
    }
    fs::write(inside.join("half.raw"), &VOXELS[..5]).expect("written");
    let error = read("LIST\ngood.raw\nhalf.raw").expect_err("half of the voxels");
    assert!(error.to_string().contains("`half.raw` has fewer voxels"), "{error}");
}

#[test]
fn compressed_voxels_that_promise_far_too_much_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let header = format!("{}encoding: gzip\n\n", HEADER.replace("3 2 2", "1000 1000 1000"));
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    std::io::Write::write_all(&mut gzip, &vec![0; 1 << 20]).expect("written");
    let bytes = gzip.finish().expect("written");
    assert!(refused(folder.path(), &header, &bytes).contains("promises 953 MiB, more than 200 times"));
    // a damaged checksum
    let header = format!("{HEADER}encoding: gzip\n\n");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    std::io::Write::write_all(&mut gzip, VOXELS).expect("written");
    let mut bytes = gzip.finish().expect("written");
    let at = bytes.len() - 6;
    bytes[at] ^= 1;
    assert!(refused(folder.path(), &header, &bytes).contains("cannot be read"));
}

#[test]
fn voxels_at_the_end_of_compressed_content_are_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image.nrrd");
    let gzip = |bytes: &[u8]| {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        std::io::Write::write_all(&mut gzip, bytes).expect("written");
        gzip.finish().expect("written")
    };
    // as pynrrd and SimpleITK read it
    let header = format!("{HEADER}encoding: gzip\nbyte skip: -1\n\n");
    for before in [&b""[..], b"any bytes", &[7; 5000]] {
        fs::write(&path, [header.as_bytes(), &gzip(&[before, VOXELS].concat())].concat()).expect("written");
        let volume = open(&path).expect("a volume");
        assert_eq!((volume.voxels.get(0), volume.voxels.get(11)), (Some(0.0), Some(11.0)), "{}", before.len());
    }
    assert!(refused(folder.path(), &header, &gzip(&VOXELS[1..])).contains("truncated"));
    assert!(refused(folder.path(), &header, &gzip(&vec![0; 5 << 20])).contains("more than 4 MiB before its voxels"));
    let still = HEADER.replace("(0,0,2)", "(0,0,0)").replace("space:", "kinds: domain domain domain\nspace:");
    let found = refused(folder.path(), &format!("{still}encoding: raw\n\n"), VOXELS);
    assert!(found.contains("axis 3 of its array has the kind `domain`, and no direction in space"), "{found}");
}

#[test]
fn segments_of_3d_slicer_are_labels_with_names() {
    let text = fs::read_to_string(fixture("layers.json")).expect("read");
    let layers: Vec<Vec<u16>> = serde_json::from_str(&text).expect("JSON");
    let map = labels::open(&fixture("labels.seg.nrrd")).expect("labels");
    assert_eq!((&map.values, map.names.to_string().as_str()), (&layers[0], "1=liver,2=spleen, left"));
    let map = labels::open(&fixture("layers.seg.nrrd")).expect("labels");
    // two layers have the value 1, so that the labels are the numbers of the segments
    assert_eq!(map.names.to_string(), "1=liver,2=spleen, left,3=vessel");
    let mask =
        |layer: usize, value: u16| -> Vec<u8> { layers[layer].iter().map(|found| u8::from(*found == value)).collect() };
    assert_eq!([map.mask(1), map.mask(2), map.mask(3)], [mask(0, 1), mask(0, 2), mask(1, 1)]);
    assert!(map.notes.iter().any(|note| note.contains("numbers of the segments")), "{:?}", map.notes);
    let map = labels::open(&fixture("layers.seg.nrrd#1")).expect("labels");
    assert_eq!((&map.values, map.names.to_string().as_str()), (&layers[1], "1=vessel"));
    assert!(open(&fixture("layers.seg.nrrd")).is_err(), "no volume is chosen");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.seg.nrrd");
    let bytes = fs::read(fixture("layers.seg.nrrd")).expect("read");
    let at = bytes.windows(11).position(|found| found == b"LabelValue:").expect("a segment");
    fs::write(&path, [&bytes[..at + 12], b"7", &bytes[at + 13..]].concat()).expect("written");
    let error = labels::open(&path).expect_err("no segment");
    assert!(error.to_string().contains("layer 0 has the value 1, which is of no segment"), "{error}");
}

/// Two segments on the grid of `volume` are written and read again.
pub(in super::super) fn check_written(volume: &Volume, name: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    let mask = |remainder: usize| -> Vec<u8> {
        (0..volume.grid.num_voxels()).map(|index| u8::from(index % 3 == remainder)).collect()
    };
    let (first, second) = (mask(0), mask(2));
    let segments = [SegmentMask { name: "liver", mask: &first }, SegmentMask { name: "Läsion\n2", mask: &second }];
    write::segments(&path, &segments, volume).expect("written");
    let map = labels::open(&path).expect("labels");
    assert_eq!([map.mask(1), map.mask(2)], [first, second]);
    let Grid { affine, size } = map.grid;
    assert_eq!(size, volume.grid.size);
    let apart = affine.0.as_flattened().iter().zip(volume.grid.affine.0.as_flattened()).map(|(a, b)| (a - b).abs());
    assert!(apart.fold(0.0, f64::max) < 1e-9, "{affine:?}, not {:?}", volume.grid.affine);
    let names = if name.ends_with("nrrd") { "1=liver,2=Läsion 2" } else { "" };
    assert_eq!(map.names.to_string(), names);
}

#[test]
fn masks_are_written() {
    for name in ["int16.nrrd", "space_rig.nrrd", "flat.nrrd"] {
        check_written(&open(&fixture(name)).expect("a volume"), "mask.nrrd");
    }
}
