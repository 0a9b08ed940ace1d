// Allocations of libtorch 2.11's CUDA kernels in the caching allocator, repeated on the meta device: outputs, tensors
// saved for the backward pass, and temporaries. Each kernel names its source file in libtorch (below aten/src/ATen,
// without `native/`). The sources were those of versions near 2.11; everything that depends on the version was checked
// in libtorch_cuda.so 2.11.0. tests/plan/cuda.rs compares them with a GPU if there is one; this has not been done yet.
//
// Not included, because they belong to the device and not to an operator: workspaces of cuBLAS (shared by cublasLt) and
// of cuDNN's convolutions. Neglected as too small: staging buffers of reductions over several blocks (cuda/Reduce.cuh:
// a partial result per block and output, only if the grid does not fill the GPU, so at most some hundred KiB for a
// short time), and sums over channels in batch norms of channels-last maps. Assumed: attention uses the flash,
// memory-efficient or math kernel, in this order. On compute capability 9.0 and 10.0 libtorch 2.11 prefers cuDNN's
// attention, which `prsmed_flash_attention` (autograd.cpp) turns off.
#include "meta.h"
#include "mirror.h"

#include <ATen/ExpandUtils.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/_scaled_dot_product_attention_math_native.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/add_meta_dispatch.h>
#include <ATen/ops/addmm_meta_dispatch.h>
#include <ATen/ops/bmm_meta_dispatch.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cumsum_meta_dispatch.h>
#include <ATen/ops/div_meta_dispatch.h>
#include <ATen/ops/dropout_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu_backward_meta_dispatch.h>
#include <ATen/ops/mean_meta_dispatch.h>
#include <ATen/ops/mm_meta_dispatch.h>
#include <ATen/ops/mul_meta_dispatch.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/sub_meta_dispatch.h>
#include <ATen/ops/sum_meta_dispatch.h>
#include <ATen/ops/upsample_bilinear2d_backward_meta_dispatch.h>
#include <ATen/ops/upsample_bilinear2d_meta_dispatch.h>
#include <ATen/ops/upsample_nearest2d_meta_dispatch.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <unordered_set>

namespace prsmed::cuda {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
bool has(const OptT& t) { return t && t->defined(); }
at::ScalarType accumulated(const Tensor& t) { return reduced(t) ? at::kFloat : t.scalar_type(); }
at::TensorOptions fp32(const Tensor& like) { return like.options().dtype(at::kFloat); }

// ---- attention: transformers/attention.cpp, transformers/cuda/{sdp_utils.cpp,attention.cu,attention_backward.cu} ---
enum class Backend { Flash, Efficient, Math };

struct Heads {
  bool same_width, equal, grouped, dense;
  Heads(const Tensor& q, const Tensor& k, const Tensor& v, bool gqa)
      : same_width(q.size(-1) == k.size(-1) && q.size(-1) == v.size(-1)),
        equal(q.size(1) == k.size(1) && q.size(1) == v.size(1)),
        grouped(gqa && k.size(1) == v.size(1) && q.size(1) % k.size(1) == 0),
        dense(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.size(0) == k.size(0) && q.size(0) == v.size(0) &&
              q.size(2) > 0 && k.size(2) > 0) {}
};

// The first kernel that supports the call; libtorch 2.11's memory-efficient one supports no grouped queries.
Backend choose(const Tensor& q, const Tensor& k, const Tensor& v, const OptT& mask, double dropout, bool causal,
               bool gqa) {
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4) return Backend::Math;
  const Heads heads(q, k, v, gqa);
  const int64_t width = q.size(-1);
  auto inner = [](const Tensor& t, bool ignore_single) {
    return t.stride(-1) == 1 || (ignore_single && t.size(-1) == 1);
  };
  const int32_t sm = gpu().capability;
  const bool trains = at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  const bool too_wide = trains && ((sm >= 86 && sm <= 89) || sm >= 120) &&
                        ((width > 192 && width <= 224) || (width > 224 && dropout > 0));
  if (reduced(q) && !has(mask) && heads.dense && heads.same_width && width <= 256 && sm >= 80 && !too_wide &&
      !(causal && q.size(2) != k.size(2)) && (heads.equal || heads.grouped) && inner(q, true) && inner(k, true) &&
      inner(v, true))
    return Backend::Flash;
  const int64_t alignment = reduced(q) ? 8 : 4;
  const bool known = reduced(q) ? q.scalar_type() == at::kHalf || sm >= 80 : q.scalar_type() == at::kFloat;
  if (known && heads.dense && heads.equal && width == k.size(-1) && width % alignment == 0 &&
      v.size(-1) % alignment == 0 && inner(q, false) && inner(k, false) && inner(v, false) &&
      (!has(mask) || inner(*mask, false)))
    return Backend::Efficient;
  return Backend::Math;
}

bool deterministic() { return at::globalContext().deterministicAlgorithms(); }

// flash_attn/flash_api.cpp, num_splits_heuristic: keys are split if heads and queries do not fill the GPU.
int64_t flash_splits(int64_t blocks, int64_t width, int64_t keys) {
  const int64_t places = 2 * gpu().multiprocessors, columns = width <= 64 ? 256 : width <= 128 ? 128 : 64;
  const int64_t key_blocks = ceil_div(keys, columns);
  if (static_cast<float>(blocks) >= 0.8F * static_cast<float>(places)) return 1;
  auto eligible = [&](int64_t n) { return n == 1 || ceil_div(key_blocks, n) != ceil_div(key_blocks, n - 1); };
  auto efficiency = [&](int64_t n) {
    const float waves = static_cast<float>(blocks * n) / static_cast<float>(places);
    return waves / std::ceil(waves);
  };
  const int64_t most = std::min({int64_t(128), places, key_blocks});
  float best = 0;
  for (int64_t n = 1; n <= most; ++n)
    if (eligible(n)) best = std::max(best, efficiency(n));
  for (int64_t n = 1; n <= most; ++n)
    if (eligible(n) && efficiency(n) >= 0.85F * best) return n;
  return 1;
}

using FlashOut = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

// flash_attn/flash_api.cpp, mha_fwd
FlashOut flash(const Tensor& q, const Tensor& k, const Tensor& v, double p, bool, bool, std::optional<double>) {
  int64_t b = q.size(0), h = q.size(1), t = q.size(2);
  const int64_t d = q.size(3), s = k.size(2), groups = k.size(1);
  auto out = at::empty_like(q.transpose(1, 2));
  auto lse = at::empty({b, h, t}, fp32(q));
  int64_t rows = t, heads = h;
  if (t == 1 && h > groups && p == 0) {  // one query: the heads of a group are treated as queries
    rows = h / groups;
    heads = groups;
  }
  const int64_t splits = p > 0 ? 1 : flash_splits(b * heads * ceil_div(rows, 64), d, s);
  Tensor lse_parts, out_parts;
  if (splits > 1) {
    lse_parts = at::empty({splits, b, heads, rows}, fp32(q));
    out_parts = at::empty({splits, b, heads, rows, round_up(d, d <= 128 ? 32 : 64)}, fp32(q));
  }
  auto wide = q.options().dtype(at::kLong);
  auto random = at::empty({2}, wide), unused = at::empty({}, wide);
  if (p > 0) random = at::empty({2}, wide);
  return {out.transpose(1, 2), lse, Tensor(), Tensor(), t, s, random, unused, at::empty({0}, q.options())};
}

// flash_attn/flash_api.cpp, mha_bwd
Three flash_backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                     const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool, const Tensor&,
                     const Tensor&, std::optional<double>) {
  if (!g.defined()) return {};
  const int64_t b = q.size(0), h = q.size(1), t = q.size(2), d = q.size(3), s = k.size(2);
  auto gc = g.transpose(1, 2).contiguous(), oc = out.transpose(1, 2).contiguous();
  auto dq = at::empty_like(q.transpose(1, 2)), dk = at::empty_like(k.transpose(1, 2));
  auto dv = at::empty_like(v.transpose(1, 2));
  const int64_t rows = round_up(t, 128);
  auto softmax = at::empty({b, h, rows}, fp32(q));
  // blocks of keys add to one gradient of the queries with atomics, or each to its own
  const int64_t sums = deterministic() ? ceil_div(gpu().multiprocessors, b * h) : 1;
  auto dq_sum = at::empty({sums, b, rows, h, round_up(d, d <= 128 ? 32 : 64)}, fp32(q));
  Tensor dk_wide, dv_wide;
  if (k.size(1) != h) {  // grouped: a gradient per query head, then summed
    dk_wide = at::empty({b, s, h, d}, q.options());
    dv_wide = at::empty({b, s, h, d}, q.options());
  }
  return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
}

using VarlenOut = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// flash_attn/flash_api.cpp, mha_varlen_fwd: sequences of several lengths one after another, `[tokens, heads, width]`
VarlenOut flash_varlen(const Tensor& q, const Tensor&, const Tensor&, const OptT&, const OptT&, c10::SymInt,
                       c10::SymInt, double, bool, bool, std::optional<double>, std::optional<c10::SymInt>,
                       std::optional<c10::SymInt>, const OptT&, const OptT&) {
  auto out = at::empty_like(q);
  auto lse = at::empty({q.size(1), q.size(0)}, fp32(q));
  auto wide = q.options().dtype(at::kLong);
  auto random = at::empty({2}, wide), unused = at::empty({}, wide);
  return {out, lse, random, unused, at::empty({0}, q.options())};
}

// flash_attn/flash_api.cpp, mha_varlen_bwd
Three flash_varlen_backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                            const Tensor&, const Tensor& starts, const Tensor&, c10::SymInt, c10::SymInt, double, bool,
                            const Tensor&, const Tensor&, std::optional<double>, std::optional<c10::SymInt>,
                            std::optional<c10::SymInt>) {
  const int64_t h = q.size(1), d = q.size(2), rows = q.size(0) + 128 * (starts.numel() - 1);
  auto gc = g.contiguous(), oc = out.contiguous();
  auto dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  auto softmax = at::empty({h, rows}, fp32(q));
  auto dq_sum = at::empty({rows, h, round_up(d, d <= 128 ? 32 : 64)}, fp32(q));
  Tensor dk_wide, dv_wide;
  if (k.size(1) != h) {  // grouped: a gradient per query head, then summed
    dk_wide = at::empty({k.size(0), h, d}, q.options());
    dv_wide = at::empty({k.size(0), h, d}, q.options());
  }
  return {dq, dk, dv};
}

// transformers/cuda/attention.cu, _efficient_attention_forward. The generator's state is two numbers on the CPU (on the
// GPU during a capture).
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor&, const Tensor& v, const OptT&,
                                                     bool keep_sums, double, bool, std::optional<double>) {
  const int64_t b = q.size(0), h = q.size(1), t = q.size(2);
  auto out = at::empty({b, t, h, v.size(3)}, q.options());
  auto lse = at::empty({b, h, keep_sums ? round_up(t, 32) : 0}, fp32(q));
  Tensor sums;
  if (v.size(3) > 128 && reduced(q)) sums = at::empty({b, t, h, v.size(3)}, fp32(q));
  auto none = at::empty({0}, at::TensorOptions(at::kLong));
  return {out.transpose(1, 2), lse, none, none};
}

// mem_eff_attention/kernel_backward.h (workspace) and kernels/generate_kernels.py (block sizes), for GPUs whose shared
// memory fits the first choice (8.0, 9.0; 8.6 and 8.9 use smaller blocks for heads wider than 64).
int64_t efficient_workspace(const Tensor& q, const Tensor& k, const Tensor& v) {
  const int64_t b = q.size(0), h = q.size(1), t = q.size(2), s = k.size(2);
  const int64_t width = std::max(q.size(3), v.size(3));
  const bool half = reduced(q);
  const int64_t rows = width <= 64 ? 64 : 128, columns = half && width > 64 && width <= 128 ? 128 : 64;
  const int64_t most = width <= 32 ? 32 : width <= 64 ? 64 : width <= 128 ? 128 : 65536;
  const bool in_registers = half && most <= rows;
  const bool sums_keys = !in_registers && half;
  int64_t splits = ceil_div(s, columns);
  if (b * h >= 256 && s <= 2 * columns) splits = 1;
  if (sums_keys) splits = std::min(splits, 200 / (b * h));
  splits = deterministic() ? 1 : std::max<int64_t>(splits, 1);
  int64_t numbers = 0;
  if (sums_keys) numbers += splits * columns * (round_up(q.size(3), rows) + round_up(v.size(3), rows));
  const int64_t block_bytes = 16 + 4 * rows * columns;  // a lock, a counter and the partial gradient of the queries
  numbers += ceil_div(t, rows) * ceil_div(q.size(3), columns) * block_bytes / 4;
  return b * h * round_up(numbers, 4) * 4;
}

// transformers/cuda/attention_backward.cu, _efficient_attention_backward
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& g, const Tensor& q, const Tensor& k,
                                                              const Tensor& v, const Tensor& bias, const Tensor& out,
                                                              const Tensor&, const Tensor&, const Tensor&, double,
                                                              std::array<bool, 4> mask, bool, std::optional<double>) {
  if (!g.defined()) return {};
  const int64_t b = q.size(0), h = q.size(1), t = q.size(2);
  auto gc = g.transpose(1, 2).contiguous();
  auto grad = [](const Tensor& x) { return at::empty(x.transpose(1, 2).sizes(), x.options()).transpose(1, 2); };
  auto dq = grad(q), dk = grad(k), dv = grad(v);
  Tensor db;
  if (bias.defined() && mask[3]) {
    auto sizes = bias.sizes().vec();
    const int64_t last = sizes.back();
    sizes.back() = round_up(last, 16);
    db = at::empty(sizes, bias.options()).slice(-1, 0, last);
  }
  Tensor delta;
  if (reduced(q)) {
    delta = at::empty({b, h, t}, fp32(q));
  } else {
    auto product = at::empty({b, t, h, v.size(3)}, fp32(q));
    auto rows = at::empty({b, t, h}, fp32(q));
    delta = rows.transpose(-2, -1).contiguous();
  }
  hold(efficient_workspace(q, k, v));
  return {dq, dk, dv, db};
}

Tensor padded_to_8(const Tensor& x) {
  const int64_t extra = (8 - x.size(-1) % 8) % 8;
  return extra == 0 ? x : at::constant_pad_nd(x, {0, extra});
}

// ---- convolutions: Convolution.cpp, cudnn/ConvShared.cpp, cuda/DepthwiseConv2d.cu ---------------------------------
// A depthwise convolution of a contiguous map has a kernel in libtorch, which allocates like cuDNN's.
at::MemoryFormat conv_format(const Tensor& x, const Tensor& w) {
  const auto last = at::MemoryFormat::ChannelsLast;
  const bool any = x.suggest_memory_format() == last || w.suggest_memory_format() == last;
  return any && x.scalar_type() != at::kDouble && w.dim() == 4 ? last : at::MemoryFormat::Contiguous;
}

Tensor convolution(const Tensor& x, const Tensor& w, const OptT&, c10::SymIntArrayRef stride,
                   c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                   c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  auto ints = [&](c10::SymIntArrayRef v) {  // one number applies to every dimension
    auto numbers = C10_AS_INTARRAYREF_SLOW(v).vec();
    if (numbers.size() == 1) numbers.resize(x.dim() - 2, numbers[0]);
    return numbers;
  };
  auto sizes = transposed
                   ? at::native::conv_input_size(x.sizes(), w.sizes(), ints(padding), ints(output_padding),
                                                 ints(stride), ints(dilation), groups.expect_int())
                   : at::native::conv_output_size(x.sizes(), w.sizes(), ints(padding), ints(stride), ints(dilation));
  const auto format = conv_format(x, w);
  auto xc = x.contiguous(format);
  auto y = at::empty(sizes, x.options(), format);
  auto wc = w.contiguous(format);
  return y;  // the bias is added in place
}

Three convolution_backward(const Tensor& g, const Tensor& x, const Tensor& w, at::OptionalSymIntArrayRef,
                           c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymIntArrayRef, bool, c10::SymIntArrayRef,
                           c10::SymInt, Mask3 mask) {
  Tensor dx, dw, db;
  {
    auto xc = mask[1] ? x.contiguous(conv_format(x, w)) : x;
    auto gc = g.suggest_memory_format() == xc.suggest_memory_format() ? g : g.contiguous(xc.suggest_memory_format());
    if (mask[0]) {
      const auto format = conv_format(gc, w);
      dx = at::empty(x.sizes(), g.options(), format);
      auto wc = w.contiguous(format), gcc = gc.contiguous(format);
    }
    if (mask[1]) {
      const auto format = conv_format(xc, gc);
      auto gcc = gc.contiguous(format), xcc = xc.contiguous(format);
      dw = at::empty(w.sizes(), g.options(), format);
    }
  }
  if (mask[2]) db = at::empty({g.size(1)}, g.options());
  return {dx, dw, db};
}

// ---- norms: cuda/Normalization.cu; cudnn/BatchNorm.cpp for fp32, which allocates the same and its workspace ----
Three batch_norm(const Tensor& x, const OptT&, const OptT&, const OptT&, const OptT&, bool train, double, double) {
  auto y = at::empty_like(x);
  auto options = x.options().dtype(accumulated(x));
  const int64_t n = train ? x.size(1) : 0;
  auto mean = at::empty({n}, options);
  return {y, mean, at::empty({n}, options)};
}
Three batch_norm_backward(const Tensor&, const Tensor& x, const OptT& w, const OptT&, const OptT&, const OptT&,
                          const OptT&, bool, double, Mask3 mask) {
  Tensor dx, dw, db;
  if (mask[0]) dx = at::empty_like(x);
  auto options = has(w) ? w->options() : x.options();
  if (mask[1]) dw = at::empty({x.size(1)}, options);
  if (mask[2]) db = at::empty({x.size(1)}, options);
  return {dx, dw, db};
}

// ---- dropout: cuda/Dropout.cu -------------------------------------------------------------------------------------
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double, std::optional<bool>) {
  auto mask = at::empty_like(x, x.options().dtype(at::kBool));
  return {at::empty_like(x), mask};
}
Tensor native_dropout_backward(const Tensor& g, const Tensor&, double) {
  return at::empty_like(g, g.options(), g.suggest_memory_format());
}

// ---- the rest -----------------------------------------------------------------------------------------------------
Tensor mean(const Tensor& x, at::OptionalIntArrayRef dims, bool keep, Kind t) {
  return at::meta::mean(x, dims, keep, t);
}
Tensor cumsum(const Tensor& x, int64_t dim, Kind t) {
  auto wide = t && *t != x.scalar_type() ? x.to(*t) : x;
  return at::meta::cumsum(x, dim, t);
}
Tensor bilinear(const Tensor& x, c10::SymIntArrayRef size, bool corners, std::optional<double> sh,
                std::optional<double> sw) {
  return at::meta::upsample_bilinear2d(x, C10_AS_INTARRAYREF_SLOW(size), corners, sh, sw);
}
// cuda/UpSampleNearest2d.cu: a channels-last input stays channels-last, others are made contiguous
Tensor nearest(const Tensor& x, c10::SymIntArrayRef size, std::optional<double> sh, std::optional<double> sw) {
  auto out = at::meta::upsample_nearest2d(x, C10_AS_INTARRAYREF_SLOW(size), sh, sw);
  auto xc = x.contiguous(out.suggest_memory_format());
  return out;
}
Tensor bilinear_backward(const Tensor& g, c10::SymIntArrayRef size, c10::SymIntArrayRef from, bool corners,
                         std::optional<double> sh, std::optional<double> sw) {
  auto dx = at::meta::upsample_bilinear2d_backward(g, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(from),
                                                   corners, sh, sw);
  auto gc = g.contiguous();
  return dx;
}
Tensor& index_add_(Tensor& x, int64_t, const Tensor&, const Tensor&, const at::Scalar&) { return x; }
// cuda/Embedding.cu: more than 3072 ids are sorted, with four lists of the ids' size
Tensor embedding_backward(const Tensor& g, const Tensor& ids, c10::SymInt rows, c10::SymInt, bool) {
  auto gc = g.contiguous();
  if (ids.numel() > 3072) hold(4 * ids.numel() * 8);
  return at::zeros({rows.expect_int(), g.size(-1)}, g.options());
}
// TensorCompare.cpp: a number from the CPU is copied to the device, an operand of another dtype is cast
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  const auto type = at::result_type(a, b);
  auto cast = [&](const Tensor& t) { return t.scalar_type() == type || t.is_cpu() ? t : t.to(type); };
  auto ac = cast(a), bc = cast(b);
  return at::empty(at::infer_size(condition.sizes(), at::infer_size(a.sizes(), b.sizes())), meta_of(type));
}

Tensor& where_out(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& out) {
  auto cast = [&](const Tensor& t) {
    return t.scalar_type() == out.scalar_type() || t.is_cpu() ? t : t.to(out.scalar_type());
  };
  auto ac = cast(a), bc = cast(b);
  out.resize_(at::infer_size(condition.sizes(), at::infer_size(a.sizes(), b.sizes())));
  return out;
}
Tensor& abs_out(const Tensor& x, Tensor& out) {
  out.resize_(x.sizes());
  return out;
}
// cuda/Activation.cpp: only the CPU needs the buffer
std::tuple<Tensor, Tensor> log_sigmoid(const Tensor& x) { return {at::empty_like(x), at::empty({0}, x.options())}; }
Tensor log_sigmoid_backward(const Tensor& g, const Tensor&, const Tensor&) { return at::empty_like(g); }

// group_norm.cpp and cuda/group_norm_kernel.cu, GroupNormKernelImplInternal: a scale and a shift per channel
Three group_norm(const Tensor& x, const OptT& w, const OptT& b, c10::SymInt batch, c10::SymInt channels,
                 c10::SymInt pixels, int64_t groups, double) {
  const int64_t n = batch.expect_int(), c = channels.expect_int(), area = pixels.expect_int();
  auto y = at::empty_like(x);
  const auto type = has(w) && w->scalar_type() != x.scalar_type() ? w->scalar_type() : x.scalar_type();
  auto mean = at::empty({n, groups}, x.options().dtype(type)), rstd = at::empty({n, groups}, x.options().dtype(type));
  if (area > 1 && (has(w) || has(b))) {
    auto a = at::empty({n, c}, x.options().dtype(accumulated(x))), shift = at::empty_like(a);
  }
  return {y, mean, rstd};
}

// A boxed kernel: `Kernel` for CUDA, the mirror for the CPU.
template <auto Kernel>
void or_mirror(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto* kernel = new c10::KernelFunction(c10::KernelFunction::makeFromUnboxedRuntimeFunction(Kernel));
  if (!for_cuda()) return mirror(op, stack);
  kernel->callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
}

std::unordered_set<std::string>& described() {
  static auto* names = new std::unordered_set<std::string>;
  return *names;
}
template <auto Kernel>
void both(torch::Library& m, const char* name) {
  described().insert(std::string("aten::") + name);
  m.impl(name, torch::CppFunction::makeFromBoxedFunction<&or_mirror<Kernel>>());
}
}  // namespace

bool takes_efficient(const Tensor& q, const Tensor& k, const Tensor& v, const OptT& mask, bool causal) {
  return choose(q, k, v, mask, 0.0, causal, false) == Backend::Efficient;
}

bool takes_flash(const Tensor& q, const Tensor& k, const Tensor& v) {
  return choose(q, k, v, std::nullopt, 0.0, false, /*gqa=*/true) == Backend::Flash;
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptT& mask, double dropout, bool causal,
                 std::optional<double> scale, bool gqa) {
  const auto backend = choose(q, k, v, mask, dropout, causal, gqa);
  OptT bias = added_mask(mask, q);
  switch (backend) {
    case Backend::Flash: {
      const int64_t width = q.size(-1);
      const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(width)));
      auto out = std::get<0>(at::_scaled_dot_product_flash_attention(padded_to_8(q), padded_to_8(k), padded_to_8(v),
                                                                     dropout, causal, false, factor));
      return out.size(-1) == width ? out : out.slice(-1, 0, width);
    }
    case Backend::Efficient: {
      const bool trains = at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
      if (has(bias)) bias = aligned_bias(*bias, q, k);
      return std::get<0>(at::_scaled_dot_product_efficient_attention(q, k, v, bias, trains, dropout, causal, scale));
    }
    default: {
      InPlaceSums guard;
      return std::get<0>(
          at::native::_scaled_dot_product_attention_math(q, k, v, bias, dropout, causal, std::nullopt, scale, gqa));
    }
  }
}

// cuda/layer_norm_kernel.cu, layer_norm_cuda
Three layer_norm(const Tensor& x, c10::SymIntArrayRef ns, const OptT& w, const OptT& b, double) {
  auto xc = x.contiguous();
  auto wc = has(w) ? w->contiguous() : Tensor(), bc = has(b) ? b->contiguous() : Tensor();
  auto y = at::empty_like(xc, xc.options(), at::MemoryFormat::Contiguous);
  std::vector<int64_t> stat(x.sizes().begin(), x.sizes().end() - static_cast<int64_t>(ns.size()));
  stat.resize(x.dim(), 1);
  auto options = x.options().dtype(accumulated(x));
  auto mean = at::empty(stat, options);
  return {y, mean, at::empty(stat, options)};
}

// cuda/layer_norm_kernel.cu, layer_norm_backward_cuda and LaunchGammaBetaBackwardCUDAKernel: many short rows are summed
// in two passes
Three layer_norm_backward(const Tensor& g, const Tensor& x, c10::SymIntArrayRef ns, const Tensor&, const Tensor&,
                          const OptT& w, const OptT& b, Mask3 mask) {
  auto xc = x.contiguous();
  auto wc = has(w) ? w->contiguous() : Tensor(), bc = has(b) ? b->contiguous() : Tensor();
  Tensor dx, dw, db;
  if (mask[0]) dx = at::empty_like(xc, xc.options(), at::MemoryFormat::Contiguous);
  if (mask[1]) dw = at::empty_like(wc, wc.options(), at::MemoryFormat::Contiguous);
  if (mask[2]) db = at::empty_like(bc, bc.options(), at::MemoryFormat::Contiguous);
  auto gc = g.contiguous();
  int64_t n = 1;
  for (const auto& size : ns) n *= size.expect_int();
  const int64_t m = x.numel() / std::max<int64_t>(n, 1);
  if ((mask[1] || mask[2]) && m > 64 * 1024 && n / 32 < gpu().multiprocessors / 2) {
    const int64_t rows = std::min(32 * 1024 / ceil_div(n, 32), ceil_div(m, 32));
    Tensor parts_w, parts_b;
    if (mask[1]) parts_w = at::empty({rows, n}, dw.options());
    if (mask[2]) parts_b = at::empty({rows, n}, db.options());
    if (mask[1]) dw = at::empty({n}, dw.options());
    if (mask[2]) db = at::empty({n}, db.options());
  }
  return {dx, dw, db};
}

// Dropout.cpp: the fused kernel, if the probability is neither 0 nor 1
Tensor dropout(const Tensor& x, double p, bool train) {
  if (train && p > 0 && p < 1 && x.numel() > 0) return std::get<0>(at::native_dropout(x, p, train));
  return at::native::dropout(x, p, train);
}

// ---- elementwise: CUDA kernels cast operands while they read them (TensorIterator.cpp) ----------------------------
#define PRSMED_BINARY(NAME)                                                        \
  Tensor NAME(const Tensor& a, const Tensor& b) {                                  \
    if (in_place_node()) {                                                         \
      const auto common = at::result_type(a, b);                                   \
      const auto size = at::infer_size(a.sizes(), b.sizes());                      \
      if (a.scalar_type() == common && a.sizes() == size && reusable(a)) return a; \
      if (b.scalar_type() == common && b.sizes() == size && reusable(b)) return b; \
    }                                                                              \
    return at::meta::NAME(a, b);                                                   \
  }                                                                                \
  Tensor& NAME##_(Tensor& a, const Tensor& b) { return at::meta::NAME##_(a, b); }
PRSMED_BINARY(mul)
PRSMED_BINARY(div)
Tensor& mul_out(const Tensor& a, const Tensor& b, Tensor& out) { return at::meta::mul_outf(a, b, out); }
Tensor add(const Tensor& a, const Tensor& b, const at::Scalar& alpha) {
  if (accumulating() && a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && reusable(a)) return a;
  if (in_place_sums() && reusable(a) && a.dim() >= b.dim() && at::result_type(a, b) == a.scalar_type()) return a;
  return at::meta::add(a, b, alpha);
}
Tensor& add_(Tensor& a, const Tensor& b, const at::Scalar& alpha) { return at::meta::add_(a, b, alpha); }
Tensor& sub_(Tensor& a, const Tensor& b, const at::Scalar& alpha) { return at::meta::sub_(a, b, alpha); }
Tensor sub(const Tensor& a, const Tensor& b, const at::Scalar& alpha) {
  if (in_place_node() && reusable(a)) return a;
  return at::meta::sub(a, b, alpha);
}

Tensor gelu_backward(const Tensor& g, const Tensor& x, std::string_view form) {
  return at::meta::gelu_backward(g, x, form);
}

// ReduceOps.cpp and cuda/ReduceSumProdKernel.cu: sums of half precision to fp32 cast while reading, others cast first
Tensor sum(const Tensor& x, at::OptionalIntArrayRef dims, bool keep, Kind t) {
  auto out = at::meta::sum(x, dims, keep, t);
  const bool reads = reduced(x) && out.scalar_type() == at::kFloat;
  if (out.scalar_type() != x.scalar_type() && !reads) at::empty_like(x, x.options().dtype(out.scalar_type()));
  return out;
}

// ---- matrix products: cuda/Blas.cpp; the workspace belongs to the cuBLAS handle -----------------------------------
Tensor mm(const Tensor& a, const Tensor& b) { return at::meta::mm(a, b); }
Tensor bmm(const Tensor& a, const Tensor& b) { return at::meta::bmm(a, b); }
Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  return at::meta::addmm(c, a, b, beta, alpha);
}

Tensor& addmm_(Tensor& c, const Tensor&, const Tensor&, const at::Scalar&, const at::Scalar&) { return c; }

void install(torch::Library& m) {
  both<&convolution>(m, "convolution");
  both<&convolution_backward>(m, "convolution_backward");
  both<&mean>(m, "mean.dim");
  both<&nearest>(m, "upsample_nearest2d");
  both<&bilinear>(m, "upsample_bilinear2d");
  both<&bilinear_backward>(m, "upsample_bilinear2d_backward");
  both<&index_add_>(m, "index_add_");
  both<&cumsum>(m, "cumsum");
  both<&batch_norm>(m, "native_batch_norm");
  both<&batch_norm_backward>(m, "native_batch_norm_backward");
  both<&group_norm>(m, "native_group_norm");
  both<&native_dropout>(m, "native_dropout");
  both<&native_dropout_backward>(m, "native_dropout_backward");
  both<&embedding_backward>(m, "embedding_dense_backward");
  both<&where>(m, "where.self");
  both<&where_out>(m, "where.self_out");
  both<&abs_out>(m, "abs.out");
  both<&log_sigmoid>(m, "log_sigmoid_forward");
  both<&log_sigmoid_backward>(m, "log_sigmoid_backward");
  m.impl("_scaled_dot_product_flash_attention", flash);
  m.impl("_scaled_dot_product_flash_attention_backward", flash_backward);
  m.impl("_flash_attention_forward", flash_varlen);
  m.impl("_flash_attention_backward", flash_varlen_backward);
  m.impl("_scaled_dot_product_efficient_attention", efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
}

bool describes(const c10::OperatorName& name) {
  return described().count(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name) > 0;
}
}  // namespace prsmed::cuda
