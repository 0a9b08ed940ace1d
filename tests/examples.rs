//! Every example runs.

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use image::codecs::jpeg::JpegEncoder;
use image::{DynamicImage, ImageBuffer, ImageEncoder, Luma, RgbImage};
use prsmed::data::decode;
use prsmed::prelude::*;
use prsmed::segment::predict::predict as probabilities;
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

#[test]
fn the_library_answers_as_the_command_does() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (folder, runtime) = (tempfile::tempdir().unwrap(), Runtime::new());
    let (run, _, question) = predict::tiny_run(folder.path(), &runtime).unwrap();
    // bright where no symmetry hides a rotation
    let byte = |value: u32| u8::try_from(value).expect("a byte");
    let colour = |x, y| if x > 40 && y < 20 { [250, 40, 30] } else { [byte(3 * x), byte(4 * y), 90] };
    let turned = folder.path().join("turned.jpg");
    let pixels = RgbImage::from_fn(60, 40, |x, y| image::Rgb(colour(x, y)));
    let mut bytes = Vec::new();
    let mut encoder = JpegEncoder::new_with_quality(&mut bytes, 95);
    let exif = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0";
    encoder.set_exif_metadata(exif.to_vec()).unwrap();
    encoder.encode_image(&DynamicImage::from(pixels)).unwrap();
    std::fs::write(&turned, bytes).unwrap();
    let deep = folder.path().join("deep.png");
    let grey = ImageBuffer::from_fn(50, 30, |x, y| Luma([u16::try_from(1200 * x + 150 * y).expect("16 bits")]));
    DynamicImage::ImageLuma16(grey).save(&deep).unwrap();

    for threshold in [0.0, 1.0] {
        set_threshold(&run, threshold);
        let loaded = LoadedModel::open(&run, &runtime).unwrap();
        for (file, size) in [(&turned, (40, 60)), (&deep, (50, 30))] {
            let image = decode::image(file).unwrap();
            let found = loaded.predict(&image, &question).unwrap();
            let out = folder.path().join("mask.png");
            let mut command = Command::new(env!("CARGO_BIN_EXE_prsmed"));
            command.env("OMP_NUM_THREADS", "1").args(["--json", "predict", "--question", &question, "--image"]);
            let output = command.arg(file).arg("--mask-out").arg(&out).arg(&run).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let line = String::from_utf8(output.stdout).unwrap().trim_end().lines().last().unwrap().to_owned();
            let record: Value = serde_json::from_str(&line).unwrap();
            let name = format!("{}, threshold {threshold}: {record}", file.display());
            assert_eq!((found.size, json!(found.answer)), (size, record["answer"].clone()), "{name}");
            assert_eq!(found.binary_mask().unwrap(), image::open(out).unwrap().into_luma8(), "{name}");
            let request = Request { image: &image, question: &question, max_new_tokens: 1 };
            let raw = probabilities(&loaded, &request, |_| ()).unwrap();
            assert!(raw.num_foreground() > 0, "{name}");
            assert_eq!(record["confidence"]["is_found"], threshold < 1.0, "{name}");
            assert_eq!(found.num_foreground(), if threshold < 1.0 { raw.num_foreground() } else { 0 }, "{name}");
        }
    }
}

#[test]
fn a_memory_plan() {
    run(plan_memory::main);
}

#[test]
fn a_custom_task() {
    run(custom_task::main);
}
