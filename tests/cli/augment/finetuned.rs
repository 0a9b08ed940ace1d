//! `prsmed augment finetune`: results, resume, use of the result, and refusals.

use super::generate;
use crate::support::{done, error_text, folder, objects, path, phantoms, prsmed, run, trained, tree};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

pub(super) fn finetune(out: &Path, more: &[&str]) -> Command {
    let mut command = prsmed();
    command.args(["augment", "finetune", "--preset", "tiny", "--data-root"]).arg(phantoms()).arg("--out").arg(out);
    command.args(["--set", "finetune.image_size=64", "--set", "train.max_steps=6"]).args(more);
    command
}

/// The files of a checkpoint.
fn checkpoint(run: &Path) -> BTreeMap<String, Vec<u8>> {
    tree(&run.join("last")).into_iter().collect()
}

/// Runs a fine-tuning undisturbed and once more with an interruption, in the folders `NAME` and `NAME-in-parts`, and
/// checks that both end with the same bytes.
pub(super) fn interrupted_equals_undisturbed(name: &str, more: &[&str]) {
    let (whole, parts) = (path(name), path(&format!("{name}-in-parts")));
    let all = [&["--set", "train.checkpoint_every_steps=2", "--set", "train.ema_decay=0.9"], more].concat();
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
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    let differing: Vec<_> = one.iter().filter(|(name, bytes)| other[*name] != **bytes).map(|(name, _)| name).collect();
    assert!(differing.is_empty(), "{differing:?}");
    let lines = objects(&fs::read_to_string(parts.join("metrics.jsonl")).unwrap());
    let steps: Vec<u64> =
        lines.iter().filter(|line| line["kind"] == "step").filter_map(|line| line["step"].as_u64()).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
}

#[test]
fn an_interrupted_fine_tuning_ends_as_an_undisturbed_one() {
    interrupted_equals_undisturbed("finetuned", &[]);
    assert!(path("finetuned/last/pytorch_lora_weights.safetensors").exists());
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

/// Weights in host memory are those on the device, and a run can go from one place to the other.
#[test]
fn weights_in_host_memory_train_the_same() {
    let with = |more: &[&str]| {
        let sets = "finetune.method=full train.precision=bf16 train.micro_batch=2 train.accumulation=2 \
                    train.ema_decay=0.9 train.checkpoint_every_steps=3";
        let sets: Vec<&str> = sets.split_whitespace().chain(more.iter().copied()).collect();
        sets.into_iter().flat_map(|set| ["--set".to_owned(), set.to_owned()]).collect::<Vec<_>>()
    };
    let train = |name: &str, sets: &[String], more: &[&str]| {
        let out = path(name);
        let words: Vec<&str> = sets.iter().map(String::as_str).chain(more.iter().copied()).collect();
        done(&mut finetune(&out, &words));
        let lines = objects(&fs::read_to_string(out.join("metrics.jsonl")).unwrap());
        let losses = lines.iter().filter(|line| line["kind"] == "step").map(|line| line["losses"]["total"].clone());
        (losses.collect::<Vec<_>>(), out)
    };
    let offloaded = with(&["train.offload_weights=true"]);
    let (resident_losses, resident) = train("finetuned-resident", &with(&[]), &[]);
    let (losses, on_host) = train("finetuned-on-host", &offloaded, &[]);
    assert_eq!(losses, resident_losses);
    let weights = "unet/diffusion_pytorch_model.safetensors";
    let bytes = |run: &Path, which: &str| fs::read(run.join(which).join(weights)).unwrap();
    for which in ["last", "best"] {
        assert!(bytes(&resident, which) == bytes(&on_host, which), "`{which}` differs");
    }
    // half of the steps here, half there
    let begun = path("finetuned-moved");
    let words: Vec<&str> = offloaded.iter().map(String::as_str).collect();
    let mut child = finetune(&begun, &words).stderr(std::process::Stdio::null()).spawn().unwrap();
    while !begun.join("last").exists() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let (_, moved) = train("finetuned-elsewhere", &with(&[]), &["--resume", begun.to_str().unwrap()]);
    assert!(bytes(&resident, "last") == bytes(&moved, "last"), "a run that moved to the device differs");
}

#[test]
fn a_run_continues_only_from_a_complete_checkpoint_in_a_new_folder() {
    let (first, second) = (path("finetuned-origin"), path("finetuned-copy"));
    done(&mut finetune(&first, &[]));
    let refused = |out: &Path, from: &Path, words: &str| {
        let before = out.exists().then(|| tree(out));
        let ran = run(&mut finetune(out, &["--resume", from.to_str().unwrap()]));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(error_text(&ran).contains(words), "{}", ran.stderr);
        assert!(before == out.exists().then(|| tree(out)), "a refused command changed the folder");
    };
    refused(&first, &first.join("best"), "already contains a run");
    refused(&second, &first.join("samples"), "checksums.json");
    done(&mut finetune(&second, &["--resume", "none"]));
}

#[test]
fn weights_in_host_memory_need_16_bits() {
    let out = folder("unusable-offload");
    for (sets, words) in [
        ("train.precision=fp32", "train.precision=bf16"),
        ("train.precision=bf16 train.offload_optimizer=true", "includes `train.offload_optimizer`"),
        ("train.precision=bf16 train.step_in_backward=true train.clip_norm=0 train.accumulation=1", "step_in_backward"),
    ] {
        let words_of_sets = sets.split_whitespace().flat_map(|set| ["--set", set]);
        let all: Vec<&str> = words_of_sets.chain(["--set", "train.offload_weights=true"]).collect();
        let ran = run(&mut finetune(&out, &all));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(error_text(&ran).contains(words), "{}", ran.stderr);
    }
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

#[test]
fn regions_and_masks_can_be_learned() {
    let images = |run: &Path, kind: &str| {
        tree(&run.join("cache")).into_iter().filter(|(name, _)| name.starts_with(kind)).count()
    };
    let regions = path("finetuned-regions");
    done(&mut finetune(&regions, &["--mode", "inpaint", "--set", "finetune.masks_per_image=2"]));
    assert!(regions.join("best/pytorch_lora_weights.safetensors").exists());
    assert!(images(&regions, "image") > 0);
    assert_eq!(images(&regions, "region"), 2 * images(&regions, "image"));

    let masks = path("finetuned-masks");
    let ran = run(&mut finetune(&masks, &["--mode", "mask_to_image"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stdout.contains("best/controlnet/diffusion_pytorch_model.safetensors"), "{}", ran.stdout);
    assert_eq!(images(&masks, "mask"), images(&masks, "image"));
    let sizes = fs::read(masks.join("best/controlnet/config.json")).unwrap();
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&sizes).unwrap()["_class_name"], "ControlNetModel");
    assert!(masks.join("best/controlnet/diffusion_pytorch_model.safetensors").exists());
    assert!(!masks.join("best/unet").exists(), "a frozen UNet is not written");
}

#[test]
fn samples_are_made_and_measured_at_each_validation() {
    let (run_folder, _) = trained();
    let features = format!("finetune.features={}", run_folder.display());
    let sets = ["finetune.samples=24", "finetune.sample_steps=2", "train.max_steps=0", "train.epochs=6", &features];
    let sets: Vec<&str> = sets.into_iter().flat_map(|set| ["--set", set]).collect();
    let out = path("finetuned-with-samples");
    let ran = run(&mut finetune(&out, &[&sets[..], &["--profile-memory", "every=1"]].concat()));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stdout.contains("best/: mean KID of the samples "), "{}", ran.stdout);
    for text in ["Computing quality metrics... before", "KID[segmenter]", "MMD[segmenter]"] {
        assert_eq!(ran.stderr.matches(text).count() % 6, 0, "{text}\n{}", ran.stderr);
        assert!(ran.stderr.contains(text), "{text}\n{}", ran.stderr);
    }
    let lines = objects(&fs::read_to_string(out.join("metrics.jsonl")).unwrap());
    let validated: Vec<_> = lines.iter().filter(|line| line["kind"] == "validation").collect();
    assert_eq!(validated.len(), 6);
    for line in validated {
        let value = |key: &str| line["values"][key].as_f64().unwrap_or_else(|| panic!("{key}: {line}"));
        assert!(value("kid_low") <= value("kid") && value("kid") <= value("kid_high"), "{line}");
        let step = line["step"].as_u64().unwrap();
        assert!(out.join(format!("samples/step-{step:06}.png")).exists());
    }
    assert!(fs::read_dir(out.join("samples/latest")).unwrap().count() >= 24);
    let best: serde_json::Value = serde_json::from_slice(&fs::read(out.join("best/trainer.json")).unwrap()).unwrap();
    assert!(best["best_score"].as_f64().unwrap() < 1.0);

    // memory does not grow from epoch to epoch
    let profile = objects(&fs::read_to_string(out.join("memory.jsonl")).unwrap());
    let of = |key: &str| -> Vec<u64> {
        let evaluations = profile.iter().filter(|line| line["kind"] == "phase" && line["name"] == "evaluate");
        evaluations.filter_map(|line| line[key].as_u64()).collect()
    };
    for bytes in [of("allocated"), of("allocated_peak")] {
        assert_eq!(bytes.len(), 6);
        assert!(bytes.iter().all(|&later| later == bytes[0]), "memory grows: {bytes:?}");
    }
}

/// Files for diffusers are compared with diffusers itself: every tensor is used, none is missing, all values are equal.
#[test]
#[ignore = "needs scripts/setup --checks"]
fn python_reads_the_fine_tuned_networks() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let whole = path("finetuned-for-python-whole");
    done(&mut finetune(&whole, &["--method", "full"]));
    let sizes = whole.join("best/unet/config.json");
    // the sizes of a small SDXL model
    let sdxl = path("finetuned-for-python-sdxl");
    done(&mut finetune(&sdxl, &["--method", "full", "--model", "random:tiny-sdxl"]));
    let cases: [(&str, &[&str], &[&str]); 6] = [
        ("whole", &["--method", "full", "--mode", "inpaint"], &["unet: 304 tensors"]),
        ("lora", &[], &["LoRA: 96 tensors", "kohya LoRA: 96 tensors"]),
        ("lora-scaled", &["--set", "finetune.alpha=2", "--set", "finetune.rank=6"], &["kohya LoRA: 96 tensors"]),
        ("lora-sdxl", &["--model", "random:tiny-sdxl"], &["LoRA: 96 tensors", "kohya LoRA: 96 tensors"]),
        ("lora-inpaint", &["--mode", "inpaint", "--set", "finetune.targets=to_q,ff.net.2"], &["LoRA: "]),
        ("control", &["--mode", "mask_to_image"], &["controlnet: 178 tensors"]),
    ];
    let mut python = Command::new(root.join(".venv/bin/python"));
    // `scripts/soak diffusers` gives other versions
    let diffusers = std::env::var_os("PRSMED_DIFFUSERS").unwrap_or_else(|| root.join(".tools/diffusers").into());
    python.env("PYTHONPATH", diffusers).arg(root.join("scripts/generator_interop_check.py"));
    for (name, more, _) in cases {
        let out = path(&format!("finetuned-for-python-{name}-files"));
        done(&mut finetune(&out, more));
        let sizes = if name.ends_with("sdxl") { sdxl.join("best/unet/config.json") } else { sizes.clone() };
        python.arg(out.join("best")).arg(sizes);
    }
    let output = python.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    // the first part is before the first folder
    let parts: Vec<&str> = said.split("== ").skip(1).collect();
    assert_eq!(parts.len(), cases.len(), "{said}");
    for ((name, _, expected), said) in cases.iter().zip(parts) {
        assert!(said.contains(&format!("-{name}-files")), "{said}");
        assert!(expected.iter().all(|line| said.contains(line)), "{name}: {said}");
    }
}
