//! A new recording against the pass that it recorded: same inputs, same random numbers, same losses and gradients.
//!
//! What a card records is not always what it ran: a kernel that took a number from the host repeats that number. So every
//! recording is tried once before its results are used.

use super::recorder::{Numbers, Recording, Work};
use crate::Result;
use crate::tensor::{Device, Kind, META, Tensor, graph, ledger, no_grad, rng};

/// Relative difference of losses, and of each gradient, up to which two passes are the same: sums are added in another order,
/// in bf16 too, and nothing else may differ. Other random numbers differ by far more.
const TOLERANCE: f64 = 0.02;
/// Gradients below this part of the largest are not told from rounding.
const NOTHING: f64 = 1e-3;

/// What a first replay gave.
#[derive(Debug)]
pub(super) struct Checked {
    /// Of the replay or, where it differed, of the pass.
    pub(super) numbers: Numbers,
    /// What differed.
    pub(super) difference: Option<String>,
}

/// Runs `work`, then replays it, both from gradients of zero and the same state of `device`'s generators. What is added to
/// `gradients`, by parameter, is what one pass adds: the replay or, where it differed, the pass. Holds two copies of them meanwhile.
///
/// # Errors
/// What `work` says and the device.
pub(super) fn first_replay(
    recording: &mut dyn Recording,
    work: &Work,
    gradients: &[(&str, &Tensor)],
    device: Device,
) -> Result<Checked> {
    let (names, gradients): (Vec<&str>, Vec<&Tensor>) = gradients.iter().copied().unzip();
    let gradients = gradients.as_slice();
    let state = rng::State::take(device)?;
    let before = copies(gradients);
    graph::zero(gradients)?;
    let expected = work()?;
    let by_pass = copies(gradients);
    graph::zero(gradients)?;
    state.restore()?;
    let numbers = recording.replay(work)?;
    let difference =
        differing(&expected, &numbers).or_else(|| no_grad(|| differing_gradient(&names, &by_pass, gradients)));
    let added: Vec<&Tensor> = if difference.is_some() { by_pass.iter().collect() } else { gradients.to_vec() };
    no_grad(|| {
        for ((gradient, before), added) in gradients.iter().zip(&before).zip(added) {
            let _ = before.shallow_clone().g_add_(added);
            gradient.shallow_clone().copy_(before);
        }
    });
    Ok(Checked { numbers: if difference.is_some() { expected } else { numbers }, difference })
}

fn copies(gradients: &[&Tensor]) -> Vec<Tensor> {
    let _category = ledger::enter(ledger::Category::Gradients);
    no_grad(|| gradients.iter().map(|gradient| gradient.copy()).collect())
}

/// The first number that is another one.
fn differing(expected: &[(&'static str, Tensor)], replayed: &[(&'static str, Tensor)]) -> Option<String> {
    let names = |numbers: &[(&'static str, Tensor)]| numbers.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    if names(expected) != names(replayed) {
        return Some("it gives other losses".to_owned());
    }
    for ((name, a), (_, b)) in expected.iter().zip(replayed) {
        let (a, b) = (values(a), values(b));
        if let Some((a, b)) = a.iter().zip(&b).find(|(a, b)| !alike(**a, **b)) {
            return Some(format!("its loss `{name}` is {b:.6}, that of the pass is {a:.6}"));
        }
    }
    None
}

fn alike(a: f64, b: f64) -> bool {
    (!a.is_finite() && !b.is_finite()) || (a - b).abs() <= TOLERANCE * a.abs() + 1e-6
}

/// The first gradient that is another one.
fn differing_gradient(names: &[&str], expected: &[Tensor], replayed: &[&Tensor]) -> Option<String> {
    if expected.is_empty() {
        return None;
    }
    let norms: Vec<Tensor> = expected.iter().map(Tensor::norm).collect();
    let differences: Vec<Tensor> = expected.iter().zip(replayed).map(|(a, b)| (a - *b).norm()).collect();
    let (norms, differences) = (values(&Tensor::stack(&norms, 0)), values(&Tensor::stack(&differences, 0)));
    let largest = norms.iter().copied().filter(|norm| norm.is_finite()).fold(0.0, f64::max);
    let is_other = |norm: f64, difference: f64| {
        // an overflow of fp16 is found by the optimizer
        norm.is_finite() && (difference.is_nan() || difference > TOLERANCE * norm.max(NOTHING * largest))
    };
    let found = norms.iter().zip(&differences).position(|(norm, difference)| is_other(*norm, *difference));
    found.map(|index| {
        let (name, difference, norm) = (names[index], differences[index], norms[index]);
        format!("the gradient of `{name}` is {difference:.3e} off that of the pass, whose norm is {norm:.3e}")
    })
}

/// The elements of a tensor of few; none of a meta tensor.
fn values(tensor: &Tensor) -> Vec<f64> {
    let wide = tensor.to_kind(Kind::Double);
    if wide.device() == META {
        return Vec::new();
    }
    let flat = wide.to_device(Device::Cpu).reshape([-1]);
    Vec::<f64>::try_from(&flat).expect("a flat fp64 tensor")
}
