//! `prsmed predict --images`: many images with several questions, continued after an interruption.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::support::{copy, done, error_text, folder, objects, path, phantoms, prsmed, run, trained, tree};

const QUESTIONS: [&str; 2] = ["Where is the lesion?", "Is there a tumour?"];

/// Three images, one of them in a subfolder.
fn images(name: &str) -> PathBuf {
    let images = folder(name);
    let source = phantoms().join("brain_MRI/train_images");
    let mut files: Vec<PathBuf> = fs::read_dir(source).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    fs::create_dir_all(images.join("b")).unwrap();
    for (file, name) in files.iter().zip(["a.png", "b/a.png"]) {
        fs::copy(file, images.join(name)).unwrap();
    }
    fs::copy(&files[0], images.join("c.PNG")).unwrap();
    fs::write(images.join("notes.txt"), "not an image").unwrap();
    images
}

fn predict(images: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = prsmed();
    command.args(["predict", "--max-new-tokens", "3", "--images"]).arg(images).arg("--out").arg(out);
    command.args(more).arg(&trained().0);
    command
}

fn asked(questions: &[&'static str]) -> Vec<&'static str> {
    questions.iter().flat_map(|question| ["--question", question]).collect()
}

/// `(image, question)` -> row of the table.
fn table(out: &Path) -> BTreeMap<(String, String), csv::StringRecord> {
    let mut reader = csv::Reader::from_path(out.join("results.csv")).unwrap();
    reader.records().map(|row| row.unwrap()).map(|row| ((row[0].to_owned(), row[1].to_owned()), row)).collect()
}

#[test]
fn each_image_gets_the_same_mask_and_answer_as_alone() {
    let (images, out) = (images("many-images"), path("many-out"));
    let mut more = asked(&QUESTIONS);
    more.push("--overlays");
    let stdout = done(predict(&images, &out, &more).arg("--json"));
    let lines = objects(&stdout);
    assert_eq!(lines.iter().filter(|line| line["kind"] == "prediction").count(), 6);
    let result = lines.last().unwrap();
    assert_eq!((&result["answered"], &result["kept"], &result["failed"]), (&6.into(), &0.into(), &0.into()));
    let rows = table(&out);
    assert_eq!(rows.len(), 6);
    for (number, question) in QUESTIONS.iter().enumerate() {
        let alone = path("many-alone.png");
        let mut single = prsmed();
        single.args(["--json", "predict", "--max-new-tokens", "3", "--question", question, "--mask-out"]).arg(&alone);
        let stdout = done(single.arg("--image").arg(images.join("b/a.png")).arg(&trained().0));
        let expected = objects(&stdout).pop().unwrap();
        let row = &rows[&("b/a.png".to_owned(), (*question).to_owned())];
        assert_eq!(&row[2], expected["answer"].as_str().unwrap());
        let mask = if number == 0 { "masks/b/a.png" } else { "masks/b/a-2.png" };
        assert_eq!(&row[12], mask);
        assert_eq!(fs::read(out.join(mask)).unwrap(), fs::read(&alone).unwrap());
        assert!(out.join(mask.replacen("masks", "overlays", 1)).is_file());
        let area: f64 = row[9].parse().unwrap();
        assert!((area - expected["foreground_frac"].as_f64().unwrap()).abs() < 1e-6, "{row:?}");
    }
}

#[test]
fn a_repeated_command_asks_only_what_is_new_and_keeps_the_rest() {
    let (images, out) = (images("many-again"), path("many-again-out"));
    let one = asked(&QUESTIONS[..1]);
    done(&mut predict(&images, &out, &one));
    let before = tree(&out.join("masks"));
    // a process that was killed leaves a partial line and no table
    let journal = fs::read_to_string(out.join("results.jsonl")).unwrap();
    let cut = journal.trim_end().rfind('\n').unwrap() + 20;
    fs::write(out.join("results.jsonl"), &journal[..cut]).unwrap();
    fs::remove_file(out.join("results.csv")).unwrap();
    let stdout = done(&mut predict(&images, &out, &[one.clone(), vec!["--no-overwrite"]].concat()));
    assert!(stdout.starts_with("questions answered: 1, 2 answered before: "), "{stdout}");
    assert!(tree(&out.join("masks")) == before);
    assert_eq!(table(&out).len(), 3);
    // a changed image is asked again, a new question is added
    fs::copy(images.join("a.png"), images.join("c.PNG")).unwrap();
    let other = phantoms().join("lung_Xray/train_images");
    fs::copy(fs::read_dir(other).unwrap().next().unwrap().unwrap().path(), images.join("a.png")).unwrap();
    let stdout = done(&mut predict(&images, &out, &asked(&QUESTIONS)));
    assert!(stdout.starts_with("questions answered: 5, 1 answered before: "), "{stdout}");
    assert_eq!(table(&out).len(), 6);
    // other settings begin anew, or stop
    let error = run(predict(&images, &out, &one).args(["--no-overwrite", "--always-paint"]));
    assert!(
        error_text(&error).contains("has results of another model, of other images or of other settings"),
        "{}",
        error.stderr
    );
    let ran = run(predict(&images, &out, &one).arg("--always-paint"));
    assert!(ran.code == Some(0) && ran.stderr.contains("all images are asked again"), "{}", ran.stderr);
    // a file of somebody else that has the name of the journal
    fs::write(out.join("results.jsonl"), "notes of mine\n").unwrap();
    let before = tree(&out);
    let ran = run(&mut predict(&images, &out, &one));
    assert!(error_text(&ran).contains("is no list of results that this program wrote"), "{}", ran.stderr);
    assert!(tree(&out) == before);
}

#[test]
fn a_table_has_questions_of_its_own_and_bad_images_do_not_stop_the_others() {
    let (images, out) = (images("many-table"), path("many-table-out"));
    fs::write(images.join("bad.png"), "no image").unwrap();
    fs::write(images.join("jobs.csv"), "image,question\na.png,Where?\nbad.png,Where?\na.png,\nb/a.png,What?\n")
        .unwrap();
    let ran = run(&mut predict(&images.join("jobs.csv"), &out, &["--question", "Is it there?"]));
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert!(ran.stdout.starts_with("questions answered: 3, 1 failed"), "{}", ran.stdout);
    let rows = table(&out);
    let asked: Vec<(&str, &str)> = rows.keys().map(|(image, question)| (image.as_str(), question.as_str())).collect();
    assert_eq!(asked, [("a.png", "Is it there?"), ("a.png", "Where?"), ("b/a.png", "What?"), ("bad.png", "Where?")]);
    let bad = &rows[&("bad.png".to_owned(), "Where?".to_owned())];
    assert!(bad[15].contains("bad.png") && bad[12].is_empty(), "{bad:?}");
    let lines: Vec<Value> = objects(&fs::read_to_string(out.join("results.jsonl")).unwrap());
    assert_eq!(lines.len(), 5);
}

#[test]
fn questions_unlike_those_of_the_training_are_named() {
    let (images, out) = (images("many-unlike"), path("many-unlike-out"));
    let (known, unlike) = ("Which part of this image shows the lesion?", "Ist der Tumor bösartig?");
    let trained_on = fs::read_to_string(trained().0.join("best/questions.json")).unwrap();
    assert!(trained_on.contains(known), "{trained_on}");
    let stdout = done(&mut predict(&images, &out, &asked(&[known, unlike])));
    let warning = "answers about questions unlike those of the training: 3 (column `question_known` is 0)";
    assert!(stdout.contains(warning), "{stdout}");
    let mut reader = csv::Reader::from_path(out.join("results.csv")).unwrap();
    let column = |name: &str| reader.headers().unwrap().iter().position(|header| header == name).unwrap();
    let [is_known, nearest] = ["question_known", "nearest_question"].map(column);
    for row in table(&out).values() {
        assert_eq!(&row[is_known], if &row[1] == known { "1" } else { "0" }, "{row:?}");
        assert!(row[nearest].contains("lesion"), "{row:?}");
    }
    // one image: as text and as JSON
    let one = |question: &str| {
        let mut predict = prsmed();
        predict.args(["predict", "--max-new-tokens", "3", "--question", question, "--image"]);
        predict.arg(images.join("a.png")).arg(&trained().0);
        predict
    };
    let text = done(&mut one(unlike));
    assert!(text.contains("attention: this question is unlike those of the training"), "{text}");
    assert!(text.contains("the nearest training question is `"), "{text}");
    assert!(!done(&mut one(known)).contains("attention"));
    for (question, is_known) in [(known, true), (unlike, false), ("Where is the kidney stone?", false)] {
        let result = objects(&done(one(question).arg("--json"))).pop().unwrap();
        assert_eq!(result["question_known"], is_known, "{question}: {result}");
        assert!(result["nearest_question"].is_string(), "{result}");
    }
    // a run of an earlier version does not know its questions, and claims nothing
    let run = copy(&trained().0, "many-unlike-run");
    for folder in ["best", "last"] {
        let file = run.join(folder).join("questions.json");
        assert!(file.is_file(), "{}", file.display());
        fs::remove_file(file).unwrap();
        let sums = run.join(folder).join("checksums.json");
        let mut listed: Value = serde_json::from_str(&fs::read_to_string(&sums).unwrap()).unwrap();
        listed["files"].as_object_mut().unwrap().remove("questions.json").unwrap();
        fs::write(sums, listed.to_string()).unwrap();
    }
    let mut old = prsmed();
    old.args(["--json", "predict", "--max-new-tokens", "3", "--question", unlike, "--image"]);
    let result = objects(&done(old.arg(images.join("a.png")).arg(&run))).pop().unwrap();
    assert_eq!((&result["question_known"], &result["nearest_question"]), (&Value::Null, &Value::Null));
}

#[test]
fn images_unlike_those_of_the_training_are_named() {
    let (images, out) = (images("many-unlike-images"), path("many-unlike-images-out"));
    let mut photograph = image::open(images.join("a.png")).unwrap().to_rgb8();
    photograph.pixels_mut().for_each(|pixel| pixel.0[2] /= 2);
    photograph.save(images.join("photograph.png")).unwrap();
    let question = "Which part of this image shows the lesion?";
    let stdout = done(&mut predict(&images, &out, &asked(&[question])));
    let warning = "answers about images unlike those of the training: 1 (column `image_known` is 0)";
    assert!(stdout.contains(warning) && !stdout.contains("about questions"), "{stdout}");
    let mut reader = csv::Reader::from_path(out.join("results.csv")).unwrap();
    let is_known = reader.headers().unwrap().iter().position(|header| header == "image_known").unwrap();
    for row in table(&out).values() {
        assert_eq!(&row[is_known], if &row[0] == "photograph.png" { "0" } else { "1" }, "{row:?}");
    }
    // one image: as text and as JSON
    let one = |image: &str| {
        let mut predict = prsmed();
        predict.args(["predict", "--max-new-tokens", "3", "--question", question, "--image"]);
        predict.arg(images.join(image)).arg(&trained().0);
        predict
    };
    let text = done(&mut one("photograph.png"));
    assert!(
        text.contains("attention: this image looks unlike those of the training (most of all its colours)"),
        "{text}"
    );
    assert!(!done(&mut one("a.png")).contains("attention"));
    for (image, is_known) in [("photograph.png", false), ("a.png", true)] {
        let result = objects(&done(one(image).arg("--json"))).pop().unwrap();
        assert_eq!((&result["image_known"], &result["question_known"]), (&is_known.into(), &true.into()), "{result}");
        assert_eq!(result["image_distance"].as_f64().unwrap() > 1.0, !is_known, "{result}");
    }
}

#[test]
fn unusable_lists_are_refused_before_the_model_is_loaded() {
    let (images, out) = (images("many-refused"), path("many-refused-out"));
    let refused = |images: &Path, more: &[&str]| {
        let ran = run(&mut predict(images, &out, more));
        assert_eq!((ran.code, out.exists()), (Some(2), false), "{}", ran.stderr);
        error_text(&ran)
    };
    let table = images.join("jobs.csv");
    fs::write(&table, "image,question\na.png,Where?\ngone.png,Where?\n").unwrap();
    let error = refused(&table, &[]);
    assert!(error.contains(":3: there is no file") && error.contains("gone.png"), "{error}");
    fs::write(&table, "file\na.png\n").unwrap();
    assert!(refused(&table, &[]).contains("has no column `image`; its columns are: file"));
    assert!(refused(&images, &[]).contains("the images have no questions"));
    assert!(refused(&folder("many-empty"), &["--question", "a"]).contains("has no file that ends in .png"));
    assert!(refused(&images, &["--question", " "]).contains("the question is empty"));
    // flags that many images have no use for
    let hint = "hint: remove it, or segment one volume with `--image FILE --out mask.nii.gz`";
    for flags in [
        &["--record-out", "never.json"][..],
        &["--axis", "axial"],
        &["--slices", "1..2"],
        &["--every", "2"],
        &["--largest-component"],
        &["--min-volume-ml", "1"],
        &["--fill-gaps", "1"],
    ] {
        let error = refused(&images, &[&["--question", "a"], flags].concat());
        let reason = format!("error: `{}`: it is for a volume, and `--images` answers about images\n{hint}", flags[0]);
        assert_eq!(error, reason);
    }
    for flags in [["--window", "lung"], ["--geometry", "sform"]] {
        let error = refused(&images, &[&["--question", "a"], &flags[..]].concat());
        assert_eq!(
            error,
            format!("error: `{}`: it is for NIfTI and DICOM files, and `--images` has none\nhint: remove it", flags[0])
        );
    }
    // flags of many images with one image
    let mut one = prsmed();
    one.args(["predict", "--question", "a", "--overlays", "--image"]).arg(images.join("a.png")).arg(&trained().0);
    assert!(error_text(&run(&mut one)).contains("--images"));
    // one image
    let mask = images.join("old.png");
    fs::copy(images.join("a.png"), &mask).unwrap();
    let mut single = prsmed();
    single.args(["predict", "--question", "a", "--no-overwrite", "--image"]).arg(images.join("a.png"));
    single.arg("--mask-out").arg(&mask);
    let before = fs::read(&mask).unwrap();
    let error = error_text(&run(single.arg(&trained().0)));
    assert!(error.contains("old.png` exists") && fs::read(&mask).unwrap() == before, "{error}");
    let copy = copy(&images, "many-copy");
    let mut two = prsmed();
    two.args(["predict", "--question", "a", "--question", "b", "--image"]).arg(copy.join("a.png")).arg(&trained().0);
    assert!(error_text(&run(&mut two)).contains("one image has one question"));
}
