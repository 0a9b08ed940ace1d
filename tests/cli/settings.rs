//! Invalid settings are refused before anything is read or written.

use std::fs;

use crate::support::{done, folder, path, phantoms, prsmed, refused, train};

const ALL: &str = "`prsmed train --print-config` shows all settings";

fn set(assignment: &str, message: &str) {
    refused(&mut train(phantoms(), &path("never-set"), &[assignment]), message);
    assert!(!path("never-set").exists());
}

#[test]
fn a_misspelt_key_is_refused() {
    set(
        "train.micro_bacth=3",
        "error: `train.micro_bacth`: there is no such setting (--set)\nhint: did you mean `train.micro_batch`?",
    );
    set(
        "model.sizes.clip.hiden_size=3",
        "error: `model.sizes.clip.hiden_size`: there is no such setting (--set)\n\
         hint: did you mean `model.sizes.clip.hidden_size`?",
    );
}

#[test]
fn a_setting_name_of_another_trainer_suggests_the_right_one() {
    for (name, own) in [("train.batch_size", "train.micro_batch"), ("train.lr", "train.learning_rate")] {
        set(
            &format!("{name}=3"),
            &format!("error: `{name}`: there is no such setting (--set)\nhint: did you mean `{own}`?"),
        );
    }
}

#[test]
fn an_invalid_value_is_refused() {
    set("train.epochs=0", "error: `train.epochs`: must be 1 or more, got 0\nhint: the default is 20");
    let message =
        "error: `train.micro_batch`: invalid type: string \"many\", expected a whole number, 0 or more (--set)";
    set("train.micro_batch=many", &format!("{message}\nhint: the preset has `8`; {ALL}"));
    let message = "error: `model.semantics`: unknown variant `refrence`, expected `reference` or `corrected` (--set)";
    set("model.semantics=refrence", &format!("{message}\nhint: the preset has `\"corrected\"`; {ALL}"));
    set(
        "train.epochs",
        "error: `--set`: `train.epochs` is not `key=value`\nhint: write for example `--set train.epochs=5`",
    );
    refused(
        train(phantoms(), &path("never-set"), &[]).args(["--precision", "fp64"]),
        &format!(
            "error: `train.precision`: unknown variant `fp64`, expected one of `fp32`, `bf16`, `fp16` (--precision)\n\
             hint: the preset has `\"fp32\"`; {ALL}"
        ),
    );
}

#[test]
fn an_invalid_image_size_is_refused() {
    refused(
        &mut train(phantoms(), &path("odd-size"), &["model.image_size=50"]),
        "error: `model.image_size`: must be 16 or more, a multiple of 16, got 50\nhint: the default is 1024",
    );
}

#[test]
fn an_unknown_preset_is_refused() {
    refused(
        prsmed().args(["train", "--preset", "tinny", "--data-root"]).arg(phantoms()),
        "error: `--preset`: there is no preset `tinny`\nhint: use one of tiny, full, cpu, gpu-4gb, gpu-6gb, gpu-8gb, gpu-12gb, gpu-16gb, \
         gpu-24gb, gpu-40gb, gpu-48gb, gpu-80gb, gpu-141gb",
    );
}

#[test]
fn an_invalid_config_file_is_refused() {
    let folder = folder("configs");
    let with = |name: &str, text: &str| {
        let file = folder.join(name);
        fs::write(&file, text).unwrap();
        let mut command = prsmed();
        command.args(["train", "--data-root"]).arg(phantoms()).arg("--config").arg(file);
        command
    };
    refused(
        &mut with("broken.toml", "[train]\nepochs = [\n"),
        "error: ~/configs/broken.toml:2: unclosed array, expected `]`\n\
         hint: correct the TOML; `configs/tiny.toml` is an example",
    );
    refused(
        &mut with("misspelt.toml", "[train]\nepoch = 3\n"),
        "error: `train.epoch`: there is no such setting (~/configs/misspelt.toml)\nhint: did you mean `train.epochs`?",
    );
    refused(
        &mut with("value.toml", "preset = \"tiny\"\n[lora]\nrank = \"big\"\n"),
        &format!(
            "error: `lora.rank`: invalid type: string \"big\", expected a whole number (~/configs/value.toml)\n\
             hint: the preset has `16`; {ALL}"
        ),
    );
    refused(
        prsmed().args(["train", "--config"]).arg(folder.join("none.toml")),
        "error: ~/configs/none.toml: cannot read\ncaused by: No such file or directory (os error 2)\n\
         hint: check the path `~/configs/none.toml`",
    );
}

#[test]
fn the_printed_settings_can_be_used_as_a_config_file() {
    let text = done(prsmed().args(["train", "--print-config", "--preset", "tiny", "--seed", "7"]));
    assert!(text.contains("seed = 7  # --seed"), "{text}");
    let file = folder("shown").join("config.toml");
    fs::write(&file, &text).unwrap();
    let again = done(prsmed().args(["train", "--print-config", "--config"]).arg(file));
    assert!(again.contains("seed = 7"), "{again}");
}

#[test]
fn an_output_folder_that_cannot_be_created_is_refused() {
    let file = folder("in-the-way").join("file");
    fs::write(&file, "").unwrap();
    refused(
        &mut train(phantoms(), &file, &[]),
        "error: `--out`: `~/in-the-way/file` is a file\nhint: choose another folder",
    );
    refused(
        &mut train(phantoms(), &file.join("run"), &[]),
        "error: ~/in-the-way/file/run: cannot create\ncaused by: Not a directory (os error 20)\n\
         hint: check the path `~/in-the-way/file/run`",
    );
    refused(
        prsmed().args(["data", "phantom"]).arg(file.join("phantoms")),
        "error: ~/in-the-way/file/phantoms: cannot read\ncaused by: Not a directory (os error 20)\n\
         hint: check the path `~/in-the-way/file/phantoms`",
    );
}
