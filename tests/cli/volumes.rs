//! `predict` on volumes and DICOM images.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use prsmed::data::volume::{self, Axis, labels};
use serde_json::Value;

use crate::support::{done, objects, path, prsmed, refused, run, trained};

/// A file that `scripts/fixtures/volumes.py` made.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/volumes").join(name)
}

fn predict(image: &Path, more: &[&str]) -> Command {
    let mut command = prsmed();
    command.arg("predict").arg(&trained().0).args(["--question", "Where is the lesion?", "--image"]).arg(image);
    command.args(["--max-new-tokens", "1"]).args(more);
    command
}

/// The result record of a prediction that must succeed.
fn result(command: &mut Command) -> Value {
    let lines = objects(&done(command.arg("--json")));
    lines.into_iter().find(|line| line["kind"] == "result").expect("a result")
}

#[test]
fn a_series_gets_a_mask_on_its_grid_and_a_record_without_identifiers() {
    let series = fixture("axial.zip");
    let (mask, record) = (path("volume-mask.nii.gz"), path("volume-record.json"));
    let more = ["--always-paint", "--slices", "1..4", "--every", "2", "--fill-gaps", "1"];
    let mut command = predict(&series, &more);
    let found = result(command.arg("--out").arg(&mask).arg("--record-out").arg(&record));
    assert_eq!((&found["image"], &found["mask"]), (&"axial.zip".into(), &"volume-mask.nii.gz".into()));
    assert_eq!(found["settings"]["window"], "soft-tissue");
    assert_eq!(found["settings"]["slices"], "1..4");
    assert_eq!((&found["num_slices"], &found["orientation"]), (&2.into(), &"LPS".into()));
    let slices: Vec<u64> = found["slices"].as_array().unwrap().iter().map(|s| s["slice"].as_u64().unwrap()).collect();
    assert_eq!(slices, [1, 3]);
    let written = fs::read_to_string(&record).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&written).unwrap()["volume_ml"], found["volume_ml"]);
    assert!(!written.contains("SECRET") && !written.contains("1.2.826"), "{written}");

    let volume = volume::open(&series).unwrap();
    let labels = labels::open(&mask).unwrap().on_grid(&mask, &volume.grid, false).unwrap();
    let labels = labels.mask(1);
    let plane = volume.plane(Axis::Axial);
    let counts: Vec<usize> =
        (0..4).map(|slice| plane.values(&labels, slice).unwrap().into_iter().map(usize::from).sum()).collect();
    for (slice, entry) in slices.iter().zip(found["slices"].as_array().unwrap()) {
        assert_eq!(counts[usize::try_from(*slice).unwrap()] as u64, entry["num_pixels"].as_u64().unwrap());
    }
    // slice 0 was not segmented; slice 2 is the gap, and has the pixels that both neighbours have
    let both = |index: usize| plane.values(&labels, index).unwrap();
    let expected: Vec<u8> = both(1).iter().zip(both(3)).map(|(a, b)| *a & b).collect();
    assert_eq!((counts[0], both(2)), (0, expected));
    let ml = volume.grid.volume_ml(&labels).unwrap();
    assert!((found["volume_ml"].as_f64().unwrap() - ml).abs() < 1e-9);
}

#[test]
fn a_mask_of_a_slice_is_that_of_the_same_image() {
    // one DICOM slice is an image; a volume of that slice gets the same mask
    let file = fixture("jpeg_2000_lossless.dcm");
    let (png, nifti) = (path("volume-slice.png"), path("volume-slice.nii"));
    let image = result(predict(&file, &["--always-paint", "--mask-out"]).arg(&png));
    assert!(image["answer"].is_string());
    let volume = result(predict(&file, &["--always-paint", "--out"]).arg(&nifti));
    let drawn = image::open(&png).unwrap().into_luma8();
    let opened = volume::open(&file).unwrap();
    let labels = labels::open(&nifti).unwrap().on_grid(&nifti, &opened.grid, false).unwrap();
    assert_eq!(opened.plane(Axis::Axial).mask(&labels.mask(1), 0).unwrap(), drawn);
    assert_eq!(volume["slices"][0]["presence"], image["confidence"]["presence"]);
}

#[test]
fn a_series_gets_a_dicom_segmentation() {
    let seg = path("volume-mask.dcm");
    let ran = run(predict(&fixture("sagittal.zip"), &["--axis", "sagittal", "--window", "lung", "--out"]).arg(&seg));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stdout.contains(" ml") && ran.stdout.contains("of 4 slices"), "{}", ran.stdout);
    let bytes = fs::read(&seg).unwrap();
    assert_eq!(&bytes[128..132], b"DICM");
    assert!(!bytes.windows(6).any(|text| text == b"SECRET"));
}

#[test]
fn wrong_flags_are_refused_before_the_model_is_loaded() {
    let series = fixture("axial.zip");
    let name = series.display();
    refused(
        &mut predict(&series, &[]),
        &format!(
            "error: `--out`: `{name}` is a volume of 6x5x4 voxels, and its mask needs a file\nhint: add `--out \
             mask.nii.gz`, or `--out mask.dcm` for DICOM SEG"
        ),
    );
    refused(
        &mut predict(&series, &["--out", "mask.png"]),
        "error: `--out`: `mask.png` has the wrong file extension\nhint: use a file name that ends with `.nii.gz`, `.nii` \
         or `.dcm`",
    );
    refused(
        &mut predict(&fixture("ras_i16.nii.gz"), &["--out", "mask.dcm"]),
        "error: mask.dcm: a DICOM SEG refers to DICOM images, and the volume is a NIfTI file\nhint: write NIfTI instead: \
         use a name that ends with `.nii.gz`",
    );
    refused(
        &mut predict(&series, &["--out", "mask.nii", "--slices", "4..9"]),
        "error: `--slices`: `4..9` has no slice: there are 4 axial slices\nhint: choose from `0..4`",
    );
    refused(
        &mut predict(&series, &["--out", "mask.nii", "--mask-out", "mask.png"]),
        "error: `--mask-out`: it is for images, and `--image` is a volume\nhint: use `--out mask.nii.gz`",
    );
    refused(
        &mut predict(&fixture("rgb.dcm"), &["--fill-gaps", "1"]),
        "error: `--fill-gaps`: it is for volumes, and `--image` is an image\nhint: remove it; the mask of an image is written \
         with `--mask-out mask.png`",
    );
    refused(
        &mut predict(&fixture("oblique.zip"), &["--out", "missing/mask.nii"]),
        "error: `--out`: `missing` is not a folder\nhint: create the folder first, or choose another path",
    );
}
