//! Volumes and masks compared with pydicom, highdicom, nibabel and rt-utils: their sample files, real scans, and files
//! that this program writes. `scripts/setup --checks` installs the packages in `.tools/medical`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::*;
use crate::fixture::{checkout, shared};

fn fixture(name: &str) -> PathBuf {
    checkout().join("tests/fixtures/volumes").join(name)
}

/// What a command of `scripts/medical_check.py` prints.
fn python(arguments: &[&Path]) -> String {
    let mut command = Command::new(checkout().join(".venv/bin/python"));
    command.env("PYTHONPATH", checkout().join(".tools/medical")).arg(checkout().join("scripts/medical_check.py"));
    let output = command.args(arguments).output().expect("scripts/setup --checks");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).expect("text")
}

fn json(text: &str) -> Value {
    serde_json::from_str(text.lines().last().unwrap_or_default()).expect("JSON")
}

fn numbers(voxels: &Voxels) -> Vec<f64> {
    match voxels {
        Voxels::I16(values) => values.iter().copied().map(f64::from).collect(),
        Voxels::F32(values) => values.iter().copied().map(f64::from).collect(),
        Voxels::Rgb(values) => values.iter().flatten().copied().map(f64::from).collect(),
    }
}

/// Samples that cannot be read, or differ from pydicom, with the reason.
const DIFFERENT: [(&str, &str); 19] = [
    // explicit VR by its transfer syntax, implicit VR in fact
    ("SC_rgb_jpeg.dcm", "not the encoding that its transfer syntax says"),
    ("resampled_anat_moved.nii", "153 of 1071 voxels are NaN"),
    ("row_major.dconn.nii", "NIfTI-2"),
    ("JPEGLSNearLossless_08.dcm", "JPEG-LS"),
    ("JPEGLSNearLossless_16.dcm", "JPEG-LS"),
    ("MR_small_jpeg_ls_lossless.dcm", "JPEG-LS"),
    ("SC_rgb_jls_lossy_line.dcm", "JPEG-LS"),
    ("SC_rgb_jls_lossy_sample.dcm", "JPEG-LS"),
    ("JPGExtended.dcm", "cannot be decoded"),
    ("JPEG-lossy.dcm", "cannot be decoded"),
    ("SC_rgb_rle_32bit.dcm", "cannot be decoded"),
    ("SC_rgb_rle_32bit_2frame.dcm", "frames"),
    ("SC_rgb_rle_16bit_2frame.dcm", "frames"),
    ("SC_rgb_rle_2frame.dcm", "frames"),
    ("examples_ybr_color.dcm", "30 frames"),
    ("MR_truncated.dcm", "truncated"),
    ("functional.nii", "4-D"),
    ("example4d.nii.gz", "4-D"),
    ("example_nifti2.nii.gz", "NIfTI-2"),
];

#[test]
#[ignore = "needs scripts/setup --checks"]
fn python_reads_the_samples_of_pydicom_and_nibabel_as_we_do() {
    let out = tempfile::tempdir().unwrap();
    python(&[Path::new("samples"), out.path()]);
    let samples: Vec<Value> = serde_json::from_slice(&fs::read(out.path().join("index.json")).unwrap()).unwrap();
    let (mut num_equal, mut problems) = (0, Vec::new());
    for sample in &samples {
        let path = Path::new(sample["path"].as_str().unwrap());
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let is_readable = |reason: &str| cfg!(feature = "jpeg-ls") && reason == "JPEG-LS";
        let known = DIFFERENT.iter().find(|entry| entry.0 == name && !is_readable(entry.1));
        match (open(path), sample["file"].as_str()) {
            (Ok(volume), Some(file)) => {
                let bytes = fs::read(out.path().join(file)).unwrap();
                let wanted = bytes.chunks_exact(8).map(|value| f64::from_le_bytes(value.try_into().unwrap()));
                let wanted: Vec<f64> = wanted.collect();
                let found = numbers(&volume.voxels);
                let apart = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs() / b.abs().max(255.0));
                let apart = apart.fold(0.0, f64::max);
                // decoders of JPEG differ by rounding, and by more where they interpolate colours of half the width
                let is_jpeg = sample["syntax"].as_str().is_some_and(|syntax| syntax.starts_with("JPEG Baseline"));
                let most = if is_jpeg { 0.1 } else { 1e-6 };
                if found.len() != wanted.len() || apart > most {
                    problems.push(format!("{name}: {} of {} values, {apart} apart", found.len(), wanted.len()));
                } else {
                    num_equal += 1;
                }
            }
            (Ok(_), None) => problems.push(format!("{name}: only Python cannot read it")),
            (Err(error), Some(_)) if known.is_none_or(|entry| !format!("{error}").contains(entry.1)) => {
                problems.push(format!("{name}: {error}"));
            }
            (Err(_), _) => {}
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert!(num_equal >= 40, "only {num_equal} of {} samples are equal", samples.len());
}

#[test]
#[ignore = "needs scripts/setup --checks"]
fn python_reads_our_nifti_masks() {
    let out = tempfile::tempdir().unwrap();
    for (name, ending) in [
        ("axial.zip", "nii.gz"),
        ("oblique.zip", "nii"),
        ("sagittal.zip", "nii.gz"),
        ("tilt.zip", "nii.gz"),
        ("permuted_f32.nii.gz", "nii.gz"),
        ("lps_u8.nii", "nii.gz"),
        ("no_form.nii", "nii.gz"),
        ("monochrome1.dcm", "nii.gz"),
    ] {
        let volume = open(&fixture(name)).unwrap();
        let count = volume.grid.num_voxels();
        let mask: Vec<u8> = (0..count).map(|index| u8::from(index % 7 == 0 || index % 5 == 1)).collect();
        let path = out.path().join(format!("{name}.{ending}"));
        write::segments(&path, &[SegmentMask { name: "target", mask: &mask }], &volume).unwrap();
        let report = json(&python(&[Path::new("nifti"), &path]));
        assert_eq!(report["dtype"], "uint8", "{name}");
        assert_eq!(report["unit"], "mm", "{name}");
        assert_eq!(report["orientation"].as_str(), Some(volume.grid.affine.orientation().as_str()), "{name}");
        let values: Vec<u8> = serde_json::from_value(report["values"].clone()).unwrap();
        assert_eq!(values, mask, "{name}");
        if name.contains(".nii") {
            // both forms, set or not, are those of the file, so that every program puts the mask on it
            let source = json(&python(&[Path::new("nifti"), &fixture(name)]));
            for key in ["affine", "qform", "sform_code", "zooms"] {
                assert_eq!(report[key], source[key], "{name}, {key}");
            }
        } else {
            for form in ["affine", "qform"] {
                if form == "qform" && name == "tilt.zip" {
                    assert!(report[form].is_null(), "a sheared grid has no quaternion");
                    continue;
                }
                let affine: [[f64; 4]; 3] = serde_json::from_value(report[form].clone()).unwrap();
                for (found, wanted) in affine.as_flattened().iter().zip(volume.grid.affine.0.as_flattened()) {
                    assert!((found - wanted).abs() < 1e-4, "{name}, {form}: {affine:?}, not {:?}", volume.grid.affine);
                }
            }
        }
        // and we read it back
        let labels = labels::open(&path).unwrap().on_grid(&path, &volume.grid, false).unwrap();
        assert_eq!(labels.mask(1), mask, "{name}");
    }
}

#[test]
#[ignore = "needs scripts/setup --checks"]
fn python_reads_our_dicom_segmentations() {
    for name in ["axial.zip", "oblique.zip", "sagittal.zip", "tilt.zip"] {
        let folder = tempfile::tempdir().unwrap();
        let mut archive = zip::ZipArchive::new(fs::File::open(fixture(name)).unwrap()).unwrap();
        archive.extract(folder.path()).unwrap();
        let volume = open(folder.path()).unwrap();
        let count = volume.grid.num_voxels();
        // the first slice is empty in both, and the second one in the second
        let first: Vec<u8> = (0..count).map(|index| u8::from(index >= 30 && index % 7 == 0)).collect();
        let second: Vec<u8> = (0..count).map(|index| u8::from(index >= 60 && index % 3 == 0)).collect();
        let out = tempfile::tempdir().unwrap();
        let path = out.path().join("seg.dcm");
        let segments =
            [SegmentMask { name: "liver", mask: &first }, SegmentMask { name: "Läsion \\ 2", mask: &second }];
        write::segments(&path, &segments, &volume).unwrap();
        let raw = [out.path().join("1.raw"), out.path().join("2.raw")];
        fs::write(&raw[0], &first).unwrap();
        fs::write(&raw[1], &second).unwrap();
        let report = json(&python(&[Path::new("seg"), &path, folder.path(), &raw[0], &raw[1]]));
        assert_eq!(report["labels"], serde_json::json!(["liver", "Läsion / 2"]), "{name}");
        assert_eq!(report["frames"], 5, "{name}");
        assert_eq!(report["volume_shape"].is_null(), name == "tilt.zip", "{name}");
        assert_eq!(report["patient"], serde_json::json!(["", "", ""]), "{name}");
        assert_eq!(report["identity_removed"], "YES", "{name}");
        let bytes = fs::read(&path).unwrap();
        assert!(!bytes.windows(6).any(|text| text == b"SECRET"), "{name}: an identifier was copied");
    }
    let nifti = open(&fixture("ras_i16.nii.gz")).unwrap();
    let mask = vec![1; nifti.grid.num_voxels()];
    let error = write::segments(Path::new("a.dcm"), &[SegmentMask { name: "a", mask: &mask }], &nifti).unwrap_err();
    assert!(error.to_string().contains("the volume is a NIfTI file") && error.hint().contains(".nii.gz"), "{error}");
}

#[test]
#[ignore = "needs scripts/setup --checks"]
fn python_fills_contours_as_we_do() {
    let out = tempfile::tempdir().unwrap();
    let names: Vec<String> = serde_json::from_str(&python(&[Path::new("draw"), out.path()])).unwrap();
    assert!(names.len() >= 8, "{names:?}");
    for name in &names {
        let at = |file: &str| out.path().join(name).join(file);
        let volume = open(&at("series")).unwrap();
        // nested contours with corners between the centres of voxels, filled by OpenCV
        let labels = labels::open_for(&at("drawn.dcm"), None, &volume).unwrap();
        assert_eq!(labels.mask(1), fs::read(at("drawn.raw")).unwrap(), "{name}");
        assert!(labels.notes.iter().any(|note| note.contains("beyond the image")), "{name}: {:?}", labels.notes);
        let mask = fs::read(at("mask.raw")).unwrap();
        for file in ["mask.rtstruct.dcm", "mask.dcm"] {
            write::segments(&at(file), &[SegmentMask { name: "liver", mask: &mask }], &volume).unwrap();
            assert!(!fs::read(at(file)).unwrap().windows(6).any(|text| text == b"SECRET"), "{name}: an identifier");
        }
    }
    let report = json(&python(&[Path::new("contours"), out.path()]));
    for name in &names {
        let found = &report[name];
        assert_eq!(found["names"], serde_json::json!(["liver"]), "{name}");
        assert_eq!((&found["differing"], &found["seg_differs"]), (&0.into(), &false.into()), "{name}: {found}");
        assert_eq!(found["patient"], serde_json::json!(["", "", ""]), "{name}");
        // half a layer of voxels, of which contours are 1/8 of that within the borders
        let number = |key: &str| found[key].as_f64().unwrap();
        assert!((number("area") - number("voxels")).abs() < number("half_layer"), "{name}: {found}");
    }
}

/// Mean value in a label, and its number of voxels.
fn mean(volume: &Volume, labels: &LabelMap, label: u16) -> (f64, usize) {
    let values = numbers(&volume.voxels);
    let inside: Vec<f64> =
        values.iter().zip(&labels.values).filter(|(_, found)| **found == label).map(|(value, _)| *value).collect();
    (inside.iter().sum::<f64>() / inside.len() as f64, inside.len())
}

/// Means that nibabel and pydicom give: an organ that lies wrong has air and bone in it.
#[test]
#[ignore = "needs the data of PRSMED_SHARED"]
fn shared_data_labels_lie_right_on_real_volumes() {
    for (volume, label_map, label, wanted, count) in [
        // JPEG 2000 slices (LPS), and labels in LAS
        ("ct_dicom", "ct_dicom_labels.nii.gz", 5, 89.304_593_845_784_65, 366_708),
        ("ct_dicom", "ct_dicom_labels.nii.gz", 1, 79.568_634_505_564_17, 130_634),
        ("ct_dicom", "ct_dicom_labels.nii.gz", 6, -56.152_020_188_388_974, 74_102),
        ("ct.nii.gz", "ct_labels.nii.gz", 5, 45.291_064_865_144_69, 38_634),
        ("mr.nii.gz", "mr_labels.nii.gz", 5, 95.180_303_030_303_04, 18_480),
    ] {
        let folder = shared("data/volumes");
        let found = open(&folder.join(volume)).unwrap();
        let path = folder.join(label_map);
        let labels = labels::open(&path).unwrap().on_grid(&path, &found.grid, false).unwrap();
        let (found, voxels) = mean(&found, &labels, label);
        assert!(
            (found - wanted).abs() < 1e-6 && voxels == count,
            "{volume}, label {label}: {found} in {voxels} voxels"
        );
    }
}

#[test]
#[ignore = "needs the data of PRSMED_SHARED"]
fn shared_data_a_series_has_its_window_modality_and_spacing() {
    let folder = shared("data/volumes");
    let volume = open(&folder.join("ct_dicom")).unwrap();
    assert_eq!((volume.modality.code(), volume.grid.affine.orientation().as_str()), ("CT", "LPS"));
    assert_eq!(volume.grid.size, [512, 512, 20]);
    let spacing = volume.grid.spacing();
    assert!(spacing.iter().zip([0.976_562_5, 0.976_562_5, 2.0]).all(|(a, b)| (a - b).abs() < 1e-9), "{spacing:?}");
    assert_eq!(volume.windows, [[300.0, 40.0], [1500.0, 300.0]]);
    let path = folder.join("ct_dicom_labels.nii.gz");
    let labels = labels::open(&path).unwrap().on_grid(&path, &volume.grid, false).unwrap();
    let liver = volume.grid.volume_ml(&labels.mask(5)).unwrap();
    assert!((liver - 699.440_002_441_406_2).abs() < 1e-6, "{liver} ml");
    // a label map of another scan does not fit
    let other = folder.join("ct_labels.nii.gz");
    let error = labels::open(&other).unwrap().on_grid(&other, &volume.grid, false).unwrap_err();
    assert!(error.to_string().contains("voxels along R, A, S instead of 512x512x20"), "{error}");
    // written as SEG and read by highdicom in the other test; here the size of the file is checked
    let out = tempfile::tempdir().unwrap();
    let seg = out.path().join("liver.dcm");
    let mask = labels.mask(5);
    write::segments(&seg, &[SegmentMask { name: "liver", mask: &mask }], &volume).unwrap();
    let frames = mask.chunks_exact(512 * 512).filter(|slice| slice.contains(&1)).count() as u64;
    let bytes = fs::metadata(&seg).unwrap().len();
    assert!((frames * 512 * 512 / 8..frames * 512 * 512 / 8 + 40_000).contains(&bytes), "{bytes} bytes");
}
