//! `predict` on volumes and DICOM images.

use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use prsmed::data::volume::{self, Axis, labels};
use serde_json::Value;

use crate::support::{done, fixture, folder, objects, path, prsmed, refused, run, trained};

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
    // one answer describes the whole mask
    let (answer, facts) = (found["answer"].as_str().unwrap(), &found["answer_facts"]);
    assert_eq!((&found["answer_source"], &facts["directions"]), (&"template".into(), &"patient".into()));
    assert_eq!((&facts["slices"], &facts["volume_ml"]), (&found["range"], &found["volume_ml"]));
    assert!(answer.starts_with(&format!("The target has a volume of {ml:.2} ml.")), "{answer}");
    assert!(answer.contains("axial slices 1 to 3 (of slices 0 to 3)"), "{answer}");
    assert!(answer.contains("Only 2 of 4 slices were segmented. Within the volume, "), "{answer}");
}

#[test]
fn a_volume_gets_an_answer_from_a_template() {
    let mask = path("volume-template.nii.gz");
    let ran =
        run(predict(&fixture("axial.zip"), &["--always-paint", "--min-volume-ml", "1000000", "--out"]).arg(&mask));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("`--max-new-tokens` has no effect: a template answers about a volume"),
        "{}",
        ran.stderr
    );
    let empty = "answer (by a template, from the mask): The mask is empty: the clean-up removed all of it (";
    assert!(ran.stdout.contains(empty), "{}", ran.stdout);
    // the file does not say where the patient's left is
    let found =
        result(predict(&fixture("no_form.nii"), &["--always-paint", "--window", "p0-p100", "--out"]).arg(&mask));
    let answer = found["answer"].as_str().unwrap();
    assert!(
        answer.contains("Left and right are those of the image") && !answer.contains("of the patient)"),
        "{answer}"
    );
}

#[test]
fn a_mask_of_a_slice_is_that_of_the_same_image() {
    // one DICOM slice is an image; a volume of that slice gets the same mask
    let file = fixture("jpeg_2000_lossless.dcm");
    let (png, nifti) = (path("volume-slice.png"), path("volume-slice.nii"));
    let levels = [path("volume-slice-p.png"), path("volume-slice-p.nii")];
    let mut predict_image = predict(&file, &["--window", "p0-p100", "--always-paint", "--mask-out"]);
    let image = result(predict_image.arg(&png).arg("--probabilities").arg(&levels[0]));
    assert!(image["answer"].is_string());
    let mut predict_volume = predict(&file, &["--window", "p0-p100", "--always-paint", "--out"]);
    let volume = result(predict_volume.arg(&nifti).arg("--probabilities").arg(&levels[1]));
    let drawn = image::open(&png).unwrap().into_luma8();
    let opened = volume::open(&file).unwrap();
    let labels = labels::open(&nifti).unwrap().on_grid(&nifti, &opened.grid, false).unwrap();
    assert_eq!(opened.plane(Axis::Axial).mask(&labels.mask(1), 0).unwrap(), drawn);
    assert_eq!(volume["slices"][0]["presence"], image["confidence"]["presence"]);
    // the probabilities are those of the mask, with 16 and 32 bits
    let of_image = image::open(&levels[0]).unwrap();
    let image::DynamicImage::ImageLuma16(of_image) = of_image else { panic!("{:?}", of_image.color()) };
    let of_volume = fs::read(&levels[1]).unwrap();
    assert_eq!((&of_volume[70..74], of_volume.len()), (&[16, 0, 32, 0][..], 352 + 4 * drawn.len()));
    let of_volume: Vec<f32> = of_volume[352..].chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let of_volume = opened.plane(Axis::Axial).values(&of_volume, 0).unwrap();
    for ((level, probability), mask) in of_image.iter().zip(of_volume).zip(drawn.iter()) {
        assert!((f32::from(*level) / 65_535.0 - probability).abs() < 1e-5, "{level} {probability}");
        assert_eq!(probability >= 0.5, *mask == 255);
    }
    // both have the same location
    assert_eq!(volume["mask_position"], image["mask_position"]);
    assert_eq!((&volume["answer_position"], &volume["positions_agree"]), (&Value::Null, &Value::Null));
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
        "error: `--out`: `mask.png` has the wrong file extension\nhint: use a file name that ends with `.nii.gz`, `.nii`, \
         `.dcm`, `.rtstruct.dcm`, `.nrrd` or `.mha`",
    );
    refused(
        &mut predict(&series, &["--out", "mask.nii", "--probabilities", "p.png"]),
        "error: `--probabilities`: `p.png` has the wrong file extension for probabilities of a volume\nhint: use a file name \
         that ends with `.nii.gz` or `.nii`",
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
        &mut predict(
            &fixture("explicit_le.dcm"),
            &["--window", "p1-p99", "--out", "mask.nii", "--mask-out", "mask.png"],
        ),
        "error: `--mask-out`: it is for images, and with `--out` a volume of one slice is no image\nhint: leave `--out` out, \
         or this flag",
    );
    refused(
        &mut predict(&fixture("rgb.dcm"), &["--fill-gaps", "1"]),
        "error: `--fill-gaps`: it is for volumes, and `--image` is an image\nhint: remove it; the mask of an image is written \
         with `--mask-out mask.png`",
    );
    let notes = path("scan.dat");
    std::fs::write(&notes, b"scan of a phantom").unwrap();
    let ran = run(&mut predict(&notes, &["--out", "mask.nii.gz"]));
    assert!(ran.stderr.contains("scan.dat: is not a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM image"), "{}", ran.stderr);
    refused(
        &mut predict(&fixture("oblique.zip"), &["--out", "missing/mask.nii"]),
        "error: `--out`: `missing` is not a folder\nhint: create the folder first, or choose another path",
    );
}

/// The files of a zipped series in a new folder.
fn unzipped(name: &str) -> PathBuf {
    let folder = folder(&format!("bad-{name}"));
    zip::ZipArchive::new(fs::File::open(fixture(name)).unwrap()).unwrap().extract(&folder).unwrap();
    folder
}

/// A zip of a file of zeros, which is a thousandth of its size.
fn zip_bomb() -> PathBuf {
    let bomb = path("bomb.zip");
    let mut archive = zip::ZipWriter::new(fs::File::create(&bomb).unwrap());
    archive.start_file("slice", zip::write::SimpleFileOptions::default()).unwrap();
    archive.write_all(&vec![0; 140 << 20]).unwrap();
    archive.finish().unwrap();
    bomb
}

#[test]
fn bad_volumes_are_refused_with_file_and_remedy() {
    let (series, positions) =
        ("remove localizers and other images that do not belong to the volume", "orientations.zip");
    for (image, window, reason, hint) in [
        (
            unzipped("two_series.zip"),
            "lung",
            "it has 2 series: number 1 (CT, 4 slices of 6x5); number 5",
            "choose a series",
        ),
        (unzipped("gap.zip"), "lung", "about 1 slice is missing", "export the whole series again"),
        (unzipped(positions), "lung", "it has another orientation than the first slice", series),
        (unzipped("sizes.zip"), "lung", "its images have different sizes or kinds", series),
        (fixture("nan.nii.gz"), "lung", "2 of 120 voxels are NaN or infinite", "numpy.nan_to_num"),
        (fixture("four.nii.gz"), "lung", "it is a series of 3 volumes of 6x5x4 voxels (4-D)", "four.nii.gz#0"),
        (zip_bomb(), "lung", "more than 200 times as large as the file", "give the folder of one series"),
        (fixture("axial.zip"), "0/40", "the width of a window must be larger than 0", ""),
    ] {
        let mut command = predict(&image, &["--window", window, "--out", "never.nii.gz"]);
        let ran = run(&mut command);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{}", ran.stderr);
        let error = ran.stderr.as_str();
        assert!(error.contains(reason) && error.contains(hint), "{error}");
        // a flag is refused without its file
        let name = if window == "lung" { image.file_name().unwrap().to_str().unwrap() } else { "--window" };
        assert!(error.contains(name), "`{name}` is not named: {error}");
    }
}

#[test]
fn overlays_are_left_out_and_said() {
    let mut object = dicom_object::open_file(fixture("explicit_le.dcm")).unwrap();
    let overlay = dicom_core::PrimitiveValue::from([1_u16, 1]);
    object.put(dicom_core::DataElement::new(dicom_core::Tag(0x6000, 0x3000), dicom_core::VR::OW, overlay));
    let file = path("overlay.dcm");
    object.write_to_file(&file).unwrap();
    let ran = run(&mut predict(&file, &["--window", "p0-p100"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let lines: Vec<&str> = ran.stderr.lines().collect();
    assert!(lines.iter().any(|line| line.contains("graphic overlays of the files are ignored")), "{}", ran.stderr);
}

#[test]
fn label_maps_on_another_grid_are_resampled_on_request_only() {
    let (volume, labels) = (fixture("ras_i16.nii.gz"), path("shifted-labels.nii"));
    // 10 mm to the side
    let mut bytes = Vec::new();
    let packed = fs::File::open(fixture("labels_las.nii.gz")).unwrap();
    flate2::read::GzDecoder::new(packed).read_to_end(&mut bytes).unwrap();
    let offset = f32::from_le_bytes(bytes[292..296].try_into().unwrap()) + 1.0;
    bytes[292..296].copy_from_slice(&offset.to_le_bytes());
    bytes[252..254].fill(0);
    fs::write(&labels, bytes).unwrap();
    let prepare = |more: &[&str]| {
        let mut command = prsmed();
        command.args(["data", "prepare", "--modality", "ct", "--labels", "2=liver", "--images"]).arg(&volume);
        command.arg("--masks").arg(&labels).arg("--out").arg(path("resampled-labels")).args(more);
        command
    };
    let ran = run(&mut prepare(&[]));
    let error = ran.stderr.as_str();
    assert!(ran.code == Some(2) && !path("resampled-labels").exists(), "{error}");
    for part in ["shifted-labels.nii", "its grid is not that of the volume", "--resample"] {
        assert!(error.contains(part), "{error}");
    }
    let ran = run(&mut prepare(&["--resample"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("nearest"), "the user is not told: {}", ran.stderr);
}

#[test]
fn the_window_of_dicom_images_is_not_that_of_other_images_beside_them() {
    let many = folder("dicom-and-png");
    fs::copy(fixture("explicit_le.dcm"), many.join("a.dcm")).unwrap();
    image::GrayImage::from_pixel(32, 32, image::Luma([90])).save(many.join("b.png")).unwrap();
    let mut command = prsmed();
    command.arg("predict").arg(&trained().0).args(["--question", "Where?", "--max-new-tokens", "1", "--images"]);
    command.arg(&many).args(["--window", "p0-p100", "--out"]).arg(path("dicom-and-png-out"));
    assert!(done(&mut command).contains("questions answered: 2"));
}

#[test]
fn a_question_of_ten_thousand_words_is_refused_before_the_model_is_loaded() {
    let words = "word ".repeat(10_000);
    let expected = "error: `--question`: the question has 50000 characters; at most 4000 are allowed\nhint: ask a shorter question";
    let many = folder("long-questions");
    fs::copy(fixture("explicit_le.dcm"), many.join("a.dcm")).unwrap();
    for flags in [["--image"], ["--images"]] {
        let mut command = prsmed();
        command.args(["predict", "no-such-run", "--question", &words]).args(flags);
        let image = if flags == ["--image"] { many.join("a.dcm") } else { many.clone() };
        command.arg(image);
        if flags == ["--images"] {
            command.arg("--out").arg(path("long-questions-out"));
        }
        refused(&mut command, expected);
    }
}
