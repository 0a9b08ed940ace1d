// AdamW steps on lists of parameters: libtorch's fused step (which tch does not wrap), 8-bit AdamW, and offloaded
// moments in CPU memory. Nothing here synchronises with the GPU: clip scale and found_inf are tensors.
#include "native.h"
#include "optim.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "meta.h"

namespace {
using at::Tensor;

// A parameter with its state: fp32 moments (`state` 0 and 1), or codes and scales of both moments.
struct PrsmedSlot { Tensor *param, *grad, *step, *state[4]; };

struct PrsmedAdamw {
  double learning_rate, beta1, beta2, weight_decay, epsilon;
  Tensor *rate, *found_inf, *signed_map, *unsigned_map;  // may be null
  int64_t chunk;  // elements per chunk of offloaded moments; 0: the moments are on the parameters' device
};

std::vector<Tensor> list(Tensor** tensors, int64_t count) {
  std::vector<Tensor> result;
  for (int64_t i = 0; i < count; ++i) result.push_back(*tensors[i]);
  return result;
}
bool runs_as_cuda(const Tensor& t) { return t.is_cuda() || (t.is_meta() && prsmed::for_cuda()); }
bool has(const Tensor* t) { return t != nullptr && t->defined(); }

void step32(std::vector<Tensor> p, std::vector<Tensor> g, std::vector<Tensor> m, std::vector<Tensor> v,
            std::vector<Tensor> steps, const PrsmedAdamw& n) {
  if (p.empty()) return;
  const auto found_inf = has(n.found_inf) ? std::optional<Tensor>(*n.found_inf) : std::nullopt;
  if (has(n.rate) && p[0].is_cuda())
    return at::_fused_adamw_(p, g, m, v, {}, steps, *n.rate, n.beta1, n.beta2, n.weight_decay, n.epsilon, false, false,
                             {}, found_inf);
  const double rate = has(n.rate) && p[0].is_cpu() ? n.rate->item<double>() : n.learning_rate;
  at::_fused_adamw_(p, g, m, v, {}, steps, rate, n.beta1, n.beta2, n.weight_decay, n.epsilon, false, false, {},
                    found_inf);
}

bool in_8_bits(const PrsmedSlot& slot) { return slot.state[2] != nullptr; }

Tensor flat(const Tensor& t) {
  TORCH_CHECK(t.is_contiguous(), "a trained tensor is not contiguous");
  return t.view({-1});
}

// The gradient with the strides of its parameter; a contiguous one is not copied.
Tensor flat_gradient(const Tensor& grad) { return grad.contiguous().view({-1}); }

using State = std::array<Tensor, 4>;

void step8(const PrsmedSlot& slot, const Tensor& param, const Tensor& grad, const State& s, const PrsmedAdamw& n) {
  auto maybe = [](const Tensor* t) { return has(t) ? *t : Tensor(); };
  prsmed::step8({param, grad, s[0], s[1], s[2], s[3], *slot.step, *n.signed_map, *n.unsigned_map, maybe(n.rate),
                 maybe(n.found_inf), n.learning_rate, n.beta1, n.beta2, n.weight_decay, n.epsilon});
}

// Step with moments on the parameters' device.
void in_place(const PrsmedSlot* slots, int64_t count, const PrsmedAdamw& n) {
  std::vector<Tensor> p, g, m, v, steps;
  for (int64_t i = 0; i < count; ++i) {
    const auto& s = slots[i];
    if (in_8_bits(s)) {
      State state;
      for (int k = 0; k < 4; ++k) state[k] = flat(*s.state[k]);
      step8(s, flat(*s.param), flat_gradient(*s.grad), state, n);
      continue;
    }
    p.push_back(*s.param);
    g.push_back(*s.grad);
    m.push_back(*s.state[0]);
    v.push_back(*s.state[1]);
    steps.push_back(*s.step);
  }
  step32(p, g, m, v, steps, n);
}

// ---- offloaded moments in CPU memory ----------------------------------------------------------------------------
constexpr int64_t kBlock = 256;

// Elements `begin..begin + count` of a parameter.
struct Chunk {
  const PrsmedSlot* slot;
  int64_t begin, count;
};

// The part of a state tensor that belongs to a chunk: elements, or one scale per block of 256.
struct Part { int64_t begin, count, bytes; };
int parts_of(const PrsmedSlot& slot) { return in_8_bits(slot) ? 4 : 2; }
Part part(const Chunk& chunk, int which) {
  const bool scales = in_8_bits(*chunk.slot) && which % 2 == 1;
  const int64_t begin = scales ? chunk.begin / kBlock : chunk.begin;
  const int64_t count = scales ? (chunk.count + kBlock - 1) / kBlock : chunk.count;
  return {begin, count, count * static_cast<int64_t>(chunk.slot->state[which]->element_size())};
}
int64_t padded(int64_t bytes) { return (bytes + 511) / 512 * 512; }
int64_t bytes_of(const Chunk& chunk) {
  int64_t bytes = 0;
  for (int k = 0; k < parts_of(*chunk.slot); ++k) bytes += padded(part(chunk, k).bytes);
  return bytes;
}

// The state of a chunk in a staging buffer.
State staged(const Chunk& chunk, const Tensor& buffer) {
  State state;
  int64_t at = 0;
  for (int k = 0; k < parts_of(*chunk.slot); ++k) {
    const auto p = part(chunk, k);
    state[k] = buffer.narrow(0, at, p.bytes).view(chunk.slot->state[k]->scalar_type());
    at += padded(p.bytes);
  }
  return state;
}

// Copies between CPU and GPU on a separate stream. On other devices everything runs in order.
class Lanes {
 public:
  explicit Lanes(at::Device device) : device_(device), cuda_(device.is_cuda()) {
    if (!cuda_) return;
    c10::impl::VirtualGuardImpl impl(device.type());
    work_ = impl.getStream(device);
    static thread_local std::optional<c10::Stream> own;
    if (!own || own->device() != device) own = impl.getStreamFromGlobalPool(device, false);
    copies_ = own;
    after(*work_, *copies_);
  }
  template <class F> void copy(F f) const {
    if (!cuda_) return f();
    c10::StreamGuard guard(*copies_);
    f();
  }
  void work_waits_for_copies() const {
    if (cuda_) after(*copies_, *work_);
  }
  void copies_wait_for_work() const {
    if (cuda_) after(*work_, *copies_);
  }
  // Completion of the copies so far, so that work can wait for them while later copies run.
  std::optional<c10::Event> mark_copies() const {
    if (!cuda_) return std::nullopt;
    c10::Event event(device_.type());
    event.record(*copies_);
    return event;
  }
  void work_waits_for(std::optional<c10::Event>& event) const {
    if (event) event->block(*work_);
  }

 private:
  void after(const c10::Stream& first, const c10::Stream& then) const {
    c10::Event event(device_.type());
    event.record(first);
    event.block(then);
  }
  at::Device device_;
  bool cuda_;
  std::optional<c10::Stream> work_, copies_;
};

// Chunk by chunk: while one is updated, the next one is copied. Two buffers.
void offloaded(const PrsmedSlot* slots, int64_t count, const PrsmedAdamw& n) {
  TORCH_CHECK(n.chunk % kBlock == 0, "the chunk size must be a multiple of the block size");
  std::vector<Chunk> chunks;
  int64_t bytes = 0;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t begin = 0; begin < slots[i].param->numel(); begin += n.chunk) {
      chunks.push_back({slots + i, begin, std::min(n.chunk, slots[i].param->numel() - begin)});
      bytes = std::max(bytes, bytes_of(chunks.back()));
    }
  if (chunks.empty()) return;
  const auto& like = *slots[0].param;
  const bool is_real = !like.is_meta();
  const Tensor buffers[2] = {at::empty({bytes}, like.options().dtype(at::kByte)),
                             at::empty({bytes}, like.options().dtype(at::kByte))};
  const Lanes lanes(like.device());
  auto host = [](const Chunk& chunk, int k) {
    const auto p = part(chunk, k);
    return flat(*chunk.slot->state[k]).narrow(0, p.begin, p.count);
  };
  std::optional<c10::Event> ready[2];
  auto bring = [&](size_t i) {
    if (!is_real) return;
    const auto state = staged(chunks[i], buffers[i % 2]);
    lanes.copy([&] {
      for (int k = 0; k < parts_of(*chunks[i].slot); ++k) state[k].copy_(host(chunks[i], k), /*non_blocking=*/true);
    });
    ready[i % 2] = lanes.mark_copies();
  };
  bring(0);
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (i + 1 < chunks.size()) bring(i + 1);
    const auto& chunk = chunks[i];
    const auto& slot = *chunk.slot;
    lanes.work_waits_for(ready[i % 2]);
    const auto state = staged(chunk, buffers[i % 2]);
    const auto param = flat(*slot.param).narrow(0, chunk.begin, chunk.count);
    const auto grad = flat_gradient(*slot.grad).narrow(0, chunk.begin, chunk.count);
    if (in_8_bits(slot)) step8(slot, param, grad, state, n);
    else step32({param}, {grad}, {state[0]}, {state[1]}, {*slot.step}, n);
    lanes.copies_wait_for_work();
    if (is_real)
      lanes.copy([&] {
        for (int k = 0; k < parts_of(slot); ++k) host(chunk, k).copy_(state[k], true);
      });
  }
  lanes.work_waits_for_copies();
}

// Increases the step counts, if a step is done.
void count_steps(const PrsmedSlot* slots, int64_t count, const Tensor* found_inf) {
  if (count == 0 || slots[0].step->is_meta()) return;
  std::vector<Tensor> steps;
  for (int64_t i = 0; i < count; ++i) steps.push_back(*slots[i].step);
  if (steps[0].is_cpu()) {
    if (has(found_inf) && found_inf->item<float>() == 1) return;
    for (auto& step : steps) *step.data_ptr<float>() += 1;
  } else if (has(found_inf)) {
    at::_foreach_add_(steps, 1 - *found_inf);
  } else {
    at::_foreach_add_(steps, at::Scalar(1));
  }
}
}  // namespace

extern "C" {

// Multiplies gradients by `factor` and returns the norm over all of them.
char* prsmed_gradient_norm(Tensor** grads, int64_t count, double factor, Tensor** out) {
  PRSMED_TRY({
    at::NoGradGuard guard;
    auto all = list(grads, count);
    const bool as_cuda = runs_as_cuda(all.at(0));
    if (factor != 1 && as_cuda) at::_foreach_mul_(all, at::Scalar(factor));
    if (factor != 1 && !as_cuda)
      for (auto& g : all) g.mul_(factor);
    std::vector<Tensor> norms;
    if (as_cuda) norms = at::_foreach_norm(all, 2);
    else
      for (auto& g : all) norms.push_back(g.norm());
    *out = new Tensor(at::stack(norms).norm());
  })
}

// `out`: fp32 `[2]`: the factor that limits gradients of this norm to `clip_norm` (0: no limit), and found_inf, which
// is 1 if the norm is not finite.
char* prsmed_clip_scale(Tensor* norm, double clip_norm, Tensor** out) {
  PRSMED_TRY({
    at::NoGradGuard guard;
    auto scale = at::empty({2}, norm->options());
    *out = new Tensor(scale);
    if (norm->is_cpu()) {
      const double value = *norm->const_data_ptr<float>();
      const bool finite = std::isfinite(value);
      const double clip = clip_norm > 0 && finite ? std::min(clip_norm / (value + 1e-6), 1.0) : 1.0;
      scale.data_ptr<float>()[0] = static_cast<float>(clip);
      scale.data_ptr<float>()[1] = finite ? 0.0F : 1.0F;
    } else if (!norm->is_meta()) {
      const auto clip =
          clip_norm > 0 ? (clip_norm / (norm->to(at::kDouble) + 1e-6)).clamp_max(1) : at::ones({}, norm->options());
      scale[0].copy_(clip);
      scale[1].copy_(norm->isfinite().logical_not());
    }
  })
}

// Clips gradients by the result of `prsmed_clip_scale`.
char* prsmed_clip_gradients(Tensor** grads, int64_t count, Tensor* scale) {
  PRSMED_TRY({
    at::NoGradGuard guard;
    auto all = list(grads, count);
    if (all.empty() || scale->is_meta()) return nullptr;
    const auto clip = scale->select(0, 0);
    if (!scale->is_cpu()) at::_foreach_mul_(all, clip);
    else if (clip.item<float>() < 1)
      for (auto& g : all) g.mul_(clip.item<float>());
  })
}

// Fills tensors with zeros.
char* prsmed_zero(Tensor** tensors, int64_t count) {
  PRSMED_TRY({
    at::NoGradGuard guard;
    if (count > 0) at::_foreach_zero_(list(tensors, count));
  })
}

// One step of all parameters.
char* prsmed_adamw_step(const PrsmedSlot* slots, int64_t count, const PrsmedAdamw* numbers) {
  PRSMED_TRY({
    at::NoGradGuard guard;
    count_steps(slots, count, numbers->found_inf);
    if (numbers->chunk > 0) offloaded(slots, count, *numbers);
    else in_place(slots, count, *numbers);
    for (int64_t i = 0; i < count; ++i)
      if (in_8_bits(slots[i])) slots[i].param->unsafeGetTensorImpl()->bump_version();
  })
}

// The same with libtorch's operators on any device, to test the kernel.
char* prsmed_adamw8_composed(const PrsmedSlot* slot, const PrsmedAdamw* n) {
  PRSMED_TRY({
    at::NoGradGuard guard;
    count_steps(slot, 1, n->found_inf);
    prsmed::step8_composed({flat(*slot->param), flat_gradient(*slot->grad), flat(*slot->state[0]),
                            flat(*slot->state[1]), flat(*slot->state[2]), flat(*slot->state[3]), *slot->step,
                            *n->signed_map, *n->unsigned_map, has(n->rate) ? *n->rate : Tensor(),
                            has(n->found_inf) ? *n->found_inf : Tensor(), n->learning_rate, n->beta1, n->beta2,
                            n->weight_decay, n->epsilon});
  })
}

// Makes the gradient undefined: its memory is freed, and AdamW skips the parameter.
void prsmed_clear_grad(Tensor* tensor) noexcept { tensor->mutable_grad().reset(); }
}
