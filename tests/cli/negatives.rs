//! Rows about absent targets and rows without a mask: phantoms, check, training.

use std::fs;

use crate::support::{copy, done, objects, path, prsmed, train};

#[test]
fn absent_targets_and_missing_masks_are_checked_and_trained() {
    let data = path("phantoms-with-negatives");
    let text = done(
        prsmed()
            .args(["data", "phantom"])
            .arg(&data)
            .args(["--count", "36", "--seed", "2", "--image-size", "64", "--negatives", "0.4"]),
    );
    assert!(text.contains(" without a lesion), "), "{text}");
    // one row of each class has an answer only, and its mask is gone
    let mut num_unknown = 0;
    for csv in fs::read_dir(data.join("annotations")).unwrap() {
        let csv = csv.unwrap().path();
        let text = fs::read_to_string(&csv).unwrap();
        let train =
            |line: &&str| line.contains("/train_masks/") && !line.contains("_a.png") && !line.contains("_b.png");
        let Some(line) = text.lines().find(train) else { continue };
        let (row, _) = line.rsplit_once(',').unwrap();
        fs::write(&csv, text.replace(line, &format!("{row},unknown"))).unwrap();
        fs::remove_file(data.join(line.split(',').next().unwrap())).unwrap();
        num_unknown += 1;
    }
    assert!(num_unknown > 2, "{num_unknown}");
    let checked = objects(&done(prsmed().args(["--json", "data", "check"]).arg(&data)));
    let sum = |field: &str| -> u64 {
        checked[0]["fingerprint"].as_array().unwrap().iter().map(|class| class[field].as_u64().unwrap()).sum()
    };
    assert_eq!(sum("unknown"), num_unknown);
    assert!(sum("absent") > 5, "{checked:?}");

    let with_validation = ["train.max_steps=3", "data.augment=classical"];
    let sets = [&with_validation[..], &["data.val_frac=0.5", "data.questions_per_image=2"]].concat();
    let run = path("run-with-negatives");
    let records = objects(&done(train(&data, &run, &sets).arg("--json")));
    let validation = records.iter().rev().find(|record| record["kind"] == "validation").unwrap();
    let values = &validation["values"];
    assert!(values["dice"].is_f64() && values["loss_mask"].is_f64(), "{validation}");
    let false_masks = values["false_masks"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&false_masks), "{validation}");
    let steps: Vec<_> = records.iter().filter(|record| record["kind"] == "step").collect();
    assert_eq!(steps.len(), 3);
    assert!(steps.iter().all(|step| step.to_string().contains("mask")), "{steps:?}");

    // without such rows, no value is added
    let plain = copy(&data, "phantoms-without-negatives");
    for csv in fs::read_dir(plain.join("annotations")).unwrap() {
        let csv = csv.unwrap().path();
        let text = fs::read_to_string(&csv).unwrap();
        let lines: Vec<&str> =
            text.lines().filter(|line| !line.ends_with(",0") && !line.ends_with("unknown")).collect();
        fs::write(&csv, lines.join("\n") + "\n").unwrap();
    }
    let sets = ["train.max_steps=1"];
    let records = objects(&done(train(&plain, &path("run-without-negatives"), &sets).arg("--json")));
    let validation = records.iter().find(|record| record["kind"] == "validation").unwrap();
    assert!(validation["values"].get("false_masks").is_none(), "{validation}");
}
