// Attention bias of packed sequences: 0 where a token may attend to another (of block 0 or its own block, not after
// it), minus infinity elsewhere, and in the padding of rows.
#include "args.h"
#include "device.cuh"

template <typename T, int V> __device__ void packed_bias(const PackedBiasArgs& a) {
  const T seen = narrow<T>(0.0f), hidden = narrow<T>(__uint_as_float(0xff800000u));
  for (unsigned i = global_thread() * V; i < a.count; i += all_threads() * V) {
    const unsigned rows = quotient(i, a.row), batch = quotient(rows, a.tokens);
    const unsigned first = i - rows * a.row.divisor, query = rows - batch * a.tokens.divisor;
    const long long* blocks = a.blocks + batch * a.tokens.divisor;
    const long long custom = blocks[query];
    Pack<T, V> out;
    for (int v = 0; v < V; ++v) {
      const unsigned key = first + v;
      out.at[v] = key <= query && (blocks[key] == 0 || blocks[key] == custom) ? seen : hidden;
    }
    store<T, V>(static_cast<T*>(a.bias) + i, out);
  }
}

PRSMED_EACH_TYPE(packed_bias, packed_bias, PackedBiasArgs)
