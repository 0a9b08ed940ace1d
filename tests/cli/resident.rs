//! Compares the planned peak of a CPU run with the resident memory that the operating system reports.

use std::process::Command;

use serde_json::Value;

use crate::support::{done, objects, path, prsmed};

/// A few steps of preset `tiny`, with its memory settings unchanged.
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
    let lines = objects(&done(command));
    let memory = &lines.iter().rfind(|line| line["kind"] == "result").unwrap()["memory"];
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("no number: {value}"));
    let (planned, measured) = (&memory["planned"], &memory["measured"]);
    let base = number(&measured["resident_at_start"]);
    let libraries = planned["terms"].as_array().unwrap().iter().find(|term| term["name"] == "libraries").unwrap();
    assert_eq!(number(&libraries["bytes"]).to_bits(), base.to_bits(), "the base of both");
    let [plan, real] = [planned, measured].map(|side| number(&side["reserved_peak"]));
    assert!((plan / real - 1.0).abs() < 0.03, "reserved: planned {plan}, measured {real}");
    (number(&planned["device_peak"]) - base, number(&measured["resident_peak"]) - base)
}

#[test]
fn resident_memory_of_a_run_is_within_five_percent_of_its_plan() {
    for (name, sets) in [("resident 16", ["train.micro_batch=16"]), ("resident 384", ["model.image_size=384"])] {
        let (planned, resident) = planned_and_resident(&mut tiny(name, &sets));
        let off = planned / resident - 1.0;
        assert!(off.abs() < 0.05, "{name}: planned {planned}, resident {resident}, {:.1} %", off * 100.0);
    }
}
