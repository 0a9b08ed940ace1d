// CUDA graphs: kernels captured once on a side stream and replayed with one call. The parts that need libtorch's CUDA
// library are in `cuda/graph.cpp`.
#include "graph.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "async_copy.h"
#include "cuda_side.h"
#include "native.h"

namespace {

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(at::kCUDA); }

// A side stream other than the current one and that of copies: libtorch hands out 32 streams in turn.
c10::Stream side_stream(c10::Device device) {
  const auto current = cuda().getStream(device), copies = copy_stream(cuda(), device);
  auto found = cuda().getStreamFromGlobalPool(device);
  while (found == current || found == copies) found = cuda().getStreamFromGlobalPool(device);
  return found;
}

}  // namespace

namespace prsmed {

uint64_t captured_offset(c10::DeviceIndex device) { return cuda_side().captured_offset(device); }
void set_captured_offset(c10::DeviceIndex device, uint64_t offset) { cuda_side().set_captured_offset(device, offset); }

}  // namespace prsmed

extern "C" {

// A memory pool that several graphs share. After its last graph is freed, libtorch accepts no new ones in it.
char* prsmed_graph_pool(uint64_t* out) { PRSMED_TRY(return prsmed::cuda_side().graph_pool(out)) }

// Makes a side stream current on this thread: the default stream cannot be captured. `before` is the stream that was
// current, for `prsmed_stream_leave`.
char* prsmed_stream_enter(int32_t device, void** before) {
  PRSMED_TRY({
    const at::Device gpu(at::kCUDA, static_cast<c10::DeviceIndex>(device));
    cuda().synchronizeDevice(gpu.index());
    *before = new c10::Stream(cuda().exchangeStream(side_stream(gpu)));
  })
}

// Returns to the stream `before`, after all work is complete. Frees it.
char* prsmed_stream_leave(void* before) {
  PRSMED_TRY({
    const std::unique_ptr<c10::Stream> stream(static_cast<c10::Stream*>(before));
    cuda().synchronizeDevice(stream->device_index());
    cuda().exchangeStream(*stream);
  })
}

char* prsmed_synchronize(int32_t device) { PRSMED_TRY(cuda().synchronizeDevice(static_cast<c10::DeviceIndex>(device))) }

// Begins a capture: this thread's current stream records kernels instead of running them.
char* prsmed_graph_begin(int32_t device, const uint64_t* pool, void** out) {
  PRSMED_TRY({
    cuda().synchronizeDevice(static_cast<c10::DeviceIndex>(device));
    return prsmed::cuda_side().graph_begin(device, pool, out);
  })
}

// Ends the capture. The graph can be replayed.
char* prsmed_graph_end(void* graph) { PRSMED_TRY(return prsmed::cuda_side().graph_end(graph)) }

// A graph exists only if the CUDA side is open.
void prsmed_graph_abandon(void* graph) noexcept { prsmed::cuda_side().graph_abandon(graph); }
char* prsmed_graph_replay(void* graph) { PRSMED_TRY(return prsmed::cuda_side().graph_replay(graph)) }
void prsmed_graph_free(void* graph) noexcept { prsmed::cuda_side().graph_free(graph); }

void prsmed_set_grad(at::Tensor* tensor, at::Tensor* grad) noexcept { tensor->mutable_grad() = *grad; }
}
