//! Runs and weights that are missing, damaged or hostile, and places that cannot be written.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::support::{
    STEPS, copy, differing, done, folder, limit_file_size, path, phantoms, prsmed, refused, run, told, train, trained,
};

const AGAIN: &str = "hint: use another checkpoint of the run (`last` or `best`), or copy this one again";

fn eval(run: &Path) -> std::process::Command {
    let mut command = prsmed();
    command.arg("eval").arg(run).arg("--data-root").arg(phantoms());
    command
}

fn predict(run: &Path) -> std::process::Command {
    let image = fs::read_dir(phantoms().join("brain_MRI/train_images")).unwrap().next().unwrap().unwrap().path();
    let mut command = prsmed();
    command.arg("predict").arg(run).arg("--image").arg(image).args(["--question", "Where is the lesion?"]);
    command.args(["--max-new-tokens", "2"]);
    command
}

fn resume(run: &Path) -> std::process::Command {
    let mut command = train(phantoms(), run, &["train.max_steps=7"]);
    command.arg("--resume");
    command
}

/// Keeps the first `bytes` of a file.
fn truncate(file: &Path, bytes: usize) {
    let all = fs::read(file).unwrap();
    assert!(bytes < all.len());
    fs::write(file, &all[..bytes]).unwrap();
}

/// Changes the last byte of a file.
fn garble(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_missing_run_folder() {
    let message = "error: ~/no-run: there is no such run folder\nhint: give the folder that `prsmed train --out` wrote";
    refused(&mut eval(&path("no-run")), message);
    refused(&mut predict(&path("no-run")), message);
    refused(
        &mut eval(phantoms()),
        "error: ~/phantoms: is no run folder: neither `best/` nor `last/` is inside\n\
         hint: give the folder that `prsmed train --out` wrote, or a published PRS-Med folder",
    );
}

#[test]
fn an_existing_run_is_not_overwritten() {
    refused(
        &mut train(phantoms(), &trained().0, &[STEPS]),
        "error: `--out`: `~/trained` already holds a run\n\
         hint: add `--resume` to continue it, or choose another `--out`",
    );
}

#[test]
fn a_truncated_checkpoint() {
    let run = copy(&trained().0, "truncated");
    truncate(&run.join("last/mask_decoder.safetensors"), 1000);
    truncate(&run.join("best/lora_adapter/adapter_model.safetensors"), 1000);
    let ran = crate::support::run(&mut resume(&run));
    let said = told(&ran);
    assert_eq!(ran.code, Some(2));
    assert!(said.contains("~/truncated/last: `mask_decoder.safetensors` has 1000 bytes, expected "), "{said}");
    assert!(
        said.ends_with("hint: put a copy of the run's `best/` in its place and resume from there, or copy it again")
    );
    let ran = crate::support::run(&mut eval(&run));
    let said = told(&ran);
    assert!(said.contains("best: `lora_adapter/adapter_model.safetensors` has 1000 bytes, expected "), "{said}");
    assert!(said.ends_with(AGAIN) && ran.code == Some(2), "{said}");
}

#[test]
fn a_garbled_checkpoint() {
    let run = copy(&trained().0, "garbled");
    garble(&run.join("last/trainer.safetensors"));
    garble(&run.join("best/cls.safetensors"));
    refused(
        resume(&run).arg("--quiet"),
        "error: cannot set up the model\n\
         caused by: ~/garbled/last: `trainer.safetensors` has another content (SHA-256)\n\
         hint: put a copy of the run's `best/` in its place and resume from there, or copy it again",
    );
    let message = format!("error: ~/garbled/best: `cls.safetensors` has another content (SHA-256)\n{AGAIN}");
    refused(&mut eval(&run), &message);
    refused(&mut predict(&run), &message);
    // What the hint says helps.
    fs::remove_dir_all(run.join("last")).unwrap();
    copy(&trained().0.join("best"), "garbled/last");
    done(&mut resume(&run));
}

#[test]
fn other_data_than_the_run_was_started_on() {
    let run = copy(&trained().0, "other-batch");
    let ran = crate::support::run(resume(&run).args(["--set", "train.micro_batch=4"]));
    let said = told(&ran);
    assert!(said.starts_with("error: ~/other-batch/last: this run had "), "{said}");
    assert!(said.contains("resume with the same data, `train.micro_batch` and `train.accumulation`"), "{said}");
    assert_eq!(ran.code, Some(2));
}

/// A folder in LLaVA's layout: the language model with its tower, a config, a tokenizer.
fn base(name: &str) -> PathBuf {
    let last = trained().0.join("last");
    let base = copy(&last.join("base"), name);
    for entry in fs::read_dir(last.join("tokenizer")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), base.join(entry.file_name())).unwrap();
    }
    base
}

fn train_on(base: &Path, out: &str) -> std::process::Command {
    let base = format!("model.base={}", base.display());
    train(phantoms(), &path(out), &[&base, "model.train_base=false", "train.max_steps=1"])
}

#[test]
fn a_truncated_shard_of_a_base() {
    let base = base("base");
    done(&mut train_on(&base, "on-a-base"));
    let shard = base.join("model.safetensors");
    let bytes = fs::metadata(&shard).unwrap().len();
    truncate(&shard, 100_000);
    let ran = run(&mut train_on(&base, "on-a-broken-base"));
    let said = told(&ran);
    let expected = format!("caused by: ~/base/model.safetensors: is truncated: expected {bytes} bytes");
    assert!(said.contains(&expected) && said.contains("found 100000 ("), "{said}");
    assert!(said.ends_with("hint: the file is incomplete: delete it and download or copy it again"), "{said}");
    assert_eq!(ran.code, Some(2));
}

#[test]
fn a_base_that_is_not_there_or_none() {
    refused(
        &mut train_on(&path("no-base"), "no-base-run"),
        "error: cannot set up the model\n\
         caused by: ~/no-base: there is no such file or folder\n\
         hint: check the path, or write `hub:owner/name` for a repository",
    );
    refused(
        &mut train_on(phantoms(), "odd-base-run"),
        "error: cannot set up the model\n\
         caused by: ~/phantoms: holds neither `tokenizer.json` nor `tokenizer.model`\n\
         hint: name the folder of the tokenizer, or copy one of the two files into it",
    );
}

#[test]
fn a_pickle_that_runs_code_is_not_run() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pth/malicious.pth");
    let encoder = format!("model.image_encoder={}", file.display());
    let ran = run(&mut train(phantoms(), &path("malicious"), &[&encoder, "train.max_steps=1"]));
    let expected = format!(
        "error: cannot set up the model\n\
         caused by: {}: refuses to execute `posix.system`: only tensors are read from a pickle\n\
         hint: if you trust the file, load it in PyTorch and write it again with `torch.save(model.state_dict(), FILE)`",
        file.display()
    );
    assert_eq!((told(&ran), ran.code), (expected, Some(2)));
}

#[test]
fn a_disk_that_fills_up_while_a_checkpoint_is_written() {
    let run = copy(&trained().0, "full-disk");
    let mut command = resume(&run);
    limit_file_size(&mut command, 2 << 20);
    let ran = crate::support::run(&mut command);
    let said = told(&ran);
    let first = ["best", "last"].map(|name| format!("error: ~/full-disk/{name}.tmp-"));
    assert!(first.iter().any(|start| said.starts_with(start)), "{said}");
    assert!(
        said.contains(".safetensors: cannot write\ncaused by: File too large (os error 27)\nhint: files of"),
        "{said}"
    );
    assert_eq!(ran.code, Some(2));
    for name in ["best", "last"] {
        assert_eq!(differing(&run.join(name), &trained().0.join(name)), [""; 0], "the old checkpoint is as it was");
    }
    let names = fs::read_dir(&run).unwrap().map(|entry| entry.unwrap().file_name().display().to_string());
    let left: Vec<String> = names.filter(|name| name.contains(".tmp-")).collect();
    assert_eq!(left, [""; 0], "no half checkpoint stays");
    done(&mut resume(&run));
}

#[test]
fn a_full_disk_under_the_outputs() {
    let folder = folder("full-outputs");
    let mask = folder.join("mask.png");
    std::os::unix::fs::symlink("/dev/full", &mask).unwrap();
    let ran = run(predict(&trained().0).arg("--mask-out").arg(&mask));
    assert_eq!(
        (told(&ran).as_str(), ran.code),
        (
            "error: ~/full-outputs/mask.png: cannot write\ncaused by: No space left on device (os error 28)\n\
             hint: free some space on that disk and run the same command again; finished work is kept",
            Some(2)
        )
    );
    let full = Stdio::from(File::options().write(true).open("/dev/full").unwrap());
    let output = prsmed().args(["hub", "ls"]).arg(phantoms()).stdout(full).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("error: standard output: cannot write\ncaused by: No space left on device"), "{said}");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn outputs_that_cannot_be_are_refused_before_the_work() {
    let run = &trained().0;
    refused(
        predict(run).args(["--mask-out", "none/mask.png"]),
        "error: `--mask-out`: `none` is not a folder\nhint: make the folder first, or choose another path",
    );
    refused(
        predict(run).args(["--mask-out", "mask.jpg"]),
        "error: `--mask-out`: `mask.jpg` is no name of a picture to write\nhint: use a name that ends in `.png`",
    );
    refused(
        prsmed().arg("predict").arg(run).args(["--question", "Where?", "--image", "none.png"]),
        "error: `--image`: there is no file `none.png`\nhint: give a PNG, JPEG or TIFF file",
    );
    refused(
        eval(run).args(["--split", "tset"]),
        "error: `--split`: there is no split `tset`\nhint: use train, val or test",
    );
}
