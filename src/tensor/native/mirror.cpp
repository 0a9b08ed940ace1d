// Mirror: runs an operator with new shapes once on the CPU under a tracing allocator (inputs are pages that are never
// touched, so they need no memory). Later it repeats the allocations on meta in the same order; they are cached by
// shape. During a trace the process's CPU allocator is this one; it passes on what other threads ask for.
#include "mirror.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/mman.h>
#include <mutex>
#include <sstream>
#include <unordered_map>

namespace prsmed {
namespace {
using at::Tensor;

constexpr uint64_t kMagic = 0x7072736d65644d52;
struct Header { uint64_t magic, bytes, id; };

struct Step {
  bool allocates;
  size_t id;
  int64_t bytes;
};

// True in the thread that traces, and in the workers of its parallel loops: each thread has workers of its own.
thread_local bool is_traced = false;

// CPU allocator that records the allocations of traced threads. Installed only during a trace.
struct TraceAllocator final : c10::Allocator {
  std::mutex lock;
  std::vector<Step> steps;
  std::unordered_map<void*, size_t> live;
  c10::Allocator* before = nullptr;
  int64_t held = 0, peak = 0;

  static void release(void* data) {
    if (data == nullptr) return;
    auto* header = reinterpret_cast<Header*>(static_cast<char*>(data) - 64);
    auto& self = get();
    if (header->magic != kMagic) return self.before->raw_deleter()(data);  // made before the trace began
    {
      std::lock_guard<std::mutex> guard(self.lock);
      if (self.live.erase(data)) {
        self.steps.push_back({false, header->id, static_cast<int64_t>(header->bytes)});
        self.held -= header->bytes;
      }
    }
    header->magic = 0;
    c10::free_cpu(header);
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (!is_traced) return before->allocate(bytes);
    const auto device = c10::Device(c10::kCPU);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    char* base = static_cast<char*>(c10::alloc_cpu(bytes + 64));
    std::lock_guard<std::mutex> guard(lock);
    *reinterpret_cast<Header*>(base) = {kMagic, bytes, steps.size()};
    live[base + 64] = steps.size();
    steps.push_back({true, steps.size(), static_cast<int64_t>(bytes)});
    held += bytes;
    peak = std::max(peak, held);
    return {base + 64, base + 64, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }

  void clear() {
    std::lock_guard<std::mutex> guard(lock);  // other threads may free what was traced before
    steps.clear();
    live.clear();
    held = peak = 0;
  }
  void begin() {
    clear();
    before = c10::GetCPUAllocator();
    at::parallel_for(0, at::get_num_threads(), 1, [](int64_t, int64_t) { is_traced = true; });
    is_traced = true;
    c10::SetCPUAllocator(this, 255);
  }
  void end() {
    c10::SetCPUAllocator(before, 255);
    is_traced = false;
  }
  static TraceAllocator& get() {
    static auto* r = new TraceAllocator;
    return *r;
  }
};

struct Out {
  enum { kUndefined, kArgument, kFresh, kOther } kind = kUndefined;
  size_t index = 0;  // of the argument, or of the step that allocates it
  size_t storage_bytes = 0;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  at::ScalarType type = at::kFloat;
};
struct Recipe {
  std::vector<Step> steps;
  std::vector<Out> outs;
  std::vector<std::pair<size_t, Out>> resized;  // arguments (of out variants) with a new storage
};
std::unordered_map<std::string, Recipe> recipes;
std::recursive_mutex learning;  // one operator at a time, of one thread
std::unordered_map<std::string, int64_t> peaks;

void describe(std::ostream& s, const Tensor& t) {
  if (!t.defined()) {
    s << "-;";
    return;
  }
  s << t.device().type() << c10::toString(t.scalar_type()) << t.sizes() << t.strides() << ';';
}
template <class F> void each_tensor(const c10::IValue& v, F f) {
  if (v.isTensor()) f(v.toTensor());
  else if (v.isTensorList())
    for (const Tensor& t : v.toTensorVector()) f(t);
  else if (v.isOptionalTensorList())
    for (const std::optional<Tensor>& t : v.toOptionalTensorVector()) f(t ? *t : Tensor());
}
// The same value with each tensor replaced.
template <class F> c10::IValue mapped(const c10::IValue& v, F f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> l;
    for (const Tensor& t : v.toTensorVector()) l.push_back(f(t));
    return l;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> l;
    for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
      l.push_back(t ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return l;
  }
  if (v.isDevice()) return c10::IValue(c10::Device(c10::kCPU));
  return v;
}
Out describe_out(const Tensor& t, const std::vector<Tensor>& arguments, const TraceAllocator& r) {
  Out o;
  if (!t.defined()) return o;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].defined() && arguments[i].is_same(t)) {
      o.kind = Out::kArgument;
      o.index = i;
      return o;
    }
  for (const auto& a : arguments)
    TORCH_CHECK(!a.defined() || t.storage().nbytes() == 0 || !a.storage().is_alias_of(t.storage()),
                "the dry run cannot mirror an operator that returns a view");
  o.kind = Out::kOther;
  auto found = r.live.find(const_cast<void*>(t.storage().data()));
  if (found != r.live.end()) {
    o.kind = Out::kFresh;
    o.index = found->second;
  }
  o.storage_bytes = t.storage().nbytes();
  o.sizes = t.sizes().vec();
  o.strides = t.strides().vec();
  o.offset = t.storage_offset();
  o.type = t.scalar_type();
  return o;
}

// While it exists, the trace allocator gets CPU allocations and the ledger does not.
struct TraceScope {
  TraceScope() { TraceAllocator::get().begin(); }
  ~TraceScope() { TraceAllocator::get().end(); }
};

Recipe learn(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  at::AutoDispatchBelowAutograd below;
  TraceScope scope;
  at::RecordFunctionGuard unobserved(false);
  std::vector<Tensor> ghosts;
  auto haunted = [&] {
    ghosts.clear();
    torch::jit::Stack stack;
    for (const auto& a : arguments)
      stack.push_back(mapped(a, [&](const Tensor& t) {
        Tensor g = t;
        if (t.defined() && t.is_meta())
          g = t.numel() == 0 ? at::empty_strided(t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()))
                             : ghost(t.sizes(), t.strides(), t.scalar_type());
        ghosts.push_back(g);
        return g;
      }));
    return stack;
  };
  auto generator = at::detail::getDefaultCPUGenerator();
  const auto random = generator.get_state();
  auto stack = haunted();
  std::vector<std::vector<int64_t>> sizes;
  for (auto& g : ghosts) sizes.push_back(g.defined() ? g.sizes().vec() : std::vector<int64_t>());
  auto& r = TraceAllocator::get();
  Recipe recipe;
  r.clear();
  op.callBoxed(&stack);
  recipe.steps = r.steps;
  for (auto& v : stack) each_tensor(v, [&](const Tensor& t) { recipe.outs.push_back(describe_out(t, ghosts, r)); });
  for (size_t i = 0; i < ghosts.size(); ++i)
    if (ghosts[i].defined() && ghosts[i].sizes().vec() != sizes[i]) {
      auto self = ghosts[i];
      recipe.resized.emplace_back(i, describe_out(self, {}, r));
    }
  generator.set_state(random);
  return recipe;
}
}  // namespace

Tensor ghost(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type) {
  int64_t last = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) last = 0;
    else if (last > 0) last += (sizes[i] - 1) * strides[i];
  }
  const size_t bytes = std::max<size_t>(64, last * c10::elementSize(type));
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(pages != MAP_FAILED, "no address space for ", bytes, " bytes");
  return at::from_blob(pages, sizes, strides, [bytes](void* p) { munmap(p, bytes); }, at::TensorOptions(type));
}

Tensor meta_tensor(c10::Storage storage, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset,
                   at::ScalarType type) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::Meta),
                                                    c10::scalarTypeToTypeMeta(type));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return t;
}

void mirror(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  std::vector<c10::IValue> arguments(stack->end() - count, stack->end());
  std::ostringstream key;
  key << op.schema().name() << '.' << op.schema().overload_name() << ' ' << at::get_num_threads() << ' ';
  std::vector<Tensor> tensors;
  for (const auto& a : arguments) {
    bool any = a.isTensor() || a.isTensorList() || a.isOptionalTensorList();
    each_tensor(a, [&](const Tensor& t) {
      describe(key, t);
      tensors.push_back(t);
    });
    if (!any && !a.isDevice() && !a.isGenerator()) key << a << ';';
  }
  std::lock_guard<std::recursive_mutex> guard(learning);
  auto found = recipes.find(key.str());
  if (found == recipes.end()) { found = recipes.emplace(key.str(), learn(op, arguments)).first; }
  const Recipe& recipe = found->second;

  torch::jit::drop(*stack, count);
  auto* allocator = meta_allocator();
  std::unordered_map<size_t, c10::DataPtr> passing;
  std::vector<Tensor> outs(recipe.outs.size());
  auto make = [&](const Out& o) {
    c10::Storage storage(c10::Storage::use_byte_size_t(), o.storage_bytes, allocator, true);
    return meta_tensor(std::move(storage), o.sizes, o.strides, o.offset, o.type);
  };
  auto is_out = [&](size_t id) {
    bool taken = false;
    for (size_t i = 0; i < outs.size(); ++i)
      if (recipe.outs[i].kind == Out::kFresh && recipe.outs[i].index == id) {
        TORCH_CHECK(!taken, op.schema().name(), ": outputs share a storage");
        outs[i] = make(recipe.outs[i]);
        taken = true;
      }
    for (const auto& [argument, o] : recipe.resized)
      if (o.kind == Out::kFresh && o.index == id) {
        auto fresh = make(o);
        auto* impl = tensors[argument].unsafeGetTensorImpl();
        impl->set_storage_keep_dtype(fresh.storage());
        impl->set_sizes_and_strides(o.sizes, o.strides, o.offset);
        taken = true;
      }
    return taken;
  };
  for (const Step& s : recipe.steps) {
    if (!s.allocates) passing.erase(s.id);
    else if (!is_out(s.id)) passing.emplace(s.id, allocator->allocate(s.bytes));
  }
  for (size_t i = 0; i < outs.size(); ++i) {
    const Out& o = recipe.outs[i];
    if (o.kind == Out::kArgument) outs[i] = tensors[o.index];
    if (o.kind == Out::kOther) outs[i] = make(o);  // without a block: no elements
  }
  size_t next = 0;
  for (const auto& r : op.schema().returns()) {
    if (r.type()->kind() == c10::TypeKind::TensorType) stack->emplace_back(outs.at(next++));
    else if (r.type()->kind() == c10::TypeKind::ListType) {
      c10::List<Tensor> l;
      while (next < outs.size()) l.push_back(outs[next++]);
      stack->emplace_back(l);
    } else TORCH_CHECK(false, op.schema().name(), ": the dry run cannot know the value it returns");
  }
}

int64_t transient_peak(const std::string& key, const std::function<void()>& run) {
  auto full = key + std::to_string(at::get_num_threads());
  std::lock_guard<std::recursive_mutex> guard(learning);
  auto found = peaks.find(full);
  if (found != peaks.end()) return found->second;
  at::AutoDispatchBelowAutograd below;
  TraceScope scope;
  at::RecordFunctionGuard unobserved(false);
  auto& r = TraceAllocator::get();
  r.clear();
  run();
  return peaks[full] = r.peak;
}
}  // namespace prsmed
