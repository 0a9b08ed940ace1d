//! Fused functions of the language model. They save fewer tensors for the backward pass than libtorch's operators do.
//!
//! The documentation of each function states the operators that it replaces. A tensor is saved only if a gradient needs
//! it, so a pass without gradients saves nothing.

use super::native::{self, answer, raw, result};
use super::{Kind, Tensor};

/// RMSNorm: `xs / sqrt(mean(xs^2) + eps) * weight` over the last dimension. The quotient is computed in fp32 and cast
/// to the dtype of `xs` before the product. Saves `xs` and one number per row.
///
/// # Shapes
/// `xs [.., d]`, `weight [d]` of any floating dtype, to `[.., d]` in the dtype of `xs`.
///
/// # Panics
/// Like libtorch's operators.
pub fn rms_norm(xs: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    // SAFETY: two live tensors are borrowed for the call; it writes one owned tensor on success.
    result(|out| unsafe { native::prsmed_rms_norm(raw(xs), raw(weight), eps, out) })
}

/// SwiGLU: `silu(gate) * up`. Saves both operands but not the SiLU. Without a backward pass it overwrites `gate`.
///
/// # Shapes
/// Both `[..]`, of one dtype, to the same.
///
/// # Panics
/// Like libtorch's operators.
pub fn swiglu(gate: Tensor, up: &Tensor) -> Tensor {
    // SAFETY: as above; `gate` is the callee's to overwrite.
    let ys = result(|out| unsafe { native::prsmed_swiglu(raw(&gate), raw(up), out) });
    drop(gate);
    ys
}

/// Low-rank product (LoRA) with dropout on the input: `scale * (dropout(x) a^T) b^T`.
#[derive(Debug, Clone, Copy)]
pub struct LowRank<'a> {
    /// `[r, in]`, the fp32 master weight.
    pub a: &'a Tensor,
    /// `[out, r]`, the fp32 master weight.
    pub b: &'a Tensor,
    /// Factor of the product (LoRA's alpha divided by its rank).
    pub scale: f64,
    /// Dropout probability, 0..1.
    pub dropout: f64,
}

impl LowRank<'_> {
    /// Adds the product of `xs` to `ys` in place. Saves `xs`, the product with `a` and the seed of the dropout mask.
    /// With dropout it draws one number from libtorch's CPU generator, on every device.
    ///
    /// # Shapes
    /// `ys [.., out]`, contiguous and not used elsewhere; `xs [.., in]`; one dtype; to `[.., out]`.
    ///
    /// # Panics
    /// Like libtorch's operators.
    pub fn add_to(&self, ys: Tensor, xs: &Tensor) -> Tensor {
        let [sum] = Self::add_each_to([*self], [ys], xs);
        sum
    }

    /// As [`Self::add_to`] for `N` adapters of one input, scale and dropout probability, each with its own output and
    /// its own mask. They share their passes over `xs`: custom CUDA kernels read it once for all of them, as do
    /// libtorch's operators without dropout.
    ///
    /// # Shapes
    /// `ys [.., out]`, contiguous and not used elsewhere; `xs [.., in]`; one dtype; to `[.., out]`.
    ///
    /// # Panics
    /// Like libtorch's operators.
    pub fn add_each_to<const N: usize>(adapters: [Self; N], ys: [Tensor; N], xs: &Tensor) -> [Tensor; N] {
        let Self { scale, dropout, .. } = adapters[0];
        let is_alike =
            |other: &Self| other.scale.to_bits() == scale.to_bits() && other.dropout.to_bits() == dropout.to_bits();
        assert!(adapters.iter().all(is_alike), "adapters of one input have one scale and one dropout probability");
        let [mut a, mut b] = [adapters.map(|adapter| raw(adapter.a)), adapters.map(|adapter| raw(adapter.b))];
        let (mut outputs, mut sums) = (ys.each_ref().map(raw), [std::ptr::null_mut(); N]);
        let count = i64::try_from(N).expect("a few");
        let (first, a, b, to) = (outputs.as_mut_ptr(), a.as_mut_ptr(), b.as_mut_ptr(), sums.as_mut_ptr());
        // SAFETY: `N` live tensors each; `ys` are the callee's to overwrite; it writes `N` owned tensors on success.
        let done = unsafe { native::check(native::prsmed_low_rank(first, raw(xs), a, b, count, scale, dropout, to)) };
        done.unwrap_or_else(|error| native::raise(error));
        drop(ys);
        // SAFETY: as above.
        sums.map(|sum| unsafe { native::owned(sum) })
    }
}

/// Rotary position embedding in place: rotates the two halves of each head by the angles of the token. Saves only the
/// `cos` and `sin` tables.
///
/// # Shapes
/// `xs [b, t, h d]`, contiguous and not used elsewhere; `cos` and `sin` `[t, d / 2]` or `[b, t, d / 2]` in its dtype;
/// to `[b, t, h d]`.
///
/// # Panics
/// Like libtorch's operators.
pub fn rotate(xs: Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    // SAFETY: as above; `xs` is the callee's to overwrite.
    let turned = result(|out| unsafe { native::prsmed_rotate(raw(&xs), raw(cos), raw(sin), out) });
    drop(xs);
    turned
}

/// Grouped-query attention: each group of query heads shares one key and value head.
#[derive(Debug, Clone, Copy)]
pub struct GroupedAttention<'a> {
    /// `[b, h, t, d]`.
    pub q: &'a Tensor,
    /// `[b, g, s, d]`, `h` a multiple of `g`.
    pub k: &'a Tensor,
    /// Like `k`.
    pub v: &'a Tensor,
    /// Broadcastable to `[b, h, t, s]`: bool (true = attend), or a bias in the dtype of `q` that is added to the
    /// scores.
    pub mask: Option<&'a Tensor>,
    /// Causal attention: a query attends to the keys at its own and earlier positions. Not with a mask.
    pub causal: bool,
}

impl GroupedAttention<'_> {
    /// `softmax(q k^T / sqrt(d) + mask) v`. Keys and values are repeated only while a kernel runs, in the forward pass
    /// and again in the backward pass. Saves `q`, `k`, `v`, `mask`, the result and one number per row of scores. `mask`
    /// gets no gradient.
    ///
    /// # Shapes
    /// To `[b, h, t, d]`.
    ///
    /// # Panics
    /// Like libtorch's operators.
    pub fn attend(&self) -> Tensor {
        let Self { q, k, v, mask, causal } = *self;
        let mask = mask.map_or(std::ptr::null_mut(), raw);
        // SAFETY: as above; the mask may be null.
        result(|out| unsafe { native::prsmed_grouped_attention(raw(q), raw(k), raw(v), mask, causal, out) })
    }

    /// True if [`Self::attend`] saves less memory than libtorch's attention on repeated keys and values, with the same
    /// kernel. That is so on CUDA, if the memory-efficient kernel takes these tensors and `mask` needs no gradient.
    ///
    /// # Panics
    /// Like libtorch's operators.
    pub fn saves_memory(&self) -> bool {
        let Self { q, k, v, mask, causal } = *self;
        let mask = mask.map_or(std::ptr::null_mut(), raw);
        // SAFETY: as above; it writes a bool.
        answer(|out| unsafe { native::prsmed_keeps_groups(raw(q), raw(k), raw(v), mask, causal, out) })
    }
}

/// Segments of packed sequences: each segment of queries attends to a segment of keys.
///
/// The segments of a sequence are the prefix (its keys are the prefix), each question (its keys are the prefix and the
/// question), and the padding (its keys are the padding).
#[derive(Debug)]
pub struct Segments {
    /// The token that each key comes from, `[k]` i64; for unused keys the first token.
    pub from: Tensor,
    /// Like `from`, but the number of all tokens for unused keys.
    pub to: Tensor,
    /// Number of the first query, and of the first key, of each of `n` segments, and the number after the last: `[n + 1]`
    /// i32 each.
    pub starts: [Tensor; 2],
    /// Number of queries and keys of each segment. A GPU only reads `starts`.
    pub lengths: Vec<[i64; 2]>,
}

impl Segments {
    /// The same tensors.
    #[must_use]
    pub fn shallow_clone(&self) -> Self {
        Self {
            from: self.from.shallow_clone(),
            to: self.to.shallow_clone(),
            starts: self.starts.each_ref().map(Tensor::shallow_clone),
            lengths: self.lengths.clone(),
        }
    }

    /// Attention of packed sequences. A query attends to the keys of its segment that are not after it: the last query
    /// sees all keys, the one before it all but one, and so on. On a GPU all segments are one call of the flash kernel,
    /// without a mask; on the CPU they are computed one after another. Saves `q`, `k`, `v`, the result and one number per
    /// row of scores.
    ///
    /// # Shapes
    /// `q [s, t, h d]`, `k` and `v` `[s, t, g d]` with `h` a multiple of `g`, and heads of width `d`; to `[s, t, h d]`.
    ///
    /// # Panics
    /// Like libtorch's operators; on a GPU if [`Self::supported`] is false.
    pub fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, d: i64) -> Tensor {
        let [queries, keys] = &self.starts;
        let count = i64::try_from(self.lengths.len()).expect("few segments");
        let lengths = self.lengths.as_flattened().as_ptr();
        let (from, to, queries, keys) = (raw(&self.from), raw(&self.to), raw(queries), raw(keys));
        // SAFETY: as above; `lengths` has two numbers for each of `count` segments.
        result(|out| unsafe {
            native::prsmed_packed_attention(raw(q), raw(k), raw(v), from, to, queries, keys, lengths, count, d, out)
        })
    }

    /// True if a GPU's flash kernel supports `heads` query heads and `groups` key-value heads of states like
    /// `xs [s, t, h d]`: bf16 or fp16, compute capability 8.0 or more. False on the CPU, which needs no support.
    ///
    /// # Panics
    /// Like libtorch's operators.
    pub fn supported(xs: &Tensor, heads: i64, groups: i64) -> bool {
        // SAFETY: as above; it writes a bool.
        answer(|out| unsafe { native::prsmed_takes_segments(raw(xs), heads, groups, out) })
    }
}

/// Attention bias of packed sequences: 0 where a token may attend to another, minus infinity elsewhere. A token attends
/// to the tokens of block 0 (the shared prefix) and of its own block that are not after it.
///
/// # Shapes
/// `blocks [b, t]` i64, contiguous, to `[b, 1, t, t]` in `kind`; rows start at multiples of 8 elements.
///
/// # Panics
/// Like libtorch's operators.
pub fn packed_bias(blocks: &Tensor, kind: Kind) -> Tensor {
    // SAFETY: as above.
    result(|out| unsafe { native::prsmed_packed_bias(raw(blocks), native::scalar_type(kind), out) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shared;
    use crate::autograd::checkpoint;
    use crate::{Device, no_grad, rng};

    const FP64: Kind = Kind::Double;

    fn leaf(size: &[i64], kind: Kind) -> Tensor {
        Tensor::randn(size, (kind, Device::Cpu)).set_requires_grad(true)
    }

    /// The result and the gradients of `leaves`, with a fixed gradient of the result.
    fn outcome(leaves: &[Tensor], forward: &dyn Fn(&[Tensor]) -> Tensor) -> Vec<Tensor> {
        let ys = forward(leaves);
        let count = i64::try_from(ys.numel()).expect("small");
        let weights = Tensor::linspace(-1.0, 2.0, count, (ys.kind(), ys.device())).view(ys.size().as_slice());
        let loss = (&ys * weights).sum(ys.kind());
        let mut all = vec![ys.detach()];
        all.extend(Tensor::run_backward(&[&loss], leaves, false, false));
        all
    }

    fn assert_same(
        leaves: &[Tensor],
        tolerance: f64,
        ours: &dyn Fn(&[Tensor]) -> Tensor,
        theirs: &dyn Fn(&[Tensor]) -> Tensor,
    ) {
        for (i, (a, b)) in outcome(leaves, ours).iter().zip(outcome(leaves, theirs)).enumerate() {
            assert_eq!((a.kind(), a.size()), (b.kind(), b.size()), "{i}");
            let error = (a - &b).to_kind(FP64).norm().double_value(&[]) / b.to_kind(FP64).norm().double_value(&[]);
            assert!(error <= tolerance, "{i}: relative error {error:e}");
        }
    }

    #[test]
    fn rms_norm_equals_libtorchs_operators() {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(1);
        let chain = |xs: &Tensor, weight: &Tensor, wide: Kind| {
            let xs_wide = xs.to_kind(wide);
            let mean = xs_wide.square().mean_dim([-1].as_slice(), true, wide);
            (xs_wide * (mean + 1e-5).rsqrt()).to_kind(xs.kind()) * weight.to_kind(xs.kind())
        };
        for (kind, wide, tolerance) in
            [(FP64, FP64, 1e-12), (Kind::Float, Kind::Float, 1e-6), (Kind::BFloat16, Kind::Float, 6e-3)]
        {
            for width in [7, 16, 100] {
                let weight = if kind == FP64 { leaf(&[width], FP64) } else { leaf(&[width], Kind::Float) };
                assert_same(
                    &[leaf(&[3, 5, width], kind), weight],
                    tolerance,
                    &|l| rms_norm(&l[0], &l[1], 1e-5),
                    &|l| chain(&l[0], &l[1], wide),
                );
            }
        }
        // a frozen weight, then a frozen input
        let (xs, weight) = (leaf(&[4, 33], FP64), leaf(&[33], FP64));
        assert_same(&[xs.shallow_clone()], 1e-12, &|l| rms_norm(&l[0], &weight.detach(), 1e-5), &|l| {
            chain(&l[0], &weight.detach(), FP64)
        });
        assert_same(&[weight], 1e-12, &|l| rms_norm(&xs.detach(), &l[0], 1e-5), &|l| chain(&xs.detach(), &l[0], FP64));
    }

    #[test]
    fn swiglu_equals_libtorchs_operators() {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(2);
        for (kind, tolerance) in [(FP64, 1e-12), (Kind::Float, 1e-6), (Kind::BFloat16, 6e-3)] {
            let leaves = [leaf(&[3, 40], kind), leaf(&[3, 40], kind)];
            // `* 1`: the memory of a leaf must not be overwritten
            assert_same(&leaves, tolerance, &|l| swiglu(&l[0] * 1, &l[1]), &|l| l[0].silu() * &l[1]);
        }
        let (gate, up) = (leaf(&[3, 40], FP64).detach(), leaf(&[3, 40], FP64).detach());
        let expected = gate.silu() * &up;
        let place = gate.data_ptr();
        let ys = swiglu(gate, &up);
        assert!(ys.data_ptr() == place, "without a graph it works in place");
        assert!((ys - expected).abs().max().double_value(&[]) < 1e-12);
    }

    #[test]
    fn low_rank_products_equal_libtorchs_operators() {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(3);
        for (kind, masters, tolerance) in
            [(FP64, FP64, 1e-12), (Kind::Float, Kind::Float, 1e-6), (Kind::BFloat16, Kind::Float, 1e-2)]
        {
            for scale in [1.0, 0.25] {
                let leaves =
                    [leaf(&[2, 5, 6], kind), leaf(&[2, 5, 8], kind), leaf(&[3, 8], masters), leaf(&[6, 3], masters)];
                let ours = |l: &[Tensor]| LowRank { a: &l[2], b: &l[3], scale, dropout: 0.0 }.add_to(&l[0] * 1, &l[1]);
                let theirs = |l: &[Tensor]| {
                    let low = l[1].linear(&l[2].to_kind(kind), None::<&Tensor>) * scale;
                    &l[0] + low.linear(&l[3].to_kind(kind), None::<&Tensor>)
                };
                assert_same(&leaves, tolerance, &ours, &theirs);
            }
        }
    }

    /// The dropout mask of a seed, computed with identity matrices.
    fn mask(seed: u64, size: [i64; 2], dropout: f64) -> Tensor {
        rng::seed(seed);
        let identity = Tensor::eye(size[1], (FP64, Device::Cpu));
        let [ys, xs] = [Tensor::zeros(size, (FP64, Device::Cpu)), Tensor::ones(size, (FP64, Device::Cpu))];
        no_grad(|| LowRank { a: &identity, b: &identity, scale: 1.0, dropout }.add_to(ys, &xs))
    }

    #[test]
    fn dropout_repeats_its_mask_in_the_backward_pass() {
        let _lock = rng::TEST_LOCK.lock();
        let kept = mask(7, [6, 8], 0.25);
        rng::seed(3);
        let leaves = [leaf(&[6, 5], FP64), leaf(&[6, 8], FP64), leaf(&[3, 8], FP64), leaf(&[5, 3], FP64)];
        let ours = |l: &[Tensor]| {
            rng::seed(7);
            LowRank { a: &l[2], b: &l[3], scale: 2.0, dropout: 0.25 }.add_to(&l[0] * 1, &l[1])
        };
        let theirs = |l: &[Tensor]| &l[0] + (&l[1] * &kept).matmul(&l[2].tr()).matmul(&l[3].tr()) * 2.0;
        assert_same(&leaves, 1e-12, &ours, &theirs);
    }

    #[test]
    fn dropout_masks_have_the_right_rate_and_differ_by_seed_and_row() {
        let _lock = rng::TEST_LOCK.lock();
        let size = [500, 64];
        for dropout in [0.05, 0.5] {
            let first = mask(1, size, dropout);
            let dropped = first.eq(0.0).to_kind(FP64);
            let spread = (dropout * (1.0 - dropout)).sqrt();
            let mean = dropped.mean(FP64).double_value(&[]);
            assert!((mean - dropout).abs() < 5.0 * spread / 32_000_f64.sqrt(), "{mean}");
            for dim in [0_i64, 1] {
                let means = dropped.mean_dim([dim].as_slice(), false, FP64);
                let most = (means - dropout).abs().max().double_value(&[]);
                let count = size[usize::try_from(dim).expect("0 or 1")] as f64;
                assert!(most < 5.0 * spread / count.sqrt(), "{dim}: {most}");
            }
            // elements that are not dropped are scaled; other seeds and other rows have other masks
            assert!((first.max().double_value(&[]) - 1.0 / (1.0 - dropout)).abs() < 1e-12);
            let agree = |a: &Tensor, b: &Tensor| a.eq_tensor(b).to_kind(FP64).mean(FP64).double_value(&[]);
            let chance = 1.0 - 2.0 * dropout * (1.0 - dropout);
            assert!((agree(&first, &mask(2, size, dropout)) - chance).abs() < 0.02);
            let (above, below) = (first.narrow(0, 0, 499), first.narrow(0, 1, 499));
            assert!((agree(&above, &below) - chance).abs() < 0.02);
            assert_eq!(first, mask(1, size, dropout));
        }
    }

    #[test]
    fn rotation_equals_libtorchs_operators() {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(4);
        for (kind, tolerance) in [(FP64, 1e-12), (Kind::Float, 1e-6), (Kind::BFloat16, 8e-3)] {
            for shape in [&[5_i64, 4][..], &[2, 5, 4]] {
                let angles = Tensor::rand(shape, (FP64, Device::Cpu)) * 6.0;
                let (cos, sin) = (angles.cos().to_kind(kind), angles.sin().to_kind(kind));
                let theirs = |l: &[Tensor]| {
                    let heads = l[0].view([2, 5, 3, 8]);
                    let turned = Tensor::cat(&[&heads.narrow(3, 4, 4).neg(), &heads.narrow(3, 0, 4)], 3);
                    let twice = |table: &Tensor| Tensor::cat(&[table, table], -1).unsqueeze(-2);
                    (heads * twice(&cos) + turned * twice(&sin)).view([2, 5, 24])
                };
                assert_same(&[leaf(&[2, 5, 24], kind)], tolerance, &|l| rotate(&l[0] * 1, &cos, &sin), &theirs);
            }
        }
    }

    /// Attention patterns of 37 tokens in 2 sequences: all, causal, packed bias, one bias per head, bool mask.
    fn masks(heads: i64, kind: Kind, device: Device) -> [(Option<Tensor>, bool); 5] {
        let starts = Tensor::from_slice(&[9_i64, 20, 5, 37]).view([2, 2, 1]);
        let blocks = Tensor::arange(37, (Kind::Int64, Device::Cpu)).ge_tensor(&starts).sum_dim_intlist(
            [1_i64].as_slice(),
            false,
            Kind::Int64,
        );
        let packed = packed_bias(&blocks.to_device(device), kind);
        let keep = packed.eq(0.0);
        let own = Tensor::randn([1, heads, 37, 37], (kind, device));
        [(None, false), (None, true), (Some(packed), false), (Some(own), false), (Some(keep), false)]
    }

    /// `[b, t, h, d]` as a projection's output is split.
    fn split(leaves: &[Tensor]) -> [Tensor; 3] {
        [0, 1, 2].map(|i| leaves[i].transpose(1, 2))
    }

    fn grouped(leaves: &[Tensor], mask: Option<&Tensor>, causal: bool) -> Tensor {
        let [q, k, v] = split(leaves);
        GroupedAttention { q: &q, k: &k, v: &v, mask, causal }.attend()
    }

    #[test]
    fn grouped_attention_equals_libtorchs_attention() {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(5);
        for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 1e-2)] {
            let leaves = [6, 2, 2].map(|heads| leaf(&[2, 37, heads, 16], kind));
            for (mask, causal) in masks(6, kind, Device::Cpu) {
                let theirs = |l: &[Tensor]| {
                    let [q, k, v] = split(l);
                    Tensor::scaled_dot_product_attention(&q, &k, &v, mask.as_ref(), 0.0, causal, None, true)
                };
                assert_same(&leaves, tolerance, &|l| grouped(l, mask.as_ref(), causal), &theirs);
                let again = |l: &[Tensor]| {
                    let mask = Shared::new(mask.as_ref().map(Tensor::shallow_clone));
                    checkpoint(&[&l[0], &l[1], &l[2]], move |l| grouped(l, mask.as_ref(), causal))
                };
                assert_same(&leaves, tolerance, &again, &theirs);
            }
            // frozen keys
            let frozen = leaves[1].detach();
            let of = |l: &[Tensor]| [l[0].shallow_clone(), frozen.shallow_clone(), l[1].shallow_clone()];
            let theirs = |l: &[Tensor]| {
                let [q, k, v] = split(&of(l));
                Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, true)
            };
            let trained = [leaves[0].shallow_clone(), leaves[2].shallow_clone()];
            assert_same(&trained, tolerance, &|l| grouped(&of(l), None, true), &theirs);
        }
    }

    #[test]
    #[ignore = "needs CUDA"]
    fn grouped_attention_on_a_gpu_equals_its_definition() {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(6);
        crate::use_flash_attention();
        let gpu = Device::Cuda(0);
        for (kind, tolerance) in [(Kind::Float, 1e-4), (Kind::BFloat16, 2e-2)] {
            let leaves = [8, 2, 2].map(|heads| leaf(&[2, 37, heads, 64], kind).to_device(gpu).detach());
            let leaves = leaves.map(|leaf| leaf.set_requires_grad(true));
            for (mask, causal) in masks(8, kind, gpu) {
                let [q, k, v] = split(&leaves);
                let saves_memory = GroupedAttention { q: &q, k: &k, v: &v, mask: mask.as_ref(), causal }.saves_memory();
                // without a mask, flash attention takes groups
                assert_eq!(saves_memory, kind == Kind::Float || mask.is_some(), "{kind:?} {causal}");
                let theirs = |l: &[Tensor]| {
                    let [q, k, v] = split(l).map(|xs| xs.to_kind(FP64));
                    let [k, v] =
                        [k, v].map(|xs| xs.unsqueeze(2).expand([2, 2, 4, 37, 64], false).reshape([2, 8, 37, 64]));
                    let below = Tensor::ones([37, 37], (Kind::Bool, gpu)).tril(0);
                    let scores = q.matmul(&k.transpose(2, 3)) / 8.0;
                    let scores = match &mask {
                        Some(keep) if keep.kind() == Kind::Bool => {
                            scores.masked_fill(&keep.logical_not(), f64::NEG_INFINITY)
                        }
                        Some(bias) => scores + bias,
                        None if causal => scores.masked_fill(&below.logical_not(), f64::NEG_INFINITY),
                        None => scores,
                    };
                    scores.softmax(-1, FP64).matmul(&v).to_kind(kind)
                };
                assert_same(&leaves, tolerance, &|l| grouped(l, mask.as_ref(), causal), &theirs);
            }
        }
    }

    /// Sequences of 40 tokens: the length of the prefix and of each question. The rest is padding.
    const PACKED: [&[usize]; 2] = [&[9, 7, 1, 12, 6], &[20, 13]];

    /// Segments and blocks of [`PACKED`], with room for unused keys.
    fn packed(device: Device) -> (Segments, Tensor) {
        let (mut lengths, mut keys, mut blocks) = (Vec::new(), Vec::new(), Vec::new());
        for (row, parts) in (0..).map(|i| 40 * i).zip(PACKED) {
            let mut at = row;
            for (block, part) in parts.iter().map(|length| i64::try_from(*length).expect("short")).enumerate() {
                let prefix = if block == 0 { 0 } else { i64::try_from(parts[0]).expect("short") };
                keys.extend(row..row + prefix);
                keys.extend(at..at + part);
                lengths.push([part, prefix + part]);
                blocks.extend((0..part).map(|_| i64::try_from(block).expect("few")));
                at += part;
            }
            keys.extend(at..row + 40);
            blocks.extend((at..row + 40).map(|_| 99));
            lengths.push([row + 40 - at; 2]);
        }
        let starts = [0, 1].map(|side| {
            let ends = lengths.iter().scan(0, |end, length: &[i64; 2]| {
                *end += length[side];
                Some(*end)
            });
            let starts: Vec<i64> = std::iter::once(0).chain(ends).collect();
            Tensor::from_slice(&starts).to_kind(Kind::Int).to_device(device)
        });
        let [from, to] = [0, 80].map(|unused| {
            let keys: Vec<i64> = keys.iter().copied().chain([unused; 11]).collect();
            Tensor::from_slice(&keys).to_device(device)
        });
        let blocks = Tensor::from_slice(&blocks).view([2, 40]).to_device(device);
        (Segments { from, to, starts, lengths }, blocks)
    }

    /// Compares segments of heads of width `d` with one call with a mask, except in padding, which sees other tokens.
    fn segments_against_a_mask(kind: Kind, tolerance: f64, d: i64, device: Device) {
        let (segments, blocks) = packed(device);
        let bias = packed_bias(&blocks, Kind::Double);
        let real = blocks.ne(99).unsqueeze(-1);
        let leaves = [6, 2, 2].map(|heads| leaf(&[2, 40, heads * d], kind).to_device(device).detach());
        let leaves = leaves.map(|leaf| leaf.set_requires_grad(true));
        let ours = |l: &[Tensor]| segments.attend(&l[0], &l[1], &l[2], d) * &real;
        let theirs = |l: &[Tensor]| {
            let [q, k, v] = [0, 1, 2].map(|i| l[i].to_kind(FP64).view([2, 40, -1, d]).transpose(1, 2));
            let [k, v] = [k, v].map(|xs| xs.unsqueeze(2).expand([2, 2, 3, 40, d], false).reshape([2, 6, 40, d]));
            let scores = q.matmul(&k.transpose(2, 3)) / (d as f64).sqrt() + &bias;
            let ys = scores.softmax(-1, FP64).matmul(&v).transpose(1, 2).reshape([2, 40, 6 * d]);
            ys.to_kind(kind) * &real
        };
        assert_same(&leaves, tolerance, &ours, &theirs);
        let again = |l: &[Tensor]| {
            let segments = Shared::new(segments.shallow_clone());
            checkpoint(&[&l[0], &l[1], &l[2]], move |l| segments.attend(&l[0], &l[1], &l[2], d)) * &real
        };
        assert_same(&leaves, tolerance, &again, &theirs);
    }

    #[test]
    fn segments_equal_one_call_with_a_mask() {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(8);
        for (kind, tolerance) in [(FP64, 1e-12), (Kind::Float, 1e-6), (Kind::BFloat16, 1e-2)] {
            segments_against_a_mask(kind, tolerance, 16, Device::Cpu);
        }
        assert!(!Segments::supported(&Tensor::zeros([2, 40, 96], (Kind::BFloat16, Device::Cpu)), 6, 2));
    }

    #[test]
    #[ignore = "needs CUDA"]
    fn segments_on_a_gpu_equal_one_call_with_a_mask() {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(8);
        crate::use_flash_attention();
        for (kind, d) in [(Kind::BFloat16, 16), (Kind::BFloat16, 128), (Kind::Half, 64)] {
            assert!(Segments::supported(&Tensor::zeros([2, 40, 6 * d], (kind, Device::Cuda(0))), 6, 2), "{kind:?}");
            segments_against_a_mask(kind, 2e-2, d, Device::Cuda(0));
        }
    }

    #[test]
    fn packed_bias_allows_the_prefix_and_the_own_question() {
        // a prefix of 3, two questions, padding; a prefix of 1, one question
        let blocks = [[0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1_i64]];
        let tensor = Tensor::from_slice(&blocks.concat()).view([2, 11]);
        for kind in [FP64, Kind::Float, Kind::BFloat16, Kind::Half] {
            let bias = packed_bias(&tensor, kind);
            assert_eq!((bias.kind(), bias.size(), bias.stride()), (kind, vec![2, 1, 11, 11], vec![176, 176, 16, 1]));
            for (row, blocks) in blocks.iter().enumerate() {
                for (query, key) in (0..121).map(|place| (place / 11, place % 11)) {
                    let sees = key <= query && [0, blocks[query]].contains(&blocks[key]);
                    let at = [row, 0, query, key].map(|index| i64::try_from(index).expect("small"));
                    let want = if sees { 0.0_f64 } else { f64::NEG_INFINITY };
                    assert_eq!(bias.double_value(&at).to_bits(), want.to_bits(), "{kind:?} {at:?}");
                }
            }
        }
    }
}
