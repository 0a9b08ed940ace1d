//! Parity of 8-bit AdamW with the published algorithm. Maps and codes of the fixture come from bitsandbytes.

use crate::adamw::{config, optimizer, params, restart};
use crate::fixture::Fixture;
use prsmed::tensor::adamw::Maps;
use prsmed::tensor::{Device, Kind, Tensor};
use prsmed::trainer::OptimizerKind;

const NAMES: [&str; 2] = ["large", "small"];
const STEPS: usize = 12;

fn assert_equal(what: &str, got: &Tensor, want: &Tensor) {
    assert_eq!((got.size(), got.kind()), (want.size(), want.kind()), "{what}");
    let different = got.ne_tensor(want).sum(Kind::Int64).int64_value(&[]);
    assert_eq!(different, 0, "{what}: {different} of {} numbers differ", want.numel());
}

/// Twelve steps. At `restart_at` the state is loaded into a new optimizer before the step.
fn run(restart_at: Option<usize>) {
    let fixture = Fixture::open("adamw8bit");
    let mut config = config(&fixture, 0.0);
    config.optimizer = OptimizerKind::AdamW8bit;
    let params = params(&fixture, NAMES);
    let mut adamw = optimizer(&NAMES, &params, &config);
    let mut compared = 0;
    for step in 0..STEPS {
        if restart_at == Some(step) {
            restart(&mut adamw, optimizer(&NAMES, &params, &config));
        }
        for (name, param) in NAMES.iter().zip(&params) {
            (param * fixture.input(&format!("{step}.grad.{name}"))).sum(Kind::Float).backward();
        }
        let gradients = adamw.measure(1.0).expect("a norm");
        adamw.step(config.learning_rate, &gradients).expect("a step");
        if ![0, 1, 5, 11].contains(&step) {
            continue;
        }
        for (name, tensor) in adamw.state() {
            let Some(what) = name.strip_suffix(".large").filter(|what| *what != "step") else { continue };
            let want = fixture.expected(&format!("{step}.{what}"));
            assert_equal(&format!("step {step}: {name}"), &tensor.reshape([-1]), &want.reshape([-1]));
            compared += 1;
        }
        let param = |name: &str| fixture.expected(&format!("{step}.param.{name}"));
        assert_equal(&format!("step {step}: large"), &params[0].detach(), &param("large"));
        // torch's fused step on both sides, but vectorised differently
        let apart = (params[1].detach() - param("small")).abs().max().double_value(&[]);
        assert!(apart < 1e-6, "step {step}: small differs by {apart}");
    }
    assert_eq!(compared, 4 * 4);
}

#[test]
fn maps_equal_bitsandbytes() {
    let fixture = Fixture::open("adamw8bit");
    let maps = Maps::new(Device::Cpu);
    assert_equal("signed", &maps.signed, &fixture.expected("map.signed"));
    assert_equal("unsigned", &maps.unsigned, &fixture.expected("map.unsigned"));
}

#[test]
fn codes_scales_and_parameters_equal_bitsandbytes() {
    run(None);
}

#[test]
fn they_are_equal_if_restored_before_the_seventh_step() {
    run(Some(6));
}
