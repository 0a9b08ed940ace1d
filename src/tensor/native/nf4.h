// NF4: matrices in 4-bit NormalFloat (nf4.cpp).
#pragma once
#include <ATen/core/Tensor.h>

namespace prsmed {
// Weights per block, and scales per block of scales.
constexpr int64_t kBlock = 64, kNestedBlock = 256;

// A [rows, cols] matrix. `absmax` is fp32 [blocks]. If `nested_absmax` is defined, it is u8 [blocks], and the scale of
// block b is nested_map[absmax[b]] * nested_absmax[b / 256] + offset.
struct Nf4 {
  at::Tensor packed, absmax, nested_absmax, nested_map;
  double offset;
  int64_t rows, cols;
  int64_t numel() const { return rows * cols; }
  int64_t blocks() const { return (numel() + kBlock - 1) / kBlock; }
  bool nested() const { return nested_absmax.defined(); }
};

// The published 16 values, in the order of their codes.
const float* nf4_values();

// The dense matrix in `kind`. Allocates only the result. On a GPU it uses the custom CUDA kernel, or libtorch's
// operators if that cannot run.
at::Tensor nf4_dequantize(const Nf4& weight, at::ScalarType kind);
// The same with libtorch's operators, on any device. Needs up to about 60 MiB besides the result.
at::Tensor nf4_dequantize_composed(const Nf4& weight, at::ScalarType kind);
}  // namespace prsmed
