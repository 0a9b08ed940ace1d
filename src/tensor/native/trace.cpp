// Trace: one thread's allocations and the cost of its operators, with the module path of each.
//
// Costs are floating-point operations of matrix products, convolutions and attention (a multiply-add is two), and bytes
// that an operator reads and writes. Views and allocations cost nothing. An operator that calls others has no cost of
// its own, except those with a formula (see `flops_of`), whose inner calls then cost nothing.
#include "trace.h"

#include "native.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace {

struct Event {
  uint64_t bytes;
  uint32_t block;
  uint32_t module;
  uint16_t op;  // index into the names
  uint8_t category;
  uint8_t kind;  // 0 allocate, 1 release, 2 move to `category`
  uint32_t padding = 0;
};

struct Cost {
  double flops, bytes;
  uint32_t module;
  uint32_t event;  // number of events before it ended
  uint16_t op;
  uint8_t element_bytes;  // of the first floating-point input
  uint8_t backward;
  uint32_t padding = 0;
};

enum class Kind : uint8_t {
  kFree,
  kPlain,
  kProduct,
  kConvolution,
  kConvolutionBackward,
  kAttention,
  kAttentionBackward
};

struct Traits {
  uint16_t name;
  Kind kind;
};

struct Frame {
  uint16_t op;
  Kind kind;
  bool inner = false;   // it called operators with a cost
  bool silent = false;  // part of an operator that is counted as a whole
  double flops = 0, bytes = 0;
  uint8_t element_bytes = 0;
};

struct Trace {
  uint32_t serial;
  bool counts_host;
  std::vector<Event> events;
  std::vector<Cost> costs;
  std::vector<std::string> names;
  std::unordered_map<std::string, uint16_t> numbers;
  std::unordered_map<const void*, Traits> known;
  std::vector<Frame> frames;
  uint32_t blocks = 0;
  at::CallbackHandle forward = 0;

  uint16_t number(const std::string& name) {
    auto [found, fresh] = numbers.emplace(name, static_cast<uint16_t>(names.size()));
    if (fresh) names.push_back(name);
    return found->second;
  }
  uint16_t current() const { return frames.empty() ? 0 : frames.back().op; }
};

thread_local std::unique_ptr<Trace> active;
thread_local uint32_t module = 0;

// Module paths of this thread's backward passes, while a trace or a profile follows them.
struct Nodes {
  uint32_t followers = 0;
  std::vector<std::pair<uint64_t, uint32_t>> modules;  // module path from this autograd sequence number on
  std::vector<uint32_t> outer;                         // module paths to restore after a backward node
  at::CallbackHandle handle = 0;

  void entered(uint32_t next) {
    const uint64_t from = at::sequence_number::peek();
    if (!modules.empty() && modules.back().first == from) modules.back().second = next;
    else modules.emplace_back(from, next);
  }
};
thread_local Nodes nodes;

Kind kind_of(const c10::FunctionSchema& schema) {
  const std::string_view name = schema.name();
  for (auto* free :
       {"aten::empty", "aten::new_empty", "aten::resize_", "aten::contiguous", "aten::to", "aten::_to_copy",
        "aten::is_", "aten::set_", "aten::result_type", "aten::detach", "aten::reshape", "aten::_unsafe_view",
        "aten::_reshape", "aten::scalar_tensor", "aten::lift", "aten::requires_grad",
        "aten::_has_compatible_shallow_copy_type", "aten::_flash_attention"})
    if (name.rfind(free, 0) == 0 && name != "aten::_to_copy") return Kind::kFree;
  for (auto* product : {"aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::addmv",
                        "aten::mv", "aten::dot"})
    if (name == product) return Kind::kProduct;
  if (name.find("convolution_backward") != name.npos) return Kind::kConvolutionBackward;
  if (name == "aten::convolution" || name == "aten::_convolution" || name == "aten::cudnn_convolution")
    return Kind::kConvolution;
  if (name.rfind("aten::_scaled_dot_product", 0) == 0 && name.find("math") == name.npos)
    return name.find("backward") == name.npos ? Kind::kAttention : Kind::kAttentionBackward;
  const auto& arguments = schema.arguments();
  if (!arguments.empty() && arguments[0].alias_info() != nullptr && !arguments[0].alias_info()->isWrite())
    return Kind::kFree;
  return Kind::kPlain;
}

// The address of an operator's name identifies the overload; asking for the schema would copy it. Autograd creates its
// nodes' names anew each time.
Traits traits(const at::RecordFunction& call) {
  if (std::string_view(call.name()).rfind("autograd::", 0) == 0) return {active->number(call.name()), Kind::kFree};
  auto found = active->known.find(call.name());
  if (found != active->known.end()) return found->second;
  const auto schema = call.operator_schema();
  // observers without a schema are autograd's, around the operators of a node
  const Traits fresh = schema ? Traits{active->number(call.name()), kind_of(*schema)} : Traits{0, Kind::kFree};
  return active->known.emplace(call.name(), fresh).first->second;
}

template <class F> void each_tensor(const c10::IValue& value, F f) {
  if (value.isTensor()) {
    const at::Tensor& t = value.toTensor();
    if (t.defined()) f(t);
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorList()) f(t);
  }
}
double touched(const at::Tensor& t) {
  const double all = static_cast<double>(t.numel()) * static_cast<double>(t.element_size());
  return t.has_storage() ? std::min(all, static_cast<double>(t.storage().nbytes())) : all;  // expanded tensors
}

std::vector<const at::Tensor*> tensors_of(c10::ArrayRef<const c10::IValue> inputs) {
  std::vector<const at::Tensor*> found;
  for (const auto& input : inputs)
    if (input.isTensor() && input.toTensor().defined()) found.push_back(&input.toTensor());
  return found;
}

double flops_of(Kind kind, std::string_view name, c10::ArrayRef<const c10::IValue> inputs) {
  auto tensors = tensors_of(inputs);
  if (kind == Kind::kProduct) {
    if (tensors.size() < 2) return 0;
    const at::Tensor& a = *tensors[tensors.size() >= 3 ? 1 : 0];
    const at::Tensor& b = *tensors[tensors.size() >= 3 ? 2 : 1];
    return 2.0 * a.numel() * (b.dim() >= 2 ? b.size(-1) : 1);
  }
  if (kind == Kind::kConvolution && tensors.size() >= 2 && inputs.size() >= 7) {
    // output positions times cost per position; `inputs`: input, weight, bias, stride, padding, dilation, transposed,
    // ...
    const at::Tensor &x = *tensors[0], &w = *tensors[1];
    if (inputs[6].isBool() && inputs[6].toBool()) return 2.0 * x.numel() * w.numel() / w.size(0);
    double places = x.size(0);
    const auto stride = inputs[3].toIntVector(), padding = inputs[4].toIntVector();
    for (int64_t i = 2; i < x.dim(); ++i) {
      const auto s = stride[std::min<size_t>(i - 2, stride.size() - 1)],
                 p = padding[std::min<size_t>(i - 2, padding.size() - 1)];
      places *= (x.size(i) + 2 * p - w.size(i)) / s + 1;
    }
    return 2.0 * places * w.numel();
  }
  if (kind == Kind::kConvolutionBackward && tensors.size() >= 3) {
    const at::Tensor &g = *tensors[0], &x = *tensors[1], &w = *tensors[2];
    const bool transposed = inputs.size() > 7 && inputs[7].isBool() && inputs[7].toBool();
    const double once = transposed ? 2.0 * x.numel() * w.numel() / w.size(0) : 2.0 * g.numel() * w.numel() / w.size(0);
    double parts = 2;
    if (!inputs.empty() && inputs.back().isBoolList()) {
      const auto wanted = inputs.back().toBoolList();
      parts = (wanted.size() > 0 && wanted[0] ? 1 : 0) + (wanted.size() > 1 && wanted[1] ? 1 : 0);
    }
    return parts * once;
  }
  if ((kind == Kind::kAttention || kind == Kind::kAttentionBackward) && tensors.size() >= 3) {
    const bool back = kind == Kind::kAttentionBackward;
    const at::Tensor &q = *tensors[back ? 1 : 0], &k = *tensors[back ? 2 : 1];
    if (q.dim() < 4) return 0;
    // the first flag of the memory-efficient kernel says whether sums are saved
    int flags = !back && name.find("efficient") != name.npos ? -1 : 0;
    bool causal = false;
    for (const auto& input : inputs)
      if (input.isBool() && &input != &inputs.back() && ++flags > 0) causal |= input.toBool();
    const double products = back ? 5 : 2;  // the backward pass computes the scores again
    return products * 2.0 * q.numel() * k.size(-2) * (causal ? 0.5 : 1.0);
  }
  return 0;
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& call) {
  if (!active) return nullptr;
  const Traits known = traits(call);
  Frame frame{known.name, known.kind};
  if (!active->frames.empty()) {
    Frame& parent = active->frames.back();
    if (known.kind == Kind::kFree) frame.op = parent.op;  // a block belongs to the calling operator
    frame.silent = parent.silent || parent.kind > Kind::kPlain;
    if (frame.silent) frame.op = parent.op;
  }
  if (!frame.silent && known.kind != Kind::kFree) {
    if (!active->frames.empty()) active->frames.back().inner = true;
    const auto inputs = call.inputs();
    for (const auto& input : inputs)
      each_tensor(input, [&](const at::Tensor& t) {
        frame.bytes += touched(t);
        if (frame.element_bytes == 0 && at::isFloatingType(t.scalar_type())) frame.element_bytes = t.element_size();
      });
    if (known.kind > Kind::kPlain) frame.flops = flops_of(known.kind, call.name(), inputs);
  }
  active->frames.push_back(frame);
  return nullptr;
}

void leave(const at::RecordFunction& call, at::ObserverContext*) {
  if (!active || active->frames.empty()) return;
  Frame frame = active->frames.back();
  active->frames.pop_back();
  if (frame.silent || frame.kind == Kind::kFree || (frame.inner && frame.kind == Kind::kPlain)) {
    // the events of an inner operator also belong to its caller
    if (frame.inner && !active->frames.empty()) active->frames.back().inner = true;
    return;
  }
  for (const auto& output : call.outputs())
    each_tensor(output, [&](const at::Tensor& t) { frame.bytes += touched(t); });
  active->costs.push_back({frame.flops, frame.bytes, module, static_cast<uint32_t>(active->events.size()), frame.op,
                           frame.element_bytes, !nodes.outer.empty()});
}

// A backward node has the module path of its forward pass.
std::unique_ptr<at::ObserverContext> enter_node(const at::RecordFunction& node) {
  nodes.outer.push_back(module);
  const auto& modules = nodes.modules;
  if (node.seqNr() >= 0 && !modules.empty()) {
    auto after = std::upper_bound(modules.begin(), modules.end(), static_cast<uint64_t>(node.seqNr()),
                                  [](uint64_t number, const auto& entry) { return number < entry.first; });
    if (after != modules.begin()) module = std::prev(after)->second;
  }
  return nullptr;
}
void leave_node(const at::RecordFunction&, at::ObserverContext*) {
  if (nodes.outer.empty()) return;
  module = nodes.outer.back();
  nodes.outer.pop_back();
}

void follow() {
  if (nodes.followers++ > 0) return;
  nodes.modules.assign(1, {0, module});
  nodes.outer.clear();
  nodes.handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(enter_node, leave_node).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}
void unfollow() {
  if (--nodes.followers > 0) return;
  at::removeCallback(nodes.handle);
  nodes.modules.clear();
  nodes.outer.clear();
}

}  // namespace

extern "C" {

bool prsmed_trace_active() noexcept { return active != nullptr; }

void prsmed_trace_cost(const char* name, double flops, double bytes, uint8_t element_bytes) noexcept {
  if (!active) return;
  active->costs.push_back({flops, bytes, module, static_cast<uint32_t>(active->events.size()), active->number(name),
                           element_bytes, !nodes.outer.empty()});
}
bool prsmed_trace_counts_host() noexcept { return active != nullptr && active->counts_host; }

PrsmedTag prsmed_trace_allocate(uint64_t bytes, int32_t category) noexcept {
  const uint32_t block = active->blocks++;
  active->events.push_back({bytes, block, module, active->current(), static_cast<uint8_t>(category), 0});
  return {active->serial, block};
}
void prsmed_trace_release(PrsmedTag tag) noexcept {
  if (!active || tag.trace != active->serial) return;
  active->events.push_back({0, tag.block, module, active->current(), 0, 1});
}
void prsmed_trace_move(PrsmedTag tag, int32_t category) noexcept {
  if (!active || tag.trace != active->serial) return;
  active->events.push_back({0, tag.block, module, active->current(), static_cast<uint8_t>(category), 2});
}

uint32_t prsmed_module() noexcept { return module; }
// Enters a module path; returns the former one.
uint32_t prsmed_module_set(uint32_t next) noexcept {
  const uint32_t before = module;
  module = next;
  if (nodes.followers > 0 && next != before) nodes.entered(next);
  return before;
}

// Gives this thread's backward nodes their module paths, until `prsmed_module_unfollow`.
char* prsmed_module_follow() { PRSMED_TRY(follow()) }
void prsmed_module_unfollow() noexcept { unfollow(); }
// Forgets the module paths of graphs made so far; a trace needs them until its end.
void prsmed_module_forget() noexcept {
  if (nodes.followers > 0 && !active) nodes.modules.assign(1, {0, module});
}

void prsmed_trace_end() noexcept;
// Starts a trace on this thread; a running one is dropped. Without `costs` operators have neither names nor costs.
char* prsmed_trace_begin(bool counts_host, bool costs) {
  PRSMED_TRY({
    static std::atomic<uint32_t> last{0};
    prsmed_trace_end();
    active = std::make_unique<Trace>();
    active->serial = ++last;
    active->counts_host = counts_host;
    active->number("");
    if (costs) {
      active->forward = at::addThreadLocalCallback(at::RecordFunctionCallback(enter, leave)
                                                       .needsInputs(true)
                                                       .needsOutputs(true)
                                                       .scopes({at::RecordScope::FUNCTION}));
    }
    follow();
  })
}

struct PrsmedTraceView {
  const Event* events;
  uint64_t num_events;
  const Cost* costs;
  uint64_t num_costs;
};
// The trace so far; valid until the next tensor operation.
void prsmed_trace_view(PrsmedTraceView* out) noexcept {
  *out = active
             ? PrsmedTraceView{active->events.data(), active->events.size(), active->costs.data(), active->costs.size()}
             : PrsmedTraceView{nullptr, 0, nullptr, 0};
}
// Name of an operator, or nullptr past the last.
const char* prsmed_trace_name(uint64_t index) noexcept {
  return active && index < active->names.size() ? active->names[index].c_str() : nullptr;
}
void prsmed_trace_end() noexcept {
  if (!active) return;
  if (active->forward != 0) at::removeCallback(active->forward);
  unfollow();
  active.reset();
}
}
