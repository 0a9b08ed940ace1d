// 8-bit AdamW with one scale per block of 256 codes of a map (Dettmers et al. 2022). It has the same operations as
// `step_block` of `optim8.cpp`, so that GPU and CPU give the same bytes. A warp processes a block of codes, eight
// elements per lane, one at a time, because chunks of tensors need not be aligned.
#include "args.h"
#include "device.cuh"

constexpr int adamw8_each = 8;  // elements per lane
constexpr int adamw8_block = 32 * adamw8_each;

// Shared by the threads of a block: values of the codes, midpoints between neighbours, numbers of the step.
struct Adamw8Shared {
  float value[2][256], middle[2][256];
  float decay, correction2, step_size;
};

// Numbers that depend on the learning rate and the step are computed in double, each by a different warp.
__device__ inline void adamw8_prepare(const Adamw8Args& a, Adamw8Shared& s) {
  const double rate = a.rate_at ? static_cast<double>(*a.rate_at) : a.rate, step = static_cast<double>(*a.step);
  for (unsigned i = threadIdx.x; i < 256; i += blockDim.x) {
    for (int k = 0; k < 2; ++k) {
      s.value[k][i] = a.map[k][i];
      if (i < 255) s.middle[k][i] = (a.map[k][i] + a.map[k][i + 1]) * 0.5f;
    }
  }
  if (threadIdx.x == 0) s.decay = static_cast<float>(1 - rate * a.weight_decay);
  if (threadIdx.x == 32) s.correction2 = static_cast<float>(sqrt(1 - pow(a.beta2_exact, step)));
  if (threadIdx.x == 64) s.step_size = static_cast<float>(rate / (1 - pow(a.beta1_exact, step)));
  __syncthreads();
}

// Code of the nearest value; the lower one of two.
__device__ inline unsigned char adamw8_nearest(const float* middle, float x) {
  int code = 0;
#pragma unroll
  for (int step = 128; step > 0; step /= 2)
    if (middle[code + step - 1] < x) code += step;
  return static_cast<unsigned char>(code);
}

// Maximum over a warp, without NaN. All threads of the block must call it.
__device__ inline float adamw8_warp_max(float value) {
  for (int lane = 16; lane > 0; lane /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, value, lane);
    value = value < other ? other : value;
  }
  return value;
}

// Writes the codes of a lane's values; the first lane writes the block's scale.
__device__ inline void adamw8_encode(const float* x, float top, const float* middle, unsigned char* codes, float* scale,
                                     unsigned lane, long long count) {
  const float divisor = top > 0 ? top : 1.0f;
#pragma unroll
  for (int k = 0; k < adamw8_each; ++k)
    if (lane + 32 * k < count) codes[lane + 32 * k] = adamw8_nearest(middle, x[k] / divisor);
  if (lane == 0 && count > 0) *scale = top;
}

__device__ inline void adamw8(const Adamw8Args& a) {
  __shared__ Adamw8Shared s;
  if (a.found_inf && *a.found_inf == 1.0f) return;
  adamw8_prepare(a, s);
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const long long blocks = (a.count + adamw8_block - 1) / adamw8_block;
  // all warps run the loop equally often: those without a block have no elements
  for (long long from = static_cast<long long>(blockIdx.x) * warps; from < blocks;
       from += static_cast<long long>(gridDim.x) * warps) {
    const long long block = from + warp, at = block * adamw8_block, count = a.count - at;
    const float scale1 = count > 0 ? a.scales[0][block] : 0.0f, scale2 = count > 0 ? a.scales[1][block] : 0.0f;
    float p[adamw8_each], g[adamw8_each], m[adamw8_each], v[adamw8_each];
    float top1 = 0.0f, top2 = 0.0f;
    // all loads of a lane are issued before its first store
#pragma unroll
    for (int k = 0; k < adamw8_each; ++k) {
      if (lane + 32 * k >= count) continue;
      const long long i = at + lane + 32 * k;
      p[k] = a.param[i], g[k] = a.grad[i];
      m[k] = s.value[0][a.codes[0][i]], v[k] = s.value[1][a.codes[1][i]];
    }
#pragma unroll
    for (int k = 0; k < adamw8_each; ++k) {
      if (lane + 32 * k >= count) continue;
      m[k] = m[k] * scale1 * a.beta1 + g[k] * a.rest1;
      v[k] = v[k] * scale2 * a.beta2 + g[k] * g[k] * a.rest2;
      const float size = fabsf(m[k]);
      top1 = top1 < size ? size : top1;
      top2 = top2 < v[k] ? v[k] : top2;
      const float denominator = sqrtf(v[k]) / s.correction2 + a.epsilon;
      a.param[at + lane + 32 * k] = p[k] * s.decay - m[k] / denominator * s.step_size;
    }
    top1 = adamw8_warp_max(top1);
    top2 = adamw8_warp_max(top2);
    adamw8_encode(m, top1, s.middle[0], a.codes[0] + at, a.scales[0] + block, lane, count);
    adamw8_encode(v, top2, s.middle[1], a.codes[1] + at, a.scales[1] + block, lane, count);
  }
}

PRSMED_KERNEL(adamw8_fp32, adamw8, Adamw8Args)
