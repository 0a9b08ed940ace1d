//! `prsmed augment finetune --select-by segmenter`: candidates, the choice, its resume, and refusals.

use super::finetuned::finetune;
use crate::runs::signal;
use crate::support::{copy, done, error_text, objects, path, run, tree};
use prsmed::tensor::weights::replace_folder;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

const LORA: &str = "pytorch_lora_weights.safetensors";

/// A fine-tuning of a few steps that keeps two of its three validated checkpoints and chooses one of them.
fn selecting(out: &Path, more: &[&str]) -> Command {
    let sets = "train.epochs=3 train.max_steps=0 train.micro_batch=8 train.learning_rate=0.01 finetune.keep_best=2 \
                finetune.select_pairs=6 finetune.select_steps=2 finetune.select_seeds=2 \
                finetune.inference_steps_training=2 finetune.guidance_scale=1";
    let sets: Vec<&str> = sets.split_whitespace().flat_map(|set| ["--set", set]).collect();
    // `finetune` ends a training after six steps unless a later setting says otherwise
    finetune(out, &[&["--select-by", "segmenter"], &sets[..], more].concat())
}

/// A finished run, and its standard output with `--json`. Tests share it and must not change it.
fn selected() -> &'static (PathBuf, Value) {
    static RUN: OnceLock<(PathBuf, Value)> = OnceLock::new();
    RUN.get_or_init(|| {
        let out = path("selected");
        let result = objects(&done(&mut selecting(&out, &["--json"])));
        (out, result.into_iter().find(|line| line["kind"] == "result").unwrap())
    })
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Steps of the checkpoints in `candidates/`.
fn candidates(run: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(run.join("candidates"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Whether the file `name` has one of these extensions.
fn is_of(name: &str, extensions: &[&str]) -> bool {
    Path::new(name).extension().is_some_and(|own| extensions.iter().any(|one| own == *one))
}

/// The files of `best/`, and those of the choice that do not tell times.
fn results(run: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = tree(&run.join("best"));
    for (name, bytes) in tree(&run.join("selection")) {
        let is_result = name.starts_with("selection.") || name.contains("scores-") || name.ends_with("manifest.jsonl");
        if is_result || is_of(&name, &["png", "csv"]) {
            files.insert(name, bytes);
        }
    }
    files
}

#[test]
fn the_best_checkpoints_are_kept_and_one_is_chosen_by_segmenter() {
    let (out, result) = selected();
    let report = &result["selection"];
    let scores: Vec<f64> =
        report["candidates"].as_array().unwrap().iter().filter_map(|c| c["score"].as_f64()).collect();
    assert_eq!(scores.len(), 2);
    assert!(scores[0] >= scores[1], "the best validation score first: {scores:?}");
    let kept: Vec<String> = candidates(out);
    let listed: Vec<u64> = report["candidates"].as_array().unwrap().iter().filter_map(|c| c["step"].as_u64()).collect();
    let mut names: Vec<String> = listed.iter().map(|step| format!("step-{step:06}")).collect();
    names.sort();
    assert_eq!(kept, names, "worse checkpoints are deleted");
    let chosen = report["chosen_step"].as_u64().unwrap();
    assert_eq!(report["best_step_by_metric"], listed[0]);
    let best = json(&out.join("best/trainer.json"));
    assert_eq!(best["step"], chosen);
    let weights = |folder: &str| fs::read(out.join(folder).join(LORA)).unwrap();
    assert!(weights("best") == weights(&format!("candidates/step-{chosen:06}")), "best/ is not the chosen one");
    assert_eq!(json(&out.join("selection/selection.json")), *report);
    let table = fs::read_to_string(out.join("selection/selection.txt")).unwrap();
    assert!(table.contains(&format!("step {chosen} *")), "{table}");
    // random weights make noise: whatever was chosen must not be called significant without its intervals
    let gains =
        report["candidates"].as_array().unwrap().iter().filter_map(|c| c["against_real"].as_array().unwrap().last());
    let has_gain = gains.clone().any(|all| all["verdict"] == "gain");
    assert_eq!(report["any_candidate_helps"], has_gain);
    if gains.count() > 0 {
        assert_eq!(best["score_kind"], "segmenter");
    }
}

/// The pairs of all candidates have the same sources, masks, prompts and seeds.
#[test]
fn candidates_make_pairs_of_the_same_sources_prompts_and_seeds() {
    let (out, result) = selected();
    let folder = fs::read_dir(out.join("selection"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.file_name().unwrap().to_string_lossy().starts_with("pairs-"))
        .unwrap();
    let mut made = Vec::new();
    for candidate in result["selection"]["candidates"].as_array().unwrap() {
        let root = folder.join(format!("step-{:06}", candidate["step"].as_u64().unwrap()));
        let records = objects(&fs::read_to_string(root.join("manifest.jsonl")).unwrap());
        assert_eq!(records.len() as u64, candidate["pairs"].as_u64().unwrap());
        let same = |record: &Value| {
            ["source_image", "prompt", "negative", "seed", "mode", "rim_px", "decoys"].map(|key| record[key].clone())
        };
        made.push(records.iter().map(same).collect::<Vec<_>>());
        assert_ne!(records[0]["loras"][0]["sha256"], Value::Null, "the adapters are recorded");
    }
    assert_eq!(made[0].len(), 6);
    assert_eq!(made[0], made[1]);
}

/// Ends a run with the signal `number` as soon as `exists` exists below it.
fn ended_at(out: &Path, exists: impl Fn(&Path) -> bool, number: i32, more: &[&str]) -> ExitStatus {
    let mut child = selecting(out, more).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while !exists(out) {
        assert!(child.try_wait().unwrap().is_none(), "the run ended before");
        std::thread::sleep(Duration::from_millis(5));
    }
    signal(&child, number);
    child.wait().unwrap()
}

/// Whether a file of the choice whose name contains all `words` exists.
fn has(run: &Path, words: &[&str]) -> bool {
    let folder = run.join("selection");
    // files may vanish while the run works
    let found = |folder: &Path| -> Vec<PathBuf> {
        fs::read_dir(folder).map(|all| all.flatten().map(|entry| entry.path()).collect()).unwrap_or_default()
    };
    let all = found(&folder).into_iter().flat_map(|one| found(&one)).flat_map(|one| {
        let mut inner = found(&one);
        inner.push(one);
        inner
    });
    all.into_iter().any(|path| words.iter().all(|word| path.to_string_lossy().contains(word)))
}

#[test]
fn a_killed_choice_continues_and_repeats_nothing() {
    let (whole, _) = selected();
    let out = path("selected-in-parts");
    ended_at(&out, |run| run.join("candidates").is_dir(), libc::SIGKILL, &[]);
    let status = ended_at(&out, |run| has(run, &["pairs-", "manifest.jsonl"]), libc::SIGINT, &["--resume"]);
    assert_eq!(status.code(), Some(130), "Ctrl-C while pairs are made");
    ended_at(&out, |run| has(run, &["unets-", "real-0", "scores-val"]), libc::SIGKILL, &["--resume"]);
    let pairs = |run: &Path| -> Vec<std::time::SystemTime> {
        let names = tree(&run.join("selection")).into_keys().filter(|name| is_of(name, &["png"]));
        names.map(|name| fs::metadata(run.join("selection").join(name)).unwrap().modified().unwrap()).collect()
    };
    let before: Vec<_> = pairs(&out).into_iter().collect();
    done(&mut selecting(&out, &["--resume"]));
    let after = pairs(&out);
    assert!(before.len() >= 6 && before.iter().all(|time| after.contains(time)), "pairs were made again");
    let (one, other) = (results(whole), results(&out));
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    let differing: Vec<_> = one.iter().filter(|(name, bytes)| other[*name] != **bytes).map(|(name, _)| name).collect();
    assert!(differing.is_empty(), "{differing:?}");
    // a finished choice is only read; phantoms have few validation images
    let folders = |run: &Path| ["selection", "candidates", "best", "last"].map(|name| tree(&run.join(name)));
    let finished = folders(&out);
    let ran = run(&mut selecting(&out, &["--resume"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stdout.contains("choice by segmenter"), "{}", ran.stdout);
    assert!(ran.stderr.contains("validation images: with fewer than 20 it is mostly chance"), "{}", ran.stderr);
    assert!(finished == folders(&out), "a finished choice was changed");
}

/// All weights of the file are `value`.
fn overwritten(file: &[u8], value: f32) -> Vec<u8> {
    let header = 8 + usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    let tensors = value.to_le_bytes().into_iter().cycle().take(file.len() - header);
    file[..header].iter().copied().chain(tensors).collect()
}

#[test]
fn a_candidate_with_broken_weights_is_not_chosen() {
    let (origin, result) = selected();
    let out = copy(origin, "selected-broken");
    fs::remove_dir_all(out.join("selection")).unwrap();
    let best = result["selection"]["best_step_by_metric"].as_u64().unwrap();
    let broken = out.join(format!("candidates/step-{best:06}"));
    let weights = overwritten(&fs::read(broken.join(LORA)).unwrap(), f32::NAN);
    replace_folder(&broken, &broken, (LORA, &weights)).unwrap();
    let ran = run(&mut selecting(&out, &["--resume"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let report = json(&out.join("selection/selection.json"));
    assert_eq!(report["best_step_by_metric"], best);
    assert_ne!(report["chosen_step"], best, "{report}");
    assert!(report["candidates"][0]["problem"].as_str().unwrap().contains("not finite"), "{report}");
    assert_eq!(report["candidates"][0]["dice"], serde_json::json!([]));
    assert!(ran.stdout.contains(&format!("step {best} was not scored: ")), "{}", ran.stdout);
    assert_eq!(json(&out.join("best/trainer.json"))["step"], report["chosen_step"]);
}

#[test]
fn generators_of_all_kinds_can_be_chosen() {
    let modes: [(&str, &[&str], &str); 3] = [
        ("whole", &["--method", "full"], "unet/diffusion_pytorch_model.safetensors"),
        (
            "filling",
            &["--mode", "inpaint", "--method", "full", "--set", "finetune.masks_per_image=2"],
            "unet/config.json",
        ),
        ("control", &["--mode", "mask_to_image"], "controlnet/diffusion_pytorch_model.safetensors"),
    ];
    for (name, more, file) in modes {
        let out = path(&format!("selected-{name}"));
        let ran = run(&mut selecting(&out, &[more, &["--set", "train.epochs=1"]].concat()));
        assert_eq!(ran.code, Some(0), "{name}: {}", ran.stderr);
        let report = json(&out.join("selection/selection.json"));
        assert_eq!(report["pair_mode"], if name == "control" { "mask_to_image" } else { "keep_lesion" });
        assert!(out.join("best").join(file).exists(), "{name}");
    }
}

#[test]
fn a_choice_that_cannot_work_is_refused_before_anything_is_written() {
    let out = path("selected-never");
    for (more, words) in [
        ("--set train.validate_every_epochs=0", "set `train.validate_every_epochs=1`"),
        ("--set finetune.select_mode=mask_to_image", "`mask_to_image` needs a ControlNet"),
        ("--mode mask_to_image --set finetune.select_mode=keep_lesion", "do not use the ControlNet"),
        ("--set finetune.inference_steps_training=1", "is too few for pairs"),
    ] {
        let ran = run(&mut selecting(&out, &more.split_whitespace().collect::<Vec<_>>()));
        assert_eq!(ran.code, Some(2), "{more}: {}", ran.stderr);
        assert!(error_text(&ran).contains(words), "{more}: {}", ran.stderr);
        assert!(!out.exists(), "{more}");
    }
    // a run that kept no candidates
    let plain = path("selected-too-late");
    done(&mut finetune(&plain, &[]));
    let ran = run(&mut finetune(&plain, &["--resume", "--select-by", "segmenter"]));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(error_text(&ran).contains("there are no candidates"), "{}", ran.stderr);
}
