//! Training runs that are repeated, interrupted and killed.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;

use crate::support::{STEPS, copy, differing, done, objects, path, phantoms, prsmed, refused, run, train, trained};

#[test]
fn train_writes_json_lines() {
    let lines = objects(&trained().1);
    let steps = lines.iter().filter(|line| line["kind"] == "step").count();
    let result = lines.last().unwrap();
    assert_eq!((steps, &result["kind"], &result["steps"]), (6, &"result".into(), &6.into()));
    assert!(result["memory"]["measured"]["allocated_peak"].as_u64().unwrap() > 0, "{result}");
    for name in ["last", "best"] {
        assert!(trained().0.join(name).join("checksums.json").is_file());
    }
    let report = std::fs::read_to_string(trained().0.join("report.html")).unwrap();
    assert!(report.contains("Training loss") && report.contains("of 6 planned"));
}

#[test]
fn the_total_loss_is_the_weighted_sum_of_its_parts() {
    let sets = ["train.max_steps=2", "model.text_loss_weight=0.5", "model.class_loss_weight=0.25"];
    let lines = objects(&done(train(phantoms(), &path("weighted-losses"), &sets).arg("--json")));
    let steps: Vec<&Value> = lines.iter().filter(|line| line["kind"] == "step").collect();
    assert_eq!(steps.len(), 2);
    for step in steps {
        let [total, mask, text, class, words] =
            ["total", "mask", "text", "class", "words"].map(|name| step["losses"][name].as_f64().unwrap());
        assert!((total / (mask + 0.5 * text + 0.25 * class + words) - 1.0).abs() < 1e-4, "{step}");
    }
}

#[test]
fn eval_and_predict_write_json_lines() {
    let (run, _) = trained();
    let mut eval = prsmed();
    eval.args(["--json", "eval", "--limit", "2", "--max-new-tokens", "2", "--split", "train", "--data-root"]);
    let lines = objects(&done(eval.arg(phantoms()).arg(run).arg("--out").arg(path("report"))));
    assert_eq!((&lines.last().unwrap()["rows"], lines.last().unwrap()["summary"].is_object()), (&2.into(), true));
    for name in ["report.html", "summary.json", "samples.csv", "overlays.png", "overlays.csv"] {
        assert!(path("report").join(name).is_file(), "{name}");
    }
    let image = std::fs::read_dir(phantoms().join("brain_MRI/train_images")).unwrap().next().unwrap().unwrap().path();
    let mut predict = prsmed();
    predict.args(["--json", "predict", "--question", "Where is the lesion?", "--max-new-tokens", "2", "--image"]);
    predict.arg(image).arg(run).arg("--mask-out").arg(path("mask.png"));
    let lines = objects(&done(&mut predict));
    assert!(lines.last().unwrap()["answer"].is_string());
    let mask = image::open(path("mask.png")).unwrap().into_luma8();
    assert_eq!(mask.dimensions(), (64, 64));
    assert!(mask.pixels().all(|pixel| matches!(pixel.0, [0 | 255])));
}

#[test]
fn results_depend_on_the_seed_and_not_on_the_number_of_workers() {
    let (run, _) = trained();
    for workers in [1, 4] {
        let out = path(&format!("workers-{workers}"));
        done(&mut train(phantoms(), &out, &[STEPS, &format!("data.workers={workers}")]));
        assert_eq!(differing(&out.join("last"), &run.join("last")), [""; 0], "{workers} workers");
    }
    let other = path("other-seed");
    done(train(phantoms(), &other, &[STEPS]).args(["--seed", "1"]));
    assert!(differing(&other.join("last"), &run.join("last")).contains(&"mask_decoder.safetensors".to_owned()));
}

/// Starts a command and waits until `kind` was reported `count` times.
pub(crate) fn start_until(command: &mut Command, kind: &str, count: usize) -> Child {
    let mut child = command.arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let is_wanted = |line: &String| serde_json::from_str::<Value>(line).unwrap()["kind"] == kind;
    let found = lines.map(Result::unwrap).filter(is_wanted).take(count).count();
    assert_eq!(found, count, "the run ended early");
    child
}

pub(crate) fn signal(child: &Child, number: i32) {
    let id = i32::try_from(child.id()).unwrap();
    // SAFETY: sends a signal to a child that was not waited for, so the id is still its own.
    assert_eq!(unsafe { libc::kill(id, number) }, 0);
}

fn step_of(checkpoint: &Path) -> u64 {
    let text = std::fs::read_to_string(checkpoint.join("trainer.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["step"].as_u64().unwrap()
}

#[test]
fn ctrl_c_saves_a_checkpoint_and_the_run_can_be_resumed() {
    saves_on(libc::SIGINT, "interrupted");
}

#[test]
fn signals_of_batch_systems_save_a_checkpoint_and_the_run_can_be_resumed() {
    saves_on(libc::SIGTERM, "terminated");
    saves_on(libc::SIGUSR1, "out-of-time");
}

#[test]
fn a_closed_terminal_ends_no_training_under_nohup() {
    let plain = train(phantoms(), &path("nohup"), &["train.max_steps=6"]);
    let mut command = Command::new("nohup");
    command.arg(plain.get_program()).args(plain.get_args()).current_dir(plain.get_current_dir().unwrap());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let child = start_until(&mut command, "step", 2);
    signal(&child, libc::SIGHUP);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(step_of(&path("nohup/last")), 6);
}

fn saves_on(number: i32, name: &str) {
    let out = path(name);
    let sets = ["train.epochs=1000", "train.checkpoint_every_steps=0", "train.validate_every_epochs=0"];
    let child = start_until(&mut train(phantoms(), &out, &sets), "step", 3);
    signal(&child, number);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("interrupted\nhint: continue with `") && said.ends_with(" --resume`\n"), "{said}");
    let step = step_of(&out.join("last"));
    assert!(step >= 3);
    let until = format!("train.max_steps={}", step + 2);
    let ran = run(train(phantoms(), &out, &sets).args(["--set", &until, "--resume"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains(&format!("note: resumed at step {step} of {}", step + 2)), "{}", ran.stderr);
    assert_eq!(step_of(&out.join("last")), step + 2);
}

#[test]
fn ctrl_c_ends_commands_without_checkpoints_at_once() {
    let mut child = prsmed().args(["data", "phantom", "many", "--count", "100000"]).spawn().unwrap();
    let started = Instant::now();
    while !path("many").exists() && started.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    signal(&child, libc::SIGINT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn a_killed_and_resumed_run_gives_the_same_weights() {
    let out = path("killed");
    let mut child = start_until(&mut train(phantoms(), &out, &[STEPS]), "saved", 2);
    // Some moment during a step or while a checkpoint is written.
    let moment = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos() % 150;
    std::thread::sleep(Duration::from_millis(u64::from(moment)));
    child.kill().unwrap();
    child.wait().unwrap();
    done(train(phantoms(), &out, &[STEPS]).arg("--resume"));
    assert_eq!(differing(&out.join("last"), &trained().0.join("last")), [""; 0], "killed after {moment} ms");
}

#[test]
fn only_one_process_can_write_a_run_folder() {
    let out = path("taken");
    let mut child = start_until(&mut train(phantoms(), &out, &["train.epochs=1000"]), "saved", 1);
    let message = format!(
        "error: `--out`: another prsmed (process {}) is writing into `~/taken`\n\
         hint: wait until it is done, stop it, or choose another folder",
        child.id()
    );
    let again = || train(phantoms(), &out, &[STEPS]);
    refused(&mut again(), &message);
    refused(again().arg("--resume"), &message);
    child.kill().unwrap();
    child.wait().unwrap();
    let step = step_of(&out.join("last"));
    let until = format!("train.max_steps={}", step + 1);
    done(again().args(["--set", &until, "--resume"]));
    assert_eq!(step_of(&out.join("last")), step + 1);
}

#[test]
fn an_image_that_vanishes_during_a_run_is_skipped_named_and_counted() {
    let data = copy(phantoms(), "vanishing");
    let sets = ["train.max_steps=40", "train.epochs=1000", "train.validate_every_epochs=0", "data.cache_mib=0"];
    let mut child = start_until(&mut train(&data, &path("vanished"), &sets), "saved", 1);
    let class = data.join("breast_ultrasound/train_images");
    let images: Vec<_> = std::fs::read_dir(&class).unwrap().map(|entry| entry.unwrap().path()).collect();
    for image in &images {
        std::fs::remove_file(image).unwrap();
    }
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let lines: Vec<Value> = lines.map(|line| serde_json::from_str(&line).unwrap()).collect();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let warnings: Vec<&str> =
        lines.iter().filter(|line| line["kind"] == "warning").map(|line| line["text"].as_str().unwrap()).collect();
    let rows = warnings.iter().filter(|text| text.contains("breast_ultrasound.csv:") && text.contains("is skipped"));
    let result = lines.last().unwrap();
    assert_eq!((rows.count(), result["steps"].as_u64()), (images.len(), Some(40)), "{warnings:?}");
    assert_eq!(result["skipped_samples"].as_u64(), Some(images.len() as u64), "{result}");

    let images = ["brain_MRI", "lung_Xray", "breast_ultrasound"].map(|class| data.join(class).join("train_images"));
    let gone = copy(phantoms(), "vanishing-all");
    let none = ["data.max_bad_samples=0", sets[0], sets[1], sets[2], sets[3]];
    let child = start_until(&mut train(&gone, &path("vanished-all"), &none), "saved", 1);
    for folder in images {
        std::fs::remove_dir_all(gone.join(folder.strip_prefix(&data).unwrap())).unwrap();
    }
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains(".csv:") && error.contains("the file is missing"), "{error}");
}

#[test]
fn steps_with_nan_are_skipped_and_a_streak_of_them_names_the_samples() {
    let out = path("diverging");
    let ran = run(&mut train(phantoms(), &out, &[STEPS, "train.learning_rate=1e30", "train.clip_norm=0"]));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    let (warnings, error) = ran.stderr.split_once("error: ").unwrap();
    for (step, text, expected) in [
        (2, warnings, "the step is skipped, the weights stay"),
        (3, warnings, "the step is skipped, the weights stay"),
        (4, error, "3 steps in a row; `last/` holds the weights before them"),
    ] {
        let line = text.lines().find(|line| line.contains(&format!("step {step}: the gradient norm is"))).unwrap();
        assert!(line.contains("phantoms/annotations/") && line.contains(".csv:") && line.contains(expected), "{line}");
    }
    assert!(out.join("last/checksums.json").is_file());
}
