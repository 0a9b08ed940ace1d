// Asynchronous copies between pinned CPU memory and a GPU: large ones to the GPU on a separate stream, small ones in both
// directions on the compute stream. It uses c10's device interface, which needs no CUDA headers.
#include "native.h"

#include "async_copy.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>

c10::Stream copy_stream(const c10::impl::VirtualGuardImpl& guard, c10::Device device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, c10::Stream> streams;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = streams.find(device.index());
  if (found == streams.end()) found = streams.emplace(device.index(), guard.getStreamFromGlobalPool(device)).first;
  return found->second;
}

namespace {

at::Tensor pinned_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
}

struct Arrival {
  c10::Event event;
  c10::Device device;
};

// `is_pinned`: `host` itself is in pinned memory, and stays unchanged until the copy is complete.
at::Tensor* send(const at::Tensor& host, bool is_pinned, int32_t index, void** completion) {
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
  const c10::impl::VirtualGuardImpl guard(device.type());
  const auto stream = copy_stream(guard, device);
  const auto current = guard.getStream(device);
  auto pinned = is_pinned ? host : pinned_like(host);
  if (!is_pinned) pinned.copy_(host);
  // allocated on the compute stream, like all other tensors; the copy waits for earlier users of this memory
  auto there = at::empty(host.sizes(), host.options().device(device));
  c10::Event free_event(device.type());
  free_event.record(current);
  free_event.block(stream);
  auto arrived = std::make_unique<Arrival>(Arrival{c10::Event(device.type()), device});
  {
    c10::StreamGuard on(stream);
    there.copy_(pinned, /*non_blocking=*/true);  // libtorch keeps `pinned` until the copy is complete
    arrived->event.record(stream);
  }
  *completion = arrived.release();
  return new at::Tensor(there);
}

at::Tensor* pinned_copy(const at::Tensor& host) {
  auto pinned = pinned_like(host);
  pinned.copy_(host);
  return new at::Tensor(pinned);
}

// A tensor on its way from a GPU.
struct Fetch {
  at::Tensor pinned;
  c10::Event event;
};

Fetch* fetch(const at::Tensor& tensor) {
  const auto device = tensor.device();
  auto out = std::make_unique<Fetch>(Fetch{pinned_like(tensor), c10::Event(device.type())});
  out->pinned.copy_(tensor, /*non_blocking=*/true);
  out->event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return out.release();
}

}  // namespace

extern "C" {

// Copies a small CPU tensor to GPU `index` on the compute stream. The CPU does not wait.
char* prsmed_send_small(at::Tensor* host, int32_t index, at::Tensor** out) {
  PRSMED_TRY({
    auto pinned = pinned_like(*host);
    pinned.copy_(*host);
    const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
    *out = new at::Tensor(pinned.to(device, pinned.scalar_type(), /*non_blocking=*/true));
  })
}

// Starts to copy a tensor from a GPU on the compute stream. `prsmed_fetch_end` frees the result.
char* prsmed_fetch_begin(at::Tensor* tensor, void** out) { PRSMED_TRY(*out = fetch(*tensor)) }
char* prsmed_fetch_is_complete(void* fetch, bool* out) {
  PRSMED_TRY(*out = static_cast<Fetch*>(fetch)->event.query())
}
// Waits for the copy, and returns it in pinned memory unless `out` is null.
char* prsmed_fetch_end(void* fetch, at::Tensor** out) {
  PRSMED_TRY({
    const std::unique_ptr<Fetch> done(static_cast<Fetch*>(fetch));
    done->event.synchronize();
    if (out) *out = new at::Tensor(done->pinned);
  })
}

// `bytes` of pinned memory.
char* prsmed_pinned_empty(int64_t bytes, at::Tensor** out) {
  PRSMED_TRY(*out = new at::Tensor(at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true))))
}

// A copy of `host` in pinned memory, from which a GPU reads without help of the CPU.
char* prsmed_pinned_copy(at::Tensor* host, at::Tensor** out) { PRSMED_TRY(*out = pinned_copy(*host)) }

// Copies `host` to GPU `index`. The result may be used after `prsmed_async_copy_complete(*completion)`.
char* prsmed_async_copy_send(at::Tensor* host, bool is_pinned, int32_t index, at::Tensor** out, void** completion) {
  PRSMED_TRY(*out = send(*host, is_pinned, index, completion))
}

// Makes the compute stream wait for the copy (the CPU does not wait). Frees `completion`.
char* prsmed_async_copy_complete(void* completion) {
  PRSMED_TRY({
    const std::unique_ptr<Arrival> arrived(static_cast<Arrival*>(completion));
    arrived->event.block(c10::impl::VirtualGuardImpl(arrived->device.type()).getStream(arrived->device));
  })
}
}
