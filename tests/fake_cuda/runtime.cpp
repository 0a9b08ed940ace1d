// Fake CUDA runtime for tests: it tracks memory, streams and captures, but computes nothing. It is preloaded under
// libtorch, whose allocators, streams, captures and backward threads then run as on a GPU. GPU memory is CPU memory
// that no kernel touches; copies to the CPU give zeros. Synchronisations, copies and allocations that a capture on this
// thread forbids invalidate the capture, as on a GPU.
//
// FAKE_CUDA_CAPABILITY (89) and FAKE_CUDA_MIB (24576) describe the GPU. The
// file FAKE_CUDA_COUNTERS receives what the process asks of the GPU.
#define __CUDA_RUNTIME_H__
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace {

size_t number(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}

int capability() { return static_cast<int>(number("FAKE_CUDA_CAPABILITY", 89)); }
// of the largest GPU of this compute capability, as plans assume
int processors() { return capability() == 90 ? 132 : capability() == 89 ? 142 : 108; }
size_t gpu_bytes() { return number("FAKE_CUDA_MIB", 24 << 10) << 20; }

thread_local cudaError_t last_error = cudaSuccess;
cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// ---- counters
// What the process asked of the GPU. Kernels of a capture are counted as nodes when they are captured, and again at
// every replay. Each counter is an entry of the file FAKE_CUDA_COUNTERS: a name of 24 bytes and a number.
struct Entry {
  char name[24];
  std::atomic<uint64_t> value;
};
constexpr size_t kEntries = 32;
Entry own[kEntries];
Entry* entries() {
  static Entry* all = [] {
    const char* path = getenv("FAKE_CUDA_COUNTERS");
    const int file = path ? open(path, O_RDWR | O_CREAT | O_TRUNC, 0600) : -1;
    if (file < 0 || ftruncate(file, sizeof(own))) return own;
    void* mapped = mmap(nullptr, sizeof(own), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return mapped == MAP_FAILED ? own : static_cast<Entry*>(mapped);
  }();
  return all;
}
struct Counter {
  std::atomic<uint64_t>& value;
  explicit Counter(const char* name) : value(entries()[used].value) { strncpy(entries()[used++].name, name, 23); }
  void operator++() { ++value; }
  void operator+=(uint64_t more) { value += more; }
  static inline size_t used = 0;
};
struct Copies {
  Counter count, bytes;
  Copies(const char* name, const char* bytes_name) : count(name), bytes(bytes_name) {}
};
#define COUNTER(name) Counter name{#name};
#define COPIES(name) Copies name{#name, #name "_bytes"};
struct Counters {
  COUNTER(launches) COUNTER(products) COUNTER(memsets)  // products: of matrices by cuBLAS, not among the launches
  COUNTER(device_syncs) COUNTER(stream_syncs) COUNTER(event_syncs) COUNTER(queries) COUNTER(events)
  COUNTER(allocations) COUNTER(allocated_bytes) COUNTER(frees) COUNTER(host_allocations) COUNTER(memory_queries)
  COUNTER(captures) COUNTER(captured_nodes) COUNTER(replays) COUNTER(replayed_nodes)
  COPIES(to_gpu_pinned) COPIES(to_gpu_pageable) COPIES(to_host_pinned) COPIES(to_host_pageable) COPIES(on_gpu)
};
Counters counters;

// ---- captures
struct Capture {
  std::mutex lock;
  cudaStream_t stream = nullptr;
  bool is_invalid = false;
  unsigned long long id = 0;
  uint64_t nodes = 0;
  std::thread::id owner;
};
Capture capture;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

bool captures(cudaStream_t stream) { return capture.stream && stream == capture.stream; }

// Nodes of each graph, and of what was made of it; both have the graph's number.
std::map<size_t, uint64_t> nodes_of;

// Counts work for the GPU, or a node if a capture runs. Captures are on one thread at a time.
void count(Counter& counter) {
  if (capture.stream) {
    ++capture.nodes, ++counters.captured_nodes;
  } else {
    ++counter;
  }
}

// Fails a call that is forbidden on a thread that captures.
cudaError_t forbid() {
  std::lock_guard<std::mutex> guard(capture.lock);
  const bool is_here = capture.stream && capture.owner == std::this_thread::get_id();
  if (!is_here || mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  capture.is_invalid = true;
  return failed(cudaErrorStreamCaptureUnsupported);
}

// Fails a wait for a stream that captures.
cudaError_t wait_for(cudaStream_t stream) {
  std::lock_guard<std::mutex> guard(capture.lock);
  if (!captures(stream)) return cudaSuccess;
  capture.is_invalid = true;
  return failed(cudaErrorStreamCaptureUnsupported);
}

// ---- memory
using Blocks = std::map<const void*, size_t>;
std::mutex memory_lock;
Blocks held, pinned;
size_t used = 0;

bool is_in(const Blocks& blocks, const void* at) {
  std::lock_guard<std::mutex> guard(memory_lock);
  auto after = blocks.upper_bound(at);
  if (after == blocks.begin()) return false;
  const auto& [start, bytes] = *--after;
  return static_cast<const char*>(at) < static_cast<const char*>(start) + bytes;
}

void count_copy(const void* to, const void* from, size_t bytes) {
  if (capture.stream) return count(counters.launches);
  const bool starts_here = is_in(held, from), ends_here = is_in(held, to);
  if (!starts_here && !ends_here) return;
  const bool is_pinned = starts_here != ends_here && is_in(pinned, starts_here ? to : from);
  Copies& kind = starts_here && ends_here ? counters.on_gpu
                 : starts_here ? (is_pinned ? counters.to_host_pinned : counters.to_host_pageable)
                               : (is_pinned ? counters.to_gpu_pinned : counters.to_gpu_pageable);
  ++kind.count, kind.bytes += bytes;
}

void* somewhere(size_t at) { return reinterpret_cast<void*>(at); }

}  // namespace

// Kernels and matrix products so far, for the fake NCCL.
// True if the compute stream had to wait for another one since the last copy.
std::atomic<bool> compute_waits{false};
extern "C" bool fake_cuda_compute_waits() { return compute_waits; }
extern "C" uint64_t fake_cuda_launches() { return counters.launches.value + counters.products.value; }

extern "C" {

// ---- the GPU
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -3, cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return ++counters.device_syncs, forbid(); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 1, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof(*properties));
  strcpy(properties->name, "fake GPU");
  properties->major = capability() / 10, properties->minor = capability() % 10;
  properties->totalGlobalMem = gpu_bytes(), properties->multiProcessorCount = processors();
  properties->maxThreadsPerMultiProcessor = 2048, properties->maxThreadsPerBlock = 1024, properties->warpSize = 32;
  properties->maxBlocksPerMultiProcessor = 32, properties->regsPerBlock = 65536;
  for (int i = 0; i < 3; ++i) properties->maxThreadsDim[i] = 1024, properties->maxGridSize[i] = 2147483647;
  properties->sharedMemPerBlock = 49152, properties->sharedMemPerBlockOptin = 232448,
  properties->sharedMemPerMultiprocessor = 233472;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

// ---- memory
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ++counters.memory_queries;
  if (auto error = forbid()) return error;
  return *total = gpu_bytes(), *free = gpu_bytes() - used, cudaSuccess;
}
cudaError_t cudaMalloc(void** out, size_t bytes) {
  if (auto error = forbid()) return error;
  if (used + bytes > gpu_bytes()) return failed(cudaErrorMemoryAllocation);
  // most of it is never touched
  *out = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*out == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  ++counters.allocations, counters.allocated_bytes += bytes;
  std::lock_guard<std::mutex> guard(memory_lock);
  used += held[*out] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::lock_guard<std::mutex> guard(memory_lock);
  const auto found = held.find(memory);
  if (found == held.end()) return cudaSuccess;
  ++counters.frees, used -= found->second;
  munmap(memory, found->second);
  return held.erase(found), cudaSuccess;
}
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  if (auto error = forbid()) return error;
  *out = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  ++counters.host_allocations;
  std::lock_guard<std::mutex> guard(memory_lock);
  return pinned[*out] = bytes, cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  std::lock_guard<std::mutex> guard(memory_lock);
  return pinned.erase(memory), free(memory), cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* at) {
  memset(out, 0, sizeof(*out));
  out->type = is_in(held, at) ? cudaMemoryTypeDevice : is_in(pinned, at) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
// The results of kernels do not exist, so only data that comes from the CPU is copied.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  count_copy(to, from, bytes);
  compute_waits = false;
  if (captures(stream)) {
    if (kind != cudaMemcpyDeviceToDevice) capture.is_invalid = true;
    return capture.is_invalid ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
  }
  if (kind == cudaMemcpyDeviceToHost) memset(to, 0, bytes);
  else if (kind == cudaMemcpyHostToHost) memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (auto error = forbid()) return error;
  ++counters.stream_syncs;
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return count(counters.memsets), cudaSuccess; }

// ---- streams and events
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int) {
  static size_t next = 0x1000;
  return *out = static_cast<cudaStream_t>(somewhere(next += 8)), cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return ++counters.stream_syncs, wait_for(stream); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return ++counters.queries, wait_for(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) {
  if (stream == nullptr) compute_waits = true;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  return *out = static_cast<cudaEvent_t>(somewhere(0x30)), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return ++counters.events, cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return ++counters.events, cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return ++counters.queries, forbid(); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return ++counters.event_syncs, forbid(); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 1, cudaSuccess;
}

// ---- captures
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* out) {
  std::lock_guard<std::mutex> guard(capture.lock);
  *out = !captures(stream)    ? cudaStreamCaptureStatusNone
         : capture.is_invalid ? cudaStreamCaptureStatusInvalidated
                              : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* out, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (id) *id = capture.id;
  return cudaStreamIsCapturing(stream, out);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  return std::swap(*other, mode), cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  std::lock_guard<std::mutex> guard(capture.lock);
  if (capture.stream) return failed(cudaErrorIllegalState);
  capture.stream = stream, capture.is_invalid = false, capture.owner = std::this_thread::get_id(), capture.nodes = 0;
  return ++capture.id, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  std::lock_guard<std::mutex> guard(capture.lock);
  if (!captures(stream)) return failed(cudaErrorIllegalState);
  capture.stream = nullptr;
  if (capture.is_invalid) return *out = nullptr, failed(cudaErrorStreamCaptureInvalidated);
  const size_t graph = 0x10 * capture.id;
  ++counters.captures, nodes_of[graph] = capture.nodes;
  return *out = static_cast<cudaGraph_t>(somewhere(graph)), cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  return *out = reinterpret_cast<cudaGraphExec_t>(graph), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  ++counters.replays, counters.replayed_nodes += nodes_of[reinterpret_cast<size_t>(graph)];
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

// ---- kernels
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
// libtorch's kernels are compiled for these; a GPU runs those of the next lower one.
int kernel_version() {
  int version = 75;
  for (const int compiled : {80, 86, 90, 100, 120})
    if (compiled <= capability()) version = compiled;
  return version;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof(*out));
  out->maxThreadsPerBlock = 1024, out->numRegs = 32, out->binaryVersion = out->ptxVersion = kernel_version();
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  return *blocks = 2, cudaSuccess;
}
cudaError_t __cudaGetKernel(void** out, const void*) { return *out = somewhere(0x40), cudaSuccess; }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t) {
  count(counters.launches);
  return capture.stream && capture.is_invalid ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return count(counters.launches), cudaSuccess;
}

// ---- the driver, as used by the custom CUDA kernels and libtorch
int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char** out) { return *out = "an error", 0; }
int cuDeviceGet(int* out, int index) { return *out = index, 0; }
int cuDeviceGetAttribute(int* out, int which, int) {
  return *out = which == 75 ? capability() / 10 : which == 76 ? capability() % 10 : 0, 0;
}
int cuCtxGetCurrent(void** out) { return *out = somewhere(1), 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuDevicePrimaryCtxRetain(void** out, int) { return *out = somewhere(1), 0; }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) { return *flags = 0, *is_active = 1, 0; }
int cuModuleLoadData(void** out, const void*) { return *out = somewhere(1), 0; }
int cuModuleGetFunction(void** out, void*, const char*) { return *out = somewhere(1), 0; }
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**) {
  return count(counters.launches), 0;
}
int cuStreamIsCapturing(void* stream, int* out) {
  cudaStreamCaptureStatus status;
  cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  return *out = status, 0;
}
int cuEventCreate(void** out, unsigned) { return *out = somewhere(1), 0; }
int cuEventRecord(void*, void*) { return ++counters.events, 0; }
int cuEventSynchronize(void*) { return ++counters.event_syncs, 0; }
int cuEventElapsedTime(float* milliseconds, void*, void*) { return *milliseconds = 1, 0; }
int cuEventDestroy_v2(void*) { return 0; }
int nothing(...) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool is_state = !strcmp(name, "cuDevicePrimaryCtxGetState");
  *out = is_state ? reinterpret_cast<void*>(cuDevicePrimaryCtxGetState) : reinterpret_cast<void*>(nothing);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** out, unsigned long long,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, out, 0, 0, result);
}

// ---- cuBLAS and cuBLASLt
int cublasCreate_v2(void** out) { return *out = somewhere(1), 0; }
int cublasGetMathMode(void*, int* out) { return *out = 0, 0; }
int cublasGetPointerMode_v2(void*, int* out) { return *out = 0, 0; }
unsigned long cublasLtGetVersion() { return 130000; }
int cublasLtMatmulDescCreate(void** out, int, int) { return *out = somewhere(1), 0; }
int cublasLtMatmulPreferenceCreate(void** out) { return *out = somewhere(1), 0; }
int cublasLtMatrixLayoutCreate(void** out, int, unsigned long, unsigned long, long) { return *out = somewhere(1), 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* count) {
  return *count = 1, 0;
}
// clang-format off
#define NOTHING(name) int cublas##name(...) { return 0; }
#define PRODUCT(name) int cublas##name(...) { return count(counters.products), 0; }
NOTHING(Destroy_v2) NOTHING(SetMathMode) NOTHING(SetPointerMode_v2) NOTHING(SetStream_v2) NOTHING(SetWorkspace_v2)
PRODUCT(LtMatmul) NOTHING(LtMatmulDescDestroy) NOTHING(LtMatmulDescSetAttribute) NOTHING(LtMatmulPreferenceDestroy)
NOTHING(LtMatmulPreferenceSetAttribute) NOTHING(LtMatrixLayoutDestroy) NOTHING(LtMatrixLayoutSetAttribute)
PRODUCT(GemmEx) PRODUCT(GemmStridedBatchedEx) PRODUCT(DotEx) PRODUCT(SgemmEx)
#define ALL(letter) \
  PRODUCT(letter##gemm_v2) PRODUCT(letter##gemmStridedBatched) PRODUCT(letter##gemv_v2) NOTHING(letter##trsm_v2) \
  NOTHING(letter##trsmBatched) NOTHING(letter##gelsBatched) NOTHING(letter##geqrfBatched) \
  NOTHING(letter##getrfBatched) NOTHING(letter##getrsBatched)
ALL(S) ALL(D) ALL(C) ALL(Z)
PRODUCT(Sdot_v2) PRODUCT(Ddot_v2) NOTHING(Cdotu_v2) NOTHING(Cdotc_v2) NOTHING(Zdotu_v2) NOTHING(Zdotc_v2)
// clang-format on
}
