//! `prsmed calibrate`, and what plans do with its reading.

use crate::support::{done, prsmed, run};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

fn with_cache(cache: &Path, arguments: &[&str]) -> Command {
    let mut command = prsmed();
    command.env("PRSMED_CACHE", cache).args(arguments);
    command
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn plans_use_the_reading_of_this_cpu_and_name_it() {
    let cache = tempfile::tempdir().unwrap();
    let plan = ["plan", "--preset", "tiny", "--gpu", "cpu", "--samples", "100"];
    let before = done(&mut with_cache(cache.path(), &plan));
    assert!(before.contains("not predicted for the CPU before `prsmed calibrate` measured it"), "{before}");

    let reading = json(&done(&mut with_cache(cache.path(), &["calibrate", "--cpu", "--json", "--quiet"])));
    assert_eq!(reading["kind"], "calibration");
    assert!(reading["device"]["name"].as_str().unwrap().starts_with("CPU"));
    let rates = reading["speed"]["fp32"].as_array().unwrap();
    assert_eq!(rates.len(), 3);
    assert_eq!(rates[2]["flops"], 2.0 * 1024_f64.powi(3));

    let after = done(&mut with_cache(cache.path(), &plan));
    assert!(after.contains("(predicted from rates measured on CPU"), "{after}");
    let plan = json(&done(&mut with_cache(cache.path(), &[&plan[..], &["--json"]].concat())));
    let (step, training) = (&plan["time"]["seconds"], &plan["training"]["step_seconds"]);
    assert!(step.as_f64().unwrap() > 0.0 && step == training, "{step} {training}");

    let file = Path::new(reading["out"].as_str().unwrap());
    assert!(file.starts_with(cache.path()));
    let text = fs::read_to_string(file).unwrap();
    fs::write(file, &text[..text.len() / 2]).unwrap();
    let ran = run(&mut with_cache(cache.path(), &["plan", "--preset", "tiny", "--gpu", "cpu"]));
    assert_eq!(ran.code, Some(0));
    assert!(ran.stderr.contains("warning") && ran.stderr.contains("run `prsmed calibrate` again"), "{}", ran.stderr);
}
