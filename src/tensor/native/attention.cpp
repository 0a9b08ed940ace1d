// Grouped-query attention that saves each key and value once. If libtorch's kernel does not support groups, keys and
// values are repeated for every query head only while the kernel runs: in the forward pass, and again in the backward
// pass.
#include "meta.h"
#include "native.h"

#include <ATen/SDPBackend.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>

namespace prsmed {

OptT added_mask(const OptT& mask, const Tensor& q) {
  if (!mask || !mask->defined() || mask->scalar_type() != at::kBool) return mask;
  const double hidden = -std::numeric_limits<double>::infinity();
  return at::where(*mask, 0.0, at::scalar_tensor(hidden, q.options()));
}

Tensor aligned_bias(const Tensor& bias, const Tensor& q, const Tensor& k) {
  bool aligned = bias.stride(-1) == 1;
  for (int64_t i = 0; i + 1 < bias.dim(); ++i) aligned &= bias.stride(i) % 8 == 0;
  auto result = bias;
  if (!aligned) {
    const int64_t last = bias.size(-1);
    result = at::constant_pad_nd(bias, {0, 8 - last % 8}).slice(-1, 0, last);
  }
  return result.expand({q.size(0), q.size(1), q.size(2), k.size(2)});
}

namespace {
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// True if CUDA's kernel runs on `t`, or would in the planned run; else it is the CPU's.
bool as_cuda(const Tensor& t) { return t.is_cuda() || (t.is_meta() && for_cuda()); }

// The mask in the kernel's format. The backward pass computes it again, because layers share its source.
OptT bias_of(const OptT& mask, const Tensor& q, const Tensor& k) {
  const auto bias = added_mask(mask, q);
  if (!bias || !bias->defined()) return std::nullopt;
  return aligned_bias(*bias, q, k);
}

// `[b, g, s, d]` to `[b, heads, s, d]`: repeats each head `heads / g` times in a row.
Tensor repeated(const Tensor& x, int64_t heads) {
  const int64_t b = x.size(0), g = x.size(1), s = x.size(2), d = x.size(3);
  return x.unsqueeze(2).expand({b, g, heads / g, s, d}).reshape({b, heads, s, d});
}

// Gradient of the repetition: sums of `[b, heads, s, d]`, which is `[b, s, heads, d]` in memory, like the result.
Tensor summed(const Tensor& grad, int64_t groups) {
  return grad.transpose(1, 2).unflatten(2, {groups, -1}).sum(at::IntArrayRef{3}).transpose(1, 2);
}

struct GroupedAttention : torch::autograd::Function<GroupedAttention> {
  static Variable forward(AutogradContext* ctx, Variable q, Variable k, Variable v, OptT mask, bool causal) {
    const int64_t heads = q.size(1);
    const auto bias = bias_of(mask, q, k);
    variable_list kept = {q, k, v, mask.value_or(Tensor())};
    Tensor out;
    if (as_cuda(q)) {
      auto [product, lse, seed, offset] = at::_scaled_dot_product_efficient_attention(
          q, repeated(k, heads), repeated(v, heads), bias, /*compute_log_sumexp=*/true, 0.0, causal);
      out = product;
      kept.insert(kept.end(), {out, lse, seed, offset});
    } else {
      auto [product, lse] =
          at::_scaled_dot_product_flash_attention_for_cpu(q, repeated(k, heads), repeated(v, heads), 0.0, causal, bias);
      out = product;
      kept.insert(kept.end(), {out, lse});
    }
    ctx->save_for_backward(kept);
    ctx->saved_data["causal"] = causal;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &q = saved[0], &k = saved[1], &v = saved[2], &mask = saved[3], &out = saved[4], &lse = saved[5];
    const bool causal = ctx->saved_data["causal"].toBool();
    const int64_t heads = q.size(1), groups = k.size(1);
    const auto bias = bias_of(mask.defined() ? OptT(mask) : std::nullopt, q, k);
    const bool of_q = ctx->needs_input_grad(0), of_k = ctx->needs_input_grad(1), of_v = ctx->needs_input_grad(2);
    Tensor dq, dk, dv, unused;
    if (as_cuda(q)) {
      std::tie(dq, dk, dv, unused) = at::_scaled_dot_product_efficient_attention_backward(
          grads[0], q, repeated(k, heads), repeated(v, heads), bias.value_or(Tensor()), out, lse, saved[6], saved[7],
          0.0, {of_q, of_k, of_v, false}, causal);
    } else {
      std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          grads[0], q, repeated(k, heads), repeated(v, heads), out, lse, 0.0, causal, bias);
    }
    if (!of_q) dq.reset();
    dk = of_k ? summed(dk, groups) : Tensor();
    dv = of_v ? summed(dv, groups) : Tensor();
    return {dq, dk, dv, Variable(), Variable()};
  }
};

// True if libtorch would use the same kernel as `GroupedAttention` for repeated keys and values.
bool takes_repeated(const Tensor& q, const Tensor& k, const Tensor& v, const OptT& mask, bool causal) {
  // the sizes of the repeated ones, without memory of their own
  const auto like = [&](const Tensor& x) { return x.narrow(1, 0, 1).expand({-1, q.size(1), -1, -1}); };
  if (q.is_meta()) return for_cuda() && cuda::takes_efficient(q, like(k), like(v), mask, causal);
  return q.is_cuda() && at::_fused_sdp_choice(q, like(k), like(v), mask, 0.0, causal) ==
                            static_cast<int64_t>(at::SDPBackend::efficient_attention);
}

OptT optional(const Tensor* mask) { return mask == nullptr ? OptT() : OptT(*mask); }
}  // namespace
}  // namespace prsmed

extern "C" {

// True if `prsmed_grouped_attention` saves less for the backward pass than libtorch's attention; `mask` may be null.
char* prsmed_keeps_groups(at::Tensor* q, at::Tensor* k, at::Tensor* v, at::Tensor* mask, bool causal, bool* out) {
  PRSMED_TRY({
    const bool trains = at::GradMode::is_enabled() && (q->requires_grad() || k->requires_grad() || v->requires_grad());
    const bool of_mask = mask != nullptr && mask->requires_grad();
    *out = trains && !of_mask && prsmed::takes_repeated(*q, *k, *v, prsmed::optional(mask), causal);
  })
}

char* prsmed_grouped_attention(at::Tensor* q, at::Tensor* k, at::Tensor* v, at::Tensor* mask, bool causal,
                               at::Tensor** out) {
  PRSMED_TRY(*out = new at::Tensor(prsmed::GroupedAttention::apply(*q, *k, *v, prsmed::optional(mask), causal)))
}
}
