use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::*;
use crate::{Axis, SegmentMask, Voxels, Window, labels, write};

/// Number of voxels of the files that are made here.
const COUNT: usize = 24;

/// A file of 4x3x2 voxels of this type with unit voxels; `change` may change its header.
pub(super) fn file(datatype: i16, voxels: &[u8], change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = vec![0; 352];
    put(&mut bytes, 0, &348_i32.to_le_bytes());
    for (index, side) in [3_i16, 4, 3, 2, 1, 1, 1, 1].into_iter().enumerate() {
        put(&mut bytes, 40 + 2 * index, &side.to_le_bytes());
    }
    put(&mut bytes, 70, &datatype.to_le_bytes());
    put_floats(&mut bytes, 76, &[1.0; 4]);
    put_floats(&mut bytes, 108, &[352.0, 1.0]);
    put(&mut bytes, 254, &1_i16.to_le_bytes());
    put_floats(&mut bytes, 280, &[1.0, 0.0, 0.0, 5.0, 0.0, 1.0, 0.0, 6.0, 0.0, 0.0, 1.0, 7.0]);
    put(&mut bytes, 344, b"n+1\0");
    change(&mut bytes);
    bytes.extend(voxels);
    bytes
}

pub(super) fn put(bytes: &mut [u8], offset: usize, values: &[u8]) {
    bytes[offset..offset + values.len()].copy_from_slice(values);
}

pub(super) fn put_floats(bytes: &mut [u8], offset: usize, values: &[f32]) {
    values.iter().enumerate().for_each(|(index, value)| put(bytes, offset + 4 * index, &value.to_le_bytes()));
}

pub(super) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).expect("written");
    encoder.finish().expect("written")
}

fn counted() -> Vec<u8> {
    (0..24).collect()
}

pub(super) struct Folder(tempfile::TempDir);

impl Folder {
    pub(super) fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).expect("written");
        path
    }
}

fn message(error: &Error) -> String {
    format!("{error}\n{}", error.hint())
}

#[test]
fn gzip_files_are_read_as_python_reads_them() {
    let folder = Folder::new();
    let bytes = file(2, &counted(), |_| ());
    let whole = gzip(&bytes);
    let members = |middle: &[u8]| [gzip(&bytes[..360]), middle.to_vec(), gzip(&bytes[360..])].concat();
    for (name, bytes) in [
        ("one.nii.gz", whole.clone()),
        ("zeros.nii.gz", [whole.clone(), vec![0; 3]].concat()),
        ("block.nii.gz", [whole.clone(), vec![0; 70_000]].concat()),
        ("two.nii.gz", members(b"")),
        ("padded.nii.gz", members(&[0; 9000])),
        ("empty.nii.gz", [gzip(b""), whole.clone(), gzip(b"")].concat()),
    ] {
        let volume = open(&folder.write(name, &bytes), None, None).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(volume.voxels, Voxels::I16((0..24).collect()), "{name}");
    }
    let other = "bytes that are neither zeros nor gzip";
    for (name, bytes, part) in [
        ("text.nii.gz", [whole.clone(), b"more".to_vec()].concat(), other),
        ("late.nii.gz", [whole.clone(), vec![0; 9000], vec![7]].concat(), other),
        ("between.nii.gz", members(b"x"), other),
        ("short.nii.gz", whole[..whole.len() - 5].to_vec(), "truncated"),
        ("member.nii.gz", [whole.clone(), vec![0x1f, 0x8b, 8]].concat(), "truncated"),
    ] {
        let error = open(&folder.write(name, &bytes), None, None).expect_err(name);
        assert!(message(&error).contains(part), "{name}: {error}");
    }
}

#[test]
fn labels_near_whole_numbers_are_rounded_with_a_note() {
    let folder = Folder::new();
    let scaled = |slope: f32, intercept: f32| move |bytes: &mut [u8]| put_floats(bytes, 112, &[slope, intercept]);
    let floats = |values: [f32; 2]| -> Vec<u8> {
        values.iter().cycle().take(COUNT).flat_map(|value| value.to_le_bytes()).collect()
    };
    let ones = [0_u8, 1].repeat(12);
    for (name, bytes, expected, is_noted) in [
        ("slope.nii", file(2, &ones, scaled(0.999_999_9, 0.0)), [0, 1], true),
        ("intercept.nii", file(2, &ones, scaled(1.0, -0.0004)), [0, 1], true),
        ("moved.nii", file(2, &[1, 2].repeat(12), scaled(1.0, -1.0)), [0, 1], false),
        ("hundredths.nii", file(2, &[0, 100].repeat(12), scaled(0.01, 0.0)), [0, 1], true),
        ("floats.nii", file(16, &floats([0.0005, 2.9995]), |_| ()), [0, 3], true),
        ("whole.nii", file(16, &floats([0.0, 3.0]), |_| ()), [0, 3], false),
        ("unscaled.nii", file(2, &ones, scaled(f32::NAN, 0.5)), [0, 1], false),
    ] {
        let path = folder.write(name, &bytes);
        let map = labels::open(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(map.values, expected.repeat(12), "{name}");
        assert_eq!(map.notes.iter().any(|note| note.contains("rounded")), is_noted, "{name}: {:?}", map.notes);
        assert_eq!(map.notes.len(), usize::from(is_noted), "{name}: {:?}", map.notes);
    }
    for (name, bytes, part) in [
        ("half.nii", file(2, &ones, scaled(0.5, 0.0)), "such as 0.5 after its header's slope 0.5 and intercept 0"),
        ("near.nii", file(2, &ones, scaled(1.0, 0.002)), "not whole numbers"),
        ("probabilities.nii", file(16, &floats([0.0, 0.7]), |_| ()), "not whole numbers, such as 0.7"),
        ("nan.nii", file(16, &floats([0.0, f32::NAN]), |_| ()), "such as NaN"),
        ("below.nii", file(2, &ones, scaled(1.0, -1.0)), "labels below 0"),
    ] {
        let error = labels::open(&folder.write(name, &bytes)).expect_err(name);
        assert!(message(&error).contains(part), "{name}: {error}");
    }
}

/// The affine fields of a header: voxel sizes, unit of lengths, and everything from the first code to the matrix.
fn forms(bytes: &[u8]) -> (Vec<u8>, u8, Vec<u8>) {
    (bytes[76..92].to_vec(), bytes[123] & 7, bytes[252..328].to_vec())
}

#[test]
fn a_mask_has_both_affines_of_its_volume() {
    let folder = Folder::new();
    let quaternion = |bytes: &mut [u8]| {
        put(bytes, 252, &2_i16.to_le_bytes());
        put_floats(bytes, 256, &[0.1, 0.2, 0.3, 16.6, 6.0, 7.0]);
        put_floats(bytes, 76, &[-1.0, 1.0, 1.0, 1.0]);
    };
    let code = |code: i16| move |bytes: &mut [u8]| put(bytes, 254, &code.to_le_bytes());
    let files: [(&str, Vec<u8>); 7] = [
        ("sform.nii", file(2, &counted(), |_| ())),
        ("both.nii", file(2, &counted(), quaternion)),
        ("talairach.nii.gz", gzip(&file(2, &counted(), |bytes| (quaternion(bytes), code(3)(bytes)).0))),
        ("qform.nii", file(2, &counted(), |bytes| (quaternion(bytes), code(0)(bytes)).0)),
        ("neither.nii.gz", gzip(&file(2, &counted(), code(0)))),
        ("sheared.nii", file(2, &counted(), |bytes| put_floats(bytes, 280, &[1.0, 0.0, 0.2]))),
        (
            "metres.nii",
            file(2, &counted(), |bytes| {
                bytes[123] = 1 | 8;
                put_floats(bytes, 76, &[1.0, 0.001, 0.001, 0.001]);
                put_floats(bytes, 280, &[0.001, 0.0, 0.0, 0.005, 0.0, 0.001, 0.0, 0.006, 0.0, 0.0, 0.001, 0.007]);
            }),
        ),
    ];
    for (name, bytes) in files {
        let path = folder.write(name, &bytes);
        let volume = open(&path, None, None).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (mut plain, mask) = (bytes, [0, 1].repeat(COUNT / 2));
        if name.ends_with("gz") {
            plain.clear();
            Content::open(&path).expect("open").bytes.read_to_end(&mut plain).expect("read");
        }
        if plain[123].trailing_zeros() >= 3 {
            // an unknown unit is read as mm
            plain[123] |= 2;
        }
        for ending in ["nii", "nii.gz"] {
            let out = folder.0.path().join(format!("mask.{ending}"));
            write::segments(&out, &[SegmentMask { name: "a", mask: &mask }], &volume).expect("written");
            let mut written = Vec::new();
            Content::open(&out).expect("open").bytes.read_to_end(&mut written).expect("read");
            assert_eq!(forms(&written), forms(&plain), "{name}, {ending}");
            let LabelMap { values, grid, .. } = open_labels(&out, None, None).expect("a label map");
            assert_eq!((values, grid), (mask.iter().map(|value| u16::from(*value)).collect(), volume.grid.clone()));
        }
    }
}

#[test]
fn a_pair_of_files_is_read_by_either_name() {
    let bytes = |offset: f32| {
        file(2, &[], |bytes| {
            put(bytes, 344, b"ni1\0");
            put_floats(bytes, 108, &[offset]);
        })
    };
    let voxels = counted();
    for (header, image, packs) in [
        ("a.hdr", "a.img", [false, false]),
        ("b.HDR", "b.IMG", [false, false]),
        ("c.hdr.gz", "c.img.gz", [true, true]),
        ("d.hdr", "d.img.gz", [false, true]),
    ] {
        let folder = Folder::new();
        let packed = |bytes: Vec<u8>, pack: bool| if pack { gzip(&bytes) } else { bytes };
        let paths = [
            folder.write(header, &packed(bytes(0.0), packs[0])),
            folder.write(image, &packed(voxels.clone(), packs[1])),
        ];
        for path in paths {
            assert!(super::super::is_volume(&path).expect("readable"), "{}", path.display());
            let volume = super::super::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert_eq!(volume.voxels, Voxels::I16((0..24).collect()));
            assert_eq!(volume.grid.affine.origin(), [5.0, 6.0, 7.0]);
        }
    }
    let folder = Folder::new();
    let offset = [folder.write("e.hdr", &bytes(16.0)), folder.write("e.img", &[vec![9; 16], voxels.clone()].concat())];
    assert_eq!(open(&offset[1], None, None).expect("a pair").voxels, Voxels::I16((0..24).collect()));
    // nibabel reads a pair whose header has the magic of a single file
    let single = file(2, &[], |bytes| put_floats(bytes, 108, &[0.0]));
    let single =
        [folder.write("j.hdr", &single[..348]), folder.write("j.img", &voxels), folder.write("j.hdr", &single)];
    assert_eq!(open(&single[1], None, None).expect("a pair").voxels, Voxels::I16((0..24).collect()));
    let analyze = file(2, &[], |bytes| put(bytes, 344, &[0; 4]));
    folder.write("f.hdr", &analyze);
    for (name, bytes, part) in [
        ("g.img", voxels.clone(), "its header `g.hdr` is missing"),
        ("h.hdr", bytes(0.0), "is not beside it"),
        ("f.img", voxels.clone(), "Analyze"),
        ("e.img", voxels[..20].to_vec(), "truncated"),
    ] {
        let error = super::super::open(&folder.write(name, &bytes)).expect_err(name);
        assert!(message(&error).contains(part), "{name}: {error}");
    }
    // a complete file with the name of a pair
    assert!(open(&folder.write("i.img", &file(2, &voxels, |_| ())), None, None).is_ok());
}

#[test]
fn other_formats_are_named_also_inside_gzip() {
    let folder = Folder::new();
    let mgh = [1_i32, 4, 4, 4, 1, 3].map(i32::to_be_bytes).concat();
    let mgh = [mgh, vec![0; 400]].concat();
    for (name, bytes, part) in [
        ("a.nii.gz", gzip(&mgh), "MGH"),
        ("a.mgz", gzip(&mgh), "MGH"),
        ("b.nii.gz", gzip(&[b"CDF\x01".to_vec(), vec![0; 400]].concat()), "netCDF"),
        ("a.mnc", [b"\x89HDF\r\n\x1a\n".to_vec(), vec![0; 400]].concat(), "MINC"),
    ] {
        let path = folder.write(name, &bytes);
        assert!(super::super::is_volume(&path).expect("readable"), "{name}");
        for error in [super::super::open(&path).expect_err(name), labels::open(&path).expect_err(name)] {
            let text = message(&error);
            assert!(text.contains(part) && text.contains("convert it to NIfTI (`.nii.gz`)"), "{name}: {text}");
        }
    }
}

#[test]
fn labels_of_every_type_and_scaled_masks_of_255_are_read() {
    let folder = Folder::new();
    let scaled = |slope: f32| move |bytes: &mut [u8]| put_floats(bytes, 112, &[slope, 0.0]);
    for (name, datatype, pair, slope) in [
        ("u8.nii", 2, vec![0, 255], 1.0 / 255.0),
        ("i16.nii", 4, [0_i16, 255].map(i16::to_le_bytes).concat(), 1.0 / 255.0),
        ("u16.nii", 512, [0_u16, 1000].map(u16::to_le_bytes).concat(), 0.001),
        ("f64.nii", 64, [0.0_f64, 0.999_999_9].map(f64::to_le_bytes).concat(), 1.0),
        ("i32.nii", 8, [0_i32, 1].map(i32::to_le_bytes).concat(), 1.0),
    ] {
        let path = folder.write(name, &file(datatype, &pair.repeat(COUNT / 2), scaled(slope)));
        let map = labels::open(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(map.values, [0, 1].repeat(COUNT / 2), "{name}");
        assert_eq!(map.notes.len(), usize::from(name != "i32.nii"), "{name}: {:?}", map.notes);
    }
}

#[test]
fn masks_of_pairs_and_of_one_volume_of_several_have_both_affines() {
    let folder = Folder::new();
    let both = |bytes: &mut [u8]| {
        bytes[123] = 2;
        put(bytes, 252, &1_i16.to_le_bytes());
        put_floats(bytes, 256, &[0.0, 0.0, 0.1, 16.6, 6.0, 7.0]);
    };
    let four = file(2, &[counted(), counted()].concat(), |bytes| {
        both(bytes);
        put(bytes, 40, &4_i16.to_le_bytes());
        put(bytes, 48, &2_i16.to_le_bytes());
    });
    let pair = file(2, &[], |bytes| {
        both(bytes);
        put(bytes, 344, b"ni1\0");
        put_floats(bytes, 108, &[0.0]);
    });
    folder.write("pair.img", &counted());
    let second = PathBuf::from(format!("{}#1", folder.write("four.nii", &four).display()));
    let mask = [0, 1].repeat(COUNT / 2);
    for (path, bytes) in [(second, &four), (folder.write("pair.hdr", &pair), &pair)] {
        let volume = super::super::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let out = folder.0.path().join("mask.nii");
        write::segments(&out, &[SegmentMask { name: "a", mask: &mask }], &volume).expect("written");
        let written = std::fs::read(&out).expect("read");
        assert_eq!(forms(&written), forms(bytes), "{}", path.display());
        assert_eq!(written[40..50], [3, 0, 4, 0, 3, 0, 2, 0, 1, 0], "{}: three dimensions", path.display());
    }
}

/// A volume of these values as 32-bit floating-point numbers.
fn of_values(value: impl Fn(u8) -> f32) -> Volume {
    let voxels: Vec<u8> = counted().into_iter().flat_map(|at| value(at).to_le_bytes()).collect();
    open(&Folder::new().write("a.nii", &file(16, &voxels, |_| ())), None, None).expect("a volume")
}

#[test]
fn windows_that_do_not_fit_the_values_have_a_note() {
    let stored = of_values(|at| if at < 8 { 20.0 + 3.0 * f32::from(at) } else { 1040.0 + f32::from(at) });
    let normalised = of_values(|at| f32::from(at) / 23.0);
    let bytes = of_values(|at| 11.0 * f32::from(at));
    let scores = of_values(|at| f32::from(at) / 4.0 - 3.0);
    let hounsfield = of_values(|at| if at < 8 { f32::from(at) - 1000.0 } else { 40.0 + f32::from(at) });
    let few = "leaves at most 4 of 256 grey levels of the values (0.0 to 1.0): if the values are normalised";
    let unlike = |values: &str| {
        format!(
            "is like one in Hounsfield units, and less than 1 % of the values ({values}) are those of air, lung and fat"
        )
    };
    for (volume, window, wanted) in [
        (&stored, "soft-tissue", Some(unlike("20.0 to 1063.0"))),
        (&stored, "-300..300", Some(unlike("20.0 to 1063.0"))),
        (&stored, "brain", Some(unlike("20.0 to 1063.0"))),
        (&stored, "0..1100", None),
        (&stored, "p0-p100", None),
        (&stored, "auto", None),
        (&normalised, "soft-tissue", Some(few.to_owned())),
        (&normalised, "0..100", Some(few.to_owned())),
        (&normalised, "0..1", None),
        (&bytes, "350/50", Some(unlike("0.0 to 253.0"))),
        (&bytes, "0..255", None),
        (&scores, "soft-tissue", Some(unlike("-3.0 to 2.75"))),
        (&scores, "-3..3", None),
        (&hounsfield, "soft-tissue", None),
        (&hounsfield, "-300..300", None),
    ] {
        let chosen: Window = window.parse().expect("a window");
        let levels = chosen.levels(volume).expect("levels");
        let note = chosen.mismatch(volume, &levels);
        let start = wanted.map(|what| format!("the window `{window}` {what}"));
        assert_eq!(note.is_some(), start.is_some(), "{window}: {note:?}");
        let fits =
            note.iter().zip(&start).all(|(note, start)| note.starts_with(start) && note.contains("`p0.5-p99.5`"));
        assert!(fits, "{note:?}, not {start:?}");
    }
}

#[test]
fn a_far_value_of_many_voxels_is_not_part_of_percentiles() {
    for value in [f32::MIN, -32768.0, 32767.0] {
        let volume = of_values(|at| if at < 4 { value } else { 300.0 + f32::from(at) });
        let part = format!("4 of 24 voxels have the value {value:?}, far from all others (304.0 to 323.0)");
        assert!(volume.notes.iter().any(|note| note.starts_with(&part)), "{:?}", volume.notes);
        let levels = "p0-p100".parse::<Window>().expect("a window").levels(&volume).expect("levels");
        assert_eq!([levels.low, levels.high], [304.0, 323.0]);
        let plane = volume.plane(Axis::Axial);
        let image = volume.slice(&plane, 0, &levels).expect("a slice");
        // four voxels are padding, and one has the smallest value
        assert_eq!(image.pixels().filter(|pixel| pixel.0 == [0]).count(), 5, "{value}");
    }
    assert_eq!(of_values(|at| if at < 4 { 285.0 } else { 300.0 + f32::from(at) }).notes, [""; 0]);
}

#[test]
fn voxels_that_are_no_real_numbers_have_a_remedy_that_works() {
    let folder = Folder::new();
    for (datatype, what, remedy) in [
        (
            128,
            "colours (RGB)",
            "`nibabel.save(nibabel.Nifti1Image(numpy.asarray(image.dataobj)[\"R\"], image.affine), path)`",
        ),
        (2304, "colours (RGB)", "save one of its colours"),
        (32, "complex numbers", "abs(numpy.asarray(image.dataobj)).astype(numpy.float32)"),
        (1792, "complex numbers", "save its magnitude"),
        (1536, "data type 1536", "save its values"),
    ] {
        let path = folder.write("a.nii", &file(datatype, &[0; 16 * COUNT], |_| {}));
        let error = super::super::open(&path).expect_err(what);
        assert!(error.to_string().contains(&format!("its voxels are {what}; ")), "{error}");
        assert!(error.hint().contains(remedy), "{}", error.hint());
    }
}

#[test]
fn lengths_in_other_units_become_millimetres() {
    let folder = Folder::new();
    for (unit, factor) in [(0_u8, 1.0), (1, 0.001), (2, 1.0), (3, 1000.0), (3 | 16, 1000.0)] {
        let bytes = file(2, &counted(), |header| {
            header[123] = unit;
            put_floats(header, 80, &[0.8 * factor, 0.8 * factor, 3.0 * factor]);
            let rows = [0.8, 0.0, 0.0, 5.0, 0.0, 0.8, 0.0, 6.0, 0.0, 0.0, 3.0, 7.0].map(|value: f32| value * factor);
            put_floats(header, 280, &rows);
        });
        let volume = super::super::open(&folder.write("a.nii", &bytes)).expect("read");
        let expected = [0.8, 0.8, 3.0, 5.0, 6.0, 7.0];
        let found = [volume.grid.spacing(), volume.grid.affine.origin()].concat();
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{unit}: {found:?}");
        let says = volume.notes.iter().any(|note| note.contains("converted to millimetres"));
        assert_eq!(says, factor != 1.0, "{unit}: {:?}", volume.notes);
    }
}
