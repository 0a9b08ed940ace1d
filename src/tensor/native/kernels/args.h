// Arguments of the kernels, one struct each, shared by NVRTC, the CPU code that fills them, and the emulation.
// Sizes and strides count elements.
#pragma once

// A divisor of numbers below 2^31, for a product and a shift instead of a division (Granlund & Montgomery 1994).
struct Divider {
  unsigned divisor, magic, shift;
};

struct RmsNormArgs {
  const void* x;       // [rows, dim]
  const void* weight;  // [dim]
  const void* dy;      // [rows, dim], backward only
  void* y;             // [rows, dim]: the output, or the gradient of x
  float* rstd;         // [rows]: 1 / sqrt(mean(x^2) + eps), written forward, read backward
  float* partial;      // [chunks, dim]: the weight's gradient before the sum over chunks
  long long rows, dim;
  float eps;
};

struct RotaryArgs {
  void* x;                               // [b, t, h 2 half], turned in place; strides of batch and token below
  const void *cos, *sin;                 // [t, half] or [b, t, half], contiguous
  Divider heads, tokens, half;
  unsigned pairs;  // b t h half
  long long x_batch, x_token;
  long long table_batch;  // 0 where all rows share the table
  int backward;
};

struct DropoutArgs {
  const void* x;             // [rows, dim]
  void* y;                   // the same; may be x
  const long long* seed_at;  // where the seed is; null = `seed`
  long long seed;
  Divider dim;
  unsigned count;
  unsigned threshold;  // the probability of being dropped, of 2^32
};

struct LowRankArgs {
  const void* x;                // [rows, dim]
  const float* a[3];            // [rank, dim] each: the master weights
  const void* g[3];             // backward: gradients of the products with a, [rows, rank] each
  const long long* seed_at[3];  // where the seeds are; null = `seed`
  long long seed[3];
  float* partial;      // forward [splits, rows, adapters rank]; gradient of a [splits, adapters rank, dim]
  void* y;             // gradient of x, [rows, dim]
  unsigned threshold;  // the probability of being dropped, of 2^32; 0 = no dropout
  unsigned rows, dim, rank, adapters;
  float factor;  // of the gradients
};

struct LowRankSumArgs {
  const float* partial;  // [splits, count]
  void* y;               // [count]
  long long count;
  unsigned splits;
  float factor;
};

struct SwigluArgs {
  const void *gate, *up;  // [rows, cols] with strides of rows
  const void* dy;         // [rows, cols] contiguous, backward only
  void *y, *dgate, *dup;  // [rows, cols] contiguous
  Divider cols;
  unsigned count;
  long long gate_row, up_row;
};

struct Nf4Args {
  const unsigned char* codes;   // two to a byte, the first in the high half
  const float* absmax;          // one to a block; null with double quantization
  const unsigned char* scales;  // double quantization: codes of absmax
  const float* map;             // [256]: value of each code
  const float* nested;          // one to 256 blocks
  void* y;                      // [count]
  long long count;
  int block_bits;  // log2 of a block's elements
  float offset;
};

struct PackedBiasArgs {
  const long long* blocks;       // [b, t]: all tokens may see block 0, the others are seen by their own tokens alone
  void* bias;                    // [b, t, row], row >= t
  Divider tokens, row;
  unsigned count;  // b t row
};

struct Adamw8Args {
  float* param;             // [count]
  const float* grad;        // [count]
  unsigned char* codes[2];  // [count]: of the first moments, of the second
  float* scales[2];         // one to 256 elements
  const float* map[2];      // [256] each, ascending: value of each code
  const float* step;        // how many steps this makes
  const float* rate_at;     // where the learning rate is; null = `rate`
  const float* found_inf;   // nothing changes where it is 1; may be null
  double rate, weight_decay, beta1_exact, beta2_exact;
  float beta1, rest1, beta2, rest2, epsilon;
  long long count;
};
