//! Generated pairs: filter models, training, and the ablation.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{assert_rows_are_correct, files, journal, made, tree, word};
use crate::support::{copy, differing, done, objects, path, phantoms, prsmed, run, train};

/// Settings of a segmenter whose steps take a fraction of a second.
const SMALL: [&str; 6] = ["--preset", "tiny", "--set", "model.image_size=64", "--set", "train.micro_batch=2"];

/// Filters pairs with models trained for three steps, with limits that such models can meet.
fn filter(pairs: &Path, more: &[&str]) -> Command {
    let mut command = filter_as_text(pairs);
    command.arg("--json").args(more);
    command
}

/// As [`filter`], with its result as text.
fn filter_as_text(pairs: &Path) -> Command {
    let mut command = prsmed();
    command.args(["augment", "filter", "--data-root"]).arg(phantoms()).arg("--extra").arg(pairs).args(SMALL);
    command.args(["--folds", "2", "--steps", "3"]);
    for limit in ["dice_min=0", "outside_max=1", "knn_quantile=1", "cosine_quantile=1"] {
        command.args(["--threshold", limit]);
    }
    command
}

fn last(text: &str) -> Value {
    objects(text).pop().unwrap()
}

fn sha256(file: &Path) -> String {
    format!("{:x}", Sha256::digest(fs::read(file).unwrap()))
}

/// The files of every pair are where its decision in the journal says, and nowhere else.
fn assert_files_match_decisions(pairs: &Path) {
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
fn filter_models_score_only_pairs_of_held_out_sources() {
    let pairs = copy(made(), "pairs-filtered");
    let before = journal(&pairs);
    let text = done(&mut filter(&pairs, &[]));
    assert!(text.contains("\"memory plan for the longest texts allowed"), "{text}");
    let result = last(&text);
    assert_eq!((result["out"].as_str(), result["thresholds"]["dice_min"].as_f64()), (pairs.to_str(), Some(0.0)));
    let first = result["filtered"].clone();
    let after = journal(&pairs);
    assert_eq!((first["pairs"].as_u64(), first["unknown"].as_u64()), (Some(after.len() as u64), Some(0)), "{first}");
    for (old, new) in before.iter().zip(&after) {
        assert_eq!((&old["index"], &old["prompt"]), (&new["index"], &new["prompt"]));
        let dice = new["scores"]["dice"].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&dice) && old["scores"]["dice"].is_null(), "{new}");
    }
    assert_files_match_decisions(&pairs);
    assert_rows_are_correct(&pairs);
    // Every real training image is in one fold; no copy of it is in another; both filter models have some.
    let folds: BTreeMap<String, usize> =
        serde_json::from_slice(&fs::read(pairs.join("filter_models/folds.json")).unwrap()).unwrap();
    let sources: BTreeSet<String> = super::masks_of(phantoms(), None).keys().map(|file| sha256(file)).collect();
    assert_eq!(folds.keys().cloned().collect::<BTreeSet<_>>(), sources);
    assert_eq!(folds.values().copied().collect::<BTreeSet<_>>(), BTreeSet::from([0, 1]));
    // A filter model equals a training without the images of its fold.
    for fold in [0, 1] {
        let without = without_fold(&folds, fold);
        let trained = path(&format!("trained-without-fold-{fold}"));
        done(&mut train(&without, &trained, &["train.max_steps=3", "train.validate_every_epochs=0"]));
        let last = |fold: usize| pairs.join(format!("filter_models/fold-{fold}/last"));
        assert_eq!(differing(&trained.join("last"), &last(fold)), [""; 0]);
        let of_the_other = differing(&trained.join("last"), &last(1 - fold));
        assert!(of_the_other.contains(&"mask_decoder.safetensors".to_owned()), "{of_the_other:?}");
    }
    // Filtering again gives the same result.
    let once = copy(&pairs, "pairs-filtered-once");
    let again = done(&mut filter(&pairs, &["--no-plan"]));
    assert!(!again.contains("\"memory plan for "), "{again}");
    let again = last(&again)["filtered"].clone();
    assert_eq!(again, first);
    let mut differing = Vec::new();
    let (a, b) = (tree(&once), tree(&pairs));
    for (name, bytes) in a.iter().filter(|(name, _)| !name.starts_with("filter_models/")) {
        if b.get(name) != Some(bytes) {
            differing.push(name);
        }
    }
    assert!(differing.is_empty(), "{differing:?}");
}

#[test]
fn a_decision_moves_files_and_can_be_reversed() {
    let pairs = copy(made(), "pairs-filtered-again");
    let filter_models = path("filter_models");
    let with = |limit: &str| {
        let mut command = filter(&pairs, &["--threshold", limit, "--filter-models"]);
        last(&done(command.arg(&filter_models)))["filtered"].clone()
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
    assert_files_match_decisions(&pairs);
    assert_rows_are_correct(&pairs);
    assert_eq!(with("dice_min=0"), lenient);
    assert_eq!(journal(&pairs), accepted);
    assert_files_match_decisions(&pairs);
    // the next command has the data root and the settings
    let text = done(filter_as_text(&pairs).arg("--filter-models").arg(&filter_models));
    let next = text.lines().find_map(|line| line.strip_prefix("next: prsmed ")).unwrap_or_else(|| panic!("{text}"));
    let rows = format!("augment ablation --data-root {} --extra {}", phantoms().display(), pairs.display());
    assert!(next.starts_with(&rows) && next.contains(&SMALL.join(" ")), "{next}");
    done(prsmed().args(next.split(' ')).arg("--help"));
    // Other folds need other filter models.
    let ran = run(filter(&pairs, &["--folds", "3", "--filter-models"]).arg(&filter_models));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
}

fn ablation(out: &Path, seeds: &str) -> Command {
    let mut command = prsmed();
    command
        .args(["augment", "ablation", "--data-root"])
        .arg(phantoms())
        .arg("--extra")
        .arg(made())
        .arg("--out")
        .arg(out);
    command.args(SMALL).args(["--steps", "2", "--seeds", seeds, "--real-images", "6", "--limit-test", "6"]);
    command
}

/// Mean Dice on the test rows of each arm and seed, from `ablation.json`.
fn dice_of_arms(report: &Value) -> BTreeMap<String, Vec<f64>> {
    let runs = report["runs"].as_array().unwrap();
    let dice = runs.iter().filter(|run| run["set"] == "test");
    dice.map(|run| (word(run, "arm").to_owned(), serde_json::from_value(run["by_seed"].clone()).unwrap())).collect()
}

#[test]
fn an_ablation_compares_four_arms() {
    let out = path("ablation");
    let ran = run(&mut ablation(&out, "2"));
    let conclusions: &[&str] = match ran.code {
        Some(0) => &["synthetic pairs help"],
        _ => &["no gain was shown", "cannot tell", "synthetic pairs harm"],
    };
    assert!(matches!(ran.code, Some(0 | 1)), "{}", ran.stderr);
    assert!(conclusions.iter().any(|conclusion| ran.stdout.contains(conclusion)), "{}", ran.stdout);
    for title in [
        "classical augmentation against real alone",
        "duplicated real rows against real alone",
        "synthetic pairs against real alone",
        "synthetic pairs against duplicated real rows",
        "synthetic pairs against classical augmentation",
    ] {
        assert!(ran.stdout.contains(title), "{}", ran.stdout);
    }
    assert!(ran.stderr.contains("8 trainings of 2 steps: 4 arms, 2 seeds"), "{}", ran.stderr);
    assert!(ran.stdout.contains(fs::read_to_string(out.join("ablation.txt")).unwrap().trim_end()));
    let report = fs::read_to_string(out.join("ablation.json")).unwrap();
    let read: Value = serde_json::from_str(&report).unwrap();
    let arms = dice_of_arms(&read);
    assert_eq!(arms.keys().collect::<Vec<_>>(), ["classical", "duplicates-0.5", "real", "synthetic-0.5"]);
    assert!(arms.values().all(|runs| runs.len() == 2));
    assert_eq!((read["steps"].as_u64(), read["real_images"].as_u64()), (Some(2), Some(6)));
    // Pairs of other images are not used.
    let synthetic = read["synthetic_images"].as_u64().unwrap();
    let all = journal(made()).iter().filter(|record| record["accepted"] == true).count() as u64;
    assert!(synthetic > 0 && synthetic < all, "{synthetic} of {all}");
    let started = Instant::now();
    let again = run(&mut ablation(&out, "2"));
    assert!(started.elapsed().as_secs() < 10, "finished runs are used again");
    assert_eq!((again.code, &again.stdout), (ran.code, &ran.stdout));
    assert_eq!(fs::read_to_string(out.join("ablation.json")).unwrap(), report);
    // a run of the second seed whose scoring was interrupted continues from its checkpoint
    fs::remove_file(out.join("runs/prsmed-6-synthetic-0.5-1/scores-test.json")).unwrap();
    let rescored = run(&mut ablation(&out, "2"));
    assert_eq!((rescored.code, &rescored.stdout), (ran.code, &ran.stdout), "{}", rescored.stderr);
    // one of the two seeds
    let warning = "warning: one seed cannot show the variation between seeds: ";
    let one = run(&mut ablation(&out, "1"));
    assert!(one.stderr.contains(warning) && !again.stderr.contains(warning), "{}", one.stderr);
}

#[test]
fn an_ablation_of_two_ratios_scores_an_external_data_root() {
    let out = path("ablation-of-two-ratios");
    let ablation = || {
        let mut command = ablation(&out, "1");
        command.args(["--ratios", "0.5,1", "--external"]).arg(phantoms());
        run(&mut command)
    };
    let ran = ablation();
    assert!(matches!(ran.code, Some(0 | 1)), "{}", ran.stderr);
    let read: Value = serde_json::from_str(&fs::read_to_string(out.join("ablation.json")).unwrap()).unwrap();
    assert_eq!(dice_of_arms(&read).len(), 6);
    let sets: Vec<&str> = read["sets"].as_array().unwrap().iter().map(|set| word(set, "name")).collect();
    assert_eq!(sets, ["test", "external"]);
    let comparisons = read["comparisons"].as_array().unwrap();
    // two sets, one comparison of classical augmentation and four for each ratio
    assert_eq!(comparisons.len(), 2 * (1 + 2 * 4));
    assert_eq!(comparisons.iter().filter(|one| one["is_primary"] == true).count(), 2);
    // the weights of a finished training are read
    for name in ["scores-test.json", "probe.json"] {
        let _ = fs::remove_file(out.join("runs/prsmed-6-real-0").join(name));
    }
    let again = ablation();
    assert_eq!((again.code, &again.stdout), (ran.code, &ran.stdout), "{}", again.stderr);
    for (flag, value, message) in [
        ("--ratios", "0.5,0.5", "`--ratios`: a value occurs twice"),
        ("--ratios", "5", "some steps of 2 would contain no real row"),
    ] {
        let mut command = self::ablation(&out, "1");
        let refused = run(command.args([flag, value]));
        assert!(refused.code == Some(2) && refused.stderr.contains(message), "{flag}: {}", refused.stderr);
    }
}

#[test]
fn a_training_uses_the_pairs() {
    let out = path("trained-on-pairs");
    let ran =
        run(train(phantoms(), &out, &["train.max_steps=2"]).args(["--synthetic-ratio", "0.5", "--extra"]).arg(made()));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains(" synthetic ones"), "{}", ran.stderr);
}

#[test]
fn models_and_runs_are_not_written_through_links() {
    let outside = crate::support::folder("outside-of-pairs");
    fs::create_dir_all(&outside).unwrap();
    let refuses = |command: &mut Command, link: PathBuf| {
        std::os::unix::fs::symlink(&outside, &link).unwrap();
        let ran = run(command);
        assert!(ran.code == Some(2) && ran.stderr.contains("is a symbolic link"), "{link:?}: {}", ran.stderr);
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0, "{link:?}");
        fs::remove_file(&link).unwrap();
    };
    let pairs = copy(made(), "pairs-with-links");
    refuses(&mut filter(&pairs, &[]), pairs.join("filter_models"));
    fs::create_dir(pairs.join("filter_models")).unwrap();
    refuses(&mut filter(&pairs, &[]), pairs.join("filter_models/fold-0"));
    let out = crate::support::folder("ablation-with-links");
    fs::create_dir_all(out.join("runs")).unwrap();
    refuses(&mut ablation(&out, "1"), out.join("runs/prsmed-6-real-0"));
    fs::remove_dir(out.join("runs")).unwrap();
    refuses(&mut ablation(&out, "1"), out.join("runs"));
}
