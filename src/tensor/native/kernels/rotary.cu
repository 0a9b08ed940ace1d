// Rotary embedding (Su et al. 2021) in place, with the halves of transformers: [x1 c - x2 s, x2 c + x1 s]. Each product
// is rounded as by libtorch's operators. The backward pass rotates in the other direction.
#include "args.h"
#include "device.cuh"

template <typename T, int V> __device__ void rotary(const RotaryArgs& a) {
  for (unsigned i = global_thread() * V; i < a.pairs; i += all_threads() * V) {
    const unsigned heads = quotient(i, a.half), tokens = quotient(heads, a.heads), batch = quotient(tokens, a.tokens);
    const unsigned column = i - heads * a.half.divisor, head = heads - tokens * a.heads.divisor;
    const unsigned token = tokens - batch * a.tokens.divisor;
    T* x = static_cast<T*>(a.x) + batch * a.x_batch + token * a.x_token + head * 2 * a.half.divisor + column;
    const long long at = batch * a.table_batch + token * a.half.divisor + column;
    const auto cs = load<T, V>(static_cast<const T*>(a.cos) + at), ss = load<T, V>(static_cast<const T*>(a.sin) + at);
    auto x1 = load<T, V>(x), x2 = load<T, V>(x + a.half.divisor);
    for (int v = 0; v < V; ++v) {
      const float c = widen(cs.at[v]), s = a.backward ? -widen(ss.at[v]) : widen(ss.at[v]);
      const float u1 = widen(x1.at[v]), u2 = widen(x2.at[v]);
      x1.at[v] = narrow<T>(rounded<T>(u1 * c) - rounded<T>(u2 * s));
      x2.at[v] = narrow<T>(rounded<T>(u2 * c) + rounded<T>(u1 * s));
    }
    store<T, V>(x, x1);
    store<T, V>(x + a.half.divisor, x2);
  }
}

PRSMED_EACH_TYPE(rotary, rotary, RotaryArgs)
