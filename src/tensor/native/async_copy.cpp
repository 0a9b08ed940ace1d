// Asynchronous copies from pinned CPU memory to a GPU, on a separate stream. It uses c10's device interface, which
// needs no CUDA headers.
#include "native.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>

namespace {

// One copy stream per GPU, taken from the pool once.
c10::Stream copy_stream(const c10::impl::VirtualGuardImpl& guard, c10::Device device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, c10::Stream> streams;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = streams.find(device.index());
  if (found == streams.end()) found = streams.emplace(device.index(), guard.getStreamFromGlobalPool(device)).first;
  return found->second;
}

struct Arrival {
  c10::Event event;
  c10::Device device;
};

at::Tensor* send(const at::Tensor& host, int32_t index, void** completion) {
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
  const c10::impl::VirtualGuardImpl guard(device.type());
  const auto stream = copy_stream(guard, device);
  const auto current = guard.getStream(device);
  auto pinned = at::empty(host.sizes(), host.options().pinned_memory(true));
  pinned.copy_(host);
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

}  // namespace

extern "C" {

// Copies `host` to GPU `index`. The result may be used after `prsmed_async_copy_complete(*completion)`.
char* prsmed_async_copy_send(at::Tensor* host, int32_t index, at::Tensor** out, void** completion) {
  PRSMED_TRY(*out = send(*host, index, completion))
}

// Makes the compute stream wait for the copy (the CPU does not wait). Frees `completion`.
char* prsmed_async_copy_complete(void* completion) {
  PRSMED_TRY({
    const std::unique_ptr<Arrival> arrived(static_cast<Arrival*>(completion));
    arrived->event.block(c10::impl::VirtualGuardImpl(arrived->device.type()).getStream(arrived->device));
  })
}
}
