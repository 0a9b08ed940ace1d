// Gradient hooks: run work on each gradient as soon as it is complete, during the backward pass.
#include "native.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace {

// Handles the gradient of parameter `index`. Returns null, or a message (by strdup).
using Work = char* (*)(void* data, int64_t index);

struct Hook final : torch::autograd::PostAccumulateGradHook {
  Hook(Work work, void* data, int64_t index) : work(work), data(data), index(index) {}
  void operator()(const torch::autograd::Variable&) override {
    char* message = work(data, index);
    if (message == nullptr) return;
    const std::string text = message;
    free(message);
    throw std::runtime_error(text);
  }
  Work work;
  void* data;
  int64_t index;
};

}  // namespace

extern "C" {

char* prsmed_hook_gradient(at::Tensor* tensor, Work work, void* data, int64_t index) {
  PRSMED_TRY(torch::autograd::impl::set_post_acc_grad_hooks(*tensor, std::make_unique<Hook>(work, data, index)))
}

void prsmed_unhook_gradient(at::Tensor* tensor) noexcept {
  torch::autograd::impl::set_post_acc_grad_hooks(*tensor, nullptr);
}
}
