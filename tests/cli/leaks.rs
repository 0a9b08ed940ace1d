//! Images of test rows that train: named by `data check`, `train`, `train --check` and `eval`, in every way that they come
//! into a training, and of every kind: equal files, equal pixels, patients.

use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::first_run::{publish, with_cache};
use crate::loopback::Server;
use crate::support::{Ran, copy, done, objects, path, phantoms, prsmed, run, train, update_checksum};

/// The test images of the phantoms as `train` rows of a data root, saved anew as TIFF.
fn corrected(name: &str) -> PathBuf {
    let root = path(name);
    fs::create_dir_all(root.join("annotations")).unwrap();
    for entry in fs::read_dir(phantoms().join("annotations")).unwrap() {
        let csv = entry.unwrap().path();
        let text = fs::read_to_string(&csv).unwrap();
        let mut rows: Vec<String> = text.lines().take(1).map(str::to_owned).collect();
        for row in text.lines().filter(|row| row.ends_with(",test")) {
            let mask = row.split(',').next().unwrap();
            let image = mask.replace("_masks", "_images");
            let to = |path: &str| root.join(path);
            for path in [mask, &image] {
                fs::create_dir_all(to(path).parent().unwrap()).unwrap();
            }
            fs::copy(phantoms().join(mask), to(mask)).unwrap();
            image::open(phantoms().join(&image)).unwrap().save(to(&image).with_extension("tif")).unwrap();
            rows.push(row.replace(",test", ",train"));
        }
        if rows.len() > 1 {
            fs::write(root.join("annotations").join(csv.file_name().unwrap()), rows.join("\n") + "\n").unwrap();
        }
    }
    root
}

/// Rows of the phantoms: mask, split, patient.
type Rows<'a> = [(&'a str, &'a str, &'a str)];

/// A data root with these rows of the phantoms, and their files.
fn subset(name: &str, rows: &Rows) -> PathBuf {
    let root = path(name);
    for (mask, split, patient) in rows {
        let class = mask.split('/').next().unwrap();
        let csv = fs::read_to_string(phantoms().join(format!("annotations/{class}.csv"))).unwrap();
        let row = csv.lines().find(|line| line.starts_with(mask)).unwrap().rsplit_once(',').unwrap().0;
        add_row(&root, class, &format!("{row},{split},{patient}"));
        for file in [(*mask).to_owned(), mask.replace("_masks", "_images")] {
            fs::create_dir_all(root.join(&file).parent().unwrap()).unwrap();
            fs::copy(phantoms().join(&file), root.join(&file)).unwrap();
        }
    }
    root
}

fn add_row(root: &Path, class: &str, row: &str) {
    let csv = root.join(format!("annotations/{class}.csv"));
    fs::create_dir_all(csv.parent().unwrap()).unwrap();
    let header = || "image_path,question,answer,position,split,patient\n".to_owned();
    let text = fs::read_to_string(&csv).unwrap_or_else(|_| header());
    fs::write(csv, format!("{text}{row}\n")).unwrap();
}

const CLEAN: &Rows<'static> = &[
    ("brain_MRI/train_masks/phantom_00001.png", "train", ""),
    ("brain_MRI/train_masks/phantom_00013.png", "train", ""),
    ("abdomen_CT/train_masks/phantom_00000.png", "train", ""),
    ("lung_Xray/train_masks/phantom_00002_a.png", "train", ""),
    ("breast_ultrasound/train_masks/phantom_00003_a.png", "train", ""),
    ("lung_Xray/val_masks/phantom_00014_a.png", "val", ""),
    ("brain_MRI/test_masks/phantom_00007_a.png", "test", ""),
    ("abdomen_CT/test_masks/phantom_00012.png", "test", ""),
    ("breast_ultrasound/train_masks/phantom_00009.png", "test", "P7"),
    ("lung_Xray/train_masks/phantom_00008.png", "test", ""),
];

/// Adds three `train` rows to a data root: an equal file, equal pixels, and the same patient, of three test images of [`CLEAN`].
fn add_leaks(root: &Path) {
    for (class, image, ending) in [
        ("brain_MRI", "brain_MRI/test_images/phantom_00007_a.png", "png"),
        ("abdomen_CT", "abdomen_CT/test_images/phantom_00012.png", "tif"),
        ("breast_ultrasound", "breast_ultrasound/val_images/phantom_00015_a.png", "png"),
    ] {
        let to = |kind: &str, ending: &str| root.join(class).join(format!("train_{kind}/leak.{ending}"));
        for kind in ["images", "masks"] {
            fs::create_dir_all(to(kind, "").parent().unwrap()).unwrap();
        }
        fs::copy(phantoms().join(image.replace("_images", "_masks")), to("masks", "png")).unwrap();
        let image = phantoms().join(image);
        if ending == "png" {
            fs::copy(image, to("images", ending)).unwrap();
        } else {
            image::open(image).unwrap().save(to("images", ending)).unwrap();
        }
        let patient = if class == "breast_ultrasound" { "p07" } else { "" };
        add_row(root, class, &format!("{class}/train_masks/leak.png,Where is it?,It is there.,center,train,{patient}"));
    }
}

/// What an evaluation of the test rows says that a run was trained on, and its text.
fn evaluated(run_folder: &Path, more: &[&Path]) -> (Value, String) {
    evaluated_on(phantoms(), run_folder, more, &mut prsmed())
}

fn evaluated_on(root: &Path, run_folder: &Path, more: &[&Path], eval: &mut Command) -> (Value, String) {
    eval.args(["--json", "eval", "--max-new-tokens", "1", "--data-root"]).arg(root).arg(run_folder).args(more);
    if !more.is_empty() {
        eval.arg("--ensemble");
    }
    let ran = run(eval.arg("--out").arg(path("leak-report")));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let report = fs::read_to_string(path("leak-report/report.html")).unwrap();
    (objects(&ran.stdout).pop().unwrap()["summary"]["protocol"].clone(), report)
}

#[test]
fn test_images_that_train_are_named_in_every_way_that_they_come_in() {
    let (extra, out) = (corrected("leak-extra"), path("leak-run"));
    let leak = " (equal pixels in different files) are in train and test, by rows of an extra data root";
    let check = run(prsmed().args(["data", "check"]).arg(phantoms()).arg("--extra").arg(&extra));
    assert!(check.code == Some(1) && check.stdout.contains(leak), "{}", check.stdout);
    let training = |out: &Path| {
        let mut command = train(phantoms(), out, &["train.max_steps=1"]);
        command.arg("--extra").arg(&extra);
        command
    };
    for more in [&[][..], &["--check"]] {
        let ran = run(training(&out).args(more));
        assert!(ran.code == Some(2) && ran.stderr.contains(leak), "{}", ran.stderr);
        assert!(ran.stderr.contains("hint: remove these rows from the extra data root"), "{}", ran.stderr);
    }
    assert!(!out.exists());
    let ran = run(training(&out).arg("--allow-leak"));
    assert!(ran.code == Some(0) && ran.stderr.contains(leak), "{}", ran.stderr);
    // the run itself, one that starts from it, their merged weights, and an ensemble with them
    let (protocol, report) = evaluated(&out, &[]);
    assert_eq!((&protocol["trained_on"], &protocol["trained_on_unknown"]), (&3.into(), &Value::Null), "{protocol}");
    assert!(report.contains("the run was trained on the images of 3 of these questions"), "{report}");
    let child = path("leak-child");
    let mut from = train(phantoms(), &child, &["train.max_steps=1"]);
    from.arg("--init").arg(&out);
    let ran = run(&mut from);
    let seen = "the run of `--init` was trained on the images of 3 test questions";
    assert!(ran.code == Some(2) && ran.stderr.contains(seen), "{}", ran.stderr);
    let ran = run(from.arg("--allow-leak"));
    assert!(ran.code == Some(0) && ran.stderr.contains(&format!("warning: {seen}")), "{}", ran.stderr);
    assert_eq!(evaluated(&child, &[]).0["trained_on"], 3);
    let merged = path("leak-merged");
    done(prsmed().arg("merge").arg(&child).arg(&merged));
    assert_eq!(evaluated(&merged, &[]).0["trained_on"], 3);
    let clean = path("leak-clean");
    done(&mut train(phantoms(), &clean, &["train.max_steps=1"]));
    assert_eq!(evaluated(&clean, &[]).0["trained_on"], 0);
    assert_eq!(evaluated(&clean, &[&merged]).0["trained_on"], 3);
    // a run of an earlier version, and one that starts from it
    let old = copy(&clean.join("last"), "leak-old");
    let mut data: Value = serde_json::from_slice(&fs::read(old.join("data.json")).unwrap()).unwrap();
    data.as_object_mut().unwrap().remove("seen").unwrap();
    fs::write(old.join("data.json"), data.to_string()).unwrap();
    update_checksum(&old, "data.json");
    let (protocol, report) = evaluated(&old, &[]);
    assert_eq!(protocol["trained_on"], Value::Null);
    assert!(protocol["trained_on_unknown"].as_str().unwrap().starts_with("it does not say which images"), "{protocol}");
    assert!(report.contains("it is unknown whether these images are new to the run"), "{report}");
    let protocol = evaluated(&merged, &[&old]).0;
    assert_eq!(protocol["trained_on"], Value::Null);
    assert!(
        protocol["trained_on_unknown"]
            .as_str()
            .unwrap()
            .ends_with("at least 3 of these questions are about its training images")
    );
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn every_kind_of_leak_is_named_in_every_way() {
    let own = subset("leaks-own", CLEAN);
    add_leaks(&own);
    let (clean, extra) = (subset("leaks-clean", CLEAN), path("leaks-extra-root"));
    add_leaks(&extra);
    // a fold may validate with one of them
    let kinds =
        ["1 patient is in ", "1 image (equal files) is in ", "1 image (equal pixels in different files) is in "];
    let named = |ran: &Ran, code: i32, way: &str| {
        assert_eq!(ran.code, Some(code), "{way}: {}", ran.stderr);
        let text = format!("{}{}", ran.stdout, ran.stderr);
        for kind in kinds {
            assert!(text.contains(kind), "{way}: no {kind}: {text}");
        }
    };
    let trained_on = |run_folder: &Path, more: &[&Path], eval: &mut Command| {
        let protocol = evaluated_on(&clean, run_folder, more, eval).0;
        ["trained_on", "trained_on_patients"].map(|key| protocol[key].as_u64().unwrap_or(0))
    };
    for (way, root, more) in [("own", &own, vec![]), ("extra", &clean, vec![PathBuf::from("--extra"), extra.clone()])] {
        named(&run(prsmed().args(["data", "check"]).arg(root).args(&more)), 1, way);
        let mut of_folds = [0, 0];
        // each row trains in one of two folds and validates in the other; rows of an extra data root train in both
        let folds: &[&str] = if way == "own" { &["", "0/2", "1/2"] } else { &["", "1/2"] };
        for fold in folds {
            let out = path(&format!("leaks-of-{way}{}", fold.replace('/', "-")));
            let fold = if fold.is_empty() { vec![] } else { vec!["--fold", *fold] };
            let training = |flags: &[&str]| {
                let mut command = train(root, &out, &["train.max_steps=1"]);
                run(command.args(&more).args(&fold).args(flags))
            };
            for (flags, code) in [(&[][..], 2), (&["--check"], 2), (&["--allow-leak"], 0)] {
                named(&training(flags), code, &format!("{way} {fold:?} {flags:?}"));
            }
            let counts = trained_on(&out, &[], &mut prsmed());
            if fold.is_empty() {
                assert_eq!(counts, [2, 1], "{way}");
            } else {
                of_folds = [of_folds[0] + counts[0], of_folds[1] + counts[1]];
            }
        }
        assert_eq!(of_folds, [2, 1], "{way}");
    }
    // from such a run: `--init`, also from the hub, merged weights, an ensemble
    let leaky = path("leaks-of-own");
    let server = Server::start(Vec::new());
    publish(&server, "lab/leaky", &leaky, "");
    let hub = "hub:lab/leaky";
    assert_eq!(trained_on(Path::new(hub), &[], &mut with_cache(&server, "cache-leaky")), [2, 1]);
    for (name, from) in [("leaks-child", leaky.to_str().unwrap()), ("leaks-hub-child", hub)] {
        let child = path(name);
        let init = |flags: &[&str]| {
            let mut command = with_cache(&server, "cache-leaky");
            command.args(["train", "--preset", "tiny", "--set", "model.image_size=64", "--set", "train.max_steps=1"]);
            run(command.arg("--data-root").arg(&clean).arg("--out").arg(&child).args(["--init", from]).args(flags))
        };
        let text = "the run of `--init` was trained on the images of 2 test questions";
        for (flags, code) in [(&[][..], 2), (&["--check"], 2), (&["--allow-leak"], 0)] {
            let ran = init(flags);
            assert!(ran.code == Some(code) && ran.stderr.contains(text), "{name} {flags:?}: {}", ran.stderr);
        }
        let merged = path(&format!("{name}-merged"));
        done(prsmed().arg("merge").arg(&child).arg(&merged));
        assert_eq!([&child, &merged].map(|run| trained_on(run, &[], &mut prsmed())), [[2, 1]; 2], "{name}");
    }
    let plain = path("leaks-plain");
    done(&mut train(&clean, &plain, &["train.max_steps=1"]));
    assert_eq!(trained_on(&plain, &[], &mut prsmed()), [0, 0]);
    assert_eq!(trained_on(&plain, &[&leaky], &mut prsmed()), [2, 1]);
}

#[test]
fn pairs_made_from_test_images_are_left_out_and_count_as_their_source() {
    let scored = subset("pairs-scored", CLEAN);
    let pairs = subset("pairs-made", &[CLEAN[0], CLEAN[1]]);
    let source =
        prsmed::tensor::weights::sha256(&phantoms().join("brain_MRI/test_images/phantom_00007_a.png")).unwrap();
    let line = json!({ "name": "phantom_00001", "class": "brain_MRI", "source_sha256": source });
    fs::write(pairs.join("manifest.jsonl"), format!("{line}\n")).unwrap();
    let check = run(prsmed().args(["data", "check"]).arg(&scored).arg("--extra").arg(&pairs));
    assert!(
        check.code == Some(0) && check.stderr.contains("a training leaves out 1 synthetic row"),
        "{}",
        check.stderr
    );
    let left_out = "1 synthetic rows are left out";
    let training = |root: &Path, name: &str| {
        let mut command = train(root, &path(name), &["train.max_steps=1", "data.synthetic_ratio=0.5"]);
        run(command.arg("--extra").arg(&pairs))
    };
    let ran = training(&scored, "pairs-run");
    assert!(ran.code == Some(0) && ran.stderr.contains(left_out), "{}", ran.stderr);
    let trained_on = |name: &str| evaluated_on(&scored, &path(name), &[], &mut prsmed()).0["trained_on"].clone();
    assert_eq!(trained_on("pairs-run"), 0);
    // the source is a test image elsewhere
    let others: Vec<_> = CLEAN.iter().filter(|(mask, ..)| !mask.contains("00007")).copied().collect();
    let ran = training(&subset("pairs-trained", &others), "pairs-other-run");
    assert!(ran.code == Some(0) && !ran.stderr.contains(left_out), "{}", ran.stderr);
    assert_eq!(trained_on("pairs-other-run"), 1);
}
