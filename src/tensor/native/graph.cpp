// CUDA graphs: the kernels of a step recorded once on a side stream and started again with one call. With a libtorch without
// CUDA every function says that there is none.
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

// The generator's state is private, and its public functions refuse during captures. Naming a private member is allowed
// where a template is instantiated explicitly.
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
  // Whether it will release its pool itself.
  bool ended() const { return capture_ended_; }
};

struct Recording {
  Graph graph;
  c10::DeviceIndex device;
  at::cuda::MempoolId_t pool;
  bool began = false;
};

template <class F> bool worked(F attempt) {
  try {
    attempt();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// After a failure: what is left of the capture must not stay in the allocators of the card and of pinned memory or in the
// generator. `capture_end` stops at the first thing that fails, which is the first thing that it does after a kernel that cannot
// be recorded; and a graph releases its pool only where the recording ended well.
void abandon(Recording& recording) {
  namespace card = c10::cuda::CUDACachingAllocator;
  if (worked([&] { recording.graph.capture_end(); })) return;
  auto& host = *at::getHostAllocator(at::kCUDA);
  const bool was_under_way = worked([&] { card::endAllocateToPool(recording.device, recording.pool); });
  worked([&] { host.end_allocate_to_pool(recording.pool); });
  if ((was_under_way || recording.began) && !recording.graph.ended()) {
    worked([&] { card::releasePool(recording.device, recording.pool); });
    worked([&] { host.release_pool(recording.pool); });
  }
  auto& state = state_of(recording.device);
  state.capturing_ = false;
  state.offset_intragraph_ = 0;
}

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(at::kCUDA); }

// libtorch records the current card's current stream.
c10::DeviceGuard current(c10::DeviceIndex device) { return c10::DeviceGuard(at::Device(at::kCUDA, device)); }

}  // namespace

namespace prsmed {

uint64_t captured_offset(c10::DeviceIndex device) { return state_of(device).offset_intragraph_; }
void set_captured_offset(c10::DeviceIndex device, uint64_t offset) { state_of(device).offset_intragraph_ = offset; }

}  // namespace prsmed

extern "C" {

// A pool of memory that several graphs share. Once there was a graph and there is none any more, it takes no new ones.
char* prsmed_graph_pool(uint64_t* out) {
  PRSMED_TRY({
    const auto pool = at::cuda::graph_pool_handle();
    out[0] = pool.first;
    out[1] = pool.second;
  })
}

// Makes a side stream this thread's current one: graphs cannot be recorded on the default stream.
char* prsmed_stream_enter(int32_t device) {
  PRSMED_TRY({
    const auto index = static_cast<c10::DeviceIndex>(device);
    cuda().synchronizeDevice(index);
    cuda().exchangeStream(cuda().getStreamFromGlobalPool(at::Device(at::kCUDA, index)));
  })
}

// Back to the default stream, when everything has run.
char* prsmed_stream_leave(int32_t device) {
  PRSMED_TRY({
    const auto index = static_cast<c10::DeviceIndex>(device);
    cuda().synchronizeDevice(index);
    cuda().exchangeStream(cuda().getDefaultStream(at::Device(at::kCUDA, index)));
  })
}

char* prsmed_synchronize(int32_t device) { PRSMED_TRY(cuda().synchronizeDevice(static_cast<c10::DeviceIndex>(device))) }

// From now on this thread's current stream records kernels in place of running them.
char* prsmed_graph_begin(int32_t device, const uint64_t* pool, void** out) {
  PRSMED_TRY({
    const auto index = static_cast<c10::DeviceIndex>(device);
    cuda().synchronizeDevice(index);
    const auto guard = current(index);
    auto recording = std::make_unique<Recording>();
    recording->device = index;
    recording->pool = at::cuda::MempoolId_t(pool[0], pool[1]);
    recording->graph.register_generator_state(at::cuda::detail::getDefaultCUDAGenerator(index));
    try {
      // other threads bring data meanwhile: their calls are not part of it
      recording->graph.capture_begin(recording->pool, cudaStreamCaptureModeThreadLocal);
      recording->began = true;
    } catch (...) {
      abandon(*recording);
      throw;
    }
    *out = recording.release();
  })
}

// Ends the recording; the graph can be replayed.
char* prsmed_graph_end(void* graph) {
  auto* recording = static_cast<Recording*>(graph);
  PRSMED_TRY({
    const auto guard = current(recording->device);
    try {
      recording->graph.capture_end();
    } catch (...) {
      abandon(*recording);
      throw;
    }
  })
}

void prsmed_graph_abandon(void* graph) {
  auto* recording = static_cast<Recording*>(graph);
  worked([&] {
    const auto guard = current(recording->device);
    abandon(*recording);
  });
}
char* prsmed_graph_replay(void* graph) { PRSMED_TRY(static_cast<Recording*>(graph)->graph.replay()) }

void prsmed_graph_free(void* graph) {
  try {
    delete static_cast<Recording*>(graph);
  } catch (const std::exception&) {  // the card may be gone
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
char* prsmed_graph_pool(uint64_t*) { return PRSMED_NO_CUDA; }
char* prsmed_stream_enter(int32_t) { return PRSMED_NO_CUDA; }
char* prsmed_stream_leave(int32_t) { return PRSMED_NO_CUDA; }
char* prsmed_synchronize(int32_t) { return PRSMED_NO_CUDA; }
char* prsmed_graph_begin(int32_t, const uint64_t*, void**) { return PRSMED_NO_CUDA; }
char* prsmed_graph_end(void*) { return PRSMED_NO_CUDA; }
void prsmed_graph_abandon(void*) {}
char* prsmed_graph_replay(void*) { return PRSMED_NO_CUDA; }
void prsmed_graph_free(void*) {}
}

#endif

extern "C" void prsmed_set_grad(at::Tensor* tensor, at::Tensor* grad) { tensor->mutable_grad() = *grad; }
