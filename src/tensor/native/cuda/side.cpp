// The functions that the CUDA side offers, and process groups over NCCL.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "../cuda_side.h"
#include "../native.h"

extern "C" {
char* prsmed_cuda_graph_pool(uint64_t* out) noexcept;
char* prsmed_cuda_graph_begin(int32_t device, const uint64_t* pool, void** out) noexcept;
char* prsmed_cuda_graph_end(void* graph) noexcept;
void prsmed_cuda_graph_abandon(void* graph) noexcept;
char* prsmed_cuda_graph_replay(void* graph) noexcept;
void prsmed_cuda_graph_free(void* graph) noexcept;
}

namespace prsmed::cuda {
uint64_t captured_offset(int8_t device);
void set_captured_offset(int8_t device, uint64_t offset);
}  // namespace prsmed::cuda

namespace {

// The options of a group contain those of NCCL, whose size depends on its version.
void check_nccl() {
  int loaded = 0;
  ncclGetVersion(&loaded);
  TORCH_CHECK(loaded / 100 == NCCL_VERSION_CODE / 100, "this program was built for NCCL ", NCCL_MAJOR, ".", NCCL_MINOR,
              ", but torch has NCCL ", loaded / 10000, ".", loaded / 100 % 100,
              ": several GPUs need a program that was built for this torch (`scripts/setup --cuda`, `cargo clean -p prsmed`, then build again)");
}

}  // namespace

extern "C" {

// A group over NCCL on the current GPU.
char* prsmed_cuda_group_nccl(void* store, const char* name, int rank, int size, double seconds, void** out) {
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  PRSMED_TRY({
    check_nccl();
    StorePtr own = c10::make_intrusive<c10d::PrefixStore>(std::string(name), *static_cast<StorePtr*>(store));
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000.0));
    *out = new BackendPtr(c10::make_intrusive<c10d::ProcessGroupNCCL>(own, rank, size, options));
  })
}

__attribute__((visibility("default"))) extern const PrsmedCudaSide prsmed_cuda_side_functions = {
    prsmed_cuda_graph_pool,    prsmed_cuda_graph_begin, prsmed_cuda_graph_end,
    prsmed_cuda_graph_abandon, prsmed_cuda_graph_replay, prsmed_cuda_graph_free,
    prsmed::cuda::captured_offset, prsmed::cuda::set_captured_offset, prsmed_cuda_group_nccl,
};
}
