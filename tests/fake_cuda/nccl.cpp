// A fake NCCL for one process among several: it records collective operations and moves nothing. The functions that it
// lacks are those of the real library, which nothing calls.
//
// The file FAKE_NCCL_LOG gets a line for each operation: its name, its bytes on the device, and the number of kernels and
// matrix products that were launched before it.
#include <cstring>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <nccl.h>

extern "C" uint64_t fake_cuda_launches();
extern "C" bool fake_cuda_compute_waits();

// `src/tensor/native/cuda/fallback/nccl.h`, which replaces this header elsewhere, has these layouts and values
static_assert(NCCL_VERSION_CODE / 100 == 228 && NCCL_SPLIT_NOCOLOR == -1);
static_assert(sizeof(ncclConfig_t) == 80 && sizeof(ncclUniqueId) == 128 && sizeof(ncclResult_t) == 4);
static_assert(offsetof(ncclConfig_t, netName) == 32 && offsetof(ncclConfig_t, commName) == 48);
static_assert(sizeof(ncclRedOp_t) == 4 && sizeof(ncclDataType_t) == 4 && ncclAvg == 4 && ncclFloat8e5m2 == 11);
static_assert(ncclSuccess == 0 && ncclRemoteError == 6 && ncclInProgress == 7);

struct ncclComm {
  int rank, size;
};

namespace {

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}

ncclResult_t record(const char* name, size_t bytes) {
  static std::mutex lock;
  static FILE* log = getenv("FAKE_NCCL_LOG") ? fopen(getenv("FAKE_NCCL_LOG"), "w") : nullptr;
  std::lock_guard<std::mutex> guard(lock);
  if (log) {
    const unsigned long long launches = fake_cuda_launches();
    fprintf(log, "%s %zu %llu %d\n", name, bytes, launches, fake_cuda_compute_waits());
    fflush(log);
  }
  return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { return *id = {}, ncclSuccess; }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId, int rank, ncclConfig_t*) {
  // two groups of a process must start their operations in one order
  const char* ordered = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  if (!ordered || strcmp(ordered, "1")) return ncclInvalidUsage;
  return *comm = new ncclComm{rank, size}, record("communicator", 0);
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return ncclCommInitRankConfig(comm, size, *ids, rank, nullptr);
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return delete comm, record("destroy", 0); }
ncclResult_t ncclCommAbort(ncclComm_t comm) { return delete comm, record("abort", 0); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { return *error = ncclSuccess, ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { return *count = comm->size, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) { return *handle = nullptr, ncclSuccess; }
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t) { return "an error"; }
const char* ncclGetLastError(ncclComm_t) { return "no error"; }
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }

ncclResult_t ncclAllReduce(const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t, ncclComm_t, cudaStream_t) {
  return record("all-reduce", count * size_of(type));
}
ncclResult_t ncclReduce(const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t, int, ncclComm_t,
    cudaStream_t) {
  return record("reduce", count * size_of(type));
}
ncclResult_t ncclBroadcast(const void*, void*, size_t count, ncclDataType_t type, int, ncclComm_t, cudaStream_t) {
  return record("broadcast", count * size_of(type));
}
ncclResult_t ncclBcast(void*, size_t count, ncclDataType_t type, int, ncclComm_t, cudaStream_t) {
  return record("broadcast", count * size_of(type));
}
ncclResult_t ncclAllGather(const void*, void*, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t) {
  return record("all-gather", count * size_of(type) * comm->size);
}
}
