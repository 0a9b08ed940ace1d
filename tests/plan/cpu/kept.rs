//! Custom autograd functions, which keep less memory for the backward pass.

use super::*;
use prsmed::tensor::functions::{LowRank, Segments, packed_bias, rms_norm, rotate, swiglu};

fn norms() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, layout) in FLOATS.into_iter().flat_map(|kind| LAYOUTS.map(|layout| (kind, layout))) {
        let what = format!("{kind:?} {layout:?}");
        cases.extend(passes("prsmed::rms_norm", &what, move |on| {
            let ((xs, xs_leaf), weight) = (laid(layout, kind, on), leaf(&[64], FP32, on));
            (vec![xs_leaf, weight.shallow_clone()], move || rms_norm(&xs, &weight, 1e-5))
        }));
        cases.extend(passes("prsmed::rms_norm", &format!("frozen weight {what}"), move |on| {
            let ((xs, xs_leaf), weight) = (laid(layout, kind, on), zeros(&[64], kind, on));
            (vec![xs_leaf], move || rms_norm(&xs, &weight, 1e-5))
        }));
        cases.push(case("prsmed::rms_norm", format!("frozen input {what}"), move |on| {
            let ((xs, _), weight) = (laid(layout, kind, on), leaf(&[64], FP32, on));
            let xs = xs.detach();
            trained(vec![weight.shallow_clone()], move || rms_norm(&xs, &weight, 1e-5))
        }));
    }
    cases
}

fn gates() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in FLOATS {
        let pair = move |on| [0; 2].map(|_| leaf(&[12, 40, 64], kind, on));
        cases.push(case("aten::silu_", format!("{kind:?}"), move |on| {
            let [gate, up] = pair(on);
            plain(move || swiglu(&gate * 2.0, &up))
        }));
        for both in [true, false] {
            cases.push(case("aten::silu_backward", format!("of a gate {kind:?}, both {both}"), move |on| {
                let [gate, up] = pair(on);
                let leaves =
                    if both { vec![gate.shallow_clone(), up.shallow_clone()] } else { vec![gate.shallow_clone()] };
                let up = if both { up } else { up.detach() };
                trained(leaves, move || swiglu(&gate * 2.0, &up))
            }));
        }
    }
    cases
}

/// The low-rank product of `rows` rows and rank `rank`, with gradients of all leaves or only of the factors.
fn low_rank(
    kind: Kind,
    (rows, rank): (&'static [i64], i64),
    dropout: f64,
    whole: bool,
    on: Device,
) -> (Vec<Tensor>, Work) {
    let (xs, a, b) = (leaf(rows, kind, on), leaf(&[rank, 96], FP32, on), leaf(&[160, rank], FP32, on));
    let mut leaves = vec![a.shallow_clone(), b.shallow_clone()];
    let mut size = rows.to_vec();
    size[rows.len() - 1] = 160;
    let xs = if whole { xs } else { xs.detach() };
    if whole {
        leaves.push(xs.shallow_clone());
    }
    let work = move || {
        let product = LowRank { a: &a, b: &b, scale: 0.5, dropout };
        vec![product.add_to(zeros(&size, kind, on), &xs)]
    };
    (leaves, Box::new(work))
}

fn low_rank_products() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in FLOATS {
        for shape in [(&[1_i64, 1, 96][..], 4), (&[2, 150, 96], 16), (&[1, 625, 96], 2)] {
            for dropout in [0.0, 0.1] {
                let what = format!("{shape:?} {kind:?}, dropout {dropout}");
                let op = if dropout > 0.0 { "prsmed::drop" } else { "aten::addmm_" };
                cases.push(case(op, what.clone(), move |on| {
                    let (_, mut work) = low_rank(kind, shape, dropout, true, on);
                    Box::new(move || no_grad(&mut work))
                }));
                for whole in [true, false] {
                    let op = if dropout > 0.0 && whole { "prsmed::drop_" } else { op };
                    cases.push(case(op, format!("{what}, trained, input {whole}"), move |on| {
                        let (leaves, mut work) = low_rank(kind, shape, dropout, whole, on);
                        Box::new(move || {
                            let mut kept = work();
                            kept.extend(Tensor::run_backward(&[&kept[0]], &leaves, false, false));
                            kept
                        })
                    }));
                }
            }
        }
    }
    cases
}

/// Three adapters that share their input, with gradients of all leaves or only of the factors.
fn shared_low_rank_products() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, dropout, whole) in
        FLOATS.into_iter().flat_map(|kind| [(kind, 0.0, true), (kind, 0.0, false), (kind, 0.1, true)])
    {
        let op = if dropout > 0.0 { "prsmed::drop_" } else { "aten::cat" };
        let what = format!("three, {kind:?}, dropout {dropout}, input {whole}");
        cases.push(case(op, what, move |on| {
            let xs = leaf(&[2, 150, 96], kind, on);
            let xs = if whole { xs } else { xs.detach() };
            let a = [0; 3].map(|_| leaf(&[16, 96], FP32, on));
            let b = [160, 40, 40].map(|out| leaf(&[out, 16], FP32, on));
            let mut leaves: Vec<Tensor> = a.iter().chain(&b).map(Tensor::shallow_clone).collect();
            if whole {
                leaves.push(xs.shallow_clone());
            }
            Box::new(move || {
                let adapters = [0, 1, 2].map(|i| LowRank { a: &a[i], b: &b[i], scale: 0.5, dropout });
                let ys = [160, 40, 40].map(|out| zeros(&[2, 150, out], kind, on));
                let sums = LowRank::add_each_to(adapters, ys, &xs);
                let mut kept = Tensor::run_backward(&sums, &leaves, false, false);
                kept.extend(sums);
                kept
            })
        }));
    }
    cases
}

/// A prefix of 30 tokens, questions of 20 and 7, and padding, without a mask.
fn segments() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in FLOATS {
        cases.extend(passes(
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            &format!("of segments, {kind:?}"),
            move |on| {
                let [q, k, v] = [6, 2, 2].map(|heads| leaf(&[1, 60, heads * 16], kind, on));
                let keys = || zeros(&[125], Kind::Int64, on);
                let segments = Segments {
                    from: keys(),
                    to: keys(),
                    starts: [0; 2].map(|_| zeros(&[5], Kind::Int, on)),
                    lengths: vec![[30, 30], [20, 50], [7, 37], [3, 3]],
                };
                let leaves = [&q, &k, &v].map(Tensor::shallow_clone);
                (leaves.into(), move || segments.attend(&q, &k, &v, 16))
            },
        ));
    }
    cases
}

fn rotations() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in FLOATS {
        cases.extend(passes("prsmed::rotate_", &format!("{kind:?}"), move |on| {
            let xs = leaf(&[2, 30, 96], kind, on);
            let [cos, sin] = [0; 2].map(|_| zeros(&[30, 16], kind, on));
            (vec![xs.shallow_clone()], move || rotate(&xs * 2.0, &cos, &sin))
        }));
    }
    cases
}

fn biases() -> Vec<Case> {
    let of = |kind: Kind, size: [i64; 2]| {
        case("prsmed::packed_bias", format!("{kind:?} {size:?}"), move |on| {
            let blocks = zeros(&size, Kind::Int64, on);
            plain(move || packed_bias(&blocks, kind))
        })
    };
    FLOATS.into_iter().flat_map(|kind| [[1, 1], [2, 64], [3, 101]].map(|size| of(kind, size))).collect()
}

pub(super) fn cases() -> Vec<Case> {
    [norms(), gates(), low_rank_products(), shared_low_rank_products(), segments(), rotations(), biases()]
        .into_iter()
        .flatten()
        .collect()
}
