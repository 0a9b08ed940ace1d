//! `prsmed augment finetune`: results, resume, use of the result, and refusals.

use super::generate;
use crate::support::{done, error_text, folder, objects, path, phantoms, prsmed, run, tree};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

fn finetune(out: &Path, more: &[&str]) -> Command {
    let mut command = prsmed();
    command.args(["augment", "finetune", "--preset", "tiny", "--data-root"]).arg(phantoms()).arg("--out").arg(out);
    command.args(["--set", "finetune.image_size=64", "--set", "train.max_steps=6"]).args(more);
    command
}

/// The files of a checkpoint.
fn checkpoint(run: &Path) -> BTreeMap<String, Vec<u8>> {
    tree(&run.join("last")).into_iter().collect()
}

#[test]
fn an_interrupted_fine_tuning_ends_as_an_undisturbed_one() {
    let (whole, parts) = (path("finetuned"), path("finetuned-in-parts"));
    let all = ["--set", "train.checkpoint_every_steps=2", "--set", "train.ema_decay=0.9"];
    done(&mut finetune(&whole, &all));
    // the second run is interrupted after its first checkpoint, wherever it is then
    let mut child = finetune(&parts, &all).stderr(std::process::Stdio::null()).spawn().unwrap();
    while !parts.join("last").exists() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    done(&mut finetune(&parts, &[&all[..], &["--resume"]].concat()));
    let (one, other) = (checkpoint(&whole), checkpoint(&parts));
    assert!(one.keys().any(|name| name.ends_with("pytorch_lora_weights.safetensors")), "{:?}", one.keys());
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    let differing: Vec<_> = one.iter().filter(|(name, bytes)| other[*name] != **bytes).map(|(name, _)| name).collect();
    assert!(differing.is_empty(), "{differing:?}");
    let lines = objects(&fs::read_to_string(parts.join("metrics.jsonl")).unwrap());
    let steps: Vec<u64> =
        lines.iter().filter(|line| line["kind"] == "step").filter_map(|line| line["step"].as_u64()).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
}

#[test]
fn micro_batches_change_rounding_only() {
    let loss_of = |name: &str, sets: &[&str]| -> f64 {
        let out = path(name);
        done(&mut finetune(&out, sets));
        let lines = objects(&fs::read_to_string(out.join("metrics.jsonl")).unwrap());
        let validated = lines.iter().rev().find(|line| line["kind"] == "validation").unwrap();
        validated["values"]["loss_denoising"].as_f64().unwrap()
    };
    let one = loss_of("finetuned-4x1", &[]);
    let other = loss_of("finetuned-1x4", &["--set", "train.micro_batch=1", "--set", "train.accumulation=4"]);
    assert!((one - other).abs() < 1e-4 * one, "{one} {other}");
    // three gradients of a skip map are added in another order
    let checkpointed = loss_of("finetuned-checkpointed", &["--set", "train.checkpointing=full"]);
    assert!((one - checkpointed).abs() < 1e-6 * one, "{one} {checkpointed}");
}

#[test]
fn the_generator_uses_the_fine_tuned_adapters() {
    let out = path("finetuned-for-use");
    let ran = run(&mut finetune(&out, &["--set", "train.learning_rate=0.01"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("trainable params: 14,080 || all params: "), "{}", ran.stderr);
    let weights = out.join("best/pytorch_lora_weights.safetensors");
    assert!(ran.stdout.contains("weights: ") && weights.exists(), "{}", ran.stdout);
    let pixels = |name: &str, more: &[&str]| {
        let root = path(name);
        done(&mut generate(phantoms(), &root, &[&["--limit", "1", "--per-image", "1", "--no-filter"], more].concat()));
        tree(&root).into_iter().filter(|(name, _)| name.contains("train_images")).collect::<Vec<_>>()
    };
    let (plain, tuned) = (pixels("plain-pair", &[]), pixels("tuned-pair", &["--lora", weights.to_str().unwrap()]));
    assert_eq!(plain.len(), 1);
    assert_ne!(plain, tuned, "the adapters change nothing");
}

#[test]
fn all_weights_can_be_trained() {
    let out = path("finetuned-whole");
    let ran = run(&mut finetune(&out, &["--method", "full"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("trainable%: 100.0000"), "{}", ran.stderr);
    assert!(out.join("best/unet/diffusion_pytorch_model.safetensors").exists());
    let sizes: serde_json::Value =
        serde_json::from_slice(&fs::read(out.join("best/unet/config.json")).unwrap()).unwrap();
    assert_eq!(sizes["_class_name"], "UNet2DConditionModel");
}

#[test]
fn unusable_fine_tunings_are_refused_before_they_start() {
    let error_of = |command: &mut Command| {
        let ran = run(command);
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        error_text(&ran)
    };
    let out = folder("unusable-finetune");
    let error = error_of(&mut finetune(&out, &["--set", "finetune.targets=to_q,to_x"]));
    assert!(error.contains("is called `to_x`") && error.contains("ff.net.2"), "{error}");
    let error = error_of(&mut finetune(&out, &["--model", "random:huge"]));
    assert!(error.contains("there is no size `huge`"), "{error}");
    assert!(!out.join("last").exists());
    let done_once = path("finetuned-once");
    done(&mut finetune(&done_once, &[]));
    let before = tree(&done_once);
    let error = error_of(&mut finetune(&done_once, &[]));
    assert!(error.contains("already contains a run"), "{error}");
    let error = error_of(&mut finetune(&done_once, &["--resume", "--set", "finetune.rank=8"]));
    assert!(error.contains("`finetune.rank`: the run to resume has 4, and 8"), "{error}");
    assert!(before == tree(&done_once), "a refused command changed the run");
}
