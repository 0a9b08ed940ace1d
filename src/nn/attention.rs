//! Scaled dot-product attention with libtorch's fused kernels. All models call it from here.

use crate::tensor::functions::GroupedAttention;
use crate::tensor::{Kind, Tensor, dims, meta};

/// Which keys a query attends to.
#[derive(Debug)]
pub enum Mask<'a> {
    /// All keys.
    None,
    /// Keys at its own and earlier positions.
    Causal,
    /// `bool`, broadcastable to `[b, h, t, s]`; true = attend.
    Keep(&'a Tensor),
    /// A bias that is added to the scores, in the dtype of the query, broadcastable to `[b, h, t, s]`.
    Bias(&'a Tensor),
}

/// `dropout(softmax(q k^T / sqrt(d) + mask)) v`. With dropout, libtorch's CPU does not use its fused kernel: pass 0 if
/// the model allows it.
///
/// # Shapes
/// `q [b, h, t, d]`, `k` and `v` `[b, g, s, d]` with `h` a multiple of `g` (grouped queries), to `[b, h, t, d]`.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask, dropout: f64) -> Tensor {
    let [_b, h, _t, _d] = dims(q);
    let [_, g, _, _] = dims(k);
    let (mask, causal) = match mask {
        Mask::None => (None, false),
        Mask::Causal => (None, true),
        Mask::Keep(mask) | Mask::Bias(mask) => (Some(*mask), false),
    };
    if h != g && meta::runs_as_cuda(q) && (mask.is_some() || q.kind() == Kind::Float) {
        // of CUDA's fused kernels only flash attention supports grouped queries, and only without a mask and not in
        // fp32
        let grouped = GroupedAttention { q, k, v, mask, causal };
        if dropout == 0.0 && grouped.saves_memory() {
            return grouped.attend();
        }
        let (k, v) = (repeat_heads(k, h / g), repeat_heads(v, h / g));
        return Tensor::scaled_dot_product_attention(q, &k, &v, mask, dropout, causal, None, false);
    }
    Tensor::scaled_dot_product_attention(q, k, v, mask, dropout, causal, None, h != g)
}

/// `[b, g, s, d]` to `[b, g * times, s, d]`: repeats each head `times` times in a row.
fn repeat_heads(xs: &Tensor, times: i64) -> Tensor {
    let [b, g, s, d] = dims(xs);
    xs.unsqueeze(2).expand([b, g, times, s, d], false).reshape([b, g * times, s, d])
}

/// `[b, t, h * d]` to `[b, h, t, d]`.
pub fn split_heads(xs: &Tensor, heads: i64) -> Tensor {
    let [b, t, width] = dims(xs);
    xs.view([b, t, heads, width / heads]).transpose(1, 2)
}

/// `[b, h, t, d]` to `[b, t, h * d]`.
pub fn merge_heads(xs: &Tensor) -> Tensor {
    let [b, h, t, d] = dims(xs);
    xs.transpose(1, 2).reshape([b, t, h * d])
}
