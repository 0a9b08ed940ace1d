//! `eval` on data with patients, pixel spacing and absent targets, and on several runs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::{
    copy, done, objects, path, phantoms, prsmed, refused, run, train, trained, tree, update_checksum,
};

/// A line of a table by the names of its columns.
type Line = std::collections::BTreeMap<String, String>;

fn lines_of(file: &Path) -> Vec<Line> {
    csv::Reader::from_path(file).unwrap().deserialize().map(Result::unwrap).collect()
}

/// The phantoms with patients of two images each, pixels of 0.5 mm x 0.75 mm, and a question about an absent target for
/// every third image, whose mask file is missing. Every fifth row has no known mask.
fn clinical(name: &str) -> PathBuf {
    let root = copy(phantoms(), name);
    let mut number = 0;
    let mut files: Vec<PathBuf> =
        fs::read_dir(root.join("annotations")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for file in files {
        let lines = lines_of(&file);
        let mut writer = csv::Writer::from_path(&file).unwrap();
        let header: Vec<String> = lines[0].keys().cloned().collect();
        let added = ["patient", "present", "spacing_x_mm", "spacing_y_mm"].map(str::to_owned);
        writer.write_record(header.iter().chain(&added)).unwrap();
        for mut line in lines {
            let mut write = |line: &Line, present: &str| {
                let patient = format!("p{}", number / 2);
                let added = [patient.as_str(), present, "0.5", "0.75"];
                writer.write_record(header.iter().map(|name| line[name].as_str()).chain(added)).unwrap();
            };
            write(&line, if number % 5 == 4 { "unknown" } else { "1" });
            if number % 3 == 0 {
                let mask = line["image_path"].replace(".png", "_Segmentation.png");
                line.insert("image_path".into(), mask);
                line.insert("question".into(), "Is there a second lesion?".into());
                write(&line, "0");
            }
            number += 1;
        }
        writer.flush().unwrap();
    }
    root
}

/// The summary and the samples of an evaluation of all training rows.
fn evaluated(root: &Path, runs: &[&Path], out: &Path) -> (Value, String) {
    let mut eval = prsmed();
    eval.args(["--json", "eval", "--max-new-tokens", "2", "--split", "train", "--data-root"]).arg(root);
    let ran = run(eval.args(runs).arg("--out").arg(out));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    (objects(&ran.stdout).pop().unwrap(), ran.stderr)
}

/// A copy of the trained run with another calibration in its best checkpoint.
fn calibrated(name: &str, calibration: &Value) -> PathBuf {
    let run = copy(&trained().0, name);
    let file = run.join("best/model.json");
    let mut model: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    model["calibration"] = calibration.clone();
    fs::write(&file, serde_json::to_vec(&model).unwrap()).unwrap();
    update_checksum(&run.join("best"), "model.json");
    run
}

fn mean_of(samples: &[Line], column: &str) -> (f64, u64) {
    let values: Vec<f64> = samples.iter().filter_map(|line| line[column].parse().ok()).collect();
    (values.iter().sum::<f64>() / values.len() as f64, values.len() as u64)
}

#[test]
fn absent_targets_and_unknown_masks_do_not_enter_mask_scores() {
    let root = clinical("clinical");
    let (run, out) = (calibrated("run-without-threshold", &Value::Null), path("clinical-report"));
    let (result, errors) = evaluated(&root, &[&run], &out);
    let samples = lines_of(&out.join("samples.csv"));
    let count = |target: &str| samples.iter().filter(|line| line["target"] == target).count() as u64;
    let summary = &result["summary"];
    let counts = json!({
        "present": count("present"), "absent": count("absent"), "unknown": count("unknown"),
        "withheld_present": 0, "withheld_absent": 0,
    });
    assert_eq!(summary["presence"], counts);
    assert!(count("present") > 4 && count("absent") > 2 && count("unknown") > 1, "{counts}");
    assert_eq!(summary["all_images"]["questions"], samples.len());
    let estimates = &summary["all_images"]["estimates"];
    for score in ["dice", "iou", "surface_dice", "hd95", "assd", "pixel_sensitivity", "area_error_frac", "bleu"] {
        let (mean, number) = mean_of(&samples, score);
        assert_eq!(estimates[score]["count"], number, "{score}");
        assert!((estimates[score]["mean"].as_f64().unwrap() - mean).abs() < 1e-9, "{score}");
    }
    assert_eq!(estimates["dice"]["count"], count("present"));
    assert_eq!(estimates["bleu"]["count"], samples.len());
    assert_eq!(summary["all_images"]["segmentation"]["dice"], estimates["dice"]["mean"]);
    let found = |target: &str| {
        let of_target: Vec<&Line> = samples.iter().filter(|line| line["target"] == target).collect();
        of_target.iter().filter(|line| line["has_mask"] == "true").count() as f64 / of_target.len() as f64
    };
    let near = |value: &Value, expected: f64| (value.as_f64().unwrap() - expected).abs() < 1e-9;
    assert!(near(&estimates["target_sensitivity"]["mean"], found("present")));
    assert!(near(&estimates["target_specificity"]["mean"], 1.0 - found("absent")));
    assert!(estimates["auroc"]["mean"].as_f64().unwrap() >= 0.0);
    let interval = &estimates["dice"]["interval"];
    let (low, high) = (interval["low"].as_f64().unwrap(), interval["high"].as_f64().unwrap());
    assert!(low < high && (low..=high).contains(&estimates["dice"]["mean"].as_f64().unwrap()), "{interval}");
    assert_eq!(summary["protocol"]["length"], "mm");
    assert!(!errors.contains("warning"), "{errors}");
    let patients = lines_of(&out.join("patients.csv"));
    assert_eq!(summary["all_images"]["patients"], patients.len());
    for line in patients {
        let own: Vec<Line> = samples.iter().filter(|sample| sample["patient"] == line["patient"]).cloned().collect();
        assert_eq!(line["questions"], own.len().to_string());
        match line["dice"].parse::<f64>() {
            Ok(dice) => assert!((dice - mean_of(&own, "dice").0).abs() < 1e-9),
            Err(_) => assert_eq!(mean_of(&own, "dice").1, 0),
        }
    }
}

#[test]
fn masks_below_the_presence_threshold_are_scored_as_empty() {
    let root = clinical("clinical-withheld");
    let plain = calibrated("run-plain", &Value::Null);
    let (_, _) = evaluated(&root, &[&plain], &path("plain-report"));
    let before = lines_of(&path("plain-report").join("samples.csv"));
    let mut scores: Vec<f64> = before.iter().map(|line| line["presence"].parse().unwrap()).collect();
    scores.sort_by(f64::total_cmp);
    let threshold = scores[scores.len() / 2];
    let calibration = json!({
        "temperature": 2.5, "presence_threshold": threshold, "num_present": 3, "num_absent": 3
    });
    let run = calibrated("run-with-threshold", &calibration);
    let out = path("withheld-report");
    let (result, _) = evaluated(&root, &[&run], &out);
    let samples = lines_of(&out.join("samples.csv"));
    let (mut present, mut absent) = (0, 0);
    for (line, plain) in samples.iter().zip(&before) {
        assert_eq!((&line["presence"], &line["generated"]), (&plain["presence"], &plain["generated"]));
        let is_found = line["presence"].parse::<f64>().unwrap() >= threshold;
        assert_eq!(line["is_found"], is_found.to_string());
        let is_withheld = !is_found && plain["has_mask"] == "true";
        assert_eq!(line["is_withheld"], is_withheld.to_string());
        assert_eq!(line["has_mask"], (is_found && plain["has_mask"] == "true").to_string());
        present += u64::from(is_withheld && line["target"] == "present");
        absent += u64::from(is_withheld && line["target"] == "absent");
        // the score without the threshold is that of a run without one
        assert_eq!((&line["raw_dice"], &plain["raw_dice"]), (&plain["dice"], &String::new()));
        let expected = if is_withheld && line["target"] == "present" { "0.0" } else { &plain["dice"] };
        assert_eq!(line["dice"], expected);
    }
    assert!(present + absent > 0, "the median of the scores withholds masks");
    let summary = &result["summary"];
    let counts = (&summary["presence"]["withheld_present"], &summary["presence"]["withheld_absent"]);
    assert_eq!(counts, (&present.into(), &absent.into()));
    assert_eq!(summary["protocol"]["presence_threshold"], threshold);
    let calibration = &summary["calibration"];
    assert_eq!(calibration["temperature"], 2.5);
    assert!(calibration["raw"]["ece"] != calibration["scaled"]["ece"], "{calibration}");
    let pixels = |curve: &str| {
        let bins = calibration[curve]["bins"].as_array().unwrap();
        bins.iter().map(|bin| bin["pixels"].as_u64().unwrap()).sum::<u64>()
    };
    let known = samples.iter().filter(|line| line["target"] != "unknown").count() as u64;
    assert_eq!((pixels("raw"), pixels("scaled")), (known * 64 * 64, known * 64 * 64));
    let shown = done(
        prsmed()
            .args(["--quiet", "eval", "--max-new-tokens", "1", "--split", "train", "--data-root"])
            .arg(&root)
            .arg(&run)
            .arg("--out")
            .arg(&out),
    );
    let note = format!("{present} masks of present and {absent} of absent targets were withheld and scored as empty");
    assert!(shown.contains(&note), "{shown}");
}

#[test]
fn rows_of_another_hospital_that_are_not_scored_are_told() {
    let root = copy(phantoms(), "other-hospital");
    for entry in fs::read_dir(root.join("annotations")).unwrap() {
        let csv = entry.unwrap().path();
        fs::write(&csv, fs::read_to_string(&csv).unwrap().replace(" image", " picture")).unwrap();
    }
    // a scanner whose images are brighter, in colours
    for path in tree(&root).keys().filter(|name| name.contains("_images/")).map(|name| root.join(name)) {
        let mut image = image::open(&path).unwrap().brighten(60).to_rgb8();
        image.pixels_mut().for_each(|pixel| pixel.0[2] /= 2);
        image.save(path).unwrap();
    }
    let said = |root: &Path| {
        let mut eval = prsmed();
        eval.args(["eval", "--max-new-tokens", "1", "--data-root"]).arg(root).arg(&trained().0);
        let ran = run(eval.arg("--out").arg(path("other-hospital-report")));
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        ran.stderr
    };
    let note = "the run was trained on none of the ";
    let (other, own) = (said(&root), said(phantoms()));
    assert!(other.contains(note) && other.contains("`prsmed data prepare --test-frac 1 --val-frac 0`"), "{other}");
    assert!(other.contains(" images look unlike those of the training"), "{other}");
    assert!(!own.contains(note) && !own.contains("look unlike"), "{own}");
}

/// Images of the training that another division of the data makes test images, also under other names and questions.
#[test]
fn scores_of_images_that_the_run_has_seen_are_marked() {
    let root = copy(phantoms(), "divided-again");
    for entry in fs::read_dir(root.join("annotations")).unwrap() {
        let csv = entry.unwrap().path();
        let text = fs::read_to_string(&csv).unwrap().replace(" image", " picture").replace(",test", ",unused");
        let text = text.replace(",train", ",test").replace(",val", ",test").replace(",unused", ",train");
        fs::write(&csv, text).unwrap();
    }
    let test = |root: &Path| {
        let mut eval = prsmed();
        eval.args(["--json", "eval", "--max-new-tokens", "1", "--data-root"]).arg(root).arg(&trained().0);
        let ran = run(eval.arg("--out").arg(path("divided-again-report")));
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        (objects(&ran.stdout).pop().unwrap(), ran.stderr)
    };
    let (result, errors) = test(&root);
    let protocol = &result["summary"]["protocol"];
    assert!(protocol["trained_on"].as_u64().unwrap() > 5, "{protocol}");
    assert!(errors.contains(" are about validation images of the run, by which its checkpoint was chosen"), "{errors}");
    assert!(!errors.contains("trained on none of"), "{errors}");
    let own = test(phantoms()).0;
    assert_eq!(own["summary"]["protocol"]["trained_on"], 0);
    assert_eq!(own["summary"]["protocol"]["trained_on_unknown"], Value::Null);
}

#[test]
fn unknown_classes_are_scored_but_not_their_class() {
    let root = copy(phantoms(), "unknown-class");
    fs::rename(root.join("brain_MRI"), root.join("liver_CT")).unwrap();
    let csv = root.join("annotations/brain_MRI.csv");
    fs::write(&csv, fs::read_to_string(&csv).unwrap().replace("brain_MRI/", "liver_CT/")).unwrap();
    let out = path("unknown-class-report");
    let (result, errors) = evaluated(&root, &[&trained().0], &out);
    assert!(errors.contains("the run does not know the classes `liver_CT`"), "{errors}");
    assert_eq!(result["summary"]["protocol"]["unknown_classes"], json!(["liver_CT"]));
    assert_eq!(result["summary"]["protocol"]["length"], "px");
    for line in lines_of(&out.join("samples.csv")) {
        assert_eq!(line["class_right"].is_empty(), line["modality"] == "liver_CT", "{}", line["row"]);
        assert!(line["dice"].parse::<f64>().is_ok());
    }
    assert!(fs::read_to_string(out.join("report.html")).unwrap().contains("does not know these classes: liver_CT"));
}

#[test]
fn several_runs_are_compared_question_by_question() {
    let root = clinical("clinical-compared");
    let calibration = json!({ "temperature": 1.0, "presence_threshold": 1.0, "num_present": 1, "num_absent": 1 });
    let (first, second) = (&calibrated("first-run", &calibration), calibrated("other-run", &Value::Null));
    let out = path("compared-report");
    let (result, _) = evaluated(&root, &[first, &second, &first.join("last")], &out);
    let names: Vec<&Value> = result["runs"].as_array().unwrap().iter().map(|run| &run["name"]).collect();
    assert_eq!(names, ["first-run", "other-run", "first-run-last"]);
    for name in ["first-run", "other-run", "first-run-last"] {
        assert!(out.join(name).join("report.html").is_file() && out.join(name).join("samples.csv").is_file());
    }
    let differences = result["differences"].as_array().unwrap();
    assert_eq!((differences.len(), &differences[1]["run"]), (2, &"first-run-last".into()));
    let of = |run: usize, score: &str| -> Value {
        let scores = differences[run]["scores"].as_array().unwrap();
        scores.iter().find(|row| row["score"] == score).unwrap().clone()
    };
    let samples = ["first-run", "first-run-last"].map(|name| lines_of(&out.join(name).join("samples.csv")));
    let expected = mean_of(&samples[1], "dice").0 - mean_of(&samples[0], "dice").0;
    assert!((of(1, "dice")["difference"].as_f64().unwrap() - expected).abs() < 1e-9);
    assert_eq!(of(0, "bleu")["difference"], 0.0, "the same weights");
    assert_eq!(of(0, "bleu")["interval"], Value::Null, "equal differences have no interval");
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains("./first-run-last/report.html") && page.contains("first-run-last compared with first-run"));
    let rows = lines_of(&out.join("comparison.csv"));
    assert!(rows.iter().any(|row| row["score"] == "dice" && row["run"] == "first-run-last"));
    let shown = done(
        prsmed()
            .args(["--quiet", "eval", "--limit", "2", "--max-new-tokens", "1", "--split", "train", "--data-root"])
            .arg(&root)
            .args([first, &first.join("last")])
            .current_dir(path("."))
            .arg("--out")
            .arg(path("compared-shown")),
    );
    assert!(shown.contains("first-run: presence threshold 1.000 of the run: "), "{shown}");
    assert!(page.contains("first-run: presence threshold 1.000"), "withheld masks are told in the report too");
    assert!(shown.contains("first-run-last compared with first-run, question by question"), "{shown}");
}

#[test]
fn an_impossible_tolerance_is_an_error() {
    let mut eval = prsmed();
    eval.args(["eval", "--split", "train", "--tolerance-mm=-1", "--data-root"]).arg(phantoms()).arg(&trained().0);
    refused(&mut eval, "error: `--tolerance-mm`: -1 is no distance\nhint: use 0 or more, for example 2");
}

#[test]
fn folds_are_scored_on_their_own_images_and_together_and_average_their_masks() {
    let fold = |number: usize| {
        let out = path(&format!("fold-{number}"));
        done(train(phantoms(), &out, &["train.max_steps=2"]).args(["--fold", &format!("{number}/2")]));
        out
    };
    let runs = [0, 1].map(fold);
    let eval = |runs: &[&PathBuf], more: &[&str]| {
        let mut command = prsmed();
        command.arg("eval").args(runs).arg("--data-root").arg(phantoms()).args(["--max-new-tokens", "2"]).args(more);
        command
    };
    let both = [&runs[0], &runs[1]];
    let out = path("folds");
    let text = done(eval(&both, &["--split", "val", "--out"]).arg(&out));
    assert!(text.contains("questions of 2 of 2 folds\nscore "), "{text}");
    let images = |folder: &Path| -> BTreeSet<String> {
        lines_of(&folder.join("samples.csv")).iter().map(|line| line["image"].clone()).collect()
    };
    let [first, second] = ["fold-0", "fold-1"].map(|name| images(&out.join(name)));
    let manifest = prsmed::data::manifest::Manifest::open(phantoms(), None).unwrap();
    let trained = manifest.rows.iter().filter(|row| row.split != prsmed::data::manifest::Split::Test);
    let trained: BTreeSet<String> = trained.map(|row| row.image_path.display().to_string()).collect();
    assert!(first.is_disjoint(&second) && first.union(&second).eq(&trained), "{first:?} {second:?}");
    // one run alone is scored on its own fold too
    done(&mut eval(&both[..1], &["--split", "val"]));
    assert_eq!(images(&runs[0].join("eval-val")), first);
    refused(
        &mut eval(&[&runs[0], &runs[0]], &["--split", "val"]),
        "error: `~/fold-0`: the runs are not different folds of one cross-validation\n\
         hint: train them with `--fold 0/5`, `--fold 1/5`, ...",
    );

    refused(
        &mut eval(&both, &["--split", "val", "--ensemble"]),
        "error: `--ensemble`: the other runs may have been trained on the `val` images of this fold\n\
         hint: use `--split test`, or leave `--ensemble` out",
    );
    done(&mut eval(&both, &["--ensemble", "--limit", "2"]));
    assert_eq!(images(&runs[0].join("eval-test-ensemble")).len(), 2);
    let predict = |more: &[&PathBuf]| {
        let mut command = prsmed();
        command.arg("predict").arg(&runs[0]).args(["--image"]).arg(first.first().unwrap());
        command.args(["--question", "Where is the lesion?", "--max-new-tokens", "2", "--always-paint", "--json"]);
        for run in more {
            command.arg("--ensemble").arg(run);
        }
        objects(&done(&mut command)).pop().unwrap()
    };
    assert_eq!(predict(&[])["agreement"], Value::Null);
    assert_eq!(predict(&[&runs[0]])["agreement"], 1.0, "a run agrees with itself");
    let agreement = predict(&[&runs[1]])["agreement"].as_f64().unwrap();
    assert!((0.0..1.0).contains(&agreement), "{agreement}");
}

#[test]
fn the_first_line_has_three_scores_and_training_rows_are_marked() {
    let (run_folder, _) = trained();
    let eval = |split: &str| {
        let mut eval = prsmed();
        eval.args(["eval", "--max-new-tokens", "2", "--limit", "3", "--split", split, "--data-root"]).arg(phantoms());
        done(eval.arg(run_folder).arg("--out").arg(path(&format!("first-line-{split}"))))
    };
    let (seen, new) = (eval("train"), eval("test"));
    let first: Vec<&str> = seen.lines().take(2).collect();
    assert!(first[0].starts_with("Dice 0.") && first[0].contains(", position accuracy "), "{seen}");
    assert!(first[1].starts_with("3 questions, "), "{seen}");
    let wide = seen.lines().find(|line| line.chars().count() > 100 && !line.contains(path("").to_str().unwrap()));
    assert_eq!(wide, None, "{seen}");
    let mark = "the run was trained on the images of 3 of these questions";
    assert!(seen.contains(mark) && !new.contains("was trained on"), "{seen}");
    assert!(fs::read_to_string(path("first-line-train/report.html")).unwrap().contains(mark));
}
