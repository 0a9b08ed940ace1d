//! The program `benches/step` on small models that need a fraction of a second.

#[path = "../../benches/step/main.rs"]
#[expect(dead_code, reason = "its `main` is not called")]
mod step;

use std::process::Command;

use crate::support::phantoms;
use serde_json::Value;

/// Not a test: this process is the program, with the words of the variable.
#[test]
#[ignore = "the program that the other tests start"]
fn program() {
    if let Ok(words) = std::env::var("PRSMED_TEST_WORDS") {
        step::start(words.lines().map(str::to_owned));
    }
}

/// The exit code, the lines that are JSON, and standard error.
fn ran(arguments: &[&str]) -> (Option<i32>, Vec<Value>, String) {
    let mut words = vec!["step", "--preset", "tiny", "--device", "cpu", "--steps", "2", "--warmup", "1"];
    for set in ["model.image_size=64", "train.micro_batch=2", "train.accumulation=2"] {
        words.extend(["--set", set]);
    }
    words.extend(arguments);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "bench::program", "--nocapture"]).env("OMP_NUM_THREADS", "1");
    let output = command.env("PRSMED_TEST_WORDS", words.join("\n")).output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (output.status.code(), stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect(), stderr)
}

fn record(arguments: &[&str]) -> Value {
    let (code, mut records, stderr) = ran(arguments);
    assert!(code == Some(0) && records.len() == 1, "{code:?} {records:?} {stderr}");
    records.remove(0)
}

fn number(record: &Value, key: &str) -> f64 {
    record.pointer(key).and_then(Value::as_f64).unwrap_or_else(|| panic!("no {key} in {record}"))
}

#[test]
fn steps_are_timed_and_use_the_planned_memory() {
    let found = record(&["--parts"]);
    assert_eq!(found["kind"], "bench");
    assert_eq!(found["seconds"].as_array().unwrap().len(), 2);
    let (samples, tokens) = (number(&found, "/samples"), number(&found, "/tokens"));
    assert_eq!(samples, 4.0);
    // 36 patches of 14 pixels, and texts of 128 ids, one of which is the image placeholder
    assert_eq!(tokens, 4.0 * (36.0 + 127.0));
    assert!((number(&found, "/samples_per_s") * number(&found, "/median_seconds") - samples).abs() < 1e-6);
    assert!(found["wait_seconds"].is_null());
    assert_eq!(found["memory"]["allocated_peak"], found["planned"]["allocated_peak"]);
    assert_eq!(found["memory"]["categories"], found["planned"]["categories"]);
    let names: Vec<&str> = found["parts"].as_array().unwrap().iter().map(|part| part[0].as_str().unwrap()).collect();
    for name in ["vision_tower", "llm", "image_encoder", "mask_decoder", "losses", "backward", "optimizer"] {
        assert!(names.contains(&name), "{names:?}");
    }
    // language model layers: 3 x (2 x 128 x 128 + 2 x 128 x 64 + 3 x 128 x 256) trained weights
    let layers = 6.0 * 3.0 * f64::from(2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256) * tokens;
    let (model, executed) = (number(&found, "/flops/model"), number(&found, "/flops/executed"));
    assert!(model > layers && model < 2.0 * executed, "{model} {layers} {executed}");
    let utilisation = number(&found, "/utilisation");
    assert!(utilisation > 0.0 && utilisation < 1.5, "{utilisation}");
}

#[test]
fn recomputed_operations_do_not_count_as_model_flops() {
    let full = ["--set", "train.checkpointing=full", "--set", "train.checkpoint_encoder=full"];
    let (plain, twice) = (record(&[]), record(&full));
    assert_eq!(plain["flops"]["model"], twice["flops"]["model"]);
    assert!(number(&twice, "/flops/executed") > 1.1 * number(&plain, "/flops/executed"));
}

#[test]
fn the_language_model_alone_and_predictions_can_be_timed() {
    let alone = record(&["--part", "llm", "--text-tokens", "20", "--answer-tokens", "5"]);
    assert_eq!(number(&alone, "/tokens"), 4.0 * (36.0 + 19.0));
    assert_eq!(alone["memory"]["allocated_peak"], alone["planned"]["allocated_peak"]);
    let whole = record(&["--text-tokens", "20", "--answer-tokens", "5"]);
    assert!(number(&alone, "/flops/model") < number(&whole, "/flops/model"));
    let predictions = record(&["--task", "predict"]);
    assert_eq!(predictions["memory"]["name"], "predict");
    assert_eq!(predictions["memory"]["allocated_peak"], predictions["planned"]["allocated_peak"]);
}

#[test]
fn waiting_for_rows_of_a_data_root_is_reported() {
    let root = phantoms().to_str().unwrap();
    let found = record(&["--set", "data.max_train_rows=8", "--data-root", root]);
    assert_eq!(found["wait_seconds"].as_array().unwrap().len(), 2);
    assert_eq!(number(&found, "/samples"), 4.0);
    // the rates include the wait
    let whole = number(&found, "/median_seconds") + number(&found, "/median_wait_seconds");
    for (rate, count) in [("/steps_per_s", 1.0), ("/samples_per_s", 4.0)] {
        assert!((number(&found, rate) * whole / count - 1.0).abs() < 1e-9, "{rate}: {found}");
    }
}

#[test]
fn changed_settings_are_compared_with_unchanged_ones() {
    let found = record(&["--compare", "train.micro_batch=4", "--rounds", "2"]);
    assert_eq!((found["kind"].as_str(), found["time_ratios"].as_array().unwrap().len()), (Some("compare"), 2));
    let [without, with] =
        ["/without/0/memory/allocated_peak", "/with/0/memory/allocated_peak"].map(|k| number(&found, k));
    assert!(with > without);
    assert!((number(&found, "/peak_ratio") - with / without).abs() < 1e-9);
    assert!(number(&found, "/time_ratio") > 0.0);
    // steps of 4 samples without the change and of 8 with it: the time of a sample is compared
    for (round, ratio) in found["time_ratios"].as_array().unwrap().iter().enumerate() {
        let [without, with] = [("without", 4.0), ("with", 8.0)].map(|(side, samples)| {
            assert_eq!(number(&found, &format!("/{side}/{round}/samples")), samples);
            let seconds = [0, 1].map(|step| number(&found, &format!("/{side}/{round}/seconds/{step}")));
            f64::midpoint(seconds[0], seconds[1]) / samples
        });
        assert!((ratio.as_f64().unwrap() * without / with - 1.0).abs() < 1e-9, "{found}");
    }
}

#[test]
fn invalid_settings_are_refused_before_timing() {
    let refused = |arguments: &[&str], expected: &str| {
        let (code, records, stderr) = ran(arguments);
        assert!(code == Some(2) && records.is_empty() && stderr.contains(expected), "{code:?} {records:?} {stderr}");
    };
    let misspelt =
        "error: `train.micro_bacth`: there is no such setting (--compare)\nhint: did you mean `train.micro_batch`?";
    refused(&["--compare", "train.micro_bacth=4"], misspelt);
    let too_long = "error: `--answer-tokens`: 4 ids of an answer leave no room for a question in 5\n\
                    hint: give a text at least two ids more than its answer";
    refused(&["--text-tokens", "5", "--answer-tokens", "4"], too_long);
    let large = ["--set", "model.image_size=256", "--set", "train.accumulation=100000"];
    refused(&large, "`--no-plan` skips this check");
}
