// 8-bit AdamW.
#pragma once
#include <ATen/core/Tensor.h>

namespace prsmed {

// Inputs of a step on one flat chunk of a parameter. Codes are u8, with one scale per block of 256.
struct Adamw8 {
  at::Tensor param, grad, first_codes, first_scales, second_codes, second_scales, step;
  at::Tensor signed_map, unsigned_map;  // 256 values each, ascending
  at::Tensor rate;                      // learning rate, a scalar on `param`'s device; undefined: `learning_rate`
  at::Tensor found_inf;                 // fp32 scalar; if it is 1 the step changes nothing; undefined: 0
  double learning_rate, beta1, beta2, weight_decay, epsilon;
};

void step8(const Adamw8& work);           // on the CPU a loop, else the CUDA kernel or libtorch's operators
void step8_composed(const Adamw8& work);  // libtorch's operators, in chunks of limited size
}  // namespace prsmed
