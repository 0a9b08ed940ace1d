//! New tensors, random numbers, and concatenation.

use super::*;

/// A case that creates a tensor.
fn made(op: &'static str, what: impl Into<String>, f: impl Fn(Device) -> Tensor + Copy + 'static) -> Case {
    case(op, what, move |on| plain(move || f(on)))
}

fn new_tensors() -> Vec<Case> {
    let mut cases = vec![
        made("aten::arange", "whole numbers", |on| Tensor::arange(300, (Kind::Int64, on))),
        made("aten::arange", "with steps", |on| Tensor::arange_start_step(0, 64, 2, (Kind::Int64, on))),
        made("aten::linspace", "fp32", |on| Tensor::linspace(0.0, 1.0, 300, (FP32, on))),
        made("aten::linspace", "on the host", |_| Tensor::linspace(0.0, 1.0, 300, (FP32, Device::Cpu))),
        made("aten::randn", "fp32", |on| Tensor::randn([1, 4, 16, 16], (FP32, on))),
        made("aten::ones", "bools", |on| Tensor::ones([64, 64], (Kind::Bool, on))),
        made("aten::zero_", "of none", |on| Tensor::zeros([0, 64], (FP32, on))),
    ];
    for kind in [FP32, BF16, FP16, Kind::Int64, Kind::Uint8, Kind::Bool] {
        let what = format!("{kind:?}");
        cases.push(made("aten::empty", &*what, move |on| Tensor::empty([30, 40], (kind, on))));
        cases.push(made("aten::zeros", &*what, move |on| Tensor::zeros([30, 40], (kind, on))));
        cases.push(made("aten::ones", &*what, move |on| Tensor::ones([30, 40], (kind, on))));
        cases.push(made("aten::full", &*what, move |on| Tensor::full([30, 40], 1, (kind, on))));
    }
    for (kind, layout) in FLOATS.into_iter().flat_map(|kind| LAYOUTS.map(|layout| (kind, layout))) {
        let what = format!("{kind:?} {layout:?}");
        cases.push(case("aten::zeros_like", &*what, move |on| {
            let (xs, _) = laid(layout, kind, on);
            plain(move || xs.zeros_like())
        }));
        cases.push(case("aten::ones_like", what, move |on| {
            let (xs, _) = laid(layout, kind, on);
            plain(move || xs.ones_like())
        }));
    }
    cases
}

type Fill = fn(&mut Tensor) -> Tensor;

fn fillings() -> Vec<Case> {
    let each: [(&str, Fill); 5] = [
        ("aten::fill_", |xs| xs.fill_(1.0)),
        ("aten::zero_", Tensor::zero_),
        ("aten::normal_", |xs| xs.normal_(0.0, 1.0)),
        ("aten::uniform_", |xs| xs.uniform_(0.0, 1.0)),
        ("aten::bernoulli_", |xs| xs.bernoulli_float_(0.5)),
    ];
    let mut cases = Vec::new();
    for ((op, fill), kind) in each.into_iter().flat_map(|pair| FLOATS.map(|kind| (pair, kind))) {
        // small and large tensors use different code for random numbers
        for size in [[1, 3], [60, 64]] {
            cases.push(case(op, format!("{kind:?} {size:?}"), move |on| {
                let xs = zeros(&size, kind, on);
                plain(move || fill(&mut xs.shallow_clone()))
            }));
        }
    }
    cases
}

fn joined() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, layout) in FLOATS.into_iter().flat_map(|kind| LAYOUTS.map(|layout| (kind, layout))) {
        let what = format!("{kind:?} {layout:?}");
        for dim in [0, 1, 2] {
            cases.extend(passes("aten::cat", &format!("along {dim} {what}"), move |on| {
                let (xs, xs_leaf) = laid(layout, kind, on);
                let (ys, ys_leaf) = laid(Layout::Contiguous, kind, on);
                (vec![xs_leaf, ys_leaf], move || Tensor::cat(&[&xs, &ys], dim))
            }));
        }
        cases.extend(passes("aten::cat", &format!("halves turned {what}"), move |on| {
            let (xs, xs_leaf) = laid(layout, kind, on);
            (vec![xs_leaf], move || Tensor::cat(&[&xs.narrow(2, 32, 32).neg(), &xs.narrow(2, 0, 32)], 2))
        }));
        cases.extend(passes("aten::repeat", &what, move |on| {
            let (xs, xs_leaf) = laid(layout, kind, on);
            (vec![xs_leaf], move || xs.repeat([2, 1, 3]))
        }));
    }
    cases.push(case("aten::cat", "stacked numbers", |on| {
        let xs = [0; 5].map(|_| zeros(&[], FP32, on));
        plain(move || Tensor::stack(&xs, 0))
    }));
    cases
}

pub(super) fn cases() -> Vec<Case> {
    [new_tensors(), fillings(), joined()].into_iter().flatten().collect()
}
