// CUDA graphs: kernels captured once on a side stream and replayed with one call. In a libtorch without CUDA every
// function returns an error.
#include "graph.h"

#include "native.h"

#ifdef PRSMED_CUDA
#include <cuda_runtime_api.h>
// its C++ half needs headers that the torch wheel lacks, and nothing here uses it
#define __CUDA_RUNTIME_H__
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>

namespace {

using State = c10::intrusive_ptr<at::CUDAGeneratorState>;

// The generator's state is private, and its public functions fail during captures. An explicit template instantiation
// may name a private member.
State at::CUDAGeneratorImpl::* state_member();
template <State at::CUDAGeneratorImpl::* member> struct Reveal {
  friend State at::CUDAGeneratorImpl::* state_member() { return member; }
};
template struct Reveal<&at::CUDAGeneratorImpl::state_>;

at::CUDAGeneratorState& state_of(c10::DeviceIndex device) {
  auto generator = at::cuda::detail::getDefaultCUDAGenerator(device);
  auto* numbers = at::check_generator<at::CUDAGeneratorImpl>(generator);
  return *(numbers->*state_member());
}

struct Graph : at::cuda::CUDAGraph {
  // True if it will release its pool itself.
  bool ended() const { return capture_ended_; }
};

struct Capture {
  Graph graph;
  c10::DeviceIndex device;
  at::cuda::MempoolId_t pool;
  bool began = false;
};

template <class F> bool worked(F attempt) {
  try {
    attempt();
    return true;
  } catch (...) { return false; }
}

// Cleans up after a failed capture. The rest of the capture must not stay in the allocators of GPU and pinned memory or
// in the generator. `capture_end` stops at the first failure, which comes first after a kernel that cannot be captured.
// A graph releases its pool only if its capture succeeded.
void abandon(Capture& capture) {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  if (worked([&] { capture.graph.capture_end(); })) return;
  auto& host = *at::getHostAllocator(at::kCUDA);
  const bool was_under_way = worked([&] { allocator::endAllocateToPool(capture.device, capture.pool); });
  worked([&] { host.end_allocate_to_pool(capture.pool); });
  if ((was_under_way || capture.began) && !capture.graph.ended()) {
    worked([&] { allocator::releasePool(capture.device, capture.pool); });
    worked([&] { host.release_pool(capture.pool); });
  }
  auto& state = state_of(capture.device);
  state.capturing_ = false;
  state.offset_intragraph_ = 0;
}

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(at::kCUDA); }

// libtorch captures the current stream of the current device
c10::DeviceGuard current(c10::DeviceIndex device) { return c10::DeviceGuard(at::Device(at::kCUDA, device)); }

}  // namespace

namespace prsmed {

uint64_t captured_offset(c10::DeviceIndex device) { return state_of(device).offset_intragraph_; }
void set_captured_offset(c10::DeviceIndex device, uint64_t offset) { state_of(device).offset_intragraph_ = offset; }

}  // namespace prsmed

extern "C" {

// A memory pool that several graphs share. After its last graph is freed, libtorch accepts no new ones in it.
char* prsmed_graph_pool(uint64_t* out) {
  PRSMED_TRY({
    const auto pool = at::cuda::graph_pool_handle();
    out[0] = pool.first;
    out[1] = pool.second;
  })
}

// Makes a side stream current on this thread: the default stream cannot be captured.
char* prsmed_stream_enter(int32_t device) {
  PRSMED_TRY({
    const auto index = static_cast<c10::DeviceIndex>(device);
    cuda().synchronizeDevice(index);
    cuda().exchangeStream(cuda().getStreamFromGlobalPool(at::Device(at::kCUDA, index)));
  })
}

// Returns to the default stream, after all work is complete.
char* prsmed_stream_leave(int32_t device) {
  PRSMED_TRY({
    const auto index = static_cast<c10::DeviceIndex>(device);
    cuda().synchronizeDevice(index);
    cuda().exchangeStream(cuda().getDefaultStream(at::Device(at::kCUDA, index)));
  })
}

char* prsmed_synchronize(int32_t device) { PRSMED_TRY(cuda().synchronizeDevice(static_cast<c10::DeviceIndex>(device))) }

// Begins a capture: this thread's current stream records kernels instead of running them.
char* prsmed_graph_begin(int32_t device, const uint64_t* pool, void** out) {
  PRSMED_TRY({
    const auto index = static_cast<c10::DeviceIndex>(device);
    cuda().synchronizeDevice(index);
    const auto guard = current(index);
    auto capture = std::make_unique<Capture>();
    capture->device = index;
    capture->pool = at::cuda::MempoolId_t(pool[0], pool[1]);
    capture->graph.register_generator_state(at::cuda::detail::getDefaultCUDAGenerator(index));
    try {
      // other threads load data meanwhile: their calls are not captured
      capture->graph.capture_begin(capture->pool, cudaStreamCaptureModeThreadLocal);
      capture->began = true;
    } catch (...) {
      abandon(*capture);
      throw;
    }
    *out = capture.release();
  })
}

// Ends the capture. The graph can be replayed.
char* prsmed_graph_end(void* graph) {
  PRSMED_TRY({
    auto* capture = static_cast<Capture*>(graph);
    const auto guard = current(capture->device);
    try {
      capture->graph.capture_end();
    } catch (...) {
      abandon(*capture);
      throw;
    }
  })
}

void prsmed_graph_abandon(void* graph) noexcept {
  auto* capture = static_cast<Capture*>(graph);
  worked([&] {
    const auto guard = current(capture->device);
    abandon(*capture);
  });
}
char* prsmed_graph_replay(void* graph) { PRSMED_TRY(static_cast<Capture*>(graph)->graph.replay()) }

void prsmed_graph_free(void* graph) noexcept {
  try {
    delete static_cast<Capture*>(graph);
  } catch (...) {  // the GPU may have failed
  }
}
}

#else

#define PRSMED_NO_CUDA prsmed_message("this libtorch has no CUDA")

namespace prsmed {
uint64_t captured_offset(c10::DeviceIndex) { return 0; }
void set_captured_offset(c10::DeviceIndex, uint64_t) {}
}  // namespace prsmed

extern "C" {
char* prsmed_graph_pool(uint64_t*) noexcept { return PRSMED_NO_CUDA; }
char* prsmed_stream_enter(int32_t) noexcept { return PRSMED_NO_CUDA; }
char* prsmed_stream_leave(int32_t) noexcept { return PRSMED_NO_CUDA; }
char* prsmed_synchronize(int32_t) noexcept { return PRSMED_NO_CUDA; }
char* prsmed_graph_begin(int32_t, const uint64_t*, void**) noexcept { return PRSMED_NO_CUDA; }
char* prsmed_graph_end(void*) noexcept { return PRSMED_NO_CUDA; }
void prsmed_graph_abandon(void*) noexcept {}
char* prsmed_graph_replay(void*) noexcept { return PRSMED_NO_CUDA; }
void prsmed_graph_free(void*) noexcept {}
}

#endif

extern "C" void prsmed_set_grad(at::Tensor* tensor, at::Tensor* grad) noexcept { tensor->mutable_grad() = *grad; }
