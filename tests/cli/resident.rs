//! The planned peak of a CPU run against what the operating system reports.

use std::process::Command;

use serde_json::Value;

use crate::support::{done, objects, path, prsmed};

/// A few steps of preset `tiny` with nothing changed that takes memory.
fn tiny(name: &str, sets: &[&str]) -> Command {
    let root = path("resident phantoms");
    if !root.exists() {
        done(prsmed().args(["data", "phantom", "--count", "48"]).arg(&root));
    }
    let mut command = prsmed();
    command.env("OMP_WAIT_POLICY", "passive");
    command.args(["--json", "train", "--preset", "tiny", "--data-root"]).arg(root).arg("--out").arg(path(name));
    for set in ["train.max_steps=12", "data.max_val_rows=8"].iter().chain(sets) {
        command.args(["--set", set]);
    }
    command
}

fn planned_and_resident(command: &mut Command) -> (f64, f64) {
    let said = objects(&done(command));
    let memory = &said.iter().rfind(|line| line["kind"] == "result").unwrap()["memory"];
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("no number: {value}"));
    let (planned, measured) = (&memory["planned"], &memory["measured"]);
    let base = number(&measured["resident_at_start"]);
    let libraries = planned["terms"].as_array().unwrap().iter().find(|term| term["name"] == "libraries").unwrap();
    assert_eq!(number(&libraries["bytes"]).to_bits(), base.to_bits(), "the base of both");
    let (reserved, seen) = (number(&planned["reserved_peak"]), number(&measured["reserved_peak"]));
    assert!((reserved / seen - 1.0).abs() < 0.03, "reserved: planned {reserved}, measured {seen}");
    (number(&planned["device_peak"]) - base, number(&measured["resident_peak"]) - base)
}

#[test]
fn a_run_takes_what_was_planned() {
    for (name, sets) in [("resident 16", ["train.micro_batch=16"]), ("resident 384", ["model.image_size=384"])] {
        let (planned, resident) = planned_and_resident(&mut tiny(name, &sets));
        let off = planned / resident - 1.0;
        assert!(off.abs() < 0.05, "{name}: planned {planned}, resident {resident}, {:.1} %", off * 100.0);
    }
}
