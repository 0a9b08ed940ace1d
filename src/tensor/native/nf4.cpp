// 4-bit NormalFloat (Dettmers et al. 2023, QLoRA) with the values and layout of bitsandbytes: blocks of 64 in row
// order, two codes per byte, the first in the high half; scales optionally in 8 bits, in blocks of 256, around their
// mean.
#include "nf4.h"

#include "kernels.h"
#include "meta.h"
#include "native.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace prsmed {
namespace {

// clang-format off
constexpr std::array<float, 16> kValues = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
// clang-format on

// The code of a value is the number of thresholds below it.
template <size_t N> std::array<float, N - 1> thresholds(const std::array<float, N>& sorted) {
  std::array<float, N - 1> result;
  for (size_t i = 0; i + 1 < N; ++i) result[i] = (sorted[i] + sorted[i + 1]) / 2;
  return result;
}
const std::array<float, 15> kThresholds = thresholds(kValues);

// The signed dynamic map of 8 bits (Dettmers 2016): 2^i midpoints of 0.1..1, times 10^(i - 6), for i from 0 to 6.
std::array<float, 256> dynamic_map() {
  std::array<float, 256> map;
  size_t next = 0;
  for (int i = 0; i < 7; ++i) {
    const int parts = 1 << i;
    const float step = (1.0f - 0.1f) / static_cast<float>(parts);
    // like libtorch's linspace: from both ends to the middle, rounded once
    auto boundary = [&](int k) {
      const double from_start = double(0.1f) + double(step) * k, to_end = 1.0 - double(step) * (parts - k);
      return static_cast<float>(k < (parts + 1) / 2 ? from_start : to_end);
    };
    const float factor = static_cast<float>(std::pow(10.0, i - 6));
    for (int k = 0; k < parts; ++k) {
      const float mean = factor * ((boundary(k) + boundary(k + 1)) / 2.0f);
      map[next++] = mean;
      map[next++] = -mean;
    }
  }
  map[next++] = 0.0f;
  map[next++] = 1.0f;
  std::sort(map.begin(), map.end());
  return map;
}
const std::array<float, 256> kMap = dynamic_map();
const std::array<float, 255> kMapThresholds = thresholds(kMap);

// Largest magnitude, and the factor of the values. bitsandbytes divides in a last block that is not full.
struct Scale {
  float absmax, factor;
  bool full;
  Scale(const float* x, int64_t count, bool full) : full(full) {
    float most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, std::abs(x[i]));
    absmax = full ? most : std::max(most, 1e-38f);
    factor = 1.0f / std::max(most, 1e-38f);
  }
  float operator()(float x) const { return full ? x * factor : x / absmax; }
};

// ---- to 4 bits
// Packs a block of 64 values, of which the last are zeros where it is not `full`; returns its scale. All loops have a
// fixed length and arrays of their own, so that they become vector instructions.
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
float quantize_block(const float* values, bool full, uint8_t* __restrict packed) {
  alignas(64) float scaled[kBlock], lanes[16] = {};
  alignas(64) int32_t codes[kBlock] = {};
  for (int64_t i = 0; i < kBlock; i += 16)
    for (int64_t j = 0; j < 16; ++j) lanes[j] = std::max(lanes[j], std::abs(values[i + j]));
  const float most = *std::max_element(lanes, lanes + 16), divisor = std::max(most, 1e-38f), factor = 1.0f / divisor;
  // bitsandbytes divides in a last block that is not full
  if (full) {
    for (int64_t i = 0; i < kBlock; ++i) scaled[i] = values[i] * factor;
  } else {
    for (int64_t i = 0; i < kBlock; ++i) scaled[i] = values[i] / divisor;
  }
  for (float threshold : kThresholds)
    for (int64_t i = 0; i < kBlock; ++i) codes[i] += scaled[i] > threshold;
  for (int64_t i = 0; i < kBlock / 2; ++i) packed[i] = static_cast<uint8_t>(codes[2 * i] << 4 | codes[2 * i + 1]);
  return full ? most : divisor;
}

template <class T>
void quantize_blocks(const T* x, int64_t n, uint8_t* packed, float* absmax, int64_t first, int64_t last) {
  alignas(64) float values[kBlock];
  uint8_t bytes[kBlock / 2];
  for (int64_t b = first; b < last; ++b) {
    const int64_t start = b * kBlock, count = std::min(kBlock, n - start);
    if (count == kBlock) {
      for (int64_t i = 0; i < kBlock; ++i) values[i] = static_cast<float>(x[start + i]);
    } else {
      for (int64_t i = 0; i < kBlock; ++i) values[i] = i < count ? static_cast<float>(x[start + i]) : 0.0f;
    }
    absmax[b] = quantize_block(values, count == kBlock, bytes);
    std::copy_n(bytes, (count + 1) / 2, packed + start / 2);
  }
}

void quantize_scales(const float* scales, float offset, int64_t n, uint8_t* codes, float* nested) {
  std::array<float, kNestedBlock> values;
  for (int64_t start = 0; start < n; start += kNestedBlock) {
    const int64_t count = std::min(kNestedBlock, n - start);
    for (int64_t i = 0; i < count; ++i) values[i] = scales[start + i] - offset;
    const Scale scale(values.data(), count, count == kNestedBlock);
    nested[start / kNestedBlock] = scale.absmax;
    for (int64_t i = 0; i < count; ++i) {
      const auto above = std::lower_bound(kMapThresholds.begin(), kMapThresholds.end(), scale(values[i]));
      codes[start + i] = static_cast<uint8_t>(above - kMapThresholds.begin());
    }
  }
}

// Fills the tensors of `into` from `dense`, both on the CPU or both on meta. Returns the offset of the scales.
double quantize(const at::Tensor& dense, const Nf4& into) {
  const bool is_meta = dense.is_meta();
  if (is_meta && for_cuda()) return 0;  // computed on the CPU
  const auto x = dense.contiguous();
  const auto scales = into.nested() ? at::empty({into.blocks()}, x.options().dtype(at::kFloat)) : into.absmax;
  if (!is_meta) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "nf4_quantize", [&] {
      const auto* from = x.const_data_ptr<scalar_t>();
      auto* packed = into.packed.data_ptr<uint8_t>();
      auto* absmax = scales.data_ptr<float>();
      at::parallel_for(0, into.blocks(), 256, [&](int64_t first, int64_t last) {
        quantize_blocks(from, into.numel(), packed, absmax, first, last);
      });
    });
  }
  if (!into.nested()) return 0;
  const auto sum = at::sum(scales);
  if (is_meta) return 0;
  const float offset = sum.item<float>() / static_cast<float>(into.blocks());
  quantize_scales(scales.data_ptr<float>(), offset, into.blocks(), into.absmax.data_ptr<uint8_t>(),
                  into.nested_absmax.data_ptr<float>());
  std::copy(kMap.begin(), kMap.end(), into.nested_map.data_ptr<float>());
  return offset;
}

// ---- dequantization on the CPU
struct Scales {
  const float* absmax = nullptr;
  const uint8_t* codes = nullptr;
  const float *nested = nullptr, *map = nullptr;
  float offset = 0;

  explicit Scales(const Nf4& w) {
    if (!w.nested()) {
      absmax = w.absmax.const_data_ptr<float>();
      return;
    }
    codes = w.absmax.const_data_ptr<uint8_t>();
    nested = w.nested_absmax.const_data_ptr<float>();
    map = w.nested_map.const_data_ptr<float>();
    offset = static_cast<float>(w.offset);
  }
  float operator()(int64_t block) const {
    if (absmax != nullptr) return absmax[block];
    const float product = map[codes[block]] * nested[block / kNestedBlock];
    return product + offset;
  }
};

template <class T> void expand(const std::array<T, 16>& table, const uint8_t* packed, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t byte = packed[i / 2];
    out[i] = table[i % 2 == 0 ? byte >> 4 : byte & 15];
  }
}

#if defined(__x86_64__)
// A whole block of 16-bit values: their lower and upper bytes are looked up 16 at a time.
__attribute__((target("ssse3"))) void expand_block(const uint16_t* table, const uint8_t* packed, uint16_t* out) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 8));
  const __m128i low_byte = _mm_set1_epi16(0x00ff);
  const __m128i lower = _mm_packus_epi16(_mm_and_si128(first, low_byte), _mm_and_si128(second, low_byte));
  const __m128i upper = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
  const __m128i nibble = _mm_set1_epi8(15);
  auto* to = reinterpret_cast<__m128i*>(out);
  for (int half = 0; half < 2; ++half) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed) + half);
    const __m128i even = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble), odd = _mm_and_si128(bytes, nibble);
    const __m128i codes[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
    for (const __m128i& code : codes) {
      const __m128i l = _mm_shuffle_epi8(lower, code), u = _mm_shuffle_epi8(upper, code);
      _mm_storeu_si128(to++, _mm_unpacklo_epi8(l, u));
      _mm_storeu_si128(to++, _mm_unpackhi_epi8(l, u));
    }
  }
}
bool has_shuffle() {
  static const bool has = __builtin_cpu_supports("ssse3");
  return has;
}
#endif

template <class T>
void dequantize_blocks(const uint8_t* packed, const Scales& scales, int64_t n, T* out, int64_t first, int64_t last) {
  std::array<T, 16> table;
  for (int64_t b = first; b < last; ++b) {
    const int64_t start = b * kBlock, count = std::min(kBlock, n - start);
    const float scale = scales(b);
    for (size_t i = 0; i < 16; ++i) table[i] = static_cast<T>(kValues[i] * scale);
#if defined(__x86_64__)
    if constexpr (sizeof(T) == 2) {
      if (count == kBlock && has_shuffle()) {
        expand_block(reinterpret_cast<const uint16_t*>(table.data()), packed + start / 2,
                     reinterpret_cast<uint16_t*>(out + start));
        continue;
      }
    }
#endif
    expand(table, packed + start / 2, count, out + start);
  }
}

void dequantize_on_cpu(const Nf4& w, at::Tensor& out) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "nf4_dequantize", [&] {
    const Scales scales(w);
    const auto* packed = w.packed.const_data_ptr<uint8_t>();
    auto* to = out.data_ptr<scalar_t>();
    at::parallel_for(0, w.blocks(), 512, [&](int64_t first, int64_t last) {
      dequantize_blocks(packed, scales, w.numel(), to, first, last);
    });
  });
}

// ---- dequantization with libtorch's operators
at::Tensor composed_scales(const Nf4& w) {
  if (!w.nested()) return w.absmax;
  auto nested = w.nested_absmax.repeat_interleave(kNestedBlock).narrow(0, 0, w.blocks());
  return w.nested_map.index_select(0, w.absmax.to(at::kInt)).mul_(nested).add_(w.offset);
}

void dequantize_composed(const Nf4& w, at::Tensor& out) {
  constexpr int64_t chunk = int64_t(1) << 20;  // bytes; a multiple of a block
  auto pairs = at::empty({256, 2}, at::kFloat);
  for (int64_t byte = 0; byte < 256; ++byte) {
    pairs.data_ptr<float>()[2 * byte] = kValues[byte >> 4];
    pairs.data_ptr<float>()[2 * byte + 1] = kValues[byte & 15];
  }
  pairs = pairs.to(w.packed.device());
  const auto scales = composed_scales(w), packed = w.packed.view({-1}), flat = out.view({-1});
  for (int64_t from = 0; from < packed.size(0); from += chunk) {
    const int64_t bytes = std::min(chunk, packed.size(0) - from);
    const int64_t start = 2 * from, count = std::min(2 * bytes, w.numel() - start);
    auto values = pairs.index_select(0, packed.narrow(0, from, bytes).to(at::kInt)).view({-1}).narrow(0, 0, count);
    auto own = scales.narrow(0, start / kBlock, (count + kBlock - 1) / kBlock);
    if (count % kBlock == 0) values = values.view({-1, kBlock}).mul_(own.unsqueeze(1)).view({-1});
    else values = values * own.repeat_interleave(kBlock).narrow(0, 0, count);
    flat.narrow(0, start, count).copy_(values);
  }
}

// ---- the operator, which traces and profiles record
at::Tensor dequantize_op(const at::Tensor& packed, const at::Tensor& absmax, const OptT& nested_absmax,
                         const OptT& nested_map, double offset, int64_t rows, int64_t cols, at::ScalarType kind) {
  const Nf4 w{packed, absmax, nested_absmax.value_or(at::Tensor()), nested_map.value_or(at::Tensor()), offset,
              rows,   cols};
  auto out = at::empty({rows, cols}, packed.options().dtype(kind));
  if (packed.is_meta()) return out;
  if (packed.is_cpu()) dequantize_on_cpu(w, out);
  else if (!kernels::nf4({w.packed, w.absmax, w.nested_absmax, w.nested_map, w.offset}, out))
    dequantize_composed(w, out);
  return out;
}

TORCH_LIBRARY(prsmed_nf4, m) {
  m.def(
      "dequantize(Tensor packed, Tensor absmax, Tensor? nested_absmax, Tensor? nested_map, float offset, int rows, "
      "int cols, ScalarType kind) -> Tensor");
  m.impl("dequantize", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(dequantize_op));
}

// ---- a frozen linear layer
struct Held : torch::CustomClassHolder {
  explicit Held(Nf4 weight) : weight(std::move(weight)) {}
  Nf4 weight;
};

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// x W^T (+ bias): saves neither x nor the dense W, which is dequantized again for the gradient of x.
struct Nf4Linear : torch::autograd::Function<Nf4Linear> {
  static Variable forward(AutogradContext* ctx, c10::intrusive_ptr<Held> held, Variable x,
                          std::optional<Variable> bias) {
    ctx->saved_data["weight"] = c10::IValue::make_capsule(held);
    ctx->saved_data["biased"] = bias.has_value();
    return at::linear(x, nf4_dequantize(held->weight, x.scalar_type()), bias);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto held = c10::static_intrusive_pointer_cast<Held>(ctx->saved_data["weight"].toCapsule());
    const Nf4& w = held->weight;
    const auto grad = grads[0].reshape({-1, w.rows});
    auto shape = grads[0].sizes().vec();
    shape.back() = w.cols;
    Variable gx, gb;
    if (ctx->needs_input_grad(0)) gx = grad.mm(nf4_dequantize(w, grad.scalar_type())).view(shape);
    // only a defined input has an index
    if (ctx->saved_data["biased"].toBool() && ctx->needs_input_grad(1)) gb = grad.sum(0);
    return {Variable(), gx, gb};
  }
};

}  // namespace

const float* nf4_values() { return kValues.data(); }

at::Tensor nf4_dequantize(const Nf4& w, at::ScalarType kind) {
  using Op = at::Tensor(const at::Tensor&, const at::Tensor&, const OptT&, const OptT&, double, int64_t, int64_t,
                        at::ScalarType);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("prsmed_nf4::dequantize", "").typed<Op>();
  auto optional = [](const at::Tensor& t) { return t.defined() ? OptT(t) : OptT(); };
  return op.call(w.packed, w.absmax, optional(w.nested_absmax), optional(w.nested_map), w.offset, w.rows, w.cols, kind);
}

at::Tensor nf4_dequantize_composed(const Nf4& w, at::ScalarType kind) {
  auto out = at::empty({w.rows, w.cols}, w.packed.options().dtype(kind));
  dequantize_composed(w, out);
  return out;
}
}  // namespace prsmed

namespace {
// The tensors of a matrix in the C ABI; the nested two are null if scales are fp32.
struct RawNf4 {
  at::Tensor *packed, *absmax, *nested_absmax, *nested_map;
  double offset;
  int64_t rows, cols;
  prsmed::Nf4 weight() const {
    auto piece = [](at::Tensor* t) { return t == nullptr ? at::Tensor() : *t; };
    return {*packed, *absmax, piece(nested_absmax), piece(nested_map), offset, rows, cols};
  }
};
}  // namespace

extern "C" {

// The published 16 values.
void prsmed_nf4_values(float* out) noexcept { std::copy_n(prsmed::nf4_values(), 16, out); }

// Fills the tensors and the offset from a dense matrix on the same device (CPU or meta).
char* prsmed_nf4_quantize(at::Tensor* dense, const RawNf4* into, double* offset) {
  PRSMED_TRY({
    at::NoGradGuard guard;
    *offset = prsmed::quantize(dense->detach(), into->weight());
  })
}

char* prsmed_nf4_dequantize(const RawNf4* weight, int32_t kind, bool composed, at::Tensor** out) {
  PRSMED_TRY({
    at::NoGradGuard guard;
    const auto type = static_cast<at::ScalarType>(kind);
    *out = new at::Tensor(composed ? prsmed::nf4_dequantize_composed(weight->weight(), type)
                                   : prsmed::nf4_dequantize(weight->weight(), type));
  })
}

// `bias` may be null.
char* prsmed_nf4_linear(at::Tensor* x, const RawNf4* weight, at::Tensor* bias, at::Tensor** out) {
  PRSMED_TRY({
    auto held = c10::make_intrusive<prsmed::Held>(weight->weight());
    std::optional<at::Tensor> b;
    if (bias != nullptr) b = *bias;
    *out = new at::Tensor(prsmed::Nf4Linear::apply(held, *x, b));
  })
}
}
