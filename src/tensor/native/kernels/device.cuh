// 16-bit floats, packs of 16 bytes, and sums over a block. Compiled by NVRTC, and by g++ with tests/native/emulate.h.
// Without toolkit headers: the build needs no toolkit, and both compilers compute the same.
#pragma once
#include "args.h"

struct Bf16 { unsigned short bits; };
struct Fp16 { unsigned short bits; };

__device__ inline float widen(float value) { return value; }
__device__ inline float widen(Bf16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }
__device__ inline float widen(Fp16 value) {
#ifdef PRSMED_EMULATED
  return emulated_half_to_float(value.bits);
#else
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value.bits));
  return out;
#endif
}

// Rounds to nearest, ties to even.
template <typename T> __device__ T narrow(float value);
template <> __device__ inline float narrow<float>(float value) { return value; }
template <> __device__ inline Bf16 narrow<Bf16>(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  unsigned short converted;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(converted) : "f"(value));
  return Bf16{converted};
#endif
  if (value != value) return Bf16{0x7fff};
  const unsigned bits = __float_as_uint(value);
  return Bf16{static_cast<unsigned short>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <> __device__ inline Fp16 narrow<Fp16>(float value) {
#ifdef PRSMED_EMULATED
  return Fp16{emulated_float_to_half(value)};
#else
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return Fp16{bits};
#endif
}

// Rounds to T and back, like a tensor between two of libtorch's operators.
template <typename T> __device__ inline float rounded(float value) { return widen(narrow<T>(value)); }

template <typename T, int V> struct alignas(sizeof(T) * V) Pack { T at[V]; };

template <typename T, int V> __device__ inline Pack<T, V> load(const T* from) {
  return *reinterpret_cast<const Pack<T, V>*>(from);
}
template <typename T, int V> __device__ inline void store(T* to, const Pack<T, V>& pack) {
  *reinterpret_cast<Pack<T, V>*>(to) = pack;
}

// For n below 2^31.
__device__ inline unsigned quotient(unsigned n, const Divider& by) { return (__umulhi(n, by.magic) + n) >> by.shift; }

// Dropout masks, which depend only on a seed and the index of the element (the CPU's loops in `functions.cpp` give the
// same masks). Rows have keys from SplitMix64 (Steele et al. 2014); Wellons' `lowbias32` mixes the bits.
__device__ inline unsigned row_key(long long seed, long long row) {
  unsigned long long z =
      static_cast<unsigned long long>(seed) + (static_cast<unsigned long long>(row) + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<unsigned>((z ^ (z >> 31)) >> 32);
}

__device__ inline bool keeps(unsigned key, unsigned column, unsigned threshold) {
  unsigned h = column * 0x9e3779b9u + key;
  h = (h ^ (h >> 16)) * 0x7feb352du;
  h = (h ^ (h >> 15)) * 0x846ca68bu;
  return (h ^ (h >> 16)) >= threshold;
}

__device__ inline long long global_thread() { return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline long long all_threads() { return static_cast<long long>(gridDim.x) * blockDim.x; }

// Sum over all threads of a block of whole warps; all threads get it. All threads must call it.
__device__ inline float block_sum(float value) {
  __shared__ float warps[32];
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
  __syncthreads();  // an earlier sum may still be read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += warps[warp];
  return sum;
}

// Names of kernels: `rms_norm_forward_bf16` processes one element per access, `rms_norm_forward_bf16_wide` 16 bytes.
#define PRSMED_EACH_TYPE(name, body, Args)                \
  PRSMED_KERNEL(name##_fp32, (body<float, 1>), Args)      \
  PRSMED_KERNEL(name##_fp32_wide, (body<float, 4>), Args) \
  PRSMED_KERNEL(name##_bf16, (body<Bf16, 1>), Args)       \
  PRSMED_KERNEL(name##_bf16_wide, (body<Bf16, 8>), Args)  \
  PRSMED_KERNEL(name##_fp16, (body<Fp16, 1>), Args)       \
  PRSMED_KERNEL(name##_fp16_wide, (body<Fp16, 8>), Args)

#ifndef PRSMED_EMULATED
#define PRSMED_KERNEL(name, body, Args) \
  extern "C" __global__ void __launch_bounds__(256) name(Args args) { body(args); }
#endif
