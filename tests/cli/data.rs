//! Bad data roots: `data check` lists every bad row, `train` stops with an error.

use std::fs;
use std::path::{Path, PathBuf};

use image::{GrayImage, Luma};

use crate::support::{copy, done, error_text, objects, path, phantoms, prsmed, refused, run, train};

/// A copy of the phantoms with one training row to break.
struct Broken {
    root: PathBuf,
    /// Relative to the root, and the line in it.
    csv: String,
    line: usize,
    image: String,
    mask: String,
}

impl Broken {
    /// Selects a row whose image has the extension `kind`.
    fn new(name: &str, kind: &str) -> Self {
        let root = copy(phantoms(), name);
        let mut tables: Vec<PathBuf> =
            fs::read_dir(root.join("annotations")).unwrap().map(|entry| entry.unwrap().path()).collect();
        tables.sort();
        for csv in tables {
            let text = fs::read_to_string(&csv).unwrap();
            for (line, row) in (1..).zip(text.lines()) {
                let mask = row.split(',').next().unwrap().to_owned();
                let image = Path::new(&mask.replace("_masks", "_images")).with_extension(kind);
                if mask.contains("/train_masks/") && root.join(&image).is_file() {
                    let csv = csv.strip_prefix(&root).unwrap().display().to_string();
                    return Self { image: image.display().to_string(), mask, csv, line, root };
                }
            }
        }
        panic!("no {kind} image among the phantoms");
    }

    fn file(&self, relative: &str) -> PathBuf {
        self.root.join(relative)
    }

    /// Replaces text in the row.
    fn edit(&self, change: impl Fn(&str) -> String) {
        let csv = self.file(&self.csv);
        let text = fs::read_to_string(&csv).unwrap();
        let lines: Vec<String> = (1..)
            .zip(text.lines())
            .map(|(line, row)| if line == self.line { change(row) } else { row.to_owned() })
            .collect();
        fs::write(csv, lines.join("\n") + "\n").unwrap();
    }

    /// `data check` lists exactly this row, with `reason`, as text and as JSON, with exit code 1.
    fn is_reported(&self, reason: &str) {
        let ran = run(prsmed().args(["data", "check"]).arg(&self.root));
        let expected = format!("{}/{}:{}: {reason}", self.root.display(), self.csv, self.line);
        assert_eq!((ran.stdout.lines().next(), ran.code), (Some(expected.as_str()), Some(1)), "{}", ran.stderr);
        assert!(ran.stdout.ends_with(", 1 bad\n"), "{}", ran.stdout);
        let ran = run(prsmed().args(["--json", "data", "check"]).arg(&self.root));
        let found = objects(&ran.stdout);
        assert_eq!((ran.code, found.len(), &found[0]["good"]), (Some(1), 1, &false.into()));
        assert_eq!((&found[0]["bad"][0]["reason"], &found[0]["bad"][0]["line"]), (&reason.into(), &self.line.into()));
    }

    /// `train` fails with the row, the reason and the hint.
    fn is_refused(&self, reason: &str, hint: &str) {
        let out = path("refused-by-train").join(self.root.file_name().unwrap());
        let ran = run(&mut train(&self.root, &out, &["train.epochs=1", "data.max_bad_samples=0"]));
        let root = format!("~/{}", self.root.file_name().unwrap().to_str().unwrap());
        let reason = reason.replace(self.root.to_str().unwrap(), &root);
        let expected =
            format!("error: {root}/{}:{}: {reason}\nhint: {}", self.csv, self.line, hint.replace("ROOT", &root));
        assert_eq!((error_text(&ran), ran.code), (expected, Some(2)));
    }

    fn at(&self, relative: &str) -> String {
        self.file(relative).display().to_string()
    }
}

const LIST: &str = "list all of them with `prsmed data check ROOT`, then repair or remove the rows";
const REPLACE: &str = "replace the file or remove its row";

#[test]
fn a_missing_data_root_is_an_error() {
    let hint = "hint: check the path; a data root contains one folder for each modality, and `annotations/`";
    let message = format!("error: ~/nowhere: the data root is not a folder\n{hint}");
    refused(prsmed().args(["data", "check"]).arg(path("nowhere")), &message);
    refused(&mut train(&path("nowhere"), &path("never"), &[]), &message);
    assert!(!path("never").exists(), "a failed run creates no folder");
}

#[test]
fn training_without_a_data_root_is_an_error() {
    let ran = run(prsmed().env("CUDA_VISIBLE_DEVICES", "").args(["train", "--out", "never"]));
    let expected = "error: `--data-root`: is required\n\
                    hint: add `--data-root DIR`; to try the program, generate one with `prsmed data phantom phantoms`";
    assert_eq!((error_text(&ran).as_str(), ran.code, ran.stdout.as_str()), (expected, Some(2), ""));
    // without a GPU, and without a preset
    let note = "note: no usable GPU (`prsmed doctor` explains why): using preset `tiny`, ";
    assert!(ran.stderr.contains(note), "{}", ran.stderr);
}

#[test]
fn missing_annotations_are_an_error() {
    let root = copy(phantoms(), "no-annotations");
    fs::remove_dir_all(root.join("annotations")).unwrap();
    refused(
        &mut train(&root, &path("never"), &[]),
        "error: ~/no-annotations: the data root contains neither `annotations` nor `annotation`\n\
         hint: make a data root of images and masks with `prsmed data prepare`, or give the folder of the CSV files with \
         `--annotations DIR`",
    );
    refused(
        train(&root, &path("never"), &[]).arg("--annotations").arg(path("none")),
        "error: ~/none: there is no such file or folder of annotations\nhint: check `--annotations`",
    );
    done(prsmed().args(["data", "check"]).arg(root).arg("--annotations").arg(phantoms().join("annotations")));
}

#[test]
fn a_missing_column_is_an_error() {
    let broken = Broken::new("wrong-column", "png");
    let csv = broken.file(&broken.csv);
    fs::write(&csv, fs::read_to_string(&csv).unwrap().replacen("answer", "reply", 1)).unwrap();
    let message = format!(
        "error: ~/wrong-column/{}:1: column `answer` is missing; \
         the header is `image_path,question,reply,position,split`\n\
         hint: the first line must name the columns `image_path`, `question`, `answer` and `split` \
         (`position` and others are optional)",
        broken.csv
    );
    refused(&mut train(&broken.root, &path("never"), &[]), &message);
    refused(prsmed().args(["data", "check"]).arg(&broken.root), &message);
}

#[test]
fn a_missing_image_is_a_bad_row() {
    let broken = Broken::new("missing-image", "png");
    fs::remove_file(broken.file(&broken.image)).unwrap();
    let image = Path::new(&broken.image);
    let reason = format!(
        "no image `{}` (png, jpg, jpeg, tif, tiff, bmp, gif, webp, pgm, ppm) in `{}`",
        image.file_stem().unwrap().display(),
        image.parent().unwrap().display()
    );
    broken.is_reported(&reason);
    broken.is_refused(&format!("{reason} (the only bad row)"), LIST);
}

#[test]
fn a_corrupt_png_is_a_bad_row() {
    let broken = Broken::new("corrupt-png", "png");
    let mut bytes = fs::read(broken.file(&broken.image)).unwrap();
    bytes.truncate(bytes.len() / 2);
    fs::write(broken.file(&broken.image), bytes).unwrap();
    let reason = format!("{}: cannot be decoded: unexpected end of file", broken.at(&broken.image));
    broken.is_reported(&reason);
    broken.is_refused(&reason, REPLACE);
}

#[test]
fn a_truncated_jpeg_is_a_bad_row() {
    let broken = Broken::new("truncated-jpeg", "jpg");
    let mut bytes = fs::read(broken.file(&broken.image)).unwrap();
    bytes.truncate(bytes.len() * 2 / 3);
    fs::write(broken.file(&broken.image), bytes).unwrap();
    let reason = format!("{}: cannot be decoded: the JPEG is truncated", broken.at(&broken.image));
    broken.is_reported(&reason);
    broken.is_refused(&reason, REPLACE);
    let ran = run(&mut train(&broken.root, &path("skips-truncated-jpeg"), &["train.epochs=1"]));
    let skipped = format!("{}:{}: {reason}; the sample is skipped (1 of at most 10)", broken.csv, broken.line);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains(&skipped), "{}", ran.stderr);
    assert!(ran.stdout.contains(", samples skipped because their files cannot be read: 1\n"), "{}", ran.stdout);
}

#[test]
fn a_mask_of_another_size_is_a_bad_row() {
    let broken = Broken::new("size-mismatch", "png");
    GrayImage::from_pixel(32, 48, Luma([255])).save(broken.file(&broken.mask)).unwrap();
    let reason = format!("{}: the mask is 32x48 pixels but its image is 64x64", broken.at(&broken.mask));
    broken.is_reported(&reason);
    broken.is_refused(&reason, "export image and mask at one size");
}

#[test]
fn an_empty_mask_is_a_bad_row() {
    let broken = Broken::new("empty-mask", "png");
    GrayImage::new(64, 64).save(broken.file(&broken.mask)).unwrap();
    broken.is_reported(&format!("{}: the mask is empty", broken.at(&broken.mask)));
}

#[test]
fn an_unknown_split_is_a_bad_row() {
    let broken = Broken::new("unknown-split", "png");
    broken.edit(|row| row.replace(",train", ",training"));
    let reason = "split `training` is not one of `train`, `val`, `test`";
    broken.is_reported(reason);
    broken.is_refused(&format!("{reason} (the only bad row)"), LIST);
    let out = path("skipped-row");
    let ran = run(train(&broken.root, &out, &["train.max_steps=1"]).arg("--skip-bad-rows"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let row = format!("{}/{}:{}: {reason}", broken.root.display(), broken.csv, broken.line);
    assert!(ran.stderr.contains(&format!("warning: 1 bad rows are left out: {row}\n")), "{}", ran.stderr);
    let classes = "`abdomen_CT`, `brain_MRI`, `polyp_endoscopy`, `skin_dermoscopy`";
    let warning = format!("warning: these classes have no validation images: {classes}\n");
    assert!(ran.stderr.contains(&warning), "{}", ran.stderr);
}

#[test]
fn a_stray_quote_is_a_bad_row() {
    let broken = Broken::new("stray-quote", "png");
    let text = fs::read_to_string(broken.file(&broken.csv)).unwrap();
    let before: Vec<&str> = text.lines().take(broken.line - 1).collect();
    let row = |start: &str, question: &str| format!("{start}{question},There.,center,train");
    let start = format!("{},", broken.mask);
    let rows = [row(&start, "\"Where?"), row(&start, "Where is it?"), row(&start, "Where else?")].join("\n");
    fs::write(broken.file(&broken.csv), format!("{}\n{rows}\n", before.join("\n"))).unwrap();
    let reason = "column `question` begins with a double quote that is never closed; \
                  close the double quote, or write a double quote inside a text as `\"\"`";
    broken.is_reported(reason);
    broken.is_refused(&format!("{reason} (the only bad row)"), LIST);
}

#[test]
fn a_panorama_is_no_reason_to_run_out_of_memory() {
    let broken = Broken::new("panorama", "png");
    let (width, height) = (60_000, 1);
    image::RgbImage::new(width, height).save(broken.file(&broken.image)).unwrap();
    GrayImage::from_pixel(width, height, Luma([255])).save(broken.file(&broken.mask)).unwrap();
    done(prsmed().args(["data", "check"]).arg(&broken.root));
    done(&mut train(&broken.root, &path("panorama-run"), &["train.epochs=1", "train.validate_every_epochs=0"]));
}

#[test]
fn pipes_and_devices_are_bad_rows() {
    let broken = Broken::new("pipe", "png");
    for (file, what) in [(&broken.image, "image"), (&broken.mask, "mask")] {
        let path = broken.file(file);
        let whole = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let reason = format!("{what} `{file}` is not a regular file (a folder, pipe or device)");
        broken.is_reported(&reason);
        broken.is_refused(&format!("{reason} (the only bad row)"), LIST);
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        broken.is_reported(&reason);
        fs::remove_file(&path).unwrap();
        fs::write(&path, whole).unwrap();
    }
    let csv = broken.file("annotations/more.csv");
    assert!(std::process::Command::new("mkfifo").arg(&csv).status().unwrap().success());
    refused(
        prsmed().args(["data", "check"]).arg(&broken.root),
        "error: ~/pipe/annotations/more.csv: it is not a regular file (a folder, pipe or device)\n\
         hint: give a CSV file of at most 4 GiB, or several files",
    );
}

#[test]
fn a_label_map_needs_labels_in_check_training_and_evaluation() {
    let root = copy(phantoms(), "label-maps");
    let masks = masks_of(&root);
    let with_other = masks.iter().position(|mask| mask.parent().unwrap().ends_with("train_masks")).unwrap();
    for (number, mask) in masks.into_iter().enumerate() {
        let one = image::open(&mask).unwrap().to_luma8();
        // the target is label 2; a larger label is beside it in one mask
        let map = GrayImage::from_fn(one.width(), one.height(), |x, y| {
            let is_other = number == with_other && one.get_pixel(x, y).0[0] < 128 && x < 8;
            Luma([if is_other { 9 } else { 2 * u8::from(one.get_pixel(x, y).0[0] >= 128) }])
        });
        map.save(&mask).unwrap();
    }
    let ran = run(prsmed().args(["data", "check"]).arg(&root));
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert!(ran.stdout.contains(": the mask has several labels: 2 ("), "{}", ran.stdout);
    assert!(
        ran.stderr.contains("warning: these classes have no `test` images: `breast_ultrasound`, "),
        "{}",
        ran.stderr
    );
    let found = objects(&run(prsmed().args(["--json", "data", "check"]).arg(&root)).stdout);
    assert_eq!((found.len(), &found[0]["uncovered"][0]["split"]), (1, &"val".into()));
    let out = path("label-run");
    let all = ["train.epochs=1", "train.validate_every_epochs=0", "data.val_frac=0.0"];
    let ran = run(&mut train(&root, &out, &all));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(error_text(&ran).contains("the mask has several labels: 2 ("), "{}", ran.stderr);
    assert!(error_text(&ran).contains("choose the labels of the target, for example `--labels 1,3`"), "{}", ran.stderr);

    done(prsmed().args(["data", "check", "--labels", "2"]).arg(&root));
    let out = path("label-run-2");
    done(train(&root, &out, &all).args(["--labels", "2"]));
    let config = fs::read_to_string(out.join("config.toml")).unwrap();
    assert!(config.contains("labels = \"2\""), "{config}");
    done(
        prsmed()
            .arg("eval")
            .arg(&out)
            .arg("--data-root")
            .arg(&root)
            .args(["--split", "train", "--max-new-tokens", "1"]),
    );
}

/// The masks of all splits.
fn masks_of(root: &Path) -> Vec<PathBuf> {
    let mut masks = Vec::new();
    for class in fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()) {
        for split in ["train_masks", "val_masks", "test_masks"] {
            let files = fs::read_dir(class.join(split)).into_iter().flatten();
            masks.extend(files.map(|entry| entry.unwrap().path()));
        }
    }
    masks.sort();
    masks
}

#[test]
fn control_characters_of_a_csv_file_are_escaped() {
    let broken = Broken::new("control", "png");
    broken.edit(|row| row.replace(",train", ",\x1b]0;owned\x07"));
    let ran = run(prsmed().args(["data", "check"]).arg(&broken.root));
    assert!(
        ran.stdout.contains(": split `\\u{1b}]0;owned\\u{7}` is not one of `train`, `val`, `test`\n"),
        "{}",
        ran.stdout
    );
    let out = path("never");
    let ran = run(&mut train(&broken.root, &out, &[]));
    assert!(ran.stderr.contains("split `\\u{1b}]0;owned\\u{7}` is not one of"), "{}", ran.stderr);
    assert!(!ran.stderr.contains(['\x1b', '\x07']), "{}", ran.stderr);
}

#[test]
fn an_empty_text_and_a_duplicate_are_bad_rows() {
    let broken = Broken::new("empty-text", "png");
    broken.edit(|row| format!("{},,an answer,center,train", row.split(',').next().unwrap()));
    broken.is_reported("column `question` is empty");
    let broken = Broken::new("duplicate", "png");
    let csv = broken.file(&broken.csv);
    let text = fs::read_to_string(&csv).unwrap();
    let row = text.lines().nth(broken.line - 1).unwrap();
    fs::write(&csv, format!("{text}{row}\n")).unwrap();
    let name = csv.file_name().unwrap().display().to_string();
    let reason = format!("repeats the row in line {} of `{name}`", broken.line);
    Broken { line: text.lines().count() + 1, ..broken }.is_reported(&reason);
}

#[test]
fn a_test_image_that_trains_is_refused_unless_it_is_allowed() {
    let broken = Broken::new("leak", "png");
    let name = "brain_MRI/test_images/leak.png";
    fs::copy(broken.file(&broken.image), broken.file(name)).unwrap();
    fs::copy(broken.file(&broken.mask), broken.file("brain_MRI/test_masks/leak.png")).unwrap();
    let csv = broken.file(&broken.csv);
    let text = fs::read_to_string(&csv).unwrap();
    fs::write(&csv, format!("{text}brain_MRI/test_masks/leak.png,Where?,There.,center,test\n")).unwrap();
    let leak = "1 image (equal files) is in train and test: ";
    let ran = run(prsmed().args(["data", "check"]).arg(&broken.root));
    assert_eq!(ran.code, Some(1), "{}", ran.stdout);
    assert!(
        ran.stdout.contains(&format!("leak: {leak}")) && ran.stdout.contains("`--allow-leak` continues"),
        "{}",
        ran.stdout
    );
    assert!(ran.stdout.contains(&broken.image) && ran.stdout.contains(name), "{}", ran.stdout);
    let ran = run(prsmed().args(["data", "check", "--allow-leak"]).arg(&broken.root));
    assert_eq!(ran.code, Some(0), "{}", ran.stdout);
    assert!(ran.stderr.contains(&format!("warning: {leak}")), "{}", ran.stderr);
}

#[test]
fn the_rows_of_a_good_data_root_are_counted() {
    let text = done(prsmed().args(["data", "check"]).arg(phantoms()));
    let (text, next) = text.trim_end().rsplit_once('\n').unwrap();
    assert_eq!(next, format!("next: prsmed train --data-root {}", phantoms().display()));
    insta::assert_snapshot!(text, @r"
    modality           images  patients  width  height  mm/pixel     grey   foreground %  labels  absent  unknown
    abdomen_CT              4         -     64      64         -   0..224  4.3..7.4..9.0     255       0        0
    brain_MRI               4         -     64      64         -   2..226  4.0..4.1..4.8     255       0        0
    breast_ultrasound       5         -     64      64         -  14..214  4.3..6.1..7.1     255       0        0
    lung_Xray               5         -     64      64         -  28..238  4.7..5.9..7.0     255       0        0
    polyp_endoscopy         3         -     64      64         -   1..211  4.0..5.6..6.6     255       0        0
    skin_dermoscopy         3         -     64      64         -  58..192  4.6..5.7..9.4     255       0        0
    8 image files are copies of another one

    modality           % of rows   units  train/val/test  largest patient  targets  < 2 cells  at border
    abdomen_CT              16.7  images           3/0/1                -        4          0          0
    brain_MRI               16.7  images           2/0/2                -        4          0          0
    breast_ultrasound       20.8  images           3/2/0                -        5          0          0
    lung_Xray               20.8  images           3/2/0                -        5          0          0
    polyp_endoscopy         12.5  images           3/0/0                -        3          0          0
    skin_dermoscopy         12.5  images           3/0/0                -        3          0          0
    the mask head draws on 64 x 64 cells
    advice: class `abdomen_CT`: its test split has 1 image: `prsmed eval` gives intervals from 4 images on
    advice: class `brain_MRI`: its test split has 2 images: `prsmed eval` gives intervals from 4 images on
    advice: class `breast_ultrasound`: its test split has 0 images: `prsmed eval` gives intervals from 4 images on
    advice: class `lung_Xray`: its test split has 0 images: `prsmed eval` gives intervals from 4 images on
    advice: class `polyp_endoscopy`: its test split has 0 images: `prsmed eval` gives intervals from 4 images on
    advice: class `skin_dermoscopy`: its test split has 0 images: `prsmed eval` gives intervals from 4 images on

    modality            train     val    test     all
    abdomen_CT              3       0       1       4
    brain_MRI               2       0       2       4
    breast_ultrasound       3       2       0       5
    lung_Xray               3       2       0       5
    polyp_endoscopy         3       0       0       3
    skin_dermoscopy         3       0       0       3
    all                    17       4       3      24
    24 rows of 24 images, no bad rows
    ");
}

#[test]
fn phantoms_do_not_overwrite_other_content() {
    refused(
        prsmed().args(["data", "phantom", "--count", "3"]).arg(phantoms()),
        "error: ~/phantoms: contains phantoms made with other options\nhint: give another folder or remove this one",
    );
    refused(
        prsmed().args(["data", "phantom", "never", "--image-size", "7"]),
        "error: `--image-size`: 7 is out of range\nhint: give 32 to 2048 pixels",
    );
}

#[test]
fn settings_decide_the_grid_of_a_check() {
    let folder = crate::support::folder("data-check-grid");
    let (settings, page) = (folder.join("small.toml"), folder.join("check.html"));
    fs::write(&settings, "preset = \"tiny\"\n").unwrap();
    let side = |flags: &[&str]| {
        let ran = run(prsmed().args(["--json", "data", "check"]).arg(phantoms()).args(flags));
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        objects(&ran.stdout).pop().unwrap()["target_sizes"]["grid_side"].clone()
    };
    assert_eq!(side(&[]), 64, "the preset `full`: 1024 pixels, 16 of them in a cell");
    assert_eq!(side(&["--config", settings.to_str().unwrap(), "--html", page.to_str().unwrap()]), 16);
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("draws on 16 x 16 cells") && page.contains("Classes and patients"), "{page}");
}
