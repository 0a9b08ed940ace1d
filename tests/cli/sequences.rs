//! Images of several sequences: from a table to a data root, a run, predictions by flag, folder and table, and their scores.

use std::fs;
use std::path::{Path, PathBuf};

use prsmed::data::volume::{self, Affine, Axis, Grid, write};
use serde_json::Value;

use crate::support::{done, folder, objects, path, prsmed, refused, run, train};

const QUESTION: &str = "Where is the lesion in this image?";
const SIZE: [usize; 3] = [12, 10, 4];

/// Volumes of two sequences and a label map of two patients, and their table.
fn volumes() -> PathBuf {
    let root = folder("sequences");
    let affine = Affine::from_columns([[-1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 3.0]], [0.0; 3]);
    let grid = Grid { size: SIZE, affine };
    let inside = |index: usize| (3..8).contains(&(index % 12)) && (2..6).contains(&(index / 12 % 10));
    let written = |name: &str, value: &dyn Fn(usize) -> usize| {
        let file = root.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let values: Vec<u8> = (0..grid.num_voxels()).map(|index| u8::try_from(value(index) % 256).unwrap()).collect();
        write::nifti_labels(&file, &values, &grid).unwrap();
    };
    for (patient, tint) in [("P1", 3), ("P2", 5)] {
        written(&format!("{patient}/T1.nii.gz"), &|index| index * 7 % 90 * tint / 3 + usize::from(inside(index)) * 60);
        written(&format!("{patient}/FLAIR.nii.gz"), &|index| index * 11 % 70 + usize::from(inside(index)) * 90);
        written(&format!("{patient}/labels.nii.gz"), &|index| usize::from(inside(index)));
    }
    let line = |patient: &str, split: &str| {
        let files = ["T1", "FLAIR", "labels"].map(|name| format!("{patient}/{name}.nii.gz")).join(",");
        format!("{files},{patient},{split},{QUESTION},The lesion is in the upper left of the image.\n")
    };
    let header = "image.T1,image.FLAIR,mask,patient,split,question,answer\n";
    fs::write(root.join("pairs.csv"), [header, &line("P1", "train"), &line("P2", "val")].concat()).unwrap();
    root
}

fn asked(trained: &Path, images: &[String]) -> std::process::Command {
    let mut command = prsmed();
    command.arg("predict").arg(trained).args(["--question", QUESTION]);
    for image in images {
        command.args(["--image", image]);
    }
    command
}

#[test]
fn a_prediction_on_sequences_is_scored_as_their_prepared_slices() {
    let (root, data, trained) = (volumes(), path("data-of-sequences"), path("run-of-sequences"));
    let mut prepare = prsmed();
    prepare.args(["data", "prepare", "--modality", "brain_MR", "--window", "0..200", "--window", "FLAIR=p1-p99"]);
    done(prepare.arg("--pairs").arg(root.join("pairs.csv")).arg("--out").arg(&data));
    done(&mut train(&data, &trained, &["train.max_steps=2"]));
    let model = fs::read_to_string(trained.join("last/model.json")).unwrap();
    let model: Value = serde_json::from_str(&model).unwrap();
    let windows = [("T1", "0..200"), ("FLAIR", "p1-p99")]
        .map(|(name, window)| serde_json::json!({ "name": name, "window": window }));
    assert_eq!(model["intensity"]["brain_MR"]["sequences"], Value::from(windows.to_vec()));

    let scores = path("eval-of-sequences");
    let mut eval = prsmed();
    eval.arg("eval").arg(&trained).args(["--split", "train", "--max-new-tokens", "1", "--data-root"]);
    done(eval.arg(&data).arg("--out").arg(&scores));
    let file = |name: &str| root.join(format!("P1/{name}.nii.gz")).display().to_string();
    let by_flag = [format!("FLAIR={}", file("FLAIR")), format!("T1={}", file("T1"))];
    let mask = path("mask-of-sequences.nii.gz");
    let predicted = |images: &[String]| {
        let text = done(asked(&trained, images).args(["--always-paint", "--json", "--out"]).arg(&mask));
        let record = objects(&text).into_iter().find(|line| line["kind"] == "result").unwrap();
        (record, volume::labels::open(&mask).unwrap())
    };
    let (record, found) = predicted(&by_flag);
    assert_eq!(record["image"], "T1=T1.nii.gz, FLAIR=FLAIR.nii.gz");
    assert_eq!(record["sequences"], Value::from(windows.to_vec()));
    // each slice has the presence and the Dice of the evaluation on the prepared slice
    let truth_file = root.join("P1/labels.nii.gz");
    let truth = volume::labels::open(&truth_file).unwrap();
    let plane = volume::SlicePlane::new(&truth.grid, Axis::Axial);
    let mut table = csv::Reader::from_path(scores.join("samples.csv")).unwrap();
    let samples: Vec<std::collections::HashMap<String, String>> = table.deserialize().map(Result::unwrap).collect();
    assert_eq!(samples.len(), SIZE[2]);
    for sample in &samples {
        let name = Path::new(&sample["image"]).file_stem().unwrap().to_string_lossy().into_owned();
        let slice: usize = name.rsplit('_').next().unwrap().parse().unwrap();
        let number = |key: &str| sample[key].parse::<f64>().unwrap();
        let presence = record["slices"][slice]["presence"].as_f64().unwrap();
        assert!((presence - number("presence")).abs() < 1e-5, "{slice}: {presence}, {sample:?}");
        let [own, wanted] = [&found, &truth].map(|map| plane.values(&map.mask(1), slice).unwrap());
        let count = |values: &[u8]| values.iter().filter(|value| **value > 0).count() as f64;
        let both = own.iter().zip(&wanted).filter(|(a, b)| **a > 0 && **b > 0).count() as f64;
        let dice = 2.0 * both / (count(&own) + count(&wanted));
        assert!((dice - number("dice")).abs() < 1e-6, "{slice}: {dice}, {sample:?}");
    }
    // a folder has the same files
    let (by_folder, same) = predicted(&[root.join("P1").display().to_string()]);
    assert_eq!((&by_folder["image"], same.mask(1)), (&record["image"], found.mask(1)));
    missing_and_wrong_sequences(&trained, &file);
    tables_of_flat_sequences(&trained);
}

/// A missing sequence is asked for and said; what does not say all sequences is refused before a model is loaded.
fn missing_and_wrong_sequences(trained: &Path, file: &dyn Fn(&str) -> String) {
    let never = path("never.nii.gz");
    let t1 = format!("T1={}", file("T1"));
    let out = |images: &[String]| {
        let mut command = asked(trained, images);
        command.arg("--out").arg(&never);
        command
    };
    let ran = run(out(&[t1.clone(), "FLAIR=none".into()]).arg("--always-paint"));
    assert!(ran.stderr.contains("FLAIR is missing: its colour is 0, and the mask may be worse"), "{}", ran.stderr);
    fs::remove_file(&never).unwrap();
    let hint = "hint: the images of this run have the sequences `T1`, `FLAIR`: give `--image T1=FILE` and \
                `--image FLAIR=FILE`, with `none` as FILE for one that is missing";
    refused(
        &mut out(std::slice::from_ref(&t1)),
        &format!("error: `--image`: the file of `FLAIR` is not given\n{hint}"),
    );
    let one = run(&mut out(&[file("T1")]));
    assert!(one.stderr.contains("does not say which sequence it is") && one.stderr.contains(hint), "{}", one.stderr);
    refused(
        out(&[t1, "FLAIR=none".into()]).args(["--window", "T2=lung"]),
        "error: `--window`: there is no sequence `T2`\nhint: the sequences are `T1`, `FLAIR`",
    );
    assert!(!never.exists());
}

/// A table has a column for each sequence.
fn tables_of_flat_sequences(trained: &Path) {
    let images = folder("flat-sequences");
    for (name, value) in [("a.png", 40), ("b.png", 90)] {
        image::GrayImage::from_fn(16, 12, |x, _| image::Luma([value + u8::try_from(x).unwrap()]))
            .save(images.join(name))
            .unwrap();
    }
    let (table, out) = (images.join("images.csv"), path("answers-of-sequences"));
    let ask = |text: &str| {
        fs::write(&table, text).unwrap();
        let mut command = prsmed();
        command.arg("predict").arg(trained).args(["--question", QUESTION, "--max-new-tokens", "1", "--images"]);
        command.arg(&table).arg("--out").arg(&out);
        command
    };
    done(&mut ask("image.T1,image.FLAIR\na.png,b.png\nb.png,none\n"));
    let mut results = csv::Reader::from_path(out.join("results.csv")).unwrap();
    let names: Vec<String> = results.records().map(|record| record.unwrap()[0].to_owned()).collect();
    assert_eq!(names, ["a.png", "b.png"]);
    for (text, expected) in [
        ("image\na.png\n", "has no column `image.T1`"),
        ("image.T1,image.FLAIR\na.png,\n", "there is no file"),
        ("image.T1,image.FLAIR\na.png,b.png\na.png,none\n", "has other sequences in an earlier line"),
        ("image.T1,image.FLAIR\nnone,none\n", "all sequences are missing"),
    ] {
        let ran = run(&mut ask(text));
        assert!(ran.code != Some(0) && ran.stderr.contains(expected), "{text}: {}", ran.stderr);
    }
}
