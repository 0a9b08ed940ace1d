//! Pairs after they are made: judged, measured, trained on, and a study of whether they help.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{assert_rows_are_true, files, generate, journal, made, tree, word};
use crate::support::{copy, differing, done, objects, path, phantoms, prsmed, run, train, trained};

/// Settings of a segmenter whose steps take a fraction of a second.
const SMALL: [&str; 6] = ["--preset", "tiny", "--set", "model.image_size=64", "--set", "train.micro_batch=2"];

/// Has judges of three steps look at pairs; with limits that judges of three steps can meet.
fn filter(pairs: &Path, more: &[&str]) -> Command {
    let mut command = prsmed();
    command.args(["augment", "filter", "--data-root"]).arg(phantoms()).arg("--synthetic").arg(pairs).args(SMALL);
    command.args(["--folds", "2", "--steps", "3", "--json"]);
    for limit in ["dice_min=0", "outside_max=1", "knn_quantile=1", "cosine_quantile=1"] {
        command.args(["--threshold", limit]);
    }
    command.args(more);
    command
}

fn last(text: &str) -> Value {
    objects(text).pop().unwrap()
}

fn sha256(file: &Path) -> String {
    format!("{:x}", Sha256::digest(fs::read(file).unwrap()))
}

/// Files and journal say the same: every pair lies where its verdict puts it, and nowhere else.
fn assert_filed(pairs: &Path) {
    let wanted: BTreeSet<PathBuf> =
        journal(pairs).iter().flat_map(|record| <[PathBuf; 2]>::from(files(pairs, record))).collect();
    let is_pair = |name: &&String| name.contains("/train_") || name.starts_with("rejected/");
    let found: BTreeSet<PathBuf> = tree(pairs).keys().filter(is_pair).map(|name| pairs.join(name)).collect();
    assert_eq!(found, wanted);
}

/// The train rows of the phantoms without those of one fold.
fn without_fold(folds: &BTreeMap<String, usize>, fold: usize) -> PathBuf {
    let root = copy(phantoms(), &format!("phantoms-without-fold-{fold}"));
    let unseen: Vec<String> = super::masks_of(phantoms(), None)
        .into_iter()
        .filter(|(image, _)| folds[&sha256(image)] == fold)
        .flat_map(|(_, masks)| masks)
        .map(|mask| mask.strip_prefix(phantoms()).unwrap().display().to_string())
        .collect();
    for entry in fs::read_dir(root.join("annotations")).unwrap() {
        let csv = entry.unwrap().path();
        let text = fs::read_to_string(&csv).unwrap();
        let (header, lines) = text.split_once('\n').unwrap();
        let is_seen = |line: &&str| line.ends_with(",train") && !unseen.iter().any(|mask| line.starts_with(mask));
        let kept = std::iter::once(header).chain(lines.lines().filter(is_seen));
        fs::write(&csv, kept.collect::<Vec<_>>().join("\n") + "\n").unwrap();
    }
    root
}

#[test]
fn judges_see_only_pairs_of_unseen_sources() {
    let pairs = copy(made(), "pairs-judged");
    let before = journal(&pairs);
    let first = last(&done(&mut filter(&pairs, &[])))["judged"].clone();
    let after = journal(&pairs);
    assert_eq!((first["pairs"].as_u64(), first["unknown"].as_u64()), (Some(after.len() as u64), Some(0)), "{first}");
    for (old, new) in before.iter().zip(&after) {
        assert_eq!((&old["index"], &old["prompt"]), (&new["index"], &new["prompt"]));
        let dice = new["scores"]["dice"].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&dice) && old["scores"]["dice"].is_null(), "{new}");
    }
    assert_filed(&pairs);
    assert_rows_are_true(&pairs);
    // Every real training picture is in one fold; no copy of it is in another; both judges have some.
    let folds: BTreeMap<String, usize> =
        serde_json::from_slice(&fs::read(pairs.join("judges/folds.json")).unwrap()).unwrap();
    let sources: BTreeSet<String> = super::masks_of(phantoms(), None).keys().map(|file| sha256(file)).collect();
    assert_eq!(folds.keys().cloned().collect::<BTreeSet<_>>(), sources);
    assert_eq!(folds.values().copied().collect::<BTreeSet<_>>(), BTreeSet::from([0, 1]));
    // A judge is what a training without the pictures of its fold gives.
    for judge in [0, 1] {
        let without = without_fold(&folds, judge);
        let trained = path(&format!("trained-without-fold-{judge}"));
        done(&mut train(&without, &trained, &["train.max_steps=3", "train.validate_every_epochs=0"]));
        let last = |judge: usize| pairs.join(format!("judges/fold-{judge}/last"));
        assert_eq!(differing(&trained.join("last"), &last(judge)), [""; 0]);
        let of_the_other = differing(&trained.join("last"), &last(1 - judge));
        assert!(of_the_other.contains(&"mask_decoder.safetensors".to_owned()), "{of_the_other:?}");
    }
    // The second time gives what the first gave.
    let once = copy(&pairs, "pairs-judged-once");
    let again = last(&done(&mut filter(&pairs, &[])))["judged"].clone();
    assert_eq!(again, first);
    let mut differing = Vec::new();
    let (a, b) = (tree(&once), tree(&pairs));
    for (name, bytes) in a.iter().filter(|(name, _)| !name.starts_with("judges/")) {
        if b.get(name) != Some(bytes) {
            differing.push(name);
        }
    }
    assert!(differing.is_empty(), "{differing:?}");
    judged_while_made(&pairs.join("judges"));
}

/// Judges of the preset's own size are larger than the small generator.
#[test]
fn judging_takes_the_memory_that_was_planned() {
    let real = path("phantoms-for-large-judges");
    done(prsmed().args(["data", "phantom", "--count", "60", "--image-size", "64"]).arg(&real));
    let pairs = path("pairs-for-large-judges");
    // enough of a class that features are compared, and a batch of them is full
    let limits = ["--limit", "6", "--per-image", "4"];
    done(generate(&real, &pairs, &limits).arg("--no-filter"));
    let mut command = prsmed();
    command.args(["augment", "filter", "--data-root"]).arg(&real).arg("--synthetic").arg(&pairs);
    done(command.args(["--preset", "tiny", "--folds", "2", "--steps", "1", "--no-plan", "--json"]));
    let out = path("pairs-by-large-judges");
    let judges = pairs.join("judges");
    let text = done(generate(&real, &out, &limits).args(["--json", "--judges"]).arg(judges));
    let memory = last(&text)["memory"].clone();
    assert_eq!(memory["planned"]["peak_phase"], "filter", "{memory}");
    assert_eq!(memory["planned"]["allocated_peak"], memory["measured"], "{memory}");
}

/// `--judges` filters what was just made, in memory that the plan knows.
fn judged_while_made(judges: &Path) {
    let out = path("pairs-judged-while-made");
    let text = done(generate(phantoms(), &out, &[]).args(["--limit", "4", "--json", "--judges"]).arg(judges));
    let result = last(&text);
    let memory = &result["memory"];
    let phases = memory["planned"]["phases"].as_array().unwrap();
    assert_eq!(phases.last().unwrap()["name"], "filter");
    assert_eq!(memory["planned"]["allocated_peak"], memory["measured"], "{memory}");
    assert_eq!(result["judged"]["unknown"], 0);
    for record in journal(&out) {
        assert!(record["scores"]["dice"].as_f64().is_some(), "{record}");
    }
}

#[test]
fn a_verdict_moves_files_and_can_be_taken_back() {
    let pairs = copy(made(), "pairs-rejudged");
    let judges = path("judges");
    let with = |limit: &str| {
        let mut command = filter(&pairs, &["--threshold", limit, "--judges"]);
        last(&done(command.arg(&judges)))["judged"].clone()
    };
    let lenient = with("dice_min=0");
    let accepted = journal(&pairs);
    let dice = |record: &Value| record["scores"]["dice"].as_f64().unwrap();
    let mut all: Vec<f64> = accepted.iter().filter(|r| r["accepted"] == true).map(dice).collect();
    all.sort_by(f64::total_cmp);
    let limit = all[all.len() - 1] / 2.0;
    let strict = with(&format!("dice_min={limit}"));
    assert!(strict["rejected"]["dice"].as_u64().unwrap() > 0, "{strict}");
    for record in journal(&pairs) {
        if dice(&record) < limit {
            assert!(record["accepted"] == false && word(&record, "reason").contains("dice "), "{record}");
        }
    }
    assert_filed(&pairs);
    assert_rows_are_true(&pairs);
    assert_eq!(with("dice_min=0"), lenient);
    assert_eq!(journal(&pairs), accepted);
    assert_filed(&pairs);
    // Other folds are other judges.
    let ran = run(filter(&pairs, &["--folds", "3", "--judges"]).arg(&judges));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    // Judges of a folder look at pairs as soon as they are made.
    let at_once = path("pairs-judged-at-once");
    let made_and_judged = done(super::generate(phantoms(), &at_once, &["--json", "--judges"]).arg(&judges));
    assert!(last(&made_and_judged)["judged"]["pairs"].as_u64().unwrap() > 0);
}

fn study(out: &Path, more: &[&str]) -> Command {
    let mut command = prsmed();
    command.args(["augment", "study", "--data-root"]).arg(phantoms()).arg("--extra").arg(made()).arg("--out").arg(out);
    command.args(SMALL).args(["--steps", "2", "--seeds", "2", "--limit-real", "6", "--limit-test", "6"]).args(more);
    command
}

#[test]
fn a_study_compares_three_arms() {
    let out = path("study");
    let ran = run(&mut study(&out, &[]));
    let verdict = if ran.code == Some(0) { "synthetic pairs help" } else { "no gain was shown" };
    assert!(matches!(ran.code, Some(0 | 1)), "{}", ran.stderr);
    assert!(ran.stdout.contains(verdict) || ran.stdout.contains("synthetic pairs harm"), "{}", ran.stdout);
    for title in [
        "classical augmentation against real alone",
        "synthetic pairs against real alone",
        "synthetic pairs against classical augmentation",
    ] {
        assert!(ran.stdout.contains(title), "{}", ran.stdout);
    }
    assert!(fs::read_to_string(out.join("study.svg")).unwrap().starts_with("<svg"));
    let report = fs::read_to_string(out.join("study.json")).unwrap();
    let read: Value = serde_json::from_str(&report).unwrap();
    let arms: BTreeMap<String, Vec<f64>> = serde_json::from_value(read["runs"].clone()).unwrap();
    assert_eq!(arms.keys().collect::<Vec<_>>(), ["classical", "real", "synthetic"]);
    assert!(arms.values().all(|runs| runs.len() == 2));
    assert_eq!((read["steps"].as_u64(), read["real_pictures"].as_u64()), (Some(2), Some(6)));
    // Pairs of pictures outside of the six do not count.
    let synthetic = read["synthetic_pictures"].as_u64().unwrap();
    let all = journal(made()).iter().filter(|record| record["accepted"] == true).count() as u64;
    assert!(synthetic > 0 && synthetic < all, "{synthetic} of {all}");
    let started = Instant::now();
    let again = run(&mut study(&out, &[]));
    assert!(started.elapsed().as_secs() < 10, "the runs are used again");
    assert_eq!((again.code, again.stdout), (ran.code, ran.stdout));
    assert_eq!(fs::read_to_string(out.join("study.json")).unwrap(), report);
}

#[test]
fn pairs_are_trained_on() {
    let out = path("trained-on-pairs");
    let ran =
        run(train(phantoms(), &out, &["train.max_steps=2"]).args(["--synthetic-ratio", "0.5", "--extra"]).arg(made()));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains(" synthetic ones"), "{}", ran.stderr);
}

#[test]
fn a_segmenter_measures_how_near_pairs_are() {
    let mut quality = prsmed();
    quality.args(["augment", "quality", "--json", "--data-root"]).arg(phantoms()).arg("--synthetic").arg(made());
    let report = last(&done(quality.arg("--run").arg(&trained().0)))["report"].clone();
    assert!(report.to_string().contains("synthetic"), "{report}");
}
