// 4-bit NormalFloat matrices (nf4.cpp).
#pragma once
#include <ATen/core/Tensor.h>

namespace prsmed {
// Blocks of 64 weights, and of 256 of their scales.
constexpr int64_t kBlock = 64, kNestedBlock = 256;

// A [rows, cols] matrix. `absmax` is fp32 [blocks], or u8 [blocks] when `nested_absmax` is defined: a block's scale is
// then nested_map[absmax[b]] * nested_absmax[b / 256] + offset.
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

// The dense matrix in `kind`: one allocation, of the result. On a card by a kernel of ours, by libtorch's operators where that
// cannot run.
at::Tensor nf4_dequantize(const Nf4& weight, at::ScalarType kind);
// The same from libtorch's operators, on any device; holds up to about 60 MiB besides the result.
at::Tensor nf4_dequantize_composed(const Nf4& weight, at::ScalarType kind);
}  // namespace prsmed
