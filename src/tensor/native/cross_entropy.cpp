// Cross-entropy of a linear layer's logits in chunks of rows, so that not all logits exist at once. The forward pass
// also computes the gradient of the inputs (and of the weight, if it is trained), so that nothing of the logits' size
// is saved. Hsu et al. 2024, "Liger Kernel" (fused linear cross-entropy).
#include "native.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Adds the chunk's losses to `total`. Returns the gradient of its logits in their dtype. Labels below 0 are ignored.
at::Tensor chunk_loss(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& labels, at::Tensor& total,
                      bool wants_gradient) {
  auto logits = at::linear(rows, weight);
  const auto type = logits.scalar_type();
  auto wide = type == at::kFloat ? logits : logits.to(at::kFloat);
  logits.reset();
  const auto known = labels.clamp_min(0).unsqueeze(1), counts = labels.ge(0).to(at::kFloat).unsqueeze(1);
  const auto top = wide.amax(1, /*keepdim=*/true);
  const auto right = wide.gather(1, known);
  wide.sub_(top).exp_();
  const auto sum = wide.sum(1, /*keepdim=*/true);
  total.add_(sum.log().add_(top).sub_(right).mul_(counts).sum());
  if (!wants_gradient) return {};
  // softmax - onehot
  wide.div_(sum).mul_(counts).scatter_add_(1, known, counts.neg());
  return type == at::kFloat ? wide : wide.to(type);
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static Variable forward(AutogradContext* ctx, Variable rows, Variable weight, Variable labels, int64_t chunk,
                          bool has_graph) {
    const bool trains_rows = has_graph && rows.requires_grad(), trains_weight = has_graph && weight.requires_grad();
    const auto cast = weight.scalar_type() == rows.scalar_type() ? weight : weight.to(rows.scalar_type());
    auto total = at::zeros({}, rows.options().dtype(at::kFloat));
    at::Tensor rows_grad, weight_grad;
    if (trains_rows) rows_grad = at::empty(rows.sizes(), rows.options());
    if (trains_weight) weight_grad = at::zeros(weight.sizes(), weight.options());
    const int64_t n = rows.size(0);
    for (int64_t first = 0; first < n; first += chunk) {
      const int64_t count = std::min(chunk, n - first);
      const auto part = rows.narrow(0, first, count);
      const auto grad = chunk_loss(part, cast, labels.narrow(0, first, count), total, trains_rows || trains_weight);
      if (trains_rows) rows_grad.narrow(0, first, count).copy_(grad.mm(cast));
      if (trains_weight) weight_grad.add_(grad.t().mm(part));
    }
    ctx->save_for_backward({rows_grad, weight_grad});
    return total;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    auto scaled = [&](const Variable& grad) { return grad.defined() ? grad.mul(grads[0]) : Variable(); };
    return {scaled(saved[0]), scaled(saved[1]), Variable(), Variable(), Variable()};
  }
};

}  // namespace

extern "C" char* prsmed_linear_cross_entropy(at::Tensor* rows, at::Tensor* weight, at::Tensor* labels, int64_t chunk,
                                             at::Tensor** out) {
  PRSMED_TRY(*out =
                 new at::Tensor(LinearCrossEntropy::apply(*rows, *weight, *labels, chunk, at::GradMode::is_enabled())))
}
