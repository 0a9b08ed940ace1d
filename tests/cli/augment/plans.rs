//! Plans and presets for generation.

use std::fs;

use serde_json::Value;

use crate::support::{done, objects, path, prsmed, refused, run};

fn last(text: &str) -> Value {
    objects(text).pop().unwrap()
}

#[test]
fn a_preset_for_a_small_gpu_can_be_used() {
    let toml = done(prsmed().args(["preset", "--task", "augment", "--gpu", "8gb"]));
    assert!(toml.starts_with("# prsmed preset --task augment for 8 GB"), "{toml}");
    let file = path("augment-8gb.toml");
    fs::write(&file, &toml).unwrap();
    let mut used = prsmed();
    used.args(["augment", "generate", "--data-root", "data", "--out", "new", "--print-config", "--config"]).arg(&file);
    let shown: toml::Table = done(&mut used).parse().unwrap();
    let printed = last(&done(used.arg("--json")));
    let written: toml::Table = toml.parse().unwrap();
    for (section, settings) in written.iter().filter_map(|(name, value)| Some((name, value.as_table()?))) {
        for (key, value) in settings {
            assert_eq!(&shown[section][key], value, "{section}.{key}");
            assert_eq!(printed[section][key], serde_json::json!(value), "{section}.{key}");
        }
    }
    let mut plan = prsmed();
    plan.args(["plan", "--task", "augment", "--gpu", "8gb", "--json", "--config"]).arg(&file);
    let plan = last(&done(&mut plan));
    let [peak, budget] = [&plan["device_peak"], &plan["budget"]["bytes"]].map(|bytes| bytes.as_f64().unwrap());
    assert!(plan["fits"] == true && peak < 0.97 * budget, "{plan}");
}

#[test]
fn for_a_gpu_that_is_too_small_remedies_are_listed() {
    let ran = run(prsmed().args(["preset", "--task", "augment", "--gpu", "4gb", "--json"]));
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let told = last(&ran.stdout);
    assert_eq!((&told["kind"], &told["fits"]), (&"preset".into(), &false.into()));
    assert!(!told["remedies"].as_array().unwrap().is_empty(), "{told}");
    let ran = run(prsmed().args(["preset", "--task", "augment", "--gpu", "4gb"]));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{}", ran.stderr);
    let said = "changes that save memory:\n  --set augment.";
    assert!(ran.stderr.contains("nothing fits 4 GB") && ran.stderr.contains(said), "{}", ran.stderr);
}

#[test]
fn a_preset_as_json_has_the_settings_of_its_toml() {
    let mut preset = prsmed();
    let found = last(&done(preset.args(["preset", "--task", "augment", "--preset", "tiny", "--gpu", "8gb", "--json"])));
    assert!(found["kind"] == "preset" && found["fits"] == true && found["plan"]["fits"] == true, "{found}");
    let toml: toml::Table = found["toml"].as_str().unwrap().parse().unwrap();
    let settings = toml["augment"].as_table().unwrap();
    assert!(settings.contains_key("batch"), "{toml}");
    for (key, value) in settings {
        assert_eq!(found["settings"]["augment"][key], serde_json::json!(value), "{key}");
    }
}

#[test]
fn a_plan_has_phases_and_a_time() {
    // a plan needs no files of the model
    let mut plan = prsmed();
    plan.env("HF_HUB_OFFLINE", "1").args(["plan", "--task", "augment", "--gpu", "24gb", "--json"]);
    let plan = last(&done(&mut plan));
    let phases: Vec<&str> = plan["phases"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(phases, ["encode prompts", "load", "encode", "denoise", "decode"]);
    assert!(plan["fits"] == true && plan["time"]["seconds"].as_f64().unwrap() > 0.0, "{plan}");
    let large = ["--set", "augment.batch=64", "--set", "augment.decode=whole"];
    let ran = run(prsmed().args(["plan", "--task", "augment", "--gpu", "24gb", "--json"]).args(large));
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let told = last(&ran.stdout);
    let first = &told["remedies"][0];
    let change = first["change"].as_str().unwrap();
    let mut then = prsmed();
    then.args(["plan", "--task", "augment", "--gpu", "24gb", "--json"]).args(large);
    then.args(change.split(' ').flat_map(|set| ["--set", set]));
    // The remedy has the promised peak.
    assert_eq!(last(&run(&mut then).stdout)["device_peak"], first["device_peak"], "{first}");
}

#[test]
fn flags_for_training_only_are_rejected() {
    refused(
        prsmed().args(["preset", "--task", "augment", "--gpu", "8gb", "--effective-batch", "8"]),
        "error: `--effective-batch`: is for training, not for `--task augment`\n\
         hint: leave it out: the search chooses the batch",
    );
}
