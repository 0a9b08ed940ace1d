// The attention mask of a packed row: a token sees the shared prefix and its own question, up to itself.
#include "args.h"
#include "device.cuh"

__device__ void packed_mask_body(const MaskArgs& a) {
  for (long long i = global_thread(); i < a.count; i += all_threads()) {
    const long long key = i % a.tokens, query = i / a.tokens % a.tokens, row = i / a.tokens / a.tokens;
    const long long of_key = a.segments[row * a.tokens + key], of_query = a.segments[row * a.tokens + query];
    a.mask[i] = key <= query && (of_key == 0 || (of_key > 0 && of_key == of_query));
  }
}

PRSMED_KERNEL(packed_mask, (packed_mask_body), MaskArgs)
