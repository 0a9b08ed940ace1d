//! Parity of InceptionV3 with pytorch-fid's network, rebuilt by `scripts/fixtures/inception.py` (which compares it with
//! torchvision's). Weights and images are the same formulas on both sides.

use prsmed::models::inception::Inception;
use prsmed::tensor::store::{Role, Store, StoreOptions};
use prsmed::tensor::{Device, Kind, Tensor, no_grad};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

fn fixture() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/inception.json");
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("fixture {path}: {e}"));
    serde_json::from_str(&text).expect("a JSON fixture")
}

fn build(kind: Kind, divisor: i64) -> (Store, Inception) {
    let store = Store::new(StoreOptions { frozen_kind: kind, device: Device::Cpu, initialise: false });
    let model = Inception::with_divisor(&store.root(Role::Frozen), divisor);
    (store, model)
}

fn counted(shape: &[i64]) -> Tensor {
    Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu)).view(shape)
}

fn fill(store: &Store) {
    let mut entries = store.entries();
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    for (n, entry) in entries.iter_mut().enumerate() {
        let shape = entry.tensor.size();
        let (i, n) = (counted(&shape), n as f64);
        let line = |step: f64, phase: f64| (&i * step + phase * n).sin();
        let value = if shape.len() > 1 {
            line(0.9, 0.1) * 1.5 / (shape[1..].iter().product::<i64>() as f64).sqrt()
        } else if entry.name.ends_with("running_var") {
            line(0.5, 0.2) * 0.3 + 0.6
        } else if entry.name.ends_with("weight") {
            line(0.7, 0.3) * 0.1 + 1.0
        } else {
            line(0.5, 0.2) * 0.05
        };
        no_grad(|| entry.tensor.copy_(&value));
    }
}

fn error_of(kind: Kind, case: &Value, divisor: i64) -> f64 {
    let (store, model) = build(kind, divisor);
    fill(&store);
    let shape: Vec<i64> = serde_json::from_value(case["picture"].clone()).expect("a shape");
    let [count, height, width] = shape[..] else { panic!("three sides") };
    let i = counted(&[count, 3, height, width]);
    let image = ((&i * 0.013).sin() + (&i * 0.31).sin()) / 4.0 + 0.5;
    let want: Vec<f64> = serde_json::from_value(case["features"].clone()).expect("numbers");
    let want = Tensor::from_slice(&want).view([count, 2048 / divisor]);
    let got = model.features(&image);
    assert_eq!((got.kind(), got.size()), (kind, want.size()));
    ((got.to_kind(Kind::Double) - &want).norm() / want.norm()).double_value(&[])
}

#[test]
fn inception_agrees() {
    let fixture = fixture();
    let cases = fixture["cases"].as_array().expect("recorded");
    assert_eq!(cases.len(), 2);
    for case in cases {
        let divisor = fixture["divisor"].as_i64().expect("recorded");
        let (double, single) = (error_of(Kind::Double, case, divisor), error_of(Kind::Float, case, divisor));
        assert!(double < 1e-9, "fp64 differs by {double:.1e}");
        assert!(single < 1e-3 && single > double, "fp32 differs by {single:.1e}");
    }
}

#[test]
fn keys_of_the_full_network_equal_torchvision() {
    let fixture = fixture();
    let (store, _model) = build(Kind::Float, 1);
    let mut keys: Vec<String> = store.entries().iter().map(|e| format!("{} {:?}", e.name, e.tensor.size())).collect();
    keys.sort();
    assert_eq!(keys.len() as u64, fixture["keys"].as_u64().expect("recorded"));
    let hex = format!("{:x}", Sha256::digest(keys.join("\n")));
    assert_eq!(hex, fixture["keys_sha256"].as_str().expect("recorded"), "{}", keys.join("\n"));
}
