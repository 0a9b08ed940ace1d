// The CUDA side: the part of this layer that uses libtorch's CUDA library (`cuda/*.cpp`). It is a shared library of its
// own, because the program itself links no CUDA library. The program contains it and opens it when the process starts,
// if there is an NVIDIA driver and the installed torch has CUDA.
#pragma once
#include <cstdint>

// Functions of the CUDA side. Those that return text return nullptr, or a message as in `native.h`.
struct PrsmedCudaSide {
  char* (*graph_pool)(uint64_t* out);
  char* (*graph_begin)(int32_t device, const uint64_t* pool, void** out);
  char* (*graph_end)(void* graph);
  void (*graph_abandon)(void* graph);
  char* (*graph_replay)(void* graph);
  void (*graph_free)(void* graph);
  uint64_t (*captured_offset)(int8_t device);
  void (*set_captured_offset)(int8_t device, uint64_t offset);
  char* (*group_nccl)(void* store, const char* name, int rank, int size, double seconds, void** out);
};

namespace prsmed {

// The opened CUDA side. Throws an exception with the reason if it is not open.
const PrsmedCudaSide& cuda_side();

}  // namespace prsmed
