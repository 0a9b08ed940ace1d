//! Volumes read from fixtures that `scripts/fixtures/volumes.py` made with pydicom and nibabel, and hostile files.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::PathBuf;

use serde::Deserialize;

use super::*;
use crate::fixture::checkout;

fn fixtures() -> PathBuf {
    checkout().join("tests/fixtures/volumes")
}

/// What the script expects of a file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expected {
    path: String,
    size: [usize; 3],
    affine: [[f64; 4]; 3],
    values: Vec<f64>,
    #[serde(default)]
    tolerance: f64,
    orientation: Option<String>,
    slices: Option<BTreeMap<Axis, ExpectedSlice>>,
    modality: Option<String>,
    windows: Option<Vec<[f32; 2]>>,
    #[serde(default)]
    inverted: bool,
    #[serde(default)]
    notes: Vec<String>,
}

/// One display slice.
#[derive(Debug, Deserialize)]
struct ExpectedSlice {
    slice: usize,
    count: usize,
    size: [usize; 2],
    spacing: [f64; 2],
    values: Vec<f64>,
}

fn expected() -> Vec<Expected> {
    let of = |name: &str| -> Vec<Expected> {
        let text = fs::read_to_string(fixtures().join(name)).expect("fixtures");
        serde_json::from_str(&text).expect("the format of the script")
    };
    ["expected.json", "itk/expected.json"].into_iter().flat_map(of).collect()
}

fn numbers(voxels: &Voxels) -> Vec<f64> {
    match voxels {
        Voxels::I16(values) => values.iter().copied().map(f64::from).collect(),
        Voxels::F32(values) => values.iter().copied().map(f64::from).collect(),
        Voxels::Rgb(values) => values.iter().flatten().copied().map(f64::from).collect(),
    }
}

fn assert_near(name: &str, found: &[f64], wanted: &[f64], tolerance: f64) {
    assert_eq!(found.len(), wanted.len(), "{name}");
    for (index, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        // values are kept as f32
        let tolerance = tolerance.max(1e-6 * wanted.abs());
        assert!((found - wanted).abs() <= tolerance, "{name}: value {index} is {found}, not {wanted}");
    }
}

fn read(name: &str) -> Volume {
    open(&fixtures().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn message(name: &str) -> String {
    let error = open(&fixtures().join(name)).expect_err(name);
    format!("{error}\n{}", error.hint())
}

#[test]
fn files_have_the_values_and_the_geometry_of_pydicom_nibabel_and_simpleitk() {
    let all = expected();
    assert!(all.len() > 40, "only {} files", all.len());
    for wanted in all {
        let name = wanted.path.as_str();
        let volume = read(name);
        assert_eq!(volume.grid.size, wanted.size, "{name}");
        let affine: Vec<f64> = volume.grid.affine.0.iter().flatten().copied().collect();
        assert_near(name, &affine, wanted.affine.as_flattened(), 1e-4);
        assert_near(name, &numbers(&volume.voxels), &wanted.values, wanted.tolerance);
        if let Some(orientation) = wanted.orientation {
            assert_eq!(volume.grid.affine.orientation(), orientation, "{name}");
        }
        if let Some(modality) = wanted.modality {
            assert_eq!(volume.modality.code(), modality, "{name}");
        }
        if let Some(windows) = wanted.windows {
            assert_eq!(volume.windows, windows, "{name}");
        }
        assert_eq!(volume.inverted, wanted.inverted, "{name}");
        // the fixtures of one CT slice have no rescale
        let notes: Vec<&String> = volume.notes.iter().filter(|note| !note.contains("no RescaleIntercept")).collect();
        assert_eq!(notes.len(), wanted.notes.len(), "{name}: {notes:?}");
        for (note, part) in notes.into_iter().zip(wanted.notes) {
            assert!(note.contains(&part), "{name}: {note}");
        }
        assert!(!format!("{volume:?}").contains("SECRET"), "{name}");
    }
}

#[test]
fn slices_are_in_radiological_orientation_as_with_nibabel() {
    let mut count = 0;
    for wanted in expected() {
        let Some(slices) = wanted.slices else { continue };
        let volume = read(&wanted.path);
        for (axis, slice) in slices {
            let name = format!("{}, {axis}", wanted.path);
            let plane = volume.plane(axis);
            assert_eq!((plane.size, plane.num_slices), (slice.size, slice.count), "{name}");
            assert_near(&name, &plane.spacing, &slice.spacing, 1e-4);
            let values = numbers(&volume.voxels);
            let found = plane.values(&values, slice.slice).unwrap();
            assert_near(&name, &found, &slice.values, wanted.tolerance.max(1e-3));
            // a mask that is drawn on slices comes back to the same voxels
            let mut back = vec![f64::NAN; values.len()];
            for index in 0..plane.num_slices {
                plane.put(&mut back, index, &plane.values(&values, index).unwrap()).unwrap();
            }
            assert_eq!(back, values, "{name}");
            count += 1;
        }
    }
    assert!(count > 90, "only {count} slices");
}

#[test]
fn a_folder_is_read_like_its_zip() {
    let folder = tempfile::tempdir().unwrap();
    let mut archive = zip::ZipArchive::new(fs::File::open(fixtures().join("axial.zip")).unwrap()).unwrap();
    archive.extract(folder.path()).unwrap();
    let (a, b) = (open(folder.path()).unwrap(), read("axial.zip"));
    assert_eq!((a.voxels, a.grid, a.notes), (b.voxels, b.grid, b.notes));
}

#[test]
fn a_series_that_is_there_twice_is_read_once() {
    let (a, b) = (read("duplicate.zip"), read("axial.zip"));
    assert_eq!((a.voxels, a.grid), (b.voxels, b.grid));
    assert_eq!(
        a.notes,
        ["4 copies of files were left out: b/IM001 of IM001, b/IM003 of IM003, sub/0.dcm of b/sub/0.dcm, .."]
    );
}

#[test]
fn a_series_is_chosen_by_its_number() {
    let found = message("two_series.zip");
    assert!(found.contains("2 series: number 1 (CT, 4 slices of 6x5); number 5 (CT, 4 slices of 6x5)"), "{found}");
    assert!(found.contains("two_series.zip#3"), "{found}");
    assert_eq!(read("two_series.zip#5").grid.size, [6, 5, 4]);
    assert!(message("two_series.zip#7").contains("no series with the number 7"));
}

#[test]
fn wrong_files_are_errors_with_a_reason_and_a_remedy() {
    for (name, parts) in [
        ("gap.zip", &["about 1 slice is missing: slices 1 and 2 of 3 are 6.00 mm apart", "export"][..]),
        ("orientations.zip", &["another orientation", "localizer", "remove"]),
        ("sizes.zip", &["4 of 6x5", "1 of 4x4", "remove localizers"]),
        ("shifted.zip", &["shifted against each other by up to"]),
        ("cine.dcm", &["4 frames are not slices of a volume", "cine.dcm#1", "cine.dcm#4"]),
        ("cine.dcm#5", &["4 frames are not slices"]),
        ("enhanced.dcm#1", &["slices of one volume", "without `#`"]),
        ("nan.nii.gz", &["2 of 120 voxels are NaN or infinite", "nan_to_num"]),
        ("four.nii.gz", &["3 volumes of 6x5x4 voxels (4-D)", "four.nii.gz#0", "four.nii.gz#2"]),
        ("four.nii.gz#3", &["no volume 3", "from 0 to 2"]),
        ("nifti2.nii", &["NIfTI-2", "NIfTI-1"]),
        ("complex.nii", &["complex numbers", "float32"]),
        ("expected.json", &["not a medical image", "DICOM"]),
        ("missing.nii", &["cannot read"]),
    ] {
        let found = message(name);
        assert!(parts.iter().all(|part| found.contains(part)), "{name}: {found}");
        assert!(found.contains(name.split('#').next().unwrap()), "{name}: {found}");
        assert!(!found.contains("SECRET"), "{name}: {found}");
    }
    let empty = tempfile::tempdir().unwrap();
    assert!(open(empty.path()).unwrap_err().to_string().ends_with("no DICOM images"));
    std::fs::copy(fixtures().join("qform.nii"), empty.path().join("ct.nii")).unwrap();
    assert_eq!(open(empty.path()).unwrap().voxels, read("qform.nii").voxels, "a patient's folder with one file");
    fs::write(empty.path().join("notes.txt"), "").unwrap();
    let error = open(empty.path()).unwrap_err();
    assert!(error.to_string().contains("no DICOM images among its files (2, the first is `ct.nii`)"), "{error}");
}

/// Without the feature the message names it.
#[test]
fn jpeg_ls_is_read_with_its_feature() {
    if cfg!(feature = "jpeg-ls") {
        // the same image in another syntax
        assert_eq!(read("jpeg_ls.dcm").voxels, read("rle.dcm").voxels);
        return;
    }
    let found = message("jpeg_ls.dcm");
    for part in ["jpeg_ls.dcm", "JPEG-LS Lossless, which cannot be read", "gdcmconv --raw", "cargo feature `jpeg-ls`"] {
        assert!(found.contains(part), "{found}");
    }
}

/// Files of a few bytes whose headers promise gigabytes.
#[test]
fn compressed_pixels_that_promise_far_too_much_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = fs::read(fixtures().join("rle.dcm")).unwrap();
    for element in [0x10, 0x11] {
        let tag = [0x28, 0, element, 0, b'U', b'S', 2, 0];
        let at = bytes.windows(8).position(|found| found == tag).unwrap() + 8;
        bytes[at..at + 2].copy_from_slice(&30_000_u16.to_le_bytes());
    }
    let mut header = fs::read(fixtures().join("no_form.nii")).unwrap();
    for (axis, side) in [1000_i16, 1000, 1000].into_iter().enumerate() {
        header[42 + 2 * axis..44 + 2 * axis].copy_from_slice(&side.to_le_bytes());
    }
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    std::io::Write::write_all(&mut packed, &header).unwrap();
    let mut deflated = fs::read(fixtures().join("deflated.dcm")).unwrap();
    // the data set begins after the file meta, whose length is its first element
    let length = u32::from_le_bytes(deflated[140..144].try_into().unwrap()) as usize;
    deflated.truncate(144 + length);
    let mut zeros = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
    std::io::Write::write_all(&mut zeros, &vec![0; 70 << 20]).unwrap();
    deflated.extend(zeros.finish().unwrap());
    for (name, bytes, reason) in [
        ("bomb.dcm", bytes, "promises 1716 MiB, more than 200 times"),
        ("bomb.nii.gz", packed.finish().unwrap(), "promises 1907 MiB, more than 200 times"),
        ("deflated.dcm", deflated, "200 times as large as the file"),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        let error = open(&path).unwrap_err();
        assert!(error.to_string().contains(name) && error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn label_maps_are_reoriented_to_the_volume() {
    let volume = read("ras_i16.nii.gz");
    let path = fixtures().join("labels_las.nii.gz");
    let labels = labels::open(&path).unwrap();
    assert_eq!(labels.grid.affine.orientation(), "LAS");
    let labels = labels.on_grid(&path, &volume.grid, false).unwrap();
    let wanted = fs::read_to_string(fixtures().join("labels_ras.json")).unwrap();
    assert_eq!(labels.values, serde_json::from_str::<Vec<u16>>(&wanted).unwrap());
    for (name, part) in [("labels_fractions.nii.gz", "not whole numbers"), ("labels_negative.nii.gz", "below 0")] {
        let error = labels::open(&fixtures().join(name)).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn the_suggested_axis_is_that_of_thick_slices() {
    let suggested = |name: &str| Axis::suggested(&read(name).grid);
    assert_eq!(suggested("axial.zip"), Axis::Axial);
    assert_eq!(suggested("sagittal.zip"), Axis::Sagittal);
    assert_eq!(suggested("oblique.zip"), Axis::Coronal);
    assert_eq!(suggested("monochrome1.dcm"), Axis::Axial);
    let cubic = Affine::from_columns([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.2]], [0.0; 3]);
    assert_eq!(Axis::suggested(&Grid { size: [4, 4, 4], affine: cubic }), Axis::Axial);
    assert_eq!(Axis::suggested(&Grid { size: [4, 1, 4], affine: cubic }), Axis::Coronal);
}

#[test]
fn windows_are_chosen_by_modality() {
    let chosen = |name: &str| Window::Auto.chosen_for(&read(name)).to_string();
    assert_eq!(chosen("axial.zip"), "soft-tissue");
    assert_eq!(chosen("oblique.zip"), "p0.5-p99.5");
    assert_eq!(chosen("monochrome1.dcm"), "file");
    assert_eq!(chosen("cine.dcm#1"), "0..255");
    assert_eq!(chosen("ras_i16.nii.gz"), "p0.5-p99.5");
    let levels = Window::File.levels(&read("axial.zip")).unwrap();
    assert_eq!((levels.low, levels.high, levels.inverted), (-160.0, 240.0, false));
    let volume = read("monochrome1.dcm");
    let levels = Window::Auto.levels(&volume).unwrap();
    assert_eq!((levels.apply(50.0), levels.apply(100.0), levels.apply(550.0)), (255, 229, 0));
    let error = Window::File.levels(&read("ras_i16.nii.gz")).unwrap_err();
    assert!(error.hint().contains("argument `window"), "{error}");
}

#[test]
fn grey_and_colour_slices_are_images() {
    let volume = read("rgb.dcm");
    let plane = volume.plane(Axis::Axial);
    let levels = Window::Auto.levels(&volume).unwrap();
    let image = volume.colour_slice(&plane, 0, &levels).unwrap();
    assert_eq!(image.get_pixel(5, 3).0, [200, 180, 125]);
    assert!(volume.slice(&plane, 0, &levels).is_err());
    let volume = read("axial.zip");
    let plane = volume.plane(Axis::Axial);
    let levels: Levels = "2000/0".parse::<Window>().unwrap().levels(&volume).unwrap();
    let image = volume.slice(&plane, 0, &levels).unwrap();
    // an LPS volume is shown as it is stored
    assert_eq!(image.get_pixel(1, 0).0, [levels.apply(-995.0)]);
    assert!(volume.slice(&plane, 4, &levels).is_err());
    let mut mask = vec![0; volume.grid.num_voxels()];
    let drawn = image::GrayImage::from_fn(6, 5, |x, y| image::Luma([if (x, y) == (1, 2) { 255 } else { 0 }]));
    plane.put(&mut mask, 3, &drawn.as_raw().iter().map(|value| value / 255).collect::<Vec<_>>()).unwrap();
    assert_eq!(mask.iter().position(|value| *value == 1), Some(3 * 30 + 2 * 6 + 1));
    assert_eq!(plane.mask(&mask, 3).unwrap(), drawn);
}

/// Every prefix of a file in steps, and single changed bytes, must give a volume or an error, quickly.
#[test]
fn damaged_files_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["explicit_le.dcm", "implicit_le.dcm", "rle.dcm", "jpeg_lossless.dcm", "enhanced.dcm", "lps_u8.nii"];
    let more =
        ["jpeg_2000_lossless.dcm", "jpeg_baseline.dcm", "deflated.dcm", "scaled.nii.gz", "axial.zip", "palette.dcm"];
    for name in names.into_iter().chain(more) {
        let mut bytes = Vec::new();
        fs::File::open(fixtures().join(name)).unwrap().read_to_end(&mut bytes).unwrap();
        let path = folder.path().join(name);
        for length in (0..bytes.len()).step_by(1 + bytes.len() / 60) {
            fs::write(&path, &bytes[..length]).unwrap();
            if let Err(error) = open(&path) {
                assert!(!error.to_string().contains("SECRET"), "{error}");
            }
        }
        fs::write(&path, &bytes[..bytes.len() - bytes.len() / 4]).unwrap();
        assert!(open(&path).is_err(), "{name} without its last quarter");
        for at in (132.min(bytes.len() / 2)..bytes.len()).step_by(1 + bytes.len() / 150) {
            let mut changed = bytes.clone();
            changed[at] ^= 0xff;
            fs::write(&path, &changed).unwrap();
            if let Err(error) = open(&path) {
                assert!(!error.to_string().contains("SECRET"), "{error}");
            }
        }
    }
}

#[test]
fn huge_dimensions_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("huge.nii");
    let mut bytes = fs::read(fixtures().join("lps_u8.nii")).unwrap();
    bytes[42..48].copy_from_slice(&[0xff, 0x7f, 0xff, 0x7f, 0xff, 0x7f]);
    fs::write(&path, &bytes).unwrap();
    assert!(open(&path).unwrap_err().to_string().contains("more than 1073741824"));
    // within the limit, but the file has fewer voxels
    bytes[42..48].copy_from_slice(&[0, 4, 0, 4, 0, 4]);
    fs::write(&path, &bytes).unwrap();
    assert!(open(&path).unwrap_err().to_string().contains("truncated"));
    let path = folder.path().join("huge.dcm");
    let mut bytes = fs::read(fixtures().join("rle.dcm")).unwrap();
    let rows = bytes.windows(8).position(|element| element == [0x28, 0, 0x10, 0, b'U', b'S', 2, 0]).unwrap();
    bytes[rows + 8..rows + 10].copy_from_slice(&[0xff, 0xff]);
    fs::write(&path, &bytes).unwrap();
    assert!(open(&path).is_err());
    // the decoder would allocate memory for the number of segments
    let mut bytes = fs::read(fixtures().join("rle.dcm")).unwrap();
    let item = bytes.windows(4).rposition(|tag| tag == [0xfe, 0xff, 0, 0xe0]).unwrap();
    bytes[item + 8..item + 12].fill(0xff);
    fs::write(&path, &bytes).unwrap();
    assert!(open(&path).unwrap_err().to_string().contains("RLE data is damaged"));
    let mut bytes = fs::read(fixtures().join("cine.dcm")).unwrap();
    let frames = bytes.windows(6).position(|element| element == [0x28, 0, 8, 0, b'I', b'S']).unwrap();
    bytes.splice(frames + 6..frames + 10, *b"\x08\x0000099999");
    fs::write(&path, &bytes).unwrap();
    assert!(open(&path).unwrap_err().to_string().contains("promises 99999 frames"));
}

/// Writes segments as DICOM SEG and reads them as a label map. That highdicom reads the same is tested with Python.
#[test]
fn a_dicom_segmentation_is_a_label_map_on_its_series() {
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("seg.dcm");
    for name in ["axial.zip", "oblique.zip", "sagittal.zip", "tilt.zip", "enhanced.dcm"] {
        let volume = read(name);
        let count = volume.grid.num_voxels();
        // slices 1 and 3 of 4 have a mask
        let mask = |remainder: usize| -> Vec<u8> {
            (0..count).map(|index| u8::from(index / 30 % 2 == 1 && index % 3 == remainder)).collect()
        };
        let (first, second) = (mask(0), mask(1));
        let segments = [SegmentMask { name: "liver", mask: &first }, SegmentMask { name: "spleen", mask: &second }];
        write::segments(&path, &segments, &volume).unwrap();
        let labels = labels::open(&path).unwrap();
        assert_eq!(labels.names.to_string(), "1=liver,2=spleen");
        assert_eq!(labels.grid.size, [6, 5, 3], "{name}: from the first to the last slice with a mask");
        let labels = labels.on_grid(&path, &volume.grid, false).unwrap();
        assert_eq!((labels.mask(1), labels.mask(2)), (first, second), "{name}");
        // another series does not fit
        let other = read(if name == "axial.zip" { "sagittal.zip" } else { "axial.zip" });
        let error = labels::open(&path).unwrap().on_grid(&path, &other.grid, false);
        assert!(error.is_err(), "{name}");
    }
    let error = labels::open(&fixtures().join("rle.dcm")).unwrap_err().to_string();
    assert!(error.contains("not a segmentation"), "{error}");
}

#[test]
fn a_panic_of_a_decoder_is_an_error_of_its_volume() {
    let folder = tempfile::tempdir().expect("a folder");
    let error = open(&folder.path().join("panics.nii")).expect_err("a panic");
    assert!(error.to_string().contains("panics.nii: its decoder failed: a panic of a test"), "{error}");
    assert!(error.hint().contains("dcm2niix"), "{}", error.hint());
}

#[test]
fn toy_format_is_read_and_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let [image, mask] = ["image", "mask.toy"].map(|name| folder.path().join(name));
    fs::write(&image, "TOY 2 2 1\n0 5 70 900\n").expect("written");
    let volume = open(&image).expect("a volume");
    assert_eq!((volume.grid.size, volume.voxels.get(3)), ([2, 2, 1], Some(900.0)));
    write::segments(&mask, &[SegmentMask { name: "a", mask: &[0, 1, 0, 1] }], &volume).expect("written");
    assert_eq!(labels::open(&mask).expect("labels").values, [0, 1, 0, 1]);
    assert!(is_volume(&mask).expect("readable") && only_volume(folder.path()).expect("read").is_none());
}
