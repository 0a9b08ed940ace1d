// NF4 dequantization (Dettmers et al. 2023) in the layout of bitsandbytes: two codes per byte, the first in the high
// half, and a scale per block, which is an 8-bit code with double quantization.
#include "args.h"
#include "device.cuh"

// clang-format off
__constant__ float nf4_values[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
// clang-format on

// A thread writes `packs` times V elements (an even number that divides a block), from loads that are all issued before
// the first store; or one pair at a time, with an odd end. Neighbouring threads write neighbouring elements.
template <typename T, int V> __device__ void nf4(const Nf4Args& a) {
  constexpr int N = V == 1 ? 2 : V, packs = V == 1 ? 1 : 32 / V;
  __shared__ float table[16];
  if (threadIdx.x < 16) table[threadIdx.x] = nf4_values[threadIdx.x];
  __syncthreads();
  T* y = static_cast<T*>(a.y);
  const long long step = all_threads() * N;
  for (long long from = global_thread() * N; from < a.count; from += packs * step) {
    Pack<unsigned char, N / 2> codes[packs];
    float scales[packs];
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      const long long i = from + k * step, block = i >> a.block_bits;
      if (i >= a.count) continue;
      codes[k] = load<unsigned char, N / 2>(a.codes + i / 2);
      scales[k] = a.absmax ? a.absmax[block] : a.map[a.scales[block]] * a.nested[block >> 8] + a.offset;
    }
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      const long long i = from + k * step;
      if (i >= a.count) continue;
      Pack<T, N> out;
      for (int v = 0; v < N; v += 2) {
        out.at[v] = narrow<T>(table[codes[k].at[v / 2] >> 4] * scales[k]);
        out.at[v + 1] = narrow<T>(table[codes[k].at[v / 2] & 15] * scales[k]);
      }
      if (V > 1) {
        store<T, N>(y + i, out);
      } else {
        y[i] = out.at[0];
        if (i + 1 < a.count) y[i + 1] = out.at[1];
      }
    }
  }
}

PRSMED_EACH_TYPE(nf4, nf4, Nf4Args)
