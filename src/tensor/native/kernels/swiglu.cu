// SwiGLU (Shazeer 2020): y = silu(gate) up, with silu rounded before the product, as by libtorch's operators.
#include "args.h"
#include "device.cuh"

__device__ inline float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

template <typename T, int V> __device__ void swiglu_forward(const SwigluArgs& a) {
  const T *gate = static_cast<const T*>(a.gate), *up = static_cast<const T*>(a.up);
  for (unsigned i = global_thread() * V; i < a.count; i += all_threads() * V) {
    const unsigned row = quotient(i, a.cols), column = i - row * a.cols.divisor;
    const auto gs = load<T, V>(gate + row * a.gate_row + column);
    const auto us = load<T, V>(up + row * a.up_row + column);
    Pack<T, V> out;
    for (int v = 0; v < V; ++v) {
      const float g = widen(gs.at[v]);
      out.at[v] = narrow<T>(rounded<T>(g / (1.0f + expf(-g))) * widen(us.at[v]));
    }
    store<T, V>(static_cast<T*>(a.y) + i, out);
  }
}

template <typename T, int V> __device__ void swiglu_backward(const SwigluArgs& a) {
  const T *gate = static_cast<const T*>(a.gate), *up = static_cast<const T*>(a.up);
  for (unsigned i = global_thread() * V; i < a.count; i += all_threads() * V) {
    const unsigned row = quotient(i, a.cols), column = i - row * a.cols.divisor;
    const auto gs = load<T, V>(gate + row * a.gate_row + column);
    const auto us = load<T, V>(up + row * a.up_row + column);
    const auto ds = load<T, V>(static_cast<const T*>(a.dy) + i);
    Pack<T, V> dgate, dup;
    for (int v = 0; v < V; ++v) {
      const float g = widen(gs.at[v]), d = widen(ds.at[v]), s = sigmoid(g);
      dup.at[v] = narrow<T>(d * rounded<T>(g / (1.0f + expf(-g))));
      dgate.at[v] = narrow<T>(rounded<T>(d * widen(us.at[v])) * s * (1.0f + g * (1.0f - s)));
    }
    store<T, V>(static_cast<T*>(a.dgate) + i, dgate);
    store<T, V>(static_cast<T*>(a.dup) + i, dup);
  }
}

PRSMED_EACH_TYPE(swiglu_forward, swiglu_forward, SwigluArgs)
PRSMED_EACH_TYPE(swiglu_backward, swiglu_backward, SwigluArgs)
