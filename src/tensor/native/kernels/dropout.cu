// Dropout without scaling. The mask depends only on a seed and the index of the element (the CPU's loops in
// `functions.cpp` give the same mask). Rows have keys from SplitMix64 (Steele et al. 2014); Wellons' `lowbias32` mixes
// the bits.
#include "args.h"
#include "device.cuh"

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

template <typename T, int V> __device__ void dropout(const DropoutArgs& a) {
  const long long seed = a.seed_at ? *a.seed_at : a.seed;
  for (unsigned i = global_thread() * V; i < a.count; i += all_threads() * V) {
    const unsigned row = quotient(i, a.dim), column = i - row * a.dim.divisor;
    const unsigned key = row_key(seed, row);
    auto xs = load<T, V>(static_cast<const T*>(a.x) + i);
    for (int v = 0; v < V; ++v)
      if (!keeps(key, column + v, a.threshold)) xs.at[v] = narrow<T>(0.0f);
    store<T, V>(static_cast<T*>(a.y) + i, xs);
  }
}

PRSMED_EACH_TYPE(dropout, dropout, DropoutArgs)
