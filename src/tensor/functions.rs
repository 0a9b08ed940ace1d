//! Functions of the language model that keep less for the backward pass than a chain of libtorch's operators.
//!
//! Each equals the chain that its documentation states. What no gradient needs is not kept: nothing at all when no
//! operand requires one.

use super::autograd::result;
use super::native::{self, raw};
use super::{Kind, Tensor};

/// `xs / sqrt(mean(xs^2) + eps) * weight` over the last dimension: the quotient in fp32, cast to the dtype of `xs`, then the
/// product. Keeps `xs` and a number for each row.
///
/// # Shapes
/// `xs [.., d]`, `weight [d]` of any floating dtype, to `[.., d]` in the dtype of `xs`.
///
/// # Panics
/// As libtorch's operators do.
pub fn rms_norm(xs: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    // SAFETY: two live tensors are borrowed for the call; it writes one owned tensor on success.
    result(|out| unsafe { native::prsmed_rms_norm(raw(xs), raw(weight), eps, out) })
}

/// `silu(gate) * up`. Keeps both and not the SiLU; writes into the memory of `gate` where no backward pass reads it.
///
/// # Shapes
/// Both `[..]`, of one dtype, to the same.
///
/// # Panics
/// As libtorch's operators do.
pub fn swiglu(gate: Tensor, up: &Tensor) -> Tensor {
    // SAFETY: as above; `gate` is the callee's to overwrite.
    let ys = result(|out| unsafe { native::prsmed_swiglu(raw(&gate), raw(up), out) });
    drop(gate);
    ys
}

/// A product of low rank with dropout before it: `scale * (dropout(x) a^T) b^T`.
#[derive(Debug, Clone, Copy)]
pub struct LowRank<'a> {
    /// `[r, in]`, the fp32 master.
    pub a: &'a Tensor,
    /// `[out, r]`, the fp32 master.
    pub b: &'a Tensor,
    /// Factor.
    pub scale: f64,
    /// Probability of dropping an element of the input, 0..1.
    pub dropout: f64,
}

impl LowRank<'_> {
    /// Adds the product of `xs` to `ys`, in its memory. Keeps `xs`, the narrow product and the seed of the mask, which is
    /// drawn from libtorch's generator of the host (one number, none without dropout) on every device.
    ///
    /// # Shapes
    /// `ys [.., out]`, contiguous, which nobody else needs; `xs [.., in]`; one dtype; to `[.., out]`.
    ///
    /// # Panics
    /// As libtorch's operators do.
    pub fn add_to(&self, ys: Tensor, xs: &Tensor) -> Tensor {
        let Self { a, b, scale, dropout } = *self;
        // SAFETY: as above; `ys` is the callee's to overwrite.
        let sum =
            result(|out| unsafe { native::prsmed_low_rank(raw(&ys), raw(xs), raw(a), raw(b), scale, dropout, out) });
        drop(ys);
        sum
    }
}

/// Turns each head's first and second half by the angles of its token, in the memory of `xs`. Keeps the tables alone.
///
/// # Shapes
/// `xs [b, t, h d]`, contiguous, which nobody else needs; `cos` and `sin [t, d / 2]` or `[b, t, d / 2]` in its dtype; to `[b, t, h d]`.
///
/// # Panics
/// As libtorch's operators do.
pub fn rotate(xs: Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    // SAFETY: as above; `xs` is the callee's to overwrite.
    let turned = result(|out| unsafe { native::prsmed_rotate(raw(&xs), raw(cos), raw(sin), out) });
    drop(xs);
    turned
}

/// Attention of grouped queries: what each query head sees, and the keys and values of its group.
#[derive(Debug, Clone, Copy)]
pub struct Grouped<'a> {
    /// `[b, h, t, d]`.
    pub q: &'a Tensor,
    /// `[b, g, s, d]`, `h` a multiple of `g`.
    pub k: &'a Tensor,
    /// As `k`.
    pub v: &'a Tensor,
    /// Broadcastable to `[b, h, t, s]`: bool (true = keep), or added to the scores in the dtype of `q`.
    pub mask: Option<&'a Tensor>,
    /// A query sees the keys at its own position and before; not with a mask.
    pub causal: bool,
}

impl Grouped<'_> {
    /// `softmax(q k^T / sqrt(d) + mask) v`, keys and values repeated for the kernel alone, in the forward pass and again in
    /// the backward pass. Keeps `q`, `k`, `v`, `mask`, the result and a number for each row of scores; `mask` gets no
    /// gradient.
    ///
    /// # Shapes
    /// To `[b, h, t, d]`.
    ///
    /// # Panics
    /// As libtorch's operators do.
    pub fn attend(&self) -> Tensor {
        let Self { q, k, v, mask, causal } = *self;
        let mask = mask.map_or(std::ptr::null_mut(), raw);
        // SAFETY: as above; the mask may be null.
        result(|out| unsafe { native::prsmed_grouped_attention(raw(q), raw(k), raw(v), mask, causal, out) })
    }

    /// Whether [`Self::attend`] keeps less than libtorch's attention on repeated keys and values, with the same kernel: on
    /// CUDA, where the memory-efficient one takes them, for a backward pass that asks for no gradient of the mask.
    ///
    /// # Panics
    /// As libtorch's operators do.
    pub fn is_leaner(&self) -> bool {
        let Self { q, k, v, mask, causal } = *self;
        let mask = mask.map_or(std::ptr::null_mut(), raw);
        let mut is = false;
        // SAFETY: as above; it writes a bool.
        let answer =
            unsafe { native::check(native::prsmed_keeps_groups(raw(q), raw(k), raw(v), mask, causal, &raw mut is)) };
        answer.unwrap_or_else(|error| error.raise());
        is
    }
}

/// The bias of attention among texts that share a sequence: 0 where a token sees another, minus infinity elsewhere. Of those
/// before it, and itself, a token sees the ones of block 0 and of its own block.
///
/// # Shapes
/// `blocks [b, t]` i64, contiguous, to `[b, 1, t, t]` in `kind`, rows starting at multiples of 8 numbers.
///
/// # Panics
/// As libtorch's operators do.
pub fn packed_bias(blocks: &Tensor, kind: Kind) -> Tensor {
    // SAFETY: as above.
    result(|out| unsafe { native::prsmed_packed_bias(raw(blocks), native::scalar_type(kind), out) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::autograd::checkpoint;
    use crate::tensor::{Device, no_grad, rng};

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
    fn rms_norm_is_its_chain() {
        let _turn = rng::TURN.lock();
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
        // a frozen weight, a frozen input
        let (xs, weight) = (leaf(&[4, 33], FP64), leaf(&[33], FP64));
        assert_same(&[xs.shallow_clone()], 1e-12, &|l| rms_norm(&l[0], &weight.detach(), 1e-5), &|l| {
            chain(&l[0], &weight.detach(), FP64)
        });
        assert_same(&[weight], 1e-12, &|l| rms_norm(&xs.detach(), &l[0], 1e-5), &|l| chain(&xs.detach(), &l[0], FP64));
    }

    #[test]
    fn swiglu_is_its_chain() {
        let _turn = rng::TURN.lock();
        rng::seed(2);
        for (kind, tolerance) in [(FP64, 1e-12), (Kind::Float, 1e-6), (Kind::BFloat16, 6e-3)] {
            let leaves = [leaf(&[3, 40], kind), leaf(&[3, 40], kind)];
            // a leaf's memory is its own
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
    fn low_rank_products_are_their_chain() {
        let _turn = rng::TURN.lock();
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

    /// The mask that a seed gives, read off a product with identities.
    fn mask(seed: u64, size: [i64; 2], dropout: f64) -> Tensor {
        rng::seed(seed);
        let identity = Tensor::eye(size[1], (FP64, Device::Cpu));
        let [ys, xs] = [Tensor::zeros(size, (FP64, Device::Cpu)), Tensor::ones(size, (FP64, Device::Cpu))];
        no_grad(|| LowRank { a: &identity, b: &identity, scale: 1.0, dropout }.add_to(ys, &xs))
    }

    #[test]
    fn dropout_repeats_its_mask_in_the_backward_pass() {
        let _turn = rng::TURN.lock();
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
    fn masks_are_fair_and_differ() {
        let _turn = rng::TURN.lock();
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
                #[expect(clippy::cast_precision_loss, reason = "small")]
                let count = size[usize::try_from(dim).expect("0 or 1")] as f64;
                assert!(most < 5.0 * spread / count.sqrt(), "{dim}: {most}");
            }
            // what is kept is scaled; other seeds and other rows have other masks
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
    fn rotation_is_its_chain() {
        let _turn = rng::TURN.lock();
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

    /// What queries of 37 tokens in 2 sequences may see, in `kind`: all, those before, a bias, one for each head, bools.
    fn sights(heads: i64, kind: Kind, device: Device) -> [(Option<Tensor>, bool); 5] {
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
        Grouped { q: &q, k: &k, v: &v, mask, causal }.attend()
    }

    #[test]
    fn grouped_attention_is_libtorchs() {
        let _turn = rng::TURN.lock();
        rng::seed(5);
        for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 1e-2)] {
            let leaves = [6, 2, 2].map(|heads| leaf(&[2, 37, heads, 16], kind));
            for (mask, causal) in sights(6, kind, Device::Cpu) {
                let theirs = |l: &[Tensor]| {
                    let [q, k, v] = split(l);
                    Tensor::scaled_dot_product_attention(&q, &k, &v, mask.as_ref(), 0.0, causal, None, true)
                };
                assert_same(&leaves, tolerance, &|l| grouped(l, mask.as_ref(), causal), &theirs);
                let again = |l: &[Tensor]| {
                    let mask = mask.as_ref().map(Tensor::shallow_clone);
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
    fn grouped_attention_of_a_card_is_its_definition() {
        let _turn = rng::TURN.lock();
        rng::seed(6);
        crate::tensor::use_flash_attention();
        let card = Device::Cuda(0);
        for (kind, tolerance) in [(Kind::Float, 1e-4), (Kind::BFloat16, 2e-2)] {
            let leaves = [8, 2, 2].map(|heads| leaf(&[2, 37, heads, 64], kind).to_device(card).detach());
            let leaves = leaves.map(|leaf| leaf.set_requires_grad(true));
            for (mask, causal) in sights(8, kind, card) {
                let [q, k, v] = split(&leaves);
                let is_leaner = Grouped { q: &q, k: &k, v: &v, mask: mask.as_ref(), causal }.is_leaner();
                // without a mask flash attention takes groups
                assert_eq!(is_leaner, kind == Kind::Float || mask.is_some(), "{kind:?} {causal}");
                let theirs = |l: &[Tensor]| {
                    let [q, k, v] = split(l).map(|xs| xs.to_kind(FP64));
                    let [k, v] =
                        [k, v].map(|xs| xs.unsqueeze(2).expand([2, 2, 4, 37, 64], false).reshape([2, 8, 37, 64]));
                    let below = Tensor::ones([37, 37], (Kind::Bool, card)).tril(0);
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

    #[test]
    fn packed_bias_shows_the_prefix_and_the_own_question() {
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
