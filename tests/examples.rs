//! Every example runs.

#![expect(clippy::unwrap_used, reason = "a test panics where an application would report")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

use image::codecs::jpeg::JpegEncoder;
use image::{DynamicImage, ImageBuffer, ImageEncoder, Luma, RgbImage};
use prsmed::data::volume::{SegmentMask, write};
use prsmed::event::Silent;
use prsmed::front::{ImageOrVolume, ImageReading};
use prsmed::prelude::*;
use serde_json::{Value, json};
use sha2::Digest;

#[path = "../examples/custom_task.rs"]
mod custom_task;
#[path = "../examples/plan_memory.rs"]
mod plan_memory;
#[path = "../examples/predict.rs"]
mod predict;
#[path = "../examples/train.rs"]
mod train;

/// The examples measure memory and seed generators of the whole process.
static TURN: Mutex<()> = Mutex::new(());

fn run(example: fn() -> Result<(), Box<dyn std::error::Error>>) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    example().expect("the example runs");
}

#[test]
fn a_training() {
    run(train::main);
}

#[test]
fn a_prediction() {
    run(predict::main);
}

/// Sets the presence threshold of a run.
fn set_threshold(run: &Path, threshold: f64) {
    for folder in ["best", "last"].map(|name| run.join(name)).iter().filter(|folder| folder.is_dir()) {
        let read = |name: &str| -> Value {
            serde_json::from_slice(&std::fs::read(folder.join(name)).expect("read")).expect("JSON")
        };
        let (mut model, mut sums) = (read("model.json"), read("checksums.json"));
        let calibration =
            json!({ "temperature": 1.0, "presence_threshold": threshold, "num_present": 1, "num_absent": 1 });
        model["calibration"] = calibration;
        let text = model.to_string();
        sums["files"]["model.json"] =
            json!({ "bytes": text.len(), "sha256": format!("{:x}", sha2::Sha256::digest(&text)) });
        std::fs::write(folder.join("model.json"), text).expect("written");
        std::fs::write(folder.join("checksums.json"), sums.to_string()).expect("written");
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A folder with an image of each kind: PNG of 8 and 16 bits, a JPEG that its EXIF block turns, TIFF, a DICOM slice.
fn images(folder: &Path, photograph: &Path) -> PathBuf {
    let images = folder.join("images");
    std::fs::create_dir(&images).unwrap();
    // bright where no symmetry hides a rotation
    let byte = |value: u32| u8::try_from(value).expect("a byte");
    let colour = |x, y| if x > 40 && y < 20 { [250, 40, 30] } else { [byte(3 * x), byte(4 * y), 90] };
    let pixels = RgbImage::from_fn(60, 40, |x, y| image::Rgb(colour(x, y)));
    let mut bytes = Vec::new();
    let mut encoder = JpegEncoder::new_with_quality(&mut bytes, 95);
    let exif = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0";
    encoder.set_exif_metadata(exif.to_vec()).unwrap();
    encoder.encode_image(&DynamicImage::from(pixels)).unwrap();
    std::fs::write(images.join("turned.jpg"), bytes).unwrap();
    let grey = ImageBuffer::from_fn(50, 30, |x, y| Luma([u16::try_from(1200 * x + 150 * y).expect("16 bits")]));
    DynamicImage::ImageLuma16(grey).save(images.join("deep.png")).unwrap();
    for (from, to) in [
        (photograph.to_path_buf(), "plain.png"),
        (fixture("preprocess/rgb_50x37.tif"), "colour.tif"),
        (fixture("volumes/monochrome1.dcm"), "slice.dcm"),
    ] {
        std::fs::copy(from, images.join(to)).unwrap();
    }
    images
}

/// Runs `prsmed predict RUN --question QUESTION` and gives its last record.
fn predicted(run: &Path, question: &str, arguments: &[&Path]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_prsmed"));
    command.env("OMP_NUM_THREADS", "1").args(["--json", "predict", "--question", question]).arg(run);
    let output = command.args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    serde_json::from_str(text.trim_end().lines().last().unwrap()).unwrap()
}

/// Compares an answer of the library with a record and a mask of the command.
fn check(found: &Prediction, record: &Value, mask: &Path) {
    let target = found.target();
    let expected = json!([found.answer, target.confidence, found.class.as_ref().map(|(name, _)| name)]);
    assert_eq!(json!([record["answer"], record["confidence"], record["modality"]]), expected, "{record}");
    assert_eq!(found.binary_mask().unwrap(), image::open(mask).unwrap().into_luma8(), "{record}");
    assert!(target.probabilities.iter().any(|probability| *probability >= 0.5), "{record}");
    let is_empty = target.num_foreground() == 0;
    assert_eq!(is_empty, !target.confidence.is_found, "{record}");
}

#[test]
fn the_library_answers_as_the_command_does_to_every_kind_of_image() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (folder, runtime) = (tempfile::tempdir().unwrap(), Runtime::new());
    let (run, photograph, question) = predict::tiny_run(folder.path(), &runtime).unwrap();
    let (images, ask) = (images(folder.path(), &photograph), Ask::new(&question));
    for (threshold, name) in [(0.0, "found"), (1.0, "withheld")] {
        set_threshold(&run, threshold);
        let model = Model::open(&run, &OpenOptions::default(), &runtime).unwrap();
        let out = folder.path().join(name);
        predicted(&run, &question, &["--images".as_ref(), &images, "--out".as_ref(), &out]);
        let journal = std::fs::read_to_string(out.join("results.jsonl")).unwrap();
        let records: Vec<Value> = journal.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(records.len(), 5);
        for record in &records {
            let image = Image::File(images.join(record["image"].as_str().unwrap()));
            let found = model.predict(&image, &ask).unwrap();
            assert_eq!(found.target().confidence.is_found, threshold < 1.0);
            check(&found, record, &out.join(record["mask"].as_str().unwrap()));
        }
    }
    // one image alone, by two runs
    set_threshold(&run, 0.0);
    let other = run.join("last");
    let model = Model::open(&run, &OpenOptions { ensemble: vec![other.clone()], ..OpenOptions::default() }, &runtime);
    let (image, mask) = (images.join("slice.dcm"), folder.path().join("mask.png"));
    let flags = ["--image".as_ref(), &*image, "--mask-out".as_ref(), &mask, "--ensemble".as_ref(), &other];
    let record = predicted(&run, &question, &flags);
    let found = model.unwrap().predict(&Image::File(image.clone()), &ask).unwrap();
    assert_eq!(json!(found.target().agreement), record["agreement"], "{record}");
    check(&found, &record, &mask);
}

#[test]
fn the_library_segments_a_volume_as_the_command_does() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (folder, runtime) = (tempfile::tempdir().unwrap(), Runtime::new());
    let (run, _, question) = predict::tiny_run(folder.path(), &runtime).unwrap();
    let (file, [theirs, ours]) =
        (fixture("volumes/ras_i16.nii.gz"), ["theirs.nii.gz", "ours.nii.gz"].map(|name| folder.path().join(name)));
    let record = predicted(&run, &question, &["--image".as_ref(), &file, "--out".as_ref(), &theirs]);
    let model = Model::open(&run, &OpenOptions::default(), &runtime).unwrap();
    let reading = ImageReading::default().with_training(model.description(), &Silent).unwrap();
    let ImageOrVolume::Volume(volume) = reading.open(&file, &Silent).unwrap() else { panic!("a volume") };
    let settings = reading.settings(&volume, &question).unwrap();
    let found = model.segment(&volume, &settings, &Silent, &AtomicBool::new(false), None).unwrap();
    write::segments(&ours, &[SegmentMask { name: &question, mask: &found.mask }], &volume).unwrap();
    assert_eq!((json!(found.slices), json!(found.volume_ml)), (record["slices"].clone(), record["volume_ml"].clone()));
    assert!(found.slices.len() > 1 && found.volume_ml > 0.0, "{record}");
    assert_eq!(std::fs::read(ours).unwrap(), std::fs::read(theirs).unwrap());
}

#[test]
fn a_memory_plan() {
    run(plan_memory::main);
}

#[test]
fn a_custom_task() {
    run(custom_task::main);
}
