// Attention of several questions packed behind one prefix, without a mask: one variable-length call of the flash kernel.
// A segment of queries (the prefix, a question, padding) attends to a segment of keys, causally, aligned at their ends.
// Keys and values of the prefix are repeated for each question, only while a kernel runs: in the forward pass and again
// in the backward pass. On the CPU one segment after the other is computed with the CPU's fused kernel.
#include "meta.h"
#include "native.h"
#include "trace.h"

#include <ATen/SDPBackend.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>

namespace prsmed {
namespace {
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

bool as_cuda(const Tensor& t) { return t.is_cuda() || (t.is_meta() && for_cuda()); }

// `[s, t, heads d]` to `[s t, heads, d]`.
Tensor heads_of(const Tensor& x, int64_t width) { return x.reshape({-1, x.size(-1) / width, width}); }

// Keys or values of all segments, `[k, heads, d]`: the tokens `from`.
Tensor gathered(const Tensor& x, const Tensor& from, int64_t width) {
  return heads_of(x.reshape({-1, x.size(-1)}).index_select(0, from), width);
}

// Gradient of `gathered`: the sum over the copies of each token. The flash kernel does not write the gradient of
// padding; it goes to a row that is dropped.
Tensor scattered(const Tensor& grad, const Tensor& to, const Tensor& like) {
  const int64_t tokens = like.size(0) * like.size(1), width = like.size(-1);
  auto sums = at::zeros({tokens + 1, width}, grad.options());
  sums.index_add_(0, to, grad.reshape({grad.size(0), width}));
  return sums.narrow(0, 0, tokens).view(like.sizes());
}

// Calls `body(number, first query, queries, first key, keys)` for each segment that has queries.
template <class F> void each_segment(const std::vector<int64_t>& lengths, F body) {
  int64_t query = 0, key = 0;
  for (size_t i = 0; i + 1 < lengths.size(); i += 2) {
    if (lengths[i] > 0) body(i / 2, query, lengths[i], key, lengths[i + 1]);
    query += lengths[i];
    key += lengths[i + 1];
  }
}

// `count` rows of `[n, heads, d]` as `[1, heads, count, d]`.
Tensor part(const Tensor& x, int64_t first, int64_t count) { return x.narrow(0, first, count).transpose(0, 1).unsqueeze(0); }

// The mask of queries at the end of `keys` keys; nothing for a square, which is causal.
OptT ends(int64_t queries, int64_t keys, const Tensor& like) {
  if (queries == keys) return std::nullopt;
  constexpr double hidden = -std::numeric_limits<double>::infinity();
  return at::full({queries, keys}, hidden, like.options()).triu_(keys - queries + 1);
}

// Arithmetic of `products` matrix products over the pairs that attend to each other.
void count_cost(const char* name, double products, const Tensor& q, const Tensor& k, const std::vector<int64_t>& lengths) {
  if (!prsmed_trace_active()) return;
  double pairs = 0;
  each_segment(lengths, [&](size_t, int64_t, int64_t queries, int64_t, int64_t keys) {
    pairs += static_cast<double>(queries) * (static_cast<double>(keys) - 0.5 * static_cast<double>(queries - 1));
  });
  // reads queries, keys and values, and writes a result of the queries' size; the backward pass also their gradients
  const double bytes = products * static_cast<double>(q.nbytes() + k.nbytes());
  prsmed_trace_cost(name, products * 2.0 * pairs * static_cast<double>(q.size(1) * q.size(2)), bytes,
                    static_cast<uint8_t>(q.element_size()));
}

struct PackedAttention : torch::autograd::Function<PackedAttention> {
  static Variable forward(AutogradContext* ctx, Variable q, Variable k, Variable v, Variable from, Variable to,
                          Variable queries, Variable keys, std::vector<int64_t> lengths, int64_t width) {
    variable_list kept = {q, k, v, from, to, queries, keys};
    const int64_t most = q.size(1);
    const auto qh = heads_of(q, width), kh = gathered(k, from, width), vh = gathered(v, from, width);
    Tensor result;
    if (as_cuda(q)) {
      auto [out, lse, seed, offset, unused] = at::_flash_attention_forward(qh, kh, vh, queries, keys, most, most, 0.0,
                                                                           /*is_causal=*/true, false);
      count_cost("prsmed::packed_attention", 2, qh, kh, lengths);
      result = out;
      kept.insert(kept.end(), {out, lse, seed, offset});
    } else {
      result = at::empty(qh.sizes(), qh.options());
      kept.push_back(result);
      each_segment(lengths, [&](size_t, int64_t query, int64_t count, int64_t key, int64_t seen) {
        const auto asking = part(qh, query, count);
        auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
            asking, part(kh, key, seen), part(vh, key, seen), 0.0, count == seen, ends(count, seen, q));
        part(result, query, count).copy_(out);
        kept.push_back(lse);
      });
    }
    ctx->save_for_backward(kept);
    ctx->saved_data["lengths"] = lengths;
    ctx->saved_data["width"] = width;
    return result.view(q.sizes());
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &q = saved[0], &k = saved[1], &v = saved[2], &to = saved[4], &out = saved[7];
    const auto lengths = ctx->saved_data["lengths"].toIntVector();
    const int64_t width = ctx->saved_data["width"].toInt(), most = q.size(1);
    const auto qh = heads_of(q, width), grad = heads_of(grads[0], width);
    Tensor dq, dk, dv;
    {
      const auto kh = gathered(k, saved[3], width), vh = gathered(v, saved[3], width);
      if (as_cuda(q)) {
        std::tie(dq, dk, dv) = at::_flash_attention_backward(grad, qh, kh, vh, out, saved[8], saved[5], saved[6], most,
                                                             most, 0.0, /*is_causal=*/true, saved[9], saved[10]);
        count_cost("prsmed::packed_attention_backward", 5, qh, kh, lengths);
      } else {
        dq = at::empty(qh.sizes(), qh.options());
        dk = at::zeros(kh.sizes(), kh.options()), dv = at::zeros(vh.sizes(), vh.options());
        size_t place = 8;
        each_segment(lengths, [&](size_t, int64_t query, int64_t count, int64_t key, int64_t seen) {
          auto [gq, gk, gv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
              part(grad, query, count), part(qh, query, count), part(kh, key, seen), part(vh, key, seen),
              part(out, query, count), saved[place++], 0.0, count == seen, ends(count, seen, q));
          part(dq, query, count).copy_(gq);
          part(dk, key, seen).copy_(gk);
          part(dv, key, seen).copy_(gv);
        });
      }
    }
    dk = ctx->needs_input_grad(1) ? scattered(dk, to, k) : Tensor();
    dv = ctx->needs_input_grad(2) ? scattered(dv, to, v) : Tensor();
    dq = ctx->needs_input_grad(0) ? dq.view(q.sizes()) : Tensor();
    return {dq, dk, dv, Variable(), Variable(), Variable(), Variable(), Variable(), Variable()};
  }
};

// True if the flash kernel takes queries and keys of these numbers of heads, in the dtype and on the device of `x`.
bool takes_segments(const Tensor& x, int64_t heads, int64_t groups) {
  // gradients of keys that several questions share are added with atomics
  if (!as_cuda(x) || at::globalContext().deterministicAlgorithms()) return false;
  const auto q = x.reshape({x.size(0), x.size(1), heads, -1}).transpose(1, 2), k = q.narrow(1, 0, groups);
  if (x.is_meta()) return cuda::takes_flash(q, k, k);
  return at::_fused_sdp_choice(q, k, k, std::nullopt, 0.0, false, std::nullopt, /*enable_gqa=*/true) ==
         static_cast<int64_t>(at::SDPBackend::flash_attention);
}
}  // namespace
}  // namespace prsmed

extern "C" {

char* prsmed_takes_segments(at::Tensor* x, int64_t heads, int64_t groups, bool* out) {
  PRSMED_TRY(*out = prsmed::takes_segments(*x, heads, groups))
}

// `lengths`: queries and keys of each of `count` segments.
char* prsmed_packed_attention(at::Tensor* q, at::Tensor* k, at::Tensor* v, at::Tensor* from, at::Tensor* to,
                              at::Tensor* queries, at::Tensor* keys, const int64_t* lengths, int64_t count, int64_t width,
                              at::Tensor** out) {
  PRSMED_TRY({
    std::vector<int64_t> list(lengths, lengths + 2 * count);
    *out = new at::Tensor(prsmed::PackedAttention::apply(*q, *k, *v, *from, *to, *queries, *keys, list, width));
  })
}
}
