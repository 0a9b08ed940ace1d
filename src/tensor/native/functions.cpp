// Fused functions of the language model that save less for the backward pass than libtorch's operators: RMSNorm,
// SwiGLU, LoRA, rotary embedding; and the attention bias of packed sequences. Functions without an operator in libtorch
// are custom operators `prsmed::`: a loop on the CPU, custom CUDA kernels or libtorch's operators on a GPU. On meta
// tensors they allocate what the target would allocate.
#include "kernels.h"
#include "meta.h"
#include "native.h"

#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <map>

#pragma GCC optimize("O3")

namespace prsmed {
namespace {
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using Two = std::tuple<Tensor, Tensor>;

#define PRSMED_FLOATS(TYPE, ...) AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, TYPE, "prsmed", __VA_ARGS__)

// True if the CPU's loops run on `t`, or would in the planned run.
bool loops(const Tensor& t) { return t.is_cpu() || (t.is_meta() && !for_cuda()); }

// Calls `body(first, last)` for parts of `0..rows` on libtorch's threads. Its iterator runs over rows that are never
// read.
template <class F>
void each_row(int64_t rows, int64_t width, F body) {
  if (rows == 0) return;
  char* const origin = reinterpret_cast<char*>(64);
  auto index = at::from_blob(origin, {rows}, at::TensorOptions(at::kByte));
  auto iter = at::TensorIteratorConfig().check_all_same_dtype(false).add_output(index).resize_outputs(false).build();
  iter.for_each(
      [&](char** data, const int64_t*, int64_t count) {
        const int64_t first = data[0] - origin;
        body(first, first + count);
      },
      std::max<int64_t>(1, at::internal::GRAIN_SIZE / std::max<int64_t>(width, 1)));
}

// ---- RMSNorm: in fp32, cast, times the weight ---------------------------------------------------------------------
// Sums in as many lanes as a vector register has.
template <class A, class F>
A lanes(int64_t n, F term) {
  constexpr int64_t kLanes = 16;
  A sums[kLanes] = {}, total = 0;
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) sums[l] += term(j + l);
  for (; j < n; ++j) total += term(j);
  for (A sum : sums) total += sum;
  return total;
}

// Fallbacks of RMSNorm: fewer and smaller temporary tensors than `kernels::composed`, with more roundings.
std::pair<Tensor, Tensor> rms_norm_fallback(const Tensor& x, const Tensor& weight, double eps) {
  auto rstd = at::linalg_vector_norm(x, 2, at::IntArrayRef{-1}, true, at::toOpMathType(x.scalar_type()));
  rstd.mul_(rstd).div_(x.size(-1)).add_(eps).rsqrt_();
  auto y = at::empty_like(x);
  at::mul_out(y, x, rstd);
  return {y.mul_(weight), rstd};
}

Tensor rms_norm_backward_fallback(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  const auto g = dy * weight;
  auto wide = g.to(at::toOpMathType(x.scalar_type()), false, true);
  auto factor = wide.mul_(x).mean(at::IntArrayRef{-1}, true);
  factor.mul_(rstd).mul_(rstd).mul_(rstd).neg_();
  at::mul_out(wide, x, factor);
  return wide.addcmul_(g, rstd).to(x.scalar_type());
}

Tensor rms_norm_weight_grad_fallback(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  auto normed = at::empty_like(x);
  at::mul_out(normed, x, rstd);
  const int64_t d = x.size(-1), rows = x.numel() / std::max<int64_t>(d, 1);
  return normed.mul_(dy).view({rows, d}).sum(at::IntArrayRef{0}, false, weight.scalar_type());
}

Two rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const auto kind = x.scalar_type();
  const int64_t d = x.size(-1), rows = x.numel() / std::max<int64_t>(d, 1);
  const auto w = weight.to(kind);
  if (!loops(x)) {
    return kernels::choose(
        "rms_norm", x, [&] { return kernels::rms_norm(x, w, eps); },
        [&] { return rms_norm_fallback(x, w, eps); });
  }
  const auto xc = x.contiguous();
  auto sizes = x.sizes().vec();
  sizes.back() = 1;
  auto y = at::empty_like(xc), rstd = at::empty(sizes, x.options().dtype(at::toOpMathType(kind)));
  if (x.is_meta()) return {y, rstd};
  PRSMED_FLOATS(kind, [&] {
    using A = at::opmath_type<scalar_t>;
    const auto *px = xc.const_data_ptr<scalar_t>(), *pw = w.const_data_ptr<scalar_t>();
    auto* py = y.mutable_data_ptr<scalar_t>();
    auto* pr = rstd.mutable_data_ptr<A>();
    each_row(rows, d, [=](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const auto* from = px + i * d;
        auto* to = py + i * d;
        const A squares = lanes<A>(d, [=](int64_t j) { return static_cast<A>(from[j]) * static_cast<A>(from[j]); });
        const A r = pr[i] = 1 / std::sqrt(squares / d + static_cast<A>(eps));
        for (int64_t j = 0; j < d; ++j)
          to[j] = static_cast<A>(static_cast<scalar_t>(static_cast<A>(from[j]) * r)) * static_cast<A>(pw[j]);
      }
    });
  });
  return {y, rstd};
}

// Gradients of x and of the weight, if they are needed.
Two rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& rstd, const Tensor& weight, bool of_x,
                      bool of_weight) {
  const auto kind = x.scalar_type(), wide_kind = at::toOpMathType(kind);
  const int64_t d = x.size(-1), rows = x.numel() / std::max<int64_t>(d, 1);
  const auto w = weight.to(kind);
  Tensor gx, gw;
  if (!loops(x)) {
    const auto custom = [&]() -> std::optional<std::pair<Tensor, Tensor>> {
      std::optional<Tensor> own_x = Tensor(), own_w = Tensor();
      if (of_x) own_x = kernels::rms_norm_backward(grad, x, w, rstd);
      if (own_x && of_weight) own_w = kernels::rms_norm_weight_grad(grad, x, w, rstd);
      if (!own_x || !own_w) return {};
      return std::pair(*own_x, of_weight ? own_w->to(weight.scalar_type()) : *own_w);
    };
    const auto fallback = [&] {
      Tensor gx, gw;
      if (of_weight) gw = rms_norm_weight_grad_fallback(grad, x, weight, rstd);
      if (of_x) gx = rms_norm_backward_fallback(grad, x, w, rstd);
      return std::pair<Tensor, Tensor>(gx, gw);
    };
    return kernels::choose(of_weight ? "rms_norm_backward of both" : "rms_norm_backward", x, custom, fallback);
  }
  const auto g = grad.contiguous(), xc = x.contiguous();
  Tensor parts;
  if (of_x) gx = at::empty_like(xc);
  if (of_weight) parts = at::zeros({at::get_num_threads(), d}, x.options().dtype(wide_kind));
  if (!x.is_meta())
    PRSMED_FLOATS(kind, [&] {
      using A = at::opmath_type<scalar_t>;
      const auto *px = xc.const_data_ptr<scalar_t>(), *pg = g.const_data_ptr<scalar_t>(),
                 *pw = w.const_data_ptr<scalar_t>();
      const auto* pr = rstd.const_data_ptr<A>();
      auto* to_x = of_x ? gx.mutable_data_ptr<scalar_t>() : nullptr;
      auto* to_w = of_weight ? parts.mutable_data_ptr<A>() : nullptr;
      each_row(rows, d, [=](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          const auto *xs = px + i * d, *gs = pg + i * d;
          const A r = pr[i];
          if (to_x != nullptr) {
            auto* to = to_x + i * d;
            auto scaled = [=](int64_t j) { return static_cast<A>(gs[j]) * static_cast<A>(pw[j]); };
            const A dot = lanes<A>(d, [=](int64_t j) { return scaled(j) * static_cast<A>(xs[j]); });
            const A factor = dot / d * r * r * r;
            for (int64_t j = 0; j < d; ++j) to[j] = r * scaled(j) - factor * static_cast<A>(xs[j]);
          }
          if (to_w != nullptr) {
            auto* to = to_w + at::get_thread_num() * d;
            for (int64_t j = 0; j < d; ++j)
              to[j] += static_cast<A>(gs[j]) * static_cast<A>(static_cast<scalar_t>(static_cast<A>(xs[j]) * r));
          }
        }
      });
    });
  if (of_weight) gw = parts.sum(at::IntArrayRef{0}).to(weight.scalar_type());
  return {gx, gw};
}

// ---- rotary embedding ---------------------------------------------------------------------------------------------
// Rotates `xs [b, t, h d]`, contiguous, in place, head by head. `cos` and `sin`: `[t, d / 2]` or `[b, t, d / 2]` in its
// dtype.
Tensor& rotate_(Tensor& xs, const Tensor& cos, const Tensor& sin, bool back) {
  const int64_t b = xs.size(0), t = xs.size(1), half = cos.size(-1), heads = xs.size(2) / (2 * half);
  if (!loops(xs)) {
    const auto fallback = [&](const Tensor& to) { kernels::composed::rotate_(to, cos, sin, back); };
    const auto own_on_copy = [&] { return kernels::rotate_(xs.clone(), cos, sin, back); };
    const bool is_own =
        kernels::usable(xs) && kernels::prefer("rotary", xs, own_on_copy, [&] { fallback(xs.clone()); });
    if (!is_own || !kernels::rotate_(xs, cos, sin, back)) fallback(xs);
    return xs;
  }
  if (xs.is_meta()) return xs;
  PRSMED_FLOATS(xs.scalar_type(), [&] {
    using A = at::opmath_type<scalar_t>;
    auto* px = xs.mutable_data_ptr<scalar_t>();
    const auto *pc = cos.const_data_ptr<scalar_t>(), *ps = sin.const_data_ptr<scalar_t>();
    const A sign = back ? -1 : 1;
    const int64_t tables = cos.numel() / half;
    each_row(b * t, 2 * heads * half, [=](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const auto *c = pc + i % tables * half, *s = ps + i % tables * half;
        for (int64_t h = 0; h < heads; ++h) {
          auto *first = px + (i * heads + h) * 2 * half, *second = first + half;
          for (int64_t j = 0; j < half; ++j) {
            const A x = first[j], y = second[j], cj = c[j], sj = sign * static_cast<A>(s[j]);
            first[j] = x * cj - y * sj;
            second[j] = y * cj + x * sj;
          }
        }
      }
    });
  });
  return xs;
}

// ---- attention bias of packed sequences ---------------------------------------------------------------------------
// `[b, 1, t, t]` from blocks `[b, t]`: see `kernels::packed_bias`.
Tensor packed_bias(const Tensor& blocks, at::ScalarType kind) {
  const int64_t b = blocks.size(0), t = blocks.size(1);
  // rows start at multiples of 8 elements; otherwise CUDA's attention would copy the bias in every layer
  const auto bias = at::empty({b, 1, t, (t + 7) / 8 * 8}, blocks.options().dtype(kind));
  const auto custom = [&] { return kernels::packed_bias(blocks, bias); };
  const auto fallback = [&] { kernels::composed::packed_bias(blocks, bias); };
  if (!kernels::usable(bias) || !kernels::prefer("packed_bias", bias, custom, fallback) || !custom()) fallback();
  return bias.narrow(3, 0, t);
}

// ---- seeded dropout -----------------------------------------------------------------------------------------------
// True if element `j` of a row is kept. Each row has a key. Wellons' `lowbias32` mixes the bits.
struct Keep {
  uint32_t key, threshold;
  bool operator()(int64_t j) const {
    uint32_t h = static_cast<uint32_t>(j) * 0x9e3779b9u + key;
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15)) * 0x846ca68bu;
    return (h ^ (h >> 16)) >= threshold;
  }
};
// Steele et al. 2014, SplitMix64.
uint32_t row_key(int64_t seed, int64_t row) {
  uint64_t z = static_cast<uint64_t>(seed) + (static_cast<uint64_t>(row) + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
}
// The same seed gives the same mask. On a GPU it uses a generator of its own.
Tensor device_mask(const Tensor& x, double p, int64_t seed) {
  auto mask = at::empty(x.sizes(), x.options().dtype(at::kBool));
  if (x.is_meta()) return mask;
  TORCH_CHECK(!kernels::capturing(x), "seeded dropout can be captured only with custom CUDA kernels");
  auto generator = at::globalContext().defaultGenerator(x.device()).clone();
  generator.set_current_seed(static_cast<uint64_t>(seed));
  return mask.bernoulli_(1 - p, generator);
}
void drop_rows(const Tensor& x, Tensor& y, double p, int64_t seed) {
  if (x.is_meta()) return;
  const int64_t d = x.size(-1), rows = x.numel() / std::max<int64_t>(d, 1);
  const auto threshold = static_cast<uint32_t>(std::min(p * 4294967296.0, 4294967295.0));
  PRSMED_FLOATS(x.scalar_type(), [&] {
    const auto* px = x.const_data_ptr<scalar_t>();
    auto* py = y.mutable_data_ptr<scalar_t>();
    each_row(rows, d, [=](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const Keep keep{row_key(seed, i), threshold};
        for (int64_t j = 0; j < d; ++j) py[i * d + j] = keep(j) ? px[i * d + j] : scalar_t(0);
      }
    });
  });
}
// Sets elements to 0 with probability `p`, without scaling.
Tensor drop(const Tensor& x, double p, int64_t seed) {
  if (!loops(x)) {
    const auto xc = x.contiguous();
    if (kernels::drops(xc)) {
      auto y = at::empty_like(xc);
      if (kernels::drop(xc, y, p, seed)) return y;
    }
    return xc * device_mask(xc, p, seed);
  }
  const auto xc = x.contiguous();
  auto y = at::empty_like(xc);
  drop_rows(xc, y, p, seed);
  return y;
}
Tensor& drop_(Tensor& x, double p, int64_t seed) {
  if (!loops(x)) return kernels::drop(x, x, p, seed) ? x : x.mul_(device_mask(x, p, seed));
  drop_rows(x, x, p, seed);
  return x;
}
// A number of the CPU's generator, which checkpointing restores before the recomputation.
int64_t draw_seed(const Tensor& x) { return x.is_meta() ? 0 : kernels::new_seed(); }

TORCH_LIBRARY(prsmed, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor weight, bool of_x, bool of_weight) -> (Tensor, "
      "Tensor)");
  m.def("rotate_(Tensor(a!) xs, Tensor cos, Tensor sin, bool back) -> Tensor(a!)");
  m.def("packed_bias(Tensor blocks, ScalarType kind) -> Tensor");
  m.def("drop(Tensor x, float p, int seed) -> Tensor");
  m.def("drop_(Tensor(a!) x, float p, int seed) -> Tensor(a!)");
}
TORCH_LIBRARY_IMPL(prsmed, CompositeExplicitAutograd, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rms_norm_backward", rms_norm_backward);
  m.impl("rotate_", rotate_);
  m.impl("packed_bias", packed_bias);
  m.impl("drop", drop);
  m.impl("drop_", drop_);
}
// Calls one of the operators above through the dispatcher, so that a trace records it.
template <auto Kernel, class... A>
decltype(auto) call(const char* name, A&&... arguments) {
  at::AutoDispatchBelowAutograd below;
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<std::remove_pointer_t<decltype(Kernel)>>();
  return op.call(std::forward<A>(arguments)...);
}

// ---- functions ----------------------------------------------------------------------------------------------------
struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static Variable forward(AutogradContext* ctx, Variable x, Variable weight, double eps) {
    auto [y, rstd] = call<&rms_norm>("prsmed::rms_norm", x, weight, eps);
    ctx->save_for_backward({x, weight, rstd});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    auto [gx, gw] = call<&rms_norm_backward>("prsmed::rms_norm_backward", grads[0], saved[0], saved[2], saved[1],
                                             ctx->needs_input_grad(0), ctx->needs_input_grad(1));
    return {gx, gw, Variable()};
  }
};

// silu(gate) * up: saves both, but not the SiLU.
struct SwiGlu : torch::autograd::Function<SwiGlu> {
  static Variable forward(AutogradContext* ctx, Variable gate, Variable up) {
    ctx->save_for_backward({gate, up});
    return kernels::choose(
        "swiglu", gate, [&] { return kernels::swiglu(gate, up); }, [&] { return kernels::composed::swiglu(gate, up); });
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &gate = saved[0], &up = saved[1];
    Variable ggate, gup;
    if (ctx->needs_input_grad(0) && ctx->needs_input_grad(1)) {
      const auto fallback = [&] { return kernels::composed::swiglu_backward(grads[0], gate, up); };
      auto [first, second] = kernels::choose(
          "swiglu_backward", gate, [&] { return kernels::swiglu_backward(grads[0], gate, up); }, fallback);
      return {first, second};
    }
    if (ctx->needs_input_grad(0)) {
      ggate = grads[0] * up;
      at::silu_backward_out(ggate, ggate, gate);
    }
    if (ctx->needs_input_grad(1)) gup = at::silu(gate).mul_(grads[0]);
    return {ggate, gup};
  }
};

// Products of x with each a and their gradients, with libtorch's operators: see kernels.h.
std::vector<Tensor> low_rank_fallback(const Tensor& x, const kernels::Adapters& adapters) {
  const auto kind = x.scalar_type();
  const auto scaled = [&](Tensor low) { return adapters.factor == 1 ? low : low.mul_(adapters.factor); };
  if (adapters.p == 0 && adapters.a.size() > 1)
    return scaled(at::mm(x, at::cat(adapters.a).to(kind).t())).split(adapters.a[0].size(0), 1);
  std::vector<Tensor> all;
  for (size_t i = 0; i < adapters.a.size(); ++i) {
    auto dropped = adapters.p > 0 ? call<&drop>("prsmed::drop", x, adapters.p, adapters.seeds[i]) : x;
    auto low = at::mm(dropped, adapters.a[i].to(kind).t());
    dropped.reset();
    all.push_back(scaled(std::move(low)));
  }
  return all;
}

// `grads` are scaled already.
std::vector<Tensor> low_rank_weight_grad_fallback(const Tensor& x, const std::vector<Tensor>& grads,
                                                  const kernels::Adapters& adapters) {
  const auto wide = adapters.a[0].scalar_type();
  if (adapters.p == 0 && grads.size() > 1)
    return at::mm(at::cat(grads, 1).t(), x).to(wide).split(adapters.a[0].size(0), 0);
  std::vector<Tensor> all;
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto dropped = adapters.p > 0 ? call<&drop>("prsmed::drop", x, adapters.p, adapters.seeds[i]) : x;
    all.push_back(at::mm(grads[i].t(), dropped).to(wide));
  }
  return all;
}

Tensor low_rank_input_grad_fallback(const Tensor& x, const std::vector<Tensor>& grads,
                                    const kernels::Adapters& adapters) {
  const auto kind = x.scalar_type();
  if (adapters.p == 0 && grads.size() > 1) return at::mm(at::cat(grads, 1), at::cat(adapters.a).to(kind));
  Tensor sum;
  for (size_t i = 0; i < grads.size(); ++i) {
    auto dx = at::mm(grads[i], adapters.a[i].to(kind));
    if (adapters.p > 0) call<&drop_>("prsmed::drop_", dx, adapters.p, adapters.seeds[i]);
    sum = sum.defined() ? sum.add_(dx) : dx;
  }
  return sum;
}

// ys[i] += scale * dropout_i(x) a_i^T b_i^T in place, for adapters that share x: saves x (shared with the layers
// themselves), the products with each a, and seeds. The masks do not scale, so the products are scaled.
struct LowRank : torch::autograd::Function<LowRank> {
  static variable_list forward(AutogradContext* ctx, Variable x, at::TensorList ys, at::TensorList a, at::TensorList b,
                               double scale, double p) {
    const auto kind = x.scalar_type();
    const auto rows = x.reshape({-1, x.size(-1)});
    kernels::Adapters adapters{a.vec(), {}, p, scale / (1 - p)};
    for (size_t i = 0; i < a.size(); ++i) adapters.seeds.push_back(p > 0 ? draw_seed(x) : 0);
    const auto low = kernels::choose(
        name_of("low_rank", adapters), rows, [&] { return kernels::low_rank(rows, adapters); },
        [&] { return low_rank_fallback(rows, adapters); });
    for (size_t i = 0; i < a.size(); ++i) ys[i].view({-1, ys[i].size(-1)}).addmm_(low[i], b[i].to(kind).t());
    variable_list changed = ys.vec(), kept = {x};
    kept.insert(kept.end(), low.begin(), low.end());
    kept.insert(kept.end(), a.begin(), a.end());
    kept.insert(kept.end(), b.begin(), b.end());
    ctx->mark_dirty(changed);
    ctx->save_for_backward(kept);
    ctx->saved_data["seeds"] = adapters.seeds;
    ctx->saved_data["p"] = p;
    ctx->saved_data["factor"] = adapters.factor;
    return changed;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const size_t count = grads.size();
    const auto part = [&](size_t index) {
      const auto first = saved.begin() + static_cast<int64_t>(1 + index * count);
      return std::vector<Tensor>(first, first + static_cast<int64_t>(count));
    };
    const auto &x = saved[0], rows = x.reshape({-1, x.size(-1)});
    const auto low = part(0), b = part(2);
    const kernels::Adapters adapters{part(1), ctx->saved_data["seeds"].toIntVector(), ctx->saved_data["p"].toDouble(),
                                     ctx->saved_data["factor"].toDouble()};
    const auto kind = x.scalar_type();
    const auto needs = [&](size_t list) {
      bool any = false;
      for (size_t i = 0; i < count; ++i) any |= ctx->needs_input_grad(1 + list * count + i);
      return any;
    };
    const bool of_x = ctx->needs_input_grad(0), of_a = needs(1), of_b = needs(2);
    std::vector<Tensor> da(count), db(count), narrow;
    Tensor dx;
    for (size_t i = 0; i < count; ++i) {
      const int64_t width = b[i].size(0);
      const auto grad = grads[i].defined() ? grads[i].reshape({-1, width}) : at::zeros({rows.size(0), width}, x.options());
      if (of_b) db[i] = at::mm(grad.t(), low[i]).to(b[i].scalar_type());
      if (of_x || of_a) narrow.push_back(at::mm(grad, b[i].to(kind)));
    }
    // the kernels scale while they read
    std::vector<Tensor> products;
    const auto scaled = [&]() -> const std::vector<Tensor>& {
      for (size_t i = products.size(); i < narrow.size(); ++i)
        products.push_back(adapters.factor == 1 ? narrow[i] : narrow[i] * adapters.factor);
      return products;
    };
    if (of_a) {
      da = kernels::choose(
          name_of("low_rank_weight_grad", adapters), rows,
          [&] { return kernels::low_rank_weight_grad(rows, narrow, adapters); },
          [&] { return low_rank_weight_grad_fallback(rows, scaled(), adapters); });
    }
    if (of_x) {
      dx = kernels::choose(
               name_of("low_rank_input_grad", adapters), rows,
               [&] { return kernels::low_rank_input_grad(rows, narrow, adapters); },
               [&] { return low_rank_input_grad_fallback(rows, scaled(), adapters); })
               .view(x.sizes());
    }
    variable_list all = {dx};
    all.insert(all.end(), grads.begin(), grads.end());
    all.insert(all.end(), da.begin(), da.end());
    all.insert(all.end(), db.begin(), db.end());
    all.insert(all.end(), 2, Variable());
    return all;
  }

  // Single adapters and groups of them differ in speed.
  static const char* name_of(const char* op, const kernels::Adapters& adapters) {
    static const std::map<std::string, std::string> groups = {
        {"low_rank", "low_rank of a group"},
        {"low_rank_weight_grad", "low_rank_weight_grad of a group"},
        {"low_rank_input_grad", "low_rank_input_grad of a group"}};
    return adapters.a.size() > 1 ? groups.at(op).c_str() : op;
  }
};

struct Rotate : torch::autograd::Function<Rotate> {
  static Variable forward(AutogradContext* ctx, Variable xs, Variable cos, Variable sin) {
    call<&rotate_>("prsmed::rotate_", xs, cos, sin, false);
    ctx->mark_dirty({xs});
    ctx->save_for_backward({cos, sin});
    return xs;
  }
  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    // a gradient that nothing else can read is rotated in place
    auto grad = std::move(grads[0]);
    const bool is_own = grad.use_count() == 1 && grad.storage().use_count() == 1 && grad.is_contiguous();
    if (!is_own || at::GradMode::is_enabled()) grad = grad.clone(at::MemoryFormat::Contiguous);
    call<&rotate_>("prsmed::rotate_", grad, saved[0], saved[1], true);
    return {grad, Variable(), Variable()};
  }
};

}  // namespace

// ---- equivalents of the kernels with libtorch's operators: fallback, and reference for tests -----------------------
namespace kernels::composed {
void rotate_(const Tensor& xs, const Tensor& cos, const Tensor& sin, bool back) {
  const int64_t b = xs.size(0), t = xs.size(1), half = cos.size(-1);
  const auto halves = xs.view({b, t, xs.size(2) / (2 * half), 2, half});
  auto first = halves.select(3, 0), second = halves.select(3, 1);
  const auto c = cos.unsqueeze(-2), s = sin.unsqueeze(-2);
  const auto from_first = first * s, from_second = second * s;
  first.mul_(c);
  second.mul_(c);
  if (back) {
    first.add_(from_second);
    second.sub_(from_first);
  } else {
    first.sub_(from_second);
    second.add_(from_first);
  }
}

Tensor swiglu(const Tensor& gate, const Tensor& up) { return at::silu(gate).mul_(up); }

std::pair<Tensor, Tensor> swiglu_backward(const Tensor& dy, const Tensor& gate, const Tensor& up) {
  auto first = dy * up;
  at::silu_backward_out(first, first, gate);
  return {first, at::silu(gate).mul_(dy)};
}

// On the CPU, element by element, in the order that the kernel must repeat.
Tensor drop(const Tensor& x, double p, int64_t seed) {
  const auto from = x.cpu().contiguous();
  auto y = at::empty_like(from);
  drop_rows(from, y, p, seed);
  return y.to(x.device());
}

// As the fallbacks, with these masks on every device.
std::vector<Tensor> low_rank(const Tensor& x, const Adapters& adapters) {
  std::vector<Tensor> all;
  for (size_t i = 0; i < adapters.a.size(); ++i) {
    const auto dropped = drop(x, adapters.p, adapters.seeds[i]);
    all.push_back(at::mm(dropped, adapters.a[i].to(x.scalar_type()).t()) * adapters.factor);
  }
  return all;
}

std::vector<Tensor> low_rank_weight_grad(const Tensor& x, const std::vector<Tensor>& grads, const Adapters& adapters) {
  std::vector<Tensor> all;
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto dropped = drop(x, adapters.p, adapters.seeds[i]).to(at::kFloat);
    all.push_back(at::mm((grads[i] * adapters.factor).t().to(at::kFloat), dropped));
  }
  return all;
}

Tensor low_rank_input_grad(const Tensor& x, const std::vector<Tensor>& grads, const Adapters& adapters) {
  auto sum = at::zeros(x.sizes(), x.options().dtype(at::kFloat));
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto a = adapters.a[i].to(x.scalar_type()).to(at::kFloat);
    sum.add_(drop(at::mm((grads[i] * adapters.factor).to(at::kFloat), a), adapters.p, adapters.seeds[i]));
  }
  return sum.to(x.scalar_type());
}
}  // namespace kernels::composed
}  // namespace prsmed

extern "C" {

char* prsmed_rms_norm(at::Tensor* x, at::Tensor* weight, double eps, at::Tensor** out) {
  PRSMED_TRY(*out = new at::Tensor(prsmed::RmsNorm::apply(*x, *weight, eps)))
}

// May overwrite `gate` if no backward pass reads it.
char* prsmed_swiglu(at::Tensor* gate, at::Tensor* up, at::Tensor** out) {
  PRSMED_TRY({
    const bool trains = at::GradMode::is_enabled() && (gate->requires_grad() || up->requires_grad());
    *out = new at::Tensor(trains ? prsmed::SwiGlu::apply(*gate, *up) : at::silu_(*gate).mul_(*up));
  })
}

// `count` adapters that share `x`; `out` receives as many tensors.
char* prsmed_low_rank(at::Tensor** ys, at::Tensor* x, at::Tensor** a, at::Tensor** b, int64_t count, double scale,
                      double p, at::Tensor** out) {
  PRSMED_TRY({
    for (int64_t i = 0; i < count; ++i) {
      // autograd would take the gradient of x for that of a view
      TORCH_CHECK(!(at::GradMode::is_enabled() && ys[i]->is_view()), "an adapter cannot be added to a view in place");
    }
    const auto list = [&](at::Tensor** from) {
      std::vector<at::Tensor> all;
      for (int64_t i = 0; i < count; ++i) all.push_back(*from[i]);
      return all;
    };
    const auto first = list(ys);
    const auto down = list(a);
    const auto up = list(b);
    const auto sums =
        prsmed::LowRank::apply(*x, at::TensorList(first), at::TensorList(down), at::TensorList(up), scale, p);
    for (int64_t i = 0; i < count; ++i) out[i] = new at::Tensor(sums[static_cast<size_t>(i)]);
  })
}

char* prsmed_rotate(at::Tensor* xs, at::Tensor* cos, at::Tensor* sin, at::Tensor** out) {
  PRSMED_TRY(*out = new at::Tensor(prsmed::Rotate::apply(*xs, *cos, *sin)))
}

char* prsmed_packed_bias(at::Tensor* blocks, int32_t kind, at::Tensor** out) {
  PRSMED_TRY(*out = new at::Tensor(
                 prsmed::call<&prsmed::packed_bias>("prsmed::packed_bias", *blocks, static_cast<at::ScalarType>(kind))))
}
}
