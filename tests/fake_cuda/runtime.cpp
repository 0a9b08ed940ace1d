// Fake CUDA runtime for tests: it tracks memory, streams and captures, but computes nothing. It is preloaded under
// libtorch, whose allocators, streams, captures and backward threads then run as on a GPU. GPU memory is CPU memory
// that no kernel touches; copies to the CPU give zeros. Synchronisations, copies and allocations that a capture on this
// thread forbids invalidate the capture, as on a GPU.
//
// FAKE_CUDA_CAPABILITY (89), FAKE_CUDA_PROCESSORS (108) and FAKE_CUDA_MIB (24576) describe the GPU.
#define __CUDA_RUNTIME_H__
#include <cuda_runtime_api.h>
#include <sys/mman.h>

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
int processors() { return static_cast<int>(number("FAKE_CUDA_PROCESSORS", 108)); }
size_t gpu_bytes() { return number("FAKE_CUDA_MIB", 24 << 10) << 20; }

thread_local cudaError_t last_error = cudaSuccess;
cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// ---- captures
struct Capture {
  std::mutex lock;
  cudaStream_t stream = nullptr;
  bool is_invalid = false;
  unsigned long long id = 0;
  std::thread::id owner;
};
Capture capture;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

bool captures(cudaStream_t stream) { return capture.stream && stream == capture.stream; }

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
std::map<void*, size_t> held;
size_t used = 0;

void* somewhere(size_t at) { return reinterpret_cast<void*>(at); }

}  // namespace

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
cudaError_t cudaDeviceSynchronize() { return forbid(); }
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
  if (auto error = forbid()) return error;
  return *total = gpu_bytes(), *free = gpu_bytes() - used, cudaSuccess;
}
cudaError_t cudaMalloc(void** out, size_t bytes) {
  if (auto error = forbid()) return error;
  if (used + bytes > gpu_bytes()) return failed(cudaErrorMemoryAllocation);
  // most of it is never touched
  *out = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*out == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  used += held[*out] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  const auto found = held.find(memory);
  if (found == held.end()) return cudaSuccess;
  used -= found->second;
  munmap(memory, found->second);
  return held.erase(found), cudaSuccess;
}
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  if (auto error = forbid()) return error;
  return *out = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096), cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) { return free(memory), cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void*) {
  return memset(out, 0, sizeof(*out)), cudaSuccess;
}
// The results of kernels do not exist, so only data that comes from the CPU is copied.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
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
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }

// ---- streams and events
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int) {
  static size_t next = 0x1000;
  return *out = static_cast<cudaStream_t>(somewhere(next += 8)), cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait_for(stream); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return wait_for(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  return *out = static_cast<cudaEvent_t>(somewhere(0x30)), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return forbid(); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return forbid(); }
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
  capture.stream = stream, capture.is_invalid = false, capture.owner = std::this_thread::get_id();
  return ++capture.id, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  std::lock_guard<std::mutex> guard(capture.lock);
  if (!captures(stream)) return failed(cudaErrorIllegalState);
  capture.stream = nullptr;
  *out = capture.is_invalid ? nullptr : static_cast<cudaGraph_t>(somewhere(0x10));
  return capture.is_invalid ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t, unsigned long long) {
  return *out = static_cast<cudaGraphExec_t>(somewhere(0x20)), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

// ---- kernels
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof(*out));
  out->maxThreadsPerBlock = 1024, out->numRegs = 32, out->binaryVersion = out->ptxVersion = capability();
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  return *blocks = 2, cudaSuccess;
}
cudaError_t __cudaGetKernel(void** out, const void*) { return *out = somewhere(0x40), cudaSuccess; }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return capture.stream && capture.is_invalid ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return cudaSuccess; }

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
  return 0;
}
int cuStreamIsCapturing(void* stream, int* out) {
  cudaStreamCaptureStatus status;
  cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  return *out = status, 0;
}
int cuEventCreate(void** out, unsigned) { return *out = somewhere(1), 0; }
int cuEventRecord(void*, void*) { return 0; }
int cuEventSynchronize(void*) { return 0; }
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
NOTHING(Destroy_v2) NOTHING(SetMathMode) NOTHING(SetPointerMode_v2) NOTHING(SetStream_v2) NOTHING(SetWorkspace_v2)
NOTHING(LtMatmul) NOTHING(LtMatmulDescDestroy) NOTHING(LtMatmulDescSetAttribute) NOTHING(LtMatmulPreferenceDestroy)
NOTHING(LtMatmulPreferenceSetAttribute) NOTHING(LtMatrixLayoutDestroy) NOTHING(LtMatrixLayoutSetAttribute)
NOTHING(GemmEx) NOTHING(GemmStridedBatchedEx) NOTHING(DotEx) NOTHING(SgemmEx)
#define ALL(letter) \
  NOTHING(letter##gemm_v2) NOTHING(letter##gemmStridedBatched) NOTHING(letter##gemv_v2) NOTHING(letter##trsm_v2) \
  NOTHING(letter##trsmBatched) NOTHING(letter##gelsBatched) NOTHING(letter##geqrfBatched) \
  NOTHING(letter##getrfBatched) NOTHING(letter##getrsBatched)
ALL(S) ALL(D) ALL(C) ALL(Z)
NOTHING(Sdot_v2) NOTHING(Ddot_v2) NOTHING(Cdotu_v2) NOTHING(Cdotc_v2) NOTHING(Zdotu_v2) NOTHING(Zdotc_v2)
// clang-format on
}
