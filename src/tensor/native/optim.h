// AdamW with moments in 8 bits.
#pragma once
#include <ATen/core/Tensor.h>

namespace prsmed {

// What a step of one flat piece of a parameter works with. Codes are u8, one scale for each block of 256.
struct Adamw8 {
  at::Tensor param, grad, first_codes, first_scales, second_codes, second_scales, step;
  at::Tensor signed_map, unsigned_map;  // 256 values each, ascending
  at::Tensor rate;                      // learning rate as a scalar where `param` is; undefined: `learning_rate`
  at::Tensor skip;                      // fp32 scalar, 1: change nothing; undefined: step
  double learning_rate, beta1, beta2, weight_decay, epsilon;
};

void step8(const Adamw8& work);           // the CPU's loop, a kernel of ours, or libtorch's operators
void step8_composed(const Adamw8& work);  // libtorch's operators, in bounded chunks
}  // namespace prsmed
