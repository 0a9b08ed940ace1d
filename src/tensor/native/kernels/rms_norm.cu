// RMSNorm (Zhang & Sennrich 2019) in fp32, one thread block per row. The normalised value is rounded before the product
// with the weight, as in transformers. Backward of x: with g = dy w and n = x r, dx = r (g - n mean(g n)).
#include "args.h"
#include "device.cuh"

template <typename T, int V> __device__ void rms_norm_forward(const RmsNormArgs& a) {
  const long long row = blockIdx.x;
  const T* x = static_cast<const T*>(a.x) + row * a.dim;
  const T* weight = static_cast<const T*>(a.weight);
  T* y = static_cast<T*>(a.y) + row * a.dim;
  float sum = 0.0f;
  for (long long i = threadIdx.x * V; i < a.dim; i += blockDim.x * V) {
    const auto xs = load<T, V>(x + i);
    for (int v = 0; v < V; ++v) sum += widen(xs.at[v]) * widen(xs.at[v]);
  }
  const float rstd = rsqrtf(block_sum(sum) / static_cast<float>(a.dim) + a.eps);
  if (threadIdx.x == 0) a.rstd[row] = rstd;
  for (long long i = threadIdx.x * V; i < a.dim; i += blockDim.x * V) {
    const auto xs = load<T, V>(x + i);
    const auto ws = load<T, V>(weight + i);
    Pack<T, V> out;
    for (int v = 0; v < V; ++v) out.at[v] = narrow<T>(rounded<T>(widen(xs.at[v]) * rstd) * widen(ws.at[v]));
    store<T, V>(y + i, out);
  }
}

template <typename T, int V> __device__ void rms_norm_backward(const RmsNormArgs& a) {
  const long long row = blockIdx.x;
  const T* x = static_cast<const T*>(a.x) + row * a.dim;
  const T* dy = static_cast<const T*>(a.dy) + row * a.dim;
  const T* weight = static_cast<const T*>(a.weight);
  T* dx = static_cast<T*>(a.y) + row * a.dim;
  const float rstd = a.rstd[row];
  float sum = 0.0f;
  for (long long i = threadIdx.x * V; i < a.dim; i += blockDim.x * V) {
    const auto xs = load<T, V>(x + i);
    const auto gs = load<T, V>(dy + i);
    const auto ws = load<T, V>(weight + i);
    for (int v = 0; v < V; ++v) sum += rounded<T>(widen(gs.at[v]) * widen(ws.at[v])) * (widen(xs.at[v]) * rstd);
  }
  const float mean = block_sum(sum) / static_cast<float>(a.dim);
  for (long long i = threadIdx.x * V; i < a.dim; i += blockDim.x * V) {
    const auto xs = load<T, V>(x + i);
    const auto gs = load<T, V>(dy + i);
    const auto ws = load<T, V>(weight + i);
    Pack<T, V> out;
    for (int v = 0; v < V; ++v) {
      const float g = rounded<T>(widen(gs.at[v]) * widen(ws.at[v]));
      out.at[v] = narrow<T>(rstd * (g - widen(xs.at[v]) * rstd * mean));
    }
    store<T, V>(dx + i, out);
  }
}

// A thread sums V columns over every gridDim.y-th row; libtorch adds up the chunks.
template <typename T, int V> __device__ void rms_norm_weight_grad(const RmsNormArgs& a) {
  const long long column = global_thread() * V;
  if (column >= a.dim) return;
  float sums[V];
  for (int v = 0; v < V; ++v) sums[v] = 0.0f;
  for (long long row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const auto xs = load<T, V>(static_cast<const T*>(a.x) + row * a.dim + column);
    const auto gs = load<T, V>(static_cast<const T*>(a.dy) + row * a.dim + column);
    for (int v = 0; v < V; ++v) sums[v] += widen(gs.at[v]) * rounded<T>(widen(xs.at[v]) * a.rstd[row]);
  }
  for (int v = 0; v < V; ++v) a.partial[blockIdx.y * a.dim + column + v] = sums[v];
}

PRSMED_EACH_TYPE(rms_norm_forward, rms_norm_forward, RmsNormArgs)
PRSMED_EACH_TYPE(rms_norm_backward, rms_norm_backward, RmsNormArgs)
PRSMED_EACH_TYPE(rms_norm_weight_grad, rms_norm_weight_grad, RmsNormArgs)
