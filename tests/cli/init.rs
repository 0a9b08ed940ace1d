//! `train --init`: a new run that starts from the weights of another.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{copy, differing, done, error_text, objects, path, phantoms, prsmed, run, train, trained, tree};

/// Steps that change no weight.
const STILL: [&str; 3] = ["train.max_steps=1", "train.learning_rate=1e-30", "train.min_learning_rate=0.0"];

fn start(data: &Path, out: &Path, from: &Path) -> Command {
    let mut command = train(data, out, &STILL);
    command.arg("--init").arg(from);
    command
}

/// The phantoms with another name for the class `brain_MRI`.
fn other_class() -> PathBuf {
    let data = copy(phantoms(), "other-class");
    fs::rename(data.join("brain_MRI"), data.join("knee_MRI")).unwrap();
    for file in fs::read_dir(data.join("annotations")).unwrap() {
        let file = file.unwrap().path();
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, text.replace("brain_MRI/", "knee_MRI/")).unwrap();
    }
    data
}

#[test]
fn a_run_starts_from_the_weights_of_another() {
    let (from, out) = (&trained().0, path("from-a-run"));
    let ran = run(&mut start(phantoms(), &out, from));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("adapters, image encoder, mask decoder and tokenizer, class head of"),
        "{}",
        ran.stderr
    );
    assert!(ran.stderr.contains("are taken; new: nothing"), "{}", ran.stderr);
    // only the state of the optimizer differs
    assert_eq!(differing(&out.join("last"), &from.join("best")), ["trainer.safetensors"]);
    // what it started from is among its settings, and it can be resumed without that run
    let config = fs::read_to_string(out.join("config.toml")).unwrap();
    assert!(config.contains(&format!("init = \"{}\"", from.display())), "{config}");
    let moved = copy(from, "gone");
    let second = path("from-a-run-that-is-gone");
    done(&mut start(phantoms(), &second, &moved));
    fs::remove_dir_all(&moved).unwrap();
    let mut resume = prsmed();
    resume.args(["train", "--set", "train.max_steps=2", "--data-root"]).arg(phantoms());
    done(resume.arg("--resume").arg(&second));
}

#[test]
fn classes_that_the_run_does_not_know_get_a_new_row_of_the_class_head() {
    use prsmed::tensor::weights::Archive;
    let (from, out) = (&trained().0, path("from-other-classes"));
    let ran = run(&mut start(&other_class(), &out, from));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("new: class head of `knee_MRI`"), "{}", ran.stderr);
    let read = |folder: &Path| {
        let model: serde_json::Value = serde_json::from_slice(&fs::read(folder.join("model.json")).unwrap()).unwrap();
        let names: Vec<String> = serde_json::from_value(model["modalities"].clone()).unwrap();
        let head = Archive::open(&folder.join("cls.safetensors")).unwrap().read("2.weight").unwrap();
        (names, head)
    };
    let ((old_names, old), (names, new)) = (read(&from.join("best")), read(&out.join("last")));
    assert!(names.contains(&"knee_MRI".to_owned()) && old_names.contains(&"brain_MRI".to_owned()));
    for (row, name) in (0..).zip(&names) {
        match (0..).zip(&old_names).find(|(_, old)| *old == name) {
            Some((old_row, _)) => assert_eq!(new.get(row), old.get(old_row), "{name}"),
            None => assert!((0..).zip(&old_names).all(|(i, _)| new.get(row) != old.get(i)), "{name}"),
        }
    }
}

#[test]
fn runs_that_do_not_fit_are_refused_before_anything_is_written() {
    let out = path("from-nothing");
    let refused = |command: &mut Command| {
        let ran = run(command);
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(!out.join("last").exists());
        error_text(&ran)
    };
    let error = refused(start(phantoms(), &out, &trained().0).args(["--set", "lora.rank=2"]));
    assert!(error.contains("`lora.rank`: the run `~/trained/best` has "), "{error}");
    assert!(error.contains("the settings have 2") && error.contains("use `--set lora.rank="), "{error}");
    let error = refused(&mut start(phantoms(), &out, phantoms()));
    assert!(error.contains("it has neither `best/` nor `last/`"), "{error}");
    let error = refused(&mut start(phantoms(), &out, Path::new("nowhere")));
    assert!(error.contains("this run folder does not exist"), "{error}");
}

#[test]
fn a_script_that_always_resumes_can_start_from_a_run() {
    let out = path("init-and-resume");
    let train = |steps: &str| {
        let ran = run(start(phantoms(), &out, &trained().0).arg("--resume").args(["--set", steps]));
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        ran.stderr
    };
    let first = train("train.max_steps=1");
    assert!(first.contains("starting from the beginning") && first.contains("starting from `"), "{first}");
    let second = train("train.max_steps=2");
    assert!(second.contains("resumed at step 1 of 2"), "{second}");
}

#[test]
fn the_run_that_others_start_from_is_not_changed() {
    let from = copy(&trained().0, "unchanged-source");
    let before = tree(&from);
    let mut command = start(phantoms(), &path("from-unchanged"), &from);
    let stdout = done(command.arg("--json"));
    assert!(objects(&stdout).iter().any(|line| line["kind"] == "result"));
    assert!(before == tree(&from));
}
