// Dropout without scaling, with the masks of device.cuh.
#include "args.h"
#include "device.cuh"

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
