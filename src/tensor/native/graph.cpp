// CUDA graphs: the kernels of a step recorded once on a side stream and started again with one call. With a libtorch without
// CUDA every function says that there is none.
#include "graph.h"

#include "native.h"

#ifdef PRSMED_CUDA
#include <cuda_runtime_api.h>
// its C++ half needs headers that the torch wheel lacks, and nothing here uses it
#define __CUDA_RUNTIME_H__
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
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

struct Recording {
  at::cuda::CUDAGraph graph;
  c10::DeviceIndex device;
  at::cuda::MempoolId_t pool;
};

// After a failure: what is left of the capture must not stay in the allocator or the generator.
void abandon(Recording& recording) {
  try {
    recording.graph.capture_end();
  } catch (const std::exception&) {
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(recording.device, recording.pool);
    } catch (const std::exception&) {
    }
    auto& state = state_of(recording.device);
    state.capturing_ = false;
    state.offset_intragraph_ = 0;
  }
}

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(at::kCUDA); }

}  // namespace

namespace prsmed {

uint64_t captured_offset(c10::DeviceIndex device) { return state_of(device).offset_intragraph_; }
void set_captured_offset(c10::DeviceIndex device, uint64_t offset) { state_of(device).offset_intragraph_ = offset; }

}  // namespace prsmed

extern "C" {

// A pool of memory that several graphs share.
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
    auto recording = std::make_unique<Recording>();
    recording->device = index;
    recording->pool = at::cuda::MempoolId_t(pool[0], pool[1]);
    recording->graph.register_generator_state(at::cuda::detail::getDefaultCUDAGenerator(index));
    try {
      // other threads bring data meanwhile: their calls are not part of it
      recording->graph.capture_begin(recording->pool, cudaStreamCaptureModeThreadLocal);
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
    try {
      recording->graph.capture_end();
    } catch (...) {
      abandon(*recording);
      throw;
    }
  })
}

void prsmed_graph_abandon(void* graph) { abandon(*static_cast<Recording*>(graph)); }
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
