//! Parity of AdamW and gradient clipping with `torch.optim.AdamW` and `clip_grad_norm_`.

use crate::fixture::{Fixture, leaf};
use prsmed::tensor::{Kind, Tensor};
use prsmed::trainer::optimizer::AdamW;
use prsmed::trainer::precision::Precision;
use prsmed::trainer::{Parameter, TrainConfig};

const NAMES: [&str; 5] = ["matrix", "bias", "kernel", "scalar", "late"];
const STEPS: usize = 5;

pub(crate) fn config(fixture: &Fixture, clip_norm: f64) -> TrainConfig {
    let number = |name: &str| fixture.numbers(name)[0];
    TrainConfig {
        learning_rate: number("lr"),
        weight_decay: number("weight_decay"),
        beta1: number("betas"),
        beta2: fixture.numbers("betas")[1],
        epsilon: number("eps"),
        clip_norm,
        precision: Precision::Fp32,
        ..TrainConfig::default()
    }
}

/// Parameters `param.NAME` of the fixture.
pub(crate) fn params<const N: usize>(fixture: &Fixture, names: [&str; N]) -> [Tensor; N] {
    names.map(|name| leaf(&fixture.input(&format!("param.{name}")), Kind::Float))
}

pub(crate) fn optimizer(names: &[&str], params: &[Tensor], config: &TrainConfig) -> AdamW {
    let named = names.iter().zip(params);
    let params = named.map(|(name, tensor)| Parameter::new((*name).to_owned(), tensor.shallow_clone()));
    AdamW::new(params.collect(), config)
}

/// Loads the state of `adamw` into `fresh`, like a resumed run.
pub(crate) fn restart(adamw: &mut AdamW, mut fresh: AdamW) {
    let saved = adamw.state();
    let find = |name: &str| saved.iter().find(|(n, _)| n == name).map(|(_, t)| t.copy());
    fresh.restore(|name| Ok(find(name))).expect("moments fit");
    *adamw = fresh;
}

/// Five steps. At `restart_at` the state is loaded into a new optimizer before the step.
fn run(restart_at: Option<usize>) {
    let fixture = Fixture::open("adamw");
    let config = config(&fixture, fixture.numbers("max_norm")[0]);
    let params = params(&fixture, NAMES);
    let mut adamw = optimizer(&NAMES, &params, &config);
    for step in 0..STEPS {
        if restart_at == Some(step) {
            restart(&mut adamw, optimizer(&NAMES, &params, &config));
        }
        for (name, param) in NAMES.iter().zip(&params) {
            let name = format!("{step}.grad.{name}");
            if fixture.has_input(&name) {
                // the gradient of sum(p * g) is exactly g
                (param * fixture.input(&name)).sum(Kind::Float).backward();
            }
        }
        let gradients = adamw.measure(1.0).expect("a norm");
        adamw.step(config.learning_rate, &gradients).expect("a step");
        let mut case = fixture.case(&step.to_string());
        case.check("grad_norm", &Tensor::from(gradients.on_device.double_value(&[])));
        for (name, param) in NAMES.iter().zip(&params) {
            case.check(&format!("param.{name}"), param);
            assert!(!param.grad().defined(), "step {step}: the gradient of {name} was not dropped");
        }
        case.finish();
    }
}

#[test]
fn adamw_agrees() {
    run(None);
}

#[test]
fn adamw_agrees_if_restored_before_the_fourth_step() {
    run(Some(3));
}

#[test]
fn the_first_step_decays_and_moves_by_the_learning_rate() {
    // the fixture's decay (lr * wd = 1e-9) vanishes in rounding: use a large one, with the closed form
    let mut config = config(&Fixture::open("adamw"), 0.0);
    (config.learning_rate, config.weight_decay, config.epsilon) = (0.01, 0.5, 1e-3);
    let start = [2.0_f64, -1.0, 0.5, 3.0, -4.0];
    let grads = [0.3_f64, 0.001, -2.0, 50.0, -0.01];
    let params = start.map(|p| leaf(&Tensor::from(p), Kind::Float));
    let mut adamw = optimizer(&NAMES, &params, &config);
    for (param, grad) in params.iter().zip(grads) {
        (param * grad).backward();
    }
    let gradients = adamw.measure(1.0).expect("a norm");
    adamw.step(config.learning_rate, &gradients).expect("a step");
    for ((param, start), grad) in params.iter().zip(start).zip(grads) {
        let want = start * (1.0 - 0.01 * 0.5) - 0.01 * grad / (grad.abs() + 1e-3);
        let got = param.double_value(&[]);
        assert!((got - want).abs() < 1e-6, "from {start} with gradient {grad}: {got}, expected {want}");
    }
}
