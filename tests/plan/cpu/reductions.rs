//! Sums, softmax, losses, and measurements of optimizers.

use super::*;
use prsmed::tensor::Reduction;
use prsmed::tensor::autograd::linear_cross_entropy;

fn of_layouts(op: &'static str, what: &str, f: fn(&Tensor) -> Tensor) -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, layout) in FLOATS.into_iter().flat_map(|kind| LAYOUTS.map(|layout| (kind, layout))) {
        cases.extend(passes(op, &format!("{what} {kind:?} {layout:?}"), move |on| {
            let (xs, xs_leaf) = laid(layout, kind, on);
            (vec![xs_leaf], move || f(&xs))
        }));
    }
    cases
}

fn sums() -> Vec<Case> {
    let groups = [
        of_layouts("aten::sum", "all", |xs| xs.sum(xs.kind())),
        of_layouts("aten::sum", "all in fp32", |xs| xs.sum(FP32)),
        of_layouts("aten::sum", "rows", |xs| xs.sum_dim_intlist([-1].as_slice(), true, xs.kind())),
        of_layouts("aten::sum", "columns in fp32", |xs| xs.sum_dim_intlist([0, 1].as_slice(), false, FP32)),
        of_layouts("aten::mean", "rows", |xs| xs.mean_dim([-1].as_slice(), true, xs.kind())),
        of_layouts("aten::mean", "columns", |xs| xs.mean_dim([0, 1].as_slice(), false, xs.kind())),
        of_layouts("aten::mean", "all", |xs| xs.mean(xs.kind())),
        of_layouts("aten::_softmax", "last", |xs| xs.softmax(-1, xs.kind())),
        of_layouts("aten::_softmax", "first", |xs| xs.softmax(0, xs.kind())),
        of_layouts("aten::_log_softmax", "last", |xs| xs.log_softmax(-1, xs.kind())),
        of_layouts("aten::cumsum", "first", |xs| xs.cumsum(0, xs.kind())),
        of_layouts("aten::cumsum", "last in fp32", |xs| xs.cumsum(-1, FP32)),
    ];
    groups.into_iter().flatten().collect()
}

fn choices() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, layout) in FLOATS.into_iter().flat_map(|kind| LAYOUTS.map(|layout| (kind, layout))) {
        let what = format!("{kind:?} {layout:?}");
        cases.push(case("aten::norm", &*what, move |on| {
            let (xs, _) = laid(layout, kind, on);
            plain(move || xs.norm())
        }));
        cases.push(case("aten::argmax", what, move |on| {
            let (xs, _) = laid(layout, kind, on);
            plain(move || xs.argmax(-1, false))
        }));
    }
    cases.push(case("aten::all", "along the last", |on| {
        let xs = zeros(&[12, 40, 64], Kind::Bool, on);
        plain(move || xs.all_dim(-1, true))
    }));
    cases.push(case("aten::sum", "of bools", |on| {
        let xs = zeros(&[12, 40, 64], Kind::Bool, on);
        plain(move || xs.sum(Kind::Double))
    }));
    cases
}

/// Operators of the chunked cross-entropy loss.
const CHUNKED: [&str; 6] = ["aten::amax", "aten::clamp_min", "aten::exp_", "aten::gather", "aten::ge", "aten::log"];

fn losses() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, wide) in [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP32)] {
        for [rows, classes] in [[1, 6], [70, 1024]] {
            let what = format!("cross entropy {rows} x {classes} {kind:?} in {wide:?}");
            cases.extend(passes("aten::nll_loss_forward", &what, move |on| {
                let (xs, labels) = (leaf(&[rows, classes], kind, on), zeros(&[rows], Kind::Int64, on));
                (vec![xs.shallow_clone()], move || {
                    xs.to_kind(wide).cross_entropy_loss(&labels, None::<&Tensor>, Reduction::Sum, -100, 0.0)
                })
            }));
        }
    }
    // chunked outputs of a linear layer, with a trained and with a frozen weight
    let kinds = [(FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32), (FP16, FP32)];
    for (op, (kind, weight_kind)) in CHUNKED.into_iter().flat_map(|op| kinds.map(|kinds| (op, kinds))) {
        for (chunk, is_trained) in [(3, true), (3, false), (100, true), (100, false)] {
            let what = format!("linear cross entropy {kind:?} {weight_kind:?} by {chunk}, trained head: {is_trained}");
            cases.extend(passes(op, &what, move |on| {
                let (xs, labels) = (leaf(&[70, 64], kind, on), zeros(&[70], Kind::Int64, on));
                let weight = zeros(&[1024, 64], weight_kind, on).set_requires_grad(is_trained);
                let leaves = if is_trained {
                    vec![xs.shallow_clone(), weight.shallow_clone()]
                } else {
                    vec![xs.shallow_clone()]
                };
                (leaves, move || linear_cross_entropy(&xs, &weight, &labels, chunk))
            }));
        }
    }
    cases.push(case("aten::scatter_add_", "one number of each row", |on| {
        let (xs, known) = (zeros(&[70, 1024], FP32, on), zeros(&[70, 1], Kind::Int64, on));
        let more = zeros(&[70, 1], FP32, on);
        plain(move || xs.shallow_clone().scatter_add_(1, &known, &more))
    }));
    for reduction in [Reduction::None, Reduction::Mean] {
        cases.extend(passes("aten::binary_cross_entropy_with_logits", &format!("{reduction:?}"), move |on| {
            let (xs, truth) = (leaf(&[3, 1, 64, 64], FP32, on), zeros(&[3, 1, 64, 64], FP32, on));
            (vec![xs.shallow_clone()], move || {
                xs.binary_cross_entropy_with_logits(&truth, None::<&Tensor>, None::<&Tensor>, reduction)
            })
        }));
    }
    cases
}

pub(super) fn cases() -> Vec<Case> {
    [sums(), choices(), losses()].into_iter().flatten().collect()
}
