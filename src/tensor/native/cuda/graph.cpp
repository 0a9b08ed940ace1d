// CUDA graphs on libtorch's CUDA library; see `../graph.cpp`.
#include <cuda_runtime_api.h>
// its C++ half needs headers that the torch wheel lacks, and nothing here uses it
#define __CUDA_RUNTIME_H__
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "../cuda_side.h"
#include "../native.h"

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

// libtorch captures the current stream of the current device
c10::DeviceGuard current(c10::DeviceIndex device) { return c10::DeviceGuard(at::Device(at::kCUDA, device)); }

}  // namespace

namespace prsmed::cuda {

uint64_t captured_offset(int8_t device) { return state_of(device).offset_intragraph_; }
void set_captured_offset(int8_t device, uint64_t offset) { state_of(device).offset_intragraph_ = offset; }

}  // namespace prsmed::cuda

extern "C" {

char* prsmed_cuda_graph_pool(uint64_t* out) {
  PRSMED_TRY({
    const auto pool = at::cuda::graph_pool_handle();
    out[0] = pool.first;
    out[1] = pool.second;
  })
}

char* prsmed_cuda_graph_begin(int32_t device, const uint64_t* pool, void** out) {
  PRSMED_TRY({
    const auto index = static_cast<c10::DeviceIndex>(device);
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

char* prsmed_cuda_graph_end(void* graph) {
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

void prsmed_cuda_graph_abandon(void* graph) noexcept {
  auto* capture = static_cast<Capture*>(graph);
  worked([&] {
    const auto guard = current(capture->device);
    abandon(*capture);
  });
}

char* prsmed_cuda_graph_replay(void* graph) { PRSMED_TRY(static_cast<Capture*>(graph)->graph.replay()) }

void prsmed_cuda_graph_free(void* graph) noexcept {
  try {
    delete static_cast<Capture*>(graph);
  } catch (...) {  // the GPU may have failed
  }
}
}
