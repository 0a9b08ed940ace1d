//! Images of test rows that train: named by `data check`, `train`, `train --check` and `eval`, in every way that they come
//! into a training. The kinds (equal files, equal pixels, patients) are tested in `src/data/leaks.rs` and
//! `src/data/identity.rs`.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{copy, done, objects, path, phantoms, prsmed, run, train, update_checksum};

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

/// What an evaluation of the test rows says that a run was trained on, and its text.
fn evaluated(run_folder: &Path, more: &[&Path]) -> (Value, String) {
    let mut eval = prsmed();
    eval.args(["--json", "eval", "--max-new-tokens", "1", "--data-root"]).arg(phantoms()).arg(run_folder).args(more);
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
