//! What `prsmed augment` refuses, and what it says then.

use std::fs;

use super::{assert_same_tree, generate, made};
use crate::support::{copy, folder, path, phantoms, prsmed, refused, run, told};

/// Refused with a message that has all of `parts`.
fn refused_with(command: &mut std::process::Command, parts: &[&str]) {
    let ran = run(command);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{}", ran.stderr);
    let said = told(&ran);
    for part in parts {
        assert!(said.contains(part), "`{part}` is not in: {said}");
    }
}

#[test]
fn other_settings_into_the_same_folder() {
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
        let parts = ["error: `--out`: `~/pairs-other-settings` holds pairs of other settings", named, "hint: choose "];
        refused_with(&mut generate(phantoms(), &out, flags), &parts);
    }
    assert_same_tree(&out, made());
}

#[test]
fn a_data_set_of_somebody_is_not_written_into() {
    let root = copy(phantoms(), "pairs-into-data");
    let parts =
        ["~/pairs-into-data: is a data root without `manifest.jsonl`; nothing was written", "hint: give a folder"];
    refused_with(&mut generate(phantoms(), &root, &[]), &parts);
    assert_same_tree(&root, phantoms());
}

#[test]
fn models_that_are_not_there() {
    let out = path("never-made");
    refused(
        &mut generate(phantoms(), &out, &["--model", "random:sd16"]),
        "error: `augment.model`: there is no size `sd16`\n\
         hint: use one of `random:tiny`, `random:tiny-sdxl`, `random:sd15`, `random:sd21`, `random:sdxl`",
    );
    refused_with(
        &mut generate(phantoms(), &out, &["--model", "no/such/folder"]),
        &["error: no/such/folder: there is no such file or folder"],
    );
    let empty = folder("no-pipeline");
    refused_with(
        generate(phantoms(), &out, &[]).arg("--model").arg(&empty),
        &["error: ~/no-pipeline: holds no `model_index.json`", "save_pretrained"],
    );
    for model in ["hub:owner/name", empty.to_str().unwrap()] {
        refused_with(
            &mut generate(phantoms(), &path("no-work"), &["--mode", "mask_to_image", "--model", model]),
            &["error: `augment.controlnet`: `mask_to_image` needs one", "hint: set `augment.controlnet`"],
        );
    }
    assert!(!path("no-work").exists(), "a refused run leaves no folder");
}

#[test]
fn adapters_that_are_not_there() {
    let out = path("never-adapted");
    refused_with(
        &mut generate(phantoms(), &out, &["--lora", "none.safetensors"]),
        &["error: none.safetensors: there is no such file or folder", "hint: check the path"],
    );
    refused(
        &mut generate(phantoms(), &out, &["--lora", "none.safetensors=strong"]),
        "error: `--lora`: `strong` is no strength\nhint: write for example `file.safetensors=0.8`",
    );
}

#[test]
fn settings_out_of_range() {
    let out = path("never-set");
    let set = |assignment: &str, message: &str| {
        refused(&mut generate(phantoms(), &out, &["--set", assignment]), message);
    };
    set(
        "augment.strength=2",
        "error: `augment.strength`: must be above 0 and at most 1, got 2\nhint: 0.4 to 0.8 are usual",
    );
    set(
        "augment.strenght=0.5",
        "error: `augment.strenght`: there is no such setting (--set)\nhint: did you mean `augment.strength`?",
    );
    set(
        "augment.image_size=100",
        "error: `augment.image_size`: must be a multiple of 64, got 100\nhint: use for example 512 or 1024",
    );
    refused_with(&mut generate(phantoms(), &out, &["--preset", "full"]), &["--preset"]);
    assert!(!out.exists());
}

#[test]
fn a_prompt_with_an_unknown_placeholder() {
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
fn limits_and_pairs_of_the_filter() {
    let filter = |more: &[&str]| {
        let mut command = prsmed();
        command.args(["augment", "filter", "--preset", "tiny", "--data-root"]).arg(phantoms()).arg("--synthetic");
        command.arg(if more.is_empty() { phantoms() } else { made() }).args(more);
        command
    };
    refused_with(&mut filter(&[]), &["error: ~/phantoms: holds no pairs", "`prsmed augment generate --out` wrote"]);
    refused_with(
        &mut filter(&["--threshold", "dice=0.3"]),
        &["error: `--threshold`: there is no limit `dice`", "`dice_min`"],
    );
    refused_with(&mut filter(&["--threshold", "dice_min=much"]), &["`much` is no number"]);
}
