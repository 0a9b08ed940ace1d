//! Compares a new graph with its eager pass: same inputs, same random numbers, same losses and gradients.
//!
//! A graph may not repeat the eager pass: a kernel argument that came from the host is frozen in the graph. Every graph
//! is therefore replayed once before its results are used.

use super::backend::{CapturedGraph, GraphWork, Numbers};
use prsmed_base::Result;
use prsmed_tensor::{Device, Kind, META, Tensor, graph, ledger, no_grad, rng};

/// Largest relative difference of losses, and of each gradient: only the order of additions may differ, in bf16 too.
/// Other random numbers make far larger differences.
const TOLERANCE: f64 = 0.02;
/// Gradients below this part of the largest cannot be distinguished from rounding.
const NEGLIGIBLE: f64 = 1e-3;

/// Runs `work`, then replays it, both from zeroed gradients and the same state of `device`'s random generators. Then
/// adds one pass to `gradients` (by parameter): the replay or, where it differed, the eager pass. Needs two more copies
/// of them. Returns the losses of that pass, and the first difference.
///
/// # Errors
/// Those of `work` and of the device.
pub(super) fn first_replay(
    graph: &mut dyn CapturedGraph,
    work: &GraphWork,
    gradients: &[(&str, &Tensor)],
    device: Device,
) -> Result<(Numbers, Option<String>)> {
    let (names, gradients): (Vec<&str>, Vec<&Tensor>) = gradients.iter().copied().unzip();
    let gradients = gradients.as_slice();
    let state = rng::RngState::take(device)?;
    let before = copies(gradients);
    graph::zero(gradients)?;
    let expected = work()?;
    let by_pass = copies(gradients);
    graph::zero(gradients)?;
    state.restore()?;
    let numbers = graph.replay(work)?;
    let difference =
        differing(&expected, &numbers).or_else(|| no_grad(|| differing_gradient(&names, &by_pass, gradients)));
    let added: Vec<&Tensor> = if difference.is_some() { by_pass.iter().collect() } else { gradients.to_vec() };
    no_grad(|| {
        for ((gradient, before), added) in gradients.iter().zip(&before).zip(added) {
            let _ = before.shallow_clone().g_add_(added);
            gradient.shallow_clone().copy_(before);
        }
    });
    Ok((if difference.is_some() { expected } else { numbers }, difference))
}

fn copies(gradients: &[&Tensor]) -> Vec<Tensor> {
    let _category = ledger::enter(ledger::Category::Gradients);
    no_grad(|| gradients.iter().map(|gradient| gradient.copy()).collect())
}

/// The first loss that differs.
fn differing(expected: &[(&'static str, Tensor)], replayed: &[(&'static str, Tensor)]) -> Option<String> {
    let names = |numbers: &[(&'static str, Tensor)]| numbers.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    if names(expected) != names(replayed) {
        return Some("it has other losses".to_owned());
    }
    for ((name, a), (_, b)) in expected.iter().zip(replayed) {
        let (a, b) = (values(a), values(b));
        if let Some((a, b)) = a.iter().zip(&b).find(|(a, b)| !alike(**a, **b)) {
            return Some(format!("its loss `{name}` is {b:.6}, that of the eager pass is {a:.6}"));
        }
    }
    None
}

fn alike(a: f64, b: f64) -> bool {
    (!a.is_finite() && !b.is_finite()) || (a - b).abs() <= TOLERANCE * a.abs() + 1e-6
}

/// The first gradient that differs.
fn differing_gradient(names: &[&str], expected: &[Tensor], replayed: &[&Tensor]) -> Option<String> {
    if expected.is_empty() {
        return None;
    }
    let norms: Vec<Tensor> = expected.iter().map(Tensor::norm).collect();
    let differences: Vec<Tensor> = expected.iter().zip(replayed).map(|(a, b)| (a - *b).norm()).collect();
    let (norms, differences) = (values(&Tensor::stack(&norms, 0)), values(&Tensor::stack(&differences, 0)));
    let largest = norms.iter().copied().filter(|norm| norm.is_finite()).fold(0.0, f64::max);
    let is_other = |norm: f64, difference: f64| {
        // the optimizer handles an fp16 overflow
        norm.is_finite() && (difference.is_nan() || difference > TOLERANCE * norm.max(NEGLIGIBLE * largest))
    };
    let found = norms.iter().zip(&differences).position(|(norm, difference)| is_other(*norm, *difference));
    found.map(|index| {
        let (name, difference, norm) = (names[index], differences[index], norms[index]);
        format!(
            "the gradient of `{name}` differs by {difference:.3e} from that of the eager pass, whose norm is {norm:.3e}"
        )
    })
}

/// The elements of a small tensor; none of a meta tensor.
fn values(tensor: &Tensor) -> Vec<f64> {
    let wide = tensor.to_kind(Kind::Double);
    if wide.device() == META {
        return Vec::new();
    }
    let flat = wide.to_device(Device::Cpu).reshape([-1]);
    Vec::<f64>::try_from(&flat).expect("a flat fp64 tensor")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_alike_up_to_rounding_or_if_both_are_not_finite() {
        assert!(alike(f64::NAN, f64::INFINITY) && alike(f64::NEG_INFINITY, f64::NAN));
        assert!(!alike(1.0, f64::INFINITY) && !alike(f64::NAN, 1.0));
        assert!(alike(2.0, 2.0 + 1e-9) && !alike(2.0, 2.0 + 10.0 * TOLERANCE + 1e-5));
    }
}
