// The dry run: libtorch's meta device with an allocator that counts and kernels that allocate what the CPU's allocate.
// Every kernel here was compared, event for event, with what libtorch 2.11 does on the CPU.
#include "mirror.h"
#include "trace.h"

#include <torch/library.h>
#include <torch/torch.h>

#include <ATen/OpMathType.h>
#include <ATen/record_function.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/to_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math_native.h>
#include <ATen/ops/add_meta_dispatch.h>
#include <ATen/ops/addmm_meta_dispatch.h>
#include <ATen/ops/bmm_meta_dispatch.h>
#include <ATen/ops/div_meta_dispatch.h>
#include <ATen/ops/mm_meta_dispatch.h>
#include <ATen/ops/mul_meta_dispatch.h>
#include <ATen/ops/sub_meta_dispatch.h>
#include <ATen/ops/sum_meta_dispatch.h>
#include <torch/csrc/autograd/graph_task.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at::native {
int64_t _fused_sdp_choice_cpp(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool);
}

namespace {
using at::Tensor; using OptT = std::optional<Tensor>;

// While a trace runs on this thread blocks are its events; else the ledger counts them.
struct Block { uint64_t bytes; int32_t category; PrsmedTag tag; };
void release(void* context) {
  if (context == nullptr) return;
  auto* block = static_cast<Block*>(context);
  if (block->tag.trace != 0) prsmed_trace_release(block->tag);
  else prsmed_ledger_remove(block->category, block->bytes);
  delete block;
}
struct CountingMeta final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = c10::Device(c10::kMeta);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    auto* block = new Block{bytes, prsmed_ledger_category(), {}};
    if (prsmed_trace_active()) block->tag = prsmed_trace_allocate(bytes, block->category);
    else prsmed_ledger_add(block->category, bytes);
    return {nullptr, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {}
} counting;

at::TensorOptions meta_of(std::optional<at::ScalarType> t) { return at::TensorOptions().device(c10::kMeta).dtype(t.value_or(at::kFloat)); }

// Device::Mps of tch is what a meta tensor reports; factories asked for it give meta tensors.
Tensor mps_empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> t, std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> f) {
  return at::empty(C10_AS_INTARRAYREF_SLOW(size), meta_of(t), f);
}
Tensor mps_empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> t, std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::empty_strided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), meta_of(t));
}

// A CPU tensor sent to meta: on the CPU that is the same tensor, so the new one keeps the old block and counts nothing.
Tensor upload(const Tensor& x) {
  auto drop = [](void* storage) { delete static_cast<c10::Storage*>(storage); };
  c10::Storage alias(c10::Storage::use_byte_size_t(), x.storage().nbytes(), c10::DataPtr(nullptr, new c10::Storage(x.storage()), drop, c10::Device(c10::kMeta)), &counting, false);
  return prsmed::meta_tensor(std::move(alias), x.sizes(), x.strides(), x.storage_offset(), x.scalar_type());
}
bool uploads(const Tensor& x, std::optional<at::Device> d, std::optional<at::ScalarType> t, bool copy) {
  return x.is_cpu() && d && (d->is_mps() || d->is_meta()) && t.value_or(x.scalar_type()) == x.scalar_type() && !copy && !x.requires_grad();
}
// A meta tensor sent to "its" device stays where it is; so it does when sent to the CPU that it stands for.
std::optional<at::Device> home(const Tensor& x, std::optional<at::Device> d) { return x.is_meta() && d && (d->is_mps() || d->is_cpu()) ? at::Device(c10::kMeta) : d; }
Tensor to_device(const Tensor& x, at::Device d, at::ScalarType t, bool nb, bool copy, std::optional<at::MemoryFormat> f) {
  return uploads(x, d, t, copy) ? upload(x) : at::native::to(x, *home(x, d), t, nb, copy, f);
}
Tensor to_dtype_layout(const Tensor& x, std::optional<at::ScalarType> t, std::optional<at::Layout> l, std::optional<at::Device> d, std::optional<bool> pin, bool nb, bool copy, std::optional<at::MemoryFormat> f) {
  return uploads(x, d, t, copy) ? upload(x) : at::native::to(x, t, l, home(x, d), pin, nb, copy, f);
}

// ---- attention -------------------------------------------------------------------------------------------------
std::pair<int64_t, int64_t> flash_blocks(int64_t t, int64_t s) {
  int64_t q = t >= 768 ? 256 : t >= 192 ? 64 : 32;
  return {std::min(q, t), std::min<int64_t>(512, s)};
}
// What the matrix products inside one worker of the kernel hold (oneDNN, reduced precision only): learnt on one head.
int64_t product_scratch(const char* name, std::initializer_list<Tensor> shapes, int64_t known, const std::function<void()>& run) {
  std::ostringstream key;
  key << name;
  for (auto& t : shapes) if (t.defined()) key << t.scalar_type() << t.sizes() << t.strides();
  return prsmed::transient_peak(key.str(), run) - known;
}
bool reduced(const Tensor& t) { return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf; }
Tensor one_head(const Tensor& t) { return prsmed::ghost({1, 1, t.size(2), t.size(3)}, {0, 0, t.stride(2), t.stride(3)}, t.scalar_type()); }
OptT one_mask(const OptT& m, int64_t t, int64_t s) {
  if (!m || !m->defined()) return std::nullopt;
  auto full = m->expand({m->dim() == 4 ? m->size(0) : 1, m->dim() == 4 ? m->size(1) : 1, t, s});
  return one_head(full);
}
void hold(int64_t bytes) { if (bytes > 0) counting.allocate(bytes); }  // and let go at once

std::tuple<Tensor, Tensor> flash(const Tensor& q, const Tensor& k, const Tensor& v, double p, bool causal, const OptT& mask, std::optional<double> scale) {
  auto out = at::empty_like(q).transpose(1, 2);
  const int64_t b = q.size(0), h = q.size(1), t = q.size(2), d = q.size(3), s = k.size(2), threads = at::get_num_threads();
  auto acc = at::toOpMathType(q.scalar_type());
  auto lse = at::empty({b, t, h}, q.options().dtype(acc));
  auto [bq, bs] = flash_blocks(t, s);
  auto buffer = at::empty({threads, bq * bs + 2 * bq + bq * d}, q.options().dtype(acc));
  auto reduced_buffer = at::empty({threads, bq, reduced(q) ? bs : int64_t(0)}, q.options());
  if (reduced(q)) {
    const int64_t known = t * d * 2 + t * 4 + buffer.nbytes() + reduced_buffer.nbytes();
    auto extra = product_scratch(causal ? "flash causal" : "flash", {q[0][0], k[0][0], v[0][0], mask && mask->defined() ? *mask : Tensor()}, known,
      [&] { at::_scaled_dot_product_flash_attention_for_cpu(one_head(q), one_head(k), one_head(v), p, causal, one_mask(mask, t, s), scale); });
    hold(extra * std::min(threads, b * h * ((t + bq - 1) / bq)));
  }
  return {out.transpose(1, 2), lse.transpose(1, 2)};
}
std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse, double p, bool causal, const OptT& mask, std::optional<double> scale) {
  if (!g.defined()) return {};
  const int64_t b = q.size(0), t = q.size(2), d = q.size(3), s = k.size(2), threads = at::get_num_threads();
  auto acc = at::toOpMathType(q.scalar_type());
  auto gq = at::zeros(q.transpose(1, 2).sizes(), q.options()), gk = at::zeros(k.transpose(1, 2).sizes(), q.options()), gv = at::zeros(v.transpose(1, 2).sizes(), q.options());
  {
    auto contiguous = g.transpose(1, 2).contiguous();
    auto [bq, bs] = flash_blocks(t, s);
    auto buffer = at::empty({threads, 2 * bq * bs}, q.options().dtype(acc));
    auto reduced_buffer = at::empty({threads, reduced(q) ? 2 * bq * bs : int64_t(0)}, q.options());
    const int64_t sums = bq * c10::elementSize(acc);  // each worker's row sums
    int64_t extra = 0;
    if (reduced(q)) {
      const int64_t known = (t + 2 * s) * d * 2 + buffer.nbytes() + reduced_buffer.nbytes() + sums;
      auto head_grad = contiguous.transpose(1, 2);
      extra = product_scratch(causal ? "flash backward causal" : "flash backward", {q[0][0], k[0][0], v[0][0], head_grad[0][0], mask && mask->defined() ? *mask : Tensor()}, known, [&] {
        // the copy of one head's gradient is contiguous already
        at::_scaled_dot_product_flash_attention_for_cpu_backward(prsmed::ghost({1, 1, t, d}, {t * d, t * d, d, 1}, q.scalar_type()), one_head(q), one_head(k), one_head(v), one_head(out),
          prsmed::ghost({1, 1, t}, {t, t, 1}, lse.scalar_type()), p, causal, one_mask(mask, t, s), scale);
      });
    }
    hold((sums + extra) * std::min(threads, b * k.size(1)));
  }
  return {gq.transpose(1, 2), gk.transpose(1, 2), gv.transpose(1, 2)};
}
// Composite functions that add in place on the CPU and out of place on meta ("tensor subclass like"): inside them an
// addition gives back its first operand where nobody else holds it.
thread_local int in_place_sums = 0;
struct InPlaceSums {
  InPlaceSums() { ++in_place_sums; }
  ~InPlaceSums() { --in_place_sums; }
};
// scaled_dot_product_attention with the CPU's choice of kernel
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptT& mask, double dropout, bool causal, std::optional<double> scale, bool gqa) {
  auto choice = at::native::_fused_sdp_choice_cpp(q, k, v, mask, dropout, causal, scale, gqa);
  OptT bias = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool) bias = at::where(*mask, at::scalar_tensor(0.0, q.options()), at::scalar_tensor(-INFINITY, q.options()));
  if (choice == static_cast<int64_t>(at::SDPBackend::flash_attention)) return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, bias, scale));
  InPlaceSums guard;
  return std::get<0>(at::native::_scaled_dot_product_attention_math(q, k, v, bias, dropout, causal, std::nullopt, scale, gqa));
}
Tensor linear(const Tensor& x, const Tensor& w, const OptT& b) {
  InPlaceSums guard;
  return at::native::linear(x, w, b);
}
Tensor index_select_backward(const Tensor& g, c10::SymIntArrayRef sizes, int64_t dim, const Tensor& index) {
  return at::zeros(C10_AS_INTARRAYREF_SLOW(sizes), g.options()).index_add_(dim, index, g);
}

// ---- norms -----------------------------------------------------------------------------------------------------
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, c10::SymIntArrayRef ns, const OptT& w, const OptT& b, double) {
  auto xc = x.contiguous();
  auto wc = w && w->defined() ? w->contiguous() : Tensor(), bc = b && b->defined() ? b->contiguous() : Tensor();
  auto y = at::empty_like(xc, xc.options(), at::MemoryFormat::Contiguous);
  std::vector<int64_t> stat(x.sizes().begin(), x.sizes().end() - ns.size()); stat.resize(x.dim(), 1);
  const auto t = wc.defined() && wc.scalar_type() != x.scalar_type() ? wc.scalar_type() : x.scalar_type();
  auto mean = at::empty(stat, x.options().dtype(t)), rstd = at::empty(stat, x.options().dtype(t));
  return {y, mean, rstd};
}
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& g, const Tensor& x, c10::SymIntArrayRef ns, const Tensor& mean, const Tensor& rstd, const OptT& w, const OptT& b, std::array<bool, 3> m) {
  auto xc = x.contiguous();
  auto wc = w && w->defined() ? w->contiguous() : Tensor(); auto bc = b && b->defined() ? b->contiguous() : Tensor();
  Tensor dx, dw, db;
  if (m[0]) dx = at::empty_like(xc, xc.options(), at::MemoryFormat::Contiguous);
  if (m[1]) dw = at::empty_like(wc, wc.options(), at::MemoryFormat::Contiguous);
  if (m[2]) db = at::empty_like(bc, bc.options(), at::MemoryFormat::Contiguous);
  int64_t n = 1; for (auto s : ns) n *= s.expect_int();
  {
    auto gc = g.contiguous();
    Tensor buffer;
    if (m[1] || m[2]) { buffer = at::empty({2, at::get_num_threads(), n}, (wc.defined() ? wc : xc).options()); }
  }
  return {dx, dw, db};
}

// ---- elementwise: TensorIterator on the CPU copies each operand whose dtype is not the common one ----------------
Tensor promoted(const Tensor& t, at::ScalarType common) {
  if (t.scalar_type() == common) return t;
  if (t.is_meta()) return at::empty_like(t, t.options().dtype(common));
  return at::empty({}, meta_of(common));  // a wrapped number
}
// The engine adds gradients in place where it may; on meta tensors it never does, so the kernel of its out-of-place
// addition gives back the operand that would have been changed.
bool reusable(const Tensor& t) {
  return t.is_meta() && t.is_non_overlapping_and_dense() && t.use_count() == 1 && t.has_storage() && t.storage().use_count() == 1;
}
// Graph tasks of the nodes that are being evaluated: the engine's own additions come between nodes.
thread_local std::vector<int> evaluating;
// libtorch's formula of this node works in place on the CPU and out of place on meta
thread_local bool in_place_node = false;
bool accumulating() {
  const int task = torch::autograd::get_current_graph_task_id();
  return task != -1 && !at::GradMode::is_enabled() && (evaluating.empty() || evaluating.back() != task);
}
void watch_nodes() {
  at::addGlobalCallback(at::RecordFunctionCallback(
    [](const at::RecordFunction& node) -> std::unique_ptr<at::ObserverContext> {
      evaluating.push_back(torch::autograd::get_current_graph_task_id());
      in_place_node = std::string_view(node.name()) == "BinaryCrossEntropyWithLogitsBackward0";
      return nullptr;
    },
    [](const at::RecordFunction&, at::ObserverContext*) { evaluating.pop_back(); in_place_node = false; }).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}
#define BINARY(NAME)                                                                   \
  Tensor meta_##NAME(const Tensor& a, const Tensor& b) {                                      \
    auto common = at::result_type(a, b);                                               \
    if (!at::isFloatingType(common)) return at::meta::NAME(a, b);                      \
    if (in_place_node) {                                                               \
      const auto size = at::infer_size(a.sizes(), b.sizes());                          \
      if (a.scalar_type() == common && a.sizes() == size && reusable(a)) return a;     \
      if (b.scalar_type() == common && b.sizes() == size && reusable(b)) return b;     \
    }                                                                                  \
    auto pa = promoted(a, common), pb = promoted(b, common);                           \
    return at::meta::NAME(pa, pb);                                                     \
  }                                                                                    \
  Tensor& meta_##NAME##_(Tensor& a, const Tensor& b) {                                        \
    auto pb = promoted(b, at::result_type(a, b));                                      \
    return at::meta::NAME##_(a, pb);                                                   \
  }
BINARY(mul)
BINARY(div)
// what mul_(scalar) calls
Tensor& mul_out(const Tensor& a, const Tensor& b, Tensor& out) {
  auto common = at::result_type(a, b);
  auto pa = promoted(a, common), pb = promoted(b, common);
  return at::meta::mul_outf(pa, pb, out);
}
Tensor add(const Tensor& a, const Tensor& b, const at::Scalar& alpha) {
  if (accumulating() && a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type()) {
    if (reusable(a)) return a;
  }
  if (in_place_sums > 0 && reusable(a) && a.dim() >= b.dim() && at::result_type(a, b) == a.scalar_type()) {
    promoted(b, a.scalar_type());
    return a;
  }
  auto common = at::result_type(a, b);
  if (!at::isFloatingType(common)) return at::meta::add(a, b, alpha);
  auto pa = promoted(a, common), pb = promoted(b, common);
  return at::meta::add(pa, pb, alpha);
}
Tensor& add_(Tensor& a, const Tensor& b, const at::Scalar& alpha) { auto pb = promoted(b, at::result_type(a, b)); return at::meta::add_(a, pb, alpha); }
Tensor sub(const Tensor& a, const Tensor& b, const at::Scalar& alpha) {
  auto common = at::result_type(a, b);
  if (!at::isFloatingType(common)) return at::meta::sub(a, b, alpha);
  if (in_place_node && reusable(a)) return a;
  auto pa = promoted(a, common), pb = promoted(b, common);
  return at::meta::sub(pa, pb, alpha);
}
Tensor relu(const Tensor& x) { return at::empty_like(x); }

// ---- reductions --------------------------------------------------------------------------------------------------
Tensor sum(const Tensor& x, at::OptionalIntArrayRef dims, bool keep, std::optional<at::ScalarType> t) {
  auto out = at::meta::sum(x, dims, keep, t);
  if (out.scalar_type() != x.scalar_type()) at::empty_like(x, x.options().dtype(out.scalar_type()));  // the CPU casts the whole input
  return out;
}

// libtorch's resize_ of a meta tensor does not pass through the allocator
const Tensor& resize_(const Tensor& x, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> f) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (x.sizes() == sizes) return x;
  auto fresh = at::empty(sizes, x.options(), f);
  auto* impl = x.unsafeGetTensorImpl();
  if (fresh.storage().nbytes() > x.storage().nbytes()) impl->set_storage_keep_dtype(fresh.storage());
  impl->set_sizes_and_strides(fresh.sizes(), fresh.strides());
  return x;
}
Tensor index_select(const Tensor& x, int64_t d, const Tensor& i) {
  auto s = x.sizes().vec(); if (!s.empty()) s[at::maybe_wrap_dim(d, x.dim())] = i.numel();
  return at::empty(s, x.options());
}
void adamw(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, double, double, double, double, double, bool, bool, const OptT&, const OptT&) {}

// ---- matrix products: oneDNN's scratch for reduced precision is learnt; fp32 (MKL) has none --------------------------
// Above this many multiplications a product is not run whole: its scratch, which depends on block sizes and settles at
// about 1 MB, is that of a product cut to kCut.
constexpr double kWhole = 1e11;
constexpr int64_t kCut = 2048;
bool whole(const Tensor& a, const Tensor& b) { return static_cast<double>(a.numel()) * b.size(-1) < kWhole; }
void cut_scratch(const Tensor& a, const Tensor& b) {
  auto cut = [](const Tensor& t) {
    auto s = t.sizes().vec(), strides = t.strides().vec();
    for (size_t i = 0; i < s.size(); ++i) s[i] = std::min(s[i], i + 2 < s.size() ? 1 : kCut);
    return prsmed::ghost(s, strides, t.scalar_type());
  };
  auto ga = cut(a), gb = cut(b);
  const int64_t out = ga.numel() / ga.size(-1) * gb.size(-1) * 2;
  hold(product_scratch("product", {ga, gb}, out, [&] { at::matmul(ga, gb); }));
}
torch::jit::Stack& mirrored_call(const char* name, torch::jit::Stack& stack) {
  prsmed::mirror(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), &stack);
  return stack;
}
Tensor mm(const Tensor& a, const Tensor& b) {
  torch::jit::Stack s{a, b};
  if (reduced(a) && whole(a, b)) return mirrored_call("aten::mm", s)[0].toTensor();
  auto out = at::meta::mm(a, b);
  if (reduced(a)) cut_scratch(a, b);
  return out;
}
Tensor bmm(const Tensor& a, const Tensor& b) {
  torch::jit::Stack s{a, b};
  if (reduced(a) && whole(a, b)) return mirrored_call("aten::bmm", s)[0].toTensor();
  auto out = at::meta::bmm(a, b);
  if (reduced(a)) cut_scratch(a, b);
  return out;
}
Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  torch::jit::Stack s{c, a, b, beta, alpha};
  if (reduced(a) && whole(a, b)) return mirrored_call("aten::addmm", s)[0].toTensor();
  auto out = at::meta::addmm(c, a, b, beta, alpha);
  if (reduced(a)) cut_scratch(a, b);
  return out;
}

}  // namespace

c10::Allocator* prsmed::meta_allocator() { return &counting; }

C10_REGISTER_GUARD_IMPL(MPS, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MPS>)

namespace {
// Composite functions need their kernel under both keys: below autograd, and above it so that what they call is recorded.
void composite(torch::Library& m) {
  m.impl("scaled_dot_product_attention", attention);
  m.impl("linear", linear);
  m.impl("index_select_backward", index_select_backward);
}
void by_hand(torch::Library& m) {
  m.impl("_scaled_dot_product_flash_attention_for_cpu", flash);
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward", flash_backward);
  m.impl("native_layer_norm", layer_norm);
  m.impl("native_layer_norm_backward", layer_norm_backward);
  m.impl("index_select", index_select);
  m.impl("add.Tensor", add);
  m.impl("add_.Tensor", add_);
  m.impl("sub.Tensor", sub);
  m.impl("mul.Tensor", meta_mul);
  m.impl("mul.out", mul_out);
  m.impl("mul_.Tensor", meta_mul_);
  m.impl("div.Tensor", meta_div);
  m.impl("div_.Tensor", meta_div_);
  m.impl("relu", relu);
  m.impl("sum.dim_IntList", sum);
  m.impl("resize_", resize_);
  m.impl("mm", mm);
  m.impl("bmm", bmm);
  m.impl("addmm", addmm);
  m.impl("_fused_adamw_", adamw);
}
// Those whose kernel for meta allocates less than the CPU's, and every other one that the CPU has and meta has not.
void mirrored(torch::Library& m) {
  auto kernel = [] { return torch::CppFunction::makeFromBoxedFunction<&prsmed::mirror>(); };
  for (auto* name : {"convolution", "convolution_backward", "mean.dim", "upsample_bilinear2d", "upsample_bilinear2d_backward", "index_add_", "cumsum"}) m.impl(name, kernel());
  using K = c10::DispatchKey;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.name.rfind("aten::", 0) != 0 || !op->hasKernelForDispatchKey(K::CPU)) continue;
    bool has = false;
    for (auto k : {K::Meta, K::CompositeExplicitAutograd, K::CompositeExplicitAutogradNonFunctional, K::CompositeImplicitAutograd}) has |= op->hasKernelForDispatchKey(k);
    if (has) continue;
    m.impl((name.overload_name.empty() ? name.name : name.name + "." + name.overload_name).c_str(), kernel());
  }
}
torch::Library& library(c10::DispatchKey key) { return *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__); }  // never destroyed

void install() {
  c10::SetAllocator(c10::kMeta, &counting, 255);
  auto& mps = library(c10::DispatchKey::MPS);
  mps.impl("empty.memory_format", mps_empty);
  mps.impl("empty_strided", mps_empty_strided);
  auto& meta = library(c10::DispatchKey::Meta);
  composite(meta);
  by_hand(meta);
  mirrored(meta);
  composite(library(c10::DispatchKey::AutogradMeta));
  for (auto key : {c10::DispatchKey::Meta, c10::DispatchKey::AutogradMeta, c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU}) {
    auto& l = library(key);
    l.impl("to.device", to_device);
    l.impl("to.dtype_layout", to_dtype_layout);
  }
  watch_nodes();
}
}  // namespace

extern "C" {

// Makes the dry run possible in this process; nothing changes for tensors of other devices. Call it before the first plan.
char* prsmed_meta_install() {
  try {
    static bool done = (install(), true);
    (void)done;
    return nullptr;
  } catch (const std::exception& error) { return strdup(error.what()); }
}

// Moves a meta tensor's storage to another category; true when it is counted here.
bool prsmed_meta_move(at::Tensor* tensor, int32_t category) {
  const auto& pointer = tensor->storage().data_ptr();
  if (!tensor->is_meta() || pointer.get_deleter() != &release || pointer.get_context() == nullptr) return false;
  auto* block = static_cast<Block*>(pointer.get_context());
  if (block->tag.trace != 0) {
    prsmed_trace_move(block->tag, category);
  } else {
    prsmed_ledger_remove(block->category, block->bytes);
    prsmed_ledger_add(category, block->bytes);
  }
  block->category = category;
  return true;
}
}
