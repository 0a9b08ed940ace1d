//! Elementwise arithmetic (also in place), casts and copies.

use super::*;
use prsmed::tensor::adamw::{self, Maps, Moments, Rate, Slot, Step};

/// One operand, in each dtype and layout, with and without autograd.
fn unary(op: &'static str, what: &str, f: fn(&Tensor) -> Tensor) -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, layout) in FLOATS.into_iter().flat_map(|kind| LAYOUTS.map(|layout| (kind, layout))) {
        cases.extend(passes(op, &format!("{what} {kind:?} {layout:?}"), move |on| {
            let (xs, xs_leaf) = laid(layout, kind, on);
            (vec![xs_leaf], move || f(&xs))
        }));
    }
    cases
}

/// Without autograd, as image generation runs it.
fn without_graph(op: &'static str, f: fn(&Tensor) -> Tensor) -> Vec<Case> {
    let each = FLOATS.into_iter().flat_map(|kind| LAYOUTS.map(|layout| (kind, layout)));
    each.map(|(kind, layout)| {
        case(op, format!("{kind:?} {layout:?}"), move |on| {
            let (xs, _) = laid(layout, kind, on);
            plain(move || f(&xs))
        })
    })
    .collect()
}

fn functions() -> Vec<Case> {
    let groups = [
        unary("aten::abs", "", Tensor::abs),
        unary("aten::abs", "in place", |xs| (xs * 2.0).abs_()),
        without_graph("aten::clamp", |xs| xs.clamp(0.0, 255.0)),
        without_graph("aten::round", Tensor::round),
        without_graph("aten::cumprod", |xs| xs.cumprod(-1, xs.kind())),
        unary("aten::cos", "", Tensor::cos),
        unary("aten::sin", "", Tensor::sin),
        unary("aten::exp", "", Tensor::exp),
        unary("aten::neg", "", Tensor::neg),
        unary("aten::reciprocal", "", Tensor::reciprocal),
        unary("aten::rsqrt", "", Tensor::rsqrt),
        unary("aten::sigmoid", "", Tensor::sigmoid),
        unary("aten::silu", "", Tensor::silu),
        unary("aten::gelu", "", |xs| xs.gelu("none")),
        unary("aten::relu", "", Tensor::relu),
        unary("aten::log_sigmoid_forward", "", Tensor::log_sigmoid),
        unary("aten::pow", "square", Tensor::square),
        unary("aten::dropout", "", |xs| xs.dropout(0.1, true)),
        // autograd adds up a gradient that has two sources
        unary("aten::add", "of two gradients", |xs| xs.silu() + xs.sigmoid()),
        unary("aten::add", "of three gradients", |xs| xs.silu() + xs.sigmoid() * xs),
    ];
    groups.into_iter().flatten().collect()
}

/// Dtypes of two operands.
const PAIRS: [(Kind, Kind); 5] = [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP32, BF16), (FP16, FP32)];
/// Shapes of the other operand: equal, rows, columns, one number.
const OTHERS: [&[i64]; 4] = [&[12, 40, 64], &[64], &[40, 1], &[]];

fn binary(op: &'static str, f: fn(&Tensor, &Tensor) -> Tensor) -> Vec<Case> {
    let mut cases = Vec::new();
    for (left, right) in PAIRS {
        for (size, layout) in OTHERS.into_iter().flat_map(|size| LAYOUTS.map(|layout| (size, layout))) {
            let what = format!("{left:?} {layout:?} by {right:?} {size:?}");
            cases.extend(passes(op, &what, move |on| {
                let (xs, xs_leaf) = laid(layout, left, on);
                let ys = leaf(size, right, on);
                (vec![xs_leaf, ys.shallow_clone()], move || f(&xs, &ys))
            }));
        }
    }
    cases
}

fn in_place(op: &'static str, f: fn(&mut Tensor, &Tensor) -> Tensor) -> Vec<Case> {
    let mut cases = Vec::new();
    for (left, right) in PAIRS {
        for size in OTHERS {
            cases.push(case(op, format!("{left:?} by {right:?} {size:?}"), move |on| {
                let (xs, ys) = (zeros(&[12, 40, 64], left, on), zeros(size, right, on));
                plain(move || f(&mut xs.shallow_clone(), &ys))
            }));
        }
    }
    cases
}

/// Two steps of two parameters, with fp32 or 8-bit optimizer state.
fn adamw_steps(eight: bool, on: Device) -> Work {
    let params = [0; 2].map(|_| zeros(&[300, 41], FP32, on));
    let grads = [0; 2].map(|_| zeros(&[300, 41], FP32, on));
    let steps = [0; 2].map(|_| zeros(&[], FP32, on));
    let moments = params.each_ref().map(|param| Moments::zeros(param, eight, false));
    let maps = Maps::new(on);
    Box::new(move || {
        let norm = adamw::norm(&grads, 0.5).unwrap();
        let verdict = adamw::clip_scale(&norm, 1.0).unwrap();
        adamw::scale_gradients(&grads, &verdict).unwrap();
        let skip = verdict.select(0, 1);
        let (rate, maps) = (Rate::Number(1e-3), Some(&maps));
        let step =
            Step { rate, betas: (0.9, 0.95), weight_decay: 0.1, epsilon: 1e-6, found_inf: &skip, maps, chunk: 0 };
        let slot = |i: usize| Slot { param: &params[i], grad: &grads[i], moments: &moments[i], step: &steps[i] };
        adamw::step(&[slot(0), slot(1)], step).unwrap();
        vec![norm]
    })
}

fn arithmetic() -> Vec<Case> {
    let mut cases = vec![
        case("aten::lerp_", "towards weights", |on| {
            let (xs, ys) = (zeros(&[300, 40], FP32, on), leaf(&[300, 40], FP32, on));
            plain(move || xs.shallow_clone().lerp_(&ys.detach(), 0.5))
        }),
        case("aten::_fused_adamw_", "two parameters", |on| adamw_steps(false, on)),
        case("prsmed::adamw8", "two parameters", |on| adamw_steps(true, on)),
        case("aten::add", "of whole numbers", |on| {
            let (xs, ys) = (zeros(&[300], Kind::Int64, on), zeros(&[1], Kind::Int64, on));
            plain(move || &xs + &ys)
        }),
    ];
    let groups = [
        binary("aten::add", |xs, ys| xs + ys),
        binary("aten::sub", |xs, ys| xs - ys),
        binary("aten::mul", |xs, ys| xs * ys),
        binary("aten::div", |xs, ys| xs / ys),
        unary("aten::add", "a number", |xs| xs + 1.0),
        unary("aten::sub", "a number", |xs| xs - 1.0),
        unary("aten::mul", "by a number", |xs| xs * 3.0),
        unary("aten::div", "by a number", |xs| xs / 3.0),
        unary("aten::pow", "of a number", |xs| Tensor::full([1], 10.0, (xs.kind(), xs.device())).pow(xs)),
        in_place("aten::add_", Tensor::g_add_),
        in_place("aten::mul_", Tensor::g_mul_),
        in_place("aten::div_", Tensor::g_div_),
        in_place("aten::add_", |xs, _| xs.g_add_scalar_(1.0)),
        in_place("aten::sub_", |xs, _| xs.g_sub_scalar_(1.0)),
        in_place("aten::mul_", |xs, _| xs.g_mul_scalar_(0.5)),
        in_place("aten::div_", |xs, _| xs.g_div_scalar_(0.5)),
    ];
    cases.extend(groups.into_iter().flatten());
    cases
}

fn comparisons() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in [FP32, BF16, FP16, Kind::Int64] {
        let two = move |on: Device| (zeros(&[40, 64], kind, on), zeros(&[40, 1], kind, on));
        cases.push(case("aten::lt", format!("{kind:?}"), move |on| {
            let (xs, ys) = two(on);
            plain(move || xs.lt_tensor(&ys))
        }));
        cases.push(case("aten::eq", format!("{kind:?}"), move |on| {
            let (xs, ys) = two(on);
            plain(move || xs.eq_tensor(&ys))
        }));
    }
    for kind in FLOATS {
        cases.push(case("aten::isneginf", format!("{kind:?}"), move |on| {
            let xs = zeros(&[40, 64], kind, on);
            plain(move || xs.isneginf())
        }));
        for size in [&[40, 64][..], &[]] {
            cases.extend(passes("aten::where", &format!("{kind:?} or {size:?}"), move |on| {
                let (xs, ys) = (leaf(&[40, 64], kind, on), leaf(size, kind, on));
                let keep = zeros(&[40, 1], Kind::Bool, on);
                (vec![xs.shallow_clone(), ys.shallow_clone()], move || xs.where_self(&keep, &ys))
            }));
        }
    }
    cases.push(case("aten::logical_and", "masks", |on| {
        let (rows, causal) = (zeros(&[2, 1, 1, 64], Kind::Bool, on), zeros(&[64, 64], Kind::Bool, on));
        plain(move || rows.logical_and(&causal))
    }));
    for kind in FLOATS {
        cases.push(case("aten::triu_", format!("{kind:?}"), move |on| {
            let xs = zeros(&[2, 1, 64, 64], kind, on);
            plain(move || xs.shallow_clone().triu_(1))
        }));
        cases.push(case("aten::masked_fill_", format!("{kind:?}"), move |on| {
            let (xs, hidden) = (zeros(&[2, 1, 64, 64], kind, on), zeros(&[2, 64, 64], Kind::Bool, on));
            plain(move || xs.shallow_clone().masked_fill_(&hidden.unsqueeze(1), f64::NEG_INFINITY))
        }));
    }
    cases.push(case("aten::ne", "blocks of tokens", |on| {
        let (keys, queries) = (zeros(&[2, 1, 64], Kind::Int64, on), zeros(&[2, 64, 1], Kind::Int64, on));
        plain(move || keys.ne_tensor(&queries))
    }));
    cases.push(case("aten::ne", "a number", |on| {
        let xs = zeros(&[2, 1, 64], Kind::Int64, on);
        plain(move || xs.ne(0))
    }));
    cases.push(case("aten::logical_and", "of blocks", |on| {
        let (keys, both) = (zeros(&[2, 1, 64], Kind::Bool, on), zeros(&[2, 64, 64], Kind::Bool, on));
        plain(move || keys.logical_and(&both))
    }));
    cases.push(case("aten::tril", "of bools", |on| {
        let xs = zeros(&[64, 64], Kind::Bool, on);
        plain(move || xs.tril(0))
    }));
    cases
}

fn copies() -> Vec<Case> {
    let mut cases = Vec::new();
    for (from, to) in [(FP32, BF16), (FP32, FP16), (BF16, FP32), (FP16, FP32)] {
        for layout in LAYOUTS {
            cases.extend(passes("aten::_to_copy", &format!("{from:?} {layout:?} to {to:?}"), move |on| {
                let (xs, xs_leaf) = laid(layout, from, on);
                (vec![xs_leaf], move || xs.to_kind(to))
            }));
            cases.push(case("aten::copy_", format!("{from:?} {layout:?} to {to:?}"), move |on| {
                let (xs, ys) = (laid(layout, from, on).0, zeros(&[12, 40, 64], to, on));
                plain(move || {
                    ys.shallow_clone().copy_(&xs);
                    ys.shallow_clone()
                })
            }));
        }
    }
    for (name, from) in [("bytes", Kind::Uint8), ("whole numbers", Kind::Int64)] {
        cases.push(case("aten::_to_copy", format!("{name} to numbers"), move |on| {
            let xs = zeros(&[2, 3, 33, 33], from, on);
            plain(move || xs.to_kind(FP32))
        }));
    }
    for (kind, layout) in FLOATS.into_iter().flat_map(|kind| LAYOUTS.map(|layout| (kind, layout))) {
        // the second micro-batch adds to the gradient of the first
        cases.push(case("aten::add_", format!("gradients of two micro-batches {kind:?} {layout:?}"), move |on| {
            let (xs, xs_leaf) = laid(layout, kind, on);
            let w = leaf(&[64], FP32, on);
            Box::new(move || {
                for _ in 0..2 {
                    (&xs * w.to_kind(kind)).sum(kind).backward();
                }
                vec![xs_leaf.grad(), w.grad()]
            })
        }));
    }
    cases
}

pub(super) fn cases() -> Vec<Case> {
    [functions(), arithmetic(), comparisons(), copies()].into_iter().flatten().collect()
}
