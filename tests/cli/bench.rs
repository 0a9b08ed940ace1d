//! `prsmed bench` on small models that need a fraction of a second.

use std::process::Command;

use crate::support::{done, phantoms, prsmed, refused, run};
use serde_json::Value;

fn bench(arguments: &[&str]) -> Command {
    let mut command = prsmed();
    command.args(["bench", "--preset", "tiny", "--device", "cpu", "--steps", "2", "--warmup", "1"]);
    for set in ["model.image_size=64", "train.micro_batch=2", "train.accumulation=2"] {
        command.args(["--set", set]);
    }
    command.args(arguments);
    command
}

fn record(command: &mut Command) -> Value {
    let text = done(command.args(["--json", "--quiet"]));
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).unwrap()
}

fn number(record: &Value, key: &str) -> f64 {
    record.pointer(key).and_then(Value::as_f64).unwrap_or_else(|| panic!("no {key} in {record}"))
}

#[test]
fn steps_are_timed_and_use_the_planned_memory() {
    let found = record(&mut bench(&["--parts"]));
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
    let (plain, twice) = (record(&mut bench(&[])), record(&mut bench(&full)));
    assert_eq!(plain["flops"]["model"], twice["flops"]["model"]);
    assert!(number(&twice, "/flops/executed") > 1.1 * number(&plain, "/flops/executed"));
}

#[test]
fn the_language_model_alone_and_predictions_can_be_timed() {
    let alone = record(&mut bench(&["--part", "llm", "--text-tokens", "20", "--answer-tokens", "5"]));
    assert_eq!(number(&alone, "/tokens"), 4.0 * (36.0 + 19.0));
    assert_eq!(alone["memory"]["allocated_peak"], alone["planned"]["allocated_peak"]);
    let whole = record(&mut bench(&["--text-tokens", "20", "--answer-tokens", "5"]));
    assert!(number(&alone, "/flops/model") < number(&whole, "/flops/model"));
    let predictions = record(&mut bench(&["--task", "predict"]));
    assert_eq!(predictions["memory"]["name"], "predict");
    assert_eq!(predictions["memory"]["allocated_peak"], predictions["planned"]["allocated_peak"]);
}

#[test]
fn waiting_for_rows_of_a_data_root_is_reported() {
    let found = record(bench(&["--set", "data.max_train_rows=8", "--data-root"]).arg(phantoms()));
    assert_eq!(found["wait_seconds"].as_array().unwrap().len(), 2);
    assert_eq!(number(&found, "/samples"), 4.0);
    // the rates include the wait
    let whole = number(&found, "/median_seconds") + number(&found, "/median_wait_seconds");
    for (rate, count) in [("/steps_per_s", 1.0), ("/samples_per_s", 4.0)] {
        assert!((number(&found, rate) * whole / count - 1.0).abs() < 1e-9, "{rate}: {found}");
    }
    let text = done(bench(&["--data-root"]).arg(phantoms()));
    assert!(text.contains("s waited before a step"), "{text}");
}

#[test]
fn changed_settings_are_compared_with_unchanged_ones() {
    let found = record(&mut bench(&["--compare", "train.micro_batch=4", "--rounds", "2"]));
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
    refused(
        &mut bench(&["--compare", "train.micro_bacth=4"]),
        "error: `train.micro_bacth`: there is no such setting (--compare)\nhint: did you mean `train.micro_batch`?",
    );
    refused(
        &mut bench(&["--text-tokens", "5", "--answer-tokens", "4"]),
        "error: `--answer-tokens`: 4 ids of an answer leave no room for a question in 5\n\
         hint: give a text at least two ids more than its answer",
    );
    let ran = run(&mut bench(&["--set", "model.image_size=256", "--set", "train.accumulation=100000"]));
    assert_eq!(ran.code, Some(2));
    assert!(
        ran.stderr.contains("does not fit") && ran.stderr.contains("`--no-plan` skips this check"),
        "{}",
        ran.stderr
    );
}
