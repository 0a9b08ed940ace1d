// AdamW with 8-bit codes of a dynamic map and one scale per block of 256 (Dettmers et al. 2022).
// The CPU has a threaded loop. A GPU has a kernel (`kernels/adamw8.cu`), or the same step with libtorch's operators if
// the kernel cannot run.
#include "kernels.h"
#include "native.h"
#include "optim.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>

#include "trace.h"

namespace prsmed {
namespace {
using at::Tensor;

constexpr int64_t kBlock = 256;
constexpr int64_t kChunk = int64_t(1) << 20;  // elements per chunk of libtorch's operators

// Values of the codes, and midpoints between neighbours.
struct Map {
  float value[256], middle[255];
  explicit Map(const Tensor& values) {
    const float* v = values.const_data_ptr<float>();
    std::copy(v, v + 256, value);
    for (int i = 0; i < 255; ++i) middle[i] = (v[i] + v[i + 1]) * 0.5F;
  }
  // The code of the nearest value; the lower one of two.
  uint8_t nearest(float x) const {
    int code = 0;
    for (int step = 128; step > 0; step /= 2)
      if (middle[code + step - 1] < x) code += step;
    return static_cast<uint8_t>(code);
  }
  // Codes of `count` values, and their scale.
  void encode(const float* x, float top, uint8_t* codes, float* scale, int64_t count) const {
    const float divisor = top > 0 ? top : 1.0F;
    for (int64_t i = 0; i < count; ++i) codes[i] = nearest(x[i] / divisor);
    *scale = top;
  }
};

// Numbers of a step in fp32, computed in double.
struct Numbers {
  float decay, beta1, rest1, beta2, rest2, correction2, step_size, epsilon;
  Numbers(const Adamw8& w, double rate, double step)
      : decay(static_cast<float>(1 - rate * w.weight_decay)),
        beta1(static_cast<float>(w.beta1)),
        rest1(static_cast<float>(1 - w.beta1)),
        beta2(static_cast<float>(w.beta2)),
        rest2(static_cast<float>(1 - w.beta2)),
        correction2(static_cast<float>(std::sqrt(1 - std::pow(w.beta2, step)))),
        step_size(static_cast<float>(rate / (1 - std::pow(w.beta1, step)))),
        epsilon(static_cast<float>(w.epsilon)) {}
};

struct Block {
  float* param;
  const float* grad;
  uint8_t *first, *second;
  float *first_scale, *second_scale;
  int64_t count;
};

void step_block(const Block& b, const Numbers& n, const Map& first, const Map& second) {
  float m[kBlock], v[kBlock];
  float top1 = 0, top2 = 0;
  for (int64_t i = 0; i < b.count; ++i) {
    const float g = b.grad[i];
    m[i] = first.value[b.first[i]] * *b.first_scale * n.beta1 + g * n.rest1;
    v[i] = second.value[b.second[i]] * *b.second_scale * n.beta2 + g * g * n.rest2;
    top1 = std::max(top1, std::abs(m[i]));
    top2 = std::max(top2, v[i]);
    const float denominator = std::sqrt(v[i]) / n.correction2 + n.epsilon;
    b.param[i] = b.param[i] * n.decay - m[i] / denominator * n.step_size;
  }
  first.encode(m, top1, b.first, b.first_scale, b.count);
  second.encode(v, top2, b.second, b.second_scale, b.count);
}

void step_cpu(const Adamw8& w) {
  if (w.found_inf.defined() && w.found_inf.item<float>() == 1) return;
  const double rate = w.rate.defined() ? w.rate.item<double>() : w.learning_rate;
  const Numbers numbers(w, rate, w.step.item<double>());
  const Map first(w.signed_map), second(w.unsigned_map);
  const int64_t count = w.param.numel(), blocks = (count + kBlock - 1) / kBlock;
  auto* param = w.param.data_ptr<float>();
  const auto* grad = w.grad.const_data_ptr<float>();
  auto *codes1 = w.first_codes.data_ptr<uint8_t>(), *codes2 = w.second_codes.data_ptr<uint8_t>();
  auto *scales1 = w.first_scales.data_ptr<float>(), *scales2 = w.second_scales.data_ptr<float>();
  at::parallel_for(0, blocks, 64, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t at = b * kBlock;
      step_block(
          {param + at, grad + at, codes1 + at, codes2 + at, scales1 + b, scales2 + b, std::min(kBlock, count - at)},
          numbers, first, second);
    }
  });
}

// Numbers of a step as scalars on the GPU, so that the CPU need not know them.
struct Scalars {
  Tensor decay, correction2, step_size;
  explicit Scalars(const Adamw8& w) {
    const auto step = w.step.to(at::kDouble);
    const auto rate = w.rate.defined() ? w.rate.to(at::kDouble) : at::full({}, w.learning_rate, step.options());
    decay = (1 - rate * w.weight_decay).to(at::kFloat);
    correction2 = (1 - at::pow(w.beta2, step)).sqrt().to(at::kFloat);
    step_size = (rate / (1 - at::pow(w.beta1, step))).to(at::kFloat);
  }
};

// Values of the codes, in rows of one block.
Tensor decode(const Tensor& codes, const Tensor& scales, const Tensor& map) {
  auto values = map.index_select(0, codes.reshape({-1}).to(at::kInt)).view(codes.sizes());
  return values.mul_(scales.unsqueeze(1));
}
Tensor encode(const Tensor& values, const Tensor& top, const Tensor& middle) {
  const auto divisor = at::where(top > 0, top, at::ones_like(top)).unsqueeze(1);
  return at::bucketize(values / divisor, middle, /*out_int32=*/true).to(at::kByte);
}
Tensor middles(const Tensor& map) { return (map.narrow(0, 0, 255) + map.narrow(0, 1, 255)).mul_(0.5); }
}  // namespace

void step8_composed(const Adamw8& w) {
  const Scalars scalars(w);
  const auto middle1 = middles(w.signed_map), middle2 = middles(w.unsigned_map);
  const int64_t all = w.param.numel();
  for (int64_t begin = 0; begin < all; begin += kChunk) {
    const int64_t count = std::min(kChunk, all - begin), blocks = (count + kBlock - 1) / kBlock;
    auto rows = [&](const Tensor& flat) {
      auto part = flat.narrow(0, begin, count);
      if (blocks * kBlock != count) part = at::constant_pad_nd(part, {0, blocks * kBlock - count});
      return part.view({blocks, kBlock});
    };
    auto scales = [&](const Tensor& t) { return t.narrow(0, begin / kBlock, blocks); };
    auto put = [&](const Tensor& flat, const Tensor& value) {
      auto target = flat.narrow(0, begin, count);
      const auto fresh = value.reshape({-1}).narrow(0, 0, count);
      target.copy_(w.found_inf.defined() ? at::where(w.found_inf > 0, target, fresh) : fresh);
    };
    auto put_scales = [&](const Tensor& t, const Tensor& value) {
      auto target = scales(t);
      target.copy_(w.found_inf.defined() ? at::where(w.found_inf > 0, target, value) : value);
    };
    const auto grad = rows(w.grad);
    auto m = decode(rows(w.first_codes), scales(w.first_scales), w.signed_map).mul_(w.beta1);
    m.add_(grad.mul(1 - w.beta1));
    // the last block is padded with code 0, the smallest value of the signed map
    if (blocks * kBlock != count) m.view({-1}).narrow(0, count, blocks * kBlock - count).zero_();
    auto v = decode(rows(w.second_codes), scales(w.second_scales), w.unsigned_map).mul_(w.beta2);
    v.add_(grad.mul(grad).mul_(1 - w.beta2));
    auto denominator = v.sqrt().div_(scalars.correction2).add_(w.epsilon);
    auto update = m.div(denominator).mul_(scalars.step_size);
    denominator.reset();
    put(w.param, rows(w.param).mul(scalars.decay).sub_(update));
    update.reset();
    const auto top1 = m.abs().amax(1), top2 = v.amax(1);
    put(w.first_codes, encode(m, top1, middle1));
    put(w.second_codes, encode(v, top2, middle2));
    put_scales(w.first_scales, top1);
    put_scales(w.second_scales, top2);
  }
}

void step8(const Adamw8& work) {
  const auto device = work.param.device();
  if (device.is_cuda() && !kernels::adamw8(work)) return step8_composed(work);
  // reads parameter and gradient, reads and writes codes
  prsmed_trace_cost("prsmed::adamw8", 0, 16.0 * static_cast<double>(work.param.numel()), 4);
  // neither the loop nor the kernel allocates
  if (device.is_cpu() && !kernels::adamw8(work)) step_cpu(work);
}

namespace {
void encode_all(const Tensor& values, const Map& map, uint8_t* codes, float* scales) {
  const auto flat = values.contiguous();
  const auto* x = flat.const_data_ptr<float>();
  for (int64_t at = 0; at < flat.numel(); at += kBlock) {
    const int64_t count = std::min(kBlock, flat.numel() - at);
    float top = 0;
    for (int64_t i = at; i < at + count; ++i) top = std::max(top, std::abs(x[i]));
    map.encode(x + at, top, codes + at, scales + at / kBlock, count);
  }
}
void decode_all(const uint8_t* codes, const float* scales, const float* map, float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = map[codes[i]] * scales[i / kBlock];
}
}  // namespace
}  // namespace prsmed

extern "C" {

// Encodes fp32 values on the CPU into codes and scales.
char* prsmed_encode8(at::Tensor* values, at::Tensor* map, at::Tensor* codes, at::Tensor* scales) {
  PRSMED_TRY(prsmed::encode_all(*values, prsmed::Map(*map), codes->data_ptr<uint8_t>(), scales->data_ptr<float>()))
}

// Decodes them.
char* prsmed_decode8(at::Tensor* codes, at::Tensor* scales, at::Tensor* map, at::Tensor* values) {
  PRSMED_TRY(prsmed::decode_all(codes->const_data_ptr<uint8_t>(), scales->const_data_ptr<float>(),
                                map->const_data_ptr<float>(), values->data_ptr<float>(), values->numel()))
}
}
