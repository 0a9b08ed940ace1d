// Dry run: libtorch's meta device with an allocator that counts bytes, and kernels that allocate like the CPU's. Every
// kernel here was compared, event by event, with libtorch 2.11 on the CPU.
#include "meta.h"
#include "mirror.h"
#include "native.h"
#include "trace.h"

#include <ATen/ops/_log_softmax_backward_data_meta_dispatch.h>
#include <ATen/ops/_log_softmax_meta_dispatch.h>
#include <ATen/ops/_softmax_backward_data_meta_dispatch.h>
#include <ATen/ops/_softmax_meta_dispatch.h>
#include <ATen/ops/dropout_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/native_group_norm.h>
#include <ATen/ops/to_native.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

namespace {
using at::Tensor;
using OptT = std::optional<Tensor>;

// While a trace runs on this thread, it records the blocks; otherwise the ledger counts them.
struct MetaBlock {
  uint64_t bytes;
  int32_t category;
  PrsmedTag tag;
};
void release(void* context) {
  if (context == nullptr) return;
  auto* block = static_cast<MetaBlock*>(context);
  if (block->tag.trace != 0) prsmed_trace_release(block->tag);
  else prsmed_ledger_remove(block->category, block->bytes);
  delete block;
}
struct CountingMeta final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = c10::Device(c10::kMeta);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    auto* block = new MetaBlock{bytes, prsmed_ledger_category(), {}};
    if (prsmed_trace_active()) block->tag = prsmed_trace_allocate(bytes, block->category);
    else prsmed_ledger_add(block->category, bytes);
    return {nullptr, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {}
} counting;

// Kernels that depend on the target are in meta_cpu.cpp and meta_cuda.cpp; here are those that both targets share.
using namespace prsmed;

// A meta tensor reports tch's Device::Mps. Factory functions for this device give meta tensors.
Tensor mps_empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> t, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> f) {
  return at::empty(C10_AS_INTARRAYREF_SLOW(size), meta_of(t), f);
}
Tensor mps_empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> t,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::empty_strided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), meta_of(t));
}

// Copies a CPU tensor to meta. For the CPU target this is the same tensor, so the new one shares the old block and
// counts nothing. For the CUDA target it gets a block of its own.
Tensor upload(const Tensor& x) {
  auto drop = [](void* storage) { delete static_cast<c10::Storage*>(storage); };
  c10::Storage alias(c10::Storage::use_byte_size_t(), x.storage().nbytes(),
                     c10::DataPtr(nullptr, new c10::Storage(x.storage()), drop, c10::Device(c10::kMeta)), &counting,
                     false);
  return prsmed::meta_tensor(std::move(alias), x.sizes(), x.strides(), x.storage_offset(), x.scalar_type());
}
bool uploads(const Tensor& x, std::optional<at::Device> d, std::optional<at::ScalarType> t, bool copy) {
  return !for_cuda() && x.is_cpu() && d && (d->is_mps() || d->is_meta()) &&
         t.value_or(x.scalar_type()) == x.scalar_type() && !copy && !x.requires_grad();
}
// A meta tensor that is sent to its own device, or to the CPU that it simulates, stays unchanged.
std::optional<at::Device> home(const Tensor& x, std::optional<at::Device> d) {
  return x.is_meta() && d && (d->is_mps() || d->is_cpu()) ? at::Device(c10::kMeta) : d;
}
Tensor to_device(const Tensor& x, at::Device d, at::ScalarType t, bool nb, bool copy,
                 std::optional<at::MemoryFormat> f) {
  return uploads(x, d, t, copy) ? upload(x) : at::native::to(x, *home(x, d), t, nb, copy, f);
}
Tensor to_dtype_layout(const Tensor& x, std::optional<at::ScalarType> t, std::optional<at::Layout> l,
                       std::optional<at::Device> d, std::optional<bool> pin, bool nb, bool copy,
                       std::optional<at::MemoryFormat> f) {
  return uploads(x, d, t, copy) ? upload(x) : at::native::to(x, t, l, home(x, d), pin, nb, copy, f);
}

// ---- kernels of both targets -------------------------------------------------------------------------------------
Tensor linear(const Tensor& x, const Tensor& w, const OptT& b) {
  InPlaceSums guard;
  return at::native::linear(x, w, b);
}
// group_norm.cpp: on the CPU a channels-last map stays channels-last; the composite function asks the device.
Tensor group_norm(const Tensor& x, int64_t groups, const OptT& w, const OptT& b, double eps, bool) {
  auto xc = for_cuda() ? x.contiguous() : x.contiguous(x.suggest_memory_format());
  auto flat = [](const OptT& t) { return t && t->defined() ? t->contiguous() : Tensor(); };
  auto wc = flat(w), bc = flat(b);
  const int64_t n = x.size(0), c = x.size(1), area = x.numel() / std::max<int64_t>(n * c, 1);
  return std::get<0>(at::native_group_norm(xc, wc, bc, n, c, area, groups, eps));
}
Tensor index_select_backward(const Tensor& g, c10::SymIntArrayRef sizes, int64_t dim, const Tensor& index) {
  return at::zeros(C10_AS_INTARRAYREF_SLOW(sizes), g.options()).index_add_(dim, index, g);
}
Tensor index_select(const Tensor& x, int64_t d, const Tensor& i) {
  auto s = x.sizes().vec();
  if (!s.empty()) s[at::maybe_wrap_dim(d, x.dim())] = i.numel();
  return at::empty(s, x.options());
}
// SoftMax.cpp and cuda/SoftMax.cu make their inputs contiguous.
template <auto Kernel> Tensor softmax_backward(const Tensor& g, const Tensor& y, int64_t dim, at::ScalarType t) {
  auto out = Kernel(g, y, dim, t);
  auto gc = g.contiguous(), yc = y.contiguous();
  return out;
}
template <auto Kernel> Tensor softmax(const Tensor& x, int64_t dim, bool half_to_float) {
  auto out = Kernel(x, dim, half_to_float);
  auto copy = x.contiguous();
  return out;
}
Tensor relu(const Tensor& x) { return at::empty_like(x); }
void adamw(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, double,
           double, double, double, double, bool, bool, const OptT&, const OptT&) {}
Tensor dropout(const Tensor& x, double p, bool train) { return at::native::dropout(x, p, train); }

// libtorch's resize_ of a meta tensor does not use the allocator
const Tensor& resize_(const Tensor& x, c10::SymIntArrayRef size, Format f) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (x.sizes() == sizes) return x;
  auto fresh = at::empty(sizes, x.options(), f);
  auto* impl = x.unsafeGetTensorImpl();
  if (fresh.storage().nbytes() > x.storage().nbytes()) impl->set_storage_keep_dtype(fresh.storage());
  impl->set_sizes_and_strides(fresh.sizes(), fresh.strides());
  return x;
}

// ---- autograd between kernels -------------------------------------------------------------------------------------
thread_local bool cuda_target = false;
thread_local Gpu planned_gpu;
thread_local int sums_in_place = 0;
// Graph tasks of the nodes in evaluation: autograd's own additions run between nodes.
thread_local std::vector<int> evaluating;
thread_local bool node_in_place = false;
void watch_nodes() {
  at::addGlobalCallback(at::RecordFunctionCallback(
                            [](const at::RecordFunction& node) -> std::unique_ptr<at::ObserverContext> {
                              evaluating.push_back(torch::autograd::get_current_graph_task_id());
                              node_in_place = std::string_view(node.name()) == "BinaryCrossEntropyWithLogitsBackward0";
                              return nullptr;
                            },
                            [](const at::RecordFunction&, at::ObserverContext*) {
                              evaluating.pop_back();
                              node_in_place = false;
                            })
                            .scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

// A kernel that selects one of two by the thread's target.
template <auto Cpu, auto Cuda, class Type = decltype(Cpu)> struct Either;
template <auto Cpu, auto Cuda, class R, class... A> struct Either<Cpu, Cuda, R (*)(A...)> {
  static R call(A... a) { return cuda_target ? Cuda(std::forward<A>(a)...) : Cpu(std::forward<A>(a)...); }
};
#define PRSMED_EITHER(NAME) &Either<&cpu::NAME, &cuda::NAME>::call

}  // namespace

namespace prsmed {
c10::Allocator* meta_allocator() { return &counting; }
bool for_cuda() { return cuda_target; }
const Gpu& gpu() { return planned_gpu; }
void hold(int64_t bytes) {
  if (bytes > 0) counting.allocate(bytes);
}
at::TensorOptions meta_of(std::optional<at::ScalarType> t) {
  return at::TensorOptions().device(c10::kMeta).dtype(t.value_or(at::kFloat));
}
bool reduced(const Tensor& t) { return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf; }
bool reusable(const Tensor& t) {
  return t.is_meta() && t.is_non_overlapping_and_dense() && t.use_count() == 1 && t.has_storage() &&
         t.storage().use_count() == 1;
}
bool accumulating() {
  const int task = torch::autograd::get_current_graph_task_id();
  return task != -1 && !at::GradMode::is_enabled() && (evaluating.empty() || evaluating.back() != task);
}
bool in_place_node() { return node_in_place; }
bool in_place_sums() { return sums_in_place > 0; }
InPlaceSums::InPlaceSums() { ++sums_in_place; }
InPlaceSums::~InPlaceSums() { --sums_in_place; }
}  // namespace prsmed

C10_REGISTER_GUARD_IMPL(MPS, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MPS>)

namespace {
// Composite functions need their kernel under both keys: below autograd, and above it, so that autograd records their
// calls.
void composite(torch::Library& m) {
  m.impl("scaled_dot_product_attention", PRSMED_EITHER(attention));
  m.impl("dropout", &Either<&dropout, &cuda::dropout>::call);
  m.impl("linear", linear);
  m.impl("group_norm", group_norm);
  m.impl("index_select_backward", index_select_backward);
}
void by_hand(torch::Library& m) {
  m.impl("_scaled_dot_product_flash_attention_for_cpu", cpu::flash);
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward", cpu::flash_backward);
  m.impl("native_layer_norm", PRSMED_EITHER(layer_norm));
  m.impl("native_layer_norm_backward", PRSMED_EITHER(layer_norm_backward));
  m.impl("index_select", index_select);
  m.impl("add.Tensor", PRSMED_EITHER(add));
  m.impl("add_.Tensor", PRSMED_EITHER(add_));
  m.impl("sub.Tensor", PRSMED_EITHER(sub));
  m.impl("sub_.Tensor", PRSMED_EITHER(sub_));
  m.impl("mul.Tensor", PRSMED_EITHER(mul));
  m.impl("mul.out", PRSMED_EITHER(mul_out));
  m.impl("mul_.Tensor", PRSMED_EITHER(mul_));
  m.impl("div.Tensor", PRSMED_EITHER(div));
  m.impl("div_.Tensor", PRSMED_EITHER(div_));
  m.impl("relu", relu);
  m.impl("gelu_backward", PRSMED_EITHER(gelu_backward));
  m.impl("_softmax_backward_data", softmax_backward<&at::meta::_softmax_backward_data>);
  m.impl("_log_softmax_backward_data", softmax_backward<&at::meta::_log_softmax_backward_data>);
  m.impl("_softmax", softmax<&at::meta::_softmax>);
  m.impl("_log_softmax", softmax<&at::meta::_log_softmax>);
  m.impl("sum.dim_IntList", PRSMED_EITHER(sum));
  m.impl("resize_", resize_);
  m.impl("mm", PRSMED_EITHER(mm));
  m.impl("bmm", PRSMED_EITHER(bmm));
  m.impl("addmm", PRSMED_EITHER(addmm));
  m.impl("addmm_", PRSMED_EITHER(addmm_));
  m.impl("_fused_adamw_", adamw);
}
// All other operators that the CPU has and meta lacks. For CUDA, the CPU's allocations are an approximation.
void mirrored(torch::Library& m) {
  auto kernel = [] { return torch::CppFunction::makeFromBoxedFunction<&prsmed::mirror>(); };
  using K = c10::DispatchKey;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.name.rfind("aten::", 0) != 0 || !op->hasKernelForDispatchKey(K::CPU)) continue;
    bool has = cuda::describes(name);
    for (auto k : {K::Meta, K::CompositeExplicitAutograd, K::CompositeExplicitAutogradNonFunctional,
                   K::CompositeImplicitAutograd})
      has |= op->hasKernelForDispatchKey(k);
    if (has) continue;
    m.impl((name.overload_name.empty() ? name.name : name.name + "." + name.overload_name).c_str(), kernel());
  }
}
torch::Library& library(c10::DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
}  // never destroyed

void install() {
  c10::SetAllocator(c10::kMeta, &counting, 255);
  auto& mps = library(c10::DispatchKey::MPS);
  mps.impl("empty.memory_format", mps_empty);
  mps.impl("empty_strided", mps_empty_strided);
  auto& meta = library(c10::DispatchKey::Meta);
  composite(meta);
  by_hand(meta);
  cuda::install(meta);
  mirrored(meta);
  composite(library(c10::DispatchKey::AutogradMeta));
  for (auto key :
       {c10::DispatchKey::Meta, c10::DispatchKey::AutogradMeta, c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU}) {
    auto& l = library(key);
    l.impl("to.device", to_device);
    l.impl("to.dtype_layout", to_dtype_layout);
  }
  watch_nodes();
}
void install_once() { [[maybe_unused]] static const bool is_done = (install(), true); }
}  // namespace

extern "C" {

// Enables the dry run in this process. Tensors of other devices are not affected. Call it before the first plan.
char* prsmed_meta_install(){PRSMED_TRY(install_once())}

// Sets the target of this thread's meta tensors: 0 is the CPU, 1 is CUDA. Returns the former target.
int32_t prsmed_meta_target(int32_t target) noexcept {
  const bool before = cuda_target;
  cuda_target = target == 1;
  return before;
}
int32_t prsmed_meta_target_now() noexcept { return cuda_target; }
// Sets the simulated GPU of this thread; the default is 80 and 108 (an A100).
void prsmed_meta_gpu(int32_t capability, int32_t multiprocessors) noexcept {
  planned_gpu = {capability, multiprocessors};
}

// Moves a meta tensor's storage to another category. Returns true if it is counted here.
bool prsmed_meta_move(at::Tensor* tensor, int32_t category) noexcept {
  const auto& pointer = tensor->storage().data_ptr();
  if (!tensor->is_meta() || pointer.get_deleter() != &release || pointer.get_context() == nullptr) return false;
  auto* block = static_cast<MetaBlock*>(pointer.get_context());
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
