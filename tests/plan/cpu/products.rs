//! Matrix products, attention and embedding look-ups.

use super::super::operands::heads;
use super::*;
use prsmed::nn::attention::{Mask, attention};
use prsmed::tensor::Shared;
use prsmed::tensor::autograd::{checkpoint, gelu_linear};

/// One or more matrices `[.., rows, columns]`; stored transposed if `transposed`.
fn matrix(size: &[i64], transposed: bool, kind: Kind, on: Device) -> (Tensor, Tensor) {
    if !transposed {
        let xs = leaf(size, kind, on);
        return (xs.shallow_clone(), xs);
    }
    let mut size = size.to_vec();
    let last = size.len() - 1;
    size.swap(last - 1, last);
    let xs = leaf(&size, kind, on);
    (xs.transpose(-1, -2), xs)
}

fn plain_products() -> Vec<Case> {
    let mut cases = Vec::new();
    // the last sizes are large enough that oneDNN allocates scratch memory
    for [m, k, n] in [[1, 64, 80], [65, 96, 80], [200, 300, 256]] {
        for kind in FLOATS {
            for (a_turned, b_turned) in [(false, false), (false, true), (true, false)] {
                let what = format!("{m} x {k} x {n} {kind:?}, transposed {a_turned} {b_turned}");
                cases.extend(passes("aten::mm", &what, move |on| {
                    let (a, a_leaf) = matrix(&[m, k], a_turned, kind, on);
                    let (b, b_leaf) = matrix(&[k, n], b_turned, kind, on);
                    (vec![a_leaf, b_leaf], move || a.mm(&b))
                }));
                cases.extend(passes("aten::bmm", &what, move |on| {
                    let (a, a_leaf) = matrix(&[3, m, k], a_turned, kind, on);
                    let (b, b_leaf) = matrix(&[3, k, n], b_turned, kind, on);
                    (vec![a_leaf, b_leaf], move || a.bmm(&b))
                }));
            }
        }
    }
    cases
}

fn linear_maps() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in FLOATS {
        for rows in [&[1_i64, 96][..], &[50, 96], &[2, 150, 96], &[2, 7, 7, 96]] {
            let prepare = move |on| (leaf(rows, kind, on), leaf(&[160, 96], kind, on), leaf(&[160], kind, on));
            let what = format!("of {rows:?} {kind:?}");
            cases.extend(passes("aten::addmm", &what, move |on| {
                let (xs, w, b) = prepare(on);
                let leaves = vec![xs.shallow_clone(), w.shallow_clone(), b.shallow_clone()];
                (leaves, move || xs.linear(&w, Some(&b)))
            }));
            cases.extend(passes("aten::mm", &format!("linear {what}"), move |on| {
                let (xs, w, _) = prepare(on);
                (vec![xs.shallow_clone(), w.shallow_clone()], move || xs.linear(&w, None::<&Tensor>))
            }));
            cases.extend(passes("aten::gelu", &format!("before a linear map {what}"), move |on| {
                let (xs, w, b) = prepare(on);
                let leaves = vec![xs.shallow_clone(), w.shallow_clone(), b.shallow_clone()];
                (leaves, move || gelu_linear(&xs, &w, &b))
            }));
        }
        // transposed rows, and a bias that is a slice of a longer tensor
        cases.extend(passes("aten::mm", &format!("linear of transposed rows {kind:?}"), move |on| {
            let (xs, w, b) = (leaf(&[2, 96, 50], kind, on), leaf(&[480, 96], kind, on), leaf(&[480], kind, on));
            let leaves = vec![xs.shallow_clone(), w.shallow_clone(), b.shallow_clone()];
            let part = |whole: &Tensor| whole.narrow(0, 160, 160);
            (leaves, move || xs.transpose(1, 2).linear(&part(&w), Some(&part(&b))))
        }));
        cases.push(case("aten::mm", format!("run again in the backward pass {kind:?}"), move |on| {
            let (xs, w) = (leaf(&[2, 50, 96], kind, on), leaf(&[96, 96], kind, on));
            let leaves = [xs.shallow_clone(), w.shallow_clone()];
            Box::new(move || {
                let w = Shared::new(w.shallow_clone());
                checkpoint(&[&xs], move |i| i[0].linear(&w, None::<&Tensor>).silu()).sum(kind).backward();
                leaves.each_ref().map(Tensor::grad).into()
            })
        }));
    }
    cases
}

/// Sizes of queries (batch, heads, tokens, width) and number of key heads.
const QUERIES: [([i64; 4], i64); 4] =
    [([2, 4, 49, 16], 4), ([1, 4, 200, 32], 2), ([1, 1, 800, 32], 1), ([3, 2, 1, 32], 1)];

fn fused_attention() -> Vec<Case> {
    const FLASH: &str = "aten::_scaled_dot_product_flash_attention_for_cpu";
    let mut cases = Vec::new();
    for kind in FLOATS {
        for (size, groups) in QUERIES {
            let [b, h, t, d] = size;
            let prepare = move |on| {
                let ((q, ql), (k, kl), (v, vl)) =
                    (heads(size, kind, on), heads([b, groups, t, d], kind, on), heads([b, groups, t, d], kind, on));
                (vec![ql, kl, vl], [q, k, v])
            };
            let what = format!("{size:?} {groups} {kind:?}");
            for causal in [false, true] {
                cases.extend(passes(FLASH, &format!("{what}, causal {causal}"), move |on| {
                    let (leaves, [q, k, v]) = prepare(on);
                    let mask = move || if causal { Mask::Causal } else { Mask::None };
                    (leaves, move || attention(&q, &k, &v, &mask(), 0.0))
                }));
            }
            cases.extend(passes(FLASH, &format!("{what}, keep"), move |on| {
                let (leaves, [q, k, v]) = prepare(on);
                let keep = Tensor::ones([b, 1, t, t], (Kind::Bool, on));
                (leaves, move || attention(&q, &k, &v, &Mask::Keep(&keep), 0.0))
            }));
            cases.extend(passes(FLASH, &format!("{what}, fixed bias"), move |on| {
                let (leaves, [q, k, v]) = prepare(on);
                let bias = zeros(&[1, h, t, t], kind, on);
                (leaves, move || attention(&q, &k, &v, &Mask::Bias(&bias), 0.0))
            }));
        }
    }
    cases
}

/// With a trained bias or dropout, libtorch composes attention of several kernels.
fn composed_attention() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in FLOATS {
        for (size, groups) in QUERIES {
            let [b, h, t, d] = size;
            let prepare = move |on| {
                let (q, ql) = heads(size, kind, on);
                let (k, kl) = heads([b, groups, t, d], kind, on);
                (vec![ql, kl], [q, k])
            };
            let what = format!("in attention {size:?} {groups} {kind:?}");
            cases.push(case("aten::_safe_softmax", format!("{what}, trained bias"), move |on| {
                let (mut leaves, [q, k]) = prepare(on);
                let bias = leaf(&[1, h, t, t], kind, on);
                leaves.push(bias.shallow_clone());
                trained(leaves, move || attention(&q, &k, &k, &Mask::Bias(&bias), 0.0))
            }));
            cases.extend(passes("aten::_safe_softmax", &format!("{what}, dropout"), move |on| {
                let (leaves, [q, k]) = prepare(on);
                (leaves, move || attention(&q, &k, &k, &Mask::None, 0.1))
            }));
            cases.extend(passes(
                "aten::scaled_dot_product_attention",
                &format!("{what}, dropout, causal"),
                move |on| {
                    let (leaves, [q, k]) = prepare(on);
                    (leaves, move || attention(&q, &k, &k, &Mask::Causal, 0.1))
                },
            ));
        }
    }
    cases
}

fn look_ups() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in FLOATS {
        for dim in [0, 1] {
            cases.extend(passes("aten::index_select", &format!("along {dim} {kind:?}"), move |on| {
                let xs = leaf(&[60, 300], kind, on);
                let ids: Vec<i64> = (0..50).collect();
                // ids are copied from the CPU
                let f = {
                    let xs = xs.shallow_clone();
                    move || xs.index_select(dim, &Tensor::from_slice(&ids).to_device(on))
                };
                (vec![xs], f)
            }));
        }
        cases.push(case("aten::index_add_", format!("{kind:?}"), move |on| {
            let (xs, ys) = (zeros(&[60, 300], kind, on), zeros(&[50, 300], kind, on));
            let rows = zeros(&[50], Kind::Int64, on);
            plain(move || xs.shallow_clone().index_add_(0, &rows, &ys))
        }));
        cases.extend(passes("aten::index_select", &format!("of an embedding {kind:?}"), move |on| {
            let (table, ids) = (leaf(&[1000, 64], kind, on), zeros(&[70], Kind::Int64, on));
            (vec![table.shallow_clone()], move || Tensor::embedding(&table, &ids, -1, false, false))
        }));
    }
    cases
}

pub(super) fn cases() -> Vec<Case> {
    [plain_products(), linear_maps(), fused_attention(), composed_attention(), look_ups()]
        .into_iter()
        .flatten()
        .collect()
}
