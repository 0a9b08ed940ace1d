// Replaces NCCL's header where its wheel is not installed, so that every program has the CUDA side: the names that
// libtorch's headers use, with the values and layouts of NCCL 2.28 (https://docs.nvidia.com/deeplearning/nccl). A group
// checks the version of the loaded NCCL; `tests/fake_cuda/nccl.cpp` compares the layouts with those of the real header.
#pragma once
#include <cuda_runtime_api.h>

#include <climits>
#include <cstddef>

#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_PATCH 9
#define NCCL_VERSION(x, y, z) ((x) * 10000 + (y) * 100 + (z))
#define NCCL_VERSION_CODE NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH)
#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_SPLIT_NOCOLOR -1

typedef struct ncclComm* ncclComm_t;
typedef struct { char internal[NCCL_UNIQUE_ID_BYTES]; } ncclUniqueId;
typedef enum { ncclSuccess = 0, ncclRemoteError = 6, ncclInProgress = 7, ncclNumResults = 8 } ncclResult_t;
typedef enum { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4, ncclMaxRedOp = INT_MAX } ncclRedOp_t;
typedef enum {
  ncclInt8 = 0, ncclUint8 = 1, ncclInt32 = 2, ncclUint32 = 3, ncclInt64 = 4, ncclUint64 = 5, ncclFloat16 = 6, ncclHalf = 6,
  ncclFloat32 = 7, ncclFloat = 7, ncclFloat64 = 8, ncclDouble = 8, ncclBfloat16 = 9, ncclFloat8e4m3 = 10, ncclFloat8e5m2 = 11,
} ncclDataType_t;

// Settings of a communicator; `INT_MIN` and null mean NCCL's own defaults.
struct ncclConfig_v22800 {
  size_t size = sizeof(ncclConfig_v22800);
  unsigned int magic = 0xcafebeef, version = NCCL_VERSION_CODE;
  int blocking = INT_MIN, cga_cluster_size = INT_MIN, min_ctas = INT_MIN, max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN, traffic_class = INT_MIN;
  const char* name = nullptr;
  int collnet = INT_MIN, cta_policy = INT_MIN, shrink_share = INT_MIN, nvls_ctas = INT_MIN;
  int channels_per_net_peer = INT_MIN, nvlink_centric = INT_MIN;
};
typedef ncclConfig_v22800 ncclConfig_t;
static_assert(sizeof(ncclConfig_t) == 80, "the layout of NCCL 2.28");
#define NCCL_CONFIG_INITIALIZER {}

extern "C" {
ncclResult_t ncclGetVersion(int* version);
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);
}
