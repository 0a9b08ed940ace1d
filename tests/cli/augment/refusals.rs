//! Errors of `prsmed augment`.

use std::fs;

use super::{assert_same_tree, generate, made};
use crate::support::{copy, error_text, folder, path, phantoms, prsmed, refused, run};

/// The command fails with a message that contains all `parts`.
fn refused_with(command: &mut std::process::Command, parts: &[&str]) {
    let ran = run(command);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{}", ran.stderr);
    let said = error_text(&ran);
    for part in parts {
        assert!(said.contains(part), "`{part}` is not in: {said}");
    }
}

#[test]
fn other_settings_in_the_same_folder_are_rejected() {
    let out = copy(made(), "pairs-other-settings");
    let differing = [
        (&["--set", "augment.strength=0.5"][..], "(augment.strength was 0.6, is 0.5)"),
        (&["--seed", "4"], "(augment.seed was 0, is 4)"),
        (&["--per-image", "3"], "(augment.per_image was 2, is 3)"),
        (&["--set", "filter.sigma=2"], "(filter.sigma was 3.0, is 2.0)"),
        (&["--no-filter"], "(filters was true, is false)"),
        (&["--limit", "2"], "(sources was "),
    ];
    for (flags, named) in differing {
        let parts = [
            "error: `--out`: `~/pairs-other-settings` contains pairs made with other settings",
            named,
            "hint: choose ",
        ];
        refused_with(&mut generate(phantoms(), &out, flags), &parts);
    }
    assert_same_tree(&out, made());
}

#[test]
fn a_data_set_that_was_not_generated_is_not_changed() {
    let root = copy(phantoms(), "pairs-into-data");
    let parts =
        ["~/pairs-into-data: is a data root without `manifest.jsonl`; nothing was written", "hint: give a folder"];
    refused_with(&mut generate(phantoms(), &root, &[]), &parts);
    assert_same_tree(&root, phantoms());
}

#[test]
fn missing_models_are_errors() {
    let out = path("never-made");
    refused(
        &mut generate(phantoms(), &out, &["--model", "random:sd16"]),
        "error: `augment.model`: there is no size `sd16`\n\
         hint: use one of `random:tiny`, `random:tiny-sdxl`, `random:sd15`, `random:sd21`, `random:sdxl`",
    );
    refused_with(
        &mut generate(phantoms(), &out, &["--model", "no/such/folder"]),
        &["error: `augment.model`: `no/such/folder`: there is no such file or folder"],
    );
    let empty = folder("no-pipeline");
    refused_with(
        generate(phantoms(), &out, &[]).arg("--model").arg(&empty),
        &["error: ~/no-pipeline: contains no `model_index.json`", "save_pretrained", "in one file once with diffusers"],
    );
    for model in ["hub:owner/name", empty.to_str().unwrap()] {
        refused_with(
            &mut generate(phantoms(), &path("no-work"), &["--mode", "mask_to_image", "--model", model]),
            &["error: `augment.controlnet`: `mask_to_image` needs one", "hint: set `augment.controlnet`"],
        );
    }
    assert!(!path("no-work").exists(), "a failed run creates no folder");
}

#[test]
fn missing_adapters_are_errors() {
    let out = path("never-adapted");
    refused_with(
        &mut generate(phantoms(), &out, &["--lora", "none.safetensors"]),
        &["error: `--lora`: `none.safetensors`: there is no such file or folder", "hint: check the path"],
    );
    refused(
        &mut generate(phantoms(), &out, &["--lora", "none.safetensors=strong"]),
        "error: `--lora`: `strong` is not a number\nhint: write for example `file.safetensors=0.8`",
    );
}

#[test]
fn settings_out_of_range_are_errors() {
    let out = path("never-set");
    let set = |assignment: &str, message: &str| {
        refused(&mut generate(phantoms(), &out, &["--set", assignment]), message);
    };
    set("augment.strength=2", "error: `augment.strength`: must be above 0, at most 1, got 2\nhint: the default is 0.6");
    set(
        "augment.strenght=0.5",
        "error: `augment.strenght`: there is no such setting (--set)\nhint: did you mean `augment.strength`?",
    );
    set(
        "augment.image_size=100",
        "error: `augment.image_size`: must be 64 or more, a multiple of 64, got 100\nhint: the default is 1024",
    );
    refused_with(&mut generate(phantoms(), &out, &["--preset", "full"]), &["--preset"]);
    assert!(!out.exists());
}

#[test]
fn a_prompt_with_an_unknown_placeholder_is_an_error() {
    let file = folder("prompts").join("bad.toml");
    let prompts = "[default]\nmodality = \"scan\"\ntarget = \"lesion\"\nimage = \"scan\"\n\
                   surroundings = [\"a {modality} of {organ}\"]\ntargets = [\"a {target}\"]\nwhole = [\"a {image}\"]\n\
                   negatives = [\"text\"]\n";
    fs::write(&file, prompts).unwrap();
    let set = format!("augment.prompts={}", file.display());
    let parts = ["error: `~/prompts/bad.toml`: ", "[default]", "{organ}", "hint: start from the program's own"];
    refused_with(&mut generate(phantoms(), &path("never-prompted"), &["--set", &set]), &parts);
    fs::write(&file, prompts.replace("{organ}", "{image}")).unwrap();
    crate::support::done(&mut generate(phantoms(), &path("pairs-prompted"), &["--set", &set, "--limit", "1"]));
}

#[test]
fn invalid_limits_and_folders_of_the_filter_are_errors() {
    let filter = |more: &[&str]| {
        let mut command = prsmed();
        command.args(["augment", "filter", "--preset", "tiny", "--data-root"]).arg(phantoms()).arg("--extra");
        command.arg(if more.is_empty() { phantoms() } else { made() }).args(more);
        command
    };
    refused_with(
        &mut filter(&[]),
        &["error: `--extra`: `~/phantoms` is `~/phantoms` of `--data-root`", "a folder of its own"],
    );
    refused_with(
        &mut filter(&["--threshold", "dice=0.3"]),
        &["error: `--threshold`: there is no limit `dice`", "`dice_min`"],
    );
    refused_with(&mut filter(&["--threshold", "dice_min=much"]), &["`much` is not a number"]);
}
