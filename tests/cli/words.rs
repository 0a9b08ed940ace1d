//! Words that follow a mask: given masks, their errors, and how often words follow moved ones.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use image::{GrayImage, ImageBuffer, Luma};
use serde_json::Value;

use crate::scores::class_files;
use crate::support::{copy, done, objects, path, phantoms, prsmed, refused, run, trained, update_checksum};

/// A mask of this size with a box in the lower right corner.
fn mask(name: &str, side: u32) -> PathBuf {
    let file = path(name);
    let is_inside = |x: u32, y: u32| 4 * x > 3 * side && 4 * y > 3 * side;
    GrayImage::from_fn(side, side, |x, y| Luma([if is_inside(x, y) { 255 } else { 0 }])).save(&file).unwrap();
    file
}

fn predict(run: &Path, mask: &Path) -> Command {
    let mut command = prsmed();
    command.args(["--json", "predict", "--question", "Where is the lesion?", "--max-new-tokens", "3", "--image"]);
    command.arg(class_files(phantoms(), "test_images").remove(0)).arg(run).arg("--mask-in").arg(mask);
    command
}

/// The shared run with the setting off: the same weights without those of the reader.
fn without_reader() -> PathBuf {
    let run = copy(&trained().0.join("last"), "no-reader");
    fs::remove_file(run.join("mask_reader.safetensors")).unwrap();
    let file = run.join("model.json");
    let mut description: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    description["model"]["answer_reads_mask"] = false.into();
    description["sizes"].as_object_mut().unwrap().remove("mask_reader");
    fs::write(file, description.to_string()).unwrap();
    let checksums = run.join("checksums.json");
    let mut sums: Value = serde_json::from_slice(&fs::read(&checksums).unwrap()).unwrap();
    sums["files"].as_object_mut().unwrap().remove("mask_reader.safetensors");
    fs::write(checksums, sums.to_string()).unwrap();
    update_checksum(&run, "model.json");
    run
}

#[test]
fn words_are_written_for_a_given_mask_and_wrong_masks_are_named() {
    let given = mask("given.png", 64);
    let last = &trained().0;
    let out = path("given-out.png");
    let result = objects(&done(predict(last, &given).arg("--mask-out").arg(&out))).pop().unwrap();
    assert_eq!((&result["mask_given"], &result["confidence"]), (&Value::Bool(true), &Value::Null));
    assert_eq!(result["mask_position"], "lower right");
    assert_eq!(image::open(&out).unwrap().to_luma8(), image::open(&given).unwrap().to_luma8());
    let before = fs::read(&given).unwrap();
    let error = error_of(predict(last, &given).arg("--mask-out").arg(&given));
    assert!(error.contains("--mask-in") && error.contains("--mask-out"), "{error}");
    assert_eq!(fs::read(&given).unwrap(), before, "the given mask was replaced");
    refused(
        &mut predict(last, &mask("given-small.png", 32)),
        "error: `--mask-in`: the mask has 32x32 pixels, its image 64x64\n\
         hint: give a mask on the grid of the image",
    );
    let empty = path("given-empty.png");
    GrayImage::new(64, 64).save(&empty).unwrap();
    refused(
        &mut predict(last, &empty),
        "error: `--mask-in`: the mask has no pixel in it\n\
         hint: mark the target in it, or leave the mask out: the model then draws its own",
    );
    // words for another mask than is meant are not written without a word
    let whole = path("given-whole.png");
    GrayImage::from_pixel(64, 64, Luma([255])).save(&whole).unwrap();
    let result = objects(&done(&mut predict(last, &whole))).pop().unwrap();
    let warning = result["mask_warning"].as_str().unwrap();
    assert!(warning.starts_with("the mask covers 100.00 % of the image") && warning.contains("inverted"), "{warning}");
    let faint = path("given-faint.png");
    let probability = |x: u32, y: u32| 7000_u32.saturating_sub(20 * (x.abs_diff(32).pow(2) + y.abs_diff(32).pow(2)));
    let faint_map = ImageBuffer::from_fn(64, 64, |x, y| Luma([u16::try_from(probability(x, y)).unwrap()]));
    faint_map.save(&faint).unwrap();
    let error = error_of(&mut predict(last, &faint));
    assert!(error.contains("given-faint.png: is no mask: its largest value is 7000 of 65535"), "{error}");
    let error = error_of(&mut predict(last, faint.parent().unwrap()));
    assert!(error.contains("it is a folder, and a mask is one file"), "{error}");
    let labels = path("given-labels.png");
    GrayImage::from_fn(64, 64, |x, _| Luma([u8::try_from(x / 16).unwrap()])).save(&labels).unwrap();
    let error = error_of(&mut predict(last, &labels));
    assert!(error.contains("given-labels.png") && error.contains("labels"), "{error}");
    assert!(error.contains("hint: give a mask of one target") && !error.contains("--labels"), "{error}");
    refused(
        &mut predict(&without_reader(), &given),
        "error: `--mask-in`: the words of this run do not follow a mask\n\
         hint: train with `model.answer_reads_mask=true`",
    );
}

/// The error of a command that must fail.
fn error_of(command: &mut Command) -> String {
    let ran = run(command);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    ran.stderr
}

#[test]
fn moved_masks_are_scored_and_the_reader_changes_no_mask() {
    let eval = |run: &Path, out: &str| {
        let mut command = prsmed();
        command.args(["--json", "eval", "--limit", "2", "--max-new-tokens", "3", "--split", "train", "--data-root"]);
        command.arg(phantoms()).arg(run).arg("--out").arg(path(out));
        command
    };
    let estimates =
        |command: &mut Command| objects(&done(command)).pop().unwrap()["summary"]["all_images"]["estimates"].clone();
    let last = trained().0.join("last");
    let moved = estimates(eval(&last, "words-moved").arg("--move-masks"));
    assert!((0.0..=1.0).contains(&moved["words_follow"]["mean"].as_f64().unwrap()), "{moved}");
    let plain = without_reader();
    let off = estimates(&mut eval(&plain, "words-plain"));
    assert_eq!((&off["dice"], &off["words_follow"]), (&moved["dice"], &Value::Null));
    refused(
        eval(&plain, "words-refused").arg("--move-masks"),
        "error: `--move-masks`: the words of this run do not follow a mask\n\
         hint: leave it out, or train with `model.answer_reads_mask=true`",
    );
}
