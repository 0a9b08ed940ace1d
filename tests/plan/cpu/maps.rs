//! Convolutions, norms and upsampling.

use super::*;
use prsmed::tensor::autograd::gelu_conv2d;

#[derive(Debug, Clone, Copy)]
struct Convolution {
    from: i64,
    to: i64,
    kernel: i64,
    stride: i64,
    padding: i64,
    groups: i64,
    side: i64,
}

const CONVOLUTIONS: [Convolution; 8] = [
    Convolution { from: 3, to: 16, kernel: 3, stride: 2, padding: 1, groups: 1, side: 33 },
    Convolution { from: 3, to: 24, kernel: 14, stride: 14, padding: 0, groups: 1, side: 56 },
    Convolution { from: 32, to: 48, kernel: 1, stride: 1, padding: 0, groups: 1, side: 20 },
    Convolution { from: 32, to: 16, kernel: 1, stride: 1, padding: 1, groups: 1, side: 8 },
    Convolution { from: 32, to: 32, kernel: 3, stride: 1, padding: 1, groups: 32, side: 14 },
    Convolution { from: 32, to: 32, kernel: 3, stride: 2, padding: 1, groups: 32, side: 15 },
    Convolution { from: 32, to: 48, kernel: 3, stride: 1, padding: 1, groups: 1, side: 33 },
    Convolution { from: 16, to: 1, kernel: 1, stride: 1, padding: 0, groups: 1, side: 8 },
];

/// A tensor `[b, c, h, w]` (memory layout `[b, h, w, c]` if `last`) and its leaf.
fn map(size: [i64; 4], last: bool, kind: Kind, on: Device) -> (Tensor, Tensor) {
    let [b, c, h, w] = size;
    if last {
        let xs = leaf(&[b, h, w, c], kind, on);
        (xs.permute([0, 3, 1, 2]), xs)
    } else {
        let xs = leaf(&size, kind, on);
        (xs.shallow_clone(), xs)
    }
}

fn convolutions() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in CONVOLUTIONS {
        let Convolution { from, to, kernel, stride, padding, groups, side } = shape;
        for (kind, last) in FLOATS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
            let prepare = move |on| {
                let (xs, xs_leaf) = map([2, from, side, side], last, kind, on);
                (xs, xs_leaf, leaf(&[to, from / groups, kernel, kernel], kind, on), leaf(&[to], kind, on))
            };
            let what = format!("{shape:?} {kind:?}, channels last {last}");
            let strides = ([stride; 2], [padding; 2], [1; 2]);
            cases.extend(passes("aten::convolution", &what, move |on| {
                let (xs, xs_leaf, w, b) = prepare(on);
                let leaves = vec![xs_leaf, w.shallow_clone(), b.shallow_clone()];
                (leaves, move || xs.conv2d(&w, Some(&b), strides.0, strides.1, strides.2, groups))
            }));
            cases.extend(passes("aten::convolution", &format!("{what}, without bias, of an image"), move |on| {
                let (xs, _, w, _) = prepare(on);
                let xs = xs.detach();
                (vec![w.shallow_clone()], move || {
                    xs.conv2d(&w, None::<&Tensor>, strides.0, strides.1, strides.2, groups)
                })
            }));
            // autograd keeps or copies a gradient depending on the layout of its parameter
            cases.push(case("aten::convolution", format!("{what}, gradients kept"), move |on| {
                let (xs, xs_leaf, w, b) = prepare(on);
                Box::new(move || {
                    xs.conv2d(&w, Some(&b), strides.0, strides.1, strides.2, groups).sum(FP32).backward();
                    vec![xs_leaf.grad(), w.grad(), b.grad()]
                })
            }));
            cases.extend(passes("aten::gelu", &format!("before {what}"), move |on| {
                let (xs, xs_leaf, w, b) = prepare(on);
                let leaves = vec![xs_leaf, w.shallow_clone(), b.shallow_clone()];
                (leaves, move || gelu_conv2d(&xs, &w, &b, stride, padding, groups))
            }));
        }
    }
    cases
}

fn map_norms() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, last) in FLOATS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        for size in [[3, 32, 15, 15], [1, 16, 64, 64]] {
            let channels = size[1];
            let what = format!("{size:?} {kind:?}, channels last {last}");
            // trained in fp32 in every precision
            cases.extend(passes("aten::native_batch_norm", &what, move |on| {
                let (xs, xs_leaf) = map(size, last, kind, on);
                let [w, b] = [0; 2].map(|_| leaf(&[channels], FP32, on));
                let [mean, variance] = [0; 2].map(|_| zeros(&[channels], FP32, on));
                let leaves = vec![xs_leaf, w.shallow_clone(), b.shallow_clone()];
                (leaves, move || xs.batch_norm(Some(&w), Some(&b), Some(&mean), Some(&variance), true, 0.1, 1e-5, true))
            }));
            cases.extend(passes("aten::repeat", &format!("in an instance norm {what}"), move |on| {
                let (xs, xs_leaf) = map(size, last, kind, on);
                let [w, b] = [0; 2].map(|_| leaf(&[channels], kind, on));
                let leaves = vec![xs_leaf, w.shallow_clone(), b.shallow_clone()];
                (leaves, move || xs.instance_norm(Some(&w), Some(&b), None, None, true, 0.1, 1e-5, true))
            }));
        }
    }
    cases
}

/// Group norms: only the forward pass, as image generation runs it.
fn group_norms() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, last) in FLOATS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        for size in [[3, 32, 15, 15], [1, 16, 64, 64], [2, 64, 1, 1]] {
            let channels = size[1];
            cases.push(case(
                "aten::native_group_norm",
                format!("{size:?} {kind:?}, channels last {last}"),
                move |on| {
                    let (xs, _) = map(size, last, kind, on);
                    let [w, b] = [0; 2].map(|_| zeros(&[channels], kind, on));
                    plain(move || xs.group_norm(8, Some(&w), Some(&b), 1e-5, true))
                },
            ));
        }
    }
    cases
}

fn nearest() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, last) in FLOATS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        for scale in [2, 8] {
            let what = format!("by {scale} {kind:?}, channels last {last}");
            cases.push(case("aten::upsample_nearest2d", what, move |on| {
                let (xs, _) = map([2, 16, 9, 8], last, kind, on);
                plain(move || xs.upsample_nearest2d([9 * scale, 8 * scale], None, None))
            }));
        }
    }
    cases
}

fn layer_norms() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, layout) in FLOATS.into_iter().flat_map(|kind| LAYOUTS.map(|layout| (kind, layout))) {
        cases.extend(passes("aten::native_layer_norm", &format!("{kind:?} {layout:?}"), move |on| {
            let (xs, xs_leaf) = laid(layout, kind, on);
            let [w, b] = [0; 2].map(|_| leaf(&[64], kind, on));
            let leaves = vec![xs_leaf, w.shallow_clone(), b.shallow_clone()];
            (leaves, move || xs.layer_norm([64], Some(&w), Some(&b), 1e-5, true))
        }));
        cases.extend(passes("aten::native_layer_norm", &format!("frozen {kind:?} {layout:?}"), move |on| {
            let (xs, xs_leaf) = laid(layout, kind, on);
            let [w, b] = [0; 2].map(|_| zeros(&[64], kind, on));
            (vec![xs_leaf], move || xs.layer_norm([64], Some(&w), Some(&b), 1e-5, true))
        }));
    }
    cases
}

fn sizes() -> Vec<Case> {
    let mut cases = Vec::new();
    for corners in [false, true] {
        for last in [false, true] {
            let what = format!("corners {corners}, channels last {last}");
            cases.extend(passes("aten::upsample_bilinear2d", &what, move |on| {
                let (xs, xs_leaf) = map([2, 1, 9, 8], last, FP32, on);
                (vec![xs_leaf], move || xs.upsample_bilinear2d([144, 128], corners, None, None))
            }));
        }
    }
    for kind in FLOATS {
        cases.extend(passes("aten::constant_pad_nd", &format!("{kind:?}"), move |on| {
            let xs = leaf(&[2, 13, 13, 32], kind, on);
            let f = {
                let xs = xs.shallow_clone();
                move || xs.constant_pad_nd([0, 0, 0, 1, 0, 1])
            };
            (vec![xs], f)
        }));
        cases.extend(passes("aten::clone", &format!("windows of a map {kind:?}"), move |on| {
            let (xs, xs_leaf) = map([2, 32, 14, 14], true, kind, on);
            (vec![xs_leaf], move || {
                let windows = xs.permute([0, 2, 3, 1]).reshape([2, 2, 7, 2, 7, 32]).transpose(2, 3);
                windows.reshape([8, 49, 32])
            })
        }));
    }
    cases
}

pub(super) fn cases() -> Vec<Case> {
    [convolutions(), map_norms(), group_norms(), layer_norms(), nearest(), sizes()].into_iter().flatten().collect()
}
