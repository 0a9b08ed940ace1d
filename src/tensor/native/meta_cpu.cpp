// Allocations of libtorch 2.11's CPU kernels, repeated on the meta device. Every kernel here was compared, event by
// event, with libtorch on the CPU.
#include "meta.h"
#include "mirror.h"

#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/native/ReduceOpsUtils.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/add_meta_dispatch.h>
#include <ATen/ops/addmm_meta_dispatch.h>
#include <ATen/ops/bmm_meta_dispatch.h>
#include <ATen/ops/div_meta_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/gelu_backward_meta_dispatch.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm_meta_dispatch.h>
#include <ATen/ops/mul_meta_dispatch.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sub_meta_dispatch.h>
#include <ATen/ops/sum_meta_dispatch.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <sstream>

namespace at::native {
int64_t _fused_sdp_choice_cpp(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                              std::optional<double>, bool);
}

namespace prsmed::cpu {

// ---- attention ----------------------------------------------------------------------------------------------------
std::pair<int64_t, int64_t> flash_blocks(int64_t t, int64_t s) {
  int64_t q = t >= 768 ? 256 : t >= 192 ? 64 : 32;
  return {std::min(q, t), std::min<int64_t>(512, s)};
}
// Memory of the matrix products in one worker of the kernel (oneDNN, reduced precision only), measured with one head.
int64_t product_scratch(const char* name, std::initializer_list<Tensor> shapes, int64_t known,
                        const std::function<void()>& run) {
  std::ostringstream key;
  key << name;
  for (auto& t : shapes)
    if (t.defined()) key << t.scalar_type() << t.sizes() << t.strides();
  return transient_peak(key.str(), run) - known;
}
Tensor one_head(const Tensor& t) {
  return ghost({1, 1, t.size(2), t.size(3)}, {0, 0, t.stride(2), t.stride(3)}, t.scalar_type());
}
Tensor all_heads(const Tensor& t) { return ghost(t.sizes(), t.strides(), t.scalar_type()); }
OptT one_mask(const OptT& m, int64_t t, int64_t s) {
  if (!m || !m->defined()) return std::nullopt;
  auto full = m->expand({m->dim() == 4 ? m->size(0) : 1, m->dim() == 4 ? m->size(1) : 1, t, s});
  return one_head(full);
}
std::tuple<Tensor, Tensor> flash(const Tensor& q, const Tensor& k, const Tensor& v, double p, bool causal,
                                 const OptT& mask, std::optional<double> scale) {
  auto out = at::empty_like(q).transpose(1, 2);
  const int64_t b = q.size(0), h = q.size(1), t = q.size(2), d = q.size(3), s = k.size(2),
                threads = at::get_num_threads();
  auto acc = at::toOpMathType(q.scalar_type());
  auto lse = at::empty({b, t, h}, q.options().dtype(acc));
  auto [bq, bs] = flash_blocks(t, s);
  auto buffer = at::empty({threads, bq * bs + 2 * bq + bq * d}, q.options().dtype(acc));
  auto reduced_buffer = at::empty({threads, bq, reduced(q) ? bs : int64_t(0)}, q.options());
  if (reduced(q)) {
    // a CPU that multiplies packed matrices (AMX) packs keys and values of all heads at once
    const bool packs_heads = at::native::cpublas::could_pack(q.scalar_type());
    const int64_t count = packs_heads ? b * h : 1;
    const int64_t known = count * (t * d * 2 + t * 4) + buffer.nbytes() + reduced_buffer.nbytes();
    const Tensor bias = mask && mask->defined() ? *mask : Tensor();
    if (packs_heads) {
      hold(product_scratch(causal ? "flash of all heads causal" : "flash of all heads", {q, k, v, bias}, known, [&] {
        at::_scaled_dot_product_flash_attention_for_cpu(all_heads(q), all_heads(k), all_heads(v), p, causal,
                                                        bias.defined() ? OptT(all_heads(bias)) : std::nullopt, scale);
      }));
    } else {
      auto extra = product_scratch(causal ? "flash causal" : "flash", {q[0][0], k[0][0], v[0][0], bias}, known, [&] {
        at::_scaled_dot_product_flash_attention_for_cpu(one_head(q), one_head(k), one_head(v), p, causal,
                                                        one_mask(mask, t, s), scale);
      });
      hold(extra * std::min(threads, b * h * ((t + bq - 1) / bq)));
    }
  }
  return {out.transpose(1, 2), lse.transpose(1, 2)};
}
std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& out, const Tensor& lse, double p, bool causal,
                                                  const OptT& mask, std::optional<double> scale) {
  if (!g.defined()) return {};
  const int64_t b = q.size(0), t = q.size(2), d = q.size(3), s = k.size(2), threads = at::get_num_threads();
  auto acc = at::toOpMathType(q.scalar_type());
  auto gq = at::zeros(q.transpose(1, 2).sizes(), q.options()), gk = at::zeros(k.transpose(1, 2).sizes(), q.options()),
       gv = at::zeros(v.transpose(1, 2).sizes(), q.options());
  {
    auto contiguous = g.transpose(1, 2).contiguous();
    auto [bq, bs] = flash_blocks(t, s);
    auto buffer = at::empty({threads, 2 * bq * bs}, q.options().dtype(acc));
    auto reduced_buffer = at::empty({threads, reduced(q) ? 2 * bq * bs : int64_t(0)}, q.options());
    const int64_t sums = bq * c10::elementSize(acc);  // row sums of each worker
    int64_t extra = 0;
    if (reduced(q)) {
      const int64_t known = (t + 2 * s) * d * 2 + buffer.nbytes() + reduced_buffer.nbytes() + sums;
      auto head_grad = contiguous.transpose(1, 2);
      extra = product_scratch(
          causal ? "flash backward causal" : "flash backward",
          {q[0][0], k[0][0], v[0][0], head_grad[0][0], mask && mask->defined() ? *mask : Tensor()}, known, [&] {
            // the copy of one head's gradient is already contiguous
            at::_scaled_dot_product_flash_attention_for_cpu_backward(
                ghost({1, 1, t, d}, {t * d, t * d, d, 1}, q.scalar_type()), one_head(q), one_head(k), one_head(v),
                one_head(out), ghost({1, 1, t}, {t, t, 1}, lse.scalar_type()), p, causal, one_mask(mask, t, s), scale);
          });
    }
    hold((sums + extra) * std::min(threads, b * k.size(1)));
  }
  return {gq.transpose(1, 2), gk.transpose(1, 2), gv.transpose(1, 2)};
}
// scaled_dot_product_attention with the CPU's choice of kernel
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptT& mask, double dropout, bool causal,
                 std::optional<double> scale, bool gqa) {
  auto choice = at::native::_fused_sdp_choice_cpp(q, k, v, mask, dropout, causal, scale, gqa);
  OptT bias = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool)
    bias = at::where(*mask, at::scalar_tensor(0.0, q.options()), at::scalar_tensor(-INFINITY, q.options()));
  if (choice == static_cast<int64_t>(at::SDPBackend::flash_attention))
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, bias, scale));
  InPlaceSums guard;
  return std::get<0>(
      at::native::_scaled_dot_product_attention_math(q, k, v, bias, dropout, causal, std::nullopt, scale, gqa));
}
// ---- norms --------------------------------------------------------------------------------------------------------
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, c10::SymIntArrayRef ns, const OptT& w, const OptT& b,
                                              double) {
  auto xc = x.contiguous();
  auto wc = w && w->defined() ? w->contiguous() : Tensor(), bc = b && b->defined() ? b->contiguous() : Tensor();
  auto y = at::empty_like(xc, xc.options(), at::MemoryFormat::Contiguous);
  std::vector<int64_t> stat(x.sizes().begin(), x.sizes().end() - ns.size());
  stat.resize(x.dim(), 1);
  const auto t = wc.defined() && wc.scalar_type() != x.scalar_type() ? wc.scalar_type() : x.scalar_type();
  auto mean = at::empty(stat, x.options().dtype(t)), rstd = at::empty(stat, x.options().dtype(t));
  return {y, mean, rstd};
}
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& g, const Tensor& x, c10::SymIntArrayRef ns,
                                                       const Tensor& mean, const Tensor& rstd, const OptT& w,
                                                       const OptT& b, std::array<bool, 3> m) {
  auto xc = x.contiguous();
  auto wc = w && w->defined() ? w->contiguous() : Tensor();
  auto bc = b && b->defined() ? b->contiguous() : Tensor();
  Tensor dx, dw, db;
  if (m[0]) dx = at::empty_like(xc, xc.options(), at::MemoryFormat::Contiguous);
  if (m[1]) dw = at::empty_like(wc, wc.options(), at::MemoryFormat::Contiguous);
  if (m[2]) db = at::empty_like(bc, bc.options(), at::MemoryFormat::Contiguous);
  int64_t n = 1;
  for (auto s : ns) n *= s.expect_int();
  {
    auto gc = g.contiguous();
    Tensor buffer;
    if (m[1] || m[2]) { buffer = at::empty({2, at::get_num_threads(), n}, (wc.defined() ? wc : xc).options()); }
  }
  return {dx, dw, db};
}

// ---- elementwise: TensorIterator on the CPU copies each operand whose dtype is not the common one -----------------
Tensor promoted(const Tensor& t, at::ScalarType common) {
  if (t.scalar_type() == common) return t;
  if (t.is_meta()) return at::empty_like(t, t.options().dtype(common));
  return at::empty({}, meta_of(common));  // a wrapped number
}
// In place, an operand with another dtype than the common one is read from a copy and written through another.
void cast_in_place(const Tensor& a, const Tensor& b) {
  const auto common = at::result_type(a, b);
  auto pb = promoted(b, common);
  if (a.scalar_type() != common) hold(2 * a.numel() * c10::elementSize(common));
}
#define BINARY(NAME)                                                               \
  Tensor NAME(const Tensor& a, const Tensor& b) {                                  \
    auto common = at::result_type(a, b);                                           \
    if (!at::isFloatingType(common)) return at::meta::NAME(a, b);                  \
    if (in_place_node()) {                                                         \
      const auto size = at::infer_size(a.sizes(), b.sizes());                      \
      if (a.scalar_type() == common && a.sizes() == size && reusable(a)) return a; \
      if (b.scalar_type() == common && b.sizes() == size && reusable(b)) return b; \
    }                                                                              \
    auto pa = promoted(a, common), pb = promoted(b, common);                       \
    return at::meta::NAME(pa, pb);                                                 \
  }                                                                                \
  Tensor& NAME##_(Tensor& a, const Tensor& b) {                                    \
    cast_in_place(a, b);                                                           \
    return at::meta::NAME##_(a, b);                                                \
  }
BINARY(mul)
BINARY(div)
// called by mul_(scalar)
Tensor& mul_out(const Tensor& a, const Tensor& b, Tensor& out) {
  auto common = at::result_type(a, b);
  auto pa = promoted(a, common), pb = promoted(b, common);
  return at::meta::mul_outf(pa, pb, out);
}
Tensor add(const Tensor& a, const Tensor& b, const at::Scalar& alpha) {
  if (accumulating() && a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type()) {
    if (reusable(a)) return a;
  }
  if (in_place_sums() && reusable(a) && a.dim() >= b.dim() && at::result_type(a, b) == a.scalar_type()) {
    promoted(b, a.scalar_type());
    return a;
  }
  auto common = at::result_type(a, b);
  if (!at::isFloatingType(common)) return at::meta::add(a, b, alpha);
  auto pa = promoted(a, common), pb = promoted(b, common);
  return at::meta::add(pa, pb, alpha);
}
Tensor& add_(Tensor& a, const Tensor& b, const at::Scalar& alpha) {
  cast_in_place(a, b);
  return at::meta::add_(a, b, alpha);
}
Tensor& sub_(Tensor& a, const Tensor& b, const at::Scalar& alpha) {
  cast_in_place(a, b);
  return at::meta::sub_(a, b, alpha);
}
Tensor sub(const Tensor& a, const Tensor& b, const at::Scalar& alpha) {
  auto common = at::result_type(a, b);
  if (!at::isFloatingType(common)) return at::meta::sub(a, b, alpha);
  if (in_place_node() && reusable(a)) return a;
  auto pa = promoted(a, common), pb = promoted(b, common);
  return at::meta::sub(pa, pb, alpha);
}
// Activation.cpp: if oneDNN supports the dtype, it needs a gradient with the input's strides.
Tensor gelu_backward(const Tensor& g, const Tensor& x, std::string_view form) {
  auto out = at::meta::gelu_backward(g, x, form);
  if (form == "none" && x.numel() > 1 && x.is_contiguous() && !g.is_contiguous()) {
    constexpr int64_t n = 16;
    auto line = [&](int64_t stride) { return ghost({n}, {stride}, x.scalar_type()); };
    const auto peak = transient_peak(std::string("gelu backward ") + c10::toString(x.scalar_type()),
                                     [&] { at::gelu_backward(line(0), line(1), "none"); });
    if (peak > n * c10::elementSize(x.scalar_type())) hold(x.nbytes());
  }
  return out;
}
// ---- reductions ---------------------------------------------------------------------------------------------------
// ReduceOps.cpp, should_use_acc_buffer: over two dimensions that cannot be merged, reduced precision is summed in fp32.
bool sums_in_fp32(const Tensor& x, const Tensor& out, at::OptionalIntArrayRef dims, bool keep) {
  if (!reduced(out) || x.numel() == 0) return false;
  auto ghost_of = [](const Tensor& t) { return ghost(t.sizes(), t.strides(), t.scalar_type()); };
  auto loop = at::meta::make_reduction(ghost_of(x), ghost_of(out), dims, keep, out.scalar_type());
  return loop.ndim() >= 2 && loop.strides(0)[0] == 0 && loop.strides(0)[1] == 0;
}
Tensor sum(const Tensor& x, at::OptionalIntArrayRef dims, bool keep, std::optional<at::ScalarType> t) {
  auto out = at::meta::sum(x, dims, keep, t);
  const bool casts = out.scalar_type() != x.scalar_type();
  if (casts) at::empty_like(x, x.options().dtype(out.scalar_type()));  // the CPU casts the whole input
  if (!casts && sums_in_fp32(x, out, dims, keep)) hold((x.numel() + out.numel()) * 4);
  return out;
}

// ---- matrix products: oneDNN's scratch for reduced precision is measured; fp32 (MKL) has none ---------------------
// Above this number of multiplications a product is not run whole. Its scratch, which depends on block sizes and
// reaches about 1 MB, is that of a product cut to kCut.
constexpr double kWhole = 1e11;
// cpublas.cpp, mkldnn_bf16_gemm: oneDNN multiplies 16-bit matrices, with scratch memory, where the CPU has AVX-512 or
// AVX-NE-CONVERT. Elsewhere libtorch's own loops do, without scratch memory and too slowly to run for a plan.
bool packs(const Tensor& t) {
#ifdef __x86_64__
  static const bool has_onednn = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool converts = __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (d & (1U << 5U)) != 0;
    return converts || (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq"));
  }();
  return reduced(t) && has_onednn;
#else
  return reduced(t);
#endif
}
constexpr int64_t kCut = 2048;
bool whole(const Tensor& a, const Tensor& b) { return static_cast<double>(a.numel()) * b.size(-1) < kWhole; }
void cut_scratch(const Tensor& a, const Tensor& b) {
  auto cut = [](const Tensor& t) {
    auto s = t.sizes().vec(), strides = t.strides().vec();
    for (size_t i = 0; i < s.size(); ++i) s[i] = std::min(s[i], i + 2 < s.size() ? 1 : kCut);
    return ghost(s, strides, t.scalar_type());
  };
  auto ga = cut(a), gb = cut(b);
  const int64_t out = ga.numel() / ga.size(-1) * gb.size(-1) * 2;
  hold(product_scratch("product", {ga, gb}, out, [&] { at::matmul(ga, gb); }));
}
// LinearAlgebra.cpp, addmm_impl_cpu_ (BLAS): a matrix whose rows and columns both have gaps or overlap is copied.
bool regular(const Tensor& t) {
  const int64_t rows = t.size(-2), columns = t.size(-1), down = t.stride(-2), right = t.stride(-1);
  return (right == 1 && down >= std::max<int64_t>(1, columns)) || (down == 1 && right >= std::max<int64_t>(1, rows));
}
void copy_irregular(const Tensor& a, const Tensor& b) {
  int64_t copied = 0;
  for (auto* t : {&a, &b})
    if (!regular(*t)) copied += t->size(-2) * t->size(-1) * t->element_size();
  hold(copied);
}
torch::jit::Stack& mirrored_call(const char* name, torch::jit::Stack& stack) {
  mirror(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), &stack);
  return stack;
}
Tensor mm(const Tensor& a, const Tensor& b) {
  torch::jit::Stack s{a, b};
  if (packs(a) && whole(a, b)) return mirrored_call("aten::mm", s)[0].toTensor();
  auto out = at::meta::mm(a, b);
  if (packs(a)) cut_scratch(a, b);
  else copy_irregular(a, b);
  return out;
}
Tensor bmm(const Tensor& a, const Tensor& b) {
  torch::jit::Stack s{a, b};
  if (packs(a) && whole(a, b)) return mirrored_call("aten::bmm", s)[0].toTensor();
  auto out = at::meta::bmm(a, b);
  // small products are loops; others run one after another, unless MKL takes them all
  constexpr int64_t kLoops = 400;
  if (packs(a)) cut_scratch(a, b);
  else if (a.size(1) * a.size(2) * b.size(2) >= kLoops) copy_irregular(a, b);
  return out;
}
Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  torch::jit::Stack s{c, a, b, beta, alpha};
  if (packs(a) && whole(a, b)) return mirrored_call("aten::addmm", s)[0].toTensor();
  auto out = at::meta::addmm(c, a, b, beta, alpha);
  if (packs(a)) cut_scratch(a, b);
  else copy_irregular(a, b);
  return out;
}
Tensor& addmm_(Tensor& c, const Tensor& a, const Tensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  torch::jit::Stack s{c, a, b, beta, alpha};
  if (packs(a) && whole(a, b)) mirrored_call("aten::addmm_", s);
  else if (packs(a)) cut_scratch(a, b);
  else copy_irregular(a, b);
  return c;
}

}  // namespace prsmed::cpu
