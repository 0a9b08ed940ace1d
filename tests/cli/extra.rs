//! `prsmed train --extra`: synthetic rows together with real rows.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::runs::start_until;
use crate::support::{copy, differing, done, path, phantoms, prsmed, refused, run, train};

/// Other phantoms, with `train` rows only.
fn made(name: &str) -> PathBuf {
    let root = path(name);
    done(prsmed().args(["data", "phantom", "--count", "8", "--image-size", "64", "--seed", "9"]).arg(&root));
    for entry in fs::read_dir(root.join("annotations")).unwrap() {
        let csv = entry.unwrap().path();
        let text = fs::read_to_string(&csv).unwrap();
        fs::write(csv, text.replace(",val\n", ",train\n").replace(",test\n", ",train\n")).unwrap();
    }
    root
}

fn mixed(extra: &Path, out: &Path, sets: &[&str]) -> Command {
    let mut command = train(phantoms(), out, sets);
    command.arg("--extra").arg(extra).args(["--synthetic-ratio", "0.25"]);
    command
}

#[test]
fn a_killed_run_on_two_roots_continues_to_the_same_bytes() {
    let extra = made("made");
    let sets = ["train.max_steps=6", "data.augment=classical", "data.synthetic_until=0.7", "train.deterministic=true"];
    let whole = path("mixed");
    let ran = run(&mut mixed(&extra, &whole, &sets));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("note: an epoch has "), "{}", ran.stderr);
    let config = fs::read_to_string(whole.join("config.toml")).unwrap();
    assert!(config.contains("synthetic_ratio = 0.25  # --synthetic-ratio\n"), "{config}");
    let killed = path("mixed-killed");
    let mut child = start_until(&mut mixed(&extra, &killed, &sets), "saved", 2);
    child.kill().unwrap();
    child.wait().unwrap();
    done(mixed(&extra, &killed, &sets).arg("--resume"));
    assert_eq!(differing(&killed.join("last"), &whole.join("last")), [""; 0]);
    let real = path("mixed-not");
    done(train(phantoms(), &real, &sets).arg("--extra").arg(&extra).args(["--synthetic-ratio", "0"]));
    assert!(differing(&real.join("last"), &whole.join("last")).contains(&"mask_decoder.safetensors".to_owned()));
}

#[test]
fn unusable_extra_roots_are_errors() {
    let out = path("refused-extra");
    let twice = format!(
        "error: `--extra`: `{}` is given twice\nhint: give every data root once",
        phantoms().display().to_string().replace(path("").to_str().unwrap().trim_end_matches('/'), "~")
    );
    refused(&mut mixed(phantoms(), &out, &[]), &twice);
    let held_out = run(&mut mixed(&copy(phantoms(), "extra-held-out"), &out, &[]));
    assert!(
        held_out.stderr.contains("in an extra data root, which may contain `train` rows only"),
        "{}",
        held_out.stderr
    );
    assert!(held_out.stderr.contains("extra-held-out/annotations/"), "{}", held_out.stderr);
    let many = made("made-many");
    let one = train(phantoms(), &out, &["train.micro_batch=1"]).arg("--extra").arg(&many).output().unwrap();
    let said = String::from_utf8(one.stderr).unwrap();
    assert!(said.contains("some steps of 1 would contain no real row"), "{said}");
    assert_eq!((held_out.code, one.status.code()), (Some(2), Some(2)));
}
