//! Plans of single CUDA operators: live and peak bytes, worked out by hand from libtorch's sources (in
//! `aten/src/ATen/native`), and the same operators on a real GPU if there is one.

use super::operands::{BF16, FP32, Work, backward, forward, heads, leaf, zeros};
use super::{config_of, ready};
use prsmed::nn::attention::{self, Mask};
use prsmed::tensor::functions::{LowRank, Segments, packed_bias, rms_norm, rotate, swiglu};
use prsmed::tensor::{Device, Kind, META, Tensor, kernels, ledger, memory, meta, trace};
use prsmed::trainer::Parameter;
use prsmed::trainer::optimizer::AdamW;

struct Case {
    name: &'static str,
    /// Prepares the operands on a device.
    prepare: fn(Device) -> Work,
    /// Growth of live bytes; negative if an autograd graph is freed.
    live: i64,
    /// Peak above the live bytes before.
    peak: u64,
    /// Whether the bytes depend on the number of the GPU's multiprocessors.
    depends_on_gpu: bool,
}

fn case(name: &'static str, live: i64, peak: u64, prepare: fn(Device) -> Work) -> Case {
    Case { name, prepare, live, peak, depends_on_gpu: false }
}

/// Queries, keys and values of 1024 tokens: a prefix of 512, and two questions, with 8 query heads and 2 key-value heads.
fn packed_questions(on: Device) -> ([Tensor; 3], Segments) {
    let keys = || zeros(&[2048], Kind::Int64, on);
    let starts = [[0, 512, 768, 1024, 1024], [0, 512, 1280, 2048, 2048]];
    let starts = starts.map(|starts: [i64; 5]| Tensor::from_slice(&starts).to_kind(Kind::Int).to_device(on));
    let lengths = vec![[512, 512], [256, 768], [256, 768], [0, 0]];
    let leaves = [8, 2, 2].map(|heads| leaf(&[1, 1024, heads * 64], BF16, on));
    (leaves, Segments { from: keys(), to: keys(), starts, lengths })
}

fn self_attention(size: [i64; 4], groups: i64, kind: Kind, device: Device, mask: &Mask) -> (Tensor, Vec<Tensor>) {
    let [b, _, t, d] = size;
    let ((q, q_leaf), (k, k_leaf), (v, v_leaf)) =
        (heads(size, kind, device), heads([b, groups, t, d], kind, device), heads([b, groups, t, d], kind, device));
    (attention::attention(&q, &k, &v, mask, 0.0), vec![q_leaf, k_leaf, v_leaf])
}

/// Attention of prepared heads, measured.
fn attend(size: [i64; 4], groups: i64, kind: Kind, device: Device, causal: bool) -> Work {
    let [b, _, t, d] = size;
    let (q, k, v) = (
        heads(size, kind, device).0,
        heads([b, groups, t, d], kind, device).0,
        heads([b, groups, t, d], kind, device).0,
    );
    let mask = if causal { Mask::Causal } else { Mask::None };
    forward(move || attention::attention(&q, &k, &v, &mask, 0.0))
}

#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn attention_cases() -> Vec<Case> {
    vec![
        // transformers/cuda/flash_attn/flash_api.cpp, mha_fwd: output, log-sum-exp fp32, seed (16) and offset (8)
        case("flash", 5_120_000 + 80_000 + 24, 5_200_024, |on| attend([1, 32, 625, 128], 32, BF16, on, true)),
        // mha_bwd: ones; dq, dk, dv; sums of the softmax for 640 rows; dq in fp32 for 640 rows
        case("flash backward", 3 * 5_120_000 - 80_024, 4 * 5_120_000 + 81_920 + 10_485_760, |on| {
            let (ys, leaves) = self_attention([1, 32, 625, 128], 32, BF16, on, &Mask::Causal);
            backward(ys, leaves, [])
        }),
        case("flash, grouped queries", 1_638_400 + 25_600 + 24, 1_664_024, |on| {
            attend([2, 32, 100, 128], 8, BF16, on, true)
        }),
        // ... and dk and dv for each query head
        case(
            "flash backward, grouped queries",
            1_638_400 + 2 * 409_600 - 25_624,
            2 * 1_638_400 + 2 * 409_600 + 32_768 + 4_194_304 + 2 * 1_638_400,
            |on| {
                let (ys, leaves) = self_attention([2, 32, 100, 128], 8, BF16, on, &Mask::Causal);
                backward(ys, leaves, [])
            },
        ),
        // transformers/attention.cpp, pad_last_dim: heads of 20 become heads of 24
        case("flash, padded heads", 24_576, 4 * 24_576 + 2048 + 24, |on| {
            let [q, k, v] = [0; 3].map(|_| zeros(&[1, 4, 128, 20], BF16, on));
            forward(move || attention::attention(&q, &k, &v, &Mask::None, 0.0))
        }),
        // flash_api.cpp, set_params_splitkv: one block of queries, 16 of keys: 16 partial outputs
        Case {
            depends_on_gpu: true,
            ..case("flash, split keys", 8192, 8192 + 256 + 16 * (256 + 16_384) + 24, |on| {
                let [q, k] = [64, 4096].map(|t| zeros(&[1, 1, t, 64], BF16, on));
                forward(move || attention::attention(&q, &k, &k, &Mask::None, 0.0))
            })
        },
        // transformers/cuda/attention.cu, _efficient_attention_forward: log-sum-exp for 64 rows
        case("efficient fp32", 50_176 + 2048, 52_224, |on| attend([2, 4, 49, 32], 4, FP32, on, false)),
        // transformers/cuda/sdp_utils.cpp: the kernel does not accept grouped queries, so keys and values are repeated;
        // native/attention.cpp: the copies are freed after the kernel
        case("efficient fp32, grouped queries", 32_768 + 1024, 99_328, |on| attend([1, 4, 64, 32], 2, FP32, on, true)),
        // ... and without a backward pass, which needs no log-sum-exp
        case("efficient fp32, grouped queries, no gradient", 32_768, 98_304, |on| {
            let [q, k] = [4, 2].map(|groups| heads([1, groups, 64, 32], FP32, on).0.detach());
            forward(move || attention::attention(&q, &k, &k, &Mask::Causal, 0.0))
        }),
        // attention_backward.cu: ones, three gradients, delta; the workspace of mem_eff_attention/kernel_backward.h
        case("efficient backward fp32", 3 * 50_176 - 2048, 4 * 50_176 + 1568 + 131_200, |on| {
            let (ys, leaves) = self_attention([2, 4, 49, 32], 4, FP32, on, &Mask::None);
            backward(ys, leaves, [])
        }),
        // ... of grouped queries: ones, repeated keys and values, their gradients, that of the queries, the workspace;
        // then the two sums
        case("efficient backward fp32, grouped queries", 65_536 - 1024, 6 * 32_768 + 1024 + 65_600, |on| {
            let (ys, leaves) = self_attention([1, 4, 64, 32], 2, FP32, on, &Mask::Causal);
            backward(ys, leaves, [])
        }),
        // ... bf16, with a bias in the layout of the kernel
        case("efficient bf16 with a bias, grouped queries", 16_384 + 1024, 3 * 16_384 + 1024, |on| {
            let (q, bias) = (heads([1, 4, 64, 32], BF16, on).0, zeros(&[1, 1, 64, 64], BF16, on));
            let k = heads([1, 2, 64, 32], BF16, on).0;
            forward(move || attention::attention(&q, &k, &k, &Mask::Bias(&bias), 0.0))
        }),
        // ... bools: converted to a bias in rows of 56, which is freed after the kernel
        case("efficient bf16 with bools, grouped queries", 12_544 + 1024, 3 * 12_544 + 1024 + 5488, |on| {
            let (q, keep) = (heads([1, 4, 49, 32], BF16, on).0, zeros(&[1, 1, 49, 49], Kind::Bool, on));
            let k = heads([1, 2, 49, 32], BF16, on).0;
            forward(move || attention::attention(&q, &k, &k, &Mask::Keep(&keep), 0.0))
        }),
        // transformers/attention.cpp, pad_bias: rows of 56
        case("efficient bf16 with a bias", 21_952 + 50_176 + 4096, 76_224, |on| {
            let (q, bias) = (heads([4, 4, 49, 32], BF16, on).0, leaf(&[1, 4, 49, 49], BF16, on));
            forward(move || attention::attention(&q, &q, &q, &Mask::Bias(&bias), 0.0))
        }),
        // ... gradient of the bias for each sample, rows of 64
        case(
            "efficient backward with a bias",
            50_176 + 19_208 - 21_952 - 4096,
            4 * 50_176 + 100_352 + 3136 + 262_400,
            |on| {
                let bias = leaf(&[1, 4, 49, 49], BF16, on);
                let (q, q_leaf) = heads([4, 4, 49, 32], BF16, on);
                let [k, v] = [0; 2].map(|_| zeros(&[4, 49, 4, 32], BF16, on).transpose(1, 2));
                let ys = attention::attention(&q, &k, &v, &Mask::Bias(&bias), 0.0);
                backward(ys, vec![q_leaf, bias], [k, v])
            },
        ),
    ]
}

fn elementwise_cases() -> Vec<Case> {
    const M: i64 = 1 << 20;
    vec![
        // TensorIterator.cpp: no casts of operands
        case("mixed sum", 4 * M, 4 << 20, |on| {
            let (xs, ys) = (zeros(&[1024, 1024], BF16, on), zeros(&[1024, 1024], FP32, on));
            forward(move || &xs + &ys)
        }),
        case("mixed product in place", 0, 0, |on| {
            let (mut xs, ys) = (zeros(&[1024, 1024], FP32, on), zeros(&[1024, 1024], BF16, on));
            forward(move || xs.g_mul_(&ys))
        }),
        case("cast", 4 * M, 4 << 20, |on| {
            let xs = zeros(&[1024, 1024], BF16, on);
            forward(move || xs.to_kind(FP32))
        }),
        // cuda/Dropout.cu: a mask of bools is kept
        case("dropout", 3 * M, 3 << 20, |on| {
            let xs = leaf(&[1024, 1024], BF16, on);
            forward(move || xs.dropout(0.1, true))
        }),
        case("dropout backward", 2 * M - M, 4 << 20, |on| {
            let xs = leaf(&[1024, 1024], BF16, on);
            backward(xs.dropout(0.1, true), vec![xs], [])
        }),
        // cuda/ActivationGeluKernel.cu
        case("gelu backward", 2 * M, 4 << 20, |on| {
            let xs = leaf(&[1024, 1024], BF16, on);
            backward(xs.gelu("none"), vec![xs], [])
        }),
        case("silu", 2 * M, 2 << 20, |on| {
            let xs = zeros(&[1024, 1024], BF16, on);
            forward(move || xs.silu())
        }),
        // cuda/Activation.cpp: without the CPU's buffer
        case("log sigmoid", 4 * M, 4 << 20, |on| {
            let xs = leaf(&[1024, 1024], FP32, on);
            forward(move || xs.log_sigmoid())
        }),
        // Copy.cpp: an upload allocates a block
        case("upload", 8192, 8192, |on| {
            let xs = Tensor::from_slice(&[0_i64; 1024]);
            forward(move || xs.to_device(on))
        }),
        // cuda/FusedAdamWKernel.cu and the like work in place; cuda/Lerp.cu too
        case("lerp in place", 0, 0, |on| {
            let (mut xs, ys) = (zeros(&[1024, 1024], FP32, on), zeros(&[1024, 1024], FP32, on));
            forward(move || xs.lerp_(&ys, 0.5))
        }),
    ]
}

fn reduction_cases() -> Vec<Case> {
    vec![
        // cuda/ReduceSumProdKernel.cu reads half precision and sums in fp32
        case("sum to fp32", 4096, 4096, |on| {
            let xs = zeros(&[1024, 64], BF16, on);
            forward(move || xs.sum_dim_intlist([1].as_slice(), false, FP32))
        }),
        // ReduceOps.cpp casts others first
        case("sum of bools", 8192, 8192 + 8 * 65_536, |on| {
            let xs = zeros(&[1024, 64], Kind::Bool, on);
            forward(move || xs.sum_dim_intlist([1].as_slice(), false, Kind::Int64))
        }),
        // cuda/SoftMax.cu
        case("softmax", 131_072, 131_072, |on| {
            let xs = zeros(&[64, 1024], BF16, on);
            forward(move || xs.softmax(-1, BF16))
        }),
        // LossNLL.cpp, cuda/Loss.cu: log-probabilities, the sum and its weight
        case("cross entropy", 409_600 + 8, 409_608, |on| {
            let (xs, labels) = (leaf(&[100, 1024], FP32, on), zeros(&[100], Kind::Int64, on));
            forward(move || xs.cross_entropy_loss(&labels, None::<&Tensor>, prsmed::tensor::Reduction::Sum, -100, 0.0))
        }),
        // cuda/ScanKernels.cpp
        case("cumsum", 1 << 18, 1 << 18, |on| {
            let xs = zeros(&[256, 256], FP32, on);
            forward(move || xs.cumsum(0, FP32))
        }),
    ]
}

fn kept_cases() -> Vec<Case> {
    const M: i64 = 1 << 20;
    vec![
        // native/functions.cpp: 1/root of each row in fp32 is kept
        case("rms norm", 2 * M + 4096, 2 * M as u64 + 4096, |on| {
            let (xs, w) = (leaf(&[1024, 1024], BF16, on), zeros(&[1024], BF16, on));
            forward(move || rms_norm(&xs, &w, 1e-5))
        }),
        // ... ones; the gradient times the weight, that in fp32, a factor for each row (and its product), the result
        case("rms norm backward", 2 * M - 4096, 10 * M as u64 + 4096, |on| {
            let (xs, w) = (leaf(&[1024, 1024], BF16, on), zeros(&[1024], BF16, on));
            backward(rms_norm(&xs, &w, 1e-5), vec![xs], [w])
        }),
        // ... gate and up are kept, the gate times 1 is one
        case("swiglu", 4 * M, 4 << 20, |on| {
            let (gate, up) = (leaf(&[1024, 1024], BF16, on), leaf(&[1024, 1024], BF16, on));
            forward(move || swiglu(&gate * 1.0, &up))
        }),
        case("swiglu in place", 0, 0, |on| {
            let (gate, up) = (zeros(&[1024, 1024], BF16, on), zeros(&[1024, 1024], BF16, on));
            forward(move || swiglu(gate.shallow_clone(), &up))
        }),
        // ... the masked input is temporary (a custom CUDA kernel applies dropout without a mask); the 1024 x 16
        // product is kept, the cast factor is not
        case("low rank", 2 * M + 32_768, 4 * M as u64 + 65_536, |on| {
            let (xs, a, b) = (leaf(&[1024, 1024], BF16, on), leaf(&[16, 1024], FP32, on), leaf(&[1024, 16], FP32, on));
            let product = move |ys| LowRank { a: &a, b: &b, scale: 0.5, dropout: 0.1 }.add_to(ys, &xs);
            forward(move || product(zeros(&[1024, 1024], BF16, on)))
        }),
        // ... two products of halves
        case("rotation", 2 * M, 4 << 20, |on| {
            let (xs, table) = (leaf(&[1, 1024, 1024], BF16, on), zeros(&[1024, 64], BF16, on));
            forward(move || rotate(&xs * 1.0, &table, &table))
        }),
        // flash_attn/flash_api.cpp, mha_varlen_fwd: the result, fp32 sums of rows, the generator's state; copies of keys and
        // values only meanwhile
        case("packed questions", M + 32_768 + 24, 2 * M as u64 + 32_768 + 24, |on| {
            let ([q, k, v], segments) = packed_questions(on);
            forward(move || segments.attend(&q, &k, &v, 64))
        }),
        // mha_varlen_bwd: gradients of the copies for each query head and for each key-value head, fp32 sums of rows and of
        // the gradient of queries, padded for each of four segments; then the sums of the copies
        case("packed questions backward", 1_507_816, 11_583_488, |on| {
            let ([q, k, v], segments) = packed_questions(on);
            backward(segments.attend(&q, &k, &v, 64), vec![q, k, v], segments.starts)
        }),
        // ... rows of 1008; masks of keys in another block and of keys outside block 0
        case("bias of packed texts", 4 * 1001 * 1008, 4 * 1001 * 1008 + 2 * 1001 * 1001 + 2002, |on| {
            let blocks = zeros(&[2, 1001], Kind::Int64, on);
            forward(move || packed_bias(&blocks, BF16))
        }),
    ]
}

fn norm_cases() -> Vec<Case> {
    vec![
        // cuda/layer_norm_kernel.cu: mean and 1/deviation of each row in fp32
        case("layer norm", (4 << 20) + 16_384, (4 << 20) + 16_384, |on| {
            let (xs, w) = (leaf(&[2048, 1024], BF16, on), zeros(&[1024], BF16, on));
            forward(move || xs.layer_norm([1024], Some(&w), Some(&w), 1e-5, true))
        }),
        case("layer norm backward", (4 << 20) - 16_384, 8 << 20, |on| {
            let (xs, w) = (leaf(&[2048, 1024], BF16, on), zeros(&[1024], BF16, on));
            backward(xs.layer_norm([1024], Some(&w), Some(&w), 1e-5, true), vec![xs], [w])
        }),
        // ... many short rows: 2188 partial gradients of weight and bias, then their sums
        Case {
            depends_on_gpu: true,
            ..case(
                "layer norm backward, short rows",
                17_920_000 + 512 - 560_000,
                2 * 17_920_000 + 2 * 560_128 + 768,
                |on| {
                    let (xs, w, b) = (leaf(&[70_000, 64], FP32, on), leaf(&[64], FP32, on), leaf(&[64], FP32, on));
                    backward(xs.layer_norm([64], Some(&w), Some(&b), 1e-5, true), vec![xs, w, b], [])
                },
            )
        },
        // cuda/Normalization.cu
        case("batch norm", 65_536 + 256, 65_792, |on| {
            let (xs, w) = (leaf(&[4, 32, 16, 16], BF16, on), zeros(&[32], FP32, on));
            forward(move || xs.batch_norm(Some(&w), Some(&w), Some(&w), Some(&w), true, 0.1, 1e-5, true))
        }),
        case("batch norm backward", 65_536 + 256 - 256, 2 * 65_536 + 256, |on| {
            let (xs, w, b) = (leaf(&[4, 32, 16, 16], BF16, on), leaf(&[32], FP32, on), leaf(&[32], FP32, on));
            let mean = zeros(&[32], FP32, on);
            let ys = xs.batch_norm(Some(&w), Some(&b), Some(&mean), Some(&mean), true, 0.1, 1e-5, true);
            backward(ys, vec![xs, w, b], [mean])
        }),
    ]
}

fn map_cases() -> Vec<Case> {
    fn conv(xs: &Tensor, w: &Tensor, b: Option<&Tensor>, groups: i64) -> Tensor {
        xs.conv2d(w, b, [1, 1], [1, 1], [1, 1], groups)
    }
    vec![
        // Convolution.cpp, cudnn/ConvShared.cpp; without cuDNN's workspace
        case("convolution", 524_288, 524_288, |on| {
            let (xs, w, b) =
                (zeros(&[2, 64, 32, 32], BF16, on), zeros(&[128, 64, 3, 3], BF16, on), zeros(&[128], BF16, on));
            forward(move || conv(&xs, &w, Some(&b), 1))
        }),
        // ... of a channels-last map: the weight is copied into that layout
        case("convolution, channels last", 524_288, 524_288 + 147_456, |on| {
            let (xs, w) = (zeros(&[2, 32, 32, 64], BF16, on).permute([0, 3, 1, 2]), zeros(&[128, 64, 3, 3], BF16, on));
            forward(move || conv(&xs, &w, None, 1))
        }),
        case("convolution backward", 262_144 + 147_456 + 256, 524_288 + 262_144 + 147_456 + 256, |on| {
            let (xs, w, b) =
                (leaf(&[2, 64, 32, 32], BF16, on), leaf(&[128, 64, 3, 3], BF16, on), leaf(&[128], BF16, on));
            backward(conv(&xs, &w, Some(&b), 1), vec![xs, w, b], [])
        }),
        case("depthwise convolution, channels last", 16_384, 16_384, |on| {
            let (xs, w) = (zeros(&[1, 16, 16, 32], BF16, on).permute([0, 3, 1, 2]), zeros(&[32, 1, 3, 3], BF16, on));
            forward(move || conv(&xs, &w, None, 32))
        }),
        // cuda/UpSampleBilinear2d.cu
        case("enlargement", 4 << 20, 4 << 20, |on| {
            let xs = zeros(&[1, 1, 64, 64], FP32, on);
            forward(move || xs.upsample_bilinear2d([1024, 1024], true, None, None))
        }),
        case("enlargement backward", 16_384, (4 << 20) + 16_384, |on| {
            let xs = leaf(&[1, 1, 64, 64], FP32, on);
            backward(xs.upsample_bilinear2d([1024, 1024], true, None, None), vec![xs], [])
        }),
    ]
}

fn table_cases() -> Vec<Case> {
    vec![
        // Linear.cpp, cuda/Blas.cpp: the bias is added by the product
        case("linear", 1_280_000, 1_280_000, |on| {
            let (xs, w, b) = (zeros(&[1, 625, 512], BF16, on), zeros(&[1024, 512], BF16, on), zeros(&[1024], BF16, on));
            forward(move || xs.linear(&w, Some(&b)))
        }),
        case("linear backward", 640_000, 1_280_000 + 640_000, |on| {
            let (xs, w) = (leaf(&[1, 625, 512], BF16, on), zeros(&[1024, 512], BF16, on));
            backward(xs.linear(&w, None::<&Tensor>), vec![xs], [w])
        }),
        // cuda/Indexing.cu
        case("index select", 100 * 2048, 100 * 2048, |on| {
            let (xs, rows) = (zeros(&[1000, 512], FP32, on), zeros(&[100], Kind::Int64, on));
            forward(move || xs.index_select(0, &rows))
        }),
        case("index select backward", 1000 * 2048, 1100 * 2048, |on| {
            let (xs, rows) = (leaf(&[1000, 512], FP32, on), zeros(&[100], Kind::Int64, on));
            backward(xs.index_select(0, &rows), vec![xs], [rows])
        }),
        // cuda/Embedding.cu
        case("embedding backward", 1000 * 2048, 1100 * 2048, |on| {
            let (table, ids) = (leaf(&[1000, 512], FP32, on), zeros(&[100], Kind::Int64, on));
            backward(Tensor::embedding(&table, &ids, -1, false, false), vec![table], [ids])
        }),
    ]
}

fn cases() -> Vec<Case> {
    let groups = [
        attention_cases(),
        elementwise_cases(),
        kept_cases(),
        reduction_cases(),
        norm_cases(),
        map_cases(),
        table_cases(),
    ];
    groups.into_iter().flatten().collect()
}

/// Growth of live bytes, and peak above the live bytes before.
fn planned(case: &Case) -> (i64, u64) {
    let mut work = (case.prepare)(META);
    ledger::reset_peak();
    let before = ledger::usage().allocated.0;
    let kept = work();
    let now = ledger::usage();
    drop(kept);
    (now.allocated.0.cast_signed() - before.cast_signed(), now.allocated_peak.0 - before)
}

#[test]
fn planned_memory_of_cuda_operators_is_as_worked_out_by_hand() {
    let _alone = ready();
    let _target = meta::enter_target(meta::PlanTarget::Cuda);
    meta::set_gpu(80, 108);
    let cases = cases();
    assert!(cases.len() >= 25);
    let wrong: Vec<String> = cases
        .iter()
        .map(|case| (case, planned(case)))
        .filter(|(case, found)| *found != (case.live, case.peak))
        .map(|(case, found)| format!("{}: expected {:?}, planned {found:?}", case.name, (case.live, case.peak)))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn planned_memory_of_custom_cuda_kernels_is_as_worked_out_by_hand() {
    let _alone = ready();
    let _target = meta::enter_target(meta::PlanTarget::Cuda);
    meta::set_gpu(80, 108);
    kernels::set_mode(kernels::Switch::On);
    // native/kernels.cpp: the bias is written at once
    let bias = case("bias of packed texts", 4 * 1001 * 1008, 4 * 1001 * 1008, |on| {
        let blocks = zeros(&[2, 1001], Kind::Int64, on);
        forward(move || packed_bias(&blocks, BF16))
    });
    let found = planned(&bias);
    kernels::set_mode(kernels::Switch::Off);
    assert_eq!(found, (bias.live, bias.peak));
}

/// Two matrix products in the forward pass, five in the backward pass; half of the operations with a causal mask.
#[test]
fn operations_of_grouped_query_attention_are_counted() {
    let _alone = ready();
    let _target = meta::enter_target(meta::PlanTarget::Cuda);
    let bias = zeros(&[1, 1, 64, 64], FP32, META);
    for (mask, part) in [(Mask::Causal, 0.5), (Mask::Bias(&bias), 1.0)] {
        let recording = trace::begin(meta::PlanTarget::Cuda, true).unwrap();
        let (ys, leaves) = self_attention([1, 4, 64, 32], 2, FP32, META, &mask);
        Tensor::run_backward(&[&ys.sum(FP32)], &leaves, false, false);
        let trace = recording.finish();
        let costs = trace.costs.iter().filter(|cost| trace.ops[usize::from(cost.op)].contains("attention"));
        let found: Vec<_> = costs.map(|cost| (cost.backward, cost.flops)).collect();
        let product = part * 2.0 * f64::from(4 * 64 * 64 * 32);
        assert_eq!(found, [(false, 2.0 * product), (true, 5.0 * product)], "{mask:?}");
    }
}

/// Only pairs that attend to each other: a prefix of 8, questions of 4 and 2, padding of 2.
#[test]
fn operations_of_packed_questions_are_counted() {
    let _alone = ready();
    let _target = meta::enter_target(meta::PlanTarget::Cuda);
    let [q, k, v] = [4, 2, 2].map(|heads| leaf(&[1, 16, heads * 32], BF16, META));
    let keys = || zeros(&[40], Kind::Int64, META);
    let segments = Segments {
        from: keys(),
        to: keys(),
        starts: [0; 2].map(|_| zeros(&[5], Kind::Int, META)),
        lengths: vec![[8, 8], [4, 12], [2, 10], [2, 2]],
    };
    let recording = trace::begin(meta::PlanTarget::Cuda, true).unwrap();
    let ys = segments.attend(&q, &k, &v, 32);
    Tensor::run_backward(&[&ys.sum(FP32)], &[q, k, v], false, false);
    let trace = recording.finish();
    let costs = trace.costs.iter().filter(|cost| trace.ops[usize::from(cost.op)].contains("attention"));
    let found: Vec<_> = costs.map(|cost| (cost.backward, cost.flops)).collect();
    let pairs = f64::from(36 + (4 * 8 + 10) + (2 * 8 + 3) + 3);
    let product = 2.0 * pairs * f64::from(4 * 32);
    assert_eq!(found, [(false, 2.0 * product), (true, 5.0 * product)]);
}

/// The gradient of the queries is kept once for each group of multiprocessors. The flag ends with the plan.
#[test]
fn a_plan_in_a_fixed_order_has_more_gradients_of_attention() {
    let _alone = ready();
    let peaks = ["false", "true"].map(|deterministic| {
        let _target = meta::enter_target(meta::PlanTarget::Cuda);
        let _deterministic = prsmed::tensor::enter_deterministic(deterministic == "true");
        let (ys, leaves) = self_attention([1, 4, 256, 64], 4, BF16, META, &Mask::Causal);
        let before = ledger::usage().allocated.0;
        ledger::reset_peak();
        Tensor::run_backward(&[&ys.sum(FP32)], &leaves, false, false);
        ledger::usage().allocated_peak.0 - before
    });
    // an A100 has 108
    let (parts, bytes) = (108_u64.div_ceil(4), 256 * 4 * 64 * 4);
    assert_eq!(peaks[1] - peaks[0], (parts - 1) * bytes);
    assert!(!prsmed::tensor::is_deterministic());
}

/// Bytes that the adapters of q, k, v and o of a layer of the full model move, forward and backward, and the number of
/// their operators. The gradients of a shared input are summed.
fn adapters_of_a_layer(are_shared: bool) -> (f64, usize) {
    const SIZE: [i64; 3] = [1, 1152, 4096];
    let widths = [SIZE[2], SIZE[2] / 4, SIZE[2] / 4, SIZE[2]];
    let matrices = widths.map(|out| [leaf(&[16, SIZE[2]], FP32, META), leaf(&[out, 16], FP32, META)]);
    let [q, k, v, o] = matrices.each_ref().map(|[a, b]| LowRank { a, b, scale: 1.0, dropout: 0.05 });
    let [y_q, y_k, y_v, y_o] = widths.map(|out| zeros(&[SIZE[0], SIZE[1], out], BF16, META));
    let inputs = [0; 2].map(|_| leaf(&SIZE, BF16, META));
    let recording = trace::begin(meta::PlanTarget::Cuda, true).unwrap();
    let mut sums: Vec<Tensor> = if are_shared {
        LowRank::add_each_to([q, k, v], [y_q, y_k, y_v], &inputs[0]).into()
    } else {
        [(q, y_q), (k, y_k), (v, y_v)].map(|(adapter, ys)| adapter.add_to(ys, &inputs[0])).into()
    };
    sums.push(o.add_to(y_o, &inputs[1]));
    let leaves: Vec<&Tensor> = matrices.iter().flatten().chain(&inputs).collect();
    Tensor::run_backward(&sums, &leaves, false, false);
    let trace = recording.finish();
    (trace.costs.iter().map(|cost| cost.bytes).sum(), trace.costs.len())
}

#[test]
#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn adapters_that_share_their_input_move_half_of_the_bytes() {
    let _alone = ready();
    let _target = meta::enter_target(meta::PlanTarget::Cuda);
    let (apart, operators) = adapters_of_a_layer(false);
    kernels::set_mode(kernels::Switch::On);
    let (shared, fewer) = adapters_of_a_layer(true);
    kernels::set_mode(kernels::Switch::Off);
    println!("{:.1} of {:.1} MB, {:.2}; {fewer} of {operators} operators", shared / 1e6, apart / 1e6, shared / apart);
    assert!(shared <= 0.5 * apart, "{shared} of {apart} bytes");
    assert!(fewer < operators, "{fewer} of {operators} operators");
}

/// Live bytes of the optimizer after a step of two parameters, and its peak in a second step.
fn optimizer_bytes_on_a_gpu(sets: &str) -> (u64, u64) {
    let _target = meta::enter_target(meta::PlanTarget::Cuda);
    let config = config_of("tiny", &format!("train.clip_norm=1 {sets}")).train;
    // three chunks of offloaded state, and a small parameter
    let params = [(3 << 20) - 4096, 1000].map(|size| leaf(&[size], FP32, META));
    let named = params.iter().zip(["large", "small"]);
    let named = named.map(|(tensor, name)| Parameter::new(name, tensor.shallow_clone()));
    let mut optimizer = AdamW::new(named.collect(), &config);
    let share = || ledger::usage().categories.into_iter().find(|category| category.name == "optimizer").unwrap();
    let before = share().allocated.0;
    let mut peak = 0;
    for _ in 0..2 {
        for param in &params {
            param.sum(FP32).backward();
        }
        ledger::reset_peak();
        let gradients = optimizer.measure(1.0).unwrap();
        optimizer.step(1e-3, &gradients).unwrap();
        peak = share().own_peak.0 - before;
    }
    (share().allocated.0 - before, peak)
}

#[test]
fn offloaded_optimizer_state_takes_two_chunks_on_the_gpu() {
    let _alone = ready();
    let (large, small): (u64, u64) = ((3 << 20) - 4096, 1000);
    let counts = 2 * 4;
    let (held, peak) = optimizer_bytes_on_a_gpu("");
    assert_eq!((held, peak), (8 * (large + small) + counts, held), "optimizer state in fp32");
    let (held, peak) = optimizer_bytes_on_a_gpu("train.offload_optimizer=true");
    // in a plan, one number stands for each tensor that is offloaded to the CPU
    let stand_ins = 4 * 4;
    assert_eq!(held, counts + stand_ins);
    assert_eq!(peak, held + 2 * (8 << 20), "two chunks of 1 Mi elements");
    let maps = 2 * 1024;
    let (held, peak) = optimizer_bytes_on_a_gpu("train.optimizer=adamw8bit");
    let eight = 2 * (large + large / 256 * 4) + 8 * small + maps + counts;
    assert_eq!((held, peak), (eight, eight), "codes and scales");
    let (held, peak) = optimizer_bytes_on_a_gpu("train.optimizer=adamw8bit train.offload_optimizer=true");
    let stand_ins = 2 * (1 + 4) + 2 * 4;
    assert_eq!(held, counts + maps + stand_ins);
    let staged = 2 * 2 * ((1 << 20) + (16 << 10));
    assert_eq!(peak, held + staged, "codes and scales of two chunks; the kernel needs no memory");
}

/// Bytes of tensors on a GPU (blocks are up to 1 MiB larger, because libtorch does not split small rests of large ones)
/// once they stay equal for a while: the thread of a backward pass frees its last tensor a moment after the pass.
fn settled_bytes(gpu: Device) -> u64 {
    let read = || memory::requested(gpu).unwrap().0;
    let (mut bytes, mut times) = (read(), 0);
    while times < 10 {
        std::thread::sleep(std::time::Duration::from_millis(1));
        let now = read();
        times = if now == bytes { times + 1 } else { 0 };
        bytes = now;
    }
    bytes
}

#[test]
#[ignore = "needs CUDA"]
fn memory_of_operators_on_cuda_is_as_planned() {
    let _alone = ready();
    let _target = meta::enter_target(meta::PlanTarget::Cuda);
    let gpu = Device::Cuda(0);
    // the first product, product with a bias and convolution create the library handles and their workspaces
    let warm = zeros(&[8, 8, 8, 8], BF16, gpu);
    let (square, bias) = (zeros(&[8, 8], BF16, gpu), zeros(&[8], BF16, gpu));
    drop((warm.matmul(&warm), square.linear(&square, Some(&bias))));
    drop(warm.conv2d(&warm, None::<&Tensor>, [1, 1], [4, 4], [1, 1], 1));
    let wrong: Vec<String> = cases()
        .iter()
        .filter(|case| !case.depends_on_gpu)
        .filter_map(|case| {
            let (live, peak) = planned(case);
            let mut work = (case.prepare)(gpu);
            let before = settled_bytes(gpu);
            memory::begin_window(gpu).unwrap();
            let kept = work();
            let real_live = settled_bytes(gpu).cast_signed() - before.cast_signed();
            let real_peak = memory::requested(gpu).unwrap().1 - before;
            drop(kept);
            // cuDNN's workspaces, or those of libtorch's own convolutions, are not in the plan of an operator
            let near =
                real_live == live && (real_peak == peak || case.name.contains("convolution") && real_peak > peak);
            (!near).then(|| format!("{}: planned {:?}, measured {:?}", case.name, (live, peak), (real_live, real_peak)))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
