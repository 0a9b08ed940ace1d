// AdamW with moments in 8 bits: where a fused kernel for cards may take over.
#pragma once
#include <ATen/core/Tensor.h>

namespace prsmed {

// What a step of one flat piece of a parameter works with. Codes are u8, one scale for each block of 256.
struct Adamw8 {
  at::Tensor param, grad, first_codes, first_scales, second_codes, second_scales, step;
  at::Tensor signed_map, unsigned_map;  // 256 values each, ascending
  at::Tensor rate;                      // learning rate as a scalar on the card; undefined: `learning_rate`
  at::Tensor skip;                      // fp32 scalar, 1: change nothing; undefined: step
  double learning_rate, beta1, beta2, weight_decay, epsilon;
};

// A kernel for CUDA that does all of `Adamw8` at once and returns true, or false to leave it to libtorch's operators. Null
// until somebody sets it.
using Adamw8Kernel = bool (*)(const Adamw8&);
extern Adamw8Kernel adamw8_kernel;

void step8(const Adamw8& work);           // chooses
void step8_composed(const Adamw8& work);  // libtorch's operators, in bounded chunks
}  // namespace prsmed
