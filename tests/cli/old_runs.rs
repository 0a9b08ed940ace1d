//! Runs written by an older build are opened, and answer as they did.
//!
//! `scripts/fixtures/old_runs.py` wrote the runs with revision 8fdc89c, and what that build answered. The answers differ by
//! rounding at most, because another processor adds in another order; with `--check` the script compares them exactly.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

use crate::support::{copy, done, prsmed};

/// A copy of the old runs, which some commands change.
fn old_runs() -> &'static Path {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    HOME.get_or_init(|| copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/old_runs"), "old_runs"))
}

fn run(arguments: &str) -> String {
    done(prsmed().current_dir(old_runs()).arg("--json").args(arguments.split(' ').map(|word| word.replace('~', " "))))
}

fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(old_runs().join("answers/texts.json")).unwrap()).unwrap()
}

/// Fails if more than one pixel in a hundred differs by more than 2 of 255.
fn assert_same_image(found: &Path, expected: &str) {
    let open = |path: &Path| image::open(path).unwrap().to_rgb8();
    let (found, expected) = (open(found), open(&old_runs().join("answers").join(expected)));
    assert_eq!(found.dimensions(), expected.dimensions());
    let differ = found.iter().zip(expected.iter()).filter(|(a, b)| a.abs_diff(**b) > 2).count();
    assert!(100 * differ <= expected.len(), "{differ} of {} values differ", expected.len());
}

/// `predict` on an old run gives the old mask, words and confidence.
fn assert_predicts(name: &str) {
    let image = "data/brain_MRI/val_images/phantom_00007_a.png";
    let stdout = run(&format!(
        "predict {name}/last --image {image} --question Where~is~the~lesion~in~this~image? --always-paint \
         --mask-out {name}.png"
    ));
    let file = format!("{name}.png");
    assert_same_image(&old_runs().join(&file), &file);
    let found: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    let expected = &expected()[name];
    assert_eq!(found["answer"], expected["answer"]);
    for score in ["presence", "foreground"] {
        let score = |value: &Value| value["confidence"][score].as_f64().unwrap();
        assert!((score(&found) - score(expected)).abs() < 1e-3, "{found}");
    }
}

#[test]
fn an_old_run_predicts_as_before() {
    assert_predicts("whole");
}

#[test]
fn an_old_adapter_predicts_as_before() {
    assert_predicts("lora");
}

#[test]
fn an_old_run_continues_as_before() {
    let whole = copy(&old_runs().join("whole"), "old_runs_continued");
    run(&format!(
        "train --config small.toml --data-root data --out {} --set train.max_steps=6 --resume",
        whole.to_str().unwrap()
    ));
    let metrics = std::fs::read_to_string(whole.join("metrics.jsonl")).unwrap();
    let steps = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let losses: Vec<_> =
        steps.filter(|line| line["kind"] == "step").map(|line| line["losses"]["total"].as_f64().unwrap()).collect();
    let expected: Vec<_> = expected()["losses"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    assert_eq!(losses.len(), 6);
    assert!(losses.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-3 * b), "{losses:?} {expected:?}");
}

#[test]
fn an_old_generator_makes_the_same_pairs() {
    run("augment generate --preset tiny --data-root data --no-filter --limit 2 --per-image 1 \
         --set augment.image_size=64 --set augment.steps=2 --lora generator/last/pytorch_lora_weights.safetensors --out pairs");
    let mut pairs = 0;
    for entry in std::fs::read_dir(old_runs().join("answers")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let Some((folder, file)) = name.strip_prefix("pair-").and_then(|name| name.split_once('-')) else { continue };
        let pairs_root = old_runs().join("pairs");
        let class = std::fs::read_dir(&pairs_root)
            .unwrap()
            .map(|entry| entry.unwrap().path().join(folder).join(file))
            .find(|path| path.exists());
        assert_same_image(&class.unwrap_or_else(|| panic!("no {folder}/{file}")), &name);
        pairs += 1;
    }
    assert_eq!(pairs, 4);
}
