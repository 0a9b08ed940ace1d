// Products with the low-rank matrices of adapters (LoRA). Up to three adapters share one pass over their input x
// [rows, dim]. Each has a dropout mask of its own, which is computed where x is read and never stored. Sums in fp32.
//
//   forward:      low_i = (mask_i x) a_i^T         [rows, rank]; splits of `dim`, then `low_rank_sum`
//   weight_grad:  da_i = g_i^T (mask_i x)          [rank, dim]; splits of `rows`, then `low_rank_sum`
//   input_grad:   dx = sum over i of mask_i (g_i a_i)
//
// A block has 256 threads. A tile of x has `tile` rows or columns; a group is 16 columns of one a_i. Tiles are stored
// with a padding that keeps shared memory free of bank conflicts. `dim` is a multiple of 64, `rank` at most 32.
#include "args.h"
#include "device.cuh"

constexpr int tile = 64, step = 32, padded = step + 4, most_rank = 32;

struct alignas(16) Four { float at[4]; };

__device__ inline Four four(const float* from) { return *reinterpret_cast<const Four*>(from); }

// Eight elements from `from`.
template <typename T> __device__ inline void load_eight(const T* from, float* to) {
  constexpr int width = sizeof(T) == 4 ? 4 : 8;
  for (int i = 0; i < 8; i += width) {
    const auto pack = load<T, width>(from + i);
    for (int v = 0; v < width; ++v) to[i + v] = widen(pack.at[v]);
  }
}

__device__ inline long long seed_of(const LowRankArgs& a, unsigned adapter) {
  return a.seed_at[adapter] ? *a.seed_at[adapter] : a.seed[adapter];
}

// Thread: column `threadIdx % 16` of each group, and four rows. Grid: tiles of rows, splits of `dim`.
template <typename T> __device__ void low_rank_forward(const LowRankArgs& a) {
  alignas(16) __shared__ float xs[3][tile][padded];
  alignas(16) __shared__ float as[3 * most_rank][padded];
  const unsigned column = threadIdx.x % 16, rows = threadIdx.x / 16 * 4, first_row = blockIdx.x * tile;
  const unsigned groups_of_one = (a.rank + 15) / 16, groups = a.adapters * groups_of_one;
  float sums[6][4] = {};
  const unsigned steps = a.dim / step, each = (steps + gridDim.y - 1) / gridDim.y;
  const unsigned last = min((blockIdx.y + 1) * each, steps);
  for (unsigned k = blockIdx.y * each; k < last; ++k) {
    {
      const unsigned row = threadIdx.x / 4, from = threadIdx.x % 4 * 8;
      float loaded[8] = {};
      if (first_row + row < a.rows)
        load_eight<T>(static_cast<const T*>(a.x) + static_cast<long long>(first_row + row) * a.dim + k * step + from,
                      loaded);
      for (unsigned adapter = 0; adapter < a.adapters; ++adapter) {
        const unsigned key = a.threshold ? row_key(seed_of(a, adapter), first_row + row) : 0;
        for (int v = 0; v < 8; ++v)
          xs[adapter][row][from + v] = !a.threshold || keeps(key, k * step + from + v, a.threshold) ? loaded[v] : 0.0f;
      }
    }
    for (unsigned i = threadIdx.x; i < groups * 16 * step; i += blockDim.x) {
      const unsigned group = i / (16 * step), c = i / step % 16 + group % groups_of_one * 16;
      const float* from = a.a[group / groups_of_one];
      as[i / step][i % step] =
          c < a.rank ? rounded<T>(from[static_cast<long long>(c) * a.dim + k * step + i % step]) : 0.0f;
    }
    __syncthreads();
    for (int at = 0; at < step; at += 4) {
#pragma unroll
      for (unsigned group = 0; group < 6; ++group) {
        if (group >= groups) break;
        const Four weight = four(&as[group * 16 + column][at]);
        for (int r = 0; r < 4; ++r) {
          const Four x = four(&xs[group / groups_of_one][rows + r][at]);
          for (int v = 0; v < 4; ++v) sums[group][r] += x.at[v] * weight.at[v];
        }
      }
    }
    __syncthreads();
  }
  const unsigned all = a.adapters * a.rank;
#pragma unroll
  for (unsigned group = 0; group < 6; ++group) {
    if (group >= groups) break;
    const unsigned c = column + group % groups_of_one * 16;
    for (int r = 0; r < 4; ++r) {
      const unsigned row = first_row + rows + r;
      if (c < a.rank && row < a.rows)
        a.partial[(static_cast<long long>(blockIdx.y) * a.rows + row) * all + group / groups_of_one * a.rank + c] =
            sums[group][r];
    }
  }
}

// Thread: row `threadIdx % 16` of each group of a, and four columns. Grid: tiles of columns, splits of `rows`.
template <typename T> __device__ void low_rank_weight_grad(const LowRankArgs& a) {
  alignas(16) __shared__ float xs[3][step][tile];
  alignas(16) __shared__ float gs[3 * most_rank][padded];
  const unsigned own = threadIdx.x % 16, columns = threadIdx.x / 16 * 4, first = blockIdx.x * tile;
  const unsigned groups_of_one = (a.rank + 15) / 16, groups = a.adapters * groups_of_one;
  float sums[6][4] = {};
  const unsigned steps = (a.rows + step - 1) / step, each = (steps + gridDim.y - 1) / gridDim.y;
  const unsigned last = min((blockIdx.y + 1) * each, steps);
  for (unsigned k = blockIdx.y * each; k < last; ++k) {
    {
      const unsigned row = threadIdx.x / 8, from = threadIdx.x % 8 * 8;
      float loaded[8] = {};
      if (k * step + row < a.rows)
        load_eight<T>(static_cast<const T*>(a.x) + static_cast<long long>(k * step + row) * a.dim + first + from,
                      loaded);
      for (unsigned adapter = 0; adapter < a.adapters; ++adapter) {
        const unsigned key = a.threshold ? row_key(seed_of(a, adapter), k * step + row) : 0;
        for (int v = 0; v < 8; ++v)
          xs[adapter][row][from + v] = !a.threshold || keeps(key, first + from + v, a.threshold) ? loaded[v] : 0.0f;
      }
    }
    for (unsigned i = threadIdx.x; i < groups * 16 * step; i += blockDim.x) {
      const unsigned group = i / 16 % groups, c = i % 16 + group % groups_of_one * 16, row = i / 16 / groups;
      const T* from = static_cast<const T*>(a.g[group / groups_of_one]);
      const bool is_inside = c < a.rank && k * step + row < a.rows;
      gs[group * 16 + i % 16][row] =
          is_inside ? rounded<T>(widen(from[static_cast<long long>(k * step + row) * a.rank + c]) * a.factor) : 0.0f;
    }
    __syncthreads();
    for (int at = 0; at < step; at += 4) {
#pragma unroll
      for (unsigned group = 0; group < 6; ++group) {
        if (group >= groups) break;
        const Four grad = four(&gs[group * 16 + own][at]);
        for (int r = 0; r < 4; ++r) {
          const Four x = four(&xs[group / groups_of_one][at + r][columns]);
          for (int v = 0; v < 4; ++v) sums[group][v] += x.at[v] * grad.at[r];
        }
      }
    }
    __syncthreads();
  }
  const unsigned all = a.adapters * a.rank;
#pragma unroll
  for (unsigned group = 0; group < 6; ++group) {
    if (group >= groups) break;
    const unsigned c = own + group % groups_of_one * 16;
    if (c >= a.rank) continue;
    float* to = a.partial + (static_cast<long long>(blockIdx.y) * all + group / groups_of_one * a.rank + c) * a.dim;
    for (int v = 0; v < 4; ++v) to[first + columns + v] = sums[group][v];
  }
}

// Thread: four rows and four columns. Grid: tiles of rows, tiles of columns.
template <typename T> __device__ void low_rank_input_grad(const LowRankArgs& a) {
  alignas(16) __shared__ float gs[most_rank][tile];
  alignas(16) __shared__ float as[most_rank][tile];
  const unsigned columns = threadIdx.x % 16 * 4, rows = threadIdx.x / 16 * 4;
  const unsigned first_row = blockIdx.x * tile, first = blockIdx.y * tile;
  float totals[4][4] = {};
  for (unsigned adapter = 0; adapter < a.adapters; ++adapter) {
    for (unsigned i = threadIdx.x; i < a.rank * tile; i += blockDim.x) {
      const unsigned row = first_row + i / a.rank, c = i % a.rank;
      const T* from = static_cast<const T*>(a.g[adapter]);
      gs[c][i / a.rank] =
          row < a.rows ? rounded<T>(widen(from[static_cast<long long>(row) * a.rank + c]) * a.factor) : 0.0f;
      as[i / tile][i % tile] = rounded<T>(a.a[adapter][static_cast<long long>(i / tile) * a.dim + first + i % tile]);
    }
    __syncthreads();
    float sums[4][4] = {};
    for (unsigned c = 0; c < a.rank; ++c) {
      const Four grad = four(&gs[c][rows]), weight = four(&as[c][columns]);
      for (int r = 0; r < 4; ++r)
        for (int v = 0; v < 4; ++v) sums[r][v] += grad.at[r] * weight.at[v];
    }
    for (int r = 0; r < 4; ++r) {
      const unsigned key = a.threshold ? row_key(seed_of(a, adapter), first_row + rows + r) : 0;
      for (int v = 0; v < 4; ++v)
        if (!a.threshold || keeps(key, first + columns + v, a.threshold)) totals[r][v] += sums[r][v];
    }
    __syncthreads();
  }
  for (int r = 0; r < 4; ++r) {
    if (first_row + rows + r >= a.rows) continue;
    Pack<T, 4> out;
    for (int v = 0; v < 4; ++v) out.at[v] = narrow<T>(totals[r][v]);
    store<T, 4>(static_cast<T*>(a.y) + static_cast<long long>(first_row + rows + r) * a.dim + first + columns, out);
  }
}

// Sums of `splits` partial results of `count` elements, times the factor.
template <typename T> __device__ void low_rank_sum(const LowRankSumArgs& a) {
  for (long long i = global_thread(); i < a.count; i += all_threads()) {
    float sum = 0.0f;
    for (unsigned split = 0; split < a.splits; ++split) sum += a.partial[split * a.count + i];
    static_cast<T*>(a.y)[i] = narrow<T>(sum * a.factor);
  }
}

#define PRSMED_LOW_RANK(name, Args)            \
  PRSMED_KERNEL(name##_fp32, name<float>, Args) \
  PRSMED_KERNEL(name##_bf16, name<Bf16>, Args)  \
  PRSMED_KERNEL(name##_fp16, name<Fp16>, Args)

PRSMED_LOW_RANK(low_rank_forward, LowRankArgs)
PRSMED_LOW_RANK(low_rank_weight_grad, LowRankArgs)
PRSMED_LOW_RANK(low_rank_input_grad, LowRankArgs)
PRSMED_LOW_RANK(low_rank_sum, LowRankSumArgs)
