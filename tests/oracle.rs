//! A recorded step of the original Python PRS-Med, reproduced (`trace.md` beside the recording states the tolerances).

#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "a test fails by panicking and says what it skips")]

use prsmed::Result;
use prsmed::segment::setup::{Build, RunOverrides};
use prsmed::segment::{Semantics, setup, trace};
use prsmed::tensor::weights::Archive;
use prsmed::tensor::{Device, Kind, Tensor};
use prsmed::trainer::TrainConfig;
use std::path::{Path, PathBuf};

/// The folder of recorded and real data, or `None` with a visible line.
fn shared() -> Option<PathBuf> {
    let folder = std::env::var_os("PRSMED_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"), PathBuf::from);
    if folder.join("reference/oracle/expected.safetensors").exists() {
        return Some(folder);
    }
    eprintln!("skipped: the recorded oracle is not at {} (set PRSMED_SHARED)", folder.display());
    None
}

fn recorded_optimizer() -> TrainConfig {
    let text = r#"{"micro_batch":2,"accumulation":1,"epochs":1,"max_steps":0,"checkpoint_every_steps":0,
        "validate_every_epochs":0,"patience":0,"learning_rate":1e-4,"min_learning_rate":0,"warmup_frac":0,
        "weight_decay":1e-5,"beta1":0.9,"beta2":0.999,"epsilon":1e-6,"clip_norm":1.0,"seed":0,"precision":"fp32",
        "checkpointing":"none","checkpoint_encoder":"none","checkpoint_decoder":false,"optimizer":"adamw",
        "offload_optimizer":false,"step_in_backward":false,"graph":"off","fused_kernels":"off","ema_decay":0}"#;
    serde_json::from_str(text).unwrap()
}

fn record(semantics: Semantics, steps: usize) -> Option<(Vec<(String, Tensor)>, PathBuf)> {
    let oracle = shared()?.join("reference/oracle");
    let base = oracle.join("base");
    let overrides = RunOverrides {
        base: Some(base.join("llava-med-v1.5-mistral-7b").display().to_string()),
        vision_tower: Some(base.join("clip-vit-large-patch14-336").display().to_string()),
        semantics: Some(semantics),
        quantization: None,
    };
    let locate = |spec: &str| -> Result<PathBuf> { Ok(PathBuf::from(spec)) };
    let build =
        Build { device: Device::Cpu, kind: Kind::Float, seed: 0, locate: &locate, allow_partial: false, cache: None };
    let assembly = setup::open(&oracle.join("run"), &overrides, build).unwrap();
    let inputs =
        trace::read_inputs(&oracle.join("inputs.safetensors"), semantics, assembly.model.num_image_tokens()).unwrap();
    Some((trace::run(&assembly, &inputs, steps, &recorded_optimizer()).unwrap(), oracle))
}

fn tolerance(name: &str) -> f64 {
    let rules = [
        ("llm_last_hidden", 2e-5),
        ("image_embedding", 5e-5),
        ("mask_logits", 1e-4),
        ("class_logits", 1e-5),
        ("loss.", 1e-5),
        ("steps.loss.", 1e-4),
        ("steps.grad_norm", 2e-3),
        ("grad.lora_adapter", 1e-4),
        ("grad.cls", 1e-5),
        ("grad.image_encoder", 5e-3),
        ("grad.mask_decoder", 5e-3),
        ("param_after3.lora_adapter", 2e-5),
        ("param_after3.", 1e-3),
    ];
    rules.iter().find(|(prefix, _)| name.starts_with(prefix)).unwrap_or_else(|| panic!("no tolerance: {name}")).1
}

/// Relative L2 distance of what was recorded (every N-th element) from ours.
fn distance(got: &Tensor, want: &Tensor, stride: i64) -> f64 {
    let got = got.reshape([-1]).slice(0, 0, None, stride).to_kind(Kind::Double);
    let want = want.reshape([-1]).to_kind(Kind::Double);
    assert_eq!(got.size(), want.size());
    (got - &want).norm().double_value(&[]) / want.norm().double_value(&[]).max(1e-30)
}

#[test]
fn reference_semantics_reproduce_the_recording() {
    let Some((record, oracle)) = record(Semantics::Reference, 3) else { return };
    let expected = Archive::open(&oracle.join("expected.safetensors")).unwrap();
    let mut wrong = Vec::new();
    for name in expected.names() {
        let (plain, stride) = name.split_once("@stride:").map_or((name.as_str(), 1), |(n, s)| (n, s.parse().unwrap()));
        let Some((_, got)) = record.iter().find(|(n, _)| n == plain) else {
            wrong.push(format!("{plain}: missing"));
            continue;
        };
        let error = distance(got, &expected.read(name).unwrap(), stride);
        eprintln!("{error:.2e} (allowed {:.0e}) {plain}", tolerance(plain));
        if error.is_nan() || error > tolerance(plain) {
            wrong.push(format!("{plain}: {error:.3e} > {:.0e}", tolerance(plain)));
        }
    }
    assert!(expected.names().len() > 50, "only {} recorded tensors", expected.names().len());
    assert!(wrong.is_empty(), "{} tensors differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn corrected_semantics_differ() {
    let Some((record, oracle)) = record(Semantics::Corrected, 1) else { return };
    let expected = Archive::open(&oracle.join("expected.safetensors")).unwrap();
    for name in ["mask_logits", "loss.text", "loss.mask"] {
        let stored = expected.names().iter().find(|n| n.split('@').next() == Some(name)).unwrap();
        let stride = stored.split_once("@stride:").map_or(1, |(_, s)| s.parse().unwrap());
        let got = &record.iter().find(|(n, _)| n == name).unwrap().1;
        let error = distance(got, &expected.read(stored).unwrap(), stride);
        assert!(error > 1e-3, "{name} does not differ: {error:.2e}");
    }
}
