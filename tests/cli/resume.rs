//! `train --resume`: the same run goes on, or the command says why not and changes nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{STEPS, copy, differing, done, error_text, path, phantoms, prsmed, run, train, trained, tree};

fn resume(run: &Path, data: &Path, more: &[&str]) -> Command {
    let mut command = prsmed();
    command.args(["train", "--resume", "--data-root"]).arg(data).arg("--out").arg(run).args(more);
    command
}

/// Runs a resume that must be refused without changing a byte of the run folder; returns the error.
fn refused(command: &mut Command, folder: &Path) -> String {
    let before = tree(folder);
    let ran = run(command);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    let after = tree(folder);
    let names = |files: &std::collections::BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&before), names(&after));
    assert!(before == after, "a refused command changed the run folder");
    error_text(&ran)
}

/// The phantoms, with `from` replaced by `to` in every CSV file.
fn other_data(name: &str, from: &str, to: &str) -> PathBuf {
    let data = copy(phantoms(), name);
    let mut changed = 0;
    for file in fs::read_dir(data.join("annotations")).unwrap() {
        let file = file.unwrap().path();
        let text = fs::read_to_string(&file).unwrap();
        changed += usize::from(text.contains(from));
        fs::write(&file, text.replace(from, to)).unwrap();
    }
    assert!(changed > 0, "no CSV file contains {from}");
    data
}

#[test]
fn a_refused_resume_changes_nothing_and_the_run_can_still_be_resumed() {
    let run = copy(&trained().0, "refused");
    let more = &["--set", "train.max_steps=7"];
    for (set, key) in [
        ("model.text_loss_weight=0.0", "model.text_loss_weight"),
        ("lora.rank=2", "lora.rank"),
        ("model.max_text_tokens=400", "model.max_text_tokens"),
        ("model.decoder_positions=false", "model.decoder_positions"),
        ("data.val_frac=0.3", "data.val_frac"),
        ("train.seed=3", "train.seed"),
    ] {
        let error = refused(resume(&run, phantoms(), more).args(["--set", set]), &run);
        assert!(error.starts_with(&format!("error: `{key}`: the run to resume has ")), "{error}");
        assert!(error.contains(set.split_once('=').unwrap().1) && error.contains("start a new run"), "{error}");
    }
    let error = refused(resume(&run, phantoms(), more).args(["--set", "train.micro_batch=4"]), &run);
    assert!(error.starts_with("error: ~/refused/last: this run had "), "{error}");
    assert!(error.contains("resume with the same data, `train.micro_batch` and `train.accumulation`"), "{error}");
    let ran = crate::support::run(&mut resume(&run, phantoms(), more));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("resumed at step 6 of 7"), "{}", ran.stderr);
    let config = fs::read_to_string(run.join("config.toml")).unwrap();
    assert!(config.contains("max_steps = 7") && config.contains("micro_batch = 2"), "{config}");
    assert_eq!(fs::read_to_string(run.join("last/config.toml")).unwrap(), config);
}

#[test]
fn a_run_keeps_its_settings_and_its_length_is_checked() {
    let run_folder = copy(&trained().0, "keeps-settings");
    let error = refused(&mut resume(&run_folder, phantoms(), &["--set", "train.max_steps=5"]), &run_folder);
    let expected = "error: `train.max_steps`: the run to resume has done 6 steps, and the settings end it after 5";
    assert!(error.starts_with(expected), "{error}");
    assert!(error.contains("give a larger number, or start a new run with another `--out`"), "{error}");

    // the preset alone has other settings, which are not taken
    let ran = run(&mut resume(&run_folder, phantoms(), &["--preset", "tiny", "--set", "train.max_steps=8"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("resumed at step 6 of 8"), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("warning: the run keeps its settings; `--preset` and `--config` do not"),
        "{}",
        ran.stderr
    );
    assert!(ran.stderr.contains("`train.micro_batch`") && !ran.stderr.contains("`train.max_steps`,"), "{}", ran.stderr);
    // the rate follows a cosine over all steps
    assert!(ran.stderr.contains("the training had 6 steps and now has 8"), "{}", ran.stderr);
    assert!(ran.stderr.contains("and jumps from ") && ran.stderr.contains(" at step 6"), "{}", ran.stderr);
    let config = fs::read_to_string(run_folder.join("config.toml")).unwrap();
    assert!(config.contains("max_steps = 8") && config.contains("micro_batch = 2"), "{config}");

    // the run's own settings as a file change nothing, and nothing is said
    let own = path("own-settings.toml");
    fs::copy(run_folder.join("config.toml"), &own).unwrap();
    let ran = run(resume(&run_folder, phantoms(), &["--config"]).arg(&own));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(!ran.stderr.contains("keeps its settings") && !ran.stderr.contains("jumps"), "{}", ran.stderr);
}

#[test]
fn changed_data_is_named_and_refused() {
    let run = copy(&trained().0, "on-other-data");
    let answers = other_data("other-answers", "lesion", "spot");
    let error = refused(&mut resume(&run, &answers, &["--set", "train.max_steps=7"]), &run);
    assert!(error.contains("is not the data of the run to resume: the first row that differs is "), "{error}");
    assert!(error.contains(".csv:") && error.contains("start a new run with another `--out`"), "{error}");
    // the same rows in another place are the same data
    let moved = copy(phantoms(), "moved-phantoms");
    done(&mut resume(&run, &moved, &["--set", "train.max_steps=7"]));
    // an image of another size in bytes is another image
    let image = fs::read_dir(moved.join("brain_MRI/train_images")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&image).unwrap();
    bytes.push(0);
    fs::write(&image, bytes).unwrap();
    let error = refused(&mut resume(&run, &moved, &["--set", "train.max_steps=8"]), &run);
    assert!(error.contains("path or size of image or mask"), "{error}");
}

#[test]
fn settings_that_keep_results_may_change_on_resume() {
    let out = path("other-switches");
    let from_the_beginning = "contains no checkpoint yet: starting from the beginning";
    let ran = run(train(phantoms(), &out, &["train.max_steps=3"]).arg("--resume"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains(from_the_beginning), "{}", ran.stderr);
    let keep = [
        "data.workers=2",
        "data.prefetch=2",
        "data.cache_mib=16",
        "data.cache_vision_mib=64",
        "data.max_val_rows=2",
        "train.checkpointing=1",
        "train.checkpoint_encoder=none",
        "train.offload_optimizer=true",
        "train.checkpoint_every_steps=2",
    ];
    let mut command = resume(&out, phantoms(), &["--set", STEPS]);
    for set in keep {
        command.args(["--set", set]);
    }
    let ran = run(&mut command);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    // the number of steps was changed as well: it is warned of, and it changes the schedule
    assert!(ran.stderr.contains("`train.max_steps` was 3 and is now 6"), "{}", ran.stderr);
    assert!(!ran.stderr.contains(from_the_beginning), "{}", ran.stderr);
    for set in keep {
        assert!(!ran.stderr.contains(set.split_once('=').unwrap().0), "{}", ran.stderr);
    }
    let plain = path("same-switches");
    done(&mut train(phantoms(), &plain, &["train.max_steps=3"]));
    done(&mut resume(&plain, phantoms(), &["--set", STEPS]));
    assert_eq!(differing(&out.join("last"), &plain.join("last")), [""; 0]);
}
