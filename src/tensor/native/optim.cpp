// libtorch's fused AdamW, which tch does not wrap (it takes lists and returns nothing).
#include "native.h"

#include <ATen/ops/_fused_adamw.h>

namespace {
std::vector<at::Tensor> list(torch::Tensor** tensors, int64_t count) {
  std::vector<at::Tensor> result;
  for (int64_t i = 0; i < count; ++i) result.push_back(*tensors[i]);
  return result;
}
}  // namespace

extern "C" char* prsmed_fused_adamw(torch::Tensor** params, torch::Tensor** grads, torch::Tensor** first,
                                    torch::Tensor** second, torch::Tensor** steps, int64_t count,
                                    const double* settings /* lr, beta1, beta2, weight decay, eps */) {
  PRSMED_TRY({
    at::NoGradGuard guard;
    auto p = list(params, count);
    auto g = list(grads, count);
    auto m = list(first, count);
    auto v = list(second, count);
    auto s = list(steps, count);
    at::_fused_adamw_(p, g, m, v, {}, s, settings[0], settings[1], settings[2], settings[3], settings[4],
                      /*amsgrad=*/false, /*maximize=*/false);
  })
}

// Makes the gradient undefined, so that its memory is free and AdamW skips the parameter.
extern "C" void prsmed_clear_grad(torch::Tensor* tensor) { tensor->mutable_grad().reset(); }
