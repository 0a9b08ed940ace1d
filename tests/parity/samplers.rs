//! Parity of whole sampler runs with diffusers: timesteps, initial noise scale, and all latents.

use prsmed::models::diffusion::sampler::{History, Sampler, SamplerKind, SchedulerConfig};
use prsmed::tensor::{Device, Kind as Dtype, Tensor};
use serde_json::Value;

/// Relative to the largest latent before the step: fp32 rounding of 30 steps.
const ALLOWED: f64 = 1e-5;
/// Relative to the largest latent so far: with zero terminal SNR a run starts at 4096 and one step reduces it to 10.
const ROUNDING: f64 = 2e-7;

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number")).collect()
}

fn largest_difference(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

fn config(case: &Value) -> SchedulerConfig {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("scheduler_config.json");
    std::fs::write(&path, case["config"].to_string()).expect("a file");
    SchedulerConfig::open(&path).expect("a supported config")
}

fn check(case: &Value) {
    let kind: SamplerKind = serde_json::from_value(case["kind"].clone()).expect("a sampler");
    let steps = usize::try_from(case["steps"].as_u64().expect("a count")).expect("small");
    let what = format!("{kind} {steps} {} {}", case["config"], case["strength"]);
    let sampler = Sampler::new(kind, &config(case), steps).unwrap_or_else(|error| panic!("{what}: {error}"));
    let times = largest_difference(&sampler.timesteps, &numbers(&case["timesteps"]));
    assert!(times < 1e-3, "{what}: timesteps differ by {times}");
    let scale = case["init_noise_scale"].as_f64().expect("a number");
    assert!((sampler.init_noise_scale / scale - 1.0).abs() < 1e-6, "{what}: {}", sampler.init_noise_scale);

    let latents: Vec<Vec<f64>> = case["latents"].as_array().expect("a list").iter().map(numbers).collect();
    let clean = Tensor::linspace(-1.0, 1.0, 5, (Dtype::Float, Device::Cpu));
    let (start, mut xs) = match case["strength"].as_f64() {
        None => (0, &clean * sampler.init_noise_scale),
        Some(strength) => {
            let start = sampler.start_index(strength);
            (start, sampler.add_noise(&clean, &clean.flip([0]), start))
        }
    };
    assert_eq!(Some(start as u64), case["start"].as_u64(), "{what}");
    assert_eq!(latents.len(), steps - start + 1, "{what}");
    let (mut history, mut most) = (History::default(), 0.0_f64);
    for (i, want) in (start..).zip(&latents) {
        let largest = want.iter().fold(1e-3_f64, |most, x| most.max(x.abs()));
        let got = Vec::<f64>::try_from(xs.to_kind(Dtype::Double)).expect("numbers");
        most = most.max(largest);
        let error = largest_difference(&got, want);
        assert!(
            error < ALLOWED * largest + ROUNDING * most,
            "{what}: before step {i} the latents differ by {error:.1e}: {got:?}, expected {want:?}"
        );
        if i < steps {
            let wave = 0.05 * (sampler.timesteps[i] / 100.0).sin();
            let output = sampler.scale_model_input(&xs, i) * 0.3 + wave;
            xs = sampler.step(i, &output, &xs, &mut history);
        }
    }
}

#[test]
fn runs_of_every_sampler_agree() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parity/samplers.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("fixture {}: {e}", path.display()));
    let record: Value = serde_json::from_str(&text).expect("json");
    let runs = record["runs"].as_array().expect("runs");
    assert!(runs.len() > 30, "only {} runs", runs.len());
    for case in runs {
        check(case);
    }
}
